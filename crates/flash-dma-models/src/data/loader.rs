//! Batches in an order that can be taken up again.

use super::batch::Batch;
use super::error::DataError;
use super::permutation::Permutation;
use super::rows::{PackedRows, Row};
use burn::tensor::Device;
use serde::{Deserialize, Serialize};
use std::fmt::Debug;

/// In which order rows are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// That of the file, in every epoch.
    File,
    /// Every epoch another one, which depends on the seed, the epoch's number and the number of rows alone.
    Shuffled {
        /// The seed.
        seed: u64,
    },
}

/// What happens to the rows of an epoch that do not fill a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Remainder {
    /// They are left out, so all batches have one shape. In a shuffled order they are others in every epoch.
    #[default]
    Dropped,
    /// They are a smaller batch, the epoch's last.
    Smaller,
}

/// How a [`Loader`] makes batches of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batching {
    /// The rows of a batch.
    pub batch: usize,
    /// The order of the rows.
    pub order: Order,
    /// What happens to the rest of an epoch.
    pub remainder: Remainder,
}

impl Batching {
    /// Batches of so many rows, in the file's order, without the rest.
    #[must_use]
    pub fn new(batch: usize) -> Self {
        Self {
            batch,
            order: Order::File,
            remainder: Remainder::default(),
        }
    }

    /// Shuffles by a seed.
    #[must_use]
    pub fn shuffled(mut self, seed: u64) -> Self {
        self.order = Order::Shuffled { seed };
        self
    }

    /// What happens to the rest of an epoch.
    #[must_use]
    pub fn with_remainder(mut self, remainder: Remainder) -> Self {
        self.remainder = remainder;
        self
    }
}

/// Where a [`Loader`] stands, and what its batches depend on. A checkpoint keeps it beside the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// The epoch of the next batch, counted from 0.
    pub epoch: usize,
    /// The number of the next batch in its epoch.
    pub batch: usize,
    batching: Batching,
    row_len: usize,
    first_token: usize,
    end_token: usize,
    fingerprint: u64,
}

/// The batches of one epoch after the other, without an end. How many there are in an epoch says
/// [`batches`](Self::batches).
///
/// The batches depend on the token file, the length of a row and the [`Batching`] alone. So a loader that
/// [resumes](Self::resume) from a saved state goes on with the same batches as one that was never stopped, also in the
/// middle of an epoch. Its memory does not grow with the file.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use flash_dma_models::data::{Batching, Loader, LoaderState, PackedRows, TokenFileWriter};
/// use std::sync::Arc;
///
/// let path = std::env::temp_dir().join("flash-dma-loader-example.tokens");
/// let mut writer = TokenFileWriter::create(&path, 256).unwrap();
/// writer.push(&(0..100).collect::<Vec<u32>>()).unwrap();
/// let rows = PackedRows::new(Arc::new(writer.finish().unwrap()), 8).unwrap();
///
/// let (batching, device) = (Batching::new(4).shuffled(7), Device::flex());
/// let mut loader = Loader::new(rows.clone(), batching, &device).unwrap();
/// assert_eq!(loader.batches(), 3);
/// let first = loader.next().unwrap().unwrap();
/// assert_eq!(first.inputs.dims(), [4, 8]);
/// let saved = serde_json::to_string(&loader.state()).unwrap();
/// let second = loader.next().unwrap().unwrap();
///
/// let mut later = Loader::new(rows, batching, &device).unwrap();
/// later.resume(&serde_json::from_str::<LoaderState>(&saved).unwrap()).unwrap();
/// let again = later.next().unwrap().unwrap();
/// again.inputs.into_data().assert_eq(&second.inputs.into_data(), true);
/// # drop((loader, later));
/// # std::fs::remove_file(&path).unwrap();
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Loader {
    rows: PackedRows,
    device: Device,
    state: LoaderState,
}

impl Loader {
    /// A loader at the beginning of the first epoch.
    ///
    /// # Errors
    ///
    /// [`DataError::Zero`], or [`DataError::NoBatch`] if an epoch has none.
    pub fn new(rows: PackedRows, batching: Batching, device: &Device) -> Result<Self, DataError> {
        if batching.batch == 0 {
            let what = "the number of rows of a batch";
            return Err(DataError::Zero { what });
        }
        let state = LoaderState {
            epoch: 0,
            batch: 0,
            batching,
            row_len: rows.row_len(),
            first_token: rows.tokens().start,
            end_token: rows.tokens().end,
            fingerprint: rows.file().fingerprint(),
        };
        let loader = Self {
            rows,
            device: device.clone(),
            state,
        };
        if loader.batches() == 0 {
            return Err(DataError::NoBatch {
                rows: loader.rows.rows(),
                batch: batching.batch,
            });
        }
        Ok(loader)
    }

