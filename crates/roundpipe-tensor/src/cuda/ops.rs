//! From a kernel to the family that launches it.
//!
//! One `match` for all kernels, and one for their scratch. Kernels written for host memory are
//! refused: they would read addresses of the card.

use std::sync::Arc;

use super::call::Call;
use super::compile::Unit;
use super::context::Gpu;
use super::faults::ErrorWord;
use super::lane::CudaLane;
use super::{attention, elementwise, image, index, loss, moe, norm, product, reduce, rope};
use crate::device::{Faults, Lane, Ops};
use crate::error::{Error, Result};
use crate::kernel::{Family, Kernel, View};

/// An element of the sum costs 2 operations per row and 8 bytes; an H200 does 700e12 of the former
/// in the time of 4e12 of the latter, so both are equal at 700 rows. Its head of 151,936 classes
/// takes 107, 76, 61–67 and 60 ms for 16,384 tokens with 256, 512, 1,024 and 2,048 rows at a time.
pub(crate) const THICK: usize = 1024;

/// The GPU's mathematics.
pub(crate) struct CudaOps {
    pub(super) alarm: Arc<ErrorWord>,
    pub(super) gpu: Arc<Gpu>,
}

// SAFETY: kernels run in the lane's stream; what they touch is argued by family. Scratch is stated
// by the functions that the launches themselves cut it with.
unsafe impl Ops for CudaOps {
    unsafe fn launch(
        &self,
        lane: &dyn Lane,
        kernel: &Kernel,
        src: &[Option<View>],
        dst: &[Option<View>],
        scratch: Option<View>,
        faults: Option<&Faults>,
    ) -> Result<()> {
        let Some(lane) = lane.as_any().downcast_ref::<CudaLane>() else {
            return Err(Error::Foreign {
                op: kernel.name(),
                what: format!("{lane:?} is no lane of a GPU"),
            });
        };
        self.gpu.enter()?;
        let (gpu, alarm, stream) = (&*self.gpu, self.alarm.slot(faults), lane.stream);
        let call = Call {
            gpu,
            alarm,
            stream,
            kernel,
            src,
            dst,
            scratch,
        };
        // SAFETY: the caller's promise is passed on unchanged to the family that knows the kernel.
        unsafe {
            match kernel.family() {
                Family::Elementwise => elementwise::run(&call),
                Family::Reduce => reduce::run(&call),
                Family::Index => index::run(&call),
                Family::Product => product::run(&call),
                Family::Norm => norm::run(&call),
                Family::Rope => rope::run(&call),
                Family::Attention => attention::run(&call),
                Family::Loss => loss::run(&call),
                Family::Moe => moe::run(&call),
                Family::Image => image::run(&call),
                Family::Host(host) => Err(Error::invalid(
                    host.name(),
                    "a kernel written for host memory does not run on a GPU; write it with the operations of Cx",
                )),
            }
        }
    }

    fn scratch(&self, kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
        // Of attention alone, for the first time this is asked cuDNN is looked for.
        let library_attention = matches!(kernel, Kernel::AttentionGrad(_))
            && attention::may_take_backward(self.gpu.capability);
        scratch(kernel, src, dst, library_attention)
    }

    fn min_gemm_rows(&self) -> usize {
        THICK
    }
}

/// Scratch bytes that kernels want: of the operands and of what a likeness tells, so that meta can
/// ask too.
pub(crate) fn scratch(
    kernel: &Kernel,
    src: &[Option<View>],
    dst: &[Option<View>],
    library_attention: bool,
) -> usize {
    use Kernel as K;
    match kernel {
        K::Reduce { .. } | K::ArgReduce { .. } | K::CumSum { .. } | K::TopK { .. } => {
            reduce::scratch(kernel, src, dst)
        }
        K::IndexAdd { .. } | K::ScatterAdd { .. } => index::scratch(kernel, src, dst),
        K::MatMul { .. } | K::GroupedMatMul | K::GroupedMatMulGrad { .. } => {
            product::scratch(kernel, src, dst)
        }
        K::RmsNormGrad { .. }
        | K::LayerNormGrad { .. }
        | K::GroupNorm { .. }
        | K::GroupNormGrad { .. }
        | K::BatchNorm { .. }
        | K::BatchNormGrad { .. } => norm::scratch(kernel, src, dst),
        K::RopeNormGrad { .. } => rope::scratch(kernel, src, dst),
        K::Attention(_) | K::AttentionGrad(_) => {
            attention::scratch(kernel, src, dst, library_attention)
        }
        K::MoeSort { .. } | K::MoeCombineGrad => moe::scratch(kernel, src, dst),
        K::Conv2d(_) | K::Conv2dGradInput(_) | K::Conv2dGradFilter { .. } => {
            image::scratch(kernel, src, dst)
        }
        _ => 0,
    }
}

/// A kernel that traps, for tests of failures.
pub(super) fn trap() -> Unit {
    Unit::new("trap", include_str!("kernels/trap.cu"), "trap_now")
}

/// Every kernel in the variants that models use: what a machine without a GPU compiles to see that
/// it can.
pub fn units() -> Vec<Unit> {
    let families = [
        elementwise::units(),
        reduce::units(),
        index::units(),
        product::units(),
        norm::units(),
        rope::units(),
        attention::units(),
        loss::units(),
        moe::units(),
        image::units(),
        vec![trap()],
    ];
    families.into_iter().flatten().collect()
}
