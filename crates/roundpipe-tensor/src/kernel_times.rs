//! How long each kernel of a worker takes, by kind and sizes of operands.
//!
//! Off unless asked for: a launch then only reads a flag. While on, a stamp of the compute lane
//! stands on either side of every launch; a launch of several kernels (a product with a copy before
//! it) is one. Stamps cost the lane a few microseconds, so times of short kernels are a little too
//! long, and a step that is timed this way is slower than others.
//!
//! # Invariants
//! - Nothing here waits: stamps that the lane has not passed yet are left out of a report.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::device::{Lane, Stamp};
use crate::error::Result;
use crate::kernel::{Kernel, View};
use crate::sync::lock;

/// Stamps of the launches of one worker.
#[derive(Debug, Default)]
pub(crate) struct KernelTimes {
    is_on: AtomicBool,
    launches: Mutex<Vec<TimedLaunch>>,
}

#[derive(Debug)]
struct TimedLaunch {
    what: String,
    start: Stamp,
    end: Stamp,
}

/// All launches of one kernel with operands of one size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelTime {
    /// The kernel and its operands, such as `matmul bf16 [4096, 2048] x [2048, 6144]`.
    pub what: String,
    /// How often it was launched.
    pub launches: u64,
    /// Their times together.
    pub ns: u64,
}

impl KernelTimes {
    /// Starts or ends timing; what was noted before is forgotten when it starts.
    pub(crate) fn set(&self, is_on: bool) {
        if is_on {
            lock(&self.launches).clear();
        }
        self.is_on.store(is_on, Ordering::Relaxed);
    }

    /// Calls `launch`, between two stamps of its lane while timing is on.
    pub(crate) fn around(
        &self,
        lane: &dyn Lane,
        what: impl FnOnce() -> String,
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if !self.is_on.load(Ordering::Relaxed) {
            return launch();
        }
        let start = lane.stamp()?;
        launch()?;
        let end = lane.stamp()?;
        let what = what();
        lock(&self.launches).push(TimedLaunch { what, start, end });
        Ok(())
    }

    /// What was noted, the longest first.
    pub(crate) fn report(&self) -> Vec<KernelTime> {
        let mut sums = BTreeMap::<String, (u64, u64)>::new();
        for launch in &*lock(&self.launches) {
            let (Some(start), Some(end)) = (launch.start.ns(), launch.end.ns()) else {
                continue;
            };
            let sum = sums.entry(launch.what.clone()).or_default();
            sum.0 += 1;
            sum.1 += end.saturating_sub(start);
        }
        let mut times: Vec<KernelTime> = sums
            .into_iter()
            .map(|(what, (launches, ns))| KernelTime { what, launches, ns })
            .collect();
        times.sort_by(|a, b| b.ns.cmp(&a.ns).then_with(|| a.what.cmp(&b.what)));
        times
    }
}

/// A kernel's name with the types and sizes of its operands.
pub(crate) fn describe(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> String {
    let list = |views: &[Option<View>]| {
        let mut text = String::new();
        for view in views.iter().flatten() {
            if !text.is_empty() {
                text.push_str(", ");
            }
            text.push_str(&format!("{} {}", view.dtype, view.shape()));
        }
        text
    };
    format!("{} ({}) -> ({})", kernel.name(), list(src), list(dst))
}

#[cfg(test)]
mod tests {
    use crate::bytes::Bytes;
    use crate::cpu::Cpu;
    use crate::cx::Cx;
    use crate::shape::Shape;
    use crate::worker::Worker;

    /// Only launches made while timing is on count; equal ones are one line.
    #[test]
    fn launches_are_timed_while_timing_is_on() {
        let worker = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(4)).unwrap();
        let x = worker
            .upload(&[1.0f32, 2.0], Shape::new(&[2]).unwrap())
            .unwrap();
        let mut cx = Cx::infer(&worker);
        cx.mul(&x, &x).unwrap();
        worker.time_kernels(true);
        for _ in 0..3 {
            cx.add(&x, &x).unwrap();
        }
        worker.time_kernels(false);
        cx.mul(&x, &x).unwrap();
        let times = worker.kernel_times();
        assert_eq!(times.len(), 1, "{times:?}");
        assert_eq!(times[0].launches, 3, "{times:?}");
        assert!(times[0].what.contains("f32 [2]"), "{times:?}");
    }
}
