// One dense decoder block for one new token of each row, in one launch; follows decode.cuh.
//
// A block of threads stays on every processor and all of them go through the same phases. What a phase writes is read
// by the next behind a barrier of the whole grid:
//
//   1. q, k, v = norm(x) w^T + b
//   2. queries and keys are normed and turned, new keys and values go into the caches, and every chunk of KEYS places
//      of a key head gives its part of the attention. A team that needs a query turns it itself.
//   3. the parts of a query head are added up: mixed
//   4. middle = x + mixed w^T + b
//   5. inner = silu(gate) up of norm(middle)
//   6. y = middle + inner w^T + b
//
// Matrices do not depend on what was computed before. So a warp asks for its first chunk of the next matrix before it
// waits at a barrier: memory stays busy in between. Bringing more of it into the second cache meanwhile was slower
// (1.61 instead of 1.49 ms for a token of Qwen3-1.7B on an H200).
//
// Rules:
//   - Every block of threads comes to every barrier: nobody returns before the last, whatever the input.
//   - The grid is launched as a cooperative one: all its blocks are on the card at the same time.
//   - What another block may have written in this launch is read by plain loads behind a barrier, never by those of
//     the read-only cache. Those are for matrices alone.
//   - Sums have the order of the separate kernels, and values are rounded where those store them.

const int THREADS = ROWS == 1 ? 512 : 256;
const int WARPS = THREADS / 32;
const int D = WIDTH;
const u32 TOP_BIT = 0x80000000u;

// As `block_words` writes it. Scratch is from `q` on.
struct Block {
    const T *x, *attn_norm, *wq, *wk, *wv, *bq, *bk, *bv, *q_norm, *k_norm;
    const A *cos, *sin;
    const int *positions, *at;
    const T *sinks, *wo, *bo, *mlp_norm, *wg, *wu, *wd, *bg, *bu, *bd;
    T *y, *keys, *values, *q, *k, *v, *mixed, *middle, *inner;
    A* parts;
    i64 rows, hidden, units, heads, key_heads, half, table, capacity, window, team_bytes;
    double attn_eps, head_eps, mlp_eps, factor;
    u32 *barrier, *alarm;
    i64 code;
};

// ---- the barrier ----

// All blocks of the grid arrive, then all go on, and see what was written before any arrived. The word's top bit flips
// when the last one arrives and the others are 0 again, so the word serves the next barrier and the next launch as it
// is, for any number of blocks. Launches that share a word run one after another.
struct GridBarrier {
    u32* word;
    // The top bit before the flip that is waited for. It cannot flip before this block arrives, so any earlier moment
    // of this launch is the right one to read it.
    u32 before;

    __device__ __forceinline__ void open(u32* at) {
        word = at;
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(word) : "memory");
        before &= TOP_BIT;
    }
    // The first thread's release covers what the others wrote: they met it at `__syncthreads`.
    __device__ __forceinline__ void arrive() {
        __syncthreads();
        if (threadIdx.x > 0) return;
        const u32 more = blockIdx.x == 0 ? TOP_BIT - (gridDim.x - 1) : 1;
        asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(word), "r"(more) : "memory");
    }
    __device__ __forceinline__ void wait() {
        if (threadIdx.x == 0) {
            u32 now;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
            } while ((now & TOP_BIT) == before);
        }
        before ^= TOP_BIT;
        __syncthreads();
    }
};

// Waits for the grid; `then` is done meanwhile. The first warp does it after it has arrived: its release would wait for
// loads that are under way. Other warps may have done it before, which `WAITS` says.
template <bool WAITS, typename Then> __device__ __forceinline__ void cross(GridBarrier& barrier, Then then) {
    const bool is_first = threadIdx.x < 32;
    if (WAITS && !is_first) then();
    barrier.arrive();
    if (is_first) then();
    barrier.wait();
}

// ---- matrices ----

// Pieces of a row that a lane holds, in two halves: of one row, or of gate and of up.
const int HALF = ROWS == 1 || ROWS == 16 ? 4 : 8;
// As words: a structure of narrow numbers that lives on across loops would lie in local memory.
struct Ahead { uint4 a[HALF], b[HALF]; };

