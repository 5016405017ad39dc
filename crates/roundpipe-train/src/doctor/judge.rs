//! From a machine to lines with a verdict and a hint each. A pure function: it asks no system.
//!
//! A warning is something that makes runs slower or smaller than the hardware allows. A failure is
//! something that stops runs which this machine was meant for. A machine without a GPU is warned
//! about, not failed.

use roundpipe::Bytes;
use serde::Serialize;

use super::facts::{CacheFacts, GpuFacts, HostRates, Machine};
use crate::profile::GpuProfile;

/// Cores that a card wants: its launcher and copies, and a share of the optimizer.
const CORES_PER_GPU: usize = 4;
/// Below this share of what its wires carry, a link is slow. 0.8 to 0.9 are usual.
const LEAST_LINK_SHARE: f64 = 0.65;
/// Both ways at once, beside the faster way alone. Links carry 1.6 to 1.9 times as much.
const LEAST_DUPLEX: f64 = 1.2;
/// Bytes per second, read plus written, that one channel of old memory has.
const LEAST_MEMORY_RATE: f64 = 12e9;
/// Bytes per second: a checkpoint of a model with 8 billion parameters takes eight minutes.
const LEAST_DISK_RATE: f64 = 200e6;
/// Room for a few checkpoints of a small model.
const LITTLE_ROOM: u64 = 20 << 30;
/// Room for nothing.
const NO_ROOM: u64 = 1 << 30;
/// Host memory per byte of a card's: what training a model of the card's size takes.
const HOST_PER_GPU_BYTE: u64 = 2;
/// Host memory of a trained bf16 parameter at lag 1.
const BYTES_PER_PARAM: f64 = 18.0;

/// How something was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Pass,
    /// Runs work, and could be faster or larger.
    Warn,
    /// Runs do not work, or not on the hardware that is there.
    Fail,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    /// What, in a word or two.
    pub name: String,
    /// How it was found.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What to do about it, where something can be done.
    pub hint: Option<String>,
}

impl Check {
    fn pass(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            verdict: Verdict::Pass,
            found: found.into(),
            hint: None,
        }
    }

    fn warn(self, hint: impl Into<String>) -> Self {
        self.worse(Verdict::Warn, hint)
    }

    fn fail(self, hint: impl Into<String>) -> Self {
        self.worse(Verdict::Fail, hint)
    }

    /// Keeps the worst verdict, and all hints.
    fn worse(mut self, verdict: Verdict, hint: impl Into<String>) -> Self {
        self.verdict = self.verdict.max(verdict);
        let hint = hint.into();
        self.hint = Some(match self.hint {
            Some(before) => format!("{before}; {hint}"),
            None => hint,
        });
        self
    }
}

/// A line for each part of a machine, in the order in which a person would ask.
pub fn judge(machine: &Machine) -> Vec<Check> {
    let mut checks = Vec::new();
    if !machine.is_release {
        let found = "built without optimisation, so rates of the processor are too low";
        checks.push(Check::pass("build", found).warn("build with `cargo build --release`"));
    }
    checks.push(driver(machine));
    checks.extend(libraries(machine));
    let profiles = machine
        .profile
        .as_ref()
        .map_or(&[][..], |profile| &profile.gpus);
    let used = machine.gpus.iter().filter(|gpu| gpu.refused.is_none());
    let place = |gpu: &GpuFacts| used.clone().position(|other| other.index == gpu.index);
    for gpu in &machine.gpus {
        // Of this run, or of an earlier one with the same cards.
        let earlier = place(gpu).and_then(|place| profiles.get(place));
        let rates = gpu.measured.as_ref().or(earlier);
        checks.extend(card(
            gpu,
            rates.filter(|rates| rates.name == gpu.name),
            machine,
        ));
    }
    checks.push(processor(machine));
    checks.push(memory(machine));
    checks.extend(host_rates(machine));
    checks.push(disk(machine));
    checks.extend(caches(machine));
    checks
}

