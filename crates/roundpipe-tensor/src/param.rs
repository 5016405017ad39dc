//! Parameters: named host memory that operations read through [`Cx::get`](crate::cx::Cx::get).
//!
//! A parameter's home is host memory. A pass over a model borrows it for reading; an optimizer
//! writes it between passes. The guards of [`HostBuf`] keep the two apart: writing while a pass
//! still reads is an error, not a race. A store may move a parameter to another home
//! ([`Param::rehome`]); holders of the old memory keep it alive.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock, Weak};

use half::{bf16, f16};

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::host::HostBuf;
use crate::host_tensor::HostTensor;
use crate::rng::{RngKey, normal_pair, unit};
use crate::shape::Shape;
use crate::sync::unpoisoned;

/// The name under which parameters ask for memory and refuse it.
const NAME: &str = "parameter";

/// Weights, or a buffer that no gradient reaches. Cloning shares it: a tied weight is a clone.
#[derive(Debug, Clone)]
pub struct Param(Arc<ParamInner>);

#[derive(Debug)]
struct ParamInner {
    shape: Shape,
    dtype: DType,
    data: RwLock<HostBuf>,
    trainable: AtomicBool,
    embedding: AtomicBool,
    keeper: RwLock<Option<Weak<dyn Keeper>>>,
}

/// The state of an engine that moved a parameter's memory and knows where its newest values are.
pub trait Keeper: Send + Sync + fmt::Debug {
    /// What errors call it.
    fn name(&self) -> &str;

    /// Whether it updates the parameter.
    fn trains(&self, param: ParamId) -> bool;

    /// Waits until the updates that were asked for are done, so that [`Param::data`] is the newest
    /// value of every parameter.
    fn wait_for_updates(&self);
}

/// Tells parameters apart; clones share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(usize);

impl Param {
    /// A trainable parameter over existing memory.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the memory is not exactly as large as the shape and type ask, or
    /// does not begin where elements of the type can.
    pub fn new(data: HostBuf, dtype: DType, dims: &[usize]) -> Result<Self> {
        let shape = Shape::new(dims)?;
        data.place_all(NAME, dtype, &shape)?;
        let data = RwLock::new(data);
        Ok(Self(Arc::new(ParamInner {
            shape,
            dtype,
            data,
            trainable: AtomicBool::new(true),
            embedding: AtomicBool::new(false),
            keeper: RwLock::new(None),
        })))
    }

    /// All zeros.
    ///
    /// # Errors
    /// When the shape is absurd or the system has no memory.
    pub fn zeros(dtype: DType, dims: &[usize]) -> Result<Self> {
        let shape = Shape::new(dims)?;
        Self::new(
            HostBuf::zeroed(NAME, shape.numel() * dtype.size())?,
            dtype,
            dims,
        )
    }

    /// Values that are not there yet: no memory, until [`Param::rehome`].
    ///
    /// # Errors
    /// When the shape is absurd.
    pub fn absent(dtype: DType, dims: &[usize]) -> Result<Self> {
        let shape = Shape::new(dims)?;
        Self::new(
            HostBuf::absent(NAME, shape.numel() * dtype.size()),
            dtype,
            dims,
        )
    }

    /// All one value.
    ///
    /// # Errors
    /// As [`Param::zeros`].
    pub fn full(dtype: DType, dims: &[usize], value: f64) -> Result<Self> {
        let param = Self::zeros(dtype, dims)?;
        param.fill(|_| [value; 4])?;
        Ok(param)
    }

    /// Given values.
    ///
    /// # Errors
    /// When their number is not the shape's.
    pub fn from_slice<T: Element>(values: &[T], dims: &[usize]) -> Result<Self> {
        let shape = Shape::new(dims)?;
        if shape.numel() != values.len() {
            return Err(Error::invalid(
                NAME,
                format!("{} values for shape {shape}", values.len()),
            ));
        }
        Self::new(HostBuf::from_slice(NAME, values)?, T::DTYPE, dims)
    }

    /// Normal values around 0.
    ///
    /// # Errors
    /// As [`Param::zeros`].
    pub fn normal(dtype: DType, dims: &[usize], std: f64, key: RngKey) -> Result<Self> {
        let param = Self::zeros(dtype, dims)?;
        param.fill(|block| {
            let words = key.block(block);
            let ([a, b], [c, d]) = (
                normal_pair(words[0], words[1]),
                normal_pair(words[2], words[3]),
            );
            [a, b, c, d].map(|x| f64::from(x) * std)
        })?;
        Ok(param)
    }