// 16 bytes that no kernel writes, not kept in the first cache. Volatile, so that they are asked for where this stands
// and not behind a barrier.
__device__ __forceinline__ uint4 load_weight(const T* p, bool is_there) {
    uint4 w;
    asm volatile(
        "{ .reg .pred there; setp.ne.u32 there, %5, 0;\n"
        "@there ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(p), "r"((u32)is_there)
    );
    return w;
}

__device__ __forceinline__ void load_half(uint4 (&held)[HALF], const T* row, int from, int k, bool is_there) {
    const int lane = threadIdx.x & 31, left = is_there ? k - from - lane * N : 0;
    const T* mine = row + from + lane * N;
    #pragma unroll
    for (int i = 0; i < HALF; ++i) held[i] = load_weight(mine + i * 32 * N, i * 32 * N < left);
}

// Writes all of `next`, also where there is no such column: so what it held before need not be kept until here.
template <MapKind KIND> __device__ __forceinline__ void load_ahead(
    Ahead& next, const Maps& maps, int column, int total, int from, int k
) {
    const Column c = find<KIND>(maps, column, k);
    load_half(next.a, c.w, from, k, column < total);
    load_half(next.b, c.other, KIND == GATED ? from : from + HALF * 32 * N, k, column < total);
}

// What is added to a column: in lane r what row r had before, and biases.
struct Extra { A residual, bias, other_bias; };

template <MapKind KIND> __device__ __forceinline__ Extra load_extra(
    const Maps& maps, const T* residual, int column, int total, int k, int rows
) {
    Extra extra = { 0, 0, 0 };
    if (column >= total) return extra;
    const int lane = threadIdx.x & 31;
    const Column c = find<KIND>(maps, column, k);
    if (residual && lane < rows) extra.residual = up(residual[lane * c.n + c.at]);
    if (c.bias) extra.bias = up(c.bias[c.at]);
    if (KIND == GATED && maps.b[1]) extra.other_bias = up(maps.b[1][c.at]);
    return extra;
}

// Rows of x into shared memory as they are.
__device__ __forceinline__ void stage(T* xs, const T* x, int k, int rows) {
    const int all = rows * k;
    #pragma unroll 4
    for (int at = threadIdx.x * N; at < all; at += THREADS * N)
        *reinterpret_cast<Piece*>(xs + at) = load_few<N>(x + at);
    __syncthreads();
}

// Rows of norm(x) into shared memory. 256 threads add up the squares of a row, as in few_linear.
__device__ __forceinline__ void stage_norm(
    T* xs, const T* x, const T* weight, int k, int rows, double eps, A (*slots)[8]
) {
    const int lane = threadIdx.x & 31, thread = threadIdx.x & 255;
    #pragma unroll 1
    for (int r = threadIdx.x >> 8; r < rows; r += THREADS / 256) {
        A squares = 0;
        for (int at = thread * N; at < k; at += 256 * N) {
            Piece p = load_few<N>(x + r * k + at);
            *reinterpret_cast<Piece*>(xs + r * k + at) = p;
            #pragma unroll
            for (int j = 0; j < N; ++j) { A v = up(p.at[j]); squares += v * v; }
        }
        squares = warp_sum(squares);
        if (lane == 0) slots[r][thread >> 5] = squares;
    }
    // On its way while the block waits.
    const int begin = threadIdx.x * N;
    const uint4 first = load_weight(weight + begin, begin < k);
    __syncthreads();
    #pragma unroll 1
    for (int r = 0; r < rows; ++r) {
        const A scale = A(1) / root_of(warp_sum(lane < 8 ? slots[r][lane] : A(0)) / (A)k + (A)eps);
        for (int at = begin; at < k; at += THREADS * N) {
            Piece p = *reinterpret_cast<Piece*>(xs + r * k + at);
            const Piece w = piece_of(at == begin ? first : load_weight(weight + at, true));
            #pragma unroll
            for (int j = 0; j < N; ++j) put(p.at[j], up(p.at[j]) * scale * up(w.at[j]));
            *reinterpret_cast<Piece*>(xs + r * k + at) = p;
        }
    }
    __syncthreads();
}

