// Attention on tensor cores, for bf16 and f16; the formulas are those of attention.cu.
//
// Widths are multiples of 8 up to D (q, k) and DV (v), which are multiples of 32; what is missing is read as zeros.
// A block has four warps and ROWS rows, 16 or 32 per warp: queries in forward and dq, keys in dk and dv. Tiles of COLS
// rows of the other side come into shared memory by asynchronous copies while others are multiplied: two deep in the
// backward; in the forward keys and values take turns. A warp's products (m16n8k16, sums in f32) leave their result in
// the registers in which the next product wants its left side, so weights never touch memory. dk and dv multiply the
// transposed scores, k qᵀ, for that reason; they go over rising query heads of the group and rising tiles of queries.
// Scores are in units of ln 2.
//
// What bounds these kernels is what else is to be issued beside the products: addresses of shared memory are one XOR
// from a lane's own, copies walk down a column, and masks are looked at only in tiles that have some.

const int WARPS = 4;
const int THREADS = 32 * WARPS;
// Tiles of 16 rows that a warp holds.
const int MT = ROWS / (16 * WARPS);

__device__ __forceinline__ u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// c = a b + d: 16 by 8 sums, 16 inner elements.
__device__ __forceinline__ void mma(bf16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, const float* d) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]));
}
__device__ __forceinline__ void mma(f16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, const float* d) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]));
}

// Four 8 by 8 matrices; each lane gives the address of one row.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
__device__ __forceinline__ void load_matrices_turned(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

// In a row of a tile of width W, pieces of 16 bytes lie in another order in every row, so that the same columns of
// eight rows lie in different banks.
template <int W> __device__ __forceinline__ int swap_of(int row) { return W % 64 == 0 ? row & 7 : row >> 1 & 3; }
template <int W> __device__ __forceinline__ int spot(int row, int column) {
    return row * W + (column / 8 ^ swap_of<W>(row)) * 8;
}
// `first` is the address of a row and of one of its two first columns of 8; this is that of the row `down` rows
// below, a multiple of 8, and the column `right` columns on, a multiple of 16.
template <int W> __device__ __forceinline__ u32 from(u32 first, int down, int right) {
    const u32 part = W % 64 == 0 ? 127 : 63;
    u32 bytes = right * 2;
    return (first ^ (bytes & part)) + (bytes & ~part) + down * W * 2;
}

// Where a lane begins to read 16 rows of a tile [row][inner] as left sides.
template <int W> __device__ __forceinline__ u32 left_of(const T* tile, int row) {
    int lane = threadIdx.x % 32;
    return shared_at(tile + spot<W>(row + lane % 16, lane / 16 * 8));
}
// The same of a tile [column][inner] as right sides of two products, 16 inner elements by 16 columns.
template <int W> __device__ __forceinline__ u32 right_of(const T* tile, int column) {
    int lane = threadIdx.x % 32;
    return shared_at(tile + spot<W>(column + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8));
}
// The same of a tile [inner][column], turned, as right sides.
template <int W> __device__ __forceinline__ u32 turned_of(const T* tile) {
    int lane = threadIdx.x % 32;
    return shared_at(tile + spot<W>(lane % 16, lane / 16 * 8));
}

template <int M, int N> __device__ __forceinline__ void clear(float (&sums)[M][N][4]) {
    #pragma unroll
    for (int m = 0; m < M; ++m) {
        #pragma unroll
        for (int n = 0; n < N; ++n) { sums[m][n][0] = sums[m][n][1] = sums[m][n][2] = sums[m][n][3] = 0.0f; }
    }
}

// sums = rows of `left` times rows of `right`, over W elements; both as `left_of` and `right_of` give them.
template <int W, int M, int N>
__device__ __forceinline__ void products(float (&sums)[M][N][4], u32 left, u32 right) {
    const float zeros[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    #pragma unroll
    for (int k = 0; k < W; k += 16) {
        u32 a[M][4];
        #pragma unroll
        for (int m = 0; m < M; ++m) load_matrices(a[m], from<W>(left, m * 16, k));
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 b[4];
            load_matrices(b, from<W>(right, n * 8, k));
            #pragma unroll
            for (int m = 0; m < M; ++m) {
                mma(T(), sums[m][n], a[m], b[0], b[1], k == 0 ? zeros : sums[m][n]);
                mma(T(), sums[m][n + 1], a[m], b[2], b[3], k == 0 ? zeros : sums[m][n + 1]);
            }
        }
    }
}

// sums += weights (as products left them) times a tile [inner][W], as `turned_of` gives it.
template <int W, int M, int K, int N>
__device__ __forceinline__ void weighted(float (&sums)[M][N][4], const float (&weights)[M][K][4], u32 tile) {
    #pragma unroll
    for (int k = 0; k < K; k += 2) {
        u32 a[M][4];
        #pragma unroll
        for (int m = 0; m < M; ++m) {
            const float (&x)[4] = weights[m][k];
            const float (&y)[4] = weights[m][k + 1];
            a[m][0] = pair_of(x[0], x[1]);
            a[m][1] = pair_of(x[2], x[3]);
            a[m][2] = pair_of(y[0], y[1]);
            a[m][3] = pair_of(y[2], y[3]);
        }
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 b[4];
            load_matrices_turned(b, from<W>(tile, k * 8, n * 8));
            #pragma unroll
            for (int m = 0; m < M; ++m) {
                mma(T(), sums[m][n], a[m], b[0], b[1], sums[m][n]);
                mma(T(), sums[m][n + 1], a[m], b[2], b[3], sums[m][n + 1]);
            }
        }
    }
}