    /// Uniform values in [-bound, bound).
    ///
    /// # Errors
    /// As [`Param::zeros`].
    pub fn uniform(dtype: DType, dims: &[usize], bound: f64, key: RngKey) -> Result<Self> {
        let param = Self::zeros(dtype, dims)?;
        param.fill(|block| {
            key.block(block)
                .map(|word| (f64::from(unit(word)) * 2.0 - 1.0) * bound)
        })?;
        Ok(param)
    }

    /// Block i gives the elements from 4 i on.
    fn fill(&self, block: impl Fn(u64) -> [f64; 4] + Sync) -> Result<()> {
        /// Every element is a function of its place, so any number of threads gives the same
        /// values.
        fn each<T: Element>(out: &mut [T], block: impl Fn(u64) -> [f64; 4] + Sync) {
            const ALONE: usize = 1 << 16;
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            let share = out.len().div_ceil(threads).next_multiple_of(4).max(ALONE);
            let fill = |start: usize, part: &mut [T]| {
                for (i, four) in part.chunks_mut(4).enumerate() {
                    let values = block((start / 4 + i) as u64);
                    four.iter_mut()
                        .zip(values)
                        .for_each(|(x, value)| *x = T::from_f64(value));
                }
            };
            if share >= out.len() {
                return fill(0, out);
            }
            std::thread::scope(|scope| {
                for (part, chunk) in out.chunks_mut(share).enumerate() {
                    let fill = &fill;
                    scope.spawn(move || fill(part * share, chunk));
                }
            });
        }
        let mut data = self.data().write(0..self.bytes())?;
        match self.0.dtype {
            DType::F64 => each::<f64>(data.as_mut_slice(), block),
            DType::F32 => each::<f32>(data.as_mut_slice(), block),
            DType::BF16 => each::<bf16>(data.as_mut_slice(), block),
            DType::F16 => each::<f16>(data.as_mut_slice(), block),
            DType::I64 => each::<i64>(data.as_mut_slice(), block),
            DType::I32 => each::<i32>(data.as_mut_slice(), block),
            DType::U32 => each::<u32>(data.as_mut_slice(), block),
            DType::U8 => each::<u8>(data.as_mut_slice(), block),
            DType::Bool => each::<u8>(data.as_mut_slice(), |i| {
                block(i).map(|x| f64::from(u8::from(x != 0.0)))
            }),
        }
        Ok(())
    }

    /// Who this is; clones agree.
    pub fn id(&self) -> ParamId {
        ParamId(Arc::as_ptr(&self.0) as usize)
    }

