//! Rates of this machine: copies to and from cards, memory, products, the optimizer's pass, the
//! disk. Each takes about half a second, the disk at most five.
//!
//! # Invariants
//! - Memory is taken in proportion to what is left, never more than 2 GiB (4 GiB to see how much
//!   is pinned).
//! - The disk's file is unlinked before it is written, so that even a killed program leaves none.

use std::fs::File;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use roundpipe::optim::AdamW;
use roundpipe::{Bytes, Cpu, Cx, DType, Device, HostBuf, Pin, TensorResult, Worker, bf16};
use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::optim::{AdamSlabs, Floats, FloatsMut, StepSettings};
use roundpipe_tensor::{Cuda, LaneKind, host_memory};

use super::facts::{DiskFacts, GpuFacts, HostRates, existing};
use crate::machine::product_rate;
use crate::profile::GpuProfile;

/// Every rate is measured for at least so long, and for at least [`LEAST_ROUNDS`].
const MEASURED: Duration = Duration::from_millis(500);
const LEAST_ROUNDS: u32 = 3;
/// Bytes of one copy over the bus.
const COPY_BYTES: u64 = 256 << 20;
/// Host memory that is asked to be pinned, at most.
const PIN_BYTES: u64 = 4 << 30;
/// What the disk is written with, and for how long.
const DISK_BYTES: u64 = 512 << 20;
const DISK_TIME: Duration = Duration::from_secs(5);
const DISK_BLOCK: usize = 8 << 20;
/// Bytes between two flushes, so that the time can be kept.
const DISK_FLUSHED: u64 = 64 << 20;

/// What rounds of some work took, in seconds.
struct Rounds {
    /// All of them but the first, which warms up.
    mean: f64,
    /// The shortest: what the hardware can do while other programs run too.
    best: f64,
}

fn time_rounds(mut work: impl FnMut() -> TensorResult<()>) -> TensorResult<Rounds> {
    work()?;
    let start = Instant::now();
    let mut rounds = 0;
    let mut best = f64::INFINITY;
    while rounds < LEAST_ROUNDS || start.elapsed() < MEASURED {
        let round = Instant::now();
        work()?;
        best = best.min(round.elapsed().as_secs_f64());
        rounds += 1;
    }
    let mean = start.elapsed().as_secs_f64() / f64::from(rounds);
    // A clock too coarse for a round gives none that took no time.
    Ok(Rounds {
        mean,
        best: if best > 0.0 { best } else { mean },
    })
}

/// Measures a card and how much host memory its driver pins.
pub(super) fn gpu(facts: &mut GpuFacts) {
    match measure_gpu(facts) {
        Ok(profile) => {
            facts.measured = Some(profile);
            facts.failed = None;
        }
        Err(error) => facts.failed = Some(error.to_string()),
    }
}

fn measure_gpu(facts: &mut GpuFacts) -> TensorResult<GpuProfile> {
    let card = Cuda::new(facts.index)?;
    (facts.name, facts.memory) = (card.name(), card.total_memory().0);
    let device: Arc<dyn Device> = card;
    pin(facts, &device);
    let (upload_rate, download_rate, both_rate) = bus_rates(&device)?;
    Ok(GpuProfile {
        name: facts.name.clone(),
        memory: facts.memory,
        bf16_flops: product_rate(device.clone(), DType::BF16)?,
        memory_rate: card_memory_rate(&device)?,
        upload_rate,
        download_rate,
        both_rate,
    })
}

/// Sees how much of a few gigabytes the driver pins. It all goes back before anything is measured.
fn pin(facts: &mut GpuFacts, device: &Arc<dyn Device>) {
    let left = host_memory::available().map_or(PIN_BYTES, |left| left.0);
    let asked = PIN_BYTES.min(left / 4) / COPY_BYTES * COPY_BYTES;
    let mut held = Vec::new();
    let mut pinned = 0;
    while pinned < asked {
        match device.host_buffer("a trial of pinned memory", COPY_BYTES as usize, Pin::Alloc) {
            Ok(buf) => held.push(buf),
            Err(error) => {
                facts.pin_refusal = Some(error.to_string());
                break;
            }
        }
        pinned += COPY_BYTES;
    }
    facts.pinned = Some((asked, pinned));
}

