//! The operations that programs are made of. Each chooses operands that fit most of the time.

use std::sync::Arc;

use roundpipe_tensor::kernel::{
    ConvSpec, Glu, HostKernel, HostView, HostViewMut, PoolSpec, RopeStyle,
};
use roundpipe_tensor::ops::{
    Attention, BatchNorm, CrossEntropy, Experts, Lora, MoeOptions, Reduction, RouteWeights,
};
use roundpipe_tensor::{CustomOp, Cx, DType, Param, Result, Shape, Tensor};

use crate::bench::Bench;

type Operation = fn(&mut Bench<'_>) -> Result<Vec<Tensor>>;

/// Every operation by name.
pub const ALL: &[(&str, Operation)] = &[
    ("unary", unary),
    ("unary", unary),
    ("numbers", numbers),
    ("binary", binary),
    ("binary", binary),
    ("steps", steps),
    ("compare", compare),
    ("choose", choose),
    ("cast", cast),
    ("reshape", reshape),
    ("permute", permute),
    ("cut", cut),
    ("join", join),
    ("stretch", stretch),
    ("border", border),
    ("reduce", reduce),
    ("reduce", reduce),
    ("softmax", softmax),
    ("search", search),
    ("sort", sort),
    ("pick", pick),
    ("add_at", add_at),
    ("matmul", matmul),
    ("linear", linear),
    ("norm", norm),
    ("channel_norm", channel_norm),
    ("batch_norm", batch_norm),
    ("rope", rope),
    ("glu", glu),
    ("attention", attention),
    ("attention", attention),
    ("cross_entropy", cross_entropy),
    ("loss", loss),
    ("grouped", grouped),
    ("moe", moe),
    ("conv", conv),
    ("pool", pool),
    ("random", random),
    ("custom", custom),
    ("host_kernel", host_kernel),
    ("misfit", misfit),
];

/// Those without jumps, whose values and gradients are close to the same in f64.
pub const SMOOTH: &[(&str, Operation)] = &[
    ("unary", unary),
    ("binary", binary),
    ("reshape", reshape),
    ("permute", permute),
    ("cut", cut),
    ("join", join),
    ("stretch", stretch),
    ("border", border),
    ("softmax", softmax),
    ("add_at", add_at),
    ("matmul", matmul),
    ("linear", linear),
    ("norm", norm),
    ("rope", rope),
    ("glu", glu),
    ("attention", attention),
    ("cross_entropy", cross_entropy),
    ("loss", loss),
    ("grouped", grouped),
    ("conv", conv),
    ("pool", pool),
    ("custom", custom),
];

fn one(tensor: Result<Tensor>) -> Result<Vec<Tensor>> {
    Ok(vec![tensor?])
}

fn unary(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    const FUNCTIONS: [fn(&mut Cx, &Tensor) -> Result<Tensor>; 14] = [
        Cx::neg,
        Cx::abs,
        Cx::square,
        Cx::relu,
        Cx::exp,
        Cx::sin,
        Cx::cos,
        Cx::tanh,
        Cx::sigmoid,
        Cx::erf,
        Cx::silu,
        Cx::gelu,
        Cx::gelu_tanh,
        Cx::softplus,
    ];
    let x = b.any_float()?;
    let function = b.dice.pick(&FUNCTIONS);
    one(function(b.cx, &x))
}

/// Functions with numbers beside the tensor.
fn numbers(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = if b.dice.one_in(3) {
        b.any()?
    } else {
        b.any_float()?
    };
    let numbers = [-1.5, 0.0, 0.5, 2.0, 3.0, -1.0, 1e9, f64::NAN, f64::INFINITY];
    let (p, q) = (b.dice.pick(&numbers), b.dice.pick(&numbers));
    one(match b.dice.below(7) {
        0 => b.cx.leaky_relu(&x, p),
        1 => b.cx.elu(&x, p),
        2 => b.cx.powf(&x, p),
        3 => b.cx.clamp(&x, p, q),
        4 => b.cx.affine(&x, p, q),
        5 => b.cx.add_scalar(&x, p),
        _ => b.cx.mul_scalar(&x, q),
    })
}

/// Two tensors whose shapes broadcast.
fn pair(b: &mut Bench<'_>) -> Result<(Tensor, Tensor)> {
    let x = b.any_float()?;
    let dims: Vec<usize> = x
        .dims()
        .iter()
        .map(|d| if b.dice.one_in(4) { 1 } else { *d })
        .collect();
    let from = if b.dice.one_in(3) {
        b.dice.below(dims.len() + 1)
    } else {
        0
    };
    let y = b.float(&dims[from..])?;
    Ok(if b.dice.one_in(2) { (x, y) } else { (y, x) })
}

fn binary(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let (x, y) = pair(b)?;
    one(match b.dice.below(6) {
        0 => b.cx.add(&x, &y),
        1 => b.cx.sub(&x, &y),
        2 => b.cx.mul(&x, &y),
        3 => b.cx.div(&x, &y),
        4 => b.cx.maximum(&x, &y),
        _ => b.cx.minimum(&x, &y),
    })
}

/// Functions that jump.
fn steps(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    const FUNCTIONS: [fn(&mut Cx, &Tensor) -> Result<Tensor>; 9] = [
        Cx::sign,
        Cx::floor,
        Cx::ceil,
        Cx::round,
        Cx::log,
        Cx::sqrt,
        Cx::rsqrt,
        Cx::recip,
        Cx::logical_not,
    ];
    if b.dice.one_in(4) {
        let (x, y) = pair(b)?;
        return one(b.cx.pow(&x, &y));
    }
    let x = b.any()?;
    let function = b.dice.pick(&FUNCTIONS);
    one(function(b.cx, &x))
}

fn compare(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let (x, y) = pair(b)?;
    let bools = match b.dice.below(6) {
        0 => b.cx.eq(&x, &y),
        1 => b.cx.ne(&x, &y),
        2 => b.cx.lt(&x, &y),
        3 => b.cx.ge(&x, &y),
        4 => b.cx.gt_scalar(&x, 0.25),
        _ => b.cx.le_scalar(&x, -1.0),
    }?;
    let other = b.cx.lt_scalar(&y, 0.0)?;
    let both = match b.dice.below(3) {
        0 => b.cx.logical_and(&bools, &other),
        1 => b.cx.logical_or(&bools, &other),
        _ => b.cx.logical_xor(&bools, &other),
    }?;
    Ok(vec![bools, both])
}

fn choose(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let (x, y) = pair(b)?;
    let mask = b.cx.gt_scalar(&y, 0.0)?;
    one(match b.dice.below(3) {
        0 => b.cx.where_cond(&mask, &x, &y),
        1 => b.cx.masked_fill(&x, &mask, 7.0),
        _ => {
            let diagonal = b.dice.pick(&[0, 1, -2, i64::MIN, i64::MAX]);
            if b.dice.one_in(2) {
                b.cx.tril(&x, diagonal)
            } else {
                b.cx.triu(&x, diagonal)
            }
        }
    })
}

fn cast(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let (x, dtype) = (b.any()?, b.dice.pick(&DType::ALL));
    let to = b.cx.cast(&x, dtype)?;
    let dtype = b.dtype;
    let back = b.cx.cast(&to, dtype)?;
    let dense = b.cx.contiguous(&back)?;
    Ok(vec![to, dense])
}

fn reshape(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    let rank = x.rank();
    let (first, last) = (b.dice.dim(rank), b.dice.dim(rank));
    one(match b.dice.below(6) {
        0 => b.cx.reshape(&x, &[-1]),
        1 => {
            let mut dims: Vec<isize> = x.dims().iter().map(|d| *d as isize).collect();
            dims.reverse();
            b.cx.reshape(&x, &dims)
        }
        2 => b.cx.unsqueeze(&x, first),
        3 => b.cx.squeeze(&x, first),
        4 => b.cx.flatten(&x, first, last),
        _ => {
            let halves = [2, -1, b.dice.pick(&[1, 2, 3])];
            b.cx.reshape(&x, &halves)
        }
    })
}

fn permute(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    let rank = x.rank();
    if b.dice.one_in(2) {
        let (first, second) = (b.dice.dim(rank), b.dice.dim(rank));
        return one(b.cx.transpose(&x, first, second));
    }
    let mut order: Vec<usize> = (0..rank).collect();
    for i in 0..rank {
        order.swap(i, b.dice.below(rank));
    }
    one(b.cx.permute(&x, &order))
}

fn cut(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    let dim = b.dice.dim(x.rank());
    let size = x.shape().axis("test", dim).map_or(3, |axis| x.dims()[axis]);
    let start = b.dice.below(size + 1);
    let len = if b.dice.one_in(30) {
        usize::MAX
    } else {
        b.dice.below(size - start + 1)
    };
    match b.dice.below(5) {
        0 => b.cx.split(&x, b.dice.below(5).max(size / 4), dim),
        1 => b.cx.chunk(&x, b.dice.below(4), dim),
        2 => b.cx.split_sizes(&x, &[start, size - start], dim),
        3 => one(b.cx.select(&x, dim, start)),
        _ => one(b.cx.narrow(&x, dim, start, len)),
    }
}

fn join(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    let dim = b.dice.dim(x.rank());
    let mut dims = x.dims().to_vec();
    let stack = b.dice.one_in(3);
    if let (Ok(axis), false) = (x.shape().axis("test", dim), stack) {
        dims[axis] = b.dice.below(4);
    }
    let y = b.float(&dims)?;
    let parts: &[&Tensor] = if b.dice.one_in(20) {
        &[]
    } else {
        &[&x, &y, &x][..1 + b.dice.below(3)]
    };
    one(if stack {
        b.cx.stack(parts, dim)
    } else {
        b.cx.cat(parts, dim)
    })
}

fn stretch(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    let mut dims: Vec<usize> = x.dims().to_vec();
    if x.numel() > b.budget {
        return Ok(vec![x]);
    }
    one(match b.dice.below(2) {
        0 => {
            dims.iter_mut()
                .filter(|d| **d == 1)
                .for_each(|d| *d = b.dice.below(4));
            if b.dice.one_in(2) {
                dims.insert(0, b.dice.below(4));
            }
            b.cx.expand(&x, &dims)
        }
        _ => {
            let counts: Vec<usize> = dims.iter().map(|_| b.dice.pick(&[0, 1, 1, 2, 3])).collect();
            b.cx.repeat(&x, &counts)
        }
    })
}

fn border(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    if b.dice.one_in(2) {
        let dims: Vec<isize> = (0..b.dice.below(3)).map(|_| b.dice.dim(x.rank())).collect();
        return one(b.cx.flip(&x, &dims));
    }
    let around: Vec<(usize, usize)> = x
        .dims()
        .iter()
        .map(|_| (b.dice.below(3), b.dice.below(2)))
        .collect();
    one(b.cx.pad(&x, &around, 0.5))
}

/// Some dimensions of a tensor.
fn some_dims(b: &mut Bench<'_>, x: &Tensor) -> Vec<isize> {
    match b.dice.below(3) {
        0 => Vec::new(),
        1 => vec![b.dice.dim(x.rank())],
        _ => (0..x.rank() as isize)
            .filter(|_| b.dice.one_in(2))
            .collect(),
    }
}

fn reduce(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = if b.dice.one_in(4) {
        b.any()?
    } else {
        b.any_float()?
    };
    let (dims, keep, unbiased) = (some_dims(b, &x), b.dice.one_in(2), b.dice.one_in(2));
    one(match b.dice.below(12) {
        0 => b.cx.sum(&x, &dims, keep),
        1 => b.cx.mean(&x, &dims, keep),
        2 => b.cx.max(&x, &dims, keep),
        3 => b.cx.min(&x, &dims, keep),
        4 => b.cx.prod(&x, &dims, keep),
        5 => b.cx.var(&x, &dims, unbiased, keep),
        6 => b.cx.std(&x, &dims, unbiased, keep),
        7 => b.cx.norm(&x, &dims, keep),
        8 => b.cx.logsumexp(&x, &dims, keep),
        9 => b.cx.any(&x, &dims, keep),
        10 => b.cx.all(&x, &dims, keep),
        _ => b.cx.mean_all(&x),
    })
}

fn softmax(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    let dim = b.dice.dim(x.rank());
    one(match b.dice.below(3) {
        0 => b.cx.softmax(&x, dim),
        1 => b.cx.log_softmax(&x, dim),
        _ => b.cx.cumsum(&x, dim),
    })
}

fn search(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any()?;
    let (dim, keep) = (b.dice.dim(x.rank()), b.dice.one_in(2));
    one(if b.dice.one_in(2) {
        b.cx.argmax(&x, dim, keep)
    } else {
        b.cx.argmin(&x, dim, keep)
    })
}

fn sort(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = if b.dice.one_in(3) {
        b.any()?
    } else {
        b.any_float()?
    };
    let (dim, largest) = (b.dice.dim(x.rank()), b.dice.one_in(2));
    let (values, places) = match b.dice.one_in(2) {
        true => b.cx.sort(&x, dim, largest)?,
        false => {
            let size = x.shape().axis("test", dim).map_or(0, |axis| x.dims()[axis]);
            let k = b.dice.below(size.min(40) + 1);
            b.cx.topk(&x, k, dim, largest)?
        }
    };
    Ok(vec![values, places])
}

const INDICES: [DType; 3] = [DType::I64, DType::I32, DType::U32];

fn pick(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    let dim = b.dice.dim(x.rank());
    let Ok(axis) = x.shape().axis("test", dim) else {
        return one(b.cx.index_select(&x, dim, &x));
    };
    let (dtype, size) = (b.dice.pick(&INDICES), x.dims()[axis]);
    match b.dice.below(4) {
        0 => {
            let many = b.dice.below(9);
            let index = b.index(dtype, size, &[many])?;
            one(b.cx.index_select(&x, dim, &index))
        }
        1 => {
            let dims: Vec<usize> = x
                .dims()
                .iter()
                .map(|d| (*d).min(1 + b.dice.below(9)))
                .collect();
            let index = b.index(dtype, size, &dims)?;
            one(b.cx.gather(&x, dim, &index))
        }
        2 => {
            let (rows, width) = (1 + b.dice.below(20), b.dice.below(40));
            let weight = b.float(&[rows, width])?;
            let dims = b.dice.dims(2, 60);
            let ids = b.index(dtype, rows, &dims)?;
            let padding = if b.dice.one_in(2) {
                Some(b.dice.below(rows))
            } else {
                None
            };
            one(b.cx.embedding_padded(&weight, &ids, padding))
        }
        _ => {
            let dims = b.dice.dims(2, 60);
            let index = b.index(dtype, 9, &dims)?;
            let to = b.dice.pick(&DType::ALL);
            one(b.cx.one_hot(&index, b.dice.below(12), to))
        }
    }
}

fn add_at(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    let dim = b.dice.dim(x.rank());
    let Ok(axis) = x.shape().axis("test", dim) else {
        return one(b.cx.index_add(&x, dim, &x, &x));
    };
    let (dtype, size, many) = (b.dice.pick(&INDICES), x.dims()[axis], b.dice.below(9));
    if b.dice.one_in(2) {
        let index = b.index(dtype, size, &[many])?;
        let mut dims = x.dims().to_vec();
        dims[axis] = index.numel();
        let src = b.float(&dims)?;
        return one(b.cx.index_add(&x, dim, &index, &src));
    }
    let dims: Vec<usize> = x
        .dims()
        .iter()
        .map(|d| (*d).min(1 + b.dice.below(9)))
        .collect();
    let index = b.index(dtype, size, &dims)?;
    let src = b.float(index.dims())?;
    one(b.cx.scatter_add(&x, dim, &index, &src))
}

fn matmul(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let side = b.budget.isqrt().max(1);
    let [m, k, n] = [(); 3].map(|()| b.dice.dims(1, side)[0]);
    let rank = b.dice.pick(&[0, 0, 1, 2]);
    let batch = b.dice.dims(rank, 4);
    let left: Vec<usize> = batch
        .iter()
        .map(|d| if b.dice.one_in(4) { 1 } else { *d })
        .chain([m, k])
        .collect();
    let right: Vec<usize> = match b.dice.below(4) {
        0 => vec![k, n],
        1 => vec![k],
        _ => batch.iter().copied().chain([k, n]).collect(),
    };
    let (x, y) = (b.float(&left)?, b.float(&right)?);
    one(b.cx.matmul(&x, &y))
}

fn linear(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    let (inner, outer) = (
        x.dims().last().copied().unwrap_or(3).min(4000),
        b.dice.dims(1, 40)[0],
    );
    let weight = b.float(&[outer, inner])?;
    let bias = if b.dice.one_in(2) {
        Some(b.float(&[outer])?)
    } else {
        None
    };
    if b.dice.one_in(2) {
        return one(b.cx.linear(&x, &weight, bias.as_ref()));
    }
    let rank = b.dice.below(4);
    let (a, c) = (b.float(&[rank, inner])?, b.float(&[outer, rank])?);
    let lora = Lora {
        a: &a,
        b: &c,
        scale: 0.5,
        dropout: b.dice.pick(&[0.0, 0.25, 1.0]),
    };
    one(b.cx.linear_lora(&x, &weight, bias.as_ref(), lora))
}

/// A weight of `size` elements, perhaps.
fn weight(b: &mut Bench<'_>, size: usize) -> Result<Option<Tensor>> {
    if b.dice.one_in(3) || size > 1 << 20 {
        Ok(None)
    } else {
        b.float(&[size]).map(Some)
    }
}

fn norm(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    let size = x.dims().last().copied().unwrap_or(1);
    let (w, bias) = (weight(b, size)?, weight(b, size)?);
    match b.dice.below(3) {
        0 => one(b.cx.rms_norm(&x, w.as_ref(), 0.1)),
        1 => {
            let residual = b.float(x.dims())?;
            let (sum, normed) = b.cx.add_rms_norm(&x, &residual, w.as_ref(), 0.1)?;
            Ok(vec![sum, normed])
        }
        _ => one(b.cx.layer_norm(&x, w.as_ref(), bias.as_ref(), 0.1)),
    }
}

fn channel_norm(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    let channels = x.dims().get(1).copied().unwrap_or(2);
    let (w, bias) = (weight(b, channels)?, weight(b, channels)?);
    let groups = b.dice.pick(&[0, 1, 2, channels, 3]);
    one(match b.dice.one_in(2) {
        true => b.cx.group_norm(&x, groups, w.as_ref(), bias.as_ref(), 0.1),
        false => b.cx.instance_norm(&x, w.as_ref(), bias.as_ref(), 0.1),
    })
}

fn batch_norm(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    let channels = x.dims().get(1).copied().unwrap_or(2);
    let (w, bias) = (weight(b, channels)?, weight(b, channels)?);
    let options = BatchNorm {
        eps: 0.1,
        ..BatchNorm::default()
    };
    if b.dice.one_in(2) || channels > 1 << 20 {
        return one(b
            .cx
            .batch_norm(&x, w.as_ref(), bias.as_ref(), None, options));
    }
    let acc = b.dtype.accumulator();
    let running = (
        Param::full(acc, &[channels], 0.5)?.frozen(),
        Param::full(acc, &[channels], 2.0)?.frozen(),
    );
    let y = b.cx.batch_norm(
        &x,
        w.as_ref(),
        bias.as_ref(),
        Some((&running.0, &running.1)),
        options,
    )?;
    b.cx.commit_buffers()?;
    Ok(vec![y])
}

fn rope(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let dims = b.dice.dims(4, b.budget);
    let x = b.float(&dims)?;
    let [_, steps, _, width] = *x.dims() else {
        return Ok(vec![]);
    };
    let (acc, positions, turned) = (
        b.dtype.accumulator(),
        1 + b.dice.below(40),
        b.dice.below(width / 2 + 1),
    );
    let table = |b: &mut Bench<'_>| {
        let rows = if b.dice.one_in(8) {
            positions
        } else {
            positions.max(steps.min(4096))
        };
        let values: Vec<f64> = (0..rows * turned.min(64))
            .map(|i| (i % 17) as f64 / 16.0)
            .collect();
        b.typed(acc, &values, &[rows, turned.min(64)])
    };
    let (cos, sin) = (table(b)?, table(b)?);
    let sin = if cos.dims() == sin.dims() {
        sin
    } else {
        cos.clone()
    };
    let style = b.dice.pick(&[RopeStyle::Half, RopeStyle::Interleaved]);
    let dtype = b.dice.pick(&INDICES);
    let at = match b.dice.one_in(2) && x.dims()[0].saturating_mul(steps) < 4096 {
        true => Some(b.index(dtype, cos.dims()[0], &[x.dims()[0], steps])?),
        false => None,
    };
    if b.dice.one_in(2) {
        return one(b.cx.rope(&x, &cos, &sin, at.as_ref(), style));
    }
    let weight = b.float(&[width.min(1 << 20)])?;
    one(b
        .cx
        .rope_norm(&x, &weight, &cos, &sin, at.as_ref(), style, 0.1))
}

