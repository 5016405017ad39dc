//! Datasets and loaders: the same batches for any number of threads, on every machine, from any
//! position.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use roundpipe::data::{Collate, DataError, Dataset, Loader, Pad, Position, Stack};
use roundpipe::{DType, HostTensor, Tree};

fn ids(batch: &HostTensor) -> Vec<i64> {
    batch.to_vec::<i64>().unwrap()
}

/// All batches of an epoch.
fn epoch<D, C>(loader: &mut Loader<D, C>) -> Vec<Vec<i64>>
where
    D: Dataset + 'static,
    C: Collate<D::Sample, Batch = HostTensor> + 'static,
{
    let batches = loader.epoch().unwrap();
    batches.map(|batch| ids(&batch.unwrap())).collect()
}

fn numbers(count: i64) -> Vec<i64> {
    (0..count).collect()
}

/// Threads change when a batch is made, never what is in it.
#[test]
fn batches_are_the_same_for_any_number_of_threads() {
    let run = |threads: usize, prefetch: Option<usize>| {
        let mut loader = Loader::new(numbers(23))
            .batch_size(4)
            .shuffle(7)
            .threads(threads);
        if let Some(batches) = prefetch {
            loader = loader.prefetch(batches);
        }
        [epoch(&mut loader), epoch(&mut loader), epoch(&mut loader)]
    };
    let want = run(0, None);
    for (threads, prefetch) in [
        (1, None),
        (2, Some(1)),
        (3, Some(2)),
        (8, None),
        (50, Some(100)),
    ] {
        assert_eq!(run(threads, prefetch), want, "{threads} threads");
    }
    for batches in &want {
        let sizes: Vec<usize> = batches.iter().map(Vec::len).collect();
        assert_eq!(sizes, [4, 4, 4, 4, 4, 3]);
        let all: BTreeSet<i64> = batches.iter().flatten().copied().collect();
        assert_eq!(all.len(), 23, "every sample once");
    }
    assert!(want[0] != want[1] && want[1] != want[2]);
}

/// Fixed for all time: a run that is resumed on another machine, or with a newer version, goes on in
/// the same order.
#[test]
fn the_order_of_a_seed_and_epoch_never_changes() {
    let order = |seed: u64, epoch: u64| {
        let mut loader = Loader::new(numbers(10)).batch_size(10).shuffle(seed);
        loader.set_position(Position { epoch, batch: 0 });
        self::epoch(&mut loader).remove(0)
    };
    assert_eq!(order(7, 0), [6, 4, 0, 1, 9, 8, 3, 2, 7, 5]);
    assert_eq!(order(7, 1), [8, 1, 6, 2, 4, 7, 3, 5, 0, 9]);
    assert_eq!(order(8, 0), [0, 9, 5, 6, 3, 4, 8, 2, 1, 7]);
    assert_eq!(
        order(u64::MAX, u64::MAX - 1),
        [8, 9, 3, 7, 4, 0, 6, 1, 2, 5]
    );
}

/// A run that was cut anywhere goes on as if it had not been.
#[test]
fn a_position_resumes_in_the_middle() {
    let loader = || {
        Loader::new(numbers(11))
            .batch_size(3)
            .shuffle(5)
            .drop_last(true)
            .threads(2)
    };
    let mut whole = loader();
    let mut want = Vec::new();
    let mut positions = Vec::new();
    while whole.position().epoch < 2 {
        positions.push(whole.position());
        let first = whole.epoch().unwrap().next().unwrap().unwrap();
        want.push(ids(&first));
    }
    assert_eq!(want.len(), 6, "two epochs of three full batches");
    assert_eq!(whole.position(), Position { epoch: 2, batch: 0 });
    for (cut, position) in positions.iter().enumerate() {
        let mut resumed = loader();
        resumed.set_position(*position);
        let mut rest = Vec::new();
        while resumed.position().epoch < 2 {
            rest.extend(epoch(&mut resumed));
        }
        assert_eq!(rest, want[cut..], "from {position:?}");
    }
    let mut behind = loader();
    behind.set_position(Position { epoch: 0, batch: 3 });
    assert_eq!(
        epoch(&mut behind),
        want[3..],
        "behind the last is the next epoch"
    );
    let mut beyond = loader();
    beyond.set_position(Position { epoch: 1, batch: 4 });
    let text = beyond.epoch().err().unwrap().to_string();
    assert!(
        text.contains("position: batch 4 of epoch 1, which has 3"),
        "{text}"
    );
}

