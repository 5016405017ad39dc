//! A decoder block of a step of decoding is what the operations that it is made of give, bit by bit.

use roundpipe_tensor::kernel::RopeStyle;
use roundpipe_tensor::meta::measure;
use roundpipe_tensor::ops::{Attention, DecodeBlock, NewHeads, rope_tables};
use roundpipe_tensor::{Bytes, Cx, DType, DeviceKind, Error, Result, SimWorld, Tensor, Worker};

use crate::bed::{self, noise, upload};

/// Sizes of a block and its caches.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    dtype: DType,
    rows: usize,
    group: usize,
    head_dim: usize,
    capacity: usize,
}

/// What a block may have or not.
#[derive(Clone, Copy, Debug, Default)]
struct Options {
    norms: bool,
    biases: bool,
    sinks: bool,
    window: Option<usize>,
    /// Only half of a head is turned.
    half_turned: bool,
}

/// Neither of these is a whole number of the chunks that a warp takes of a row.
const HIDDEN: usize = 208;
const UNITS: usize = 336;
const KV_HEADS: usize = 2;
const EPS: f64 = 1e-6;

/// Options that show every branch, in turn.
const OPTIONS: [Options; 4] = [
    Options {
        norms: true,
        biases: false,
        sinks: false,
        window: None,
        half_turned: false,
    },
    Options {
        norms: false,
        biases: true,
        sinks: false,
        window: Some(70),
        half_turned: false,
    },
    Options {
        norms: true,
        biases: true,
        sinks: true,
        window: None,
        half_turned: true,
    },
    Options {
        norms: false,
        biases: false,
        sinks: true,
        window: Some(1),
        half_turned: false,
    },
];

/// Places around the borders of chunks: how many a row has filled before the new token.
const FILLED: [usize; 6] = [0, 62, 63, 64, 199, 999];

/// A block's operands on a worker.
struct Operands {
    x: Tensor,
    /// Matrices and biases of q, k, v, o, gate, up, down.
    maps: Vec<(Tensor, Option<Tensor>)>,
    /// Of attention, of the unit, of queries and of keys.
    norms: Vec<Tensor>,
    tables: [Tensor; 2],
    sinks: Tensor,
    caches: [Tensor; 2],
    at: Tensor,
    positions: Tensor,
    options: Options,
}

impl Operands {
    fn new(cx: &mut Cx, sizes: Sizes, options: Options, filled: &[usize]) -> Result<Self> {
        let Sizes {
            dtype,
            rows,
            group,
            head_dim,
            capacity,
        } = sizes;
        let (wide, narrow) = (group * KV_HEADS * head_dim, KV_HEADS * head_dim);
        let random = |cx: &mut Cx, seed: u64, dims: &[usize], factor: f64| {
            let all: Vec<f64> = noise(seed, dims.iter().product());
            let all: Vec<f64> = all.into_iter().map(|value| value * factor).collect();
            upload(cx, &all, dims, dtype)
        };
        let shapes = [
            [wide, HIDDEN],
            [narrow, HIDDEN],
            [narrow, HIDDEN],
            [HIDDEN, wide],
            [UNITS, HIDDEN],
            [UNITS, HIDDEN],
            [HIDDEN, UNITS],
        ];
        let mut maps = Vec::new();
        for (seed, dims) in (10..).zip(shapes) {
            let weight = random(cx, seed, &dims, 1.0 / (dims[1] as f64).sqrt())?;
            let bias = random(cx, seed + 10, &dims[..1], 0.25)?;
            maps.push((weight, options.biases.then_some(bias)));
        }
        let mut norms = Vec::new();
        for (seed, width) in (30..).zip([HIDDEN, HIDDEN, head_dim, head_dim]) {
            norms.push(random(cx, seed, &[width], 0.5)?);
        }
        let turned = if options.half_turned {
            head_dim / 2
        } else {
            head_dim
        };
        let (cos, sin) = rope_tables(capacity, turned, 1e4);
        let table = [capacity, turned / 2];
        let dims = [rows, capacity, KV_HEADS, head_dim];
        let start = cx.zeros(DType::I32, &[rows])?;
        let mut cache = |seed: u64| {
            let cache = cx.cache(dtype, dims)?;
            let before = random(cx, seed, &dims, 0.5)?;
            cx.cache_write(&cache, &before, &start)?;
            Ok(cache)
        };
        let caches = [cache(40)?, cache(41)?];
        let at: Vec<i32> = filled.iter().map(|place| *place as i32).collect();
        Ok(Self {
            x: random(cx, 1, &[rows, 1, HIDDEN], 1.0)?,
            maps,
            norms,
            tables: [
                upload(cx, &cos, &table, dtype.accumulator())?,
                upload(cx, &sin, &table, dtype.accumulator())?,
            ],
            sinks: random(cx, 42, &[group * KV_HEADS], 1.0)?,
            caches,
            at: cx.tensor(&at, &[rows])?,
            positions: cx.tensor(&at, &[rows, 1])?,
            options,
        })
    }

