// Convolution of images and its gradients; REAL: the type (T), sums in A, rounded once. Each is a product of matrices per
// group, M x N with K terms, whose factors are read where they lie (og = o / groups, cg = c / groups):
//   KIND 0: y[q, (img, i, j)]   = sum over (ci, a, b)    of f[q, ci, a, b] · x[img, ci, i·s - p + a·d, ..] (+ bias[q])
//   KIND 1: dx[ci, (img, r, s)] = sum over (q, a, b)     of f[q, ci, a, b] · dy[img, q, (r + p - a·d) / s, ..]
//   KIND 2: df[q, (ci, a, b)]   = sum over (img, i, j)   of dy[img, q, i, j] · x[img, ci, i·s - p + a·d, ..]
//
//   conv_tiles:  a block of 256 threads computes 64 x 64 of one group, 16 terms at a time through shared memory;
//                a thread has 4 x 4 sums. KIND 2 cuts the K terms into parts of `chunk`, each to its own place of
//                `partial`, which conv_join adds in order.
//   conv_direct: KIND 0 and 1 for groups of few rows: one thread per element.
//   conv_filter: KIND 2 for groups of few rows: one block per element; fixed order of sums.
// A triple such as (img, i, j) is counted in three digits, so that no loop divides.

typedef REAL T;
typedef AccOf<T>::type A;

#define GEOMETRY int n, int c, int h, int w, int o, int kh, int kw, int oh, int ow, int sh, int sw, int ph, int pw, \
    int dh, int dw, int groups

// a · B · C + b · C + c.
struct Digits { int a, b, c; };

__device__ __forceinline__ Digits split(i64 i, int B, int C) {
    Digits d;
    if (i <= 0xffffffffll) {
        u32 k = (u32)i, q = k / (u32)C;
        d.c = (int)(k - q * (u32)C); d.a = (int)(q / (u32)B); d.b = (int)(q - (u32)d.a * (u32)B);
    } else {
        i64 q = i / C;
        d.c = (int)(i - q * C); d.a = (int)(q / B); d.b = (int)(q - (i64)d.a * B);
    }
    return d;
}

// Each digit of both is below its base, so each carry is at most one.
__device__ __forceinline__ void advance(Digits& d, const Digits& step, int B, int C) {
    d.c += step.c;
    if (d.c >= C) { d.c -= C; d.b += 1; }
    d.b += step.b;
    if (d.b >= B) { d.b -= B; d.a += 1; }
    d.a += step.a;
}

// x where tap (a, b) of the window at (i, j) meets it; 0 on the border.
__device__ __forceinline__ A met(const T* x, i64 plane, int i, int j, int a, int b, int h, int w, int sh, int sw, int ph,
                                 int pw, int dh, int dw) {
    int row = i * sh - ph + a * dh, col = j * sw - pw + b * dw;
    if ((u32)row >= (u32)h || (u32)col >= (u32)w) return A(0);
    return up(x[(plane * h + row) * w + col]);
}

// dy of the window whose tap (a, b) meets the element (r, s); 0 where there is none.
__device__ __forceinline__ A meeting(const T* dy, i64 plane, int r, int s, int a, int b, int oh, int ow, int sh, int sw,
                                     int ph, int pw, int dh, int dw) {
    int top = r + ph - a * dh, left = s + pw - b * dw;
    if (top < 0 || left < 0) return A(0);
    int i = top / sh, j = left / sw;
    if (i * sh != top || j * sw != left || i >= oh || j >= ow) return A(0);
    return up(dy[(plane * oh + i) * ow + j]);
}

#if KIND == 2
#define OUT A
#else
#define OUT T
#endif

