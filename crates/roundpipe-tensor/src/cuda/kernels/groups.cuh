// Groups of rows, bounded by `offsets` in device memory: group g has rows offsets[g] .. offsets[g + 1] of t.

// A tile of rows inside one group; group `e` stands for the rows past the last offset. No rows: no such tile.
struct Place { int group, row, rows; };

// Offset i, held within 0 ..= t; the one after the last is t.
__device__ __forceinline__ int bound_of(const int* offsets, int e, int t, int i) {
    if (i > e) return t;
    int at = offsets[i];
    return at < 0 ? 0 : at > t ? t : at;
}

// Tile number `tile` when every group is cut into tiles of `size` rows. Every warp scans for itself, 32 groups at a
// time: there are few groups, and no warp waits for another.
__device__ __forceinline__ Place find_tile(const int* offsets, int e, int t, int tile, int size) {
    int lane = threadIdx.x & 31, before = 0;
    for (int base = 0; base <= e; base += 32) {
        int group = base + lane, from = 0, to = 0;
        if (group <= e) { from = bound_of(offsets, e, t, group); to = bound_of(offsets, e, t, group + 1); }
        int tiles = to > from ? (to - from + size - 1) / size : 0;
        int sum = tiles;
        for (int step = 1; step < 32; step <<= 1) {
            int other = __shfl_up_sync(0xffffffffu, sum, step);
            if (lane >= step) sum += other;
        }
        int mine = tile - before - (sum - tiles);
        u32 hit = __ballot_sync(0xffffffffu, mine >= 0 && mine < tiles);
        if (hit) {
            int who = __ffs((int)hit) - 1;
            Place p;
            p.group = __shfl_sync(0xffffffffu, group, who);
            p.row = __shfl_sync(0xffffffffu, from + mine * size, who);
            int left = __shfl_sync(0xffffffffu, to, who) - p.row;
            p.rows = left < size ? left : size;
            return p;
        }
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
    Place none = { 0, 0, 0 };
    return none;
}

// Offsets must ascend from 0 within t; the first block says so when they do not.
__device__ __forceinline__ void check_offsets(const int* offsets, int e, int t, u32* alarm, u32 code) {
    if (blockIdx.x != 0) return;
    for (int i = threadIdx.x; i <= e; i += blockDim.x) {
        int at = offsets[i], low = i == 0 ? 0 : offsets[i - 1];
        if (at < low || at > t || (i == 0 && at != 0)) raise_alarm(alarm, code, at, i, i == 0 ? 1 : (i64)t + 1);
    }
}
