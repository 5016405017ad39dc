//! Launches of known kernels do without the allocator: what the host pays per launch, checked
//! without a GPU.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use cudarc::driver::sys::CUresult as E;

use super::call::Args;
use super::compile::{Table, Unit};
use super::context::{is_fatal, lacks_fp8, too_old};
use crate::dtype::DType;
use crate::kernel::View;
use crate::shape::Shape;

/// The system's allocator, which counts what this thread asks of it.
struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How often `f` allocates, the second time.
pub(super) fn allocations(mut f: impl FnMut()) -> usize {
    f();
    let before = COUNT.with(Cell::get);
    f();
    COUNT.with(Cell::get) - before
}

/// A unit as large as they come.
fn unit(width: usize) -> Unit {
    let unit = Unit::new("map", "", "map_elements")
        .with("KIND", "BINARY")
        .with("FUNCTION", "take_larger");
    let unit = unit
        .with("SOURCES", 3)
        .with("A_T", "unsigned char")
        .with("B_T", "bf16")
        .with("C_T", "float");
    unit.with("Y_T", "long long")
        .with("STAGE_T", "double")
        .with("WIDTH", width)
        .with("FAST", u8::from(true))
}

/// fp8 begins with Ada, and a card without it is named.
#[test]
fn cards_before_ada_have_no_fp8() {
    for capability in [(8, 0), (8, 6), (8, 7)] {
        let why = lacks_fp8("NVIDIA A100", capability).unwrap();
        let number = format!("{}.{}", capability.0, capability.1);
        assert!(
            why.starts_with("NVIDIA A100 has no fp8") && why.contains(&number),
            "{why}"
        );
    }
    for capability in [(8, 9), (9, 0), (10, 0), (12, 0)] {
        assert_eq!(lacks_fp8("a card", capability), None);
    }
}

/// Cards of before Ampere are refused by their capability, and it is said which.
#[test]
fn old_cards_are_refused() {
    for capability in [(6, 1), (7, 5)] {
        let why = too_old(capability).unwrap();
        assert!(
            why.contains(&format!("{}.{}", capability.0, capability.1)) && why.contains("8.0"),
            "{why}"
        );
    }
    assert!(
        [(8, 0), (8, 9), (12, 0)]
            .into_iter()
            .all(|new| too_old(new).is_none())
    );
}

#[test]
fn a_known_kernel_is_found_without_allocating() {
    let table: Table<Unit, usize> = [1, 2, 4, 8]
        .map(|width| (unit(width), width))
        .into_iter()
        .collect();
    assert_eq!(allocations(|| assert_eq!(table.get(&unit(4)), Some(&4))), 0);
    assert_eq!(table.get(&unit(3)), None);
}

#[test]
fn arguments_use_their_memory_again() {
    let layout = crate::shape::Layout::contiguous(Shape::new(&[3, 5, 7]).unwrap());
    let view = View {
        ptr: 4096,
        dtype: DType::F32,
        layout,
    };
    let launch = || {
        let mut args = Args::new()
            .view(&view)
            .view(&view)
            .ptr(1)
            .size(2)
            .f64(0.5)
            .i32(-1)
            .words(&[1, 2, 3]);
        assert_eq!(args.pointers().len(), 7);
    };
    assert_eq!(allocations(launch), 0);
    // Two at a time do not share memory.
    let (mut one, mut two) = (Args::new().u64(1), Args::new().u64(2));
    assert_ne!(one.pointers()[0], two.pointers()[0]);
}

/// A card that does not answer any more is lost; one that has no room, or is not done, is not.
#[test]
fn a_lost_card_is_told_from_a_refusal() {
    for lost in [
        E::CUDA_ERROR_ILLEGAL_ADDRESS,
        E::CUDA_ERROR_ECC_UNCORRECTABLE,
        E::CUDA_ERROR_DEVICE_UNAVAILABLE,
        E::CUDA_ERROR_EXTERNAL_DEVICE,
        E::CUDA_ERROR_MPS_CLIENT_TERMINATED,
    ] {
        assert!(is_fatal(lost), "{lost:?}");
    }
    for refused in [
        E::CUDA_ERROR_OUT_OF_MEMORY,
        E::CUDA_ERROR_NOT_READY,
        E::CUDA_ERROR_INVALID_VALUE,
    ] {
        assert!(!is_fatal(refused), "{refused:?}");
    }
}

/// Host time of what every launch does before the driver's call; run with `--ignored --nocapture`
/// to read it.
#[test]
#[ignore = "a measurement"]
#[expect(clippy::print_stderr, reason = "a measurement")]
fn how_long_a_kernel_takes_to_be_found() {
    let table: Table<Unit, usize> = (0..200).map(|width| (unit(width), width)).collect();
    let start = std::time::Instant::now();
    for turn in 0..1_000_000 {
        assert!(table.contains_key(&unit(std::hint::black_box(turn % 200))));
    }
    eprintln!("{:.0} ns", start.elapsed().as_secs_f64() * 1e3);
}
