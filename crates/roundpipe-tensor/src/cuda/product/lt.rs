//! cuBLASLt: products of dense matrices, planned once per shape.
//!
//! # From rows to columns
//! The library thinks in columns. Our c `[m, n]` in rows is cᵀ `[n, m]` in columns with leading
//! dimension n, and cᵀ = bᵀ aᵀ: the library's first operand is our b, its second our a, and its
//! result is `n` by `m`.
//! - b has element (l, j) at `l · row + j · col`. With col = 1 that memory, read in columns, is bᵀ
//!   `[n, k]` itself with leading dimension `row`: taken as it is. With row = 1 it is b `[k, n]`
//!   with leading dimension `col`: the library transposes.
//! - a likewise: element (i, l) at `i · row + l · col`. With col = 1 it is aᵀ `[k, m]`, as it is;
//!   with row = 1 it is a `[m, k]`, transposed.
//! - A bias `[n]` belongs to the rows of cᵀ, which is where the library adds one.
//!
//! # The algorithm
//! Of the heuristic's candidates whose workspace fits, the one that [`tune`](super::tune) chose:
//! the same for the same library, GPU and shape. Sums in float or double, never TF32; cuts along
//! the depth are added up in a fixed order and in the accumulator's type, so schemes that add in
//! place or in the result's type are excluded.
//!
//! # Invariants
//! - A plan is made once per shape, under a lock: workers of one card agree.
//! - A product whose plan is known is launched without allocating.

use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use cudarc::cublaslt::sys;

use super::tune::{self, Choices};
use crate::cuda::call::Call;
use crate::cuda::compile::Table;
use crate::cuda::library::{self, CublasLt, Status};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::fp8::Fp8;
use crate::shape::Layout;
use crate::sync::lock;

/// Batches in one call; more are cut.
pub(super) const MOST_BATCHES: usize = 65_535;

/// How many algorithms the heuristic is asked for.
const CANDIDATES: usize = 8;

/// How a matrix of rows lies: lines side by side, `line` elements apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Lie {
    /// Lines are the matrix's columns instead of its rows.
    pub transposed: bool,
    /// Elements from one line to the next; at least a line's length.
    pub line: i64,
}

impl Lie {
    /// How the matrices of the last two dimensions lie, if one of their strides is 1 and lines do
    /// not overlap.
    pub fn of(layout: &Layout) -> Option<Self> {
        let rank = layout.shape().rank();
        let (rows, cols) = (
            layout.shape()[rank - 2] as i64,
            layout.shape()[rank - 1] as i64,
        );
        let (row, col) = (
            layout.strides()[rank - 2] as i64,
            layout.strides()[rank - 1] as i64,
        );
        // Strides of dimensions of size 1 mean nothing.
        let line = |count: i64, length: i64, stride: i64, step: i64| {
            let unit = step == 1 || length == 1;
            let apart = if count == 1 { length } else { stride };
            (unit && apart >= length).then_some(apart)
        };
        let straight = line(rows, cols, row, col).map(|line| Self {
            transposed: false,
            line,
        });
        straight.or_else(|| {
            line(cols, rows, col, row).map(|line| Self {
                transposed: true,
                line,
            })
        })
    }
}

/// Sizes of a call; from one batch to the next in elements: of a, b and c.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ProductShape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub batches: usize,
    pub steps: [i64; 3],
}

/// An operand.
#[derive(Debug, Clone, Copy)]
pub(super) struct Side {
    pub ptr: u64,
    pub lie: Lie,
}

/// Operands of 8-bit floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Fp8Operands {
    pub left: Fp8,
    pub right: Fp8,
    /// The library multiplies with a scale per row of either side; else sums stay as they are.
    pub applies_scales: bool,
}

impl Fp8Operands {
    /// Whether sums may have fewer bits: see [`fp8`](super::fp8).
    fn adds_fast(self) -> bool {
        self.left == Fp8::E4M3
    }
}

/// What a plan depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub shape: ProductShape,
    pub lies: [Lie; 2],
    /// Of the operands and of the result.
    pub types: [DType; 2],
    pub has_bias: bool,
    pub overwrites: bool,
    /// Bytes that a, b and c (with the bias) are aligned to.
    pub aligned: [u32; 3],
    pub workspace: usize,
    /// Of operands that are codes.
    pub fp8: Option<Fp8Operands>,
}

