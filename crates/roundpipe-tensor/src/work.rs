//! What kernels have to do: operations, and bytes of their operands.
//!
//! Counted from shapes alone. Nothing here depends on a device; [`crate::rates`] turns counts into
//! times.

use crate::kernel::{AttentionSpec, Kernel, View};

/// Bytes of memory behind a view: a broadcast dimension counts once.
pub(crate) fn bytes(view: &View) -> u64 {
    let distinct = view
        .shape()
        .iter()
        .zip(view.layout.strides())
        .map(|(n, s)| if *s == 0 { (*n).min(1) } else { *n });
    (distinct.product::<usize>() * view.dtype.size()) as u64
}

/// A multiplication and an addition for each pair; absurd sizes stop at the largest number.
fn twice(a: u64, b: u64) -> u64 {
    2u64.saturating_mul(a).saturating_mul(b)
}

/// Floating-point operations of a kernel, as [`crate::meta`] describes them. Of attention the pairs
/// may be `known`.
pub(crate) fn flops(
    kernel: &Kernel,
    src: &[Option<View>],
    dst: &[Option<View>],
    known: Option<u64>,
) -> u64 {
    let size = |v: &Option<View>| v.as_ref().map_or(0, |v| v.numel() as u64);
    let read: u64 = src.iter().map(size).sum();
    let written: u64 = dst.iter().map(size).sum();
    let dim = |views: &[Option<View>], i: usize, axis: usize| {
        views[i].as_ref().map_or(0, |v| v.shape()[axis] as u64)
    };
    match kernel {
        Kernel::Fill { .. } | Kernel::Copy | Kernel::IndexSelect { .. } | Kernel::Gather { .. } => {
            0
        }
        Kernel::MatMul { .. } => {
            let rank = src[0].as_ref().map_or(2, |v| v.shape().rank());
            twice(written, dim(src, 0, rank - 1))
        }
        Kernel::Fp8MatMul { .. } => twice(written, dim(src, 0, 1)),
        Kernel::GroupedMatMul { .. } => {
            let beside = if src.len() > 3 { dim(src, 3, 1) } else { 0 };
            twice(written, dim(src, 0, 1) + beside)
        }
        Kernel::GroupedMatMulGrad { .. } => twice(size(&src[0]), dim(src, 1, 1)),
        Kernel::Attention(spec) => {
            let pairs = known.unwrap_or_else(|| pairs(spec, src));
            twice(pairs, dim(src, 0, 3) + dim(src, 2, 3))
        }
        Kernel::CacheWrite => 0,
        Kernel::FewLinear(_) => {
            let weights: u64 = src[3..6].iter().map(size).sum();
            twice(weights, dim(src, 0, 0))
        }
        Kernel::DecodeBlock(spec) => {
            let maps = [2, 3, 4, 15, 18, 19, 20];
            let weights: u64 = maps.iter().map(|map| size(&src[*map])).sum();
            let places = spec.window.map_or(u64::MAX, |window| window as u64);
            // All places count as filled: queries and what they mix are as wide as the input of wo.
            let attended = twice(2 * dim(dst, 1, 1).min(places), dim(src, 15, 1));
            let rows = dim(src, 0, 0);
            twice(weights, rows).saturating_add(attended.saturating_mul(rows))
        }
        Kernel::CachedAttention(spec) => {
            // All places count as filled.
            twice(pairs(spec, src), dim(src, 0, 3) + dim(src, 2, 3))
        }
        Kernel::AttentionGrad(spec) => {
            let pairs = known.unwrap_or_else(|| pairs(spec, src));
            twice(pairs, 3 * dim(src, 0, 3) + 2 * dim(src, 2, 3))
        }
        Kernel::Conv2d(_) => twice(written, size(&src[1]) / dim(src, 1, 0).max(1)),
        Kernel::Conv2dGradInput(_) => twice(size(&src[0]), size(&src[1]) / dim(src, 1, 0).max(1)),
        Kernel::Conv2dGradFilter { .. } => {
            twice(size(&src[1]), size(&dst[0]) / dim(dst, 0, 0).max(1))
        }
        Kernel::Reduce { .. }
        | Kernel::ArgReduce { .. }
        | Kernel::IndexAdd { .. }
        | Kernel::ScatterAdd { .. } => read,
        Kernel::Softmax { .. } | Kernel::SoftmaxGrad { .. } => 4 * written,
        Kernel::RmsNorm { .. } | Kernel::RmsNormGrad { .. } => 4 * written,
        Kernel::LayerNorm { .. } | Kernel::LayerNormGrad { .. } => 5 * written,
        Kernel::GroupNorm { .. } | Kernel::GroupNormGrad { .. } => 5 * written,
        Kernel::BatchNorm { .. } | Kernel::BatchNormGrad { .. } => 5 * written,
        Kernel::CrossEntropy { .. } | Kernel::CrossEntropyGrad { .. } => 4 * size(&src[0]),
        Kernel::Host(host) => {
            let shapes =
                |all: &[Option<View>]| all.iter().flatten().map(|v| *v.shape()).collect::<Vec<_>>();
            host.flops(&shapes(src), &shapes(dst))
        }
        _ => written,
    }
}

/// Query-key pairs that the mask leaves visible, over all batches and query heads.
fn pairs(spec: &AttentionSpec, src: &[Option<View>]) -> u64 {
    let (Some(q), Some(k)) = (&src[0], &src[1]) else {
        return 0;
    };
    let (queries, keys) = (q.shape()[1] as u64, k.shape()[1] as u64);
    let window = spec.window.map_or(u64::MAX, |w| w as u64);
    let visible = |row: u64| {
        // Position of the query among the keys, the last query at the last key.
        let seen = if spec.causal {
            (row + 1 + keys).saturating_sub(queries)
        } else {
            keys
        };
        let hidden = (row + 1 + keys)
            .saturating_sub(queries)
            .saturating_sub(window);
        seen.min(keys).saturating_sub(hidden.min(keys))
    };
    (q.shape()[0] * q.shape()[2]) as u64 * (0..queries).map(visible).sum::<u64>()
}
