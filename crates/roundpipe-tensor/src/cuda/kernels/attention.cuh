// What the attention kernels share: operands, which rows a block works on, and who sees whom.
//
// A tile is TILE consecutive queries (or keys) of one sequence, counted from the sequence's own first row, so that
// a row's bits depend on its own sequence alone. Packed sequences are found by bisection in the cumulative lengths:
// sequence i owns the tile slots from end(i) / TILE + i on, which are always enough for it; slots that are left over
// have nothing to do. Rows before the first and after the last sequence count as sequences without counterpart.

struct Shape {
    i64 batch, queries, keys, heads, key_heads, width, value_width;
    const int* lens_q;
    const int* lens_k;
    // Sequences, where there are lens.
    i64 sequences;
    i64 causal, window;
    double scale;
};

// Rows of one sequence, and the tile's first row in it.
struct Piece { i64 first_query, queries, first_key, keys, at; };

// End of sequence i - 1 in the list: nothing, the rows before the first, the sequences, the rows after the last.
__device__ __forceinline__ i64 end_of(const int* lens, i64 sequences, i64 rows, i64 i) {
    if (i <= 0) return 0;
    if (i > sequences + 1) return rows;
    i64 end = lens[i - 1];
    return end < 0 ? 0 : end > rows ? rows : end;
}

// Rows of sequence i - 1 in the list, whatever the tile: those before the first and after the last have no counterpart.
__device__ __forceinline__ void set_rows(Piece& p, const Shape& s, bool by_keys, i64 i) {
    i64 q0 = end_of(s.lens_q, s.sequences, s.queries, i), q1 = end_of(s.lens_q, s.sequences, s.queries, i + 1);
    i64 k0 = end_of(s.lens_k, s.sequences, s.keys, i), k1 = end_of(s.lens_k, s.sequences, s.keys, i + 1);
    bool alone = i == 0 || i == s.sequences + 1;
    p.first_query = q0; p.queries = alone && by_keys ? 0 : q1 > q0 ? q1 - q0 : 0;
    p.first_key = k0; p.keys = alone && !by_keys ? 0 : k1 > k0 ? k1 - k0 : 0;
}

// The rows of tile slot `slot` of queries (or keys); false when the slot is left over.
__device__ __forceinline__ bool find_piece(Piece& p, const Shape& s, bool by_keys, i64 slot, i64 tile) {
    if (!s.lens_q) {
        p.first_query = 0; p.queries = s.queries; p.first_key = 0; p.keys = s.keys;
        p.at = slot * tile;
        return p.at < (by_keys ? s.keys : s.queries);
    }
    const int* lens = by_keys ? s.lens_k : s.lens_q;
    i64 rows = by_keys ? s.keys : s.queries;
    i64 low = 0, high = s.sequences + 1;
    while (low < high) {
        i64 mid = (low + high + 1) / 2;
        if (end_of(lens, s.sequences, rows, mid) / tile + mid <= slot) low = mid; else high = mid - 1;
    }
    set_rows(p, s, by_keys, low);
    p.at = (slot - (end_of(lens, s.sequences, rows, low) / tile + low)) * tile;
    return p.at >= 0 && p.at < (by_keys ? p.keys : p.queries);
}

// Reports lengths that do not ascend or leave the rows; called by all threads of one block.
__device__ __forceinline__ void check_lens(const Shape& s, u32* alarm, u32 code) {
    if (!s.lens_q) return;
    for (i64 i = threadIdx.x; i <= s.sequences; i += blockDim.x) {
        i64 q = s.lens_q[i], k = s.lens_k[i];
        i64 q_before = i ? s.lens_q[i - 1] : 0, k_before = i ? s.lens_k[i - 1] : 0;
        if (q < q_before || q > s.queries) raise_alarm(alarm, code, q, i, s.queries + 1);
        if (k < k_before || k > s.keys) raise_alarm(alarm, code, k, i, s.keys + 1);
    }
}

__device__ __forceinline__ i64 clamp_to(i64 x, i64 low, i64 high) { return x < low ? low : x > high ? high : x; }

// Query i of the piece sees keys first_seen..end_seen; its position is that of a key, the last query at the last key.
__device__ __forceinline__ i64 first_seen(const Shape& s, const Piece& p, i64 i) {
    return clamp_to(i + p.keys - p.queries - s.window + 1, 0, p.keys);
}
__device__ __forceinline__ i64 end_seen(const Shape& s, const Piece& p, i64 i) {
    return s.causal ? clamp_to(i + p.keys - p.queries + 1, 0, p.keys) : p.keys;
}
// Keys first..end (not empty) are seen by queries within first_seer..end_seer.
__device__ __forceinline__ i64 first_seer(const Shape& s, const Piece& p, i64 first) {
    return s.causal ? clamp_to(first - (p.keys - p.queries), 0, p.queries) : 0;
}
__device__ __forceinline__ i64 end_seer(const Shape& s, const Piece& p, i64 end) {
    return clamp_to(end - 1 - (p.keys - p.queries) + s.window, 0, p.queries);
}

// Where a block works: x counts tile slots fastest, then heads, then batches.
struct Place { i64 slot, head, batch; };
__device__ __forceinline__ Place place_of(i64 x, i64 slots, i64 heads) {
    Place at;
    at.slot = x % slots;
    at.head = x / slots % heads;
    at.batch = x / slots / heads;
    return at;
}

// The first element of a row of [batch, rows, heads, width].
template <typename T> __device__ __forceinline__ T* row_at(const View& v, i64 batch, i64 row, i64 head) {
    return (T*)v.ptr + batch * v.stride[0] + row * v.stride[1] + head * v.stride[2];
}
