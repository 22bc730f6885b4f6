//! What is trained: the decoder, or its attention layer alone.

use crate::Options;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use burn_flash_dma::ScoreRole;
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, ScoreForm};
use flash_dma_models::nn::{Activations, Backward, Decoder, DecoderConfig, cast};
use std::error::Error;
use train_text::data::{Corpus, Text};
use train_text::loader::Batch;
use train_text::rng::Rng;

/// A module and what it is trained on.
pub trait Task {
    /// What is trained.
    type Module: Module;

    /// The module with its first parameters.
    fn init(&self, device: &Device) -> Self::Module;

    /// The loss of the next batch, and its backward pass.
    fn forward<'a>(&mut self, module: &'a Self::Module) -> (Tensor<1>, Backward<'a>);
}

/// The language model on random bytes.
pub struct ModelTask {
    config: DecoderConfig,
    text: Text,
    rng: Rng,
    batch: usize,
    device: Device,
}

impl ModelTask {
    /// The model of the options.
    ///
    /// # Errors
    ///
    /// Only if the text is too short for a sequence, which it is not.
    pub fn new(options: &Options, device: &Device) -> Result<Self, Box<dyn Error>> {
        let layer = layer(options).with_keep_window(options.window.or(Some(options.seq)));
        let config = DecoderConfig::new(layer, options.layers);
        let mut rng = Rng::new(0, 0);
        // Enough for many windows of training, and a tenth for validation, which nobody reads.
        let bytes = (0..32 * (options.seq + 1)).map(|_| rng.below(256) as u8);
        let corpus = Corpus {
            source: "random bytes".into(),
            files: 1,
            bytes: bytes.collect(),
        };
        Ok(Self {
            config: config.with_dtype(options.dtype.burn()).with_activations(
                match options.checkpoint {
                    true => Activations::Recomputed,
                    false => Activations::Kept,
                },
            ),
            text: Text::split(corpus, options.seq)?,
            rng,
            batch: options.batch,
            device: device.clone(),
        })
    }
}

impl Task for ModelTask {
    type Module = Decoder;

    fn init(&self, device: &Device) -> Decoder {
        self.config.init(device)
    }

    fn forward<'a>(&mut self, model: &'a Decoder) -> (Tensor<1>, Backward<'a>) {
        let start = |_| self.text.random_train_start(&mut self.rng);
        let starts: Vec<usize> = (0..self.batch).map(start).collect();
        let batch = Batch::new(&self.text, &starts, &self.device);
        let loss = model.try_loss_and_backward(batch.inputs, batch.targets, None);
        loss.expect("windows fit the model")
    }
}

/// The attention of the options, with DMA's own scores: said here, so that the rows stay those of one layer whatever the
/// defaults become.
fn layer(options: &Options) -> DynamicMaskAttentionConfig {
    DynamicMaskAttentionConfig::new(options.d_model, options.heads)
        .with_n_kv_heads(Some(options.kv_heads))
        .with_score_form(ScoreForm::Zoh)
        .with_score_role(Some(ScoreRole::RankAndBias))
        .with_keep_window(options.window)
        .with_max_seq_len(Some(options.seq))
}

/// One attention layer on a random input, which gets a gradient as it does within a model.
pub struct LayerTask {
    config: DynamicMaskAttentionConfig,
    dtype: FloatDType,
    input: Tensor<3>,
    /// The gradient of the output.
    slope: Tensor<3>,
}

impl LayerTask {
    /// The layer of the options.
    pub fn new(options: &Options, device: &Device) -> Self {
        let dtype = options.dtype.burn();
        let normal = || {
            let shape = [options.batch, options.seq, options.d_model];
            let normal = Distribution::Normal(0.0, 1.0);
            Tensor::<3>::random(shape, normal, device).cast(dtype)
        };
        Self {
            config: layer(options),
            dtype,
            input: normal(),
            slope: normal(),
        }
    }
}

impl Task for LayerTask {
    type Module = DynamicMaskAttention;

    fn init(&self, device: &Device) -> DynamicMaskAttention {
        self.config.init(device)
    }

    fn forward<'a>(&mut self, layer: &'a DynamicMaskAttention) -> (Tensor<1>, Backward<'a>) {
        let copy = cast(layer, self.dtype);
        let out = copy.forward(self.input.clone().autodiff().require_grad());
        // A mean keeps the loss of 16 bits finite.
        let loss = (out * self.slope.clone().autodiff()).mean();
        let kept = loss.clone();
        let backward = move || GradientsParams::from_grads(kept.backward(), layer);
        (loss, Box::new(backward))
    }
}
