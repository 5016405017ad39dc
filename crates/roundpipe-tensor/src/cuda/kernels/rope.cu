// Rotary embedding of heads [b, s, h, d], alone (NORM 0) or behind the RMS norm of a head (NORM 1), and the
// gradient of the latter.
//
//   pair (p, q) of a head's first 2 half elements:  (p cos - q sin, q cos + p sin); the rest passes
//   STYLE 0: p = element i, q = element i + half;   STYLE 1: p = element 2i, q = element 2i + 1
//   NORM: elements are x r w before they turn, r = 1 / sqrt(mean(x^2) + eps)
//   gradient: g = dy turned back;  dx = r (g w - x r mean(g w x r));  dw = sum g x r
//
// A head belongs to a group of `lanes` neighbouring threads (a power of two up to 32), which sum by shuffles.
// A unit is two pieces of N elements (WIDE: 16 bytes each) whose pairs are whole, or of what passes; a thread
// takes units lane, lane + lanes, .. and holds the first in registers. For dw a block goes over `per` consecutive
// heads; every group sums for itself, the groups of a block are added in order, sum_chunks adds the blocks.

typedef ELEMENT T;
typedef AccOf<T>::type A;
const int N = WIDE ? 16 / sizeof(T) : 1;
typedef Few<T, N> Piece;

// Sizes, tables of cosines and sines [table, half], positions [b, s] or null.
struct Heads {
    i64 steps, heads, width, half, table;
    const A* cos;
    const A* sin;
    const int* positions;
    u32* alarm;
    u32 code;
};
// As the parameters of a kernel, and back from there.
#define HEADS i64 steps, i64 heads, i64 width, i64 half, i64 table, const A* cos, const A* sin, \
    const int* positions, u32* alarm, u32 code
#define THESE { steps, heads, width, half, table, cos, sin, positions, alarm, code }

struct Place { u32 batch, step, head; };

__device__ __forceinline__ Place place_of(const Heads& h, u32 row) {
    u32 place = row / (u32)h.heads;
    Place p;
    p.head = row - place * (u32)h.heads;
    p.batch = place / (u32)h.steps;
    p.step = place - p.batch * (u32)h.steps;
    return p;
}

// The position of a head; one that is not in the table raises the alarm and counts as 0.
__device__ __forceinline__ i64 position_of(const Heads& h, const Place& p) {
    if (!h.positions) return p.step;
    i64 at = (i64)p.batch * h.steps + p.step;
    return checked(h.positions[at], at, h.table, h.alarm, h.code);
}

// Where the two pieces of a unit lie in a head; `second` is -1 where there is only one.
struct Spot { int first, second, angle; };

__device__ __forceinline__ Spot spot_of(const Heads& h, int unit) {
    Spot s;
    const int half = (int)h.half, width = (int)h.width, pairs = half / N;
    if (unit < pairs) {
        s.first = STYLE == 0 ? unit * N : 2 * unit * N;
        s.second = s.first + (STYLE == 0 ? half : N);
        s.angle = unit * N;
    } else {
        s.first = 2 * half + (unit - pairs) * 2 * N;
        s.second = s.first + N < width ? s.first + N : -1;
        s.angle = -1;
    }
    return s;
}

__device__ __forceinline__ int units_of(const Heads& h) {
    const int half = (int)h.half, width = (int)h.width;
    return half / N + (width - 2 * half + 2 * N - 1) / (2 * N);
}

__device__ __forceinline__ void load(const T* head, const Spot& s, A (&e)[2 * N]) {
    Piece a = load_few<N>(head + s.first);
    #pragma unroll
    for (int j = 0; j < N; ++j) e[j] = up(a.at[j]), e[N + j] = 0;
    if (s.second < 0) return;
    Piece b = load_few<N>(head + s.second);
    #pragma unroll
    for (int j = 0; j < N; ++j) e[N + j] = up(b.at[j]);
}

__device__ __forceinline__ void store(T* head, const Spot& s, const A (&e)[2 * N]) {
    Piece a, b;
    #pragma unroll
    for (int j = 0; j < N; ++j) put(a.at[j], e[j]), put(b.at[j], e[N + j]);
    store_few(head + s.first, a);
    if (s.second >= 0) store_few(head + s.second, b);
}

// The angles of a unit at a position, where its pairs turn.
struct Angles { Few<A, N> cos, sin; };

