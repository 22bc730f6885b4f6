//! The cache of constant size.

use super::sequences::{Sequences, Shape, dtype};
use burn_flash_dma::AttentionOptions;
use burn_flash_dma::cache::{DynamicMaskCache, DynamicMaskCacheConfig};
use flash_dma_problem::ElementType::{self, Bf16, F16, F32};
use flash_dma_reference::Rng;
use flash_dma_reference::generate::Scores;
use flash_dma_tests::engine::skip;
use flash_dma_tests::engines::{Backend, Burn};
use flash_dma_tests::{Engine, every_burn};

every_burn!(
    one_token_at_a_time,
    pieces_of_any_size,
    beams_and_resets,
    options_in_f32,
    options_in_f16,
    options_in_bf16,
    a_prompt_in_chunks_or_at_once,
);

fn shape(element: ElementType) -> Shape {
    Shape {
        q_heads: 4,
        kv_heads: 2,
        dim: 16,
        element,
    }
}

struct Decoder<'a, B> {
    burn: &'a Burn<B>,
    sequences: Sequences,
    cache: DynamicMaskCache,
}

impl<'a, B: Backend> Decoder<'a, B> {
    fn new(
        burn: &'a Burn<B>,
        shape: Shape,
        batch: usize,
        kind: Scores,
        options: AttentionOptions,
    ) -> Self {
        let config = DynamicMaskCacheConfig::new(batch, shape.kv_heads, shape.dim, options)
            .with_dtype(dtype(shape.element).into());
        Self {
            burn,
            sequences: Sequences::new(shape, batch, Some(kind), options, batch as u64),
            cache: config.init(burn.device()),
        }
    }

    /// A step of `count` tokens against the oracle, and the keys that are kept then.
    fn step(&mut self, count: usize) {
        let tokens = self.sequences.grow(count, self.burn.device());
        let new = tokens.clone();
        let scores = new.scores.expect("slots have scores");
        let (out, lse) = (self.cache)
            .try_step_with_lse(new.q, new.k, new.v, scores)
            .unwrap();
        self.sequences.check(&tokens, out, lse);
        self.check_live();
    }

    fn check_live(&self) {
        assert_eq!(self.cache.positions_sync(), self.sequences.live());
        assert_eq!(self.cache.lengths(), self.sequences.lengths());
    }
}

fn window(keys: usize) -> AttentionOptions {
    AttentionOptions::new().with_keep_window(keys)
}

/// Thousands of prefixes: every kind of scores, ties and NaN and −∞ among them.
fn one_token_at_a_time<B: Backend>(burn: &Burn<B>) {
    for kind in Burn::<B>::cases([Scores::Ties], Scores::ALL, []) {
        for (keys, steps) in Burn::<B>::cases([(6, 20)], [(1, 40), (23, 250)], [(64, 150)]) {
            let mut decoder = Decoder::new(burn, shape(F32), 2, kind, window(keys));
            for _ in 0..steps {
                decoder.step(1);
            }
        }
    }
}

fn pieces_of_any_size<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(5);
    for kind in Burn::<B>::cases([Scores::Nan], Scores::ALL, []) {
        for (keys, pieces) in Burn::<B>::cases([(9, 6)], [(40, 30)], [(100, 40)]) {
            let mut decoder = Decoder::new(burn, shape(F32), 1, kind, window(keys));
            for _ in 0..pieces {
                // Mostly decode steps, and some chunks.
                let most = [4, 16, 16, 60][rng.below(4)];
                decoder.step(1 + rng.below(most));
            }
        }
    }
}

/// Sequences of different lengths, reordered, repeated, dropped and restarted.
fn beams_and_resets<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(6);
    for kind in Burn::<B>::cases([Scores::Padded], [Scores::Ties], [Scores::Nan]) {
        let mut decoder = Decoder::new(burn, shape(F32), 3, kind, window(11));
        for round in 0..Burn::<B>::cases([4], [36], []).into_iter().sum::<usize>() {
            decoder.step([1, 1, 3, 20][rng.below(4)]);
            match round % 4 {
                1 => {
                    let batch = decoder.sequences.batch();
                    let beams: Vec<usize> =
                        (0..2 + rng.below(3)).map(|_| rng.below(batch)).collect();
                    decoder.cache.reorder(&beams);
                    decoder.sequences.reorder(&beams);
                }
                2 => {
                    let sequence = rng.below(decoder.sequences.batch());
                    decoder.cache.reset(sequence);
                    decoder.sequences.reset(sequence);
                }
                _ => {}
            }
            decoder.check_live();
        }
    }
}

fn options_in_f32<B: Backend>(burn: &Burn<B>) {
    options(burn, F32);
}

fn options_in_f16<B: Backend>(burn: &Burn<B>) {
    options(burn, F16);
}

fn options_in_bf16<B: Backend>(burn: &Burn<B>) {
    options(burn, Bf16);
}

fn options<B: Backend>(burn: &Burn<B>, element: ElementType) {
    if !burn.supports(element) {
        return skip::<Burn<B>>(&format!("{element}"));
    }
    for (q_heads, kv_heads, dim) in Burn::<B>::cases(
        [(2, 1, 32)],
        [(6, 2, 8), (3, 3, 40)],
        [(32, 8, 128), (8, 1, 64), (4, 2, 256)],
    ) {
        let shape = Shape {
            q_heads,
            kv_heads,
            dim,
            element,
        };
        let options = window(12).with_softcap(3.0).with_scale(0.4);
        for options in Burn::<B>::cases([options], [window(30)], []) {
            let mut decoder = Decoder::new(burn, shape, 2, Scores::Recency, options);
            for count in Burn::<B>::cases([20, 2], [1, 16, 5, 1, 1, 40, 7, 1], [300, 1, 1, 4]) {
                decoder.step(count);
            }
        }
    }
}

fn a_prompt_in_chunks_or_at_once<B: Backend>(burn: &Burn<B>) {
    for (len, keys) in Burn::<B>::cases([(50, 8)], [(300, 33)], [(3000, 512)]) {
        let mut whole = Decoder::new(burn, shape(F32), 1, Scores::Ties, window(keys));
        whole.step(len);
        for chunk in Burn::<B>::cases([25], [17, 90, 150], [1000]) {
            let mut parts = Decoder::new(burn, shape(F32), 1, Scores::Ties, window(keys));
            for from in (0..len).step_by(chunk) {
                parts.step(chunk.min(len - from));
            }
        }
        // Appended without attention.
        let mut parts = Decoder::new(burn, shape(F32), 1, Scores::Ties, window(keys));
        for from in (0..len).step_by(20) {
            let tokens = parts.sequences.grow(20.min(len - from), burn.device());
            let scores = tokens.scores.clone().expect("slots have scores");
            parts.cache.append(tokens.k, tokens.v, scores);
        }
        parts.check_live();
        parts.step(1);
    }
}
