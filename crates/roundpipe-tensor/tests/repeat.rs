//! A forward that is run a second time gives the same bits, whatever of it was kept or left out.

use std::sync::Arc;

use roundpipe_tensor::ops::Attention;
use roundpipe_tensor::{
    Bytes, Cpu, Cx, DType, DeviceKind, Meta, Param, PassSteps, Recompute, Result, RngSite, Tensor,
    Watch, Worker,
};

const ROWS: usize = 2;
const STEPS: usize = 9;
const HIDDEN: usize = 16;
const INNER: usize = 40;
const HEADS: usize = 2;

/// A block of a decoder.
struct Block {
    params: [Param; 7],
}

impl Block {
    fn new(dtype: DType) -> Self {
        let mut site = RngSite {
            seed: 7,
            ..RngSite::default()
        };
        let shapes: [&[usize]; 7] = [
            &[HIDDEN],
            &[3 * HIDDEN, HIDDEN],
            &[HIDDEN, HIDDEN],
            &[HIDDEN],
            &[INNER, HIDDEN],
            &[INNER, HIDDEN],
            &[HIDDEN, INNER],
        ];
        Self {
            params: shapes.map(|shape| {
                site.site += 1;
                Param::normal(dtype, shape, 0.3, site.key()).unwrap()
            }),
        }
    }

    fn run(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        let mut weights = Vec::new();
        for param in &self.params {
            weights.push(cx.get(param)?);
        }
        let y = cx.rms_norm(x, Some(&weights[0]), 1e-6)?;
        let qkv = cx.linear(&y, &weights[1], None)?;
        let dims = [ROWS, STEPS, 3 * HEADS, HIDDEN / HEADS].map(|size| size as isize);
        let qkv = cx.reshape(&qkv, &dims)?;
        let [q, k, v] = [0, 1, 2].map(|part| cx.narrow(&qkv, 2, part * HEADS, HEADS));
        let how = Attention {
            causal: true,
            ..Attention::default()
        };
        let mixed = cx.attention(&q?, &k?, &v?, &how)?;
        let mixed = cx.reshape(&mixed, &[ROWS as isize, STEPS as isize, -1])?;
        let mixed = cx.linear(&mixed, &weights[2], None)?;
        let mixed = cx.dropout(&mixed, 0.2)?;
        let x = cx.add(x, &mixed)?;
        let y = cx.rms_norm(&x, Some(&weights[3]), 1e-6)?;
        let gate = cx.linear(&y, &weights[4], None)?;
        let up = cx.linear(&y, &weights[5], None)?;
        let inner = cx.swiglu(&gate, &up)?;
        let out = cx.linear(&inner, &weights[6], None)?;
        cx.add(&x, &out)
    }
}

fn input(worker: &Worker, dtype: DType) -> Tensor {
    let count = ROWS * STEPS * HIDDEN;
    let values: Vec<f32> = (0..count).map(|i| (i as f32 * 0.37).sin()).collect();
    let mut cx = Cx::infer(worker);
    let x = cx.tensor(&values, &[ROWS, STEPS, HIDDEN]).unwrap();
    worker.cast(&x, dtype).unwrap()
}

/// The gradients of input and parameters, as bits.
fn walk_back(
    cx: &mut Cx,
    params: &[Param],
    x: &Tensor,
    output: Tensor,
    seed: &Tensor,
) -> Vec<Vec<u64>> {
    let mut gradients = cx.backward_from(&[(output, seed.clone())]).unwrap();
    let mut all = vec![gradients.take(x).unwrap()];
    all.extend(params.iter().map(|p| gradients.take_param(p).unwrap()));
    let bits = |grad: Tensor| -> Vec<u64> {
        let values = grad.to_f64_vec().unwrap().into_iter();
        values.map(f64::to_bits).collect()
    };
    all.into_iter().map(bits).collect()
}

