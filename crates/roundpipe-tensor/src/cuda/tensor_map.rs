//! Tensors as Hopper's copy engine (TMA) sees them: `TensorMap` of `kernels/hopper.cuh`.
//!
//! A box of a map comes into shared memory as lines of 128 bytes, swizzled as the tensor cores read
//! them. What a box reaches past the end of its tensor is read as 0.
//!
//! # Invariants
//! - Every address and stride that the copy engine gets is a multiple of 16 bytes.

use cudarc::driver::sys;

use super::call::Call;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::View;

/// Elements of a line in shared memory: 128 bytes, the widest that is swizzled.
pub(super) const LINE: usize = 64;

/// The most dimensions that the copy engine knows.
const MOST: usize = 5;

/// A tensor as the copy engine sees it.
pub(super) struct TensorMap(pub [u64; 16]);

impl TensorMap {
    /// Of 16-bit elements: sizes from the innermost dimension, strides of the others in elements,
    /// and the box that one copy brings.
    pub(super) fn new(
        call: &Call<'_>,
        view: &View,
        dims: &[usize],
        strides: &[isize],
        sides: &[usize],
    ) -> Result<Self> {
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let rank = dims.len();
        let (mut sizes, mut bytes, mut boxes) = ([1u64; MOST], [0u64; MOST - 1], [1u32; MOST]);
        for i in 0..rank {
            (sizes[i], boxes[i]) = (dims[i] as u64, sides[i] as u32);
        }
        for i in 0..rank - 1 {
            bytes[i] = strides[i] as u64 * 2;
        }
        let steps = [1u32; MOST];
        let kind = match view.dtype {
            DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        // SAFETY: the map has room, and the lists have as many entries as the rank asks for; the
        // address is only written down.
        let made = unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                kind,
                rank as u32,
                view.ptr as *mut _,
                sizes.as_ptr(),
                bytes.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        made.result().map_err(|error| {
            Error::invalid(
                call.kernel.name(),
                format!("the driver describes no tensor of {dims:?}: {error}"),
            )
        })?;
        Ok(Self(map.opaque))
    }
}
