//! `doge check`: checks that the files were read correctly.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use clap::Parser;
use flash_dma_models::LanguageModel;
use serde_json::json;

use crate::{Error, Folder, Place, at};

/// The sentence for comparing losses.
const SENTENCE: &str = "Paris is the capital and most populous city of France, with an estimated population of over two million residents.";

/// For a figure of three decimals, and sums in another order.
const TOLERANCE: f32 = 1e-3;

/// Number of tokens whose logits are written.
const ROWS: usize = 8;

/// Compares the loss of a sentence about Paris with that of Doge-20M in `transformers`, in f32. The exit code is 1 if
/// they differ.
#[derive(Debug, Parser)]
pub struct Cli {
    /// Folder of the model.
    #[arg(long, value_name = "DIR")]
    weights: PathBuf,
    /// The loss of another model.
    #[arg(long, default_value_t = 2.779)]
    loss: f32,
    /// Write the logits of the sentence into `expected.json` of the folder, for the script that compares them with
    /// those of `transformers`.
    #[arg(long)]
    expected: bool,
    #[command(flatten)]
    place: Place,
}

/// Prints the loss of every token of the sentence but the first.
pub fn run(cli: &Cli) -> Result<ExitCode, Error> {
    let (device, _) = cli.place.open()?;
    let folder = Folder::read(&cli.weights, FloatDType::F32, &device)?;
    let row = |tokens: &[u32]| -> Tensor<2, Int> {
        let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        let shape = [1, tokens.len()];
        Tensor::from_data(TensorData::new(tokens, shape), &folder.model.device())
    };
    let mut tokens = folder.prompt(SENTENCE)?;
    let last = tokens.len().saturating_sub(1);
    if last == 0 {
        return Err("the sentence has fewer than two tokens".into());
    }
    let (inputs, targets) = (row(&tokens[..last]), row(&tokens[1..]));
    let loss = folder.model.try_loss(inputs, targets)?;
    let loss: f32 = loss.into_scalar();
    let agrees = (loss - cli.loss).abs() <= TOLERANCE;
    let verdict = if agrees { "agrees" } else { "does not agree" };
    println!("loss {loss:.4}, expected {}: {verdict}", cli.loss);
    if cli.expected {
        // Ends the sentence where the window is full: among keys of equal score, such as those of equal tokens in the
        // first layer, `transformers` may keep others.
        tokens.truncate(folder.model.config().keep_window_size);
        let rows: Vec<usize> = (0..tokens.len()).rev().take(ROWS).collect();
        let logits = folder.model.try_forward(row(&tokens))?;
        let of_row = |&at: &usize| -> Vec<f32> {
            let row = logits.clone().narrow(1, at, 1);
            row.into_data().iter::<f32>().collect()
        };
        let logits: Vec<Vec<f32>> = rows.iter().map(of_row).collect();
        let text = json!({"tokens": tokens, "rows": rows, "logits_by_step": logits}).to_string();
        let path = cli.weights.join("expected.json");
        fs::write(&path, text).map_err(at(&path))?;
    }
    Ok(ExitCode::from(u8::from(!agrees)))
}
