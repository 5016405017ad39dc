// Attention on tensor cores, for bf16 and f16; the formulas are those of attention.cu.
//
// Widths are multiples of 8 up to D (q, k) and DV (v), which are multiples of 32; what is missing is read as zeros.
// A block has four warps and 64 rows, 16 per warp: queries in forward and dq, keys in dk and dv. Tiles of the other
// side come into shared memory two deep by asynchronous copies, while the tile before is multiplied. A warp's
// products (m16n8k16, sums in f32) leave their result in the registers in which the next product wants its left
// side, so weights never touch memory. dk and dv multiply the transposed scores, k qᵀ, for that reason; they go over
// rising query heads of the group and rising tiles of queries. Scores are in units of ln 2.

typedef TYPE T;
const int ROWS = 64;
#if PART == 0 || D <= 64 && DV <= 64
const int COLS = 64;
#else
const int COLS = 32;
#endif
// A row of a tile in shared memory has 16 bytes more than it needs: eight rows then lie in different banks.
const int LD = D + 8;
const int LDV = DV + 8;
const float LOG2E = 1.4426950408889634f;
const float LN2 = 0.6931471805599453f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float exp2_of(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 pair(bf16, float lo, float hi) { return bf16_pair(lo, hi); }
__device__ __forceinline__ u32 pair(f16, float lo, float hi) { return f16_pair(lo, hi); }
__device__ __forceinline__ u32 pair_of(float lo, float hi) { return pair(T(), lo, hi); }
__device__ __forceinline__ u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// c += a b: 16 by 8 sums, 16 inner elements.
__device__ __forceinline__ void mma(bf16, float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(f16, float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 by 8 matrices; each lane gives the address of one row.
__device__ __forceinline__ void load_matrices(u32 r[4], const T* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_at(row)) : "memory");
}
__device__ __forceinline__ void load_matrices_turned(u32 r[4], const T* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_at(row)) : "memory");
}

// Left side: 16 rows by 16 inner elements of a tile [row][inner].
__device__ __forceinline__ void load_left(u32 a[4], const T* tile, int ld, int row, int inner) {
    int lane = threadIdx.x % 32;
    load_matrices(a, tile + (row + lane % 16) * ld + inner + lane / 16 * 8);
}
// Right side: 16 inner elements by 16 columns, for two products, of a tile [column][inner].
__device__ __forceinline__ void load_right(u32 b[4], const T* tile, int ld, int column, int inner) {
    int lane = threadIdx.x % 32;
    load_matrices(b, tile + (column + lane % 8 + lane / 16 * 8) * ld + inner + lane / 8 % 2 * 8);
}
// The same of a tile [inner][column].
__device__ __forceinline__ void load_right_turned(u32 b[4], const T* tile, int ld, int column, int inner) {
    int lane = threadIdx.x % 32;
    load_matrices_turned(b, tile + (inner + lane % 16) * ld + column + lane / 16 * 8);
}

// sums[N / 8][4] = 16 rows of `left` from `row` on, times N rows of `right`, over `INNER` elements.
template <int N, int INNER>
__device__ __forceinline__ void products(float sums[][4], const T* left, int row, const T* right, int ld) {
    #pragma unroll
    for (int n = 0; n < N / 8; ++n) { sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f; }
    #pragma unroll
    for (int k = 0; k < INNER; k += 16) {
        u32 a[4];
        load_left(a, left, ld, row, k);
        #pragma unroll
        for (int n = 0; n < N; n += 16) {
            u32 b[4];
            load_right(b, right, ld, n, k);
            mma(T(), sums[n / 8], a, b[0], b[1]);
            mma(T(), sums[n / 8 + 1], a, b[2], b[3]);
        }
    }
}

