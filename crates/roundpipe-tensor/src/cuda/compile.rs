//! Kernels from CUDA C++ to machine code: compiled by NVRTC for the GPU at hand, once, and kept on
//! disk.
//!
//! A [`Unit`] is one kernel file with its macros. The name of its image on disk is a hash of
//! everything that the machine code depends on: text, macros, architecture, compiler (its version
//! and the size of its file). Images are written beside and renamed into place, so that two
//! processes never see half of one, and end in a check sum: a broken file is compiled anew, and a
//! broken or unwritable folder only costs time. In one process a unit is compiled once for an
//! architecture, however many cards of it start together.
//!
//! # Invariants
//! - To name a unit and to find what was made of it allocates nothing: launches do it every time.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, c_char, c_int};
use std::fmt;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::nvrtc::sys;

use super::library::{self, Loaded, Nvrtc, Status};
use crate::error::{Error, Result};
use crate::sync::lock;

/// In front of every kernel file.
const COMMON: &str = include_str!("kernels/common.cuh");

/// One kernel file with its macros.
#[derive(Clone)]
pub struct Unit {
    name: &'static str,
    text: &'static str,
    entry: &'static str,
    defines: Defines,
    /// Whether it uses instructions that only Hopper has.
    for_hopper: bool,
}

/// Lines `NAME value`, in the order of definition, in place: units are made for every launch.
#[derive(Clone)]
struct Defines {
    bytes: [u8; Self::ROOM],
    length: usize,
}

impl Defines {
    /// More than any kernel's macros take.
    const ROOM: usize = 368;

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    fn lines(&self) -> std::str::Lines<'_> {
        std::str::from_utf8(self.as_bytes())
            .expect("whole strings were written")
            .lines()
    }
}

impl Defines {
    /// False where there is no room.
    fn push(&mut self, text: &[u8]) -> bool {
        let end = self.length + text.len();
        let Some(room) = self.bytes.get_mut(self.length..end) else {
            return false;
        };
        room.copy_from_slice(text);
        self.length = end;
        true
    }

    fn push_number(&mut self, number: i64) -> bool {
        let (mut digits, mut at, mut rest) = ([0; 20], 20, number.unsigned_abs());
        while rest > 0 || at == 20 {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        (number >= 0 || self.push(b"-")) && self.push(&digits[at..])
    }
}

/// What a macro stands for.
#[derive(Debug, Clone, Copy)]
pub enum MacroValue<'a> {
    /// A name or an expression, on one line.
    Text(&'a str),
    /// A number.
    Number(i64),
}

impl<'a> From<&'a str> for MacroValue<'a> {
    fn from(text: &'a str) -> Self {
        Self::Text(text)
    }
}

impl<'a> From<&'a String> for MacroValue<'a> {
    fn from(text: &'a String) -> Self {
        Self::Text(text)
    }
}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        impl From<$number> for MacroValue<'_> {
            fn from(number: $number) -> Self {
                Self::Number(number as i64)
            }
        }
    )*};
}

numbers!(bool u8 u16 u32 u64 usize i32 i64);

impl Unit {
    /// The kernel `entry` (declared `extern "C" __global__`) of a file.
    pub fn new(name: &'static str, text: &'static str, entry: &'static str) -> Self {
        Self {
            name,
            text,
            entry,
            defines: Defines {
                bytes: [0; Defines::ROOM],
                length: 0,
            },
            for_hopper: false,
        }
    }

    /// The kernel uses instructions that Hopper alone has: it is compiled for `sm_90a` and runs on no
    /// other card.
    #[must_use]
    pub fn for_hopper(mut self) -> Self {
        self.for_hopper = true;
        self
    }

    /// Whether [`Unit::for_hopper`] was said.
    pub fn is_for_hopper(&self) -> bool {
        self.for_hopper
    }

