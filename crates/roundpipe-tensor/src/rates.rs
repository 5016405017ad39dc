//! How long kernels take on a device that is described, not measured: a plan for a machine that is
//! not here starts from these.
//!
//! A kernel takes as long as its arithmetic at the rate of its kind, as its operands at the rate of
//! the device's memory, or as its launch, whichever is longest. Nothing here measures, and nothing
//! depends on this machine. Rates go by the kind of a kernel, not by model: a description of a device
//! says what each kind reaches there.

use crate::kernel::{AttentionSpec, Kernel, View};

/// What a device reaches, by kind of kernel. Operations and bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelRates {
    /// Dense products of many rows.
    pub products: f64,
    /// Dense products of 8-bit floats; `None` for a device that has none.
    pub fp8_products: Option<f64>,
    /// Products of groups of rows, one per expert.
    pub grouped_products: f64,
    /// Attention by the vendor's library.
    pub attention: AttentionRate,
    /// Its backward, with the same bits every time.
    pub attention_grad: AttentionRate,
    /// Its backward that adds in any order.
    pub attention_grad_any_order: AttentionRate,
    /// Attention by our own kernels: packed sequences and windows.
    pub own_attention: AttentionRate,
    /// The backward of that.
    pub own_attention_grad: AttentionRate,
    /// Operands read and written by everything else.
    pub bytes: f64,
    /// The least that a kernel takes.
    pub launch_s: f64,
    /// Whether the vendor's library computes attention here; our own kernels do otherwise.
    pub library_attention: bool,
    /// Tokens of the document that a token of packed sequences is in, on average; without it they
    /// count as one long one.
    pub packed_context: Option<u64>,
}

/// A rate that grows with the keys that a query sees.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionRate {
    /// What long sequences reach.
    pub most: f64,
    /// Keys at which half of it is reached.
    pub half_at: f64,
    /// Of that, what heads narrower than 128 reach.
    pub narrow: f64,
}

impl AttentionRate {
    fn at(&self, keys: u64, head_dim: usize) -> f64 {
        let keys = keys.max(1) as f64;
        let narrow = if head_dim < 128 { self.narrow } else { 1.0 };
        self.most * narrow * keys / (keys + self.half_at)
    }
}

impl KernelRates {
    /// Seconds of a kernel that does `flops` operations on operands of `traffic` bytes.
    pub(crate) fn seconds(
        &self,
        kernel: &Kernel,
        src: &[Option<View>],
        flops: u64,
        traffic: u64,
    ) -> f64 {
        let of_memory = traffic as f64 / self.bytes;
        let of_arithmetic = self
            .flops_per_s(kernel, src)
            .map_or(0.0, |rate| flops as f64 / rate);
        of_memory.max(of_arithmetic).max(self.launch_s)
    }

    /// The rate of kernels that arithmetic bounds.
    fn flops_per_s(&self, kernel: &Kernel, src: &[Option<View>]) -> Option<f64> {
        let (spec, rates) = match kernel {
            Kernel::MatMul { .. }
            | Kernel::Conv2d(_)
            | Kernel::Conv2dGradInput(_)
            | Kernel::Conv2dGradFilter { .. } => return Some(self.products),
            Kernel::Fp8MatMul { .. } => {
                return Some(self.fp8_products.unwrap_or(self.products));
            }
            Kernel::GroupedMatMul { .. } | Kernel::GroupedMatMulGrad { .. } => {
                return Some(self.grouped_products);
            }
            Kernel::Attention(spec) => (spec, [self.attention, self.own_attention]),
            Kernel::AttentionGrad(spec) if spec.any_order => (
                spec,
                [self.attention_grad_any_order, self.own_attention_grad],
            ),
            Kernel::AttentionGrad(spec) => (spec, [self.attention_grad, self.own_attention_grad]),
            _ => return None,
        };
        let [library, own] = rates;
        let is_packed = is_packed(kernel, src);
        let is_own = is_packed || spec.window.is_some() || !self.library_attention;
        let rate = if is_own { own } else { library };
        let head_dim = src[0].as_ref().map_or(0, |q| q.shape()[3]);
        Some(rate.at(self.keys(spec, is_packed, src), head_dim))
    }

    /// Keys of the sequence that a query belongs to.
    fn keys(&self, spec: &AttentionSpec, is_packed: bool, src: &[Option<View>]) -> u64 {
        let all = src[1].as_ref().map_or(0, |k| k.shape()[1] as u64);
        let window = spec.window.map_or(u64::MAX, |window| window as u64);
        match self.packed_context.filter(|_| is_packed) {
            Some(context) => all.min(context).min(window),
            None => all.min(window),
        }
    }

    /// Of the pairs of queries and keys that a kernel's shapes allow, those that packed documents
    /// leave, counted as causal ones.
    pub(crate) fn packed_pairs(&self, kernel: &Kernel, src: &[Option<View>]) -> Option<u64> {
        let context = self.packed_context?;
        if !is_packed(kernel, src) {
            return None;
        }
        let q = src.first()?.as_ref()?;
        let rows = (q.shape()[0] * q.shape()[1] * q.shape()[2]) as u64;
        Some(rows.saturating_mul(context.div_ceil(2).max(1)))
    }
}

/// Whether sequences of any lengths lie in one row.
fn is_packed(kernel: &Kernel, src: &[Option<View>]) -> bool {
    let lens = match kernel {
        Kernel::Attention(_) => 4,
        Kernel::AttentionGrad(_) => 7,
        _ => return false,
    };
    src.get(lens).is_some_and(Option::is_some)
}