/// A matrix in columns: its size, and the elements from one column and from one batch to the next.
#[derive(Debug, Clone, Copy)]
struct ColumnMatrix {
    rows: usize,
    cols: usize,
    line: i64,
    step: i64,
}

impl Key {
    /// The library's operands and result: our right, left and c as their memory reads in columns.
    fn matrices(&self) -> [ColumnMatrix; 3] {
        let ProductShape {
            m,
            n,
            k,
            steps: [step_a, step_b, step_c],
            ..
        } = self.shape;
        let [a, b] = self.lies;
        let columns = |rows, cols, line, step| ColumnMatrix {
            rows,
            cols,
            line,
            step,
        };
        let first = if b.transposed {
            columns(k, n, b.line, step_b)
        } else {
            columns(n, k, b.line, step_b)
        };
        let second = if a.transposed {
            columns(m, k, a.line, step_a)
        } else {
            columns(k, m, a.line, step_a)
        };
        [first, second, columns(n, m, n as i64, step_c)]
    }
}

/// One call of the library.
#[derive(Debug, Clone, Copy)]
pub(super) struct LtTask {
    pub key: Key,
    a: u64,
    b: u64,
    c: u64,
    bias: Option<u64>,
    alpha: f64,
    beta: f64,
    pub workspace: u64,
    /// Of the left and right rows, where they are codes.
    scales: [u64; 2],
}

impl LtTask {
    pub fn new(
        shape: ProductShape,
        a: Side,
        b: Side,
        (src, dst, c): (DType, DType, u64),
        bias: Option<u64>,
        [alpha, beta]: [f64; 2],
        (workspace, workspace_bytes): (u64, usize),
    ) -> Self {
        let key = Key {
            shape,
            lies: [a.lie, b.lie],
            types: [src, dst],
            has_bias: bias.is_some(),
            overwrites: beta == 0.0,
            aligned: [
                alignment(a.ptr),
                alignment(b.ptr),
                alignment(c | bias.unwrap_or(0)),
            ],
            workspace: workspace_bytes,
            fp8: None,
        };
        Self {
            key,
            a: a.ptr,
            b: b.ptr,
            c,
            bias,
            alpha,
            beta,
            workspace,
            scales: [0; 2],
        }
    }

    /// The same over codes of 8-bit floats, with the scales of the left and right rows.
    pub fn in_fp8(mut self, operands: Fp8Operands, scales: [u64; 2]) -> Self {
        self.key.fp8 = Some(operands);
        self.scales = scales;
        self
    }

    /// A part of it, with the result elsewhere.
    pub fn of(&self, key: Key, c: u64) -> Self {
        Self { key, c, ..*self }
    }
}

/// The largest power of two, up to 64, that divides an address. Weights lie at multiples of 64, by
/// the plan at this one or that: more would be told apart, chosen for apart, and differ in bits.
fn alignment(ptr: u64) -> u32 {
    1 << ptr.trailing_zeros().min(6)
}

/// The library's handle and the plans made so far.
#[derive(Default)]
pub(crate) struct Products {
    handle: Mutex<Option<LtHandle>>,
    /// `None` where the library knows no algorithm.
    plans: Mutex<Table<Key, Option<Arc<ProductPlan>>>>,
    pub(super) choices: Choices,
}

