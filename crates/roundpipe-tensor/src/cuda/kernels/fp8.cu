// Rows as 8-bit floats with a scale each, and what surrounds their products.
//   quantize_rows:     x [rows, columns] dense: a block per row; its magnitude first, then its codes.
//   quantize_short_rows: the same for rows that fit a block's registers.
//   column_magnitudes: the largest magnitudes of the columns of x [columns, rows] dense, one for each chunk of lines.
//   quantize_columns:  codes [rows, columns] of the same x, transposed on the way, a block per 64 rows and 128 columns.
//   finish_rows:       c = sums · left scale · right scale + bias (+ c), rounded once; rows of n.
//   plain_fp8:         the whole product, for what the library does not take.
// Macros: REAL of x, c and bias (T); FORMAT of the codes, PACKS of a thread's eight values, LEFT and RIGHT of the sides of a product: 0 is e4m3, 1 is
// e5m2. A scale is the smallest power of two at which the largest finite magnitude is not above the format's largest
// value (1.75 · 2^8, 1.75 · 2^15). Values are rounded to nearest even; what is not finite becomes 0x7f. `fp8.rs` is the
// definition, and these are its bits.

typedef REAL T;

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((u32)(exponent + 127) << 23); }

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7fffffffu) < 0x7f800000u; }

__device__ __forceinline__ float larger(float most, float x) {
    x = fabsf(x);
    return x > most && is_finite(x) ? x : most;
}

template <int F> __device__ __forceinline__ int scale_exponent(float most) {
    u32 bits = __float_as_uint(most) & 0x7fffffffu;
    int exponent = (int)(bits >> 23) - 127 - (F ? 15 : 8) + ((bits & 0x7fffffu) > 0x600000u ? 1 : 0);
    return exponent < -100 ? -100 : exponent > 120 ? 120 : exponent;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
// Two values into two codes, the first in the low byte.
template <int F> __device__ __forceinline__ u32 encode_pair(float lo, float hi) {
    if (!is_finite(lo)) lo = __uint_as_float(0x7fffffffu);
    if (!is_finite(hi)) hi = __uint_as_float(0x7fffffffu);
    u16 y;
    if (F) asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
    else asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
    return y;
}
#else
template <int F> __device__ __forceinline__ u32 encode(float x) {
    const u32 fraction = F ? 2 : 3, bias = F ? 15 : 7, dropped = 23 - fraction, rebias = (127 - bias) << 23;
    u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffffu, code;
    if (magnitude >= 0x7f800000u) return 0x7f;
    if (magnitude < rebias + (1u << 23)) {
        float anchor = power_of_two(24 - (int)bias - (int)fraction);
        code = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), anchor)) - __float_as_uint(anchor);
    } else {
        code = (magnitude + ((1u << (dropped - 1)) - 1) + (magnitude >> dropped & 1) - rebias) >> dropped;
        u32 largest = F ? 0x7b : 0x7e;
        code = code < largest ? code : largest;
    }
    return sign | code;
}
template <int F> __device__ __forceinline__ u32 encode_pair(float lo, float hi) {
    return encode<F>(lo) | encode<F>(hi) << 8;
}
#endif

template <int F> __device__ __forceinline__ float decode(u8 code) {
    u32 magnitude = code & 0x7f;
    float value = __fmul_rn(__uint_as_float(magnitude << (F ? 21 : 20)), power_of_two(F ? 112 : 120));
    if (magnitude > (F ? 0x7bu : 0x7eu)) value = __uint_as_float(F && magnitude == 0x7cu ? 0x7f800000u : 0x7fc00000u);
    return code & 0x80 ? -value : value;
}

// Eight neighbours; in whole packs of 16 bytes where their address allows it.
__device__ __forceinline__ void load8(float (&values)[8], const T* p, bool aligned) {
    if (aligned) {
        const int N = Pack<T>::N;
        #pragma unroll
        for (int part = 0; part < 8 / N; ++part) {
            Pack<T> pack = load16(p + part * N);
            #pragma unroll
            for (int v = 0; v < N; ++v) values[part * N + v] = up(pack.at[v]);
        }
    } else {
        #pragma unroll
        for (int v = 0; v < 8; ++v) values[v] = up(p[v]);
    }
}

template <int F> __device__ __forceinline__ uint2 encode8(const float (&values)[8], float inverse) {
    uint2 codes;
    float x[8];
    #pragma unroll
    for (int v = 0; v < 8; ++v) x[v] = __fmul_rn(values[v], inverse);
    codes.x = encode_pair<F>(x[0], x[1]) | encode_pair<F>(x[2], x[3]) << 16;
    codes.y = encode_pair<F>(x[4], x[5]) | encode_pair<F>(x[6], x[7]) << 16;
    return codes;
}