// sums[N / 8][4] += weights (16 by INNER, as products left them) times a tile [INNER][N].
template <int N, int INNER>
__device__ __forceinline__ void weighted(float sums[][4], const float weights[][4], const T* tile, int ld) {
    #pragma unroll
    for (int k = 0; k < INNER; k += 16) {
        const float* x = weights[k / 8];
        const float* y = weights[k / 8 + 1];
        u32 a[4] = { pair_of(x[0], x[1]), pair_of(x[2], x[3]), pair_of(y[0], y[1]), pair_of(y[2], y[3]) };
        #pragma unroll
        for (int n = 0; n < N; n += 16) {
            u32 b[4];
            load_right_turned(b, tile, ld, n, k);
            mma(T(), sums[n / 8], a, b[0], b[1]);
            mma(T(), sums[n / 8 + 1], a, b[2], b[3]);
        }
    }
}

// Starts copying a tile of N rows by W columns; rows from `rows` on and columns from `width` on become zeros.
template <int N, int W>
__device__ __forceinline__ void fetch(T* to, const T* from, i64 stride, i64 rows, i64 width) {
    for (int n = threadIdx.x; n < N * (W / 8); n += 128) {
        int r = n / (W / 8), c = n % (W / 8) * 8;
        bool there = r < rows && c < width;
        const T* src = there ? from + r * stride + c : from;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
            :: "r"(shared_at(to + r * (W + 8) + c)), "l"(src), "r"(there ? 16 : 0) : "memory");
    }
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's committed copies are under way.
template <int N> __device__ __forceinline__ void arrive() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// Writes a warp's 16 rows through `stage` (shared, its own 16 rows of W + 8), in whole 16 bytes.
template <int W>
__device__ __forceinline__ void store(T* stage, const float x[][4], float upper, float lower, T* to, i64 stride, i64 rows, i64 width) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    T* own = stage + warp * 16 * (W + 8);
    #pragma unroll
    for (int n = 0; n < W / 8; ++n) {
        *(u32*)(own + g * (W + 8) + n * 8 + 2 * t) = pair_of(x[n][0] * upper, x[n][1] * upper);
        *(u32*)(own + (g + 8) * (W + 8) + n * 8 + 2 * t) = pair_of(x[n][2] * lower, x[n][3] * lower);
    }
    __syncwarp();
    for (int n = lane; n < 16 * (W / 8); n += 32) {
        int r = n / (W / 8), c = n % (W / 8) * 8;
        if (warp * 16 + r < rows && c < width) store16(to + (warp * 16 + r) * stride + c, load16(own + r * (W + 8) + c));
    }
    __syncwarp();
}

__device__ __forceinline__ i64 least(i64 a, i64 b) { return a < b ? a : b; }

