//! From a kernel to the family that launches it.
//!
//! One `match` for all kernels, and one for their scratch. Kernels written for host memory are
//! refused: they would read addresses of the card.

use std::sync::{Arc, OnceLock};

use super::attention::BackwardWays;
use super::call::Call;
use super::compile::Unit;
use super::context::Gpu;
use super::costs::MIN_GEMM_ROWS;
use super::faults::ErrorWord;
use super::lane::CudaLane;
use super::{
    attention, decode, decode_block, elementwise, fp8, image, index, loss, moe, norm, product,
    quantized, reduce, rope,
};
use crate::device::{Faults, Lane, Ops};
use crate::error::{Error, Result};
use crate::kernel::{DecodeBlockSizes, Family, Kernel, View};

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
        lane.make_room()?;
        let (gpu, alarm, stream) = (&*self.gpu, self.alarm.slot(faults), lane.stream);
        let call = Call {
            gpu,
            alarm,
            stream,
            barrier: lane.barrier.ptr(),
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
                Family::Product => product::run(&call),
                Family::Quantized => quantized::run(&call),
                Family::Norm => norm::run(&call),
                Family::Rope => rope::run(&call),
                Family::Attention if matches!(kernel, Kernel::CachedAttention(_)) => {
                    decode::run(&call)
                }
                Family::Index if matches!(kernel, Kernel::CacheWrite) => decode::run(&call),
                Family::Decode if matches!(kernel, Kernel::DecodeBlock(_)) => {
                    decode_block::run(&call)
                }
                Family::Decode => decode::run(&call),
                Family::Attention => attention::run(&call),
                Family::Index => index::run(&call),
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
        // Only attention asks for cuDNN: the first time, the library is searched for.
        let backward = match kernel {
            Kernel::AttentionGrad(_) => attention::backward_ways(self.gpu.capability),
            _ => BackwardWays::Own,
        };
        scratch(kernel, src, dst, backward)
    }

    fn min_gemm_rows(&self) -> usize {
        MIN_GEMM_ROWS
    }

    fn few_rows(&self) -> usize {
        decode::MAX_ROWS
    }

    fn takes_block(&self, sizes: &DecodeBlockSizes) -> bool {
        takes_block(sizes)
    }
}

/// Whether a decoder block goes in one launch: where its kernel takes it, unless
/// `ROUNDPIPE_DECODE=separate` asks for the launches of [`decode`], to compare the two.
pub(super) fn takes_block(sizes: &DecodeBlockSizes) -> bool {
    static SEPARATE: OnceLock<bool> = OnceLock::new();
    let is_separate =
        SEPARATE.get_or_init(|| std::env::var("ROUNDPIPE_DECODE").as_deref() == Ok("separate"));
    !is_separate && decode_block::takes(sizes)
}

/// Scratch bytes that kernels want: by their operands and by how the backward of attention may go, so
/// that a plan can ask without a GPU.
pub(super) fn scratch(
    kernel: &Kernel,
    src: &[Option<View>],
    dst: &[Option<View>],
    backward: BackwardWays,
) -> usize {
    use Kernel as K;
    match kernel {
        K::Reduce { .. } | K::ArgReduce { .. } | K::CumSum { .. } | K::TopK { .. } => {
            reduce::scratch(kernel, src, dst)
        }
        K::IndexAdd { .. } | K::ScatterAdd { .. } => index::scratch(kernel, src, dst),
        K::MatMul { .. }
        | K::GroupedMatMul { .. }
        | K::GroupedMatMulGrad { .. }
        | K::Fp8MatMul { .. } => product::scratch(kernel, src, dst),
        K::QuantizeRows(_) => fp8::scratch(src),
        K::RmsNormGrad { .. }
        | K::LayerNormGrad { .. }
        | K::GroupNorm { .. }
        | K::GroupNormGrad { .. }
        | K::BatchNorm { .. }
        | K::BatchNormGrad { .. } => norm::scratch(kernel, src, dst),
        K::RopeNormGrad { .. } => rope::scratch(kernel, src, dst),
        K::Attention(_) | K::AttentionGrad(_) => attention::scratch(kernel, src, dst, backward),
        K::CachedAttention(_) => decode::scratch(kernel, src, dst),
        K::DecodeBlock(_) => decode_block::scratch(src, dst),
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
        quantized::units(),
        fp8::units(),
        norm::units(),
        rope::units(),
        attention::units(),
        decode::units(),
        decode_block::units(),
        loss::units(),
        moe::units(),
        image::units(),
        vec![trap()],
    ];
    families.into_iter().flatten().collect()
}
