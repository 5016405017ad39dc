//! What planning knows about a GPU before it is opened: scratch of its kernels, and rough rates.

use super::attention::BackwardWays;
use super::ops::{scratch, takes_block};
use crate::bytes::Bytes;
use crate::device::{BackendCosts, CostModel, DeviceKind};
use crate::kernel::{DecodeBlockSizes, Kernel, View};

/// An element of the sum costs 2 operations per row and 8 bytes; an H200 does 700e12 of the former
/// in the time of 4e12 of the latter, so both are equal at 700 rows. Its head of 151,936 classes
/// takes 107, 76, 61–67 and 60 ms for 16,384 tokens with 256, 512, 1,024 and 2,048 rows at a time.
pub(crate) const MIN_GEMM_ROWS: usize = 1024;

/// The context, the kernels, cuBLASLt and cuDNN. The driver counted 567 MiB beside the arena on an
/// H200 after some training steps; smaller cards have smaller contexts.
const CONTEXT: Bytes = Bytes(640 << 20);

/// A GPU, by what changes the scratch of its kernels.
#[derive(Debug)]
pub(crate) struct CudaCosts {
    /// How the backward of attention may go: cuDNN's wants gigabytes of scratch.
    backward: BackwardWays,
}

/// A GPU whose attention may be cuDNN's: the one that wants the most memory.
pub(crate) static WITH_CUDNN: CudaCosts = CudaCosts {
    backward: BackwardWays::Library,
};

static WITHOUT_CUDNN: CudaCosts = CudaCosts {
    backward: BackwardWays::Own,
};

static HOPPER: CudaCosts = CudaCosts {
    backward: BackwardWays::OnePass,
};

/// A GPU where the backward of attention may go so.
pub(super) fn cost_model(backward: BackwardWays) -> CostModel {
    CostModel::new(match backward {
        BackwardWays::Own => &WITHOUT_CUDNN,
        BackwardWays::Library => &WITH_CUDNN,
        BackwardWays::OnePass => &HOPPER,
    })
}

impl BackendCosts for CudaCosts {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn scratch(&self, kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
        scratch(kernel, src, dst, self.backward)
    }

    fn few_rows(&self) -> usize {
        super::decode::MAX_ROWS
    }

    fn takes_block(&self, sizes: &DecodeBlockSizes) -> bool {
        takes_block(sizes)
    }

    fn min_gemm_rows(&self) -> usize {
        MIN_GEMM_ROWS
    }

    fn flops_per_ms(&self) -> f64 {
        300e9
    }

    fn bytes_per_ms(&self) -> f64 {
        1.5e9
    }

    fn context_bytes(&self) -> Bytes {
        CONTEXT
    }
}