// Starts copying a tile of N rows by W columns; rows from `rows` on and columns from `width` on become zeros.
template <int N, int W>
__device__ __forceinline__ void fetch(T* to, const T* from, i64 stride, int rows, int width) {
    const int PIECES = W / 8;
    if (THREADS % PIECES == 0 && rows >= N && width == W) {
        // Every thread goes down a column. Nothing is to be computed before, for it would fill the registers.
        const int DOWN = THREADS / PIECES;
        int r = threadIdx.x / PIECES, c = threadIdx.x % PIECES * 8;
        const T* src = from + r * stride + c;
        u32 dst = shared_at(to + spot<W>(r, c));
        i64 step = DOWN * stride;
        #pragma unroll
        for (int n = 0; n < N; n += DOWN) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(dst + n * W * 2), "l"(src) : "memory");
            src += step;
            asm volatile("" : "+l"(src));
        }
        return;
    }
    #pragma unroll 1
    for (int n = threadIdx.x; n < N * PIECES; n += THREADS) {
        int r = n / PIECES, c = n % PIECES * 8;
        bool there = r < rows && c < width;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
            :: "r"(shared_at(to + spot<W>(r, c))), "l"(there ? from + r * stride + c : from), "r"(there ? 16 : 0) : "memory");
    }
}
// The same of N numbers.
template <int N> __device__ __forceinline__ void fetch_row(float* to, const float* from, int count) {
    int n = threadIdx.x;
    if (n >= N) return;
    const float* src = n < count ? from + n : from;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
        :: "r"(shared_at(to + n)), "l"(src), "r"(n < count ? 4 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's committed copies are under way.
template <int N> __device__ __forceinline__ void arrive() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// Writes a warp's rows, times a factor each, through `stage` (shared, ROWS by W; every warp uses its own rows).
template <int W>
__device__ __forceinline__ void store(T* stage, const float (&x)[MT][W / 8][4], const float (&factor)[MT][2], T* to, i64 stride, int rows, int width) {
    int first = threadIdx.x / 32 * MT * 16, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    #pragma unroll
    for (int m = 0; m < MT; ++m) {
        #pragma unroll
        for (int n = 0; n < W / 8; ++n) {
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                *(u32*)(stage + spot<W>(first + m * 16 + g + 8 * h, n * 8) + 2 * t) =
                    pair_of(x[m][n][2 * h] * factor[m][h], x[m][n][2 * h + 1] * factor[m][h]);
            }
        }
    }
    __syncwarp();
    for (int n = lane; n < MT * 16 * (W / 8); n += 32) {
        int r = first + n / (W / 8), c = n % (W / 8) * 8;
        if (r < rows && c < width) store16(to + r * stride + c, load16(stage + spot<W>(r, c)));
    }
}

// Gives `value` to the columns of a row, upper or lower, that are not within `low` and `high`. Both count from the
// lane's own first column.
template <int N> __device__ __forceinline__ void hide(float (&x)[N][4], int lower, int low, int high, float value) {
    #pragma unroll
    for (int n = 0; n < N; ++n) {
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (n * 8 + e < low || n * 8 + e >= high) x[n][2 * lower + e] = value;
        }
    }
}

