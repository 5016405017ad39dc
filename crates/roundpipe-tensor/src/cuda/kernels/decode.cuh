// What the kernels of a step of decoding share; follows rows.cuh. Two kernels that compute the same value do it by
// these functions, so that they give the same bits: one sum has one order, whoever asks for it.

typedef ELEMENT T;
typedef AccOf<T>::type A;
const int N = WIDE ? 16 / sizeof(T) : 1;
typedef Few<T, N> Piece;
#define INFINITY_VALUE __int_as_float(0x7f800000)
// Kernels that are launched early: this one goes on once those before it are done and what they wrote is there; the
// next may be set up from now on.
__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_later_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }
__device__ __forceinline__ A rounded(A x) { T y; put(y, x); return up(y); }

// Attention goes by teams of 128 threads. A block has one or several of them; each synchronises alone.
const int TEAM = 128;
__device__ __forceinline__ int team_thread() { return threadIdx.x & (TEAM - 1); }
__device__ __forceinline__ void team_sync() {
    asm volatile("bar.sync %0, 128;" :: "r"((threadIdx.x >> 7) + 1) : "memory");
}

#ifdef ROWS
// A column of y: its row of the matrix, and where it goes.
struct Column { const T* w; const T* other; const T* bias; T* y; i64 n, at; };

// Matrices that share their input.
struct Maps { const T* w[3]; const T* b[3]; T* y[3]; i64 n[3]; };
// How many there are: one, up to three, or gate and up of a gated unit.
enum MapKind { ONE, THREE, GATED };

template <MapKind KIND, typename I> __device__ __forceinline__ Column find(const Maps& maps, I column, I k) {
    Column c;
    int map = 0;
    if (KIND == THREE && column >= (I)maps.n[0]) {
        column -= (I)maps.n[0];
        map = 1;
        if (column >= (I)maps.n[1]) { column -= (I)maps.n[1]; map = 2; }
    }
    // Chosen, not indexed: an array would lie in local memory.
    c.w = (map == 0 ? maps.w[0] : map == 1 ? maps.w[1] : maps.w[2]) + (i64)column * k;
    c.other = KIND == GATED ? maps.w[1] + (i64)column * k : c.w;
    c.bias = map == 0 ? maps.b[0] : map == 1 ? maps.b[1] : maps.b[2];
    c.y = map == 0 ? maps.y[0] : map == 1 ? maps.y[1] : maps.y[2];
    c.n = map == 0 ? maps.n[0] : map == 1 ? maps.n[1] : maps.n[2];
    c.at = column;
    return c;
}

__device__ __forceinline__ Piece piece_of(const Piece& piece) { return piece; }
__device__ __forceinline__ Piece piece_of(const uint4& words) {
    Piece piece;
    *reinterpret_cast<uint4*>(&piece) = words;
    return piece;
}

// Adds the products of HELD pieces per lane, which begin at column `from` of a row, with the rows of x.
template <typename P, int HELD> __device__ __forceinline__ void multiply_chunk(
    A (&sum)[ROWS], const P (&held)[HELD], const T* xs, i64 from, i64 k, int lane, int rows
) {
    const T* mine = xs + from + lane * N;
    const int left = (int)(k - from) - lane * N, width = (int)k;
    #pragma unroll
    for (int i = 0; i < HELD; ++i) {
        if (i * 32 * N >= left) continue;
        const Piece w = piece_of(held[i]);
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= rows) continue;
            Piece x = load_few<N>(mine + r * width + i * 32 * N);
            #pragma unroll
            for (int j = 0; j < N; ++j) sum[r] += up(w.at[j]) * up(x.at[j]);
        }
    }
}

// silu(gate) up, of sums with their biases.
__device__ __forceinline__ A gated(A gate, A above) {
    gate = rounded(gate);
    return gate * Recip<T>::of(A(1) + Exp<T>::of(-gate)) * rounded(above);
}
#endif

// One warp: the norm of a head (where it has a weight) and its rotary embedding. `store(i, value)` takes the results,
// not yet rounded to T. cos and sin are those of the head's position.
template <typename Store> __device__ __forceinline__ void turn_head(
    const T* from, const T* w, const A* cos, const A* sin, i64 width, i64 half, double eps, Store store
) {
    const int lane = threadIdx.x & 31;
    A scale = 1;
    if (w) {
        A squares = 0;
        for (i64 i = lane; i < width; i += 32) { A e = up(from[i]); squares += e * e; }
        scale = A(1) / root_of(warp_sum(squares) / (A)width + (A)eps);
    }
    for (i64 i = lane; i < half; i += 32) {
        A a = up(from[i]), b = up(from[i + half]);
        if (w) { a = a * scale * up(w[i]); b = b * scale * up(w[i + half]); }
        A c = cos[i], s = sin[i];
        // Of two products and a sum a compiler may fuse either one: said in so many words.
        store(i, fused(a, c, -times(b, s)));
        store(i + half, fused(b, c, times(a, s)));
    }
    for (i64 i = 2 * half + lane; i < width; i += 32) {
        A a = up(from[i]);
        store(i, w ? a * scale * up(w[i]) : a);
    }
}

