// y[plane, r, c] = x[plane, r, c], where x lies with r side by side and y with c side by side: a transposed copy.
//
// A block of 32 x 8 threads moves a square of 32 x 32 through shared memory, so that both sides move whole lines.
// blockIdx.x counts squares, columns first, then rows, then planes; planes are counted through the outer dimensions,
// which x and y share. BITS_T is an unsigned type of the elements' size.

typedef BITS_T Bits;

// `x` and `y` hold the outer dimensions only.
extern "C" __global__ void __launch_bounds__(256)
turn_planes(const __grid_constant__ View x, const __grid_constant__ View y, i64 rows, i64 columns, i64 x_column, i64 y_row) {
    __shared__ Bits square[32][33];
    i64 wide = (columns + 31) / 32, tall = (rows + 31) / 32;
    i64 at = blockIdx.x;
    i64 column = at % wide * 32;
    at /= wide;
    i64 row = at % tall * 32, plane = at / tall;
    const Bits* from = (const Bits*)x.ptr + offset_of(x, plane);
    Bits* to = (Bits*)y.ptr + offset_of(y, plane);
    int tx = threadIdx.x, ty = threadIdx.y;
#pragma unroll
    for (int k = 0; k < 32; k += 8) {
        i64 c = column + ty + k, r = row + tx;
        if (c < columns && r < rows) square[ty + k][tx] = from[c * x_column + r];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 32; k += 8) {
        i64 r = row + ty + k, c = column + tx;
        if (c < columns && r < rows) to[r * y_row + c] = square[tx][ty + k];
    }
}