/// Bytes per second to the card, from it, and both ways at once.
fn bus_rates(device: &Arc<dyn Device>) -> TensorResult<(f64, f64, f64)> {
    let worker = Worker::new(device.clone(), Bytes(2 * COPY_BYTES + (64 << 20)))?;
    let bytes = COPY_BYTES as usize;
    let up = device.host_buffer("bytes to upload", bytes, Pin::Try)?;
    let down = device.host_buffer("bytes to download", bytes, Pin::Try)?;
    let upload = time_rounds(|| upload(&worker, &up))?.best;
    let download = time_rounds(|| download(&worker, &down))?.best;
    let rate = |seconds: f64| COPY_BYTES as f64 / seconds;
    let both = std::thread::scope(|scope| {
        // Means: the shortest round of one way may have had no other beside it.
        let other = scope.spawn(|| time_rounds(|| self::upload(&worker, &up)));
        let down = time_rounds(|| self::download(&worker, &down))?.mean;
        let up = other
            .join()
            .map_or(Ok(f64::INFINITY), |up| up.map(|up| up.mean));
        Ok::<f64, roundpipe::TensorError>(rate(down) + rate(up?))
    })?;
    Ok((rate(upload), rate(download), both))
}

fn upload(worker: &Worker, buf: &HostBuf) -> TensorResult<()> {
    let block = worker.pool().alloc("a measured upload", COPY_BYTES)?;
    let lane = worker.device().lane(LaneKind::ParamUpload);
    let flight = lane.upload("a measured upload", buf.read_all()?, block)?;
    flight.land().map(drop)
}

fn download(worker: &Worker, buf: &HostBuf) -> TensorResult<()> {
    let block = worker.pool().alloc("a measured download", COPY_BYTES)?;
    let lane = worker.device().lane(LaneKind::GradDownload);
    let flight = lane.download("a measured download", block, buf.write(0..buf.len())?)?;
    flight.land().map(drop)
}

/// Bytes per second that a copy within the card reads and writes.
fn card_memory_rate(device: &Arc<dyn Device>) -> TensorResult<f64> {
    const ROUND: usize = 8;
    let worker = Worker::new(device.clone(), Bytes(2 * COPY_BYTES + (64 << 20)))?;
    let mut cx = Cx::infer(&worker);
    let elements = COPY_BYTES as usize / DType::BF16.size();
    let source = cx.zeros(DType::BF16, &[elements])?;
    let seconds = time_rounds(|| {
        for _ in 0..ROUND {
            drop(worker.copied(&source, DType::BF16)?);
        }
        worker.fence()
    })?
    .best;
    Ok((2 * ROUND as u64 * COPY_BYTES) as f64 / seconds)
}

/// Measures processor and memory, with all cores.
pub(super) fn host() -> TensorResult<HostRates> {
    let threads = Threads::new(None)?;
    Ok(HostRates {
        memory_rate: memory_rate(&threads),
        adamw_params: adamw_rate(&threads)?,
        f32_flops: product_rate(Cpu::new(None)?, DType::F32)?,
        bf16_flops: product_rate(Cpu::new(None)?, DType::BF16)?,
    })
}

/// Bytes that may be taken for one measurement of the host.
fn host_bytes() -> u64 {
    let left = host_memory::available().map_or(1 << 30, |left| left.0);
    (left / 8).clamp(32 << 20, 1 << 30)
}

/// Bytes per second that a copy with all threads reads and writes.
fn memory_rate(threads: &Threads) -> f64 {
    const CHUNK: usize = 4 << 20;
    struct Pair {
        src: Vec<u8>,
        dst: Vec<u8>,
    }
    let count = (host_bytes() as usize / (2 * CHUNK)).max(1);
    let pairs: Vec<Mutex<Option<Pair>>> = (0..count).map(|_| Mutex::new(None)).collect();
    // Memory belongs to the socket of the thread that first writes it, so each task makes its own.
    let copy_all = || {
        threads.run(count, |i| {
            let mut pair = pairs[i].lock().unwrap_or_else(PoisonError::into_inner);
            let Pair { src, dst } = pair.get_or_insert_with(|| Pair {
                src: vec![i as u8 | 1; CHUNK],
                dst: vec![1; CHUNK],
            });
            dst.copy_from_slice(src);
        });
        Ok(())
    };
    let seconds = time_rounds(copy_all).map_or(f64::INFINITY, |rounds| rounds.best);
    (2 * CHUNK * count) as f64 / seconds
}

