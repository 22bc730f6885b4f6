//! A model and the caches of a batch of sequences.

use super::error::GenerateError;
use crate::decoder::Decoder;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_flash_dma::cache::AttentionCache;
use std::collections::BTreeMap;

/// A model and what it remembers of a batch of sequences.
///
/// A clone shares the caches' tensors until one of the two is written.
pub(super) struct Batch<'a, D: ?Sized> {
    model: &'a D,
    device: Device,
    caches: Vec<AttentionCache>,
}

impl<D: ?Sized> Clone for Batch<'_, D> {
    fn clone(&self) -> Self {
        Self {
            model: self.model,
            device: self.device.clone(),
            caches: self.caches.clone(),
        }
    }
}

impl<'a, D: Decoder + ?Sized> Batch<'a, D> {
    fn new(model: &'a D, sequences: usize) -> Result<Self, GenerateError> {
        Ok(Self {
            model,
            device: model.device(),
            caches: model.try_init_caches(sequences)?,
        })
    }

    /// Reads prompts, which are not empty, in chunks of at most `chunk` tokens, and returns the logits of what follows
    /// each: `[prompts, 1, vocabulary]`. Prompts of one length are read together.
    pub(super) fn prefill<P: AsRef<[u32]>>(
        model: &'a D,
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
            let mut group = Self::new(model, indices.len())?;
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

    /// One batch of all groups; `order` has the place of each of their sequences in it.
    fn join(
        mut groups: Vec<(Self, Tensor<3>)>,
        order: &[usize],
    ) -> Result<(Self, Tensor<3>), GenerateError> {
        if groups.len() == 1 {
            return Ok(groups.remove(0));
        }
        let (batches, logits): (Vec<Self>, Vec<Tensor<3>>) = groups.into_iter().unzip();
        let (model, device) = (batches[0].model, batches[0].device.clone());
        let mut layers: Vec<Vec<AttentionCache>> = Vec::new();
        for batch in batches {
            layers.resize_with(batch.caches.len(), Vec::new);
            let caches = batch.caches.into_iter();
            caches
                .zip(&mut layers)
                .for_each(|(cache, layer)| layer.push(cache));
        }
        let caches = layers
            .into_iter()
            .map(AttentionCache::try_cat)
            .collect::<Result<_, _>>()?;
        let mut batch = Self {
            model,
            device,
            caches,
        };
        let mut from = vec![0; order.len()];
        order
            .iter()
            .enumerate()
            .for_each(|(row, &place)| from[place] = row);
        batch.keep(&from)?;
        let index: Vec<i32> = from.iter().map(|&row| row as i32).collect();
        let index = TensorData::new(index, [from.len()]);
        let index = Tensor::<1, Int>::from_data(index, &batch.device);
        let logits = Tensor::cat(logits, 0).select(0, index);
        Ok((batch, logits))
    }

    /// Token ids of sequences of one length.
    pub(super) fn tokens<'t>(&self, rows: impl Iterator<Item = &'t [u32]>) -> Tensor<2, Int> {
        let mut shape = [0, 0];
        let mut tokens: Vec<i32> = Vec::new();
        for row in rows {
            shape = [shape[0] + 1, row.len()];
            tokens.extend(row.iter().map(|&token| token as i32));
        }
        Tensor::from_data(TensorData::new(tokens, shape), (&self.device, DType::I32))
    }

    /// Reads tokens `[sequences, len]` and returns the logits of what follows the last `rows` of them.
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

    /// Makes sequence `i` what sequence `indices[i]` is.
    pub(super) fn keep(&mut self, indices: &[usize]) -> Result<(), GenerateError> {
        for cache in &mut self.caches {
            cache.try_reorder(indices)?;
        }
        Ok(())
    }

    /// Whether one token more per sequence can be read by a recorded step.
    pub(super) fn can_replay(&self) -> bool {
        let longest = |cache: &AttentionCache| cache.lengths().iter().copied().max().unwrap_or(0);
        let inside = |cache| longest(cache) < self.model.replays_up_to();
        (self.caches.iter()).all(|cache| cache.can_replay() && inside(cache))
    }

    /// See [`AttentionCache::set_recorded`].
    pub(super) fn set_recorded(&mut self, recorded: bool) {
        (self.caches.iter_mut()).for_each(|cache| cache.set_recorded(recorded));
    }

    /// See [`AttentionCache::replayed`].
    pub(super) fn replayed(&mut self, tokens: usize) {
        (self.caches.iter_mut()).for_each(|cache| cache.replayed(tokens));
    }

    pub(super) fn model(&self) -> &'a D {
        self.model
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Reads tokens of which it is not yet known which are right: the caches wait for [`accept`](Self::accept).
    pub(super) fn try_out(&mut self, tokens: Tensor<2, Int>) -> Result<Tensor<3>, GenerateError> {
        for cache in &mut self.caches {
            cache.try_hold()?;
        }
        let rows = tokens.dims()[1];
        self.read(tokens, rows)
    }

    /// Appends the first `count` tokens that were tried out, and forgets the others.
    pub(super) fn accept(&mut self, count: usize) -> Result<(), GenerateError> {
        for cache in &mut self.caches {
            cache.try_accept(count)?;
        }
        Ok(())
    }
}
