//! Adds branches into the base: W += scale · B A, computed in f32 and rounded once.

use rayon::prelude::*;
use roundpipe::{DType, Element, HostBuf, Param, TensorResult, bf16, f16};

use crate::decoder::{Adapter, Model, Weight};
use crate::error::{Error, Result};

impl Model {
    /// Adds every branch to its weight and removes it. The base stays frozen; what a
    /// [`mapped`](Model::load_mapped) model changes moves into memory. Engines made before
    /// keep the branches and must not be used any more.
    ///
    /// # Errors
    /// When the weights are read or written at the same time; [`Error::Argument`] when they are
    /// quantised, which leaves everything as it is.
    pub fn merge_lora(&mut self) -> Result<()> {
        self.merge_each(|weight, adapter| {
            weight.leave_file()?;
            merge(
                &weight.data(),
                weight.dtype(),
                weight.shape().dims(),
                adapter,
            )
        })
    }

    /// The same for a model that is only read from now on: a sum is made whenever a weight is read,
    /// and no weight moves into memory. The values are those of [`Model::merge_lora`].
    ///
    /// # Errors
    /// When a weight cannot be replaced.
    pub fn merge_lora_on_read(&mut self) -> Result<()> {
        self.merge_each(|weight, adapter| {
            let base = weight.data();
            // Not the weight itself, which will hold this closure.
            let (dtype, dims) = (weight.dtype(), weight.shape().dims().to_vec());
            let adapter = adapter.clone();
            let name = base.name().to_owned();
            let sum = HostBuf::made_on_read(name, base.len(), move |buf| {
                buf.write(0..buf.len())?
                    .bytes()
                    .copy_from_slice(base.read_all()?.bytes());
                base.let_go(0..base.len())?;
                merge(buf, dtype, &dims, &adapter)
            });
            weight.rehome(sum)
        })
    }

    fn merge_each(&mut self, merge: impl Fn(&Param, &Adapter) -> TensorResult<()>) -> Result<()> {
        if let Some(how) = self.quantization() {
            let why = format!(
                "the base is quantised ({how}), so that merging would round it again; load it whole, or \
                 call Model::dequantize, and merge there"
            );
            return Err(Error::argument("merge", why));
        }
        for (_, projection) in self.projections_mut() {
            if let (Some(adapter), Weight::Whole(weight)) =
                (&projection.adapter, &projection.weight)
            {
                merge(weight, adapter)?;
                projection.adapter = None;
            }
        }
        self.lora = None;
        self.assemble();
        Ok(())
    }
}

/// Adds a branch to the values in `home`: a weight of this type and shape.
fn merge(home: &HostBuf, dtype: DType, dims: &[usize], adapter: &Adapter) -> TensorResult<()> {
    match dtype {
        DType::BF16 => add_product::<bf16>(home, dims, adapter),
        DType::F16 => add_product::<f16>(home, dims, adapter),
        _ => add_product::<f32>(home, dims, adapter),
    }
}

fn add_product<T: Element>(home: &HostBuf, dims: &[usize], adapter: &Adapter) -> TensorResult<()> {
    let (out, inner) = (dims[dims.len() - 2], dims[dims.len() - 1]);
    let wide = |param: &Param| -> TensorResult<Vec<f32>> {
        Ok(param
            .to_vec::<T>()?
            .into_iter()
            .map(|x| x.to_f64() as f32)
            .collect())
    };
    let (a, b) = (wide(&adapter.a)?, wide(&adapter.b)?);
    let rank = adapter.a.shape().dims()[dims.len() - 2];
    let scale = adapter.scale as f32;
    let mut data = home.write(0..home.len())?;
    // One row of one expert at a time; every element is a sum in a fixed order, whatever the
    // threads.
    data.as_mut_slice::<T>()
        .par_chunks_mut(inner)
        .enumerate()
        .for_each(|(row, values)| {
            let a = &a[row / out * rank * inner..][..rank * inner];
            let b = &b[row * rank..][..rank];
            let mut sum = vec![0f32; inner];
            for (factor, line) in b.iter().zip(a.chunks_exact(inner)) {
                sum.iter_mut().zip(line).for_each(|(s, x)| *s += factor * x);
            }
            for (value, s) in values.iter_mut().zip(sum) {
                *value = T::from_f64(f64::from(value.to_f64() as f32 + scale * s));
            }
        });
    Ok(())
}
