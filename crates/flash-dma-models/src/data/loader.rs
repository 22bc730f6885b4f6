//! Shuffled batches in a resumable order.

use super::batch::Batch;
use super::error::DataError;
use super::rows::{PackedRows, Row};
use super::state::LoaderState;
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::transform::ShuffledDataset;
use burn::data::dataset::{Dataset, DatasetError};
use burn::tensor::Device;
use rand::rngs::ChaCha8Rng;
use rand::{Rng, SeedableRng};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Shuffled batches of packed rows for a training loop, Burn's or your own: each iterator serves one epoch, or the
/// rest of the current one. All batches have one shape: rows that do not fill one are left out, different ones in
/// every epoch.
///
/// The order is Burn's [`ShuffledDataset`] by the seed and the number of the epoch; it takes 8 bytes a row. The
/// batches depend only on the token file, the length of a row, the size of a batch and the seed, so a loader that
/// [resumes](Self::resume) from a saved [state](Self::state), even in the middle of an epoch, continues with the
/// batches of one that never stopped. For rows in file order, once, use Burn's loader with
/// [`RowBatcher`](super::RowBatcher).
///
/// Clones, and copies that Burn makes for another device, share the position. Burn itself resumes after its last
/// checkpoint: move there with [`begin`](Self::begin). It validates and keeps checkpoints between iterators:
/// [`with_parts`](Self::with_parts) makes each serve a part of an epoch.
///
/// For several devices Burn slices a loader. A slice has some rows of *every* batch, so all devices take as many steps
/// (Burn's `ddp` would wait for ever otherwise), of the batches of a single device. Their [means](Batch::mean) add up to
/// that of the whole batch, and their gradients to its gradient: reduce by `ReduceOperation::Sum`. A slice has its own
/// position, initially that of the loader.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::data::dataloader::DataLoader;
/// use burn::tensor::Device;
/// use flash_dma_models::data::{Loader, LoaderState, PackedRows, TokenFileWriter};
/// use std::sync::Arc;
///
/// let path = std::env::temp_dir().join("flash-dma-loader-example.tokens");
/// let mut writer = TokenFileWriter::create(&path, 256).unwrap();
/// writer.push(&(0..100).collect::<Vec<u32>>()).unwrap();
/// let rows = PackedRows::new(Arc::new(writer.finish().unwrap()), 8).unwrap();
///
/// // Batches of four rows by the seed 7: `SupervisedTraining::new(dir, Arc::new(train.clone()), valid)`
/// let train = Loader::new(rows.clone(), 4, 7, &Device::flex()).unwrap();
/// let mut epoch = train.iter();
/// assert_eq!(epoch.next().unwrap().unwrap().inputs.dims(), [4, 8]);
/// let saved = serde_json::to_string(&train.state()).unwrap();
/// assert_eq!(epoch.count(), 2);
///
/// let later = Loader::new(rows, 4, 7, &Device::flex()).unwrap();
/// later.resume(&serde_json::from_str::<LoaderState>(&saved).unwrap()).unwrap();
/// assert_eq!(later.iter().count(), 2);
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Loader {
    rows: PackedRows,
    batch: usize,
    seed: u64,
    device: Device,
    /// Batches of an epoch.
    batches: usize,
    /// Rows of each batch that are served.
    served: Range<usize>,
    parts: usize,
    /// Batches served, over all epochs.
    step: Arc<AtomicUsize>,
}

impl Loader {
    /// A loader of batches of `batch` rows, at the beginning of the first epoch.
    ///
    /// # Errors
    ///
    /// [`DataError::NoBatch`] if an epoch has none.
    pub fn new(
        rows: PackedRows,
        batch: usize,
        seed: u64,
        device: &Device,
    ) -> Result<Self, DataError> {
        let batches = rows.len().checked_div(batch).unwrap_or(0);
        if batches == 0 {
            let rows = rows.len();
            return Err(DataError::NoBatch { rows, batch });
        }
        Ok(Self {
            rows,
            batch,
            seed,
            device: device.clone(),
            batches,
            served: 0..batch,
            parts: 1,
            step: Arc::default(),
        })
    }

    /// Divides every epoch into parts, whose numbers of batches differ by at most 1. An iterator serves one part, or
    /// the rest of it, so Burn validates and keeps a checkpoint after each, and its `num_epochs` counts parts. Burn
    /// does not accumulate gradients across parts.
    ///
    /// # Errors
    ///
    /// [`DataError::Parts`] if there are none, or more of them than batches.
    pub fn with_parts(self, parts: usize) -> Result<Self, DataError> {
        let batches = self.batches;
        if !(1..=batches).contains(&parts) {
            return Err(DataError::Parts { parts, batches });
        }
        Ok(Self { parts, ..self })
    }

