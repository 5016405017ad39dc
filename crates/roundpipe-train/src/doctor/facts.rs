//! What a machine is, read from the system, the driver and the file system. Nothing is measured and
//! nothing is judged here; what a system does not tell stays `None`.

use std::path::{Path, PathBuf};

use roundpipe_models::hub::HubConfig;
use roundpipe_tensor::cuda::{compile, library};
use roundpipe_tensor::{Cuda, Device as _, DiskSpace, host_memory};

use crate::profile::{GpuProfile, Profile};

/// More files of a cache are not counted.
const MOST_ENTRIES: usize = 200_000;

/// A machine as it was found, and as it was measured where it was.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Machine {
    /// The version of CUDA that the driver is for, or why there is none.
    pub driver: Option<Result<String, String>>,
    /// Whether the user switched the driver off.
    pub driver_off: bool,
    /// NVIDIA's cards on the bus, whether a driver knows them or not.
    pub cards_on_bus: usize,
    /// CUDA's libraries, where there is a driver.
    pub libraries: Vec<Library>,
    /// Why attention is slower than it could be.
    pub attention_note: Option<String>,
    /// The cards that the driver knows.
    pub gpus: Vec<GpuFacts>,
    /// Processor and memory.
    pub host: HostFacts,
    /// Where runs go.
    pub disk: DiskFacts,
    /// Compiled kernels.
    pub kernel_cache: CacheFacts,
    /// Models of the hub.
    pub hub_cache: CacheFacts,
    /// The profile of the machine.
    pub profile_cache: CacheFacts,
    /// The rates, if they are known.
    pub profile: Option<Profile>,
    /// Whether this program was built with optimisation.
    pub is_release: bool,
}

/// One of CUDA's libraries.
#[derive(Debug, Clone, PartialEq)]
pub struct Library {
    /// As people call it.
    pub name: &'static str,
    /// Its file and version, or why there is none.
    pub found: Result<String, String>,
}

/// One card.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GpuFacts {
    /// Counted by the driver.
    pub index: u32,
    /// As the driver names it.
    pub name: String,
    /// Why it is not used.
    pub refused: Option<String>,
    /// All of its memory.
    pub memory: u64,
    /// What other programs left of it.
    pub free: u64,
    /// How it is connected, where the system tells.
    pub link: Option<Link>,
    /// Bytes of host memory that were asked to be pinned, and those that were.
    pub pinned: Option<(u64, u64)>,
    /// What the driver said when it pinned no more.
    pub pin_refusal: Option<String>,
    /// The rates.
    pub measured: Option<GpuProfile>,
    /// Why they could not be measured.
    pub failed: Option<String>,
}

/// How a card is connected to the host.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Of a lane, in giga-transfers per second: the slower of card and slot.
    pub gt_per_s: f64,
    /// Lanes in use.
    pub width: u32,
    /// Lanes that the card has.
    pub most_width: u32,
}

impl Link {
    /// Bytes per second that the wires carry one way.
    pub fn rate(&self) -> f64 {
        // 8 of 10 bits are data up to PCIe 2, 128 of 130 later.
        let share = if self.gt_per_s < 8.0 {
            0.8
        } else {
            128.0 / 130.0
        };
        self.gt_per_s * 1e9 * f64::from(self.width) * share / 8.0
    }
}

/// Processor and memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HostFacts {
    /// As the processor calls itself.
    pub processor: Option<String>,
    /// Instruction sets that matter here, of those it has.
    pub features: Vec<String>,
    /// Whether it is an x86 processor, whose instruction sets are listed.
    pub is_x86: bool,
    /// Cores that this process may use.
    pub cores: usize,
    /// Cores of the machine.
    pub machine_cores: Option<usize>,
    /// Memory that this process can have.
    pub memory: u64,
    /// Memory of the machine, with its swap.
    pub machine_memory: Option<u64>,
    /// Memory that is left now.
    pub available: Option<u64>,
    /// Memory that a user may lock; `None` without a limit.
    pub locked_limit: Option<u64>,
    /// Whether this is Linux under Windows.
    pub is_wsl: bool,
    /// The rates.
    pub rates: Option<HostRates>,
    /// Why they could not be measured.
    pub failed: Option<String>,
}

