//! Finding CUDA's libraries at run time.
//!
//! The loader's own places are tried first, then what the variable `ROUNDPIPE_CUDA_LIBS` lists, then the folders of
//! a toolkit, then `nvidia/*/lib` of Python environments. An entry `only` in the list leaves out all other places, the
//! loader's too. A library that was loaded by its path is found by name afterwards, which is how the bindings get it.
//!
//! Asked once per process and library: the answer stays.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// The driver's library, which comes with the driver.
///
/// # Errors
/// One line that says how to get it.
pub fn driver() -> Result<()> {
    static FOUND: OnceLock<bool> = OnceLock::new();
    // SAFETY: asks the loader for the library; its start-up code is the driver's own.
    let present = || unsafe { cudarc::driver::sys::is_culib_present() };
    let found = || (!only() || preload(&["libcuda.so"])) && present();
    match *FOUND.get_or_init(found) {
        true => Ok(()),
        false => Err(missing("libcuda", "install NVIDIA's driver, or run on the CPU")),
    }
}

/// The compiler of our kernels; its version.
///
/// # Errors
/// One line that says how to get it.
pub fn nvrtc() -> Result<String> {
    static FOUND: OnceLock<Option<String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let loaded = preload(&["libnvrtc-builtins.so", "libnvrtc.so"]);
        // SAFETY: as for the driver.
        if (only() && !loaded) || !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
            return None;
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both numbers are written by the call.
        let asked = unsafe { cudarc::nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
        asked.result().ok().map(|()| format!("{major}.{minor}"))
    });
    found
        .clone()
        .ok_or_else(|| missing("libnvrtc", "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc`"))
}

/// The library of products.
///
/// # Errors
/// One line that says how to get it.
pub fn cublaslt() -> Result<()> {
    static FOUND: OnceLock<bool> = OnceLock::new();
    // SAFETY: as for the driver.
    let present = || unsafe { cudarc::cublaslt::sys::is_culib_present() };
    match *FOUND.get_or_init(|| (preload(&["libcublasLt.so"]) || !only()) && present()) {
        true => Ok(()),
        false => Err(missing("libcublasLt", "install the CUDA toolkit, or `pip install nvidia-cublas`")),
    }
}

/// The library of attention and convolutions; optional.
pub fn cudnn() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    // SAFETY: as for the driver.
    let present = || unsafe { cudarc::cudnn::sys::is_culib_present() };
    *FOUND.get_or_init(|| (preload(&["libcudnn.so"]) || !only()) && present())
}

fn missing(library: &'static str, way: &str) -> Error {
    let what = format!("{library} is not here; {way}; or name its folder in ROUNDPIPE_CUDA_LIBS");
    Error::Invalid { op: "cuda", what }
}

/// Loads libraries by path where the loader would not find them by name. Only what is not found by name is
/// loaded: two copies of one library in a process do not get along. Whether the last one is there now; a loader that
/// knows it by another name may have it all the same.
fn preload(names: &[&str]) -> bool {
    let mut loaded = false;
    for name in names {
        // SAFETY: loading runs the library's start-up code; these are NVIDIA's own, needed by name later anyway.
        loaded = !only() && unsafe { libloading::Library::new(*name) }.is_ok();
        if loaded {
            continue;
        }
        let found = folders().into_iter().find_map(|folder| newest(&folder, name));
        // SAFETY: as above. The handle is kept for ever: what is loaded stays.
        if let Some(Ok(library)) = found.map(|path| unsafe { libloading::Library::new(path) }) {
            LOADED.get_or_init(Default::default).lock().map(|mut all| all.push(library)).ok();
            loaded = true;
        }
    }
    loaded
}

/// The folders of `ROUNDPIPE_CUDA_LIBS`.
fn listed() -> Vec<PathBuf> {
    let listed = std::env::var_os("ROUNDPIPE_CUDA_LIBS").unwrap_or_default();
    std::env::split_paths(&listed).filter(|path| !path.as_os_str().is_empty()).collect()
}

/// Whether no other folders count.
fn only() -> bool {
    listed().iter().any(|path| path.as_os_str() == "only")
}

/// Libraries that were loaded by path.
static LOADED: OnceLock<std::sync::Mutex<Vec<libloading::Library>>> = OnceLock::new();

/// The file of that name in a folder, with the highest version behind it.
fn newest(folder: &Path, name: &str) -> Option<PathBuf> {
    let files = std::fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()).map(|entry| entry.path());
    let fits = |path: &PathBuf| {
        path.file_name().and_then(|file| file.to_str()).is_some_and(|file| file.starts_with(name))
    };
    files.filter(fits).max()
}

/// Where libraries may lie beyond the loader's places.
fn folders() -> Vec<PathBuf> {
    let mut folders = listed();
    if only() {
        folders.retain(|path| path.as_os_str() != "only");
        return folders;
    }
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(home) = std::env::var_os(variable) {
            folders.push(PathBuf::from(home).join("lib64"));
        }
    }
    folders.push("/usr/local/cuda/lib64".into());
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        if let Some(home) = std::env::var_os(variable) {
            folders.extend(python_folders(&PathBuf::from(home)));
        }
    }
    // The environment of the `python3` that a shell would find.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let python = std::env::split_paths(&path).map(|folder| folder.join("python3")).find(|file| file.exists());
    if let Some(home) = python.as_ref().and_then(|file| file.parent()).and_then(Path::parent) {
        folders.extend(python_folders(home));
    }
    folders
}

/// `lib/python*/site-packages/nvidia/*/lib` and `nvidia/*/*/lib` of an environment.
fn python_folders(home: &Path) -> Vec<PathBuf> {
    let list = |folder: PathBuf| -> Vec<PathBuf> {
        std::fs::read_dir(folder)
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok())
            .map(|e| e.path())
            .collect()
    };
    let pythons = list(home.join("lib"));
    let sites = pythons
        .iter()
        .flat_map(|python| ["site-packages", "dist-packages"].map(|site| python.join(site).join("nvidia")));
    let packages = sites.flat_map(list);
    packages
        .flat_map(|package| [package.join("lib"), package.join("lib64")])
        .filter(|lib| lib.is_dir())
        .collect()
}
