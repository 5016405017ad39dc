// Attention with Hopper's own instructions, for bf16 and f16; the formulas are those of attention.cu.
//
// Queries, keys and values are D wide, 64 or 128. A block has 128 rows, queries in forward and dq, keys in dk and dv, and
// three warpgroups: two multiply, 64 rows each; the third orders copies of the other side's tiles of COLS rows, STAGES
// ahead. Two barriers per stage: `full` (the copies have landed) and `empty` (every warp that multiplies has read it and
// arrived). Forward and dq stay on their processor and go from one tile of queries to the next; barriers and stages go on
// over all of them. For that dk and dv have no registers: there a block has one tile of keys.
//
// Products leave their sums in the registers in which the next product wants its left side, so weights never touch
// memory: dk and dv multiply the transposed scores, k qᵀ, for that reason. The right sides of those next products are the
// same tiles, read across. The backward orders the scores of a tile before the last products of the one before have
// ended. dk and dv go over rising query heads of the group and rising tiles of queries.
//
// A tile is read from its sequence's own rows on; rows past the sequence's end belong to another and might be anything.
// Where such rows would be multiplied by weights of 0 they are overwritten with zeros first, by each warpgroup for itself:
// zeros over zeros harm nobody. Elsewhere they make rows that are not written, or scores that are hidden.
// Macros: TYPE, HALF (1: f16), PART, D, COLS, STAGES. The text of tiles comes first.

#if PART < 2
// What a block works on next: `count` queries of a head, and `tiles` tiles of keys from `start` on. No queries: there is
// nothing more.
struct Work { Piece piece; Place at; int count, start, tiles; };

// The work of number x in the order of ranks, all heads of a rank together. All lanes of a warp; false when there is none.
__device__ __forceinline__ bool find_work(Work& work, const Shape& s, i64 x, i64 slots) {
    i64 rest = x % (s.heads * s.batch);
    work.at.slot = x / (s.heads * s.batch);
    work.at.head = rest % s.heads;
    work.at.batch = rest / s.heads;
    Piece& p = work.piece;
    if (!find_tile(p, s, false, work.at.slot, slots)) return false;
    work.count = (int)least(p.queries - p.at, ROWS);
    work.start = (int)(first_seen(s, p, p.at) / COLS * COLS);
    int end = (int)end_seen(s, p, p.at + work.count - 1);
    work.tiles = work.start < end ? (end - work.start + COLS - 1) / COLS : 0;
    return true;
}

// The number that the block takes in a round: in one round from the left, in the next from the right, so that all blocks
// get about the same when works come sorted.
__device__ __forceinline__ i64 number_in(i64 round) {
    return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}
#endif

// The tiles of a work of which the other warpgroup has all the rows.
__device__ __forceinline__ void leave_tiles(int base, int tiles, u32 k_full, u32 k_empty, u32 v_full, u32 v_empty) {
    for (int j = base; j < base + tiles; ++j) {
        int stage = j % STAGES;
        barrier_wait(k_full + 8 * stage, turn_of(j));
        barrier_wait(v_full + 8 * stage, turn_of(j));
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(k_empty + 8 * stage);
            barrier_arrive(v_empty + 8 * stage);
        }
    }
    __syncwarp();
}

