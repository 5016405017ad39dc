// Products of groups of rows of 16-bit floats, by tensor cores (mma.sync m16n8k16, sums in float).
//   grouped_mma:      y[rows of g] = x[rows of g] w[g] (+ y); rows past the last offset become 0 (or stay). A block per tile of 128
//                     rows of a group and 128 columns; there are at most t / 128 + e + 1 tiles of rows.
//   grouped_grad_mma: d[g] = sum over the rows r of g of a[r]^T b[r] (+ d[g]). A block per tile of d[g], rows in order.
//
// A block multiplies a left tile (128 x 32) by a right tile (32 x 128) per step; STAGES steps are in shared memory, the
// later ones on their way. 4 warps as 2 x 2 hold 64 x 64 elements each. A tile lies in shared memory in the order of its
// memory: lines of 32 (a pitch of 40 elements) when the depth is the fast direction, lines of 128 (a pitch of 136)
// when it is not; either pitch puts eight lines into eight different banks of 16 bytes, and ldmatrix turns the
// second kind. Sums run over the depth in order, whatever the number of stages.
// Macros: OUT of the result (O), HALF (1: f16, 0: bf16), STAGES, FAST (1: elements of all lines lie side by side, and
// every line begins at a multiple of 16 bytes); FORWARD with RIGHT_BY_DEPTH (1: lines of w are along the depth).
// The groups' text comes before this one.

typedef OUT O;

#define SIDE 128
#define STEP 32
#define WARPS 4
#define THREADS (32 * WARPS)
// Columns of a warp.
#define WIDE (SIDE * 2 / WARPS)
// Elements of one tile in shared memory: 128 * 40, which is more than 32 * 136.
#define ROOM 5120

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copies 16 bytes, of which the first `bytes` exist; the rest become 0.
__device__ __forceinline__ void copy_async(u16* to, const u16* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }

// Four matrices of 8 x 8: lane l gives the address of line l % 8 of matrix l / 8, and gets elements 2 (l % 4) and the
// next of line l / 4 of each; turned, of column l / 4.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], const u16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}
__device__ __forceinline__ void load_turned(u32 (&r)[4], const u16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}

#if HALF
#define KIND "f16.f16"
#else
#define KIND "bf16.bf16"
#endif
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An operand's tile: element i of line l lies at p + l * line + i * step.
struct Source { const u16* p; i64 line, step; };

// Brings tiles of LINES x LEN elements into shared memory, one after another along the depth, 0 where there is none.
// ALONG: the depth is along the lines; else the lines follow each other along it. Addresses walk: what a step needs
// beside its products must be little.
template <int LINES, int LEN, int PITCH, int ALONG> struct Feed {
    static const int PIECES = LINES * LEN / 8 / THREADS;
    const u16* at[PIECES];
    // Elements of a piece that exist across the depth.
    int across[PIECES];
    i64 line, step;
    __device__ __forceinline__ Feed(const Source& s, i64 extent) {
        line = s.line; step = s.step;
        #pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            int piece = threadIdx.x + THREADS * i, l = piece / (LEN / 8), c = piece % (LEN / 8) * 8;
            at[i] = s.p + l * s.line + c * s.step;
            i64 left = ALONG ? (l < extent ? 8 : 0) : extent - c;
            across[i] = left < 0 ? 0 : left > 8 ? 8 : (int)left;
        }
    }
    // The next tile; `rest` steps of the depth are left.
    __device__ __forceinline__ void next(u16* to, int rest) {
        i64 walk = STEP * (ALONG ? step : line);
        #pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            int piece = threadIdx.x + THREADS * i, l = piece / (LEN / 8), c = piece % (LEN / 8) * 8;
            int left = ALONG ? rest - c : l < rest ? 8 : 0;
            int count = left < 0 ? 0 : left < across[i] ? left : across[i];
            u16* place = to + l * PITCH + c;
            // A piece that has nothing is not read; its address may be anything.
            if (FAST) copy_async(place, at[i], count * 2);
            else {
                Pack<u16> pack;
                #pragma unroll
                for (int j = 0; j < 8; ++j) pack.at[j] = j < count ? at[i][j * step] : (u16)0;
                store16(place, pack);
            }
            at[i] += walk;
        }
    }
};

