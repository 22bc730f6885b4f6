//! `endless`: see `endless --help`, and `run.rs` for the loop.

mod cli;
mod model;
mod run;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match run::run(&cli::Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("endless: {error}");
            ExitCode::from(2)
        }
    }
}