#if PART == 0
extern "C" __global__ void __launch_bounds__(THREADS)
attention_mma_forward(Shape s, View q, View k, View v, const T* sinks, View o, float* lse, i64 slots, u32* alarm, u32 code) {
    extern __shared__ __align__(256) char memory[];
    T* q_tile = (T*)memory;
    T* k_tile = q_tile + ROWS * D;
    T* v_tile = k_tile + COLS * D;
    if (blockIdx.x == 0) check_lens(s, alarm, code);
    Place at = place_of(blockIdx.x, slots, s.heads);
    Piece p;
    if (!find_piece(p, s, false, slots - 1 - at.slot, ROWS)) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int count = (int)least(p.queries - p.at, ROWS);
    i64 row = p.first_query + p.at, key_head = at.head / (s.heads / s.key_heads);
    fetch<ROWS, D>(q_tile, row_at<T>(q, at.batch, row, at.head), q.stride[1], count, (int)s.width);
    int start = (int)(first_seen(s, p, p.at) / COLS * COLS), end = (int)end_seen(s, p, p.at + count - 1);
    // Keys from `clear_from` to `clear_to` are seen by the whole tile.
    int clear_from = (int)first_seen(s, p, p.at + count - 1), clear_to = (int)end_seen(s, p, p.at);
    // The highest score is searched before it is scaled, so the factor must be positive; `sign` is what is missing.
    float scale = (float)(s.scale * 1.4426950408889634), sign = scale > 0.0f ? 1.0f : scale < 0.0f ? -1.0f : 0.0f;
    scale = scale == 0.0f ? 1.0f : scale * sign;
    float top[MT][2], sum[MT][2], out[MT][DV / 8][4];
    #pragma unroll
    for (int m = 0; m < MT; ++m) {
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            top[m][h] = sinks ? up(sinks[at.head]) * LOG2E : -infinity();
            // Four lanes sum parts of a row; one of them starts with the sink.
            sum[m][h] = sinks && t == 0 ? 1.0f : 0.0f;
        }
    }
    clear(out);
    const T* k_rows = row_at<T>(k, at.batch, p.first_key, key_head);
    const T* v_rows = row_at<T>(v, at.batch, p.first_key, key_head);
    auto bring_k = [&](int key) { fetch<COLS, D>(k_tile, k_rows + key * k.stride[1], k.stride[1], (int)p.keys - key, (int)s.width); };
    auto bring_v = [&](int key) { fetch<COLS, DV>(v_tile, v_rows + key * v.stride[1], v.stride[1], (int)p.keys - key, (int)s.value_width); };
    if (start < end) bring_k(start);
    commit();
    for (int key = start; key < end; key += COLS) {
        // The keys are there, and no thread reads the previous values any more.
        arrive<0>();
        __syncthreads();
        bring_v(key);
        commit();
        float x[MT][COLS / 8][4];
        products<D>(x, left_of<D>(q_tile, warp * MT * 16), right_of<D>(k_tile, 0));
        // The values are there, and no thread reads the keys any more.
        arrive<0>();
        __syncthreads();
        if (key + COLS < end) bring_k(key + COLS);
        commit();
        if (sign != 1.0f) {
            #pragma unroll
            for (int m = 0; m < MT; ++m) {
                #pragma unroll
                for (int n = 0; n < COLS / 8; ++n) {
                    #pragma unroll
                    for (int e = 0; e < 4; ++e) x[m][n][e] *= sign;
                }
            }
        }
        if (key < clear_from || key + COLS > clear_to) {
            #pragma unroll
            for (int m = 0; m < MT; ++m) {
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    i64 i = p.at + (warp * MT + m) * 16 + g + 8 * h;
                    hide(x[m], h, (int)first_seen(s, p, i) - key - 2 * t, (int)end_seen(s, p, i) - key - 2 * t, -infinity());
                }
            }
        }
        #pragma unroll
        for (int m = 0; m < MT; ++m) {
            float fade[2];
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                float highest = x[m][0][2 * h];
                #pragma unroll
                for (int n = 0; n < COLS / 8; ++n) {
                    highest = fmaxf(highest, fmaxf(x[m][n][2 * h], x[m][n][2 * h + 1]));
                }
                #pragma unroll
                for (int step = 1; step <= 2; step <<= 1) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));
                highest = fmaxf(top[m][h], highest * scale);
                // A query that has seen nothing yet would subtract infinities.
                float base = highest == -infinity() ? 0.0f : highest;
                fade[h] = exp2_of(top[m][h] - base);
                top[m][h] = highest;
                float total = 0.0f;
                #pragma unroll
                for (int n = 0; n < COLS / 8; ++n) {
                    #pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& y = x[m][n][2 * h + e];
                        y = exp2_of(y * scale - base);
                        total += y;
                    }
                }
                sum[m][h] = sum[m][h] * fade[h] + total;
            }
            // Where the highest score has not changed nothing fades.
            if (__any_sync(0xffffffffu, fade[0] != 1.0f || fade[1] != 1.0f)) {
                #pragma unroll
                for (int n = 0; n < DV / 8; ++n) {
                    out[m][n][0] *= fade[0];
                    out[m][n][1] *= fade[0];
                    out[m][n][2] *= fade[1];
                    out[m][n][3] *= fade[1];
                }
            }
        }
        weighted<DV>(out, x, turned_of<DV>(v_tile));
    }
    arrive<0>();
    __syncthreads();
    float factor[MT][2];
    #pragma unroll
    for (int m = 0; m < MT; ++m) {
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            #pragma unroll
            for (int step = 1; step <= 2; step <<= 1) sum[m][h] += __shfl_xor_sync(0xffffffffu, sum[m][h], step);
            factor[m][h] = sum[m][h] == 0.0f ? 0.0f : 1.0f / sum[m][h];
            int r = (warp * MT + m) * 16 + g + 8 * h;
            if (t == 0 && r < count) lse[(at.batch * s.heads + at.head) * s.queries + row + r] = top[m][h] * LN2 + logf(sum[m][h]);
        }
    }
    store<DV>((T*)memory, out, factor, row_at<T>(o, at.batch, row, at.head), o.stride[1], count, (int)s.value_width);
}
#endif

