// values, places [rows, k] = the k largest (smallest) of each row of x [rows, width] in order; equal values in order of
// their place, NaN counts as largest.
//
// "Comes before" is a total order, so both ways give one answer:
// topk_pick: blockDim.x (32 or 256) threads take a row, blockDim.y rows a block; k times they search for the first element
//       that comes after the last one found. For small k.
// topk_rank: a thread takes one element and counts those that come before it: that is its place in the result. A block
//       takes 256 elements of one row and looks at the row in pieces of 256 through shared memory.
//
// X_T is x's type, LARGEST is 1 or 0.

typedef X_T X;
typedef StageOf<X>::type S;

__device__ __forceinline__ bool before(S a, i64 i, S b, i64 j) {
    bool nan_a = a != a, nan_b = b != b;
    if (nan_a != nan_b) return LARGEST ? nan_a : nan_b;
    if (nan_a || a == b) return i < j;
    return LARGEST ? a > b : a < b;
}

// The earlier of two candidates; a place of -1 is none.
__device__ __forceinline__ void earlier(S& best, i64& place, S value, i64 other) {
    if (other >= 0 && (place < 0 || before(value, other, best, place))) { best = value; place = other; }
}

extern "C" __global__ void __launch_bounds__(256)
topk_pick(const X* x, X* values, i64* places, i64 rows, i64 width, i64 k) {
    __shared__ S best_of[8];
    __shared__ i64 place_of[8];
    i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    // A row is a whole warp's or a whole block's, so a return leaves no thread waiting.
    if (row >= rows) return;
    x += row * width;
    S last = S(0);
    i64 last_place = -1;
    for (i64 n = 0; n < k; ++n) {
        S best = S(0);
        i64 place = -1;
#pragma unroll 4
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            S value = rise(x[i]);
            if (last_place < 0 || before(last, last_place, value, i)) earlier(best, place, value, i);
        }
        for (int step = 16; step > 0; step >>= 1) {
            S value = __shfl_xor_sync(0xffffffffu, best, step);
            i64 other = __shfl_xor_sync(0xffffffffu, place, step);
            earlier(best, place, value, other);
        }
        if (blockDim.x > 32) {
            if ((threadIdx.x & 31) == 0) { best_of[threadIdx.x >> 5] = best; place_of[threadIdx.x >> 5] = place; }
            __syncthreads();
            for (int warp = 0; warp < (int)(blockDim.x >> 5); ++warp) earlier(best, place, best_of[warp], place_of[warp]);
            __syncthreads();
        }
        last = best;
        last_place = place;
        if (threadIdx.x == 0) {
            values[row * k + n] = x[place];
            places[row * k + n] = place;
        }
    }
}

// blockIdx.x counts pieces of 256 elements, row after row.
extern "C" __global__ void __launch_bounds__(256)
topk_rank(const X* x, X* values, i64* places, i64 width, i64 k) {
    __shared__ S piece[256];
    i64 pieces = (width + 255) / 256;
    i64 row = blockIdx.x / pieces, own = (blockIdx.x - row * pieces) * 256 + threadIdx.x;
    x += row * width;
    S mine = own < width ? rise(x[own]) : S(0);
    i64 place = 0;
    for (i64 start = 0; start < width; start += 256) {
        i64 i = start + threadIdx.x;
        __syncthreads();
        if (i < width) piece[threadIdx.x] = rise(x[i]);
        __syncthreads();
        int many = width - start < 256 ? (int)(width - start) : 256;
#pragma unroll 8
        for (int j = 0; j < many; ++j) place += before(piece[j], start + j, mine, own);
    }
    if (own < width && place < k) {
        values[row * k + place] = x[own];
        places[row * k + place] = own;
    }
}
