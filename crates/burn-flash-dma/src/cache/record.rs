//! Saving and restoring a cache, as a serde value or a Burn record.

use super::config::{DynamicMaskCacheConfig, PagedCacheConfig};
use super::paged::PagedCache;
use super::pool::PagePool;
use super::slots::{DynamicMaskCache, State};
use super::tokens::{Rows, check_support};
use crate::validate::expect;
use burn::module::{Module, Param};
use burn::store::ModuleRecord;
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use flash_dma_problem::{AttentionError, ScoreRole};
use serde::{Deserialize, Serialize};

/// A saved [`DynamicMaskCache`] for any serde format.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DynamicMaskCacheRecord {
    config: DynamicMaskCacheConfig,
    k: TensorData,
    v: TensorData,
    score: TensorData,
    position: TensorData,
    seen: TensorData,
}

/// A saved [`PagedCache`] for any serde format. A shared page is saved once, and a cache with an external table gives
/// out its pages itself when it is restored.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PagedCacheRecord {
    config: PagedCacheConfig,
    pages: usize,
    table: Vec<Vec<i32>>,
    lengths: Vec<usize>,
    /// See [`PagedCache`].
    dropped: Vec<usize>,
    k: TensorData,
    v: TensorData,
    scores: Option<TensorData>,
}

/// Tensors of slots as parameters, which Burn's record takes.
#[derive(Module, Debug)]
struct SlotParams {
    k: Param<Tensor<4>>,
    v: Param<Tensor<4>>,
    score: Param<Tensor<3>>,
    position: Param<Tensor<3, Int>>,
    seen: Param<Tensor<1, Int>>,
}

impl From<State> for SlotParams {
    fn from(state: State) -> Self {
        Self {
            k: Param::from_tensor(state.k),
            v: Param::from_tensor(state.v),
            score: Param::from_tensor(state.score),
            position: int_param(state.position),
            seen: int_param(state.seen),
        }
    }
}

impl DynamicMaskCache {
    /// Saves the whole cache. Waits for the device.
    ///
    /// # Panics
    ///
    /// If the device fails, or [`try_to_record_sync`](Self::try_to_record_sync) returns an error, with that error's
    /// text.
    #[must_use]
    pub fn to_record_sync(&self) -> DynamicMaskCacheRecord {
        expect(self.try_to_record_sync())
    }

    /// Like [`to_record_sync`](Self::to_record_sync), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::TokensWait`] if tokens wait.
    ///
    /// # Panics
    ///
    /// If the device fails.
    pub fn try_to_record_sync(&self) -> Result<DynamicMaskCacheRecord, AttentionError> {
        self.hold.check()?;
        let state = self.state().clone();
        Ok(DynamicMaskCacheRecord {
            config: self.config(),
            k: state.k.into_data(),
            v: state.v.into_data(),
            score: state.score.into_data(),
            position: state.position.into_data(),
            seen: state.seen.into_data(),
        })
    }

    /// Restores a saved cache on a device.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Record`] if the record's parts do not fit each other, or those of
    /// [`try_new`](Self::try_new).
    pub fn try_from_record(
        record: DynamicMaskCacheRecord,
        device: &Device,
    ) -> Result<Self, AttentionError> {
        // Before a damaged configuration decides how much memory is allocated.
        let kv = record.config.shape()?.kv_shape();
        check("k", &record.k, &kv, record.config.dtype.into())?;
        let empty = Self::try_new(&record.config, device)?;
        let (dtype, device) = (DType::from(record.config.dtype), empty.device());
        let slots = empty.state();
        let (words, ints) = (DType::F32, DType::I32);
        check("seen", &record.seen, &slots.seen.dims(), ints)?;
        let lengths: Vec<i32> = record.seen.iter::<i32>().collect();
        let state = State {
            k: tensor("k", record.k, slots.k.dims(), dtype, device)?,
            v: tensor("v", record.v, slots.v.dims(), dtype, device)?,
            score: tensor("score", record.score, slots.score.dims(), words, device)?,
            position: tensor(
                "position",
                record.position,
                slots.position.dims(),
                ints,
                device,
            )?,
            seen: tensor("seen", record.seen, slots.seen.dims(), ints, device)?,
        };
        empty.with_state(state, &lengths)
    }