#if PART == 0
// A block stays on its processor and takes tiles of queries, those with the most work first. The third warpgroup finds
// them and brings the next one's queries and keys while this one is in work.
// Two tiles of keys are in work at once: while the tensor cores multiply the scores of one and the weights of the one
// before, a warpgroup waits only for the former. The two warpgroups take turns to order products (barriers 1 and 2), so
// that one computes exponentials while the other multiplies.
extern "C" __global__ void __launch_bounds__(384, 1)
attention_wgmma_forward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                        Shape s, const T* sinks, View o, float* lse, i64 slots, u32* alarm, u32 code) {
    extern __shared__ u8 raw[];
    __shared__ u64 barriers[4 + 4 * STAGES];
    __shared__ Work works[2];
    if (blockIdx.x == 0) check_lens(s, alarm, code);
    u32 own_full = shared_address(barriers), own_empty = own_full + 16, k_full = own_empty + 16, v_full = k_full + 8 * STAGES;
    u32 k_empty = v_full + 8 * STAGES, v_empty = k_empty + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) { barrier_init(own_full + 8 * i, 1); barrier_init(own_empty + 8 * i, 8); }
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(k_full + 8 * i, 1);
            barrier_init(v_full + 8 * i, 1);
            barrier_init(k_empty + 8 * i, 8);
            barrier_init(v_empty + 8 * i, 8);
        }
        barriers_ready();
    }
    __syncthreads();
    u8* memory = tiles_in(raw);
    u32 own = shared_address(memory), k_tiles = own + 2 * OWN_BYTES, v_tiles = k_tiles + STAGES * TILE_BYTES;
    int warpgroup = warpgroup_here(), lane = threadIdx.x % 32;
    if (warpgroup == 2) {
        fewer_registers<104>();
        if (threadIdx.x >= 256 + 32) return;
        i64 all = slots * s.heads * s.batch;
        // Works taken so far, and tiles of keys brought.
        int taken = 0, passed = 0;
        for (i64 round = 0;; ++round) {
            i64 x = number_in(round);
            bool is_over = round * gridDim.x >= all;
            Work work;
            work.count = 0;
            if (!is_over && (x >= all || !find_work(work, s, x, slots))) continue;
            if (lane == 0) {
                int place = taken % 2;
                u32 bar = own_full + 8 * place;
                barrier_wait(own_empty + 8 * place, taken / 2 % 2 ^ 1);
                works[place] = work;
                const Piece& p = work.piece;
                if (work.count > 0 && work.tiles > 0) {
                    barrier_expect(bar, OWN_BYTES);
                    bring(own + place * OWN_BYTES, OWN_PANEL, &q, bar, p.first_query + p.at, work.at.head, work.at.batch);
                    i64 key_head = work.at.head / (s.heads / s.key_heads), key = p.first_key + work.start;
                    for (int j = passed; j < passed + work.tiles; ++j, key += COLS) {
                        int stage = j % STAGES;
                        u32 parity = turn_of(j) ^ 1;
                        barrier_wait(k_empty + 8 * stage, parity);
                        barrier_expect(k_full + 8 * stage, TILE_BYTES);
                        bring(k_tiles + stage * TILE_BYTES, TILE_PANEL, &k, k_full + 8 * stage, key, key_head, work.at.batch);
                        barrier_wait(v_empty + 8 * stage, parity);
                        barrier_expect(v_full + 8 * stage, TILE_BYTES);
                        bring(v_tiles + stage * TILE_BYTES, TILE_PANEL, &v, v_full + 8 * stage, key, key_head, work.at.batch);
                    }
                    passed += work.tiles;
                } else {
                    barrier_arrive(bar);
                }
            }
            __syncwarp();
            if (is_over) return;
            ++taken;
        }
    }
    more_registers<200>();
    int g = lane / 4, t = lane % 4, line = threadIdx.x / 32 * 16;
    // The highest score is searched before it is scaled, so the factor must be positive; `sign` is what is missing.
    float scale = (float)(s.scale * 1.4426950408889634), sign = scale > 0.0f ? 1.0f : scale < 0.0f ? -1.0f : 0.0f;
    scale = scale == 0.0f ? 1.0f : scale * sign;
    float out[D / 2], x[COLS / 2];
    u32 weights[COLS / 4];
    clear(x);
    // `base` is the number of this work's first tile of keys among all that this block goes over.
    for (int taken = 0, base = 0;; ++taken) {
        int place = taken % 2;
        barrier_wait(own_full + 8 * place, taken / 2 % 2);
        const Work& work = works[place];
        const Piece& p = work.piece;
        int count = work.count, start = work.start, tiles = work.tiles;
        if (count == 0) return;
        if (warpgroup * 64 >= count) {
            leave_tiles(base, tiles, k_full, k_empty, v_full, v_empty);
            if (lane == 0) barrier_arrive(own_empty + 8 * place);
            base += tiles;
            continue;
        }
        bool takes_turns = count > 64 && tiles > 1;
        if (takes_turns && warpgroup == 1) pass(1, 256);
        u32 mine = own + place * OWN_BYTES + warpgroup * 64 * 128;
        // Keys from `clear_from` to `clear_to` are seen by the whole warpgroup; from low to high by a row.
        int clear_from = (int)first_seen(s, p, p.at + warpgroup * 64 + 63), clear_to = (int)end_seen(s, p, p.at + warpgroup * 64);
        int low[2], high[2];
        float top[2], sum[2], fade[2];
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            low[h] = (int)first_seen(s, p, p.at + line + g + 8 * h) - 2 * t;
            high[h] = (int)end_seen(s, p, p.at + line + g + 8 * h) - 2 * t;
            top[h] = sinks ? up(sinks[work.at.head]) * LOG2E : -infinity();
            // Four lanes sum parts of a row; one of them starts with the sink.
            sum[h] = sinks && t == 0 ? 1.0f : 0.0f;
        }
        clear(out);
        // Scores of the tile at `key` become exponentials; what was summed before fades by so much.
        auto soften = [&](int key) {
            if (sign != 1.0f) {
                #pragma unroll
                for (int i = 0; i < COLS / 2; ++i) x[i] *= sign;
            }
            if (key < clear_from || key + COLS > clear_to) {
                #pragma unroll
                for (int h = 0; h < 2; ++h) hide(x, h, low[h] - key, high[h] - key, -infinity());
            }
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                float highest = x[2 * h];
                #pragma unroll
                for (int n = 0; n < COLS / 8; ++n) highest = fmaxf(highest, fmaxf(x[n * 4 + 2 * h], x[n * 4 + 2 * h + 1]));
                #pragma unroll
                for (int step = 1; step <= 2; step <<= 1) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));
                highest = fmaxf(top[h], highest * scale);
                // A query that has seen nothing yet would subtract infinities.
                float lowest = highest == -infinity() ? 0.0f : highest, total = 0.0f;
                fade[h] = exp2_of(top[h] - lowest);
                top[h] = highest;
                #pragma unroll
                for (int n = 0; n < COLS / 8; ++n) {
                    #pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& y = x[n * 4 + 2 * h + e];
                        y = exp2_of(y * scale - lowest);
                        total += y;
                    }
                }
                sum[h] = sum[h] * fade[h] + total;
            }
        };
        if (tiles > 0) {
            int stage = base % STAGES;
            barrier_wait(k_full + 8 * stage, turn_of(base));
            products_begin();
            scores(x, mine, k_tiles + stage * TILE_BYTES);
            products_commit();
            products_wait<0>();
            hold(x);
            if (lane == 0) barrier_arrive(k_empty + 8 * stage);
            // Nothing was summed before this tile.
            soften(start);
            narrow(weights, x);
        }
        for (int j = 1; j < tiles; ++j) {
            int stage = (base + j) % STAGES, before = (base + j - 1) % STAGES;
            barrier_wait(k_full + 8 * stage, turn_of(base + j));
            if (takes_turns) meet(1 + warpgroup, 256);
            products_begin();
            scores(x, mine, k_tiles + stage * TILE_BYTES);
            products_commit();
            barrier_wait(v_full + 8 * before, turn_of(base + j - 1));
            products_begin();
            weighted(out, weights, v_tiles + before * TILE_BYTES);
            products_commit();
            // Nobody waits for the second warpgroup's last turn.
            if (takes_turns && (warpgroup == 0 || j + 1 < tiles)) pass(2 - warpgroup, 256);
            products_wait<1>();
            hold(x);
            if (lane == 0) barrier_arrive(k_empty + 8 * stage);
            soften(start + j * COLS);
            hold(x);
            // Where the highest score has not changed nothing fades. The branch also keeps the wait behind the
            // exponentials, where the compiler would move it before them.
            if (__any_sync(0xffffffffu, fade[0] != 1.0f || fade[1] != 1.0f)) {
                products_wait<0>();
                hold(out);
                #pragma unroll
                for (int i = 0; i < D / 2; ++i) out[i] *= fade[i / 2 % 2];
            }
            products_wait<0>();
            hold(out);
            if (lane == 0) barrier_arrive(v_empty + 8 * before);
            narrow(weights, x);
        }
        if (tiles > 0) {
            int last = (base + tiles - 1) % STAGES, there = (int)p.keys - (start + (tiles - 1) * COLS);
            barrier_wait(v_full + 8 * last, turn_of(base + tiles - 1));
            if (there < COLS) {
                zero_lines(memory + 2 * OWN_BYTES + (STAGES + last) * TILE_BYTES, there);
                zeroed();
            }
            products_begin();
            weighted(out, weights, v_tiles + last * TILE_BYTES);
            products_commit();
            products_wait<0>();
            hold(out);
            if (lane == 0) barrier_arrive(v_empty + 8 * last);
        }
        float factor[2];
        i64 row = p.first_query + p.at;
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            #pragma unroll
            for (int step = 1; step <= 2; step <<= 1) sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], step);
            factor[h] = sum[h] == 0.0f ? 0.0f : 1.0f / sum[h];
            int r = line + g + 8 * h;
            if (t == 0 && r < count) lse[(work.at.batch * s.heads + work.at.head) * s.queries + row + r] = top[h] * LN2 + logf(sum[h]);
        }
        // The results go through the lines of the queries, which no warp of this warpgroup reads any more.
        meet(3 + warpgroup, 128);
        T* to = row_at<T>(o, work.at.batch, row, work.at.head);
        store(memory + place * OWN_BYTES, line, out, factor[0], factor[1], to, o.stride[1], count);
        show_to_engines();
        __syncwarp();
        if (lane == 0) barrier_arrive(own_empty + 8 * place);
        base += tiles;
    }
}
#endif