    /// Defines a macro.
    ///
    /// # Panics
    /// When a kernel has more macros than a unit has room for.
    #[must_use]
    pub fn with<'a>(mut self, macro_name: &'static str, value: impl Into<MacroValue<'a>>) -> Self {
        let named = self.defines.push(macro_name.as_bytes()) && self.defines.push(b" ");
        let written = match value.into() {
            MacroValue::Text(text) => self.defines.push(text.as_bytes()),
            MacroValue::Number(number) => self.defines.push_number(number),
        };
        assert!(
            named && written && self.defines.push(b"\n"),
            "{}: more macros than fit into a unit",
            self.name
        );
        self
    }

    /// The kernel function's name.
    pub fn entry(&self) -> &'static str {
        self.entry
    }

    /// For errors: file, kernel and macros.
    pub fn name(&self) -> String {
        let defines: Vec<String> = self
            .defines
            .lines()
            .map(|line| line.replacen(' ', "=", 1))
            .collect();
        format!("{}:{} [{}]", self.name, self.entry, defines.join(" "))
    }

    fn source(&self) -> String {
        let mut source = String::with_capacity(COMMON.len() + self.text.len() + 256);
        for line in self.defines.lines() {
            source.push_str("#define ");
            source.push_str(line);
            source.push('\n');
        }
        source.push_str("#line 1 \"common.cuh\"\n");
        source.push_str(COMMON);
        source.push_str(&format!("\n#line 1 \"{}.cu\"\n", self.name));
        source.push_str(self.text);
        source
    }
}

impl fmt::Debug for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Unit({})", self.name())
    }
}

/// File, kernel and macros identify a unit; the text belongs to the file.
impl PartialEq for Unit {
    fn eq(&self, other: &Self) -> bool {
        (self.name, self.entry) == (other.name, other.entry)
            && self.defines.as_bytes() == other.defines.as_bytes()
    }
}

impl Eq for Unit {}

impl Hash for Unit {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(self.name.as_bytes());
        state.write(self.entry.as_bytes());
        state.write(self.defines.as_bytes());
    }
}

/// What was made of units and of other short keys: a map with a quick hash, since
/// no user chooses the keys and could make them collide.
pub(crate) type Table<K, V> = HashMap<K, V, BuildHasherDefault<Quick>>;

/// Eight bytes at a time: rotate, mix in, multiply.
#[derive(Default)]
pub(crate) struct Quick(u64);

impl Hasher for Quick {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(26) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn finish(&self) -> u64 {
        // The map takes its groups from the high bits and its places from the low ones.
        self.0 ^ (self.0 >> 32)
    }
}

/// The machine code of a unit for a compute capability: from disk, or compiled now and kept.
///
/// # Errors
/// As [`check`].
pub fn image(unit: &Unit, capability: (i32, i32)) -> Result<Vec<u8>> {
    let nvrtc = library::nvrtc()?;
    let source = unit.source();
    let target = nvrtc.target((capability.0 * 10 + capability.1).unsigned_abs())?;
    let own = if unit.for_hopper { "a" } else { "" };
    let arch = format!("sm_{target}{own}");
    let sum = hash([&source, &arch, nvrtc.identity()].map(|part| part.as_bytes()));
    let name = format!("{}-{arch}-{sum:032x}.cubin", unit.entry);
    let path = folder().map(|folder| folder.join(&name));
    static MADE: Once<Vec<u8>> = Once::new();
    let find = || path.as_ref().and_then(|path| kept(path));
    MADE.value(&name, find, || {
        let image = compile(nvrtc, unit, &source, &arch)?;
        let is_kept = path.as_ref().is_some_and(|path| keep(path, &image));
        Ok((image, is_kept))
    })
}

/// Values that are made once, by name: cards of one kind start together and want the same kernels.
/// Who comes while one is being made waits for it. What could not be kept elsewhere stays here; an
/// error does not.
struct Once<V>(Mutex<BTreeMap<String, Place<V>>>);

type Place<V> = Arc<Mutex<Option<V>>>;

impl<V: Clone> Once<V> {
    const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// What is here, else what `find` finds, else what `make` makes; that says whether `find` will
    /// find it from now on.
    fn value(
        &self,
        name: &str,
        find: impl FnOnce() -> Option<V>,
        make: impl FnOnce() -> Result<(V, bool)>,
    ) -> Result<V> {
        let place = lock(&self.0).entry(name.to_owned()).or_default().clone();
        let mut here = lock(&place);
        if let Some(value) = here.clone().or_else(find) {
            return Ok(value);
        }
        let (value, is_kept) = make()?;
        if !is_kept {
            *here = Some(value.clone());
        }
        Ok(value)
    }
}

