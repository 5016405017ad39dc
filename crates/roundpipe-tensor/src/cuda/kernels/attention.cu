// Attention for any float type and any width.
//
//   o = softmax(scale · q kᵀ, sink) v            lse = log(sum of the exponentials)
//   delta = sum(do · o)                          p = exp(scale · q kᵀ - lse), ds = p · (do vᵀ - delta)
//   dq = scale · ds k    dk = scale · dsᵀ q    dv = pᵀ do    dsink = -sum(exp(sink - lse) · delta)
//
// Forward and dq: a block computes 64 queries of one head (grid x) and 64 columns of the result (grid y), over rising
// tiles of 64 keys. dk and dv: a block has 64 keys of one key head and 64 columns, over rising query heads of the
// group and rising tiles of queries. Products go over 16 inner elements at a time, staged in shared memory in Acc.
// Thread (ty, tx) of 16 by 16 keeps rows 4·ty + i and columns tx + 16·j. Blocks of a wider result repeat the
// scores: this is the way that is always right; the tensor cores' kernels are the fast one.

typedef TYPE T;
typedef AccOf<T>::type Acc;
const int TILE = 64;
const int STEP = 16;
const int PAD = STEP + 1;
const int WIDE = TILE + 1;

__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
__device__ __forceinline__ Acc infinity() { return (Acc)__int_as_float(0x7f800000); }

// Sum and maximum over the 16 threads of a row; every one gets the result.
__device__ __forceinline__ Acc row_sum(Acc x) {
    for (int step = 8; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
__device__ __forceinline__ Acc row_max(Acc x) {
    for (int step = 8; step > 0; step >>= 1) { Acc y = __shfl_xor_sync(0xffffffffu, x, step); x = x > y ? x : y; }
    return x;
}

// Rows of one head: `rows` of them from `first` on, `width` elements each.
struct Slab { const T* first; i64 stride; i64 rows; i64 width; };
__device__ __forceinline__ Slab slab_of(const View& v, i64 batch, i64 row, i64 head, i64 rows, i64 width) {
    Slab s;
    s.first = row_at<T>(v, batch, row, head); s.stride = v.stride[1]; s.rows = rows; s.width = width;
    return s;
}
__device__ __forceinline__ Acc element(const Slab& s, i64 row, i64 column) {
    return row < s.rows && column < s.width ? (Acc)up(s.first[row * s.stride + column]) : Acc(0);
}

// to[r][c] = rows r (64) by columns column + c (16), zero outside.
__device__ __forceinline__ void stage_columns(Acc* to, const Slab& s, i64 column) {
    for (int n = threadIdx.x; n < TILE * STEP; n += 256) {
        int r = n / STEP, c = n % STEP;
        to[r * PAD + c] = element(s, r, column + c);
    }
}
// to[r][c] = rows row + r (16) by columns column + c (64), zero outside.
__device__ __forceinline__ void stage_rows(Acc* to, const Slab& s, i64 row, i64 column) {
    for (int n = threadIdx.x; n < TILE * STEP; n += 256) {
        int r = n / TILE, c = n % TILE;
        to[r * WIDE + c] = element(s, row + r, column + c);
    }
}

// sum[i][j] = row 4·ty + i of `a` times row tx + 16·j of `b`. All threads; `left` and `right` hold 64·17 values.
__device__ __forceinline__ void products(Acc sum[4][4], const Slab& a, const Slab& b, Acc* left, Acc* right) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    for (int i = 0; i < 4; ++i) for (int j = 0; j < 4; ++j) sum[i][j] = Acc(0);
    for (i64 at = 0; at < a.width; at += STEP) {
        __syncthreads();
        stage_columns(left, a, at);
        stage_columns(right, b, at);
        __syncthreads();
        for (int c = 0; c < STEP; ++c) {
            Acc x[4], y[4];
            for (int i = 0; i < 4; ++i) x[i] = left[(4 * ty + i) * PAD + c];
            for (int j = 0; j < 4; ++j) y[j] = right[(tx + 16 * j) * PAD + c];
            for (int i = 0; i < 4; ++i) for (int j = 0; j < 4; ++j) sum[i][j] += x[i] * y[j];
        }
    }
}

// sum[i][j] += over the tile's 64 inner rows r: w(4·ty + i, r) · b[r][column + tx + 16·j]; w lies as [row][r], or
// as [r][row] where `across`. Waits for w to be written first.
__device__ __forceinline__ void weighted(Acc sum[4][4], const Acc* w, bool across, const Slab& b, i64 column, Acc* right) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    for (int at = 0; at < TILE; at += STEP) {
        __syncthreads();
        stage_rows(right, b, at, column);
        __syncthreads();
        for (int r = 0; r < STEP; ++r) {
            Acc x[4], y[4];
            for (int i = 0; i < 4; ++i) x[i] = across ? w[(at + r) * WIDE + 4 * ty + i] : w[(4 * ty + i) * WIDE + at + r];
            for (int j = 0; j < 4; ++j) y[j] = right[r * WIDE + tx + 16 * j];
            for (int i = 0; i < 4; ++i) for (int j = 0; j < 4; ++j) sum[i][j] += x[i] * y[j];
        }
    }
}

