//! `flash-dma-kernels` through a CubeCL client, without Burn.

use super::{Decoder, Step, steps, wrong_behind};
use crate::decoding::{Held, Sequence};
use crate::engines::{Kernels, Target};
use crate::fuzz::spec::{Decoding, MAX_STEP, Spec, Store};
use flash_dma_kernels::Engine;
use flash_dma_reference::Inputs;

impl<T: Target> Decoder for Kernels<T> {
    /// No step of a cache runs on `wgmma`.
    fn decodes(&self) -> bool {
        T::ENGINE != Some(Engine::Wgmma)
    }

    fn decode(&self, spec: &Spec, decoding: &Decoding, all: &Inputs) -> Result<Vec<Step>, String> {
        let sequence = sequence(spec, decoding);
        let mut held = Held::new(self, &sequence);
        if decoding.prefill > 0 {
            held.append(all, decoding.prefill);
            held.share(decoding.shared_pages());
        }
        let step = |tokens: core::ops::Range<usize>| {
            let wrong = wrong_behind(decoding, tokens.len(), spec.k_len);
            let outputs = match (wrong, decoding.window()) {
                (Some(wrong), _) => {
                    let result = held.guess(all, tokens.end, wrong);
                    held.append(all, tokens.end);
                    result
                }
                (None, Some(_)) if tokens.len() > MAX_STEP => held.chunk(all, tokens.end),
                (None, _) => held.step(all, tokens.end),
            };
            Step {
                tokens,
                outputs,
                live: held.live(),
            }
        };
        Ok(steps(decoding).map(step).collect())
    }
}

fn sequence(spec: &Spec, decoding: &Decoding) -> Sequence {
    let page_len = match decoding.storage {
        Store::Slots(_) => 1,
        Store::Pages { page_len, .. } => page_len,
    };
    Sequence {
        batch: spec.batch,
        heads: [spec.q_heads(), spec.kv_heads],
        head_dim: spec.head_dim,
        element: spec.element,
        role: decoding.role,
        biased: decoding.window().is_none() && decoding.scored(),
        last: decoding.last(),
        page_len,
        scores: decoding.scores,
        options: spec.options(),
        layout: spec.places[Spec::Q].layout(),
        prefill: decoding.prefill,
        pieces: decoding.pieces.clone(),
        seed: spec.seed,
        ..Sequence::new(spec.k_len, decoding.window())
    }
}
