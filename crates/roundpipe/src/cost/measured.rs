//! Measured times of layers, averaged into the costs of the next plan.
//!
//! A moving average per layer and phase; layers without a measurement keep their guess, brought to
//! the same unit. Beside it, how fast each worker is relative to the others, and how fast copies
//! are. Nothing here measures: the engine records what its workers' clocks say.

use roundpipe_tensor::LaneKind;

use super::{LayerCost, LayerCosts};

/// Weight of the newest measurement.
const NEWEST: f64 = 0.2;
/// After so much measured time, what was before counts half.
const FORGET_MS: f64 = 10_000.0;
/// Workers whose speeds differ by less are alike.
const ALIKE: f64 = 1.1;
/// The smallest copy whose time says how fast a link is.
const SMALLEST_COPY: u64 = 1 << 20;

/// What of a layer was timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Its forward.
    Forward,
    /// Its forward again.
    Recompute,
    /// Its backward alone.
    Backward,
    /// The host's update of its parameters.
    Update,
}

impl Phase {
    const ALL: [Self; 4] = [Self::Forward, Self::Recompute, Self::Backward, Self::Update];
    /// What a worker does.
    const ON_WORKER: [Self; 3] = [Self::Forward, Self::Recompute, Self::Backward];

    fn of(self, cost: &mut LayerCost) -> &mut f64 {
        match self {
            Self::Forward => &mut cost.forward_ms,
            Self::Recompute => &mut cost.recompute_ms,
            Self::Backward => &mut cost.backward_ms,
            Self::Update => &mut cost.update_ms,
        }
    }

    fn guess(self, cost: &LayerCost) -> f64 {
        match self {
            Self::Forward => cost.forward_ms,
            Self::Recompute => cost.recompute_ms,
            Self::Backward => cost.backward_ms,
            Self::Update => cost.update_ms,
        }
    }
}

/// One layer's moving averages; nothing for what was never timed.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LayerTime {
    /// Its forward.
    pub forward_ms: Option<f64>,
    /// Its forward again.
    pub recompute_ms: Option<f64>,
    /// Its backward alone.
    pub backward_ms: Option<f64>,
    /// The host's update of its parameters.
    pub update_ms: Option<f64>,
}

impl LayerTime {
    fn part(&self, part: Phase) -> Option<f64> {
        match part {
            Phase::Forward => self.forward_ms,
            Phase::Recompute => self.recompute_ms,
            Phase::Backward => self.backward_ms,
            Phase::Update => self.update_ms,
        }
    }

    fn part_mut(&mut self, part: Phase) -> &mut Option<f64> {
        match part {
            Phase::Forward => &mut self.forward_ms,
            Phase::Recompute => &mut self.recompute_ms,
            Phase::Backward => &mut self.backward_ms,
            Phase::Update => &mut self.update_ms,
        }
    }
}

/// Moving averages of measured times per layer and microbatch: the newest measurement weighs a
/// fifth.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LayerTimes {
    layers: Vec<LayerTime>,
}

impl LayerTimes {
    /// Every layer up to the last that was timed.
    pub fn layers(&self) -> &[LayerTime] {
        &self.layers
    }

    /// The average of a layer so far, if it was ever timed.
    pub fn average_ms(&self, layer: usize, part: Phase) -> Option<f64> {
        self.layers.get(layer)?.part(part)
    }

    /// Takes a measurement in; one that is negative or not finite says nothing and is left out.
    pub fn record(&mut self, layer: usize, part: Phase, ms: f64) {
        if !(ms.is_finite() && ms >= 0.0) {
            return;
        }
        if self.layers.len() <= layer {
            self.layers.resize(layer + 1, LayerTime::default());
        }
        let average = self.layers[layer].part_mut(part);
        *average = Some(average.map_or(ms, |old| (1.0 - NEWEST) * old + NEWEST * ms));
    }

