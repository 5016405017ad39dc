//! Batches of a dataset: [`Loader`], and where it stands ([`Position`]).

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::collate::{Collate, CollateFn, Stack};
use super::dataset::{DataError, Dataset};
use super::order::shuffled;
use super::prefetch::{Make, Prefetch};
use crate::error::{Error, Result};

/// Where a loader stands: the next batch it gives. Saved beside the weights, it resumes a run in
/// the middle of an epoch, with the same dataset and options.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The batch in it, from 0.
    pub batch: u64,
}

/// Which samples an epoch takes, in order.
#[derive(Clone)]
enum Order {
    Sequential,
    Shuffled { seed: u64 },
    Sampler(Arc<dyn Fn(u64, usize) -> Vec<usize> + Send + Sync>),
}

impl Order {
    fn of(&self, epoch: u64, len: usize) -> Result<Vec<usize>> {
        let samples = match self {
            Self::Sequential => return Ok((0..len).collect()),
            Self::Shuffled { seed } => return Ok(shuffled(*seed, epoch, len)),
            Self::Sampler(sampler) => sampler(epoch, len),
        };
        match samples.iter().find(|sample| **sample >= len) {
            None => Ok(samples),
            Some(odd) => {
                let what = format!("it asks for sample {odd} in epoch {epoch}; there are {len}");
                Err(Error::config("sampler", what))
            }
        }
    }
}

/// Gives the samples of a dataset in batches, epoch by epoch: the `DataLoader` of PyTorch. See
/// [`data`](super) for an example.
pub struct Loader<D, C = Stack> {
    dataset: Arc<D>,
    collate: Arc<C>,
    order: Order,
    batch_size: usize,
    drop_last: bool,
    threads: usize,
    prefetch: Option<usize>,
    position: Position,
}

impl<D: Dataset> Loader<D> {
    /// One sample per batch, in their order, stacked, on the caller's thread.
    pub fn new(dataset: D) -> Self {
        Self {
            dataset: Arc::new(dataset),
            collate: Arc::new(Stack),
            order: Order::Sequential,
            batch_size: 1,
            drop_last: false,
            threads: 0,
            prefetch: None,
            position: Position::default(),
        }
    }
}

impl<D: Dataset, C> Loader<D, C> {
    /// Samples per batch.
    #[must_use]
    pub fn batch_size(mut self, samples: usize) -> Self {
        self.batch_size = samples;
        self
    }

    /// Shuffles the samples of every epoch, by `seed` and the epoch's number.
    #[must_use]
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.order = Order::Shuffled { seed };
        self
    }

    /// Chooses the samples of an epoch by a function of its number and the number of samples; some
    /// may come twice or not at all. It must give the same for the same epoch.
    #[must_use]
    pub fn sampler(
        mut self,
        sampler: impl Fn(u64, usize) -> Vec<usize> + Send + Sync + 'static,
    ) -> Self {
        self.order = Order::Sampler(Arc::new(sampler));
        self
    }

    /// Leaves the last batch of an epoch out if it is smaller than the others.
    #[must_use]
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }

    /// Makes batches ahead in so many threads; with 0, the default, the caller makes them.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// How many batches may wait for the caller or be in the making; by default two per thread.
    #[must_use]
    pub fn prefetch(mut self, batches: usize) -> Self {
        self.prefetch = Some(batches);
        self
    }

    /// How samples become a batch, such as [`Pad`](super::Pad) for unequal lengths.
    #[must_use]
    pub fn collate<K: Collate<D::Sample>>(self, collate: K) -> Loader<D, K> {
        Loader {
            dataset: self.dataset,
            collate: Arc::new(collate),
            order: self.order,
            batch_size: self.batch_size,
            drop_last: self.drop_last,
            threads: self.threads,
            prefetch: self.prefetch,
            position: self.position,
        }
    }

    /// Makes batches of samples by a function.
    #[must_use]
    pub fn collate_with<B, F>(self, collate: F) -> Loader<D, CollateFn<F, D::Sample>>
    where
        B: Send,
        F: Fn(Vec<D::Sample>) -> Result<B, DataError> + Send + Sync,
    {
        self.collate(CollateFn::new(collate))
    }

    /// The next batch that it gives.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Goes on from a position; [`Loader::epoch`] refuses one that does not exist.
    pub fn set_position(&mut self, position: Position) {
        self.position = position;
    }

    /// The dataset.
    pub fn dataset(&self) -> &D {
        &self.dataset
    }
}