    twin! {
        /// Contents of the cache, without its configuration, as a Burn record to be saved with a model's. Waits for
        /// the device.
        pub fn to_module_record_sync(&self) -> ModuleRecord = Self::try_to_module_record_sync;
    }

    /// Like [`to_module_record_sync`](Self::to_module_record_sync), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::TokensWait`] if tokens wait.
    pub fn try_to_module_record_sync(&self) -> Result<ModuleRecord, AttentionError> {
        self.hold.check()?;
        Ok(SlotParams::from(self.state().clone()).into_record())
    }

    /// This cache with the contents of a record made from one of the same configuration. Waits for the device.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Record`] if the record does not fit.
    pub fn try_load_module_record_sync(
        &self,
        record: ModuleRecord,
    ) -> Result<Self, AttentionError> {
        let own = self.state();
        let loaded = SlotParams::from(own.clone())
            .try_load_record(record)
            .map_err(|error| unfit(error.to_string()))?;
        let state = State {
            k: loaded.k.val().set_require_grad(false),
            v: loaded.v.val().set_require_grad(false),
            score: loaded.score.val().set_require_grad(false),
            position: loaded.position.val(),
            seen: loaded.seen.val(),
        };
        let like = |a: &Tensor<4>, b: &Tensor<4>| a.dtype() == b.dtype() && a.dims() == b.dims();
        let scores = state.score.dtype() == DType::F32 && state.score.dims() == own.score.dims();
        let fits = [
            ("k", like(&state.k, &own.k)),
            ("v", like(&state.v, &own.v)),
            ("score", scores),
            ("position", state.position.dims() == own.position.dims()),
            ("seen", state.seen.dims() == own.seen.dims()),
        ];
        match fits.iter().find(|(_, fits)| !fits) {
            Some((name, _)) => Err(unfit(format!("{name} has another shape or type"))),
            None => {
                let seen = state.seen.clone().into_data_as::<i32>();
                self.with_state(state, &seen.iter::<i32>().collect::<Vec<_>>())
            }
        }
    }

    fn config(&self) -> DynamicMaskCacheConfig {
        let shape = self.shape();
        let dtype = self.state().k.dtype().into();
        // Zero as a configuration without the field.
        let some = |keys: usize| (keys > 0).then_some(keys);
        let rule = self.rule();
        DynamicMaskCacheConfig::new(shape.batch, shape.kv_heads, shape.head_dim, self.options())
            .with_recent(some(rule.recent))
            .with_sinks(some(rule.sinks))
            .with_score_role(Some(self.score_role()).filter(|&role| role != ScoreRole::default()))
            .with_dtype(dtype)
    }

    fn with_state(&self, state: State, seen: &[i32]) -> Result<Self, AttentionError> {
        let lengths: Result<_, _> = seen.iter().map(|&n| usize::try_from(n)).collect();
        let lengths = lengths.map_err(|_| unfit("a sequence has a negative length".into()))?;
        Ok(self.restored(*self.shape(), state, lengths))
    }
}

impl PagedCache {
    /// Saves the whole cache. Waits for the device.
    ///
    /// # Panics
    ///
    /// If the device fails, or [`try_to_record_sync`](Self::try_to_record_sync) returns an error, with that error's
    /// text.
    #[must_use]
    pub fn to_record_sync(&self) -> PagedCacheRecord {
        expect(self.try_to_record_sync())
    }

    /// Like [`to_record_sync`](Self::to_record_sync), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::TokensWait`] if tokens wait.
    ///
    /// # Panics
    ///
    /// If the device fails.
    pub fn try_to_record_sync(&self) -> Result<PagedCacheRecord, AttentionError> {
        self.hold.check()?;
        let state = self.state();
        // An external table has room for more tokens.
        let used =
            |(row, held): (&Vec<i32>, usize)| row[..held.div_ceil(self.config().page_len)].to_vec();
        let rows = self.pool().table.iter().zip(self.held());
        Ok(PagedCacheRecord {
            config: self.config().clone(),
            pages: self.pool().pages(),
            table: rows.map(used).collect(),
            lengths: self.lengths().to_vec(),
            dropped: self.dropped.clone(),
            k: state.rows.k.clone().into_data(),
            v: state.rows.v.clone().into_data(),
            scores: state.rows.scores.clone().map(Tensor::into_data),
        })
    }

