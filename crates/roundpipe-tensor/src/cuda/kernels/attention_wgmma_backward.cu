// The exact backward of attention in one pass, with Hopper's own instructions, for bf16 and f16: causal rows as long as
// their keys, in whole tiles, not packed, heads of 128. The formulas are those of attention.cu.
//
// A block has 128 keys of one head and goes over the tiles of 64 queries that see them, head after head of the group.
// Two warpgroups multiply, 64 keys each, as in dk and dv of attention_wgmma.cu. Of the third, one warp orders copies, one
// brings what is known of the queries, and one adds dq to sums in global memory.
//
// Gradients of scores also go to shared memory, where both warpgroups multiply them with all keys: the block's part of
// dq, half of the columns each. It is added in the order of keys, whatever runs when: every tile of queries has a
// counter, and a block adds when it stands at the block's place. Blocks take their places by ticket, low keys first, so
// one waits only for blocks that have started; those begin with the tiles that the next ones need first, and stay ahead.
// Sums lie as registers do: `attention_wgmma_dq_sums` puts them in order, scales and rounds them.
// Macros: TYPE, HALF (1: f16), PART (0: the pass, 1: sums of dq), D, COLS, STAGES. The text of tiles comes first.

// Gradients of the scores of a tile: 128 lines of keys, a panel; there are two of them.
const u32 GRAD_BYTES = ROWS * 128;
// A tile's part of dq, in f32.
const u32 PART_BYTES = COLS * D * 4;

__device__ __forceinline__ u32 counter_seen(const u32* p) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ void counter_set(u32* p, u32 x) { asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(x) : "memory"); }
// Orders what the copy engine does in global memory and what this thread does.
__device__ __forceinline__ void join_engines() { asm volatile("fence.proxy.async;" ::: "memory"); }

