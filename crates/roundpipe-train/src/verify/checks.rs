//! The claims, one by one. Each runs a subject in two ways and compares what they leave.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use roundpipe::{Bytes, Device, Grain, Lag, Meta, Params, RoundPipe};
use roundpipe_models::Model;

use super::subject::Subject;
use super::trail::{Counted, Kind, Trail, relative_difference};
use super::way::{MANY, Place, Way, memory, one_step, run_steps, simulated};
use super::{Comparison, Outcome, plain};
use crate::error::Result;
use crate::machine;

/// How far packed and unpacked rows may be apart in f32: sums over a row may have another order.
const PACKED_BOUND: f64 = 1e-5;
/// A GPU may be so many times as far from f32 as the processor is, with the same bf16 weights.
const NOISE_FACTOR: f64 = 2.0;
/// What a slab may add behind each parameter, in all its versions.
const PADDING: u64 = 128;

/// What a check found.
pub(super) struct Found {
    counted: Vec<Counted>,
    largest: Option<f64>,
    bound: Option<f64>,
    note: Option<String>,
    skipped: bool,
}

impl Found {
    /// Of two trails that must have the same bits.
    fn exact(one: &Trail, other: &Trail) -> Result<Self> {
        let (counted, note) = one.compare(other)?;
        Ok(Self::counted(counted, note))
    }

    fn counted(counted: Vec<Counted>, note: Option<String>) -> Self {
        Self {
            counted,
            largest: None,
            bound: None,
            note,
            skipped: false,
        }
    }

    fn skipped(why: &str) -> Self {
        Self {
            skipped: true,
            ..Self::counted(Vec::new(), Some(why.to_owned()))
        }
    }

    /// A difference that may be as large as its bound. One that is larger counts as one value that
    /// differs.
    fn bounded(values: u64, largest: f64, bound: f64, note: String) -> Self {
        let is_within = largest <= bound;
        let counted = Counted {
            kind: Kind::Gradients,
            values,
            differ: u64::from(!is_within),
        };
        Self {
            largest: Some(largest),
            bound: Some(bound),
            ..Self::counted(vec![counted], Some(note))
        }
    }

    /// Whether values were compared and none differs.
    pub fn holds(&self) -> bool {
        let values: u64 = self.counted.iter().map(|counted| counted.values).sum();
        values > 0 && self.counted.iter().all(|counted| counted.differ == 0)
    }
}

/// One claim.
pub(super) struct Check {
    claim: String,
    /// Whether it runs on simulated devices, not on those of the place.
    is_simulated: bool,
    run: fn(&Subject, &Place) -> Result<Found>,
}

impl Check {
    /// Runs it. What goes wrong on the way is a claim that does not hold.
    pub fn run(&self, subject: &Subject, place: &Place) -> Comparison {
        let start = Instant::now();
        let found = (self.run)(subject, place).unwrap_or_else(|error| {
            Found::counted(Vec::new(), Some(format!("a run failed: {error}")))
        });
        let outcome = match (found.skipped, found.holds()) {
            (true, _) => Outcome::Skipped,
            (false, true) => Outcome::Holds,
            (false, false) => Outcome::Differs,
        };
        Comparison {
            claim: self.claim.clone(),
            subject: subject.name.clone(),
            place: if self.is_simulated {
                "simulated".to_owned()
            } else {
                place.name().to_owned()
            },
            outcome,
            counted: found.counted,
            largest: found.largest,
            bound: found.bound,
            note: found.note,
            seconds: start.elapsed().as_secs_f64(),
        }
    }
}

