//! Dynamic-mask attention on slices: selection, forward and backward on the CPU, framework-free.
//!
//! Each query attends to the `window` keys of greatest score among those it may see. [`select`](select())
//! turns scores into one [`Interval`] per key; [`forward`] and [`backward`] attend by those intervals in
//! O(q_len · window) time and memory linear in the lengths. Shapes, options and the checks of a
//! problem are those of [`Problem`]; buffers are slices with strides ([`View`]).
//!
//! Work runs on rayon's current thread pool. How it is cut depends on the problem alone and every sum
//! has a fixed order, so results are bit-equal over repeats and over numbers of threads.
//!
//! ```
//! use flash_dma_cpu::{
//!     AttentionOptions, ElementType, Inputs, Interval, Outputs, Problem, Selection, View,
//! };
//!
//! let (q_shape, kv_shape) = ([1, 2, 4, 8], [1, 1, 4, 8]);
//! let q = vec![0.5f32; 64];
//! let kv: Vec<f32> = (0..32).map(|i| i as f32 * 0.1).collect();
//! let scores = [0.1, 0.9, -0.3, 0.4];
//!
//! let options = AttentionOptions::new().with_keep_window(2);
//! let problem = Problem::new(
//!     &q_shape, &kv_shape, &kv_shape, Some(&kv_shape[..3]), ElementType::F32, &options,
//! )?;
//! let scores = View::contiguous(&scores, [1, 1, 4]);
//! let mut intervals = [Interval { first: 0, end: 0 }; 4];
//! flash_dma_cpu::select(scores, problem.window, &mut intervals)?;
//! // Position 3 attends to the keys 1 and 3, the two of greatest score.
//! assert_eq!(intervals.map(|i| i.contains(3)), [false, true, false, true]);
//!
//! let inputs = Inputs {
//!     q: View::contiguous(&q, q_shape),
//!     k: View::contiguous(&kv, kv_shape),
//!     v: View::contiguous(&kv, kv_shape),
//!     selection: Some(Selection { scores, intervals: &intervals, learning: None }),
//! };
//! let (mut out, mut lse) = (vec![0.0; 64], vec![0.0; 8]);
//! flash_dma_cpu::forward(&problem, inputs, Outputs::new(&mut out, &mut lse))?;
//! # Ok::<(), flash_dma_cpu::AttentionError>(())
//! ```
#![warn(missing_docs)]

mod args;
mod attention;
pub mod cache;
mod check;
mod element;
mod gemm;
mod keys;
mod masked;
mod norm;
mod position;
mod queries;
mod scored;
mod scratch;
mod select;
mod simd;
#[cfg(test)]
mod tests;
mod tile_plan;
mod view;

pub use args::{
    Gradients, Inputs, MaskedGradients, MaskedInputs, Outputs, RankLearning, Saved, Selection,
};
pub use element::Element;
pub use flash_dma_problem::{
    AlibiSlopes, AppendProblem, Appending, AttentionError, AttentionOptions, CacheShape,
    DecodeProblem, Dropout, ElementType, Interval, KeptKeys, MaskedProblem, NormProblem,
    PlanGeometry, Problem, Rotary, ScoreRole, SelectionRule,
};
pub use masked::{masked_backward, masked_forward, plan, plan_ranges};
pub use norm::{NormGradients, NormParameters, norm_backward, norm_forward};
pub use scored::{backward, forward};
pub use select::select;
pub use view::{BroadcastView, View};
