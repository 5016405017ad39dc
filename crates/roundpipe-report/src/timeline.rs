//! What the devices did in one step, small enough for a page.
//!
//! Spans of the engine's trace come in, a few lanes per device go out: first what it computed, then
//! its copies; the host's optimizer last. Adjacent spans of one stage, microbatch and pass become
//! one. Spans that name no stage (copies, updates) get that of the layer they belong to, so that a
//! stage has one colour on all lanes. Waits are left out: a gap shows them.
//!
//! # Invariants
//! - At most [`SPANS`] spans; beyond, smaller gaps are closed first, then microbatches are joined,
//!   then the shortest spans are left out and counted.
//! - Times are relative to the first span's start, and spans of a lane are in order.

use std::collections::BTreeMap;

use roundpipe::trace::{Category, Lane, Span};
use serde::{Deserialize, Serialize};

/// Spans that a page draws at most.
const SPANS: usize = 20_000;

/// The lanes of one step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// Which step it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// From the first span's start to the last one's end, in microseconds.
    pub us: f64,
    /// By device, the host last; compute before copies.
    pub lanes: Vec<TimelineLane>,
    /// Short spans for which there was no room.
    #[serde(default)]
    pub left_out: u64,
}

/// What one lane of a device did.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TimelineLane {
    /// The device's name, or `host`.
    pub device: String,
    /// The lane's, as traces show it: `compute`, `parameter upload`, `optimizer`.
    pub kind: String,
    /// In the order they began.
    pub spans: Vec<TimelineSpan>,
}

/// Something that took time on a lane.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TimelineSpan {
    /// When it began, in microseconds.
    pub start_us: f64,
    /// How long it took, in microseconds.
    pub us: f64,
    /// The stage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<u64>,
    /// The lowest layer in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<u64>,
    /// The highest layer in it, where that is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_layer: Option<u64>,
    /// The microbatch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub microbatch: Option<u64>,
    /// What was done, as traces show it: `forward`, `backward`, `transfer`.
    pub category: String,
    /// What it moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

impl Timeline {
    /// Of the spans of one step: clear the trace before it, take its spans behind it.
    pub fn from_spans(spans: &[Span]) -> Self {
        Self::bounded(spans, SPANS)
    }

    /// The same with the step's number.
    #[must_use]
    pub fn at_step(mut self, step: u64) -> Self {
        self.step = Some(step);
        self
    }

    fn bounded(spans: &[Span], limit: usize) -> Self {
        let shown = || spans.iter().filter(|span| span.category != Category::Wait);
        let Some(origin_ns) = shown().map(|span| span.start_ns).min() else {
            return Self::default();
        };
        let end_ns = shown().map(|span| span.end_ns).max().unwrap_or(origin_ns);
        let total_ns = end_ns.saturating_sub(origin_ns);
        let stages = Stages::of(spans);
        let mut lanes: Lanes = BTreeMap::new();
        for span in shown() {
            let lane = lanes.entry((span.track.worker, span.track.lane));
            let (_, pieces) = lane.or_insert_with(|| (span.track.worker_name.clone(), Vec::new()));
            pieces.push(Piece::of(span, &stages));
        }
        for (_, pieces) in lanes.values_mut() {
            pieces.sort_by_key(|piece| (piece.start_ns, piece.end_ns));
        }
        let left_out = reduce(&mut lanes, total_ns, limit);
        let lanes = lanes
            .into_iter()
            .filter(|(_, (_, pieces))| !pieces.is_empty());
        Self {
            step: None,
            us: total_ns as f64 / 1e3,
            lanes: lanes
                .map(|((_, lane), (device, pieces))| TimelineLane {
                    device,
                    kind: lane.name().to_owned(),
                    spans: pieces.iter().map(|piece| piece.shown(origin_ns)).collect(),
                })
                .collect(),
            left_out,
        }
    }
}

/// Spans by worker and lane, with the worker's name.
type Lanes = BTreeMap<(usize, Lane), (String, Vec<Piece>)>;

