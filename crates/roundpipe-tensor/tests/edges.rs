//! Mistakes and corner cases that once gave wrong results, panics or worse.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use roundpipe_tensor::kernel::{ConvSpec, PoolSpec, RopeStyle};
use roundpipe_tensor::ops::{Attention, BatchNorm, CrossEntropy, Lora, Reduction};
use roundpipe_tensor::{
    Bytes, Cpu, CustomOp, Cx, DType, Device, DeviceKind, HostBuf, LaneKind, Meta, Param, Result,
    Tensor, Worker,
};

fn worker() -> Worker {
    Worker::new(Cpu::new(Some(2)).unwrap(), Bytes::mib(256)).unwrap()
}

fn refused<T>(result: Result<T>, words: &[&str]) {
    let text = result.err().expect("refused").to_string();
    assert!(words.iter().all(|w| text.contains(w)), "{text}");
}

/// Sizes that only a stretched view can have must not wrap around to a small allocation.
#[test]
fn a_result_with_too_many_elements_is_refused() {
    let mut cx = Cx::infer(&worker());
    let one = cx.zeros(DType::F32, &[1, 1]).unwrap();
    let wide = cx.expand(&one, &[2, 1 << 58]).unwrap();
    let index = cx.zeros(DType::I64, &[64]).unwrap();
    refused(
        cx.index_select(&wide, 0, &index),
        &["index_select", "too many elements"],
    );
}

/// One parameter may stand for weight and bias at once: both of its gradients count.
#[test]
fn a_parameter_at_two_inputs_of_one_norm_gets_both_gradients() {
    let w = worker();
    let param = Param::from_slice(&[1.0f32, 2.0], &[2]).unwrap();
    let run = |into: Option<Tensor>| -> Vec<f32> {
        let mut cx = Cx::train(&w);
        let x = cx.tensor(&[1.0f32, 3.0, -2.0, 5.0], &[2, 2]).unwrap();
        let p = match into {
            Some(into) => {
                let tensor = cx.tensor(&[1.0f32, 2.0], &[2]).unwrap();
                cx.bind(&param, tensor, Some(into)).unwrap()
            }
            None => cx.get(&param).unwrap(),
        };
        let y = cx.layer_norm(&x, Some(&p), Some(&p), 1e-9).unwrap();
        let loss = cx.sum_all(&y).unwrap();
        cx.backward(&loss)
            .unwrap()
            .param(&param)
            .unwrap()
            .to_vec()
            .unwrap()
    };
    // Normed rows are (-1, 1) twice: dw = (-2, 2), db = (2, 2).
    let near = |got: Vec<f32>, want: [f32; 2]| {
        assert!(
            got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-4),
            "{got:?} is not {want:?}"
        );
    };
    near(run(None), [0.0, 4.0]);
    let into = w.upload(&[10.0f32, 20.0], [2].try_into().unwrap()).unwrap();
    near(run(Some(into)), [10.0, 24.0]);
}

/// A parameter looked at without recording still learns afterwards.
#[test]
fn a_parameter_first_used_without_recording_gets_its_gradient() {
    let w = worker();
    let param = Param::from_slice(&[3.0f32], &[1]).unwrap();
    let mut cx = Cx::train(&w);
    cx.no_grad(|cx| cx.get(&param).map(drop)).unwrap();
    let p = cx.get(&param).unwrap();
    let y = cx.mul(&p, &p).unwrap();
    let grads = cx.backward(&y).unwrap();
    assert_eq!(grads.param(&param).unwrap().to_vec::<f32>().unwrap(), [6.0]);
}

/// Writing buffers between forward and backward must not lose gradients, nor must letting go of
/// parameters.
#[test]
fn letting_go_of_parameters_keeps_their_gradients() {
    let w = worker();
    let param = Param::from_slice(&[3.0f32], &[1]).unwrap();
    let buffer = Param::zeros(DType::F32, &[1]).unwrap().frozen();
    let mut cx = Cx::train(&w);
    let a = cx.get(&param).unwrap();
    let y = cx.mul(&a, &a).unwrap();
    cx.set_buffer(&buffer, &y).unwrap();
    cx.commit_buffers().unwrap();
    assert_eq!(buffer.to_vec::<f32>().unwrap(), [9.0]);
    let again = cx.get(&param).unwrap();
    let y = cx.mul(&y, &again).unwrap();
    let grads = cx.backward(&y).unwrap();
    assert_eq!(
        grads.param(&param).unwrap().to_vec::<f32>().unwrap(),
        [27.0]
    );
    assert_eq!(grads.params().count(), 1);
}

