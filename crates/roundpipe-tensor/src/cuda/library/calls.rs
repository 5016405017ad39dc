//! The functions that we call of each library, bound from the file that was chosen.
//!
//! Types are the bindings' own; what a call returns is a number, since a newer library may return
//! one that the bindings do not know. A function that is not there is an error that names it.

#![allow(
    non_snake_case,
    reason = "functions keep the names that the libraries give them"
)]

use std::ffi::{CStr, c_char, c_int, c_void};

use cudarc::cublaslt::sys as lt;
use cudarc::cudnn::sys as dnn;
use cudarc::nvrtc::sys as rtc;
use libloading::Library;

use super::version::{self, Package, Version};

/// What a library's call returned; 0 is success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Status(pub u32);

impl Status {
    /// An error for everything but success.
    pub fn result(self) -> Result<(), Self> {
        if self.0 == 0 { Ok(()) } else { Err(self) }
    }
}

/// A table of functions.
pub(super) trait Calls: Sized {
    /// The library's name for people.
    const NAME: &'static str;
    /// Its file without a version.
    const FILE: &'static str;
    /// Whether a file's first number is CUDA's.
    const NUMBERED_AS_CUDA: bool;
    /// What to install.
    const PACKAGE: Package;

    /// Binds all functions, or names the one that is missing.
    fn bind(library: &Library) -> Result<Self, &'static str>;

    /// The version of CUDA that the library was made for.
    fn made_for(&self) -> Option<Version>;

    /// An address within the library, by which its file is known.
    fn address(&self) -> *const c_void;

    /// Whether it works for cards of all these compute capabilities.
    fn knows(&self, _cards: &[u32]) -> bool {
        true
    }
}