fn glu(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    match b.dice.below(6) {
        0 => one(b.cx.swiglu_packed(&x)),
        1 => one(b.cx.geglu_packed(&x)),
        2 => one(b.cx.swiglu_clamped_interleaved(&x, 1.7, 1.0)),
        kind => {
            let up = b.float(x.dims())?;
            one(match kind {
                3 => b.cx.swiglu(&x, &up),
                4 => b.cx.geglu(&x, &up),
                _ => b.cx.swiglu_clamped(&x, &up, 1.7, 1.0),
            })
        }
    }
}

fn attention(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let packed = b.dice.one_in(3);
    let batch = if packed { 1 } else { b.dice.dims(1, 3)[0] };
    let (sq, sk) = (
        b.dice.dims(1, b.budget / 8)[0],
        b.dice.dims(1, b.budget / 8)[0],
    );
    let (group, heads) = (1 + b.dice.below(3), b.dice.pick(&[0, 1, 1, 2, 3]));
    let (d, dv) = (
        b.dice.pick(&[0, 1, 4, 8, 17]),
        b.dice.pick(&[0, 1, 4, 8, 19]),
    );
    let q = b.float(&[batch, sq, heads * group, d])?;
    let (k, v) = (
        b.float(&[batch, sk, heads, d])?,
        b.float(&[batch, sk, heads, dv])?,
    );
    let sinks = if b.dice.one_in(3) {
        Some(b.float(&[heads * group])?)
    } else {
        None
    };
    let sequences = 1 + b.dice.below(3);
    let mut lens = |rows: usize| {
        let mut ends: Vec<f64> = (0..=sequences)
            .map(|_| b.dice.below(rows + 1) as f64)
            .collect();
        ends.sort_by(f64::total_cmp);
        if b.odd_indices && b.dice.one_in(4) {
            ends[0] = b.dice.pick(&[-3.0, 1e9]);
        }
        b.typed(DType::I32, &ends, &[sequences + 1])
    };
    let lens = if packed {
        Some((lens(sq.min(4096))?, lens(sk.min(4096))?))
    } else {
        None
    };
    let how = Attention {
        scale: b.dice.pick(&[None, Some(0.5)]),
        causal: b.dice.one_in(2),
        window: b
            .dice
            .pick(&[None, None, Some(0), Some(3), Some(usize::MAX)]),
        sinks: sinks.as_ref(),
        lens: lens.as_ref().map(|(q, k)| (q, k)),
        any_order: b.dice.one_in(2),
    };
    // No query and key differ by more than a few units, so that scores of empty heads are not
    // infinite times zero.
    let how = if d == 0 {
        Attention {
            scale: Some(1.0),
            ..how
        }
    } else {
        how
    };
    let (o, lse) = b.cx.attention_known(&q, &k, &v, &how, None)?;
    Ok(if o.numel() == 0 {
        vec![o]
    } else {
        vec![o, lse]
    })
}

