//! Steps that append nothing, on every engine of the kernels, without Burn.

use super::steps::types;
use flash_dma_tests::decoding::{Held, Sequence};
use flash_dma_tests::prelude::*;

flash_dma_tests::kernel_engines!(guesses_leave_the_cache);

/// A step that appends nothing writes the same results as the step and leaves every bit of the cache; appending some of
/// its tokens afterwards equals a step of just these tokens.
fn guesses_leave_the_cache<T: Target>(kernels: &Kernels<T>) {
    let more = [(Some(100), false), (None, true)];
    for (window, biased) in Kernels::<T>::cases([(Some(9), false), (None, false)], [], more) {
        for element in types(kernels) {
            let sequence = Sequence {
                element,
                biased,
                scores: Scores::Padded,
                ..Sequence::new(60, window)
            };
            let all = sequence.inputs();
            let mut cache = Held::new(kernels, &sequence);
            let mut stepped = Held::new(kernels, &sequence);
            cache.append(&all, 12);
            stepped.append(&all, 12);
            for (accepted, wrong) in [(1, 3), (4, 0), (1, 15), (7, 9), (16, 0)] {
                let (from, to) = (cache.held, cache.held + accepted);
                let before = cache.bits();
                let result = cache.guess(&all, to, wrong);
                assert!(cache.bits() == before, "a guess has written");
                cache.append(&all, to);
                cache.compare(&all, from, &result);
                cache.check_live(&all);
                let _ = stepped.step(&all, to);
                assert!(cache.bits() == stepped.bits(), "{accepted} and {wrong}");
            }
        }
    }
}
