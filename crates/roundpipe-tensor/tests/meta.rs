//! The meta device states costs beforehand, and real devices meet them.

use roundpipe_tensor::meta::{Given, measure, profile};
use roundpipe_tensor::ops::{Attention, CrossEntropy, Lora, Quantized};
use roundpipe_tensor::quant::{NF4_BOOKS, nf4_nested};
use roundpipe_tensor::{
    Bytes, CostModel, Cpu, Cuda, Cx, DType, DeviceKind, Meta, Param, Result, RngSite, Shape,
    Tensor, Worker,
};

/// A pre-norm transformer block with a loss behind it: every kind of allocation a training step
/// makes.
struct Block {
    norm: Param,
    qkv: Param,
    out: Param,
    gate: Param,
    up: Param,
    down: Param,
    head: Param,
    heads: usize,
}

impl Block {
    fn new(dtype: DType, hidden: usize, heads: usize, vocab: usize) -> Result<Self> {
        let mut site = RngSite {
            seed: 5,
            ..RngSite::default()
        };
        let mut random = |dims: &[usize]| {
            site.site += 1;
            Param::normal(dtype, dims, 0.05, site.key())
        };
        Ok(Self {
            norm: Param::full(dtype, &[hidden], 1.0)?,
            qkv: random(&[3 * hidden, hidden])?,
            out: random(&[hidden, hidden])?,
            gate: random(&[2 * hidden, hidden])?,
            up: random(&[2 * hidden, hidden])?,
            down: random(&[hidden, 2 * hidden])?,
            head: random(&[vocab, hidden])?,
            heads,
        })
    }

    fn loss(&self, cx: &mut Cx, x: &Tensor, labels: &Tensor) -> Result<Tensor> {
        let (batch, seq, hidden) = (x.dims()[0], x.dims()[1], x.dims()[2]);
        let norm = cx.get(&self.norm)?;
        let y = cx.rms_norm(x, Some(&norm), 1e-6)?;
        let w = cx.get(&self.qkv)?;
        let qkv = cx.linear(&y, &w, None)?;
        let dims = [batch, seq, 3 * self.heads, hidden / self.heads].map(|d| d as isize);
        let qkv = cx.reshape(&qkv, &dims)?;
        let q = cx.narrow(&qkv, 2, 0, self.heads)?;
        let k = cx.narrow(&qkv, 2, self.heads, self.heads)?;
        let v = cx.narrow(&qkv, 2, 2 * self.heads, self.heads)?;
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
        let w = cx.get(&self.out)?;
        let o = cx.linear(&o, &w, None)?;
        let x = cx.add(x, &o)?;
        let y = cx.dropout(&x, 0.1)?;
        let (gate, up, down) = (cx.get(&self.gate)?, cx.get(&self.up)?, cx.get(&self.down)?);
        let (g, u) = (cx.linear(&y, &gate, None)?, cx.linear(&y, &up, None)?);
        let z = cx.swiglu(&g, &u)?;
        let z = cx.linear(&z, &down, None)?;
        let x = cx.add(&x, &z)?;
        let head = cx.get(&self.head)?;
        cx.linear_cross_entropy(&x, &head, labels, CrossEntropy::default())
    }

    fn step(&self, worker: &Worker, batch: usize, seq: usize, dtype: DType) -> Result<()> {
        let mut cx = Cx::train(worker);
        let hidden = self.norm.shape()[0];
        let x = cx.full(dtype, &[batch, seq, hidden], 0.25)?;
        let x = cx.input(&x)?;
        let labels = cx.zeros(DType::I64, &[batch, seq])?;
        let loss = self.loss(&mut cx, &x, &labels)?;
        cx.backward(&loss).map(drop)
    }
}

