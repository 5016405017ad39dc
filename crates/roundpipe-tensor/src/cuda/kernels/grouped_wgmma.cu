// Products of groups of rows of 16-bit floats on Hopper: y[rows of g] = x[rows of g] w[g] + low[rows of g] narrow[g] (+ y),
// sums in float. The second product is there where its depth r is above 0; a tile goes over its depth behind the first's.
// Rows past the last offset become 0 (or stay). The tensor cores read tiles of shared memory (wgmma) that the copy engine
// fills (TMA).
//
// A block stays on its processor and takes every gridDim.x-th tile of 128 rows of a group and BN columns. Its third
// warpgroup orders copies, STAGES steps of 64 of the depth ahead; the first two multiply, 64 rows each. Two barriers per
// stage: `full` (the copies have landed) and `empty` (all eight warps that multiply have read it; each arrives by
// itself, since warps without rows do not wait for each other). They go round over all tiles of the block, so the next
// tile's copies are on their way while this one is written.
// Rows of a tile past its group are rows of the next group, or 0 past the last row: every row of a product depends
// on its own row alone, and those are not written. Tiles of one matrix and the same columns are neighbours, so
// that blocks which run together read the same part of w.
// A row's sums run over the depth in order, 16 at a time; they depend on nothing but the row and the matrix.
// Macros: OUT of the result (O), ADDS (1: to what is there), HALF (1: f16, 0: bf16), BN (64, 128 or 256), STAGES,
// RIGHT_BY_DEPTH (1: lines of w are along the depth). The texts of Hopper's instructions and of groups come before this one.

typedef OUT O;

#define BM 128
#define BK 64
// Bytes of a stage: left rows and right rows (or columns) of 64 elements.
#define LEFT_BYTES (BM * BK * 2)
#define RIGHT_BYTES (BN * BK * 2)
#define STAGE_BYTES (LEFT_BYTES + RIGHT_BYTES)

// A tile of a product; no rows: there is none.
struct Work { int group, row, rows, col; };

// Tile number `tile` when every group is cut into tiles of BM rows times `across` tiles of columns, rows first.
__device__ __forceinline__ Work find_work(const int* offsets, int e, int t, int tile, int across) {
    int lane = threadIdx.x & 31, before = 0;
    for (int base = 0; base <= e; base += 32) {
        int group = base + lane, from = 0, to = 0;
        if (group <= e) { from = bound_of(offsets, e, t, group); to = bound_of(offsets, e, t, group + 1); }
        int down = to > from ? (to - from + BM - 1) / BM : 0, tiles = down * across, sum = tiles;
        for (int step = 1; step < 32; step <<= 1) {
            int other = __shfl_up_sync(0xffffffffu, sum, step);
            if (lane >= step) sum += other;
        }
        int mine = tile - before - (sum - tiles);
        u32 hit = __ballot_sync(0xffffffffu, mine >= 0 && mine < tiles);
        if (hit) {
            int who = __ffs((int)hit) - 1;
            int row = down > 0 ? from + mine % down * BM : 0, col = down > 0 ? mine / down * BN : 0;
            Work work;
            work.group = __shfl_sync(0xffffffffu, group, who);
            work.row = __shfl_sync(0xffffffffu, row, who);
            work.col = __shfl_sync(0xffffffffu, col, who);
            int left = __shfl_sync(0xffffffffu, to, who) - work.row;
            work.rows = left < BM ? left : BM;
            return work;
        }
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
    Work none = { 0, 0, 0, 0 };
    return none;
}

// Two results of neighbouring columns in one word.
__device__ __forceinline__ u32 narrow_pair(const bf16*, float x, float y) { return bf16_pair(x, y); }
__device__ __forceinline__ u32 narrow_pair(const f16*, float x, float y) { return f16_pair(x, y); }
__device__ __forceinline__ u32 narrow_pair(const float*, float, float) { return 0; }

// Four lanes hold an element each of four neighbouring blocks; afterwards lane i holds all four of block i.
__device__ __forceinline__ void exchange(u32 (&v)[4]) {
    int lane = threadIdx.x & 3;
    #pragma unroll
    for (int step = 1; step < 4; step <<= 1) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & step) continue;
            // The half that belongs to the other lane goes there.
            u32 give = lane & step ? v[i] : v[i | step];
            u32 take = __shfl_xor_sync(0xffffffffu, give, step);
            if (lane & step) v[i] = take; else v[i | step] = take;
        }
    }
}

