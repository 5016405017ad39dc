// Copies of indexed places in words of the type WORD; values are never looked at.
//
//   index_rows: y[o, i, :] = x[o, index[i], :] where the elements after the dimension lie densely in x. A row is
//               `words` words; `lanes` neighbouring threads (a power of two up to 256) copy it, four words each
//               at a time.
//   index_pick: the same, and y[.., i, ..] = x[.., index[.., i, ..], ..], for any strides; one thread per element.
//
// A place whose index is refused becomes 0.

typedef WORD W;

extern "C" __global__ void __launch_bounds__(256)
index_rows(View x, int dim, i64 bytes, const char* index, int kind, W* __restrict__ y, i64 rows, i64 many, i64 words,
           int lanes, u32* alarm, u32 code) {
    i64 row = (i64)blockIdx.x * (256 / lanes) + threadIdx.x / lanes;
    int lane = threadIdx.x % lanes;
    if (row >= rows) return;
    i64 outer = 0, i = row;
    if (many < rows) { outer = row / many; i = row - outer * many; }
    i64 at = index_at(index, i, kind);
    bool good = (u64)at < (u64)x.dim[dim];
    if (!good && lane == 0) raise_alarm(alarm, code, at, i, x.dim[dim]);
    i64 from = at * x.stride[dim];
    for (int d = dim - 1; d >= 0 && outer > 0; --d) {
        i64 q = outer / x.dim[d];
        from += (outer - q * x.dim[d]) * x.stride[d];
        outer = q;
    }
    const W* __restrict__ src = reinterpret_cast<const W*>(x.ptr + from * bytes);
    W* dst = y + row * words;
    W zero = {};
    for (i64 c = lane; c < words; c += 4 * lanes) {
        W word[4];
        #pragma unroll
        for (int u = 0; u < 4; ++u) word[u] = good && c + u * lanes < words ? src[c + u * lanes] : zero;
        #pragma unroll
        for (int u = 0; u < 4; ++u) if (c + u * lanes < words) dst[c + u * lanes] = word[u];
    }
}

// `I` counts elements; 32 bits are enough for most and divide faster. `along`: the index is one list along `dim`.
template <typename I> __device__ __forceinline__ void
pick(const View& x, const View& y, int dim, int along, const char* index, int kind, i64 element, u32* alarm, u32 code) {
    I rest = (I)element;
    i64 from = 0, place = element;
    for (int d = (int)y.rank - 1; d >= 0; --d) {
        I q = rest / (I)y.dim[d];
        i64 c = (i64)(rest - q * (I)y.dim[d]);
        rest = q;
        if (d != dim) from += c * x.stride[d];
        else if (along) place = c;
    }
    i64 at = index_at(index, place, kind);
    bool good = (u64)at < (u64)x.dim[dim];
    if (!good) raise_alarm(alarm, code, at, place, x.dim[dim]);
    W zero = {};
    W* dst = reinterpret_cast<W*>(y.ptr) + element;
    *dst = good ? reinterpret_cast<const W*>(x.ptr)[from + at * x.stride[dim]] : zero;
}

extern "C" __global__ void __launch_bounds__(256)
index_pick(View x, View y, int dim, int along, const char* index, int kind, i64 total, u32* alarm, u32 code) {
    i64 element = (i64)blockIdx.x * 256 + threadIdx.x;
    if (element >= total) return;
    if (total <= 0x7fffffff) pick<u32>(x, y, dim, along, index, kind, element, alarm, code);
    else pick<u64>(x, y, dim, along, index, kind, element, alarm, code);
}
