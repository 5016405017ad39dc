// softmax: y = e^(x - m) / s along the last dimension, with m the largest x and s = sum of e^(x - m);
//          its logarithm (LOG = 1): y = x - (m + ln s). Where m is infinite it counts as 0.
// softmax_grad: dx = y (dy - sum of y dy); of the logarithm: dx = dy - e^y sum of dy.
//
// blockDim.x (32 or 256) threads take one row, blockDim.y rows a block. A thread takes every blockDim.x-th pack of V
// elements. Rows of at most HOLD packs a thread are kept in registers, longer ones (HOLD = 0) are read again. The cut
// depends on the row's length alone; `packed` only says how packs are moved. X_T is the operands'
// type, GRAD is 1 for the second.

typedef X_T X;
typedef AccOf<X>::type Acc;
#define V (16 / (int)sizeof(X))

__device__ __forceinline__ float m_exp(float x) { return expf(x); }
__device__ __forceinline__ double m_exp(double x) { return exp(x); }
__device__ __forceinline__ float m_log(float x) { return logf(x); }
__device__ __forceinline__ double m_log(double x) { return log(x); }
__device__ __forceinline__ float lowest(float) { return __int_as_float(0xff800000); }
__device__ __forceinline__ double lowest(double) { return __longlong_as_double((i64)0xfff0000000000000ull); }

struct Largest {
    static __device__ __forceinline__ Acc start() { return lowest(Acc(0)); }
    static __device__ __forceinline__ Acc join(Acc a, Acc b) { return a > b || a != a ? a : b; }
};
struct Total {
    static __device__ __forceinline__ Acc start() { return Acc(0); }
    static __device__ __forceinline__ Acc join(Acc a, Acc b) { return a + b; }
};

// Over the threads of a row, in a fixed order; every thread gets it. `slots` may be used again after the call.
template <typename J> __device__ __forceinline__ Acc row_join(Acc x, Acc* slots) {
    for (int step = 16; step > 0; step >>= 1) x = J::join(x, __shfl_xor_sync(0xffffffffu, x, step));
    if (blockDim.x == 32) return x;
    if ((threadIdx.x & 31) == 0) slots[threadIdx.x >> 5] = x;
    __syncthreads();
    x = slots[0];
    for (int warp = 1; warp < (int)(blockDim.x >> 5); ++warp) x = J::join(x, slots[warp]);
    __syncthreads();
    return x;
}

__device__ __forceinline__ int live_of(i64 at, i64 width) { return width - at < V ? (int)(width - at) : V; }

__device__ __forceinline__ Pack<X> read(const X* x, i64 at, i64 width, int packed) {
    int live = live_of(at, width);
    if (packed && live == V) return load16(x + at);
    Pack<X> pack;
#pragma unroll
    for (int k = 0; k < V; ++k) pack.at[k] = x[at + (k < live ? k : 0)];
    return pack;
}

__device__ __forceinline__ void write(X* y, i64 at, i64 width, int packed, const Pack<X>& pack) {
    int live = live_of(at, width);
    if (packed && live == V) { store16(y + at, pack); return; }
#pragma unroll
    for (int k = 0; k < V; ++k) if (k < live) y[at + k] = pack.at[k];
}

// For every pack of this thread: `at` is its place in the row. KEEP and KEPT put a pack into registers and take it
// out again, or read it again.
#if HOLD > 0
#define FOR_PACKS(at) \
    _Pragma("unroll") for (int h = 0; h < HOLD; ++h) \
        if (i64 at = ((i64)threadIdx.x + (i64)h * blockDim.x) * V; at < width)
#define ROOM(held) Pack<X> held[HOLD]
#define KEEP(held, pack) held[h] = pack
#define KEPT(held, x, at) held[h]
#else
#define FOR_PACKS(at) for (i64 at = (i64)threadIdx.x * V; at < width; at += (i64)blockDim.x * V)
#define ROOM(held)
#define KEEP(held, pack)
#define KEPT(held, x, at) read(x, at, width, packed)
#endif

#if GRAD == 0
extern "C" __global__ void __launch_bounds__(256)
softmax(const X* x, X* y, i64 rows, i64 width, int packed) {
    __shared__ Acc slots[8];
    i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    // A row is a whole warp's or a whole block's, so nobody is left waiting.
    if (row >= rows) return;
    x += row * width;
    y += row * width;
    ROOM(held);
    Acc peak = Largest::start();
    FOR_PACKS(at) {
        Pack<X> pack = read(x, at, width, packed);
        KEEP(held, pack);
        int live = live_of(at, width);
#pragma unroll
        for (int k = 0; k < V; ++k) if (k < live) peak = Largest::join(peak, up(pack.at[k]));
    }
    peak = row_join<Largest>(peak, slots);
    if (peak == lowest(Acc(0)) || peak == -lowest(Acc(0))) peak = Acc(0);
    Acc sum = Acc(0);
    FOR_PACKS(at) {
        Pack<X> pack = KEPT(held, x, at);
        int live = live_of(at, width);
#pragma unroll
        for (int k = 0; k < V; ++k) if (k < live) sum += m_exp(up(pack.at[k]) - peak);
    }
    sum = row_join<Total>(sum, slots);
    Acc shift = LOG ? peak + m_log(sum) : Acc(1) / sum;
    FOR_PACKS(at) {
        Pack<X> pack = KEPT(held, x, at), out;
#pragma unroll
        for (int k = 0; k < V; ++k) {
            Acc value = up(pack.at[k]);
            put(out.at[k], LOG ? value - shift : m_exp(value - peak) * shift);
        }
        write(y, at, width, packed, out);
    }
}

#else
extern "C" __global__ void __launch_bounds__(256)
softmax_grad(const X* y, const X* dy, X* dx, i64 rows, i64 width, int packed) {
    __shared__ Acc slots[8];
    i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    y += row * width;
    dy += row * width;
    dx += row * width;
    ROOM(held);
    ROOM(grad);
    Acc sum = Acc(0);
    FOR_PACKS(at) {
        Pack<X> value = read(y, at, width, packed), slope = read(dy, at, width, packed);
        KEEP(held, value);
        KEEP(grad, slope);
        int live = live_of(at, width);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            if (k < live) sum += LOG ? up(slope.at[k]) : up(slope.at[k]) * up(value.at[k]);
        }
    }
    sum = row_join<Total>(sum, slots);
    FOR_PACKS(at) {
        Pack<X> value = KEPT(held, y, at), slope = KEPT(grad, dy, at), out;
#pragma unroll
        for (int k = 0; k < V; ++k) {
            Acc v = up(value.at[k]), d = up(slope.at[k]);
            put(out.at[k], LOG ? d - m_exp(v) * sum : v * (d - sum));
        }
        write(dx, at, width, packed, out);
    }
}
#endif
