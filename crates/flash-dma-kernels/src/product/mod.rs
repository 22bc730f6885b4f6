//! Products of matrices: the rest of a training step's time, apart from attention.
//!
//! `C = A B` with sums in f32, for the three products of a linear layer on `T` tokens: its output `X W`, the gradient
//! of its input `dY Wᵀ`, and the gradient of its weight `Xᵀ dY`, whose sums run over all tokens. A [rule](Choice::of)
//! picks the kernel and the number of parts that the sums are cut into; nothing is tuned at run time.
//!
//! | kernel | of | served |
//! |---|---|---|
//! | [`Route::FewRows`] | this crate, `few_rows/` | few contiguous rows, as for a decoded token |
//! | [`Route::Wgmma`] | this crate, `wgmma/` | f16 and bf16 on sm_90, rows that begin at multiples of 16 bytes |
//! | [`Route::Standard`] | CubeK (`standard.rs`), as Burn chooses it without autotune | everything |
//!
//! f32 operands of more rows take [`Route::Standard`]: as in Burn, a device with tensor cores then multiplies in TF32,
//! unless [`ENGINE_VARIABLE`](crate::ENGINE_VARIABLE) excludes them. Those of few rows are multiplied in f32.

pub(crate) mod few_rows;
mod operands;
mod parts;
mod rule;
mod run;
mod standard;
pub(crate) mod wgmma;

pub use operands::{Operands, Sizes};
pub use rule::{Choice, Route};
pub use run::{product, product_by};
pub use wgmma::Tile;