__device__ __forceinline__ void spread(Acc* to, const Acc x[4][4]) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    for (int i = 0; i < 4; ++i) for (int j = 0; j < 4; ++j) to[(4 * ty + i) * WIDE + tx + 16 * j] = x[i][j];
}

// Rows 4·ty + i below `rows`, columns column + tx + 16·j below `width`, times factor[i].
__device__ __forceinline__ void store(const View& v, i64 batch, i64 row, i64 head, i64 rows, i64 width, i64 column,
                                      const Acc x[4][4], const Acc factor[4]) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    for (int i = 0; i < 4; ++i) {
        if (4 * ty + i >= rows) continue;
        T* to = row_at<T>(v, batch, row + 4 * ty + i, head);
        for (int j = 0; j < 4; ++j) {
            i64 c = column + tx + 16 * j;
            if (c < width) put(to[c], x[i][j] * factor[i]);
        }
    }
}

#if PART == 0
extern "C" __global__ void __launch_bounds__(256, 2)
attention_forward(Shape s, View q, View k, View v, const T* sinks, View o, Acc* lse, i64 slots, u32* alarm, u32 code) {
    extern __shared__ __align__(16) char memory[];
    Acc* left = (Acc*)memory;
    Acc* right = left + TILE * PAD;
    Acc* weights = right + TILE * PAD;
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    if (blockIdx.x == 0 && blockIdx.y == 0) check_lens(s, alarm, code);
    Place at = place_of(blockIdx.x, slots, s.heads);
    Piece p;
    if (!find_piece(p, s, false, slots - 1 - at.slot, TILE)) return;
    i64 column = (i64)blockIdx.y * TILE, count = p.queries - p.at < TILE ? p.queries - p.at : TILE;
    i64 row = p.first_query + p.at, key_head = at.head / (s.heads / s.key_heads);
    Slab queries = slab_of(q, at.batch, row, at.head, count, s.width);
    Acc scale = (Acc)s.scale, top[4], sum[4], out[4][4];
    i64 low[4], high[4];
    for (int i = 0; i < 4; ++i) {
        top[i] = sinks ? (Acc)up(sinks[at.head]) : -infinity();
        sum[i] = sinks ? Acc(1) : Acc(0);
        low[i] = first_seen(s, p, p.at + 4 * ty + i);
        high[i] = end_seen(s, p, p.at + 4 * ty + i);
        for (int j = 0; j < 4; ++j) out[i][j] = Acc(0);
    }
    i64 start = first_seen(s, p, p.at) / TILE * TILE, end = end_seen(s, p, p.at + count - 1);
    for (i64 key = start; key < end; key += TILE) {
        i64 some = p.keys - key < TILE ? p.keys - key : TILE;
        Acc x[4][4];
        products(x, queries, slab_of(k, at.batch, p.first_key + key, key_head, some, s.width), left, right);
        for (int i = 0; i < 4; ++i) {
            Acc highest = -infinity();
            for (int j = 0; j < 4; ++j) {
                i64 c = key + tx + 16 * j;
                x[i][j] = c >= low[i] && c < high[i] ? x[i][j] * scale : -infinity();
                highest = x[i][j] > highest ? x[i][j] : highest;
            }
            highest = row_max(highest);
            Acc now = highest > top[i] ? highest : top[i];
            // A query that has seen nothing yet would subtract infinities.
            Acc base = now == -infinity() ? Acc(0) : now;
            Acc fade = exp_of(top[i] - base), part = Acc(0);
            for (int j = 0; j < 4; ++j) { x[i][j] = exp_of(x[i][j] - base); part += x[i][j]; }
            sum[i] = sum[i] * fade + row_sum(part);
            top[i] = now;
            for (int j = 0; j < 4; ++j) out[i][j] *= fade;
        }
        __syncthreads();
        spread(weights, x);
        weighted(out, weights, false, slab_of(v, at.batch, p.first_key + key, key_head, some, s.value_width), column, right);
    }
    Acc factor[4];
    for (int i = 0; i < 4; ++i) factor[i] = sum[i] == Acc(0) ? Acc(0) : Acc(1) / sum[i];
    store(o, at.batch, row, at.head, count, s.value_width, column, out, factor);
    if (blockIdx.y == 0 && tx == 0) {
        for (int i = 0; i < 4; ++i)
            if (4 * ty + i < count)
                lse[(at.batch * s.heads + at.head) * s.queries + row + 4 * ty + i] = top[i] + log_of(sum[i]);
    }
}
#endif