#if PART == 1
// A block stays on its processor, as in the forward; the next work's first keys and values come while this one is in work,
// its queries when their place is free.
extern "C" __global__ void __launch_bounds__(384, 1)
attention_wgmma_dq(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                   const __grid_constant__ TensorMap d_o, Shape s, const float* lse, const float* delta, View dq, i64 slots) {
    extern __shared__ u8 raw[];
    __shared__ u64 barriers[2 + 4 * STAGES];
    __shared__ Work shared_work;
    u32 own_full = shared_address(barriers), own_empty = own_full + 8, k_full = own_empty + 8, v_full = k_full + 8 * STAGES;
    u32 k_empty = v_full + 8 * STAGES, v_empty = k_empty + 8 * STAGES;
    if (threadIdx.x == 0) {
        barrier_init(own_full, 1);
        barrier_init(own_empty, 8);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(k_full + 8 * i, 1);
            barrier_init(v_full + 8 * i, 1);
            barrier_init(k_empty + 8 * i, 8);
            barrier_init(v_empty + 8 * i, 8);
        }
        barriers_ready();
    }
    __syncthreads();
    u8* memory = tiles_in(raw);
    u32 own = shared_address(memory), k_tiles = own + 2 * OWN_BYTES, v_tiles = k_tiles + STAGES * TILE_BYTES;
    int warpgroup = warpgroup_here(), lane = threadIdx.x % 32;
    if (warpgroup == 2) {
        fewer_registers<56>();
        if (threadIdx.x >= 256 + 32) return;
        i64 all = slots * s.heads * s.batch;
        // Works taken so far, and tiles of keys brought.
        int taken = 0, passed = 0;
        for (i64 round = 0;; ++round) {
            i64 x = number_in(round);
            bool is_over = round * gridDim.x >= all;
            Work work;
            work.count = work.tiles = 0;
            if (!is_over && (x >= all || !find_work(work, s, x, slots))) continue;
            if (lane == 0) {
                const Piece& p = work.piece;
                i64 key_head = work.at.head / (s.heads / s.key_heads);
                for (int j = 0; j < max(work.tiles, 1); ++j) {
                    int stage = (passed + j) % STAGES;
                    u32 parity = turn_of(passed + j) ^ 1;
                    if (work.tiles > 0) {
                        i64 key = p.first_key + work.start + j * COLS;
                        barrier_wait(k_empty + 8 * stage, parity);
                        barrier_expect(k_full + 8 * stage, TILE_BYTES);
                        bring(k_tiles + stage * TILE_BYTES, TILE_PANEL, &k, k_full + 8 * stage, key, key_head, work.at.batch);
                        barrier_wait(v_empty + 8 * stage, parity);
                        barrier_expect(v_full + 8 * stage, TILE_BYTES);
                        bring(v_tiles + stage * TILE_BYTES, TILE_PANEL, &v, v_full + 8 * stage, key, key_head, work.at.batch);
                    }
                    if (j > 0) continue;
                    barrier_wait(own_empty, taken % 2 ^ 1);
                    shared_work = work;
                    if (work.tiles > 0) {
                        i64 row = p.first_query + p.at;
                        barrier_expect(own_full, 2 * OWN_BYTES);
                        bring(own, OWN_PANEL, &q, own_full, row, work.at.head, work.at.batch);
                        bring(own + OWN_BYTES, OWN_PANEL, &d_o, own_full, row, work.at.head, work.at.batch);
                    } else {
                        barrier_arrive(own_full);
                    }
                }
                passed += work.tiles;
            }
            __syncwarp();
            if (is_over) return;
            ++taken;
        }
    }
    more_registers<224>();
    int g = lane / 4, t = lane % 4, line = threadIdx.x / 32 * 16;
    u32 mine = own + warpgroup * 64 * 128;
    float scale = (float)(s.scale * 1.4426950408889634), out[D / 2], x[COLS / 2], y[COLS / 2];
    u32 weights[COLS / 4];
    clear(x);
    clear(y);
    // `base` is the number of this work's first tile of keys among all that this block goes over.
    for (int taken = 0, base = 0;; ++taken) {
        barrier_wait(own_full, taken % 2);
        const Work& work = shared_work;
        const Piece& p = work.piece;
        int count = work.count, start = work.start, tiles = work.tiles, keys = (int)p.keys;
        if (count == 0) return;
        if (warpgroup * 64 >= count) {
            leave_tiles(base, tiles, k_full, k_empty, v_full, v_empty);
            if (lane == 0) barrier_arrive(own_empty);
            base += tiles;
            continue;
        }
        int clear_from = (int)first_seen(s, p, p.at + warpgroup * 64 + 63), clear_to = (int)end_seen(s, p, p.at + warpgroup * 64);
        int low[2], high[2];
        float row_lse[2], row_delta[2];
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            int r = line + g + 8 * h;
            low[h] = (int)first_seen(s, p, p.at + r) - 2 * t;
            high[h] = (int)end_seen(s, p, p.at + r) - 2 * t;
            i64 stats = (work.at.batch * s.heads + work.at.head) * s.queries + p.first_query + p.at + r;
            // A query that is not there or saw nothing has weights 0.
            row_lse[h] = r < count ? lse[stats] * LOG2E : infinity();
            row_delta[h] = r < count ? delta[stats] : 0.0f;
            if (row_lse[h] == -infinity()) row_lse[h] = infinity();
        }
        clear(out);
        for (int j = 0; j < tiles; ++j) {
            int stage = (base + j) % STAGES, key = start + j * COLS, there = keys - key;
            u32 k_tile = k_tiles + stage * TILE_BYTES, v_tile = v_tiles + stage * TILE_BYTES;
            barrier_wait(k_full + 8 * stage, turn_of(base + j));
            barrier_wait(v_full + 8 * stage, turn_of(base + j));
            if (there < COLS) {
                zero_lines(memory + 2 * OWN_BYTES + stage * TILE_BYTES, there);
                zero_lines(memory + 2 * OWN_BYTES + (STAGES + stage) * TILE_BYTES, there);
                zeroed();
            }
            products_begin();
            scores(x, mine, k_tile);
            products_commit();
            // The products of the tile before have ended when at most these scores are under way.
            products_wait<1>();
            if (j > 0 && lane == 0) barrier_arrive(k_empty + 8 * ((base + j - 1) % STAGES));
            products_begin();
            scores(y, mine + OWN_BYTES, v_tile);
            products_commit();
            products_wait<1>();
            hold(x);
            #pragma unroll
            for (int i = 0; i < COLS / 2; ++i) x[i] = exp2_of(x[i] * scale - row_lse[i / 2 % 2]);
            hold(x);
            if (key < clear_from || key + COLS > clear_to) {
                #pragma unroll
                for (int h = 0; h < 2; ++h) hide(x, h, low[h] - key, high[h] - key, 0.0f);
            }
            products_wait<0>();
            hold(y);
            if (lane == 0) barrier_arrive(v_empty + 8 * stage);
            #pragma unroll
            for (int i = 0; i < COLS / 2; ++i) x[i] *= y[i] - row_delta[i / 2 % 2];
            narrow(weights, x);
            products_begin();
            weighted(out, weights, k_tile);
            products_commit();
        }
        products_wait<0>();
        hold(out);
        if (tiles > 0 && lane == 0) barrier_arrive(k_empty + 8 * ((base + tiles - 1) % STAGES));
        // The results go through the lines of the queries, which no warp of this warpgroup reads any more.
        meet(3 + warpgroup, 128);
        float factor = (float)s.scale;
        T* to = row_at<T>(dq, work.at.batch, p.first_query + p.at, work.at.head);
        store(memory, line, out, factor, factor, to, dq.stride[1], count);
        show_to_engines();
        __syncwarp();
        if (lane == 0) barrier_arrive(own_empty);
        base += tiles;
    }
}
#endif

