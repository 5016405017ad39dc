// y[i] = f(a[i], b[i], c[i]) for every row-major index i; the operands share their sizes, not their strides.
//
// KIND says what f is (FILL, COPY, ...), FUNCTION names it where there are several, A_T, B_T, C_T, Y_T are the types
// of the operands, SOURCES says how many sources there are, WIDTH is V below, and FAST is 1 for 16-bit floats.
//
// The work is cut into packs of V neighbours along the innermost dimension; a thread takes U packs, 256 apart. With
// V > 1 the innermost strides are 0 or 1 (y: 1), every pack lies inside a row and at a multiple of its size; only
// where there is a single row may the last pack be shorter. With V = 1 strides are free. A pack's place costs one
// division per outer dimension, and none where a single dimension is left.

#define FILL 0
#define COPY 1
#define ACCUMULATE 2
#define UNARY 3
#define UNARY_GRAD 4
#define BINARY 5
#define COMPARE 6
#define SELECT 7
#define DROPOUT 8
#define SAME 9

#define V WIDTH
typedef A_T A;
typedef B_T B;
typedef C_T C;
typedef Y_T Y;

#define U (V == 1 ? 4 : 2)

// ---- functions of one value: x and the constants p and q ----

// 16-bit results need neither the last bits of exp nor those of a quotient.
__device__ __forceinline__ float m_exp(float x) { return FAST ? __expf(x) : expf(x); }
__device__ __forceinline__ float m_ratio(float a, float b) { return FAST ? __fdividef(a, b) : a / b; }
__device__ __forceinline__ float m_log(float x) { return logf(x); }
__device__ __forceinline__ float m_sqrt(float x) { return sqrtf(x); }
__device__ __forceinline__ float m_sin(float x) { return sinf(x); }
__device__ __forceinline__ float m_cos(float x) { return cosf(x); }
__device__ __forceinline__ float m_tanh(float x) { return tanhf(x); }
__device__ __forceinline__ float m_erf(float x) { return erff(x); }
__device__ __forceinline__ float m_erfc(float x) { return erfcf(x); }
__device__ __forceinline__ float m_expm1(float x) { return expm1f(x); }
__device__ __forceinline__ float m_log1p(float x) { return log1pf(x); }
__device__ __forceinline__ float m_pow(float x, float y) { return powf(x, y); }
__device__ __forceinline__ float m_abs(float x) { return fabsf(x); }
__device__ __forceinline__ float m_floor(float x) { return floorf(x); }
__device__ __forceinline__ float m_ceil(float x) { return ceilf(x); }
__device__ __forceinline__ float m_round(float x) { return rintf(x); }
__device__ __forceinline__ double m_exp(double x) { return exp(x); }
__device__ __forceinline__ double m_ratio(double a, double b) { return a / b; }
__device__ __forceinline__ double m_log(double x) { return log(x); }
__device__ __forceinline__ double m_sqrt(double x) { return sqrt(x); }
__device__ __forceinline__ double m_sin(double x) { return sin(x); }
__device__ __forceinline__ double m_cos(double x) { return cos(x); }
__device__ __forceinline__ double m_tanh(double x) { return tanh(x); }
__device__ __forceinline__ double m_erf(double x) { return erf(x); }
__device__ __forceinline__ double m_erfc(double x) { return erfc(x); }
__device__ __forceinline__ double m_expm1(double x) { return expm1(x); }
__device__ __forceinline__ double m_log1p(double x) { return log1p(x); }
__device__ __forceinline__ double m_pow(double x, double y) { return pow(x, y); }
__device__ __forceinline__ double m_abs(double x) { return fabs(x); }
__device__ __forceinline__ double m_floor(double x) { return floor(x); }
__device__ __forceinline__ double m_ceil(double x) { return ceil(x); }
__device__ __forceinline__ double m_round(double x) { return rint(x); }
__device__ __forceinline__ i64 m_abs(i64 x) { return x < 0 ? (i64)(0 - (u64)x) : x; }
__device__ __forceinline__ i64 m_floor(i64 x) { return x; }
__device__ __forceinline__ i64 m_ceil(i64 x) { return x; }
__device__ __forceinline__ i64 m_round(i64 x) { return x; }
__device__ __forceinline__ float m_neg(float x) { return -x; }
__device__ __forceinline__ double m_neg(double x) { return -x; }
__device__ __forceinline__ i64 m_neg(i64 x) { return (i64)(0 - (u64)x); }

