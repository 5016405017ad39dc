// A tile of 64 x 64 elements of a product by 256 threads, for operands of any strides and any float type.
// Macros: IN of the operands, OUT of the result.
// Thread (x, y) of 16 x 16 holds rows y + 16 i and columns x + 16 j; each sum runs over the depth in order.

typedef IN T;
typedef OUT O;
typedef AccOf<T>::type A;

#define TILE 64
#define DEPTH 16

// acc[i][j] = sum over l < depth of a(row, l) b(l, column). `a` and `b` point at the tile's first row and column,
// of which `rows` and `cols` exist. Ends with all threads past their reads of shared memory.
__device__ __forceinline__ void tile_product(A (&acc)[4][4], const T* a, i64 a_row, i64 a_col, i64 rows,
                                             const T* b, i64 b_row, i64 b_col, i64 cols, i64 depth) {
    __shared__ A as[DEPTH][TILE + 1];
    __shared__ A bs[DEPTH][TILE + 1];
    int tid = threadIdx.x, x = tid % 16, y = tid / 16;
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        #pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = A(0);
    for (i64 from = 0; from < depth; from += DEPTH) {
        #pragma unroll
        for (int s = 0; s < 4; ++s) {
            int at = tid + 256 * s;
            // Neighbouring threads read neighbouring elements, whichever way the operand lies.
            int r = a_col == 1 ? at / DEPTH : at % TILE, l = a_col == 1 ? at % DEPTH : at / TILE;
            as[l][r] = r < rows && from + l < depth ? A(up(a[r * a_row + (from + l) * a_col])) : A(0);
            int c = b_col == 1 ? at % TILE : at / DEPTH, m = b_col == 1 ? at / TILE : at % DEPTH;
            bs[m][c] = c < cols && from + m < depth ? A(up(b[(from + m) * b_row + c * b_col])) : A(0);
        }
        __syncthreads();
        #pragma unroll
        for (int l = 0; l < DEPTH; ++l) {
            A left[4], right[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) { left[i] = as[l][y + 16 * i]; right[i] = bs[l][x + 16 * i]; }
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                #pragma unroll
                for (int j = 0; j < 4; ++j) acc[i][j] += left[i] * right[j];
        }
        __syncthreads();
    }
}