/// Whatever meta says a step needs is exactly what the cpu's sub-allocator reaches, odd sizes
/// included.
#[test]
fn the_peak_of_a_training_step_is_known_to_the_byte() {
    for dtype in [DType::F32, DType::BF16] {
        for (batch, seq, hidden, heads, vocab) in
            [(2, 17, 24, 2, 53), (1, 64, 64, 4, 300), (3, 1, 8, 1, 7)]
        {
            let block = Block::new(dtype, hidden, heads, vocab).unwrap();
            let ((), cost) =
                measure(DeviceKind::Cpu, |w| block.step(w, batch, seq, dtype)).unwrap();
            let worker = Worker::new(Cpu::new(Some(2)).unwrap(), Bytes::gib(1)).unwrap();
            block.step(&worker, batch, seq, dtype).unwrap();
            let case = format!("{dtype} {batch}x{seq}x{hidden}");
            assert_eq!(worker.usage().high_water, Bytes(cost.peak), "{case}");
            // An arena of exactly that size is enough, for any number of steps, and one of less is
            // not.
            let tight = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes(cost.peak)).unwrap();
            for _ in 0..3 {
                block.step(&tight, batch, seq, dtype).unwrap();
            }
            let short = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes(cost.peak - 1)).unwrap();
            let text = block
                .step(&short, batch, seq, dtype)
                .unwrap_err()
                .to_string();
            assert!(
                text.contains("needs") && text.contains("reserved"),
                "{text}"
            );
            assert_eq!(
                short.usage().used,
                Bytes(0),
                "{case}: a failed step gives everything back"
            );
        }
    }
}

/// Two linear layers with LoRA on weights in 4 and 8 bits.
struct QuantizedPair {
    codes: [Param; 2],
    scales: [Param; 4],
    branches: [Param; 2],
    width: usize,
}

impl QuantizedPair {
    fn new(dtype: DType, width: usize) -> Result<Self> {
        let blocks = width * width / 64;
        let branch = |dims: &[usize]| Param::full(dtype, dims, 0.125);
        Ok(Self {
            codes: [
                Param::full(DType::U8, &[width, width / 2], 0x3c.into())?,
                Param::full(DType::U8, &[width, width], 200.0)?,
            ],
            scales: [
                Param::full(DType::U8, &[1, blocks], 140.0)?,
                Param::full(DType::F32, &[1, nf4_nested(blocks)], 0.25)?.frozen(),
                Param::full(DType::F32, &[NF4_BOOKS], 0.5)?.frozen(),
                Param::full(DType::F32, &[width], 0.01)?.frozen(),
            ],
            branches: [branch(&[4, width])?, branch(&[width, 4])?],
            width,
        })
    }

    fn step(&self, worker: &Worker, rows: usize, dtype: DType) -> Result<()> {
        let mut cx = Cx::train(worker);
        let mut x = cx.full(dtype, &[rows, self.width], 0.25)?;
        let [nf4, int8] = [cx.get(&self.codes[0])?, cx.get(&self.codes[1])?];
        let scales: Vec<Tensor> = self
            .scales
            .iter()
            .map(|param| cx.get(param))
            .collect::<Result<_>>()?;
        let (a, b) = (cx.get(&self.branches[0])?, cx.get(&self.branches[1])?);
        let lora = Lora {
            a: &a,
            b: &b,
            scale: 2.0,
            dropout: 0.0,
        };
        for weight in [
            Quantized::Nf4 {
                codes: &nf4,
                magnitudes: &scales[0],
                nested: Some(&scales[1]),
                books: &scales[2],
            },
            Quantized::Int8 {
                codes: &int8,
                factors: &scales[3],
            },
        ] {
            x = cx.linear_lora_quantized(&x, weight, None, lora)?;
        }
        let loss = cx.sum_all(&x)?;
        drop(x);
        cx.backward(&loss).map(drop)
    }
}

/// The same for quantised weights: what is widened counts while it is there, and no longer.
#[test]
fn the_peak_with_quantised_weights_is_known_to_the_byte() {
    for dtype in [DType::F32, DType::BF16] {
        for (rows, width) in [(5, 64), (1, 192), (40, 128)] {
            let pair = QuantizedPair::new(dtype, width).unwrap();
            let ((), cost) = measure(DeviceKind::Cpu, |w| pair.step(w, rows, dtype)).unwrap();
            let case = format!("{dtype} {rows}x{width}");
            let tight = Worker::new(Cpu::new(Some(2)).unwrap(), Bytes(cost.peak)).unwrap();
            for _ in 0..2 {
                pair.step(&tight, rows, dtype).unwrap();
            }
            assert_eq!(tight.usage().high_water, Bytes(cost.peak), "{case}");
            let short = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes(cost.peak - 1)).unwrap();
            assert!(pair.step(&short, rows, dtype).is_err(), "{case}");
            assert_eq!(short.usage().used, Bytes(0), "{case}");
            // One weight is wide at a time, beside a few rows.
            let wide = (width * width * dtype.size()) as u64;
            let rest = (rows * width * 12 * 4 + 3 * 4 * width * 8 + 8192) as u64;
            assert!(cost.peak < wide + rest, "{case}: {} bytes", cost.peak);
        }
    }
}