    /// Where the loader stands: what [`resume`](Self::resume) takes to go on with the batch that comes next.
    #[must_use]
    pub fn state(&self) -> LoaderState {
        self.state.clone()
    }

    /// Goes to where another loader of the same file, row length and batching stood.
    ///
    /// # Errors
    ///
    /// [`DataError::State`] if one of them differs: nothing has changed then.
    pub fn resume(&mut self, state: &LoaderState) -> Result<(), DataError> {
        let (old, new) = (state, &self.state);
        let (then, now) = (old.batching, new.batching);
        same("the file", &old.fingerprint, &new.fingerprint)?;
        let tokens = |state: &LoaderState| state.first_token..state.end_token;
        same("the range of tokens", &tokens(old), &tokens(new))?;
        same("the length of a row", &old.row_len, &new.row_len)?;
        same("the number of rows of a batch", &then.batch, &now.batch)?;
        same("the order", &then.order, &now.order)?;
        same("the remainder", &then.remainder, &now.remainder)?;
        // Where all else is the same, only a changed state is beyond its epoch.
        let batches = self.batches();
        if old.batch >= batches {
            return Err(DataError::State {
                what: "the batch in its epoch",
                saved: old.batch.to_string(),
                here: format!("one of {batches}"),
            });
        }
        self.state = state.clone();
        Ok(())
    }

    /// Goes to the beginning of an epoch, counted from 0.
    pub fn begin(&mut self, epoch: usize) {
        self.state.epoch = epoch;
        self.state.batch = 0;
    }

    /// The batches of an epoch.
    #[must_use]
    pub fn batches(&self) -> usize {
        let Batching {
            batch, remainder, ..
        } = self.state.batching;
        match remainder {
            Remainder::Dropped => self.rows.rows() / batch,
            Remainder::Smaller => self.rows.rows().div_ceil(batch),
        }
    }

    /// The rows of an epoch, without those that are left out.
    #[must_use]
    pub fn served(&self) -> usize {
        self.rows
            .rows()
            .min(self.batches() * self.state.batching.batch)
    }

    /// What the batches are made of.
    #[must_use]
    pub fn rows(&self) -> &PackedRows {
        &self.rows
    }

    /// How the batches are made.
    #[must_use]
    pub fn batching(&self) -> Batching {
        self.state.batching
    }

    /// The device of the batches.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The rows at these places of an epoch's order, as one batch on a device.
    pub(super) fn at(
        &self,
        epoch: usize,
        places: impl Iterator<Item = usize>,
        device: &Device,
    ) -> Result<Batch, DataError> {
        let order = match self.state.batching.order {
            Order::File => None,
            Order::Shuffled { seed } => {
                Some(Permutation::new(self.rows.rows(), seed, epoch as u64))
            }
        };
        let row = |place| {
            self.rows
                .row(order.as_ref().map_or(place, |order| order.at(place)))
        };
        let rows: Vec<Row> = places.map(row).collect::<Result<_, _>>()?;
        Ok(Batch::new(&rows, device))
    }
}

impl Iterator for Loader {
    type Item = Result<Batch, DataError>;

    /// The next batch; never `None`. After an error the next call tries the same batch again.
    fn next(&mut self) -> Option<Self::Item> {
        let size = self.state.batching.batch;
        let first = self.state.batch * size;
        let places = first..(first + size).min(self.served());
        let batch = self.at(self.state.epoch, places, &self.device);
        if batch.is_ok() {
            self.state.batch += 1;
            if self.state.batch == self.batches() {
                self.begin(self.state.epoch + 1);
            }
        }
        Some(batch)
    }
}

/// Refuses a state that differs.
fn same<T: PartialEq + Debug>(what: &'static str, saved: &T, here: &T) -> Result<(), DataError> {
    if saved == here {
        Ok(())
    } else {
        Err(DataError::State {
            what,
            saved: format!("{saved:?}"),
            here: format!("{here:?}"),
        })
    }
}