/// Parameters per second of AdamW's fused pass: bf16 gradients and weights, f32 masters and
/// moments, as training has them.
fn adamw_rate(threads: &Threads) -> TensorResult<f64> {
    const BYTES_PER_PARAM: u64 = 2 + 2 + 4 + 4 + 4;
    let params = (host_bytes() / BYTES_PER_PARAM) as usize;
    let narrow = |name: &str| HostBuf::zeroed(name, 2 * params);
    let wide = |name: &str| HostBuf::zeroed(name, 4 * params);
    let (grad, working) = (narrow("gradients")?, narrow("weights")?);
    let (master, first, second) = (wide("masters")?, wide("moments")?, wide("squares")?);
    grad.write(0..grad.len())?
        .as_mut_slice::<bf16>()
        .fill(bf16::from_f32(1e-3));
    let mut step = 0;
    let seconds = time_rounds(|| {
        step += 1;
        let grad = grad.read_all()?;
        let mut working = working.write(0..working.len())?;
        let mut master = master.write(0..master.len())?;
        let mut first = first.write(0..first.len())?;
        let mut second = second.write(0..second.len())?;
        let slabs = AdamSlabs {
            grad: Floats::BF16(grad.as_slice()),
            master: master.as_mut_slice(),
            exp_avg: first.as_mut_slice(),
            exp_avg_sq: second.as_mut_slice(),
            max_exp_avg_sq: None,
            working: Some(FloatsMut::BF16(working.as_mut_slice())),
        };
        AdamW::default()
            .step(threads, StepSettings::new(step, 1e-3), slabs)
            .map(drop)
    })?
    .best;
    Ok(params as f64 / seconds)
}

/// Measures the disk of a folder.
pub(super) fn disk(facts: &mut DiskFacts, stop: &AtomicBool) {
    let folder = existing(&facts.folder).unwrap_or(Path::new("."));
    // Half of what is left may be needed by others.
    let most = facts
        .free
        .map_or(DISK_BYTES, |free| (free / 2).min(DISK_BYTES));
    match write_rate(folder, most, stop) {
        Ok(rate) => facts.write_rate = Some(rate),
        Err(error) => facts.failed = Some(error.to_string()),
    }
}

fn write_rate(folder: &Path, most: u64, stop: &AtomicBool) -> std::io::Result<f64> {
    let block = noise(DISK_BLOCK);
    if most < DISK_BLOCK as u64 {
        return Err(std::io::Error::other("the disk is full"));
    }
    let mut file = nameless(folder)?;
    let start = Instant::now();
    let mut bytes = 0;
    while bytes + block.len() as u64 <= most && !stop.load(Ordering::Relaxed) {
        file.write_all(&block)?;
        bytes += block.len() as u64;
        if bytes.is_multiple_of(DISK_FLUSHED) {
            file.sync_data()?;
            if start.elapsed() >= DISK_TIME {
                break;
            }
        }
    }
    file.sync_data()?;
    let seconds = start.elapsed().as_secs_f64();
    // Some file systems give room back only when a file gets shorter.
    file.seek(SeekFrom::Start(0))?;
    file.set_len(0)?;
    Ok(bytes.max(1) as f64 / seconds.max(1e-9))
}

/// A file without a name: it goes away with its last handle, whatever happens to the program.
fn nameless(folder: &Path) -> std::io::Result<File> {
    let path = folder.join(format!(".roundpipe-disk-{}", std::process::id()));
    let file = File::options().write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

/// Bytes that a disk which compresses cannot make fewer.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut words = Vec::with_capacity(bytes);
    while words.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        words.extend_from_slice(&state.to_le_bytes());
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file has no name while it is written, and the folder is as before.
    #[test]
    fn the_disk_is_left_as_it_was() {
        let folder = std::env::temp_dir().join(format!("roundpipe-disk-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut facts = DiskFacts {
            folder: folder.join("runs").join("mine"),
            free: Some(64 << 20),
            ..DiskFacts::default()
        };
        disk(&mut facts, &AtomicBool::new(false));
        assert!(facts.write_rate.is_some_and(|rate| rate > 0.0), "{facts:?}");
        let file = nameless(&folder).unwrap();
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        drop(file);
        facts.free = Some(1 << 20);
        (facts.write_rate, facts.failed) = (None, None);
        disk(&mut facts, &AtomicBool::new(false));
        assert_eq!(facts.failed.as_deref(), Some("the disk is full"));
        std::fs::remove_dir(&folder).unwrap();
        facts.free = Some(64 << 20);
        facts.folder = "/proc/no/folder".into();
        disk(&mut facts, &AtomicBool::new(false));
        assert!(facts.write_rate.is_none() || !Path::new("/proc").exists());
    }

    #[test]
    fn every_rate_of_the_host_is_above_0() {
        let rates = host().unwrap();
        for rate in [
            rates.memory_rate,
            rates.adamw_params,
            rates.f32_flops,
            rates.bf16_flops,
        ] {
            assert!(rate.is_finite() && rate > 0.0, "{rates:?}");
        }
    }
}