    fn block(&self) -> DecodeBlock<'_> {
        let map = |i: usize| (&self.maps[i].0, self.maps[i].1.as_ref());
        let norm = |i: usize| (&self.norms[i], EPS);
        DecodeBlock {
            attn_norm: norm(0),
            q: map(0),
            k: map(1),
            v: map(2),
            head_norms: self.options.norms.then(|| (norm(2), norm(3))),
            cos: &self.tables[0],
            sin: &self.tables[1],
            positions: &self.positions,
            caches: [&self.caches[0], &self.caches[1]],
            at: &self.at,
            attention: Attention {
                causal: true,
                window: self.options.window,
                sinks: self.options.sinks.then_some(&self.sinks),
                ..Attention::default()
            },
            o: map(3),
            mlp_norm: norm(1),
            gate: map(4),
            up: map(5),
            down: map(6),
        }
    }
}

/// The block by operations of its own: of a few rows where the device has such, of training elsewhere.
fn separate(cx: &mut Cx, x: &Tensor, block: &DecodeBlock<'_>) -> Result<Tensor> {
    let is_few = cx.few_rows() > 0;
    let [rows, _, kv_heads, head_dim] = *block.caches[0].dims() else {
        panic!("four dimensions")
    };
    let maps = [block.q, block.k, block.v];
    let flat = if is_few {
        cx.few_linears(x, Some(block.attn_norm), &maps)?
    } else {
        let normed = cx.rms_norm(x, Some(block.attn_norm.0), EPS)?;
        let project = |(weight, bias): (&Tensor, Option<&Tensor>)| cx.linear(&normed, weight, bias);
        maps.into_iter().map(project).collect::<Result<_>>()?
    };
    let heads = block.q.0.dims()[0] / head_dim;
    let mut split = |flat: &Tensor, heads: usize| {
        cx.reshape(flat, &[rows, 1, heads, head_dim].map(|size| size as isize))
    };
    let (q, k) = (split(&flat[0], heads)?, split(&flat[1], kv_heads)?);
    let v = split(&flat[2], kv_heads)?;
    let q = if is_few {
        let new = NewHeads {
            q: &q,
            k: &k,
            v: &v,
            norms: block.head_norms,
            cos: block.cos,
            sin: block.sin,
            positions: block.positions,
        };
        cx.decode_heads(&new, block.caches, block.at)?
    } else {
        let mut turn = |heads: &Tensor, weight: Option<&Tensor>| {
            let (cos, sin, places) = (block.cos, block.sin, Some(block.positions));
            match weight {
                Some(w) => cx.rope_norm(heads, w, cos, sin, places, RopeStyle::Half, EPS),
                None => cx.rope(heads, cos, sin, places, RopeStyle::Half),
            }
        };
        let q = turn(&q, block.head_norms.map(|((w, _), _)| w))?;
        let k = turn(&k, block.head_norms.map(|(_, (w, _))| w))?;
        cx.cache_write(block.caches[0], &k, block.at)?;
        cx.cache_write(block.caches[1], &v, block.at)?;
        q
    };
    let [k, v] = block.caches;
    let mixed = cx.cached_attention(&q, k, v, block.at, &block.attention)?;
    let mixed = cx.reshape(&mixed, &[rows as isize, 1, -1])?;
    if is_few {
        let x = cx.few_linear_add(&mixed, block.o, x)?;
        let inner = cx.few_swiglu(&x, Some(block.mlp_norm), block.gate, block.up)?;
        return cx.few_linear_add(&inner, block.down, &x);
    }
    let attended = cx.linear(&mixed, block.o.0, block.o.1)?;
    let (x, normed) = cx.add_rms_norm(&attended, x, Some(block.mlp_norm.0), EPS)?;
    let gate = cx.linear(&normed, block.gate.0, block.gate.1)?;
    let up = cx.linear(&normed, block.up.0, block.up.1)?;
    let inner = cx.swiglu(&gate, &up)?;
    let out = cx.linear(&inner, block.down.0, block.down.1)?;
    cx.add(&x, &out)
}