fn cross_entropy(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let rank = b.dice.pick(&[1, 2, 2, 3]);
    let mut dims = b.dice.dims(rank, b.budget);
    let classes = dims.last().copied().unwrap_or(1).min(1 << 20);
    *dims.last_mut().expect("one at least") = classes;
    let labels_dims = dims[..dims.len() - 1].to_vec();
    let dtype = b.dice.pick(&INDICES);
    let labels = b.index(dtype, classes, &labels_dims)?;
    let options = CrossEntropy {
        reduction: b
            .dice
            .pick(&[Reduction::None, Reduction::Mean, Reduction::Sum]),
        ignore_index: b.dice.pick(&[-100, 0, 1]),
        label_smoothing: b.dice.pick(&[0.0, 0.0, 0.1, 1.0]),
        chunk_tokens: b.dice.pick(&[None, Some(1), Some(7)]),
    };
    match b.dice.below(3) {
        0 => {
            let logits = b.float(&dims)?;
            one(b.cx.cross_entropy(&logits, &labels, options))
        }
        1 => {
            let logits = b.float(&dims)?;
            let log_probs = b.cx.log_softmax(&logits, -1)?;
            let options = CrossEntropy {
                label_smoothing: 0.0,
                ..options
            };
            one(b.cx.nll_loss(&log_probs, &labels, options))
        }
        _ => {
            let hidden = 1 + b.dice.below(9);
            let weight = b.float(&[classes, hidden])?;
            *dims.last_mut().expect("one at least") = hidden;
            let x = b.float(&dims)?;
            let weight = if b.dice.one_in(2) {
                weight.detach()
            } else {
                weight
            };
            one(b.cx.linear_cross_entropy(&x, &weight, &labels, options))
        }
    }
}