#if PART == 0
extern "C" __global__ void __launch_bounds__(128)
attention_mma_forward(Shape s, View q, View k, View v, const T* sinks, View o, float* lse, i64 slots, u32* alarm, u32 code) {
    extern __shared__ __align__(16) char memory[];
    T* q_tile = (T*)memory;
    T* k_tiles = q_tile + ROWS * LD;
    T* v_tiles = k_tiles + 2 * COLS * LD;
    if (blockIdx.x == 0) check_lens(s, alarm, code);
    Place at = place_of(blockIdx.x, slots, s.heads);
    Piece p;
    if (!find_piece(p, s, false, slots - 1 - at.slot, ROWS)) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    i64 count = least(p.queries - p.at, ROWS), row = p.first_query + p.at, key_head = at.head / (s.heads / s.key_heads);
    fetch<ROWS, D>(q_tile, row_at<T>(q, at.batch, row, at.head), q.stride[1], count, s.width);
    int start = (int)(first_seen(s, p, p.at) / COLS * COLS), end = (int)end_seen(s, p, p.at + count - 1);
    // Keys from `clear_from` to `clear_to` are seen by the whole tile.
    int clear_from = (int)first_seen(s, p, p.at + count - 1), clear_to = (int)end_seen(s, p, p.at);
    int low[2], high[2];
    float scale = (float)(s.scale * 1.4426950408889634), top[2], sum[2], out[DV / 8][4];
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
        i64 i = p.at + warp * 16 + g + 8 * h;
        low[h] = (int)first_seen(s, p, i);
        high[h] = (int)end_seen(s, p, i);
        top[h] = sinks ? up(sinks[at.head]) * LOG2E : -infinity();
        // Four lanes sum parts of a row; one of them starts with the sink.
        sum[h] = sinks && t == 0 ? 1.0f : 0.0f;
    }
    #pragma unroll
    for (int n = 0; n < DV / 8; ++n) { out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f; }
    auto bring = [&](int key, int buffer) {
        i64 some = least(p.keys - key, COLS), first = p.first_key + key;
        fetch<COLS, D>(k_tiles + buffer * COLS * LD, row_at<T>(k, at.batch, first, key_head), k.stride[1], some, s.width);
        fetch<COLS, DV>(v_tiles + buffer * COLS * LDV, row_at<T>(v, at.batch, first, key_head), v.stride[1], some, s.value_width);
    };
    if (start < end) bring(start, 0);
    commit();
    int buffer = 0;
    for (int key = start; key < end; key += COLS, buffer ^= 1) {
        if (key + COLS < end) bring(key + COLS, buffer ^ 1);
        commit();
        arrive<1>();
        __syncthreads();
        float x[COLS / 8][4];
        products<COLS, D>(x, q_tile, warp * 16, k_tiles + buffer * COLS * LD, LD);
        bool hidden = key < clear_from || key + COLS > clear_to;
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            float highest = top[h];
            #pragma unroll
            for (int n = 0; n < COLS / 8; ++n) {
                #pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& y = x[n][2 * h + e];
                    int c = key + n * 8 + 2 * t + e;
                    y *= scale;
                    if (hidden && (c < low[h] || c >= high[h])) y = -infinity();
                    highest = y > highest ? y : highest;
                }
            }
            #pragma unroll
            for (int step = 1; step <= 2; step <<= 1) {
                float other = __shfl_xor_sync(0xffffffffu, highest, step);
                highest = other > highest ? other : highest;
            }
            // A query that has seen nothing yet would subtract infinities.
            float base = highest == -infinity() ? 0.0f : highest;
            float fade = exp2_of(top[h] - base);
            top[h] = highest;
            sum[h] *= fade;
            #pragma unroll
            for (int n = 0; n < COLS / 8; ++n) {
                #pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& y = x[n][2 * h + e];
                    y = exp2_of(y - base);
                    sum[h] += y;
                }
            }
            #pragma unroll
            for (int n = 0; n < DV / 8; ++n) { out[n][2 * h] *= fade; out[n][2 * h + 1] *= fade; }
        }
        weighted<DV, COLS>(out, x, v_tiles + buffer * COLS * LDV, LDV);
        __syncthreads();
    }
    arrive<0>();
    __syncthreads();
    float factor[2];
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
        #pragma unroll
        for (int step = 1; step <= 2; step <<= 1) sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], step);
        factor[h] = sum[h] == 0.0f ? 0.0f : 1.0f / sum[h];
        int r = warp * 16 + g + 8 * h;
        if (t == 0 && r < count) lse[(at.batch * s.heads + at.head) * s.queries + row + r] = top[h] * LN2 + logf(sum[h]);
    }
    store<DV>((T*)memory, out, factor[0], factor[1], row_at<T>(o, at.batch, row, at.head), o.stride[1], count, s.value_width);
}
#endif

