//! `doge`: see `doge --help`.

mod write;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match write::run(&write::Cli::parse()) {
        Ok(write::Outcome::Done) => ExitCode::SUCCESS,
        Ok(write::Outcome::Disagrees) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("doge: {error}");
            ExitCode::from(2)
        }
    }
}