fn loss(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    let target = b.float(x.dims())?;
    let how = b
        .dice
        .pick(&[Reduction::None, Reduction::Mean, Reduction::Sum]);
    one(match b.dice.below(5) {
        0 => b.cx.mse_loss(&x, &target, how),
        1 => b.cx.l1_loss(&x, &target, how),
        2 => {
            b.cx.huber_loss(&x, &target, b.dice.pick(&[0.5, 1.0, 0.0]), how)
        }
        3 => b.cx.smooth_l1_loss(&x, &target, 0.5, how),
        _ => b.cx.binary_cross_entropy_with_logits(&x, &target, how),
    })
}

fn grouped(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let (rows, inner, outer, groups) = (
        b.dice.dims(1, 60)[0],
        b.dice.dims(1, 20)[0],
        b.dice.dims(1, 20)[0],
        b.dice.below(4),
    );
    let (x, weight) = (b.float(&[rows, inner])?, b.float(&[groups, outer, inner])?);
    let bias = if b.dice.one_in(2) {
        Some(b.float(&[groups, outer])?)
    } else {
        None
    };
    let mut ends: Vec<f64> = (0..groups).map(|_| b.dice.below(rows + 1) as f64).collect();
    ends.push(0.0);
    ends.sort_by(f64::total_cmp);
    if b.odd_indices && b.dice.one_in(3) {
        ends[groups] = b.dice.pick(&[-1.0, 1e9]);
    }
    let offsets = b.typed(DType::I32, &ends, &[groups + 1])?;
    one(b.cx.grouped_linear(&x, &weight, &offsets, bias.as_ref()))
}

