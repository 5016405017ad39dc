//! The work that both bench programs time.
#![allow(dead_code, reason = "each program uses its part")]

use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::kernel::RopeStyle;
use roundpipe_tensor::ops::{Attention, rope_tables};
use roundpipe_tensor::optim::{
    Adafactor, AdafactorSlabs, AdamSlabs, AdamW, Floats, FloatsMut, Matrices, Muon, MuonSlabs,
    SecondMoment, StepSettings,
};
use roundpipe_tensor::{Bytes, Cpu, Cx, DType, HostBuf, Param, RngSite, Tensor, Worker, bf16};

/// Cores of this machine.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Most memory this process ever had, where the system tells.
pub fn peak_rss_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("VmHWM:"))
        .unwrap_or("0");
    line.trim()
        .split(' ')
        .next()
        .and_then(|kib| kib.parse::<u64>().ok())
        .unwrap_or(0)
        / 1024
}

fn random(dtype: DType, dims: &[usize], std: f64, site: u32) -> Param {
    Param::normal(
        dtype,
        dims,
        std,
        RngSite {
            seed: 3,
            site,
            ..RngSite::default()
        }
        .key(),
    )
    .expect("memory")
}

/// A square product of random matrices.
pub fn product(dtype: DType, size: usize, threads: usize) -> impl FnMut() {
    let worker =
        Worker::new(Cpu::new(Some(threads)).expect("threads"), Bytes::mib(256)).expect("memory");
    let mut cx = Cx::infer(&worker);
    let (a, b) = (
        random(dtype, &[size, size], 1.0, 1),
        random(dtype, &[size, size], 1.0, 2),
    );
    let (a, b) = (cx.get(&a).expect("memory"), cx.get(&b).expect("memory"));
    move || drop(cx.matmul(&a, &b).expect("shapes fit"))
}

/// Hidden 512, 8 heads, sequence 512, batch 4, f32: norm, rotary causal attention, norm, SwiGLU of
/// 1536.
pub struct Block {
    worker: Worker,
    norms: [Param; 2],
    /// q, k, v, o, gate, up, down.
    weights: [Param; 7],
    tables: [Param; 2],
    x: Param,
}

const BATCH: usize = 4;
const SEQ: usize = 512;
const HIDDEN: usize = 512;
const HEADS: usize = 8;
const INNER: usize = 1536;

impl Block {
    pub fn new(threads: usize) -> Self {
        let h = HIDDEN;
        let shapes = [
            [h, h],
            [h, h],
            [h, h],
            [h, h],
            [INNER, h],
            [INNER, h],
            [h, INNER],
        ];
        let mut site = 0;
        let weights = shapes.map(|dims| {
            site += 1;
            random(DType::F32, &dims, 0.02, site)
        });
        let (cos, sin) = rope_tables(SEQ, h / HEADS, 10_000.0);
        let table = |t: Vec<f64>| {
            let t: Vec<f32> = t.into_iter().map(|x| x as f32).collect();
            Param::from_slice(&t, &[SEQ, h / HEADS / 2])
                .expect("memory")
                .frozen()
        };
        Self {
            worker: Worker::new(Cpu::new(Some(threads)).expect("threads"), Bytes::gib(2))
                .expect("memory"),
            norms: [(); 2].map(|()| Param::full(DType::F32, &[h], 1.0).expect("memory")),
            weights,
            tables: [table(cos), table(sin)],
            x: random(DType::F32, &[BATCH, SEQ, h], 1.0, 99).frozen(),
        }
    }

    /// Forward and backward, gradients of the input and all weights.
    pub fn step(&mut self) {
        let mut cx = Cx::train(&self.worker);
        let x = cx.get(&self.x).expect("memory");
        let x = cx.input(&x).expect("float");
        let y = self.forward(&mut cx, &x).expect("shapes fit");
        let seed = cx.full(DType::F32, y.dims(), 1.0).expect("memory");
        drop(cx.backward_from(&[(y, seed)]).expect("recorded"));
    }

    /// What the arena needed.
    pub fn peak_bytes(&self) -> u64 {
        self.worker.usage().high_water.0
    }

    fn forward(&self, cx: &mut Cx, x: &Tensor) -> roundpipe_tensor::Result<Tensor> {
        let [wq, wk, wv, wo, gate, up, down] = &self.weights;
        let norm = cx.get(&self.norms[0])?;
        let y = cx.rms_norm(x, Some(&norm), 1e-6)?;
        let q = self.heads(cx, &y, wq, true)?;
        let k = self.heads(cx, &y, wk, true)?;
        let v = self.heads(cx, &y, wv, false)?;
        drop(y);
        let o = cx.attention(
            &q,
            &k,
            &v,
            &Attention {
                causal: true,
                ..Attention::default()
            },
        )?;
        drop((q, k, v));
        let o = cx.reshape(&o, &[BATCH as isize, SEQ as isize, HIDDEN as isize])?;
        let w = cx.get(wo)?;
        let o = cx.linear(&o, &w, None)?;
        let norm = cx.get(&self.norms[1])?;
        let (x, y) = cx.add_rms_norm(&o, x, Some(&norm), 1e-6)?;
        drop(o);
        let (wg, wu, wd) = (cx.get(gate)?, cx.get(up)?, cx.get(down)?);
        let (g, u) = (cx.linear(&y, &wg, None)?, cx.linear(&y, &wu, None)?);
        drop(y);
        let z = cx.swiglu(&g, &u)?;
        drop((g, u));
        let z = cx.linear(&z, &wd, None)?;
        cx.add(&x, &z)
    }

