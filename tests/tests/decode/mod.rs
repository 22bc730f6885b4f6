//! Decoding through a cache equals a pass over everything, for every prefix and any division into pieces.

mod guesses;
#[cfg(feature = "burn")]
mod hold;
#[cfg(feature = "burn")]
mod joined;
#[cfg(feature = "burn")]
mod pages;
#[cfg(feature = "burn")]
mod refusals;
#[cfg(feature = "burn")]
mod sequences;
#[cfg(feature = "burn")]
mod shared;
#[cfg(feature = "burn")]
mod slots;
mod steps;

use flash_dma_tests::prelude::*;

/// Rules of a window: with recent keys, with sinks, with both, and full of them.
fn rules(window: usize) -> [SelectionRule; 5] {
    let (some, few) = (window.div_ceil(3), window / 4);
    let parts = [
        (some, 0),
        (0, some),
        (some, few),
        (window, 0),
        (window - some, some),
    ];
    parts.map(|(recent, sinks)| SelectionRule {
        window,
        recent,
        sinks,
    })
}