fn moe(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let (tokens, width, inner, count) = (
        b.dice.dims(1, 30)[0].min(300),
        b.dice.dims(1, 9)[0].min(300),
        1 + b.dice.below(5),
        1 + b.dice.below(5),
    );
    let x = b.float(&[tokens, width])?;
    let router = b.float(&[count, width])?;
    let (gate_up, down) = (
        b.float(&[count, 2 * inner, width])?,
        b.float(&[count, width, inner])?,
    );
    let (gate_up_bias, down_bias) = (b.float(&[count, 2 * inner])?, b.float(&[count, width])?);
    let biased = b.dice.one_in(2);
    let experts = Experts {
        router: &router,
        router_bias: None,
        gate_up: &gate_up,
        gate_up_bias: biased.then_some(&gate_up_bias),
        down: &down,
        down_bias: biased.then_some(&down_bias),
    };
    let options = MoeOptions {
        top_k: b.dice.below(count + 1),
        weights: b.dice.pick(&[
            RouteWeights::Renormalized,
            RouteWeights::Plain,
            RouteWeights::Chosen,
        ]),
        glu: b.dice.pick(&[
            Glu::Silu,
            Glu::GeluTanh,
            Glu::Clamped {
                alpha: 1.7,
                limit: 7.0,
            },
        ]),
    };
    let (y, logits, routing) = b.cx.moe(&x, experts, options)?;
    let balance = b.cx.load_balancing_loss(&logits, routing.choice())?;
    Ok(vec![y, balance])
}

