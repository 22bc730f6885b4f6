//! Generation: samplers, batches of prompts, beams, speculative decoding.
//!
//! Everything here works over a [`LanguageModel`](crate::LanguageModel), so over a model of your own as well:
//!
//! - [`Generator`] goes on from a batch of prompts, of equal or different lengths, and hands out each token as it
//!   is written;
//! - [`Sampler`] says how the next token is drawn;
//! - [`Beams`] says how many texts [`Generator::try_beams`] follows, and which it prefers;
//! - a [`Draft`] proposes tokens that [`Generator::try_speculate`] verifies, several in one step: a smaller model
//!   ([`ModelDraft`]), or what followed the same tokens before ([`PromptLookup`]).
//!
//! A prompt is read in chunks, so a long one takes the memory of a chunk and of the caches. A model that autodiff
//! tracks is refused by the caches: generate with `model.valid()`.

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
