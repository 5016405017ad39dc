//! Moments in bf16 and in 8 bits: what they take, that they are the rule's own rounded once, and that
//! neither workers, threads, lag nor a resume change a bit.

use std::path::PathBuf;
use std::sync::Arc;

use roundpipe::nn::{Embedding, Init, Linear};
use roundpipe::optim::{Adafactor, AdamW, Lion, Muon, Sgd};
use roundpipe::testing::{Store, StoreConfig};
use roundpipe::{
    Bytes, Cpu, Cx, DType, Device, HostTensor, Lag, Layer, MomentType, Param, ParamGroup,
    ParamVisitor, Params, Pin, RingOptions, RngSite, RoundPipe, Rule, RunConfig, Sequential,
    Tensor, TensorResult, Tree, Update, bf16,
};
use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::optim::{self, AdamSlabs, DynamicMap, Floats, FloatsMut, StepSettings};

const ALL: [MomentType; 3] = [MomentType::F32, MomentType::Bf16, MomentType::Bits8];

/// One parameter, and nothing to compute.
struct One(Param);

impl Params for One {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.0);
    }
}

impl Layer for One {
    fn run(&self, _: &mut Cx, input: Tree) -> TensorResult<Tree> {
        Ok(input)
    }
}

fn store(dtype: DType, dims: &[usize], rule: Rule, lag: Lag, moments: MomentType) -> Store {
    threaded_store(dtype, dims, rule, lag, moments, 1)
}

fn threaded_store(
    dtype: DType,
    dims: &[usize],
    rule: Rule,
    lag: Lag,
    moments: MomentType,
    threads: usize,
) -> Store {
    let key = RngSite::default().key();
    let param = Param::normal(dtype, dims, 0.5, key).unwrap();
    let layers: Vec<(String, Arc<dyn Layer>)> = vec![("l".to_owned(), Arc::new(One(param)))];
    let config = StoreConfig {
        pin: Pin::Off,
        rule: Some(rule),
        max_lag: lag,
        moments,
        seed: 9,
        threads: Some(threads),
        ..StoreConfig::new(Cpu::new(Some(1)).unwrap())
    };
    Store::new(&layers, config).unwrap()
}

/// AdamW over bf16 weights takes 14, 10 and 8 bytes per parameter at lag 0, two more at lag 1, and
/// an eighth for tie bits; 8 bits have a scale per 256 elements for each moment.
#[test]
fn a_parameter_takes_14_10_or_8_bytes() {
    let numel = 64 * 128;
    for (moments, at_lag_0) in ALL.into_iter().zip([14.125, 10.125, 8.15625]) {
        for (lag, more) in [(Lag::Zero, 0.0), (Lag::One, 2.0)] {
            let store = store(
                DType::BF16,
                &[64, 128],
                AdamW::default().into(),
                lag,
                moments,
            );
            store.prepare().unwrap();
            let used = store.host_bytes();
            assert_eq!(
                used.total() as f64 / numel as f64,
                at_lag_0 + more,
                "{moments}, {lag:?}"
            );
            let rule = Rule::from(AdamW::default());
            let param = &store.layer(0).params()[0].param;
            let promised = rule.moment_bytes(["weight"], param, DType::F32, moments);
            assert_eq!(used.moments as u64, promised);
        }
    }
}

/// Adafactor's rows and columns stay f32, and so do small parameters where others have 8 bits.
#[test]
fn small_moments_stay_f32() {
    let bytes = |dims: &[usize], rule: Rule, moments| {
        let store = store(DType::BF16, dims, rule, Lag::Zero, moments);
        store.prepare().unwrap();
        store.host_bytes().moments
    };
    let adafactor: Rule = Adafactor::default().into();
    for moments in ALL {
        assert_eq!(bytes(&[64, 128], adafactor, moments), 4 * (64 + 128));
    }
    let adamw: Rule = AdamW::default().into();
    assert_eq!(bytes(&[4095], adamw, MomentType::Bits8), 2 * 4 * 4095);
    assert_eq!(bytes(&[4096], adamw, MomentType::Bits8), 2 * (4096 + 64));
    assert_eq!(bytes(&[7], adamw, MomentType::Bf16), 2 * (14 + 2) - 4);
}

