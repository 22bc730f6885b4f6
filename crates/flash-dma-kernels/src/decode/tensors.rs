//! What the kernels of a decode step are launched with. Tensors described for slots are not read with pages, and conversely.

use cubecl::prelude::*;

/// The cache, the new tokens, and where they go.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct StepTensors<E: Float, N: Size> {
    /// The cache's keys, contiguous `[batch, kv_heads, window, head_dim]` or `[pages, kv_heads, page_len, head_dim]`.
    pub k: OwnedTensor<Vector<E, N>>,
    /// As `k`.
    pub v: OwnedTensor<Vector<E, N>>,
    /// `[batch, kv_heads, tokens, head_dim]`, any strides with a contiguous last axis.
    pub new_k: OwnedTensor<Vector<E, N>>,
    /// As `new_k`.
    pub new_v: OwnedTensor<Vector<E, N>>,
    /// Contiguous `[batch, kv_heads, window]` or `[pages, kv_heads, page_len]`.
    pub score: Box<[f32]>,
    /// `[batch, kv_heads, tokens]`, last axis contiguous.
    pub new_scores: OwnedTensor<f32>,
    /// Slots: the plan, contiguous `[batch * kv_heads, tokens]` of entries; pages: the table, contiguous
    /// `[batch, max_pages]`.
    pub places: Box<[i32]>,
    /// Pages: `[batch]`.
    pub lengths: Box<[i32]>,
}

/// What competes for the slots of a cache: the keys in them, and new tokens.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Contenders {
    /// The cache's, contiguous `[batch, kv_heads, window]`.
    pub score: Box<[f32]>,
    /// As `score`.
    pub position: Box<[i32]>,
    /// `[batch]`.
    pub seen: Box<[i32]>,
    /// `[batch, kv_heads, tokens]`, last axis contiguous.
    pub new_scores: OwnedTensor<f32>,
}

/// New tokens, and where they go.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct NewTokens<E: Numeric, N: Size> {
    /// `[batch, kv_heads, tokens, head_dim]`, any strides with a contiguous last axis.
    pub k: OwnedTensor<Vector<E, N>>,
    /// As `k`.
    pub v: OwnedTensor<Vector<E, N>>,
    /// `[batch, kv_heads, tokens]`, last axis contiguous.
    pub scores: OwnedTensor<f32>,
    /// Slots: contiguous `[batch * kv_heads, entries]` of entries. Pages: the table, contiguous `[batch, max_pages]`.
    pub places: Box<[i32]>,
}

/// A cache of slots. The rows of the moves are overwritten.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SlotTensors<E: Numeric, N: Size> {
    /// Contiguous `[batch, kv_heads, window, head_dim]`.
    pub k: OwnedTensor<Vector<E, N>>,
    /// As `k`.
    pub v: OwnedTensor<Vector<E, N>>,
    /// Contiguous `[batch, kv_heads, window]`.
    pub score: Box<[f32]>,
    /// As `score`.
    pub position: Box<[i32]>,
    /// `[batch]`; the tokens are added.
    pub seen: Box<[i32]>,
}

/// A cache of pages. The rows of the new tokens are overwritten.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PageTensors<E: Numeric, N: Size> {
    /// Contiguous `[pages, kv_heads, page_len, head_dim]`.
    pub k: OwnedTensor<Vector<E, N>>,
    /// As `k`.
    pub v: OwnedTensor<Vector<E, N>>,
    /// With scores: contiguous `[pages, kv_heads, page_len]`.
    pub scores: Box<[f32]>,
    /// `[batch]`.
    pub lengths: Box<[i32]>,
}

/// The parts of the keys, and what they are merged into.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct MergedParts<E: Float> {
    /// Contiguous `[parts, rows, head_dim]`, each row of a part divided by that part's own sum.
    pub part_out: Box<[Vector<f32, Const<2>>]>,
    /// Contiguous `[parts, rows]`, -inf where a row attends to none of the part's keys.
    pub part_lse: Box<[f32]>,
    /// Contiguous `[rows, head_dim]`, overwritten.
    pub out: Box<[Vector<E, Const<2>>]>,
    /// Contiguous `[rows]`, overwritten.
    pub lse: Box<[f32]>,
}
