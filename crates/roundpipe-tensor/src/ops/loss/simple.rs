//! Losses made of other operations, whose gradients follow from theirs.

use super::{CrossEntropy, LossTarget, Reduction};
use crate::cx::{Cx, float, same_dtype, same_shape};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::Binary;
use crate::ops::arith::raw_binary;
use crate::shape::{Layout, Shape};
use crate::tensor::Tensor;

impl Cx {
    /// -x\[label\] of `log_probs` [.., v] against integer `labels` [..], as [`Cx::log_softmax`]
    /// gives them. The loss has the accumulator type. `options.label_smoothing` has no meaning here
    /// and must be 0.
    ///
    /// # Errors
    /// As [`Cx::cross_entropy`].
    pub fn nll_loss(
        &mut self,
        log_probs: &Tensor,
        labels: &Tensor,
        options: CrossEntropy,
    ) -> Result<Tensor> {
        const OP: &str = "nll_loss";
        float(OP, log_probs)?;
        options.check(OP)?;
        if options.label_smoothing != 0.0 {
            return Err(Error::invalid(
                OP,
                "label smoothing needs logits: use cross_entropy",
            ));
        }
        let target = LossTarget::new(self.worker(), OP, log_probs, labels, options)?;
        let acc = log_probs.dtype().accumulator();
        let (used, count) = target.used(self.worker(), OP, acc)?;
        // Ignored labels may lie outside the classes; any class will do, since what it gives is not
        // used.
        let class = self.worker().cast(&used, DType::I64)?;
        let class = raw_binary(self.worker(), OP, Binary::Mul, &target.labels, &class)?;
        let classes = log_probs.dims()[log_probs.rank() - 1];
        let flat = self.reshape(log_probs, &[target.tokens as isize, classes as isize])?;
        let column = class.relaid(Layout::contiguous(Shape::new(&[target.tokens, 1])?));
        let picked = self.gather(&flat, 1, &column)?;
        let picked = self.reshape(&picked, &[target.tokens as isize])?;
        let picked = self.cast(&picked, acc)?;
        // A probability of 0 at an unused class must not turn into NaN, so it is cut off, not
        // multiplied.
        let zero = self.zeros(acc, &[])?;
        let truth = self.worker().cast(&used, DType::Bool)?;
        let picked = self.where_cond(&truth, &picked, &zero)?;
        let losses = self.neg(&picked)?;
        match options.reduction {
            Reduction::None => {
                let dims: Vec<isize> = labels.dims().iter().map(|d| *d as isize).collect();
                self.reshape(&losses, &dims)
            }
            Reduction::Sum => self.sum_all(&losses),
            Reduction::Mean => {
                let sum = self.sum_all(&losses)?;
                self.div(&sum, &count)
            }
        }
    }

    /// (x - target)².
    ///
    /// # Errors
    /// When shapes or types differ.
    pub fn mse_loss(
        &mut self,
        x: &Tensor,
        target: &Tensor,
        reduction: Reduction,
    ) -> Result<Tensor> {
        let gap = self.gap("mse_loss", x, target)?;
        let losses = self.mul(&gap, &gap)?;
        self.reduced(&losses, reduction)
    }

    /// |x - target|.
    ///
    /// # Errors
    /// When shapes or types differ.
    pub fn l1_loss(&mut self, x: &Tensor, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let gap = self.gap("l1_loss", x, target)?;
        let losses = self.abs(&gap)?;
        self.reduced(&losses, reduction)
    }

    /// Half the square of the difference up to `delta`, from there on a straight line of slope
    /// `delta`.
    ///
    /// # Errors
    /// When shapes or types differ or `delta` is not positive.
    pub fn huber_loss(
        &mut self,
        x: &Tensor,
        target: &Tensor,
        delta: f64,
        reduction: Reduction,
    ) -> Result<Tensor> {
        if delta <= 0.0 || delta.is_nan() {
            return Err(Error::invalid(
                "huber_loss",
                format!("delta {delta} is not positive"),
            ));
        }
        let gap = self.gap("huber_loss", x, target)?;
        let size = self.abs(&gap)?;
        // With c = min(|d|, delta) both branches are c · (|d| - c / 2).
        let near = self.clamp(&size, 0.0, delta)?;
        let half = self.affine(&near, 0.5, 0.0)?;
        let far = self.sub(&size, &half)?;
        let losses = self.mul(&near, &far)?;
        self.reduced(&losses, reduction)
    }

    /// [`Cx::huber_loss`] divided by its `beta`.
    ///
    /// # Errors
    /// As [`Cx::huber_loss`].
    pub fn smooth_l1_loss(
        &mut self,
        x: &Tensor,
        target: &Tensor,
        beta: f64,
        reduction: Reduction,
    ) -> Result<Tensor> {
        let loss = self.huber_loss(x, target, beta, reduction)?;
        self.affine(&loss, 1.0 / beta, 0.0)
    }

    /// Cross entropy of the probability sigmoid(x) against `target` in 0 to 1, without overflow.
    ///
    /// # Errors
    /// When shapes or types differ.
    pub fn binary_cross_entropy_with_logits(
        &mut self,
        x: &Tensor,
        target: &Tensor,
        reduction: Reduction,
    ) -> Result<Tensor> {
        const OP: &str = "binary_cross_entropy_with_logits";
        self.pair(OP, x, target)?;
        let whole = self.softplus(x)?;
        let part = self.mul(x, target)?;
        let losses = self.sub(&whole, &part)?;
        self.reduced(&losses, reduction)
    }

    /// target · (ln target - log_probs), 0 where the target is 0. [`Reduction::Mean`] is over
    /// elements; for PyTorch's "batchmean" divide the sum by the batch.
    ///
    /// # Errors
    /// When shapes or types differ.
    pub fn kl_div(
        &mut self,
        log_probs: &Tensor,
        target: &Tensor,
        reduction: Reduction,
    ) -> Result<Tensor> {
        self.pair("kl_div", log_probs, target)?;
        // ln of the smallest normal number stands for ln 0: times a target of 0 it is 0.
        let least = match target.dtype() {
            DType::F16 => half::f16::MIN_POSITIVE.to_f64(),
            _ => f64::from(f32::MIN_POSITIVE),
        };
        let positive = self.clamp(target, least, f64::INFINITY)?;
        let log_target = self.log(&positive)?;
        let gap = self.sub(&log_target, log_probs)?;
        let losses = self.mul(target, &gap)?;
        self.reduced(&losses, reduction)
    }

    fn pair(&mut self, op: &'static str, x: &Tensor, target: &Tensor) -> Result<()> {
        float(op, x)?;
        same_dtype(op, x, target)?;
        same_shape(op, x, *target.shape())
    }

    fn gap(&mut self, op: &'static str, x: &Tensor, target: &Tensor) -> Result<Tensor> {
        self.pair(op, x, target)?;
        self.sub(x, target)
    }

    fn reduced(&mut self, losses: &Tensor, reduction: Reduction) -> Result<Tensor> {
        match reduction {
            Reduction::None => Ok(losses.clone()),
            Reduction::Mean => self.mean_all(losses),
            Reduction::Sum => self.sum_all(losses),
        }
    }
}
