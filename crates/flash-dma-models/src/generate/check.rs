//! Checks of prompts and tokens before anything is generated.

use super::error::{GenerateError, TokenPlace};

/// Refuses prompts that would exceed a model's maximum length with their new tokens.
pub(super) fn check_lengths<P: AsRef<[u32]>>(
    max_len: Option<usize>,
    model: &'static str,
    prompts: &[P],
    new: usize,
) -> Result<(), GenerateError> {
    let max_len = max_len.unwrap_or(usize::MAX);
    let lengths = prompts.iter().map(|prompt| prompt.as_ref().len());
    let is_too_long = |&(_, prompt): &(usize, usize)| prompt.saturating_add(new) > max_len;
    match lengths.enumerate().find(is_too_long) {
        None => Ok(()),
        Some((sequence, prompt)) => Err(GenerateError::TooLong {
            sequence,
            prompt,
            new,
            model,
            max_len,
        }),
    }
}

pub(super) fn check_tokens(
    tokens: &[u32],
    vocabulary: usize,
    place: impl Fn(usize) -> TokenPlace,
) -> Result<(), GenerateError> {
    let beyond = |&token: &u32| token as usize >= vocabulary;
    match tokens.iter().position(beyond) {
        None => Ok(()),
        Some(position) => Err(GenerateError::Token {
            place: place(position),
            token: tokens[position],
            vocabulary,
        }),
    }
}