/// Makes spans fewer until there are at most `limit`; says how many it had to leave out.
fn reduce(lanes: &mut Lanes, total_ns: u64, limit: usize) -> u64 {
    let mut join = Join {
        gap_ns: total_ns / 5_000,
        whole_stages: false,
    };
    loop {
        for (_, pieces) in lanes.values_mut() {
            join.apply(pieces);
        }
        let count: usize = lanes.values().map(|(_, pieces)| pieces.len()).sum();
        if count <= limit {
            return 0;
        }
        if join.gap_ns < total_ns / 200 {
            join.gap_ns = 2 * join.gap_ns + 1;
        } else if !join.whole_stages {
            join.whole_stages = true;
        } else {
            return drop_shortest(lanes, count - limit);
        }
    }
}

fn drop_shortest(lanes: &mut Lanes, count: usize) -> u64 {
    let pieces = lanes.values().flat_map(|(_, pieces)| pieces);
    let mut lengths: Vec<u64> = pieces.map(Piece::ns).collect();
    lengths.sort_unstable();
    let longest_dropped = lengths[count - 1];
    let mut left = count;
    for (_, pieces) in lanes.values_mut() {
        pieces.retain(|piece| {
            let drop = left > 0 && piece.ns() <= longest_dropped;
            left -= usize::from(drop);
            !drop
        });
    }
    (count - left) as u64
}

/// A stage that computes a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Use {
    start_ns: u64,
    stage: usize,
    layer: usize,
}

/// Which stage a layer belongs to, from the spans that say so.
struct Stages<'a> {
    /// By worker and the layer's name, in the order of time.
    by_name: BTreeMap<(usize, &'a str), Vec<Use>>,
    /// The stage of each layer's backward, or of its forward where there is none.
    by_layer: BTreeMap<usize, usize>,
}

impl<'a> Stages<'a> {
    fn of(spans: &'a [Span]) -> Self {
        let mut stages = Self {
            by_name: BTreeMap::new(),
            by_layer: BTreeMap::new(),
        };
        for span in spans {
            let (Some(stage), Some(layer)) = (span.stage, span.layer) else {
                continue;
            };
            let key = (span.track.worker, span.name.as_str());
            let uses = stages.by_name.entry(key).or_default();
            uses.push(Use {
                start_ns: span.start_ns,
                stage,
                layer,
            });
            let is_forward = span.category == Category::Forward;
            if !is_forward || !stages.by_layer.contains_key(&layer) {
                stages.by_layer.insert(layer, stage);
            }
        }
        for uses in stages.by_name.values_mut() {
            uses.sort_unstable();
        }
        stages
    }

    /// The stage and layer of a span: its own, or for an upload those of the layer's next use on the
    /// same worker, or for an update those of the layer's backward.
    fn find(&self, span: &Span) -> (Option<usize>, Option<usize>) {
        if span.stage.is_some() {
            return (span.stage, span.layer);
        }
        if let Some(layer) = span.layer {
            return (self.by_layer.get(&layer).copied(), span.layer);
        }
        let uses = self.by_name.get(&(span.track.worker, span.name.as_str()));
        let next = uses.and_then(|uses| {
            let next = uses.partition_point(|used| used.start_ns < span.start_ns);
            uses.get(next).or(uses.last())
        });
        (next.map(|used| used.stage), next.map(|used| used.layer))
    }
}

/// A span on its way into a lane.
struct Piece {
    start_ns: u64,
    end_ns: u64,
    stage: Option<usize>,
    layers: Option<(usize, usize)>,
    microbatch: Option<usize>,
    category: Category,
    bytes: Option<u64>,
}

impl Piece {
    fn of(span: &Span, stages: &Stages<'_>) -> Self {
        let (stage, layer) = stages.find(span);
        Self {
            start_ns: span.start_ns,
            end_ns: span.end_ns.max(span.start_ns),
            stage,
            layers: layer.map(|layer| (layer, layer)),
            microbatch: span.microbatch,
            category: span.category,
            bytes: span.bytes,
        }
    }

    fn ns(&self) -> u64 {
        self.end_ns - self.start_ns
    }

