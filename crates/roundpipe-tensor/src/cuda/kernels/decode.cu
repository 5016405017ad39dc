// What a step of decoding launches: linear maps of a few rows, heads on their way into the caches, and attention to
// the filled part of a cache. All of it is bound by memory and by the time that a launch takes, so what stands
// between two matrices is done by their kernels.
//
// No sum depends on the number of rows or on which others stand beside a row.
//
//   few_linear:      y = [residual +] norm(x) w^T + b, of up to three matrices, or with GLU silu(gate) up of two.
//                    A warp takes columns of y one after another; the rows of x lie in shared memory. Values are rounded
//                    to T wherever separate operations would round them.
//   decode_heads:    norm and rotary embedding of queries and keys; keys and values go to their places in the caches.
//                    One warp per head.
//   cached_partial:  softmax(q k^T) v over KEYS places of one key head, for all query heads that share it.
//   cached_combine:  adds up those parts in the order of places.
//   cache_write:     copies rows to their places in a cache, in words.

#ifdef ROWS
// Pieces that one lane holds of each matrix; as many are on their way. A chunk is what a warp holds.
const MapKind KIND = GLU ? GATED : THREE;
const int HELD = GLU ? 4 : 8;
const int CHUNK = HELD * 32 * N;
const int WARPS = 8;

__device__ __forceinline__ void load_chunk(Piece (&held)[HELD], const T* row, i64 from, i64 k, int lane) {
    const T* mine = row + from + lane * N;
    const int left = (int)(k - from) - lane * N;
    #pragma unroll
    for (int i = 0; i < HELD; ++i) {
        if (i * 32 * N < left) held[i] = load_few<N>(mine + i * 32 * N);
    }
}

extern "C" __global__ void __launch_bounds__(256, ROWS <= 4 ? 2 : 1) few_linear(
    const T* __restrict__ x, const T* __restrict__ norm, const T* __restrict__ residual,
    const T* __restrict__ w0, const T* __restrict__ w1, const T* __restrict__ w2,
    const T* __restrict__ b0, const T* __restrict__ b1, const T* __restrict__ b2,
    T* __restrict__ y0, T* __restrict__ y1, T* __restrict__ y2, i64 n0, i64 n1, i64 n2, i64 k, int rows, double eps
) {
    extern __shared__ __align__(16) char room[];
    T* xs = reinterpret_cast<T*>(room);
    __shared__ A slots[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Maps maps = { { w0, w1, w2 }, { b0, b1, b2 }, { y0, y1, y2 }, { n0, n1, n2 } };
    const i64 total = GLU ? n0 : n0 + n1 + n2, step = (i64)gridDim.x * WARPS;
    i64 column = (i64)blockIdx.x * WARPS + warp;
    Piece next[HELD], next_up[HELD];
    let_later_start();
    // The matrix is on its way while the rows are made ready, and before they are there.
    if (column < total) {
        const Column here = find<KIND>(maps, column, k);
        load_chunk(next, here.w, 0, k, lane);
        if (GLU) load_chunk(next_up, here.other, 0, k, lane);
    }
    wait_for_earlier();
    #pragma unroll 1
    for (int r = 0; r < rows; ++r) {
        A scale = 1;
        if (NORM) {
            A squares = 0;
            for (i64 at = (i64)threadIdx.x * N; at < k; at += 256 * N) {
                Piece p = load_few<N>(x + r * k + at);
                #pragma unroll
                for (int j = 0; j < N; ++j) { A v = up(p.at[j]); squares += v * v; }
            }
            scale = A(1) / root_of(block_sum(squares, slots) / (A)k + (A)eps);
        }
        for (i64 at = (i64)threadIdx.x * N; at < k; at += 256 * N) {
            Piece p = load_few<N>(x + r * k + at);
            if (NORM) {
                Piece w = load_few<N>(norm + at);
                #pragma unroll
                for (int j = 0; j < N; ++j) put(p.at[j], up(p.at[j]) * scale * up(w.at[j]));
            }
            *reinterpret_cast<Piece*>(xs + r * k + at) = p;
        }
    }
    __syncthreads();
    #pragma unroll 1
    for (; column < total; column += step) {
        A sum[ROWS], sum_up[ROWS];
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = sum_up[r] = 0;
        #pragma unroll 1
        for (i64 from = 0; from < k; from += CHUNK) {
            Piece held[HELD], held_up[HELD];
            #pragma unroll
            for (int i = 0; i < HELD; ++i) { held[i] = next[i]; if (GLU) held_up[i] = next_up[i]; }
            // The next chunk of this column, or the first of the next. Found anew each time, which takes fewer
            // registers than to remember.
            const bool ends = from + CHUNK >= k;
            const i64 coming = ends ? column + step : column;
            if (coming < total) {
                const Column then = find<KIND>(maps, coming, k);
                load_chunk(next, then.w, ends ? 0 : from + CHUNK, k, lane);
                if (GLU) load_chunk(next_up, then.other, ends ? 0 : from + CHUNK, k, lane);
            }
            multiply_chunk(sum, held, xs, from, k, lane, rows);
            if (GLU) multiply_chunk(sum_up, held_up, xs, from, k, lane, rows);
        }
        const Column here = find<KIND>(maps, column, k);
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= rows) continue;
            A value = warp_sum(sum[r]);
            if (here.bias) value += up(here.bias[here.at]);
            if (GLU) {
                A above = warp_sum(sum_up[r]);
                if (b1) above += up(b1[here.at]);
                value = gated(value, above);
            }
            if (lane == 0) {
                if (residual) value = rounded(value) + up(residual[r * here.n + here.at]);
                put(here.y[r * here.n + here.at], value);
            }
        }
    }
}
#endif

