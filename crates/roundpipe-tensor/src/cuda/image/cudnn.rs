//! Convolutions by cuDNN, where it is here and takes them.
//!
//! One algorithm per operation, each of those that repeat bit for bit; the library computes in
//! float, never TF32. Which cases are given to it, and how much workspace it may use, follows from
//! the operands alone, so that scratch is the same without the library; what wants more workspace,
//! or is refused, goes to our own kernels. So do
//!
//! - f64, and groups that our kernels sum directly;
//! - gradients of filters in 16-bit types: the library would round the sums to the operands' type;
//! - borders as wide as the filter or wider, empty operands, and those not at multiples of 16
//!   bytes.
//!
//! `ROUNDPIPE_CONV=own` leaves the library out.
//!
//! # Invariants
//! - Bias and sum are rounded together, once.
//! - A case is refused once and for all, or computed by the library each time.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock};

use cudarc::cudnn::sys;

use crate::cuda::call::Call;
use crate::cuda::compile::Table;
use crate::cuda::library::{self, Cudnn, Status};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernel::{ConvSpec, Kernel, View};
use crate::shape::Shape;
use crate::sync::lock;

const FORWARD: sys::cudnnConvolutionFwdAlgo_t =
    sys::cudnnConvolutionFwdAlgo_t::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM;
const GRAD_INPUT: sys::cudnnConvolutionBwdDataAlgo_t =
    sys::cudnnConvolutionBwdDataAlgo_t::CUDNN_CONVOLUTION_BWD_DATA_ALGO_1;
const GRAD_FILTER: sys::cudnnConvolutionBwdFilterAlgo_t =
    sys::cudnnConvolutionBwdFilterAlgo_t::CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1;

/// Workspace that any case may use: tables of offsets, and sums of parts of a filter's gradient.
const TABLE_BYTES: usize = 8 << 20;
const PARTS_BYTES: usize = 32 << 20;

/// The oldest version whose API this is.
const OLDEST: usize = 90_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum ConvKind {
    Forward { bias: bool },
    GradInput,
    GradFilter,
}

/// All that a plan depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ConvCase {
    kind: ConvKind,
    dtype: DType,
    /// `[n, c, h, w]`, `[o, c / groups, kh, kw]`, `[n, o, h', w']`.
    x: [i32; 4],
    f: [i32; 4],
    y: [i32; 4],
    stride: [i32; 2],
    padding: [i32; 2],
    dilation: [i32; 2],
    groups: i32,
}

