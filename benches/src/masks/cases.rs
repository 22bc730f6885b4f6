//! The timed cases and phases.

use Pattern::{All, Documents, Scattered, Top, Unmasked, Window};

/// Which keys `j <= i` query `i` sees.
#[derive(Clone, Copy, Debug)]
pub enum Pattern {
    /// All keys: no mask is passed.
    Unmasked,
    /// All keys, through a mask.
    All,
    /// The keys less than this many positions before the query.
    Window(usize),
    /// The keys of the same document, each of this length.
    Documents(usize),
    /// The `w` keys of greatest bias among those that causal masking leaves.
    Top(usize),
    /// Each key with this probability.
    Scattered(f64),
}

/// The bias added to the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bias {
    /// No bias.
    None,
    /// One value per key of every kv head.
    Keys,
    /// One value per pair, shared by all heads.
    Pairs,
    /// One value per pair and head of `q`.
    HeadPairs,
}

impl Bias {
    pub fn shape(self, q_heads: usize, kv_heads: usize, len: usize) -> Option<[usize; 4]> {
        match self {
            Self::None => None,
            Self::Keys => Some([1, kv_heads, 1, len]),
            Self::Pairs => Some([1, 1, len, len]),
            Self::HeadPairs => Some([1, q_heads, len, len]),
        }
    }
}

/// One shape and mask: causal self-attention of one sequence, bf16.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Name in the rows.
    pub name: &'static str,
    pub q_heads: usize,
    pub kv_heads: usize,
    /// Queries and keys.
    pub len: usize,
    pub head_dim: usize,
    /// The mask, one for all heads.
    pub pattern: Pattern,
    /// The bias.
    pub bias: Bias,
    /// Dropout probability of a pair; `None` is no dropout.
    pub dropout: Option<f32>,
}

const fn layer(name: &'static str, len: usize, pattern: Pattern, bias: Bias) -> Case {
    Case {
        name,
        q_heads: 32,
        kv_heads: 8,
        len,
        head_dim: 128,
        pattern,
        bias,
        dropout: None,
    }
}

/// Without a bias, one pair in ten is dropped.
const fn dropping(name: &'static str, len: usize, pattern: Pattern) -> Case {
    Case {
        dropout: Some(0.1),
        ..layer(name, len, pattern, Bias::None)
    }
}

/// The project's target cases, and the cases they are compared with.
pub const CASES: &[Case] = &[
    layer("n8k-unmasked", 8192, Unmasked, Bias::None),
    layer("n8k-all-visible", 8192, All, Bias::None),
    layer("n8k-top2048-key-bias", 8192, Top(2048), Bias::Keys),
    layer("n8k-pair-bias", 8192, Unmasked, Bias::Pairs),
    layer("n8k-window1024-pair-bias", 8192, Window(1024), Bias::Pairs),
    layer("n2k-head-pair-bias", 2048, Unmasked, Bias::HeadPairs),
    layer("n8k-scattered25", 8192, Scattered(0.25), Bias::None),
    layer("n8k-window1024", 8192, Window(1024), Bias::None),
    layer("n32k-window1024", 32768, Window(1024), Bias::None),
    layer("n32k-documents2k", 32768, Documents(2048), Bias::None),
    dropping("n8k-all-visible-dropout", 8192, All),
    dropping("n8k-window1024-dropout", 8192, Window(1024)),
    dropping("n32k-window1024-dropout", 32768, Window(1024)),
    dropping("n32k-documents2k-dropout", 32768, Documents(2048)),
];