fn driver(machine: &Machine) -> Check {
    let name = "driver";
    let why = match &machine.driver {
        Some(Ok(version)) if machine.gpus.is_empty() => {
            let found = format!("for CUDA {version}, but it knows no GPU");
            return Check::pass(name, found)
                .warn("in a container, start it with GPUs (`--gpus all`); models train on the processor meanwhile");
        }
        Some(Ok(version)) => return Check::pass(name, format!("for CUDA {version}")),
        Some(Err(why)) => why.as_str(),
        None => "not looked for",
    };
    let check = Check::pass(name, format!("no GPU: {why}"));
    if machine.cards_on_bus > 0 && !machine.driver_off {
        let cards = machine.cards_on_bus;
        return check.fail(format!(
            "{cards} of NVIDIA's cards are in this machine: install or update the driver, or give the container its GPUs"
        ));
    }
    check.warn("models train on the processor; those above a billion parameters want a GPU")
}

fn libraries(machine: &Machine) -> Vec<Check> {
    let one = |library: &super::facts::Library| match &library.found {
        Ok(found) => Check::pass(library.name, found),
        Err(why) => {
            Check::pass(library.name, why).fail("without it no GPU is used; the line names the fix")
        }
    };
    let mut checks: Vec<Check> = machine.libraries.iter().map(one).collect();
    if machine.gpus.is_empty() {
        return checks;
    }
    checks.push(match &machine.attention_note {
        None => Check::pass("cuDNN", "used for attention"),
        Some(note) => Check::pass("cuDNN", note)
            .warn("install a newer cuDNN for faster attention; results are right without it"),
    });
    checks
}

fn card(gpu: &GpuFacts, rates: Option<&GpuProfile>, machine: &Machine) -> Vec<Check> {
    let name = format!("cuda:{}", gpu.index);
    if let Some(why) = &gpu.refused {
        return vec![Check::pass(name, why).warn("it is left out; GPUs from Ampere on are used")];
    }
    if let Some(why) = &gpu.failed {
        let hint = "see `nvidia-smi` for what holds or breaks it";
        return vec![Check::pass(name, format!("{}: {why}", gpu.name)).fail(hint)];
    }
    let (total, free) = (Bytes(gpu.memory), Bytes(gpu.free));
    let mut found = format!("{}, {total}, {free} free", gpu.name);
    if let Some(rates) = rates {
        let (tera, memory) = (rates.bf16_flops / 1e12, giga(rates.memory_rate));
        found += &format!("; {tera:.0} TFLOP/s in bf16, memory {memory} GB/s");
    }
    let mut check = Check::pass(&name, found);
    if gpu.free < gpu.memory / 10 * 9 {
        check = check.warn("other programs hold its memory; `nvidia-smi` lists them");
    }
    let mut checks = vec![check];
    checks.extend(rates.map(|rates| bus(&name, gpu, rates)));
    checks.extend(pinned(&name, gpu, machine));
    checks
}

fn bus(name: &str, gpu: &GpuFacts, rates: &GpuProfile) -> Check {
    let (up, down) = (rates.upload_rate, rates.download_rate);
    let mut found = format!(
        "{} GB/s up, {} down, {} both at once",
        giga(up),
        giga(down),
        giga(rates.both_rate)
    );
    if let Some(link) = &gpu.link {
        let (speed, width) = (link.gt_per_s, link.width);
        let limit = giga(link.rate());
        found += &format!("; the link is {speed} GT/s x{width}, {limit} GB/s each way");
    }
    let mut check = Check::pass(format!("{name} PCIe"), found);
    if let Some(link) = &gpu.link {
        if link.width < link.most_width {
            let most = link.most_width;
            check = check.warn(format!(
                "the card runs on {} of its {most} lanes: use the first slot, and take out what shares its lanes",
                link.width
            ));
        }
        if up.min(down) < LEAST_LINK_SHARE * link.rate() {
            check = check.warn(
                "far below the link's rate: look for a riser, for lanes shared with a disk, for power saving (ASPM), and for the other socket's memory (`numactl`)",
            );
        }
    }
    if rates.both_rate < LEAST_DUPLEX * up.max(down) {
        check = check.warn(
            "both ways at once are hardly faster than one, so weights and gradients get in each other's way; the host's memory or the hypervisor limits them",
        );
    }
    check
}

