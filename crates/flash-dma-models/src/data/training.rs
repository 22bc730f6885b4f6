//! The loader of Burn's training loop (feature `train`).

use super::batch::Batch;
use super::error::DataError;
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
/// a checkpoint needs beside Burn's own, and [`Loader::resume`] takes it. Burn itself resumes behind its last checkpoint,
/// which is where [`begin`](Self::begin) goes.
///
/// Burn validates and keeps checkpoints between the iterators. With [`with_parts`](Self::with_parts) each of them
/// serves a part of an epoch.
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
    /// The parts of an epoch.
    parts: usize,
    device: Device,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    /// The part that is served, counted over all epochs.
    part: usize,
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
            state: Arc::new(Mutex::new(Place { part: epoch, batch })),
            places,
            parts: 1,
            device,
        }
    }

    /// The loader with every epoch divided into so many parts, whose numbers of batches differ by 1 at most. An iterator
    /// serves one part, or what is left of it, so Burn validates and keeps a checkpoint after each, and its `num_epochs`
    /// counts parts. Gradients that Burn accumulates do not reach from one part into the next.
    ///
    /// # Errors
    ///
    /// [`DataError::Parts`] if there are none, or more of them than batches.
    pub fn with_parts(self, parts: usize) -> Result<Self, DataError> {
        let batches = self.batches();
        if !(1..=batches).contains(&parts) {
            return Err(DataError::Parts { parts, batches });
        }
        let LoaderState { epoch, batch, .. } = self.state();
        let mut divided = Self { parts, ..self };
        let of_epoch = (0..parts).find(|&part| divided.end(part) > batch);
        let part = epoch * parts + of_epoch.unwrap_or(0);
        divided.state = Arc::new(Mutex::new(Place { part, batch }));
        Ok(divided)
    }

    /// Goes to the beginning of a part, counted from 0 over all epochs: behind Burn's checkpoint of this number.
    pub fn begin(&self, part: usize) {
        *self.place() = self.beginning(part);
    }

    /// Where the loader stands: behind the last batch that has been served.
    #[must_use]
    pub fn state(&self) -> LoaderState {
        let Place { part, batch } = *self.place();
        let mut state = self.loader.state();
        (state.epoch, state.batch) = (part / self.parts, batch);
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

    /// The batches of an epoch up to the end of one of its parts.
    fn end(&self, part: usize) -> usize {
        (part % self.parts + 1) * self.batches() / self.parts
    }

    /// Where a part begins.
    fn beginning(&self, part: usize) -> Place {
        let batch = part % self.parts * self.batches() / self.parts;
        Place { part, batch }
    }
}

impl DataLoader<Batch> for EpochLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        let Place { part, .. } = *self.place();
        Box::new(Part { loader: self, part })
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
        let part = self.place().part / self.parts * self.parts;
        let places = self.places.start + start..self.places.start + end;
        Arc::new(Self {
            state: Arc::new(Mutex::new(Place { part, batch: 0 })),
            places,
            ..self.clone()
        })
    }
}

/// The rest of a part of an epoch.
struct Part<'a> {
    loader: &'a EpochLoader,
    part: usize,
}

impl Iterator for Part<'_> {
    type Item = Result<Batch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let EpochLoader {
            loader,
            places,
            parts,
            device,
            ..
        } = self.loader;
        let mut place = self.loader.place();
        if place.part != self.part {
            return None;
        }
        let end = self.loader.end(self.part);
        // A slice may have fewer batches than parts.
        if place.batch >= end {
            *place = self.loader.beginning(self.part + 1);
            return None;
        }
        let size = self.loader.batch_size();
        let first = places.start + place.batch * size;
        let of_batch = first..(first + size).min(places.end);
        let batch = loader.at(self.part / parts, of_batch, device);
        if batch.is_ok() {
            place.batch += 1;
            if place.batch >= end {
                *place = self.loader.beginning(self.part + 1);
            }
        }
        Some(batch.map_err(DatasetError::new))
    }
}

impl DataLoaderIterator<Batch> for Part<'_> {
    /// In rows of the epoch, of which the part is not the first.
    fn progress(&self) -> Progress {
        let place = *self.loader.place();
        let all = self.loader.places.len();
        let batches = if place.part == self.part {
            place.batch
        } else {
            self.loader.end(self.part)
        };
        let served = (batches * self.loader.batch_size()).min(all);
        Progress::new(served, all, Some("rows".to_owned()))
    }
}
