// What attention on tensor cores needs of numbers, for bf16 and f16: T is the type. Scores are in units of ln 2.

typedef TYPE T;
const float LOG2E = 1.4426950408889634f;
const float LN2 = 0.6931471805599453f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float exp2_of(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 pair(bf16, float lo, float hi) { return bf16_pair(lo, hi); }
__device__ __forceinline__ u32 pair(f16, float lo, float hi) { return f16_pair(lo, hi); }
__device__ __forceinline__ u32 pair_of(float lo, float hi) { return pair(T(), lo, hi); }
__device__ __forceinline__ i64 least(i64 a, i64 b) { return a < b ? a : b; }

