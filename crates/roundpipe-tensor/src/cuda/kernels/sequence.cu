// arange: y[i] = start + i step, computed in double.
// random: y[i] drawn from word i of the stream (key, high); normal: elements 2j and 2j + 1 from words 2j and 2j + 1.
//
// Element i depends on i and the key alone. Sequences: a thread writes the four elements of one counter block, at once
// where y allows it (`packed`). Y_T is y's type, DIST one of the three below.

#define UNIFORM 0
#define NORMAL 1
#define BERNOULLI 2

typedef Y_T Y;
typedef StageOf<Y>::type S;

struct __align__(16) Four { Y at[4]; };

__device__ __forceinline__ void store4(Y* y, i64 first, i64 count, int packed, const Four& four) {
    if (packed && first + 4 <= count) {
        const int bytes = 4 * (int)sizeof(Y);
        if (bytes >= 16) {
#pragma unroll
            for (int k = 0; k < (bytes + 15) / 16; ++k) ((uint4*)(y + first))[k] = ((const uint4*)&four)[k];
        } else if (bytes == 8) {
            *(uint2*)(y + first) = *(const uint2*)&four;
        } else {
            *(u32*)(y + first) = *(const u32*)&four;
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) if (first + k < count) y[first + k] = four.at[k];
}

extern "C" __global__ void __launch_bounds__(256) fill_arange(Y* y, i64 count, int packed, double start, double step) {
    i64 first = ((i64)blockIdx.x * 256 + threadIdx.x) * 4;
    if (first >= count) return;
    Four four;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        lower(four.at[k], To<S>::from(plus(start, times((double)(first + k), step))));
    }
    store4(y, first, count, packed, four);
}

#ifdef DIST
// Two standard normal values from two words: Box-Muller in double, rounded once to float.
__device__ __forceinline__ void normal_pair(u32 a, u32 b, float& even, float& odd) {
    double radius = sqrt(-2.0 * log(((double)a + 1.0) / 4294967297.0));
    double sine, cosine;
    sincos((double)b * (6.28318530717958647693 / 4294967296.0), &sine, &cosine);
    even = (float)times(radius, cosine);
    odd = (float)times(radius, sine);
}

// Uniform: p = low, q = high - low, top = the largest value below high. Normal: p = mean, q = deviation.
// Bernoulli: words below `limit` give 1.
extern "C" __global__ void __launch_bounds__(256)
fill_random(Y* y, i64 count, int packed, double p, double q, double top, u64 limit, u64 key, u64 high) {
    i64 block = (i64)blockIdx.x * 256 + threadIdx.x;
    i64 first = block * 4;
    if (first >= count) return;
    uint4 four = philox((u64)block, key, high);
    u32 words[4] = { four.x, four.y, four.z, four.w };
    Four out;
#if DIST == UNIFORM
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        double value = plus(p, times((double)unit(words[k]), q));
        lower(out.at[k], To<S>::from(value < top ? value : top));
    }
#elif DIST == NORMAL
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
        float even, odd;
        normal_pair(words[k], words[k + 1], even, odd);
        lower(out.at[k], To<S>::from(plus(p, times(q, (double)even))));
        lower(out.at[k + 1], To<S>::from(plus(p, times(q, (double)odd))));
    }
#else
#pragma unroll
    for (int k = 0; k < 4; ++k) lower(out.at[k], To<S>::from((i64)((u64)words[k] < limit)));
#endif
    store4(y, first, count, packed, out);
}
#endif
