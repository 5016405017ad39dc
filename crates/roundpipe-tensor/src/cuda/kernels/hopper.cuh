// Hopper's own instructions: the copy engine (TMA), barriers in shared memory that count its bytes, and products that
// the tensor cores read from shared memory (wgmma). For sm_90a.
// Macro: HALF (1: f16, 0: bf16), the type that is multiplied.
//
// A tile in shared memory is made of panels: lines of 128 bytes (64 elements), one below the other, whose 16-byte
// pieces are swizzled as the copy engine leaves them (piece c of line r lies at c ^ r % 8). Panels begin at multiples of
// 1024 bytes.

// A description of a tensor for the copy engine, made by the driver.
struct __align__(64) TensorMap { u64 words[16]; };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory");
}
// Makes barriers that are set up known to the copy engine; a barrier of all threads must follow.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
}
// One arrival that also waits for so many bytes of copies.
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
// Until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
    asm volatile("{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}" :: "r"(bar), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_rows(u32 to, const TensorMap* map, u32 bar, int inner, int outer) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        :: "r"(to), "l"(map), "r"(bar), "r"(inner), "r"(outer) : "memory");
}
__device__ __forceinline__ void copy_matrix(u32 to, const TensorMap* map, u32 bar, int inner, int outer, int group) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
        :: "r"(to), "l"(map), "r"(bar), "r"(inner), "r"(outer), "r"(group) : "memory");
}
__device__ __forceinline__ void copy_head(u32 to, const TensorMap* map, u32 bar, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
        :: "r"(to), "l"(map), "r"(bar), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}

// Copies from shared to global memory in one piece, or adds f32 numbers to what is there; then the end of what a thread
// ordered: that shared memory has been read, or that all is written.
__device__ __forceinline__ void copy_out(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void add_out(void* to, u32 from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" :: "l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void out_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void out_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void out_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// What this thread wrote into shared memory becomes visible to the tensor cores and the copy engine; a barrier of the
// threads that wrote must follow.
__device__ __forceinline__ void show_to_engines() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barriers among some threads of a block by number; 0 is that of __syncthreads.
__device__ __forceinline__ void meet(int number, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory");
}
// Arrives without waiting.
__device__ __forceinline__ void pass(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(number), "r"(threads) : "memory");
}

// How the tensor cores find a tile: address, bytes between its columns of blocks (for lines across the depth), bytes
// between blocks of 8 lines; all in units of 16. Lines have 128 bytes, whose 16-byte pieces are swizzled.
__device__ __forceinline__ u64 describe(u32 address, u32 leading, u32 stride) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory"); }

// The compiler moves no use of the sums across this: it does not know that the tensor cores write them.
template <int N> __device__ __forceinline__ void hold(float (&d)[N]) {
    #pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}

#if HALF
#define KIND "f32.f16.f16"
#else
#define KIND "f32.bf16.bf16"
#endif
#define P0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define P1 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define P2 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define P3 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define P4 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define P5 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define P6 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define P7 "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define F64(i) F16(i), F16(i + 16), F16(i + 32), F16(i + 48)
#define MULTIPLY(WIDE, LIST, SIDES, ADD, TURN, ...) \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADD ", 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n" WIDE "k16." KIND " {" LIST "}, " SIDES ", adds, 1, 1, " TURN ";\n}" : __VA_ARGS__)

// d = a b, or d += a b where `add` is not 0: 64 rows, 256, 128 or 64 columns, depth 16. TURNED: lines of b are across the
// depth. Lines of a are along it.
template <int TURNED> __device__ __forceinline__ void multiply(float (&d)[128], u64 a, u64 b, int add) {
    MULTIPLY("256", P0 "," P1 "," P2 "," P3 "," P4 "," P5 "," P6 "," P7, "%128, %129", "%130", "0, %131", F64(0), F64(64)
        : "l"(a), "l"(b), "r"(add), "n"(TURNED));
}
template <int TURNED> __device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b, int add) {
    MULTIPLY("128", P0 "," P1 "," P2 "," P3, "%64, %65", "%66", "0, %67", F64(0) : "l"(a), "l"(b), "r"(add), "n"(TURNED));
}
template <int TURNED> __device__ __forceinline__ void multiply(float (&d)[32], u64 a, u64 b, int add) {
    MULTIPLY("64", P0 "," P1, "%32, %33", "%34", "0, %35", F16(0), F16(16) : "l"(a), "l"(b), "r"(add), "n"(TURNED));
}

// The same where lines of both sides are across the depth.
__device__ __forceinline__ void multiply_across(float (&d)[32], u64 a, u64 b, int add) {
    MULTIPLY("64", P0 "," P1, "%32, %33", "%34", "1, 1", F16(0), F16(16) : "l"(a), "l"(b), "r"(add));
}

// The same with the left side in registers: pairs of row lane / 4 and of row lane / 4 + 8, then those of eight columns on.
template <int TURNED> __device__ __forceinline__ void multiply(float (&d)[64], const u32* a, u64 b, int add) {
    MULTIPLY("128", P0 "," P1 "," P2 "," P3, "{%64,%65,%66,%67}, %68", "%69", "%70", F64(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TURNED));
}
template <int TURNED> __device__ __forceinline__ void multiply(float (&d)[32], const u32* a, u64 b, int add) {
    MULTIPLY("64", P0 "," P1, "{%32,%33,%34,%35}, %36", "%37", "%38", F16(0), F16(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TURNED));
}

