//! A problem as a value: everything that is needed to reproduce it, in one line of text.

use super::large::Large;
use crate::masked::{MaskedCase, Pattern};
use crate::{Layout, Raw};
use flash_dma_problem::{AlibiSlopes, AttentionOptions, Dropout, ElementType, ScoreRole};
use flash_dma_reference::generate::Scores;

/// One problem. Its [`Display`](core::fmt::Display) form is one line that parses back to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// The operation.
    pub what: What,
    /// Element type of q, k, v.
    pub element: ElementType,
    /// Sequences.
    pub batch: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Query heads per key/value head.
    pub group: usize,
    /// Queries; for a cache its tokens, equal to [`k_len`](Self::k_len).
    pub q_len: usize,
    /// Keys.
    pub k_len: usize,
    /// Elements per row.
    pub head_dim: usize,
    /// Causal masking.
    pub causal: bool,
    /// Factor on `q . k`, if it is not the default.
    pub scale: Option<f32>,
    /// Cap of the logits.
    pub softcap: Option<f32>,
    /// True if there is ALiBi, with the standard slopes.
    pub alibi: bool,
    /// The cause of great logits, if there is one.
    pub large: Option<Large>,
    /// True if each query head has a sink logit, without a key.
    pub sink: bool,
    /// True if bit-equal repeats are requested.
    pub deterministic: bool,
    /// The rate of the dropout, whose seed is that of the random numbers.
    pub dropout: Option<f32>,
    /// True if the LSE has a gradient, too.
    pub grad_lse: bool,
    /// Standard deviation of q, k and v.
    pub deviation: f64,
    /// The places of q, k, v, the gradient of `out`, the scores or the bias, and the mask.
    pub places: [Place; 6],
    /// The seed of the random numbers.
    pub seed: u64,
}

/// The operations.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// Attention without scores.
    Plain,
    /// Dynamic-mask attention.
    Scored {
        /// Keys that each query keeps; `None` keeps all.
        window: Option<usize>,
        /// The kind of scores.
        scores: Scores,
        /// The use of the scores in selecting the keys.
        selecting: Selecting,
    },
    /// Attention under a mask, a bias, both or neither.
    Masked {
        /// The axes and the pattern of the mask.
        mask: Option<(Axes, Pattern)>,
        /// The axes of the bias, and true if some of it is −∞.
        bias: Option<(Axes, bool)>,
        /// True if the mask is passed as the pairs that it hides.
        hidden: bool,
    },
    /// Decoding over a cache.
    Decoded(Decoding),
}

/// The way scores select. The default is the best keys of a window, for which they are biases, too.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Selecting {
    /// The source of the intervals.
    pub by: By,
    /// Number of runners-up per query: keys that just miss the window.
    pub runners_up: Option<usize>,
    /// True if kept keys learn.
    pub left_out: bool,
    /// True if ranks compete.
    pub competes: bool,
    /// True if the logits get a tensor other than the rank: a normal one.
    pub apart: bool,
    /// True if the scores are constant, where a rank learns.
    pub constant: bool,
}

impl Selecting {
    /// True if the scores are constant.
    pub fn has_constant_scores(&self) -> bool {
        self.constant && (self.left_out || self.runners_up.is_some())
    }
}

/// The source of the intervals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The order of the scores.
    Rank(Parts),
    /// Ends that are independent of scores.
    Ends(Ends),
}

impl Default for By {
    fn default() -> Self {
        Self::Rank(Parts::default())
    }
}

/// The parts of a rule, apart from its window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Recent keys.
    pub recent: usize,
    /// Sinks.
    pub sinks: usize,
    /// The length of most documents, if there are some.
    pub documents: Option<usize>,
    /// By how much the window of each head is smaller than that of the head before it.
    pub narrower: usize,
}

/// Ends of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// On average a window after the key.
    Random,
    /// At the next multiple of the window, or one later.
    Waves,
}