/// A buffer that is being read can be written by a second try.
#[test]
fn buffers_that_could_not_be_written_wait() {
    let w = worker();
    let [a, b] = [0, 1].map(|_| Param::zeros(DType::F32, &[1]).unwrap().frozen());
    let mut cx = Cx::train(&w);
    let one = cx.ones(DType::F32, &[1]).unwrap();
    cx.set_buffer(&a, &one).unwrap();
    cx.set_buffer(&b, &one).unwrap();
    let reading = a.data().read_all().unwrap();
    assert!(cx.commit_buffers().is_err());
    drop(reading);
    cx.commit_buffers().unwrap();
    assert_eq!([a, b].map(|p| p.to_vec::<f32>().unwrap()), [[1.0], [1.0]]);
}

/// Accumulators are written: they must not be memory that is lent for reading, or read by the same
/// kernels.
#[test]
fn accumulators_in_read_memory_are_refused() {
    let w = worker();
    let [a, b] = [0, 1].map(|_| Param::from_slice(&[1.0f32, 2.0], &[2]).unwrap());
    let mut cx = Cx::train(&w);
    let host = cx.get(&a).unwrap().detach();
    let own = cx.zeros(DType::F32, &[2]).unwrap();
    refused(cx.bind(&b, own.clone(), Some(host)), &["bind", "only read"]);
    refused(
        cx.bind(&b, own.clone(), Some(own.clone())),
        &["bind", "held elsewhere"],
    );
    let into = cx.zeros(DType::F32, &[2]).unwrap();
    refused(
        cx.bind(&b, own.clone(), Some(into.clone())),
        &["bind", "held elsewhere"],
    );
    cx.bind(&b, own, Some(into)).unwrap();
}

/// Addresses of one device mean nothing on another.
#[test]
fn a_lane_refuses_blocks_of_another_device() {
    let cpu = Cpu::new(Some(1)).unwrap();
    let meta = Worker::new(Meta::like(DeviceKind::Cpu), Bytes::mib(1)).unwrap();
    let host = HostBuf::from_slice("h", &[1u8; 64]).unwrap();
    let lane = cpu.lane(LaneKind::Compute);
    let block = meta.pool().alloc("b", 64).unwrap();
    refused(
        lane.upload("x", host.read_all().unwrap(), block),
        &["upload", "another device"],
    );
    let block = meta.pool().alloc("b", 64).unwrap();
    refused(
        lane.download("x", block, host.write(0..64).unwrap()),
        &["download", "another device"],
    );
}

/// Rows before the first group would belong to no group and keep what the memory held.
#[test]
fn groups_begin_at_row_zero() {
    let mut cx = Cx::infer(&worker());
    let x = cx.ones(DType::F32, &[4, 2]).unwrap();
    let weight = cx.ones(DType::F32, &[1, 3, 2]).unwrap();
    for bad in [[2, 4], [-1, 4], [0, 5], [3, 1]] {
        let offsets = cx.tensor(&bad, &[2]).unwrap();
        refused(
            cx.grouped_linear(&x, &weight, &offsets, None),
            &["offsets", "from 0"],
        );
    }
}

/// A position beyond 2^32 must not come round to a valid one.
#[test]
fn huge_positions_are_refused() {
    let mut cx = Cx::infer(&worker());
    let x = cx.ones(DType::F32, &[1, 1, 1, 2]).unwrap();
    let table = cx.ones(DType::F32, &[4, 1]).unwrap();
    for bad in [1i64 << 32, (1 << 32) + 1, -(1 << 32), -1, 4, i64::MIN] {
        let at = cx.tensor(&[bad], &[1, 1]).unwrap();
        refused(
            cx.rope(&x, &table, &table, Some(&at), RopeStyle::Half),
            &["rope", "outside"],
        );
    }
    let at = cx.tensor(&[3i64], &[1]).unwrap();
    cx.rope(&x, &table, &table, Some(&at), RopeStyle::Half)
        .unwrap();
}

