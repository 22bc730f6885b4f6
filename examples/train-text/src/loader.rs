//! Batches of windows for burn-train.
//!
//! Burn's own loader reshuffles a data set from a generator that starts anew with the process. This
//! one derives a window from the seed and the window's number in the run, so that `--resume` goes on
//! with the windows the interrupted run would have drawn.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::prelude::*;

use crate::data::Text;
use crate::rng::Rng;

/// Inputs and targets of one step.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Bytes read, `[batch, seq]`.
    pub inputs: Tensor<2, Int>,
    /// The byte after each of them, `[batch, seq]`.
    pub targets: Tensor<2, Int>,
}

impl Batch {
    /// The windows of `text` that begin at `starts`.
    pub fn new(text: &Text, starts: &[usize], device: &Device) -> Self {
        let windows = || starts.iter().map(|&start| text.window(start));
        let seq = text.window(starts[0]).len() - 1;
        let tensor = |bytes: Vec<i32>| {
            Tensor::from_data(TensorData::new(bytes, [starts.len(), seq]), device)
        };
        Self {
            inputs: tensor(
                windows()
                    .flat_map(|w| &w[..seq])
                    .map(|&b| b.into())
                    .collect(),
            ),
            targets: tensor(windows().flat_map(|w| &w[1..]).map(|&b| b.into()).collect()),
        }
    }
}

/// Which windows a loader serves.
#[derive(Debug, Clone)]
enum Source {
    /// Training: as many random windows an epoch as there are items.
    Random { seed: u64, items_an_epoch: usize },
    /// Validation: the same windows every epoch.
    Fixed(Vec<usize>),
}

/// Seconds each epoch took, to the end of the device's work; shared between a loader's copies.
pub type EpochTimes = Arc<Mutex<Vec<f64>>>;

/// A loader of training or validation windows.
pub struct WindowLoader {
    text: Arc<Text>,
    source: Source,
    items: Range<usize>,
    batch: usize,
    device: Device,
    epoch: AtomicUsize,
    times: EpochTimes,
}

impl WindowLoader {
    /// `steps_an_epoch` batches of random training windows; the first epoch served is
    /// `first_epoch`, counted from 0.
    pub fn train(
        text: Arc<Text>,
        batch: usize,
        steps_an_epoch: usize,
        seed: u64,
        first_epoch: usize,
        device: &Device,
    ) -> Self {
        let items_an_epoch = batch * steps_an_epoch;
        Self {
            text,
            source: Source::Random {
                seed,
                items_an_epoch,
            },
            items: 0..items_an_epoch,
            batch,
            device: device.clone(),
            epoch: AtomicUsize::new(first_epoch),
            times: EpochTimes::default(),
        }
    }

    /// About `windows` validation windows, the same ones every epoch.
    ///
    /// Whole batches where there are enough, so that the mean over batches is the mean over bytes.
    pub fn valid(text: Arc<Text>, batch: usize, windows: usize, device: &Device) -> Self {
        let mut starts = text.valid_starts(windows);
        if starts.len() > batch {
            starts.truncate(starts.len() / batch * batch);
        }
        Self {
            text,
            items: 0..starts.len(),
            source: Source::Fixed(starts),
            batch,
            device: device.clone(),
            epoch: AtomicUsize::new(0),
            times: EpochTimes::default(),
        }
    }

    /// Where the durations of the epochs are written.
    pub fn times(&self) -> EpochTimes {
        self.times.clone()
    }

    fn start(&self, epoch: usize, item: usize) -> usize {
        match &self.source {
            Source::Random {
                seed,
                items_an_epoch,
            } => {
                let number = (epoch * items_an_epoch + item) as u64;
                self.text.random_train_start(&mut Rng::new(*seed, number))
            }
            Source::Fixed(starts) => starts[item],
        }
    }

    fn copy(&self, items: Range<usize>, device: &Device) -> Self {
        Self {
            text: self.text.clone(),
            source: self.source.clone(),
            items,
            batch: self.batch,
            device: device.clone(),
            epoch: AtomicUsize::new(self.epoch.load(Ordering::Relaxed)),
            times: self.times.clone(),
        }
    }
}

