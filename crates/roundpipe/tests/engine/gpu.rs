//! Offloading is invisible on a GPU too: workers of one card, resident or offloaded, every grain and lag. Without
//! a GPU this is skipped, and says so.

use std::sync::Arc;

use roundpipe::{Bytes, DType, Device, ExecutePlan, Grain, Lag, PlanKind};
use roundpipe_tensor::Cuda;

use crate::invisible::{Way, run, same};
use crate::models;

#[expect(clippy::print_stderr, reason = "a skipped test says why")]
fn workers(count: usize) -> Option<Vec<Arc<dyn Device>>> {
    match Cuda::workers(0, count) {
        Ok(workers) => Some(workers.into_iter().map(|worker| worker as Arc<dyn Device>).collect()),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

#[test]
fn a_gpu_trains_to_the_same_bits_however_it_is_run() {
    for dtype in [DType::F32, DType::BF16] {
        let batch = move |step| models::tokens(step, 9, dtype);
        let model = || models::transformer(dtype, true);
        for lag in [Lag::Zero, Lag::One] {
            let Some(one) = workers(1) else { return };
            let whole = ExecutePlan::from_sizes(PlanKind::Fused, &[], &[6]);
            let cut = ExecutePlan::from_sizes(PlanKind::Fused, &[2, 2], &[2, 1, 3]);
            let serial = Way { serial: true, lag, plan: Some(whole.clone()), ..Way::threaded(one) };
            let want = run(&model(), &serial, &batch, models::token_loss);
            for count in [1, 2, 4] {
                for grain in [Grain::Stage, Grain::Layer] {
                    for plan in [&whole, &cut] {
                        for keep in [Bytes(0), Bytes::mib(8)] {
                            let Some(devices) = workers(count) else { return };
                            let (plan, keep) = (Some(plan.clone()), Some(keep));
                            let way = Way { grain, plan, keep, lag, ..Way::threaded(devices) };
                            let got = run(&model(), &way, &batch, models::token_loss);
                            same(&format!("{dtype} {lag:?} {count} workers {grain:?} {keep:?}"), &want, &got);
                        }
                    }
                }
            }
        }
    }
}