impl<D, C> Loader<D, C>
where
    D: Dataset + 'static,
    C: Collate<D::Sample> + 'static,
    C::Batch: 'static,
{
    /// The batches of the current epoch from the current position on. Each that is given moves the
    /// position, the last one to the next epoch; an iterator that is dropped before leaves it at
    /// the next batch.
    ///
    /// # Errors
    /// [`Error::Config`] for options or a position that cannot work, [`Error::Data`] for a dataset
    /// that cannot.
    pub fn epoch(&mut self) -> Result<Batches<'_, C::Batch>> {
        if self.batch_size == 0 {
            return Err(Error::config("batch_size", "it is 0; use 1 or more"));
        }
        if self.prefetch == Some(0) {
            let what = "it is 0, so no batch could be made; use 1 or more";
            return Err(Error::config("prefetch", what));
        }
        self.dataset.check().map_err(|cause| Error::Data {
            place: "dataset".into(),
            cause,
        })?;
        let mut epoch = self.position.epoch;
        let mut order = self.order.of(epoch, self.dataset.len())?;
        let mut count = self.count(order.len());
        let mut first = usize::try_from(self.position.batch).unwrap_or(usize::MAX);
        if first > count {
            let what = format!(
                "batch {first} of epoch {epoch}, which has {count}; were the options the same when \
                 it was saved?"
            );
            return Err(Error::config("position", what));
        }
        if first == count && count > 0 {
            // Behind the last batch is the next epoch.
            (epoch, first) = (epoch + 1, 0);
            order = self.order.of(epoch, self.dataset.len())?;
            count = self.count(order.len());
        }
        self.position = Position {
            epoch,
            batch: first as u64,
        };
        if count == 0 {
            // An epoch without batches is over at once, or a loop over epochs would not end.
            self.position = Position {
                epoch: epoch + 1,
                batch: 0,
            };
        }
        let make = self.maker(order, epoch);
        let batches = first..count;
        let source = if self.threads == 0 {
            Source::Here(make)
        } else {
            let ahead = self.prefetch.unwrap_or(2 * self.threads);
            Source::Threads(Prefetch::start(make, batches.clone(), self.threads, ahead)?)
        };
        Ok(Batches {
            position: &mut self.position,
            source: Some(source),
            next: batches.start,
            end: batches.end,
        })
    }

    /// How many batches make an epoch of so many samples.
    fn count(&self, samples: usize) -> usize {
        if self.drop_last {
            samples / self.batch_size
        } else {
            samples.div_ceil(self.batch_size)
        }
    }

    fn maker(&self, order: Vec<usize>, epoch: u64) -> Arc<Make<C::Batch>> {
        let dataset = self.dataset.clone();
        let collate = self.collate.clone();
        let size = self.batch_size;
        Arc::new(move |number| {
            let start = number * size;
            let samples = &order[start..order.len().min(start + size)];
            // A panic is the data's, not the loader's: nothing here is left half-made by it.
            let made = catch_unwind(AssertUnwindSafe(|| batch(&*dataset, &*collate, samples)));
            let made = made.unwrap_or_else(|panic| Err((String::new(), words_of(&*panic).into())));
            made.map_err(|(sample, cause)| Error::Data {
                place: format!("epoch {epoch}, batch {number}{sample}"),
                cause,
            })
        })
    }
}

/// Reads samples and puts them together; an error comes with the sample's place in words.
fn batch<D: Dataset, C: Collate<D::Sample>>(
    dataset: &D,
    collate: &C,
    samples: &[usize],
) -> Result<C::Batch, (String, DataError)> {
    let mut read = Vec::with_capacity(samples.len());
    for sample in samples {
        let at = |cause| (format!(", sample {sample}"), cause);
        read.push(dataset.get(*sample).map_err(at)?);
    }
    let collated = collate.collate(read);
    collated.map_err(|cause| (String::new(), cause))
}

/// What a panic said.
fn words_of(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    match text {
        Some(text) => format!("the dataset or its collation panicked: {text}"),
        None => "the dataset or its collation panicked".to_owned(),
    }
}

enum Source<B> {
    Here(Arc<Make<B>>),
    Threads(Prefetch<B>),
}

/// The batches of an epoch. Dropping it ends its threads: it waits for the samples that they are
/// reading, not for more.
pub struct Batches<'a, B> {
    position: &'a mut Position,
    /// `None` behind the last batch and behind an error.
    source: Option<Source<B>>,
    next: usize,
    end: usize,
}

impl<B: Send + 'static> Iterator for Batches<'_, B> {
    type Item = Result<B>;

    fn next(&mut self) -> Option<Result<B>> {
        if self.next >= self.end {
            self.source = None;
            return None;
        }
        let batch = match self.source.as_ref()? {
            Source::Here(make) => make(self.next),
            Source::Threads(prefetch) => prefetch.next(),
        };
        if batch.is_err() {
            // The position stays at the batch that failed.
            self.source = None;
            return Some(batch);
        }
        self.next += 1;
        if self.next == self.end {
            self.position.epoch += 1;
            self.position.batch = 0;
        } else {
            self.position.batch = self.next as u64;
        }
        Some(batch)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = match self.source {
            Some(_) => self.end - self.next,
            None => 0,
        };
        // An error ends it early.
        (usize::from(left > 0), Some(left))
    }
}