// Columns of y, a warp's one after another. `next` holds the first chunk of the first. With the last chunk under way,
// every warp but the first does `then`.
template <MapKind KIND, typename Then> __device__ __forceinline__ void multiply(
    Ahead& next, const Maps& maps, const T* residual, const T* xs, int total, int k, int rows, Extra extra, Then then
) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int step = gridDim.x * WARPS, chunk = (KIND == GATED ? HALF : 2 * HALF) * 32 * N;
    int column = blockIdx.x * WARPS + warp;
    if (column >= total && warp > 0) then();
    #pragma unroll 1
    for (; column < total; column += step) {
        A sum[ROWS], other[ROWS];
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = other[r] = 0;
        Extra coming_extra = extra;
        #pragma unroll 1
        for (int from = 0; from < k; from += chunk) {
            const Ahead held = next;
            const bool ends = from + chunk >= k;
            const int coming = ends ? column + step : column;
            if (coming < total) {
                load_ahead<KIND>(next, maps, coming, total, ends ? 0 : from + chunk, k);
                if (ends) coming_extra = load_extra<KIND>(maps, residual, coming, total, k, rows);
            } else if (warp > 0) {
                then();
            }
            multiply_chunk(sum, held.a, xs, from, k, lane, rows);
            if (KIND == GATED) multiply_chunk(other, held.b, xs, from, k, lane, rows);
            else multiply_chunk(sum, held.b, xs, from + HALF * 32 * N, k, lane, rows);
        }
        const Column here = find<KIND>(maps, column, k);
        A mine = 0;
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= rows) continue;
            A value = warp_sum(sum[r]);
            if (here.bias) value += extra.bias;
            if (KIND == GATED) {
                A above = warp_sum(other[r]);
                if (maps.b[1]) above += extra.other_bias;
                value = gated(value, above);
            }
            if (lane == r) mine = value;
        }
        if (lane < rows) {
            if (residual) mine = rounded(mine) + extra.residual;
            put(here.y[lane * here.n + here.at], mine);
        }
        extra = coming_extra;
    }
}

// ---- attention ----

// Pieces of keys or values that a thread holds before it needs them: as many as there are registers for.
const int DEPTH = THREADS == 256 ? 8 : sizeof(T) == 4 ? 2 : GROUP <= 2 ? 7 : GROUP <= 6 ? 4 : 2;

// A chunk of places that a key head attends to.
struct Task { int row, head, chunk, first, end; };

// The tasks of all rows, counted one after another; false behind the last. `filled` is -1 for a row without any.
__device__ __forceinline__ bool find_task(const Block& b, const int* filled, int index, Task& task) {
    const int heads = (int)b.key_heads, window = (int)b.window;
    #pragma unroll 1
    for (int row = 0; row < (int)b.rows; ++row) {
        if (filled[row] < 0) continue;
        const int end = filled[row] + 1, first = window > 0 && end > window ? end - window : 0;
        const int from = first / KEYS, count = ((end - 1) / KEYS + 1 - from) * heads;
        if (index < count) {
            task = { row, index % heads, from + index / heads, first, end };
            return true;
        }
        index -= count;
    }
    return false;
}

// What a team has in shared memory; `new_key` and the value behind it are those of the new token.
struct TeamRoom {
    T* new_key;
    A *query, *shares;
    A (*scores)[KEYS];
    A *tops, *sums;

    __device__ __forceinline__ explicit TeamRoom(char* room) {
        new_key = reinterpret_cast<T*>(room);
        query = reinterpret_cast<A*>(new_key + 2 * D);
        shares = query + GROUP * D;
        scores = reinterpret_cast<A (*)[KEYS]>(shares + SHARES * GROUP * D);
        tops = reinterpret_cast<A*>(scores + GROUP);
        sums = tops + GROUP;
    }
};