// Sources are dense. heads: query heads, then key heads, then as many value heads. qw and kw may be null.
extern "C" __global__ void __launch_bounds__(32) decode_heads(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const T* __restrict__ qw,
    const T* __restrict__ kw, const A* __restrict__ cos, const A* __restrict__ sin, const int* __restrict__ positions,
    const int* __restrict__ at, T* __restrict__ turned, T* __restrict__ keys, T* __restrict__ values,
    i64 steps, i64 hq, i64 hk, i64 width, i64 half, i64 table, i64 capacity, double eps, u32* alarm, u32 code
) {
    let_later_start();
    wait_for_earlier();
    const i64 place = blockIdx.y, batch = place / steps, step = place - batch * steps;
    i64 head = blockIdx.x;
    const int kind = head < hq ? 0 : head < hq + hk ? 1 : 2;
    if (kind > 0) head -= kind == 1 ? hq : hq + hk;
    const T* from = (kind == 0 ? q + (place * hq + head) * width : (kind == 1 ? k : v) + (place * hk + head) * width);
    T* to = turned + (place * hq + head) * width;
    if (kind > 0) {
        i64 to_place = at[batch] + step;
        if (at[batch] < 0 || to_place >= capacity) {
            if (threadIdx.x == 0) raise_alarm(alarm, code, at[batch], batch, capacity + 1 - steps);
            return;
        }
        to = (kind == 1 ? keys : values) + ((batch * capacity + to_place) * hk + head) * width;
    }
    if (kind == 2) {
        for (i64 i = threadIdx.x; i < width; i += 32) to[i] = from[i];
        return;
    }
    const i64 position = checked(positions[place], place, table, alarm, code);
    turn_head(
        from, kind == 0 ? qw : kw, cos + position * half, sin + position * half, width, half, eps,
        [&](i64 i, A value) { put(to[i], value); }
    );
}

#ifdef GROUP
// The places that query `step` of a row sees.
__device__ __forceinline__ void seen(const int* at, i64 batch, i64 step, i64 window, i64& first, i64& end) {
    end = at[batch] + step + 1;
    first = window > 0 && end > window ? end - window : 0;
}

