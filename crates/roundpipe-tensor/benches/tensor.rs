//! Regression benches of the cpu backend. `benches/compare.py` sets the same work beside PyTorch
//! and other crates, and prints the ratios the project aims for.

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};

mod work;

fn main() {
    divan::main();
}

/// Square products; items are floating-point operations.
#[divan::bench(args = [1024, 2048], sample_count = 10)]
fn matmul_f32(bencher: Bencher<'_, '_>, size: usize) {
    let mut run = work::product(roundpipe_tensor::DType::F32, size, work::cores());
    bencher
        .counter(ItemsCount::new(2 * size.pow(3)))
        .bench_local(&mut run);
}

/// As above, in bf16.
#[divan::bench(args = [1024, 2048], sample_count = 10)]
fn matmul_bf16(bencher: Bencher<'_, '_>, size: usize) {
    let mut run = work::product(roundpipe_tensor::DType::BF16, size, work::cores());
    bencher
        .counter(ItemsCount::new(2 * size.pow(3)))
        .bench_local(&mut run);
}

/// A transformer block through the tape; must not be slower than PyTorch's eager one.
#[divan::bench(sample_count = 10)]
fn block_forward_backward(bencher: Bencher<'_, '_>) {
    let mut block = work::Block::new(work::cores());
    bencher.bench_local(|| block.step());
}

/// The optimizer's pass; must reach 80% of the copy below.
#[divan::bench(sample_count = 10)]
fn adamw_step(bencher: Bencher<'_, '_>) {
    let mut slabs = work::Adam::new(16 << 20, work::cores());
    bencher
        .counter(BytesCount::new(slabs.bytes()))
        .bench_local(|| slabs.step());
}

/// Three passes over the gradient and two over the weights; must take about as long as AdamW's one,
/// which has two moments to read and write.
#[divan::bench(sample_count = 10)]
fn adafactor_step(bencher: Bencher<'_, '_>) {
    let mut slabs = work::Adam::new(16 << 20, work::cores());
    // Gradients of 2 bytes three times, weights of 4 read twice and written, and of 2 written.
    bencher
        .counter(BytesCount::new(20u64 * (16 << 20)))
        .bench_local(|| slabs.adafactor_step(4096));
}

/// Five steps of the iteration on a square matrix: items are the operations of its products.
#[divan::bench(args = [1024], sample_count = 10)]
fn muon_step(bencher: Bencher<'_, '_>, size: usize) {
    let mut slabs = work::Adam::new(size * size, work::cores());
    bencher
        .counter(ItemsCount::new(5 * 3 * 2 * size.pow(3)))
        .bench_local(|| slabs.muon_step(size));
}

/// A plain copy by as many threads.
#[divan::bench(sample_count = 10)]
fn adamw_copy(bencher: Bencher<'_, '_>) {
    let mut slabs = work::Adam::new(16 << 20, work::cores());
    bencher
        .counter(BytesCount::new(slabs.copy_bytes()))
        .bench_local(|| slabs.copy());
}
