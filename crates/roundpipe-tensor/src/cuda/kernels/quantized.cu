// widen_int8:      w[i] = code[i] · factor[row of i].
// widen_nf4:       w[i] = book[code] · (book[16 + magnitude] · factor + offset): blocks of 64 values have a magnitude,
//                  256 blocks a factor, a matrix an offset. The earlier value is in the high half of a byte.
// widen_nf4_plain: w[i] = book[code] · magnitude.
// REAL: the type of w (T), PACK: values that lie side by side (V), PACKS: packs of a thread. The packs of a thread are a
// block of threads apart, so that a warp reads and writes side by side, and their reads do not wait for each other.
// Products and sums are rounded one by one in f32 (never fused), values once more to T.

typedef REAL T;
static const int V = PACK;
static const int THREADS = 256;
struct __align__(V) Bytes { u8 at[V]; };
// At most 16 bytes: what one instruction writes.
static const int W = V * sizeof(T) > 16 ? 16 / sizeof(T) : V;
struct __align__(sizeof(T) * W) Few { T at[W]; };

__device__ __forceinline__ void put_pack(T* out, i64 pack, const float (&values)[V]) {
    Few* to = reinterpret_cast<Few*>(out + pack * V);
    #pragma unroll
    for (int part = 0; part < V / W; ++part) {
        Few few;
        #pragma unroll
        for (int v = 0; v < W; ++v) put(few.at[v], values[part * W + v]);
        to[part] = few;
    }
}

extern "C" __global__ void __launch_bounds__(256)
widen_int8(const u8* __restrict__ codes, const float* __restrict__ factors, T* __restrict__ out, i64 packs, i64 of_row) {
    i64 first = (i64)blockIdx.x * THREADS * PACKS + threadIdx.x;
    Bytes bytes[PACKS];
    #pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        i64 pack = first + i * THREADS;
        if (pack < packs) bytes[i] = reinterpret_cast<const Bytes*>(codes)[pack];
    }
    #pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        i64 pack = first + i * THREADS;
        if (pack >= packs) return;
        i64 row = packs <= 0x7fffffff ? (i64)((u32)pack / (u32)of_row) : pack / of_row;
        float factor = factors[row], values[V];
        #pragma unroll
        for (int v = 0; v < V; ++v) values[v] = __fmul_rn((float)(signed char)bytes[i].at[v], factor);
        put_pack(out, pack, values);
    }
}

#if PACK == 8
template <bool CODED>
__device__ __forceinline__ void widen_blocks(const u8* codes, const void* magnitudes, const float* nested,
                                             const float* books, T* out, i64 matrices, i64 packs) {
    __shared__ float book[16];
    __shared__ float magnitude_book[CODED ? 256 : 1];
    if (threadIdx.x < 16) book[threadIdx.x] = books[threadIdx.x];
    if (CODED) magnitude_book[threadIdx.x] = books[16 + threadIdx.x];
    __syncthreads();
    i64 first = (i64)blockIdx.x * THREADS * PACKS + threadIdx.x, blocks = packs / 8, factors = 1 + (blocks + 255) / 256;
    for (i64 matrix = blockIdx.y; matrix < matrices; matrix += gridDim.y) {
        const u32* from = reinterpret_cast<const u32*>(codes) + matrix * packs;
        const float* scales = nested + matrix * factors;
        T* to = out + matrix * packs * 8;
        u32 eight[PACKS];
        float magnitude[PACKS];
        #pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            i64 pack = first + i * THREADS, block = pack >> 3;
            if (pack >= packs) continue;
            eight[i] = from[pack];
            if (CODED) {
                u8 code = reinterpret_cast<const u8*>(magnitudes)[matrix * blocks + block];
                magnitude[i] = __fadd_rn(__fmul_rn(magnitude_book[code], scales[1 + (block >> 8)]), scales[0]);
            } else {
                magnitude[i] = reinterpret_cast<const float*>(magnitudes)[matrix * blocks + block];
            }
        }
        #pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            i64 pack = first + i * THREADS;
            if (pack >= packs) continue;
            float values[8];
            #pragma unroll
            for (int v = 0; v < 8; ++v) {
                // Byte v / 2, the high half first.
                u32 code = eight[i] >> ((v >> 1) * 8 + ((v & 1) ? 0 : 4)) & 15;
                values[v] = __fmul_rn(book[code], magnitude[i]);
            }
            put_pack(to, pack, values);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
widen_nf4(const u8* __restrict__ codes, const u8* __restrict__ magnitudes, const float* __restrict__ nested,
          const float* __restrict__ books, T* __restrict__ out, i64 matrices, i64 packs) {
    widen_blocks<true>(codes, magnitudes, nested, books, out, matrices, packs);
}

extern "C" __global__ void __launch_bounds__(256)
widen_nf4_plain(const u8* __restrict__ codes, const float* __restrict__ magnitudes, const float* __restrict__ nested,
                const float* __restrict__ books, T* __restrict__ out, i64 matrices, i64 packs) {
    widen_blocks<false>(codes, magnitudes, nested, books, out, matrices, packs);
}
#endif