/// Rates of the host, per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HostRates {
    /// Bytes read plus bytes written, of a copy with all cores.
    pub memory_rate: f64,
    /// Parameters that AdamW updates.
    pub adamw_params: f64,
    /// Operations of a large f32 product.
    pub f32_flops: f64,
    /// Operations of a large bf16 product.
    pub bf16_flops: f64,
}

/// The disk where runs go.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DiskFacts {
    /// The folder that was given.
    pub folder: PathBuf,
    /// Room that is left.
    pub free: Option<u64>,
    /// Bytes that reach it, flushed.
    pub write_rate: Option<f64>,
    /// Why it could not be measured.
    pub failed: Option<String>,
}

/// A folder in which things are kept.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CacheFacts {
    /// Where; `None` for a user without a home.
    pub folder: Option<PathBuf>,
    /// What is in it.
    pub bytes: u64,
    /// Room that is left there.
    pub free: Option<u64>,
    /// Why nothing can be written there.
    pub refused: Option<String>,
    /// Whether the user forbids the network.
    pub is_offline: bool,
}

/// Looks at this machine.
pub(super) fn look(disk: &Path) -> Machine {
    let driver = library::driver();
    let has_driver = driver.is_ok();
    let gpus = if has_driver { gpus() } else { Vec::new() };
    let has_gpus = !gpus.is_empty();
    let hub = HubConfig::from_env();
    let hub_folder = Some(hub.cache).filter(|path| !path.as_os_str().is_empty());
    let profile_folder = Profile::path().and_then(|path| Some(path.parent()?.to_path_buf()));
    Machine {
        driver: Some(one_line(driver)),
        cards_on_bus: cards_on_bus(Path::new("/sys/bus/pci/devices")),
        libraries: if has_gpus { libraries() } else { Vec::new() },
        attention_note: has_gpus.then(Cuda::attention_note).flatten(),
        gpus,
        host: host(),
        disk: DiskFacts {
            folder: disk.to_path_buf(),
            free: existing(disk).and_then(DiskSpace::at).map(|s| s.free.0),
            ..DiskFacts::default()
        },
        kernel_cache: cache(compile::folder()),
        hub_cache: CacheFacts {
            is_offline: hub.offline,
            ..cache(hub_folder)
        },
        profile_cache: cache(profile_folder),
        profile: None,
        is_release: !cfg!(debug_assertions),
        driver_off: false,
    }
}

fn one_line(found: roundpipe_tensor::Result<impl ToString>) -> Result<String, String> {
    found
        .map(|found| found.to_string())
        .map_err(|e| e.to_string())
}

fn libraries() -> Vec<Library> {
    let line = |path: &Path, version: String| format!("{version}, {}", path.display());
    let found = [
        (
            "NVRTC",
            library::nvrtc().map(|lib| line(lib.path(), lib.version().to_string())),
        ),
        (
            "cuBLASLt",
            library::cublaslt().map(|lib| line(lib.path(), lib.version().to_string())),
        ),
    ];
    let found = found.into_iter();
    found
        .map(|(name, found)| Library {
            name,
            found: one_line(found),
        })
        .collect()
}

fn gpus() -> Vec<GpuFacts> {
    let count = Cuda::count().unwrap_or(0) as u32;
    (0..count).map(gpu).collect()
}