#define HALF_ROOT 0.70710678118654752440
#define TWO_OVER_ROOT_PI 1.12837916709551257390
// The square root of 2 / pi.
#define GELU_ROOT (HALF_ROOT * TWO_OVER_ROOT_PI)

template <typename S> __device__ __forceinline__ S gelu_argument(S x) {
    return S(GELU_ROOT) * (x + S(0.044715) * x * x * x);
}

#define ONE(name, expression) \
    template <typename S> __device__ __forceinline__ S name(S x, S p, S q) { return expression; }

ONE(f_neg, m_neg(x))
ONE(f_abs, m_abs(x))
ONE(f_sign, x > S(0) ? S(1) : x < S(0) ? S(-1) : x)
ONE(f_exp, m_exp(x))
ONE(f_log, m_log(x))
ONE(f_sqrt, m_sqrt(x))
ONE(f_rsqrt, S(1) / m_sqrt(x))
ONE(f_recip, S(1) / x)
ONE(f_square, times(x, x))
ONE(f_sin, m_sin(x))
ONE(f_cos, m_cos(x))
ONE(f_tanh, m_tanh(x))
ONE(f_sigmoid, m_ratio(S(1), S(1) + m_exp(-x)))
ONE(f_erf, m_erf(x))
ONE(f_relu, x <= S(0) ? S(0) : x)
ONE(f_silu, m_ratio(x, S(1) + m_exp(-x)))
ONE(f_gelu, S(0.5) * x * m_erfc(-x * S(HALF_ROOT)))
// x (1 + tanh u) / 2 = x / (1 + e^-2u).
ONE(f_gelu_tanh, m_ratio(x, S(1) + m_exp(S(-2) * gelu_argument(x))))
ONE(f_softplus, (x > S(0) ? x : S(0)) + m_log1p(m_exp(-m_abs(x))))
ONE(f_leaky_relu, x > S(0) ? x : p * x)
ONE(f_elu, x > S(0) ? x : p * m_expm1(x))
ONE(f_floor, m_floor(x))
ONE(f_ceil, m_ceil(x))
ONE(f_round, m_round(x))
ONE(f_affine, plus(times(x, p), q))
ONE(f_powf, m_pow(x, p))
template <typename S> __device__ __forceinline__ S f_clamp(S x, S p, S q) {
    S y = x < p ? p : x;
    return y > q ? q : y;
}
ONE(f_not, S(x == S(0)))

ONE(d_neg, p)
ONE(d_abs, x > S(0) ? S(1) : x < S(0) ? S(-1) : S(0))
ONE(d_sign, S(0))
ONE(d_exp, m_exp(x))
ONE(d_log, S(1) / x)
ONE(d_sqrt, S(0.5) / m_sqrt(x))
ONE(d_rsqrt, S(-0.5) / (x * m_sqrt(x)))
ONE(d_recip, S(-1) / (x * x))
ONE(d_square, S(2) * x)
ONE(d_sin, m_cos(x))
ONE(d_cos, -m_sin(x))
// 1 - tanh^2 = 4e / (1 + e)^2 with e = e^-2|x|, which does not cancel.
template <typename S> __device__ __forceinline__ S d_tanh(S x, S p, S q) {
    S e = m_exp(S(-2) * m_abs(x));
    return m_ratio(S(4) * e, (S(1) + e) * (S(1) + e));
}
template <typename S> __device__ __forceinline__ S d_sigmoid(S x, S p, S q) {
    S e = m_exp(-m_abs(x));
    return m_ratio(e, (S(1) + e) * (S(1) + e));
}
ONE(d_erf, S(TWO_OVER_ROOT_PI) * m_exp(-x * x))
ONE(d_relu, x <= S(0) ? S(0) : S(1))
template <typename S> __device__ __forceinline__ S d_silu(S x, S p, S q) {
    S s = m_ratio(S(1), S(1) + m_exp(-x));
    return s * (S(1) + x * (S(1) - s));
}
template <typename S> __device__ __forceinline__ S d_gelu(S x, S p, S q) {
    S density = S(0.5 * HALF_ROOT * TWO_OVER_ROOT_PI) * m_exp(S(-0.5) * x * x);
    return S(0.5) * m_erfc(-x * S(HALF_ROOT)) + x * density;
}
// With s = 1 / (1 + e^-2u): s + x s (1 - s) 2u'.
template <typename S> __device__ __forceinline__ S d_gelu_tanh(S x, S p, S q) {
    S s = m_ratio(S(1), S(1) + m_exp(S(-2) * gelu_argument(x)));
    S slope = S(GELU_ROOT) * (S(1) + S(3 * 0.044715) * x * x);
    return s + x * s * (S(1) - s) * S(2) * slope;
}
ONE(d_softplus, m_ratio(S(1), S(1) + m_exp(-x)))
ONE(d_leaky_relu, x > S(0) ? S(1) : p)
ONE(d_elu, x > S(0) ? S(1) : p * m_exp(x))
ONE(d_floor, S(0))
ONE(d_ceil, S(0))
ONE(d_round, S(0))
ONE(d_affine, p)
ONE(d_powf, p == S(0) ? S(0) : p * m_pow(x, p - S(1)))
ONE(d_clamp, x >= p && x <= q ? S(1) : S(0))

