//! The loader of Burn's training loop (feature `train`).

use super::batch::Batch;
use super::loader::{Loader, LoaderState};
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A [`Loader`] as what Burn's training loop takes: each iterator serves one epoch, or what is left of the one in which
/// the loader stands. Validation wants the same rows every time: [`Order::File`](super::Order::File).
///
/// Clones, and what Burn makes of it for another device, share the place. Keep one: its [`state`](Self::state) is what
/// a checkpoint needs beside Burn's own, and [`Loader::resume`] takes it. Burn itself resumes at an epoch's beginning,
/// which is [`Loader::begin`] with the number of epochs that are done.
///
/// For several devices Burn slices a loader. A slice has a place of its own and begins at the epoch's beginning; its
/// last batch may be smaller.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::data::dataloader::DataLoader;
/// use burn::tensor::Device;
/// use flash_dma_models::data::{Batching, EpochLoader, Loader, PackedRows, TokenFileWriter};
/// use std::sync::Arc;
///
/// let path = std::env::temp_dir().join("flash-dma-epochs-example.tokens");
/// let mut writer = TokenFileWriter::create(&path, 256).unwrap();
/// writer.push(&(0..100).collect::<Vec<u32>>()).unwrap();
/// let rows = PackedRows::new(Arc::new(writer.finish().unwrap()), 8).unwrap();
/// let loader = Loader::new(rows, Batching::new(4).shuffled(7), &Device::flex()).unwrap();
///
/// // `SupervisedTraining::new(dir, Arc::new(train.clone()), Arc::new(valid))`
/// let train = EpochLoader::new(loader);
/// assert_eq!(train.iter().count(), 3);
/// assert_eq!(train.state().epoch, 1);
/// # drop(train);
/// # std::fs::remove_file(&path).unwrap();
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct EpochLoader {
    loader: Loader,
    /// Where the next batch stands.
    state: Arc<Mutex<Place>>,
    /// The places of an epoch's order that are served.
    places: Range<usize>,
    device: Device,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    epoch: usize,
    /// The batches of the epoch that have been served.
    batch: usize,
}

impl EpochLoader {
    /// Serves the batches that the loader would serve, from where it stands.
    #[must_use]
    pub fn new(loader: Loader) -> Self {
        let LoaderState { epoch, batch, .. } = loader.state();
        let places = 0..loader.served();
        let device = loader.device().clone();
        Self {
            loader,
            state: Arc::new(Mutex::new(Place { epoch, batch })),
            places,
            device,
        }
    }

    /// Where the loader stands: behind the last batch that has been served.
    #[must_use]
    pub fn state(&self) -> LoaderState {
        let Place { epoch, batch } = *self.place();
        let mut state = self.loader.state();
        (state.epoch, state.batch) = (epoch, batch);
        state
    }

    fn place(&self) -> MutexGuard<'_, Place> {
        // A place is written as a whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn batch_size(&self) -> usize {
        self.loader.batching().batch
    }

    fn batches(&self) -> usize {
        self.places.len().div_ceil(self.batch_size())
    }
}

impl DataLoader<Batch> for EpochLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        let Place { epoch, .. } = *self.place();
        Box::new(Epoch {
            loader: self,
            epoch,
        })
    }

    fn num_items(&self) -> usize {
        self.places.len()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        Arc::new(Self {
            device: device.clone(),
            ..self.clone()
        })
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Batch>> {
        let Place { epoch, .. } = *self.place();
        let places = self.places.start + start..self.places.start + end;
        Arc::new(Self {
            state: Arc::new(Mutex::new(Place { epoch, batch: 0 })),
            places,
            ..self.clone()
        })
    }
}

/// The rest of an epoch.
struct Epoch<'a> {
    loader: &'a EpochLoader,
    epoch: usize,
}

impl Iterator for Epoch<'_> {
    type Item = Result<Batch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let EpochLoader {
            loader,
            places,
            device,
            ..
        } = self.loader;
        let mut place = self.loader.place();
        if place.epoch != self.epoch || places.is_empty() {
            return None;
        }
        let size = self.loader.batch_size();
        let first = places.start + place.batch * size;
        let of_batch = first..(first + size).min(places.end);
        let batch = loader.at(self.epoch, of_batch, device);
        if batch.is_ok() {
            place.batch += 1;
            if place.batch >= self.loader.batches() {
                *place = Place {
                    epoch: self.epoch + 1,
                    batch: 0,
                };
            }
        }
        Some(batch.map_err(DatasetError::new))
    }
}

impl DataLoaderIterator<Batch> for Epoch<'_> {
    fn progress(&self) -> Progress {
        let place = *self.loader.place();
        let all = self.loader.places.len();
        let served = if place.epoch == self.epoch {
            (place.batch * self.loader.batch_size()).min(all)
        } else {
            all
        };
        Progress::new(served, all, Some("rows".to_owned()))
    }
}
