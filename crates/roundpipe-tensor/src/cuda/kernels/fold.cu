// y[k] = join over i of x[k, i]: Sum, Mean, Max, Min, Prod, Any, All over any set of dimensions.
//
// Dimensions come sorted into kept ones (`keep`, with x's address) and folded ones (`fold`); both count row-major.
// Folded elements are cut into blockIdx.y = 0.. parts of `each`; with more than one part, y is scratch memory
// [parts, results] in the stage, and a second launch of `fold_rows` folds that. Cuts and orders depend on sizes and strides
// alone, never on addresses.
//
// fold_rows: blockDim.x (1, 32 or 256) threads fold one result, blockDim.y results a block. A thread takes every
//       blockDim.x-th pack of V elements, then the threads join in a fixed tree.
// fold_columns: neighbouring results lie side by side in x. A thread folds V of them over every blockDim.y-th element,
//       then the blockDim.y partial results join in order.
//
// X_T is x's type, Y_T is y's (x's, or the stage), OP one of those below, WIDTH is V, COLUMNS is 1 for the second.

#define SUM 0
#define PROD 1
#define MAX 2
#define MIN 3
#define ANY 4
#define ALL 5

#define V WIDTH
typedef X_T X;
typedef Y_T Y;
typedef StageOf<X>::type S;

__device__ __forceinline__ float lowest(float) { return __int_as_float(0xff800000); }
__device__ __forceinline__ double lowest(double) { return __longlong_as_double((i64)0xfff0000000000000ull); }
__device__ __forceinline__ i64 lowest(i64) { return (i64)0x8000000000000000ull; }
__device__ __forceinline__ float highest(float) { return __int_as_float(0x7f800000); }
__device__ __forceinline__ double highest(double) { return __longlong_as_double(0x7ff0000000000000ll); }
__device__ __forceinline__ i64 highest(i64) { return 0x7fffffffffffffffll; }

// The result of no elements; truth values are 0 and 1.
__device__ __forceinline__ S nothing() {
#if OP == SUM || OP == ANY
    return S(0);
#elif OP == PROD || OP == ALL
    return S(1);
#elif OP == MAX
    return lowest(S(0));
#else
    return highest(S(0));
#endif
}

// NaN wins over numbers.
__device__ __forceinline__ S join(S a, S b) {
#if OP == SUM
    return plus(a, b);
#elif OP == PROD
    return times(a, b);
#elif OP == MAX || OP == ANY
    return a > b || a != a ? a : b;
#else
    return a < b || a != a ? a : b;
#endif
}

__device__ __forceinline__ float over(float x, i64 count) { return x / (float)count; }
__device__ __forceinline__ double over(double x, i64 count) { return x / (double)count; }
__device__ __forceinline__ i64 over(i64 x, i64 count) { return count == 0 ? 0 : x / count; }

// Mean and accumulation belong to the last launch; `mean` is 1 for a mean over `count`.
__device__ __forceinline__ void finish(Y* y, i64 at, S value, int mean, i64 count, int accumulate) {
    if (mean) value = over(value, count);
    if (accumulate) value = plus(value, rise(y[at]));
    lower(y[at], value);
}

// Where the folded element `i` lies, relative to its result.
__device__ __forceinline__ i64 step_to(const View& fold, i64 i, i64 folded) {
    if (folded > 0x7fffffffll) return offset_of(fold, i);
    i64 at = 0;
    u32 rest = (u32)i;
#pragma unroll 1
    for (int d = (int)fold.rank - 1; d >= 0; --d) {
        u32 n = (u32)fold.dim[d], q = rest / n;
        at += (i64)(rest - q * n) * fold.stride[d];
        rest = q;
    }
    return at;
}

// The join of a pack's elements, in a tree.
__device__ __forceinline__ S fold_tree(S (&value)[V]) {
#pragma unroll
    for (int n = V / 2; n > 0; n /= 2) {
#pragma unroll
        for (int k = 0; k < n; ++k) value[k] = join(value[k], value[k + n]);
    }
    return value[0];
}

#if WIDTH > 1
__device__ __forceinline__ S fold_whole(const Pack<X>& pack) {
    S value[V];
#pragma unroll
    for (int k = 0; k < V; ++k) value[k] = rise(pack.at[k]);
    return fold_tree(value);
}
#endif

// A pack of V elements from folded element i on, of which `live` count. With V > 1 a pack lies side by side, and
// `packed` says that it lies at a multiple of 16 bytes.
__device__ __forceinline__ S fold_pack(const X* x, int live, int packed) {
    if (V == 1) return rise(*x);
    S value[V];
    if (packed && live == V) {
        Pack<X> pack = load16(x);
#pragma unroll
        for (int k = 0; k < V; ++k) value[k] = rise(pack.at[k]);
    } else {
#pragma unroll
        for (int k = 0; k < V; ++k) value[k] = k < live ? rise(x[k]) : nothing();
    }
    return fold_tree(value);
}