#if PART == 1
// One warp per row of [batch, heads, queries]. Lane l takes elements 256·n + 8·l + 0..8, whatever their alignment.
extern "C" __global__ void __launch_bounds__(256)
attention_delta(Shape s, View o, View d_o, Acc* delta) {
    i64 row = (i64)blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= s.batch * s.heads * s.queries) return;
    i64 batch = row / (s.heads * s.queries), head = row / s.queries % s.heads, query = row % s.queries;
    const T* a = row_at<T>(o, batch, query, head);
    const T* b = row_at<T>(d_o, batch, query, head);
    bool packed = sizeof(T) == 2 && ((u64)a | (u64)b) % 16 == 0;
    Acc sum = Acc(0);
    for (i64 c = lane * 8; c < s.value_width; c += 256) {
        if (packed && c + 8 <= s.value_width) {
            Pack<T> x = load16(a + c), y = load16(b + c);
            for (int e = 0; e < Pack<T>::N; ++e) sum += (Acc)up(x.at[e]) * (Acc)up(y.at[e]);
        } else {
            for (i64 e = c; e < c + 8 && e < s.value_width; ++e) sum += (Acc)up(a[e]) * (Acc)up(b[e]);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) delta[row] = sum;
}
#endif

#if PART == 5
// A result without sinks becomes one with: the sum of the exponentials grows by exp(sink). A warp has a row of o.
extern "C" __global__ void __launch_bounds__(256)
attention_sinks(Shape s, View o, const T* sinks, Acc* lse) {
    i64 row = (i64)blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= s.batch * s.heads * s.queries) return;
    i64 batch = row / (s.heads * s.queries), head = row / s.queries % s.heads, query = row % s.queries;
    Acc sink = (Acc)up(sinks[head]), before = lse[row];
    Acc top = sink > before ? sink : before;
    Acc all = top + log_of(exp_of(before - top) + exp_of(sink - top));
    Acc share = exp_of(before - all);
    T* out = (T*)row_at<T>(o, batch, query, head);
    for (i64 c = lane; c < s.value_width; c += 32) put(out[c], (Acc)up(out[c]) * share);
    __syncwarp();
    if (lane == 0) lse[row] = all;
}
#endif

// Weights p and score gradients ds of 64 queries by 64 keys. lse and delta are those of rows 4·ty + i.
__device__ __forceinline__ void backward_tile(Acc p_out[4][4], Acc ds[4][4], const Shape& s, const Piece& p, i64 query, i64 key,
                                              const Slab& q, const Slab& k, const Slab& d_o, const Slab& v,
                                              const Acc lse[4], const Acc delta[4], Acc* left, Acc* right) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    products(p_out, q, k, left, right);
    products(ds, d_o, v, left, right);
    for (int i = 0; i < 4; ++i) {
        i64 low = first_seen(s, p, query + 4 * ty + i), high = end_seen(s, p, query + 4 * ty + i);
        for (int j = 0; j < 4; ++j) {
            i64 c = key + tx + 16 * j;
            Acc weight = c >= low && c < high ? exp_of(p_out[i][j] * (Acc)s.scale - lse[i]) : Acc(0);
            p_out[i][j] = weight;
            ds[i][j] = weight * (ds[i][j] - delta[i]);
        }
    }
}

// What is known of queries 4·ty + i: a query that is not there or saw nothing has weights 0.
__device__ __forceinline__ void load_stats(Acc to_lse[4], Acc to_delta[4], const Acc* lse, const Acc* delta, i64 count) {
    int ty = threadIdx.x / 16;
    for (int i = 0; i < 4; ++i) {
        bool there = 4 * ty + i < count;
        to_lse[i] = there ? lse[4 * ty + i] : infinity();
        to_delta[i] = there ? delta[4 * ty + i] : Acc(0);
        if (to_lse[i] == -infinity()) to_lse[i] = infinity();
    }
}