fn conv(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let (groups, per_group, out) = (1 + b.dice.below(3), b.dice.below(4), b.dice.below(4));
    let [kh, kw] = [(); 2].map(|()| 1 + b.dice.below(4));
    let odd = |b: &mut Bench<'_>| {
        if b.dice.one_in(60) {
            b.dice.pick(&[0, 1 << 30, usize::MAX])
        } else {
            1
        }
    };
    let spec = ConvSpec {
        stride: [1 + b.dice.below(3), odd(b)],
        padding: [b.dice.below(3), b.dice.below(2)],
        dilation: [1 + b.dice.below(2), odd(b)],
        groups,
    };
    let (n, h, w) = (b.dice.below(3), b.dice.below(12), b.dice.below(20));
    let bias = if b.dice.one_in(2) {
        Some(b.float(&[out * groups])?)
    } else {
        None
    };
    if b.dice.one_in(4) {
        let (x, f) = (
            b.float(&[n, per_group * groups, w])?,
            b.float(&[out * groups, per_group, kw])?,
        );
        return one(b.cx.conv1d(&x, &f, bias.as_ref(), spec));
    }
    let (x, f) = (
        b.float(&[n, per_group * groups, h, w])?,
        b.float(&[out * groups, per_group, kh, kw])?,
    );
    one(b.cx.conv2d(&x, &f, bias.as_ref(), spec))
}