#ifdef GROUP
// Places of a chunk.
const int KEYS = 64;

// Adds one piece of a key, which begins at column `from`, to its scores with the queries.
__device__ __forceinline__ void add_key(A (&dot)[GROUP], const Piece& key, const A* query, i64 d, i64 from) {
    #pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        #pragma unroll
        for (int j = 0; j < N; ++j) dot[g] += up(key.at[j]) * query[g * d + from + j];
    }
}

// Of the two threads of a key: their sums together are its score.
__device__ __forceinline__ void put_scores(A (*scores)[KEYS], const A (&dot)[GROUP], int key, bool live) {
    #pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        A both = dot[g] + __shfl_xor_sync(0xffffffffu, dot[g], 1);
        if ((threadIdx.x & 1) == 0) scores[g][key] = live ? both : A(-INFINITY_VALUE);
    }
}

// A team: scores become weights, beside their maximum and their sum.
__device__ __forceinline__ void weigh(A (*scores)[KEYS], A* tops, A* sums) {
    const int lane = threadIdx.x & 31;
    for (int g = team_thread() >> 5; g < GROUP; g += TEAM / 32) {
        A a = scores[g][lane], b = scores[g][lane + 32];
        A top = warp_max(a > b ? a : b);
        a = exp_of(a - top);
        b = exp_of(b - top);
        scores[g][lane] = a;
        scores[g][lane + 32] = b;
        A sum = warp_sum(a + b);
        if (lane == 0) { tops[g] = top; sums[g] = sum; }
    }
}

__device__ __forceinline__ void add_value(A (&out)[GROUP][N], const Piece& value, A (*scores)[KEYS], int key) {
    #pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        #pragma unroll
        for (int j = 0; j < N; ++j) out[g][j] += scores[g][key] * up(value.at[j]);
    }
}

// The sum or maximum over a team, in a fixed order; every thread gets it. `slots` holds a value per warp and may be
// used again after the call.
template <bool LARGEST> __device__ __forceinline__ A team_fold(A x, A* slots) {
    const int lane = threadIdx.x & 31, warps = TEAM / 32;
    x = LARGEST ? warp_max(x) : warp_sum(x);
    if (lane == 0) slots[team_thread() >> 5] = x;
    team_sync();
    A all = LARGEST ? warp_max(slots[lane < warps ? lane : 0]) : warp_sum(lane < warps ? slots[lane] : A(0));
    team_sync();
    return all;
}

// A team adds up the parts of one query head from chunk `from` to `until`, in the order of places: parts hold dv sums,
// the maximum and the sum of weights. `sink` is one more score, where there is one. Gives the logarithm of the sum.
__device__ __forceinline__ A combine_parts(
    const A* mine, i64 from, i64 until, i64 dv, bool has_sink, A sink, A* slots, T* o
) {
    const int thread = team_thread();
    // A thread takes the same chunks of a text whatever its length, so the order of the sum is fixed.
    A top = sink, sum = 0;
    for (i64 chunk = thread; chunk < until; chunk += TEAM) {
        if (chunk < from) continue;
        A other = mine[chunk * (dv + 2) + dv];
        top = top > other ? top : other;
    }
    top = team_fold<true>(top, slots);
    for (i64 chunk = thread; chunk < until; chunk += TEAM)
        if (chunk >= from) sum += mine[chunk * (dv + 2) + dv + 1] * exp_of(mine[chunk * (dv + 2) + dv] - top);
    sum = team_fold<false>(sum, slots);
    if (has_sink) sum += exp_of(sink - top);
    for (int c = thread; c < (int)dv; c += TEAM) {
        A out = 0;
        #pragma unroll 8
        for (i64 chunk = from; chunk < until; ++chunk)
            out += mine[chunk * (dv + 2) + c] * exp_of(mine[chunk * (dv + 2) + dv] - top);
        put(o[c], out / sum);
    }
    return top + log_of(sum);
}
#endif