    /// Restores a saved cache on a device.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Record`] if the record's parts do not fit each other, or those of
    /// [`try_new`](Self::try_new).
    pub fn try_from_record(
        record: PagedCacheRecord,
        device: &Device,
    ) -> Result<Self, AttentionError> {
        let config = record.config;
        let shape = config.shape(record.pages)?;
        check_support(device, config.dtype)?;
        let place = device.clone().without_autodiff();
        let (kv, dtype) = (shape.kv_shape(), DType::from(config.dtype));
        let k = tensor("k", record.k, kv, dtype, &place)?;
        let v = tensor("v", record.v, kv, dtype, &place)?;
        let scores = match (record.scores, config.scored) {
            (None, false) => None,
            (Some(data), true) => {
                let [pages, heads, page_len, _] = kv;
                let shape = [pages, heads, page_len];
                Some(tensor("scores", data, shape, DType::F32, &place)?)
            }
            _ => {
                let reason = "scores are given exactly if the cache has them";
                return Err(unfit(reason.into()));
            }
        };
        let (lengths, dropped) = (record.lengths, record.dropped);
        check_table(&config, record.pages, &record.table, &lengths, &dropped)?;
        let pool = PagePool::restored(config.page_len, record.pages, record.table);
        let (rows, tokens) = (Rows { k, v, scores }, [lengths, dropped]);
        Ok(Self::restored(config, shape, &place, rows, pool, tokens))
    }
}

/// Checks that every sequence has exactly the pages of its tokens. A page may belong to several sequences with a
/// common prefix, but at the same index in all.
fn check_table(
    config: &PagedCacheConfig,
    pages: usize,
    table: &[Vec<i32>],
    lengths: &[usize],
    dropped: &[usize],
) -> Result<(), AttentionError> {
    let batch = config.batch;
    if [table.len(), lengths.len(), dropped.len()] != [batch; 3] {
        return Err(unfit(format!("{} sequences are not {batch}", table.len())));
    }
    let mut places = vec![None; pages];
    for (row, (&length, &dropped)) in table.iter().zip(lengths.iter().zip(dropped)) {
        let unseen = (length + 1).saturating_sub(config.window.unwrap_or(usize::MAX));
        if dropped > unseen || !dropped.is_multiple_of(config.page_len) {
            return Err(unfit(format!("{dropped} of {length} tokens are dropped")));
        }
        let held = length - dropped;
        if row.len() != held.div_ceil(config.page_len) || row.len() > config.max_pages() {
            return Err(unfit(format!("{} pages for {held} tokens", row.len())));
        }
        for (index, &page) in row.iter().enumerate() {
            let own = dropped / config.page_len + index;
            let page = usize::try_from(page).unwrap_or(usize::MAX);
            let place = places.get_mut(page).map(|place| *place.get_or_insert(own));
            if place != Some(own) {
                return Err(unfit("a page is missing or has two places".into()));
            }
        }
    }
    Ok(())
}

fn tensor<const D: usize, K: Basic>(
    name: &str,
    data: TensorData,
    shape: [usize; D],
    dtype: DType,
    device: &Device,
) -> Result<Tensor<D, K>, AttentionError> {
    check(name, &data, &shape, dtype)?;
    Ok(Tensor::from_data(data, (device, dtype)))
}

fn check(
    name: &str,
    data: &TensorData,
    shape: &[usize],
    dtype: DType,
) -> Result<(), AttentionError> {
    let (actual, element) = (data.shape().to_vec(), data.dtype());
    if actual == shape && element == dtype {
        return Ok(());
    }
    Err(unfit(format!(
        "{name} is {actual:?} of {element:?}, not {shape:?} of {dtype:?}"
    )))
}

fn int_param<const D: usize>(tensor: Tensor<D, Int>) -> Param<Tensor<D, Int>> {
    Param::initialized(burn::module::ParamId::new(), tensor)
}

fn unfit(reason: String) -> AttentionError {
    AttentionError::Record { reason }
}