fn pool(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let dims = b.dice.dims(4, b.budget);
    let x = b.float(&dims)?;
    let odd = |b: &mut Bench<'_>| {
        if b.dice.one_in(40) {
            b.dice.pick(&[0, 1 << 30, usize::MAX])
        } else {
            1
        }
    };
    let kernel = [1 + b.dice.below(4), 1 + b.dice.below(4)];
    let spec = PoolSpec {
        kernel,
        stride: [1 + b.dice.below(3), odd(b)],
        padding: [
            b.dice.below(kernel[0] / 2 + 1),
            b.dice.below(kernel[1] / 2 + 1),
        ],
        dilation: [1, 1],
        ceil_mode: b.dice.one_in(2),
        count_include_pad: b.dice.one_in(2),
    };
    let dilation = [1 + b.dice.below(2), odd(b)];
    one(match b.dice.below(4) {
        0 => b.cx.max_pool2d(&x, PoolSpec { dilation, ..spec }),
        1 => b.cx.avg_pool2d(&x, spec),
        2 => {
            b.cx.adaptive_avg_pool2d(&x, [b.dice.below(6), b.dice.below(6)])
        }
        _ => b.cx.global_avg_pool2d(&x),
    })
}

fn random(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let (dims, dtype) = (b.dice.shape(b.budget), b.dice.pick(&DType::ALL));
    let p = b.dice.pick(&[0.0, 0.3, 1.0, -0.1, f64::NAN]);
    one(match b.dice.below(8) {
        0 => b.cx.rand(dtype, &dims),
        1 => {
            b.cx.uniform(dtype, &dims, -1.0, b.dice.pick(&[2.0, -1.0, f64::INFINITY]))
        }
        2 => b.cx.normal(dtype, &dims, 1.0, 2.0),
        3 => b.cx.bernoulli(dtype, &dims, p),
        4 => b.cx.arange(
            dtype,
            -3.0,
            b.dice.pick(&[9.0, 300.0, 1e18, f64::NAN]),
            b.dice.pick(&[1.0, 0.5, -1.0, 0.0]),
        ),
        5 => {
            b.cx.full(dtype, &dims, b.dice.pick(&[1.5, -7.0, 1e20, f64::NAN]))
        }
        _ => {
            let x = b.any_float()?;
            b.cx.dropout(&x, p)
        }
    })
}