    fn heads(
        &self,
        cx: &mut Cx,
        y: &Tensor,
        weight: &Param,
        turn: bool,
    ) -> roundpipe_tensor::Result<Tensor> {
        let w = cx.get(weight)?;
        let flat = cx.linear(y, &w, None)?;
        let split = cx.reshape(
            &flat,
            &[BATCH, SEQ, HEADS, HIDDEN / HEADS].map(|d| d as isize),
        )?;
        if !turn {
            return Ok(split);
        }
        let (cos, sin) = (cx.get(&self.tables[0])?, cx.get(&self.tables[1])?);
        cx.rope(&split, &cos, &sin, None, RopeStyle::Half)
    }
}

/// Slabs of one optimizer step with bf16 gradients and bf16 working weights.
pub struct Adam {
    threads: Threads,
    grad: HostBuf,
    working: HostBuf,
    state: [HostBuf; 3],
    count: usize,
    steps: u64,
}

impl Adam {
    pub fn new(count: usize, threads: usize) -> Self {
        let slab = |bytes: usize| HostBuf::zeroed("slab", count * bytes).expect("memory");
        let grad = slab(2);
        grad.write(0..count * 2)
            .expect("free")
            .as_mut_slice::<bf16>()
            .fill(bf16::from_f32(0.01));
        // Touch every page, so that the first timed pass does not pay for it.
        let state = [(); 3].map(|()| slab(4));
        for s in &state {
            s.write(0..count * 4)
                .expect("free")
                .as_mut_slice::<f32>()
                .fill(0.5);
        }
        let working = slab(2);
        working.write(0..count * 2).expect("free").bytes().fill(1);
        Self {
            threads: Threads::new(Some(threads)).expect("threads"),
            grad,
            working,
            state,
            count,
            steps: 0,
        }
    }

    /// Read gradient, master and two moments; write master, moments and working weights.
    pub fn bytes(&self) -> u64 {
        28 * self.count as u64
    }

    pub fn step(&mut self) {
        self.steps += 1;
        let all = |b: &HostBuf| b.write(0..b.len()).expect("free");
        let grad = self.grad.read_all().expect("free");
        let (mut a, mut b, mut c) = (
            all(&self.state[0]),
            all(&self.state[1]),
            all(&self.state[2]),
        );
        let mut working = all(&self.working);
        let slabs = AdamSlabs {
            grad: Floats::BF16(grad.as_slice()),
            master: a.as_mut_slice(),
            exp_avg: b.as_mut_slice(),
            exp_avg_sq: c.as_mut_slice(),
            max_exp_avg_sq: None,
            working: Some(FloatsMut::BF16(working.as_mut_slice())),
        };
        AdamW::default()
            .step(&self.threads, StepSettings::new(self.steps, 1e-3), slabs)
            .expect("equal lengths");
    }

    /// A step of Adafactor over the same slabs as a matrix of `cols` columns.
    pub fn adafactor_step(&mut self, cols: usize) {
        self.steps += 1;
        let matrices = Matrices {
            count: 1,
            rows: self.count / cols,
            cols,
        };
        let all = |b: &HostBuf| b.write(0..b.len()).expect("free");
        let grad = self.grad.read_all().expect("free");
        let (mut a, mut b, mut c) = (
            all(&self.state[0]),
            all(&self.state[1]),
            all(&self.state[2]),
        );
        let mut working = all(&self.working);
        let slabs = AdafactorSlabs {
            grad: Floats::BF16(grad.as_slice()),
            master: a.as_mut_slice(),
            second: SecondMoment::Factored {
                matrices,
                by_row: &mut b.as_mut_slice()[..matrices.rows],
                by_col: &mut c.as_mut_slice()[..cols],
            },
            working: Some(FloatsMut::BF16(working.as_mut_slice())),
        };
        Adafactor::default()
            .step(&self.threads, StepSettings::new(self.steps, 1e-3), slabs)
            .expect("equal lengths");
    }

    /// A step of Muon over the same slabs as a matrix of `cols` columns.
    pub fn muon_step(&mut self, cols: usize) {
        self.steps += 1;
        let all = |b: &HostBuf| b.write(0..b.len()).expect("free");
        let grad = self.grad.read_all().expect("free");
        let (mut a, mut b) = (all(&self.state[0]), all(&self.state[1]));
        let mut working = all(&self.working);
        let slabs = MuonSlabs {
            matrices: Matrices {
                count: 1,
                rows: self.count / cols,
                cols,
            },
            grad: Floats::BF16(grad.as_slice()),
            master: a.as_mut_slice(),
            momentum: b.as_mut_slice(),
            working: Some(FloatsMut::BF16(working.as_mut_slice())),
        };
        Muon::default()
            .step(&self.threads, StepSettings::new(self.steps, 1e-3), slabs)
            .expect("equal lengths");
    }

    /// Bytes read and written by [`Adam::copy`].
    pub fn copy_bytes(&self) -> u64 {
        8 * self.count as u64
    }

    /// A plain copy of one slab into another, by the same threads.
    pub fn copy(&mut self) {
        let src = self.state[0].read_all().expect("free");
        let mut dst = self.state[1].write(0..self.state[1].len()).expect("free");
        let pieces = 64;
        let from = src.bytes();
        let part = from.len().div_ceil(pieces);
        let to: Vec<std::sync::Mutex<&mut [u8]>> = dst
            .bytes()
            .chunks_mut(part)
            .map(std::sync::Mutex::new)
            .collect();
        self.threads.run(to.len(), |i| {
            let mut to = to[i].lock().expect("one task per piece");
            let len = to.len();
            to.copy_from_slice(&from[i * part..i * part + len]);
        });
    }
}