    /// Number of batches of an epoch.
    #[must_use]
    pub fn batches(&self) -> usize {
        self.batches
    }

    /// Position of the loader: after the last batch served.
    #[must_use]
    pub fn state(&self) -> LoaderState {
        LoaderState {
            step: self.step.load(Ordering::Relaxed),
            batch: self.batch,
            seed: self.seed,
            row_len: self.rows.row_len(),
            tokens: self.rows.tokens(),
            fingerprint: self.rows.file().fingerprint(),
        }
    }

    /// Moves to the position of another loader with the same file, row length, batches and seed.
    ///
    /// # Errors
    ///
    /// [`DataError::State`] if one of them differs: nothing has changed then.
    pub fn resume(&self, state: &LoaderState) -> Result<(), DataError> {
        let here = LoaderState {
            step: state.step,
            ..self.state()
        };
        if here != *state {
            let (saved, here) = (Box::new(state.clone()), Box::new(here));
            return Err(DataError::State { saved, here });
        }
        self.step.store(state.step, Ordering::Relaxed);
        Ok(())
    }

    /// Moves to the beginning of a part, counted from 0 over all epochs: after Burn's checkpoint of this number.
    pub fn begin(&self, part: usize) {
        let before = part.checked_sub(1).map_or(0, |before| self.end(before));
        self.step.store(before, Ordering::Relaxed);
    }

    fn epoch(&self) -> usize {
        let step = self.step.load(Ordering::Relaxed);
        step / self.batches
    }

    /// Number of batches up to the end of a part, counted from 0 over all epochs.
    fn end(&self, part: usize) -> usize {
        let (epoch, part) = (part / self.parts, part % self.parts);
        epoch * self.batches + (part + 1) * self.batches / self.parts
    }
}

impl DataLoader<Batch> for Loader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        let step = self.step.load(Ordering::Relaxed);
        let epoch = self.epoch();
        let part = (epoch * self.parts..).find(|&part| self.end(part) > step);
        let end = self.end(part.expect("the parts do not end"));
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(epoch as u64);
        let order = ShuffledDataset::new(self.rows.clone(), rng.next_u64());
        Box::new(Epoch {
            loader: self,
            order,
            first: epoch * self.batches,
            end,
        })
    }

    fn num_items(&self) -> usize {
        self.batches * self.served.len()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        let mut loader = self.clone();
        loader.device = device.clone();
        Arc::new(loader)
    }

    /// # Panics
    ///
    /// If the slice has no row of a batch: there are more devices than rows.
    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Batch>> {
        let row = |item: usize| self.served.start + item / self.batches;
        let mut slice = self.clone();
        slice.served = row(start)..row(end);
        let (devices, rows) = ("a device without a row of a batch", self.served.len());
        assert!(!slice.served.is_empty(), "{devices}: batches have {rows}");
        slice.step = Arc::new(AtomicUsize::new(self.step.load(Ordering::Relaxed)));
        Arc::new(slice)
    }
}

struct Epoch<'a> {
    loader: &'a Loader,
    order: ShuffledDataset<PackedRows, Row>,
    first: usize,
    /// Number of the part's last batch, plus one.
    end: usize,
}

impl Iterator for Epoch<'_> {
    type Item = Result<Batch, DatasetError>;

    /// The next batch. After an error the next call tries the same batch again.
    fn next(&mut self) -> Option<Self::Item> {
        let loader = self.loader;
        let step = loader.step.load(Ordering::Relaxed);
        // The loader may have been moved.
        if !(self.first..self.end).contains(&step) {
            return None;
        }
        let first = (step - self.first) * loader.batch;
        let rows = self.order.get_many((first..first + loader.batch).collect());
        Some(rows.map(|rows| {
            loader.step.store(step + 1, Ordering::Relaxed);
            Batch::part(&rows, loader.served.clone(), &loader.device)
        }))
    }
}

impl DataLoaderIterator<Batch> for Epoch<'_> {
    /// In rows of the epoch, since the part may not be the first.
    fn progress(&self) -> Progress {
        let (loader, step) = (self.loader, self.loader.step.load(Ordering::Relaxed));
        let batches = step.clamp(self.first, self.end) - self.first;
        let served = batches * loader.served.len();
        Progress::new(served, loader.num_items(), Some("rows".to_owned()))
    }
}