// acc = left (rows x depth) times right (depth x cols). BY_DEPTH: lines of the source are along the depth, one per row
// (column); else one line per step of depth.
template <int LEFT_BY_D, int RIGHT_BY_D>
__device__ __forceinline__ void tile_product_mma(float (&acc)[4][WIDE / 8][4], u16* shared, Source left, i64 rows, Source right,
                                                 i64 cols, i64 depth) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int row = (warp & 1) * 64, col = (warp >> 1) * WIDE;
    int steps = (int)((depth + STEP - 1) / STEP);
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        #pragma unroll
        for (int j = 0; j < WIDE / 8; ++j)
            #pragma unroll
            for (int q = 0; q < 4; ++q) acc[i][j][q] = 0.0f;
    Feed<LEFT_BY_D ? SIDE : STEP, LEFT_BY_D ? STEP : SIDE, LEFT_BY_D ? 40 : 136, LEFT_BY_D> lefts(left, rows);
    Feed<RIGHT_BY_D ? SIDE : STEP, RIGHT_BY_D ? STEP : SIDE, RIGHT_BY_D ? 40 : 136, RIGHT_BY_D> rights(right, cols);
    int rest = (int)depth, filling = 0, reading = 0;
    auto load = [&]() {
        u16* a = shared + filling * (2 * ROOM);
        lefts.next(a, rest);
        rights.next(a + ROOM, rest);
        rest -= STEP;
        filling = filling == STAGES - 1 ? 0 : filling + 1;
    };
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) load();
        close_copies();
    }
    for (int step = 0; step < steps; ++step) {
        // This step's copies are the oldest; after the barrier those of all threads are here, and all threads are done
        // with the stage that the next copies go to.
        wait_copies<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) load();
        close_copies();
        const u16* a = shared + reading * (2 * ROOM);
        const u16* b = a + ROOM;
        reading = reading == STAGES - 1 ? 0 : reading + 1;
        #pragma unroll
        for (int d = 0; d < STEP; d += 16) {
            u32 fa[4][4], fb[WIDE / 16][4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                // Matrices: rows 0..8 and 8..16 at depth 0..8, then the same at depth 8..16.
                int r = row + i * 16;
                if (LEFT_BY_D) load_matrices(fa[i], a + (r + lane % 16) * 40 + d + lane / 16 * 8);
                else load_turned(fa[i], a + (d + lane % 8 + lane / 16 * 8) * 136 + r + lane / 8 % 2 * 8);
            }
            #pragma unroll
            for (int j = 0; j < WIDE / 16; ++j) {
                // Matrices: depth 0..8 and 8..16 of columns 0..8, then of columns 8..16.
                int c = col + j * 16;
                if (RIGHT_BY_D) load_matrices(fb[j], b + (c + lane % 8 + lane / 16 * 8) * 40 + d + lane / 8 % 2 * 8);
                else load_turned(fb[j], b + (d + lane % 16) * 136 + c + lane / 16 * 8);
            }
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                #pragma unroll
                for (int j = 0; j < WIDE / 8; ++j) multiply(acc[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
        }
    }
}

__device__ __forceinline__ void put_pair(float* p, float x, float y) { *(float2*)p = make_float2(x, y); }
__device__ __forceinline__ void put_pair(bf16* p, float x, float y) { *(u32*)p = bf16_pair(x, y); }
__device__ __forceinline__ void put_pair(f16* p, float x, float y) { *(u32*)p = f16_pair(x, y); }

