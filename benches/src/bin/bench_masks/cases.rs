//! What is timed.

/// Which keys `j <= i` query `i` sees.
#[derive(Clone, Copy, Debug)]
pub enum Pattern {
    /// All: no mask is passed.
    Unmasked,
    /// All, by a mask.
    All,
    /// Those less than so many behind.
    Window(usize),
    /// Those of the same document of this length.
    Documents(usize),
    /// The `w` of greatest bias among those that causal masking leaves.
    Top(usize),
    /// Each with this probability.
    Scattered(f64),
}

/// One shape and mask: causal self-attention of one sequence, bf16.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Short name, the key of a result row.
    pub name: &'static str,
    /// Heads of `q`.
    pub q_heads: usize,
    /// Heads of `k` and `v`.
    pub kv_heads: usize,
    /// Queries and keys.
    pub len: usize,
    /// Elements a row.
    pub head_dim: usize,
    /// The mask, one for all heads.
    pub pattern: Pattern,
    /// Whether every key of every kv head has a bias.
    pub bias: bool,
}

const fn layer(name: &'static str, len: usize, pattern: Pattern, bias: bool) -> Case {
    Case {
        name,
        q_heads: 32,
        kv_heads: 8,
        len,
        head_dim: 128,
        pattern,
        bias,
    }
}

/// The targets of the project, and what they are measured against.
pub const CASES: &[Case] = &[
    layer("n8k-unmasked", 8192, Pattern::Unmasked, false),
    layer("n8k-all-visible", 8192, Pattern::All, false),
    layer("n8k-top2048-key-bias", 8192, Pattern::Top(2048), true),
    layer("n8k-scattered25", 8192, Pattern::Scattered(0.25), false),
    layer("n8k-window1024", 8192, Pattern::Window(1024), false),
    layer("n32k-window1024", 32768, Pattern::Window(1024), false),
    layer("n32k-documents2k", 32768, Pattern::Documents(2048), false),
];
