// softmax: y = e^(x - m) / s along the last dimension, with m the largest x and s = sum of e^(x - m);
//          its logarithm (LOG = 1): y = x - (m + ln s). Where m is infinite it counts as 0.
// softmax_grad: dx = y (dy - sum of y dy); of the logarithm: dx = dy - e^y sum of dy.
//
// blockDim.x (32 or 256) threads take one row, blockDim.y rows a block. A thread takes every blockDim.x-th pack of V
// elements. Rows of at most HOLD packs a thread are kept in registers, in the accumulator type; longer ones (HOLD = 0)
// are read again. Places behind the end of a row hold -inf (in gradients 0), which changes neither m nor a sum. The cut
// depends on the row's length alone; `packed` only says how packs are moved. X_T is the operands'
// type, GRAD is 1 for the second.

typedef X_T X;
typedef AccOf<X>::type Acc;
#define V (16 / (int)sizeof(X))

// e^(x - peak): two instructions for 16-bit operands, whose last bits are far coarser; `peak` comes as `scaled` gave it.
// The library's otherwise.
template <typename E> struct Power {
    static __device__ __forceinline__ float scaled(float peak) { return -peak * 1.44269504f; }
    static __device__ __forceinline__ float of(float x, float peak) {
        float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(x, 1.44269504f, peak))); return y;
    }
};
template <> struct Power<float> {
    static __device__ __forceinline__ float scaled(float peak) { return peak; }
    static __device__ __forceinline__ float of(float x, float peak) { return expf(x - peak); }
};
template <> struct Power<double> {
    static __device__ __forceinline__ double scaled(double peak) { return peak; }
    static __device__ __forceinline__ double of(double x, double peak) { return exp(x - peak); }
};
__device__ __forceinline__ float m_log(float x) { return logf(x); }
__device__ __forceinline__ double m_log(double x) { return log(x); }
__device__ __forceinline__ float lowest(float) { return __int_as_float(0xff800000); }
__device__ __forceinline__ double lowest(double) { return __longlong_as_double((i64)0xfff0000000000000ull); }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

struct Largest {
    // A number wins over NaN, which comes back with the sum.
    static __device__ __forceinline__ Acc join(Acc a, Acc b) { return larger(a, b); }
};
struct Total {
    static __device__ __forceinline__ Acc join(Acc a, Acc b) { return a + b; }
};

// Over the threads of a row (a warp, or eight), in a fixed order; every thread gets it. `slots` may be used again after the call.
template <typename J> __device__ __forceinline__ Acc row_join(Acc x, Acc* slots) {
    for (int step = 16; step > 0; step >>= 1) x = J::join(x, __shfl_xor_sync(0xffffffffu, x, step));
    if (blockDim.x == 32) return x;
    if ((threadIdx.x & 31) == 0) slots[threadIdx.x >> 5] = x;
    __syncthreads();
    x = slots[0];
#pragma unroll
    for (int warp = 1; warp < 8; ++warp) x = J::join(x, slots[warp]);
    __syncthreads();
    return x;
}

// Elements of the pack at `at` that lie in the row; none or less behind it.
__device__ __forceinline__ int live_of(i64 at, i64 width) { return width - at < V ? (int)(width - at) : V; }

// A pack in the accumulator type, `dead` behind the end of the row.
__device__ __forceinline__ void read(const X* x, i64 at, i64 width, int packed, Acc dead, Acc (&out)[V]) {
    if (packed) {
        Pack<X> pack = load16(x + at);
#pragma unroll
        for (int k = 0; k < V; ++k) out[k] = up(pack.at[k]);
        return;
    }
    int live = live_of(at, width);
#pragma unroll
    for (int k = 0; k < V; ++k) out[k] = k < live ? Acc(up(x[at + k])) : dead;
}

__device__ __forceinline__ void write(X* y, i64 at, i64 width, int packed, const Acc (&value)[V]) {
    Pack<X> pack;
#pragma unroll
    for (int k = 0; k < V; ++k) put(pack.at[k], value[k]);
    if (packed) {
        if (at < width) store_whole(y + at, pack);
        return;
    }
    int live = live_of(at, width);
#pragma unroll
    for (int k = 0; k < V; ++k) if (k < live) y[at + k] = pack.at[k];
}