/// x · y with a backward of its own.
struct Product;

impl CustomOp for Product {
    fn name(&self) -> &'static str {
        "product"
    }

    fn forward(&self, cx: &mut Cx, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![cx.mul(&inputs[0], &inputs[1])?])
    }

    fn backward(
        &self,
        cx: &mut Cx,
        inputs: &[Tensor],
        _: &[Tensor],
        grads: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        let Some(dy) = &grads[0] else {
            return Ok(vec![None, None]);
        };
        Ok(vec![
            Some(cx.mul(dy, &inputs[1])?),
            Some(cx.mul(dy, &inputs[0])?),
        ])
    }
}

fn custom(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let x = b.any_float()?;
    let y = b.float(x.dims())?;
    b.cx.custom(Arc::new(Product), &[&x, &y])
}

/// The sum of all bytes, in every byte of its results.
struct ByteSum;

impl HostKernel for ByteSum {
    fn name(&self) -> &'static str {
        "byte_sum"
    }

    fn run(&self, src: &[HostView<'_>], dst: &mut [HostViewMut<'_>]) -> Result<()> {
        let sum = src
            .iter()
            .flat_map(|view| view.bytes)
            .fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        dst.iter_mut().for_each(|view| view.bytes.fill(sum & 1));
        Ok(())
    }
}

fn host_kernel(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let (x, y) = (b.any()?, b.any()?);
    let mut outputs = Vec::new();
    for _ in 0..b.dice.below(3) {
        let dims = b.dice.shape(b.budget);
        outputs.push((b.dice.pick(&DType::ALL), Shape::new(&dims)?));
    }
    b.cx.host_kernel(Arc::new(ByteSum), &[&x, &y], &outputs)
}

/// Operands that were not made for each other.
fn misfit(b: &mut Bench<'_>) -> Result<Vec<Tensor>> {
    let (x, y, z) = (b.any()?, b.any()?, b.any()?);
    let dim = b.dice.dim(x.rank());
    one(match b.dice.below(14) {
        0 => b.cx.add(&x, &y),
        1 => b.cx.matmul(&x, &y),
        2 => b.cx.linear(&x, &y, Some(&z)),
        3 => b.cx.attention(&x, &y, &z, &Attention::default()),
        4 => b.cx.index_select(&x, dim, &y),
        5 => b.cx.gather(&x, dim, &y),
        6 => b.cx.scatter_add(&x, dim, &y, &z),
        7 => b.cx.cross_entropy(&x, &y, CrossEntropy::default()),
        8 => b.cx.conv2d(&x, &y, Some(&z), ConvSpec::default()),
        9 => b.cx.layer_norm(&x, Some(&y), Some(&z), 0.1),
        10 => b.cx.rope(&x, &y, &z, None, RopeStyle::Half),
        11 => b.cx.where_cond(&x, &y, &z),
        12 => b.cx.grouped_linear(&x, &y, &z, None),
        _ => b.cx.cat(&[&x, &y, &z], dim),
    })
}
