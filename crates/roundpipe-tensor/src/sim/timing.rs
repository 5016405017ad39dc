//! How long things take on the virtual clock, and the dice that vary it.
//!
//! A throw depends on the seed and on what it is thrown for (lane and item number), never on which
//! host thread came first: one seed gives one timing.

use crate::device::{Copy, DeviceId, Direction};
use crate::kernel::{Kernel, View};
use crate::rng::{RngSite, unit};

/// Virtual durations. One byte per nanosecond is 1 GB/s.
#[derive(Debug, Clone)]
pub struct Timing {
    /// Rate of host-to-device copies.
    pub upload_bytes_per_ns: f64,
    /// Rate of device-to-host copies.
    pub download_bytes_per_ns: f64,
    /// Rate of copies within a device.
    pub local_bytes_per_ns: f64,
    /// What any copy takes beside its bytes.
    pub copy_ns: u64,
    /// Rate at which kernels go through the bytes of their operands.
    pub kernel_bytes_per_ns: f64,
    /// What any kernel takes beside its bytes.
    pub kernel_ns: u64,
    /// Host time to queue a kernel or a copy.
    pub queue_ns: u64,
    /// Every duration is multiplied by a factor between 1/spread and spread; 1 switches this off.
    pub spread: f64,
    /// Probability, per item, of a stall.
    pub stall_chance: f64,
    /// The longest stall.
    pub stall_ns: u64,
}

impl Default for Timing {
    /// A fast GPU on a fast bus, with enough disorder to bring out a missing event.
    fn default() -> Self {
        Self {
            upload_bytes_per_ns: 25.0,
            download_bytes_per_ns: 25.0,
            local_bytes_per_ns: 1000.0,
            copy_ns: 5_000,
            kernel_bytes_per_ns: 1000.0,
            kernel_ns: 4_000,
            queue_ns: 1_000,
            spread: 4.0,
            stall_chance: 0.03,
            stall_ns: 200_000,
        }
    }
}

/// One kernel about to be queued, as a [`KernelTime`] sees it.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The worker.
    pub worker: DeviceId,
    /// What to compute.
    pub kernel: &'a Kernel,
    /// What it reads.
    pub src: &'a [Option<View>],
    /// What it writes.
    pub dst: &'a [Option<View>],
}

/// Nanoseconds of a kernel before dice, or `None` for the timing model's own figure.
pub type KernelTime = dyn Fn(&Launch<'_>) -> Option<u64> + Send + Sync;

impl Timing {
    /// No dice: every duration is exactly what the model says.
    pub fn exact() -> Self {
        Self {
            spread: 1.0,
            stall_chance: 0.0,
            ..Self::default()
        }
    }

    pub(super) fn copy(&self, copy: &Copy) -> u64 {
        let rate = match copy.direction {
            Direction::Upload => self.upload_bytes_per_ns,
            Direction::Download => self.download_bytes_per_ns,
            Direction::Local => self.local_bytes_per_ns,
        };
        self.copy_ns + (copy.bytes as f64 / rate) as u64
    }

    pub(super) fn kernel(&self, launch: &Launch<'_>) -> u64 {
        let operands = launch.src.iter().chain(launch.dst).flatten();
        let bytes: u64 = operands.map(|v| (v.numel() * v.dtype.size()) as u64).sum();
        self.kernel_ns + (bytes as f64 / self.kernel_bytes_per_ns) as u64
    }

    /// `nanos` as it turns out for item `seq` of `lane`.
    pub(super) fn thrown(&self, nanos: u64, seed: u64, lane: usize, seq: u64) -> u64 {
        let factor = self.spread.powf(2.0 * throw(seed, lane, seq, 0) - 1.0);
        let stall = match throw(seed, lane, seq, 1) < self.stall_chance {
            true => throw(seed, lane, seq, 2) * self.stall_ns as f64,
            false => 0.0,
        };
        (nanos as f64 * factor + stall) as u64
    }
}

/// A number in [0, 1) fixed by the seed and by what it is for.
pub(super) fn throw(seed: u64, lane: usize, seq: u64, purpose: u32) -> f64 {
    let site = RngSite {
        seed,
        step: seq,
        microbatch: purpose,
        layer: lane as u32,
        site: 0,
    };
    f64::from(unit(site.key().word(0)))
}
