//! The parts of the example program `recall`: multi-query associative recall ([`task`]), a small transformer whose
//! layers choose their keys in one of several ways ([`arm`], [`model`]), its training ([`mod@train`]), and one row of
//! JSON per run ([`rows`]), which also say how long others may take ([`estimate`]). Runs are made by processes of their own
//! ([`processes`]).

pub mod arm;
pub mod cli;
pub mod estimate;
pub mod evaluate;
pub mod keys;
pub mod lengthening;
pub mod model;
pub mod processes;
pub mod rates;
pub mod rows;
pub mod settings;
pub mod task;
pub mod train;