macro_rules! functions {
    ($(#[$doc:meta])* $table:ident: $($name:ident($($arg:ident: $type:ty),* $(,)?) -> $out:ty;)*) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) -> $out,)*
        }

        impl $table {
            fn bound(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $(
                        // SAFETY: the library's function of this name has this type.
                        $name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                            .map_err(|_| stringify!($name))?,
                    )*
                })
            }

            $(
                /// # Safety
                /// As the library says of its function.
                #[allow(clippy::too_many_arguments, dead_code, reason = "the library's; some are used as values")]
                pub(crate) unsafe fn $name(&self, $($arg: $type),*) -> $out {
                    // SAFETY: the caller's promise.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }
    };
}

functions! {
    /// The compiler of our kernels.
    Nvrtc:
    nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> Status;
    nvrtcGetNumSupportedArchs(count: *mut c_int) -> Status;
    nvrtcGetSupportedArchs(archs: *mut c_int) -> Status;
    nvrtcGetErrorString(status: Status) -> *const c_char;
    nvrtcCreateProgram(
        program: *mut rtc::nvrtcProgram,
        text: *const c_char,
        name: *const c_char,
        headers: c_int,
        header_texts: *const *const c_char,
        header_names: *const *const c_char,
    ) -> Status;
    nvrtcCompileProgram(program: rtc::nvrtcProgram, count: c_int, options: *const *const c_char) -> Status;
    nvrtcGetCUBINSize(program: rtc::nvrtcProgram, bytes: *mut usize) -> Status;
    nvrtcGetCUBIN(program: rtc::nvrtcProgram, image: *mut c_char) -> Status;
    nvrtcGetProgramLogSize(program: rtc::nvrtcProgram, bytes: *mut usize) -> Status;
    nvrtcGetProgramLog(program: rtc::nvrtcProgram, log: *mut c_char) -> Status;
    nvrtcDestroyProgram(program: *mut rtc::nvrtcProgram) -> Status;
}

functions! {
    /// The library of products.
    CublasLt:
    cublasLtGetVersion() -> usize;
    cublasLtGetCudartVersion() -> usize;
    cublasLtGetStatusName(status: Status) -> *const c_char;
    cublasLtCreate(handle: *mut lt::cublasLtHandle_t) -> Status;
    cublasLtDestroy(handle: lt::cublasLtHandle_t) -> Status;
    cublasLtMatrixLayoutCreate(
        layout: *mut lt::cublasLtMatrixLayout_t,
        dtype: lt::cudaDataType,
        rows: u64,
        cols: u64,
        line: i64,
    ) -> Status;
    cublasLtMatrixLayoutSetAttribute(
        layout: lt::cublasLtMatrixLayout_t,
        name: lt::cublasLtMatrixLayoutAttribute_t,
        value: *const c_void,
        bytes: usize,
    ) -> Status;
    cublasLtMatrixLayoutDestroy(layout: lt::cublasLtMatrixLayout_t) -> Status;
    cublasLtMatmulDescCreate(
        operation: *mut lt::cublasLtMatmulDesc_t,
        compute: lt::cublasComputeType_t,
        scale: lt::cudaDataType_t,
    ) -> Status;
    cublasLtMatmulDescSetAttribute(
        operation: lt::cublasLtMatmulDesc_t,
        name: lt::cublasLtMatmulDescAttributes_t,
        value: *const c_void,
        bytes: usize,
    ) -> Status;
    cublasLtMatmulDescDestroy(operation: lt::cublasLtMatmulDesc_t) -> Status;
    cublasLtMatmulPreferenceCreate(preference: *mut lt::cublasLtMatmulPreference_t) -> Status;
    cublasLtMatmulPreferenceSetAttribute(
        preference: lt::cublasLtMatmulPreference_t,
        name: lt::cublasLtMatmulPreferenceAttributes_t,
        value: *const c_void,
        bytes: usize,
    ) -> Status;
    cublasLtMatmulPreferenceDestroy(preference: lt::cublasLtMatmulPreference_t) -> Status;
    cublasLtMatmulAlgoGetHeuristic(
        handle: lt::cublasLtHandle_t,
        operation: lt::cublasLtMatmulDesc_t,
        a: lt::cublasLtMatrixLayout_t,
        b: lt::cublasLtMatrixLayout_t,
        c: lt::cublasLtMatrixLayout_t,
        d: lt::cublasLtMatrixLayout_t,
        preference: lt::cublasLtMatmulPreference_t,
        wanted: c_int,
        found: *mut lt::cublasLtMatmulHeuristicResult_t,
        count: *mut c_int,
    ) -> Status;
    cublasLtMatmul(
        handle: lt::cublasLtHandle_t,
        operation: lt::cublasLtMatmulDesc_t,
        alpha: *const c_void,
        a: *const c_void,
        a_layout: lt::cublasLtMatrixLayout_t,
        b: *const c_void,
        b_layout: lt::cublasLtMatrixLayout_t,
        beta: *const c_void,
        c: *const c_void,
        c_layout: lt::cublasLtMatrixLayout_t,
        d: *mut c_void,
        d_layout: lt::cublasLtMatrixLayout_t,
        algorithm: *const lt::cublasLtMatmulAlgo_t,
        workspace: *mut c_void,
        workspace_bytes: usize,
        stream: lt::cudaStream_t,
    ) -> Status;
}

functions! {
    /// The library of attention and convolutions.
    Cudnn:
    cudnnGetVersion() -> usize;
    cudnnGetCudartVersion() -> usize;
    cudnnGetErrorString(status: Status) -> *const c_char;
    cudnnCreate(handle: *mut dnn::cudnnHandle_t) -> Status;
    cudnnDestroy(handle: dnn::cudnnHandle_t) -> Status;
    cudnnSetStream(handle: dnn::cudnnHandle_t, stream: dnn::cudaStream_t) -> Status;
    cudnnBackendCreateDescriptor(
        kind: dnn::cudnnBackendDescriptorType_t,
        descriptor: *mut dnn::cudnnBackendDescriptor_t,
    ) -> Status;
    cudnnBackendDestroyDescriptor(descriptor: dnn::cudnnBackendDescriptor_t) -> Status;
    cudnnBackendFinalize(descriptor: dnn::cudnnBackendDescriptor_t) -> Status;
    cudnnBackendSetAttribute(
        descriptor: dnn::cudnnBackendDescriptor_t,
        name: dnn::cudnnBackendAttributeName_t,
        kind: dnn::cudnnBackendAttributeType_t,
        count: i64,
        values: *const c_void,
    ) -> Status;
    cudnnBackendGetAttribute(
        descriptor: dnn::cudnnBackendDescriptor_t,
        name: dnn::cudnnBackendAttributeName_t,
        kind: dnn::cudnnBackendAttributeType_t,
        wanted: i64,
        count: *mut i64,
        values: *mut c_void,
    ) -> Status;
    cudnnBackendExecute(
        handle: dnn::cudnnHandle_t,
        plan: dnn::cudnnBackendDescriptor_t,
        pack: dnn::cudnnBackendDescriptor_t,
    ) -> Status;
    cudnnCreateTensorDescriptor(descriptor: *mut dnn::cudnnTensorDescriptor_t) -> Status;
    cudnnDestroyTensorDescriptor(descriptor: dnn::cudnnTensorDescriptor_t) -> Status;
    cudnnSetTensor4dDescriptor(
        descriptor: dnn::cudnnTensorDescriptor_t,
        format: dnn::cudnnTensorFormat_t,
        dtype: dnn::cudnnDataType_t,
        n: c_int,
        c: c_int,
        h: c_int,
        w: c_int,
    ) -> Status;
    cudnnCreateFilterDescriptor(descriptor: *mut dnn::cudnnFilterDescriptor_t) -> Status;
    cudnnDestroyFilterDescriptor(descriptor: dnn::cudnnFilterDescriptor_t) -> Status;
    cudnnSetFilter4dDescriptor(
        descriptor: dnn::cudnnFilterDescriptor_t,
        dtype: dnn::cudnnDataType_t,
        format: dnn::cudnnTensorFormat_t,
        o: c_int,
        c: c_int,
        h: c_int,
        w: c_int,
    ) -> Status;
    cudnnCreateConvolutionDescriptor(descriptor: *mut dnn::cudnnConvolutionDescriptor_t) -> Status;
    cudnnDestroyConvolutionDescriptor(descriptor: dnn::cudnnConvolutionDescriptor_t) -> Status;
    cudnnSetConvolution2dDescriptor(
        descriptor: dnn::cudnnConvolutionDescriptor_t,
        padding_h: c_int,
        padding_w: c_int,
        stride_h: c_int,
        stride_w: c_int,
        dilation_h: c_int,
        dilation_w: c_int,
        mode: dnn::cudnnConvolutionMode_t,
        compute: dnn::cudnnDataType_t,
    ) -> Status;
    cudnnSetConvolutionGroupCount(descriptor: dnn::cudnnConvolutionDescriptor_t, groups: c_int) -> Status;
    cudnnSetConvolutionMathType(
        descriptor: dnn::cudnnConvolutionDescriptor_t,
        math: dnn::cudnnMathType_t,
    ) -> Status;
    cudnnCreateActivationDescriptor(descriptor: *mut dnn::cudnnActivationDescriptor_t) -> Status;
    cudnnDestroyActivationDescriptor(descriptor: dnn::cudnnActivationDescriptor_t) -> Status;
    cudnnSetActivationDescriptor(
        descriptor: dnn::cudnnActivationDescriptor_t,
        mode: dnn::cudnnActivationMode_t,
        nan: dnn::cudnnNanPropagation_t,
        coefficient: f64,
    ) -> Status;
    cudnnGetConvolutionForwardWorkspaceSize(
        handle: dnn::cudnnHandle_t,
        x: dnn::cudnnTensorDescriptor_t,
        f: dnn::cudnnFilterDescriptor_t,
        convolution: dnn::cudnnConvolutionDescriptor_t,
        y: dnn::cudnnTensorDescriptor_t,
        algorithm: dnn::cudnnConvolutionFwdAlgo_t,
        bytes: *mut usize,
    ) -> Status;
    cudnnGetConvolutionBackwardDataWorkspaceSize(
        handle: dnn::cudnnHandle_t,
        f: dnn::cudnnFilterDescriptor_t,
        y: dnn::cudnnTensorDescriptor_t,
        convolution: dnn::cudnnConvolutionDescriptor_t,
        x: dnn::cudnnTensorDescriptor_t,
        algorithm: dnn::cudnnConvolutionBwdDataAlgo_t,
        bytes: *mut usize,
    ) -> Status;
    cudnnGetConvolutionBackwardFilterWorkspaceSize(
        handle: dnn::cudnnHandle_t,
        x: dnn::cudnnTensorDescriptor_t,
        y: dnn::cudnnTensorDescriptor_t,
        convolution: dnn::cudnnConvolutionDescriptor_t,
        f: dnn::cudnnFilterDescriptor_t,
        algorithm: dnn::cudnnConvolutionBwdFilterAlgo_t,
        bytes: *mut usize,
    ) -> Status;
    cudnnConvolutionForward(
        handle: dnn::cudnnHandle_t,
        alpha: *const c_void,
        x: dnn::cudnnTensorDescriptor_t,
        x_data: *const c_void,
        f: dnn::cudnnFilterDescriptor_t,
        f_data: *const c_void,
        convolution: dnn::cudnnConvolutionDescriptor_t,
        algorithm: dnn::cudnnConvolutionFwdAlgo_t,
        workspace: *mut c_void,
        workspace_bytes: usize,
        beta: *const c_void,
        y: dnn::cudnnTensorDescriptor_t,
        y_data: *mut c_void,
    ) -> Status;
    cudnnConvolutionBiasActivationForward(
        handle: dnn::cudnnHandle_t,
        alpha: *const c_void,
        x: dnn::cudnnTensorDescriptor_t,
        x_data: *const c_void,
        f: dnn::cudnnFilterDescriptor_t,
        f_data: *const c_void,
        convolution: dnn::cudnnConvolutionDescriptor_t,
        algorithm: dnn::cudnnConvolutionFwdAlgo_t,
        workspace: *mut c_void,
        workspace_bytes: usize,
        beta: *const c_void,
        z: dnn::cudnnTensorDescriptor_t,
        z_data: *const c_void,
        bias: dnn::cudnnTensorDescriptor_t,
        bias_data: *const c_void,
        activation: dnn::cudnnActivationDescriptor_t,
        y: dnn::cudnnTensorDescriptor_t,
        y_data: *mut c_void,
    ) -> Status;
    cudnnConvolutionBackwardData(
        handle: dnn::cudnnHandle_t,
        alpha: *const c_void,
        f: dnn::cudnnFilterDescriptor_t,
        f_data: *const c_void,
        y: dnn::cudnnTensorDescriptor_t,
        y_data: *const c_void,
        convolution: dnn::cudnnConvolutionDescriptor_t,
        algorithm: dnn::cudnnConvolutionBwdDataAlgo_t,
        workspace: *mut c_void,
        workspace_bytes: usize,
        beta: *const c_void,
        x: dnn::cudnnTensorDescriptor_t,
        x_data: *mut c_void,
    ) -> Status;
    cudnnConvolutionBackwardFilter(
        handle: dnn::cudnnHandle_t,
        alpha: *const c_void,
        x: dnn::cudnnTensorDescriptor_t,
        x_data: *const c_void,
        y: dnn::cudnnTensorDescriptor_t,
        y_data: *const c_void,
        convolution: dnn::cudnnConvolutionDescriptor_t,
        algorithm: dnn::cudnnConvolutionBwdFilterAlgo_t,
        workspace: *mut c_void,
        workspace_bytes: usize,
        beta: *const c_void,
        f: dnn::cudnnFilterDescriptor_t,
        f_data: *mut c_void,
    ) -> Status;
}

impl Calls for Nvrtc {
    const NAME: &'static str = "libnvrtc";
    const FILE: &'static str = "libnvrtc.so";
    const NUMBERED_AS_CUDA: bool = true;
    const PACKAGE: Package = Package::Nvrtc;

    fn bind(library: &Library) -> Result<Self, &'static str> {
        Self::bound(library)
    }

    fn made_for(&self) -> Option<Version> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both numbers are written by the call.
        unsafe { self.nvrtcVersion(&mut major, &mut minor) }
            .result()
            .ok()?;
        Some(Version::new(major.try_into().ok()?, minor.try_into().ok()?))
    }

    fn address(&self) -> *const c_void {
        self.nvrtcVersion as *const c_void
    }

    fn knows(&self, cards: &[u32]) -> bool {
        let known = self.architectures();
        known.is_empty()
            || cards
                .iter()
                .all(|card| version::target(&known, *card).is_some())
    }
}

