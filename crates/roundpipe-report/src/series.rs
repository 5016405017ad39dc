//! What a page shows of a run, in bounded memory.
//!
//! Steps are kept as points of [`POINTS`] at most: when there are more, every four neighbours leave
//! the two with the lowest and the highest loss, so that no spike is lost however long the run is.
//! `metrics.jsonl` has them all.
//!
//! Every change has a number. A page that knows all up to some number asks for what came behind it
//! and gets that, or everything, when the past has changed since (points were thinned out, or a
//! resume went back).

use std::sync::Arc;

use serde::{Serialize, Serializer};

use crate::record::{self, End, Eval, Note, Record, Sample, Save, Start, Step};
use crate::timeline::Timeline;

/// Steps that are kept at most.
pub(crate) const POINTS: usize = 1 << 16;
/// Evaluations that are kept at most.
const EVALS: usize = 1 << 12;
/// Samples that are kept at most, in number and in bytes of text.
const SAMPLES: usize = 512;
const SAMPLE_BYTES: usize = 2 << 20;
/// Bytes of one text of a sample.
const SAMPLE_TEXT_BYTES: usize = 1 << 14;
/// Checkpoints and notes that are kept at most: the newest.
const LINES: usize = 256;
/// Devices and uses of memory that are kept at most.
const NAMES: usize = 256;

/// A step as a page draws it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Point {
    order: u64,
    pub(crate) step: u64,
    pub(crate) loss: f32,
    epoch: f32,
    lr: f32,
    grad_norm: f32,
    tokens_per_s: f32,
    limit_share: f32,
    elapsed_s: f32,
    gpu_bytes: u64,
    host_bytes: u64,
    tokens_trained: u64,
    skipped: bool,
}

impl Point {
    fn of(step: &Step, order: u64) -> Self {
        let optional = |number: Option<f64>| number.map_or(f32::NAN, |number| number as f32);
        Self {
            order,
            step: step.step,
            loss: step.loss as f32,
            epoch: step.epoch as f32,
            lr: step.lr as f32,
            grad_norm: optional(step.grad_norm),
            tokens_per_s: step.tokens_per_s as f32,
            limit_share: optional(step.limit_share),
            elapsed_s: step.elapsed_s as f32,
            gpu_bytes: step.gpu_bytes.iter().copied().max().unwrap_or(0),
            host_bytes: step.host_bytes,
            tokens_trained: step.tokens_trained,
            skipped: step.skipped,
        }
    }
}

/// A record and the number of the change that brought it.
type Kept<T> = (u64, Arc<T>);

/// All that a page shows.
#[derive(Debug, Default)]
pub(crate) struct Series {
    /// The number of the newest change.
    order: u64,
    /// The newest change of what was there before.
    rewritten: u64,
    start: Option<Kept<Start>>,
    /// When the run first began, in seconds since 1970.
    began: Option<f64>,
    resumed: Vec<u64>,
    points: Vec<Point>,
    evals: Vec<Kept<Eval>>,
    samples: Vec<Kept<Sample>>,
    saves: Vec<Kept<Save>>,
    notes: Vec<Kept<Note>>,
    end: Option<Kept<End>>,
    timeline: Option<Kept<Timeline>>,
}

impl Series {
    /// Adds a record.
    pub(crate) fn push(&mut self, mut record: Record) {
        record.cut_texts();
        self.order += 1;
        let order = self.order;
        match record {
            Record::Start(start) => self.start(start),
            Record::Step(step) => {
                self.points.push(Point::of(&step, order));
                self.thin_points();
            }
            Record::Eval(eval) => {
                self.evals.push((order, Arc::new(eval)));
                if self.evals.len() > EVALS {
                    thin(&mut self.evals, |(_, eval)| eval.loss);
                    self.rewritten = order;
                }
            }
            Record::Sample(mut sample) => {
                record::cut(&mut sample.prompt, SAMPLE_TEXT_BYTES);
                record::cut(&mut sample.text, SAMPLE_TEXT_BYTES);
                self.samples.push((order, Arc::new(sample)));
                self.thin_samples();
            }
            Record::Save(save) => push_newest(&mut self.saves, (order, Arc::new(save))),
            Record::Note(note) => push_newest(&mut self.notes, (order, Arc::new(note))),
            Record::End(end) => self.end = Some((order, Arc::new(end))),
        }
    }