#if PART == 1
extern "C" __global__ void __launch_bounds__(THREADS)
attention_mma_dq(Shape s, View q, View k, View v, View d_o, const float* lse, const float* delta, View dq, i64 slots) {
    extern __shared__ __align__(256) char memory[];
    T* q_tile = (T*)memory;
    T* o_tile = q_tile + ROWS * D;
    T* k_tiles = o_tile + ROWS * DV;
    T* v_tiles = k_tiles + 2 * COLS * D;
    Place at = place_of(blockIdx.x, slots, s.heads);
    Piece p;
    if (!find_piece(p, s, false, slots - 1 - at.slot, ROWS)) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int count = (int)least(p.queries - p.at, ROWS);
    i64 row = p.first_query + p.at, key_head = at.head / (s.heads / s.key_heads);
    fetch<ROWS, D>(q_tile, row_at<T>(q, at.batch, row, at.head), q.stride[1], count, (int)s.width);
    fetch<ROWS, DV>(o_tile, row_at<T>(d_o, at.batch, row, at.head), d_o.stride[1], count, (int)s.value_width);
    int start = (int)(first_seen(s, p, p.at) / COLS * COLS), end = (int)end_seen(s, p, p.at + count - 1);
    int clear_from = (int)first_seen(s, p, p.at + count - 1), clear_to = (int)end_seen(s, p, p.at);
    float scale = (float)(s.scale * 1.4426950408889634), row_lse[MT][2], row_delta[MT][2], out[MT][D / 8][4];
    #pragma unroll
    for (int m = 0; m < MT; ++m) {
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            int r = (warp * MT + m) * 16 + g + 8 * h;
            i64 stats = (at.batch * s.heads + at.head) * s.queries + row + r;
            // A query that is not there or saw nothing has weights 0.
            row_lse[m][h] = r < count ? lse[stats] * LOG2E : infinity();
            row_delta[m][h] = r < count ? delta[stats] : 0.0f;
            if (row_lse[m][h] == -infinity()) row_lse[m][h] = infinity();
        }
    }
    clear(out);
    const T* k_rows = row_at<T>(k, at.batch, p.first_key, key_head);
    const T* v_rows = row_at<T>(v, at.batch, p.first_key, key_head);
    auto bring = [&](int key, int buffer) {
        int some = (int)p.keys - key;
        fetch<COLS, D>(k_tiles + buffer * COLS * D, k_rows + key * k.stride[1], k.stride[1], some, (int)s.width);
        fetch<COLS, DV>(v_tiles + buffer * COLS * DV, v_rows + key * v.stride[1], v.stride[1], some, (int)s.value_width);
    };
    if (start < end) bring(start, 0);
    commit();
    int buffer = 0;
    for (int key = start; key < end; key += COLS, buffer ^= 1) {
        arrive<0>();
        __syncthreads();
        if (key + COLS < end) bring(key + COLS, buffer ^ 1);
        commit();
        const T* k_tile = k_tiles + buffer * COLS * D;
        float x[MT][COLS / 8][4], y[MT][COLS / 8][4];
        products<D>(x, left_of<D>(q_tile, warp * MT * 16), right_of<D>(k_tile, 0));
        products<DV>(y, left_of<DV>(o_tile, warp * MT * 16), right_of<DV>(v_tiles + buffer * COLS * DV, 0));
        #pragma unroll
        for (int m = 0; m < MT; ++m) {
            #pragma unroll
            for (int n = 0; n < COLS / 8; ++n) {
                #pragma unroll
                for (int e = 0; e < 4; ++e) x[m][n][e] = exp2_of(x[m][n][e] * scale - row_lse[m][e / 2]);
            }
        }
        if (key < clear_from || key + COLS > clear_to) {
            #pragma unroll
            for (int m = 0; m < MT; ++m) {
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    i64 i = p.at + (warp * MT + m) * 16 + g + 8 * h;
                    hide(x[m], h, (int)first_seen(s, p, i) - key - 2 * t, (int)end_seen(s, p, i) - key - 2 * t, 0.0f);
                }
            }
        }
        #pragma unroll
        for (int m = 0; m < MT; ++m) {
            #pragma unroll
            for (int n = 0; n < COLS / 8; ++n) {
                #pragma unroll
                for (int e = 0; e < 4; ++e) x[m][n][e] *= y[m][n][e] - row_delta[m][e / 2];
            }
        }
        weighted<D>(out, x, turned_of<D>(k_tile));
    }
    arrive<0>();
    __syncthreads();
    float factor[MT][2];
    #pragma unroll
    for (int m = 0; m < MT; ++m) { factor[m][0] = factor[m][1] = (float)s.scale; }
    store<D>((T*)memory, out, factor, row_at<T>(dq, at.batch, row, at.head), dq.stride[1], count, (int)s.width);
}
#endif

