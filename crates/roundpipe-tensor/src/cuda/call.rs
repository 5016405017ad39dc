//! One kernel to be launched: operands, and the way they reach CUDA C++.

use std::cell::Cell;
use std::ffi::c_void;

use cudarc::driver::{result, sys};

use super::compile::Unit;
use super::context::{Function, Gpu, card};
use super::faults::AlarmSlot;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};

/// A kernel with its operands and where it runs.
pub(crate) struct Call<'a> {
    pub gpu: &'a Gpu,
    pub alarm: AlarmSlot<'a>,
    pub stream: sys::CUstream,
    /// The lane's own word for kernels whose blocks wait for each other.
    pub barrier: u64,
    pub kernel: &'a Kernel,
    pub src: &'a [Option<View>],
    pub dst: &'a [Option<View>],
    pub scratch: Option<View>,
}

impl Call<'_> {
    /// A source that the kernel's contract says is there.
    pub fn src(&self, i: usize) -> &View {
        self.src[i]
            .as_ref()
            .expect("the kernel's contract names this source")
    }

    /// A destination that the kernel's contract says is there.
    pub fn dst(&self, i: usize) -> &View {
        self.dst[i]
            .as_ref()
            .expect("the kernel's contract names this destination")
    }

    /// A source that may be absent.
    pub fn maybe_src(&self, i: usize) -> Option<&View> {
        self.src.get(i).and_then(Option::as_ref)
    }

    /// A destination that may be absent.
    pub fn maybe_dst(&self, i: usize) -> Option<&View> {
        self.dst.get(i).and_then(Option::as_ref)
    }

    /// Address of the scratch memory, 0 without.
    pub fn scratch_ptr(&self) -> u64 {
        self.scratch.as_ref().map_or(0, |view| view.ptr)
    }

    /// What a library's refusal means: the device's own error where there is one behind it.
    pub fn failed(&self, what: &str) -> Error {
        use sys::CUresult as R;
        // SAFETY: the stream is valid; the call only looks.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            R::CUDA_SUCCESS | R::CUDA_ERROR_NOT_READY => Error::Device {
                device: card(self.gpu.index),
                what: format!("cannot {what}"),
            },
            error => self.gpu.failed(what, result::DriverError(error)),
        }
    }

    /// Queues a compiled kernel. Nothing is queued for an empty grid.
    ///
    /// # Safety
    /// The arguments are what the kernel's parameters say, in order, and its memory is the caller's
    /// promise.
    pub unsafe fn launch(
        &self,
        unit: &Unit,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        args: &mut Args,
    ) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let function = self.function(unit, shared)?;
        let (grid, block) = ((grid[0], grid[1], grid[2]), (block[0], block[1], block[2]));
        // SAFETY: promised by the caller; the arguments live past the call, which copies them.
        unsafe {
            result::launch_kernel(
                function.0,
                grid,
                block,
                shared,
                self.stream,
                args.pointers(),
            )
        }
        .map_err(|e| self.gpu.failed(&format!("launch {}", unit.name()), e))
    }

    /// A compiled kernel that may have so much dynamic shared memory.
    fn function(&self, unit: &Unit, shared: u32) -> Result<Function> {
        let function = self.gpu.function(unit)?;
        // Beyond 48 KiB a kernel must be allowed to; its own static memory counts too.
        if shared > 32 << 10 {
            use sys::CUfunction_attribute_enum as A;
            let what = A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded and never unloaded.
            unsafe { result::function::set_function_attribute(function.0, what, shared as i32) }
                .map_err(|e| self.gpu.failed(&format!("launch {}", unit.name()), e))?;
        }
        Ok(function)
    }

    /// As [`Call::launch`], for a kernel that waits by itself (`wait_for_earlier` in `decode.cu`) for
    /// those before it: it may start while the last of them ends, where the card can do that.
    ///
    /// # Safety
    /// As for [`Call::launch`]; before it waits, the kernel touches nothing that a kernel writes.
    pub unsafe fn launch_early(
        &self,
        unit: &Unit,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        args: &mut Args,
    ) -> Result<()> {
        if self.gpu.capability.0 < 9 || shared > 32 << 10 || grid.contains(&0) {
            // SAFETY: promised by the caller.
            return unsafe { self.launch(unit, grid, block, shared, args) };
        }
        let mut early = [attribute(
            sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        )];
        early[0].value.programmaticStreamSerializationAllowed = 1;
        // SAFETY: promised by the caller.
        unsafe { self.launch_with(unit, grid, block, shared, args, &mut early) }
    }

    /// As [`Call::launch`], for a kernel whose blocks wait for each other: all of them are on the card
    /// at the same time, or none. So there must be no more of them than the card holds.
    ///
    /// # Safety
    /// As for [`Call::launch`].
    pub unsafe fn launch_cooperative(
        &self,
        unit: &Unit,
        blocks: u32,
        threads: u32,
        shared: u32,
        args: &mut Args,
    ) -> Result<()> {
        let mut whole = [attribute(
            sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
        )];
        whole[0].value.cooperative = 1;
        let (grid, block) = ([blocks, 1, 1], [threads, 1, 1]);
        // SAFETY: promised by the caller.
        unsafe { self.launch_with(unit, grid, block, shared, args, &mut whole) }
    }

    /// # Safety
    /// As for [`Call::launch`], and what the attributes ask for.
    unsafe fn launch_with(
        &self,
        unit: &Unit,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        args: &mut Args,
        attributes: &mut [sys::CUlaunchAttribute],
    ) -> Result<()> {
        let function = self.function(unit, shared)?;
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: shared,
            hStream: self.stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let args = args.pointers().as_mut_ptr();
        // SAFETY: promised by the caller; the configuration and the arguments live past the call,
        // which copies them.
        let queued =
            unsafe { sys::cuLaunchKernelEx(&config, function.0, args, std::ptr::null_mut()) };
        queued
            .result()
            .map_err(|e| self.gpu.failed(&format!("launch {}", unit.name()), e))
    }

    /// One thread per element, in blocks of 256; as many as 2^31 blocks.
    pub fn blocks(elements: usize) -> [u32; 3] {
        [elements.div_ceil(256) as u32, 1, 1]
    }
}

