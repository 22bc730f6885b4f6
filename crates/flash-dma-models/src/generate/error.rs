//! Why a text cannot be generated.

use burn::tensor::{ExecutionError, TensorReadError};
use burn_flash_dma::AttentionError;

/// Why logits give no next token.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// A number of the sampler is outside its range.
    #[error("{name} is {value}, but must be {range}")]
    Range {
        /// Which number.
        name: &'static str,
        /// Its value.
        value: f64,
        /// Its range, in words.
        range: &'static str,
    },
    /// A logit is NaN.
    #[error("a logit is NaN")]
    NotANumber,
    /// A logit is +∞, so that the softmax has no value.
    #[error("the logit of token {token} is infinite")]
    Infinite {
        /// The first token with such a logit.
        token: u32,
    },
    /// Every logit is −∞, or there is none.
    #[error("no token is possible: every logit is -inf")]
    Impossible,
}

/// Why a text cannot be generated.
#[derive(Debug, thiserror::Error)]
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
        /// Which model: that of the generator or the draft.
        model: &'static str,
        /// The index of the prompt.
        sequence: usize,
        /// How many tokens have been written before.
        written: usize,
        /// Why not.
        source: SampleError,
    },
    /// A prompt has no tokens: a model predicts what follows a token.
    #[error("prompt {sequence} is empty: a model predicts what follows a token")]
    EmptyPrompt {
        /// The index of the prompt.
        sequence: usize,
    },
    /// A token is not in the vocabulary.
    #[error("{place} has token {token}, but the vocabulary has {vocabulary}")]
    Token {
        /// What has the token.
        place: TokenPlace,
        /// The token.
        token: u32,
        /// Tokens of the vocabulary.
        vocabulary: usize,
    },
    /// The text would become longer than the model can read.
    #[error(
        "prompt {sequence} has {prompt} tokens and {new} are to follow, but the {model} reads at most {max_len}"
    )]
    TooLong {
        /// The index of the prompt.
        sequence: usize,
        /// Tokens of the prompt.
        prompt: usize,
        /// The most tokens that follow.
        new: usize,
        /// Which model.
        model: &'static str,
        /// The longest sequence that it can read.
        max_len: usize,
    },
    /// A setting that counts something is 0.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// A stop sequence has no tokens.
    #[error("stop sequence {index} is empty")]
    EmptyStop {
        /// Its index.
        index: usize,
    },
    /// Beams follow the most likely texts; they draw nothing.
    #[error("beams draw nothing: the sampler must be greedy, but has temperature {temperature}")]
    BeamsDraw {
        /// The sampler's temperature.
        temperature: f64,
    },
    /// More texts are asked for than there are beams.
    #[error("{returned} texts are to be returned, but there are {beams} beams")]
    BeamsReturned {
        /// Texts to be returned.
        returned: usize,
        /// Beams.
        beams: usize,
    },
    /// The length penalty is not a number.
    #[error("the length penalty is {0}, but must be finite")]
    LengthPenalty(f64),
    /// The draft has another vocabulary than the model.
    #[error("the draft has a vocabulary of {draft} tokens, the model of {model}")]
    DraftVocabulary {
        /// Tokens of the draft's.
        draft: usize,
        /// Tokens of the model's.
        model: usize,
    },
    /// The draft broke its contract.
    #[error(
        "the draft was asked for at most {count} tokens for each of {rows} sequences: {problem}"
    )]
    Draft {
        /// The most tokens it may propose.
        count: usize,
        /// Sequences.
        rows: usize,
        /// What it did.
        problem: String,
    },
    /// The decoder broke its contract.
    #[error("the decoder returned logits {actual:?}, but must return {expected:?}")]
    Logits {
        /// `[sequences, rows, vocabulary]` as it was asked for.
        expected: [usize; 3],
        /// The shape that came.
        actual: [usize; 3],
    },
}

/// Where a token stands that is not in the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenPlace {
    /// In a prompt.
    Prompt {
        /// Its index.
        sequence: usize,
        /// Where in it.
        position: usize,
    },
    /// Among the stop tokens.
    Stop,
    /// In a stop sequence.
    StopSequence {
        /// Its index.
        index: usize,
    },
    /// In what a draft proposes.
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