impl Nvrtc {
    /// The architectures it compiles for, 90 for `sm_90`; none where it does not say.
    pub(super) fn architectures(&self) -> Vec<u32> {
        let mut count = 0;
        // SAFETY: the number is written by the call.
        if unsafe { self.nvrtcGetNumSupportedArchs(&mut count) }
            .result()
            .is_err()
            || count <= 0
        {
            return Vec::new();
        }
        let mut archs = vec![0; count as usize];
        // SAFETY: there is room for as many as the library says there are.
        let asked = unsafe { self.nvrtcGetSupportedArchs(archs.as_mut_ptr()) };
        archs.retain(|arch| *arch > 0 && asked.0 == 0);
        archs.into_iter().map(|arch| arch as u32).collect()
    }

    /// What a status means, in the library's words.
    pub(crate) fn text(&self, status: Status) -> String {
        // SAFETY: the call takes any number and returns a constant text.
        words(unsafe { self.nvrtcGetErrorString(status) }, status)
    }
}

impl Calls for CublasLt {
    const NAME: &'static str = "libcublasLt";
    const FILE: &'static str = "libcublasLt.so";
    const NUMBERED_AS_CUDA: bool = true;
    const PACKAGE: Package = Package::Cublas;

    fn bind(library: &Library) -> Result<Self, &'static str> {
        Self::bound(library)
    }

    fn made_for(&self) -> Option<Version> {
        // SAFETY: the call only reads a constant.
        Version::of_library(unsafe { self.cublasLtGetCudartVersion() })
    }

    fn address(&self) -> *const c_void {
        self.cublasLtGetVersion as *const c_void
    }
}