struct LtHandle(sys::cublasLtHandle_t, &'static CublasLt);

impl Drop for LtHandle {
    fn drop(&mut self) {
        // SAFETY: made in `handle` and destroyed once.
        let _ = unsafe { self.1.cublasLtDestroy(self.0) };
    }
}

/// Whether the library knows an algorithm for a task, which is planned if it is the first of its
/// kind.
///
/// # Safety
/// As for [`run`]; the result is not touched.
pub(super) unsafe fn takes(call: &Call<'_>, task: &LtTask) -> Result<bool> {
    // SAFETY: the caller's promise.
    unsafe { plan(call, task).map(|plan| plan.is_some()) }
}

/// Queues a product that the library [`takes`].
///
/// # Safety
/// The task's memory is as large as its shape says, its workspace too, and nothing else writes the
/// result.
pub(super) unsafe fn run(call: &Call<'_>, task: &LtTask) -> Result<()> {
    // SAFETY: the caller's promise; the plan was made for tasks of this key.
    unsafe {
        let plan = plan(call, task)?.expect("asked before");
        let queued = plan
            .described
            .queue(plan.handle, call.stream, task, &plan.algorithm);
        queued.map_err(|e| failed(call, "launch", e))
    }
}

/// # Safety
/// As for [`run`]; the result is not touched.
unsafe fn plan(call: &Call<'_>, task: &LtTask) -> Result<Option<Arc<ProductPlan>>> {
    let mut plans = lock(&call.gpu.products.plans);
    if let Some(known) = plans.get(&task.key) {
        return Ok(known.clone());
    }
    let handle = handle(call)?;
    let fail = |e| failed(call, "plan", e);
    let proposed = Described::new(task).and_then(|described| {
        let found = candidates(handle, &described, &task.key)?;
        Ok((described, found))
    });
    let (described, found) = match proposed {
        Ok(proposed) => proposed,
        // A library that does not know an attribute of fp8 says so: there is another way.
        Err(_) if task.key.fp8.is_some() => {
            plans.insert(task.key, None);
            return Ok(None);
        }
        Err(error) => return Err(fail(error)),
    };
    let mut made = None;
    if !found.is_empty() {
        // SAFETY: the caller's promise.
        let chosen = unsafe { tune::choose(call, handle, task, &found)? };
        made = Some(Arc::new(ProductPlan {
            handle,
            described,
            algorithm: found[chosen].algorithm,
        }));
    }
    plans.insert(task.key, made.clone());
    Ok(made)
}

fn handle(call: &Call<'_>) -> Result<sys::cublasLtHandle_t> {
    let gpu = call.gpu;
    let mut handle = lock(&gpu.products.handle);
    if let Some(handle) = &*handle {
        return Ok(handle.0);
    }
    let lt = library::cublaslt()?;
    gpu.enter()?;
    let mut made = std::ptr::null_mut();
    // SAFETY: written by the call; a context is current.
    unsafe { lt.cublasLtCreate(&mut made) }
        .result()
        .map_err(|e| failed(call, "start", e))?;
    *handle = Some(LtHandle(made, lt));
    Ok(made)
}

/// The library, for what is only reached once it was found.
fn api() -> std::result::Result<&'static CublasLt, Status> {
    library::cublaslt()
        .map(|library| &**library)
        .map_err(|_| NOT_INITIALIZED)
}

const NOT_INITIALIZED: Status = Status(sys::cublasStatus_t::CUBLAS_STATUS_NOT_INITIALIZED as u32);
const NOT_SUPPORTED: Status = Status(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as u32);

fn failed(call: &Call<'_>, what: &str, status: Status) -> Error {
    let why = api().map_or_else(|_| "the library is gone".to_owned(), |api| api.text(status));
    call.failed(&format!("{what} a product by cuBLASLt: {why}"))
}

