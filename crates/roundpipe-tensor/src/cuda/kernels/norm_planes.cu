// Group norm and batch norm of [n, c, plane], and their gradients.
//
//   y = (x - m) r w + b;   r = 1 / sqrt(var + eps); m and var of a group of channels of a sample, or of a channel
//   dx = r (dy w - F - h L),  h = (x - m) r;   F, L: means of dy w and dy w h over what m was taken over
//   dw = sum dy h,  db = sum dy over samples and places
//
// First every plane gives two numbers (plane_*), then those of the planes that belong together are joined in a
// fixed order (join_*: planes r * base + j * step, j < many, of result r; one warp per result), then planes are
// mapped (plane_*). A plane belongs to one thread, one warp, or one block; blocks are [threads of a plane, planes].
// Plane p has statistics (p / per) % stats and channel p % channels.

typedef ELEMENT T;
typedef AccOf<T>::type A;
const int N = WIDE ? 16 / sizeof(T) : 1;
typedef Few<T, N> Piece;

template <typename F> __device__ __forceinline__ A part(const T* x, i64 plane, F f) {
    A sum = 0;
    for (i64 i = (i64)threadIdx.x * N; i < plane; i += (i64)blockDim.x * N) {
        Piece p = load_few<N>(x + i);
        #pragma unroll
        for (int j = 0; j < N; ++j) sum += f(up(p.at[j]));
    }
    return sum;
}

// Mean and sum of squared deviations of every plane.
extern "C" __global__ __launch_bounds__(1024) void plane_moments(
    const T* __restrict__ x, A* __restrict__ means, A* __restrict__ spreads, i64 planes, i64 plane
) {
    __shared__ A slots[32];
    const i64 p = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (p >= planes) return;
    x += p * plane;
    const A count = (A)plane;
    const A near = row_sum(part(x, plane, [](A v) { return v; }), slots) / count;
    const A missed = row_sum(part(x, plane, [=](A v) { return v - near; }), slots) / count;
    const A spread = row_sum(part(x, plane, [=](A v) { return (v - near) * (v - near); }), slots);
    if (threadIdx.x != 0) return;
    means[p] = near + missed;
    spreads[p] = spread - count * missed * missed;
}

// Blocks of [32, 8]. var may be null.
extern "C" __global__ __launch_bounds__(256) void join_moments(
    const A* __restrict__ means, const A* __restrict__ spreads, A* mean, A* rstd, A* var,
    i64 results, i64 base, i64 step, i64 many, i64 plane, double eps
) {
    const i64 r = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (r >= results) return;
    means += r * base;
    spreads += r * base;
    const A count = (A)many;
    A sum = 0;
    for (i64 j = threadIdx.x; j < many; j += 32) sum += means[j * step];
    const A near = warp_sum(sum) / count;
    A missed = 0, between = 0, within = 0;
    for (i64 j = threadIdx.x; j < many; j += 32) {
        A d = means[j * step] - near;
        missed += d;
        between += d * d;
        within += spreads[j * step];
    }
    missed = warp_sum(missed) / count;
    between = warp_sum(between) - count * missed * missed;
    within = warp_sum(within);
    if (threadIdx.x != 0) return;
    const A v = (within + (A)plane * between) / (count * (A)plane);
    mean[r] = near + missed;
    rstd[r] = A(1) / root_of(v + (A)eps);
    if (var) var[r] = v;
}

// Statistics that are given: one thread per channel.
extern "C" __global__ __launch_bounds__(256) void given_moments(
    const A* __restrict__ means, const A* __restrict__ vars, A* mean, A* rstd, A* var, i64 channels, double eps
) {
    const i64 c = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    mean[c] = means[c];
    var[c] = vars[c];
    rstd[c] = A(1) / root_of(vars[c] + (A)eps);
}

