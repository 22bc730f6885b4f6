//! Errors of generation.

use burn::tensor::{ExecutionError, TensorReadError};
use burn_flash_dma::AttentionError;

/// Reason for which logits give no next token.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum SampleError {
    /// A setting of the sampler is out of range.
    #[error("{name} is {value}, but must be {range}")]
    Range {
        name: &'static str,
        value: f64,
        range: &'static str,
    },
    /// A logit is NaN.
    #[error("a logit is NaN")]
    NotANumber,
    /// A logit is +∞, so the softmax is undefined.
    #[error("the logit of token {token} is infinite")]
    Infinite { token: u32 },
    /// Every logit is −∞, or there is none.
    #[error("no token is possible: every logit is -inf")]
    Impossible,
}

/// Error of generation. The text of each error explains its fields; `sequence` counts the prompts from 0.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum GenerateError {
    /// The model or a cache refused its input.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// The device failed.
    #[error("the logits cannot be read from the device: {0}")]
    Device(String),
    /// The sampler's settings are refused.
    #[error("the sampler is refused: {0}")]
    Sampler(SampleError),
    /// The logits give no next token.
    #[error("the {model} has no token {written} for sequence {sequence}: {source}")]
    Sample {
        /// The model: the generator's or the draft's.
        model: &'static str,
        sequence: usize,
        /// Number of tokens written before.
        written: usize,
        source: SampleError,
    },
    /// A prompt has no tokens: a model predicts what follows a token.
    #[error("prompt {sequence} is empty: a model predicts what follows a token")]
    EmptyPrompt { sequence: usize },
    /// A token is not in the vocabulary.
    #[error("{place} has token {token}, but the vocabulary has {vocabulary}")]
    Token {
        place: TokenPlace,
        token: u32,
        vocabulary: usize,
    },
    /// The text would exceed the model's maximum length.
    #[error(
        "prompt {sequence} has {prompt} tokens and {new} are to follow, but the {model} reads at most {max_len}"
    )]
    TooLong {
        sequence: usize,
        prompt: usize,
        new: usize,
        model: &'static str,
        max_len: usize,
    },
    /// A setting that counts something is 0.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// A stop sequence has no tokens.
    #[error("stop sequence {index} is empty")]
    EmptyStop { index: usize },
    /// Beam search needs a greedy sampler.
    #[error("beams draw nothing: the sampler must be greedy, but has temperature {temperature}")]
    BeamsDraw { temperature: f64 },
    /// More texts are requested than there are beams.
    #[error("{returned} texts are to be returned, but there are {beams} beams")]
    BeamsReturned { returned: usize, beams: usize },
    /// The length penalty is not a number.
    #[error("the length penalty is {0}, but must be finite")]
    LengthPenalty(f64),
    /// The draft has another vocabulary than the model.
    #[error("the draft has a vocabulary of {draft} tokens, the model of {model}")]
    DraftVocabulary { draft: usize, model: usize },
    /// The draft broke its contract.
    #[error(
        "the draft was asked for at most {count} tokens for each of {rows} sequences: {problem}"
    )]
    Draft {
        count: usize,
        rows: usize,
        problem: String,
    },
    /// The model returned logits of another shape.
    #[error("the decoder returned logits {actual:?}, but must return {expected:?}")]
    Logits {
        /// Requested `[sequences, rows, vocabulary]`.
        expected: [usize; 3],
        actual: [usize; 3],
    },
}

/// Place of a token outside the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum TokenPlace {
    /// In a prompt.
    Prompt { sequence: usize, position: usize },
    /// Among the stop tokens.
    Stop,
    /// In a stop sequence.
    StopSequence { index: usize },
    /// In a draft's proposal.
    Draft,
}

impl std::fmt::Display for TokenPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Prompt { sequence, position } => {
                write!(f, "prompt {sequence} at position {position}")
            }
            Self::Stop => write!(f, "the list of stop tokens"),
            Self::StopSequence { index } => write!(f, "stop sequence {index}"),
            Self::Draft => write!(f, "the draft"),
        }
    }
}

impl From<TensorReadError> for GenerateError {
    fn from(error: TensorReadError) -> Self {
        Self::Device(error.to_string())
    }
}

impl From<ExecutionError> for GenerateError {
    fn from(error: ExecutionError) -> Self {
        Self::Device(error.to_string())
    }
}
