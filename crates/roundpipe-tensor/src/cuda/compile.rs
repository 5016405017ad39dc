//! Kernels from CUDA C++ to machine code: compiled by NVRTC for the GPU at hand, once, and kept on disk.
//!
//! A [`Unit`] is one kernel file with its macros. The name of its image on disk is a hash of everything that the
//! machine code depends on: text, macros, architecture, compiler version. Images are written beside and renamed
//! into place, so that two processes never see half of one; a broken or unwritable folder only costs time.

use std::ffi::{CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::nvrtc::sys;

use super::library;
use crate::error::{Error, Result};

/// In front of every kernel file.
const COMMON: &str = include_str!("kernels/common.cuh");

/// One kernel file with its macros.
#[derive(Debug, Clone)]
pub struct Unit {
    name: &'static str,
    text: &'static str,
    entry: &'static str,
    defines: Vec<(&'static str, String)>,
}

impl Unit {
    /// The kernel `entry` (declared `extern "C" __global__`) of a file.
    pub fn new(name: &'static str, text: &'static str, entry: &'static str) -> Self {
        Self { name, text, entry, defines: Vec::new() }
    }

    /// Defines a macro.
    #[must_use]
    pub fn with(mut self, macro_name: &'static str, value: impl ToString) -> Self {
        self.defines.push((macro_name, value.to_string()));
        self
    }

    /// The kernel function's name.
    pub fn entry(&self) -> &'static str {
        self.entry
    }

    /// For errors: file, kernel and macros.
    pub fn name(&self) -> String {
        let defines: Vec<String> =
            self.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
        format!("{}:{} [{}]", self.name, self.entry, defines.join(" "))
    }

    /// Tells units apart.
    pub(crate) fn key(&self) -> String {
        let mut key = String::with_capacity(64);
        key.push_str(self.name);
        key.push(':');
        key.push_str(self.entry);
        for (name, value) in &self.defines {
            key.push(' ');
            key.push_str(name);
            key.push('=');
            key.push_str(value);
        }
        key
    }

    fn source(&self) -> String {
        let mut source = String::with_capacity(COMMON.len() + self.text.len() + 256);
        for (name, value) in &self.defines {
            source.push_str(&format!("#define {name} {value}\n"));
        }
        source.push_str("#line 1 \"common.cuh\"\n");
        source.push_str(COMMON);
        source.push_str(&format!("\n#line 1 \"{}.cu\"\n", self.name));
        source.push_str(self.text);
        source
    }
}

/// The machine code of a unit for a compute capability.
pub(crate) fn image(unit: &Unit, capability: (i32, i32)) -> Result<Vec<u8>> {
    let version = library::nvrtc()?;
    let source = unit.source();
    let arch = format!("sm_{}{}", capability.0, capability.1);
    let name = format!("{}-{arch}-{:032x}.cubin", unit.entry, hash(&[&source, &arch, &version]));
    let path = folder().map(|folder| folder.join(name));
    if let Some(image) =
        path.as_ref().and_then(|path| std::fs::read(path).ok()).filter(|image| image.len() > 4)
    {
        return Ok(image);
    }
    let image = compile(unit, &source, &arch)?;
    if let Some(path) = path {
        keep(&path, &image);
    }
    Ok(image)
}

/// Compiles a unit for an architecture such as `sm_90`; no GPU is needed.
///
/// # Errors
/// One line per complaint of the compiler, or which library is missing.
pub fn check(unit: &Unit, arch: &str) -> Result<usize> {
    library::nvrtc()?;
    compile(unit, &unit.source(), arch).map(|image| image.len())
}

fn compile(unit: &Unit, source: &str, arch: &str) -> Result<Vec<u8>> {
    let refuse = |what: String| Error::invalid("compile", format!("{}: {what}", unit.name()));
    let text = CString::new(source).map_err(|_| refuse("the source holds a zero".to_owned()))?;
    let name = CString::new(format!("{}.cu", unit.name)).expect("names have no zero");
    let mut program: sys::nvrtcProgram = std::ptr::null_mut();
    // SAFETY: text and name live past the destruction of the program; no headers are given.
    let made = unsafe {
        sys::nvrtcCreateProgram(
            &mut program,
            text.as_ptr(),
            name.as_ptr(),
            0,
            std::ptr::null(),
            std::ptr::null(),
        )
    };
    made.result().map_err(|e| refuse(format!("{e}")))?;
    let program = Program(program);
    let options = [
        format!("--gpu-architecture={arch}"),
        "--std=c++17".to_owned(),
        "--extra-device-vectorization".to_owned(),
        "-default-device".to_owned(),
    ];
    let options: Vec<CString> = options.iter().map(|o| CString::new(o.as_str()).expect("no zero")).collect();
    let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    // SAFETY: the program is alive, the options live past the call.
    let compiled = unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as c_int, pointers.as_ptr()) };
    compiled.result().map_err(|e| refuse(format!("{e}: {}", program.log())))?;
    let mut size = 0;
    // SAFETY: the program is alive and compiled.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size) }.result().map_err(|e| refuse(format!("{e}")))?;
    let mut image = vec![0u8; size];
    // SAFETY: the buffer has the size just asked for.
    unsafe { sys::nvrtcGetCUBIN(program.0, image.as_mut_ptr().cast()) }
        .result()
        .map_err(|e| refuse(format!("{e}")))?;
    Ok(image)
}

struct Program(sys::nvrtcProgram);

impl Program {
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program is alive.
        if unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut size) }.result().is_err() {
            return String::new();
        }
        let mut log = vec![0u8; size];
        // SAFETY: the buffer has the size just asked for.
        let _ = unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `nvrtcCreateProgram` and destroyed once.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

/// Where images are kept: a folder of the user's choice, or the usual place for such things.
fn folder() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("ROUNDPIPE_KERNEL_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("roundpipe").join("kernels")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache").join("roundpipe").join("kernels")))
}

/// Writes beside and renames; whatever goes wrong, the kernel is in memory.
fn keep(path: &std::path::Path, image: &[u8]) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let Some(folder) = path.parent() else { return };
    let beside =
        folder.join(format!(".{}-{}.part", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&beside, image));
    if written.is_err() || std::fs::rename(&beside, path).is_err() {
        let _ = std::fs::remove_file(&beside);
    }
}

/// 128 bits of FNV-1a: names files, guards nothing.
fn hash(parts: &[&str]) -> u128 {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013B;
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([0]));
    bytes.fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash: u128, byte| {
        (hash ^ u128::from(byte)).wrapping_mul(PRIME)
    })
}