#if PART == 1
extern "C" __global__ void __launch_bounds__(128)
attention_mma_dq(Shape s, View q, View k, View v, View d_o, const float* lse, const float* delta, View dq, i64 slots) {
    extern __shared__ __align__(16) char memory[];
    T* q_tile = (T*)memory;
    T* o_tile = q_tile + ROWS * LD;
    T* k_tiles = o_tile + ROWS * LDV;
    T* v_tiles = k_tiles + 2 * COLS * LD;
    Place at = place_of(blockIdx.x, slots, s.heads);
    Piece p;
    if (!find_piece(p, s, false, slots - 1 - at.slot, ROWS)) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    i64 count = least(p.queries - p.at, ROWS), row = p.first_query + p.at, key_head = at.head / (s.heads / s.key_heads);
    fetch<ROWS, D>(q_tile, row_at<T>(q, at.batch, row, at.head), q.stride[1], count, s.width);
    fetch<ROWS, DV>(o_tile, row_at<T>(d_o, at.batch, row, at.head), d_o.stride[1], count, s.value_width);
    int start = (int)(first_seen(s, p, p.at) / COLS * COLS), end = (int)end_seen(s, p, p.at + count - 1);
    int clear_from = (int)first_seen(s, p, p.at + count - 1), clear_to = (int)end_seen(s, p, p.at);
    int low[2], high[2];
    float scale = (float)(s.scale * 1.4426950408889634), row_lse[2], row_delta[2], out[D / 8][4];
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
        int r = warp * 16 + g + 8 * h;
        i64 stats = (at.batch * s.heads + at.head) * s.queries + row + r;
        low[h] = (int)first_seen(s, p, p.at + r);
        high[h] = (int)end_seen(s, p, p.at + r);
        // A query that is not there or saw nothing has weights 0.
        row_lse[h] = r < count ? lse[stats] * LOG2E : infinity();
        row_delta[h] = r < count ? delta[stats] : 0.0f;
        if (row_lse[h] == -infinity()) row_lse[h] = infinity();
    }
    #pragma unroll
    for (int n = 0; n < D / 8; ++n) { out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f; }
    auto bring = [&](int key, int buffer) {
        i64 some = least(p.keys - key, COLS), first = p.first_key + key;
        fetch<COLS, D>(k_tiles + buffer * COLS * LD, row_at<T>(k, at.batch, first, key_head), k.stride[1], some, s.width);
        fetch<COLS, DV>(v_tiles + buffer * COLS * LDV, row_at<T>(v, at.batch, first, key_head), v.stride[1], some, s.value_width);
    };
    if (start < end) bring(start, 0);
    commit();
    int buffer = 0;
    for (int key = start; key < end; key += COLS, buffer ^= 1) {
        if (key + COLS < end) bring(key + COLS, buffer ^ 1);
        commit();
        arrive<1>();
        __syncthreads();
        const T* k_tile = k_tiles + buffer * COLS * LD;
        float x[COLS / 8][4], y[COLS / 8][4];
        products<COLS, D>(x, q_tile, warp * 16, k_tile, LD);
        products<COLS, DV>(y, o_tile, warp * 16, v_tiles + buffer * COLS * LDV, LDV);
        bool hidden = key < clear_from || key + COLS > clear_to;
        #pragma unroll
        for (int n = 0; n < COLS / 8; ++n) {
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                int h = e / 2, c = key + n * 8 + 2 * t + e % 2;
                float weight = exp2_of(x[n][e] * scale - row_lse[h]);
                if (hidden && (c < low[h] || c >= high[h])) weight = 0.0f;
                x[n][e] = weight * (y[n][e] - row_delta[h]);
            }
        }
        weighted<D, COLS>(out, x, k_tile, LD);
        __syncthreads();
    }
    arrive<0>();
    __syncthreads();
    float factor = (float)s.scale;
    store<D>((T*)memory, out, factor, factor, row_at<T>(dq, at.batch, row, at.head), dq.stride[1], count, s.width);
}
#endif