impl DataLoader<Batch> for WindowLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        Box::new(Windows {
            loader: self,
            epoch: self.epoch.fetch_add(1, Ordering::Relaxed),
            served: 0,
            begun: Instant::now(),
        })
    }

    fn num_items(&self) -> usize {
        self.items.len()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        Arc::new(self.copy(self.items.clone(), device))
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Batch>> {
        let items = self.items.start + start..self.items.start + end;
        Arc::new(self.copy(items, &self.device))
    }
}

struct Windows<'a> {
    loader: &'a WindowLoader,
    epoch: usize,
    served: usize,
    begun: Instant,
}

impl Iterator for Windows<'_> {
    type Item = Result<Batch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let WindowLoader {
            text,
            items,
            batch,
            device,
            times,
            ..
        } = self.loader;
        let first = items.start + self.served;
        let last = (first + batch).min(items.end);
        if first >= last {
            // An epoch's time is the device's, not the queue's. A failed device is reported by the
            // metrics, which read from it next.
            device.sync().ok();
            let seconds = self.begun.elapsed().as_secs_f64();
            times
                .lock()
                .expect("no holder of the lock panics")
                .push(seconds);
            return None;
        }
        self.served += last - first;
        let starts: Vec<usize> = (first..last)
            .map(|item| self.loader.start(self.epoch, item))
            .collect();
        Some(Ok(Batch::new(text, &starts, device)))
    }
}

impl DataLoaderIterator<Batch> for Windows<'_> {
    fn progress(&self) -> Progress {
        Progress::new(
            self.served,
            self.loader.items.len(),
            Some("windows".to_string()),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Corpus;

    fn text() -> Arc<Text> {
        let bytes = (0..5_000u32).map(|i| (i * i % 249) as u8).collect();
        Arc::new(
            Text::split(
                Corpus {
                    source: "t".into(),
                    files: 1,
                    bytes,
                },
                16,
            )
            .unwrap(),
        )
    }

    fn epoch(loader: &dyn DataLoader<Batch>) -> Vec<Vec<i64>> {
        loader
            .iter()
            .map(|batch| batch.unwrap().inputs.try_into_vec_as::<i64>().unwrap())
            .collect()
    }

    #[test]
    fn targets_are_the_inputs_one_byte_later() {
        let text = text();
        let batch = Batch::new(&text, &[0, 7], &Device::flex());
        assert_eq!(batch.inputs.dims(), [2, 16]);
        let inputs = batch.inputs.try_into_vec_as::<i64>().unwrap();
        let targets = batch.targets.try_into_vec_as::<i64>().unwrap();
        assert_eq!(inputs[1..16], targets[..15]);
        assert_eq!(inputs[17..], targets[16..31]);
        assert_eq!(targets[31], i64::from(text.window(7)[16]));
    }

    #[test]
    fn a_resumed_loader_goes_on_where_the_first_one_stopped() {
        let device = Device::flex();
        let whole = WindowLoader::train(text(), 3, 4, 9, 0, &device);
        let (first, second) = (epoch(&whole), epoch(&whole));
        assert_eq!(first.len(), 4);
        assert_ne!(first, second);
        let resumed = WindowLoader::train(text(), 3, 4, 9, 1, &device);
        assert_eq!(epoch(&resumed), second);
        assert_ne!(
            epoch(&WindowLoader::train(text(), 3, 4, 10, 0, &device)),
            first
        );
    }

    #[test]
    fn slices_partition_an_epoch() {
        let device = Device::flex();
        let loader = WindowLoader::train(text(), 2, 3, 1, 0, &device);
        let halves = [loader.slice(0, 2), loader.slice(2, 6)];
        let parts: Vec<_> = halves
            .iter()
            .flat_map(|half| epoch(half.as_ref()))
            .collect();
        assert_eq!(parts, epoch(&loader));
    }

    #[test]
    fn validation_serves_the_same_whole_batches_every_epoch() {
        let loader = WindowLoader::valid(text(), 4, 11, &Device::flex());
        assert_eq!(loader.num_items(), 8);
        let first = epoch(&loader);
        assert!(first.iter().all(|batch| batch.len() == 4 * 16));
        assert_eq!(first, epoch(&loader));
        assert_eq!(loader.times().lock().unwrap().len(), 2);
    }
}