/// Embeddings keep f32 moments where others have 8 bits, tied ones too, unless their group says
/// otherwise; the other types are for all.
#[test]
fn embeddings_keep_f32_moments_beside_8_bits() {
    let (rows, width) = (64, 128);
    let numel = rows * width;
    let in_8_bits = 2 * (numel + numel / 64);
    let bytes = |moments, group: Option<MomentType>| {
        let mut init = Init::new(1, DType::BF16);
        let table = Embedding::new(&mut init, rows, width, 0.5).unwrap();
        let tied = One(table.weight.clone());
        let other = Linear::new(&mut init, width, rows, false).unwrap();
        let model = Sequential::new()
            .with(One(table.weight))
            .with(other)
            .with(tied);
        let mut promised = 0;
        for (name, param) in &model.named_params()[..2] {
            let rule = Rule::from(AdamW::default());
            promised += rule.moment_bytes([name.as_str()], param, DType::F32, moments);
        }
        let groups = group.map(|moments| ParamGroup::matching("0.weight").moments(moments));
        let engine = RoundPipe::builder(model)
            .optimizer(Rule::AdamW(AdamW::default()))
            .moments(moments)
            .groups(groups)
            .devices([Cpu::new(Some(1)).unwrap() as Arc<dyn Device>])
            .build()
            .unwrap();
        // Makes the optimizer's memory.
        engine.training_state().unwrap();
        (engine.host_bytes().moments, promised as usize)
    };
    let of = |moments, group| bytes(moments, group).0;
    let (held, promised) = bytes(MomentType::Bits8, None);
    assert_eq!(held, 8 * numel + in_8_bits);
    assert_eq!(held, promised);
    assert_eq!(
        of(MomentType::Bits8, Some(MomentType::Bits8)),
        2 * in_8_bits
    );
    assert_eq!(
        of(MomentType::Bits8, Some(MomentType::Bf16)),
        4 * numel + in_8_bits
    );
    assert_eq!(of(MomentType::Bf16, None), 8 * numel);
    assert_eq!(
        of(MomentType::F32, Some(MomentType::Bits8)),
        8 * numel + in_8_bits
    );
}

/// The type of moments that exist cannot change, and a state in bf16 has no other.
#[test]
fn a_group_cannot_change_moments_that_exist() {
    let engine = engine(1, Lag::Zero, MomentType::Bits8);
    let group = |moments| [ParamGroup::matching("0.weight").moments(moments)];
    engine.set_groups(group(MomentType::Bf16)).unwrap();
    steps(&engine, Lag::Zero, 0..2);
    let error = engine.set_groups(group(MomentType::F32)).unwrap_err();
    assert!(error.to_string().contains("0.weight"), "{error}");
    engine.set_groups(group(MomentType::Bf16)).unwrap();
    steps(&engine, Lag::Zero, 2..3);
    let narrow = RoundPipe::builder(model())
        .optimizer(Rule::AdamW(AdamW::default()))
        .optim_dtype(DType::BF16)
        .groups(group(MomentType::Bits8))
        .devices([Cpu::new(Some(1)).unwrap() as Arc<dyn Device>])
        .build();
    let error = narrow.err().unwrap().to_string();
    assert!(error.contains("moments"), "{error}");
}

fn grads(step: u64, numel: usize) -> Vec<bf16> {
    let value = |i: usize| {
        let word = RngSite {
            step,
            ..RngSite::default()
        }
        .key()
        .word(i as u64);
        // Some are zero, and sizes differ by much within a block.
        match word % 7 {
            0 => 0.0,
            n => (f64::from(word) / 2f64.powi(31) - 1.0) * 10f64.powi(-(n as i32)),
        }
    };
    (0..numel).map(|i| bf16::from_f64(value(i))).collect()
}

fn take_step(store: &Store, step: u64) {
    let numel = store.layer(0).params()[0].shape.numel();
    let range = store.layer(0).grad_range(0).unwrap().unwrap();
    let mut into = range.write(0..range.len()).unwrap();
    match store.layer(0).params()[0].grad_dtype {
        DType::BF16 => into.as_mut_slice().copy_from_slice(&grads(step, numel)),
        _ => {
            let wide: Vec<f32> = grads(step, numel).iter().map(|x| x.to_f32()).collect();
            into.as_mut_slice().copy_from_slice(&wide);
        }
    }
    drop(into);
    store.layer(0).set_filled(0, true);
    let update = Update::new(1e-2);
    store.step(&update, step, &store.abort()).unwrap();
}

/// All that an update leaves: values and moments, as bytes.
fn state(store: &Store) -> Vec<Vec<u8>> {
    let handle = store.optim_params().unwrap().swap_remove(0);
    let moments = handle.moments().iter().cloned();
    let all = std::iter::once(handle.value()).chain(moments);
    all.map(|buf| buf.read_all().unwrap().bytes().to_vec())
        .collect()
}