/// Compiles a unit for an architecture such as `sm_90`; no GPU is needed.
///
/// # Errors
/// One line: the kernel, the architecture and the compiler's first complaint, or which library is
/// missing or too old.
pub fn check(unit: &Unit, arch: &str) -> Result<usize> {
    let nvrtc = library::nvrtc()?;
    if let Some(card) = arch
        .strip_prefix("sm_")
        .map(|number| number.trim_end_matches('a'))
        .and_then(|number| number.parse().ok())
    {
        nvrtc.target(card)?;
    }
    compile(nvrtc, unit, &unit.source(), arch).map(|image| image.len())
}

fn compile(
    nvrtc: &'static Loaded<Nvrtc>,
    unit: &Unit,
    source: &str,
    arch: &str,
) -> Result<Vec<u8>> {
    let refuse =
        |what: String| Error::invalid("compile", format!("{} for {arch}: {what}", unit.name()));
    let say = |status: Status| refuse(nvrtc.text(status));
    let text = CString::new(source).map_err(|_| refuse("the source holds a zero".to_owned()))?;
    let name = CString::new(format!("{}.cu", unit.name)).expect("names have no zero");
    let mut program: sys::nvrtcProgram = std::ptr::null_mut();
    // SAFETY: text and name live past the destruction of the program; no headers are given.
    let made = unsafe {
        nvrtc.nvrtcCreateProgram(
            &mut program,
            text.as_ptr(),
            name.as_ptr(),
            0,
            std::ptr::null(),
            std::ptr::null(),
        )
    };
    made.result().map_err(say)?;
    let program = Program(program, nvrtc);
    let options = [
        format!("--gpu-architecture={arch}"),
        "--std=c++17".to_owned(),
        "--extra-device-vectorization".to_owned(),
        "-default-device".to_owned(),
    ];
    let options: Vec<CString> = options
        .iter()
        .map(|o| CString::new(o.as_str()).expect("no zero"))
        .collect();
    let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    // SAFETY: the program is alive, the options live past the call.
    let compiled =
        unsafe { nvrtc.nvrtcCompileProgram(program.0, pointers.len() as c_int, pointers.as_ptr()) };
    compiled
        .result()
        .map_err(|e| complaint(&program.log()).map_or_else(|| say(e), refuse))?;
    let mut size = 0;
    // SAFETY: the program is alive and compiled.
    unsafe { nvrtc.nvrtcGetCUBINSize(program.0, &mut size) }
        .result()
        .map_err(say)?;
    let mut image = vec![0u8; size];
    // SAFETY: the buffer has the size just asked for.
    unsafe { nvrtc.nvrtcGetCUBIN(program.0, image.as_mut_ptr().cast()) }
        .result()
        .map_err(say)?;
    Ok(image)
}

struct Program(sys::nvrtcProgram, &'static Nvrtc);

impl Program {
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program is alive.
        if unsafe { self.1.nvrtcGetProgramLogSize(self.0, &mut size) }
            .result()
            .is_err()
        {
            return String::new();
        }
        let mut log = vec![0u8; size];
        // SAFETY: the buffer has the size just asked for.
        let _ = unsafe { self.1.nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        String::from_utf8_lossy(&log)
            .trim_end_matches(['\0', '\n'])
            .to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `nvrtcCreateProgram` and destroyed once.
        let _ = unsafe { self.1.nvrtcDestroyProgram(&mut self.0) };
    }
}

/// The first error of a compiler's log, and how many follow it.
fn complaint(log: &str) -> Option<String> {
    let mut errors = log
        .lines()
        .map(str::trim)
        .filter(|line| line.contains("error"));
    let first = errors.next()?.to_owned();
    // The last line of a log counts the errors.
    let more = errors
        .filter(|line| !line.contains(" detected in the compilation of"))
        .count();
    Some(if more == 0 {
        first
    } else {
        format!("{first} (and {more} more)")
    })
}

/// Where images are kept: a folder of the user's choice, or the usual place for such things.
pub fn folder() -> Option<PathBuf> {
    let variable = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    variable("ROUNDPIPE_KERNEL_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("roundpipe").join("kernels")))
        .or_else(|| {
            variable("HOME").map(|home| home.join(".cache").join("roundpipe").join("kernels"))
        })
}

/// A kept image whose check sum fits.
fn kept(path: &std::path::Path) -> Option<Vec<u8>> {
    let mut file = std::fs::read(path).ok()?;
    let image = file
        .len()
        .checked_sub(SUM_BYTES)
        .filter(|length| *length > 0)?;
    let sum = hash([&file[..image]]).to_le_bytes();
    if file[image..] != sum {
        return None;
    }
    file.truncate(image);
    Some(file)
}

/// At the end of every kept image.
const SUM_BYTES: usize = 16;

/// Writes beside and renames; whether that worked. If not, the kernel is in memory.
fn keep(path: &std::path::Path, image: &[u8]) -> bool {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let Some(folder) = path.parent() else {
        return false;
    };
    let beside = folder.join(format!(
        ".{}-{}.part",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    ));
    let file = [image, &hash([image]).to_le_bytes()].concat();
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&beside, file));
    let is_kept = written
        .and_then(|()| std::fs::rename(&beside, path))
        .is_ok();
    if !is_kept {
        let _ = std::fs::remove_file(&beside);
    }
    is_kept
}

