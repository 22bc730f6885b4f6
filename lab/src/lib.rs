//! The parts of the program `lab`: small models whose layers select their keys in one of several ways ([`arm`]),
//! trained ([`mod@train`]) on associative recall ([`recall`]) or on running text ([`text`]), with one row of JSON per
//! run ([`rows`]). Processes of their own make the runs ([`processes`]).

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

/// Result with an error of one line.
pub type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;
