//! The cache that keeps every key.

use super::chunk::attend_pages;
use super::config::PagedCacheConfig;
use super::hold::{Hold, holds};
use super::pool::{PagePool, lengths_tensor, table_tensor};
use super::tokens::{Rows, check_support, plain};
use crate::ops::cache::CacheOps;
use crate::types::{PageMap, PageTensors, TokenTensors};
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor};
use flash_dma_problem::{
    AppendProblem, Appending, AttentionError, CacheShape, MAX_DECODE_TOKENS, TensorName,
};

/// All keys and values that each sequence has received, in pages of `page_len` tokens from a common pool: for
/// attention without scores, and for scores without a window.
///
/// A sequence takes a page when its tokens need one and returns all when it is reset. The pool is allocated up front
/// ([`PagedCacheConfig::pages`]) or grows by blocks of pages ([`PagedCacheConfig::grow_by`]).
///
/// Sequences with a common prefix may share pages ([`fork`](Self::fork), [`share_prefix`](Self::share_prefix),
/// [`reorder`](Self::reorder)): a shared page is copied before a sequence writes to it. With a window
/// ([`PagedCacheConfig::window`]), pages whose keys are all outside it return to the pool. The table may also be
/// external ([`set_block_table`](Self::set_block_table)).
#[derive(Clone, Debug)]
pub struct PagedCache {
    pub(super) config: PagedCacheConfig,
    pub(super) shape: CacheShape,
    pub(super) device: Device,
    /// Number of tokens each sequence has received.
    pub(super) lengths: Vec<usize>,
    /// Number of these in whole pages that the window has left; the device's `lengths` count the others.
    pub(super) dropped: Vec<usize>,
    pub(super) pool: PagePool,
    /// Absent only while an operation has it.
    pub(super) state: Option<State>,
    pub(super) hold: Hold,
}

/// See [`PageTensors`].
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) rows: Rows,
    pub(super) table: Tensor<2, Int>,
    pub(super) lengths: Tensor<1, Int>,
}

impl PagedCacheConfig {
    twin! {
        /// An empty cache.
        pub fn init(&self, device: &Device) -> PagedCache = Self::try_init;
    }

    /// Like [`init`](Self::init), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the sizes, the element type or the options are refused.
    pub fn try_init(&self, device: &Device) -> Result<PagedCache, AttentionError> {
        PagedCache::try_new(self, device)
    }
}

impl PagedCache {
    twin! {
        /// An empty cache.
        pub fn new(config: &PagedCacheConfig, device: &Device) -> Self = Self::try_new;
    }

    /// Like [`new`](Self::new), but returns the error.
    ///
    /// # Errors
    ///
    /// See [`PagedCacheConfig::try_init`].
    pub fn try_new(config: &PagedCacheConfig, device: &Device) -> Result<Self, AttentionError> {
        // Backends differ on tensors without elements, so the pool has at least one page.
        let pages = config.pages.max(1);
        let shape = config.shape(pages)?;
        check_support(device, config.dtype)?;
        let device = device.clone().without_autodiff();
        let pool = PagePool::new(config.batch, config.page_len, pages);
        let zeros = || Tensor::zeros(shape.kv_shape(), (&device, DType::from(config.dtype)));
        let [_, heads, page_len, _] = shape.kv_shape();
        let words = || Tensor::zeros([pages, heads, page_len], (&device, DType::F32));
        let rows = Rows {
            k: zeros(),
            v: zeros(),
            scores: config.scored.then(words),
        };
        let tokens = [vec![0; config.batch], vec![0; config.batch]];
        Ok(Self::restored(
            config.clone(),
            shape,
            &device,
            rows,
            pool,
            tokens,
        ))
    }

    /// A cache with unchecked contents; `lengths` counts the tokens each sequence has received, `dropped` those its
    /// window has dropped.
    pub(crate) fn restored(
        config: PagedCacheConfig,
        shape: CacheShape,
        device: &Device,
        rows: Rows,
        pool: PagePool,
        [lengths, dropped]: [Vec<usize>; 2],
    ) -> Self {
        let state = State {
            rows,
            table: table_tensor(&pool, config.max_pages(), device),
            lengths: lengths_tensor(&held(&lengths, &dropped), device),
        };
        Self {
            config,
            shape,
            device: device.clone(),
            lengths,
            dropped,
            pool,
            state: Some(state),
            hold: Hold::Off,
        }
    }

    twin! {
        /// Attends from new tokens to all earlier ones and to each other, and appends them. Shapes as in
        /// [`DynamicMaskCache::step`](super::DynamicMaskCache::step); `scores` must be given exactly if the
        /// configuration says so.
        pub fn step(
            &mut self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, scores: Option<Tensor<3>>
        ) -> Tensor<4> = Self::try_step;
    }

    /// Like [`step`](Self::step), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the shapes, element types or devices do not fit the cache, autodiff tracks a tensor, a
    /// sequence would outgrow its row of the page table ([`AttentionError::PagesFull`]), the pool is used up and does
    /// not grow ([`AttentionError::PagesUsed`]), an external table has no pages for the tokens
    /// ([`AttentionError::BlockTable`]), or tokens wait ([`AttentionError::TokensWait`]). The cache is unchanged
    /// then.
    pub fn try_step(
        &mut self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        scores: Option<Tensor<3>>,
    ) -> Result<Tensor<4>, AttentionError> {
        Ok(self.try_step_with_lse(q, k, v, scores)?.0)
    }

