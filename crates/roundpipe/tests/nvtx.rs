//! Ranges for a profiler: one test in the file, since a profiler is attached to a process.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use roundpipe::nn::{Init, Linear, Relu};
use roundpipe::optim::Sgd;
use roundpipe::{
    Bytes, Cx, DType, HostTensor, Lag, RoundPipe, RunConfig, Sequential, Tree, Update,
};
use roundpipe_tensor::nvtx::{GetExportTable, attach};
use roundpipe_tensor::sim::SimConfig;
use roundpipe_tensor::{SimWorld, nvtx};

static NAMES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
static UNMATCHED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static OPEN: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

unsafe extern "C" fn push(name: *const c_char) -> c_int {
    // SAFETY: NVTX hands over a text that ends in a NUL.
    let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap().to_owned();
    NAMES.lock().unwrap().insert(name.clone());
    OPEN.with_borrow_mut(|open| open.push(name));
    0
}

unsafe extern "C" fn pop() -> c_int {
    if OPEN.with_borrow_mut(Vec::pop).is_none() {
        UNMATCHED.fetch_add(1, Ordering::SeqCst);
    }
    0
}

/// What a profiler's library does, by NVTX's rules.
unsafe extern "C" fn initialize(tables: GetExportTable) -> c_int {
    type Functions =
        unsafe extern "C" fn(c_int, *mut *const *mut *mut c_void, *mut c_uint) -> c_int;
    // SAFETY: table 1 holds its size and the function that gives modules.
    let functions = unsafe { *tables(1).cast::<usize>().add(1).cast::<Functions>() };
    let (mut table, mut size) = (ptr::null(), 0);
    // SAFETY: both may be written.
    if unsafe { functions(1, &mut table, &mut size) } == 0 || size <= 11 {
        return 0;
    }
    // SAFETY: slots 9 and 11 exist and are for functions of these types.
    unsafe {
        **table.add(9) = push as *mut c_void;
        **table.add(11) = pop as *mut c_void;
    }
    1
}

#[test]
fn tasks_and_copies_have_ranges() {
    drop(nvtx::range(|| unreachable!("there is no profiler yet")));
    // SAFETY: `initialize` writes functions of the slots' types, which live as long as the process.
    assert!(unsafe { attach(initialize) });
    let mut init = Init::new(1, DType::F32);
    let model = Sequential::new()
        .named("first", Linear::new(&mut init, 4, 4, true).unwrap())
        .named("bend", Relu)
        .named("last", Linear::new(&mut init, 4, 2, true).unwrap());
    let config = SimConfig {
        memory: Bytes::mib(64),
        ..SimConfig::default()
    };
    let workers = SimWorld::new(config).unwrap().workers(2);
    let engine = RoundPipe::builder(model)
        .name("net")
        .optimizer(Sgd::default())
        .devices(workers.into_iter().map(|worker| worker as _))
        .memory(Bytes::mib(16))
        .run_config(RunConfig::new().num_microbatch(2))
        .build()
        .unwrap();
    let x = HostTensor::zeros(DType::F32, &[4, 4]).unwrap();
    let loss = |cx: &mut Cx, output: Tree, _: Tree| cx.sum_all(&output.tensor()?);
    engine.forward_backward(x, Tree::None, loss).unwrap();
    engine.update(&Update::new(0.1), Lag::Zero).unwrap();
    engine.synchronize().unwrap();
    drop(engine);
    let names = NAMES.lock().unwrap();
    for want in [
        "net fused, layer last, microbatch 1",
        "net loss, microbatch 0",
        "net backward, layer first, microbatch 0",
        "net weights of first in",
        "net gradients out",
        "net update",
    ] {
        assert!(
            names.iter().any(|name| name.starts_with(want)),
            "{want}: {names:?}"
        );
    }
    assert_eq!(UNMATCHED.load(Ordering::SeqCst), 0);
    OPEN.with_borrow(|open| assert!(open.is_empty(), "{open:?}"));
}
