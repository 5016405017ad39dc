// y[line] = index along one dimension of the first largest (smallest) value, or of the first NaN.
//
// blockDim.x (1, 32, 256 or 1024) threads search one line, blockDim.y lines a block. "Comes first" is a total order of values
// and their places, so any order of joining gives the same answer. X_T is x's type, LARGEST is 1 or 0.

typedef X_T X;
typedef StageOf<X>::type S;

__device__ __forceinline__ bool beats(S a, i64 i, S b, i64 j) {
    bool nan_a = a != a, nan_b = b != b;
    if (nan_a != nan_b) return nan_a;
    if (nan_a || a == b) return i < j;
    return LARGEST ? a > b : a < b;
}

// `lines` holds x's address and every dimension but the searched one, which has `size` elements `stride` apart.
extern "C" __global__ void __launch_bounds__(1024)
arg_line(const __grid_constant__ View lines, i64* y, i64 count, i64 size, i64 stride) {
    __shared__ S values[32];
    __shared__ i64 places[32];
    i64 line = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    S best = S(0);
    i64 place = 0;
    if (line < count) {
        const X* x = (const X*)lines.ptr + offset_of(lines, line);
        // A thread beyond the end starts from the last element: seen twice, counted once.
        place = threadIdx.x < size ? threadIdx.x : size - 1;
        best = rise(x[place * stride]);
#pragma unroll 4
        for (i64 i = place + blockDim.x; i < size; i += blockDim.x) {
            S value = rise(x[i * stride]);
            if (beats(value, i, best, place)) { best = value; place = i; }
        }
    }
    if (blockDim.x > 1) {
        for (int step = 16; step > 0; step >>= 1) {
            S value = __shfl_down_sync(0xffffffffu, best, step);
            i64 other = __shfl_down_sync(0xffffffffu, place, step);
            if (beats(value, other, best, place)) { best = value; place = other; }
        }
    }
    if (blockDim.x > 32) {
        if ((threadIdx.x & 31) == 0) { values[threadIdx.x >> 5] = best; places[threadIdx.x >> 5] = place; }
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int warp = 1; warp < (int)(blockDim.x >> 5); ++warp) {
                if (beats(values[warp], places[warp], best, place)) { best = values[warp]; place = places[warp]; }
            }
        }
    }
    if (threadIdx.x == 0 && line < count) y[line] = place;
}