// Writes what the calling thread holds of a tile: `d` is its element (0, 0). `paired`: two neighbours of an even
// column lie side by side and aligned.
__device__ __forceinline__ void store_tile(float (&acc)[4][WIDE / 8][4], O* d, i64 d_row, i64 d_col, i64 rows, i64 cols, bool paired,
                                           bool accumulate) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        #pragma unroll
        for (int j = 0; j < WIDE / 8; ++j)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                i64 r = (warp & 1) * 64 + i * 16 + half * 8 + lane / 4, c = (warp >> 1) * WIDE + j * 8 + lane % 4 * 2;
                if (r >= rows || c >= cols) continue;
                O* p = d + r * d_row + c * d_col;
                bool second = c + 1 < cols;
                float x = acc[i][j][half * 2], y = acc[i][j][half * 2 + 1];
                if (accumulate) { x += up(p[0]); if (second) y += up(p[d_col]); }
                if (paired && second) { put_pair(p, x, y); continue; }
                put(p[0], x);
                if (second) put(p[d_col], y);
            }
}

#ifdef FORWARD
extern "C" __global__ void __launch_bounds__(THREADS, 2)
grouped_mma(const u16* x, i64 x_line, i64 x_step, const u16* w, i64 w_group, i64 w_line, i64 w_step,
            const int* offsets, O* y, int t, int e, i64 k, i64 n, int paired, int accumulate, u32* alarm, u32 code) {
    extern __shared__ __align__(16) u16 shared[];
    check_offsets(offsets, e, t, alarm, code);
    // Tiles of one row of tiles are neighbours: they share their rows of x.
    int across = (int)((n + SIDE - 1) / SIDE);
    Place p = find_tile(offsets, e, t, blockIdx.x / across, SIDE);
    if (p.rows == 0) return;
    i64 col = (i64)(blockIdx.x % across) * SIDE;
    // The rows past the groups are a product of depth 0; they have no matrix.
    i64 depth = p.group < e ? k : 0;
    const u16* matrix = p.group < e ? w + p.group * w_group + col * (RIGHT_BY_DEPTH ? w_line : w_step) : w;
    Source left = { x + p.row * x_line, x_line, x_step };
    Source right = { matrix, w_line, w_step };
    float acc[4][WIDE / 8][4];
    tile_product_mma<1, RIGHT_BY_DEPTH>(acc, shared, left, p.rows, right, n - col, depth);
    store_tile(acc, y + p.row * n + col, n, 1, p.rows, n - col, paired != 0, accumulate != 0);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 2)
grouped_grad_mma(const u16* a, i64 a_line, i64 a_step, const u16* b, i64 b_line, i64 b_step,
                 const int* offsets, O* d, i64 d_group, i64 d_row, i64 d_col, int t, int e, i64 m, i64 n, int accumulate,
                 int paired, u32* alarm, u32 code) {
    extern __shared__ __align__(16) u16 shared[];
    check_offsets(offsets, e, t, alarm, code);
    int across = (int)((n + SIDE - 1) / SIDE), down = (int)((m + SIDE - 1) / SIDE);
    int group = blockIdx.x / across / down;
    i64 row = (i64)(blockIdx.x / across % down) * SIDE, col = (i64)(blockIdx.x % across) * SIDE;
    int from = bound_of(offsets, e, t, group), to = bound_of(offsets, e, t, group + 1);
    int depth = to > from ? to - from : 0;
    if (depth == 0 && accumulate) return;
    Source left = { a + from * a_line + row * a_step, a_line, a_step };
    Source right = { b + from * b_line + col * b_step, b_line, b_step };
    float acc[4][WIDE / 8][4];
    tile_product_mma<0, 0>(acc, shared, left, m - row, right, n - col, depth);
    store_tile(acc, d + group * d_group + row * d_row + col * d_col, d_row, d_col, m - row, n - col, paired != 0, accumulate != 0);
}
#endif
