// moe_combine:      out[t, :] = sum over i of weight[t, i] · y[inverse[t·k + i], :], in order of i; weight may be null.
//                   One thread per token and V columns.
// moe_combine_grad: dy[inverse[t·k + i], :] = weight[t, i] · dout[t, :]; dweight[t, i] = <y[inverse[t·k + i]], dout[t]>.
//                   One warp per choice; lane l sums every 32nd pack, then the lanes are added in a fixed order.
//                   dy, and y with dweight, may be null.
// REAL: the type (T), FEW: columns of a thread (V). Sums are kept in the accumulator type and rounded once. A place outside 0..t·k is reported and left out.

typedef REAL T;
typedef AccOf<T>::type A;
static const int V = FEW;
struct __align__(sizeof(T) * V) Few { T at[V]; };

extern "C" __global__ void __launch_bounds__(256)
moe_combine(const T* __restrict__ y, const int* __restrict__ inverse, const T* __restrict__ weight, T* __restrict__ out,
            i64 tokens, int choices, i64 packs, u32* alarm, u32 code) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x, token, pack;
    if (at >= tokens * packs) return;
    if (tokens * packs <= 0x7fffffff) { token = (u32)at / (u32)packs; pack = (u32)at - (u32)token * (u32)packs; }
    else { token = at / packs; pack = at - token * packs; }
    const Few* rows = reinterpret_cast<const Few*>(y);
    A sum[V];
    #pragma unroll
    for (int v = 0; v < V; ++v) sum[v] = 0;
    #pragma unroll 4
    for (int i = 0; i < choices; ++i) {
        i64 choice = token * choices + i, place = inverse[choice];
        if ((u64)place >= (u64)(tokens * choices)) { raise_alarm(alarm, code, place, choice, tokens * choices); continue; }
        A w = weight ? up(weight[choice]) : A(1);
        Few row = rows[place * packs + pack];
        #pragma unroll
        for (int v = 0; v < V; ++v) sum[v] += w * up(row.at[v]);
    }
    Few result;
    #pragma unroll
    for (int v = 0; v < V; ++v) put(result.at[v], sum[v]);
    reinterpret_cast<Few*>(out)[at] = result;
}

extern "C" __global__ void __launch_bounds__(256)
moe_combine_grad(const T* __restrict__ y, const int* __restrict__ inverse, const T* __restrict__ weight,
                 const T* __restrict__ dout, T* __restrict__ dy, T* __restrict__ dweight, i64 total, int choices,
                 i64 packs, u32* alarm, u32 code) {
    i64 choice = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31;
    if (choice >= total) return;
    i64 place = inverse[choice];
    if ((u64)place >= (u64)total) {
        if (lane == 0) raise_alarm(alarm, code, place, choice, total);
        return;
    }
    A w = up(weight[choice]), sum = 0;
    const Few* from = reinterpret_cast<const Few*>(dout) + (i64)((u32)choice / (u32)choices) * packs;
    const Few* value = reinterpret_cast<const Few*>(y) + place * packs;
    Few* to = reinterpret_cast<Few*>(dy) + place * packs;
    #pragma unroll 4
    for (i64 pack = lane; pack < packs; pack += 32) {
        Few d = from[pack];
        if (dy) {
            Few scaled;
            #pragma unroll
            for (int v = 0; v < V; ++v) put(scaled.at[v], w * up(d.at[v]));
            to[pack] = scaled;
        }
        if (dweight) {
            Few x = value[pack];
            #pragma unroll
            for (int v = 0; v < V; ++v) sum += up(x.at[v]) * up(d.at[v]);
        }
    }
    if (dweight) {
        sum = warp_sum(sum);
        if (lane == 0) put(dweight[choice], sum);
    }
}
