//! What can be said without a GPU: which cases cuDNN takes, in which pieces, and that it makes
//! plans of them.

use std::collections::HashSet;

use super::fused::FusedAttention;
use super::graph::TargetGpu;
use super::library;
use crate::dtype::DType;
use crate::kernel::{AttentionSpec, View};
use crate::shape::{Layout, Shape};

const CAUSAL: AttentionSpec = AttentionSpec {
    scale: 0.125,
    causal: true,
    window: None,
    any_order: false,
};

fn view(ptr: u64, dtype: DType, dims: &[usize]) -> Option<View> {
    Some(View {
        ptr,
        dtype,
        layout: Layout::contiguous(Shape::new(dims).unwrap()),
    })
}

/// A contiguous case: batch, query heads, key heads, length, width.
fn case(
    spec: &AttentionSpec,
    dims: [usize; 5],
    dtype: DType,
    backward: bool,
) -> Option<FusedAttention> {
    let [b, hq, hk, s, d] = dims;
    let q = |place: u64| view(place << 40, dtype, &[b, s, hq, d]);
    let k = |place: u64| view(place << 40, dtype, &[b, s, hk, d]);
    let lse = view(5 << 40, DType::F32, &[b, hq, s]);
    if backward {
        let src = [q(1), k(2), k(3), q(4), lse, q(8), None, None, None];
        return FusedAttention::backward(spec, &src, &[q(9), k(10), k(11), None]);
    }
    FusedAttention::forward(spec, &[q(1), k(2), k(3), None, None, None], &[q(4), lse])
}

#[test]
fn only_what_was_compared_is_taken() {
    let taken = |spec: &AttentionSpec, dims, dtype| {
        [false, true].map(|backward| case(spec, dims, dtype, backward).is_some())
    };
    assert_eq!(
        taken(&CAUSAL, [2, 4, 2, 256, 64], DType::BF16),
        [true, true]
    );
    assert_eq!(
        taken(&CAUSAL, [2, 4, 2, 256, 128], DType::F16),
        [true, true]
    );
    assert_eq!(
        taken(&CAUSAL, [2, 4, 2, 256, 64], DType::F32),
        [false, false]
    );
    assert_eq!(
        taken(&CAUSAL, [2, 4, 2, 250, 64], DType::BF16),
        [false, false]
    );
    assert_eq!(
        taken(&CAUSAL, [2, 4, 2, 256, 96], DType::BF16),
        [false, false]
    );
    assert_eq!(
        taken(&CAUSAL, [0, 4, 2, 256, 64], DType::BF16),
        [false, false]
    );
    let window = AttentionSpec {
        window: Some(100),
        ..CAUSAL
    };
    assert_eq!(
        taken(&window, [2, 4, 2, 256, 64], DType::BF16),
        [false, false]
    );
    assert_eq!(
        taken(&CAUSAL, [1, 16, 8, 131072, 128], DType::BF16),
        [true, true]
    );
    // Sums of gradients of such a sequence are more than scratch may be.
    assert_eq!(
        taken(&CAUSAL, [1, 1, 1, 1 << 24, 128], DType::BF16),
        [true, false]
    );
}