#if COLUMNS == 0
extern "C" __global__ void __launch_bounds__(256)
fold_rows(const __grid_constant__ View keep, const __grid_constant__ View fold, Y* y, i64 results, i64 folded, i64 each,
     int packed, int mean, i64 count, int accumulate) {
    __shared__ S slots[8];
    i64 result = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    // Blocks of several results have threads without one at the end; they stay for the joining.
    i64 begin = (i64)blockIdx.y * each;
    i64 end = begin + each < folded ? begin + each : folded;
    S value = nothing();
    if (result < results) {
        const X* x = (const X*)keep.ptr + offset_of(keep, result);
        i64 first = begin + (i64)threadIdx.x * V, stride = (i64)blockDim.x * V;
        if (fold.rank <= 1) {
            i64 i = first;
#if WIDTH > 1
            // Four packs on their way at a time; folded in the order of the loop below.
            for (; packed && i + 3 * stride + V <= end; i += 4 * stride) {
                Pack<X> four[4];
#pragma unroll
                for (int u = 0; u < 4; ++u) four[u] = load16(x + i + u * stride);
#pragma unroll
                for (int u = 0; u < 4; ++u) value = join(value, fold_whole(four[u]));
            }
#endif
            for (; i < end; i += stride) {
                int live = end - i < V ? (int)(end - i) : V;
                value = join(value, fold_pack(x + i * fold.stride[0], live, packed));
            }
        } else {
            for (i64 i = first; i < end; i += stride) {
                int live = end - i < V ? (int)(end - i) : V;
                value = join(value, fold_pack(x + step_to(fold, i, folded), live, packed));
            }
        }
    }
    if (blockDim.x > 1) {
        for (int step = 16; step > 0; step >>= 1) value = join(value, __shfl_down_sync(0xffffffffu, value, step));
    }
    if (blockDim.x > 32) {
        if ((threadIdx.x & 31) == 0) slots[threadIdx.x >> 5] = value;
        __syncthreads();
        value = slots[0];
        for (int warp = 1; warp < (int)(blockDim.x >> 5); ++warp) value = join(value, slots[warp]);
    }
    if (threadIdx.x == 0 && result < results) {
        finish(y, (i64)blockIdx.y * results + result, value, mean, count, accumulate);
    }
}

#else
// The last dimension of `keep` has `width` results side by side; blockIdx.x counts tiles of blockDim.x * V of them,
// then the outer kept dimensions, which are what `keep` holds.
extern "C" __global__ void __launch_bounds__(256)
fold_columns(const __grid_constant__ View keep, const __grid_constant__ View fold, Y* y, i64 results, i64 width, i64 folded,
        i64 each, int packed, int mean, i64 count, int accumulate) {
    __shared__ S slots[256 * V];
    int bx = blockDim.x, by = blockDim.y, tx = threadIdx.x, ty = threadIdx.y;
    i64 tiles = (width + (i64)bx * V - 1) / ((i64)bx * V);
    i64 outer = blockIdx.x / tiles;
    i64 column = ((i64)blockIdx.x - outer * tiles) * bx * V + (i64)tx * V;
    int live = column >= width ? 0 : width - column < V ? (int)(width - column) : V;
    i64 begin = (i64)blockIdx.y * each;
    i64 end = begin + each < folded ? begin + each : folded;
    S value[V];
#pragma unroll
    for (int k = 0; k < V; ++k) value[k] = nothing();
    if (live > 0) {
        const X* x = (const X*)keep.ptr + offset_of(keep, outer) + column;
        if (packed && live == V && fold.rank <= 1) {
#pragma unroll 4
            for (i64 i = begin + ty; i < end; i += by) {
                Pack<X> pack = load16(x + i * fold.stride[0]);
#pragma unroll
                for (int k = 0; k < V; ++k) value[k] = join(value[k], rise(pack.at[k]));
            }
        } else if (packed && live == V) {
            for (i64 i = begin + ty; i < end; i += by) {
                Pack<X> pack = load16(x + step_to(fold, i, folded));
#pragma unroll
                for (int k = 0; k < V; ++k) value[k] = join(value[k], rise(pack.at[k]));
            }
        } else {
            for (i64 i = begin + ty; i < end; i += by) {
                const X* from = x + step_to(fold, i, folded);
#pragma unroll
                for (int k = 0; k < V; ++k) if (k < live) value[k] = join(value[k], rise(from[k]));
            }
        }
    }
    if (by > 1) {
        // Side by side by thread, so that banks do not meet.
#pragma unroll
        for (int k = 0; k < V; ++k) slots[k * 256 + ty * bx + tx] = value[k];
        __syncthreads();
        if (ty > 0) return;
        for (int t = 1; t < by; ++t) {
#pragma unroll
            for (int k = 0; k < V; ++k) value[k] = join(value[k], slots[k * 256 + t * bx + tx]);
        }
    }
    i64 at = (i64)blockIdx.y * results + outer * width + column;
#pragma unroll
    for (int k = 0; k < V; ++k) if (k < live) finish(y, at + k, value[k], mean, count, accumulate);
}
#endif
