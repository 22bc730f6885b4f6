//! The cache that keeps every key.

use super::sequences::{Decoder, Sequences, Shape, shape};
use flash_dma_tests::prelude::*;

every_burn!(pieces_of_any_size, beams_and_resets);

fn decoder<B: Backend>(
    burn: &Burn<B>,
    batch: usize,
    page_len: usize,
    kind: Option<Scores>,
    element: ElementType,
) -> Decoder {
    let shape = Shape {
        dim: 32,
        ..shape(element)
    };
    let options = AttentionOptions::new().with_softcap(6.0);
    let sequences = Sequences::new(shape, batch, kind, options, page_len as u64);
    sequences.in_pages(burn, 4096, page_len, 3)
}

fn kinds<B: Backend>() -> Vec<Option<Scores>> {
    Burn::<B>::cases([None], [Some(Scores::Padded)], [Some(Scores::Nan)])
}

fn pieces_of_any_size<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(7);
    for kind in kinds::<B>() {
        for (page_len, element) in Burn::<B>::cases([(16, F32)], [(5, F32), (64, Bf16)], []) {
            if !burn.supports(element) {
                continue;
            }
            let mut decoder = decoder(burn, 2, page_len, kind, element);
            for _ in 0..Burn::<B>::cases([4], [26], [40]).into_iter().sum::<usize>() {
                let most = [1, 4, 16, 60][rng.below(4)];
                decoder.step(1 + rng.below(most));
            }
        }
    }
}

fn beams_and_resets<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(8);
    for kind in kinds::<B>() {
        let rounds = Burn::<B>::cases([4], [36], []).into_iter().sum();
        decoder(burn, 3, 4, kind, F32).beams_and_resets(rounds, &mut rng);
    }
}