/// A number outside a tensor's type must not be taken for its largest or smallest value.
#[test]
fn scalars_outside_the_type_are_refused() {
    let mut cx = Cx::infer(&worker());
    let x = cx.tensor(&[255u8, 0], &[2]).unwrap();
    refused(cx.eq_scalar(&x, 300.0), &["eq_scalar", "300", "u8"]);
    refused(cx.ge_scalar(&x, -1.0), &["ge_scalar", "-1"]);
    let mask = cx.tensor_bool(&[true, false], &[2]).unwrap();
    refused(cx.masked_fill(&x, &mask, 256.0), &["masked_fill"]);
    let counts = cx.tensor(&[0u32, 7], &[2]).unwrap();
    refused(cx.eq_scalar(&counts, -1.0), &["eq_scalar"]);
    // Classes beyond the index type are no class.
    let hot = cx.one_hot(&x, 300, DType::F32).unwrap();
    assert_eq!(hot.to_vec::<f32>().unwrap().iter().sum::<f32>(), 2.0);
}

#[test]
fn counting_needs_numbers_and_far_diagonals_are_corners() {
    let mut cx = Cx::infer(&worker());
    assert!(cx.arange(DType::F32, f64::NAN, 3.0, 1.0).is_err());
    assert!(cx.arange(DType::F32, 0.0, 3.0, f64::INFINITY).is_err());
    let x = cx.ones(DType::F32, &[2, 3]).unwrap();
    for (diagonal, sums) in [
        (i64::MAX, [6.0, 0.0]),
        (i64::MIN, [0.0, 6.0]),
        (1 << 60, [6.0, 0.0]),
    ] {
        for (lower, want) in [true, false].into_iter().zip(sums) {
            let y = if lower {
                cx.tril(&x, diagonal)
            } else {
                cx.triu(&x, diagonal)
            }
            .unwrap();
            assert_eq!(
                cx.sum_all(&y).unwrap().item().unwrap(),
                want,
                "{diagonal} {lower}"
            );
        }
    }
}

/// A target of 0 contributes 0, in every type.
#[test]
fn kl_div_of_a_zero_target_is_finite_in_f16() {
    let mut cx = Cx::infer(&worker());
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let target = cx.tensor(&[0.0f32, 1.0], &[2]).unwrap();
        let target = cx.cast(&target, dtype).unwrap();
        let log = cx.full(dtype, &[2], -1.0).unwrap();
        let loss = cx.kl_div(&log, &target, Reduction::Sum).unwrap();
        assert_eq!(loss.item().unwrap(), 1.0, "{dtype}");
    }
}

/// A product over nothing is 0.
#[test]
fn products_over_an_empty_dimension() {
    let mut cx = Cx::train(&worker());
    let a = cx.zeros(DType::F32, &[2, 3, 0]).unwrap();
    let a = cx.input(&a).unwrap();
    let b = cx.zeros(DType::F32, &[0, 4]).unwrap();
    let y = cx.matmul(&a, &b).unwrap();
    assert_eq!(y.dims(), [2, 3, 4]);
    assert_eq!(y.to_vec::<f32>().unwrap(), [0.0; 24]);
    let loss = cx.sum_all(&y).unwrap();
    assert_eq!(
        cx.backward(&loss).unwrap().of(&a).unwrap().dims(),
        [2, 3, 0]
    );
    let x = cx.zeros(DType::F32, &[2, 0]).unwrap();
    let (w, bias) = (
        cx.zeros(DType::F32, &[3, 0]).unwrap(),
        cx.ones(DType::F32, &[3]).unwrap(),
    );
    assert_eq!(
        cx.linear(&x, &w, Some(&bias))
            .unwrap()
            .to_vec::<f32>()
            .unwrap(),
        [1.0; 6]
    );
}

/// Outputs of a user's operation that hold integers have no gradient.
#[test]
fn integer_outputs_of_a_custom_operation_are_constants() {
    struct Both;
    impl CustomOp for Both {
        fn name(&self) -> &'static str {
            "both"
        }
        fn forward(&self, cx: &mut Cx, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
            Ok(vec![cx.cast(&inputs[0], DType::I64)?, inputs[0].clone()])
        }
        fn backward(
            &self,
            _: &mut Cx,
            _: &[Tensor],
            _: &[Tensor],
            grads: &[Option<Tensor>],
        ) -> Result<Vec<Option<Tensor>>> {
            assert!(grads[0].is_none());
            Ok(vec![grads[1].clone()])
        }
    }
    let mut cx = Cx::train(&worker());
    let x = cx.tensor(&[1.0f32, 2.0], &[2]).unwrap();
    let x = cx.input(&x).unwrap();
    let out = cx.custom(Arc::new(Both), &[&x]).unwrap();
    assert!(!out[0].requires_grad() && out[1].requires_grad());
    let both = cx.add(&x, &out[1]).unwrap();
    let loss = cx.sum_all(&both).unwrap();
    assert_eq!(
        cx.backward(&loss)
            .unwrap()
            .of(&x)
            .unwrap()
            .to_vec::<f32>()
            .unwrap(),
        [2.0, 2.0]
    );
}