    /// Replaces the timeline.
    pub(crate) fn set_timeline(&mut self, timeline: Timeline) {
        self.order += 1;
        self.timeline = Some((self.order, Arc::new(timeline)));
    }

    /// A run that begins anew forgets all; one that resumes, what came behind its checkpoint.
    fn start(&mut self, mut start: Start) {
        start.devices.truncate(NAMES);
        start.memory.truncate(NAMES);
        self.rewritten = self.order;
        match start.resumed_at {
            None => {
                *self = Self {
                    order: self.order,
                    rewritten: self.order,
                    ..Self::default()
                };
            }
            Some(step) => {
                self.resumed.retain(|at| *at < step);
                push_newest(&mut self.resumed, step);
                self.points.retain(|point| point.step <= step);
                self.evals.retain(|(_, eval)| eval.step <= step);
                self.samples.retain(|(_, sample)| sample.step <= step);
                self.saves.retain(|(_, save)| save.step <= step);
                self.notes.retain(|(_, note)| note.step <= step);
                self.end = None;
            }
        }
        self.began.get_or_insert(start.time);
        self.start = Some((self.order, Arc::new(start)));
    }

    fn thin_points(&mut self) {
        if self.points.len() > POINTS {
            // A skipped step is kept as one whose loss is not finite would be.
            thin(&mut self.points, |point| {
                let loss = f64::from(point.loss);
                if point.skipped { f64::NAN } else { loss }
            });
            self.rewritten = self.order;
        }
    }

    /// Makes samples fewer, between the first step that has some and the last.
    fn thin_samples(&mut self) {
        while self.samples.len() > SAMPLES || self.sample_bytes() > SAMPLE_BYTES {
            self.rewritten = self.order;
            let mut steps: Vec<u64> = self.samples.iter().map(|(_, sample)| sample.step).collect();
            steps.dedup();
            if steps.len() <= 2 {
                // Too many prompts for one step: the last ones go.
                self.samples.pop();
                continue;
            }
            let inner = steps[1..steps.len() - 1].iter().copied();
            let gone: Vec<u64> = inner.step_by(2).collect();
            self.samples
                .retain(|(_, sample)| !gone.contains(&sample.step));
        }
    }

    fn sample_bytes(&self) -> usize {
        let bytes = |(_, sample): &Kept<Sample>| sample.prompt.len() + sample.text.len();
        self.samples.iter().map(bytes).sum()
    }

    /// What came behind a change, or everything. Cheap: texts are shared, points are plain.
    pub(crate) fn since(&self, order: u64) -> Snapshot {
        let is_full = order < self.rewritten || order > self.order;
        let order = if is_full { 0 } else { order };
        let from = self.points.partition_point(|point| point.order <= order);
        Snapshot {
            order: self.order,
            is_full,
            start: newer_one(&self.start, order),
            began: self.began,
            resumed: self.resumed.clone(),
            steps: Columns(self.points[from..].to_vec()),
            evals: newer(&self.evals, order),
            samples: newer(&self.samples, order),
            saves: newer(&self.saves, order),
            notes: newer(&self.notes, order),
            end: newer_one(&self.end, order),
            timeline: newer_one(&self.timeline, order),
        }
    }
}

fn newer<T>(kept: &[Kept<T>], order: u64) -> Vec<Arc<T>> {
    let from = kept.partition_point(|(at, _)| *at <= order);
    kept[from..]
        .iter()
        .map(|(_, value)| value.clone())
        .collect()
}