impl ConvCase {
    /// A convolution that is to be given to cuDNN.
    pub fn of(kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> Option<Self> {
        let (a, b, out) = (
            src.first()?.as_ref()?,
            src.get(1)?.as_ref()?,
            dst.first()?.as_ref()?,
        );
        let (kind, spec, [x, f, y]) = match kernel {
            Kernel::Conv2d(spec) => (
                ConvKind::Forward {
                    bias: src.get(2).is_some_and(Option::is_some),
                },
                spec,
                [a, b, out],
            ),
            Kernel::Conv2dGradInput(spec) => (ConvKind::GradInput, spec, [out, b, a]),
            Kernel::Conv2dGradFilter { spec, .. } => (ConvKind::GradFilter, spec, [a, out, b]),
            _ => return None,
        };
        let fits = match a.dtype {
            DType::F32 => true,
            DType::BF16 | DType::F16 => kind != ConvKind::GradFilter,
            _ => false,
        };
        let fits = fits && is_usual(spec, x.shape(), f.shape(), y.shape());
        let sizes = |view: &View| [0, 1, 2, 3].map(|i| view.shape()[i] as i32);
        let pair = |pair: [usize; 2]| pair.map(|n| n as i32);
        fits.then(|| Self {
            kind,
            dtype: a.dtype,
            x: sizes(x),
            f: sizes(f),
            y: sizes(y),
            stride: pair(spec.stride),
            padding: pair(spec.padding),
            dilation: pair(spec.dilation),
            groups: spec.groups as i32,
        })
    }

    /// Most bytes of workspace that the library may use. Tensor cores want the channels innermost:
    /// room for all operands in that order.
    pub fn workspace(&self) -> usize {
        let bytes = |dims: [i32; 4]| {
            let count: usize = dims.iter().map(|n| *n as usize).product();
            (count * self.dtype.size()).next_multiple_of(256)
        };
        match self.dtype {
            DType::F32 if self.kind == ConvKind::GradFilter => PARTS_BYTES,
            DType::F32 => TABLE_BYTES,
            _ => TABLE_BYTES + bytes(self.x) + bytes(self.f) + bytes(self.y),
        }
    }
}

/// Neither empty nor beyond the library's 32-bit counting, a border narrower than the filter,
/// groups of some size.
fn is_usual(spec: &ConvSpec, x: &Shape, f: &Shape, y: &Shape) -> bool {
    let countable = |shape: &Shape| (1..1 << 30).contains(&shape.numel());
    let border =
        |a: usize| spec.padding[a] <= spec.dilation[a].saturating_mul(f[2 + a].saturating_sub(1));
    let small = |n: usize| (1..1 << 20).contains(&n);
    let windows = spec.stride.into_iter().chain(spec.dilation).all(small);
    let broad = spec.groups == 1 || (f[1] >= 8 && f[0] / spec.groups.max(1) >= 8);
    [x, f, y].into_iter().all(countable) && border(0) && border(1) && windows && broad
}

/// Plans by case; `None` for what the library refuses.
#[derive(Default)]
pub(crate) struct ConvPlans(Mutex<Table<ConvCase, Option<Arc<ConvPlan>>>>);

/// The library, where it is here and wanted.
fn api() -> Option<&'static Cudnn> {
    static HERE: OnceLock<Option<&'static Cudnn>> = OnceLock::new();
    *HERE.get_or_init(|| {
        let wanted = std::env::var("ROUNDPIPE_CONV").as_deref() != Ok("own");
        // Some of the library's kernels are compiled by NVRTC, which has to be found first.
        let here = if wanted && library::nvrtc().is_ok() {
            library::cudnn().ok()
        } else {
            None
        };
        here.map(|library| &**library)
            .filter(|api| api.number() >= OLDEST)
    })
}

/// Whether the library failed at what it takes: an error within it (4000 and on) or in what it
/// queued (5000 and on).
fn is_failure(status: Status) -> bool {
    (4000..6000).contains(&status.0)
}

/// Computes by cuDNN; false when our kernels are to be used.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<bool> {
    let Some((case, api)) = ConvCase::of(call.kernel, call.src, call.dst).zip(api()) else {
        return Ok(false);
    };
    let mut operands = call.src.iter().chain(call.dst).flatten();
    if !operands.all(|view| view.ptr.is_multiple_of(16)) {
        return Ok(false);
    }
    let queued = call
        .gpu
        .attention
        .with_handle(call.stream.cast(), |handle| {
            let mut plans = lock(&call.gpu.convolutions.0);
            let known = plans.get(&case).cloned();
            let plan = known.unwrap_or_else(|| {
                let made = ConvPlan::new(api, handle, &case)
                    .ok()
                    .flatten()
                    .map(Arc::new);
                plans.insert(case, made.clone());
                made
            });
            let Some(plan) = plan else { return Ok(false) };
            // SAFETY: the operands are the caller's promise and as large as the case says; scratch
            // holds what `workspace` asks for, and a plan that wants more was refused.
            match unsafe { plan.run(handle, call, &case) } {
                Status(0) => Ok(true),
                status if is_failure(status) => Err(status),
                // What the library only finds out now it has not begun.
                _ => {
                    plans.insert(case, None);
                    Ok(false)
                }
            }
        });
    match queued {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(status)) => Err(call.failed(&format!(
            "compute a convolution by cuDNN: {}",
            api.text(status)
        ))),
        // No handle, no library.
        Err(_) => Ok(false),
    }
}

/// A descriptor of the library's.
struct Owned<T>(*mut T, unsafe extern "C" fn(*mut T) -> Status);

impl<T> Owned<T> {
    /// Both functions are of one kind of descriptor.
    fn new(
        make: unsafe extern "C" fn(*mut *mut T) -> Status,
        destroy: unsafe extern "C" fn(*mut T) -> Status,
    ) -> std::result::Result<Self, Status> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: written by the call.
        unsafe { make(&mut raw) }.result()?;
        Ok(Self(raw, destroy))
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { (self.1)(self.0) };
    }
}

