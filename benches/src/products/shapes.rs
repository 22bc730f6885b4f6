//! The products of a training step.

use flash_dma_kernels::product::Sizes;
use serde::Serialize;

/// A linear layer of the model.
#[derive(Clone, Copy)]
pub struct Layer {
    /// Its name.
    pub name: &'static str,
    /// Features of its input.
    pub d_in: usize,
    /// Features of its output.
    pub d_out: usize,
    /// Number of such layers in a step.
    pub times: usize,
    /// True if its weight is stored as `[d_out, d_in]`: the tied embedding.
    pub turned: bool,
}

/// The layers of `examples/train-text` with `d_model` 1024: eight blocks, and the unembedding.
pub const LAYERS: [Layer; 5] = [
    Layer::new("q/k/v", 1024, 1536, 8),
    Layer::new("o", 1024, 1024, 8),
    Layer::new("gate/up", 1024, 2752, 16),
    Layer::new("down", 2752, 1024, 8),
    Layer {
        turned: true,
        ..Layer::new("unembedding", 1024, 256, 1)
    },
];

impl Layer {
    const fn new(name: &'static str, d_in: usize, d_out: usize, times: usize) -> Self {
        Self {
            name,
            d_in,
            d_out,
            times,
            turned: false,
        }
    }

    /// The layer with every width divided, but at least 24.
    pub fn shrunk(self, by: usize) -> Self {
        Self {
            d_in: (self.d_in / by).max(24),
            d_out: (self.d_out / by).max(24),
            ..self
        }
    }
}

/// The product of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    /// `X W`.
    Forward,
    /// `dY Wᵀ`.
    Input,
    /// `Xᵀ dY`.
    Weight,
}

impl Pass {
    /// All three.
    pub const ALL: [Self; 3] = [Self::Forward, Self::Input, Self::Weight];

    /// The sizes of a layer's product on a number of tokens.
    pub fn sizes(self, layer: &Layer, tokens: usize) -> Sizes {
        let (d_in, d_out) = (layer.d_in, layer.d_out);
        let [m, n, k] = match self {
            Self::Forward => [tokens, d_out, d_in],
            Self::Input => [tokens, d_in, d_out],
            Self::Weight => [d_in, d_out, tokens],
        };
        Sizes { m, n, k }
    }
}