/// Addresses of the pieces of a backward: where their heads and rows begin in the operands, and
/// gradients that are sums beside each other in scratch.
#[test]
fn pieces_begin_where_their_rows_are() {
    for (dims, count) in [
        ([4, 16, 8, 4096, 128], 1),
        ([6, 4, 2, 8192, 64], 2),
        ([3, 4, 2, 16384, 64], 3),
        ([1, 4, 2, 40960, 64], 6),
    ] {
        let [_, hq, hk, s, d] = dims;
        let fused = case(&CAUSAL, dims, DType::BF16, true).unwrap();
        let (pieces, scratch) = (fused.pieces(), 7 << 40);
        assert_eq!(pieces.len(), count, "{dims:?}");
        for piece in &pieces {
            let addresses = fused.addresses(piece, scratch);
            let address = |id: i64| addresses.iter().find(|p| p.0 == id).unwrap().1;
            let (b, h, g) = (piece.batch, piece.key_head, hq / hk);
            let of_queries = ((b * s + piece.queries.start) * hq + h * g) * d * 2;
            let of_keys = ((b * s + piece.keys.start) * hk + h) * d * 2;
            // The numbers of operands in graphs are their places here, but for o's and do's.
            for (id, at) in [
                (1, of_queries),
                (2, of_keys),
                (3, of_keys),
                (4, of_queries),
                (8, of_queries),
            ] {
                assert_eq!(
                    address(id) - ((id as u64) << 40),
                    at as u64,
                    "{dims:?}: {piece:?}, {id}"
                );
            }
            let lse = ((b * hq + h * g) * s + piece.queries.start) * 4;
            assert_eq!(address(5) - (5 << 40), lse as u64, "{dims:?}: {piece:?}");
            let additions = fused.additions(piece, scratch);
            for (i, (id, at)) in [(9, of_queries), (10, of_keys), (11, of_keys)]
                .into_iter()
                .enumerate()
            {
                let there = (id as u64) << 40;
                match additions.get(i) {
                    Some(add) => assert_eq!((add.part, add.out), (address(id), there + at as u64)),
                    None => assert_eq!(address(id), there + at as u64, "{dims:?}: {piece:?}, {id}"),
                }
            }
            let ends = fused.workspace_at(scratch)..scratch + fused.scratch() as u64;
            for add in &additions {
                let (part, sum) = (
                    add.rows * add.heads * add.width * 2,
                    add.rows * add.heads * add.width * 4,
                );
                assert!(add.part + part as u64 <= ends.start && add.sum + sum as u64 <= ends.start);
            }
        }
    }
}

/// cuDNN makes a plan of every kind of case for GPUs that are not here, within the scratch that was
/// counted. Skipped where cuDNN or a driver's library is missing; ROUNDPIPE_CUDNN=required makes
/// that a failure.
#[test]
#[expect(clippy::print_stderr, reason = "a skipped test says why")]
fn plans_are_made_without_a_gpu() {
    let here = library::driver().is_ok() && library::nvrtc().is_ok() && library::cudnn().is_ok();
    if !here {
        assert!(
            std::env::var("ROUNDPIPE_CUDNN").as_deref() != Ok("required"),
            "cuDNN or libcuda is missing"
        );
        eprintln!("skipped: cuDNN or libcuda is missing");
        return;
    }
    if super::super::Cuda::count().is_ok_and(|count| count > 0) {
        eprintln!("skipped: there is a GPU, whose driver refuses plans for others");
        return;
    }
    let full = AttentionSpec {
        causal: false,
        ..CAUSAL
    };
    for device in [H200, A100] {
        for (spec, dims, dtype) in [
            (&CAUSAL, [2, 16, 8, 1024, 128], DType::BF16),
            (&CAUSAL, [1, 4, 4, 384, 64], DType::BF16),
            (&full, [2, 4, 1, 128, 64], DType::F16),
            (&CAUSAL, [4, 16, 8, 4096, 128], DType::BF16),
            (&CAUSAL, [1, 16, 8, 65536, 128], DType::BF16),
            (&CAUSAL, [1, 8, 1, 40960, 64], DType::BF16),
            (&CAUSAL, [1, 4, 2, 16768, 64], DType::BF16),
        ] {
            for (backward, any_order) in [(false, false), (true, false), (true, true)] {
                let spec = AttentionSpec { any_order, ..*spec };
                let fused = case(&spec, dims, dtype, backward).unwrap();
                assert!(
                    !any_order || fused.pieces().len() == 1,
                    "{dims:?}: any order is not cut"
                );
                let mut seen = HashSet::new();
                for piece in fused.pieces() {
                    let case = fused.case(&piece);
                    if !seen.insert(case.clone()) {
                        continue;
                    }
                    let plan = fused.plan(&case, &TargetGpu::Properties(device));
                    let name = format!(
                        "{dims:?}, {piece:?}, {dtype}, backward {backward}, any order {any_order}"
                    );
                    let plan = plan.unwrap_or_else(|why| panic!("{name}: {why}"));
                    eprintln!("{name}: {} of {} bytes", plan.workspace, fused.workspace());
                }
                assert!(seen.len() <= 4, "{dims:?}: {} plans", seen.len());
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
