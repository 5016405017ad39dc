// sum += part, or sum = part where it is the first; out = sum rounded where it is the last.
// part and sum lie densely as [rows, heads, width]; out at strides. A thread has eight neighbours of a row: 16 bytes
// of part and out, 32 of sum. There are fewer than 2^31 such packs, so their places are 32-bit numbers.

extern "C" __global__ void __launch_bounds__(256)
attention_add(const TYPE* part, float* sum, TYPE* out, u32 packs, u32 heads, u32 width_packs,
              i64 row_stride, i64 head_stride, int first, int last) {
    u32 p = blockIdx.x * 256u + threadIdx.x;
    if (p >= packs) return;
    Pack<TYPE> x = load16(part + (i64)p * 8);
    float* at = sum + (i64)p * 8;
    Pack<float> lo, hi;
    if (first) {
        for (int i = 0; i < 4; ++i) { lo.at[i] = 0.0f; hi.at[i] = 0.0f; }
    } else {
        lo = load16(at);
        hi = load16(at + 4);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) { lo.at[i] += up(x.at[i]); hi.at[i] += up(x.at[i + 4]); }
    if (!last) {
        store_whole(at, lo);
        store_whole(at + 4, hi);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) { put(x.at[i], lo.at[i]); put(x.at[i + 4], hi.at[i]); }
    u32 line = p / width_packs, row = line / heads;
    i64 to = (i64)row * row_stride + (i64)(line - row * heads) * head_stride + (i64)(p - line * width_packs) * 8;
    store_whole(out + to, x);
}