#if PART == 0
// A warp's 16 lines of gradients, as they are on the left side of a product, into a panel from line `line` on.
__device__ __forceinline__ void store_gradients(u32 panel, int line, const u32 (&gradients)[COLS / 4]) {
    int lane = threadIdx.x % 32, row = line + lane % 16, piece = lane / 16;
    #pragma unroll
    for (int i = 0; i < COLS / 16; ++i) {
        u32 at = panel + row * 128 + ((2 * i + piece ^ row & 7) * 16);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
            :: "r"(at), "r"(gradients[4 * i]), "r"(gradients[4 * i + 1]), "r"(gradients[4 * i + 2]), "r"(gradients[4 * i + 3]) : "memory");
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
attention_wgmma_backward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                         const __grid_constant__ TensorMap d_o, Shape s, const float* lse, const float* delta, View dk, View dv,
                         float* sums, u32* counters) {
    extern __shared__ u8 raw[];
    __shared__ u64 barriers[3 + 2 * STAGES];
    __shared__ __align__(16) float lse_tiles[STAGES * COLS], delta_tiles[STAGES * COLS];
    __shared__ u32 ticket;
    u32 own_full = shared_address(barriers), part_full = own_full + 8, part_empty = part_full + 8, full = part_empty + 8;
    u32 empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        ticket = atomicAdd(counters, 1u);
        barrier_init(own_full, 1);
        barrier_init(part_full, 8);
        barrier_init(part_empty, 1);
        for (int i = 0; i < STAGES; ++i) {
            // The copies, and every lane that brings statistics.
            barrier_init(full + 8 * i, 1 + 32);
            barrier_init(empty + 8 * i, 8);
        }
        barriers_ready();
    }
    __syncthreads();
    u8* memory = tiles_in(raw);
    u32 own = shared_address(memory), q_tiles = own + 2 * OWN_BYTES, o_tiles = q_tiles + STAGES * TILE_BYTES;
    u32 grads = o_tiles + STAGES * TILE_BYTES, part = grads + 2 * GRAD_BYTES;
    int streams = (int)(s.key_heads * s.batch), block = (int)ticket / streams, stream = (int)ticket % streams;
    int key_head = stream % (int)s.key_heads, batch = stream / (int)s.key_heads, group = (int)(s.heads / s.key_heads);
    int start = block * ROWS, end = (int)s.queries, tiles = (end - start) / COLS * group;
    int warpgroup = warpgroup_here(), lane = threadIdx.x % 32;
    if (warpgroup == 2) {
        fewer_registers<24>();
        int warp = threadIdx.x / 32 - 8;
        if (warp > 2 || warp != 1 && lane != 0) return;
        if (warp == 0) {
            barrier_expect(own_full, 2 * OWN_BYTES);
            bring(own, OWN_PANEL, &k, own_full, start, key_head, batch);
            bring(own + OWN_BYTES, OWN_PANEL, &v, own_full, start, key_head, batch);
        }
        int query = start, head = key_head * group;
        for (int j = 0; j < tiles; ++j) {
            int stage = j % STAGES;
            u32 bar = full + 8 * stage;
            // Rows before the tile's first, in statistics and sums alike.
            i64 row = (i64)(batch * (int)s.heads + head) * end + query;
            if (warp < 2) barrier_wait(empty + 8 * stage, turn_of(j) ^ 1);
            if (warp == 0) {
                barrier_expect(bar, 2 * TILE_BYTES);
                bring(q_tiles + stage * TILE_BYTES, TILE_PANEL, &q, bar, query, head, batch);
                bring(o_tiles + stage * TILE_BYTES, TILE_PANEL, &d_o, bar, query, head, batch);
            } else if (warp == 1) {
                #pragma unroll
                for (int n = lane; n < COLS; n += 32) {
                    float all = lse[row + n];
                    // A query that saw nothing has weights 0.
                    lse_tiles[stage * COLS + n] = all == -infinity() ? infinity() : all * LOG2E;
                    delta_tiles[stage * COLS + n] = delta[row + n];
                }
                barrier_arrive(bar);
            } else {
                u32* counter = counters + 1 + row / COLS;
                float* to = sums + row * D;
                barrier_wait(part_full, j & 1);
                while (counter_seen(counter) != block) {}
                join_engines();
                if (block == 0) copy_out(to, part, PART_BYTES); else add_out(to, part, PART_BYTES);
                out_commit();
                out_read();
                barrier_arrive(part_empty);
                out_written();
                join_engines();
                counter_set(counter, block + 1);
            }
            query += COLS;
            if (query >= end) { query = start; ++head; }
        }
        return;
    }
    more_registers<240>();
    int g = lane / 4, t = lane % 4, line = threadIdx.x / 32 * 16;
    u32 mine = own + warpgroup * 64 * 128;
    int key = start + warpgroup * 64, query = start;
    float scale = (float)(s.scale * 1.4426950408889634), k_out[D / 2], v_out[D / 2], x[COLS / 2], y[COLS / 2];
    u32 weights[COLS / 4], gradients[COLS / 4];
    clear(k_out);
    clear(v_out);
    clear(x);
    clear(y);
    barrier_wait(own_full, 0);
    for (int j = 0; j < tiles; ++j) {
        int stage = j % STAGES;
        u32 q_tile = q_tiles + stage * TILE_BYTES, o_tile = o_tiles + stage * TILE_BYTES;
        barrier_wait(full + 8 * stage, turn_of(j));
        products_begin();
        scores(x, mine, q_tile);
        products_commit();
        // Products of the tile before have ended when at most these scores are under way.
        products_wait<1>();
        if (j > 0 && lane == 0) barrier_arrive(empty + 8 * ((j - 1) % STAGES));
        products_begin();
        scores(y, mine + OWN_BYTES, o_tile);
        products_commit();
        products_wait<1>();
        hold(x);
        const float* lse_tile = lse_tiles + stage * COLS + 2 * t;
        const float* delta_tile = delta_tiles + stage * COLS + 2 * t;
        #pragma unroll
        for (int n = 0; n < COLS / 8; ++n) {
            float2 all = *(const float2*)(lse_tile + n * 8);
            x[n * 4] = exp2_of(x[n * 4] * scale - all.x);
            x[n * 4 + 1] = exp2_of(x[n * 4 + 1] * scale - all.y);
            x[n * 4 + 2] = exp2_of(x[n * 4 + 2] * scale - all.x);
            x[n * 4 + 3] = exp2_of(x[n * 4 + 3] * scale - all.y);
        }
        hold(x);
        if (key + 63 > query) {
            #pragma unroll
            for (int h = 0; h < 2; ++h) hide(x, h, key + line % 64 + g + 8 * h - query - 2 * t, 1 << 30, 0.0f);
        }
        narrow(weights, x);
        products_wait<0>();
        hold(y);
        #pragma unroll
        for (int n = 0; n < COLS / 8; ++n) {
            float2 less = *(const float2*)(delta_tile + n * 8);
            gradients[2 * n] = pair_of(x[n * 4] * (y[n * 4] - less.x), x[n * 4 + 1] * (y[n * 4 + 1] - less.y));
            gradients[2 * n + 1] = pair_of(x[n * 4 + 2] * (y[n * 4 + 2] - less.x), x[n * 4 + 3] * (y[n * 4 + 3] - less.y));
        }
        // Only now, although the weights are known for longer: where other instructions read sums while products are under
        // way, the compiler lets products wait for each other.
        products_begin();
        weighted(v_out, weights, o_tile);
        products_commit();
        // The panel was read two tiles ago, by products that both warpgroups have seen end before they met last.
        u32 panel = grads + j % 2 * GRAD_BYTES;
        store_gradients(panel, line, gradients);
        show_to_engines();
        meet(1, 256);
        u64 across = describe(panel, 16, 1024), keys = describe(own + warpgroup * OWN_PANEL, 16, 1024);
        products_begin();
        #pragma unroll
        for (int i = 0; i < ROWS / 16; ++i) multiply_across(x, across + i * 2048 / 16, keys + i * 2048 / 16, i > 0);
        products_commit();
        products_begin();
        weighted(k_out, gradients, q_tile);
        products_commit();
        query = query + COLS < end ? query + COLS : start;
        products_wait<1>();
        hold(x);
        barrier_wait(part_empty, j & 1 ^ 1);
        float4* to = (float4*)(memory + (part - own)) + warpgroup * 8 * 128 + threadIdx.x % 128;
        #pragma unroll
        for (int n = 0; n < COLS / 8; ++n) to[n * 128] = make_float4(x[n * 4], x[n * 4 + 1], x[n * 4 + 2], x[n * 4 + 3]);
        show_to_engines();
        __syncwarp();
        if (lane == 0) barrier_arrive(part_full);
    }
    products_wait<0>();
    hold(k_out);
    hold(v_out);
    // Both warpgroups have read all keys; their lines are written next.
    meet(1, 256);
    float factor = (float)s.scale;
    store(memory, line, k_out, factor, factor, row_at<T>(dk, batch, start, key_head), dk.stride[1], ROWS);
    store(memory + OWN_BYTES, line, v_out, 1.0f, 1.0f, row_at<T>(dv, batch, start, key_head), dv.stride[1], ROWS);
}
#endif

