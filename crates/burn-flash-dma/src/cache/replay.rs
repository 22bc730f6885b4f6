//! Steps that a device graph records once and replays.

use super::either::AttentionCache;
use crate::ops::cache::CacheOps;
use crate::validate::check_shape;
use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};
use flash_dma_problem::{AttentionError, TensorName};

impl AttentionCache {
    /// True if a step of one token launches the same work at every position, so that a device graph can record it:
    /// with slots, which count their tokens on the device. Pages have a table that the host makes.
    #[must_use]
    pub fn can_replay(&self) -> bool {
        matches!(self, Self::DynamicMask(_))
    }

    /// Announces that the next steps of one token are recorded in a graph, or prepare for it:
    /// [layers](crate::nn::DynamicMaskAttention) then read positions from the cache's device memory instead of
    /// [`lengths`](Self::lengths). No effect on caches that [cannot replay](Self::can_replay).
    pub fn set_recorded(&mut self, recorded: bool) {
        if let Self::DynamicMask(cache) = self {
            cache.recorded = recorded;
        }
    }

    /// Counts tokens that replays of a recorded step have appended to each sequence. Recording itself has counted the
    /// first one.
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

    /// Positions of each sequence's next token, counted on the device, `[sequences]`: present if a step of one token
    /// must read them there, because it is recorded or the sequences differ in length.
    pub(crate) fn device_positions(&self) -> Option<Tensor<1, Int>> {
        let Self::DynamicMask(cache) = self else {
            return None;
        };
        let ragged = cache.lengths.windows(2).any(|pair| pair[0] != pair[1]);
        (cache.recorded || ragged).then(|| cache.state().seen.clone())
    }
}

/// Overwrites the token ids of `tokens`, in its own memory on devices that record graphs, so that a graph that has
/// read `tokens` reads these when it is replayed. `values` are in element order. Does not wait for the device.
///
/// # Errors
///
/// [`AttentionError`] if the numbers of values and elements differ, or `tokens` is not i32; nothing is written then.
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
