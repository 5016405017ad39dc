//! What can be said without a GPU: which cases cuDNN takes, in which pieces, and that it makes plans of them.

use super::fused::Fused;
use super::graph::Target;
use super::library;
use crate::dtype::DType;
use crate::kernel::{AttentionSpec, View};
use crate::shape::{Layout, Shape};

const CAUSAL: AttentionSpec = AttentionSpec { scale: 0.125, causal: true, window: None };

fn view(ptr: u64, dtype: DType, dims: &[usize]) -> Option<View> {
    Some(View { ptr, dtype, layout: Layout::contiguous(Shape::new(dims).unwrap()) })
}

/// A contiguous case: batch, query heads, key heads, length, width.
fn case(spec: &AttentionSpec, dims: [usize; 5], dtype: DType, backward: bool) -> Option<Fused> {
    let [b, hq, hk, s, d] = dims;
    let q = |place: u64| view(place << 40, dtype, &[b, s, hq, d]);
    let k = |place: u64| view(place << 40, dtype, &[b, s, hk, d]);
    let lse = view(5 << 40, DType::F32, &[b, hq, s]);
    if backward {
        let src = [q(1), k(2), k(3), q(4), lse, q(8), None, None, None];
        return Fused::backward(spec, &src, &[q(9), k(10), k(11), None]);
    }
    Fused::forward(spec, &[q(1), k(2), k(3), None, None, None], &[q(4), lse])
}

#[test]
fn only_what_was_compared_is_taken() {
    let taken = |spec: &AttentionSpec, dims, dtype| {
        [false, true].map(|backward| case(spec, dims, dtype, backward).is_some())
    };
    assert_eq!(taken(&CAUSAL, [2, 4, 2, 256, 64], DType::BF16), [true, true]);
    assert_eq!(taken(&CAUSAL, [2, 4, 2, 256, 128], DType::F16), [true, true]);
    assert_eq!(taken(&CAUSAL, [2, 4, 2, 256, 64], DType::F32), [false, false]);
    assert_eq!(taken(&CAUSAL, [2, 4, 2, 250, 64], DType::BF16), [false, false]);
    assert_eq!(taken(&CAUSAL, [2, 4, 2, 256, 96], DType::BF16), [false, false]);
    assert_eq!(taken(&CAUSAL, [0, 4, 2, 256, 64], DType::BF16), [false, false]);
    let window = AttentionSpec { window: Some(100), ..CAUSAL };
    assert_eq!(taken(&window, [2, 4, 2, 256, 64], DType::BF16), [false, false]);
    // One group of heads of a long sequence is more than a piece may be.
    assert_eq!(taken(&CAUSAL, [1, 4, 2, 32768, 64], DType::BF16), [true, false]);
}

/// The pieces of a backward cover every batch and head once and stay below the bound.
#[test]
fn pieces_cover_the_whole() {
    for (dims, count) in [
        ([4, 16, 8, 4096, 128], 2),
        ([8, 8, 8, 1024, 64], 1),
        ([6, 4, 2, 8192, 64], 3),
        ([3, 4, 2, 16384, 64], 6),
    ] {
        let [b, hq, hk, s, d] = dims;
        let fused = case(&CAUSAL, dims, DType::BF16, true).unwrap();
        let (pieces, workspace) = fused.pieces(7 << 40);
        assert_eq!(pieces.len(), count, "{dims:?}");
        assert!(fused.scratch() < super::fused::PAIRS_BYTES * 3 / 2, "{dims:?}: {}", fused.scratch());
        assert!(workspace >= (7 << 40) + (b * hq * s * 4 / count) as u64);
        let address = |piece: &[(i64, u64)], id: i64| piece.iter().find(|p| p.0 == id).unwrap().1;
        let mut starts: Vec<u64> = pieces.iter().map(|piece| address(piece, 2) - (2 << 40)).collect();
        starts.sort_unstable();
        starts.dedup();
        assert_eq!(starts.len(), count, "every piece has keys of its own");
        for piece in &pieces {
            let (q, k) = (address(piece, 1) - (1 << 40), address(piece, 2) - (2 << 40));
            let (batch, head) = (k as usize / 2 / (s * hk * d), k as usize / 2 % (hk * d) / d);
            assert_eq!(q as usize / 2, batch * s * hq * d + head * (hq / hk) * d);
            assert_eq!((address(piece, 5) - (5 << 40)) as usize / 4, (batch * hq + head * (hq / hk)) * s);
        }
    }
}

/// cuDNN makes a plan of every kind of case for GPUs that are not here, within the scratch that was counted.
/// Skipped where cuDNN or a driver's library is missing; ROUNDPIPE_CUDNN=required makes that a failure.
#[test]
#[expect(clippy::print_stderr, reason = "a skipped test says why")]
fn plans_are_made_without_a_gpu() {
    let here = library::driver().is_ok() && library::nvrtc().is_ok() && library::cudnn();
    if !here {
        assert!(std::env::var("ROUNDPIPE_CUDNN").as_deref() != Ok("required"), "cuDNN or libcuda is missing");
        eprintln!("skipped: cuDNN or libcuda is missing");
        return;
    }
    let full = AttentionSpec { causal: false, ..CAUSAL };
    for device in [H200, A100] {
        for (spec, dims, dtype) in [
            (&CAUSAL, [2, 16, 8, 1024, 128], DType::BF16),
            (&CAUSAL, [1, 4, 4, 384, 64], DType::BF16),
            (&full, [2, 4, 1, 128, 64], DType::F16),
            (&CAUSAL, [4, 16, 8, 4096, 128], DType::BF16),
        ] {
            for backward in [false, true] {
                let fused = case(spec, dims, dtype, backward).unwrap();
                let plan = fused.plan(&Target::Properties(device));
                let name = format!("{dims:?}, {dtype}, causal {}, backward {backward}", spec.causal);
                let plan = plan.unwrap_or_else(|why| panic!("{name}: {why}"));
                eprintln!("{name}: {} of {} bytes", plan.workspace, fused.workspace());
            }
        }
    }
}

macro_rules! device {
    ($name:literal, $version:literal, $processors:literal, $shared:literal) => {
        concat!(
            r#"{"deviceName":""#,
            $name,
            r#"","deviceVer":"#,
            $version,
            r#","multiProcessorCount":"#,
            $processors,
            r#","maxSharedMemoryPerBlockOptin":"#,
            $shared,
            r#","maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,
            "warpSize":32,"maxSharedMemoryPerBlock":49152,"reservedSharedMemoryPerBlock":1024,
            "maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,
            "l2CacheSize":52428800,"maxSharedMemoryPerSM":167936,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,"totalGlobalMem":85899345920,
            "smClockRateKHz":1980000,"memClockRateKHz":2600000,"cudaDeviceId":0,"driverVer":13000}"#
        )
    };
}

const H200: &str = device!("H200", 900, 132, 232448);
const A100: &str = device!("A100", 800, 108, 166912);