#if PART == 2
extern "C" __global__ void __launch_bounds__(256, 2)
attention_dq(Shape s, View q, View k, View v, View d_o, const Acc* lse, const Acc* delta, View dq, i64 slots) {
    extern __shared__ __align__(16) char memory[];
    Acc* left = (Acc*)memory;
    Acc* right = left + TILE * PAD;
    Acc* grads = right + TILE * PAD;
    Place at = place_of(blockIdx.x, slots, s.heads);
    Piece p;
    if (!find_piece(p, s, false, slots - 1 - at.slot, TILE)) return;
    i64 column = (i64)blockIdx.y * TILE, count = p.queries - p.at < TILE ? p.queries - p.at : TILE;
    i64 row = p.first_query + p.at, key_head = at.head / (s.heads / s.key_heads);
    Slab queries = slab_of(q, at.batch, row, at.head, count, s.width);
    Slab out_grads = slab_of(d_o, at.batch, row, at.head, count, s.value_width);
    Acc out[4][4], row_lse[4], row_delta[4];
    for (int i = 0; i < 4; ++i) for (int j = 0; j < 4; ++j) out[i][j] = Acc(0);
    i64 stats = (at.batch * s.heads + at.head) * s.queries + row;
    load_stats(row_lse, row_delta, lse + stats, delta + stats, count);
    i64 start = first_seen(s, p, p.at) / TILE * TILE, end = end_seen(s, p, p.at + count - 1);
    for (i64 key = start; key < end; key += TILE) {
        i64 some = p.keys - key < TILE ? p.keys - key : TILE;
        Slab keys = slab_of(k, at.batch, p.first_key + key, key_head, some, s.width);
        Slab values = slab_of(v, at.batch, p.first_key + key, key_head, some, s.value_width);
        Acc weights[4][4], ds[4][4];
        backward_tile(weights, ds, s, p, p.at, key, queries, keys, out_grads, values, row_lse, row_delta, left, right);
        __syncthreads();
        spread(grads, ds);
        weighted(out, grads, false, keys, column, right);
    }
    Acc factor[4];
    for (int i = 0; i < 4; ++i) factor[i] = (Acc)s.scale;
    store(dq, at.batch, row, at.head, count, s.width, column, out, factor);
}
#endif

#if PART == 3
extern "C" __global__ void __launch_bounds__(256, 2)
attention_dkv(Shape s, View q, View k, View v, View d_o, const Acc* lse, const Acc* delta, View dk, View dv, i64 slots) {
    extern __shared__ __align__(16) char memory[];
    Acc* left = (Acc*)memory;
    Acc* right = left + TILE * PAD;
    Acc* weights = right + TILE * PAD;
    Acc* grads = weights + TILE * WIDE;
    Place at = place_of(blockIdx.x, slots, s.key_heads);
    Piece p;
    if (!find_piece(p, s, true, at.slot, TILE)) return;
    i64 column = (i64)blockIdx.y * TILE, count = p.keys - p.at < TILE ? p.keys - p.at : TILE;
    i64 row = p.first_key + p.at, group = s.heads / s.key_heads;
    Slab keys = slab_of(k, at.batch, row, at.head, count, s.width);
    Slab values = slab_of(v, at.batch, row, at.head, count, s.value_width);
    Acc k_out[4][4], v_out[4][4];
    for (int i = 0; i < 4; ++i) for (int j = 0; j < 4; ++j) k_out[i][j] = v_out[i][j] = Acc(0);
    i64 start = first_seer(s, p, p.at) / TILE * TILE, end = end_seer(s, p, p.at + count);
    for (i64 head = at.head * group; head < (at.head + 1) * group; ++head) {
        for (i64 query = start; query < end; query += TILE) {
            i64 some = p.queries - query < TILE ? p.queries - query : TILE, first = p.first_query + query;
            Slab queries = slab_of(q, at.batch, first, head, some, s.width);
            Slab out_grads = slab_of(d_o, at.batch, first, head, some, s.value_width);
            Acc row_lse[4], row_delta[4], x[4][4], ds[4][4];
            i64 stats = (at.batch * s.heads + head) * s.queries + first;
            load_stats(row_lse, row_delta, lse + stats, delta + stats, some);
            backward_tile(x, ds, s, p, query, p.at, queries, keys, out_grads, values, row_lse, row_delta, left, right);
            __syncthreads();
            spread(weights, x);
            spread(grads, ds);
            if (column < s.value_width) weighted(v_out, weights, true, out_grads, column, right);
            if (column < s.width) weighted(k_out, grads, true, queries, column, right);
        }
    }
    Acc scale[4], one[4];
    for (int i = 0; i < 4; ++i) { scale[i] = (Acc)s.scale; one[i] = Acc(1); }
    store(dk, at.batch, row, at.head, count, s.width, column, k_out, scale);
    store(dv, at.batch, row, at.head, count, s.value_width, column, v_out, one);
}
#endif

#if PART == 4
// One block per head, over all its rows in a fixed order.
extern "C" __global__ void __launch_bounds__(256)
attention_dsinks(Shape s, const T* sinks, const Acc* lse, const Acc* delta, Acc* dsinks) {
    __shared__ double slots[32];
    i64 head = blockIdx.x;
    Acc sink = (Acc)up(sinks[head]);
    double sum = 0;
    for (i64 n = threadIdx.x; n < s.batch * s.queries; n += 256) {
        i64 at = (n / s.queries * s.heads + head) * s.queries + n % s.queries;
        Acc all = lse[at];
        if (all != -infinity()) sum -= (double)exp_of(sink - all) * (double)delta[at];
    }
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) dsinks[head] = (Acc)sum;
}
#endif