    fn take_in(&mut self, next: &Piece) {
        self.end_ns = self.end_ns.max(next.end_ns);
        self.layers = match (self.layers, next.layers) {
            (Some((low, high)), Some((next_low, next_high))) => {
                Some((low.min(next_low), high.max(next_high)))
            }
            (layers, None) | (None, layers) => layers,
        };
        if self.microbatch != next.microbatch {
            self.microbatch = None;
        }
        if self.category != next.category {
            self.category = Category::Backward;
        }
        if self.bytes.is_some() || next.bytes.is_some() {
            let (own, more) = (self.bytes.unwrap_or(0), next.bytes.unwrap_or(0));
            self.bytes = Some(own.saturating_add(more));
        }
    }

    fn shown(&self, origin_ns: u64) -> TimelineSpan {
        let number = |number: usize| number as u64;
        let last_layer = self.layers.filter(|(low, high)| low != high);
        TimelineSpan {
            start_us: (self.start_ns - origin_ns) as f64 / 1e3,
            us: self.ns() as f64 / 1e3,
            stage: self.stage.map(number),
            layer: self.layers.map(|(low, _)| number(low)),
            last_layer: last_layer.map(|(_, high)| number(high)),
            microbatch: self.microbatch.map(number),
            category: self.category.name().to_owned(),
            bytes: self.bytes,
        }
    }
}

/// Which neighbours become one.
struct Join {
    /// The largest gap between them.
    gap_ns: u64,
    /// Whether all microbatches and passes of a stage do.
    whole_stages: bool,
}

impl Join {
    fn apply(&self, pieces: &mut Vec<Piece>) {
        pieces.dedup_by(|next, piece| {
            let joined = self.fits(piece, next);
            if joined {
                piece.take_in(next);
            }
            joined
        });
    }

