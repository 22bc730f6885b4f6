//! Replayed steps write the same as launched ones.

use crate::doge::fixture::{devices, everywhere};
use burn::nn::{Embedding, EmbeddingConfig};
use burn::tensor::{Device, Int, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::cache::AttentionCache;
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, Rope, Selection};
use flash_dma_models::LanguageModel;
use flash_dma_models::generate::{Generator, Sampler};
use std::ops::ControlFlow;
use std::sync::{Mutex, PoisonError};

#[test]
fn replayed_steps_write_what_launched_steps_write() {
    for (case, device) in everywhere() {
        let tokens: Vec<u32> = case.expected().tokens.iter().map(|&t| t as u32).collect();
        let model = case.model(&device).for_generation();
        check(&model, &tokens, case.name);
    }
}

/// A recorded step reads a position that adds to a score where it counts it.
#[test]
fn replayed_steps_of_a_layer_that_ranks_by_position() {
    for device in devices() {
        device.seed(7);
        for (recency, turns) in [(false, None), (true, None), (true, Some(3))] {
            let tokens = [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 2, 7];
            let model = Ranking::new(recency, turns, &device);
            check(&model, &tokens, &format!("recency {recency}, {turns:?}"));
        }
    }
}

/// Texts from prompts of three lengths, one of them before the window is full; the second text ends on the way.
fn check(model: &impl LanguageModel, tokens: &[u32], name: &str) {
    // No other thread may use the device while a step is recorded.
    static RECORDING: Mutex<()> = Mutex::new(());
    let _alone = RECORDING.lock().unwrap_or_else(PoisonError::into_inner);
    let prompts = [tokens, &tokens[..5], &tokens[1..9]];
    for sampler in [Sampler::greedy(), Sampler::random(3).with_temperature(0.7)] {
        let generator = Generator::new(model).with_sampler(sampler).with_max_new(24);
        let written = |generator: &Generator<'_, _>, stop_after: usize| {
            let mut count = 0;
            let texts = generator.try_stream(&prompts, |event| {
                count += usize::from(event.sequence == 1);
                match event.sequence == 1 && count == stop_after {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            });
            let texts = texts.expect("the model reads its prompts").into_iter();
            texts.map(|text| text.tokens).collect::<Vec<_>>()
        };
        let launched = generator.clone().with_replay(false);
        // In the warm-up, at the recorded step, after replays, and never.
        for stop_after in [2, 5, 11, 100] {
            let [ours, theirs] = [&generator, &launched].map(|by| written(by, stop_after));
            let case = format!("{name}, {sampler:?}, the second text ends after {stop_after}");
            assert_eq!(ours, theirs, "{case}");
        }
    }
}

/// A layer that also ranks by position, between an embedding and its transpose.
struct Ranking {
    embedding: Embedding,
    layer: DynamicMaskAttention,
}

impl Ranking {
    const VOCABULARY: usize = 48;

    fn new(recency: bool, turns: Option<usize>, device: &Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(Self::VOCABULARY, 32).init(device),
            layer: DynamicMaskAttentionConfig::new(32, 4)
                .with_n_kv_heads(Some(2))
                .with_selection(
                    Selection::keep(6)
                        .with_recent(Some(2))
                        .with_recency(recency)
                        .with_turns(turns),
                )
                .with_rope(Some(Rope::new(64)))
                .init(device),
        }
    }
}

impl LanguageModel for Ranking {
    fn vocabulary(&self) -> usize {
        Self::VOCABULARY
    }

    fn device(&self) -> Device {
        self.embedding.weight.val().device()
    }

    fn try_init_caches(&self, sequences: usize) -> Result<Vec<AttentionCache>, AttentionError> {
        Ok(vec![self.layer.try_init_cache(sequences)?])
    }

    fn replays_up_to(&self) -> usize {
        64
    }

    fn try_read(
        &self,
        tokens: Tensor<2, Int>,
        rows: usize,
        caches: &mut [AttentionCache],
    ) -> Result<Tensor<3>, AttentionError> {
        let [_, len] = tokens.dims();
        let x = self.embedding.forward(tokens);
        let x = x.clone() + self.layer.try_forward_cached(x, &mut caches[0])? * 10.0;
        let table = self.embedding.weight.val().transpose().unsqueeze();
        Ok(x.narrow(1, len - rows, rows).matmul(table))
    }
}