/// A second run under a watch, whose end `look` sees together with the output.
fn second_run<R>(
    block: &Block,
    worker: &Worker,
    x: &Tensor,
    watch: Watch,
    look: impl FnOnce(&mut roundpipe_tensor::Watched, &Tensor) -> R,
) -> (Vec<Vec<u64>>, R) {
    let worker = worker.watched(watch);
    let mut cx = Cx::new(&worker, true, true).with_recompute(Recompute::Now(Vec::new()));
    let x = cx.input(x).unwrap();
    let output = block.run(&mut cx, &x).unwrap();
    let mut watched = cx.end_watch().unwrap();
    let seen = look(&mut watched, &output);
    let seed = input(cx.worker(), x.dtype());
    (walk_back(&mut cx, &block.params, &x, output, &seed), seen)
}

fn study(block: &Block, worker: &Worker, x: &Tensor) -> (Vec<Vec<u64>>, Arc<PassSteps>) {
    let (bits, steps) = second_run(block, worker, x, Watch::study(), |watched, output| {
        watched.steps(&[output]).expect("everything was watched")
    });
    (bits, Arc::new(steps))
}

/// What a first run keeps.
fn first_run(
    block: &Block,
    worker: &Worker,
    x: &Tensor,
    pieces: Vec<usize>,
    steps: &PassSteps,
) -> Vec<(usize, Tensor)> {
    let worker = worker.watched(Watch::keep(pieces, Vec::new(), None));
    let mut cx = Cx::ahead(&worker, true).with_recompute(Recompute::Later(None));
    let x = cx.input(x).unwrap();
    block.run(&mut cx, &x).unwrap();
    let watched = cx.end_watch().unwrap();
    assert_eq!(
        watched.signature,
        steps.signature(),
        "both runs take the same memory"
    );
    watched.kept
}

#[test]
fn a_second_run_has_the_same_bits_with_any_of_its_pieces_kept() {
    for dtype in [DType::F32, DType::BF16] {
        let worker = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(64)).unwrap();
        let block = Block::new(dtype);
        let x = input(&worker, dtype);
        let (whole, steps) = study(&block, &worker, &x);
        for list in [steps.choices(false), steps.choices(true)] {
            assert!(list.len() >= 5, "{list:?}");
            for count in 0..=list.len() {
                let chosen = list[..count].iter().flat_map(|choice| &choice.pieces);
                let chosen: Vec<usize> = chosen.copied().collect();
                let kept = first_run(&block, &worker, &x, chosen.clone(), &steps);
                assert_eq!(kept.len(), chosen.len());
                for needs_output in [false, true] {
                    let watch = Watch::repeat(&steps, kept.clone(), needs_output);
                    let (bits, is_sound) =
                        second_run(&block, &worker, &x, watch, |watched, output| {
                            watched.is_sound(Some(&[output]))
                        });
                    assert!(is_sound, "{dtype}, {count} kept");
                    assert_eq!(bits, whole, "{dtype}, {count} kept");
                }
            }
        }
    }
}

/// How a second run is watched, given what the one before did.
type HowToWatch<'a> = dyn Fn(&Worker, &Arc<PassSteps>, &Block, &Tensor) -> Watch + 'a;

/// Without anything kept, the last product is left out; with all of it kept, no product is left.
#[test]
fn what_is_left_out_is_not_computed() {
    let flops = |watch: &HowToWatch<'_>| {
        let meta = Meta::like(DeviceKind::Cpu);
        let worker = Worker::new(meta.clone(), Bytes::mib(64)).unwrap();
        let block = Block::new(DType::BF16);
        let mut cx = Cx::infer(&worker);
        let x = cx.zeros(DType::BF16, &[ROWS, STEPS, HIDDEN]).unwrap();
        let run = |watch: Watch| {
            let worker = worker.watched(watch);
            let mut cx = Cx::new(&worker, true, true);
            let x = cx.input(&x).unwrap();
            let before = meta.cost().flops;
            let output = block.run(&mut cx, &x).unwrap();
            let spent = meta.cost().flops - before;
            let mut watched = cx.end_watch().unwrap();
            (spent, watched.steps(&[&output]))
        };
        let (whole, steps) = run(Watch::study());
        let steps = Arc::new(steps.unwrap());
        (whole, run(watch(&worker, &steps, &block, &x)).0)
    };
    let tokens = (ROWS * STEPS) as u64;
    let down = 2 * tokens * (HIDDEN * INNER) as u64;
    let add = tokens * HIDDEN as u64;
    let (whole, none_kept) = flops(&|_, steps, _, _| Watch::repeat(steps, [], false));
    assert_eq!(whole - none_kept, down + add, "the last product and sum");
    let (whole, with_output) = flops(&|_, steps, _, _| Watch::repeat(steps, [], true));
    assert_eq!(whole, with_output);
    for needs_output in [false, true] {
        let (_, all_kept) = flops(&|worker, steps, block, x| {
            let choices = steps.choices(needs_output);
            let all = choices.iter().flat_map(|choice| &choice.pieces).copied();
            let kept = first_run(block, worker, x, all.collect(), steps);
            Watch::repeat(steps, kept, needs_output)
        });
        assert_eq!(all_kept, 0, "needs its output: {needs_output}");
    }
}