// Turns the queries of a task; where the new token's place is in its chunk, makes its key and value, too. A team.
__device__ __forceinline__ void turn_heads(
    const Block& b, const TeamRoom& mine, const Task& task, i64 position, T* key_to, T* value_to
) {
    const int lane = threadIdx.x & 31;
    const int items = GROUP + (task.end <= (task.chunk + 1) * KEYS ? 2 : 0);
    const A *cos = b.cos + position * b.half, *sin = b.sin + position * b.half;
    const i64 key_head = (i64)task.row * b.key_heads + task.head;
    #pragma unroll 1
    for (int item = team_thread() >> 5; item < items; item += TEAM / 32) {
        if (item > GROUP) {
            for (int i = lane; i < D; i += 32) {
                const T value = b.v[key_head * D + i];
                mine.new_key[D + i] = value;
                value_to[i] = value;
            }
            continue;
        }
        const bool is_key = item == GROUP;
        const T* from = is_key ? b.k + key_head * D : b.q + (key_head * GROUP + item) * D;
        turn_head(from, is_key ? b.k_norm : b.q_norm, cos, sin, D, b.half, b.head_eps, [&](i64 i, A value) {
            T turned;
            put(turned, value);
            if (is_key) {
                mine.new_key[i] = turned;
                key_to[i] = turned;
            } else {
                mine.query[item * D + i] = up(turned) * (A)b.factor;
            }
        });
    }
}

// Places of a task within its chunk: those from `skip` to `keys` are seen, `newest` is the new token's or lies behind
// the chunk. `base` is where the chunk begins in the caches, `stride` from place to place.
struct Places {
    int newest, keys, skip;
    i64 base, stride;

    __device__ __forceinline__ Places(const Block& b, const Task& task) {
        const int start = task.chunk * KEYS;
        newest = task.end - 1 - start;
        keys = newest + 1 < KEYS ? newest + 1 : KEYS;
        skip = task.first > start ? task.first - start : 0;
        stride = b.key_heads * D;
        base = (((i64)task.row * b.capacity + start) * b.key_heads + task.head) * D;
    }
};

// Turns the queries and gives the scores of all places. Keys are on their way meanwhile; the new one comes from shared
// memory.
__device__ __forceinline__ void score_keys(
    const Block& b, const TeamRoom& mine, const Task& task, const Places& at, i64 position
) {
    const int thread = team_thread(), key = thread >> 1, side = thread & 1;
    const bool live = key >= at.skip && key < at.keys;
    const int pieces = (D / N + 1) / 2, kept = pieces < DEPTH ? pieces : DEPTH;
    const T* row = b.keys + at.base + key * at.stride;
    uint4 held[kept];
    #pragma unroll
    for (int i = 0; i < kept; ++i) {
        const int c = (2 * i + side) * N;
        if (live && key != at.newest && c < D) held[i] = *reinterpret_cast<const uint4*>(row + c);
    }
    const i64 newest = at.base + at.newest * at.stride;
    turn_heads(b, mine, task, position, b.keys + newest, b.values + newest);
    team_sync();
    if (key == at.newest) {
        row = mine.new_key;
        #pragma unroll
        for (int i = 0; i < kept; ++i) {
            const int c = (2 * i + side) * N;
            if (c < D) held[i] = *reinterpret_cast<const uint4*>(mine.new_key + c);
        }
    }
    A dot[GROUP];
    #pragma unroll
    for (int g = 0; g < GROUP; ++g) dot[g] = 0;
    if (live) {
        #pragma unroll
        for (int i = 0; i < pieces; ++i) {
            const int c = (2 * i + side) * N;
            if (c >= D) continue;
            add_key(dot, i < kept ? piece_of(held[i < kept ? i : 0]) : load_few<N>(row + c), mine.query, D, c);
        }
    }
    put_scores(mine.scores, dot, key, live);
}

