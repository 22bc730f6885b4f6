//! The reasons for refusing a call. Every check runs on the host before anything is launched or written.

mod kinds;

use crate::{ElementType, Engine, Obstacle, PassKind};
use core::fmt;

/// Declares [`TensorName`]: the tensors and their display texts.
macro_rules! tensor_names {
    ($($name:ident = $text:literal,)*) => {
        /// The tensors of a problem, as named in errors.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[allow(missing_docs)]
        pub enum TensorName {
            $($name,)*
        }

        impl fmt::Display for TensorName {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$name => $text,)*
                })
            }
        }
    };
}

tensor_names! {
    Query = "q",
    Key = "k",
    Value = "v",
    Scores = "scores",
    Rank = "the rank",
    Intervals = "intervals",
    RunnerUpEnds = "the ends of the runners-up",
    KeptFrom = "the first positions of kept keys",
    PackedQueryKeyValue = "qkv",
    PackedKeyValue = "kv",
    Out = "out",
    Residual = "the residual of out",
    Lse = "lse",
    LseRest = "lse_rest",
    GradOut = "the gradient of out",
    GradLse = "the gradient of lse",
    GradQuery = "the gradient of q",
    GradKey = "the gradient of k",
    GradValue = "the gradient of v",
    GradScores = "the gradient of scores",
    GradRank = "the gradient of the rank",
    Mask = "the mask",
    Plan = "the tile plan",
    FirstKeys = "first of the key ranges",
    EndKeys = "end of the key ranges",
    Bias = "the bias",
    GradBias = "the gradient of the bias",
    Tokens = "x",
    GradTokens = "the gradient of x",
    NormWeight = "gamma",
    GradNormWeight = "the gradient of gamma",
    RotaryTable = "the rotary table",
    DtProjection = "dt_proj",
    Decay = "a",
    ScoreProjection = "score_proj",
    SinkLogits = "the sink logits",
    CachedKey = "the cached k",
    CachedValue = "the cached v",
    CachedScores = "the cached scores",
    CachedPositions = "the cached positions",
    Seen = "the count of seen tokens",
    PageTable = "the page table",
    Lengths = "the lengths of the sequences",
    Weight = "the weight",
    Gate = "the gate",
    Up = "up",
    GradGate = "the gradient of the gate",
    GradUp = "the gradient of up",
    LeftFactor = "the left factor",
    RightFactor = "the right factor",
    Product = "the product",
    Targets = "the targets",
    Logits = "the logits",
    GradLogits = "the gradient of the logits",
    Losses = "the losses",
    GradLosses = "the gradient of the losses",
    Normaliser = "the normaliser",
    Parameter = "the parameter",
    GradParameter = "the gradient of the parameter",
    FirstMoment = "the first moment",
    SecondMoment = "the second moment",
    ClipFactor = "the clip factor",
    SquareSums = "the sums of squares",
}