/// 128 bits of FNV-1a: names files and finds broken ones, guards nothing.
pub(super) fn hash<const N: usize>(parts: [&[u8]; N]) -> u128 {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013B;
    let bytes = parts.iter().flat_map(|part| part.iter().chain(&[0]));
    bytes.fold(
        0x6c62_272e_07bb_0142_62b8_2175_6295_c58d,
        |hash: u128, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME),
    )
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Barrier, Mutex};

    use super::{Once, Unit, complaint};
    use crate::error::Error;

    /// Eight cards want the same kernel at once: it is compiled once, found on disk or not, and
    /// others meanwhile.
    #[test]
    fn what_many_want_at_once_is_made_once() {
        for is_kept in [true, false] {
            let (once, made, disk) = (Once::new(), AtomicUsize::new(0), Mutex::new(None));
            let start = Barrier::new(8);
            let want = || {
                start.wait();
                let find = || *disk.lock().unwrap();
                let make = || {
                    made.fetch_add(1, Ordering::SeqCst);
                    // Another kernel does not wait for this one.
                    assert_eq!(once.value("other", || None, || Ok((5, false))).unwrap(), 5);
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    *disk.lock().unwrap() = is_kept.then_some(7);
                    Ok((7, is_kept))
                };
                assert_eq!(once.value("kernel", find, make).unwrap(), 7);
            };
            std::thread::scope(|scope| {
                (0..8).for_each(|_| drop(scope.spawn(want)));
            });
            assert_eq!(made.into_inner(), 1, "kept on disk: {is_kept}");
        }
    }

    /// A kernel that did not compile is tried again, and one whose file broke is made again.
    #[test]
    fn failures_are_not_kept() {
        let once = Once::new();
        let fails = once.value(
            "kernel",
            || None,
            || Err(Error::invalid("compile", "no memory")),
        );
        assert!(fails.is_err());
        for made in [1, 2] {
            assert_eq!(
                once.value("kernel", || None, || Ok((made, true))).unwrap(),
                made
            );
        }
        assert_eq!(
            once.value("kernel", || Some(3), || Ok((4, true))).unwrap(),
            3
        );
    }

    #[test]
    fn file_kernel_and_macros_identify_a_unit() {
        let unit = |entry, value: u8| {
            Unit::new("file", "", entry)
                .with("T", "float")
                .with("N", value)
        };
        assert_eq!(unit("go", 1), unit("go", 1));
        assert_ne!(unit("go", 1), unit("go", 12));
        assert_ne!(unit("go", 1), unit("come", 1));
        assert_eq!(unit("go", 1).name(), "file:go [T=float N=1]");
        assert!(
            unit("go", 1)
                .source()
                .starts_with("#define T float\n#define N 1\n#line 1")
        );
    }

    #[test]
    fn numbers_are_written_as_they_are_read() {
        let unit = Unit::new("f", "", "e")
            .with("A", 0u8)
            .with("B", -70i32)
            .with("C", usize::MAX >> 1)
            .with("D", true);
        assert_eq!(unit.name(), "f:e [A=0 B=-70 C=9223372036854775807 D=1]");
    }

    #[test]
    fn a_log_of_errors_is_one_line() {
        let log = "x.cu(3): warning #177-D: unused\n\nx.cu(4): error: no such thing\n  a b;\n\nx.cu(9): error: nor this\n\n\
                   2 errors detected in the compilation of \"x.cu\".\n";
        assert_eq!(
            complaint(log).unwrap(),
            "x.cu(4): error: no such thing (and 1 more)"
        );
        assert_eq!(complaint("nothing wrong"), None);
    }
}