// Scores become weights, and every share of the places the sum of its weighted values. Values are on their way
// meanwhile.
__device__ __forceinline__ void mix_values(const Block& b, const TeamRoom& mine, const Places& at) {
    const int count = SHARES > 0 ? (KEYS + SHARES - 1) / (SHARES > 0 ? SHARES : 1) : 1;
    const int kept = count < DEPTH ? count : DEPTH;
    const int share = team_thread() / (D / N), from = team_thread() % (D / N) * N;
    const T* values = b.values + at.base + from;
    uint4 held[kept];
    if (share < SHARES) {
        #pragma unroll
        for (int i = 0; i < kept; ++i) {
            const int place = share + i * SHARES;
            if (place >= at.skip && place < at.keys && place != at.newest)
                held[i] = *reinterpret_cast<const uint4*>(values + place * at.stride);
        }
    }
    team_sync();
    weigh(mine.scores, mine.tops, mine.sums);
    team_sync();
    if (share >= SHARES) return;
    A out[GROUP][N];
    #pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        #pragma unroll
        for (int j = 0; j < N; ++j) out[g][j] = 0;
    }
    #pragma unroll
    for (int i = 0; i < count; ++i) {
        const int place = share + i * SHARES;
        if (place < at.skip || place >= at.keys) continue;
        const T* value = place == at.newest ? mine.new_key + D + from : values + place * at.stride;
        uint4 words = held[i < kept ? i : 0];
        if (i >= kept || place == at.newest) words = *reinterpret_cast<const uint4*>(value);
        add_value(out, piece_of(words), mine.scores, place);
    }
    #pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        #pragma unroll
        for (int j = 0; j < N; ++j) mine.shares[(share * GROUP + g) * D + from + j] = out[g][j];
    }
}

// One task of a team, as cached_partial.
__device__ __forceinline__ void attend_chunk(
    const Block& b, const TeamRoom& mine, const Task& task, i64 position
) {
    const int thread = team_thread();
    const Places at(b, task);
    score_keys(b, mine, task, at, position);
    mix_values(b, mine, at);
    team_sync();
    const i64 chunks = (b.capacity + KEYS - 1) / KEYS;
    A* part = b.parts + (((i64)task.row * b.heads + task.head * GROUP) * chunks + task.chunk) * (D + 2);
    for (int c = thread; c < D; c += TEAM) {
        #pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            A out = 0;
            if (SHARES > 0) {
                for (int other = 0; other < SHARES; ++other) out += mine.shares[(other * GROUP + g) * D + c];
            } else {
                const T* values = b.values + at.base + c;
                for (int place = at.skip; place < at.keys; ++place) {
                    const T value = place == at.newest ? mine.new_key[D + c] : values[place * at.stride];
                    out += mine.scores[g][place] * up(value);
                }
            }
            part[g * chunks * (D + 2) + c] = out;
        }
    }
    if (thread < GROUP) {
        part[thread * chunks * (D + 2) + D] = mine.tops[thread];
        part[thread * chunks * (D + 2) + D + 1] = mine.sums[thread];
    }
    // The next task writes where this one read.
    team_sync();
}

// Teams take tasks so that every processor has one before any has two.
__device__ __forceinline__ void attend(const Block& b, char* room, const int* filled, const int* turns) {
    const int team = threadIdx.x / TEAM;
    if (team >= TEAMS) return;
    const TeamRoom mine(room + team * b.team_bytes);
    Task task;
    #pragma unroll 1
    for (int i = team * gridDim.x + blockIdx.x; find_task(b, filled, i, task); i += TEAMS * gridDim.x)
        attend_chunk(b, mine, task, turns[task.row]);
}

// The parts of a query head, added up; as cached_combine.
__device__ __forceinline__ void combine(const Block& b, char* room, const int* filled) {
    const int team = threadIdx.x / TEAM, heads = (int)b.heads, window = (int)b.window;
    if (team >= TEAMS) return;
    A* slots = TeamRoom(room + team * b.team_bytes).query;
    const i64 chunks = (b.capacity + KEYS - 1) / KEYS;
    #pragma unroll 1
    for (int i = team * gridDim.x + blockIdx.x; i < (int)b.rows * heads; i += TEAMS * gridDim.x) {
        const int row = i / heads, head = i % heads;
        if (filled[row] < 0) continue;
        const int end = filled[row] + 1, first = window > 0 && end > window ? end - window : 0;
        const A sink = b.sinks ? up(b.sinks[head]) : A(-INFINITY_VALUE);
        combine_parts(
            b.parts + i * chunks * (D + 2), first / KEYS, (end + KEYS - 1) / KEYS, D, b.sinks != nullptr, sink, slots,
            b.mixed + (i64)i * D
        );
    }
}

