// RMS norm (CENTER 0) and layer norm (CENTER 1) of the rows of [rows, cols], and their gradients.
//
//   RMS:    y = x r w,              r = 1 / sqrt(mean(x^2) + eps); with a residual, x is x + residual rounded to T
//   layer:  y = (x - m) r w + b,    m = mean(x), r = 1 / sqrt(mean((x - m)^2) + eps)
//   dx = r (g - [mean(g)] - h mean(g h)) + dsum,  g = dy w,  h = (x - m) r;   dw = sum dy h,  db = sum dy
//
// A row belongs to one warp (blocks of [32, 8]) or to one block ([threads, 1]). Threads take N neighbouring
// elements at a time (WIDE: 16 bytes) and hold the first KEEP (gradient: one) of their pieces in registers; longer
// rows read the rest again. For dw and db a block goes over `per` consecutive rows and leaves one partial sum per column in
// scratch memory; sum_chunks adds those up. A thread meets the same columns in every row. Rows have less than 2^31
// columns.

typedef ELEMENT T;
typedef AccOf<T>::type A;
const int N = WIDE ? 16 / sizeof(T) : 1;
typedef Few<T, N> Piece;
const int KEEP = 2;

// N weights from element `at` on, or `fill` where there are none.
__device__ __forceinline__ void weights(const T* w, int at, A fill, A (&out)[N]) {
    if (w) {
        Piece p = load_few<N>(w + at);
        #pragma unroll
        for (int j = 0; j < N; ++j) out[j] = up(p.at[j]);
    } else {
        #pragma unroll
        for (int j = 0; j < N; ++j) out[j] = fill;
    }
}

// This thread's part of the sum of f over a row.
template <typename F>
__device__ __forceinline__ A part(const Piece (&keep)[KEEP], const T* row, int pieces, F f) {
    A sum = 0;
    #pragma unroll
    for (int k = 0; k < KEEP; ++k) {
        if ((int)(threadIdx.x + k * blockDim.x) >= pieces) continue;
        #pragma unroll
        for (int j = 0; j < N; ++j) sum += f(up(keep[k].at[j]));
    }
    #pragma unroll 1
    for (int i = threadIdx.x + KEEP * blockDim.x; i < pieces; i += blockDim.x) {
        Piece p = load_few<N>(row + i * N);
        #pragma unroll
        for (int j = 0; j < N; ++j) sum += f(up(p.at[j]));
    }
    return sum;
}

__device__ __forceinline__ Piece add(const Piece& a, const Piece& b) {
    Piece y;
    #pragma unroll
    for (int j = 0; j < N; ++j) put(y.at[j], up(a.at[j]) + up(b.at[j]));
    return y;
}

extern "C" __global__ __launch_bounds__(1024) void norm_rows(
    const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ b, const T* __restrict__ residual,
    T* __restrict__ y, A* __restrict__ mean, A* __restrict__ rstd, T* sum, i64 rows, i64 cols, double eps
) {
    __shared__ A slots[32];
    const i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const int pieces = (int)(cols / N);
    const i64 at = row * cols;
    const T* from = x + at;
    Piece keep[KEEP];
    #pragma unroll
    for (int k = 0; k < KEEP; ++k) {
        int i = threadIdx.x + k * blockDim.x;
        if (i < pieces) keep[k] = load_few<N>(from + i * N);
    }
    if (residual) {
        const T* other = residual + at;
        T* joint = sum + at;
        Piece more[KEEP];
        #pragma unroll
        for (int k = 0; k < KEEP; ++k) {
            int i = threadIdx.x + k * blockDim.x;
            if (i < pieces) more[k] = load_few<N>(other + i * N);
        }
        #pragma unroll
        for (int k = 0; k < KEEP; ++k) {
            int i = threadIdx.x + k * blockDim.x;
            if (i >= pieces) continue;
            keep[k] = add(keep[k], more[k]);
            store_few(joint + i * N, keep[k]);
        }
        #pragma unroll 1
        for (int i = threadIdx.x + KEEP * blockDim.x; i < pieces; i += blockDim.x) {
            store_few(joint + i * N, add(load_few<N>(from + i * N), load_few<N>(other + i * N)));
        }
        // Every thread reads again only what it wrote itself.
        from = joint;
    }
    const A count = (A)cols;
    A m = 0, var;
    if (CENTER) {
        // The first mean is rounded; the second pass finds what it missed and takes it out of the variance.
        const A near = row_sum(part(keep, from, pieces, [](A v) { return v; }), slots) / count;
        const A missed = row_sum(part(keep, from, pieces, [=](A v) { return v - near; }), slots) / count;
        const A spread = row_sum(part(keep, from, pieces, [=](A v) { return (v - near) * (v - near); }), slots) / count;
        m = near + missed;
        var = spread - missed * missed;
    } else {
        var = row_sum(part(keep, from, pieces, [](A v) { return v * v; }), slots) / count;
    }
    const A r = A(1) / root_of(var + (A)eps);
    if (threadIdx.x == 0) {
        rstd[row] = r;
        if (CENTER) mean[row] = m;
    }
    T* to = y + at;
    auto finish = [&](const Piece& p, int i) {
        A ws[N], bs[N];
        Piece out;
        weights(w, i * N, A(1), ws);
        if (CENTER) weights(b, i * N, A(0), bs);
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            A v = CENTER ? (up(p.at[j]) - m) * r * ws[j] + bs[j] : up(p.at[j]) * r * ws[j];
            put(out.at[j], v);
        }
        store_few(to + i * N, out);
    };
    #pragma unroll
    for (int k = 0; k < KEEP; ++k) {
        int i = threadIdx.x + k * blockDim.x;
        if (i < pieces) finish(keep[k], i);
    }
    #pragma unroll 1
    for (int i = threadIdx.x + KEEP * blockDim.x; i < pieces; i += blockDim.x) {
        finish(load_few<N>(from + i * N), i);
    }
}

