//! Doge against Hugging Face's `transformers`: `tests/fixtures/make_doge.py` made small models with random weights
//! and recorded their results. The tests run on every engine of the build; files are read and written on the first
//! only.
#![cfg(any(feature = "flex", feature = "cuda"))]

#[cfg(feature = "autodiff")]
mod adapters;
mod config;
mod errors;
mod files;
mod fixture;
mod heads;
mod logits;
mod replay;
mod sequences;
