//! Decoding through a cache equals a pass over everything, for every prefix and whatever the pieces.

mod pages;
mod refusals;
mod sequences;
mod slots;
mod steps;