__device__ __forceinline__ void look_up(const Heads& h, i64 position, const Spot& s, Angles& angles) {
    if (s.angle < 0) return;
    angles.cos = load_few<N>(h.cos + position * h.half + s.angle);
    angles.sin = load_few<N>(h.sin + position * h.half + s.angle);
}

// Turns the pairs of a unit, or back with sign -1.
__device__ __forceinline__ void turn(const Angles& angles, const Spot& s, A sign, A (&e)[2 * N]) {
    if (s.angle < 0) return;
    #pragma unroll
    for (int j = 0; j < N; ++j) {
        const int at = STYLE == 0 ? j : 2 * j, to = STYLE == 0 ? N + j : 2 * j + 1;
        A p = e[at], q = e[to], c = angles.cos.at[j], t = angles.sin.at[j] * sign;
        e[at] = p * c - q * t;
        e[to] = q * c + p * t;
    }
}

// 1 / sqrt(sum / count + eps), to the accuracy that values of type V deserve.
template <typename V> struct Scale { static __device__ __forceinline__ float of(float sum, float count, float eps) {
    return rsqrtf(__fdividef(sum, count) + eps);
} };
template <> struct Scale<float> { static __device__ __forceinline__ float of(float sum, float count, float eps) {
    return 1.0f / root_of(sum / count + eps);
} };
template <> struct Scale<double> { static __device__ __forceinline__ double of(double sum, double count, double eps) {
    return 1.0 / root_of(sum / count + eps);
} };

