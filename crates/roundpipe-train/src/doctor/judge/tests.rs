//! Machines that are made up: each fault alone, its verdict, and a word of its hint.

use super::*;
use crate::doctor::facts::{DiskFacts, HostFacts, Library, Link};
use crate::profile::{HostProfile, Profile};

fn rates() -> GpuProfile {
    GpuProfile {
        name: "Card".into(),
        memory: 24 << 30,
        bf16_flops: 165e12,
        memory_rate: 900e9,
        upload_rate: 26e9,
        download_rate: 26.5e9,
        both_rate: 46e9,
    }
}

/// A workstation with one card where all is well.
fn good() -> Machine {
    let cache = |name: &str| CacheFacts {
        folder: Some(format!("/home/me/.cache/{name}").into()),
        bytes: 3 << 30,
        free: Some(500 << 30),
        ..CacheFacts::default()
    };
    let gpu = GpuFacts {
        name: "Card".into(),
        memory: 24 << 30,
        free: 23 << 30,
        link: Some(Link {
            gt_per_s: 16.0,
            width: 16,
            most_width: 16,
        }),
        pinned: Some((4 << 30, 4 << 30)),
        measured: Some(rates()),
        ..GpuFacts::default()
    };
    let library = |name| Library {
        name,
        found: Ok("13.0, /usr/lib/lib.so".into()),
    };
    Machine {
        driver: Some(Ok("13.0".into())),
        cards_on_bus: 1,
        libraries: vec![library("NVRTC"), library("cuBLASLt")],
        gpus: vec![gpu],
        host: HostFacts {
            processor: Some("CPU".into()),
            features: vec!["AVX2".into()],
            is_x86: true,
            cores: 16,
            machine_cores: Some(16),
            memory: 128 << 30,
            machine_memory: Some(128 << 30),
            available: Some(120 << 30),
            locked_limit: Some(8 << 20),
            rates: Some(HostRates {
                memory_rate: 60e9,
                adamw_params: 2e9,
                f32_flops: 1e12,
                bf16_flops: 2e12,
            }),
            ..HostFacts::default()
        },
        disk: DiskFacts {
            folder: "runs".into(),
            free: Some(500 << 30),
            write_rate: Some(2e9),
            failed: None,
        },
        kernel_cache: cache("roundpipe/kernels"),
        hub_cache: cache("huggingface/hub"),
        profile_cache: cache("roundpipe"),
        is_release: true,
        ..Machine::default()
    }
}

/// The lines that are not as they should be.
fn faults(machine: &Machine) -> Vec<Check> {
    let checks = judge(machine);
    for check in &checks {
        let is_plain = |text: &str| !text.is_empty() && !text.contains('\n');
        assert!(is_plain(&check.found), "{check:?}");
        assert_eq!(
            check.hint.is_some(),
            check.verdict != Verdict::Pass,
            "{check:?}"
        );
        assert!(check.hint.as_deref().is_none_or(is_plain), "{check:?}");
    }
    let bad = checks.into_iter();
    bad.filter(|check| check.verdict != Verdict::Pass).collect()
}

