//! Named ranges for NVIDIA's profilers (NVTX), so that a timeline of Nsight says which task a kernel
//! or copy belongs to.
//!
//! A profiler names a library in `NVTX_INJECTION64_PATH` before it starts the program. The first
//! [`range`] loads it and calls its `InitializeInjectionNvtx2`, which asks for tables of slots and
//! writes its functions into them; [`range`] calls what stands in two of the slots. Nothing else is
//! linked or searched for. Without a profiler a range costs two reads, and its name is not made.
//!
//! Only ranges are written, in the default domain. What a profiler does with them, and whether it
//! lives, is its own business.
//!
//! # Invariants
//! - The tables live as long as the process and never move: a profiler may write them at any time.
//! - A range ends on the thread that began it, behind every range that began in it.

use std::ffi::{CString, OsStr, c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use libloading::Library;

/// Functions per module; no module has more. Number 0 is none.
const FUNCTIONS: usize = 16;
/// The modules of NVTX: 1 is the core, the others a profiler may ask for. Number 0 is none.
const MODULES: usize = 7;
const CORE: usize = 1;
/// `nvtxRangePushA` and `nvtxRangePop` in the core.
const PUSH: usize = 9;
const POP: usize = 11;
/// The tables that a profiler may ask for.
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;

type Push = unsafe extern "C" fn(*const c_char) -> c_int;
type Pop = unsafe extern "C" fn() -> c_int;
/// Gives the table of a number, or null.
pub type GetExportTable = unsafe extern "C" fn(u32) -> *const c_void;
/// The entry of a profiler's library; not 0 when it took the tables.
pub type Initialize = unsafe extern "C" fn(GetExportTable) -> c_int;

/// A module's functions, as a profiler left them.
type Slots = [AtomicPtr<c_void>; FUNCTIONS];

static SLOTS: [Slots; MODULES] =
    [const { [const { AtomicPtr::new(ptr::null_mut()) }; FUNCTIONS] }; MODULES];

/// Where each slot is, as C reads it.
struct SlotTable([*mut *mut c_void; FUNCTIONS]);

// SAFETY: the pointers lead to `SLOTS`, which is static and made of atomics.
unsafe impl Send for SlotTable {}
// SAFETY: as above; the table itself is never written after it is made.
unsafe impl Sync for SlotTable {}

static TABLES: OnceLock<[SlotTable; MODULES]> = OnceLock::new();

fn tables() -> &'static [SlotTable; MODULES] {
    TABLES.get_or_init(|| {
        std::array::from_fn(|module| {
            SlotTable(std::array::from_fn(|function| match function {
                // The first slot of each table is none, in C too.
                0 => ptr::null_mut(),
                _ => SLOTS[module][function].as_ptr(),
            }))
        })
    })
}

/// `NvtxExportTableCallbacks` of NVTX.
#[repr(C)]
struct Callbacks {
    size: usize,
    module_functions:
        unsafe extern "C" fn(c_int, *mut *const *mut *mut c_void, *mut c_uint) -> c_int,
}

/// `NvtxExportTableVersionInfo` of NVTX.
#[repr(C)]
struct VersionInfo {
    size: usize,
    version: u32,
    reserved: u32,
    set_injection_version: unsafe extern "C" fn(u32),
}

static CALLBACK_TABLE: Callbacks = Callbacks {
    size: size_of::<Callbacks>(),
    module_functions,
};

static VERSION_TABLE: VersionInfo = VersionInfo {
    size: size_of::<VersionInfo>(),
    version: 3,
    reserved: 0,
    set_injection_version,
};

/// Called by a profiler: where the functions of a module are.
///
/// # Safety
/// `table` and `size` are null or may be written.
unsafe extern "C" fn module_functions(
    module: c_int,
    table: *mut *const *mut *mut c_void,
    size: *mut c_uint,
) -> c_int {
    let found = usize::try_from(module).ok().filter(|module| *module > 0);
    let Some(slots) = found.and_then(|module| tables().get(module)) else {
        return 0;
    };
    if !table.is_null() {
        // SAFETY: it may be written, by this function's contract.
        unsafe { *table = slots.0.as_ptr() };
    }
    if !size.is_null() {
        // SAFETY: it may be written, by this function's contract.
        unsafe { *size = FUNCTIONS as c_uint };
    }
    1
}

/// Called by a profiler that says which version it knows; ranges are the same in all.
unsafe extern "C" fn set_injection_version(_: u32) {}