__device__ __forceinline__ A group_sum(A x, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

__device__ __forceinline__ A square(const A (&e)[2 * N]) {
    A sum = 0;
    #pragma unroll
    for (int j = 0; j < 2 * N; ++j) sum += e[j] * e[j];
    return sum;
}

// Blocks of 256 threads. x has strides sb, ss, sh; y and rstd are dense. w, rstd and eps: NORM only.
extern "C" __global__ __launch_bounds__(256, 4) void rope_heads(
    const T* __restrict__ x, i64 sb, i64 ss, i64 sh, const T* __restrict__ w, T* __restrict__ y, A* __restrict__ rstd,
    HEADS, u32 rows, int lanes, double sign, double eps
) {
    const Heads h = THESE;
    const int lane = threadIdx.x & (lanes - 1);
    u32 row = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
    // Idle groups follow the last head, for the shuffles, and write nothing.
    const bool live = row < rows;
    if (!live) row = rows - 1;
    const Place place = place_of(h, row);
    const i64 position = position_of(h, place);
    const int units = units_of(h);
    if (h.table == 0 && h.half > 0) return;
    const T* head = x + place.batch * sb + place.step * ss + place.head * sh;
    T* to = y + row * h.width;
    // The angles of the first unit are on their way before the sum is waited for.
    A e[2 * N];
    Angles angles;
    Spot spot = spot_of(h, lane);
    if (lane < units) {
        load(head, spot, e);
        look_up(h, position, spot, angles);
    }
    A r = 1;
    if (NORM) {
        A sum = lane < units ? square(e) : A(0);
        #pragma unroll 1
        for (int u = lane + lanes; u < units; u += lanes) {
            A more[2 * N];
            load(head, spot_of(h, u), more);
            sum += square(more);
        }
        r = Scale<T>::of(group_sum(sum, lanes), (A)h.width, (A)eps);
        if (live && lane == 0) rstd[row] = r;
    }
    if (!live) return;
    #pragma unroll 1
    for (int u = lane; u < units; u += lanes) {
        if (u != lane) {
            spot = spot_of(h, u);
            load(head, spot, e);
            look_up(h, position, spot, angles);
        }
        if (NORM) {
            A weight[2 * N];
            load(w, spot, weight);
            #pragma unroll
            for (int j = 0; j < 2 * N; ++j) e[j] = e[j] * r * weight[j];
        }
        turn(angles, spot, (A)sign, e);
        store(to, spot, e);
    }
}

// What a unit contributes: x as it lies in memory, and the gradient turned back.
struct Grad { Piece a, b; A g[2 * N]; };

__device__ __forceinline__ A x_of(const Grad& d, int j) { return up(j < N ? d.a.at[j] : d.b.at[j - N]); }

__device__ __forceinline__ void gather(
    const Heads& h, const T* head, const T* back, i64 position, const Spot& spot, Grad& d
) {
    d.a = load_few<N>(head + spot.first);
    // Where there is no second piece its gradient and weight are 0.
    d.b = load_few<N>(head + (spot.second < 0 ? spot.first : spot.second));
    load(back, spot, d.g);
    Angles angles;
    look_up(h, position, spot, angles);
    turn(angles, spot, A(-1), d.g);
}

// The unit's part of the sum of g w x.
__device__ __forceinline__ A product(const Grad& d, const T* w, const Spot& spot) {
    A weight[2 * N], sum = 0;
    load(w, spot, weight);
    #pragma unroll
    for (int j = 0; j < 2 * N; ++j) sum += weight[j] * d.g[j] * x_of(d, j);
    return sum;
}

// dy has strides db, ds, dh; dx is dense. dw: partial sums [blocks, d], or null. room: [groups of a block, d].
extern "C" __global__ __launch_bounds__(256, 2) void rope_heads_grad(
    const T* __restrict__ x, i64 sb, i64 ss, i64 sh, const T* __restrict__ dy, i64 db, i64 ds, i64 dh,
    const T* __restrict__ w, const A* __restrict__ rstd, T* __restrict__ dx, A* __restrict__ dw,
    HEADS, u32 rows, int lanes, u32 per
) {
    const Heads h = THESE;
    extern __shared__ __align__(32) char memory[];
    A* room = reinterpret_cast<A*>(memory);
    const int lane = threadIdx.x & (lanes - 1), groups = blockDim.x / lanes, group = threadIdx.x / lanes;
    const u32 first = blockIdx.x * per, last = rows - first < per ? rows : first + per;
    const int units = units_of(h);
    A* own = room + group * h.width;
    if (dw) {
        for (i64 i = threadIdx.x; i < groups * h.width; i += blockDim.x) room[i] = 0;
        __syncthreads();
    }
    A sums[2 * N];
    #pragma unroll
    for (int j = 0; j < 2 * N; ++j) sums[j] = 0;
    const Spot mine = spot_of(h, lane);
    for (u32 from = first; from < last; from += groups) {
        // Idle groups follow the last head, for the shuffles, and write nothing.
        const bool live = last - from > group;
        const u32 row = live ? from + group : last - 1;
        const Place place = place_of(h, row);
        const i64 position = position_of(h, place);
        if (h.table == 0 && h.half > 0) return;
        const T* head = x + place.batch * sb + place.step * ss + place.head * sh;
        const T* back = dy + place.batch * db + place.step * ds + place.head * dh;
        const A r = rstd[row];
        Grad kept;
        A sum = 0;
        if (lane < units) {
            gather(h, head, back, position, mine, kept);
            sum = product(kept, w, mine);
        }
        for (int u = lane + lanes; u < units; u += lanes) {
            Grad more;
            const Spot spot = spot_of(h, u);
            gather(h, head, back, position, spot, more);
            sum += product(more, w, spot);
        }
        const A mean = group_sum(sum, lanes) * r / (A)h.width;
        if (!live) continue;
        T* to = dx ? dx + row * h.width : dx;
        auto finish = [&](const Grad& d, const Spot& spot) {
            A e[2 * N];
            load(w, spot, e);
            #pragma unroll
            for (int j = 0; j < 2 * N; ++j) e[j] = r * (d.g[j] * e[j] - x_of(d, j) * r * mean);
            store(to, spot, e);
        };
        if (lane < units) {
            if (dx) finish(kept, mine);
            #pragma unroll
            for (int j = 0; j < 2 * N; ++j) sums[j] += kept.g[j] * (x_of(kept, j) * r);
        }
        for (int u = lane + lanes; u < units; u += lanes) {
            Grad more;
            const Spot spot = spot_of(h, u);
            gather(h, head, back, position, spot, more);
            if (dx) finish(more, spot);
            if (!dw) continue;
            #pragma unroll
            for (int j = 0; j < N; ++j) {
                own[spot.first + j] += more.g[j] * (x_of(more, j) * r);
                if (spot.second >= 0) own[spot.second + j] += more.g[N + j] * (x_of(more, N + j) * r);
            }
        }
    }
    if (!dw) return;
    if (lane < units) {
        #pragma unroll
        for (int j = 0; j < N; ++j) {
            own[mine.first + j] = sums[j];
            if (mine.second >= 0) own[mine.second + j] = sums[N + j];
        }
    }
    __syncthreads();
    dw += blockIdx.x * h.width;
    for (i64 c = threadIdx.x; c < h.width; c += blockDim.x) {
        A total = 0;
        for (int g = 0; g < groups; ++g) total += room[g * h.width + c];
        dw[c] = total;
    }
}
