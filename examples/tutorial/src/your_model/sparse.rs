//! The same transformer with dynamic-mask attention, converted from the dense one.

use super::dropped_in::model::{Block, LENGTH, Model};
use burn::module::Module;
use burn::nn::{Embedding, LayerNorm, Linear};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Int, Tensor};
use burn_flash_dma::nn::mha::MultiHeadAttention;
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, QkNorm, Selection};

#[derive(Module, Debug)]
pub struct SparseBlock {
    norm: LayerNorm,
    pub attention: DynamicMaskAttention,
    feed_forward_norm: LayerNorm,
    up: Linear,
    down: Linear,
}

#[derive(Module, Debug)]
pub struct SparseModel {
    embedding: Embedding,
    positions: Embedding,
    pub blocks: Vec<SparseBlock>,
    norm: LayerNorm,
    head: Linear,
}

// ANCHOR: convert
/// Dynamic-mask attention with the projections of multi-head attention. Its scores only rank, and its window holds a
/// whole text, so it computes the same as the dense layer under causal masking.
fn sparse(dense: MultiHeadAttention, device: &Device) -> DynamicMaskAttention {
    let mut layer = DynamicMaskAttentionConfig::new(dense.d_model, dense.n_heads)
        .with_bias(true)
        .with_qk_norm(QkNorm::None)
        .with_selection(Selection::keep(LENGTH))
        .init(device);
    layer.q_proj = dense.query;
    layer.k_proj = dense.key;
    layer.v_proj = dense.value;
    layer.o_proj = dense.output;
    layer
}
// ANCHOR_END: convert

impl SparseModel {
    pub fn new(dense: Model, device: &Device) -> Self {
        let block = |block: Block| SparseBlock {
            norm: block.norm,
            attention: sparse(block.attention, device),
            feed_forward_norm: block.feed_forward_norm,
            up: block.up,
            down: block.down,
        };
        Self {
            embedding: dense.embedding,
            positions: dense.positions,
            blocks: dense.blocks.into_iter().map(block).collect(),
            norm: dense.norm,
            head: dense.head,
        }
    }

    pub fn device(&self) -> Device {
        self.head.weight.val().device()
    }

    /// `[batch, len]` to `[batch, len, TOKENS]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [_, len] = tokens.dims();
        let places = Tensor::<1, Int>::arange(0..len as i64, &tokens.device());
        let places = self.positions.forward(places.reshape([1, len]));
        let mut x = self.embedding.forward(tokens) + places;
        for block in &self.blocks {
            x = block.forward(x);
        }
        self.head.forward(self.norm.forward(x))
    }
}

// ANCHOR: block
impl SparseBlock {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = x.clone() + self.attention.forward(self.norm.forward(x));
        let hidden = gelu(self.up.forward(self.feed_forward_norm.forward(x.clone())));
        x + self.down.forward(hidden)
    }
}
// ANCHOR_END: block
