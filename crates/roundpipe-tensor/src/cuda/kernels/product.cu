// Products for operands that the library does not take, and what surrounds the library's products.
//   plain_product:  c = alpha a b + bias + beta c; a, b any strides, c dense. A block per tile and, looping, per batch.
//   settle_product: c = bias + beta c, rows of n. A thread per column, rows looping.
// Macros: IN of a, b and bias (T), OUT of c (O). The tile's text comes before this one.

// c = sum + bias + beta c, rounded once; with beta = 0, c is not read.
__device__ __forceinline__ void finish(O* c, A sum, const T* bias, i64 column, A beta) {
    if (bias) sum += A(up(bias[column]));
    if (beta != A(0)) sum += beta * A(up(*c));
    put(*c, sum);
}

extern "C" __global__ void __launch_bounds__(256) settle_product(const T* bias, O* c, i64 rows, i64 n, double beta) {
    i64 column = (i64)blockIdx.x * 256 + threadIdx.x;
    if (column >= n) return;
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) finish(c + row * n + column, A(0), bias, column, A(beta));
}

// Where batch `i` of a view of matrices begins, in elements.
__device__ __forceinline__ i64 batch_offset(const View& v, i64 i) {
    i64 at = 0;
    for (int d = (int)v.rank - 3; d >= 0; --d) {
        at += i % v.dim[d] * v.stride[d];
        i /= v.dim[d];
    }
    return at;
}

extern "C" __global__ void __launch_bounds__(256)
plain_product(View a, View b, const T* bias, O* c, i64 batches, i64 m, i64 n, i64 k, double alpha, double beta) {
    i64 across = (n + TILE - 1) / TILE;
    i64 row = blockIdx.x / across * TILE, col = blockIdx.x % across * TILE;
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    i64 a_row = a.stride[a.rank - 2], a_col = a.stride[a.rank - 1];
    i64 b_row = b.stride[b.rank - 2], b_col = b.stride[b.rank - 1];
    for (i64 batch = blockIdx.y; batch < batches; batch += gridDim.y) {
        const T* left = (const T*)a.ptr + batch_offset(a, batch) + row * a_row;
        const T* right = (const T*)b.ptr + batch_offset(b, batch) + col * b_col;
        A acc[4][4];
        tile_product(acc, left, a_row, a_col, m - row, right, b_row, b_col, n - col, k);
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 4; ++j) {
                i64 r = row + y + 16 * i, s = col + x + 16 * j;
                if (r < m && s < n) finish(c + (batch * m + r) * n + s, A(alpha) * acc[i][j], bias, s, A(beta));
            }
    }
}