extern "C" __global__ void __launch_bounds__(256)
conv_tiles(const T* __restrict__ left, const T* __restrict__ right, const T* __restrict__ bias, OUT* __restrict__ out,
           A* __restrict__ partial, GEOMETRY, i64 rows, i64 cols, i64 terms, i64 chunk, int parts, int accumulate) {
    __shared__ __align__(16) A lefts[16][68];
    __shared__ __align__(16) A rights[16][68];
    int og = o / groups, cg = c / groups, tid = threadIdx.x;
    u32 col_tiles = (u32)((cols + 63) / 64), row_tiles = (u32)((rows + 63) / 64), block = blockIdx.x;
    u32 col_tile = block % col_tiles; block /= col_tiles;
    u32 row_tile = block % row_tiles; block /= row_tiles;
    int g = (int)(block % (u32)groups), part = (int)(block / (u32)groups);
    i64 row0 = (i64)row_tile * 64, col0 = (i64)col_tile * 64;
    i64 begin = part * chunk, end = begin + chunk < terms ? begin + chunk : terms;
    // How columns and terms are counted.
#if KIND == 0
    int CB = oh, CC = ow, KB = kh, KC = kw;
#elif KIND == 1
    int CB = h, CC = w, KB = kh, KC = kw;
#else
    int CB = kh, CC = kw, KB = oh, KC = ow;
#endif
    // Of the left factor a thread reads term tid % 16 of rows tid / 16 + 16 u.
    int left_k = tid & 15, left_row = tid >> 4;
    Digits by16 = split(16, KB, KC), left_at = split(begin + left_k, KB, KC);
#if KIND == 2
    // Of the right factor the same term, of columns tid / 16 + 16 u: neighbours in memory are neighbouring terms.
    Digits place[4];
    for (int u = 0; u < 4; ++u) place[u] = split(col0 + left_row + 16 * u, CB, CC);
#else
    // Of the right factor column tid % 64 of terms tid / 64 + 4 u: neighbours in memory are neighbouring columns.
    int right_col = tid & 63, right_k = tid >> 6;
    bool col_real = col0 + right_col < cols;
    Digits place = split(col0 + right_col, CB, CC), by4 = split(4, KB, KC), right_at = split(begin + right_k, KB, KC);
#endif
    A sum[4][4];
    for (int a = 0; a < 4; ++a) for (int b = 0; b < 4; ++b) sum[a][b] = 0;
    int ty = tid >> 4, tx = tid & 15;
    for (i64 k0 = begin; k0 < end; k0 += 16) {
        A l[4], r[4];
        bool left_real = k0 + left_k < end;
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            i64 m = row0 + left_row + 16 * u;
            l[u] = 0;
            if (left_real && m < rows) {
#if KIND == 0
                l[u] = up(left[((i64)g * og + m) * terms + k0 + left_k]);
#elif KIND == 1
                l[u] = up(left[((((i64)g * og + left_at.a) * cg + m) * kh + left_at.b) * kw + left_at.c]);
#else
                l[u] = up(left[(((i64)left_at.a * o + (i64)g * og + m) * oh + left_at.b) * ow + left_at.c]);
#endif
            }
        }
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            r[u] = 0;
#if KIND == 0
            if (col_real && k0 + right_k + 4 * u < end)
                r[u] = met(right, (i64)place.a * c + (i64)g * cg + right_at.a, place.b, place.c, right_at.b, right_at.c,
                           h, w, sh, sw, ph, pw, dh, dw);
            advance(right_at, by4, KB, KC);
#elif KIND == 1
            if (col_real && k0 + right_k + 4 * u < end)
                r[u] = meeting(right, (i64)place.a * o + (i64)g * og + right_at.a, place.b, place.c, right_at.b,
                               right_at.c, oh, ow, sh, sw, ph, pw, dh, dw);
            advance(right_at, by4, KB, KC);
#else
            if (left_real && col0 + left_row + 16 * u < cols)
                r[u] = met(right, (i64)left_at.a * c + (i64)g * cg + place[u].a, left_at.b, left_at.c, place[u].b,
                           place[u].c, h, w, sh, sw, ph, pw, dh, dw);
#endif
        }
        advance(left_at, by16, KB, KC);
        // The sums of the terms before are done with the shared memory.
        __syncthreads();
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            lefts[left_k][left_row + 16 * u] = l[u];
#if KIND == 2
            rights[left_k][left_row + 16 * u] = r[u];
#else
            rights[right_k + 4 * u][right_col] = r[u];
