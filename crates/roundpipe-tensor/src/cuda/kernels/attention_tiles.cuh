// Tiles of attention for Hopper's own instructions, which attention_wgmma.cu and attention_wgmma_backward.cu share: where
// they lie in shared memory, how they are brought, multiplied, hidden and written.
// Macros: those of the kernels. The texts of attention and of Hopper's instructions come first.

const int ROWS = 128;
const int PANELS = D / 64;
// Bytes of a panel of the block's own rows and of a passing tile, and of all panels.
const u32 OWN_PANEL = ROWS * 128;
const u32 TILE_PANEL = COLS * 128;
const u32 OWN_BYTES = PANELS * OWN_PANEL;
const u32 TILE_BYTES = PANELS * TILE_PANEL;
// Sequences of a row that a lane keeps in registers, to sort tiles by their work.
const int KEPT = 4;

// The tile of rank `rank` among those of all sequences when the ones with the most work come first: of queries those
// that lie farthest from their sequence's start, of keys from its end. All lanes of a warp; false when there is none.
// Rows of very many sequences have so little work in a tile that the order does not matter.
__device__ __forceinline__ bool find_tile(Piece& p, const Shape& s, bool by_keys, i64 rank, i64 slots) {
    i64 items = s.sequences + 2;
    if (!s.lens_q || items > 32 * KEPT) return find_piece(p, s, by_keys, by_keys ? rank : slots - 1 - rank, ROWS);
    const int* lens = by_keys ? s.lens_k : s.lens_q;
    i64 rows = by_keys ? s.keys : s.queries;
    int lane = threadIdx.x % 32, tiles[KEPT], most = 0;
    #pragma unroll
    for (int n = 0; n < KEPT; ++n) {
        i64 i = n * 32 + lane;
        i64 length = i < items ? end_of(lens, s.sequences, rows, i + 1) - end_of(lens, s.sequences, rows, i) : 0;
        tiles[n] = length > 0 ? (int)((length + ROWS - 1) / ROWS) : 0;
        most = max(most, tiles[n]);
    }
    // Tiles that have at least `level` tiles of their sequence before (behind) them.
    auto from = [&](int level) {
        int sum = 0;
        #pragma unroll
        for (int n = 0; n < KEPT; ++n) sum += max(0, tiles[n] - level);
        return __reduce_add_sync(0xffffffffu, sum);
    };
    int low = 0, high = __reduce_max_sync(0xffffffffu, most);
    if (from(0) <= rank) return false;
    while (high - low > 1) {
        int mid = (low + high) / 2;
        if (from(mid) > rank) low = mid; else high = mid;
    }
    // Of the sequences that have a tile at this level, the one to take.
    int left = (int)rank - from(high);
    #pragma unroll
    for (int n = 0; n < KEPT; ++n) {
        u32 have = __ballot_sync(0xffffffffu, tiles[n] > low);
        int before = __popc(have & (1u << lane) - 1);
        u32 taken = __ballot_sync(0xffffffffu, tiles[n] > low && before == left);
        if (taken) {
            int who = __ffs((int)taken) - 1, count = __shfl_sync(0xffffffffu, tiles[n], who);
            set_rows(p, s, by_keys, n * 32 + who);
            p.at = (i64)(by_keys ? count - 1 - low : low) * ROWS;
            return p.at < (by_keys ? p.keys : p.queries);
        }
        left -= __popc(have);
    }
    return false;
}

// Where a block works: of packed rows all heads of a rank together, since ranks are sorted; otherwise a head's tiles.
__device__ __forceinline__ Place place_in(const Shape& s, i64 x, i64 slots, i64 heads) {
    if (!s.lens_q) return place_of(x, slots, heads);
    Place at;
    at.slot = x / heads; at.head = x % heads; at.batch = 0;
    return at;
}

// Orders the copies of a tile of one head: all panels of rows from `row` on.
__device__ __forceinline__ void bring(u32 to, u32 panel_bytes, const TensorMap* map, u32 bar, i64 row, i64 head, i64 batch) {
    #pragma unroll
    for (int i = 0; i < PANELS; ++i) copy_head(to + i * panel_bytes, map, bar, i * 64, (int)row, (int)head, (int)batch);
}

