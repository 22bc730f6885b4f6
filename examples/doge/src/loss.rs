//! The loss of a sentence, to compare a checkpoint with `transformers`.

use burn::tensor::{Int, Tensor, TensorData};
use flash_dma_models::Decoder;
use serde_json::json;

use crate::error::Error;
use crate::folder::Folder;

/// The sentence that losses are compared on.
pub const SENTENCE: &str = "Paris is the capital and most populous city of France, with an estimated population of over two million residents.";

/// The loss of Doge-20M on it in `transformers`, with eager attention.
pub const OF_DOGE_20M: f32 = 2.779;

/// Tokens whose logits are written.
const ROWS: usize = 8;

/// A figure of three decimals, and sums in another order.
const TOLERANCE: f32 = 1e-3;

/// Whether a loss agrees with what is expected.
pub fn agrees(loss: f32, expected: f32) -> bool {
    (loss - expected).abs() <= TOLERANCE
}

/// The mean cross-entropy in nats of every token of [`SENTENCE`] but the first.
///
/// # Errors
///
/// [`Error`] if the tokenizer makes fewer than two tokens of the sentence, or the model refuses them.
pub fn of_sentence(folder: &Folder) -> Result<f32, Error> {
    let tokens = folder.prompt(SENTENCE)?;
    let (Some((_, inputs)), Some((_, targets))) = (tokens.split_last(), tokens.split_first())
    else {
        return Err(Error::Options("the sentence has no tokens".into()));
    };
    if inputs.is_empty() {
        return Err(Error::Options("the sentence has a single token".into()));
    }
    let (inputs, targets) = (row(folder, inputs), row(folder, targets));
    Ok(folder.model.try_loss(inputs, targets)?.into_scalar())
}

/// The logits after the last tokens of [`SENTENCE`], as JSON that `make_doge.py --check` compares with those of
/// `transformers`. The sentence ends where the window is full: of keys whose scores are equal, as those of equal tokens
/// are in the first layer, `transformers` may keep others.
///
/// # Errors
///
/// [`Error`] if the tokenizer or the model refuses the sentence.
pub fn expected(folder: &Folder) -> Result<String, Error> {
    let mut tokens = folder.prompt(SENTENCE)?;
    tokens.truncate(folder.model.config().keep_window_size);
    let rows: Vec<usize> = (0..tokens.len()).rev().take(ROWS).collect();
    let logits = folder.model.try_forward(row(folder, &tokens))?;
    let of_row = |&at: &usize| -> Vec<f32> {
        let [_, _, vocabulary] = logits.dims();
        let row = logits.clone().slice([0..1, at..at + 1, 0..vocabulary]);
        row.into_data().iter::<f32>().collect()
    };
    let logits: Vec<Vec<f32>> = rows.iter().map(of_row).collect();
    Ok(json!({"tokens": tokens, "rows": rows, "logits_by_step": logits}).to_string())
}

/// Tokens on the device of the model, `[1, len]`.
fn row(folder: &Folder, tokens: &[u32]) -> Tensor<2, Int> {
    let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    let shape = [1, tokens.len()];
    Tensor::from_data(TensorData::new(tokens, shape), &folder.model.device())
}

#[cfg(test)]
mod tests {
    use super::agrees;

    #[test]
    fn a_loss_agrees_if_its_third_decimal_does() {
        assert!(agrees(2.7794, 2.779) && agrees(2.7786, 2.779));
        assert!(!agrees(2.7811, 2.779) && !agrees(f32::NAN, 2.779));
    }
}
