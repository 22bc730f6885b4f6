//! The parts of the example program `language`: what a language model loses when its attention is pruned. The model is
//! that of `train-text`; its layers choose their keys as an [`arm`] says. It is trained on running text ([`windows`])
//! and evaluated by its [`losses`], or on text with facts in it ([`needles`]) and evaluated by its [`answers`]. A run
//! ([`mod@run`]) makes one row of JSON ([`rows`]).

pub mod answers;
pub mod arm;
pub mod cli;
pub mod compare;
pub mod losses;
pub mod needles;
pub mod rows;
pub mod run;
pub mod selection;
pub mod settings;
pub mod train;
pub mod windows;