impl CublasLt {
    /// What a status means, in the library's words.
    pub(crate) fn text(&self, status: Status) -> String {
        // SAFETY: the call takes any number and returns a constant text.
        words(unsafe { self.cublasLtGetStatusName(status) }, status)
    }
}

impl Calls for Cudnn {
    const NAME: &'static str = "libcudnn";
    const FILE: &'static str = "libcudnn.so";
    const NUMBERED_AS_CUDA: bool = false;
    const PACKAGE: Package = Package::Cudnn;

    fn bind(library: &Library) -> Result<Self, &'static str> {
        Self::bound(library)
    }

    fn made_for(&self) -> Option<Version> {
        // SAFETY: the call only reads a constant.
        Version::of_library(unsafe { self.cudnnGetCudartVersion() })
    }

    fn address(&self) -> *const c_void {
        self.cudnnGetVersion as *const c_void
    }
}

impl Cudnn {
    /// 91400 for 9.14.0.
    pub(crate) fn number(&self) -> usize {
        // SAFETY: the call only reads a constant.
        unsafe { self.cudnnGetVersion() }
    }

    /// What a status means, in the library's words.
    pub(crate) fn text(&self, status: Status) -> String {
        // SAFETY: the call takes any number and returns a constant text.
        words(unsafe { self.cudnnGetErrorString(status) }, status)
    }
}

fn words(text: *const c_char, status: Status) -> String {
    if text.is_null() {
        return format!("status {}", status.0);
    }
    // SAFETY: libraries return constant texts that end in a zero.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}