/// An attribute of a launch, all of whose values are 0.
fn attribute(id: sys::CUlaunchAttributeID) -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute {
        id,
        pad: [0; 4],
        // SAFETY: a union of plain numbers, for which zeros are valid.
        value: unsafe { std::mem::zeroed() },
    }
}

/// The arguments of a kernel, in order.
///
/// Their memory is the thread's and used again: a launch allocates nothing.
pub(crate) struct Args(Lists);

#[derive(Default)]
struct Lists {
    words: Vec<u64>,
    /// Where arguments start in `words`.
    starts: Vec<usize>,
    pointers: Vec<*mut c_void>,
}

thread_local! {
    static SPARE: Cell<Option<Lists>> = const { Cell::new(None) };
}

impl Drop for Args {
    fn drop(&mut self) {
        // A thread at its end has no place for them any more.
        let _ = SPARE.try_with(|spare| spare.set(Some(std::mem::take(&mut self.0))));
    }
}

impl Args {
    pub fn new() -> Self {
        let mut lists = SPARE
            .try_with(Cell::take)
            .ok()
            .flatten()
            .unwrap_or_default();
        lists.words.clear();
        lists.starts.clear();
        Self(lists)
    }

    fn word(mut self, word: u64) -> Self {
        self.0.starts.push(self.0.words.len());
        self.0.words.push(word);
        self
    }

    /// An address.
    pub fn ptr(self, ptr: u64) -> Self {
        self.word(ptr)
    }

    /// The address of a view, or null.
    pub fn maybe(self, view: Option<&View>) -> Self {
        self.word(view.map_or(0, |v| v.ptr))
    }

    /// `long long`.
    pub fn i64(self, value: i64) -> Self {
        self.word(value as u64)
    }

    /// A size, as `long long`.
    pub fn size(self, value: usize) -> Self {
        self.word(value as u64)
    }

    /// `unsigned long long`.
    pub fn u64(self, value: u64) -> Self {
        self.word(value)
    }

    /// `int`.
    pub fn i32(self, value: i32) -> Self {
        self.word(u64::from(value as u32))
    }

    /// `unsigned`.
    pub fn u32(self, value: u32) -> Self {
        self.word(u64::from(value))
    }

    /// `double`.
    pub fn f64(self, value: f64) -> Self {
        self.word(value.to_bits())
    }

    /// A struct of eight-byte fields, by value.
    pub fn words(mut self, words: &[u64]) -> Self {
        self.0.starts.push(self.0.words.len());
        self.0.words.extend(words);
        self
    }

    /// `View` of common.cuh: address, rank, sizes, strides.
    pub fn view(mut self, view: &View) -> Self {
        self.0.starts.push(self.0.words.len());
        self.0.words.push(view.ptr);
        self.0.words.push(view.shape().rank() as u64);
        let dims = view.shape().iter().map(|n| *n as u64);
        let strides = view.layout.strides().iter().map(|s| *s as u64);
        let pad = |values: &mut dyn Iterator<Item = u64>, fill: u64| {
            let mut all = [fill; 8];
            all.iter_mut()
                .zip(values)
                .for_each(|(slot, value)| *slot = value);
            all
        };
        self.0.words.extend(pad(&mut dims.into_iter(), 1));
        self.0.words.extend(pad(&mut strides.into_iter(), 0));
        self
    }

    pub(super) fn pointers(&mut self) -> &mut [*mut c_void] {
        let Lists {
            words,
            starts,
            pointers,
        } = &mut self.0;
        let base = words.as_mut_ptr();
        pointers.clear();
        // Arguments start at words, and x86-64 and aarch64 are little-endian: a narrow one is its
        // word's start.
        pointers.extend(
            starts
                .iter()
                .map(|start| base.wrapping_add(*start).cast::<c_void>()),
        );
        pointers
    }
}

/// The types that kernels of real numbers come in.
pub(crate) const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// Whether a processor with so much shared memory holds two blocks that want `block` bytes each.
/// The driver keeps 1 KiB of every block for itself.
pub fn holds_two(shared_memory: usize, block: u32) -> bool {
    2 * (block as usize + 1024) <= shared_memory
}

/// The name of a type in common.cuh.
pub(crate) fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::I64 => "long long",
        DType::I32 => "int",
        DType::U32 => "unsigned",
        DType::U8 => "unsigned char",
        DType::Bool => "bool8",
    }
}
