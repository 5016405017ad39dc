// What all kernels share: number types without any header, views, order-preserving sums, random words.
// A kernel file is compiled with this text in front and its types given as macros.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;
typedef unsigned char u8;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };
// true is 1, false is 0; anything else reads as true.
struct bool8 { u8 bits; };

__device__ __forceinline__ float up(float x) { return x; }
__device__ __forceinline__ double up(double x) { return x; }
__device__ __forceinline__ float up(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float up(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }

// Rounds to nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ u16 bf16_bits(float x) { u16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
__device__ __forceinline__ u16 f16_bits(float x) { u16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
// Two floats into two bf16 (f16): the first in the low half.
__device__ __forceinline__ u32 bf16_pair(float lo, float hi) { u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo)); return y; }
__device__ __forceinline__ u32 f16_pair(float lo, float hi) { u32 y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo)); return y; }

__device__ __forceinline__ void put(float& y, float x) { y = x; }
__device__ __forceinline__ void put(float& y, double x) { y = (float)x; }
__device__ __forceinline__ void put(double& y, float x) { y = x; }
__device__ __forceinline__ void put(double& y, double x) { y = x; }
__device__ __forceinline__ void put(bf16& y, float x) { y.bits = bf16_bits(x); }
__device__ __forceinline__ void put(f16& y, float x) { y.bits = f16_bits(x); }
__device__ __forceinline__ void put(bf16& y, double x) { y.bits = bf16_bits((float)x); }
__device__ __forceinline__ void put(f16& y, double x) { y.bits = f16_bits((float)x); }

// The accumulator of a type.
template <typename T> struct AccOf { typedef float type; };
template <> struct AccOf<double> { typedef double type; };

// A strided piece of memory: as `Args::view` writes it.
struct View {
    char* ptr;
    i64 rank;
    i64 dim[8];
    i64 stride[8];
};

// Where element `i` (row-major index over the view's shape) lies, in elements.
__device__ __forceinline__ i64 offset_of(const View& v, i64 i) {
    i64 at = 0;
#pragma unroll 1
    for (int d = (int)v.rank - 1; d >= 0; --d) {
        i64 n = v.dim[d];
        i64 q = i / n;
        at += (i - q * n) * v.stride[d];
        i = q;
    }
    return at;
}

// Reports an index out of range: the first wins. `alarm` is eight words of host memory.
__device__ __noinline__ void raise_alarm(u32* alarm, u32 code, i64 index, i64 place, i64 bound) {
    if (atomicCAS_system(alarm + 7, 0u, 1u) != 0u) return;
    volatile u32* w = alarm;
    w[1] = (u32)index; w[2] = (u32)((u64)index >> 32);
    w[3] = (u32)place; w[4] = (u32)((u64)place >> 32);
    w[5] = (u32)bound; w[6] = (u32)((u64)bound >> 32);
    __threadfence_system();
    w[0] = code;
}

// An index in range, or 0 with an alarm.
__device__ __forceinline__ i64 checked(i64 index, i64 place, i64 bound, u32* alarm, u32 code) {
    if ((u64)index < (u64)bound) return index;
    raise_alarm(alarm, code, index, place, bound);
    return 0;
}

// Index `at` of a dense list of i64 (kind 0), i32 (1) or u32 (2).
__device__ __forceinline__ i64 index_at(const char* list, i64 at, int kind) {
    if (kind == 0) return reinterpret_cast<const i64*>(list)[at];
    if (kind == 1) return reinterpret_cast<const int*>(list)[at];
    return reinterpret_cast<const u32*>(list)[at];
}

// Sums and maxima over the 32 lanes of a warp in a fixed order; every lane gets the result.
template <typename A> __device__ __forceinline__ A warp_sum(A x) {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
template <typename A> __device__ __forceinline__ A warp_max(A x) {
    for (int step = 16; step > 0; step >>= 1) { A y = __shfl_xor_sync(0xffffffffu, x, step); x = x > y ? x : y; }
    return x;
}

// The sum over a block of up to 1024 threads (a multiple of 32), in a fixed order; every thread gets it.
// `slots` is shared memory for 32 values; it may be used again after the call.
template <typename A> __device__ __forceinline__ A block_sum(A x, A* slots) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
    x = warp_sum(x);
    if (lane == 0) slots[warp] = x;
    __syncthreads();
    A total = lane < warps ? slots[lane] : A(0);
    total = warp_sum(total);
    __syncthreads();
    return total;
}
template <typename A> __device__ __forceinline__ A block_max(A x, A* slots) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
    x = warp_max(x);
    if (lane == 0) slots[warp] = x;
    __syncthreads();
    A top = slots[lane < warps ? lane : 0];
    top = warp_max(top);
    __syncthreads();
    return top;
}

