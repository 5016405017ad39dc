// Products of groups of rows, in any float type and strides; see grouped_mma.cu for 16-bit types.
//   grouped:      y[rows of g] = x[rows of g] w[g] (+ y); rows past the last offset become 0 (or stay). A block per tile of 64 rows
//                 of a group and 64 columns; there are at most t / 64 + e + 1 tiles of rows.
//   grouped_grad: d[g] = sum over the rows r of g of a[r]^T b[r] (+ d[g]). A block per tile of d[g], rows in order.
// Macros: IN of the sources (T), OUT of the result (O). The tile's and the groups' text comes before this one.

extern "C" __global__ void __launch_bounds__(256)
grouped(const T* x, i64 x_row, i64 x_col, const T* w, i64 w_group, i64 w_row, i64 w_col, const int* offsets, O* y,
        int t, int e, i64 k, i64 n, int accumulate, u32* alarm, u32 code) {
    check_offsets(offsets, e, t, alarm, code);
    int across = (int)((n + TILE - 1) / TILE);
    Place p = find_tile(offsets, e, t, blockIdx.x / across, TILE);
    if (p.rows == 0) return;
    i64 col = (i64)(blockIdx.x % across) * TILE;
    A acc[4][4];
    // The rows past the groups are a product of depth 0; they have no matrix.
    const T* right = p.group < e ? w + p.group * w_group + col * w_col : w;
    tile_product(acc, x + p.row * x_row, x_row, x_col, p.rows, right, w_row, w_col, n - col, p.group < e ? k : 0);
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) {
            i64 r = threadIdx.x / 16 + 16 * i, c = col + threadIdx.x % 16 + 16 * j;
            if (r >= p.rows || c >= n) continue;
            O* to_put = y + (p.row + r) * n + c;
            put(*to_put, accumulate ? acc[i][j] + A(up(*to_put)) : acc[i][j]);
        }
}

extern "C" __global__ void __launch_bounds__(256)
grouped_grad(const T* a, i64 a_row, i64 a_col, const T* b, i64 b_row, i64 b_col, const int* offsets, O* d,
             i64 d_group, i64 d_row, i64 d_col, int t, int e, i64 m, i64 n, int accumulate, u32* alarm, u32 code) {
    check_offsets(offsets, e, t, alarm, code);
    int across = (int)((n + TILE - 1) / TILE), down = (int)((m + TILE - 1) / TILE);
    int group = blockIdx.x / across / down;
    i64 row = (i64)(blockIdx.x / across % down) * TILE, col = (i64)(blockIdx.x % across) * TILE;
    int from = bound_of(offsets, e, t, group), to = bound_of(offsets, e, t, group + 1);
    A acc[4][4];
    tile_product(acc, a + from * a_row + row * a_col, a_col, a_row, m - row, b + from * b_row + col * b_col, b_row, b_col,
                 n - col, to > from ? to - from : 0);
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) {
            i64 r = row + threadIdx.x / 16 + 16 * i, c = col + threadIdx.x % 16 + 16 * j;
            if (r >= m || c >= n) continue;
            O* to_put = d + group * d_group + r * d_row + c * d_col;
            put(*to_put, accumulate ? acc[i][j] + A(up(*to_put)) : acc[i][j]);
        }
}