#if PART == 1
// A block has one tile of 64 queries of a head.
extern "C" __global__ void __launch_bounds__(256)
attention_wgmma_dq_sums(Shape s, const float* sums, View dq) {
    // Lines of 16 bytes more, so that those of a column lie in different banks.
    __shared__ __align__(16) T lines[COLS][D + 8];
    i64 tiles = s.queries / COLS, tile = blockIdx.x % tiles, head = blockIdx.x / tiles % s.heads, batch = blockIdx.x / tiles / s.heads;
    const float4* from = (const float4*)(sums + (i64)blockIdx.x * COLS * D) + threadIdx.x / 128 * 8 * 128 + threadIdx.x % 128;
    int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4, column = threadIdx.x / 128 * 64 + lane % 4 * 2;
    float scale = (float)s.scale;
    #pragma unroll
    for (int n = 0; n < 8; ++n) {
        float4 x = from[n * 128];
        *(u32*)&lines[row][column + n * 8] = pair_of(x.x * scale, x.y * scale);
        *(u32*)&lines[row + 8][column + n * 8] = pair_of(x.z * scale, x.w * scale);
    }
    __syncthreads();
    T* to = row_at<T>(dq, batch, tile * COLS, head);
    #pragma unroll
    for (int n = threadIdx.x; n < COLS * D / 8; n += 256) {
        int r = n / (D / 8), c = n % (D / 8) * 8;
        *(uint4*)(to + r * dq.stride[1] + c) = *(const uint4*)&lines[r][c];
    }
}
#endif