#ifdef FORMAT
// columns is a multiple of 8. The second reading of a row finds it in the cache.
extern "C" __global__ void __launch_bounds__(256)
quantize_rows(const T* __restrict__ x, u8* __restrict__ codes, float* __restrict__ scales, i64 rows, i64 columns, i64 aligned) {
    __shared__ float slots[32];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* from = x + row * columns;
        float most = 0.0f, values[8];
        for (i64 at = threadIdx.x * 8; at < columns; at += blockDim.x * 8) {
            load8(values, from + at, aligned);
            #pragma unroll
            for (int v = 0; v < 8; ++v) most = larger(most, values[v]);
        }
        most = block_max(most, slots);
        int exponent = scale_exponent<FORMAT>(most);
        float inverse = power_of_two(-exponent);
        if (threadIdx.x == 0) scales[row] = power_of_two(exponent);
        for (i64 at = threadIdx.x * 8; at < columns; at += blockDim.x * 8) {
            load8(values, from + at, aligned);
            *reinterpret_cast<uint2*>(codes + row * columns + at) = encode8<FORMAT>(values, inverse);
        }
    }
}

// As quantize_rows, for rows that fit the registers of a block: PACKS times eight values a thread, read once and all
// at the same time. Magnitudes are compared as bits, whose order is that of the values; only a row that has one which
// is not finite is looked at again.
extern "C" __global__ void __launch_bounds__(1024)
quantize_short_rows(const T* __restrict__ x, u8* __restrict__ codes, float* __restrict__ scales, i64 columns, i64 aligned) {
    __shared__ u32 top_slots[32];
    __shared__ float slots[32];
    i64 row = blockIdx.x;
    const T* from = x + row * columns;
    float values[PACKS][8];
    #pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        i64 at = (threadIdx.x + (i64)i * blockDim.x) * 8;
        if (at < columns) load8(values[i], from + at, aligned);
        else
            #pragma unroll
            for (int v = 0; v < 8; ++v) values[i][v] = 0.0f;
    }
    u32 top = 0;
    #pragma unroll
    for (int i = 0; i < PACKS; ++i)
        #pragma unroll
        for (int v = 0; v < 8; ++v) {
            u32 bits = __float_as_uint(values[i][v]) & 0x7fffffffu;
            top = bits > top ? bits : top;
        }
    top = block_max(top, top_slots);
    float most = __uint_as_float(top);
    bool finite = top < 0x7f800000u;
    if (!finite) {
        most = 0.0f;
        #pragma unroll
        for (int i = 0; i < PACKS; ++i)
            #pragma unroll
            for (int v = 0; v < 8; ++v) most = larger(most, values[i][v]);
        most = block_max(most, slots);
    }
    int exponent = scale_exponent<FORMAT>(most);
    float inverse = power_of_two(-exponent);
    if (threadIdx.x == 0) scales[row] = power_of_two(exponent);
    #pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        i64 at = (threadIdx.x + (i64)i * blockDim.x) * 8;
        if (at < columns) *reinterpret_cast<uint2*>(codes + row * columns + at) = encode8<FORMAT>(values[i], inverse);
    }
}

// Eight warps read eight lines at once, a lane eight neighbours: blockIdx.x counts 256 rows of the result, blockIdx.y
// chunks of `lines` lines. magnitudes [chunks, rows].
extern "C" __global__ void __launch_bounds__(256)
column_magnitudes(const T* __restrict__ x, float* __restrict__ magnitudes, i64 rows, i64 columns, i64 lines, i64 aligned) {
    __shared__ float most_of[8][256];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 row = (i64)blockIdx.x * 256 + lane * 8;
    i64 start = blockIdx.y * lines, end = start + lines < columns ? start + lines : columns;
    float most[8] = {}, values[8];
    if (row < rows) {
        for (i64 line = start + warp; line < end; line += 8) {
            load8(values, x + line * rows + row, aligned);
            #pragma unroll
            for (int v = 0; v < 8; ++v) most[v] = larger(most[v], values[v]);
        }
    }
    #pragma unroll
    for (int v = 0; v < 8; ++v) most_of[warp][lane * 8 + v] = most[v];
    __syncthreads();
    float top = most_of[0][threadIdx.x];
    #pragma unroll
    for (int w = 1; w < 8; ++w) top = fmaxf(top, most_of[w][threadIdx.x]);
    row = (i64)blockIdx.x * 256 + threadIdx.x;
    if (row < rows) magnitudes[blockIdx.y * rows + row] = top;
}