/// The output and both caches.
fn outcome(y: &Tensor, operands: &Operands) -> Vec<Vec<f64>> {
    let [k, v] = &operands.caches;
    [y, k, v].map(|t| t.to_f64_vec().unwrap()).into()
}

/// Runs a block as one operation and as several; both must agree. Gives the output.
fn compare(worker: &Worker, sizes: Sizes, options: Options, filled: &[usize]) -> Vec<f64> {
    let mut cx = Cx::infer(worker);
    let mut run = |whole: bool| {
        let operands = Operands::new(&mut cx, sizes, options, filled).unwrap();
        let block = operands.block();
        let y = if whole {
            cx.decode_block(&operands.x, &block)
        } else {
            separate(&mut cx, &operands.x, &block)
        };
        outcome(&y.unwrap(), &operands)
    };
    let (one, many) = (run(true), run(false));
    for (what, (one, many)) in ["output", "keys", "values"]
        .iter()
        .zip(one.iter().zip(&many))
    {
        let bits = |all: &[f64]| -> Vec<u64> { all.iter().map(|x| x.to_bits()).collect() };
        assert!(
            bits(one) == bits(many),
            "{what} of {sizes:?} with {options:?} behind {filled:?} places: {one:?} and {many:?}"
        );
    }
    assert!(one[0].iter().all(|value| value.is_finite()));
    one[0].clone()
}

/// What rows have filled: all the numbers of `FILLED` in turn, from the given one on.
fn filled_from(first: usize, rows: usize) -> Vec<usize> {
    (first..first + rows)
        .map(|row| FILLED[row % FILLED.len()])
        .collect()
}

/// Sizes by type, rows and query heads of a key head. On a GPU each is a kernel to be compiled, so
/// this is not every combination.
const VARIANTS: [(DType, usize, usize, usize); 12] = [
    (DType::BF16, 1, 2, 128),
    (DType::BF16, 1, 1, 64),
    (DType::BF16, 1, 4, 128),
    (DType::BF16, 1, 8, 64),
    (DType::BF16, 1, 8, 128),
    (DType::BF16, 2, 1, 128),
    (DType::BF16, 3, 2, 64),
    (DType::BF16, 8, 4, 64),
    (DType::BF16, 16, 2, 128),
    (DType::F32, 1, 2, 64),
    (DType::F32, 2, 8, 128),
    (DType::F16, 1, 2, 128),
];

fn variants() -> impl Iterator<Item = Sizes> {
    let count = if bed::brief() { 1 } else { VARIANTS.len() };
    VARIANTS[..count]
        .iter()
        .map(|&(dtype, rows, group, head_dim)| Sizes {
            dtype,
            rows,
            group,
            head_dim,
            capacity: 1030,
        })
}

#[test]
fn a_block_is_what_its_operations_give() {
    let cpu = bed::worker(2);
    for (turn, sizes) in variants().enumerate() {
        let options = OPTIONS[turn % OPTIONS.len()];
        compare(&cpu, sizes, options, &filled_from(turn, sizes.rows));
    }
    let world = SimWorld::seeded(1).unwrap();
    let sim = Worker::new(world.workers(1).remove(0), Bytes::mib(64)).unwrap();
    let sizes = Sizes {
        capacity: 70,
        ..variants().next().unwrap()
    };
    compare(&sim, sizes, OPTIONS[0], &[64]);
}

#[test]
fn a_block_on_a_gpu_is_what_its_operations_give() {
    let Some((gpu, _turn)) = bed::gpu_alone() else {
        return bed::left_out("decode_block", DType::BF16);
    };
    let cpu = bed::worker(2);
    for sizes in variants() {
        for (options, first) in OPTIONS.into_iter().zip((0..).step_by(5)) {
            // One row stands at every place in turn, several rows stand at several at once.
            let turns = if sizes.rows == 1 { FILLED.len() } else { 1 };
            for turn in 0..turns {
                let filled = filled_from(first + turn, sizes.rows);
                let y = compare(gpu, sizes, options, &filled);
                if sizes.dtype == DType::F32 && turn == 0 {
                    let exact = compare(&cpu, sizes, options, &filled);
                    let far = |(a, b): (&f64, &f64)| (a - b).abs() > 1e-4 * (1.0 + b.abs());
                    assert!(!y.iter().zip(&exact).any(far), "{sizes:?} {options:?}");
                }
            }
        }
    }
}