/// Without shuffling, samples come in their order; a sampler chooses freely.
#[test]
fn orders_are_the_users_choice() {
    let mut plain = Loader::new(numbers(5)).batch_size(2);
    assert_eq!(epoch(&mut plain), [vec![0, 1], vec![2, 3], vec![4]]);
    let mut odd = Loader::new(numbers(5))
        .batch_size(2)
        .sampler(|epoch, len| vec![epoch as usize, len - 1, 0]);
    assert_eq!(epoch(&mut odd), [vec![0, 4], vec![0]]);
    assert_eq!(epoch(&mut odd), [vec![1, 4], vec![0]]);
    let mut bad = Loader::new(numbers(5)).sampler(|_, len| vec![len]);
    let text = bad.epoch().err().unwrap().to_string();
    assert!(
        text.contains("sampler: it asks for sample 5 in epoch 0; there are 5"),
        "{text}"
    );
}

/// Tensors, trees and pairs are datasets of their rows.
#[test]
fn tensors_and_pairs_are_datasets() {
    let x = HostTensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[3, 2]).unwrap();
    let y = HostTensor::from_slice(&[7i64, 8, 9], &[3]).unwrap();
    let mut pairs = Loader::new((x.clone(), y.clone())).batch_size(2);
    let batches: Vec<_> = pairs.epoch().unwrap().map(Result::unwrap).collect();
    assert_eq!(batches[0].0.dims(), [2, 2]);
    assert_eq!(batches[1].0.to_vec::<f32>().unwrap(), [5.0, 6.0]);
    assert_eq!(
        (ids(&batches[0].1), ids(&batches[1].1)),
        (vec![7, 8], vec![9])
    );
    let tree = Tree::map([
        ("x", x.into()),
        ("y", y.clone().into()),
        ("name", Tree::Text("a".into())),
        ("scale", Tree::Float(0.5)),
    ]);
    let mut trees = Loader::new(tree).batch_size(3);
    let batch = trees.epoch().unwrap().next().unwrap().unwrap();
    assert_eq!(
        batch.get("x").unwrap().clone().tensor().unwrap().dims(),
        [3, 2]
    );
    let scale = batch.get("scale").unwrap().clone().tensor().unwrap();
    assert_eq!(
        (scale.dtype(), scale.to_f64_vec().unwrap()),
        (DType::F64, vec![0.5; 3])
    );
    assert!(matches!(batch.get("name").unwrap(), Tree::List(names) if names.len() == 3));
    let short = HostTensor::from_slice(&[1i64, 2], &[2]).unwrap();
    let text = Loader::new((y.clone(), short.clone()))
        .epoch()
        .err()
        .unwrap();
    assert!(text.to_string().contains("3 samples beside 2"), "{text}");
    let text = Loader::new(Tree::from([y, short])).epoch().err().unwrap();
    assert!(
        text.to_string()
            .contains("data[1] [2] has 2 samples, the first tensor has 3"),
        "{text}"
    );
    let text = Loader::new(HostTensor::scalar(1.0).unwrap())
        .epoch()
        .err()
        .unwrap();
    assert!(text.to_string().contains("without dimensions"), "{text}");
}

/// Numbers of every kind become tensors of their type.
#[test]
fn numbers_are_stacked_in_their_type() {
    let batch = Stack.collate(vec![(1.5f32, true), (2.5, false)]).unwrap();
    assert_eq!(batch.0.to_vec::<f32>().unwrap(), [1.5, 2.5]);
    assert_eq!(
        (batch.1.dtype(), batch.1.to_vec::<u8>().unwrap()),
        (DType::Bool, vec![1, 0])
    );
    let big = (1i64 << 60) + 1;
    let batch = Stack.collate(vec![Tree::Int(big), Tree::Int(2)]).unwrap();
    assert_eq!(ids(&batch.tensor().unwrap()), [big, 2]);
    let batch = Stack
        .collate(vec![Tree::Bool(true), Tree::Bool(false)])
        .unwrap();
    assert_eq!(batch.tensor().unwrap().dtype(), DType::Bool);
}

