//! Regression benches of the cpu backend. `benches/compare.py` sets the same work beside PyTorch.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

mod work;

/// Products at sizes that fill the caches, beside the crates one would otherwise use.
fn matmul(c: &mut Criterion) {
    for size in [1024, 2048] {
        let mut group = c.benchmark_group(format!("matmul_{size}"));
        group.sample_size(10).throughput(Throughput::Elements(2 * (size as u64).pow(3)));
        for (name, mut run) in work::products(size, work::cores()) {
            group.bench_function(BenchmarkId::from_parameter(name), |b| b.iter(&mut run));
        }
        group.finish();
    }
}

/// A transformer block through the tape; must not be slower than PyTorch's eager one.
fn block(c: &mut Criterion) {
    let mut block = work::Block::new(work::cores());
    c.benchmark_group("block")
        .sample_size(10)
        .bench_function("forward_backward", |b| b.iter(|| block.step()));
}

/// The optimizer's pass against a plain copy; must reach 80% of its bandwidth.
fn adamw(c: &mut Criterion) {
    let mut slabs = work::Adam::new(16 << 20, work::cores());
    let mut group = c.benchmark_group("adamw_16Mi");
    group.sample_size(10).throughput(Throughput::Bytes(slabs.bytes()));
    group.bench_function("step", |b| b.iter(|| slabs.step()));
    group.throughput(Throughput::Bytes(slabs.copy_bytes()));
    group.bench_function("copy", |b| b.iter(|| slabs.copy()));
    group.finish();
}

criterion_group!(benches, matmul, block, adamw);
criterion_main!(benches);
