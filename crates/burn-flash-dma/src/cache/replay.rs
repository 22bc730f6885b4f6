//! Steps that a graph of the device records once and replays.

use super::either::AttentionCache;
use crate::ops::cache::CacheOps;
use crate::validate::check_shape;
use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};
use flash_dma_problem::{AttentionError, TensorName};

impl AttentionCache {
    /// Whether a step of one token launches the same work at every position, so that a graph of the device can record
    /// it: true of slots, which count their tokens on the device. Pages have a table that the host makes.
    #[must_use]
    pub fn can_replay(&self) -> bool {
        matches!(self, Self::DynamicMask(_))
    }

    /// Says whether the next steps of one token are recorded in a graph, or prepare that: then
    /// [layers](crate::nn::DynamicMaskAttention) read positions from the cache's memory on the device, and not from
    /// [`lengths`](Self::lengths). Of no effect on caches that [cannot replay](Self::can_replay).
    pub fn set_recorded(&mut self, recorded: bool) {
        if let Self::DynamicMask(cache) = self {
            cache.recorded = recorded;
        }
    }

    /// Counts the tokens that replays of a recorded step have appended to each sequence. Recording itself has counted
    /// the first one.
    ///
    /// # Panics
    ///
    /// If the cache [cannot replay](Self::can_replay).
    pub fn replayed(&mut self, tokens: usize) {
        match self {
            Self::DynamicMask(cache) => cache.lengthen(tokens),
            Self::Paged(_) => panic!("a cache of pages cannot replay"),
        }
    }

    /// The positions of the next token of each sequence as the device counts them, `[sequences]`, where a step of one
    /// token is to read them there: it is recorded, or the sequences are of different lengths.
    pub(crate) fn device_positions(&self) -> Option<Tensor<1, Int>> {
        let Self::DynamicMask(cache) = self else {
            return None;
        };
        let ragged = cache.lengths.windows(2).any(|pair| pair[0] != pair[1]);
        (cache.recorded || ragged).then(|| cache.state().seen.clone())
    }
}

/// Writes token ids over those of `tokens`, in its own memory on devices that record graphs: a graph that has read
/// `tokens` reads these when it is replayed. `values` are in the order of the elements. Nothing waits for the device.
///
/// # Errors
///
/// [`AttentionError`] if there are not as many values as elements, or `tokens` is not i32; nothing is written then.
pub fn try_overwrite<const D: usize>(
    tokens: Tensor<D, Int>,
    values: &[i32],
) -> Result<Tensor<D, Int>, AttentionError> {
    let name = TensorName::Tokens;
    check_shape(name, &[values.len()], &[tokens.shape().num_elements()])?;
    if tokens.dtype() != DType::I32 {
        return Err(AttentionError::ElementType {
            tensor: name,
            expected: "i32".into(),
            actual: format!("{:?}", tokens.dtype()),
        });
    }
    // Integers have no gradients, and the operation knows nothing of autodiff.
    let autodiff = tokens.device().is_autodiff();
    let tokens = tokens.without_autodiff().into_dispatch();
    let written = Tensor::from_dispatch(Dispatch::cache_overwrite(tokens, values.to_vec()));
    Ok(match autodiff {
        true => written.autodiff(),
        false => written,
    })
}