// Leaves the sums that a block kept in registers in its row of `partial`; of several warps in order.
__device__ __forceinline__ void leave(const A (&sums)[N], A* partial, A* room, i64 cols) {
    const bool alone = blockDim.y == 1;
    A* to = alone ? partial : room + threadIdx.y * cols;
    if (!alone) __syncthreads();
    const int at = threadIdx.x * N;
    if (at < cols) {
        #pragma unroll
        for (int j = 0; j < N; ++j) to[at + j] = sums[j];
    }
    if (alone) return;
    __syncthreads();
    for (i64 c = threadIdx.y * blockDim.x + threadIdx.x; c < cols; c += blockDim.x * blockDim.y) {
        A total = 0;
        for (int warp = 0; warp < blockDim.y; ++warp) total += room[warp * cols + c];
        partial[c] = total;
    }
}

// A piece of x, dy and dsum.
struct Trio { Piece x, dy, dsum; };

__device__ __forceinline__ void fetch(Trio& t, const T* x, const T* dy, const T* dsum, i64 at) {
    t.x = load_few<N>(x + at);
    t.dy = load_few<N>(dy + at);
    if (!CENTER && dsum) t.dsum = load_few<N>(dsum + at);
}

// A piece into shared memory; 16 bytes go there behind the thread's back.
__device__ __forceinline__ void send(Piece* to, const T* from) {
#if WIDE
    u32 place = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(place), "l"(from) : "memory");
#else
    *to = load_few<N>(from);
#endif
}

// One place of a thread's ring: the pieces of a row, those of x for all threads first.
__device__ __forceinline__ void send(Piece* to, int threads, const T* x, const T* dy, const T* dsum, i64 at) {
    send(to, x + at);
    send(to + threads, dy + at);
    if (!CENTER && dsum) send(to + 2 * threads, dsum + at);
}

