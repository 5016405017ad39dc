//! What a page shows of a run, in bounded memory.
//!
//! Steps are kept as points, [`POINTS`] at most: when there are more, the run is cut into equal parts
//! and each keeps the points with the lowest and the highest loss, so that no spike is lost however
//! long the run is. `metrics.jsonl` has them all.
//!
//! Every change has a number. A page that knows all up to some number asks for what came behind it
//! and gets that, or everything, when the past has changed since (points were thinned out, or a
//! resume went back).

use std::sync::Arc;

use serde::{Serialize, Serializer};

use crate::record::{self, End, Eval, Note, Record, Sample, Save, Start, Step};
use crate::timeline::Timeline;

/// Steps that are kept at most.
pub(crate) const POINTS: usize = 1 << 15;
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
                self.take_back_points(step.step);
                self.points.push(Point::of(&step, order));
                self.thin_points();
            }
            Record::Eval(eval) => {
                let kept = self.evals.partition_point(|(_, old)| old.step <= eval.step);
                if kept < self.evals.len() {
                    self.evals.truncate(kept);
                    self.rewritten = order;
                }
                self.evals.push((order, Arc::new(eval)));
                if self.evals.len() > EVALS {
                    let step = |(_, eval): &Kept<Eval>| eval.step;
                    thin(&mut self.evals, EVALS / 4, step, |(_, eval)| eval.loss);
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

    /// A step that is made again takes the place of the old one and of those behind it, so that the
    /// steps of points always rise.
    fn take_back_points(&mut self, step: u64) {
        let kept = self.points.partition_point(|point| point.step < step);
        if kept < self.points.len() {
            self.points.truncate(kept);
            self.rewritten = self.order;
        }
    }

    fn thin_points(&mut self) {
        if self.points.len() > POINTS {
            // A skipped step is kept as one whose loss is not finite would be.
            let height = |point: &Point| {
                let loss = f64::from(point.loss);
                if point.skipped { f64::NAN } else { loss }
            };
            thin(&mut self.points, POINTS / 4, |point| point.step, height);
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

/// Cuts the steps into equal parts and keeps of each the lowest value and the highest, and of all the
/// first and the last. What is not finite stands higher than all: it is what a person looks for.
fn thin<T>(
    values: &mut Vec<T>,
    parts: usize,
    step: impl Fn(&T) -> u64,
    height: impl Fn(&T) -> f64,
) {
    let (Some(first), Some(last)) = (values.first(), values.last()) else {
        return;
    };
    let from = step(first);
    let width = step(last).saturating_sub(from) / parts as u64 + 1;
    let part = |value: &T| step(value).saturating_sub(from) / width;
    let mut keep = vec![false; values.len()];
    (keep[0], keep[values.len() - 1]) = (true, true);
    let mut start = 0;
    for group in values.chunk_by(|one, next| part(one) == part(next)) {
        let heights: Vec<f64> = group.iter().map(&height).collect();
        let rank = |index: &usize| match heights[*index] {
            finite if finite.is_finite() => finite,
            _ => f64::INFINITY,
        };
        let by_rank = |one: &usize, other: &usize| rank(one).total_cmp(&rank(other));
        let lowest = (0..group.len()).min_by(by_rank);
        let highest = (0..group.len()).max_by(by_rank);
        for index in lowest.into_iter().chain(highest) {
            keep[start + index] = true;
        }
        start += group.len();
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

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, loss: f64) -> Record {
        Step {
            step,
            loss,
            ..Step::default()
        }
        .into()
    }

    fn sample(step: u64, text: &str) -> Record {
        Sample {
            step,
            prompt: "why?".to_owned(),
            text: text.to_owned(),
        }
        .into()
    }

    fn start(resumed_at: Option<u64>) -> Record {
        Start {
            resumed_at,
            ..Start::default()
        }
        .into()
    }

    /// However long a run is, its points are few, and none that stands out is lost.
    #[test]
    fn long_runs_keep_what_stands_out() {
        let mut series = Series::default();
        let steps = 6 * POINTS as u64;
        for at in 1..=steps {
            let mut record = Step {
                step: at,
                loss: 2.0 + (at % 7) as f64 / 100.0,
                ..Step::default()
            };
            match at {
                1_000 => record.loss = 9.0,
                2_000 => record.loss = 0.5,
                3_000 => record.loss = f64::NAN,
                4_000 => record.skipped = true,
                _ => {}
            }
            series.push(record.into());
            assert!(series.points.len() <= POINTS);
        }
        let kept: Vec<u64> = series.points.iter().map(|point| point.step).collect();
        assert!(kept.len() >= POINTS / 2 && kept.is_sorted());
        // The beginning is as fine as the end.
        let early = kept.iter().filter(|step| **step < steps / 4).count();
        assert!((POINTS / 10..POINTS / 3).contains(&early), "{early}");
        for wanted in [1, 1_000, 2_000, 3_000, 4_000, steps] {
            assert!(kept.contains(&wanted), "step {wanted}");
        }
    }

    /// Of each part the lowest and the highest stay, in their order; a run of one step too.
    #[test]
    fn parts_keep_their_extremes() {
        let heights = [5.0, 3.0, 9.0, 4.0, 1.0, 2.0, f64::NAN, 0.5, 7.0, 8.0];
        let mut values: Vec<(u64, f64)> = (1..).zip(heights).collect();
        thin(&mut values, 3, |(step, _)| *step, |(_, height)| *height);
        let kept: Vec<u64> = values.iter().map(|(step, _)| *step).collect();
        assert_eq!(kept, [1, 2, 3, 7, 8, 9, 10]);
        let mut same = vec![(4, 1.0); 1_000];
        thin(&mut same, 3, |(step, _)| *step, |(_, height)| *height);
        assert_eq!(same.len(), 2, "however many records one step has");
    }

    /// A file whose steps go back and forth takes no more memory than any other.
    #[test]
    fn steps_that_go_back_replace() {
        let mut series = Series::default();
        let steps = [1, 2, 3, 2, u64::MAX, 3, 3];
        for at in steps {
            series.push(step(at, 1.0));
            series.push(Record::Eval(Eval {
                step: at,
                ..Eval::default()
            }));
        }
        let kept: Vec<u64> = series.points.iter().map(|point| point.step).collect();
        assert_eq!(kept, [1, 2, 3]);
        let kept: Vec<u64> = series.evals.iter().map(|(_, eval)| eval.step).collect();
        assert_eq!(
            kept,
            [1, 2, 2, 3, 3],
            "several sets may be evaluated at one step"
        );
        assert!(series.since(series.order - 5).is_full);
    }

    /// A page that asks again and again knows what one that asks once knows.
    #[test]
    fn pages_that_ask_again_miss_nothing() {
        let mut series = Series::default();
        let (mut known, mut steps) = (0, Vec::<u64>::new());
        let mut fulls = 0;
        for at in 1..=2 * POINTS as u64 {
            series.push(step(at, (at % 13) as f64));
            if at == 3_000 {
                series.push(start(Some(2_000)));
            }
            if at % 997 == 0 {
                let news = series.since(known);
                if news.is_full {
                    fulls += 1;
                    steps.clear();
                }
                steps.extend(news.steps.0.iter().map(|point| point.step));
                known = news.order;
                let all = series.since(0).steps;
                let wanted: Vec<u64> = all.0.iter().map(|point| point.step).collect();
                assert_eq!(steps, wanted, "at {at}");
            }
        }
        assert!((2..6).contains(&fulls), "{fulls} times everything");
        assert!(series.since(u64::MAX).is_full, "a page of another run");
        let nothing = series.since(series.order);
        assert!(!nothing.is_full && nothing.steps.0.is_empty());
    }

    /// What has not changed is not sent again.
    #[test]
    fn only_news_are_sent() {
        let mut series = Series::default();
        series.push(start(None));
        series.push(sample(0, "a"));
        series.set_timeline(Timeline::default());
        let known = series.since(0).order;
        series.push(step(1, 2.0));
        let news: serde_json::Value =
            serde_json::from_str(&series.since(known).json()).expect("JSON");
        assert_eq!(news["steps"]["loss"], serde_json::json!([2.0]));
        assert_eq!(news["samples"], serde_json::json!([]));
        for absent in ["start", "timeline", "end"] {
            assert!(news.get(absent).is_none(), "{absent}");
        }
    }

    /// Samples are bounded in number and bytes; the first and the last steps that have some stay.
    #[test]
    fn samples_are_bounded() {
        let mut series = Series::default();
        let text = "x".repeat(2 * SAMPLE_TEXT_BYTES);
        for at in 0..2_000 {
            series.push(sample(at / 2, if at % 3 == 0 { &text } else { "short" }));
            assert!(series.samples.len() <= SAMPLES && series.sample_bytes() <= SAMPLE_BYTES);
        }
        let steps: Vec<u64> = series
            .samples
            .iter()
            .map(|(_, sample)| sample.step)
            .collect();
        assert_eq!((steps.first(), steps.last()), (Some(&0), Some(&999)));
        let longest = series.samples.iter().map(|(_, sample)| sample.text.len());
        assert!(longest.max().expect("samples") < SAMPLE_TEXT_BYTES + 16);
        let mut series = Series::default();
        for _ in 0..2 * SAMPLES {
            series.push(sample(0, "as many prompts"));
        }
        assert_eq!(series.samples.len(), SAMPLES);
    }

    /// A resume takes back what came behind its checkpoint; a new run, everything.
    #[test]
    fn starts_take_back() {
        let mut series = Series::default();
        series.push(start(None));
        for at in 1..=10 {
            series.push(step(at, 1.0));
            series.push(sample(at, "s"));
            series.push(Record::Note(Note {
                step: at,
                text: "n".to_owned(),
            }));
            series.push(Record::Eval(Eval {
                step: at,
                ..Eval::default()
            }));
        }
        series.push(Record::End(End::default()));
        series.push(start(Some(4)));
        let lengths = [
            series.points.len(),
            series.samples.len(),
            series.notes.len(),
            series.evals.len(),
        ];
        assert_eq!(lengths, [4; 4]);
        assert!(series.end.is_none());
        series.push(start(Some(8)));
        series.push(start(Some(4)));
        assert_eq!(series.resumed, [4]);
        let before = series.order;
        series.push(start(None));
        assert!(series.points.is_empty() && series.resumed.is_empty());
        assert!(series.since(before).is_full);
    }
}
