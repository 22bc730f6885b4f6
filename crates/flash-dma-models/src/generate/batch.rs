//! A model and the caches of a batch of sequences.

use super::error::GenerateError;
use crate::language_model::LanguageModel;
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_flash_dma::cache::AttentionCache;
use std::collections::BTreeMap;

/// A model and its caches for a batch of sequences.
///
/// A clone shares the caches' tensors until one of the two is written.
pub(super) struct Batch<'a, M: ?Sized> {
    pub(super) model: &'a M,
    caches: Vec<AttentionCache>,
}

impl<M: ?Sized> Clone for Batch<'_, M> {
    fn clone(&self) -> Self {
        Self {
            model: self.model,
            caches: self.caches.clone(),
        }
    }
}

impl<'a, M: LanguageModel + ?Sized> Batch<'a, M> {
    /// Reads non-empty prompts in chunks of at most `chunk` tokens, and returns the logits after each: `[prompts, 1,
    /// vocabulary]`. Prompts of one length are read together.
    pub(super) fn prefill<P: AsRef<[u32]>>(
        model: &'a M,
        prompts: &[P],
        chunk: usize,
    ) -> Result<(Self, Tensor<3>), GenerateError> {
        let mut by_length: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, prompt) in prompts.iter().enumerate() {
            let group = by_length.entry(prompt.as_ref().len()).or_default();
            group.push(index);
        }
        let mut groups = Vec::new();
        for (&len, indices) in &by_length {
            let caches = model.try_init_caches(indices.len())?;
            let mut group = Self { model, caches };
            let mut logits = None;
            for begin in (0..len).step_by(chunk) {
                let part = begin..len.min(begin + chunk);
                let rows = indices.iter().map(|&i| &prompts[i].as_ref()[part.clone()]);
                logits = Some(group.read(group.tokens(rows), 1)?);
            }
            groups.push((group, logits.expect("a prompt has a token")));
        }
        let order: Vec<usize> = by_length.into_values().flatten().collect();
        Self::join(groups, &order)
    }

    /// Joins all groups; `order` holds the index of each of their sequences in the batch.
    fn join(
        mut groups: Vec<(Self, Tensor<3>)>,
        order: &[usize],
    ) -> Result<(Self, Tensor<3>), GenerateError> {
        if groups.len() == 1 {
            return Ok(groups.remove(0));
        }
        let (batches, logits): (Vec<Self>, Vec<Tensor<3>>) = groups.into_iter().unzip();
        let model = batches[0].model;
        let mut of_groups: Vec<_> = (batches.into_iter())
            .map(|batch| batch.caches.into_iter())
            .collect();
        let mut caches = Vec::new();
        let mut next = || of_groups.iter_mut().map(Iterator::next).collect();
        while let Some(of_layer) = next() {
            caches.push(AttentionCache::try_cat(of_layer)?);
        }
        let mut batch = Self { model, caches };
        let mut from: Vec<usize> = (0..order.len()).collect();
        from.sort_by_key(|&row| order[row]);
        batch.keep(&from)?;
        let index: Vec<i32> = from.iter().map(|&row| row as i32).collect();
        let index = Tensor::<1, Int>::from_ints(&index[..], &model.device());
        Ok((batch, Tensor::cat(logits, 0).select(0, index)))
    }

    pub(super) fn tokens<'t>(&self, rows: impl Iterator<Item = &'t [u32]>) -> Tensor<2, Int> {
        let mut shape = [0, 0];
        let mut tokens: Vec<i32> = Vec::new();
        for row in rows {
            shape = [shape[0] + 1, row.len()];
            tokens.extend(row.iter().map(|&token| token as i32));
        }
        let device = self.model.device();
        Tensor::from_data(TensorData::new(tokens, shape), (&device, DType::I32))
    }

    /// Reads tokens `[sequences, len]` and returns the logits after the last `rows` of them.
    pub(super) fn read(
        &mut self,
        tokens: Tensor<2, Int>,
        rows: usize,
    ) -> Result<Tensor<3>, GenerateError> {
        let expected = [tokens.dims()[0], rows, self.model.vocabulary()];
        let logits = self.model.try_read(tokens, rows, &mut self.caches)?;
        match logits.dims() {
            actual if actual == expected => Ok(logits),
            actual => Err(GenerateError::Logits { expected, actual }),
        }
    }

    /// Replaces sequence `i` by sequence `indices[i]`.
    pub(super) fn keep(&mut self, indices: &[usize]) -> Result<(), GenerateError> {
        for cache in &mut self.caches {
            cache.try_reorder(indices)?;
        }
        Ok(())
    }

    /// True if a recorded step can read the next token of each sequence.
    pub(super) fn can_replay(&self) -> bool {
        let longest = |cache: &AttentionCache| cache.lengths().iter().copied().max().unwrap_or(0);
        let inside = |cache| longest(cache) < self.model.replays_up_to();
        (self.caches.iter()).all(|cache| cache.can_replay() && inside(cache))
    }

    pub(super) fn set_recorded(&mut self, recorded: bool) {
        (self.caches.iter_mut()).for_each(|cache| cache.set_recorded(recorded));
    }

    pub(super) fn replayed(&mut self, tokens: usize) {
        (self.caches.iter_mut()).for_each(|cache| cache.replayed(tokens));
    }

    /// Reads tokens that may be wrong: the caches hold them back until [`accept`](Self::accept).
    pub(super) fn try_out(&mut self, tokens: Tensor<2, Int>) -> Result<Tensor<3>, GenerateError> {
        for cache in &mut self.caches {
            cache.try_hold()?;
        }
        let rows = tokens.dims()[1];
        self.read(tokens, rows)
    }

    /// Appends the first `count` tokens held back, and drops the others.
    pub(super) fn accept(&mut self, count: usize) -> Result<(), GenerateError> {
        for cache in &mut self.caches {
            cache.try_accept(count)?;
        }
        Ok(())
    }
}
