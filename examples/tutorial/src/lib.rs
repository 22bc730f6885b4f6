//! Programs of the book's chapters, each a file to read from top to bottom. Two of them, `arms` and `demo`, share the
//! code of the first chapter: a task, a model of one attention layer, its training, and pictures of the keys it
//! keeps.
#![warn(missing_docs)]

mod arms;
mod demo;
mod documents;
mod generation;
mod intervals;
mod masks;
pub mod model;
mod packed;
mod parts;
pub mod picture;
pub mod selectors;
pub mod task;
pub mod training;
mod your_model;

use std::error::Error;

/// How to run a program, and the name, arguments and purpose of each.
pub const USAGE: &str = "\
cargo run --release -p tutorial -- PROGRAM

  arms [--steps N] [--json FILE] [SEED ..]    trains the arms of the tutorial's table
  demo [--steps N] [--out DIR] [--svg DIR]    what a model keeps before and after training
  documents          packed and padded batches and masks in a layer
  generation         a prompt in chunks, greedy text, beams, saving and going on
  intervals          sixteen scores and their intervals
  masks              masks, tile plans, and a bias that is learned
  packed             packed documents and padded batches
  parts              q, k and v in one tensor, probabilities, and parts that are merged
  selectors [DIR]    methods of others as selections, and pictures of them
  your-model         a transformer of Burn's modules gets this attention and keeps its weights
";

/// Runs a program with its arguments.
///
/// # Errors
/// If there is no such program, or with its own error.
pub fn run(name: &str, arguments: impl Iterator<Item = String>) -> Result<(), Box<dyn Error>> {
    match name {
        "arms" => arms::main(arguments)?,
        "demo" => demo::main(arguments)?,
        "documents" => documents::main()?,
        "generation" => generation::main()?,
        "intervals" => intervals::main(),
        "masks" => masks::main(),
        "packed" => packed::main()?,
        "parts" => parts::main(),
        "selectors" => selectors::main(arguments)?,
        "your-model" => your_model::main(),
        _ => return Err(format!("no program `{name}`; without a name they are listed").into()),
    }
    Ok(())
}