// ---- functions of two values ----

__device__ __forceinline__ float m_div(float a, float b) { return a / b; }
__device__ __forceinline__ double m_div(double a, double b) { return a / b; }
// Truncates; dividing by 0 gives 0, and the one overflow wraps.
__device__ __forceinline__ i64 m_div(i64 a, i64 b) { return b == 0 ? 0 : b == -1 ? m_neg(a) : a / b; }
// Wrapping; negative powers round towards zero, those of 0 give 0.
__device__ __forceinline__ i64 m_pow(i64 a, i64 b) {
    if (a == 1) return 1;
    if (a == -1) return (b & 1) == 0 ? 1 : -1;
    if (b < 0) return 0;
    i64 out = 1;
    for (i64 base = a; b > 0; b >>= 1) {
        if (b & 1) out = times(out, base);
        base = times(base, base);
    }
    return out;
}

#define TWO(name, expression) \
    template <typename S> __device__ __forceinline__ S name(S a, S b) { return expression; }

TWO(b_add, plus(a, b))
TWO(b_sub, plus(a, m_neg(b)))
TWO(b_mul, times(a, b))
TWO(b_div, m_div(a, b))
TWO(b_pow, m_pow(a, b))
TWO(b_max, a > b || a != a ? a : b)
TWO(b_min, a < b || a != a ? a : b)
TWO(b_and, a & b)
TWO(b_or, a | b)
TWO(b_xor, a ^ b)

#define TEST(name, sign) \
    template <typename S> __device__ __forceinline__ bool name(S a, S b) { return a sign b; }

TEST(c_eq, ==)
TEST(c_ne, !=)
TEST(c_lt, <)
TEST(c_le, <=)
TEST(c_gt, >)
TEST(c_ge, >=)

// ---- conversions ----

__device__ __forceinline__ i64 held(i64 x, i64 low, i64 high) { return x < low ? low : x > high ? high : x; }

// Any type to any other: to bool is "not 0", floats saturate in the integer's range.
template <typename T> struct Cast {
    typedef typename StageOf<T>::type S;
    template <typename X> static __device__ __forceinline__ void to(T& y, X x) { lower(y, To<S>::from(rise(x))); }
};
template <> struct Cast<bool8> {
    template <typename X> static __device__ __forceinline__ void to(bool8& y, X x) { y.bits = rise(x) != 0; }
};
template <typename X> struct IsFloat { static const bool yes = false; };
template <> struct IsFloat<float> { static const bool yes = true; };
template <> struct IsFloat<double> { static const bool yes = true; };
#define SATURATING(T, low, high) \
    template <> struct Cast<T> { \
        template <typename X> static __device__ __forceinline__ void to(T& y, X x) { \
            auto value = rise(x); \
            i64 whole = To<i64>::from(value); \
            y = (T)(IsFloat<decltype(value)>::yes ? held(whole, low, high) : whole); \
        } \
    };
