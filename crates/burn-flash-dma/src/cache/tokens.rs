//! Keys and values, and those checks of cache calls that need Burn's types.

use crate::types::{OptionalFloat, TokenTensors};
use crate::validate::{
    check_element, computes_in, element_type, same_device, scores_as_f32, supported_element,
};
use burn::backend::Dispatch;
use burn::tensor::{Device, FloatDType, Tensor};
use flash_dma_problem::{
    AppendProblem, AttentionError, AttentionOptions, CacheShape, DecodeProblem, ElementType,
    TensorName,
};

/// Keys, values and scores on the cache's device, in its element type and without autodiff: of new tokens, `[batch,
/// kv_heads, tokens, ..]`, or of a pool, `[pages, kv_heads, page_len, ..]`.
#[derive(Clone, Debug)]
pub(crate) struct Rows {
    pub(crate) k: Tensor<4>,
    pub(crate) v: Tensor<4>,
    /// f32.
    pub(crate) scores: Option<Tensor<3>>,
}

impl Rows {
    pub(crate) fn new(
        device: &Device,
        element: ElementType,
        k: Tensor<4>,
        v: Tensor<4>,
        scores: Option<Tensor<3>>,
    ) -> Result<Self, AttentionError> {
        Ok(Self {
            k: plain(device, TensorName::Key, k, Some(element))?,
            v: plain(device, TensorName::Value, v, Some(element))?,
            scores: scores
                .map(|scores| scores_as_f32(plain(device, TensorName::Scores, scores, None)?))
                .transpose()?,
        })
    }

    pub(crate) fn shape(&self) -> [usize; 4] {
        self.k.dims()
    }

    pub(crate) fn first(&self, count: usize) -> Self {
        if count == self.shape()[2] {
            return self.clone();
        }
        let rows = |all: &Tensor<4>| all.clone().narrow(2, 0, count);
        let scores = self.scores.as_ref();
        Self {
            k: rows(&self.k),
            v: rows(&self.v),
            scores: scores.map(|all| all.clone().narrow(2, 0, count)),
        }
    }

    /// Checks an append; `held` is the most tokens that a sequence has received.
    pub(crate) fn append_to(
        &self,
        cache: &CacheShape,
        held: usize,
    ) -> Result<AppendProblem, AttentionError> {
        let scores = self.scores.as_ref().map(Tensor::dims);
        let scores = scores.as_ref().map(<[usize; 3]>::as_slice);
        cache.append(&self.k.dims(), &self.v.dims(), scores, cache.element, held)
    }

    pub(crate) fn decode_over(
        &self,
        cache: &CacheShape,
        q: &[usize; 4],
        held: usize,
        options: &AttentionOptions,
    ) -> Result<DecodeProblem, AttentionError> {
        let scores = self.scores.as_ref().map(Tensor::dims);
        let scores = scores.as_ref().map(<[usize; 3]>::as_slice);
        let (k, v) = (self.k.dims(), self.v.dims());
        cache.decode(q, &k, &v, scores, cache.element, held, options)
    }

    pub(crate) fn into_ops(self) -> TokenTensors<Dispatch> {
        TokenTensors {
            k: self.k.into_dispatch(),
            v: self.v.into_dispatch(),
            scores: OptionalFloat::from_option(self.scores.map(|scores| scores.into_dispatch())),
        }
    }
}

/// A tensor without autodiff; refused if it is tracked, or on another device or of another element type.
pub(crate) fn plain<const D: usize>(
    device: &Device,
    name: TensorName,
    tensor: Tensor<D>,
    element: Option<ElementType>,
) -> Result<Tensor<D>, AttentionError> {
    let actual = element_type(name, &tensor)?;
    check_element(name, &tensor, element.unwrap_or(actual))?;
    same_device(device, name, tensor.device())?;
    #[cfg(feature = "autodiff")]
    if tensor.is_tracked() {
        return Err(AttentionError::Tracked { tensor: name });
    }
    Ok(tensor.without_autodiff())
}

pub(crate) fn cache_element(dtype: FloatDType) -> Result<ElementType, AttentionError> {
    supported_element(TensorName::CachedKey, dtype.into())
}

/// Refuses a device without an engine, or one that does not support the element type.
pub(crate) fn check_support(device: &Device, dtype: FloatDType) -> Result<(), AttentionError> {
    computes_in(device, dtype.into(), cache_element(dtype)?)
}

pub(crate) fn check_sequences(indices: &[usize], batch: usize) -> Result<(), AttentionError> {
    match indices.iter().find(|&&index| index >= batch) {
        Some(&index) => Err(AttentionError::Sequence { index, batch }),
        None => Ok(()),
    }
}