/// Running statistics may be bound to a view of any strides.
#[test]
fn batch_norm_reads_running_statistics_of_any_strides() {
    let mut cx = Cx::infer(&worker());
    let [mean, var] = [0, 1].map(|_| Param::zeros(DType::F32, &[3]).unwrap().frozen());
    for (param, value) in [(&mean, 1.0), (&var, 4.0)] {
        let one = cx.full(DType::F32, &[1], value).unwrap();
        let spread = cx.expand(&one, &[3]).unwrap();
        cx.bind(param, spread, None).unwrap();
    }
    let x = cx.full(DType::F32, &[2, 3], 5.0).unwrap();
    let y = cx
        .batch_norm(
            &x,
            None,
            None,
            Some((&mean, &var)),
            BatchNorm {
                momentum: 0.1,
                eps: 0.0,
            },
        )
        .unwrap();
    assert_eq!(y.to_vec::<f32>().unwrap(), [2.0; 6]);
}

/// No gradient reaches the padding row, not even one that is no number.
#[test]
fn the_padding_row_stays_clean() {
    let mut cx = Cx::train(&worker());
    let weight = cx.ones(DType::F32, &[2, 1]).unwrap();
    let weight = cx.input(&weight).unwrap();
    let ids = cx.tensor(&[0i64, 1], &[2]).unwrap();
    let y = cx.embedding_padded(&weight, &ids, Some(0)).unwrap();
    let seed = cx.tensor(&[f32::NAN, 2.0], &[2, 1]).unwrap();
    let grads = cx.backward_from(&[(y, seed)]).unwrap();
    assert_eq!(
        grads.of(&weight).unwrap().to_vec::<f32>().unwrap(),
        [0.0, 2.0]
    );
}

#[test]
fn a_lora_branch_checks_its_dropout() {
    let mut cx = Cx::infer(&worker());
    let x = cx.ones(DType::F32, &[1, 1]).unwrap();
    for dropout in [-0.5, f64::NAN, 1.5] {
        let lora = Lora {
            a: &x,
            b: &x,
            scale: 1.0,
            dropout,
        };
        refused(cx.linear_lora(&x, &x, None, lora), &["not a probability"]);
    }
}

/// Sizes too large for any count are counted as very many, not as few, and are no panic.
#[test]
fn absurd_products_cost_very_much() {
    let body = |worker: &Worker| {
        let mut cx = Cx::infer(worker);
        let one = cx.zeros(DType::F32, &[1, 1])?;
        let x = cx.expand(&one, &[1 << 25, 1 << 25])?;
        cx.matmul(&x, &x).map(drop)
    };
    assert_eq!(
        roundpipe_tensor::meta::measure(DeviceKind::Cpu, body)
            .unwrap()
            .1
            .flops,
        u64::MAX
    );
}

/// Truth values are 0 or 1 whatever they were made from.
#[test]
fn bool_parameters_hold_truth_values() {
    let param = Param::full(DType::Bool, &[2], 5.0).unwrap();
    assert_eq!(param.data().read_all().unwrap().bytes(), [1, 1]);
}