/// What the store does piece by piece is AdamW over f32 moments that are narrowed once per step, over
/// the whole parameter at once.
#[test]
fn an_update_is_the_rule_with_moments_narrowed_once() {
    let numel = 70_003;
    let one = Threads::new(Some(1)).unwrap();
    for dtype in [DType::BF16, DType::F32] {
        for moments in ALL {
            for lag in [Lag::Zero, Lag::One] {
                let store = store(dtype, &[numel], AdamW::default().into(), lag, moments);
                let handle = store.optim_params().unwrap().swap_remove(0);
                let mut master = handle.to_vec().unwrap();
                let mut m = vec![0.0; numel];
                let mut v = vec![0.0; numel];
                for step in 1..=4 {
                    let grad = grads(step, numel);
                    let slabs = AdamSlabs {
                        grad: Floats::BF16(&grad),
                        master: &mut master,
                        exp_avg: &mut m,
                        exp_avg_sq: &mut v,
                        max_exp_avg_sq: None,
                        working: None,
                    };
                    let settings = StepSettings::new(step, 1e-2);
                    AdamW::default().step(&one, settings, slabs).unwrap();
                    for (i, moment) in [&mut m, &mut v].into_iter().enumerate() {
                        narrow_once(&one, moments, step, i, moment);
                    }
                    take_step(&store, step);
                }
                let what = format!("{dtype}, {moments}, {lag:?}");
                assert!(handle.to_vec().unwrap() == master, "{what}");
                let weights = store.layer(0).params()[0].param.host_tensor();
                let rounded = |x: &f32| match dtype {
                    DType::BF16 => f64::from(bf16::from_f32(*x).to_f32()),
                    _ => f64::from(*x),
                };
                let rounded: Vec<f64> = master.iter().map(rounded).collect();
                assert!(weights.to_f64_vec().unwrap() == rounded, "{what}");
            }
        }
    }
}

/// Narrows and widens a moment as a whole.
fn narrow_once(one: &Threads, moments: MomentType, step: u64, index: usize, moment: &mut [f32]) {
    match moments {
        MomentType::F32 => {}
        MomentType::Bf16 => {
            let site = RngSite {
                seed: 9,
                step,
                microbatch: u32::MAX,
                layer: 0,
                site: index as u32,
            };
            let mut narrow = vec![bf16::ZERO; moment.len()];
            optim::round_randomly(one, site.key(), 0, moment, &mut narrow).unwrap();
            optim::cast(one, Floats::BF16(&narrow), FloatsMut::F32(moment)).unwrap();
        }
        MomentType::Bits8 => {
            let map = [DynamicMap::Signed, DynamicMap::Unsigned][index];
            let mut codes = vec![0; moment.len()];
            let mut scales = vec![0.0; optim::scale_count(moment.len())];
            optim::quantize(one, map, moment, &mut codes, &mut scales).unwrap();
            optim::dequantize(one, map, &codes, &scales, moment).unwrap();
        }
    }
}

/// Every rule runs with every kind of moment, and gives the same bits with any number of threads and
/// at both lags.
#[test]
fn threads_and_lag_change_no_bit() {
    let sgd = Sgd {
        momentum: 0.9,
        ..Sgd::default()
    };
    let amsgrad = AdamW {
        amsgrad: true,
        ..AdamW::default()
    };
    let rules: [Rule; 6] = [
        AdamW::default().into(),
        amsgrad.into(),
        sgd.into(),
        Lion::default().into(),
        Muon::default().into(),
        Adafactor::default().into(),
    ];
    for rule in rules {
        for moments in ALL {
            let run = |lag, threads| {
                let dims = [150, 460];
                let store = threaded_store(DType::BF16, &dims, rule, lag, moments, threads);
                (1..=3).for_each(|step| take_step(&store, step));
                state(&store)
            };
            let expected = run(Lag::Zero, 1);
            assert!(run(Lag::Zero, 3) == expected, "{rule}, {moments}: threads");
            assert!(run(Lag::One, 2) == expected, "{rule}, {moments}: lag");
        }
    }
}

fn model() -> Sequential {
    let mut init = Init::new(1, DType::BF16);
    let mut model = Sequential::new();
    for _ in 0..4 {
        model = model.with(Linear::new(&mut init, 80, 80, true).unwrap());
    }
    model
}