// Blocks of 128 threads: x counts chunks of KEYS places, y key heads, z rows of queries. `parts` holds per row, query
// head and chunk dv sums, the maximum and the sum of weights.
extern "C" __global__ void __launch_bounds__(128) cached_partial(
    const T* __restrict__ q, i64 qb, i64 qs, i64 qh, const T* __restrict__ k, i64 kb, i64 ks, i64 kh,
    const T* __restrict__ v, i64 vb, i64 vs, i64 vh, const int* __restrict__ at, A* __restrict__ parts,
    i64 steps, i64 heads, i64 d, i64 dv, i64 capacity, i64 window, double factor, u32* alarm, u32 code
) {
    extern __shared__ __align__(16) char room[];
    A* query = reinterpret_cast<A*>(room);
    __shared__ A scores[GROUP][KEYS];
    __shared__ A tops[GROUP], sums[GROUP];
    let_later_start();
    wait_for_earlier();
    const i64 batch = blockIdx.z / steps, step = blockIdx.z - batch * steps, chunks = gridDim.x;
    const int held_key = threadIdx.x >> 1, side = threadIdx.x & 1;
    const int value_pieces = (int)(dv / N), share = threadIdx.x / value_pieces;
    const int piece = threadIdx.x - share * value_pieces;
    // All that comes from memory is on its way before the first of it is needed; places that are not filled yet are
    // read, too, and left out below.
    const int kept = PIECES > 0 ? PIECES : 1, shared_keys = PIECES > 0 ? KEYS / (SHARES > 0 ? SHARES : 1) : 1;
    Piece key_held[kept], value_held[shared_keys];
    if (PIECES > 0) {
        const i64 chunk = (i64)blockIdx.x * KEYS;
        if (chunk + held_key < capacity) {
            const T* row = k + batch * kb + (chunk + held_key) * ks + (i64)blockIdx.y * kh + side * N;
            #pragma unroll
            for (int i = 0; i < kept; ++i) key_held[i] = load_few<N>(row + i * 2 * N);
        }
        if (share < SHARES) {
            const T* column = v + batch * vb + chunk * vs + (i64)blockIdx.y * vh + piece * N;
            #pragma unroll
            for (int i = 0; i < shared_keys; ++i) {
                const int key = share + i * SHARES;
                if (chunk + key < capacity) value_held[i] = load_few<N>(column + key * vs);
            }
        }
    }
    i64 first, end;
    seen(at, batch, step, window, first, end);
    if (at[batch] < 0 || at[batch] + steps > capacity) {
        if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0)
            raise_alarm(alarm, code, at[batch], batch, capacity + 1 - steps);
        return;
    }
    const i64 start = (i64)blockIdx.x * KEYS;
    if (start >= end || start + KEYS <= first) return;
    const i64 head = blockIdx.y;
    #pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        const T* from = q + batch * qb + step * qs + (head * GROUP + g) * qh;
        for (int c = threadIdx.x; c < (int)d; c += 128) query[g * d + c] = up(from[c]) * (A)factor;
    }
    __syncthreads();
    {
        const int key = held_key;
        const i64 place = start + key;
        const bool live = place >= first && place < end;
        A dot[GROUP];
        #pragma unroll
        for (int g = 0; g < GROUP; ++g) dot[g] = 0;
        if (PIECES > 0 && live) {
            #pragma unroll
            for (int i = 0; i < kept; ++i) add_key(dot, key_held[i], query, d, (2 * i + side) * N);
        } else if (live) {
            const T* row = k + batch * kb + place * ks + head * kh;
            #pragma unroll 8
            for (i64 c = side * N; c < d; c += 2 * N) {
                Piece p = load_few<N>(row + c);
                add_key(dot, p, query, d, c);
            }
        }
        put_scores(scores, dot, key, live);
    }
    __syncthreads();
    weigh(scores, tops, sums);
    __syncthreads();
    const int keys = (int)(end - start < KEYS ? end - start : KEYS);
    const int skip = first > start ? (int)(first - start) : 0;
    // Threads share the places of a column among them, in SHARES lists that are added in order.
    A* shares = query + GROUP * d;
    if (SHARES > 0 && share < SHARES) {
        A out[GROUP][N];
        #pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            #pragma unroll
            for (int j = 0; j < N; ++j) out[g][j] = 0;
        }
        const T* column = v + batch * vb + start * vs + head * vh + piece * N;
        #pragma unroll
        for (int i = 0; i < (KEYS + SHARES - 1) / (SHARES > 0 ? SHARES : 1); ++i) {
            const int key = share + i * SHARES;
            if (key < skip || key >= keys) continue;
            Piece value = PIECES > 0 ? value_held[PIECES > 0 ? i : 0] : load_few<N>(column + key * vs);
            add_value(out, value, scores, key);
        }
        #pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            #pragma unroll
            for (int j = 0; j < N; ++j) shares[(share * GROUP + g) * dv + piece * N + j] = out[g][j];
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < (int)dv; c += 128) {
        #pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            A out = 0;
            if (SHARES > 0) {
                for (int other = 0; other < SHARES; ++other) out += shares[(other * GROUP + g) * dv + c];
            } else {
                const T* column = v + batch * vb + start * vs + head * vh + c;
                for (int key = skip; key < keys; ++key) out += scores[g][key] * up(column[key * vs]);
            }
            i64 part = ((i64)blockIdx.z * heads + head * GROUP + g) * chunks + blockIdx.x;
            parts[part * (dv + 2) + c] = out;
        }
    }
    if (threadIdx.x < GROUP) {
        i64 part = ((i64)blockIdx.z * heads + head * GROUP + threadIdx.x) * chunks + blockIdx.x;
        parts[part * (dv + 2) + dv] = tops[threadIdx.x];
        parts[part * (dv + 2) + dv + 1] = sums[threadIdx.x];
    }
}