#if PART == 2
// Two warps of the third warpgroup are at work: one orders copies, the other brings what is known of the tile's queries.
extern "C" __global__ void __launch_bounds__(384, 1)
attention_wgmma_dkv(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                    const __grid_constant__ TensorMap d_o, Shape s, const float* lse, const float* delta, View dk, View dv, i64 slots) {
    extern __shared__ u8 raw[];
    __shared__ u64 barriers[1 + 2 * STAGES];
    __shared__ __align__(16) float lse_tiles[STAGES * COLS], delta_tiles[STAGES * COLS];
    __shared__ Piece found;
    __shared__ int is_found;
    Place at = place_in(s, blockIdx.x, slots, s.key_heads);
    u32 own_full = shared_address(barriers), full = own_full + 8, empty = full + 8 * STAGES;
    if (threadIdx.x < 32) {
        Piece mine;
        bool is_mine = find_tile(mine, s, true, at.slot, slots);
        if (threadIdx.x == 0) {
            found = mine;
            is_found = is_mine;
            int warps = is_mine && mine.keys - mine.at > 64 ? 8 : 4;
            barrier_init(own_full, 1);
            for (int i = 0; i < STAGES; ++i) {
                // The copies, and every lane that brings statistics.
                barrier_init(full + 8 * i, 1 + 32);
                barrier_init(empty + 8 * i, warps);
            }
            barriers_ready();
        }
    }
    __syncthreads();
    if (!is_found) return;
    Piece p = found;
    u8* memory = tiles_in(raw);
    u32 own = shared_address(memory), q_tiles = own + 2 * OWN_BYTES, o_tiles = q_tiles + STAGES * TILE_BYTES;
    int count = (int)least(p.keys - p.at, ROWS), warpgroup = warpgroup_here(), group = (int)(s.heads / s.key_heads);
    int start = (int)(first_seer(s, p, p.at) / COLS * COLS), end = (int)end_seer(s, p, p.at + count);
    // Tiles of one head, and of all heads of the group.
    int per_head = start < end ? (end - start + COLS - 1) / COLS : 0, tiles = per_head * group;
    i64 row = p.first_key + p.at;
    if (warpgroup == 2) {
        fewer_registers<24>();
        int warp = threadIdx.x / 32 - 8, lane = threadIdx.x % 32;
        if (warp > 1 || warp == 0 && lane != 0 || tiles == 0) return;
        if (warp == 0) {
            barrier_expect(own_full, 2 * OWN_BYTES);
            bring(own, OWN_PANEL, &k, own_full, row, at.head, at.batch);
            bring(own + OWN_BYTES, OWN_PANEL, &v, own_full, row, at.head, at.batch);
        }
        int query = start;
        i64 head = at.head * group;
        for (int j = 0; j < tiles; ++j) {
            int stage = j % STAGES;
            u32 bar = full + 8 * stage;
            barrier_wait(empty + 8 * stage, turn_of(j) ^ 1);
            if (warp == 0) {
                barrier_expect(bar, 2 * TILE_BYTES);
                bring(q_tiles + stage * TILE_BYTES, TILE_PANEL, &q, bar, p.first_query + query, head, at.batch);
                bring(o_tiles + stage * TILE_BYTES, TILE_PANEL, &d_o, bar, p.first_query + query, head, at.batch);
            } else {
                i64 stats = (at.batch * s.heads + head) * s.queries + p.first_query + query;
                #pragma unroll
                for (int n = lane; n < COLS; n += 32) {
                    // A query that is not there or saw nothing has weights 0.
                    bool there = query + n < p.queries;
                    float all = there ? lse[stats + n] : infinity();
                    lse_tiles[stage * COLS + n] = all == -infinity() ? infinity() : all * LOG2E;
                    delta_tiles[stage * COLS + n] = there ? delta[stats + n] : 0.0f;
                }
                barrier_arrive(bar);
            }
            query += COLS;
            if (query >= end) { query = start; ++head; }
        }
        return;
    }
    more_registers<240>();
    if (warpgroup * 64 >= count) return;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, line = threadIdx.x / 32 * 16;
    u32 mine = own + warpgroup * 64 * 128;
    int shift = (int)(p.keys - p.queries), window = (int)least(s.window, 1 << 30), queries = (int)p.queries;
    int key = (int)p.at + warpgroup * 64, causal = (int)s.causal;
    float scale = (float)(s.scale * 1.4426950408889634), k_out[D / 2], v_out[D / 2], x[COLS / 2], y[COLS / 2];
    u32 weights[COLS / 4], gradients[COLS / 4];
    clear(k_out);
    clear(v_out);
    clear(x);
    clear(y);
    if (tiles > 0) barrier_wait(own_full, 0);
    // The tile in work, and the position among the keys of its first query.
    int j = -1, query = start, first = 0;
    // Goes on to the next tile of which this warpgroup's keys are seen, and waits for it.
    auto go_on = [&]() {
        for (++j; j < tiles; ++j) {
            int stage = j % STAGES, there = queries - query;
            first = query + shift;
            query = query + COLS < end ? query + COLS : start;
            barrier_wait(full + 8 * stage, turn_of(j));
            if (causal && key > first + COLS - 1 || key + 63 <= first - window) {
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + 8 * stage);
                continue;
            }
            if (there < COLS) {
                zero_lines(memory + 2 * OWN_BYTES + stage * TILE_BYTES, there);
                zero_lines(memory + 2 * OWN_BYTES + (STAGES + stage) * TILE_BYTES, there);
                zeroed();
            }
            return;
        }
    };
    go_on();
    int before = -1;
    while (j < tiles) {
        int stage = j % STAGES;
        u32 q_tile = q_tiles + stage * TILE_BYTES, o_tile = o_tiles + stage * TILE_BYTES;
        products_begin();
        scores(x, mine, q_tile);
        products_commit();
        // The products of the tile before have ended when at most these scores are under way.
        products_wait<1>();
        if (before >= 0 && lane == 0) barrier_arrive(empty + 8 * before);
        products_begin();
        scores(y, mine + OWN_BYTES, o_tile);
        products_commit();
        products_wait<1>();
        hold(x);
        const float* lse_tile = lse_tiles + stage * COLS + 2 * t;
        const float* delta_tile = delta_tiles + stage * COLS + 2 * t;
        #pragma unroll
        for (int n = 0; n < COLS / 8; ++n) {
            float2 all = *(const float2*)(lse_tile + n * 8);
            x[n * 4] = exp2_of(x[n * 4] * scale - all.x);
            x[n * 4 + 1] = exp2_of(x[n * 4 + 1] * scale - all.y);
            x[n * 4 + 2] = exp2_of(x[n * 4 + 2] * scale - all.x);
            x[n * 4 + 3] = exp2_of(x[n * 4 + 3] * scale - all.y);
        }
        hold(x);
        // Whether every key is seen by every query.
        if (causal && key + 63 > first || key <= first + COLS - 1 - window) {
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                // The first query that is at this key.
                int seer = key + line % 64 + g + 8 * h - first - 2 * t;
                hide(x, h, causal ? seer : -COLS, seer + window, 0.0f);
            }
        }
        narrow(weights, x);
        products_begin();
        weighted(v_out, weights, o_tile);
        products_commit();
        products_wait<1>();
        hold(y);
        #pragma unroll
        for (int n = 0; n < COLS / 8; ++n) {
            float2 less = *(const float2*)(delta_tile + n * 8);
            y[n * 4] = x[n * 4] * (y[n * 4] - less.x);
            y[n * 4 + 1] = x[n * 4 + 1] * (y[n * 4 + 1] - less.y);
            y[n * 4 + 2] = x[n * 4 + 2] * (y[n * 4 + 2] - less.x);
            y[n * 4 + 3] = x[n * 4 + 3] * (y[n * 4 + 3] - less.y);
        }
        narrow(gradients, y);
        products_begin();
        weighted(k_out, gradients, q_tile);
        products_commit();
        before = stage;
        go_on();
    }
    products_wait<0>();
    hold(k_out);
    hold(v_out);
    // The lines of the keys are written next, by the same warpgroup.
    meet(3 + warpgroup, 128);
    float factor = (float)s.scale;
    store(memory, line, k_out, factor, factor, row_at<T>(dk, at.batch, row, at.head), dk.stride[1], count);
    store(memory + OWN_BYTES, line, v_out, 1.0f, 1.0f, row_at<T>(dv, at.batch, row, at.head), dv.stride[1], count);
}
#endif
