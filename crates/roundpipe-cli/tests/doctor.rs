//! `roundpipe doctor` on this machine, without a driver: what it says, what it keeps, how it ends.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use roundpipe_train::profile::Profile;
use serde_json::Value;

mod kit;
use kit::text;

/// A folder of this test's own, and the program with its caches there.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let folder =
            std::env::temp_dir().join(format!("roundpipe-doctor-{name}-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("disk")).unwrap();
        Self(folder)
    }

    fn doctor(&self, cache: &Path, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_roundpipe"))
            .arg("doctor")
            .args(arguments)
            .env("ROUNDPIPE_CUDA_DRIVER", "off")
            .env("ROUNDPIPE_CACHE", cache)
            .env("HF_HOME", self.0.join("hub"))
            .env_remove("HF_HUB_CACHE")
            .current_dir(self.0.join("disk"))
            .output()
            .expect("the program starts")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn checks(diagnosis: &Value) -> Vec<(&str, &str)> {
    let checks = diagnosis["checks"].as_array().unwrap();
    let word = |check: &'_ Value, key: &str| check[key].as_str().map(str::to_owned);
    for check in checks {
        let has_hint = word(check, "hint").is_some();
        assert_eq!(has_hint, check["verdict"] != "pass", "{check}");
    }
    let pair = |check| {
        let check: &Value = check;
        (
            check["name"].as_str().unwrap(),
            check["verdict"].as_str().unwrap(),
        )
    };
    checks.iter().map(pair).collect()
}

/// The whole of it: one JSON value, a profile that loads and says the same, and nothing left on the
/// disk. Then a quick look shows the same rates without measuring.
#[test]
fn a_machine_is_measured_and_its_profile_is_kept() {
    let place = Place::new("whole");
    let cache = place.0.join("cache");
    let disk = place.0.join("disk");
    let output = place.doctor(&cache, &["--json", "--disk", disk.to_str().unwrap()]);
    let error = text(&output.stderr);
    let found: Value = serde_json::from_slice(&output.stdout).expect(&error);
    let ended = if found["verdict"] == "fail" { 1 } else { 0 };
    assert_eq!(output.status.code(), Some(ended), "{found}\n{error}");
    let lines = checks(&found);
    for name in [
        "driver",
        "processor",
        "host memory",
        "memory rate",
        "optimizer",
        "products",
        "disk",
        "hub cache",
        "profile",
    ] {
        assert!(lines.iter().any(|(other, _)| *other == name), "{name}");
    }
    assert!(lines.contains(&("driver", "warn")), "{lines:?}");
    let path = cache.join("machine.json");
    assert_eq!(found["saved"].as_str(), path.to_str());
    let profile = Profile::load(&path).unwrap().expect("it was saved");
    assert_eq!(serde_json::to_value(&profile).unwrap(), found["profile"]);
    assert!(profile.gpus.is_empty() && profile.host.cores > 0);
    assert_eq!(std::fs::read_dir(&disk).unwrap().count(), 0);

    let before = std::fs::read(&path).unwrap();
    let quick = place.doctor(&cache, &["--quick"]);
    let shown = text(&quick.stdout);
    let rate = format!("{:.0} MB/s", profile.host.disk_write_rate / 1e6);
    assert!(shown.contains(&rate), "{rate}: {shown}");
    assert!(!shown.contains("measurements are in"), "{shown}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    for line in shown.lines() {
        let is_check = ["pass  ", "warn  ", "fail  "]
            .iter()
            .any(|word| line.starts_with(word));
        let is_hint = line.trim_start().starts_with("hint: ");
        assert!(is_check || is_hint, "{line}");
        assert!(!line.contains('\u{1b}'), "colours in a pipe: {line}");
    }
}

/// What cannot be used is a line, not the end; what was asked for wrongly is usage.
#[test]
fn a_cache_that_cannot_be_written_is_a_warning() {
    let place = Place::new("cache");
    let file = place.0.join("file");
    std::fs::write(&file, "in the way").unwrap();
    let output = place.doctor(&file.join("cache"), &["--quick", "--json"]);
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let lines = checks(&found);
    assert!(lines.contains(&("profile", "warn")), "{found}");
    assert!(lines.contains(&("host rates", "warn")), "{found}");
    assert_eq!(found["profile"], Value::Null);

    let output = place.doctor(&place.0, &["--disk", "no/such/folder"]);
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    assert!(
        error.contains("--disk no/such/folder") && error.lines().count() == 1,
        "{error}"
    );
}