    /// `base` with measurements in the place of guesses. Guesses that stay are scaled by what the
    /// measured layers took relative to theirs, because a guess may have any unit. Layers beyond
    /// `base` are left out.
    pub fn to_costs(&self, base: &LayerCosts) -> LayerCosts {
        let mut costs = base.clone();
        let all = Scale::of(self, base, &Phase::ON_WORKER);
        for part in Phase::ALL {
            // The host's speed says nothing about a worker's, nor the other way round.
            let alike = all.filter(|_| part != Phase::Update);
            let scale = Scale::of(self, base, &[part])
                .or(alike)
                .map_or(1.0, |scale| scale.0);
            for (index, cost) in costs.layers.iter_mut().enumerate() {
                let measured = self.layers.get(index).and_then(|layer| layer.part(part));
                let ms = part.of(cost);
                *ms = measured.unwrap_or(*ms * scale);
            }
        }
        costs
    }

    /// How far a plan made from `planned` is from what was measured: the largest change of a
    /// layer's share of all time, relative to its planned share. Forward visits and backward visits
    /// have shares of their own, because each has its own cuts; the update of all layers has one.
    /// Infinite if something took time that was planned to take none.
    pub fn drift(&self, planned: &LayerCosts) -> f64 {
        let (now, then) = (shares(&self.to_costs(planned)), shares(planned));
        let change = |(now, then): (f64, f64)| {
            if now == then {
                0.0
            } else {
                (now - then).abs() / then
            }
        };
        now.into_iter().zip(then).map(change).fold(0.0, f64::max)
    }
}

/// Work that a worker did, in the time of an average worker and in its own.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Pace {
    average_ms: f64,
    own_ms: f64,
}

/// How fast the workers of a ring are, relative to their average.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct WorkerSpeeds {
    paces: Vec<Pace>,
}

impl WorkerSpeeds {
    /// A worker took `own_ms` for what takes `average_ms` on average.
    pub fn record(&mut self, worker: usize, average_ms: f64, own_ms: f64) {
        if !(average_ms.is_finite() && own_ms.is_finite() && average_ms >= 0.0 && own_ms >= 0.0) {
            return;
        }
        if self.paces.len() <= worker {
            self.paces.resize(worker + 1, Pace::default());
        }
        let pace = &mut self.paces[worker];
        if pace.own_ms > FORGET_MS {
            pace.average_ms /= 2.0;
            pace.own_ms /= 2.0;
        }
        pace.average_ms += average_ms;
        pace.own_ms += own_ms;
    }

    /// One speed for each of `workers`, or none if they are alike or not all were measured.
    pub fn of(&self, workers: usize) -> Vec<f64> {
        let measured = self.paces.iter().filter(|pace| pace.own_ms > 0.0);
        let speeds: Vec<f64> = measured.map(|pace| pace.average_ms / pace.own_ms).collect();
        let slowest = speeds.iter().copied().fold(f64::INFINITY, f64::min);
        let fastest = speeds.iter().copied().fold(0.0, f64::max);
        let are_alike = fastest <= slowest * ALIKE;
        if speeds.len() != workers || slowest <= 0.0 || are_alike {
            return Vec::new();
        }
        speeds
    }
}

/// Bytes and the time they took.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Copied {
    bytes: f64,
    ms: f64,
}

/// How fast copies are in each lane. Small copies are left out: they take as long as their launch.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CopyRates {
    lanes: [Copied; LaneKind::ALL.len()],
}

impl CopyRates {
    /// A copy of `bytes` took `ms`.
    pub fn record(&mut self, lane: LaneKind, bytes: u64, ms: f64) {
        if bytes < SMALLEST_COPY || !(ms.is_finite() && ms > 0.0) {
            return;
        }
        let copied = &mut self.lanes[lane as usize];
        if copied.ms > FORGET_MS {
            copied.bytes /= 2.0;
            copied.ms /= 2.0;
        }
        copied.bytes += bytes as f64;
        copied.ms += ms;
    }

    /// Bytes per millisecond in a lane, if any copy was measured there.
    pub fn bytes_per_ms(&self, lane: LaneKind) -> Option<f64> {
        let copied = self.lanes[lane as usize];
        (copied.ms > 0.0).then(|| copied.bytes / copied.ms)
    }

