// From choices sorted by expert (`keys`: experts, `items`: token · k + choice) to
//   rows[j] = token of place j, inverse[item] = its place j, offsets[e] = first place of expert e.
// One thread per place and one more. Thread j writes the offsets of the experts after the one of place j - 1, up to
// its own: together they write offsets[0..=experts] once each.

extern "C" __global__ void __launch_bounds__(256)
moe_places(const u32* keys, const u32* items, i64 n, i64 per_token, i64 experts, int* rows, int* inverse, int* offsets) {
    i64 j = (i64)blockIdx.x * 256 + threadIdx.x;
    if (j > n) return;
    if (j < n) {
        u32 item = items[j];
        rows[j] = (int)(item / (u32)per_token);
        inverse[item] = (int)j;
    }
    i64 low = j == 0 ? -1 : (i64)keys[j - 1];
    i64 high = j == n ? experts : (i64)keys[j];
    for (i64 e = low + 1; e <= high; ++e) offsets[e] = (int)j;
}