extern "C" __global__ __launch_bounds__(1024) void plane_apply(
    const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ b, const A* __restrict__ mean,
    const A* __restrict__ rstd, T* __restrict__ y, i64 planes, i64 plane, i64 channels, i64 per, i64 stats
) {
    const i64 p = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (p >= planes) return;
    const i64 s = p / per % stats, c = p % channels;
    const A m = mean[s], r = rstd[s], weight = w ? up(w[c]) : A(1), bias = b ? up(b[c]) : A(0);
    x += p * plane;
    y += p * plane;
    for (i64 i = (i64)threadIdx.x * N; i < plane; i += (i64)blockDim.x * N) {
        Piece v = load_few<N>(x + i), out;
        #pragma unroll
        for (int j = 0; j < N; ++j) put(out.at[j], (up(v.at[j]) - m) * r * weight + bias);
        store_few(y + i, out);
    }
}

// Sums of dy h and of dy of every plane.
extern "C" __global__ __launch_bounds__(1024) void plane_sums(
    const T* __restrict__ x, const T* __restrict__ dy, const A* __restrict__ mean, const A* __restrict__ rstd,
    A* __restrict__ along, A* __restrict__ flat, i64 planes, i64 plane, i64 per, i64 stats
) {
    __shared__ A slots[32];
    const i64 p = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (p >= planes) return;
    const i64 s = p / per % stats;
    const A m = mean[s], r = rstd[s];
    x += p * plane;
    dy += p * plane;
    A sum_along = 0, sum_flat = 0;
    for (i64 i = (i64)threadIdx.x * N; i < plane; i += (i64)blockDim.x * N) {
        Piece v = load_few<N>(x + i), d = load_few<N>(dy + i);
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            sum_along += up(d.at[j]) * ((up(v.at[j]) - m) * r);
            sum_flat += up(d.at[j]);
        }
    }
    sum_along = row_sum(sum_along, slots);
    sum_flat = row_sum(sum_flat, slots);
    if (threadIdx.x != 0) return;
    along[p] = sum_along;
    flat[p] = sum_flat;
}

// out[r] (+)= scale * sum of w[(r % groups) * many + j] * sums[r * base + j * step]; w may be null. Blocks of [32, 8].
extern "C" __global__ __launch_bounds__(256) void join_sums(
    const A* __restrict__ sums, const T* __restrict__ w, A* out,
    i64 results, i64 base, i64 step, i64 many, i64 groups, double scale, int accumulate
) {
    const i64 r = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (r >= results) return;
    sums += r * base;
    if (w) w += r % groups * many;
    A sum = 0;
    for (i64 j = threadIdx.x; j < many; j += 32) sum += (w ? up(w[j]) : A(1)) * sums[j * step];
    sum = warp_sum(sum) * (A)scale;
    if (threadIdx.x == 0) out[r] = accumulate ? out[r] + sum : sum;
}

// along and flat are those of statistics s; by_weight: they lack the channel's weight (batch norm).
extern "C" __global__ __launch_bounds__(1024) void plane_grad(
    const T* __restrict__ x, const T* __restrict__ dy, const T* __restrict__ w, const A* __restrict__ mean,
    const A* __restrict__ rstd, const A* __restrict__ along, const A* __restrict__ flat, T* __restrict__ dx,
    i64 planes, i64 plane, i64 channels, i64 per, i64 stats, int by_weight
) {
    const i64 p = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (p >= planes) return;
    const i64 s = p / per % stats, c = p % channels;
    const A m = mean[s], r = rstd[s], weight = w ? up(w[c]) : A(1), lift = by_weight ? weight : A(1);
    const A l = along[s] * lift, f = flat[s] * lift;
    x += p * plane;
    dy += p * plane;
    dx += p * plane;
    for (i64 i = (i64)threadIdx.x * N; i < plane; i += (i64)blockDim.x * N) {
        Piece v = load_few<N>(x + i), d = load_few<N>(dy + i), out;
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            put(out.at[j], r * (up(d.at[j]) * weight - f - (up(v.at[j]) - m) * r * l));
        }
        store_few(dx + i, out);
    }
}