// What was sent since the last call is one parcel.
__device__ __forceinline__ void close_parcel() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all parcels but the `behind` latest: 1 or 2.
__device__ __forceinline__ void await_parcels(int behind) {
    if (behind == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
    else asm volatile("cp.async.wait_group 2;" ::: "memory");
}

// dw and db are partial sums, [blocks, cols]. A thread holds one piece of a row. Those of the next `ahead` rows (1 or
// 2) are on their way through shared memory, each thread's in places of its own: no thread waits for another's pieces.
extern "C" __global__ __launch_bounds__(1024) void norm_rows_grad(
    const T* __restrict__ x, const T* __restrict__ w, const A* __restrict__ mean, const A* __restrict__ rstd,
    const T* __restrict__ dy, const T* __restrict__ dsum, T* __restrict__ dx, A* dw, A* db, i64 rows, i64 cols, i64 per,
    int ahead
) {
    extern __shared__ __align__(16) char room[];
    __shared__ A slots[32];
    const int pieces = (int)(cols / N), mine = threadIdx.x, step = blockDim.x;
    const bool held = mine < pieces;
    const i64 first = blockIdx.x * per, last = first + per < rows ? first + per : rows;
    const A count = (A)cols;
    if (dw) dw += blockIdx.x * cols;
    if (db) db += blockIdx.x * cols;
    A sum_w[N], sum_b[N];
    #pragma unroll
    for (int j = 0; j < N; ++j) sum_w[j] = sum_b[j] = 0;
    const int threads = blockDim.x * blockDim.y, place = threads * (!CENTER && dsum ? 3 : 2);
    Piece* ring = reinterpret_cast<Piece*>(room) + threadIdx.y * blockDim.x + threadIdx.x;
    i64 coming = first + threadIdx.y;
    for (int i = 0; i < ahead; ++i, coming += blockDim.y) {
        if (held && coming < last) send(ring + i * place, threads, x, dy, dsum, coming * cols + mine * N);
        close_parcel();
    }
    int from = 0, to = ahead;
    Piece ws;
    if (w && held) ws = load_few<N>(w + mine * N);
    A m = 0, r = 0, next_m = 0, next_r = 0;
    if (first + threadIdx.y < last) {
        if (CENTER) next_m = mean[first + threadIdx.y];
        next_r = rstd[first + threadIdx.y];
    }
    for (i64 row = first + threadIdx.y; row < last; row += blockDim.y, coming += blockDim.y) {
        const i64 start = row * cols, then = row + blockDim.y;
        if (held && coming < last) send(ring + to * place, threads, x, dy, dsum, coming * cols + mine * N);
        close_parcel();
        m = next_m;
        r = next_r;
        if (then < last) {
            if (CENTER) next_m = mean[then];
            next_r = rstd[then];
        }
        await_parcels(ahead);
        Trio now;
        if (held) {
            const Piece* here = ring + from * place;
            now.x = here[0];
            now.dy = here[threads];
            if (!CENTER && dsum) now.dsum = here[2 * threads];
        }
        from = from == ahead ? 0 : from + 1;
        to = to == ahead ? 0 : to + 1;
        if (dx) {
            A along = 0, flat = 0;
            auto gather = [&](const Trio& t, const Piece& ws) {
                #pragma unroll
                for (int j = 0; j < N; ++j) {
                    A g = up(t.dy.at[j]) * (w ? up(ws.at[j]) : A(1));
                    along += g * (up(t.x.at[j]) - m);
                    if (CENTER) flat += g;
                }
            };
            if (held) gather(now, ws);
            #pragma unroll 1
            for (int i = mine + step; i < pieces; i += step) {
                Trio more;
                fetch(more, x, dy, dsum, start + i * N);
                gather(more, w ? load_few<N>(w + i * N) : ws);
            }
            along = row_sum(along, slots) * r / count;
            if (CENTER) flat = row_sum(flat, slots) / count;
            auto finish = [&](const Trio& t, const Piece& ws, int i) {
                Piece out;
                #pragma unroll
                for (int j = 0; j < N; ++j) {
                    A v = r * (up(t.dy.at[j]) * (w ? up(ws.at[j]) : A(1)) - flat - (up(t.x.at[j]) - m) * r * along);
                    if (!CENTER && dsum) v += up(t.dsum.at[j]);
                    put(out.at[j], v);
                }
                store_few(dx + start + i * N, out);
            };
            if (held) finish(now, ws, mine);
            #pragma unroll 1
            for (int i = mine + step; i < pieces; i += step) {
                Trio more;
                fetch(more, x, dy, dsum, start + i * N);
                finish(more, w ? load_few<N>(w + i * N) : ws, i);
            }
        }
        if (held) {
            #pragma unroll
            for (int j = 0; j < N; ++j) {
                A d = up(now.dy.at[j]);
                sum_w[j] += d * ((up(now.x.at[j]) - m) * r);
                if (CENTER) sum_b[j] += d;
            }
        }
        // Columns that no register holds (one row per block then): the sum lives in scratch, this thread's alone.
        if (dw || db) {
            #pragma unroll 1
            for (int i = mine + step; i < pieces; i += step) {
                Trio more;
                fetch(more, x, dy, dsum, start + i * N);
                #pragma unroll
                for (int j = 0; j < N; ++j) {
                    A d = up(more.dy.at[j]);
                    const int c = i * N + j;
                    if (dw) dw[c] = (row == first ? A(0) : dw[c]) + d * ((up(more.x.at[j]) - m) * r);
                    if (db) db[c] = (row == first ? A(0) : db[c]) + d;
                }
            }
        }
    }
    if (dw) leave(sum_w, dw, reinterpret_cast<A*>(room), cols);
    if (db) leave(sum_b, db, reinterpret_cast<A*>(room), cols);
}
