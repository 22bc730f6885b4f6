//! The cache that keeps every key.

use super::config::PagedCacheConfig;
use super::hold::Hold;
use super::pool::PagePool;
use super::tokens::{NewTokens, check_support, plain};
use crate::fallback::cache::attend_pages;
use crate::ops::cache::CacheOps;
use crate::ops::types::{OptionalFloat, PageMap, PageTensors};
use crate::validate::expect;
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use flash_dma_problem::{
    AppendProblem, Appending, AttentionError, CacheShape, MAX_DECODE_TOKENS, TensorName,
};

/// Every key and value that each sequence has been given, in pages of `page_len` tokens of a common pool: for
/// attention without scores, and for scores without a window.
///
/// A sequence takes a page when its tokens need one and gives all back when it is reset, so sequences of
/// different lengths share the pool. The pool is taken up front ([`PagedCacheConfig::pages`]) or grows by whole
/// blocks of pages ([`PagedCacheConfig::grow_by`]).
#[derive(Clone, Debug)]
pub struct PagedCache {
    pub(super) config: PagedCacheConfig,
    pub(super) shape: CacheShape,
    pub(super) device: Device,
    /// The number of tokens that each sequence holds: the host's copy of the device's `lengths`.
    pub(super) lengths: Vec<usize>,
    pub(super) pool: PagePool,
    /// Absent only while an operation has it.
    pub(super) state: Option<State>,
    pub(super) hold: Hold,
}

/// See [`PageTensors`].
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) k: Tensor<4>,
    pub(crate) v: Tensor<4>,
    pub(crate) scores: Option<Tensor<3>>,
    pub(super) table: Tensor<2, Int>,
    pub(super) lengths: Tensor<1, Int>,
}

/// The contents of a pool, and the pages that each sequence owns.
pub(crate) struct Contents {
    pub(crate) k: Tensor<4>,
    pub(crate) v: Tensor<4>,
    pub(crate) scores: Option<Tensor<3>>,
    pub(crate) pool: PagePool,
    /// The tokens that each sequence holds.
    pub(crate) lengths: Vec<usize>,
}

impl PagedCache {
    /// An empty cache.
    ///
    /// # Panics
    ///
    /// If [`try_new`](Self::try_new) returns an error, with that error's text.
    #[must_use]
    pub fn new(config: &PagedCacheConfig, device: &Device) -> Self {
        expect(Self::try_new(config, device))
    }

    /// Like [`new`](Self::new), but returns the error.
    ///
    /// # Errors
    ///
    /// Those of [`PagedCacheConfig::try_init`].
    pub fn try_new(config: &PagedCacheConfig, device: &Device) -> Result<Self, AttentionError> {
        // A pool without pages would be a tensor without elements, on which backends differ.
        let pages = config.pages.max(1);
        let shape = config.shape(pages)?;
        check_support(device, config.dtype)?;
        let device = device.clone().without_autodiff();
        let lengths = vec![0; config.batch];
        let pool = PagePool::new(config.batch, config.page_len, pages);
        let rows = || Tensor::zeros(shape.kv_shape(), (&device, DType::from(config.dtype)));
        let [_, heads, page_len, _] = shape.kv_shape();
        let scores = config
            .scored
            .then(|| Tensor::zeros([pages, heads, page_len], (&device, DType::F32)));
        let (k, v) = (rows(), rows());
        let contents = Contents {
            k,
            v,
            scores,
            pool,
            lengths,
        };
        Ok(Self::restored(config.clone(), shape, &device, contents))
    }

    /// A cache of these contents, which are not checked.
    pub(crate) fn restored(
        config: PagedCacheConfig,
        shape: CacheShape,
        device: &Device,
        contents: Contents,
    ) -> Self {
        let state = State {
            k: contents.k,
            v: contents.v,
            scores: contents.scores,
            table: table_tensor(&contents.pool, config.max_pages(), device),
            lengths: lengths_tensor(&contents.lengths, device),
        };
        Self {
            config,
            shape,
            device: device.clone(),
            lengths: contents.lengths,
            pool: contents.pool,
            state: Some(state),
            hold: Hold::Off,
        }
    }

