//! CUDA's libraries, found at run time and bound from the files that were found.
//!
//! Where a library may lie, and in which order, is said in [`places`]: what the user lists comes
//! first, then what the shell has chosen, then the loader's places, then the usual ones. The first
//! that goes with the driver is taken ([`version`]): of a major version that is not newer, with all
//! the functions that we call ([`calls`]). One that also compiles for the cards here, or is new
//! enough for attention, comes before others that go with the driver. Libraries of several files
//! are taken from one folder ([`parts`]). Errors list the candidates that were passed over, but
//! only where none was taken.
//!
//! The driver's library is the bindings' own business; only its version is asked here, and the one
//! function that the bindings know by a name newer than the oldest driver.
//!
//! # Invariants
//! - Asked once per process and library: the answer stays, and what was taken is never unloaded.
//!   A library that was passed over is closed again.
//! - A library that is missing, too new, too old or broken is an error of one line that names it;
//!   nothing panics.

mod calls;
mod parts;
mod places;
mod version;

use std::ffi::{c_int, c_void};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::driver::result::DriverError;
use cudarc::driver::sys;
use libloading::Library;

use crate::error::{Error, Result};
use calls::Calls;
pub(crate) use calls::Status;
pub use calls::{CublasLt, Cudnn, Nvrtc};
use places::{LibraryPlace, SearchInputs};
pub(crate) use version::OLDEST_CUDNN;
use version::Package;
pub use version::{Version, cudnn_version};

/// Why a library is of no use, in one line.
type Complaint = String;

/// A library in use: its functions, its file and the version of CUDA that it was made for.
#[derive(Debug)]
pub struct Loaded<C> {
    calls: C,
    path: PathBuf,
    version: Version,
    /// Kept for ever: functions of them are called.
    _libraries: Vec<Library>,
}

impl<C> Loaded<C> {
    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The version of CUDA that it was made for.
    pub fn version(&self) -> Version {
        self.version
    }
}

impl<C> Deref for Loaded<C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.calls
    }
}

fn refused(what: &Complaint) -> Error {
    Error::Invalid {
        op: "cuda",
        what: what.clone(),
    }
}

fn places() -> &'static SearchInputs {
    static PLACES: OnceLock<SearchInputs> = OnceLock::new();
    PLACES.get_or_init(SearchInputs::here)
}

/// The driver's library, which comes with the driver; the version of CUDA that it is for.
///
/// # Errors
/// One line that says how to get it, or a newer one.
pub fn driver() -> Result<Version> {
    static FOUND: OnceLock<std::result::Result<Version, Complaint>> = OnceLock::new();
    FOUND
        .get_or_init(|| find_driver(places()))
        .as_ref()
        .copied()
        .map_err(refused)
}

fn find_driver(places: &SearchInputs) -> std::result::Result<Version, Complaint> {
    // SAFETY: asks the loader for the library; its start-up code is the driver's own.
    let present = || unsafe { sys::is_culib_present() };
    // A library that was loaded by its path is found by name afterwards, which is how the bindings
    // get it.
    let found = || present() || (load_first(&places.of_driver()) && present());
    if places.no_driver {
        return Err(missing(
            "with ROUNDPIPE_CUDA_DRIVER=off libcuda",
            "install NVIDIA's driver, or run on the CPU",
        ));
    }
    if !found() {
        return Err(missing(
            "libcuda",
            "install NVIDIA's driver, or run on the CPU",
        ));
    }
    // SAFETY: as above; it was found a moment ago.
    let library = unsafe { sys::culib() };
    // SAFETY: the function of this name has this type in every driver.
    let ask =
        unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> u32>(b"cuDriverGetVersion\0") };
    let mut number = 0;
    // SAFETY: the number is written by the call.
    let status = ask.map(|ask| unsafe { ask(&mut number) });
    match (status, u32::try_from(number)) {
        (Ok(0), Ok(number)) => {
            let version = Version::of_number(number);
            version::driver_verdict(version).map(|()| version)
        }
        _ => Err("libcuda does not tell its version, as a toolkit's stand-in for it does not; install NVIDIA's driver \
                  and see that its library comes first for the loader, or run on the CPU"
            .to_owned()),
    }
}

/// Loads the first of these files that loads.
fn load_first(files: &[PathBuf]) -> bool {
    static DRIVER: OnceLock<Option<Library>> = OnceLock::new();
    let load = |file| {
        // SAFETY: loading runs the library's start-up code, which is the driver's own.
        unsafe { Library::new(file) }.ok()
    };
    DRIVER.get_or_init(|| files.iter().find_map(load)).is_some()
}

/// The compute capabilities of the cards that we may use, 90 for 9.0; none where the driver does
/// not say.
fn cards() -> &'static [u32] {
    static CARDS: OnceLock<Vec<u32>> = OnceLock::new();
    CARDS.get_or_init(|| {
        if driver().is_err() {
            return Vec::new();
        }
        // SAFETY: the driver was found.
        ask_cards(unsafe { sys::culib() }).unwrap_or_default()
    })
}