#endif
        }
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < 16; ++k) {
            A a4[4], b4[4];
            #pragma unroll
            for (int u = 0; u < 4; ++u) { a4[u] = lefts[k][ty * 4 + u]; b4[u] = rights[k][tx * 4 + u]; }
            #pragma unroll
            for (int a = 0; a < 4; ++a)
                #pragma unroll
                for (int b = 0; b < 4; ++b) sum[a][b] += a4[a] * b4[b];
        }
    }
    for (int b = 0; b < 4; ++b) {
        i64 col = col0 + tx * 4 + b;
        if (col >= cols) continue;
        Digits at = split(col, CB, CC);
        for (int a = 0; a < 4; ++a) {
            i64 m = row0 + ty * 4 + a;
            if (m >= rows) continue;
#if KIND == 0
            i64 q = (i64)g * og + m;
            put(out[(((i64)at.a * o + q) * oh + at.b) * ow + at.c], bias ? sum[a][b] + up(bias[q]) : sum[a][b]);
#elif KIND == 1
            put(out[(((i64)at.a * c + (i64)g * cg + m) * h + at.b) * w + at.c], sum[a][b]);
#else
            i64 e = ((i64)g * og + m) * cols + col;
            if (parts > 1) partial[(i64)part * o * cols + e] = sum[a][b];
            else out[e] = accumulate ? out[e] + sum[a][b] : sum[a][b];
#endif
        }
    }
}

#if KIND == 2

extern "C" __global__ void __launch_bounds__(256)
conv_join(const A* __restrict__ partial, A* __restrict__ out, i64 total, int parts, int accumulate) {
    i64 e = (i64)blockIdx.x * 256 + threadIdx.x;
    if (e >= total) return;
    A sum = 0;
    for (int part = 0; part < parts; ++part) sum += partial[(i64)part * total + e];
    out[e] = accumulate ? out[e] + sum : sum;
}

extern "C" __global__ void __launch_bounds__(256)
conv_filter(const T* __restrict__ dy, const T* __restrict__ x, A* __restrict__ out, GEOMETRY, int accumulate) {
    __shared__ A slots[32];
    int og = o / groups, cg = c / groups;
    Digits tap = split(blockIdx.x, kh, kw);
    int q = tap.a / cg, ci = tap.a - q * cg;
    i64 channel = (i64)(q / og) * cg + ci, terms = (i64)n * oh * ow;
    Digits at = split(threadIdx.x, oh, ow), step = split(256, oh, ow);
    A sum = 0;
    for (i64 k = threadIdx.x; k < terms; k += 256) {
        A d = up(dy[(((i64)at.a * o + q) * oh + at.b) * ow + at.c]);
        sum += d * met(x, (i64)at.a * c + channel, at.b, at.c, tap.b, tap.c, h, w, sh, sw, ph, pw, dh, dw);
        advance(at, step, oh, ow);
    }
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) out[blockIdx.x] = accumulate ? out[blockIdx.x] + sum : sum;
}

#else

extern "C" __global__ void __launch_bounds__(256)
conv_direct(const T* __restrict__ f, const T* __restrict__ from, const T* __restrict__ bias, T* __restrict__ out,
            GEOMETRY, i64 total) {
    i64 e = (i64)blockIdx.x * 256 + threadIdx.x;
    if (e >= total) return;
    int og = o / groups, cg = c / groups;
    A sum = 0;
#if KIND == 0
    Digits at = split(e, oh, ow);
    int img = at.a / o, q = at.a - img * o, g = q / og;
    for (int ci = 0; ci < cg; ++ci)
        for (int a = 0; a < kh; ++a)
            for (int b = 0; b < kw; ++b)
                sum += up(f[(((i64)q * cg + ci) * kh + a) * kw + b]) *
                       met(from, (i64)img * c + (i64)g * cg + ci, at.b, at.c, a, b, h, w, sh, sw, ph, pw, dh, dw);
    if (bias) sum += up(bias[q]);
#else
    Digits at = split(e, h, w);
    int img = at.a / c, channel = at.a - img * c, g = channel / cg, ci = channel - g * cg;
    for (int q = g * og; q < (g + 1) * og; ++q)
        for (int a = 0; a < kh; ++a)
            for (int b = 0; b < kw; ++b)
                sum += up(f[(((i64)q * cg + ci) * kh + a) * kw + b]) *
                       meeting(from, (i64)img * o + q, at.b, at.c, a, b, oh, ow, sh, sw, ph, pw, dh, dw);
#endif
    put(out[e], sum);
}

#endif