// ---- the block ----

// Where each row writes and how far its heads are turned; what is out of range is left out here and reported at the
// end, where no register waits for memory.
__device__ __forceinline__ void read_places(const Block& b, int* filled, int* turns) {
    if (threadIdx.x >= b.rows) return;
    const int at = b.at[threadIdx.x], position = b.positions[threadIdx.x];
    filled[threadIdx.x] = at >= 0 && at < b.capacity ? at : -1;
    turns[threadIdx.x] = position >= 0 && position < b.table ? position : 0;
}

__device__ __forceinline__ void report_places(const Block& b) {
    if (blockIdx.x > 0 || threadIdx.x >= b.rows) return;
    const int at = b.at[threadIdx.x];
    if (at < 0 || at >= b.capacity) raise_alarm(b.alarm, (u32)b.code, at, threadIdx.x, b.capacity);
    checked(b.positions[threadIdx.x], threadIdx.x, b.table, b.alarm, (u32)b.code);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_block(const __grid_constant__ Block b) {
    extern __shared__ __align__(16) char room[];
    __shared__ A slots[ROWS][8];
    __shared__ int filled[ROWS], turns[ROWS];
    T* xs = reinterpret_cast<T*>(room);
    const int rows = (int)b.rows;
    const int first = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const int hidden = (int)b.hidden, units = (int)b.units, wide = (int)b.heads * D, narrow = (int)b.key_heads * D;
    const Maps into = { { b.wq, b.wk, b.wv }, { b.bq, b.bk, b.bv }, { b.q, b.k, b.v }, { wide, narrow, narrow } };
    const Maps out = { { b.wo }, { b.bo }, { b.middle }, { hidden } };
    const Maps gate_up = { { b.wg, b.wu }, { b.bg, b.bu }, { b.inner }, { units } };
    const Maps down = { { b.wd }, { b.bd }, { b.y }, { hidden } };
    const int all = wide + 2 * narrow;
    Ahead next;
    let_later_start();
    load_ahead<THREE>(next, into, first, all, 0, hidden);
    wait_for_earlier();
    GridBarrier barrier;
    barrier.open(b.barrier);
    read_places(b, filled, turns);

    stage_norm(xs, b.x, b.attn_norm, hidden, rows, b.attn_eps, slots);
    multiply<THREE>(
        next, into, nullptr, xs, all, hidden, rows, load_extra<THREE>(into, nullptr, first, all, hidden, rows), [] {}
    );
    cross<false>(barrier, [] {});

    attend(b, room, filled, turns);
    cross<false>(barrier, [] {});

    combine(b, room, filled);
    // Forgotten here, so that no register holds it through the two phases above.
    next = Ahead();
    cross<true>(barrier, [&] { load_ahead<ONE>(next, out, first, hidden, 0, wide); });

    Extra extra = load_extra<ONE>(out, b.x, first, hidden, wide, rows);
    stage(xs, b.mixed, wide, rows);
    const auto to_units = [&] { load_ahead<GATED>(next, gate_up, first, units, 0, hidden); };
    multiply<ONE>(next, out, b.x, xs, hidden, wide, rows, extra, to_units);
    cross<false>(barrier, to_units);

    extra = load_extra<GATED>(gate_up, nullptr, first, units, hidden, rows);
    stage_norm(xs, b.middle, b.mlp_norm, hidden, rows, b.mlp_eps, slots);
    const auto to_down = [&] { load_ahead<ONE>(next, down, first, hidden, 0, units); };
    multiply<GATED>(next, gate_up, nullptr, xs, units, hidden, rows, extra, to_down);
    cross<false>(barrier, to_down);

    extra = load_extra<ONE>(down, b.middle, first, hidden, units, rows);
    stage(xs, b.inner, units, rows);
    multiply<ONE>(next, down, b.middle, xs, hidden, units, rows, extra, [] {});
    report_places(b);
}