#if PART == 2
extern "C" __global__ void __launch_bounds__(128)
attention_mma_dkv(Shape s, View q, View k, View v, View d_o, const float* lse, const float* delta, View dk, View dv, i64 slots) {
    extern __shared__ __align__(16) char memory[];
    T* k_tile = (T*)memory;
    T* v_tile = k_tile + ROWS * LD;
    T* q_tiles = v_tile + ROWS * LDV;
    T* o_tiles = q_tiles + 2 * COLS * LD;
    float* lse_tiles = (float*)(o_tiles + 2 * COLS * LDV);
    float* delta_tiles = lse_tiles + 2 * COLS;
    Place at = place_of(blockIdx.x, slots, s.key_heads);
    Piece p;
    if (!find_piece(p, s, true, at.slot, ROWS)) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    i64 count = least(p.keys - p.at, ROWS), row = p.first_key + p.at, group = s.heads / s.key_heads;
    fetch<ROWS, D>(k_tile, row_at<T>(k, at.batch, row, at.head), k.stride[1], count, s.width);
    fetch<ROWS, DV>(v_tile, row_at<T>(v, at.batch, row, at.head), v.stride[1], count, s.value_width);
    int start = (int)(first_seer(s, p, p.at) / COLS * COLS), end = (int)end_seer(s, p, p.at + count);
    int tiles = end > start ? (end - start + COLS - 1) / COLS : 0, total = tiles * (int)group;
    int shift = (int)(p.keys - p.queries), window = (int)least(s.window, 1 << 30);
    float scale = (float)(s.scale * 1.4426950408889634), k_out[D / 8][4], v_out[DV / 8][4];
    #pragma unroll
    for (int n = 0; n < D / 8; ++n) { k_out[n][0] = k_out[n][1] = k_out[n][2] = k_out[n][3] = 0.0f; }
    #pragma unroll
    for (int n = 0; n < DV / 8; ++n) { v_out[n][0] = v_out[n][1] = v_out[n][2] = v_out[n][3] = 0.0f; }
    auto bring = [&](int turn, int buffer) {
        int query = start + turn % tiles * COLS;
        i64 head = at.head * group + turn / tiles, some = least(p.queries - query, COLS), first = p.first_query + query;
        fetch<COLS, D>(q_tiles + buffer * COLS * LD, row_at<T>(q, at.batch, first, head), q.stride[1], some, s.width);
        fetch<COLS, DV>(o_tiles + buffer * COLS * LDV, row_at<T>(d_o, at.batch, first, head), d_o.stride[1], some, s.value_width);
        if (threadIdx.x < COLS) {
            int r = threadIdx.x;
            i64 stats = (at.batch * s.heads + head) * s.queries + first + r;
            // A query that is not there or saw nothing has weights 0.
            float all = r < some ? lse[stats] * LOG2E : infinity();
            lse_tiles[buffer * COLS + r] = all == -infinity() ? infinity() : all;
            delta_tiles[buffer * COLS + r] = r < some ? delta[stats] : 0.0f;
        }
    };
    if (total > 0) bring(0, 0);
    commit();
    int buffer = 0;
    for (int turn = 0; turn < total; ++turn, buffer ^= 1) {
        if (turn + 1 < total) bring(turn + 1, buffer ^ 1);
        commit();
        arrive<1>();
        __syncthreads();
        const T* q_tile = q_tiles + buffer * COLS * LD;
        const T* o_tile = o_tiles + buffer * COLS * LDV;
        const float* lse_tile = lse_tiles + buffer * COLS;
        const float* delta_tile = delta_tiles + buffer * COLS;
        int query = start + turn % tiles * COLS;
        // Positions of the tile's queries among the keys; whether every key is seen by every one of them.
        int first = query + shift, last = first + COLS - 1, key = (int)p.at;
        bool hidden = s.causal && key + ROWS - 1 > first || key <= last - window;
        float x[COLS / 8][4], y[COLS / 8][4];
        products<COLS, D>(x, k_tile, warp * 16, q_tile, LD);
        products<COLS, DV>(y, v_tile, warp * 16, o_tile, LDV);
        #pragma unroll
        for (int n = 0; n < COLS / 8; ++n) {
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                int column = n * 8 + 2 * t + e % 2, own = key + warp * 16 + g + e / 2 * 8;
                float weight = exp2_of(x[n][e] * scale - lse_tile[column]);
                if (hidden && (s.causal && own > first + column || own <= first + column - window)) weight = 0.0f;
                x[n][e] = weight;
                y[n][e] = weight * (y[n][e] - delta_tile[column]);
            }
        }
        weighted<DV, COLS>(v_out, x, o_tile, LDV);
        weighted<D, COLS>(k_out, y, q_tile, LD);
        __syncthreads();
    }
    arrive<0>();
    __syncthreads();
    float factor = (float)s.scale;
    store<D>((T*)memory, k_out, factor, factor, row_at<T>(dk, at.batch, row, at.head), dk.stride[1], count, s.width);
    __syncthreads();
    store<DV>((T*)memory, v_out, 1.0f, 1.0f, row_at<T>(dv, at.batch, row, at.head), dv.stride[1], count, s.value_width);
}
#endif