/// All claims, in the order in which they build on each other.
pub(super) fn all(place: &Place) -> Vec<Check> {
    let check = |claim: &str, is_simulated, run: fn(&Subject, &Place) -> Result<Found>| Check {
        claim: claim.to_owned(),
        is_simulated,
        run,
    };
    let many = place.many().map_or(MANY, |devices| devices.len());
    vec![
        check("engine = plain loop", false, engine_is_plain),
        check(&format!("1 worker = {many} workers"), false, any_workers),
        check("stage grain = layer grain", false, any_grain),
        check("kept = computed again", false, any_keeping),
        check("weights first = in one pass", false, any_passes),
        check("resident = offloaded", false, any_residence),
        check("resident = offloaded", true, simulated_residence),
        check("every copy is ordered", true, order),
        check("resumed = uninterrupted", false, resumed),
        check("packed = unpacked rows", false, packed),
        check("GPU = processor, within bf16's noise", false, gpu),
        check("memory used = memory promised", true, worker_memory),
        check("host memory used = promised", false, host_memory),
    ]
}

/// The plainest way of the engine, at lag 0, gives what a loop without one gives. A tied head has a
/// gradient of its own in the engine and none in such a loop, so here head and embedding are two.
fn engine_is_plain(subject: &Subject, place: &Place) -> Result<Found> {
    let subject = &subject.untied()?;
    let device = place.one()?.remove(0);
    let room = memory(subject, &*device);
    let want = plain::run(subject, device, room)?;
    let got = Way::plainest(place.one()?, Lag::Zero).run(subject)?;
    Found::exact(&want, &got.without(&[Kind::Masters, Kind::Moments]))
}

fn any_workers(subject: &Subject, place: &Place) -> Result<Found> {
    let one = Way::plainest(place.one()?, Lag::One).run(subject)?;
    let many = Way {
        stages: Some(subject.layers().min(4)),
        ..Way::usual(place.many()?, Lag::One)
    };
    Found::exact(&one, &many.run(subject)?)
}

fn any_grain(subject: &Subject, place: &Place) -> Result<Found> {
    let stage = Way {
        stages: Some(2),
        ..Way::usual(place.one()?, Lag::Zero)
    };
    let layer = Way {
        devices: place.one()?,
        grain: Grain::Layer,
        ..stage.clone()
    };
    Found::exact(&stage.run(subject)?, &layer.run(subject)?)
}

/// Results of forwards are kept for their recompute where there is room, or none is.
fn any_keeping(subject: &Subject, place: &Place) -> Result<Found> {
    let kept = Way {
        stages: Some(2),
        ..Way::usual(place.one()?, Lag::Zero)
    };
    let again = Way {
        devices: place.one()?,
        recompute_all: true,
        ..kept.clone()
    };
    Found::exact(&kept.run(subject)?, &again.run(subject)?)
}

/// Updates write weights first and moments behind all of them, or both together.
fn any_passes(subject: &Subject, place: &Place) -> Result<Found> {
    let together = Way {
        weights_first: Some(false),
        ..Way::plainest(place.one()?, Lag::Zero)
    };
    let apart = Way {
        weights_first: Some(true),
        ..Way::usual(place.many()?, Lag::Zero)
    };
    Found::exact(&together.run(subject)?, &apart.run(subject)?)
}

/// Everything stays on the worker, or nothing does.
fn any_residence(subject: &Subject, place: &Place) -> Result<Found> {
    let resident = Way {
        stages: Some(1),
        resident: true,
        ..Way::usual(place.one()?, Lag::Zero)
    };
    let offloaded = Way {
        stages: Some(subject.layers()),
        keep: Some(Bytes(0)),
        ..Way::usual(place.many()?, Lag::Zero)
    };
    Found::exact(&resident.run(subject)?, &offloaded.run(subject)?)
}

/// The same where a device has memory of its own, also without a GPU.
fn simulated_residence(subject: &Subject, _: &Place) -> Result<Found> {
    let run = |stages, workers, keep| -> Result<Trail> {
        let (world, devices) = simulated(1, workers)?;
        let way = Way {
            stages: Some(stages),
            keep,
            resident: workers == 1,
            ..Way::usual(devices, Lag::Zero)
        };
        let trail = way.run(subject)?;
        world.fence_all()?;
        Ok(trail)
    };
    let resident = run(1, 1, None)?;
    Found::exact(&resident, &run(subject.layers(), 2, Some(Bytes(0)))?)
}