/// A case as the library knows it.
struct ConvPlan {
    api: &'static Cudnn,
    x: Owned<sys::cudnnTensorStruct>,
    f: Owned<sys::cudnnFilterStruct>,
    y: Owned<sys::cudnnTensorStruct>,
    bias: Owned<sys::cudnnTensorStruct>,
    convolution: Owned<sys::cudnnConvolutionStruct>,
    /// None at all, which is what a sum with a bias wants said.
    activation: Owned<sys::cudnnActivationStruct>,
    workspace: usize,
}

// SAFETY: descriptors are plain memory of the library's, only read after `new`.
unsafe impl Send for ConvPlan {}
// SAFETY: as above.
unsafe impl Sync for ConvPlan {}

fn tensor(
    api: &Cudnn,
    dtype: sys::cudnnDataType_t,
    [n, c, h, w]: [i32; 4],
) -> std::result::Result<Owned<sys::cudnnTensorStruct>, Status> {
    let made = Owned::new(
        api.cudnnCreateTensorDescriptor,
        api.cudnnDestroyTensorDescriptor,
    )?;
    let dense = sys::cudnnTensorFormat_t::CUDNN_TENSOR_NCHW;
    // SAFETY: the descriptor is alive.
    unsafe { api.cudnnSetTensor4dDescriptor(made.0, dense, dtype, n, c, h, w) }.result()?;
    Ok(made)
}

impl ConvPlan {
    /// `None` where the library wants more workspace than it may use.
    fn new(
        api: &'static Cudnn,
        handle: sys::cudnnHandle_t,
        case: &ConvCase,
    ) -> std::result::Result<Option<Self>, Status> {
        use sys::cudnnDataType_t as Data;
        use sys::cudnnMathType_t as Math;
        let dtype = match case.dtype {
            DType::BF16 => Data::CUDNN_DATA_BFLOAT16,
            DType::F16 => Data::CUDNN_DATA_HALF,
            _ => Data::CUDNN_DATA_FLOAT,
        };
        // Without tensor cores for f32: they would round the operands.
        let math = if case.dtype == DType::F32 {
            Math::CUDNN_FMA_MATH
        } else {
            Math::CUDNN_TENSOR_OP_MATH
        };
        let f = Owned::new(
            api.cudnnCreateFilterDescriptor,
            api.cudnnDestroyFilterDescriptor,
        )?;
        let convolution = Owned::new(
            api.cudnnCreateConvolutionDescriptor,
            api.cudnnDestroyConvolutionDescriptor,
        )?;
        let activation = Owned::new(
            api.cudnnCreateActivationDescriptor,
            api.cudnnDestroyActivationDescriptor,
        )?;
        let (
            [o, c, h, w],
            ConvCase {
                stride,
                padding,
                dilation,
                ..
            },
        ) = (case.f, *case);
        let dense = sys::cudnnTensorFormat_t::CUDNN_TENSOR_NCHW;
        // The filter is not turned around: what this field calls a convolution.
        let mode = sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION;
        let none = sys::cudnnActivationMode_t::CUDNN_ACTIVATION_IDENTITY;
        let nan = sys::cudnnNanPropagation_t::CUDNN_PROPAGATE_NAN;
        // SAFETY: the descriptors are alive.
        unsafe {
            api.cudnnSetFilter4dDescriptor(f.0, dtype, dense, o, c, h, w)
                .result()?;
            api.cudnnSetConvolution2dDescriptor(
                convolution.0,
                padding[0],
                padding[1],
                stride[0],
                stride[1],
                dilation[0],
                dilation[1],
                mode,
                Data::CUDNN_DATA_FLOAT,
            )
            .result()?;
            api.cudnnSetConvolutionGroupCount(convolution.0, case.groups)
                .result()?;
            api.cudnnSetConvolutionMathType(convolution.0, math)
                .result()?;
            api.cudnnSetActivationDescriptor(activation.0, none, nan, 0.0)
                .result()?;
        }
        let (x, y, bias) = (
            tensor(api, dtype, case.x)?,
            tensor(api, dtype, case.y)?,
            tensor(api, dtype, [1, o, 1, 1])?,
        );
        let mut plan = Self {
            api,
            x,
            f,
            y,
            bias,
            convolution,
            activation,
            workspace: 0,
        };
        plan.workspace = plan.wanted(handle, case.kind)?;
        Ok((plan.workspace <= case.workspace()).then_some(plan))
    }