    /// [`try_step`](Self::try_step) that also returns the LSE of the logits: `[batch, q_heads, tokens]`, f32.
    ///
    /// # Errors
    ///
    /// See [`try_step`](Self::try_step).
    pub fn try_step_with_lse(
        &mut self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        scores: Option<Tensor<3>>,
    ) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
        self.hold.check()?;
        let element = self.shape.element;
        let new = Rows::new(&self.device, element, k, v, scores)?;
        let q = plain(&self.device, TensorName::Query, q, Some(element))?;
        let problem = |cache: &Self| {
            let (held, options) = (cache.most_held(), &cache.config.options);
            new.decode_over(&cache.shape, &q.dims(), held, options)
        };
        problem(self)?;
        let tokens = new.shape()[2];
        // Waiting tokens have pages too, so accepting them needs no more.
        self.reserve(tokens)?;

        let map = self.map();
        // The pool may have grown.
        let problem = problem(self)?.with_appending(self.hold.appending());
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
            // Tokens beyond a decode step are already in their pages, but the sequences end before them.
            Some(lengths) => self.state_mut().lengths = lengths,
        }
        Ok((Tensor::from_dispatch(out), Tensor::from_dispatch(lse)))
    }

    twin! {
        /// Appends tokens without attending.
        pub fn append(&mut self, k: Tensor<4>, v: Tensor<4>, scores: Option<Tensor<3>>)
            = Self::try_append;
    }

    /// Like [`append`](Self::append), but returns the error.
    ///
    /// # Errors
    ///
    /// See [`try_step`](Self::try_step).
    pub fn try_append(
        &mut self,
        k: Tensor<4>,
        v: Tensor<4>,
        scores: Option<Tensor<3>>,
    ) -> Result<(), AttentionError> {
        self.hold.check()?;
        let new = Rows::new(&self.device, self.shape.element, k, v, scores)?;
        self.append_new(new)
    }

    pub(super) fn append_new(&mut self, new: Rows) -> Result<(), AttentionError> {
        let tokens = self.check(&new)?.tokens;
        self.reserve(tokens)?;
        let problem = self.check(&new)?;
        let (map, pages) = (self.map(), self.take());
        let pages = Dispatch::cache_append_pages(pages, new.into_ops(), map, problem);
        self.put(pages);
        self.lengthen(tokens);
        Ok(())
    }

    /// Number of sequences.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.config.batch
    }

    /// Number of tokens each sequence has received, which is the position of its next token. Known on the host.
    #[must_use]
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Configuration of the cache.
    #[must_use]
    pub fn config(&self) -> &PagedCacheConfig {
        &self.config
    }

    /// Number of pages in use; a shared page counts once. Known on the host.
    #[must_use]
    pub fn used_pages(&self) -> usize {
        self.pool.used()
    }

    /// Size of the whole pool on the device in bytes, used or not.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shape.bytes()
    }

    /// Device of the tensors.
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

    fn check(&self, tokens: &Rows) -> Result<AppendProblem, AttentionError> {
        tokens.append_to(&self.shape, self.most_held())
    }

    fn map(&self) -> PageMap {
        PageMap {
            table: self.pool.table.clone(),
            lengths: self.held(),
        }
    }

    /// Number of tokens each sequence holds.
    pub(super) fn held(&self) -> Vec<usize> {
        held(&self.lengths, &self.dropped)
    }

    fn most_held(&self) -> usize {
        self.held().into_iter().max().unwrap_or(0)
    }

    /// Takes the tensors for an operation that gives them back, so that nothing else shares them meanwhile.
    fn take(&mut self) -> PageTensors<Dispatch> {
        let state = self.state.take().expect("no operation has the cache");
        let TokenTensors { k, v, scores } = state.rows.into_ops();
        PageTensors {
            k,
            v,
            scores,
            table: state.table.into_dispatch(),
            lengths: state.lengths.into_dispatch(),
        }
    }

    fn put(&mut self, pages: PageTensors<Dispatch>) {
        self.state = Some(State {
            rows: Rows {
                k: Tensor::from_dispatch(pages.k),
                v: Tensor::from_dispatch(pages.v),
                scores: pages.scores.into_option().map(Tensor::from_dispatch),
            },
            table: Tensor::from_dispatch(pages.table),
            lengths: Tensor::from_dispatch(pages.lengths),
        });
    }

    /// Counts appended tokens, and returns pages that the next query does not see.
    fn lengthen(&mut self, tokens: usize) {
        self.lengths.iter_mut().for_each(|n| *n += tokens);
        self.slide();
    }
}

/// Number of tokens each sequence holds of those it has received.
fn held(lengths: &[usize], dropped: &[usize]) -> Vec<usize> {
    let pairs = lengths.iter().zip(dropped);
    pairs.map(|(given, dropped)| given - dropped).collect()
}

holds!(PagedCache);

impl PagedCache {
    /// Returns the pages of tokens that waited.
    fn release_waiting(&mut self) {
        // The device's table may name pages past the end of a sequence, where nothing reads it.
        self.pool.trim(&self.held());
    }
}