/// Asks without the bindings, which panic where a driver lacks a function.
fn ask_cards(library: &Library) -> Option<Vec<u32>> {
    use sys::CUdevice_attribute as A;
    // SAFETY: the functions of these names have these types in every driver.
    let (init, count, device, attribute) = unsafe {
        (
            library
                .get::<unsafe extern "C" fn(u32) -> u32>(b"cuInit\0")
                .ok()?,
            library
                .get::<unsafe extern "C" fn(*mut c_int) -> u32>(b"cuDeviceGetCount\0")
                .ok()?,
            library
                .get::<unsafe extern "C" fn(*mut c_int, c_int) -> u32>(b"cuDeviceGet\0")
                .ok()?,
            library
                .get::<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> u32>(
                    b"cuDeviceGetAttribute\0",
                )
                .ok()?,
        )
    };
    let number_of = |ask: &dyn Fn(*mut c_int) -> u32| {
        let mut number = 0;
        (ask(&mut number) == 0).then_some(number)
    };
    // SAFETY: any thread may start the driver, any number of times.
    if unsafe { init(0) } != 0 {
        return None;
    }
    // SAFETY: each of these calls writes the number that it is given; the driver gave the handles
    // of the cards.
    let capability = |index| unsafe {
        let card = number_of(&|number| device(number, index))?;
        let of = |what: A| number_of(&|number| attribute(number, what as c_int, card));
        let major = of(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        u32::try_from(major * 10 + of(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?).ok()
    };
    // SAFETY: as above.
    let cards = number_of(&|number| unsafe { count(number) })?;
    Some(
        (0..cards)
            .filter_map(capability)
            .filter(|card| *card >= OLDEST_CARD)
            .collect(),
    )
}

/// Ampere, as compute capability 8.0; older cards are left out.
pub(crate) const OLDEST_CARD: u32 = 80;

type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// The function that tells the time between events, by the name that every driver knows: the
/// bindings ask for a newer one, which drivers before 570 do not have.
fn bind_elapsed(library: &Library) -> Option<Elapsed> {
    // SAFETY: the function of this name has this type in every driver.
    unsafe { library.get::<Elapsed>(b"cuEventElapsedTime\0") }
        .ok()
        .map(|function| *function)
}

/// Milliseconds from one event to another.
///
/// # Safety
/// The driver was found, and both events are alive.
pub(crate) unsafe fn elapsed(
    start: sys::CUevent,
    end: sys::CUevent,
) -> std::result::Result<f32, DriverError> {
    static FUNCTION: OnceLock<Option<Elapsed>> = OnceLock::new();
    // SAFETY: the driver was found.
    let function = FUNCTION.get_or_init(|| bind_elapsed(unsafe { sys::culib() }));
    let function = function.ok_or(DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND))?;
    let mut ms = 0.0;
    // SAFETY: the caller's promise; the number is written by the call.
    unsafe { function(&mut ms, start, end) }.result()?;
    Ok(ms)
}

/// The compiler of our kernels.
///
/// # Errors
/// One line that says how to get it, or one that goes with the driver.
pub fn nvrtc() -> Result<&'static Loaded<Nvrtc>> {
    static FOUND: OnceLock<std::result::Result<Loaded<Nvrtc>, Complaint>> = OnceLock::new();
    FOUND
        .get_or_init(|| choose(places(), driver().ok()))
        .as_ref()
        .map_err(refused)
}

/// The library of products.
///
/// # Errors
/// As [`nvrtc`].
pub fn cublaslt() -> Result<&'static Loaded<CublasLt>> {
    static FOUND: OnceLock<std::result::Result<Loaded<CublasLt>, Complaint>> = OnceLock::new();
    FOUND
        .get_or_init(|| choose(places(), driver().ok()))
        .as_ref()
        .map_err(refused)
}

/// The library of attention and convolutions; optional.
///
/// # Errors
/// As [`nvrtc`].
pub fn cudnn() -> Result<&'static Loaded<Cudnn>> {
    static FOUND: OnceLock<std::result::Result<Loaded<Cudnn>, Complaint>> = OnceLock::new();
    let find = || {
        // It asks the loader for both of these by name: whichever we have chosen is to be its own
        // too.
        let _ = (nvrtc(), cublaslt());
        choose(places(), driver().ok())
    };
    FOUND.get_or_init(find).as_ref().map_err(refused)
}

impl Loaded<Nvrtc> {
    /// For which architecture the kernels of a card are compiled, such as 90 for `sm_90`.
    ///
    /// # Errors
    /// One line with both versions, the library's file and the fix, where it knows none that the
    /// card runs.
    pub(crate) fn target(&self, card: u32) -> Result<u32> {
        static KNOWN: OnceLock<Vec<u32>> = OnceLock::new();
        let known = KNOWN.get_or_init(|| self.architectures());
        if known.is_empty() {
            return Ok(card);
        }
        version::target(known, card).ok_or_else(|| {
            let file = self.path.display().to_string();
            refused(&version::architecture_complaint(
                &file,
                self.version,
                card,
                driver().ok(),
            ))
        })
    }

