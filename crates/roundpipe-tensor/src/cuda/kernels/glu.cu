// Gated linear units of [rows, cols], and their gradients; KIND says which:
//
//   0: gate s(gate) up, s the logistic function         1: gelu(gate) up, by tanh
//   2: g s(alpha g) (u + 1), g = min(gate, limit), u = up held to [-limit, limit]
//   dgate = dy f'(gate) ..,  dup = dy f(gate)
//
// Blocks of [tx, ty] threads: tx along a row, ty rows. A thread takes N neighbours (WIDE: 16 bytes). Block i works
// on rows i / across * ty and pieces i % across * tx. Operands that are dense as a whole come as one row.

typedef ELEMENT T;
typedef AccOf<T>::type A;
const int N = WIDE ? 16 / sizeof(T) : 1;
typedef Few<T, N> Piece;

__device__ __forceinline__ A logistic(A x) { return Recip<T>::of(A(1) + Exp<T>::of(-x)); }
// 16-bit values need no more than the quotient gives.
__device__ __forceinline__ A tanh_quick(A x) {
    return sizeof(T) == 2 ? A(1) - A(2) * Recip<T>::of(A(1) + Exp<T>::of(A(2) * x)) : tanh_of(x);
}

#define ROOT A(0.7978845608028654)
#define CUBE A(0.044715)

__device__ __forceinline__ A value(A gate, A up, A alpha, A limit) {
    if (KIND == 0) return gate * logistic(gate) * up;
    if (KIND == 1) {
        A inner = ROOT * (gate + CUBE * gate * gate * gate);
        return A(0.5) * gate * (A(1) + tanh_quick(inner)) * up;
    }
    // Comparisons are written so that NaN passes.
    A g = gate > limit ? limit : gate, u = up > limit ? limit : up;
    u = u < -limit ? -limit : u;
    return g * logistic(alpha * g) * (u + A(1));
}

// Derivatives by gate and by up.
__device__ __forceinline__ void slopes(A gate, A up, A alpha, A limit, A& by_gate, A& by_up) {
    if (KIND == 0) {
        A s = logistic(gate);
        by_gate = up * s * (A(1) + gate * (A(1) - s));
        by_up = gate * s;
    } else if (KIND == 1) {
        A inner = ROOT * (gate + CUBE * gate * gate * gate);
        A slope = ROOT * (A(1) + A(3) * CUBE * gate * gate);
        A t = tanh_quick(inner), half = A(0.5) * (A(1) + t);
        by_gate = up * (half + A(0.5) * gate * (A(1) - t * t) * slope);
        by_up = gate * half;
    } else {
        A g = gate > limit ? limit : gate, u = up > limit ? limit : up;
        u = u < -limit ? -limit : u;
        A s = logistic(alpha * g);
        // A value on the bound passes its gradient.
        by_gate = gate > limit ? A(0) : (u + A(1)) * s * (A(1) + alpha * g * (A(1) - s));
        by_up = up > limit || up < -limit ? A(0) : g * s;
    }
}

// Where a row begins; the view lacks the last dimension.
__device__ __forceinline__ T* row_at(const View& v, i64 row) {
    return reinterpret_cast<T*>(v.ptr) + (v.rank == 1 ? row * v.stride[0] : offset_of(v, row));
}

extern "C" __global__ __launch_bounds__(256) void glu(
    View gate, View up_view, View y, i64 rows, i64 cols, u32 across, double alpha, double limit
) {
    const u32 down = blockIdx.x / across;
    const i64 row = (i64)down * blockDim.y + threadIdx.y;
    const i64 at = ((i64)(blockIdx.x - down * across) * blockDim.x + threadIdx.x) * N;
    if (row >= rows || at >= cols) return;
    Piece g = load_few<N>(row_at(gate, row) + at), u = load_few<N>(row_at(up_view, row) + at), out;
    #pragma unroll
    for (int j = 0; j < N; ++j) put(out.at[j], value(up(g.at[j]), up(u.at[j]), (A)alpha, (A)limit));
    store_few(row_at(y, row) + at, out);
}

extern "C" __global__ __launch_bounds__(256) void glu_grad(
    View gate, View up_view, View dy, View dgate, View dup, i64 rows, i64 cols, u32 across, double alpha, double limit
) {
    const u32 down = blockIdx.x / across;
    const i64 row = (i64)down * blockDim.y + threadIdx.y;
    const i64 at = ((i64)(blockIdx.x - down * across) * blockDim.x + threadIdx.x) * N;
    if (row >= rows || at >= cols) return;
    Piece g = load_few<N>(row_at(gate, row) + at), u = load_few<N>(row_at(up_view, row) + at);
    Piece d = load_few<N>(row_at(dy, row) + at), to_gate, to_up;
    #pragma unroll
    for (int j = 0; j < N; ++j) {
        A by_gate, by_up;
        slopes(up(g.at[j]), up(u.at[j]), (A)alpha, (A)limit, by_gate, by_up);
        put(to_gate.at[j], up(d.at[j]) * by_gate);
        put(to_up.at[j], up(d.at[j]) * by_up);
    }
    store_few(row_at(dgate, row) + at, to_gate);
    store_few(row_at(dup, row) + at, to_up);
}