type Op = (&'static str, fn(&mut Cx, &Tensor) -> Result<Tensor>);

const OPS: &[Op] = &[
    ("sum 0", |cx, x| cx.sum(x, &[0], false)),
    ("sum -1", |cx, x| cx.sum(x, &[-1], true)),
    ("sum", |cx, x| cx.sum_all(x)),
    ("mean 0", |cx, x| cx.mean(x, &[0], true)),
    ("max 0", |cx, x| cx.max(x, &[0], false)),
    ("min -1", |cx, x| cx.min(x, &[-1], false)),
    ("prod 0", |cx, x| cx.prod(x, &[0], false)),
    ("var", |cx, x| cx.var(x, &[-1], true, false)),
    ("std 0", |cx, x| cx.std(x, &[0], false, true)),
    ("norm", |cx, x| cx.norm(x, &[0], false)),
    ("lse 0", |cx, x| cx.logsumexp(x, &[0], false)),
    ("lse -1", |cx, x| cx.logsumexp(x, &[-1], true)),
    ("softmax 0", |cx, x| cx.softmax(x, 0)),
    ("softmax -1", |cx, x| cx.softmax(x, -1)),
    ("argmax", |cx, x| cx.argmax(x, 0, false)),
    ("cumsum 0", |cx, x| cx.cumsum(x, 0)),
    ("cumsum -1", |cx, x| cx.cumsum(x, -1)),
    ("topk 0", |cx, x| Ok(cx.topk(x, 0, -1, true)?.0)),
    ("topk 1", |cx, x| Ok(cx.topk(x, 1, 0, false)?.0)),
    ("sort", |cx, x| Ok(cx.sort(x, 0, true)?.0)),
    ("rms", |cx, x| cx.rms_norm(x, None, 1e-6)),
    ("add rms", |cx, x| Ok(cx.add_rms_norm(x, x, None, 1e-6)?.1)),
    ("layer", |cx, x| cx.layer_norm(x, None, None, 1e-6)),
    ("group", |cx, x| cx.group_norm(x, 1, None, None, 1e-6)),
    ("instance", |cx, x| cx.instance_norm(x, None, None, 1e-6)),
    ("batch", |cx, x| {
        cx.batch_norm(x, None, None, None, BatchNorm::default())
    }),
    ("flip", |cx, x| cx.flip(x, &[0, -1])),
    ("repeat", |cx, x| cx.repeat(x, &vec![2; x.rank()])),
    ("repeat 0", |cx, x| cx.repeat(x, &vec![0; x.rank()])),
    ("pad", |cx, x| cx.pad(x, &vec![(1, 2); x.rank()], 1.0)),
    ("cat", |cx, x| cx.cat(&[x, x], -1)),
    ("stack", |cx, x| cx.stack(&[x, x], -1)),
    ("chunk", |cx, x| Ok(cx.chunk(x, 2, 0)?.remove(0))),
    ("narrow", |cx, x| cx.narrow(x, -1, 1, 1)),
    ("tril", |cx, x| cx.tril(x, 0)),
    ("transpose", |cx, x| cx.transpose(x, 0, -1)),
    ("flatten", |cx, x| cx.flatten(x, 0, -1)),
    ("swiglu", |cx, x| cx.swiglu(x, x)),
    ("packed", |cx, x| cx.swiglu_packed(x)),
    ("interleaved", |cx, x| {
        cx.swiglu_clamped_interleaved(x, 1.7, 7.0)
    }),
    ("attention", |cx, x| {
        cx.attention(
            x,
            x,
            x,
            &Attention {
                causal: true,
                ..Default::default()
            },
        )
    }),
    ("window 0", |cx, x| {
        cx.attention(
            x,
            x,
            x,
            &Attention {
                window: Some(0),
                ..Default::default()
            },
        )
    }),
    ("pool", |cx, x| {
        cx.max_pool2d(
            x,
            PoolSpec {
                padding: [1, 1],
                ..PoolSpec::window([2, 2])
            },
        )
    }),
    ("avg", |cx, x| {
        cx.avg_pool2d(
            x,
            PoolSpec {
                ceil_mode: true,
                padding: [1, 1],
                ..PoolSpec::window([3, 3])
            },
        )
    }),
    ("adaptive", |cx, x| cx.adaptive_avg_pool2d(x, [2, 0])),
    ("adaptive 3", |cx, x| cx.adaptive_avg_pool2d(x, [3, 3])),
    ("conv", |cx, x| {
        cx.conv2d(
            x,
            x,
            None,
            ConvSpec {
                padding: [3, 3],
                ..Default::default()
            },
        )
    }),
    ("conv 1", |cx, x| {
        let f = cx.ones(
            DType::F32,
            &[0, x.dims().get(1).copied().unwrap_or(1), 1, 1],
        )?;
        cx.conv2d(
            x,
            &f,
            None,
            ConvSpec {
                padding: [1, 1],
                stride: [2, 3],
                ..Default::default()
            },
        )
    }),
    ("matmul", |cx, x| {
        let t = cx.transpose(x, -1, -2)?;
        cx.matmul(x, &t)
    }),
    ("select", |cx, x| {
        let index = cx.zeros(DType::I64, &[3])?;
        cx.index_select(x, 0, &index)
    }),
    ("select none", |cx, x| {
        let index = cx.zeros(DType::I32, &[0])?;
        cx.index_select(x, -1, &index)
    }),
    ("gather", |cx, x| {
        let index = cx.zeros(DType::U32, x.dims())?;
        cx.gather(x, 0, &index)
    }),
    ("scatter", |cx, x| {
        let index = cx.zeros(DType::U32, x.dims())?;
        cx.scatter_add(x, -1, &index, x)
    }),
    ("rope", |cx, x| {
        let table = cx.ones(DType::F32, &[8, 1])?;
        cx.rope(x, &table, &table, None, RopeStyle::Interleaved)
    }),
    ("rope norm", |cx, x| {
        let table = cx.ones(DType::F32, &[8, 0])?;
        let w = cx.ones(DType::F32, &[x.dims().last().copied().unwrap_or(1)])?;
        cx.rope_norm(x, &w, &table, &table, None, RopeStyle::Half, 1e-6)
    }),
    ("cross entropy", |cx, x| {
        let labels = cx.full(DType::I64, &x.dims()[..x.rank().saturating_sub(1)], -100.0)?;
        cx.cross_entropy(x, &labels, CrossEntropy::default())
    }),
    ("fused", |cx, x| {
        let labels = cx.full(DType::I64, &x.dims()[..x.rank().saturating_sub(1)], -100.0)?;
        let w = cx.ones(DType::F32, &[0, x.dims().last().copied().unwrap_or(1)])?;
        cx.linear_cross_entropy(x, &w, &labels, CrossEntropy::default())
    }),
    ("embedding", |cx, x| {
        let ids = cx.zeros(DType::I64, &[2, 2])?;
        cx.embedding_padded(x, &ids, Some(0))
    }),
    ("bias", |cx, x| {
        let b = cx.ones(DType::F32, &[x.dims().last().copied().unwrap_or(1)])?;
        let b = cx.input(&b)?;
        cx.mul(x, &b)
    }),
];

/// Odd shapes give a result with finite bookkeeping or an error, forward and backward, and never a
/// panic.
#[test]
fn no_operation_panics_on_odd_shapes() {
    let shapes: &[&[usize]] = &[
        &[],
        &[0],
        &[1],
        &[3],
        &[0, 3],
        &[5, 0],
        &[1, 1],
        &[3, 4],
        &[5, 3, 0],
        &[0, 3, 5],
        &[5, 0, 3],
        &[0, 0],
        &[1, 0, 0, 1],
        &[0, 2, 3, 4],
        &[2, 0, 3, 4],
        &[2, 2, 0, 4],
        &[2, 2, 3, 0],
        &[2, 2, 3, 4],
        &[1, 1, 1, 1],
        &[2, 1, 2, 2, 1, 2, 1, 2],
    ];
    let w = worker();
    let mut bad = Vec::new();
    for dims in shapes.iter().step_by(if cfg!(miri) { 7 } else { 1 }) {
        for (name, op) in OPS {
            for turned in [false, true] {
                let outcome = catch_unwind(AssertUnwindSafe(|| -> Result<()> {
                    let mut cx = Cx::train(&w);
                    let mut back = dims.to_vec();
                    back.reverse();
                    let x = cx.ones(DType::F32, if turned { &back } else { dims })?;
                    let x = cx.input(&x)?;
                    let order: Vec<usize> = (0..dims.len()).rev().collect();
                    let y = if turned {
                        cx.permute(&x, &order)?
                    } else {
                        x.clone()
                    };
                    let y = op(&mut cx, &y)?;
                    if y.requires_grad() {
                        let seed = cx.ones(y.dtype(), y.dims())?;
                        let grads = cx.backward_from(&[(y, seed)])?;
                        assert!(
                            grads.of(&x).is_none_or(|g| g.shape() == x.shape()),
                            "gradient's shape"
                        );
                    }
                    Ok(())
                }));
                if outcome.is_err() {
                    bad.push(format!("{name} of {dims:?} turned {turned}"));
                }
            }
        }
    }
    assert!(bad.is_empty(), "{bad:#?}");
}
