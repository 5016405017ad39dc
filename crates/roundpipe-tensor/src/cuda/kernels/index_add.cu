// y[o, index[i], c] += src[o, i, c] and y[.., index[.., i, ..], ..] += src[.., i, ..], in order of i.
// SRC, DST, SUM: the types of source, destination and sums (T, Y, A); FEW: columns of a thread (V). An element is read once, summed in A in order
// and rounded once (scatter_lines: rounded at every addition).
//
//   index_add:     the indices come sorted, equal ones in order of i: `items` are the i, `keys` their rows. The
//                  threads of a row of the block own V columns each; the place where a run of equal keys begins
//                  adds the whole run. A warp reads 32 places of the run at a time, and U rows ahead of the sums.
//   scatter_lines: one thread per line along the dimension, one addition after the other.
//   scatter_runs:  elements sorted by destination; one thread per run of equal keys.

typedef SRC T;
typedef DST Y;
typedef SUM A;
static const int V = FEW;

__device__ __forceinline__ float sum_in(float x) { return x; }
__device__ __forceinline__ double sum_in(double x) { return x; }
__device__ __forceinline__ float sum_in(bf16 x) { return up(x); }
__device__ __forceinline__ float sum_in(f16 x) { return up(x); }
__device__ __forceinline__ i64 sum_in(i64 x) { return x; }
__device__ __forceinline__ i64 sum_in(int x) { return x; }
__device__ __forceinline__ i64 sum_in(u32 x) { return x; }
__device__ __forceinline__ i64 sum_in(u8 x) { return x; }

__device__ __forceinline__ void sum_out(float& y, float x) { y = x; }
__device__ __forceinline__ void sum_out(double& y, double x) { y = x; }
__device__ __forceinline__ void sum_out(bf16& y, float x) { put(y, x); }
__device__ __forceinline__ void sum_out(f16& y, float x) { put(y, x); }
__device__ __forceinline__ void sum_out(i64& y, i64 x) { y = x; }
__device__ __forceinline__ void sum_out(int& y, i64 x) { y = (int)x; }
__device__ __forceinline__ void sum_out(u32& y, i64 x) { y = (u32)x; }
__device__ __forceinline__ void sum_out(u8& y, i64 x) { y = (u8)x; }

template <typename E> struct __align__(sizeof(E) * V) Few { E at[V]; };

// Where element `i` of the dimensions from `low` to `high` lies.
__device__ __forceinline__ i64 part_of(const View& v, int low, int high, i64 i) {
    i64 at = 0;
    for (int d = high - 1; d >= low && i > 0; --d) {
        i64 q = i / v.dim[d];
        at += (i - q * v.dim[d]) * v.stride[d];
        i = q;
    }
    return at;
}

// Memory wants many warps: no more than 64 registers.
extern "C" __global__ void __launch_bounds__(256, 4)
index_add(View src, int dim, const u32* __restrict__ keys, const u32* __restrict__ items, i64 many, i64 size, Y* y,
          i64 outer, i64 inner) {
    const int U = 8;
    i64 first = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (first >= many) return;
    u32 key = keys[first];
    // Keys at and above the size were refused; they come last.
    if ((i64)key >= size || (first > 0 && keys[first - 1] == key)) return;
    // Whole warps lie in one row of the block: blockDim.x is a multiple of 32.
    int lane = threadIdx.x & 31;
    i64 step = src.stride[dim];
    for (i64 o = blockIdx.z; o < outer; o += gridDim.z) {
        i64 base = part_of(src, 0, dim, o);
        for (i64 block = blockIdx.y; block * blockDim.x * V < inner; block += gridDim.y) {
            i64 c = (block * blockDim.x + threadIdx.x) * V;
            bool mine = c < inner;
            const T* from = reinterpret_cast<const T*>(src.ptr) + base + part_of(src, dim + 1, (int)src.rank, c);
            Few<Y>* to = reinterpret_cast<Few<Y>*>(y + (o * size + key) * inner + c);
            A sum[V];
            if (mine) {
                Few<Y> old = *to;
                #pragma unroll
                for (int v = 0; v < V; ++v) sum[v] = sum_in(old.at[v]);
            }
            for (i64 place = first;; place += 32) {
                bool ours = place + lane < many && keys[place + lane] == key;
                u32 item = ours ? items[place + lane] : 0;
                // Equal keys are neighbours: the lanes that are ours are the first ones.
                int count = __popc(__ballot_sync(0xffffffffu, ours));
                for (int start = 0; start < count; start += U) {
                    Few<T> x[U];
                    #pragma unroll
                    for (int u = 0; u < U; ++u) {
                        i64 row = __shfl_sync(0xffffffffu, item, (start + u) & 31);
                        if (mine && start + u < count) x[u] = *reinterpret_cast<const Few<T>*>(from + row * step);
                    }
                    #pragma unroll
                    for (int u = 0; u < U; ++u) {
                        if (mine && start + u < count) {
                            #pragma unroll
                            for (int v = 0; v < V; ++v) sum[v] += sum_in(x[u].at[v]);
                        }
                    }
                }
                if (count < 32) break;
            }
            if (mine) {
                Few<Y> fresh;
                #pragma unroll
                for (int v = 0; v < V; ++v) sum_out(fresh.at[v], sum[v]);
                *to = fresh;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
scatter_lines(View src, View y, int dim, const char* index, int kind, i64 lines, u32* alarm, u32 code) {
    i64 line = (i64)blockIdx.x * 256 + threadIdx.x;
    if (line >= lines) return;
    i64 from = 0, to = 0, at = 0, dense = 1, along = 0, rest = line;
    for (int d = (int)src.rank - 1; d >= 0; --d) {
        if (d == dim) {
            along = dense;
        } else {
            i64 q = rest / src.dim[d], c = rest - q * src.dim[d];
            from += c * src.stride[d];
            to += c * y.stride[d];
            at += c * dense;
            rest = q;
        }
        dense *= src.dim[d];
    }
    for (i64 i = 0; i < src.dim[dim]; ++i) {
        i64 place = at + i * along, target = index_at(index, place, kind);
        if ((u64)target >= (u64)y.dim[dim]) { raise_alarm(alarm, code, target, place, y.dim[dim]); continue; }
        Y& sum = reinterpret_cast<Y*>(y.ptr)[to + target * y.stride[dim]];
        sum_out(sum, (A)(sum_in(sum) + sum_in(reinterpret_cast<const T*>(src.ptr)[from + i * src.stride[dim]])));
    }
}

extern "C" __global__ void __launch_bounds__(256)
scatter_runs(View src, const u32* keys, const u32* items, i64 n, i64 size, Y* y) {
    i64 first = (i64)blockIdx.x * 256 + threadIdx.x;
    if (first >= n) return;
    u32 key = keys[first];
    if ((i64)key >= size || (first > 0 && keys[first - 1] == key)) return;
    A sum = sum_in(y[key]);
    for (i64 place = first; place < n && keys[place] == key; ++place)
        sum += sum_in(reinterpret_cast<const T*>(src.ptr)[offset_of(src, items[place])]);
    sum_out(y[key], sum);
}