SATURATING(int, -2147483648ll, 2147483647ll)
SATURATING(u32, 0ll, 4294967295ll)
SATURATING(u8, 0ll, 255ll)

// ---- the walk ----

template <typename T> struct __align__(16) Vec { T at[V]; };

// V neighbours at once, or `live` of them.
template <typename T> __device__ __forceinline__ void load(Vec<T>& x, const View& v, i64 at, int live) {
    const T* from = (const T*)v.ptr + at;
    const int bytes = V * (int)sizeof(T);
    if (V == 1) {
        x.at[0] = *from;
    } else if (v.stride[v.rank - 1] == 0) {
        T one = *from;
#pragma unroll
        for (int k = 0; k < V; ++k) x.at[k] = one;
    } else if (live < V) {
#pragma unroll
        for (int k = 0; k < V; ++k) x.at[k] = from[k < live ? k : 0];
    } else if (bytes % 16 == 0) {
#pragma unroll
        for (int k = 0; k < bytes / 16; ++k) ((uint4*)&x)[k] = ((const uint4*)from)[k];
    } else if (bytes == 8) {
        *(uint2*)&x = *(const uint2*)from;
    } else {
        *(u32*)&x = *(const u32*)from;
    }
}
template <typename T> __device__ __forceinline__ void store(const Vec<T>& x, const View& v, i64 at, int live) {
    T* to = (T*)v.ptr + at;
    const int bytes = V * (int)sizeof(T);
    if (V == 1) {
        *to = x.at[0];
    } else if (live < V) {
#pragma unroll
        for (int k = 0; k < V; ++k) if (k < live) to[k] = x.at[k];
    } else if (bytes % 16 == 0) {
#pragma unroll
        for (int k = 0; k < bytes / 16; ++k) ((uint4*)to)[k] = ((const uint4*)&x)[k];
    } else if (bytes == 8) {
        *(uint2*)to = *(const uint2*)&x;
    } else {
        *(u32*)to = *(const u32*)&x;
    }
}

// All at once: two 16-bit floats are rounded by one instruction.
template <typename T, typename S> __device__ __forceinline__ void lower_all(Vec<T>& y, const S (&x)[V]) {
#pragma unroll
    for (int k = 0; k < V; ++k) lower(y.at[k], x[k]);
}
#if WIDTH > 1
__device__ __forceinline__ void lower_all(Vec<bf16>& y, const float (&x)[V]) {
#pragma unroll
    for (int k = 0; k < V; k += 2) ((u32*)&y)[k / 2] = bf16_pair(x[k], x[k + 1]);
}
__device__ __forceinline__ void lower_all(Vec<f16>& y, const float (&x)[V]) {
#pragma unroll
    for (int k = 0; k < V; k += 2) ((u32*)&y)[k / 2] = f16_pair(x[k], x[k + 1]);
}
#endif

struct Place { i64 a, b, c, y; };

// Where a pack starts in each operand; I is the narrowest type that counts the packs.
template <typename I>
__device__ __forceinline__ Place place_of(i64 pack, const View& a, const View& b, const View& c, const View& y) {
    int last = (int)y.rank - 1;
    I row = 0;
    i64 column = pack * V;
    if (last > 0) {
        I wide = (I)((y.dim[last] + V - 1) / V), p = (I)pack;
        row = p / wide;
        column = (i64)(p - row * wide) * V;
    }
    Place at = { column * a.stride[last], column * b.stride[last], column * c.stride[last], column * y.stride[last] };
#pragma unroll 1
    for (int d = last - 1; d >= 0; --d) {
        I n = (I)y.dim[d], rest = row / n;
        i64 i = (i64)(row - rest * n);
        row = rest;
        at.a += i * a.stride[d];
        at.b += i * b.stride[d];
        at.c += i * c.stride[d];
        at.y += i * y.stride[d];
    }
    return at;
}

