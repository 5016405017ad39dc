// Cross entropy of rows of logits [t, v] (FROM) against labels, and its gradient (INTO; may be the logits' memory).
//
//   lse = log(sum e^x);  loss = (1 - a) (lse - x[label]) + a (lse - mean(x));  0 where the label is `ignore`
//   dx = dloss (e^(x - lse) - a / v - (1 - a) [i = label])
//
// One block per row, which reads the row once: every thread keeps the largest value it met and the sum of e^(x - that),
// and corrects the sum when it meets a larger one; the threads are joined in a fixed order. Threads take 16 bytes at a
// time from the first address that allows it; what lies before and behind is taken one by one.

typedef FROM T;
typedef INTO D;
typedef AccOf<T>::type A;
const int N = 16 / (sizeof(T) > sizeof(D) ? sizeof(T) : sizeof(D));
const int AHEAD = 4;

__device__ __forceinline__ A endless() { return A(__int_as_float(0x7f800000)); }

// What sums are measured against: the largest value, or 0 where that is infinite.
__device__ __forceinline__ A level(A top) { return top == endless() || top == -endless() ? A(0) : top; }

// What a thread knows of a row: its largest value, sum of e^(x - level), sum of (level - x), number of values.
struct Part { A top, sum, below, count; };

// Makes `top` the largest value.
__device__ __forceinline__ void raise(Part& p, A top) {
    A from = level(p.top), to = level(top);
    // Below the first value there is nothing to correct (and 0 times infinity would be NaN).
    if (p.top != -endless()) p.sum *= Exp<T>::of(from - to);
    if (SMOOTH) p.below += (to - from) * p.count;
    p.top = top;
}

template <int K> __device__ __forceinline__ void meet(Part& p, const Few<T, K>& x) {
    A top = up(x.at[0]);
    // NaN is no maximum, but makes the sum NaN.
    #pragma unroll
    for (int j = 1; j < K; ++j) { A v = up(x.at[j]); top = v > top || top != top ? v : top; }
    if (top > p.top) raise(p, top);
    const A base = level(p.top);
    #pragma unroll
    for (int j = 0; j < K; ++j) {
        A v = up(x.at[j]);
        p.sum += Exp<T>::of(v - base);
        if (SMOOTH) p.below += base - v;
    }
    if (SMOOTH) p.count += A(K);
}

// Elements before the first address that allows 16 bytes; all of them where there is none.
__device__ __forceinline__ i64 ragged(const T* x, const D* y, i64 width) {
    i64 head = (i64)((0 - (u64)x) % (N * sizeof(T)) / sizeof(T));
    return head < width && (u64)(y + head) % (N * sizeof(D)) == 0 ? head : width;
}

extern "C" __global__ __launch_bounds__(512) void cross_entropy(
    const T* __restrict__ x, const i64* __restrict__ labels, A* __restrict__ loss, A* __restrict__ lse, i64 width,
    i64 ignore, double smoothing, u32* alarm, u32 code
) {
    __shared__ A slots[32];
    const i64 row = blockIdx.x;
    x += row * width;
    // There is no destination to align: the logits' own address stands in.
    const i64 head = ragged(x, reinterpret_cast<const D*>(x), width), pieces = (width - head) / N;
    Part p;
    p.top = -endless();
    p.sum = p.below = p.count = 0;
    for (i64 i = threadIdx.x; i < head; i += blockDim.x) meet(p, load_few<1>(x + i));
    const T* body = x + head;
    i64 i = threadIdx.x;
    for (; i + (AHEAD - 1) * (i64)blockDim.x < pieces; i += AHEAD * (i64)blockDim.x) {
        Few<T, N> v[AHEAD];
        #pragma unroll
        for (int k = 0; k < AHEAD; ++k) v[k] = load_few<N>(body + (i + k * (i64)blockDim.x) * N);
        #pragma unroll
        for (int k = 0; k < AHEAD; ++k) meet(p, v[k]);
    }
    for (; i < pieces; i += blockDim.x) meet(p, load_few<N>(body + i * N));
    for (i64 j = head + pieces * N + threadIdx.x; j < width; j += blockDim.x) meet(p, load_few<1>(x + j));
    const A top = block_max(p.top, slots);
    raise(p, top);
    const A sum = block_sum(p.sum, slots), below = SMOOTH ? block_sum(p.below, slots) : A(0);
    if (threadIdx.x != 0) return;
    const A base = level(top), all = base + log_of(sum);
    lse[row] = all;
    i64 label = labels[row];
    if (label == ignore) {
        loss[row] = 0;
        return;
    }
    label = checked(label, row, width, alarm, code);
    if (width == 0) return;
    A hard = all - up(x[label]);
    if (SMOOTH) hard = (A)(1.0 - smoothing) * hard + (A)smoothing * ((all - base) + below / (A)width);
    loss[row] = hard;
}

// dx may be x: every thread reads its elements before it writes them.
extern "C" __global__ __launch_bounds__(512) void cross_entropy_grad(
    const T* x, const i64* __restrict__ labels, const A* __restrict__ lse, const A* __restrict__ dloss, D* dx, i64 width,
    i64 ignore, double smoothing, u32* alarm, u32 code
) {
    const i64 row = blockIdx.x;
    x += row * width;
    dx += row * width;
    i64 label = labels[row];
    const bool left_out = label == ignore;
    if (!left_out && (u64)label >= (u64)width) {
        if (threadIdx.x == 0) raise_alarm(alarm, code, label, row, width);
        label = 0;
    }
    const A all = lse[row], slope = dloss[row];
    const A share = (A)(smoothing / (double)width), target = (A)(1.0 - smoothing) + share;
    auto one = [&](T v, i64 at) {
        D out;
        put(out, left_out ? A(0) : slope * (Exp<T>::of(up(v) - all) - (at == label ? target : share)));
        return out;
    };
    const i64 head = ragged(x, dx, width), pieces = (width - head) / N;
    for (i64 i = threadIdx.x; i < head; i += blockDim.x) dx[i] = one(x[i], i);
    for (i64 i = threadIdx.x; i < pieces; i += AHEAD * (i64)blockDim.x) {
        Few<T, N> v[AHEAD];
        #pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            i64 at = i + k * (i64)blockDim.x;
            if (at < pieces) v[k] = load_few<N>(x + head + at * N);
        }
        #pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            i64 at = i + k * (i64)blockDim.x;
            if (at >= pieces) continue;
            Few<D, N> out;
            #pragma unroll
            for (int j = 0; j < N; ++j) out.at[j] = one(v[k].at[j], head + at * N + j);
            store_few(dx + head + at * N, out);
        }
    }
    for (i64 j = head + pieces * N + threadIdx.x; j < width; j += blockDim.x) dx[j] = one(x[j], j);
}