fn pinned(name: &str, gpu: &GpuFacts, machine: &Machine) -> Option<Check> {
    let (asked, pinned) = gpu.pinned?;
    let found = format!("{} of {} asked for", Bytes(pinned), Bytes(asked));
    let check = Check::pass(format!("{name} pinned memory"), found);
    if pinned >= asked {
        return Some(check);
    }
    let why = gpu.pin_refusal.as_deref().unwrap_or("the driver gave less");
    let hint = if machine.host.is_wsl {
        "WSL2 pins little: the rest is pageable and copies are slower; Linux itself pins all".into()
    } else if let Some(limit) = machine.host.locked_limit {
        let limit = Bytes(limit);
        format!(
            "the limit of locked memory is {limit}: raise it (`ulimit -l unlimited`, in containers `--ulimit memlock=-1`)"
        )
    } else {
        "free host memory, or raise the container's limit".into()
    };
    Some(check.warn(format!("{hint} ({why})")))
}

fn processor(machine: &Machine) -> Check {
    let host = &machine.host;
    let mut found = format!("{} cores", host.cores);
    if let Some(all) = host.machine_cores.filter(|all| *all > host.cores) {
        found += &format!(" of the machine's {all}");
    }
    found.extend(host.processor.iter().map(|name| format!(", {name}")));
    if !host.features.is_empty() {
        found += &format!(", {}", host.features.join(", "));
    }
    let mut check = Check::pass("processor", found);
    let used = machine.gpus.iter().filter(|gpu| gpu.refused.is_none());
    let wanted = CORES_PER_GPU * used.count().max(1);
    if host.cores < wanted {
        check = check.warn(format!(
            "the optimizer runs here: {wanted} cores or more keep up better; see `taskset` and the container's limits"
        ));
    }
    if host.is_x86
        && host.processor.is_some()
        && !host.features.iter().any(|name| name.starts_with("AVX"))
    {
        check = check.warn("without AVX2 the optimizer and the processor's kernels are slow");
    }
    check
}

fn memory(machine: &Machine) -> Check {
    let host = &machine.host;
    let billions = host.memory as f64 / BYTES_PER_PARAM / 1e9;
    let mut found = format!("{}", Bytes(host.memory));
    if let Some(left) = host.available {
        found += &format!(", {} left", Bytes(left));
    }
    found += &format!("; room to train every weight of {billions:.1} billion parameters");
    let mut check = Check::pass("host memory", found);
    if let Some(all) = host
        .machine_memory
        .filter(|all| host.memory < all / 100 * 99)
    {
        check = check.warn(format!(
            "a control group allows less than the machine's {}: raise the container's limit (`--memory`) or the session's",
            Bytes(all)
        ));
    }
    let used = machine.gpus.iter().filter(|gpu| gpu.refused.is_none());
    let cards: u64 = used.map(|gpu| gpu.memory).sum();
    if host.memory < HOST_PER_GPU_BYTE.saturating_mul(cards) {
        check = check.warn(
            "less than twice the GPUs' memory: full fine-tuning is limited by the host; LoRA, `lag=0` and `state_dtype=bf16` take less",
        );
    }
    check
}

