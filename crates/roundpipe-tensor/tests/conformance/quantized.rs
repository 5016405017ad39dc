//! Quantised weights: bitsandbytes' values bit for bit, and products that are those of the widened
//! weight.

use std::path::PathBuf;

use roundpipe_tensor::ops::{Lora, Quantized};
use roundpipe_tensor::quant::{
    NF4_BLOCK, int8_row, int8_value, nf4_blocks, nf4_books, nf4_magnitude, nf4_magnitudes,
    nf4_nested,
};
use roundpipe_tensor::{
    Bytes, Cx, DType, Quantization, Result, SimWorld, Tensor, Worker, bf16, f16,
};
use safetensors::SafeTensors;

use crate::bed::{Strict, check_with, fixed, gpu_alone, randn, worker};

/// A weight's parts on the host: `p` matrices one behind the other.
#[derive(Clone)]
struct Parts {
    dims: Vec<usize>,
    how: Quantization,
    codes: Vec<u8>,
    /// Of int8: factors. Of NF4: offsets and factors of the matrices.
    scales: Vec<f32>,
    magnitudes: Vec<u8>,
    /// As values, for NF4 without double quantisation.
    plain: Vec<f32>,
    matrices: usize,
}

impl Parts {
    fn of(how: Quantization, values: &[f32], dims: &[usize], matrices: usize) -> Self {
        let columns = dims[dims.len() - 1];
        let mut parts = Self {
            dims: dims.to_vec(),
            how,
            codes: Vec::new(),
            scales: Vec::new(),
            magnitudes: Vec::new(),
            plain: Vec::new(),
            matrices,
        };
        match how {
            Quantization::Int8 => {
                parts.codes.resize(values.len(), 0);
                let rows = values.chunks(columns).zip(parts.codes.chunks_mut(columns));
                parts.scales = rows.map(|(row, codes)| int8_row(row, codes)).collect();
            }
            Quantization::Nf4 => {
                let blocks = values.len() / NF4_BLOCK;
                parts.codes.resize(values.len() / 2, 0);
                parts.plain.resize(blocks, 0.0);
                parts.magnitudes.resize(blocks, 0);
                nf4_blocks(values, &mut parts.codes, &mut parts.plain);
                let each = blocks / matrices;
                let stride = nf4_nested(each);
                parts.scales.resize(matrices * stride, 0.0);
                for m in 0..matrices {
                    nf4_magnitudes(
                        &parts.plain[m * each..][..each],
                        &mut parts.magnitudes[m * each..][..each],
                        &mut parts.scales[m * stride..][..stride],
                    );
                }
            }
        }
        parts
    }

    /// Runs `f` with the parts on a worker.
    fn with<R>(
        &self,
        cx: &mut Cx,
        double: bool,
        f: impl FnOnce(&mut Cx, Quantized<'_>) -> Result<R>,
    ) -> Result<R> {
        let mut dims = self.dims.clone();
        let rank = dims.len();
        if self.how == Quantization::Int8 {
            let codes = cx.tensor(&self.codes, &dims)?;
            let factors = cx.tensor(&self.scales, &dims[..rank - 1])?;
            let (codes, factors) = (&codes, &factors);
            return f(cx, Quantized::Int8 { codes, factors });
        }
        dims[rank - 1] /= 2;
        let codes = cx.tensor(&self.codes, &dims)?;
        let books = cx.tensor(&nf4_books(), &[nf4_books().len()])?;
        let blocks = self.plain.len() / self.matrices;
        let magnitudes = match double {
            true => cx.tensor(&self.magnitudes, &[self.matrices, blocks])?,
            false => cx.tensor(&self.plain, &[self.matrices, blocks])?,
        };
        let nested = match double {
            true => Some(cx.tensor(&self.scales, &[self.matrices, nf4_nested(blocks)])?),
            false => None,
        };
        let weight = Quantized::Nf4 {
            codes: &codes,
            magnitudes: &magnitudes,
            nested: nested.as_ref(),
            books: &books,
        };
        f(cx, weight)
    }

    /// The values, one by one, by the definition.
    fn widened(&self, double: bool) -> Vec<f32> {
        let columns = self.dims[self.dims.len() - 1];
        let books = nf4_books();
        let each = (self.plain.len() / self.matrices).max(1);
        let value = |i: usize| match self.how {
            Quantization::Int8 => int8_value(self.codes[i], self.scales[i / columns]),
            Quantization::Nf4 => {
                let (code, block) = (self.codes[i / 2], i / NF4_BLOCK);
                let code = if i.is_multiple_of(2) {
                    code >> 4
                } else {
                    code & 15
                };
                let scales = &self.scales[block / each * nf4_nested(each)..];
                let factor = scales[1 + block % each / 256];
                let magnitude = match double {
                    true => nf4_magnitude(self.magnitudes[block], factor, scales[0], &books),
                    false => self.plain[block],
                };
                books[usize::from(code)] * magnitude
            }
        };
        (0..self.dims.iter().product()).map(value).collect()
    }
}

/// Values without a pattern, of about ±`size`.
fn noise(count: usize, size: f32) -> Vec<f32> {
    let mut state = 12345u64;
    let mut next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next() * next() * size).collect()
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    let all = tensor.to_f64_vec().unwrap();
    all.into_iter().map(f64::to_bits).collect()
}

