// out[c] (+)= sum over i of partial[i, c], of [chunks, cols]: the second phase of sums over rows.
//
// Blocks of [32 columns, 32]: thread (c, y) adds chunks y, y + 32, ..; the 32 sums are added in order.

typedef SUM A;

extern "C" __global__ __launch_bounds__(1024) void sum_chunks(
    const A* __restrict__ partial, A* out, i64 chunks, i64 cols, int accumulate
) {
    __shared__ A sums[32][33];
    const i64 c = (i64)blockIdx.x * 32 + threadIdx.x;
    A sum = 0;
    if (c < cols) {
        #pragma unroll 4
        for (i64 i = threadIdx.y; i < chunks; i += 32) sum += partial[i * cols + c];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || c >= cols) return;
    A total = 0;
    for (int y = 0; y < 32; ++y) total += sums[y][threadIdx.x];
    out[c] = accumulate ? out[c] + total : total;
}