fn host_rates(machine: &Machine) -> Vec<Check> {
    if let Some(why) = &machine.host.failed {
        return vec![
            Check::pass("host rates", format!("not measured: {why}"))
                .warn("close other programs and run it again"),
        ];
    }
    let earlier = machine.profile.as_ref().map(|profile| HostRates {
        memory_rate: profile.host.memory_rate,
        adamw_params: profile.host.adamw_params,
        f32_flops: profile.host.f32_flops,
        bf16_flops: profile.host.bf16_flops,
    });
    let Some(rates) = machine.host.rates.or(earlier) else {
        return vec![
            Check::pass("host rates", "not measured")
                .warn("run `roundpipe doctor` without --quick"),
        ];
    };
    let mut bandwidth = Check::pass(
        "memory rate",
        format!("{} GB/s, read plus written", giga(rates.memory_rate)),
    );
    if rates.memory_rate < LEAST_MEMORY_RATE {
        bandwidth = bandwidth.warn(
            "the optimizer's steps will be slow: fill all memory channels, and see that no other program runs",
        );
    }
    let adamw = Check::pass(
        "optimizer",
        format!(
            "AdamW updates {:.2} billion parameters a second",
            rates.adamw_params / 1e9
        ),
    );
    let products = Check::pass(
        "products",
        format!(
            "{} GFLOP/s in f32, {} in bf16, on the processor",
            giga(rates.f32_flops),
            giga(rates.bf16_flops)
        ),
    );
    vec![bandwidth, adamw, products]
}

fn disk(machine: &Machine) -> Check {
    let disk = &machine.disk;
    let folder = disk.folder.display();
    if let Some(why) = &disk.failed {
        return Check::pass("disk", format!("{folder}: {why}")).fail(
            "runs are written here: choose another folder with --out, and look at it with --disk",
        );
    }
    let earlier = machine.profile.as_ref().map(|p| p.host.disk_write_rate);
    let rate = disk.write_rate.or(earlier);
    let mut found = format!("{folder}");
    found.extend(rate.map(|rate| format!(": {:.0} MB/s written and flushed", rate / 1e6)));
    found.extend(disk.free.map(|free| format!(", {} free", Bytes(free))));
    let mut check = Check::pass("disk", found);
    if rate.is_some_and(|rate| rate < LEAST_DISK_RATE) {
        check = check.warn(
            "checkpoints are written beside training, but at this rate they pile up: use another disk (--out), or save less often (`save_every`)",
        );
    }
    match disk.free {
        Some(free) if free < NO_ROOM => {
            check.fail("it is full: a checkpoint needs 12 to 14 bytes per trained parameter, twice")
        }
        Some(free) if free < LITTLE_ROOM => check
            .warn("little room: a checkpoint needs 12 to 14 bytes per trained parameter, twice"),
        _ => check,
    }
}

fn caches(machine: &Machine) -> Vec<Check> {
    let has_gpus = machine.gpus.iter().any(|gpu| gpu.refused.is_none());
    let mut checks = Vec::new();
    if has_gpus {
        let hint = "kernels are compiled at every start, about a minute: set ROUNDPIPE_KERNEL_CACHE to a folder that can be written";
        checks.push(cache("kernel cache", &machine.kernel_cache, hint));
    }
    let hint = "models of the hub cannot be kept: set HF_HOME to a folder that can be written";
    let mut hub = cache("hub cache", &machine.hub_cache, hint);
    if machine.hub_cache.is_offline {
        hub.found += "; HF_HUB_OFFLINE is set";
    }
    if hub.verdict == Verdict::Pass
        && machine
            .hub_cache
            .free
            .is_some_and(|free| free < LITTLE_ROOM)
    {
        hub = hub
            .warn("little room for models: set HF_HOME to a larger disk, or remove some from here");
    }
    checks.push(hub);
    let hint = "measurements are not kept for `roundpipe plan`: set ROUNDPIPE_CACHE to a folder that can be written";
    checks.push(cache("profile", &machine.profile_cache, hint));
    checks
}

fn cache(name: &str, cache: &CacheFacts, hint: &str) -> Check {
    let Some(folder) = &cache.folder else {
        return Check::pass(name, "no place: HOME is not set").warn(hint);
    };
    let mut found = format!("{}, {}", folder.display(), Bytes(cache.bytes));
    found.extend(cache.free.map(|free| format!(", {} free", Bytes(free))));
    match &cache.refused {
        None => Check::pass(name, found),
        Some(why) => Check::pass(name, format!("{found}: {why}")).warn(hint),
    }
}

/// A rate in thousand millions, with three digits.
fn giga(rate: f64) -> String {
    let value = rate / 1e9;
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests;
