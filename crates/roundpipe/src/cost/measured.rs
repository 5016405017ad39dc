//! Measured times of layers, averaged into the costs of the next plan.
//!
//! A moving average per layer and phase; layers without a measurement keep their guess, brought to
//! the same unit. Nothing here measures: the engine records what its workers' clocks say.

use super::{LayerCost, LayerCosts};

/// Weight of the newest measurement.
const NEWEST: f64 = 0.2;

/// What of a layer was timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Its forward.
    Forward,
    /// Its forward again.
    Recompute,
    /// Its backward alone.
    Backward,
}

impl Phase {
    const ALL: [Self; 3] = [Self::Forward, Self::Recompute, Self::Backward];

    fn of(self, cost: &mut LayerCost) -> &mut f64 {
        match self {
            Self::Forward => &mut cost.forward_ms,
            Self::Recompute => &mut cost.recompute_ms,
            Self::Backward => &mut cost.backward_ms,
        }
    }

    fn guess(self, cost: &LayerCost) -> f64 {
        match self {
            Self::Forward => cost.forward_ms,
            Self::Recompute => cost.recompute_ms,
            Self::Backward => cost.backward_ms,
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
}

impl LayerTime {
    fn part(&self, part: Phase) -> Option<f64> {
        match part {
            Phase::Forward => self.forward_ms,
            Phase::Recompute => self.recompute_ms,
            Phase::Backward => self.backward_ms,
        }
    }

    fn part_mut(&mut self, part: Phase) -> &mut Option<f64> {
        match part {
            Phase::Forward => &mut self.forward_ms,
            Phase::Recompute => &mut self.recompute_ms,
            Phase::Backward => &mut self.backward_ms,
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
        let all = Scale::of(self, base, &Phase::ALL);
        for part in Phase::ALL {
            let scale = Scale::of(self, base, &[part])
                .or(all)
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
    /// have shares of their own, because each has its own cuts. Infinite if something took time
    /// that was planned to take none.
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

/// Each layer's forward visit and backward visit as a share of them all.
fn shares(costs: &LayerCosts) -> Vec<f64> {
    let visits = |layer: &LayerCost| [layer.forward_ms, layer.recompute_ms + layer.backward_ms];
    let times: Vec<f64> = costs.layers.iter().flat_map(visits).collect();
    let all: f64 = times.iter().sum();
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
}