    /// Sizes.
    pub fn shape(&self) -> &Shape {
        &self.0.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Its memory.
    pub fn data(&self) -> HostBuf {
        unpoisoned(self.0.data.read()).clone()
    }

    /// Makes `home` its memory, for all clones. What `home` holds is the value from now on; nothing
    /// is copied.
    ///
    /// # Errors
    /// As [`Param::new`].
    pub fn rehome(&self, home: HostBuf) -> Result<()> {
        home.place_all(NAME, self.0.dtype, &self.0.shape)?;
        *unpoisoned(self.0.data.write()) = home;
        Ok(())
    }

    /// Gives it memory of its own if its values stay in a file, so that they can be written.
    ///
    /// # Errors
    /// When the system has no memory, or the values are not there yet.
    pub fn leave_file(&self) -> Result<()> {
        let old = self.data();
        if !old.stays_in_file() {
            return Ok(());
        }
        let own = HostBuf::zeroed(NAME, old.len())?;
        own.write(0..own.len())?
            .bytes()
            .copy_from_slice(old.read_all()?.bytes());
        self.rehome(own)
    }

    /// Who keeps its memory, while they live.
    pub fn keeper(&self) -> Option<Arc<dyn Keeper>> {
        unpoisoned(self.0.keeper.read()).as_ref()?.upgrade()
    }

    /// Says who keeps its memory from now on.
    pub fn set_keeper(&self, keeper: Weak<dyn Keeper>) {
        *unpoisoned(self.0.keeper.write()) = Some(keeper);
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.shape.numel() * self.0.dtype.size()
    }

    /// Whether gradients are computed for it.
    pub fn is_trainable(&self) -> bool {
        self.0.dtype.is_float() && self.0.trainable.load(Ordering::Relaxed)
    }

    /// Freezes or thaws it (for all clones).
    pub fn set_trainable(&self, trainable: bool) {
        self.0.trainable.store(trainable, Ordering::Relaxed);
    }

    /// The same parameter, frozen: for buffers and constants.
    #[must_use]
    pub fn frozen(self) -> Self {
        self.set_trainable(false);
        self
    }

    /// Whether layers read single rows of it by index, as those of a vocabulary. Rows then get
    /// gradients that differ by orders of magnitude, and optimizers keep more bits for them
    /// (`MomentType::Bits8`).
    pub fn is_embedding(&self) -> bool {
        self.0.embedding.load(Ordering::Relaxed)
    }

    /// The same parameter, as a table of rows that layers read by index (for all clones).
    #[must_use]
    pub fn embedding(self) -> Self {
        self.0.embedding.store(true, Ordering::Relaxed);
        self
    }

    /// A tensor over its memory, such as `RoundPipe::load_params` takes. Nothing is copied: it shows
    /// what is written there later, until the parameter moves to another home.
    ///
    /// ```
    /// # use roundpipe_tensor::Param;
    /// let param = Param::from_slice(&[1.0f32, 2.0], &[1, 2])?;
    /// assert_eq!(param.host_tensor().dims(), [1, 2]);
    /// assert_eq!(param.host_tensor().to_vec::<f32>()?, [1.0, 2.0]);
    /// # Ok::<(), roundpipe_tensor::Error>(())
    /// ```
    pub fn host_tensor(&self) -> HostTensor {
        let tensor = HostTensor::new(self.data(), self.0.dtype, self.0.shape.dims());
        tensor.expect("the memory was checked when it became the parameter's")
    }

    /// A copy of the values.
    ///
    /// # Errors
    /// When `T` is not the parameter's type, or while it is being written.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if T::DTYPE != self.0.dtype {
            return Err(Error::invalid(
                "to_vec",
                format!("asked for {} of a {} parameter", T::DTYPE, self.0.dtype),
            ));
        }
        Ok(self.data().read_all()?.as_slice::<T>().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::Param;
    use crate::dtype::DType;
    use crate::host::HostBuf;
    use crate::rng::{RngSite, normal_pair, unit};

    /// Every element is the one that its place in the random stream says, across threads and at a
    /// ragged end.
    #[test]
    fn random_values_are_those_of_their_places() {
        let key = RngSite {
            seed: 4,
            ..RngSite::default()
        }
        .key();
        let count = if cfg!(miri) {
            (1 << 10) + 3
        } else {
            (1 << 18) + 3
        };
        let normal = Param::normal(DType::F32, &[count], 0.5, key)
            .unwrap()
            .to_vec::<f32>()
            .unwrap();
        let uniform = Param::uniform(DType::F32, &[count], 2.0, key)
            .unwrap()
            .to_vec::<f32>()
            .unwrap();
        for i in (0..count)
            .step_by(4099)
            .chain([1, 2, 3, count - 2, count - 1])
        {
            let words = key.block(i as u64 / 4);
            let pair = normal_pair(words[i % 4 / 2 * 2], words[i % 4 / 2 * 2 + 1]);
            assert_eq!(
                normal[i],
                (f64::from(pair[i % 2]) * 0.5) as f32,
                "normal {i}"
            );
            assert_eq!(
                uniform[i],
                ((f64::from(unit(words[i % 4])) * 2.0 - 1.0) * 2.0) as f32,
                "uniform {i}"
            );
        }
    }

    /// A tied weight is a clone: it must move with its twin, and a home of another size is no home.
    #[test]
    fn clones_move_together() {
        let param = Param::from_slice(&[1.0f32, 2.0], &[2]).unwrap();
        let twin = param.clone();
        let slab = HostBuf::from_slice("slab", &[7.0f32, 8.0, 9.0]).unwrap();
        assert!(param.rehome(slab.clone()).is_err());
        assert_eq!(twin.to_vec::<f32>().unwrap(), [1.0, 2.0]);
        param.rehome(slab.slice(4..12).unwrap()).unwrap();
        assert_eq!(twin.to_vec::<f32>().unwrap(), [8.0, 9.0]);
        assert_eq!(twin.id(), param.id());
    }
}