// Philox 4x32-10: the four words of counter block `block` of a stream (key, high).
__device__ __forceinline__ uint4 philox(u64 block, u64 key, u64 high) {
    u32 c0 = (u32)block, c1 = (u32)(block >> 32), c2 = (u32)high, c3 = (u32)(high >> 32);
    u32 k0 = (u32)key, k1 = (u32)(key >> 32);
    for (int round = 0; round < 10; ++round) {
        if (round > 0) { k0 += 0x9E3779B9u; k1 += 0xBB67AE85u; }
        u64 p0 = (u64)c0 * 0xD2511F53u, p1 = (u64)c2 * 0xCD9E8D57u;
        u32 n0 = (u32)(p1 >> 32) ^ c1 ^ k0, n2 = (u32)(p0 >> 32) ^ c3 ^ k1;
        c1 = (u32)p1; c3 = (u32)p0; c0 = n0; c2 = n2;
    }
    return make_uint4(c0, c1, c2, c3);
}
// M of them at once, which share the keys of every round.
template <int M> __device__ __forceinline__ void philox_many(const u64 (&block)[M], u64 key, u64 high, u32 (&out)[M][4]) {
    u32 k0 = (u32)key, k1 = (u32)(key >> 32);
#pragma unroll
    for (int m = 0; m < M; ++m) {
        out[m][0] = (u32)block[m]; out[m][1] = (u32)(block[m] >> 32);
        out[m][2] = (u32)high; out[m][3] = (u32)(high >> 32);
    }
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        if (round > 0) { k0 += 0x9E3779B9u; k1 += 0xBB67AE85u; }
#pragma unroll
        for (int m = 0; m < M; ++m) {
            u64 p0 = (u64)out[m][0] * 0xD2511F53u, p1 = (u64)out[m][2] * 0xCD9E8D57u;
            u32 n0 = (u32)(p1 >> 32) ^ out[m][1] ^ k0, n2 = (u32)(p0 >> 32) ^ out[m][3] ^ k1;
            out[m][1] = (u32)p1; out[m][3] = (u32)p0; out[m][0] = n0; out[m][2] = n2;
        }
    }
}
__device__ __forceinline__ u32 random_word(u64 i, u64 key, u64 high) {
    uint4 w = philox(i / 4, key, high);
    u32 all[4] = { w.x, w.y, w.z, w.w };
    return all[i % 4];
}
// Uniform in [0, 1) with 24 random bits.
__device__ __forceinline__ float unit(u32 word) { return (float)(word >> 8) * (1.0f / 16777216.0f); }

// 16 bytes of T at once.
template <typename T> struct __align__(16) Pack { static const int N = 16 / sizeof(T); T at[16 / sizeof(T)]; };
template <typename T> __device__ __forceinline__ Pack<T> load16(const T* p) {
    Pack<T> x; *reinterpret_cast<uint4*>(&x) = *reinterpret_cast<const uint4*>(p); return x;
}
template <typename T> __device__ __forceinline__ void store16(T* p, const Pack<T>& x) {
    *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(&x);
}

// To global memory, in so many words: the compiler cuts some stores of packs into four or eight.
template <typename T> __device__ __forceinline__ void store_whole(T* p, const Pack<T>& x) {
    uint4 w = *reinterpret_cast<const uint4*>(&x);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(p), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
}

// The type that elementwise arithmetic and folds of a type are done in: integers and truth values use i64.
template <typename T> struct StageOf { typedef i64 type; };
template <> struct StageOf<double> { typedef double type; };
template <> struct StageOf<float> { typedef float type; };
template <> struct StageOf<bf16> { typedef float type; };
template <> struct StageOf<f16> { typedef float type; };

// To the stage.
__device__ __forceinline__ double rise(double x) { return x; }
__device__ __forceinline__ float rise(float x) { return x; }
__device__ __forceinline__ float rise(bf16 x) { return up(x); }
__device__ __forceinline__ float rise(f16 x) { return up(x); }
__device__ __forceinline__ i64 rise(i64 x) { return x; }
__device__ __forceinline__ i64 rise(int x) { return x; }
__device__ __forceinline__ i64 rise(u32 x) { return x; }
__device__ __forceinline__ i64 rise(u8 x) { return x; }
__device__ __forceinline__ i64 rise(bool8 x) { return x.bits != 0; }

// From the stage: floats round to nearest, integers keep their low bits.
__device__ __forceinline__ void lower(double& y, double x) { y = x; }
__device__ __forceinline__ void lower(float& y, float x) { y = x; }
__device__ __forceinline__ void lower(bf16& y, float x) { put(y, x); }
__device__ __forceinline__ void lower(f16& y, float x) { put(y, x); }
__device__ __forceinline__ void lower(i64& y, i64 x) { y = x; }
__device__ __forceinline__ void lower(int& y, i64 x) { y = (int)x; }
__device__ __forceinline__ void lower(u32& y, i64 x) { y = (u32)x; }
__device__ __forceinline__ void lower(u8& y, i64 x) { y = (u8)x; }
__device__ __forceinline__ void lower(bool8& y, i64 x) { y.bits = x != 0; }

// Products and sums that are not contracted into one rounding: the same bits as on the host.
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double times(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ i64 times(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ i64 plus(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }

// Between stages. Floats become integers by truncation, saturating; NaN becomes 0.
template <typename S> struct To;
template <> struct To<float> {
    static __device__ __forceinline__ float from(float x) { return x; }
    static __device__ __forceinline__ float from(double x) { return (float)x; }
    static __device__ __forceinline__ float from(i64 x) { return __ll2float_rn(x); }
};
template <> struct To<double> {
    static __device__ __forceinline__ double from(float x) { return x; }
    static __device__ __forceinline__ double from(double x) { return x; }
    static __device__ __forceinline__ double from(i64 x) { return __ll2double_rn(x); }
};
template <> struct To<i64> {
    static __device__ __forceinline__ i64 from(float x) { return x != x ? 0 : __float2ll_rz(x); }
    static __device__ __forceinline__ i64 from(double x) { return x != x ? 0 : __double2ll_rz(x); }
    static __device__ __forceinline__ i64 from(i64 x) { return x; }
};