fn read(name: &str) -> Vec<u8> {
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../../fixtures", name]
        .iter()
        .collect();
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let data = file.tensor(name).unwrap();
    let words = data.data().chunks_exact(4);
    words
        .map(|word| f32::from_le_bytes(word.try_into().unwrap()))
        .collect()
}

fn halves(file: &SafeTensors<'_>, name: &str) -> Vec<u16> {
    let data = file.tensor(name).unwrap();
    let words = data.data().chunks_exact(2);
    words
        .map(|word| u16::from_le_bytes(word.try_into().unwrap()))
        .collect()
}

/// Codes, scales and widened values are bitsandbytes' own, bit for bit.
#[test]
fn nf4_is_that_of_bitsandbytes() {
    let bytes = read("quant.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let w: Vec<f32> = halves(&file, "w")
        .into_iter()
        .map(|x| bf16::from_bits(x).to_f32())
        .collect();
    assert_eq!(nf4_books().to_vec(), floats(&file, "books"));
    let parts = Parts::of(Quantization::Nf4, &w, &[68, 256], 1);
    assert_eq!(parts.codes, file.tensor("codes").unwrap().data());
    assert_eq!(parts.magnitudes, file.tensor("magnitudes").unwrap().data());
    assert_eq!(parts.scales, floats(&file, "nested"));
    let mut cx = Cx::infer(&worker(2));
    let mut widen = |dtype| {
        parts
            .with(&mut cx, true, |cx, weight| cx.dequantize(weight, dtype))
            .unwrap()
    };
    let got: Vec<u16> = widen(DType::BF16)
        .to_vec::<bf16>()
        .unwrap()
        .into_iter()
        .map(bf16::to_bits)
        .collect();
    assert_eq!(got, halves(&file, "bf16"));
    let (want, got) = (
        floats(&file, "f32"),
        widen(DType::F32).to_vec::<f32>().unwrap(),
    );
    assert_eq!(got[..want.len()], want);
    let want = halves(&file, "f16");
    let got = widen(DType::F16).to_vec::<f16>().unwrap();
    assert!(
        got.iter()
            .zip(&want)
            .all(|(got, want)| got.to_bits() == *want)
    );
    // A block of zeros has the code of 0 throughout, so that its magnitude does not matter.
    assert!(w[64 * 7..64 * 8].iter().all(|x| *x == 0.0));
    assert!(parts.codes[32 * 7..32 * 8].iter().all(|code| *code == 0x77));
}

#[test]
fn int8_rows_are_those_of_bitsandbytes() {
    let bytes = read("quant.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let w: Vec<f32> = halves(&file, "w")
        .into_iter()
        .map(|x| bf16::from_bits(x).to_f32())
        .collect();
    let parts = Parts::of(Quantization::Int8, &w, &[68, 256], 1);
    assert_eq!(parts.codes, file.tensor("int8").unwrap().data());
    let factors: Vec<f32> = floats(&file, "scb")
        .into_iter()
        .map(|x| x / 127.0)
        .collect();
    assert_eq!(parts.scales, factors);
}

/// The error of a code is at most half of its distance to the next: rows of int8 half a step, NF4
/// half of the widest gap times what double quantisation adds.
#[test]
fn widened_values_are_near() {
    let w = noise(128 * 256, 0.3);
    let int8 = Parts::of(Quantization::Int8, &w, &[128, 256], 1);
    for (i, (got, want)) in int8.widened(true).iter().zip(&w).enumerate() {
        let step = int8.scales[i / 256];
        assert!((got - want).abs() <= step * 0.5001, "{i}: {got} for {want}");
    }
    let nf4 = Parts::of(Quantization::Nf4, &w, &[128, 256], 1);
    let (plain, double) = (nf4.widened(false), nf4.widened(true));
    for (i, want) in w.iter().enumerate() {
        let most = nf4.plain[i / NF4_BLOCK];
        assert!((plain[i] - want).abs() <= most * 0.1520, "{i}");
        // The book of magnitudes is dense: its error stays below 1% of the largest deviation.
        assert!((double[i] - plain[i]).abs() <= 0.01 * 0.3, "{i}");
    }
}

#[test]
fn rows_and_blocks_without_values_widen_to_zero_and_bad_ones_show() {
    let zeros = vec![0.0; 512];
    for how in [Quantization::Int8, Quantization::Nf4] {
        let parts = Parts::of(how, &zeros, &[4, 128], 1);
        assert!(parts.widened(true).iter().all(|x| *x == 0.0), "{how}");
        let mut bad = noise(512, 1.0);
        bad[130] = f32::NAN;
        let wide = Parts::of(how, &bad, &[4, 128], 1).widened(true);
        assert!(wide[128..].iter().any(|x| x.is_nan()), "{how}");
    }
}

/// Sizes that make vectors, remainders, several tasks and several matrices.
fn cases() -> Vec<(Quantization, Vec<usize>, usize)> {
    use Quantization::{Int8, Nf4};
    vec![
        (Int8, vec![3, 5], 1),
        (Int8, vec![40, 1000], 1),
        (Int8, vec![3, 24, 16], 1),
        (Nf4, vec![1, 64], 1),
        (Nf4, vec![96, 200], 1),
        (Nf4, vec![130, 256], 1),
        (Nf4, vec![3, 20, 32], 3),
        (Nf4, vec![3, 64, 288], 6),
    ]
}

/// Every backend widens to the same bits, in every type.
#[test]
fn devices_widen_alike() {
    for (how, dims, matrices) in cases() {
        let parts = Parts::of(how, &noise(dims.iter().product(), 2.0), &dims, matrices);
        for double in [true, false] {
            let want = parts.widened(double);
            let widen = |worker: &Worker, dtype| {
                let mut cx = Cx::infer(worker);
                let wide = parts
                    .with(&mut cx, double, |cx, weight| cx.dequantize(weight, dtype))
                    .unwrap();
                bits(&wide)
            };
            for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
                let case = format!("{how} {dims:?} {dtype} double {double}");
                let round = |x: &f32| match dtype {
                    DType::BF16 => f64::from(bf16::from_f32(*x)),
                    DType::F16 => f64::from(f16::from_f32(*x)),
                    _ => f64::from(*x),
                };
                let want: Vec<u64> = want.iter().map(|x| round(x).to_bits()).collect();
                assert_eq!(widen(&worker(1), dtype), want, "{case}");
                assert_eq!(widen(&worker(2), dtype), want, "{case}, two threads");
                let world = SimWorld::seeded(7).unwrap();
                let sim = Worker::new(world.worker(), Bytes::mib(16)).unwrap();
                assert_eq!(widen(&sim, dtype), want, "{case}, sim");
                if let Some((gpu, _turn)) = gpu_alone() {
                    assert_eq!(widen(gpu, dtype), want, "{case}, on a GPU");
                }
            }
        }
    }
}

/// Values and gradients of products, as every operation has to show them.
#[test]
fn products_with_quantised_weights() {
    let strict = Strict {
        slack: 4.0,
        ..Strict::default()
    };
    for how in [Quantization::Int8, Quantization::Nf4] {
        let parts = Parts::of(how, &noise(24 * 32, 1.0), &[24, 32], 1);
        let inputs = [
            randn(1, &[2, 3, 32]),
            randn(2, &[24]),
            randn(3, &[4, 32]),
            randn(4, &[24, 4]),
        ];
        check_with(&format!("linear {how}"), &inputs, strict, |cx, x| {
            parts.with(cx, true, |cx, weight| {
                let lora = Lora {
                    a: &x[2],
                    b: &x[3],
                    scale: 0.5,
                    dropout: 0.0,
                };
                Ok(vec![
                    cx.linear_quantized(&x[0], weight, Some(&x[1]))?,
                    cx.linear_lora_quantized(&x[0], weight, None, lora)?,
                ])
            })
        });
        let parts = Parts::of(how, &noise(3 * 8 * 16, 1.0), &[3, 8, 16], 3);
        let inputs = [
            randn(5, &[7, 16]),
            randn(6, &[3, 8]),
            fixed(DType::I32, &[0, 2, 2, 6], &[4]),
        ];
        check_with(&format!("grouped {how}"), &inputs, strict, |cx, x| {
            parts.with(cx, true, |cx, weight| {
                Ok(vec![cx.grouped_linear_quantized(
                    &x[0],
                    weight,
                    &x[2],
                    Some(&x[1]),
                )?])
            })
        });
    }
}

/// A product with codes is the product with what they widen to, bit for bit, both ways.
#[test]
fn products_are_those_of_the_widened_weight() {
    let x = noise(18 * 64, 1.0);
    for (how, dims, matrices) in [
        (Quantization::Int8, vec![48, 64], 1),
        (Quantization::Nf4, vec![48, 64], 1),
        (Quantization::Nf4, vec![3, 16, 64], 3),
    ] {
        let parts = Parts::of(how, &noise(dims.iter().product(), 0.5), &dims, matrices);
        for dtype in [DType::F32, DType::BF16] {
            let run = |quantised: bool| {
                let mut cx = Cx::train(&worker(2));
                let x = cx.tensor(&x, &[18, 64]).unwrap();
                let x = cx.cast(&x, dtype).unwrap();
                let x = cx.input(&x).unwrap();
                let offsets = cx.tensor(&[0i32, 5, 5, 17], &[4]).unwrap();
                let y = parts
                    .with(&mut cx, true, |cx, weight| match (quantised, dims.len()) {
                        (true, 2) => cx.linear_quantized(&x, weight, None),
                        (true, _) => cx.grouped_linear_quantized(&x, weight, &offsets, None),
                        (false, 2) => {
                            let wide = cx.dequantize(weight, dtype)?;
                            cx.linear(&x, &wide, None)
                        }
                        (false, _) => {
                            let wide = cx.dequantize(weight, dtype)?;
                            cx.grouped_linear(&x, &wide, &offsets, None)
                        }
                    })
                    .unwrap();
                let seed = cx.mul(&y, &y).unwrap();
                let loss = cx.sum_all(&seed).unwrap();
                let out = bits(&y);
                let grads = cx.backward(&loss).unwrap();
                (out, bits(grads.of(&x).unwrap()))
            };
            assert_eq!(run(true), run(false), "{how} {dims:?} {dtype}");
        }
    }
}

/// A tape keeps codes, not the widened weight.
#[test]
fn a_tape_keeps_codes_alone() {
    let parts = Parts::of(Quantization::Nf4, &noise(256 * 256, 1.0), &[256, 256], 1);
    let worker = worker(1);
    let mut cx = Cx::train(&worker);
    let x = cx.full(DType::F32, &[1, 256], 1.0).unwrap();
    let x = cx.input(&x).unwrap();
    let before = worker.usage().used.0;
    let y = parts
        .with(&mut cx, true, |cx, weight| {
            cx.linear_quantized(&x, weight, None)
        })
        .unwrap();
    let kept = worker.usage().used.0 - before;
    let codes = Quantization::Nf4.bytes(256, 256) as u64;
    assert!(
        kept < codes + 8192,
        "{kept} bytes kept for {codes} of codes"
    );
    drop(y);
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let mut cx = Cx::infer(&worker(1));
    let codes = cx.tensor(&[0u8; 64], &[2, 32]).unwrap();
    let wide = cx.tensor(&[0f32; 64], &[2, 32]).unwrap();
    let books = cx.tensor(&nf4_books(), &[272]).unwrap();
    let (two, three) = (
        cx.tensor(&[1f32; 2], &[2]).unwrap(),
        cx.tensor(&[1f32; 3], &[3]).unwrap(),
    );
    let block = cx.tensor(&[0f32, 0.0], &[1, 2]).unwrap();
    let coded = cx.tensor(&[0u8, 0], &[1, 2]).unwrap();
    let nf4 = |magnitudes, nested| Quantized::Nf4 {
        codes: &codes,
        magnitudes,
        nested,
        books: &books,
    };
    let int8 = |codes, factors| Quantized::Int8 { codes, factors };
    let mut refuse = |weight: Quantized<'_>, dtype: DType, part: &str| {
        let text = cx.dequantize(weight, dtype).unwrap_err().to_string();
        assert!(text.contains("dequantize") && text.contains(part), "{text}");
    };
    refuse(int8(&wide, &two), DType::F32, "codes are u8");
    refuse(int8(&codes, &three), DType::F32, "[3]");
    refuse(int8(&codes, &two), DType::I32, "float");
    refuse(nf4(&two, None), DType::F32, "one per 64");
    refuse(nf4(&coded, None), DType::F32, "u8 with their factors");
    refuse(nf4(&block, Some(&two)), DType::F32, "u8 with their factors");
    let x = cx.full(DType::F32, &[1, 31], 1.0).unwrap();
    let text = cx
        .linear_quantized(&x, int8(&codes, &two), None)
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("linear_quantized") && text.contains("31"),
        "{text}"
    );
}
