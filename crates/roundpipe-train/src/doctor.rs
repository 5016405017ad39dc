//! What this machine is, how fast it is, and what holds it back: `roundpipe doctor`.
//!
//! ```text
//! look (facts.rs) -> measure (measure.rs) -> judge (judge.rs) -> Diagnosis, and the Profile on disk
//! ```
//! Looking and measuring fill a [`Machine`]; [`judge`] turns that into lines and is a pure function,
//! so that every verdict can be tested with a machine that is made up.
//!
//! Refused: nothing. What cannot be read or measured (a container without `/sys`, a card that is
//! full) is a fact like any other and gets a line.
//!
//! # Invariants
//! - Nothing that was made here is left behind but the profile: the disk is measured with a file
//!   that has no name any more while it is written.
//! - A profile replaces the saved one only when everything in it was measured now.

mod facts;
mod judge;
mod measure;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;

pub use facts::{CacheFacts, DiskFacts, GpuFacts, HostFacts, Library, Link, Machine};
pub use judge::{Check, Verdict, judge};

use crate::error::{Error, Result};
use crate::profile::{HostProfile, Profile};

/// What to look at.
#[derive(Debug, Clone, Default)]
pub struct DoctorOptions {
    /// The folder whose disk is measured: where runs go.
    pub disk: PathBuf,
    /// Look only: measure nothing, and judge by the profile that is saved, if there is one.
    pub quick: bool,
}

/// What was found.
#[derive(Debug, Clone, Serialize)]
pub struct Diagnosis {
    /// The worst of all verdicts.
    pub verdict: Verdict,
    /// A line for each thing that was looked at.
    pub checks: Vec<Check>,
    /// The rates, measured now or taken from the file.
    pub profile: Option<Profile>,
    /// Where the profile was saved, if it was.
    pub saved: Option<PathBuf>,
}

/// Looks, measures, judges, and saves the profile. `progress` hears what is being done.
///
/// # Errors
/// When `stop` was set. Everything else that goes wrong is a line of the diagnosis.
pub fn examine(
    options: &DoctorOptions,
    progress: &mut dyn FnMut(&str),
    stop: &AtomicBool,
) -> Result<Diagnosis> {
    progress("looking at the machine");
    let mut machine = facts::look(&options.disk);
    machine.driver_off =
        std::env::var_os("ROUNDPIPE_CUDA_DRIVER").is_some_and(|value| value == "off");
    let path = Profile::path();
    let mut saved = None;
    if options.quick {
        machine.profile = path.as_ref().and_then(|path| Profile::load(path).ok()?);
    } else {
        machine.profile = measure_all(&mut machine, progress, stop)?;
        if let (Some(profile), Some(path)) = (&machine.profile, &path) {
            match profile.save(path) {
                Ok(()) => saved = Some(path.clone()),
                Err(error) => machine.profile_cache.refused = Some(error.to_string()),
            }
        }
    }
    let checks = judge(&machine);
    let verdict = checks.iter().map(|check| check.verdict).max();
    Ok(Diagnosis {
        verdict: verdict.unwrap_or(Verdict::Pass),
        checks,
        profile: machine.profile,
        saved,
    })
}

/// Fills in what can be measured; the profile, if all of it could be.
fn measure_all(
    machine: &mut Machine,
    progress: &mut dyn FnMut(&str),
    stop: &AtomicBool,
) -> Result<Option<Profile>> {
    let go_on = || {
        if stop.load(Ordering::Relaxed) {
            let what = "interrupted; nothing was saved";
            return Err(Error::Failed(what.into()));
        }
        Ok(())
    };
    for gpu in &mut machine.gpus {
        go_on()?;
        if gpu.refused.is_none() {
            progress(&format!("measuring cuda:{} ({})", gpu.index, gpu.name));
            measure::gpu(gpu);
        }
    }
    go_on()?;
    progress("measuring the processor and its memory");
    let rates = measure::host();
    go_on()?;
    progress("measuring the disk");
    measure::disk(&mut machine.disk, stop);
    go_on()?;
    let used = machine.gpus.iter().filter(|gpu| gpu.refused.is_none());
    let gpus: Option<Vec<_>> = used.map(|gpu| gpu.measured.clone()).collect();
    let rates = match rates {
        Ok(rates) => rates,
        Err(error) => {
            machine.host.failed = Some(error.to_string());
            return Ok(None);
        }
    };
    let (Some(gpus), Some(disk_write_rate)) = (gpus, machine.disk.write_rate) else {
        machine.host.rates = Some(rates);
        return Ok(None);
    };
    let host = HostProfile {
        cores: machine.host.cores,
        memory: machine.host.memory,
        memory_rate: rates.memory_rate,
        adamw_params: rates.adamw_params,
        f32_flops: rates.f32_flops,
        bf16_flops: rates.bf16_flops,
        disk_write_rate,
    };
    machine.host.rates = Some(rates);
    Ok(Some(Profile::new(gpus, host)))
}