// Every operand is given; those beyond SOURCES are not read. `p` and `q` are the function's constants, `word` the bits of a
// fill or the words that drop out, (key, high) the random stream.
extern "C" __global__ void __launch_bounds__(256)
map_elements(const __grid_constant__ View a, const __grid_constant__ View b, const __grid_constant__ View c,
    const __grid_constant__ View y, i64 count, double p, double q, u64 word, u64 key, u64 high) {
    i64 packs = y.rank == 1 ? (count + V - 1) / V : count / V;
    i64 first = (i64)blockIdx.x * (256 * U) + threadIdx.x;
    Place at[U];
    Vec<A> x0[U];
    Vec<B> x1[U];
    Vec<C> x2[U];
    int live[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
        i64 pack = first + u * 256;
        live[u] = 0;
        if (pack >= packs) continue;
        live[u] = count - pack * V < V ? (int)(count - pack * V) : V;
        at[u] = packs <= 0x7fffffffll ? place_of<u32>(pack, a, b, c, y) : place_of<u64>(pack, a, b, c, y);
        if (SOURCES > 0) load(x0[u], a, at[u].a, live[u]);
        if (SOURCES > 1) load(x1[u], b, at[u].b, live[u]);
        if (SOURCES > 2) load(x2[u], c, at[u].c, live[u]);
    }
#if KIND == DROPOUT
    // Element i has word i % 4 of block i / 4, whatever the cut.
    u32 words[U][V];
#if WIDTH == 1
#pragma unroll
    for (int u = 0; u < U; ++u) words[u][0] = random_word((u64)(first + u * 256), key, high);
#else
    const int M = U * V / 4;
    u64 blocks[M];
    u32 fours[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) blocks[m] = (u64)(first + m / (V / 4) * 256) * (V / 4) + m % (V / 4);
    philox_many<M>(blocks, key, high, fours);
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int k = 0; k < 4; ++k) words[m / (V / 4)][m % (V / 4) * 4 + k] = fours[m][k];
    }
#endif
    // All words are below 2^32.
    const bool some = word <= 0xffffffffull;
    const u32 least = (u32)word;
#endif
#pragma unroll
    for (int u = 0; u < U; ++u) {
        if (live[u] == 0) continue;
        Vec<Y> out;
#if KIND == DROPOUT
        typedef StageOf<Y>::type S;
        S all[V];
#endif
#pragma unroll
        for (int k = 0; k < V; ++k) {
#if KIND == FILL
            out.at[k] = (Y)word;
#elif KIND == SAME
            out.at[k] = x0[u].at[k];
#elif KIND == COPY
            Cast<Y>::to(out.at[k], x0[u].at[k]);
#elif KIND == ACCUMULATE
            // b is y itself, as it was.
            typedef STAGE_T S;
            S sum = plus(To<S>::from(rise(x1[u].at[k])), times(To<S>::from(p), To<S>::from(rise(x0[u].at[k]))));
            lower(out.at[k], To<StageOf<Y>::type>::from(sum));
#elif KIND == UNARY
            typedef StageOf<Y>::type S;
            lower(out.at[k], FUNCTION<S>(rise(x0[u].at[k]), To<S>::from(p), To<S>::from(q)));
#elif KIND == UNARY_GRAD
            typedef StageOf<Y>::type S;
            S slope = FUNCTION<S>(rise(x0[u].at[k]), To<S>::from(p), To<S>::from(q));
            lower(out.at[k], times(rise(x1[u].at[k]), slope));
#elif KIND == BINARY
            lower(out.at[k], FUNCTION<StageOf<Y>::type>(rise(x0[u].at[k]), rise(x1[u].at[k])));
#elif KIND == COMPARE
            out.at[k] = FUNCTION<StageOf<A>::type>(rise(x0[u].at[k]), rise(x1[u].at[k]));
#elif KIND == SELECT
            out.at[k] = x0[u].at[k] != 0 ? x1[u].at[k] : x2[u].at[k];
#elif KIND == DROPOUT
            S kept = times(rise(x0[u].at[k]), To<S>::from(p));
            all[k] = some && words[u][k] >= least ? kept : S(0);
#endif
        }
#if KIND == DROPOUT
        lower_all(out, all);
#endif
        store(out, y, at[u].y, live[u]);
    }
}