/// No bit of a row depends on the rows beside it.
#[test]
fn a_row_of_a_block_is_what_it_is_beside_others() {
    let Some((gpu, _turn)) = bed::gpu_alone() else {
        return bed::left_out("decode_block rows", DType::BF16);
    };
    let mut first: Option<Vec<f64>> = None;
    for rows in [1, 2, 3, 8, 16] {
        let sizes = Sizes {
            dtype: DType::BF16,
            rows,
            group: 2,
            head_dim: 128,
            capacity: 300,
        };
        let filled: Vec<usize> = (0..rows).map(|row| 130 + row).collect();
        let y = compare(gpu, sizes, OPTIONS[0], &filled)[..HIDDEN].to_vec();
        assert_eq!(*first.get_or_insert_with(|| y.clone()), y, "of {rows} rows");
    }
}

/// Several blocks in a row, recorded and repeated: the barrier of one launch serves the next.
#[test]
fn recorded_blocks_repeat_themselves() {
    let Some((gpu, _turn)) = bed::gpu_alone() else {
        return bed::left_out("decode_block recorded", DType::BF16);
    };
    let sizes = variants().next().unwrap();
    let mut cx = Cx::infer(gpu);
    let operands = Operands::new(&mut cx, sizes, OPTIONS[0], &[199]).unwrap();
    let three = |cx: &mut Cx| {
        let block = operands.block();
        let x = cx.decode_block(&operands.x, &block)?;
        let x = cx.decode_block(&x, &block)?;
        cx.decode_block(&x, &block)
    };
    let direct = three(&mut cx).unwrap().to_f64_vec().unwrap();
    let recorded = gpu.record(|worker| three(&mut Cx::infer(worker))).unwrap();
    let (recording, y) = recorded.expect("a GPU records");
    for turn in 0..5 {
        recording.replay().unwrap();
        assert_eq!(y.to_f64_vec().unwrap(), direct, "turn {turn}");
    }
}

/// A GPU's block is one launch, and a plan without a GPU knows it.
#[test]
fn a_block_on_a_gpu_is_one_launch() {
    let launches = |sizes: Sizes| {
        let filled = vec![0; sizes.rows];
        let ((before, after), cost) = measure(DeviceKind::Cuda, |worker| {
            let mut cx = Cx::infer(worker);
            let operands = Operands::new(&mut cx, sizes, OPTIONS[2], &filled)?;
            let before = worker.usage().allocations;
            cx.decode_block(&operands.x, &operands.block())?;
            Ok((before, worker.usage().allocations))
        })
        .unwrap();
        assert!(cost.kernels > 0);
        after - before
    };
    for sizes in variants() {
        // The output and the scratch.
        assert_eq!(launches(sizes), 2, "{sizes:?}");
    }
    let double = Sizes {
        dtype: DType::F64,
        ..variants().next().unwrap()
    };
    assert!(launches(double) > 2, "no kernel for f64");
}

#[test]
fn blocks_refuse_places_outside_their_cache() {
    let cpu = bed::worker(2);
    let gpu = bed::gpu_alone();
    let sizes = Sizes {
        dtype: DType::F32,
        rows: 1,
        group: 2,
        head_dim: 64,
        capacity: 5,
    };
    for worker in [Some(&cpu), gpu.as_ref().map(|(gpu, _)| *gpu)]
        .into_iter()
        .flatten()
    {
        let mut cx = Cx::infer(worker);
        for at in [-1_i32, 5, i32::MAX] {
            let mut operands = Operands::new(&mut cx, sizes, OPTIONS[0], &[4]).unwrap();
            operands.at = cx.tensor(&[at], &[1]).unwrap();
            let run = cx
                .decode_block(&operands.x, &operands.block())
                .and_then(|_| worker.fence());
            assert!(matches!(run, Err(Error::Index { .. })), "{at}: {run:?}");
            let mut operands = Operands::new(&mut cx, sizes, OPTIONS[0], &[4]).unwrap();
            operands.positions = cx.tensor(&[at], &[1, 1]).unwrap();
            let run = cx
                .decode_block(&operands.x, &operands.block())
                .and_then(|_| worker.fence());
            assert!(matches!(run, Err(Error::Index { .. })), "{at}: {run:?}");
        }
        // Nothing of it stays behind.
        compare(worker, sizes, OPTIONS[0], &[4]);
    }
}