    fn fits(&self, piece: &Piece, next: &Piece) -> bool {
        let same_work = piece.microbatch == next.microbatch && piece.category == next.category;
        piece.stage == next.stage
            && next.start_ns.saturating_sub(piece.end_ns) <= self.gap_ns
            && (self.whole_stages || same_work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use roundpipe::trace::Track;

    fn span(worker: usize, lane: Lane, category: Category, start_ns: u64, end_ns: u64) -> Span {
        let name = if worker == usize::MAX {
            "host".to_owned()
        } else {
            format!("cuda:{worker}")
        };
        Span {
            track: Track {
                worker,
                worker_name: name,
                lane,
            },
            name: "block".to_owned(),
            category,
            start_ns,
            end_ns,
            call: 1,
            stage: None,
            layer: None,
            microbatch: None,
            bytes: None,
        }
    }

    fn work(worker: usize, stage: usize, layer: usize, microbatch: usize, at: u64) -> Span {
        Span {
            name: format!("layer {layer}"),
            stage: Some(stage),
            layer: Some(layer),
            microbatch: Some(microbatch),
            ..span(worker, Lane::Compute, Category::Forward, at, at + 1_000)
        }
    }

    /// Layers of one stage and microbatch are one span; stages, microbatches and gaps part them.
    #[test]
    fn neighbours_of_a_stage_become_one() {
        let spans = [
            work(0, 0, 1, 0, 6_000),
            work(0, 0, 0, 0, 5_000),
            work(0, 0, 0, 1, 7_000),
            work(0, 2, 4, 1, 8_000),
            work(0, 2, 5, 1, 20_000),
            span(0, Lane::Compute, Category::Wait, 0, 90_000),
        ];
        let timeline = Timeline::from_spans(&spans).at_step(7);
        assert_eq!((timeline.step, timeline.us), (Some(7), 16.0));
        assert_eq!(timeline.lanes.len(), 1);
        let lane = &timeline.lanes[0];
        assert_eq!(
            (lane.device.as_str(), lane.kind.as_str()),
            ("cuda:0", "compute")
        );
        let seen: Vec<_> = lane
            .spans
            .iter()
            .map(|span| (span.start_us, span.us, span.stage, span.microbatch))
            .collect();
        let wanted = [
            (0.0, 2.0, Some(0), Some(0)),
            (2.0, 1.0, Some(0), Some(1)),
            (3.0, 1.0, Some(2), Some(1)),
            (15.0, 1.0, Some(2), Some(1)),
        ];
        assert_eq!(seen, wanted);
        let layers = (lane.spans[0].layer, lane.spans[0].last_layer);
        assert_eq!(layers, (Some(0), Some(1)));
        assert_eq!(lane.spans[2].last_layer, None);
    }

    /// Devices come in the order of their numbers, the host last, compute first; a copy has the
    /// stage that uses its layer next, an update that of the layer's backward.
    #[test]
    fn lanes_are_in_order_and_name_their_stage() {
        let backward = Span {
            category: Category::Backward,
            ..work(1, 3, 0, 0, 50_000)
        };
        let upload = |start_ns, bytes| Span {
            name: "layer 0".to_owned(),
            bytes: Some(bytes),
            ..span(
                1,
                Lane::ParamUpload,
                Category::Transfer,
                start_ns,
                start_ns + 10,
            )
        };
        let update = Span {
            layer: Some(0),
            ..span(
                usize::MAX,
                Lane::Optimizer,
                Category::Optimizer,
                60_000,
                61_000,
            )
        };
        let spans = [
            update,
            upload(0, 5),
            upload(40_000, 6),
            backward,
            work(1, 1, 0, 0, 10_000),
            work(0, 0, 7, 0, 9_000),
            span(0, Lane::GradDownload, Category::Transfer, 70_000, 70_001),
        ];
        let timeline = Timeline::from_spans(&spans);
        let lanes: Vec<_> = timeline
            .lanes
            .iter()
            .map(|lane| (lane.device.as_str(), lane.kind.as_str()))
            .collect();
        let wanted = [
            ("cuda:0", "compute"),
            ("cuda:0", "gradient download"),
            ("cuda:1", "compute"),
            ("cuda:1", "parameter upload"),
            ("host", "optimizer"),
        ];
        assert_eq!(lanes, wanted);
        let stages = |lane: usize| -> Vec<_> {
            let spans = timeline.lanes[lane].spans.iter();
            spans.map(|span| span.stage).collect()
        };
        assert_eq!(stages(3), [Some(1), Some(3)], "each upload's own use");
        assert_eq!(stages(4), [Some(3)]);
        assert_eq!(stages(1), [None]);
        assert_eq!(timeline.lanes[3].spans[1].bytes, Some(6));
    }

    /// However many spans there are, few come out: joined as long as that helps, then left out.
    #[test]
    fn timelines_are_bounded() {
        let many: Vec<Span> = (0..5_000)
            .map(|at| work(at % 2, at / 100, at, at % 10, 2_000 * at as u64))
            .collect();
        let joined = Timeline::bounded(&many, 200);
        let count = |timeline: &Timeline| -> usize {
            timeline.lanes.iter().map(|lane| lane.spans.len()).sum()
        };
        assert!(
            count(&joined) <= 200 && count(&joined) >= 50,
            "{}",
            count(&joined)
        );
        assert_eq!(joined.left_out, 0);
        assert_eq!(joined.us, 9_999.0);
        let cut = Timeline::bounded(&many, 10);
        assert_eq!(count(&cut), 10);
        assert_eq!(cut.left_out, 90, "50 stages on two workers are 100 spans");
        assert_eq!(Timeline::from_spans(&[]), Timeline::default());
        let reversed = span(0, Lane::Compute, Category::Loss, 9, 3);
        assert_eq!(Timeline::from_spans(&[reversed]).us, 0.0);
    }

    /// A timeline is read back from JSON.
    #[test]
    fn timelines_are_values() {
        let timeline = Timeline::from_spans(&[work(0, 0, 1, 0, 6_000)]).at_step(3);
        let json = serde_json::to_string(&timeline).expect("JSON");
        assert_eq!(
            serde_json::from_str::<Timeline>(&json).expect("read"),
            timeline
        );
    }
}