// For every pack of this thread: `at` is its place in the row. FIRST reads a row's packs into registers, or not yet;
// TAKE gives a pack from there, or reads it now. Packs behind the end of the row are `dead` as well.
#if HOLD > 0
#define ROOM(held) Acc held[HOLD][V]
#define FOR_PACKS(at) \
    _Pragma("unroll") for (int h = 0; h < HOLD; ++h) \
        if ([[maybe_unused]] i64 at = ((i64)threadIdx.x + (i64)h * blockDim.x) * V; true)
#define FIRST(held, x, dead) read_row(x, width, packed, dead, held)
#define TAKE(pack, held, x, at, dead) Acc (&pack)[V] = held[h]

// All loads are on their way before the first is waited for.
__device__ __forceinline__ void read_row(const X* x, i64 width, int packed, Acc dead, Acc (&held)[HOLD][V]) {
    if (packed) {
        Pack<X> raw[HOLD];
        FOR_PACKS(at) if (at < width) raw[h] = load16(x + at);
        FOR_PACKS(at) {
#pragma unroll
            for (int k = 0; k < V; ++k) held[h][k] = at < width ? Acc(up(raw[h].at[k])) : dead;
        }
    } else {
        FOR_PACKS(at) read(x, at, width, 0, dead, held[h]);
    }
}
#else
#define ROOM(held)
#define FOR_PACKS(at) for (i64 at = (i64)threadIdx.x * V; at < width; at += (i64)blockDim.x * V)
#define FIRST(held, x, dead)
#define TAKE(pack, held, x, at, dead) Acc pack[V]; read(x, at, width, packed, dead, pack)
#endif

#if GRAD == 0
extern "C" __global__ void __launch_bounds__(256)
softmax(const X* x, X* y, i64 rows, i64 width, int packed) {
    __shared__ Acc slots[8];
    i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    // A row is a whole warp's or a whole block's, so a return leaves no thread waiting.
    if (row >= rows) return;
    x += row * width;
    y += row * width;
    const Acc dead = lowest(Acc(0));
    ROOM(held);
    FIRST(held, x, dead);
    Acc peak = dead;
    FOR_PACKS(at) {
        TAKE(pack, held, x, at, dead);
#pragma unroll
        for (int k = 0; k < V; ++k) peak = larger(peak, pack[k]);
    }
    peak = row_join<Largest>(peak, slots);
    if (peak == dead || peak == -dead) peak = Acc(0);
    const Acc base = Power<X>::scaled(peak);
    Acc sum = Acc(0);
    FOR_PACKS(at) {
        TAKE(pack, held, x, at, dead);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            Acc power = Power<X>::of(pack[k], base);
            sum += power;
            // What is kept need not be computed again.
            if (HOLD > 0 && !LOG) pack[k] = power;
        }
    }
    sum = row_join<Total>(sum, slots);
    const Acc shift = LOG ? peak + m_log(sum) : Acc(1) / sum;
    FOR_PACKS(at) {
        TAKE(pack, held, x, at, dead);
        Acc out[V];
#pragma unroll
        for (int k = 0; k < V; ++k) {
            if (LOG) out[k] = pack[k] - shift;
            else out[k] = (HOLD > 0 ? pack[k] : Power<X>::of(pack[k], base)) * shift;
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
    FIRST(held, y, Acc(0));
    FIRST(grad, dy, Acc(0));
    Acc sum = Acc(0);
    FOR_PACKS(at) {
        TAKE(value, held, y, at, Acc(0));
        TAKE(slope, grad, dy, at, Acc(0));
#pragma unroll
        for (int k = 0; k < V; ++k) sum += LOG ? slope[k] : slope[k] * value[k];
    }
    sum = row_join<Total>(sum, slots);
    FOR_PACKS(at) {
        TAKE(value, held, y, at, Acc(0));
        TAKE(slope, grad, dy, at, Acc(0));
        Acc out[V];
#pragma unroll
        for (int k = 0; k < V; ++k) {
            if (LOG) out[k] = slope[k] - Power<X>::of(value[k], Power<X>::scaled(Acc(0))) * sum;
            else out[k] = value[k] * (slope[k] - sum);
        }
        write(dx, at, width, packed, out);
    }
}
#endif
