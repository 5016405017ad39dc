//! The figures that RoundPipe's authors published for 8 GPUs and 16 microbatches: times per layer
//! measured on RTX 4090, the plans they simulated, and the bubbles they got.

use crate::cost::{LayerCost, LayerCosts};
use crate::plan::{ExecutePlan, PlanKind};

/// Devices of the published simulation.
pub const DEVICES: usize = 8;
/// Its microbatches.
pub const MICROBATCHES: usize = 16;

/// One model.
#[derive(Debug)]
pub struct Model {
    /// What it is called.
    pub name: &'static str,
    layers: usize,
    forward_ms: f64,
    backward_ms: f64,
    head_forward_ms: f64,
    head_backward_ms: f64,
    hop_ms: f64,
    /// Runs of (stages, layers each); the head is not counted.
    forward: &'static [(usize, usize)],
    backward: &'static [(usize, usize)],
    single: &'static [(usize, usize)],
    looped: &'static [(usize, usize)],
    /// Bubbles in percent.
    pub sync: f64,
    /// Bubble without fill and drain, in percent.
    pub overlapped: f64,
    /// Bubbles of other schedules, in percent.
    pub gpipe: f64,
    /// One forward, one backward.
    pub one_f_one_b: f64,
    /// Interleaved 1F1B.
    pub interleaved: f64,
    /// Looped BFS.
    pub looped_bfs: f64,
}

impl Model {
    /// Every layer and the head, which keeps what its backward needs.
    pub fn costs(&self) -> LayerCosts {
        let layer = |index| LayerCost {
            name: format!("block {index}"),
            forward_ms: self.forward_ms,
            recompute_ms: self.forward_ms,
            backward_ms: self.backward_ms,
            bytes: 1,
            hop_ms: self.hop_ms,
            ..LayerCost::default()
        };
        let head = LayerCost {
            name: "head".to_string(),
            forward_ms: self.head_forward_ms,
            recompute_ms: 0.0,
            backward_ms: self.head_backward_ms,
            bytes: 1,
            hop_ms: self.hop_ms,
            ..LayerCost::default()
        };
        LayerCosts {
            layers: (0..self.layers).map(layer).chain([head]).collect(),
        }
    }

    /// RoundPipe's published plan: the head alone is the fused stage.
    pub fn plan(&self) -> ExecutePlan {
        let backward: Vec<usize> = std::iter::once(1).chain(sizes(self.backward)).collect();
        ExecutePlan::from_sizes(PlanKind::Fused, &sizes(self.forward), &backward)
    }

    /// One stage per device, the head with the last.
    pub fn single(&self) -> ExecutePlan {
        self.bound(self.single)
    }

    /// Several stages per device, the head with the last.
    pub fn looped(&self) -> ExecutePlan {
        self.bound(self.looped)
    }

    fn bound(&self, runs: &[(usize, usize)]) -> ExecutePlan {
        let mut sizes = sizes(runs);
        if let Some(last) = sizes.last_mut() {
            *last += 1;
        }
        ExecutePlan::from_sizes(PlanKind::Infer, &sizes, &[])
    }
}

fn sizes(runs: &[(usize, usize)]) -> Vec<usize> {
    runs.iter()
        .flat_map(|&(stages, layers)| std::iter::repeat_n(layers, stages))
        .collect()
}

/// All published models.
pub const MODELS: [Model; 5] = [
    Model {
        name: "Qwen3-1.7B",
        layers: 28,
        forward_ms: 7.429,
        backward_ms: 15.831,
        head_forward_ms: 22.07,
        head_backward_ms: 43.71,
        hop_ms: 1.6,
        forward: &[(4, 7)],
        backward: &[(8, 3), (2, 2)],
        single: &[(2, 3), (5, 4), (1, 2)],
        looped: &[(18, 1), (5, 2), (1, 0)],
        sync: 19.07,
        overlapped: 4.05,
        gpipe: 36.1,
        one_f_one_b: 35.2,
        interleaved: 27.8,
        looped_bfs: 25.0,
    },
    Model {
        name: "Llama3.1-8B",
        layers: 32,
        forward_ms: 18.504,
        backward_ms: 41.207,
        head_forward_ms: 37.23,
        head_backward_ms: 74.50,
        hop_ms: 3.2,
        forward: &[(4, 5), (2, 6)],
        backward: &[(16, 2)],
        single: &[(8, 4)],
        looped: &[(32, 1)],
        sync: 14.28,
        overlapped: 1.29,
        gpipe: 42.1,
        one_f_one_b: 42.1,
        interleaved: 30.6,
        looped_bfs: 29.2,
    },
    Model {
        name: "GPT-OSS-20B",
        layers: 24,
        forward_ms: 21.645,
        backward_ms: 81.781,
        head_forward_ms: 44.29,
        head_backward_ms: 86.26,
        hop_ms: 2.25,
        forward: &[(1, 4), (4, 5)],
        backward: &[(24, 1)],
        single: &[(8, 3)],
        looped: &[(24, 1)],
        sync: 13.98,
        overlapped: 3.30,
        gpipe: 41.7,
        one_f_one_b: 41.7,
        interleaved: 30.9,
        looped_bfs: 30.4,
    },
    Model {
        name: "Qwen3-32B",
        layers: 64,
        forward_ms: 40.561,
        backward_ms: 91.174,
        head_forward_ms: 54.93,
        head_backward_ms: 108.29,
        hop_ms: 4.0,
        forward: &[(2, 2), (20, 3)],
        backward: &[(64, 1)],
        single: &[(8, 8)],
        looped: &[(64, 1)],
        sync: 6.67,
        overlapped: 2.65,
        gpipe: 34.9,
        one_f_one_b: 34.9,
        interleaved: 15.2,
        looped_bfs: 13.7,
    },
    Model {
        name: "Qwen3-235B",
        layers: 94,
        forward_ms: 43.016,
        backward_ms: 58.376,
        head_forward_ms: 42.44,
        head_backward_ms: 43.29,
        hop_ms: 3.2,
        forward: &[(47, 2)],
        backward: &[(94, 1)],
        single: &[(1, 11), (6, 12), (1, 11)],
        looped: &[(1, 0), (94, 1), (1, 0)],
        sync: 3.29,
        overlapped: 0.98,
        gpipe: 31.2,
        one_f_one_b: 31.2,
        interleaved: 6.0,
        looped_bfs: 4.4,
    },
];