#if PART == 2
extern "C" __global__ void __launch_bounds__(THREADS)
attention_mma_dkv(Shape s, View q, View k, View v, View d_o, const float* lse, const float* delta, View dk, View dv, i64 slots) {
    extern __shared__ __align__(256) char memory[];
    T* k_tile = (T*)memory;
    T* v_tile = k_tile + ROWS * D;
    T* q_tiles = v_tile + ROWS * DV;
    T* o_tiles = q_tiles + 2 * COLS * D;
    float* lse_tiles = (float*)(o_tiles + 2 * COLS * DV);
    float* delta_tiles = lse_tiles + 2 * COLS;
    Place at = place_of(blockIdx.x, slots, s.key_heads);
    Piece p;
    if (!find_piece(p, s, true, at.slot, ROWS)) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int count = (int)least(p.keys - p.at, ROWS), group = (int)(s.heads / s.key_heads);
    i64 row = p.first_key + p.at;
    fetch<ROWS, D>(k_tile, row_at<T>(k, at.batch, row, at.head), k.stride[1], count, (int)s.width);
    fetch<ROWS, DV>(v_tile, row_at<T>(v, at.batch, row, at.head), v.stride[1], count, (int)s.value_width);
    int start = (int)(first_seer(s, p, p.at) / COLS * COLS), end = (int)end_seer(s, p, p.at + count);
    int shift = (int)(p.keys - p.queries), window = (int)least(s.window, 1 << 30);
    float scale = (float)(s.scale * 1.4426950408889634), k_out[MT][D / 8][4], v_out[MT][DV / 8][4];
    clear(k_out);
    clear(v_out);
    auto bring = [&](int member, int query, int buffer) {
        i64 head = at.head * group + member, first = p.first_query + query, stats = (at.batch * s.heads + head) * s.queries + first;
        int some = (int)p.queries - query;
        fetch<COLS, D>(q_tiles + buffer * COLS * D, row_at<T>(q, at.batch, first, head), q.stride[1], some, (int)s.width);
        fetch<COLS, DV>(o_tiles + buffer * COLS * DV, row_at<T>(d_o, at.batch, first, head), d_o.stride[1], some, (int)s.value_width);
        fetch_row<COLS>(lse_tiles + buffer * COLS, lse + stats, some);
        fetch_row<COLS>(delta_tiles + buffer * COLS, delta + stats, some);
    };
    if (start < end) bring(0, start, 0);
    commit();
    int buffer = 0, member = 0, query = start;
    while (start < end && member < group) {
        arrive<0>();
        __syncthreads();
        int next = query + COLS < end ? query + COLS : start, next_member = next == start ? member + 1 : member;
        if (next_member < group) bring(next_member, next, buffer ^ 1);
        commit();
        const T* q_tile = q_tiles + buffer * COLS * D;
        const T* o_tile = o_tiles + buffer * COLS * DV;
        const float* lse_tile = lse_tiles + buffer * COLS + 2 * t;
        const float* delta_tile = delta_tiles + buffer * COLS + 2 * t;
        float x[MT][COLS / 8][4], y[MT][COLS / 8][4];
        products<D>(x, left_of<D>(k_tile, warp * MT * 16), right_of<D>(q_tile, 0));
        products<DV>(y, left_of<DV>(v_tile, warp * MT * 16), right_of<DV>(o_tile, 0));
        #pragma unroll
        for (int n = 0; n < COLS / 8; ++n) {
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                // A query that saw nothing has weights 0; one that is not there is all zeros.
                float all = lse_tile[n * 8 + c];
                all = all == -infinity() ? infinity() : all * LOG2E;
                #pragma unroll
                for (int m = 0; m < MT; ++m) {
                    x[m][n][c] = exp2_of(x[m][n][c] * scale - all);
                    x[m][n][c + 2] = exp2_of(x[m][n][c + 2] * scale - all);
                }
            }
        }
        // Positions of the tile's queries among the keys; whether every key is seen by every one of them.
        int first = query + shift, last = first + COLS - 1, key = (int)p.at;
        if (s.causal && key + ROWS - 1 > first || key <= last - window) {
            #pragma unroll
            for (int m = 0; m < MT; ++m) {
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    // The first query that is at this key.
                    int own = key + (warp * MT + m) * 16 + g + 8 * h - first - 2 * t;
                    hide(x[m], h, s.causal ? own : -COLS, own + window, 0.0f);
                }
            }
        }
        #pragma unroll
        for (int n = 0; n < COLS / 8; ++n) {
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                float less = delta_tile[n * 8 + c];
                #pragma unroll
                for (int m = 0; m < MT; ++m) {
                    y[m][n][c] = x[m][n][c] * (y[m][n][c] - less);
                    y[m][n][c + 2] = x[m][n][c + 2] * (y[m][n][c + 2] - less);
                }
            }
        }
        weighted<DV>(v_out, x, turned_of<DV>(o_tile));
        weighted<D>(k_out, y, turned_of<D>(q_tile));
        query = next;
        member = next_member;
        buffer ^= 1;
    }
    arrive<0>();
    __syncthreads();
    float factor[MT][2], one[MT][2];
    #pragma unroll
    for (int m = 0; m < MT; ++m) { factor[m][0] = factor[m][1] = (float)s.scale; one[m][0] = one[m][1] = 1.0f; }
    store<D>((T*)memory, k_out, factor, row_at<T>(dk, at.batch, row, at.head), dk.stride[1], count, (int)s.width);
    __syncthreads();
    store<DV>((T*)memory, v_out, one, row_at<T>(dv, at.batch, row, at.head), dv.stride[1], count, (int)s.value_width);
}
#endif