fn engine(workers: usize, lag: Lag, moments: MomentType) -> RoundPipe {
    let devices = Cpu::workers(workers, Some(workers)).unwrap().into_iter();
    RoundPipe::builder(model())
        .optimizer(Rule::AdamW(AdamW::default()))
        .max_lag(lag)
        .moments(moments)
        .seed(5)
        .run_config(RunConfig::new().num_microbatch(2))
        .devices(devices.map(|cpu| cpu as Arc<dyn Device>))
        .ring_options(RingOptions {
            memory: Some(Bytes::mib(32)),
            ..RingOptions::default()
        })
        .build()
        .unwrap()
}

fn square(cx: &mut Cx, output: Tree, _: Tree) -> TensorResult<Tensor> {
    let squared = cx.square(&output.tensor()?)?;
    cx.mean_all(&squared)
}

fn steps(engine: &RoundPipe, lag: Lag, steps: std::ops::Range<u64>) {
    for step in steps {
        let values: Vec<f64> = (0..8 * 80)
            .map(|i| ((i as f64 + 7.0 * step as f64) * 0.37).sin())
            .collect();
        let input = HostTensor::from_f64s(&values, DType::BF16, &[8, 80]).unwrap();
        engine.forward_backward(input, Tree::None, square).unwrap();
        engine.update(&Update::new(1e-3), lag).unwrap();
    }
}

fn engine_state(engine: &RoundPipe) -> Vec<(String, Vec<u8>)> {
    let state = engine.training_state().unwrap();
    let mut all = Vec::new();
    for (name, param) in &state.params {
        for tensor in std::iter::once(&param.value).chain(&param.moments) {
            all.push((name.clone(), tensor.read().unwrap().bytes().to_vec()));
        }
    }
    all
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("roundpipe-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The same bits for one, two and three workers, and for a run that was resumed from a checkpoint or
/// from a training state. Another setting is refused by name, and nothing changes.
#[test]
fn workers_and_resumes_change_no_bit() {
    let folder = Folder::new("moments");
    for moments in ALL {
        for lag in [Lag::Zero, Lag::One] {
            let whole = engine(1, lag, moments);
            steps(&whole, lag, 0..6);
            whole.synchronize().unwrap();
            let expected = engine_state(&whole);
            for workers in [2, 3] {
                let other = engine(workers, lag, moments);
                steps(&other, lag, 0..3);
                other.save(&folder.0, "").unwrap().wait().unwrap();
                steps(&other, lag, 3..6);
                other.synchronize().unwrap();
                let what = format!("{moments}, {lag:?}, {workers} workers");
                assert!(engine_state(&other) == expected, "{what}");
                let resumed = engine(4 - workers, lag, moments);
                resumed.restore(&folder.0).unwrap();
                steps(&resumed, lag, 3..6);
                resumed.synchronize().unwrap();
                assert!(engine_state(&resumed) == expected, "{what}: resumed");
            }
            let loaded = engine(1, lag, moments);
            loaded
                .load_training_state(&whole.training_state().unwrap())
                .unwrap();
            assert!(engine_state(&loaded) == expected, "{moments}: loaded");
            steps(&loaded, Lag::Zero, 6..8);
            steps(&whole, Lag::Zero, 6..8);
            assert!(engine_state(&loaded) == engine_state(&whole), "{moments}");
            for other in ALL.into_iter().filter(|other| *other != moments) {
                let refusing = engine(1, lag, other);
                let before = engine_state(&refusing);
                let error = refusing.restore(&folder.0).unwrap_err().to_string();
                let named = format!("has `moments` {moments} in it, and {other} in this engine");
                assert!(error.contains(&named), "{error}");
                let state = whole.training_state().unwrap();
                let error = refusing
                    .load_training_state(&state)
                    .unwrap_err()
                    .to_string();
                assert!(error.contains("`moments`"), "{error}");
                assert!(engine_state(&refusing) == before);
            }
        }
    }
}

/// bf16 masters make bf16 moments, so both settings at once are refused.
#[test]
fn moments_beside_a_narrow_state_are_refused() {
    let built = RoundPipe::builder(model())
        .optimizer(Rule::AdamW(AdamW::default()))
        .optim_dtype(DType::BF16)
        .moments(MomentType::Bits8)
        .devices([Cpu::new(Some(1)).unwrap() as Arc<dyn Device>])
        .build();
    let error = built.err().unwrap().to_string();
    assert!(
        error.contains("moments") && error.contains("8bit"),
        "{error}"
    );
    assert!(error.contains("optim_dtype"), "{error}");
}
