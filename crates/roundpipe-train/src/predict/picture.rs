//! A step of several cards as lines of text, and as a trace for Perfetto.

use std::path::Path;

use roundpipe::trace::{Category, Lane, Track};
use roundpipe::{Pass, Span, Timeline, Trace};

use crate::error::{Error, Result};

/// One line per card: each visit of a stage has its number and is as wide as it is long. Forward
/// stages are drawn with `-`, the one that also begins the way back with `+`, backward ones with
/// `=`; a card that waits with spaces.
pub fn picture(timeline: &Timeline, columns: usize) -> Vec<String> {
    let Some((from_ms, to_ms)) = window(timeline) else {
        return Vec::new();
    };
    let columns = columns.max(10);
    let column = |ms: f64| {
        let share = (ms - from_ms) / (to_ms - from_ms);
        (share.clamp(0.0, 1.0) * columns as f64).round() as usize
    };
    let mut lines = vec![vec![' '; columns]; timeline.devices];
    for visit in visits(timeline) {
        let (start, end) = (column(visit.start_ms), column(visit.end_ms));
        let line = &mut lines[visit.device][start..end];
        let fill = match visit.pass {
            Pass::Forward => '-',
            Pass::Fused => '+',
            Pass::Backward => '=',
        };
        line.fill(fill);
        let number = visit.stage.to_string();
        // A number that touches its neighbour cannot be read.
        if number.len() < line.len() {
            for (place, digit) in line.iter_mut().zip(number.chars()) {
                *place = digit;
            }
        }
    }
    let card = |(index, line): (usize, &Vec<char>)| {
        let line: String = line.iter().collect();
        format!("gpu {index:<2} |{line}|")
    };
    lines.iter().enumerate().map(card).collect()
}

/// Writes the same as a trace, microbatch by microbatch.
///
/// # Errors
/// When the file cannot be written.
pub fn trace(timeline: &Timeline, path: &Path) -> Result<()> {
    let trace = Trace::new();
    trace.on();
    for task in &timeline.tasks {
        trace.record(|| Span {
            track: Track {
                worker: task.device,
                worker_name: format!("gpu {} (simulated)", task.device),
                lane: Lane::Compute,
            },
            name: format!("stage {}, microbatch {}", task.stage, task.microbatch),
            category: match task.pass {
                Pass::Forward => Category::Forward,
                Pass::Backward => Category::Backward,
                Pass::Fused => Category::Fused,
            },
            start_ns: (1e6 * task.start_ms) as u64,
            end_ns: (1e6 * task.end_ms) as u64,
            call: task.step as u64,
            stage: Some(task.stage),
            layer: None,
            microbatch: Some(task.microbatch),
            bytes: None,
        });
    }
    trace
        .write_to(path)
        .map_err(|e| Error::io("write", path, &e))
}

/// The time of one step in the middle of what was replayed.
fn window(timeline: &Timeline) -> Option<(f64, f64)> {
    let last = timeline.tasks.iter().map(|task| task.step).max()?;
    let step = last / 2;
    let mine = || timeline.tasks.iter().filter(|task| task.step == step);
    let from_ms = mine()
        .map(|task| task.start_ms)
        .fold(f64::INFINITY, f64::min);
    let to_ms = mine().map(|task| task.end_ms).fold(0.0, f64::max);
    (to_ms > from_ms).then_some((from_ms, to_ms))
}

/// All microbatches of a stage on its card.
struct Visit {
    device: usize,
    stage: usize,
    step: usize,
    pass: Pass,
    start_ms: f64,
    end_ms: f64,
}

fn visits(timeline: &Timeline) -> Vec<Visit> {
    let mut visits: Vec<Visit> = Vec::new();
    for task in &timeline.tasks {
        match visits.last_mut() {
            Some(visit) if (visit.stage, visit.step) == (task.stage, task.step) => {
                visit.end_ms = task.end_ms;
            }
            _ => visits.push(Visit {
                device: task.device,
                stage: task.stage,
                step: task.step,
                pass: task.pass,
                start_ms: task.start_ms,
                end_ms: task.end_ms,
            }),
        }
    }
    visits
}

#[cfg(test)]
mod tests {
    use super::*;
    use roundpipe::timeline::TimelineTask;

    fn task(device: usize, stage: usize, pass: Pass, [start_ms, end_ms]: [f64; 2]) -> TimelineTask {
        TimelineTask {
            device,
            start_ms,
            end_ms,
            step: 0,
            stage,
            microbatch: 0,
            pass,
        }
    }

    fn two_cards() -> Timeline {
        Timeline {
            tasks: vec![
                task(0, 0, Pass::Forward, [0.0, 10.0]),
                task(1, 1, Pass::Fused, [10.0, 30.0]),
                task(0, 2, Pass::Backward, [30.0, 40.0]),
            ],
            devices: 2,
            step_ms: 40.0,
            bubble: 0.5,
        }
    }

    #[test]
    fn visits_are_as_wide_as_they_are_long() {
        let lines = picture(&two_cards(), 40);
        let first = format!(
            "gpu 0  |0{}{}2{}|",
            "-".repeat(9),
            " ".repeat(20),
            "=".repeat(9)
        );
        let second = format!(
            "gpu 1  |{}1{}{}|",
            " ".repeat(10),
            "+".repeat(19),
            " ".repeat(10)
        );
        assert_eq!(lines, [first, second]);
        assert_eq!(
            picture(
                &Timeline {
                    tasks: Vec::new(),
                    ..two_cards()
                },
                40
            )
            .len(),
            0
        );
    }

    #[test]
    fn a_trace_has_every_task() {
        let path =
            std::env::temp_dir().join(format!("roundpipe-plan-trace-{}", std::process::id()));
        trace(&two_cards(), &path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        for stage in 0..3 {
            assert!(
                text.contains(&format!("stage {stage}, microbatch 0")),
                "{text}"
            );
        }
    }
}