    /// Attends from new tokens to everything before them and to each other, and appends them. Shapes as in
    /// [`DynamicMaskCache::step`](super::DynamicMaskCache::step); `scores` are given exactly if the
    /// configuration says so.
    ///
    /// # Panics
    ///
    /// If [`try_step`](Self::try_step) returns an error, with that error's text.
    #[must_use]
    pub fn step(
        &mut self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        scores: Option<Tensor<3>>,
    ) -> Tensor<4> {
        expect(self.try_step(q, k, v, scores))
    }

    /// Like [`step`](Self::step), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the shapes, element types or devices do not fit the cache, a tensor is tracked by
    /// autodiff, a sequence would outgrow its row of the page table ([`AttentionError::PagesFull`]), the pool is used
    /// up and does not grow ([`AttentionError::PagesUsed`]), or tokens wait ([`AttentionError::TokensWait`]). The cache
    /// is unchanged then.
    pub fn try_step(
        &mut self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        scores: Option<Tensor<3>>,
    ) -> Result<Tensor<4>, AttentionError> {
        Ok(self.try_step_with_lse(q, k, v, scores)?.0)
    }

    /// The output of [`try_step`](Self::try_step), and the LSE of the logits: `[batch, q_heads, tokens]`, f32.
    ///
    /// # Errors
    ///
    /// Those of [`try_step`](Self::try_step).
    pub fn try_step_with_lse(
        &mut self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        scores: Option<Tensor<3>>,
    ) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
        self.hold.check()?;
        let element = self.shape.element;
        let new = NewTokens::new(&self.device, element, k, v, scores)?;
        let q = plain(&self.device, TensorName::Query, q, Some(element))?;
        new.decode_over(&self.shape, &q.dims(), self.held(), &self.config.options)?;
        let tokens = new.shape()[2];
        // Tokens that wait have their pages, too, so that accepting them needs no more.
        self.reserve(tokens)?;

