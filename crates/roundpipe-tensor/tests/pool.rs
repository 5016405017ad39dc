//! The sub-allocator: blocks never overlap, holes merge, the same requests give the same addresses.

#[path = "support/skip.rs"]
mod skip;

use proptest::prelude::*;
use roundpipe_tensor::pool::{ALIGN, Block, Pool};
use roundpipe_tensor::{Bytes, Cpu, Cuda, DType, DeviceKind, Meta, Shape, Tensor, Worker};

const CAP: u64 = 64 * ALIGN;

/// Takes (size > 0) or gives back (index) at random; returns the addresses of all blocks taken.
fn play(moves: &[(u16, u16)]) -> (Vec<Option<u64>>, u64, u64) {
    let device = Meta::like(DeviceKind::Cpu);
    let pool = Pool::reserve(device, Bytes(CAP)).unwrap();
    let base = pool.alloc("base", 1).unwrap().addr();
    let mut live: Vec<(Block, u64)> = Vec::new();
    let mut addresses = Vec::new();
    for &(kind, amount) in moves {
        if kind % 3 == 0 && !live.is_empty() {
            live.swap_remove(amount as usize % live.len());
            continue;
        }
        let bytes = u64::from(amount) % (12 * ALIGN);
        let block = pool.alloc("test", bytes).ok();
        addresses.push(block.as_ref().map(|b| b.addr() - base));
        live.extend(block.map(|b| (b, bytes)));
        check(&live, base, pool.usage().used.0);
    }
    drop(live);
    assert_eq!(pool.usage().used, Bytes(0));
    // Everything was given back and merged: one block of the whole arena fits again.
    drop(pool.alloc("test", CAP).unwrap());
    (
        addresses,
        pool.usage().high_water.0,
        pool.usage().peak_used.0,
    )
}

fn check(live: &[(Block, u64)], base: u64, used: u64) {
    let mut spans: Vec<(u64, u64)> = live
        .iter()
        .filter(|(b, _)| b.bytes() > 0)
        .map(|(b, _)| (b.addr(), b.addr() + b.bytes()))
        .collect();
    spans.sort_unstable();
    assert!(
        spans.windows(2).all(|w| w[0].1 <= w[1].0),
        "blocks overlap: {spans:?}"
    );
    assert!(
        spans
            .iter()
            .all(|s| s.0 >= base && s.1 <= base + CAP && s.0 % ALIGN == 0)
    );
    assert!(live.iter().all(|(b, asked)| b.bytes() >= *asked));
    assert_eq!(spans.iter().map(|s| s.1 - s.0).sum::<u64>(), used);
}

proptest! {
    #[test]
    fn any_sequence_keeps_the_invariants_and_repeats(moves in prop::collection::vec(any::<(u16, u16)>(), 0..200)) {
        prop_assert_eq!(play(&moves), play(&moves));
    }
}

/// Takes tensors of a worker that may move them, and gives some back, at random. Every request has
/// its memory if so much is free, in one piece or not, and no value changes.
fn play_moving(worker: &Worker, moves: &[(u16, u16)]) {
    let worker = worker.moving();
    let mut live: Vec<(Tensor, f32)> = Vec::new();
    for (number, &(kind, amount)) in moves.iter().enumerate() {
        if kind % 5 < 2 && !live.is_empty() {
            live.swap_remove(amount as usize % live.len());
            continue;
        }
        let elements = 1 + usize::from(amount) % (16 * ALIGN as usize / 4);
        let bytes = (4 * elements as u64).next_multiple_of(ALIGN);
        let fits = worker.usage().used.0 + bytes <= CAP;
        let taken = full(&worker, elements, number as f32);
        assert_eq!(taken.is_some(), fits, "{bytes} bytes");
        live.extend(taken.map(|tensor| (tensor, number as f32)));
    }
    for (tensor, value) in &live {
        let values = tensor.to_vec::<f32>().unwrap();
        assert!(
            values.iter().all(|v| v == value),
            "{value} became {values:?}"
        );
    }
    live.clear();
    assert_eq!(worker.usage().used, Bytes(0));
    assert!(full(&worker, CAP as usize / 4, 0.0).is_some());
}

fn cpu_worker() -> Worker {
    Worker::new(Cpu::new(Some(1)).unwrap(), Bytes(CAP)).unwrap()
}

/// So many elements of one value, or `None` without room for them.
fn full(worker: &Worker, elements: usize, value: f32) -> Option<Tensor> {
    let shape = Shape::new(&[elements]).unwrap();
    worker.full(DType::F32, shape, f64::from(value)).ok()
}

proptest! {
    #[test]
    fn what_is_free_can_be_had_in_one_piece(moves in prop::collection::vec(any::<(u16, u16)>(), 0..200)) {
        play_moving(&cpu_worker(), &moves);
    }
}

/// The same on a GPU, whose kernels run behind the host.
#[test]
fn a_gpu_moves_blocks_and_changes_no_value() {
    let device = match Cuda::workers(0, 1) {
        Ok(mut workers) => workers.remove(0),
        Err(error) => return skip::skipped("moved blocks", &error.to_string()),
    };
    let worker = Worker::new(device, Bytes(CAP)).unwrap();
    let mut word = 1_u32;
    let mut dice = || {
        word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (word >> 16) as u16
    };
    for _ in 0..50 {
        let moves: Vec<(u16, u16)> = (0..200).map(|_| (dice(), dice())).collect();
        play_moving(&worker, &moves);
    }
}