#[test]
fn unequal_samples_are_named() {
    let sample = |dims: &[usize]| HostTensor::zeros(DType::F32, dims).unwrap();
    let list = |dims: &[usize]| Tree::from([sample(&[1]), sample(dims)]);
    let text = Stack
        .collate(vec![list(&[2]), list(&[3])])
        .unwrap_err()
        .to_string();
    let want = "sample[1] is f32 [2] in one sample and f32 [3] in another; use `Pad`";
    assert!(text.contains(want), "{text}");
    let text = Stack
        .collate(vec![list(&[2]), sample(&[2]).into()])
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("sample is a list of 2 in one sample and a tensor in another"),
        "{text}"
    );
}

/// Padding fills with the leaf's own value, on the side and to the multiple that was asked for.
#[test]
fn padding_makes_lengths_equal() {
    let samples = || {
        let sample = |ids: &[i64], x: &[f32]| {
            Tree::map([
                (
                    "ids",
                    HostTensor::from_slice(ids, &[ids.len()]).unwrap().into(),
                ),
                (
                    "labels",
                    HostTensor::from_slice(ids, &[ids.len()]).unwrap().into(),
                ),
                (
                    "x",
                    HostTensor::from_slice(x, &[x.len() / 2, 2]).unwrap().into(),
                ),
                ("weight", Tree::Float(1.0)),
            ])
        };
        vec![
            sample(&[1, 2, 3], &[1.0, 2.0]),
            sample(&[4], &[3.0, 4.0, 5.0, 6.0]),
        ]
    };
    let read = |batch: &Tree<HostTensor>, name: &str| {
        let tensor = batch.get(name).unwrap().clone().tensor().unwrap();
        (tensor.dims().to_vec(), tensor.to_f64_vec().unwrap())
    };
    let pad = Pad::new(9.0).named("labels", -100.0).multiple_of(2);
    let batch = pad.collate(samples()).unwrap();
    let row = vec![1.0, 2.0, 3.0, 9.0, 4.0, 9.0, 9.0, 9.0];
    assert_eq!(read(&batch, "ids"), (vec![2, 4], row));
    let row = vec![1.0, 2.0, 3.0, -100.0, 4.0, -100.0, -100.0, -100.0];
    assert_eq!(read(&batch, "labels"), (vec![2, 4], row));
    let rows = vec![1.0, 2.0, 9.0, 9.0, 3.0, 4.0, 5.0, 6.0];
    assert_eq!(read(&batch, "x"), (vec![2, 2, 2], rows));
    assert_eq!(read(&batch, "weight"), (vec![2], vec![1.0, 1.0]));
    let left = Pad::new(0.0).left().leaf(0, 7.0);
    let batch = left.collate(samples()).unwrap();
    assert_eq!(read(&batch, "ids").1, [1.0, 2.0, 3.0, 7.0, 7.0, 4.0]);
    assert_eq!(read(&batch, "labels").1, [1.0, 2.0, 3.0, 0.0, 0.0, 4.0]);
    let wide = |width: usize| HostTensor::zeros(DType::BF16, &[2, width]).unwrap();
    let batch = Pad::new(1.0)
        .dim(-1)
        .collate(vec![wide(1), wide(3)])
        .unwrap();
    assert_eq!(batch.dims(), [2, 2, 3]);
    assert_eq!(batch.sum().unwrap(), 4.0);
    let text = |pad: Pad, samples: Vec<HostTensor>| pad.collate(samples).unwrap_err().to_string();
    let bytes = |len: usize| HostTensor::zeros(DType::U8, &[len]).unwrap();
    let found = text(Pad::new(-100.0), vec![bytes(1), bytes(2)]);
    assert!(
        found.contains("sample is u8, which cannot hold -100"),
        "{found}"
    );
    let found = text(Pad::new(0.0).multiple_of(0), vec![bytes(1)]);
    assert!(found.contains("multiple_of: 0"), "{found}");
    let found = text(Pad::new(0.0).dim(1), vec![bytes(1)]);
    assert!(found.contains("no dimension 1 in [1]"), "{found}");
    let found = text(Pad::new(0.0), vec![wide(1), wide(2)]);
    assert!(
        found.contains("bf16 [2, 1] in one sample and bf16 [2, 2]"),
        "{found}"
    );
}

#[test]
fn a_function_collates() {
    let mut loader = Loader::new(vec!["a", "b", "c"])
        .batch_size(2)
        .collate_with(|samples| Ok(samples.concat()));
    let batches: Vec<String> = loader.epoch().unwrap().map(Result::unwrap).collect();
    assert_eq!(batches, ["ab", "c"]);
}

/// Fails or panics at one sample.
struct Odd {
    at: usize,
    panics: bool,
}