// rows is a multiple of 8, columns one of 16.
extern "C" __global__ void __launch_bounds__(256)
quantize_columns(const T* __restrict__ x, const float* __restrict__ magnitudes, u8* __restrict__ codes,
                 float* __restrict__ scales, i64 rows, i64 columns, i64 chunks, i64 aligned) {
    // Four more bytes a row: neighbouring rows lie in other banks.
    __shared__ u8 square[64][128 + 4];
    __shared__ float inverse[64];
    i64 first_row = (i64)blockIdx.x * 64, first_column = (i64)blockIdx.y * 128;
    if (threadIdx.x < 64) {
        i64 row = first_row + threadIdx.x;
        float most = 0.0f;
        if (row < rows) for (i64 chunk = 0; chunk < chunks; ++chunk) most = fmaxf(most, magnitudes[chunk * rows + row]);
        int exponent = scale_exponent<FORMAT>(most);
        inverse[threadIdx.x] = power_of_two(-exponent);
        if (row < rows && blockIdx.y == 0) scales[row] = power_of_two(exponent);
    }
    __syncthreads();
    int group = threadIdx.x & 7, line = threadIdx.x >> 3;
    #pragma unroll
    for (int turn = 0; turn < 4; ++turn, line += 32) {
        i64 row = first_row + group * 8, column = first_column + line;
        if (row >= rows || column >= columns) continue;
        float values[8];
        load8(values, x + column * rows + row, aligned);
        #pragma unroll
        for (int v = 0; v < 8; v += 2) {
            float lo = __fmul_rn(values[v], inverse[group * 8 + v]), hi = __fmul_rn(values[v + 1], inverse[group * 8 + v + 1]);
            u32 pair = encode_pair<FORMAT>(lo, hi);
            square[group * 8 + v][line] = (u8)pair;
            square[group * 8 + v + 1][line] = (u8)(pair >> 8);
        }
    }
    __syncthreads();
    // A quarter of a row for each thread: 32 bytes in two stores.
    int own = threadIdx.x >> 2, from = (threadIdx.x & 3) * 32;
    i64 row = first_row + own;
    if (row >= rows) return;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        i64 column = first_column + from + half * 16;
        if (column >= columns) continue;
        const u32* words = reinterpret_cast<const u32*>(&square[own][from + half * 16]);
        *reinterpret_cast<uint4*>(codes + row * columns + column) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}
#endif

// sum · left · right + bias: products with powers of two round nothing, so their order does not matter.
__device__ __forceinline__ void finish(T* c, float sum, float left, float right, const T* bias, i64 column, float there) {
    float value = __fmul_rn(__fmul_rn(sum, left), right);
    put(*c, __fadd_rn(__fadd_rn(value, bias ? up(bias[column]) : 0.0f), there));
}

// Four columns a thread; n is a multiple of 16.
extern "C" __global__ void __launch_bounds__(256)
finish_rows(const float* __restrict__ sums, const float* __restrict__ left, const float* __restrict__ right,
            const T* __restrict__ bias, T* __restrict__ c, i64 rows, i64 n, int accumulate) {
    i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) * 4;
    if (at >= rows * n) return;
    i64 row = at / n, column = at % n;
    float4 four = *reinterpret_cast<const float4*>(sums + at);
    float sum[4] = { four.x, four.y, four.z, four.w };
    struct alignas(sizeof(T) * 4) Four { T at[4]; } out, there;
    if (accumulate) there = *reinterpret_cast<const Four*>(c + at);
    #pragma unroll
    for (int v = 0; v < 4; ++v)
        finish(&out.at[v], sum[v], left[row], right[column + v], bias, column + v, accumulate ? up(there.at[v]) : 0.0f);
    *reinterpret_cast<Four*>(c + at) = out;
}

#ifdef LEFT
// A square of 16 x 16 a block, an element a thread; sums run over the depth in order.
extern "C" __global__ void __launch_bounds__(256)
plain_fp8(const u8* __restrict__ a, const float* __restrict__ left, const u8* __restrict__ b, const float* __restrict__ right,
          const T* __restrict__ bias, T* __restrict__ c, i64 m, i64 n, i64 k, int accumulate) {
    __shared__ float as[16][17];
    __shared__ float bs[16][17];
    i64 across = (n + 15) / 16, row = blockIdx.x / across * 16, column = blockIdx.x % across * 16;
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    float sum = 0.0f;
    for (i64 from = 0; from < k; from += 16) {
        as[y][x] = row + y < m && from + x < k ? decode<LEFT>(a[(row + y) * k + from + x]) : 0.0f;
        bs[y][x] = column + y < n && from + x < k ? decode<RIGHT>(b[(column + y) * k + from + x]) : 0.0f;
        __syncthreads();
        #pragma unroll
        for (int l = 0; l < 16; ++l) sum += as[y][l] * bs[x][l];
        __syncthreads();
    }
    i64 r = row + y, s = column + x;
    if (r < m && s < n) finish(c + r * n + s, sum, left[r], right[s], bias, s, accumulate ? up(c[r * n + s]) : 0.0f);
}
#endif
