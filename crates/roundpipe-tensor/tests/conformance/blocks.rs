//! Whole transformer blocks against PyTorch: output and every gradient.

use roundpipe_tensor::kernel::RopeStyle;
use roundpipe_tensor::ops::{Attention, rope_tables};
use roundpipe_tensor::{Cx, DType, Result, Tensor};

use crate::bed::upload;
use crate::golden::{self, Inputs};

/// Sizes of a golden decoder block.
struct Sizes {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    theta: f64,
    eps: f64,
}

/// RMS norm, rotary grouped attention (with normed queries and keys where the file has them),
/// SwiGLU.
fn decoder(cx: &mut Cx, t: &Inputs, sizes: &Sizes) -> Result<Tensor> {
    let x = t.of("in.x");
    let (batch, seq) = (x.dims()[0], x.dims()[1]);
    let (cos, sin) = rope_tables(seq, sizes.head_dim, sizes.theta);
    let acc = x.dtype().accumulator();
    let table = [seq, sizes.head_dim / 2];
    let (cos, sin) = (
        upload(cx, &cos, &table, acc)?,
        upload(cx, &sin, &table, acc)?,
    );
    let normed = cx.rms_norm(x, Some(t.of("p.input_layernorm.weight")), sizes.eps)?;
    let split = |cx: &mut Cx, name: &str, heads: usize| {
        let flat = cx.linear(
            &normed,
            t.of(&format!("p.self_attn.{name}_proj.weight")),
            None,
        )?;
        cx.reshape(
            &flat,
            &[batch, seq, heads, sizes.head_dim].map(|d| d as isize),
        )
    };
    let turned = |cx: &mut Cx, x: &Tensor, name: &str| match t
        .get(&format!("p.self_attn.{name}_norm.weight"))
    {
        Some(weight) => cx.rope_norm(x, weight, &cos, &sin, None, RopeStyle::Half, sizes.eps),
        None => cx.rope(x, &cos, &sin, None, RopeStyle::Half),
    };
    let (q, k) = (
        split(cx, "q", sizes.heads)?,
        split(cx, "k", sizes.kv_heads)?,
    );
    let (q, k) = (turned(cx, &q, "q")?, turned(cx, &k, "k")?);
    let v = split(cx, "v", sizes.kv_heads)?;
    let o = cx.attention(
        &q,
        &k,
        &v,
        &Attention {
            causal: true,
            ..Attention::default()
        },
    )?;
    let o = cx.reshape(&o, &[batch as isize, seq as isize, -1])?;
    let o = cx.linear(&o, t.of("p.self_attn.o_proj.weight"), None)?;
    let (x, normed) = cx.add_rms_norm(
        &o,
        x,
        Some(t.of("p.post_attention_layernorm.weight")),
        sizes.eps,
    )?;
    let gate = cx.linear(&normed, t.of("p.mlp.gate_proj.weight"), None)?;
    let up = cx.linear(&normed, t.of("p.mlp.up_proj.weight"), None)?;
    let inner = cx.swiglu(&gate, &up)?;
    let out = cx.linear(&inner, t.of("p.mlp.down_proj.weight"), None)?;
    cx.add(&x, &out)
}

const LLAMA: Sizes = Sizes {
    heads: 4,
    kv_heads: 2,
    head_dim: 12,
    theta: 1e4,
    eps: 1e-5,
};
const QWEN3: Sizes = Sizes {
    heads: 4,
    kv_heads: 2,
    head_dim: 8,
    theta: 1e6,
    eps: 1e-6,
};

#[test]
fn a_llama_block_agrees_with_pytorch() {
    golden::open("llama_block")
        .case("")
        .check(|cx, t| decoder(cx, t, &LLAMA));
}

#[test]
fn a_qwen3_block_agrees_with_pytorch() {
    golden::open("qwen3_block")
        .case("")
        .check(|cx, t| decoder(cx, t, &QWEN3));
}

/// PyTorch's own bf16 errors against f64 reach 0.0084 in this block (recorded in the file); ours
/// stay there.
#[test]
fn a_llama_block_in_bf16_is_as_close_to_f64_as_pytorch() {
    let exact = golden::open("llama_block_bf16")
        .case("")
        .with_exact_answers();
    exact.check_in(DType::BF16, 0.0095, &|cx, t| decoder(cx, t, &LLAMA));
}

/// Layer norms, attention and unit with biases.
fn gpt2(cx: &mut Cx, t: &Inputs, tanh: bool) -> Result<Tensor> {
    let x = t.of("in.x");
    let (batch, seq) = (x.dims()[0] as isize, x.dims()[1] as isize);
    let linear = |cx: &mut Cx, x: &Tensor, name: &str| {
        cx.linear(
            x,
            t.of(&format!("p.{name}.weight")),
            Some(t.of(&format!("p.{name}.bias"))),
        )
    };
    let norm = |cx: &mut Cx, x: &Tensor, name: &str| {
        let (weight, bias) = (
            t.of(&format!("p.{name}.weight")),
            t.of(&format!("p.{name}.bias")),
        );
        cx.layer_norm(x, Some(weight), Some(bias), 1e-5)
    };
    let normed = norm(cx, x, "ln_1")?;
    let mut heads = Vec::new();
    for name in ["attn.q_proj", "attn.k_proj", "attn.v_proj"] {
        let flat = linear(cx, &normed, name)?;
        heads.push(cx.reshape(&flat, &[batch, seq, 4, -1])?);
    }
    let how = Attention {
        causal: true,
        ..Attention::default()
    };
    let o = cx.attention(&heads[0], &heads[1], &heads[2], &how)?;
    let o = cx.reshape(&o, &[batch, seq, -1])?;
    let o = linear(cx, &o, "attn.o_proj")?;
    let x = cx.add(x, &o)?;
    let normed = norm(cx, &x, "ln_2")?;
    let up = linear(cx, &normed, "mlp.up_proj")?;
    let inner = if tanh {
        cx.gelu_tanh(&up)?
    } else {
        cx.gelu(&up)?
    };
    let out = linear(cx, &inner, "mlp.down_proj")?;
    cx.add(&x, &out)
}

#[test]
fn blocks_with_layer_norm_and_gelu_agree_with_pytorch() {
    golden::open("gpt2_block_gelu")
        .case("")
        .check(|cx, t| gpt2(cx, t, false));
    golden::open("gpt2_block_gelu_tanh")
        .case("")
        .check(|cx, t| gpt2(cx, t, true));
}
