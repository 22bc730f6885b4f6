//! The parts of the program `lab`: small models whose layers choose their keys in one of several ways ([`arm`]), trained
//! ([`mod@train`]) on associative recall ([`recall`]) or on running text ([`text`]), with one row of JSON per run
//! ([`rows`]). Runs are made by processes of their own ([`processes`]).

pub mod arm;
pub mod cli;
pub mod device;
pub mod layers;
pub mod options;
pub mod processes;
pub mod recall;
pub mod rng;
pub mod rows;
pub mod settings;
pub mod text;
pub mod train;

/// The result of what can go wrong; the error is one line.
pub type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;
