//! A small transformer as one finds it. Only the line with `super::attention` chooses the attention.

use super::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Bool, Device, Int, Tensor};

pub const TOKENS: usize = 16;
pub const LENGTH: usize = 32;
pub const WIDTH: usize = 32;
pub const HEADS: usize = 4;

/// A block around its attention.
#[derive(Module, Debug)]
pub struct Block {
    pub norm: LayerNorm,
    pub attention: MultiHeadAttention,
    pub feed_forward_norm: LayerNorm,
    pub up: Linear,
    pub down: Linear,
}

/// From tokens to the logits of the next ones.
#[derive(Module, Debug)]
pub struct Model {
    pub embedding: Embedding,
    pub positions: Embedding,
    pub blocks: Vec<Block>,
    pub norm: LayerNorm,
    pub head: Linear,
}

impl Model {
    pub fn new(device: &Device) -> Self {
        let norm = || LayerNormConfig::new(WIDTH).init(device);
        let block = |_| Block {
            norm: norm(),
            attention: MultiHeadAttentionConfig::new(WIDTH, HEADS)
                .with_dropout(0.0)
                .init(device),
            feed_forward_norm: norm(),
            up: LinearConfig::new(WIDTH, 4 * WIDTH).init(device),
            down: LinearConfig::new(4 * WIDTH, WIDTH).init(device),
        };
        Self {
            embedding: EmbeddingConfig::new(TOKENS, WIDTH).init(device),
            positions: EmbeddingConfig::new(LENGTH, WIDTH).init(device),
            blocks: (0..2).map(block).collect(),
            norm: norm(),
            head: LinearConfig::new(WIDTH, TOKENS).init(device),
        }
    }

    /// `[batch, len]` to `[batch, len, TOKENS]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [batch, len] = tokens.dims();
        let places = Tensor::<1, Int>::arange(0..len as i64, &tokens.device());
        let places = self.positions.forward(places.reshape([1, len]));
        let mask = generate_autoregressive_mask(batch, len, &tokens.device());
        let mut x = self.embedding.forward(tokens) + places;
        for block in &self.blocks {
            x = block.forward(x, mask.clone());
        }
        self.head.forward(self.norm.forward(x))
    }
}

// ANCHOR: block
impl Block {
    fn forward(&self, x: Tensor<3>, mask: Tensor<3, Bool>) -> Tensor<3> {
        let input = MhaInput::self_attn(self.norm.forward(x.clone())).mask_attn(mask);
        let x = x + self.attention.forward(input).context;
        let hidden = gelu(self.up.forward(self.feed_forward_norm.forward(x.clone())));
        x + self.down.forward(hidden)
    }
}
// ANCHOR_END: block