#[test]
fn a_good_machine_has_no_fault() {
    assert_eq!(faults(&good()), []);
    let text = format!("{:?}", judge(&good()));
    for part in [
        "26.0 GB/s up, 26.5 down, 46.0 both",
        "16 GT/s x16, 31.5 GB/s",
        "4.00 GiB of 4.00 GiB",
        "165 TFLOP/s",
        "2.00 billion parameters a second",
        "2000 MB/s",
        "7.6 billion",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

type Change = fn(&mut Machine);

#[test]
fn each_fault_gets_its_verdict_and_its_hint() {
    use Verdict::{Fail, Warn};
    let cases: &[(&str, Verdict, &str, Change)] = &[
        ("build", Warn, "--release", |m| m.is_release = false),
        ("driver", Warn, "--gpus all", |m| {
            m.gpus.clear();
            m.libraries.clear();
        }),
        ("driver", Fail, "install or update the driver", |m| {
            no_driver(m)
        }),
        ("driver", Warn, "train on the processor", |m| {
            no_driver(m);
            m.cards_on_bus = 0;
        }),
        ("driver", Warn, "train on the processor", |m| {
            no_driver(m);
            m.driver_off = true;
        }),
        ("NVRTC", Fail, "names the fix", |m| {
            m.libraries[0].found = Err("NVRTC is not here; `pip install …`".into());
        }),
        ("cuDNN", Warn, "faster attention", |m| {
            m.attention_note = Some("attention by our own kernels".into());
        }),
        ("cuda:0", Fail, "nvidia-smi", |m| {
            m.gpus[0].failed = Some("lost".into());
        }),
        ("cuda:0", Warn, "hold its memory", |m| {
            m.gpus[0].free = 10 << 30
        }),
        ("cuda:0 PCIe", Warn, "8 of its 16 lanes", |m| {
            m.gpus[0].link.as_mut().unwrap().width = 8;
            m.gpus[0].measured = Some(GpuProfile {
                upload_rate: 13e9,
                download_rate: 13e9,
                both_rate: 24e9,
                ..rates()
            });
        }),
        ("cuda:0 PCIe", Warn, "riser", |m| {
            m.gpus[0].measured = Some(GpuProfile {
                upload_rate: 12e9,
                ..rates()
            });
        }),
        ("cuda:0 PCIe", Warn, "hypervisor", |m| {
            m.gpus[0].measured = Some(GpuProfile {
                both_rate: 27e9,
                ..rates()
            });
        }),
        ("cuda:0 pinned memory", Warn, "memlock=-1", |m| {
            m.gpus[0].pinned = Some((4 << 30, 1 << 30));
        }),
        ("cuda:0 pinned memory", Warn, "WSL2", |m| {
            m.gpus[0].pinned = Some((4 << 30, 1 << 30));
            m.host.is_wsl = true;
        }),
        ("processor", Warn, "4 cores", |m| m.host.cores = 2),
        ("processor", Warn, "AVX2", |m| m.host.features.clear()),
        ("host memory", Warn, "128.00 GiB", |m| {
            m.host.memory = 64 << 30
        }),
        ("host memory", Warn, "twice the GPUs' memory", |m| {
            m.host.memory = 32 << 30;
            m.host.machine_memory = None;
        }),
        ("host rates", Warn, "--quick", |m| m.host.rates = None),
        ("host rates", Warn, "other programs", |m| {
            m.host.failed = Some("no memory".into());
        }),
        ("memory rate", Warn, "channels", |m| {
            m.host.rates.as_mut().unwrap().memory_rate = 5e9;
        }),
        ("disk", Warn, "save_every", |m| {
            m.disk.write_rate = Some(60e6)
        }),
        ("disk", Warn, "little room", |m| m.disk.free = Some(5 << 30)),
        ("disk", Fail, "full", |m| m.disk.free = Some(5 << 20)),
        ("disk", Fail, "--out", |m| {
            m.disk.failed = Some("Permission denied".into());
        }),
        ("kernel cache", Warn, "ROUNDPIPE_KERNEL_CACHE", |m| {
            m.kernel_cache.refused = Some("read-only".into());
        }),
        ("hub cache", Warn, "HF_HOME", |m| m.hub_cache.folder = None),
        ("hub cache", Warn, "larger disk", |m| {
            m.hub_cache.free = Some(1 << 30);
        }),
        ("profile", Warn, "ROUNDPIPE_CACHE", |m| {
            m.profile_cache.refused = Some("read-only".into());
        }),
    ];
    for (name, verdict, word, change) in cases {
        let mut machine = good();
        change(&mut machine);
        let found = faults(&machine);
        assert_eq!(found.len(), 1, "{name}, {word}: {found:?}");
        let check = &found[0];
        assert_eq!((check.name.as_str(), check.verdict), (*name, *verdict));
        let hint = check.hint.as_deref().unwrap_or_default();
        assert!(hint.contains(word), "{name}: {hint}");
    }
}

fn no_driver(machine: &mut Machine) {
    machine.driver = Some(Err("libcuda is not here".into()));
    machine.gpus.clear();
    machine.libraries.clear();
}

/// A card that is too old is left out, and the rest is judged as if it were not there.
#[test]
fn a_card_that_is_left_out_counts_for_nothing() {
    let mut machine = good();
    machine.gpus.insert(
        0,
        GpuFacts {
            refused: Some("Old: compute capability 7.5".into()),
            memory: 1 << 50,
            ..GpuFacts::default()
        },
    );
    machine.gpus[1].index = 1;
    let found = faults(&machine);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].found.contains("7.5"));
    let lines = judge(&machine);
    assert!(lines.iter().any(|line| line.name == "cuda:1 PCIe"));
}

/// A quick look judges by what is saved, as far as it is of the same cards.
#[test]
fn a_quick_look_takes_the_rates_of_the_profile() {
    let mut machine = good();
    machine.host.rates = None;
    machine.disk.write_rate = None;
    machine.gpus[0].measured = None;
    let host = HostProfile {
        cores: 16,
        memory: 128 << 30,
        memory_rate: 60e9,
        adamw_params: 2e9,
        f32_flops: 1e12,
        bf16_flops: 2e12,
        disk_write_rate: 50e6,
    };
    machine.profile = Some(Profile::new(vec![rates()], host.clone()));
    let found = faults(&machine);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].found.contains("50 MB/s"));
    let other = GpuProfile {
        name: "Another".into(),
        ..rates()
    };
    machine.profile = Some(Profile::new(vec![other], host));
    let has_bus = |machine: &Machine| judge(machine).iter().any(|c| c.name.ends_with("PCIe"));
    assert!(!has_bus(&machine));
}