/// Holes on both sides of a block are joined by moving it; a pinned one stays where it is, and so
/// does everything on a worker that moves nothing.
#[test]
fn a_pinned_block_is_not_moved() {
    let sixteenth = CAP as usize / 4 / 16;
    for (is_moving, is_pinned) in [(true, false), (true, true), (false, false)] {
        let plain = cpu_worker();
        let moving = plain.moving();
        let worker = if is_moving { &moving } else { &plain };
        let mut parts: Vec<Tensor> = (0..16)
            .map(|part| full(worker, sixteenth, part as f32).unwrap())
            .collect();
        let between = parts.swap_remove(4);
        if is_pinned {
            between.pin();
        }
        let before = between.view().ptr;
        parts.retain(|tensor| ![3.0, 5.0].contains(&tensor.to_vec::<f32>().unwrap()[0]));
        let joined = full(worker, 2 * sixteenth, 20.0);
        let moves = is_moving && !is_pinned;
        assert_eq!(joined.is_some(), moves);
        assert_eq!(between.view().ptr != before, moves);
        assert_eq!(between.to_vec::<f32>().unwrap(), vec![4.0; sixteenth]);
    }
}

/// An impossible request says who asked, for how much, and what there is; the pool goes on working.
#[test]
fn running_out_is_an_error_value() {
    let device = Meta::like(DeviceKind::Cpu);
    let pool = Pool::reserve(device, Bytes(CAP)).unwrap();
    let half = pool.alloc("first", CAP / 2).unwrap();
    let text = pool.alloc("attention", CAP).unwrap_err().to_string();
    assert!(
        text.contains("attention") && text.contains("16.0 KiB") && text.contains("8.0 KiB"),
        "{text}"
    );
    assert!(pool.alloc("huge", u64::MAX).is_err(), "no overflow");
    drop(half);
    assert!(pool.alloc("again", CAP).is_ok());
}

/// Long-lived blocks that come and go between short-lived ones leave the working memory whole: as
/// much as is free can be had in one piece.
#[test]
fn long_lived_blocks_do_not_cut_working_memory_into_pieces() {
    let device = Meta::like(DeviceKind::Cpu);
    let pool = Pool::reserve(device, Bytes(CAP)).unwrap();
    let part = CAP / 16;
    let mut kept = Vec::new();
    for round in 0..6 {
        let work: Vec<Block> = (0..4).map(|_| pool.alloc("work", part).unwrap()).collect();
        kept.push(if round % 2 == 0 {
            pool.lend("weights", part).unwrap().0
        } else {
            pool.alloc_long("kept", part).unwrap()
        });
        drop(work);
        let free = CAP - pool.usage().used.0;
        drop(pool.alloc("all that is free", free).unwrap());
    }
    kept.remove(2);
    pool.trim();
    // Another long-lived block finds the hole; the working memory stays whole.
    kept.push(pool.alloc_long("kept", part).unwrap());
    drop(pool.alloc("work", CAP - 6 * part).unwrap());
    assert_eq!(pool.usage().high_water, Bytes(CAP));
}

/// A block that its own end has no room for takes a hole of the other.
#[test]
fn the_last_room_may_be_at_the_other_end() {
    let device = Meta::like(DeviceKind::Cpu);
    let pool = Pool::reserve(device, Bytes(CAP)).unwrap();
    let quarter = CAP / 4;
    let far = pool.alloc_long("far", quarter).unwrap();
    let near = pool.alloc_long("near", quarter).unwrap();
    let work = pool.alloc("work", 2 * quarter).unwrap();
    drop(far);
    let more = pool.alloc("more", quarter).unwrap();
    let ranges = [&near, &work, &more].map(|block| block.addr()..block.addr() + block.bytes());
    for (i, a) in ranges.iter().enumerate() {
        for b in &ranges[i + 1..] {
            assert!(a.end <= b.start || b.end <= a.start, "{a:?} {b:?}");
        }
    }
    assert!(pool.alloc("none", 1).is_err());
    drop((near, work, more));
    assert_eq!(pool.usage().used, Bytes(0));
    drop(pool.alloc("whole", CAP).unwrap());
}

/// What could wait leaves a task's claim whole, also when it would find a hole behind the limit; what
/// the task needs may use the claim.
#[test]
fn a_claim_keeps_working_memory_in_one_piece() {
    let device = Meta::like(DeviceKind::Cpu);
    let pool = Pool::reserve(device, Bytes(CAP)).unwrap();
    let eighth = CAP / 8;
    let far = pool.alloc_long("weights", eighth).unwrap();
    assert!(pool.claim_working(5 * eighth));
    let beside = pool.alloc_beside("kept", 2 * eighth, 0).unwrap();
    assert!(pool.alloc_beside("no room", 1, 0).is_err());
    assert!(pool.lend_beside("no room", 1, 0).is_err());
    // The task's own blocks come from the claim.
    let input = pool.lend("input", eighth).unwrap().0;
    let work = pool.alloc("work", 4 * eighth).unwrap();
    drop((work, input, beside, far));
    pool.trim();
    assert!(pool.claim_working(CAP));
    assert!(!pool.claim_working(CAP + 1), "there is no such room");
    assert!(pool.alloc_beside("all is claimed", 1, 0).is_err());
    pool.end_claim();

    // A hole that lies too near to the working memory is not used: its block would keep the
    // frontier there.
    let far = pool.alloc_long("far", 4 * eighth).unwrap();
    let hole = pool.alloc_long("hole", eighth).unwrap();
    let near = pool.alloc_long("near", eighth).unwrap();
    drop(hole);
    assert!(
        pool.alloc_beside("in the hole", eighth, 4 * eighth)
            .is_err()
    );
    assert!(pool.alloc_beside("in the hole", eighth, 3 * eighth).is_ok());
    drop((far, near));
    assert!(pool.claim_working(CAP));
}