/// The reason for refusing a problem. The fields are those of the error's text; axes and other indices count from 0.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum AttentionError {
    /// A tensor has a different number of axes than its role requires.
    #[error("{tensor} must have {expected} axes, but has {actual}")]
    Rank {
        tensor: TensorName,
        expected: usize,
        actual: usize,
    },
    /// An axis has a different size than the other tensors imply.
    #[error("{tensor} must have size {expected} on axis {axis}, but has {actual}")]
    Shape {
        tensor: TensorName,
        axis: usize,
        expected: usize,
        actual: usize,
    },
    /// An axis of a mask or bias has neither the size of the logits nor 1.
    #[error(
        "{tensor} must have size 1{} on axis {axis}, but has {actual}",
        alternatives(sizes)
    )]
    Broadcast {
        tensor: TensorName,
        axis: usize,
        /// The sizes other than 1 that it may have.
        sizes: Vec<usize>,
        actual: usize,
    },
    /// The plan was made with causal masking and the call is without, or vice versa.
    #[error("the tile plan was made with causal = {plan}, but the options say {options}")]
    PlanCausal { plan: bool, options: bool },
    /// A buffer for the gradient of a bias without a bias.
    #[error("the gradient of the bias has a buffer, but there is no bias")]
    BiasGradient,
    /// `q_heads` is not a positive multiple of `kv_heads`.
    #[error("the {q_heads} query heads are no positive multiple of the {kv_heads} key/value heads")]
    HeadRatio { q_heads: usize, kv_heads: usize },
    /// The head dimension is not a multiple of 8 from 8 to 256.
    #[error("head dimension {head_dim} is not supported: it must be a multiple of 8 from 8 to 256")]
    HeadDim { head_dim: usize },
    /// A tensor has a different element type than its role requires.
    #[error("{tensor} must be {expected}, but is {actual}")]
    ElementType {
        tensor: TensorName,
        /// The expected element type, in words.
        expected: String,
        /// The actual element type, in words.
        actual: String,
    },
    /// A tensor lives on another device than `q`.
    #[error("{tensor} is on another device than q")]
    Device { tensor: TensorName },
    /// The two tensors of key ranges live on different devices.
    #[error("first and end of the key ranges are on different devices")]
    RangesDevice,
    /// The last axis of a tensor is not contiguous, or an output is not contiguous as a whole.
    #[error("{tensor} must have a contiguous last axis, but its strides are {strides:?}")]
    Strides {
        tensor: TensorName,
        /// Its strides, in elements.
        strides: Vec<usize>,
    },
    /// A buffer ends before its shape and strides do.
    #[error("{tensor} needs {needed} elements, but its buffer has {actual}")]
    Buffer {
        tensor: TensorName,
        needed: usize,
        actual: usize,
    },
    /// A window of zero keys.
    #[error("the keep window must be at least 1")]
    ZeroWindow,
    /// A keep window was given but no scores to rank the keys by.
    #[error("a keep window needs scores to rank the keys by")]
    WindowWithoutScores,
    /// The options request a different window than the intervals were made with.
    #[error(
        "the options keep {} keys, but the intervals were selected for {}",
        words(*options, "all"),
        words(*intervals, "all")
    )]
    IntervalsWindow {
        /// The most keys alive at one position of the intervals: the window they were selected for, `usize::MAX` for
        /// all keys.
        intervals: usize,
        /// The keep window of the options, `usize::MAX` for all keys.
        options: usize,
    },
    /// Recent keys and sinks take more places than the window has.
    #[error("{recent} recent keys and {sinks} sinks pass the window of {window} keys")]
    WindowParts {
        recent: usize,
        sinks: usize,
        /// The window; the smallest if every head has its own.
        window: usize,
    },
    /// The number of windows is not the number of kv heads.
    #[error("there are {windows} windows for {kv_heads} key/value heads")]
    HeadWindows { windows: usize, kv_heads: usize },
    /// Recent keys, sinks or documents without causal masking.
    #[error(
        "recent keys, sinks and documents need causal masking: without it all queries stand at one position"
    )]
    SelectionNotCausal,
    /// Documents have different numbers of queries and keys.
    #[error(
        "documents need as many queries as keys, but there are {q_len} and {k_len}: use masked attention"
    )]
    DocumentQueries { q_len: usize, k_len: usize },
    /// The documents are of another number of sequences.
    #[error("the documents are those of {documents} sequences, but there are {batch}")]
    DocumentBatch {
        documents: usize,
        /// Sequences of the tensors, or of the documents of the keys.
        batch: usize,
    },
    /// Documents do not add up to their sequence.
    #[error("the documents of sequence {sequence} have {tokens} tokens, but it has {k_len}")]
    DocumentTokens {
        sequence: usize,
        tokens: usize,
        /// Tokens of the sequence: keys per head, or queries.
        k_len: usize,
    },
    /// The queries of a sequence have another number of documents than its keys.
    #[error("sequence {sequence} has the queries of {queries} documents, but the keys of {keys}")]
    DocumentCounts {
        sequence: usize,
        queries: usize,
        keys: usize,
    },
    /// A mask differs between queries where a selection by intervals is needed.
    #[error(
        "a mask that differs between queries rules out {what}: it leaves keys on no interval of queries"
    )]
    MaskedSelection { what: &'static str },
    /// Recent keys or sinks, which count toward a keep window, without one.
    #[error(
        "{recent} recent keys and {sinks} sinks are counted in a keep window, but there is none: every key is kept"
    )]
    PartsWithoutWindow { recent: usize, sinks: usize },
    /// A rotary encoding for no positions, or with a base that is not positive and finite.
    #[error(
        "a rotary encoding needs at least 1 position and a positive, finite base, but has {positions} and {base}"
    )]
    Rotary { positions: usize, base: f32 },
    /// Cumulative lengths do not begin with 0, or fall.
    #[error("cumulative lengths must begin with 0 and never fall, which entry {index} breaks")]
    CumulativeLengths { index: usize },
    /// A given interval does not begin at its key, or ends out of bounds.
    #[error(
        "the interval of key {key} must begin at it and end at {key} to {k_len}, but is {first}..{end}"
    )]
    IntervalBounds {
        key: usize,
        first: i64,
        /// One past the last position.
        end: i64,
        k_len: usize,
    },
    /// Scores were given without their intervals, or intervals without scores.
    #[error("scores and intervals must be given together")]
    ScoresWithoutIntervals,
    /// A problem with scores that learn got no buffer for their gradient, or one without such scores got one.
    #[error("the gradient of scores needs a buffer exactly if there are scores that learn")]
    ScoresGradient,
    /// A selection with runners-up got no buffer for their gradient, or one without got one.
    #[error("the gradient of the rank needs a buffer exactly if there are runners-up")]
    RankGradient,
    /// A residual for outputs that are f32.
    #[error("the residual of out has a buffer, but rounding to f32 loses nothing")]
    Residual,
    /// The scale is NaN or infinite.
    #[error("the scale must be finite, but is {scale}")]
    Scale { scale: f32 },
    /// The softcap is not positive and finite.
    #[error("the softcap must be positive and finite, but is {softcap}")]
    Softcap { softcap: f32 },
    /// The dropout rate is not a probability less than 1.
    #[error("the dropout rate must be at least 0 and less than 1, but is {rate}")]
    DropoutRate { rate: f32 },
    /// A cache was given options with dropout, which is only for training.
    #[error("a cache serves inference: its options must have no dropout")]
    CacheDropout,
    /// A slope of ALiBi is NaN or infinite.
    #[error("the ALiBi slope of head {head} must be finite, but is {slope}")]
    AlibiSlope { head: usize, slope: f32 },
    /// Heads take turns of 0 tokens or more than an i32 holds, or the layer's scores do more than rank.
    #[error(
        "heads must be dealt at least 1 token in turn, by scores that only rank, but it is {run}"
    )]
    Turns { run: usize },
    /// The number of ALiBi slopes is not the number of query heads.
    #[error("there are {slopes} ALiBi slopes for {q_heads} query heads")]
    AlibiHeads { slopes: usize, q_heads: usize },
    /// A cache was given options with ALiBi, which its kernels do not add.
    #[error("a cache has no kernels with ALiBi: its options must have none")]
    CacheAlibi,
    /// The epsilon of a norm is not positive and finite.
    #[error("the epsilon of a norm must be positive and finite, but is {epsilon}")]
    Epsilon { epsilon: f32 },
    /// A norm lacks its weight or input or a rotary encoding its table, or one of these was given and is not needed.
    #[error("{tensor} must be given exactly if the problem has it")]
    NormOperand { tensor: TensorName },
    /// Positions would exceed 32 bits.
    #[error(
        "the cache has been given {held} tokens: {tokens} more pass the greatest number of positions, {limit}"
    )]
    Positions {
        /// Tokens that the longest sequence has been given.
        held: usize,
        tokens: usize,
        limit: usize,
    },
    /// The page table has no room for the tokens.
    #[error("the page table holds {held} tokens of {capacity}: there is no room for {tokens} more")]
    PagesFull {
        /// Tokens that the longest sequence holds.
        held: usize,
        tokens: usize,
        capacity: usize,
    },
    /// Pages of zero tokens, or zero pages per sequence.
    #[error("a page must hold at least one token, and a sequence at least one page")]
    EmptyPages,
    /// Tokens without scores for a cache that has them, or vice versa.
    #[error("scores must be given exactly if the cache has them, as slots do")]
    CacheScores,
    /// The options request a different window than the cache keeps.
    #[error("the options keep {options} keys, but the cache keeps {cache}")]
    CacheWindow {
        /// The keys that the cache keeps, in words.
        cache: String,
        /// The keys that the options keep, in words.
        options: String,
    },
    /// Decoding without causal masking.
    #[error("attention over a cache is causal")]
    CacheNotCausal,
    /// The pool has too few free pages and does not grow.
    #[error("{needed} pages are needed, but the pool has {free}")]
    PagesUsed { needed: usize, free: usize },
    /// The cache does not have the sequence.
    #[error("there is no sequence {index}: the cache has {batch}")]
    Sequence { index: usize, batch: usize },
    /// A call would change or save a cache while tokens are held.
    #[error("{waiting} tokens are held: accept those that stay, or none, before this")]
    TokensWait { waiting: usize },
    /// Tokens were accepted in a cache that does not hold its tokens.
    #[error("the cache does not hold: call hold before the step whose tokens are to wait")]
    NotHolding,
    /// More tokens were accepted than are held.
    #[error("{count} tokens cannot be accepted: {waiting} are held")]
    TooManyAccepted { count: usize, waiting: usize },
    /// The input is not the whole sequence, whose first tokens the cache holds.
    #[error(
        "the input is to be the whole sequence, {expected} tokens or more: the cache holds {held}, but it has {tokens}"
    )]
    WholeSequence {
        held: usize,
        expected: usize,
        tokens: usize,
    },
    /// There is nothing to merge.
    #[error("there are no parts of an attention to merge")]
    NoParts,
    /// There is nothing to join.
    #[error("there are no caches to join")]
    NoCaches,
    /// Caches of different kinds cannot be joined.
    #[error("cache {index} cannot be joined to cache 0: they differ in their {what}")]
    JoinedCaches {
        index: usize,
        /// The difference, in words.
        what: &'static str,
    },
    /// A sequence does not have, or no longer has, the prefix to share.
    #[error(
        "sequence {sequence} can share its first {least} to {most} tokens, but {tokens} were asked for"
    )]
    Prefix {
        sequence: usize,
        tokens: usize,
        /// The shortest prefix it can share: with a window, the pages before it are gone.
        least: usize,
        most: usize,
    },
    /// A page table from outside does not fit, or a call would change one.
    #[error("the block table does not fit: {reason}")]
    BlockTable { reason: String },
    /// A tensor tracked by autodiff was given to an operation without gradients.
    #[error(
        "{tensor} is tracked by autodiff, but a cache has no gradients: use it without autodiff"
    )]
    Tracked { tensor: TensorName },
    /// A saved cache does not fit.
    #[error("the saved cache does not fit: {reason}")]
    Record { reason: String },
    /// A size exceeds what the engine can index.
    #[error("{what} is {}, past the limit of {limit}", words(*size, "more than can be counted"))]
    TooLarge {
        what: &'static str,
        /// Its value; `usize::MAX` for anything larger.
        size: usize,
        limit: usize,
    },
    /// A launch would need more cubes along an axis of its grid than the device has.
    #[error(
        "{what} is {size}, and the device launches {limit} at once: split the batch over several calls"
    )]
    Grid {
        what: &'static str,
        size: usize,
        limit: usize,
    },
    /// The requested engine does not serve the call.
    #[error("{engine} cannot run {pass}: {obstacle}")]
    Engine {
        engine: Engine,
        pass: PassKind,
        obstacle: Obstacle,
    },
    /// The backend has no engine for attention.
    #[error(
        "the backend {backend} has no engine of attention: take a device of Flex or of a CubeCL runtime"
    )]
    NoEngine {
        /// Burn's name of the backend.
        backend: String,
    },
    /// The device lacks what the engine needs.
    #[error("the device does not support {what}")]
    Unsupported { what: String },
    /// The device failed during computation: memory ran out, a kernel did not compile or was refused, or a fault ended
    /// its context. The outputs of the operation must not be used; unless the context has ended, the next operation
    /// runs.
    #[error("{operation} failed on the device: {reason}")]
    DeviceFailed {
        operation: &'static str,
        /// The message of the runtime.
        reason: String,
    },
    /// A device of a group did not do its part of a step.
    #[error("device {device} of the group {reason}")]
    Group {
        /// Its place in the group.
        device: usize,
        reason: String,
    },
    /// The gradients of a backward pass would be differentiated again.
    #[error(
        "{tensor} is tracked by autodiff in a backward pass, but there are no second derivatives"
    )]
    SecondOrder { tensor: TensorName },
}

impl AttentionError {
    /// The [`AttentionError::ElementType`] for two supported types.
    #[must_use]
    pub fn element_type(tensor: TensorName, expected: ElementType, actual: ElementType) -> Self {
        Self::ElementType {
            tensor,
            expected: expected.to_string(),
            actual: actual.to_string(),
        }
    }
}

/// A number in words: `most` stands for `usize::MAX`, which means any greater number, too.
fn words(number: usize, most: &str) -> String {
    match number {
        usize::MAX => most.into(),
        number => number.to_string(),
    }
}

/// The sizes without 1 and without repetitions, as `, 4 or 2`.
fn alternatives(sizes: &[usize]) -> String {
    let mut sizes = sizes.to_vec();
    sizes.retain(|&n| n != 1);
    sizes.dedup();
    let last = sizes.pop().map_or(String::new(), |n| format!(" or {n}"));
    sizes.iter().map(|n| format!(", {n}")).collect::<String>() + &last
}
