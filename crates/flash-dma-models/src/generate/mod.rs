//! Generation: samplers, batches of prompts, beams, speculative decoding.
//!
//! Everything here works with any [`LanguageModel`](crate::LanguageModel), including your own:
//!
//! - [`Generator`] continues a batch of prompts, of equal or different lengths, and reports each token as it is
//!   written;
//! - [`Sampler`] draws the next token;
//! - [`Beams`] configures [`Generator::try_beams`];
//! - a [`Draft`] proposes tokens that [`Generator::try_speculate`] verifies, several in one step: a smaller model
//!   ([`ModelDraft`]), or the continuation of an earlier occurrence ([`PromptLookup`]).
//!
//! A prompt is read in chunks, so a long one takes the memory of a chunk and of the caches. The caches refuse a model
//! that autodiff tracks: generate with `model.valid()`.

mod batch;
mod beams;
mod check;
mod distribution;
mod draft;
mod error;
mod generator;
mod laws;
mod lookup;
mod sampler;
mod speculate;
mod steps;
mod text;

pub use beams::{Beam, Beams, EarlyStopping};
pub use distribution::Distribution;
pub use draft::{Draft, DraftLimits, DraftRow, ModelDraft, Proposal};
pub use error::{GenerateError, SampleError, TokenPlace};
pub use generator::Generator;
pub use lookup::PromptLookup;
pub use sampler::{Draw, Purpose, Sampler};
pub use speculate::{Speculated, Speculation};
pub use text::{Ended, Event, Generated};