/// On simulated devices with seeded delays, every access comes behind the last write.
fn order(subject: &Subject, _: &Place) -> Result<Found> {
    let mut accesses = 0;
    let mut races = Vec::new();
    let mut failed = None;
    for seed in 0..subject.seeds {
        let (world, devices) = simulated(seed, 2)?;
        let way = Way {
            stages: Some(subject.layers().min(4)),
            keep: (seed % 2 == 0).then_some(Bytes(0)),
            ..Way::usual(devices, Lag::One)
        };
        if let Err(error) = way.run(subject) {
            failed.get_or_insert(error);
        }
        accesses += world.timeline().len() as u64;
        races.extend(world.races());
    }
    let counted = Counted {
        kind: Kind::Accesses,
        values: accesses,
        differ: races.len() as u64,
    };
    let note = races
        .first()
        .map(|race| format!("{} is not ordered after {}", race.second, race.first));
    match (note, failed) {
        (None, Some(error)) => Err(error),
        (note, _) => Ok(Found::counted(vec![counted], note)),
    }
}

/// A folder for a checkpoint, which is removed.
pub(super) struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("roundpipe-verify-{}-{number}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What is left would only be in the way of another run of the same number.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A run that was stopped behind half of its steps and goes on elsewhere, from its checkpoint.
fn resumed(subject: &Subject, place: &Place) -> Result<Found> {
    let scratch = Scratch::new();
    resumed_through(subject, place, &scratch.0, &|_| Ok(()))
}

/// The same, with something done to the engine that goes on.
pub(super) fn resumed_through(
    subject: &Subject,
    place: &Place,
    folder: &Path,
    between: &dyn Fn(&RoundPipe) -> Result<()>,
) -> Result<Found> {
    let lag = Lag::One;
    let way = Way::usual(place.one()?, lag);
    let half = subject.half;
    let mut whole = way.run(subject)?;
    whole.losses.drain(..half as usize);
    {
        let model = subject.model()?;
        let engine = way.engine(subject, &model)?;
        let steps = 0..half;
        for step in steps {
            engine.train(subject.batch(step)?).run()?;
            engine.update(&super::way::update(), lag)?;
        }
        engine.save(folder, "")?.wait()?;
    }
    let model = subject.model()?;
    let engine = Way::usual(place.many()?, lag).engine(subject, &model)?;
    engine.restore(folder)?;
    between(&engine)?;
    let rest = run_steps(&engine, &model, subject, half..2 * half, lag)?;
    Found::exact(&whole, &rest)
}

/// The same rows beside each other, and behind each other in one row, in f32.
fn packed(subject: &Subject, place: &Place) -> Result<Found> {
    let way = Way::usual(place.one()?, Lag::Zero);
    let model = subject.wide_model()?;
    let unpacked = one_step(&way, subject, &model, subject.batch(0)?)?;
    let packed = one_step(&way, subject, &model, subject.packed(0)?)?;
    let (unpacked_values, packed_values) = (unpacked.gradients()?, packed.gradients()?);
    let loss = relative_difference(&packed.losses, &unpacked.losses);
    let difference = relative_difference(&packed_values, &unpacked_values).max(loss);
    let note = "of the gradients' norm in f32".to_owned();
    let values = unpacked_values.len() as u64 + 1;
    Ok(Found::bounded(values, difference, PACKED_BOUND, note))
}

/// One step in bf16 on both, each beside the same step in f32 on the processor.
fn gpu(subject: &Subject, place: &Place) -> Result<Found> {
    if !place.has_gpu {
        return Ok(Found::skipped("there is no GPU to compare"));
    }
    let host = Place::open(Some("cpu"))?;
    let run = |place: &Place, model: &Model| -> Result<Vec<f64>> {
        let way = Way::usual(place.one()?, Lag::Zero);
        one_step(&way, subject, model, subject.batch(0)?)?.gradients()
    };
    let exact = run(&host, &subject.wide_model()?)?;
    let floor = relative_difference(&run(&host, &subject.still_model()?)?, &exact);
    let on_gpu = relative_difference(&run(place, &subject.still_model()?)?, &exact);
    let note = format!(
        "from f32, of the gradients' norm; the processor's bf16 is {floor:.1e} away, {NOISE_FACTOR} times that is allowed"
    );
    let values = exact.len() as u64;
    Ok(Found::bounded(values, on_gpu, NOISE_FACTOR * floor, note))
}

/// The peak of a worker's memory, stated beforehand by devices that only count.
fn worker_memory(subject: &Subject, _: &Place) -> Result<Found> {
    let mut sizes = Sizes::new(0);
    for stages in [1, subject.layers().min(3), subject.layers()] {
        for grain in [Grain::Stage, Grain::Layer] {
            let (_world, computes) = simulated(0, 1)?;
            let counts: Arc<dyn Device> = Meta::like(computes[0].cost_model());
            let promised = peak(subject, stages, grain, counts)?;
            let used = peak(subject, stages, grain, computes[0].clone())?;
            sizes.compare(&format!("a worker with {stages} stages"), promised, used);
        }
    }
    Ok(sizes.found())
}

/// Sizes that were promised beside those that are used.
struct Sizes {
    /// Bytes that may be used beside what was promised.
    padding: u64,
    counted: Counted,
    /// Of what was used, the largest; or the first that does not agree.
    note: Option<(u64, String)>,
}

impl Sizes {
    fn new(padding: u64) -> Self {
        Self {
            padding,
            counted: Counted {
                kind: Kind::Bytes,
                values: 0,
                differ: 0,
            },
            note: None,
        }
    }

    fn compare(&mut self, name: &str, promised: u64, used: u64) {
        let agree = (promised..=promised.saturating_add(self.padding)).contains(&used);
        let weight = if agree { used } else { u64::MAX };
        self.counted.values += 1;
        self.counted.differ += u64::from(!agree);
        if self.note.as_ref().is_none_or(|(most, _)| weight > *most) {
            let line = format!("{name}: {promised} bytes promised, {used} used");
            self.note = Some((weight, line));
        }
    }

    fn found(self) -> Found {
        Found::counted(vec![self.counted], self.note.map(|(_, line)| line))
    }
}

/// Most memory that steps take of a worker, one job after another.
fn peak(subject: &Subject, stages: usize, grain: Grain, device: Arc<dyn Device>) -> Result<u64> {
    let model = subject.model()?;
    let way = Way {
        serial: true,
        stages: Some(stages),
        grain,
        ..Way::usual(vec![device], Lag::Zero)
    };
    let engine = way.engine(subject, &model)?;
    for step in 0..2 {
        // Without an update: devices that only count have no gradients to make one of.
        engine.train(subject.batch(step)?).run()?;
        engine.synchronize()?;
    }
    Ok(machine::worker_peaks(&engine)
        .into_iter()
        .max()
        .unwrap_or(0))
}

/// Host memory of the training state, as it is known before a run starts.
fn host_memory(subject: &Subject, place: &Place) -> Result<Found> {
    let model = subject.model()?;
    let promised = machine::training_budget(&model.layers, &subject.rule(), true);
    let way = Way::usual(place.one()?, Lag::One);
    let engine: RoundPipe = way.engine(subject, &model)?;
    run_steps(&engine, &model, subject, 0..1, Lag::One)?;
    let used = engine.host_bytes();
    let padding = PADDING * model.layers.named_params().len() as u64;
    let mut sizes = Sizes::new(padding);
    let weights = used.weights + used.frozen;
    sizes.compare("weights", promised.weights, weights as u64);
    sizes.compare("gradients", promised.gradients, used.gradients as u64);
    sizes.compare("masters", promised.masters, used.masters as u64);
    sizes.compare("moments", promised.moments, used.moments as u64);
    Ok(sizes.found())
}
