//! Benchmarks of flash-dma: the program `bench` with a command for each part of the library, and the rows they write.
#![warn(missing_docs)]

#[cfg(feature = "cube")]
mod attention;
#[cfg(any(feature = "cube", feature = "flex"))]
mod baseline;
#[cfg(feature = "flex")]
mod cpu;
#[cfg(feature = "cube")]
mod decode;
#[cfg(feature = "cube")]
mod device;
#[cfg(feature = "step")]
mod generation;
#[cfg(feature = "step")]
mod kernel_kinds;
#[cfg(feature = "step")]
mod launches;
#[cfg(feature = "cube")]
mod masks;
#[cfg(feature = "step")]
mod model;
#[cfg(any(feature = "cube", feature = "flex"))]
mod options;
#[cfg(feature = "step")]
mod place;
#[cfg(feature = "cube")]
mod products;
#[cfg(feature = "step")]
mod selections;
#[cfg(feature = "step")]
mod shares;
mod stats;
#[cfg(feature = "step")]
mod step;
#[cfg(feature = "cube")]
mod tensor;

use clap::{Parser, Subcommand};
use std::error::Error;

/// Result of a command, or its error.
type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// Times the parts of flash-dma.
#[derive(Debug, Parser)]
#[command(name = "bench")]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[cfg(feature = "cube")]
    Attention(attention::Options),
    #[cfg(feature = "cube")]
    Masks(masks::Options),
    #[cfg(feature = "cube")]
    Decode(decode::Options),
    #[cfg(feature = "cube")]
    Products(products::Options),
    #[cfg(feature = "step")]
    Selections(selections::Options),
    #[cfg(feature = "step")]
    Step(step::Options),
    #[cfg(feature = "step")]
    Generation(generation::Options),
    #[cfg(feature = "flex")]
    Cpu(cpu::Options),
}

impl Cli {
    /// Runs the command, which prints its rows and writes them to the named file, if any.
    ///
    /// # Errors
    ///
    /// If an option is wrong, the device is missing, or a file cannot be written.
    pub fn run(self) -> Result {
        match self.command {
            #[cfg(feature = "cube")]
            Command::Attention(options) => attention::run(&options),
            #[cfg(feature = "cube")]
            Command::Masks(options) => masks::run(&options),
            #[cfg(feature = "cube")]
            Command::Decode(options) => decode::run(&options),
            #[cfg(feature = "cube")]
            Command::Products(options) => products::run(&options),
            #[cfg(feature = "step")]
            Command::Selections(options) => selections::run(&options),
            #[cfg(feature = "step")]
            Command::Step(options) => step::run(&options),
            #[cfg(feature = "step")]
            Command::Generation(options) => generation::run(&options),
            #[cfg(feature = "flex")]
            Command::Cpu(options) => cpu::run(&options),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn no_two_options_of_a_command_have_one_name() {
        Cli::command().debug_assert();
    }
}
