// Pooling of planes [h, w] into [oh, ow] and its gradients; REAL: the type (T), sums in A, rounded once. COUNT (I): int where every
// number below fits, else long long. ADAPTIVE: cell i takes floor(i·h/oh)..ceil((i+1)·h/oh), else a window.
//
//   pool_max:       y = the largest of the window, at = its place in the plane; the first of equals, the first NaN;
//                   -inf and -1 for a window without elements. One thread per output.
//   pool_max_grad:  dx = sum of dy over the windows that chose the element, in order. One thread per element.
//   pool_mean:      y = sum over the window / its size. LANES threads per output, added in a fixed order.
//   pool_mean_grad: dx = sum of dy / size over the windows that hold the element, in order. One thread per element.

typedef REAL T;
typedef COUNT I;
typedef AccOf<T>::type A;

// One axis: `size` elements, `count` windows.
struct Axis { I size, count, kernel, stride, padding, dilation; };
#define AXES I size_h, I size_w, I count_h, I count_w, I kernel_h, I kernel_w, I stride_h, I stride_w, I padding_h, \
    I padding_w, I dilation_h, I dilation_w
#define ROWS Axis{size_h, count_h, kernel_h, stride_h, padding_h, dilation_h}
#define COLS Axis{size_w, count_w, kernel_w, stride_w, padding_w, dilation_w}

// The elements low..high of window i, and its part of the divisor.
struct Span { I low, high, size; };
__device__ __forceinline__ Span span(const Axis& axis, I i, int count_pad) {
    Span s;
#if ADAPTIVE
    s.low = i * axis.size / axis.count;
    s.high = ((i + 1) * axis.size + axis.count - 1) / axis.count;
    s.size = s.high - s.low;
#else
    I start = i * axis.stride, end = start + axis.kernel, most = axis.size + 2 * axis.padding;
    if (end > most) end = most;
    s.low = (start > axis.padding ? start : axis.padding) - axis.padding;
    I last = end < axis.padding ? axis.padding : end;
    s.high = (last < axis.size + axis.padding ? last : axis.size + axis.padding) - axis.padding;
    s.size = count_pad ? end - start : (s.high > s.low ? s.high - s.low : 0);
#endif
    return s;
}

// The windows first..=last that reach element `at`.
struct Reach { I first, last; };
__device__ __forceinline__ Reach reach(const Axis& axis, I at) {
    Reach r;
#if ADAPTIVE
    r.first = at * axis.count / axis.size;
    r.last = ((at + 1) * axis.count + axis.size - 1) / axis.size - 1;
#else
    I place = at + axis.padding, behind = place - axis.dilation * (axis.kernel - 1);
    r.first = behind > 0 ? (behind + axis.stride - 1) / axis.stride : 0;
    r.last = place / axis.stride;
    if (r.last > axis.count - 1) r.last = axis.count - 1;
#endif
    return r;
}

__device__ __forceinline__ A divisor(const Span& row, const Span& col) {
    i64 size = (i64)row.size * col.size;
    return (A)(size > 1 ? size : 1);
}

#if !ADAPTIVE

extern "C" __global__ void __launch_bounds__(256)
pool_max(const T* __restrict__ x, T* __restrict__ y, int* __restrict__ at, i64 total, AXES) {
    i64 e = (i64)blockIdx.x * 256 + threadIdx.x;
    if (e >= total) return;
    I q = (I)e / count_w, j = (I)e - q * count_w, plane = q / count_h, i = q - plane * count_h;
    const T* from = x + (i64)plane * size_h * size_w;
    A best = -(A)__int_as_float(0x7f800000);
    int place = -1;
    for (I a = 0; a < kernel_h; ++a) {
        I row = i * stride_h - padding_h + a * dilation_h;
        if (row < 0 || row >= size_h) continue;
        for (I b = 0; b < kernel_w; ++b) {
            I col = j * stride_w - padding_w + b * dilation_w;
            if (col < 0 || col >= size_w) continue;
            A value = up(from[row * size_w + col]);
            if (value > best || place < 0 || (value != value && best == best)) {
                best = value;
                place = (int)(row * size_w + col);
            }
        }
    }
    put(y[e], best);
    at[e] = place;
}

extern "C" __global__ void __launch_bounds__(256)
pool_max_grad(const T* __restrict__ dy, const int* __restrict__ at, T* __restrict__ dx, i64 total, AXES) {
    i64 e = (i64)blockIdx.x * 256 + threadIdx.x;
    if (e >= total) return;
    I q = (I)e / size_w, col = (I)e - q * size_w, plane = q / size_h, row = q - plane * size_h;
    Reach down = reach(ROWS, row), across = reach(COLS, col);
    i64 base = (i64)plane * count_h * count_w;
    int place = (int)(row * size_w + col);
    A sum = 0;
    for (I i = down.first; i <= down.last; ++i)
        for (I j = across.first; j <= across.last; ++j) {
            i64 window = base + i * count_w + j;
            if (at[window] == place) sum += up(dy[window]);
        }
    put(dx[e], sum);
}

#endif

extern "C" __global__ void __launch_bounds__(256)
pool_mean(const T* __restrict__ x, T* __restrict__ y, i64 total, int count_pad, AXES) {
    i64 e = ((i64)blockIdx.x * 256 + threadIdx.x) / LANES;
    int lane = threadIdx.x % LANES;
    // With 32 lanes a warp has one output: all of it leaves or none.
    if (e >= total) return;
    I q = (I)e / count_w, j = (I)e - q * count_w, plane = q / count_h, i = q - plane * count_h;
    Span row = span(ROWS, i, count_pad), col = span(COLS, j, count_pad);
    const T* from = x + (i64)plane * size_h * size_w;
    A sum = 0;
#if LANES == 1
    for (I r = row.low; r < row.high; ++r)
        for (I c = col.low; c < col.high; ++c) sum += up(from[r * size_w + c]);
#else
    I width = col.high - col.low, area = width > 0 && row.high > row.low ? (row.high - row.low) * width : 0;
    for (I k = lane; k < area; k += LANES) {
        I r = k / width;
        sum += up(from[(row.low + r) * size_w + col.low + k - r * width]);
    }
    sum = warp_sum(sum);
#endif
    if (lane == 0) put(y[e], sum / divisor(row, col));
}

extern "C" __global__ void __launch_bounds__(256)
pool_mean_grad(const T* __restrict__ dy, T* __restrict__ dx, i64 total, int count_pad, AXES) {
    i64 e = (i64)blockIdx.x * 256 + threadIdx.x;
    if (e >= total) return;
    I q = (I)e / size_w, col = (I)e - q * size_w, plane = q / size_h, row = q - plane * size_h;
    Reach down = reach(ROWS, row), across = reach(COLS, col);
    i64 base = (i64)plane * count_h * count_w;
    A sum = 0;
    for (I i = down.first; i <= down.last; ++i) {
        Span tall = span(ROWS, i, count_pad);
        for (I j = across.first; j <= across.last; ++j)
            sum += up(dy[base + i * count_w + j]) / divisor(tall, span(COLS, j, count_pad));
    }
    put(dx[e], sum);
}