/// The pieces in which a cache gets its tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoding {
    /// Slots or pages.
    pub storage: Store,
    /// The role of the scores in slots.
    pub role: ScoreRole,
    /// The kind of scores, if the cache has any.
    pub scores: Scores,
    /// Tokens that are appended before the first step.
    pub prefill: usize,
    /// Tokens of each step. One of more than [`MAX_STEP`] is a chunk: a forward pass over the slots' keys and the
    /// tokens, which are then appended.
    pub pieces: Vec<usize>,
    /// Number of wrong tokens that each decode step attends with after its own, as far as it has room for them: a
    /// guess. Such a step appends nothing, and its own tokens are accepted afterwards. With `None`, steps append their
    /// tokens.
    pub wrong: Option<usize>,
    /// Number of tokens of the prefill that every sequence shares with the first one. Pages that hold only such tokens
    /// are the first sequence's for all.
    pub shared: usize,
}

/// The most tokens of a decode step.
pub const MAX_STEP: usize = flash_dma_problem::MAX_DECODE_TOKENS;

/// The storage of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// This many keys of each head.
    Slots(usize),
    /// All keys.
    Pages {
        /// Tokens per page.
        page_len: usize,
        /// True if keys carry scores.
        scored: bool,
        /// How many of the last keys a query attends to, if not all.
        last: Option<usize>,
    },
}

/// The axes of `[batch, heads, queries, keys]` that a mask or bias has; along the others it is broadcast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axes {
    /// A row for each sequence.
    pub batch: bool,
    /// The heads with separate rows.
    pub heads: Heads,
    /// A row for each query.
    pub queries: bool,
    /// An entry for each key.
    pub keys: bool,
}

/// The heads that a mask or bias distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heads {
    /// None.
    One,
    /// Key/value heads.
    Kv,
    /// Query heads.
    Query,
}

/// The place of a tensor: its layout, and the axis along which its values repeat with a stride of 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Row after row.
    Contiguous,
    /// Token by token.
    Transposed,
    /// With a gap between rows.
    Padded,
    /// As a part of a packed tensor.
    Packed,
    /// One sequence is read for all.
    Batch,
    /// One head is read for all.
    Heads,
    /// One token is read for all.
    Tokens,
}

impl Place {
    /// The layout of the buffer, repeated axes aside.
    pub fn layout(self) -> Layout {
        match self {
            Self::Transposed => Layout::Transposed,
            Self::Padded => Layout::Padded,
            Self::Packed => Layout::Packed,
            _ => Layout::Contiguous,
        }
    }

    /// The axis of stride 0.
    fn axis(self) -> Option<usize> {
        match self {
            Self::Batch => Some(0),
            Self::Heads => Some(1),
            Self::Tokens => Some(2),
            _ => None,
        }
    }

    /// Lays a contiguous tensor out, whose values [`repeat`](Self::repeat) as the place requires.
    pub fn place(self, raw: &mut Raw) {
        if self == Self::Contiguous {
            return;
        }
        let shape = raw.shape.clone();
        let Some(axis) = self.axis().filter(|&axis| shape[axis] > 1) else {
            *raw = Raw::new(&raw.values, &shape, raw.element, self.layout());
            return;
        };
        let inner: usize = shape[axis + 1..].iter().product();
        let rows = raw.values.chunks_exact((shape[axis] * inner).max(1));
        let once: Vec<f64> = rows.flat_map(|rows| &rows[..inner]).copied().collect();
        let mut stored = shape.clone();
        stored[axis] = 1;
        *raw = Raw::new(&once, &stored, raw.element, Layout::Contiguous);
        raw.shape = shape;
        raw.strides[axis] = 0;
    }

    /// Makes values of `shape` repeat as the place requires.
    pub fn repeat<T: Copy>(self, values: &mut [T], shape: &[usize]) {
        let Some(axis) = self.axis() else {
            return;
        };
        let inner: usize = shape[axis + 1..].iter().product();
        let size = shape[axis] * inner;
        if size > 0 {
            for rows in values.chunks_exact_mut(size) {
                let (first, others) = rows.split_at_mut(inner);
                for other in others.chunks_exact_mut(inner) {
                    other.copy_from_slice(first);
                }
            }
        }
    }
}

impl Spec {
    /// The place of q, in [`places`](Self::places).
    pub const Q: usize = 0;
    /// The place of k.
    pub const K: usize = 1;
    /// The place of v.
    pub const V: usize = 2;
    /// The place of the gradient of `out`, and of `out` where it is passed back.
    pub const GRAD_OUT: usize = 3;
    /// The place of the scores or of the bias.
    pub const SCORES: usize = 4;
    /// The place of the mask.
    pub const MASK: usize = 5;