    /// Bytes per millisecond all the way from one worker to another, through host memory.
    pub fn hop_bytes_per_ms(&self) -> Option<f64> {
        let down = self.bytes_per_ms(LaneKind::ActivationDownload)?;
        let up = self.bytes_per_ms(LaneKind::ActivationUpload)?;
        Some(1.0 / (1.0 / down + 1.0 / up))
    }

    /// How far a rate of a lane has moved since `earlier`, relative to it. Infinite for a lane that
    /// was not known then.
    pub fn drift(&self, earlier: &Self) -> f64 {
        let change = |lane: &LaneKind| match (self.bytes_per_ms(*lane), earlier.bytes_per_ms(*lane))
        {
            (Some(now), Some(then)) => (now - then).abs() / then,
            (Some(_), None) => f64::INFINITY,
            (None, _) => 0.0,
        };
        LaneKind::ALL.iter().map(change).fold(0.0, f64::max)
    }
}

/// Measured time over guessed time, of the layers that were measured.
#[derive(Clone, Copy)]
struct Scale(f64);

impl Scale {
    fn of(times: &LayerTimes, base: &LayerCosts, phases: &[Phase]) -> Option<Self> {
        let (mut measured, mut guessed) = (0.0, 0.0);
        for (layer, cost) in times.layers.iter().zip(&base.layers) {
            for part in phases {
                if let Some(ms) = layer.part(*part) {
                    measured += ms;
                    guessed += part.guess(cost);
                }
            }
        }
        (guessed > 0.0).then(|| Self(measured / guessed))
    }
}