// Eight neighbours of a row that are there, with the sums of four pairs added to them, rounded once.
__device__ __forceinline__ uint4 added(const O* y, uint4 there, const u32 (&even)[4], const u32 (&odd)[4]) {
    const u32 words[4] = { there.x, there.y, there.z, there.w };
    u32 out[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        struct __align__(4) Two { O at[4 / sizeof(O)]; } two = *(const Two*)&words[i];
        float lo = up(two.at[0]), hi = up(two.at[4 / sizeof(O) - 1]);
        out[i] = narrow_pair(y, __uint_as_float(even[i]) + lo, __uint_as_float(odd[i]) + hi);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

// Writes what the calling thread holds of 64 rows: rows lane / 4 and lane / 4 + 8 of its warp's 16. Where lines are whole,
// a lane writes 16 bytes at a time; what they are added to is on its way before the first of it is needed.
__device__ __forceinline__ void store(float (&d)[BN / 2], O* y, i64 n, int row, int rows, int col, bool whole) {
    int lane = threadIdx.x & 31, first = (threadIdx.x >> 5 & 3) * 16 + lane / 4;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        int r = first + half * 8;
        O* line = y + (i64)(row + r) * n + col;
        if (sizeof(O) == 2 && whole) {
            uint4 there[ADDS ? BN / 32 : 1];
            #pragma unroll
            for (int j = 0; ADDS && j < BN / 32; ++j) {
                int c = (j * 4 + lane % 4) * 8;
                there[j] = r < rows && col + c < n ? *(const uint4*)(line + c) : make_uint4(0, 0, 0, 0);
            }
            #pragma unroll
            for (int j = 0; j < BN / 32; ++j) {
                u32 v[4], odd[4];
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float x = d[(j * 4 + i) * 4 + half * 2], z = d[(j * 4 + i) * 4 + half * 2 + 1];
                    v[i] = ADDS ? __float_as_uint(x) : narrow_pair(y, x, z);
                    odd[i] = __float_as_uint(z);
                }
                exchange(v);
                if (ADDS) exchange(odd);
                int c = (j * 4 + lane % 4) * 8;
                uint4 out = ADDS ? added(y, there[ADDS ? j : 0], v, odd) : make_uint4(v[0], v[1], v[2], v[3]);
                if (r < rows && col + c < n) *(uint4*)(line + c) = out;
            }
        } else if (r < rows) {
            #pragma unroll
            for (int j = 0; j < BN / 8; ++j) {
                int c = j * 8 + lane % 4 * 2;
                float x = d[j * 4 + half * 2], z = d[j * 4 + half * 2 + 1];
                if (col + c < n) put(line[c], ADDS ? x + up(line[c]) : x);
                if (col + c + 1 < n) put(line[c + 1], ADDS ? z + up(line[c + 1]) : z);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
grouped_wgmma(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap low,
              const __grid_constant__ TensorMap narrow, const int* offsets, O* y, int t, int e, int k, int r, i64 n, int whole,
              u32* alarm, u32 code) {
    extern __shared__ u8 raw[];
    __shared__ u64 barriers[2 * STAGES];
    check_offsets(offsets, e, t, alarm, code);
    u32 tiles = shared_address(raw) + 1023 & ~1023u, full = shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) { barrier_init(full + 8 * i, 1); barrier_init(empty + 8 * i, 8); }
        barriers_ready();
    }
    __syncthreads();
    int across = (int)((n + BN - 1) / BN), main_steps = (k + BK - 1) / BK, steps = main_steps + (r + BK - 1) / BK;
    int warpgroup = threadIdx.x / 128, lane = threadIdx.x & 31;
    if (warpgroup == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x >= 2 * 128 + 32) return;
        int stage = 0;
        u32 parity = 1;
        for (int tile = blockIdx.x;; tile += gridDim.x) {
            Work work = find_work(offsets, e, t, tile, across);
            if (work.rows == 0 || work.group == e) {
                if (work.rows == 0) return;
                continue;
            }
            if ((threadIdx.x & 31) != 0) continue;
            for (int step = 0; step < steps; ++step) {
                u32 bar = full + 8 * stage, left = tiles + stage * STAGE_BYTES, right = left + LEFT_BYTES;
                barrier_wait(empty + 8 * stage, parity);
                barrier_expect(bar, STAGE_BYTES);
                bool is_main = step < main_steps;
                int depth = (is_main ? step : step - main_steps) * BK;
                const TensorMap* rows = is_main ? &x : &low;
                const TensorMap* matrices = is_main ? &w : &narrow;
                copy_rows(left, rows, bar, depth, work.row);
#if RIGHT_BY_DEPTH
                copy_matrix(right, matrices, bar, depth, work.col, work.group);
#else
                #pragma unroll
                for (int c = 0; c < BN; c += 64)
                    copy_matrix(right + c * BK * 2, matrices, bar, work.col + c, depth, work.group);
#endif
                if (++stage == STAGES) { stage = 0; parity ^= 1; }
            }
        }
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int stage = 0;
    u32 parity = 0;
    float d[BN / 2];
    Work work = find_work(offsets, e, t, blockIdx.x, across), next;
    for (int tile = blockIdx.x; work.rows > 0; tile += gridDim.x, work = next) {
        int count = work.group < e ? steps : 0, rows = work.rows - warpgroup * 64;
        if (rows <= 0 || count == 0) next = find_work(offsets, e, t, tile + gridDim.x, across);
        if (rows <= 0) {
            // Nothing to multiply here; the stages are the other warpgroup's alone.
            for (int step = 0; step < count; ++step) {
                barrier_wait(full + 8 * stage, parity);
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + 8 * stage);
                if (++stage == STAGES) { stage = 0; parity ^= 1; }
            }
            continue;
        }
        #pragma unroll
        for (int i = 0; i < BN / 2; ++i) d[i] = 0.0f;
        hold(d);
        for (int step = 0; step < count; ++step) {
            barrier_wait(full + 8 * stage, parity);
            u32 left = tiles + stage * STAGE_BYTES + warpgroup * 64 * BK * 2;
            u32 right = tiles + stage * STAGE_BYTES + LEFT_BYTES;
            products_begin();
            #pragma unroll
            for (int i = 0; i < BK / 16; ++i) {
                u64 a = describe(left + i * 32, 16, 1024);
#if RIGHT_BY_DEPTH
                u64 b = describe(right + i * 32, 16, 1024);
#else
                u64 b = describe(right + i * 2048, 64 * BK * 2, 1024);
#endif
                multiply<1 - RIGHT_BY_DEPTH>(d, a, b, 1);
            }
            products_commit();
            // The next tile is looked for while the tensor cores are at work.
            if (step == 0) next = find_work(offsets, e, t, tile + gridDim.x, across);
            // The step before has ended when at most one is under way: its stage may be filled again.
            products_wait<1>();
            if (step > 0 && lane == 0) barrier_arrive(empty + 8 * (stage == 0 ? STAGES - 1 : stage - 1));
            if (++stage == STAGES) { stage = 0; parity ^= 1; }
        }
        products_wait<0>();
        hold(d);
        if (count > 0 && lane == 0) barrier_arrive(empty + 8 * (stage == 0 ? STAGES - 1 : stage - 1));
        if (ADDS && count == 0) continue;
        store(d, y, n, work.row + warpgroup * 64, rows, work.col, whole != 0);
    }
}