/// Called by a profiler: a table by its number.
unsafe extern "C" fn export_table(number: u32) -> *const c_void {
    match number {
        CALLBACKS => ptr::from_ref(&CALLBACK_TABLE).cast(),
        VERSION_INFO => ptr::from_ref(&VERSION_TABLE).cast(),
        _ => ptr::null(),
    }
}

/// Hands the tables to a profiler that is already in the process; whether it took them. [`range`]
/// finds those in libraries by itself.
///
/// # Safety
/// `initialize` keeps to NVTX: it writes into slots only functions of the slot's type, which stay
/// valid as long as the process.
pub unsafe fn attach(initialize: Initialize) -> bool {
    // SAFETY: `export_table` is what NVTX's entry expects; the rest is this function's contract.
    let taken = unsafe { initialize(export_table) };
    taken != 0
}

/// Loads the profiler's library, if the environment names one that can be loaded.
fn load(path: Option<&OsStr>) -> Option<Library> {
    let path = path.filter(|path| !path.is_empty())?;
    // SAFETY: loading runs the library's own start-up code. It is the profiler that the user
    // started this program under, named by it.
    let library = unsafe { Library::new(path) }.ok()?;
    // SAFETY: the type is that of the entry of this name in every NVTX library.
    let entry = unsafe { library.get::<Initialize>(b"InitializeInjectionNvtx2\0") };
    let initialize = *entry.ok()?;
    // SAFETY: it is an NVTX library's entry, and the library is never unloaded: the caller keeps it
    // in a static.
    unsafe { attach(initialize) }.then_some(library)
}

/// Looked for once; a profiler is there from the start or not at all.
static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();

/// A range of a profiler's timeline, which ends when it is dropped.
#[must_use]
#[derive(Debug)]
pub struct Range {
    is_open: bool,
    /// Not `Send`: a profiler keeps a stack of ranges per thread.
    thread: PhantomData<*const ()>,
}

/// Begins a range under `name`, where a profiler listens; otherwise `name` is not called.
pub fn range(name: impl FnOnce() -> String) -> Range {
    LIBRARY.get_or_init(|| load(std::env::var_os("NVTX_INJECTION64_PATH").as_deref()));
    let push = SLOTS[CORE][PUSH].load(Ordering::Acquire);
    let mut is_open = false;
    if !push.is_null() {
        // A name with a NUL cannot be handed over; its range has none.
        let name = CString::new(name()).unwrap_or_default();
        // SAFETY: the slot is not null, so a profiler wrote it, and what it writes there is an
        // `nvtxRangePushA` that stays valid (`attach`).
        let push = unsafe { std::mem::transmute::<*mut c_void, Push>(push) };
        // SAFETY: `name` ends in a NUL and lives until the call returns.
        unsafe { push(name.as_ptr()) };
        is_open = true;
    }
    Range {
        is_open,
        thread: PhantomData,
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        let pop = SLOTS[CORE][POP].load(Ordering::Acquire);
        if self.is_open && !pop.is_null() {
            // SAFETY: as in `range`, for `nvtxRangePop`.
            let pop = unsafe { std::mem::transmute::<*mut c_void, Pop>(pop) };
            // SAFETY: the range was pushed on this thread, since `Range` is not `Send`.
            unsafe { pop() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is not there, or is no profiler, leaves ranges off.
    #[test]
    fn without_a_profiler_nothing_is_loaded() {
        assert!(load(None).is_none());
        assert!(load(Some(OsStr::new(""))).is_none());
        assert!(load(Some(OsStr::new("/nowhere/libprofiler.so"))).is_none());
    }

    /// A profiler is refused what does not exist, and finds every slot of what does.
    #[test]
    fn tables_have_their_sizes() {
        // SAFETY: any number may be asked for.
        assert!(unsafe { export_table(2) }.is_null());
        // SAFETY: as above.
        let version = unsafe { export_table(VERSION_INFO) }.cast::<VersionInfo>();
        // SAFETY: the number is that of this table, which is static.
        let version = unsafe { &*version };
        assert_eq!((version.version, version.size), (3, 24));
        let mut table = ptr::null();
        let mut size = 0;
        for (module, want) in [(-1, 0), (0, 0), (1, 1), (5, 1), (6, 1), (7, 0)] {
            // SAFETY: both may be written.
            let found = unsafe { module_functions(module, &mut table, &mut size) };
            assert_eq!(found, want, "module {module}");
        }
        assert_eq!(size, 16);
        let slots = &tables()[CORE].0;
        assert!(slots[0].is_null() && slots[1..].iter().all(|slot| !slot.is_null()));
    }
}
