// A stable sort of n keys (u32) with the places they came from, by digits from the lowest to the highest.
//
// One digit is three kernels. A tile is TILE neighbouring keys, its order is kept:
//   sort_count: counts[digit][tile] = how often the digit occurs in the tile; one block per tile.
//   sort_scan:  counts[digit][tile] = the same digit in earlier tiles; totals[digit]; one warp per digit.
//   sort_place: place = smaller digits + same digit in earlier tiles + same digit earlier in the tile;
//               one warp per tile, 32 keys at a time in order.
// Counting is in integers, so the result depends on the keys alone.
//
// index_keys and scatter_keys write the keys: where each element goes, `bad` where its index is refused.

extern __shared__ u32 counters[];

extern "C" __global__ void __launch_bounds__(256)
index_keys(const char* index, int kind, i64 n, i64 bound, u32 bad, u32* keys, u32* alarm, u32 code) {
    i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    i64 at = index_at(index, i, kind);
    bool good = (u64)at < (u64)bound;
    if (!good) raise_alarm(alarm, code, at, i, bound);
    keys[i] = good ? (u32)at : bad;
}

// The key of element i of `src` is the offset in the dense y where it is added.
extern "C" __global__ void __launch_bounds__(256)
scatter_keys(View src, View y, int dim, const char* index, int kind, i64 n, u32 bad, u32* keys, u32* alarm, u32 code) {
    i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    i64 at = index_at(index, i, kind);
    bool good = (u64)at < (u64)y.dim[dim];
    if (!good) raise_alarm(alarm, code, at, i, y.dim[dim]);
    i64 to = at * y.stride[dim], rest = i;
    for (int d = (int)src.rank - 1; d >= 0; --d) {
        i64 q = rest / src.dim[d];
        if (d != dim) to += (rest - q * src.dim[d]) * y.stride[d];
        rest = q;
    }
    keys[i] = good ? (u32)to : bad;
}

extern "C" __global__ void __launch_bounds__(256)
sort_count(const u32* keys, i64 n, int shift, int digits, i64 tiles, u32* counts) {
    for (int d = threadIdx.x; d < digits; d += 256) counters[d] = 0;
    __syncthreads();
    i64 first = (i64)blockIdx.x * TILE;
    for (int i = threadIdx.x; i < TILE; i += 256)
        if (first + i < n) atomicAdd(&counters[(keys[first + i] >> shift) & (u32)(digits - 1)], 1u);
    __syncthreads();
    for (int d = threadIdx.x; d < digits; d += 256) counts[d * tiles + blockIdx.x] = counters[d];
}

// The sum over this lane and the lanes below it.
__device__ __forceinline__ u32 up_to_here(u32 x, int lane) {
    for (int step = 1; step < 32; step <<= 1) {
        u32 below = __shfl_up_sync(0xffffffffu, x, step);
        if (lane >= step) x += below;
    }
    return x;
}

extern "C" __global__ void __launch_bounds__(256) sort_scan(u32* counts, i64 tiles, int digits, u32* totals) {
    int lane = threadIdx.x & 31, digit = blockIdx.x * 8 + (threadIdx.x >> 5);
    if (digit >= digits) return;
    u32* mine = counts + digit * tiles;
    u32 before = 0;
    for (i64 first = 0; first < tiles; first += 32) {
        i64 tile = first + lane;
        u32 count = tile < tiles ? mine[tile] : 0;
        u32 sum = up_to_here(count, lane);
        if (tile < tiles) mine[tile] = before + sum - count;
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) totals[digit] = before;
}

// `items` is null in the first pass: then item i is i. `digits` is a multiple of 32.
extern "C" __global__ void __launch_bounds__(32)
sort_place(const u32* __restrict__ keys, const u32* __restrict__ items, i64 n, int shift, int digits, i64 tiles,
           const u32* __restrict__ counts, const u32* __restrict__ totals, u32* keys_out, u32* items_out) {
    int lane = threadIdx.x, each = digits / 32;
    i64 tile = blockIdx.x;
    u32 sum = 0;
    for (int d = lane * each; d < (lane + 1) * each; ++d) sum += totals[d];
    u32 smaller = up_to_here(sum, lane) - sum;
    // counters[digit] is the place of the next key with that digit.
    for (int d = lane * each; d < (lane + 1) * each; ++d) {
        counters[d] = smaller + counts[d * tiles + tile];
        smaller += totals[d];
    }
    __syncwarp();
    const int STEPS = TILE / 32;
    u32 key[STEPS], item[STEPS];
    #pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        i64 i = tile * TILE + s * 32 + lane;
        key[s] = i < n ? keys[i] : 0;
        item[s] = i < n ? (items ? items[i] : (u32)i) : 0;
    }
    #pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        bool real = tile * TILE + s * 32 + lane < n;
        u32 digit = real ? (key[s] >> shift) & (u32)(digits - 1) : (u32)digits;
        u32 same = __match_any_sync(0xffffffffu, digit);
        u32 earlier = __popc(same & ((1u << lane) - 1u));
        u32 place = real ? counters[digit] + earlier : 0;
        __syncwarp();
        if (real && earlier == 0) counters[digit] += __popc(same);
        __syncwarp();
        if (real) { keys_out[place] = key[s]; items_out[place] = item[s]; }
    }
}
