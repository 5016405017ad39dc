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

/// A plain copy by as many threads.
#[divan::bench(sample_count = 10)]
fn adamw_copy(bencher: Bencher<'_, '_>) {
    let mut slabs = work::Adam::new(16 << 20, work::cores());
    bencher
        .counter(BytesCount::new(slabs.copy_bytes()))
        .bench_local(|| slabs.copy());
}