/// The list begins with what a byte saves most by: attention before elementwise work.
#[test]
fn choices_are_in_the_order_of_their_worth() {
    let worker = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(64)).unwrap();
    let block = Block::new(DType::F32);
    let x = input(&worker, DType::F32);
    let (_, steps) = study(&block, &worker, &x);
    let choices = steps.choices(false);
    let worth: Vec<f64> = choices.iter().map(|c| c.seconds_per_byte()).collect();
    assert!(worth[0] > *worth.last().unwrap(), "{worth:?}");
    assert!(choices.iter().all(|c| c.seconds > 0.0 && c.bytes > 0));
    assert_eq!(steps.choices(false), choices, "the same list every time");
}

#[test]
fn a_run_that_differs_is_noticed() {
    let worker = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(64)).unwrap();
    let block = Block::new(DType::F32);
    let x = input(&worker, DType::F32);
    let (_, steps) = study(&block, &worker, &x);
    let run = |body: &dyn Fn(&mut Cx, &Tensor) -> Result<Tensor>| {
        let worker = worker.watched(Watch::repeat(&steps, [], false));
        let mut cx = Cx::new(&worker, true, true);
        let x = cx.input(&x).unwrap();
        let output = body(&mut cx, &x);
        let watched = cx.end_watch().unwrap();
        match &output {
            Ok(output) => watched.is_sound(Some(&[output])),
            Err(_) => watched.is_sound(None),
        }
    };
    assert!(run(&|cx, x| block.run(cx, x)));
    assert!(!run(&|cx, x| cx.exp(x)), "another kernel");
    assert!(
        !run(&|cx, x| {
            let x = cx.mul_scalar(x, 2.0)?;
            block.run(cx, &x)
        }),
        "one more"
    );
    assert!(
        !run(&|cx, x| {
            let y = block.run(cx, x)?;
            cx.neg(&y)
        }),
        "one more at the end"
    );
    assert!(
        !run(&|cx, x| {
            let y = block.run(cx, x)?;
            y.to_f64_vec()?;
            Ok(y)
        }),
        "a look at values that were not computed"
    );
    assert!(
        !run(&|cx, x| {
            let y = block.run(cx, x)?;
            Worker::of(&y).copied(&y, DType::BF16)?;
            Ok(y)
        }),
        "a kernel beside the watch"
    );
    assert!(
        run(&|_, _| Err(roundpipe_tensor::Error::invalid("layer", "of its own"))),
        "its own failure is no difference"
    );
}

/// A tape that holds more than the one that was studied is noticed, although all launches agree.
#[test]
fn a_tape_that_needs_more_is_noticed() {
    let worker = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(64)).unwrap();
    let block = Block::new(DType::F32);
    block.params[1..]
        .iter()
        .for_each(|p| p.set_trainable(false));
    let x = input(&worker, DType::F32);
    let run = |watch: Watch| {
        let worker = worker.watched(watch);
        let mut cx = Cx::new(&worker, true, true);
        let x = cx.input(&x).unwrap();
        let output = block.run(&mut cx, &x).unwrap();
        let mut watched = cx.end_watch().unwrap();
        (
            watched.is_sound(Some(&[&output])),
            watched.steps(&[&output]),
        )
    };
    let steps = Arc::new(run(Watch::study()).1.unwrap());
    assert!(run(Watch::repeat(&steps, [], false)).0);
    block.params[1..].iter().for_each(|p| p.set_trainable(true));
    assert!(!run(Watch::repeat(&steps, [], false)).0);
}
