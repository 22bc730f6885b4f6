//! The definitions shared by all engines of flash-dma: the shapes and options of a dynamic-mask attention problem
//! ([`Problem`], [`AttentionOptions`]), the errors of an invalid one ([`AttentionError`]), the form of a selection
//! ([`Interval`]) and the rule that makes one ([`SelectionRule`]), and the cost ([`cost`]) and memory ([`memory`]) of a
//! problem.
//!
//! No framework, no allocation, no arithmetic on tensors. The CPU engine, the CubeCL kernels, the Burn extension and
//! the benchmarks all depend on this crate and re-export the parts that their users need.
//!
//! # Shapes
//!
//! | tensor | shape | type |
//! |---|---|---|
//! | `q`, `out` | `[batch, q_heads, q_len, head_dim]` | f32, f16 or bf16 |
//! | `k`, `v` | `[batch, kv_heads, k_len, head_dim]` | as `q` |
//! | `scores` | `[batch, kv_heads, k_len]` | f32 |
//! | `lse` | `[batch, q_heads, q_len]` | f32 |
//! | intervals | `[batch, kv_heads, k_len, 2]` | 32-bit integer |
//! | mask, bias | `[batch \| 1, q_heads \| kv_heads \| 1, q_len \| 1, k_len \| 1]` | bool, f32 |
//!
//! Decoding: [`CacheShape`], [`AppendProblem`], [`DecodeProblem`]; RMS norm and rotary encoding: [`NormProblem`].
//!
//! `q_heads` is a multiple of `kv_heads`; query head `h` reads kv head `h / (q_heads / kv_heads)`.
#![warn(missing_docs)]

mod alibi;
mod cache;
pub mod cost;
pub mod dropout;
mod element;
mod engine;
mod error;
mod grid;
mod interval;
mod leave_one_out;
mod masked;
pub mod memory;
mod norm;
mod options;
mod problem;
mod rule;
pub mod tensors;
mod update;

pub use alibi::AlibiSlopes;
pub use cache::{AppendProblem, Appending, CacheShape, DecodeProblem, MAX_DECODE_TOKENS, Storage};
pub use dropout::Dropout;
pub use element::ElementType;
pub use engine::{Engine, EngineChoice, EngineReport, Obstacle, PassKind, PassedOver};
pub use error::{AttentionError, TensorName};
pub use grid::check_grid;
pub use interval::Interval;
pub use leave_one_out::OWN_OUTPUT_WEIGHT;
pub use masked::{MaskedProblem, PlanGeometry};
pub use norm::{MAX_NORM_WIDTH, NormProblem, Rotary};
pub use options::AttentionOptions;
pub use problem::{MAX_HEAD_DIM, Problem, TensorSpec, contiguous_strides};
pub use rule::{KeptKeys, ScoreRole, SelectionRule};
pub use update::{AdamWStep, SQUARE_SUMS};