// Sums of 64 own rows times COLS rows of a tile, over the width. The caller begins and commits. A description's address
// is in units of 16 bytes and never leaves its field, so that steps are additions.
__device__ __forceinline__ void scores(float (&x)[COLS / 2], u32 own, u32 tile) {
    u64 a = describe(own, 16, 1024), b = describe(tile, 16, 1024);
    #pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        u32 step = i % 4 * 32;
        multiply<0>(x, a + (i / 4 * OWN_PANEL + step) / 16, b + (i / 4 * TILE_PANEL + step) / 16, i > 0);
    }
}

// Adds weights of 64 own rows times a tile of COLS rows.
__device__ __forceinline__ void weighted(float (&sums)[D / 2], const u32 (&weights)[COLS / 4], u32 tile) {
    u64 b = describe(tile, TILE_PANEL, 1024);
    #pragma unroll
    for (int i = 0; i < COLS / 16; ++i) multiply<1>(sums, weights + 4 * i, b + i * 2048 / 16, 1);
}

// Sums as the left side of a product.
__device__ __forceinline__ void narrow(u32 (&weights)[COLS / 4], const float (&x)[COLS / 2]) {
    #pragma unroll
    for (int i = 0; i < COLS / 4; ++i) weights[i] = pair_of(x[2 * i], x[2 * i + 1]);
}

template <int N> __device__ __forceinline__ void clear(float (&x)[N]) {
    #pragma unroll
    for (int i = 0; i < N; ++i) x[i] = 0.0f;
    hold(x);
}

// Zeros for the lines of a tile from `first` on; by all threads of a warpgroup, who then call `zeroed`.
__device__ __forceinline__ void zero_lines(u8* tile, int first) {
    int count = (COLS - first) * 8;
    for (int n = threadIdx.x % 128; n < count * PANELS; n += 128)
        *(uint4*)(tile + n / count * TILE_PANEL + first * 128 + n % count * 16) = make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void zeroed() {
    show_to_engines();
    meet(3 + threadIdx.x / 128, 128);
}

// Gives `value` to the columns of a row, upper or lower, that are not within `low` and `high`. Both count from the
// lane's own first column.
__device__ __forceinline__ void hide(float (&x)[COLS / 2], int lower, int low, int high, float value) {
    #pragma unroll
    for (int n = 0; n < COLS / 8; ++n) {
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (n * 8 + e < low || n * 8 + e >= high) x[n * 4 + 2 * lower + e] = value;
        }
    }
}

// Writes a warp's 16 rows, times a factor for the upper and one for the lower eight, by way of lines of its own in
// shared memory. `line` is the first of them in the block, `rows` how many rows of the block there are.
__device__ __forceinline__ void store(u8* stage, int line, const float (&x)[D / 2], float upper, float lower, T* to, i64 stride, int rows) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    #pragma unroll
    for (int n = 0; n < D / 8; ++n) {
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            float factor = h ? lower : upper;
            *(u32*)(stage + n / 8 * OWN_PANEL + (line + g + 8 * h) * 128 + ((n % 8 ^ g) * 16 + t * 4)) =
                pair_of(x[n * 4 + 2 * h] * factor, x[n * 4 + 2 * h + 1] * factor);
        }
    }
    __syncwarp();
    #pragma unroll
    for (int n = lane; n < 16 * (D / 8); n += 32) {
        int r = line + n / (D / 8), c = n % (D / 8);
        if (r < rows) *(uint4*)(to + r * stride + c * 8) = *(const uint4*)(stage + c / 8 * OWN_PANEL + r * 128 + (c % 8 ^ r & 7) * 16);
    }
}

// The number of the warpgroup, as a value that is known to be the same for a warp: the compiler lets products overlap
// only where it sees that all lanes go the same way.
__device__ __forceinline__ int warpgroup_here() { return __shfl_sync(0xffffffffu, (int)(threadIdx.x / 128), 0); }

// Where the tiles of shared memory begin: at a multiple of 1024 bytes.
__device__ __forceinline__ u8* tiles_in(u8* raw) { return raw + ((1024 - (shared_address(raw) & 1023)) & 1023); }

// A block's 64,512 registers: so many for each thread that orders copies, and so many for each that multiplies.
template <int COUNT> __device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT)); }
template <int COUNT> __device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT)); }

// Tile j of a block goes through stage j % STAGES; this is how often that was used before, as a parity.
__device__ __forceinline__ u32 turn_of(int j) { return (u32)(j / STAGES) & 1; }