fn newer_one<T>(kept: &Option<Kept<T>>, order: u64) -> Option<Arc<T>> {
    let newer = kept.as_ref().filter(|(at, _)| *at > order);
    newer.map(|(_, value)| value.clone())
}

fn push_newest<T>(lines: &mut Vec<T>, line: T) {
    if lines.len() == LINES {
        lines.remove(0);
    }
    lines.push(line);
}

/// Of every four neighbours keeps the lowest and the highest, but the first and the last of all. What
/// is not finite counts as both: it is what a person looks for.
fn thin<T>(values: &mut Vec<T>, height: impl Fn(&T) -> f64) {
    let last = values.len() - 1;
    let mut keep = vec![false; values.len()];
    (keep[0], keep[last]) = (true, true);
    for (group, four) in values.chunks(4).enumerate() {
        let heights: Vec<f64> = four.iter().map(&height).collect();
        let at = |chosen: Option<usize>| 4 * group + chosen.unwrap_or(0);
        let odd = heights.iter().position(|height| !height.is_finite());
        let indices = 0..heights.len();
        let by_height = |a: &usize, b: &usize| heights[*a].total_cmp(&heights[*b]);
        let lowest = indices.clone().min_by(by_height);
        let highest = indices.max_by(by_height);
        keep[at(lowest)] = true;
        keep[at(odd.or(highest))] = true;
    }
    let mut keep = keep.into_iter();
    values.retain(|_| keep.next().unwrap_or(true));
}

/// A part of a run, as a page reads it.
#[derive(Debug, Serialize)]
pub(crate) struct Snapshot {
    order: u64,
    #[serde(rename = "full")]
    is_full: bool,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shared")]
    start: Option<Arc<Start>>,
    began: Option<f64>,
    resumed: Vec<u64>,
    steps: Columns,
    #[serde(serialize_with = "list")]
    evals: Vec<Arc<Eval>>,
    #[serde(serialize_with = "list")]
    samples: Vec<Arc<Sample>>,
    #[serde(serialize_with = "list")]
    saves: Vec<Arc<Save>>,
    #[serde(serialize_with = "list")]
    notes: Vec<Arc<Note>>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shared")]
    end: Option<Arc<End>>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "shared")]
    timeline: Option<Arc<Timeline>>,
}

impl Snapshot {
    pub(crate) fn json(&self) -> String {
        serde_json::to_string(self).expect("a snapshot is JSON")
    }
}

fn shared<T: Serialize, S: Serializer>(value: &Option<Arc<T>>, to: S) -> Result<S::Ok, S::Error> {
    value.as_deref().serialize(to)
}

fn list<T: Serialize, S: Serializer>(values: &[Arc<T>], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(values.iter().map(|value| &**value))
}

/// Points as a list per field: a third of the size of a list of objects.
#[derive(Debug)]
struct Columns(Vec<Point>);

impl Serialize for Columns {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap;
        let points = &self.0;
        let mut map = to.serialize_map(Some(12))?;
        let mut floats = |name, field: fn(&Point) -> f32| {
            let column: Vec<f32> = points.iter().map(field).collect();
            map.serialize_entry(name, &column)
        };
        floats("loss", |point| point.loss)?;
        floats("epoch", |point| point.epoch)?;
        floats("lr", |point| point.lr)?;
        floats("grad_norm", |point| point.grad_norm)?;
        floats("tokens_per_s", |point| point.tokens_per_s)?;
        floats("limit_share", |point| point.limit_share)?;
        floats("elapsed_s", |point| point.elapsed_s)?;
        let mut integers = |name, field: fn(&Point) -> u64| {
            let column: Vec<u64> = points.iter().map(field).collect();
            map.serialize_entry(name, &column)
        };
        integers("step", |point| point.step)?;
        integers("gpu_bytes", |point| point.gpu_bytes)?;
        integers("host_bytes", |point| point.host_bytes)?;
        integers("tokens_trained", |point| point.tokens_trained)?;
        integers("skipped", |point| u64::from(point.skipped))?;
        map.end()
    }
}