    /// Query heads.
    pub fn q_heads(&self) -> usize {
        self.kv_heads * self.group
    }

    /// The window of the scores or the slots.
    pub fn window(&self) -> Option<usize> {
        match &self.what {
            What::Scored { window, .. } => *window,
            What::Decoded(decoding) => decoding.window(),
            _ => None,
        }
    }

    /// The options.
    pub fn options(&self) -> AttentionOptions {
        AttentionOptions {
            keep_window: self.window(),
            causal: self.causal,
            scale: self.scale,
            softcap: self.softcap,
            alibi: (self.alibi).then(|| AlibiSlopes::standard(self.kv_heads * self.group)),
            deterministic: self.deterministic,
            dropout: (self.dropout)
                .map(|rate| Dropout::new(rate, self.seed).expect("a rate of the fuzzer's")),
            ..AttentionOptions::new()
        }
    }

    /// The way the scores select, if it is not by their window alone or if the logits are not their sum in f64.
    pub fn selecting(&self) -> Option<&Selecting> {
        match &self.what {
            What::Scored { selecting, .. }
                if *selecting != Selecting::default() || self.large.is_some() =>
            {
                Some(selecting)
            }
            _ => None,
        }
    }

    /// The kind of the scores, if there are scores.
    pub fn scores(&self) -> Option<Scores> {
        match &self.what {
            What::Scored { scores, .. } => Some(*scores),
            What::Decoded(decoding) if decoding.scored() => Some(decoding.scores),
            _ => None,
        }
    }

    /// The case of a problem under a mask or bias.
    pub fn masked_case(&self) -> MaskedCase {
        let (q_heads, kv_heads) = (self.q_heads(), self.kv_heads);
        let sizes = [
            self.batch,
            q_heads,
            kv_heads,
            self.q_len,
            self.k_len,
            self.head_dim,
        ];
        let mut case = MaskedCase::new(sizes);
        case.element = self.element;
        case.options = self.options();
        if let What::Masked { mask, bias, hidden } = &self.what {
            case.mask = mask.map(|(axes, pattern)| (axes.shape(self), pattern));
            case.bias = bias.map(|(axes, _)| axes.shape(self));
            case.hidden = *hidden;
        }
        case.grad_lse = self.grad_lse;
        case.deviation = self.deviation;
        case.seed = self.seed;
        case
    }

    /// The same with lengths that follow from the pieces of a cache.
    pub fn with_lengths(mut self) -> Self {
        if let What::Decoded(decoding) = &self.what {
            self.k_len = decoding.prefill + decoding.pieces.iter().sum::<usize>();
            self.q_len = self.k_len;
        }
        self
    }
}

impl Decoding {
    /// Slots per head.
    pub fn window(&self) -> Option<usize> {
        match self.storage {
            Store::Slots(window) => Some(window),
            Store::Pages { .. } => None,
        }
    }

    /// How many of the last keys a query attends to, if not all of the pages.
    pub fn last(&self) -> Option<usize> {
        match self.storage {
            Store::Slots(_) => None,
            Store::Pages { last, .. } => last,
        }
    }

    /// Number of pages that every sequence begins with.
    pub fn shared_pages(&self) -> usize {
        match self.storage {
            Store::Slots(_) => 0,
            Store::Pages { page_len, .. } => self.shared.min(self.prefill) / page_len,
        }
    }

    /// True if keys have scores.
    pub fn scored(&self) -> bool {
        !matches!(self.storage, Store::Pages { scored: false, .. })
    }
}

impl Axes {
    /// The same, broadcast along one more axis.
    pub fn without(mut self, axis: usize) -> Self {
        match axis {
            0 => self.batch = false,
            1 => self.heads = Heads::One,
            2 => self.queries = false,
            _ => self.keys = false,
        }
        self
    }

    /// The shape for a problem.
    pub fn shape(self, spec: &Spec) -> [usize; 4] {
        let of = |has: bool, size| if has { size } else { 1 };
        let heads = match self.heads {
            Heads::One => 1,
            Heads::Kv => spec.kv_heads,
            Heads::Query => spec.q_heads(),
        };
        [
            of(self.batch, spec.batch),
            heads,
            of(self.queries, spec.q_len),
            of(self.keys, spec.k_len),
        ]
    }
}
