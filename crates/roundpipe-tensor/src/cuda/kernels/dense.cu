// y[i] = x[i] for a strided x of words WORD, whatever they mean. A thread per element.

extern "C" __global__ void __launch_bounds__(256) dense_matrices(View x, WORD* y, i64 count) {
    i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i < count) y[i] = ((const WORD*)x.ptr)[offset_of(x, i)];
}