fn gpu(index: u32) -> GpuFacts {
    let facts = GpuFacts {
        index,
        name: "a GPU".to_owned(),
        ..GpuFacts::default()
    };
    match Cuda::refuses(index) {
        Ok(None) => {}
        Ok(Some(why)) => {
            return GpuFacts {
                refused: Some(why),
                ..facts
            };
        }
        Err(error) => {
            return GpuFacts {
                failed: Some(error.to_string()),
                ..facts
            };
        }
    }
    match Cuda::new(index) {
        Ok(card) => GpuFacts {
            name: card.name(),
            memory: card.total_memory().0,
            free: card.memory().0,
            link: card.pci_address().and_then(|address| {
                link(&Path::new("/sys/bus/pci/devices").join(address.to_lowercase()))
            }),
            ..facts
        },
        Err(error) => GpuFacts {
            failed: Some(error.to_string()),
            ..facts
        },
    }
}

/// The link of a card whose folder this is; the slot's folder is the one above it.
fn link(card: &Path) -> Option<Link> {
    let card = card.canonicalize().ok()?;
    let number = |folder: &Path, file: &str| -> Option<f64> {
        let text = std::fs::read_to_string(folder.join(file)).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    let of_card = number(&card, "max_link_speed")?;
    let of_slot = card
        .parent()
        .and_then(|slot| number(slot, "max_link_speed"));
    let width = number(&card, "current_link_width")?;
    let most = number(&card, "max_link_width")?;
    let is_known = of_card > 0.0 && (1.0..=64.0).contains(&width) && (1.0..=64.0).contains(&most);
    is_known.then_some(Link {
        gt_per_s: of_slot
            .filter(|rate| *rate > 0.0)
            .map_or(of_card, |slot| slot.min(of_card)),
        width: width as u32,
        most_width: most as u32,
    })
}

/// Display and compute cards of NVIDIA, as Linux lists the bus.
fn cards_on_bus(devices: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(devices) else {
        return 0;
    };
    let is = |folder: &Path, file: &str, start: &str| {
        std::fs::read_to_string(folder.join(file)).is_ok_and(|text| text.starts_with(start))
    };
    let folders = entries.flatten().map(|entry| entry.path());
    folders
        .filter(|card| is(card, "vendor", "0x10de") && is(card, "class", "0x03"))
        .count()
}

fn host() -> HostFacts {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let cpuinfo = read("/proc/cpuinfo");
    let machine_cores = cpuinfo
        .lines()
        .filter(|line| line.starts_with("processor"))
        .count();
    let kernel = read("/proc/sys/kernel/osrelease").to_lowercase();
    HostFacts {
        processor: processor(&cpuinfo),
        features: features(&cpuinfo),
        is_x86: cfg!(target_arch = "x86_64"),
        cores,
        machine_cores: (machine_cores > 0).then_some(machine_cores),
        memory: host_memory::total().0,
        machine_memory: machine_memory(&read("/proc/meminfo")),
        available: host_memory::available().map(|left| left.0),
        locked_limit: locked_limit(&read("/proc/self/limits")),
        is_wsl: kernel.contains("microsoft"),
        rates: None,
        failed: None,
    }
}

fn processor(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo
        .lines()
        .find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn features(cpuinfo: &str) -> Vec<String> {
    let names = [
        ("avx2", "AVX2"),
        ("avx512f", "AVX-512"),
        ("avx512_bf16", "AVX512-BF16"),
        ("amx_bf16", "AMX"),
    ];
    let line = cpuinfo.lines().find(|line| line.starts_with("flags"));
    let flags = line.unwrap_or_default();
    let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
    let there = names.iter().filter(|(flag, _)| has(flag));
    there.map(|(_, name)| (*name).to_owned()).collect()
}

fn machine_memory(meminfo: &str) -> Option<u64> {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    };
    field("MemTotal:")?.checked_add(field("SwapTotal:").unwrap_or(0))
}

/// What `ulimit -l` says, in bytes.
fn locked_limit(limits: &str) -> Option<u64> {
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The path itself, or the nearest folder above it that is there.
pub(super) fn existing(path: &Path) -> Option<&Path> {
    let mut above = path.ancestors().map(|path| {
        if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        }
    });
    above.find(|path| path.exists())
}

fn cache(folder: Option<PathBuf>) -> CacheFacts {
    let Some(folder) = folder else {
        return CacheFacts::default();
    };
    let there = existing(&folder);
    CacheFacts {
        bytes: bytes_below(&folder),
        free: there.and_then(DiskSpace::at).map(|space| space.free.0),
        refused: there.and_then(unwritable),
        folder: Some(folder),
        is_offline: false,
    }
}

/// Why no file can be made in a folder.
fn unwritable(folder: &Path) -> Option<String> {
    let file = folder.join(format!(".roundpipe-doctor-{}", std::process::id()));
    let made = std::fs::File::options()
        .write(true)
        .create_new(true)
        .open(&file);
    match made {
        Ok(_) => std::fs::remove_file(&file).err().map(|e| e.to_string()),
        Err(error) => Some(error.to_string()),
    }
}

/// Bytes of all files below a folder; links count for nothing.
fn bytes_below(folder: &Path) -> u64 {
    let mut bytes = 0u64;
    let mut entries_left = MOST_ENTRIES;
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(folder) else {
            continue;
        };
        for entry in entries.flatten() {
            entries_left = entries_left.saturating_sub(1);
            if entries_left == 0 {
                return bytes;
            }
            match entry.metadata() {
                Ok(data) if data.is_dir() => folders.push(entry.path()),
                Ok(data) if data.is_file() => bytes = bytes.saturating_add(data.len()),
                _ => {}
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_linux_are_read() {
        let cpuinfo =
            "processor : 0\nmodel name : A CPU\nflags : fpu avx2 avx512f\nprocessor : 1\n";
        assert_eq!(processor(cpuinfo).as_deref(), Some("A CPU"));
        assert_eq!(features(cpuinfo), ["AVX2", "AVX-512"]);
        assert_eq!(features(""), Vec::<String>::new());
        let meminfo = "MemTotal:  1000 kB\nMemFree: 1 kB\nSwapTotal: 24 kB\n";
        assert_eq!(machine_memory(meminfo), Some(1024 * 1024));
        assert_eq!(machine_memory(""), None);
        let limits = "Max locked memory         8388608              8388608   bytes\n";
        assert_eq!(locked_limit(limits), Some(8_388_608));
        let unlimited = "Max locked memory         unlimited   unlimited   bytes\n";
        assert_eq!(locked_limit(unlimited), None);
    }

    /// Folders as Linux has them: a slot with a slower generation and a card in it.
    #[test]
    fn a_link_is_as_fast_as_its_slower_end() {
        let root = std::env::temp_dir().join(format!("roundpipe-link-{}", std::process::id()));
        let card = root.join("slot").join("0000:01:00.0");
        std::fs::create_dir_all(&card).unwrap();
        let put = |path: &Path, name: &str, text: &str| {
            std::fs::write(path.join(name), text).unwrap();
        };
        assert_eq!(link(&card), None);
        put(&card, "max_link_speed", "32.0 GT/s PCIe\n");
        put(&card, "current_link_width", "8\n");
        put(&card, "max_link_width", "16\n");
        put(&card, "vendor", "0x10de\n");
        put(&card, "class", "0x030200\n");
        assert_eq!(link(&card).unwrap().gt_per_s, 32.0);
        put(card.parent().unwrap(), "max_link_speed", "16.0 GT/s PCIe\n");
        let found = link(&card).unwrap();
        assert_eq!(
            (found.gt_per_s, found.width, found.most_width),
            (16.0, 8, 16)
        );
        assert!((found.rate() / 15.75e9 - 1.0).abs() < 0.01);
        assert_eq!(cards_on_bus(&root.join("slot")), 1);
        assert_eq!(cards_on_bus(&root.join("none")), 0);
        assert!(bytes_below(&root) > 40);
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(existing(&card), Some(std::env::temp_dir().as_path()));
        assert!(existing(Path::new("no/such/folder")).is_some());
    }
}