/// Each layer's forward visit and backward visit as a share of them all, and the whole update
/// beside them.
fn shares(costs: &LayerCosts) -> Vec<f64> {
    let visits = |layer: &LayerCost| [layer.forward_ms, layer.recompute_ms + layer.backward_ms];
    let mut times: Vec<f64> = costs.layers.iter().flat_map(visits).collect();
    let all: f64 = times.iter().sum();
    times.push(costs.update_ms(0..costs.len()));
    times
        .into_iter()
        .map(|ms| if all > 0.0 { ms / all } else { 0.0 })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_time_is_no_measurement() {
        let mut odd = LayerTimes::default();
        for ms in [f64::NAN, -1.0, f64::INFINITY] {
            odd.record(0, Phase::Forward, ms);
        }
        assert_eq!(
            odd,
            LayerTimes::default(),
            "what is no time is no measurement"
        );
    }

    /// Measurements replace guesses, and the guesses that stay are brought to the same unit.
    #[test]
    fn measurements_replace_guesses() {
        let base = LayerCosts::from_bytes([("a", 100), ("b", 300), ("c", 200)]);
        let mut times = LayerTimes::default();
        assert_eq!(times.to_costs(&base), base);
        times.record(0, Phase::Forward, 1.0);
        times.record(1, Phase::Forward, 7.0);
        times.record(0, Phase::Backward, 4.0);
        let costs = times.to_costs(&base);
        let forward: Vec<f64> = costs.layers.iter().map(|layer| layer.forward_ms).collect();
        assert_eq!(
            forward,
            [1.0, 7.0, 4.0],
            "8 ms for 400 guessed, so 4 for 200"
        );
        let backward: Vec<f64> = costs.layers.iter().map(|layer| layer.backward_ms).collect();
        assert_eq!(backward, [4.0, 12.0, 8.0]);
        // Nothing of recompute was timed: 12 ms for 600 guessed in all.
        let recompute: Vec<f64> = costs
            .layers
            .iter()
            .map(|layer| layer.recompute_ms)
            .collect();
        assert_eq!(recompute, [2.0, 6.0, 4.0]);
        times.record(9, Phase::Forward, 1e9);
        assert_eq!(
            times.to_costs(&base),
            costs,
            "a layer that the model does not have changes nothing"
        );
    }

    /// Drift sees shares, not units: equal proportions are no drift, a layer that doubles is one.
    #[test]
    fn drift_is_a_change_of_shares() {
        let base = LayerCosts::from_bytes([("a", 10), ("b", 10), ("c", 20)]);
        let mut times = LayerTimes::default();
        assert_eq!(times.drift(&base), 0.0);
        for (layer, ms) in [(0, 1.0), (1, 1.0), (2, 2.0)] {
            times.record(layer, Phase::Forward, ms);
            times.record(layer, Phase::Recompute, ms);
            times.record(layer, Phase::Backward, 2.0 * ms);
        }
        assert!(times.drift(&base) < 1e-12, "{}", times.drift(&base));
        let measured = times.to_costs(&base);
        times.record(0, Phase::Forward, 6.0);
        // 1 ms became 2 ms of 17 ms where it was 1 of 16.
        assert!((times.drift(&measured) - (2.0 / 17.0 * 16.0 - 1.0)).abs() < 1e-12);
        let nothing = LayerCosts::from_bytes([("a", 0), ("b", 10), ("c", 20)]);
        assert_eq!(times.drift(&nothing), f64::INFINITY);
    }

    /// How fast workers are says nothing about the host's update, and the plan is made again when
    /// the update's share of a step has changed.
    #[test]
    fn updates_have_their_own_unit() {
        let mut base = LayerCosts::from_bytes([("a", 100), ("b", 300)]);
        for layer in &mut base.layers {
            layer.update_ms = 10.0;
        }
        let mut times = LayerTimes::default();
        for part in Phase::ON_WORKER {
            let factor = if part == Phase::Backward { 2.0 } else { 1.0 };
            times.record(0, part, factor * 1.0);
            times.record(1, part, factor * 3.0);
        }
        let updates = |times: &LayerTimes| {
            let costs = times.to_costs(&base);
            [costs.layers[0].update_ms, costs.layers[1].update_ms]
        };
        assert_eq!(updates(&times), [10.0, 10.0]);
        let planned = times.to_costs(&base);
        assert_eq!(times.drift(&planned), 0.0);
        times.record(1, Phase::Update, 30.0);
        assert_eq!(updates(&times), [30.0, 30.0]);
        assert_eq!(times.drift(&planned), 2.0, "20 ms became 60");
    }

    #[test]
    fn copies_of_some_size_say_how_fast_a_link_is() {
        let mut rates = CopyRates::default();
        assert_eq!(rates.bytes_per_ms(LaneKind::ParamUpload), None);
        rates.record(LaneKind::ParamUpload, 1 << 10, 5.0);
        rates.record(LaneKind::ParamUpload, 4 << 20, f64::NAN);
        assert_eq!(rates.bytes_per_ms(LaneKind::ParamUpload), None);
        let before = rates.clone();
        rates.record(LaneKind::ParamUpload, 4 << 20, 1.0);
        rates.record(LaneKind::ParamUpload, 2 << 20, 2.0);
        let expected = f64::from(2 << 20);
        assert_eq!(rates.bytes_per_ms(LaneKind::ParamUpload), Some(expected));
        assert_eq!(rates.drift(&before), f64::INFINITY, "it was not known");
        assert_eq!(rates.drift(&rates), 0.0);
        assert_eq!(rates.hop_bytes_per_ms(), None, "one way is not enough");
        rates.record(LaneKind::ActivationUpload, 2 << 20, 1.0);
        rates.record(LaneKind::ActivationDownload, 2 << 20, 1.0);
        assert_eq!(rates.hop_bytes_per_ms(), Some(f64::from(1 << 20)));
    }

    #[test]
    fn workers_of_different_speed_are_told_apart() {
        let mut speeds = WorkerSpeeds::default();
        for worker in 0..2 {
            speeds.record(worker, 10.0, 10.0 + 0.2 * worker as f64);
        }
        assert!(speeds.of(2).is_empty(), "alike");
        speeds.record(1, 10.0, 30.0);
        let found = speeds.of(2);
        assert_eq!(found.len(), 2);
        assert!(
            found[0] == 1.0 && (0.4..0.6).contains(&found[1]),
            "{found:?}"
        );
        assert!(speeds.of(3).is_empty(), "one was never measured");
    }
}
