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