/// A matrix as the library sees it.
struct Matrix(sys::cublasLtMatrixLayout_t, &'static CublasLt);

impl Matrix {
    fn new(
        kind: sys::cudaDataType,
        columns: ColumnMatrix,
        batches: usize,
    ) -> std::result::Result<Self, Status> {
        use sys::cublasLtMatrixLayoutAttribute_t as A;
        let ColumnMatrix {
            rows,
            cols,
            line,
            step,
        } = columns;
        let (lt, mut raw) = (api()?, std::ptr::null_mut());
        let (rows, cols) = (rows as u64, cols as u64);
        // SAFETY: written by the call.
        unsafe { lt.cublasLtMatrixLayoutCreate(&mut raw, kind, rows, cols, line) }.result()?;
        let made = Self(raw, lt);
        if batches > 1 {
            let count = batches as i32;
            // SAFETY: the layout is alive; the attributes are an i32 and an i64.
            unsafe {
                let what = A::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
                lt.cublasLtMatrixLayoutSetAttribute(raw, what, bytes(&count), 4)
                    .result()?;
                let what = A::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
                lt.cublasLtMatrixLayoutSetAttribute(raw, what, bytes(&step), 8)
                    .result()?;
            }
        }
        Ok(made)
    }
}

impl Drop for Matrix {
    fn drop(&mut self) {
        // SAFETY: made in `new` and destroyed once.
        let _ = unsafe { self.1.cublasLtMatrixLayoutDestroy(self.0) };
    }
}

/// What is computed.
struct Operation(sys::cublasLtMatmulDesc_t, &'static CublasLt);

impl Operation {
    fn new(key: &Key) -> std::result::Result<Self, Status> {
        use sys::cublasLtMatmulDescAttributes_t as A;
        let (compute, scale) = match key.types[0] {
            DType::F64 => (
                sys::cublasComputeType_t::CUBLAS_COMPUTE_64F,
                sys::cudaDataType::CUDA_R_64F,
            ),
            _ => (
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cudaDataType::CUDA_R_32F,
            ),
        };
        let (lt, mut raw) = (api()?, std::ptr::null_mut());
        // SAFETY: written by the call.
        unsafe { lt.cublasLtMatmulDescCreate(&mut raw, compute, scale) }.result()?;
        let made = Self(raw, lt);
        // 1 is CUBLAS_OP_T, 0 is CUBLAS_OP_N. The library's first operand is our right one.
        let turns = [
            i32::from(key.lies[1].transposed),
            i32::from(key.lies[0].transposed),
        ];
        for (what, turn) in [
            A::CUBLASLT_MATMUL_DESC_TRANSA,
            A::CUBLASLT_MATMUL_DESC_TRANSB,
        ]
        .into_iter()
        .zip(turns)
        {
            // SAFETY: the description is alive; the attribute is an i32.
            unsafe { lt.cublasLtMatmulDescSetAttribute(raw, what, bytes(&turn), 4) }.result()?;
        }
        if key.has_bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            let what = A::CUBLASLT_MATMUL_DESC_EPILOGUE;
            // SAFETY: as above; the attribute is a u32.
            unsafe { lt.cublasLtMatmulDescSetAttribute(raw, what, bytes(&epilogue), 4) }
                .result()?;
        }
        if let Some(codes) = key.fp8 {
            made.describe_fp8(codes)?;
        }
        Ok(made)
    }

    /// What is said of operands in fp8 besides their type.
    fn describe_fp8(&self, codes: Fp8Operands) -> std::result::Result<(), Status> {
        use sys::cublasLtMatmulDescAttributes_t as A;
        let fast = i8::from(codes.adds_fast());
        // SAFETY: the description is alive; the attribute is an i8.
        unsafe {
            let what = A::CUBLASLT_MATMUL_DESC_FAST_ACCUM;
            self.1
                .cublasLtMatmulDescSetAttribute(self.0, what, bytes(&fast), 1)
                .result()?;
        }
        if !codes.applies_scales {
            return Ok(());
        }
        let mode =
            sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F as i32;
        for what in [
            A::CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
            A::CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
        ] {
            // SAFETY: as above; the attributes are i32.
            unsafe {
                self.1
                    .cublasLtMatmulDescSetAttribute(self.0, what, bytes(&mode), 4)
                    .result()?;
            }
        }
        Ok(())
    }

    /// The addresses that change from call to call.
    fn set_pointers(&self, task: &LtTask) -> std::result::Result<(), Status> {
        use sys::cublasLtMatmulDescAttributes_t as A;
        let [left, right] = match task.key.fp8 {
            Some(codes) if codes.applies_scales => task.scales.map(Some),
            _ => [None; 2],
        };
        // The library's first operand is our right one.
        for (what, address) in [
            (A::CUBLASLT_MATMUL_DESC_BIAS_POINTER, task.bias),
            (A::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, right),
            (A::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, left),
        ] {
            let Some(address) = address else { continue };
            // SAFETY: the description is alive; the attribute is an address.
            unsafe {
                self.1
                    .cublasLtMatmulDescSetAttribute(self.0, what, bytes(&address), 8)
                    .result()?;
            }
        }
        Ok(())
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: made in `new` and destroyed once.
        let _ = unsafe { self.1.cublasLtMatmulDescDestroy(self.0) };
    }
}

/// What algorithms may do.
struct Preference(sys::cublasLtMatmulPreference_t, &'static CublasLt);

impl Preference {
    fn new(key: &Key) -> std::result::Result<Self, Status> {
        use sys::cublasLtMatmulPreferenceAttributes_t as A;
        let (lt, mut raw) = (api()?, std::ptr::null_mut());
        // SAFETY: written by the call.
        unsafe { lt.cublasLtMatmulPreferenceCreate(&mut raw) }.result()?;
        let made = Self(raw, lt);
        let workspace = key.workspace as u64;
        let what = A::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: the preference is alive; the attribute is a u64.
        unsafe { lt.cublasLtMatmulPreferenceSetAttribute(raw, what, bytes(&workspace), 8) }
            .result()?;
        let [a, b, c] = key.aligned;
        let words = [
            // Cuts along the depth: none, or added up in the accumulator's type in a step of their
            // own.
            (
                A::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32,
            ),
            (A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (A::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
        ];
        for (what, word) in words {
            // SAFETY: the preference is alive; these attributes are u32.
            unsafe { lt.cublasLtMatmulPreferenceSetAttribute(raw, what, bytes(&word), 4) }
                .result()?;
        }
        Ok(made)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made in `new` and destroyed once.
        let _ = unsafe { self.1.cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

/// A product of one shape, ready to run.
struct ProductPlan {
    handle: sys::cublasLtHandle_t,
    described: Described,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: descriptions are plain memory of the library's, only read after `new` but for the locked
// one; the handle may be used from any thread.
unsafe impl Send for ProductPlan {}
// SAFETY: as above.
unsafe impl Sync for ProductPlan {}

/// The library's description of products of one shape.
pub(super) struct Described {
    /// Locked for a call: the addresses of bias and scales are part of it.
    operation: Mutex<Operation>,
    first: Matrix,
    second: Matrix,
    out: Matrix,
}

impl Described {
    pub fn new(task: &LtTask) -> std::result::Result<Self, Status> {
        let key = &task.key;
        let ([src, dst], batches) = (key.types, key.shape.batches);
        let operation = Operation::new(key)?;
        operation.set_pointers(task)?;
        let [first, second, out] = key.matrices();
        // The library's first operand is our right one.
        let [first_kind, second_kind] = match key.fp8 {
            None => [data_type(src); 2],
            Some(codes) => [fp8_type(codes.right), fp8_type(codes.left)],
        };
        let (first, second) = (
            Matrix::new(first_kind, first, batches)?,
            Matrix::new(second_kind, second, batches)?,
        );
        let out = Matrix::new(data_type(dst), out, batches)?;
        Ok(Self {
            operation: Mutex::new(operation),
            first,
            second,
            out,
        })
    }

    /// # Safety
    /// As for [`run`]; the task has the key that this describes.
    pub unsafe fn queue(
        &self,
        handle: sys::cublasLtHandle_t,
        stream: cudarc::driver::sys::CUstream,
        task: &LtTask,
        algorithm: &sys::cublasLtMatmulAlgo_t,
    ) -> std::result::Result<(), Status> {
        let operation = lock(&self.operation);
        operation.set_pointers(task)?;
        let wide = [task.alpha, task.beta];
        let narrow = wide.map(|factor| factor as f32);
        let (alpha, beta) = match task.key.types[0] {
            DType::F64 => (bytes(&wide[0]), bytes(&wide[1])),
            _ => (bytes(&narrow[0]), bytes(&narrow[1])),
        };
        let c = task.c as *mut c_void;
        // SAFETY: the descriptions are alive and those that the algorithm was found for; the
        // factors live past the call; the memory is the caller's promise.
        unsafe {
            let queued = operation.1.cublasLtMatmul(
                handle,
                operation.0,
                alpha,
                task.b as *const c_void,
                self.first.0,
                task.a as *const c_void,
                self.second.0,
                beta,
                c.cast_const(),
                self.out.0,
                c,
                self.out.0,
                algorithm,
                task.workspace as *mut c_void,
                task.key.workspace,
                stream.cast(),
            );
            queued.result()
        }
    }
}

/// An algorithm that the heuristic proposes.
#[derive(Debug, Clone, Copy)]
pub(super) struct LtCandidate {
    pub algorithm: sys::cublasLtMatmulAlgo_t,
    /// Bytes that it wants.
    pub workspace: usize,
}

/// The heuristic's algorithms whose workspace fits, in its order.
fn candidates(
    handle: sys::cublasLtHandle_t,
    described: &Described,
    key: &Key,
) -> std::result::Result<Vec<LtCandidate>, Status> {
    let preference = Preference::new(key)?;
    let mut found = [sys::cublasLtMatmulHeuristicResult_t {
        algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        workspaceSize: 0,
        state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
        wavesCount: 0.0,
        reserved: [0; 4],
    }; CANDIDATES];
    let mut count = 0;
    // SAFETY: all descriptions are alive; there is room for as many answers as are asked for.
    let asked = unsafe {
        preference.1.cublasLtMatmulAlgoGetHeuristic(
            handle,
            lock(&described.operation).0,
            described.first.0,
            described.second.0,
            described.out.0,
            described.out.0,
            preference.0,
            CANDIDATES as i32,
            found.as_mut_ptr(),
            &mut count,
        )
    };
    use sys::cublasStatus_t as S;
    match asked {
        Status(0) => {}
        // A shape or layout that no algorithm takes.
        NOT_SUPPORTED => return Ok(Vec::new()),
        other => return Err(other),
    }
    let fits = |found: &&sys::cublasLtMatmulHeuristicResult_t| {
        found.state == S::CUBLAS_STATUS_SUCCESS && found.workspaceSize <= key.workspace
    };
    let candidate = |found: &sys::cublasLtMatmulHeuristicResult_t| LtCandidate {
        algorithm: found.algo,
        workspace: found.workspaceSize,
    };
    Ok(found[..count as usize]
        .iter()
        .filter(fits)
        .map(candidate)
        .collect())
}

fn data_type(dtype: DType) -> sys::cudaDataType {
    match dtype {
        DType::F64 => sys::cudaDataType::CUDA_R_64F,
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

fn fp8_type(format: Fp8) -> sys::cudaDataType {
    match format {
        Fp8::E4M3 => sys::cudaDataType::CUDA_R_8F_E4M3,
        Fp8::E5M2 => sys::cudaDataType::CUDA_R_8F_E5M2,
    }
}

fn bytes<T>(value: &T) -> *const c_void {
    std::ptr::from_ref(value).cast()
}

#[cfg(test)]
impl Default for LtCandidate {
    fn default() -> Self {
        Self {
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
            workspace: 0,
        }
    }
}

#[cfg(test)]
impl LtTask {
    /// What the library would do, over `f64` elements whose addresses are eight times their index.
    pub fn emulate(&self, memory: &mut [f64]) {
        let [first, second, out] = self.key.matrices();
        let ProductShape {
            m, n, k, batches, ..
        } = self.key.shape;
        let at = |ptr: u64, matrix: &ColumnMatrix, batch: usize, row: usize, col: usize| {
            assert!(row < matrix.rows && col < matrix.cols && matrix.line >= matrix.rows as i64);
            (ptr as i64 / 8 + batch as i64 * matrix.step + col as i64 * matrix.line) as usize + row
        };
        for (batch, i, j) in (0..batches * n * m).map(|x| (x / (n * m), x / m % n, x % m)) {
            let mut sum = 0.0;
            for l in 0..k {
                let (r, c) = if self.key.lies[1].transposed {
                    (l, i)
                } else {
                    (i, l)
                };
                let left = memory[at(self.b, &first, batch, r, c)];
                let (r, c) = if self.key.lies[0].transposed {
                    (j, l)
                } else {
                    (l, j)
                };
                sum += left * memory[at(self.a, &second, batch, r, c)];
            }
            let bias = self.bias.map_or(0.0, |bias| memory[bias as usize / 8 + i]);
            let place = at(self.c, &out, batch, i, j);
            memory[place] = self.alpha * sum + bias + self.beta * memory[place];
        }
    }
}
