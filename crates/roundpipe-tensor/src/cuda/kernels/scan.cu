// y[.., i, ..] = x[.., 0, ..] + ... + x[.., i, ..] along one dimension, or from the end with `reverse`.
//
// scan_one: a thread runs along a line; neighbouring threads take neighbouring lines.
// scan_many: a block of 256 threads runs along a line, 256 elements at a time: a scan in each warp, the warps' totals in
//       order, and what came before is added last.
//
// Sums are kept in the stage and rounded for each element. X_T is the operands' type.

typedef X_T X;
typedef StageOf<X>::type S;

// `x` and `y` hold addresses and every dimension but the summed one.
extern "C" __global__ void __launch_bounds__(256)
scan_one(const __grid_constant__ View x, const __grid_constant__ View y, i64 count, i64 size, i64 x_step, i64 y_step,
    int reverse) {
    i64 line = (i64)blockIdx.x * 256 + threadIdx.x;
    if (line >= count) return;
    const X* from = (const X*)x.ptr + offset_of(x, line);
    X* to = (X*)y.ptr + offset_of(y, line);
    S sum = S(0);
    for (i64 n = 0; n < size; ++n) {
        i64 i = reverse ? size - 1 - n : n;
        sum = plus(sum, rise(from[i * x_step]));
        lower(to[i * y_step], sum);
    }
}

extern "C" __global__ void __launch_bounds__(256)
scan_many(const __grid_constant__ View x, const __grid_constant__ View y, i64 count, i64 size, i64 x_step, i64 y_step,
     int reverse) {
    __shared__ S totals[8];
    i64 line = blockIdx.x;
    const X* from = (const X*)x.ptr + offset_of(x, line);
    X* to = (X*)y.ptr + offset_of(y, line);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    S before = S(0);
    for (i64 start = 0; start < size; start += 256) {
        i64 n = start + threadIdx.x;
        i64 i = reverse ? size - 1 - n : n;
        S sum = n < size ? rise(from[i * x_step]) : S(0);
        for (int step = 1; step < 32; step <<= 1) {
            S left = __shfl_up_sync(0xffffffffu, sum, step);
            if (lane >= step) sum = plus(left, sum);
        }
        if (lane == 31) totals[warp] = sum;
        __syncthreads();
        S ahead = before;
        for (int w = 0; w < 8; ++w) {
            if (w < warp) ahead = plus(ahead, totals[w]);
            before = plus(before, totals[w]);
        }
        if (n < size) lower(to[i * y_step], plus(ahead, sum));
        __syncthreads();
    }
}