    /// Bytes of workspace that the library wants.
    fn wanted(
        &self,
        handle: sys::cudnnHandle_t,
        kind: ConvKind,
    ) -> std::result::Result<usize, Status> {
        let (x, f, y, convolution) = (self.x.0, self.f.0, self.y.0, self.convolution.0);
        let mut bytes = 0;
        // SAFETY: handle and descriptors are alive; the number is written by the call.
        let asked = unsafe {
            match kind {
                ConvKind::Forward { .. } => self.api.cudnnGetConvolutionForwardWorkspaceSize(
                    handle,
                    x,
                    f,
                    convolution,
                    y,
                    FORWARD,
                    &mut bytes,
                ),
                ConvKind::GradInput => self.api.cudnnGetConvolutionBackwardDataWorkspaceSize(
                    handle,
                    f,
                    y,
                    convolution,
                    x,
                    GRAD_INPUT,
                    &mut bytes,
                ),
                ConvKind::GradFilter => self.api.cudnnGetConvolutionBackwardFilterWorkspaceSize(
                    handle,
                    x,
                    y,
                    convolution,
                    f,
                    GRAD_FILTER,
                    &mut bytes,
                ),
            }
        };
        asked.result().map(|()| bytes)
    }

    /// # Safety
    /// The call's operands are as large as the case says, and its scratch memory as the plan wants.
    unsafe fn run(&self, handle: sys::cudnnHandle_t, call: &Call<'_>, case: &ConvCase) -> Status {
        let again = matches!(
            call.kernel,
            Kernel::Conv2dGradFilter {
                accumulate: true,
                ..
            }
        );
        let (one, nothing, beta) = (1.0f32, 0.0f32, if again { 1.0f32 } else { 0.0 });
        let number = |number: &f32| std::ptr::from_ref(number).cast::<c_void>();
        let (a, b) = (
            call.src(0).ptr as *const c_void,
            call.src(1).ptr as *const c_void,
        );
        let out = call.dst(0).ptr as *mut c_void;
        let (workspace, bytes) = (call.scratch_ptr() as *mut c_void, self.workspace);
        let (one, nothing, beta) = (number(&one), number(&nothing), number(&beta));
        let (x, f, y, convolution) = (self.x.0, self.f.0, self.y.0, self.convolution.0);
        // SAFETY: the caller's promise; the descriptors are alive and say what lies there; the
        // numbers live past the call, which reads them.
        unsafe {
            match (case.kind, call.maybe_src(2)) {
                (ConvKind::Forward { bias: true }, Some(bias)) => {
                    self.api.cudnnConvolutionBiasActivationForward(
                        handle,
                        one,
                        x,
                        a,
                        f,
                        b,
                        convolution,
                        FORWARD,
                        workspace,
                        bytes,
                        nothing,
                        y,
                        out.cast_const(),
                        self.bias.0,
                        bias.ptr as *const c_void,
                        self.activation.0,
                        y,
                        out,
                    )
                }
                (ConvKind::Forward { .. }, _) => self.api.cudnnConvolutionForward(
                    handle,
                    one,
                    x,
                    a,
                    f,
                    b,
                    convolution,
                    FORWARD,
                    workspace,
                    bytes,
                    beta,
                    y,
                    out,
                ),
                (ConvKind::GradInput, _) => self.api.cudnnConvolutionBackwardData(
                    handle,
                    one,
                    f,
                    b,
                    y,
                    a,
                    convolution,
                    GRAD_INPUT,
                    workspace,
                    bytes,
                    beta,
                    x,
                    out,
                ),
                (ConvKind::GradFilter, _) => self.api.cudnnConvolutionBackwardFilter(
                    handle,
                    one,
                    x,
                    a,
                    y,
                    b,
                    convolution,
                    GRAD_FILTER,
                    workspace,
                    bytes,
                    beta,
                    f,
                    out,
                ),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ConvCase, ConvKind, PARTS_BYTES, Status, TABLE_BYTES, is_failure};
    use crate::dtype::DType;
    use crate::kernel::{ConvSpec, Kernel, View};
    use crate::shape::{Layout, Shape};

    fn dense(dtype: DType, dims: &[usize]) -> Option<View> {
        Some(View {
            ptr: 0,
            dtype,
            layout: Layout::contiguous(Shape::new(dims).unwrap()),
        })
    }

    const SPEC: ConvSpec = ConvSpec {
        stride: [2, 1],
        padding: [1, 1],
        dilation: [1, 1],
        groups: 1,
    };
    const X: [usize; 4] = [2, 16, 9, 8];
    const F: [usize; 4] = [32, 16, 3, 3];
    const Y: [usize; 4] = [2, 32, 5, 8];

    /// Operands come in another order for each of the three; the case has them by what they are.
    #[test]
    fn all_three_describe_one_convolution() {
        for dtype in [DType::F32, DType::BF16] {
            let [x, f, y] = [X, F, Y].map(|dims| dense(dtype, &dims));
            let forward = ConvCase::of(&Kernel::Conv2d(SPEC), &[x, f, None], &[y]).unwrap();
            let input = ConvCase::of(&Kernel::Conv2dGradInput(SPEC), &[y, f], &[x]).unwrap();
            assert_eq!(
                ConvCase {
                    kind: ConvKind::GradInput,
                    ..forward
                },
                input
            );
            assert_eq!(
                (forward.x, forward.f, forward.y),
                (X.map(|n| n as i32), F.map(|n| n as i32), [2, 32, 5, 8])
            );
            assert_eq!((forward.stride, forward.padding), ([2, 1], [1, 1]));
            let kernel = Kernel::Conv2dGradFilter {
                spec: SPEC,
                accumulate: true,
            };
            let filter = ConvCase::of(&kernel, &[x, y], &[dense(DType::F32, &F)]);
            // The library would round the sums of 16-bit types.
            let want = (dtype == DType::F32).then_some(ConvCase {
                kind: ConvKind::GradFilter,
                ..forward
            });
            assert_eq!(filter, want, "{dtype}");
            assert_eq!(forward.workspace() > TABLE_BYTES, dtype == DType::BF16);
            assert!(filter.is_none_or(|case| case.workspace() == PARTS_BYTES));
        }
    }

    /// Refusals go to our kernels; what went wrong within is an error, by whatever number of those.
    #[test]
    fn failures_are_told_from_refusals() {
        for failed in [4000, 4001, 4004, 5000, 5001, 5003] {
            assert!(is_failure(Status(failed)), "{failed}");
        }
        for refused in [0, 1002, 2000, 3000, 3014] {
            assert!(!is_failure(Status(refused)), "{refused}");
        }
    }

    #[test]
    fn unusual_cases_are_our_own() {
        let takes = |dtype: DType, x: &[usize], f: &[usize], y: &[usize], spec: ConvSpec| {
            let [x, f, y] = [x, f, y].map(|dims| dense(dtype, dims));
            ConvCase::of(&Kernel::Conv2d(spec), &[x, f, None], &[y]).is_some()
        };
        assert!(takes(DType::F16, &X, &F, &Y, SPEC));
        assert!(!takes(DType::F64, &X, &F, &Y, SPEC));
        let wide = ConvSpec {
            padding: [1, 3],
            ..SPEC
        };
        assert!(
            !takes(DType::F32, &X, &F, &[2, 32, 5, 12], wide),
            "a border wider than the filter"
        );
        assert!(
            !takes(DType::F32, &[0, 16, 9, 8], &F, &[0, 32, 5, 8], SPEC),
            "nothing"
        );
        let groups = |groups| ConvSpec { groups, ..SPEC };
        assert!(takes(DType::F32, &X, &[32, 8, 3, 3], &Y, groups(2)));
        assert!(
            !takes(DType::F32, &X, &[16, 1, 3, 3], &[2, 16, 5, 8], groups(16)),
            "depthwise"
        );
    }
}