    /// What the machine code that it makes depends on: its version, and the size of its file for
    /// builds of one version.
    pub(crate) fn identity(&self) -> &'static str {
        static IDENTITY: OnceLock<String> = OnceLock::new();
        IDENTITY.get_or_init(|| {
            let bytes = std::fs::metadata(&self.path).map_or(0, |file| file.len());
            format!("{} {bytes}", self.version)
        })
    }
}

/// What to install of cuDNN beside this driver.
pub(crate) fn cudnn_package() -> &'static str {
    Package::Cudnn.name(driver().ok())
}

fn missing(library: &str, way: &str) -> Complaint {
    format!("{library} is not here; {way}; or name its folder in ROUNDPIPE_CUDA_LIBS")
}

/// What a library has to go with.
#[derive(Debug, Clone, Copy)]
struct Wish {
    driver: Option<Version>,
    /// Not only with the driver: with the cards that are here too, and new enough for all that we
    /// use it for.
    best: bool,
}

/// The first library in the order of search that goes with everything, else the first that goes
/// with the driver; else what is wrong with the first one there is.
fn choose<C: Calls>(
    places: &SearchInputs,
    driver: Option<Version>,
) -> std::result::Result<Loaded<C>, Complaint> {
    let mut first = None;
    let places = places.of_library(C::FILE, &majors::<C>(driver));
    for best in [true, false] {
        first = None;
        for place in &places {
            match load(place, Wish { driver, best }) {
                Ok(loaded) => return Ok(loaded),
                Err(why) => first = first.or(why),
            }
        }
    }
    Err(first.unwrap_or_else(|| {
        let toolkit = if C::PACKAGE == Package::Cudnn {
            ""
        } else {
            "install the CUDA toolkit, or "
        };
        missing(
            C::NAME,
            &format!("{toolkit}`pip install {}`", C::PACKAGE.name(driver)),
        )
    }))
}

/// The versions in files' names that the loader is asked for: the driver's CUDA and older ones;
/// cuDNN has its own.
fn majors<C: Calls>(driver: Option<Version>) -> Vec<u32> {
    let oldest = Version::OLDEST.major;
    if !C::NUMBERED_AS_CUDA {
        return vec![9];
    }
    (oldest..=driver.map_or(13, |driver| driver.major.clamp(oldest, 99)))
        .rev()
        .collect()
}

/// Loads what lies at a place and sees that it will do. `None` where there is nothing.
fn load<C: Calls>(
    place: &LibraryPlace,
    wish: Wish,
) -> std::result::Result<Loaded<C>, Option<Complaint>> {
    if let (LibraryPlace::At(path), true) = (place, C::NUMBERED_AS_CUDA) {
        // What its name already says to be too new is not even loaded.
        if let Some(&major) = places::file_version(path).first() {
            fits::<C>(path, (major, &major.to_string()), wish.driver)?;
        }
    }
    let (file, mut libraries) = parts::open::<C>(place, wish)?;
    // SAFETY: loading runs the library's start-up code; these are NVIDIA's own, which we are about
    // to call.
    let library = unsafe { Library::new(&file) }.map_err(|e| match place {
        LibraryPlace::Named(_) => None,
        LibraryPlace::At(path) => Some(one_line(&format!("cannot load {}: {e}", path.display()))),
    })?;
    let calls = C::bind(&library).map_err(|function| {
        let package = C::PACKAGE.name(wish.driver);
        let path = file.display();
        Some(format!(
            "{path} has no function {function}, so it is none that we know: `pip install {package}`"
        ))
    })?;
    let path = file_of(calls.address()).unwrap_or(file);
    let unknown = || Some(format!("{} does not tell its version", path.display()));
    let version = calls.made_for().ok_or_else(unknown)?;
    fits::<C>(&path, (version.major, &version.to_string()), wish.driver)?;
    if wish.best && !calls.knows(cards()) {
        return Err(Some(format!(
            "{} does not know the cards here",
            path.display()
        )));
    }
    libraries.push(library);
    Ok(Loaded {
        calls,
        path,
        version,
        _libraries: libraries,
    })
}

fn fits<C: Calls>(
    path: &Path,
    made_for: (u32, &str),
    driver: Option<Version>,
) -> std::result::Result<(), Option<Complaint>> {
    version::library_verdict(&path.display().to_string(), made_for, driver, C::PACKAGE)
        .map_err(Some)
}

/// The file that a function came from.
#[cfg(unix)]
fn file_of(address: *const c_void) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt as _;
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address may be asked for; the answer is written to the place given.
    if unsafe { libc::dladdr(address, found.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: zeroed at first and written by the call: plain pointers.
    let name = unsafe { found.assume_init() }.dli_fname;
    if name.is_null() {
        return None;
    }
    // SAFETY: the loader's own text, which lives as long as the library is loaded.
    let name = unsafe { std::ffi::CStr::from_ptr(name) };
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes())))
}

#[cfg(not(unix))]
fn file_of(_: *const c_void) -> Option<PathBuf> {
    None
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