/// Products dominate, so their count is checked against the formula by hand.
#[test]
fn flops_of_a_linear_layer_are_counted_exactly() {
    let weight = Param::zeros(DType::F32, &[7, 5]).unwrap();
    let given = [Given {
        dtype: DType::F32,
        shape: Shape::new(&[2, 3, 5]).unwrap(),
        grad: true,
    }];
    let linear = |cx: &mut Cx, x: &[Tensor]| {
        let w = cx.get(&weight)?;
        Ok(vec![cx.linear(&x[0], &w, None)?])
    };
    let all = profile(DeviceKind::Cpu, &given, linear).unwrap();
    assert_eq!(all.forward.flops, 2 * 6 * 7 * 5);
    assert_eq!(all.backward.flops, 2 * 2 * 6 * 7 * 5);
    assert_eq!(all.outputs, [(DType::F32, Shape::new(&[2, 3, 7]).unwrap())]);
    weight.set_trainable(false);
    let frozen = profile(DeviceKind::Cpu, &given, linear).unwrap();
    assert_eq!(
        frozen.backward.flops,
        2 * 6 * 7 * 5,
        "a frozen weight costs no gradient"
    );
}

/// Causal attention counts the visible half, a window the visible band.
#[test]
fn flops_of_attention_follow_the_mask() {
    let shape = Shape::new(&[1, 6, 1, 4]).unwrap();
    let given = [Given {
        dtype: DType::F32,
        shape,
        grad: false,
    }; 3];
    let count = |options: Attention<'_>| {
        let run =
            |cx: &mut Cx, x: &[Tensor]| Ok(vec![cx.attention(&x[0], &x[1], &x[2], &options)?]);
        profile(DeviceKind::Cpu, &given, run).unwrap().forward.flops
    };
    assert_eq!(count(Attention::default()), 36 * 2 * 8);
    assert_eq!(
        count(Attention {
            causal: true,
            ..Attention::default()
        }),
        21 * 2 * 8
    );
    assert_eq!(
        count(Attention {
            causal: true,
            window: Some(2),
            ..Attention::default()
        }),
        11 * 2 * 8
    );
}

/// A card whose attention is our own does not pay for a library's scratch: 2 bytes per pair of a
/// query and a key.
#[test]
fn a_likeness_knows_who_computes_attention() {
    let given = |heads| Given {
        dtype: DType::BF16,
        shape: Shape::new(&[2, 1024, heads, 128]).unwrap(),
        grad: true,
    };
    let given = [given(8), given(4), given(4)];
    let causal = Attention {
        causal: true,
        ..Attention::default()
    };
    let run = |cx: &mut Cx, x: &[Tensor]| Ok(vec![cx.attention(&x[0], &x[1], &x[2], &causal)?]);
    let peak = |like: CostModel| profile(like, &given, run).unwrap().backward.peak;
    let any = CostModel::from(DeviceKind::Cuda);
    let (library, own) = (peak(any), peak(Cuda::costs_without_cudnn()));
    assert!(
        library - own > 2 * 2 * 8 * 1024 * 1024,
        "{library} bytes with a library, {own} without"
    );
}

#[test]
fn meta_gives_no_data_and_says_so() {
    let worker = Worker::new(Meta::like(DeviceKind::Cpu), Bytes(1 << 60)).unwrap();
    let mut cx = Cx::infer(&worker);
    let x = cx.zeros(DType::F32, &[3]).unwrap();
    assert!(x.to_vec::<f32>().unwrap_err().to_string().contains("meta"));
    // Sizes that no machine has are no problem where nothing is stored.
    assert!(cx.zeros(DType::BF16, &[1 << 20, 1 << 20]).is_ok());
}