// Blocks of 128 threads: x counts query heads, y rows of queries.
extern "C" __global__ void __launch_bounds__(128) cached_combine(
    const A* __restrict__ parts, const T* __restrict__ sinks, const int* __restrict__ at, T* __restrict__ o,
    A* __restrict__ lse, i64 steps, i64 heads, i64 dv, i64 capacity, i64 chunks, i64 window
) {
    let_later_start();
    wait_for_earlier();
    const i64 batch = blockIdx.y / steps, step = blockIdx.y - batch * steps, head = blockIdx.x;
    if (at[batch] < 0 || at[batch] + steps > capacity) return;
    i64 first, end;
    seen(at, batch, step, window, first, end);
    const i64 from = first / KEYS, until = (end + KEYS - 1) / KEYS;
    const A* mine = parts + ((i64)blockIdx.y * heads + head) * chunks * (dv + 2);
    __shared__ A slots[TEAM / 32];
    const A sink = sinks ? up(sinks[head]) : A(-INFINITY_VALUE);
    const A logarithm = combine_parts(
        mine, from, until, dv, sinks != nullptr, sink, slots, o + ((i64)blockIdx.y * heads + head) * dv
    );
    if (threadIdx.x == 0) lse[(batch * heads + head) * steps + step] = logarithm;
}
#endif

#ifdef WORD
extern "C" __global__ void __launch_bounds__(256) cache_write(
    const WORD* __restrict__ x, const int* __restrict__ at, WORD* __restrict__ cache, i64 steps, i64 words,
    i64 capacity, i64 apart, i64 total, u32* alarm, u32 code
) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const i64 row = i / (steps * words), rest = i - row * steps * words, start = at[row];
    if (start < 0 || start + steps > capacity) {
        if (rest == 0) raise_alarm(alarm, code, start, row, capacity + 1 - steps);
        return;
    }
    cache[(row * apart + start) * words + rest] = x[i];
}
#endif
