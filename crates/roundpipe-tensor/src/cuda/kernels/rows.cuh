// What the kernels over rows (norms, rotary embedding, gated units, cross entropy) share; follows common.cuh.

// N neighbours at once; their address is a multiple of their size.
template <typename V, int N> struct alignas(sizeof(V) * N) Few { V at[N]; };
template <int N, typename V> __device__ __forceinline__ Few<V, N> load_few(const V* p) {
    return *reinterpret_cast<const Few<V, N>*>(p);
}
// To global memory. 16 bytes in so many words: the compiler cuts some such stores into eight.
template <int N, typename V> __device__ __forceinline__ void store_few(V* p, const Few<V, N>& x) {
    if constexpr (sizeof(V) * N == 16) {
        uint4 w = *reinterpret_cast<const uint4*>(&x);
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(p), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
    } else {
        *reinterpret_cast<Few<V, N>*>(p) = x;
    }
}

__device__ __forceinline__ float root_of(float x) { return sqrtf(x); }
__device__ __forceinline__ double root_of(double x) { return sqrt(x); }
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }

// e^x to the accuracy that values of type V deserve: two instructions for 16-bit values (relative error below
// 1e-6 while |x| < 10), the library's otherwise. Right at the ends: e^-inf = 0, e^inf = inf, NaN stays.
template <typename V> struct Exp { static __device__ __forceinline__ float of(float x) {
    float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f)); return y;
} };
template <> struct Exp<float> { static __device__ __forceinline__ float of(float x) { return expf(x); } };
template <> struct Exp<double> { static __device__ __forceinline__ double of(double x) { return exp(x); } };

// 1 / x in the same manner; 0 for huge x.
template <typename V> struct Recip { static __device__ __forceinline__ float of(float x) { return __fdividef(1.0f, x); } };
template <> struct Recip<float> { static __device__ __forceinline__ float of(float x) { return 1.0f / x; } };
template <> struct Recip<double> { static __device__ __forceinline__ double of(double x) { return 1.0 / x; } };

// The sum over the threads of one row, in a fixed order; each gets it. Blocks are [threads of a row, rows]: one
// thread or one warp per row, or (one row per block) several warps. Only the last synchronises the block.
template <typename B> __device__ __forceinline__ B row_sum(B x, B* slots) {
    if (blockDim.x == 1) return x;
    if (blockDim.x == 32) return warp_sum(x);
    return block_sum(x, slots);
}