impl Dataset for Odd {
    type Sample = i64;

    fn len(&self) -> usize {
        10
    }

    fn get(&self, index: usize) -> Result<i64, DataError> {
        if index == self.at {
            assert!(!self.panics, "sample {index} is odd");
            return Err(std::io::Error::other("the disk is gone").into());
        }
        Ok(index as i64)
    }
}

/// The batches before come first; then one error that names the place; then nothing. The position
/// stays, so that the batch can be tried again or skipped.
#[test]
fn a_failing_batch_ends_the_epoch_behind_those_before_it() {
    for threads in [0, 1, 4] {
        for (panics, want) in [
            (false, "data: epoch 0, batch 2, sample 5: the disk is gone"),
            (
                true,
                "data: epoch 0, batch 2: the dataset or its collation panicked: sample 5 is odd",
            ),
        ] {
            let mut loader = Loader::new(Odd { at: 5, panics })
                .batch_size(2)
                .threads(threads);
            let mut batches = loader.epoch().unwrap();
            let first = [batches.next(), batches.next()].map(|batch| ids(&batch.unwrap().unwrap()));
            assert_eq!(first, [vec![0, 1], vec![2, 3]]);
            let error = batches.next().unwrap().unwrap_err();
            assert_eq!(error.to_string(), want, "{threads} threads");
            assert!(batches.next().is_none());
            drop(batches);
            assert_eq!(loader.position(), Position { epoch: 0, batch: 2 });
            loader.set_position(Position { epoch: 0, batch: 3 });
            assert_eq!(epoch(&mut loader), [vec![6, 7], vec![8, 9]]);
        }
    }
}

/// Counts the samples that were read and the readers that live.
struct Watched {
    read: AtomicUsize,
    reading: Sender<usize>,
    gate: Mutex<Receiver<()>>,
}

impl Dataset for Watched {
    type Sample = i64;

    fn len(&self) -> usize {
        1000
    }

    fn get(&self, index: usize) -> Result<i64, DataError> {
        self.read.fetch_add(1, Ordering::SeqCst);
        self.reading.send(index)?;
        // Nothing to wait for once the test has let go of the gate.
        let _ = self.gate.lock().unwrap().recv();
        Ok(index as i64)
    }
}

/// A loader reads only as far ahead as it may, and a dropped iterator leaves no thread behind.
#[test]
fn the_queue_is_bounded_and_dropping_joins_the_threads() {
    let (reading, started) = channel();
    let (open, gate) = channel();
    let watched = Arc::new(Watched {
        read: AtomicUsize::new(0),
        reading,
        gate: Mutex::new(gate),
    });
    let mut loader = Loader::new(watched.clone()).threads(3).prefetch(4);
    let mut batches = loader.epoch().unwrap();
    for _ in 0..5 {
        open.send(()).unwrap();
    }
    assert_eq!(ids(&batches.next().unwrap().unwrap()), [0]);
    // One was received, so five may have begun; a sixth must not, however long it has.
    for _ in 0..5 {
        started.recv_timeout(Duration::from_secs(60)).unwrap();
    }
    assert!(started.recv_timeout(Duration::from_millis(50)).is_err());
    assert_eq!(watched.read.load(Ordering::SeqCst), 5);
    drop(open);
    drop(batches);
    let read = watched.read.load(Ordering::SeqCst);
    drop(loader);
    // The threads held the dataset; joined, they have let go of it.
    assert_eq!(Arc::strong_count(&watched), 1);
    assert_eq!(watched.read.load(Ordering::SeqCst), read);
}

#[test]
fn options_that_cannot_work_are_refused() {
    let text = |mut loader: Loader<Vec<i64>>| loader.epoch().err().unwrap().to_string();
    let loader = || Loader::new(numbers(3));
    assert_eq!(
        text(loader().batch_size(0)),
        "batch_size: it is 0; use 1 or more"
    );
    let found = text(loader().threads(1).prefetch(0));
    assert!(found.starts_with("prefetch: it is 0"), "{found}");
}

/// A loop over epochs ends also without data.
#[test]
fn an_epoch_without_batches_is_over_at_once() {
    for mut loader in [
        Loader::new(Vec::<i64>::new()).threads(2),
        Loader::new(numbers(3)).batch_size(4).drop_last(true),
    ] {
        assert!(epoch(&mut loader).is_empty());
        assert_eq!(loader.position(), Position { epoch: 1, batch: 0 });
    }
}