        let map = self.map();
        // The pool may have grown.
        let problem = new.decode_over(&self.shape, &q.dims(), self.held(), &self.config.options)?;
        let problem = problem.with_appending(self.hold.appending());
        let lengths = match problem.appending {
            Appending::Now => None,
            Appending::Later => {
                self.hold = Hold::Tokens(Box::new(new.clone()));
                Some(self.state().lengths.clone())
            }
        };
        let (q, pages, new) = (q.into_dispatch(), self.take(), new.into_ops());
        let (out, lse, pages) = if tokens <= MAX_DECODE_TOKENS {
            let decoded = Dispatch::cache_decode_pages(q, pages, new, map, problem);
            (decoded.out, decoded.lse, decoded.pages)
        } else {
            let append = problem.append;
            let pages = Dispatch::cache_append_pages(pages, new, map.clone(), append);
            let options = &self.config.options;
            let (out, lse) = attend_pages::<Dispatch>(q, &pages, &map, &append, options);
            (out, lse, pages)
        };
        self.put(pages);
        match lengths {
            None => self.lengthen(tokens),
            // The rows of more tokens than a step has are in their pages, but the sequences end before them.
            Some(lengths) => self.state_mut().lengths = lengths,
        }
        Ok((Tensor::from_dispatch(out), Tensor::from_dispatch(lse)))
    }

    /// Appends tokens without attending.
    ///
    /// # Panics
    ///
    /// If [`try_append`](Self::try_append) returns an error, with that error's text.
    pub fn append(&mut self, k: Tensor<4>, v: Tensor<4>, scores: Option<Tensor<3>>) {
        expect(self.try_append(k, v, scores));
    }

    /// Like [`append`](Self::append), but returns the error.
    ///
    /// # Errors
    ///
    /// Those of [`try_step`](Self::try_step).
    pub fn try_append(
        &mut self,
        k: Tensor<4>,
        v: Tensor<4>,
        scores: Option<Tensor<3>>,
    ) -> Result<(), AttentionError> {
        self.hold.check()?;
        let new = NewTokens::new(&self.device, self.shape.element, k, v, scores)?;
        self.append_new(new)
    }

    pub(super) fn append_new(&mut self, new: NewTokens) -> Result<(), AttentionError> {
        let tokens = self.check(&new)?.tokens;
        self.reserve(tokens)?;
        let problem = self.check(&new)?;
        let (map, pages) = (self.map(), self.take());
        let pages = Dispatch::cache_append_pages(pages, new.into_ops(), map, problem);
        self.put(pages);
        self.lengthen(tokens);
        Ok(())
    }

    /// The number of sequences.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.config.batch
    }

    /// The number of tokens that each sequence holds. Known on the host.
    #[must_use]
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// The configuration that the cache was made with.
    #[must_use]
    pub fn config(&self) -> &PagedCacheConfig {
        &self.config
    }

    /// The size in bytes on the device: the whole pool, used or not.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shape.bytes()
    }

    /// The device that holds the tensors.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn state(&self) -> &State {
        self.state.as_ref().expect("no operation has the cache")
    }

    pub(super) fn state_mut(&mut self) -> &mut State {
        self.state.as_mut().expect("no operation has the cache")
    }

    pub(crate) fn pool(&self) -> &PagePool {
        &self.pool
    }

    fn check(&self, tokens: &NewTokens) -> Result<AppendProblem, AttentionError> {
        tokens.append_to(&self.shape, self.held())
    }

    /// Gives the sequences the pages of `tokens` more tokens each.
    fn reserve(&mut self, tokens: usize) -> Result<(), AttentionError> {
        let growth = (self.pool).growth(&self.lengths, tokens, self.config.grow_by)?;
        let shape = self.config.shape(self.pool.pages() + growth)?;
        self.grow(growth, shape);
        if self.pool.allocate(&self.lengths, tokens) {
            self.upload_table();
        }
        Ok(())
    }

    pub(super) fn grow(&mut self, pages: usize, shape: CacheShape) {
        self.shape = shape;
        if pages == 0 {
            return;
        }
        self.pool.grow(pages);
        let state = self.state.take().expect("no operation has the cache");
        let [_, heads, page_len, dim] = shape.kv_shape();
        let rows = |old: Tensor<4>| {
            let (dtype, shape) = (old.dtype(), [pages, heads, page_len, dim]);
            Tensor::cat(vec![old, Tensor::zeros(shape, (&self.device, dtype))], 0)
        };
        let scores = |old: Tensor<3>| {
            let new = Tensor::zeros([pages, heads, page_len], (&self.device, DType::F32));
            Tensor::cat(vec![old, new], 0)
        };
        self.state = Some(State {
            k: rows(state.k),
            v: rows(state.v),
            scores: state.scores.map(scores),
            ..state
        });
    }

    pub(super) fn upload_table(&mut self) {
        self.state_mut().table = table_tensor(&self.pool, self.config.max_pages(), &self.device);
    }

    fn map(&self) -> PageMap {
        PageMap {
            table: self.pool.table.clone(),
            lengths: self.lengths.clone(),
        }
    }

    /// The most tokens that a sequence holds.
    fn held(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    /// The tensors, for an operation that gives them back: in the operation nothing else shares them.
    fn take(&mut self) -> PageTensors<Dispatch> {
        let state = self.state.take().expect("no operation has the cache");
        PageTensors {
            k: state.k.into_dispatch(),
            v: state.v.into_dispatch(),
            scores: OptionalFloat::from_option(state.scores.map(|scores| scores.into_dispatch())),
            table: state.table.into_dispatch(),
            lengths: state.lengths.into_dispatch(),
        }
    }

    fn put(&mut self, pages: PageTensors<Dispatch>) {
        self.state = Some(State {
            k: Tensor::from_dispatch(pages.k),
            v: Tensor::from_dispatch(pages.v),
            scores: pages.scores.into_option().map(Tensor::from_dispatch),
            table: Tensor::from_dispatch(pages.table),
            lengths: Tensor::from_dispatch(pages.lengths),
        });
    }

    fn lengthen(&mut self, tokens: usize) {
        self.lengths.iter_mut().for_each(|n| *n += tokens);
    }
}

/// The page table, `[batch, max_pages]`; unused entries are 0.
fn table_tensor(pool: &PagePool, max_pages: usize, device: &Device) -> Tensor<2, Int> {
    let row = |pages: &Vec<i32>| {
        let mut row = pages.clone();
        row.resize(max_pages, 0);
        row
    };
    let table: Vec<i32> = pool.table.iter().flat_map(row).collect();
    let data = TensorData::new(table, [pool.table.len(), max_pages]);
    Tensor::from_data(data, (device, DType::I32))
}

pub(super) fn lengths_tensor(lengths: &[usize], device: &Device) -> Tensor<1, Int> {
    let data: Vec<i32> = lengths.iter().map(|&n| n as i32).collect();
    Tensor::from_data(TensorData::new(data, [lengths.len()]), (device, DType::I32))
}
