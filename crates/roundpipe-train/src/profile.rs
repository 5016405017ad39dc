//! What was measured of a machine: written by `roundpipe doctor`, read by `roundpipe plan`.
//!
//! One file of JSON per user, replaced as a whole. It describes one machine: a file that names other
//! cards than those that are there is not used, and that is said.

use std::path::{Path, PathBuf};

use roundpipe_files::{AtomicFile, FileLimits, small};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Files of another version are measured again.
const VERSION: u32 = 1;
const LIMITS: FileLimits = FileLimits {
    bytes: 1 << 20,
    json_values: 10_000,
};

/// A machine as it was measured. Rates are bytes or operations per second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    version: u32,
    /// One entry per card.
    pub gpus: Vec<GpuProfile>,
    /// Processor, memory and disk.
    pub host: HostProfile,
}

/// One card.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuProfile {
    /// As the driver names it.
    pub name: String,
    /// All of its memory.
    pub memory: u64,
    /// Of a large bf16 product.
    pub bf16_flops: f64,
    /// Of its own memory, read and written.
    pub memory_rate: f64,
    /// From pinned host memory to the card, alone.
    pub upload_rate: f64,
    /// From the card to pinned host memory, alone.
    pub download_rate: f64,
    /// Both ways together, while both are under way.
    pub both_rate: f64,
}

/// Processor, memory and disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HostProfile {
    /// Cores that this process may use.
    pub cores: usize,
    /// Memory of the machine, or of the group of processes that this one is in.
    pub memory: u64,
    /// Of a copy, counted as bytes read plus bytes written.
    pub memory_rate: f64,
    /// Parameters that AdamW updates per second, bf16 weights with f32 masters.
    pub adamw_params: f64,
    /// Of a large f32 product.
    pub f32_flops: f64,
    /// Of a large bf16 product.
    pub bf16_flops: f64,
    /// Bytes that reach the disk, flushed.
    pub disk_write_rate: f64,
}

impl Profile {
    /// Of what was measured now.
    pub fn new(gpus: Vec<GpuProfile>, host: HostProfile) -> Self {
        Self {
            version: VERSION,
            gpus,
            host,
        }
    }

    /// `machine.json` in `ROUNDPIPE_CACHE`, or in the usual place for such things; `None` for a
    /// user without a home.
    pub fn path() -> Option<PathBuf> {
        let variable = |name: &str| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        variable("ROUNDPIPE_CACHE")
            .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("roundpipe")))
            .or_else(|| variable("HOME").map(|home| home.join(".cache").join("roundpipe")))
            .map(|folder| folder.join("machine.json"))
    }

    /// The profile in a file; `None` without a file, or with one of another version.
    ///
    /// # Errors
    /// For a file that cannot be read or is no profile.
    pub fn load(path: &Path) -> Result<Option<Self>> {
        let Some(bytes) = small::read_if_there(path, LIMITS)? else {
            return Ok(None);
        };
        let wrong = |why: String| {
            Error::Failed(format!(
                "{}: {why}; run `roundpipe doctor` again",
                path.display()
            ))
        };
        let value = small::parse_json(path, &bytes, LIMITS)?;
        if value.get("version").and_then(serde_json::Value::as_u64) != Some(u64::from(VERSION)) {
            return Ok(None);
        }
        let profile: Self = serde_json::from_value(value).map_err(|e| wrong(e.to_string()))?;
        if !profile.is_sane() {
            return Err(wrong("has a rate that is not above 0".into()));
        }
        Ok(Some(profile))
    }

    /// Replaces the file.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)
                .map_err(|e| Error::Failed(format!("{}: {e}", folder.display())))?;
        }
        let text = serde_json::to_vec_pretty(self)
            .map_err(|e| Error::Failed(format!("the profile cannot be written: {e}")))?;
        Ok(AtomicFile::of_bytes(path, &text)?.finish()?)
    }

    fn is_sane(&self) -> bool {
        let host = &self.host;
        let of_host = [
            host.memory_rate,
            host.adamw_params,
            host.f32_flops,
            host.bf16_flops,
            host.disk_write_rate,
        ];
        let of_gpu = |gpu: &GpuProfile| {
            [
                gpu.bf16_flops,
                gpu.memory_rate,
                gpu.upload_rate,
                gpu.download_rate,
                gpu.both_rate,
            ]
        };
        let mut all = self.gpus.iter().flat_map(of_gpu).chain(of_host);
        host.cores > 0 && all.all(|rate| rate.is_finite() && rate > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> Profile {
        let gpu = GpuProfile {
            name: "Card".into(),
            memory: 24 << 30,
            bf16_flops: 165e12,
            memory_rate: 1e12,
            upload_rate: 25e9,
            download_rate: 26e9,
            both_rate: 45e9,
        };
        let host = HostProfile {
            cores: 16,
            memory: 128 << 30,
            memory_rate: 60e9,
            adamw_params: 2e9,
            f32_flops: 1e12,
            bf16_flops: 2e12,
            disk_write_rate: 1e9,
        };
        Profile::new(vec![gpu], host)
    }

    #[test]
    fn what_is_saved_is_loaded() {
        let folder = std::env::temp_dir().join(format!("roundpipe-profile-{}", std::process::id()));
        let path = folder.join("deep").join("machine.json");
        assert_eq!(Profile::load(&path).unwrap(), None);
        profile().save(&path).unwrap();
        assert_eq!(Profile::load(&path).unwrap(), Some(profile()));
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("\"version\": 1", "\"version\": 0")).unwrap();
        assert_eq!(Profile::load(&path).unwrap(), None);
        std::fs::write(&path, text.replace("25000000000.0", "-1.0")).unwrap();
        let error = Profile::load(&path).unwrap_err().to_string();
        assert!(error.contains("machine.json"), "{error}");
        assert!(error.contains("roundpipe doctor"), "{error}");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
