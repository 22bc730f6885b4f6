//! Trainable dynamic-mask sparse attention for [Burn](burn): every query attends only to the `w` keys that learned
//! importance scores rank highest among those it may see, in `O(N * w)` time and `O(N)` memory, forward and backward.
//! The operation adds the given scores to the logits, as in Dynamic Mask Attention; the layers of [`nn`] only rank by
//! theirs by default ([`nn::Scores`]).
//!
//! ```
//! # #[cfg(all(feature = "flex", feature = "autodiff"))] {
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_flash_dma::{AttentionOptions, dynamic_mask_attention};
//!
//! let device = Device::flex().autodiff();
//! let normal = Distribution::Normal(0.0, 1.0);
//! // 4 query heads share 2 key/value heads; 100 tokens of 32 features per head.
//! let q = Tensor::<4>::random([1, 4, 100, 32], normal, &device).require_grad();
//! let k = Tensor::<4>::random([1, 2, 100, 32], normal, &device);
//! let v = Tensor::<4>::random([1, 2, 100, 32], normal, &device);
//! // One score per key, the same for every query.
//! let scores = Tensor::<3>::random([1, 2, 100], normal, &device).require_grad();
//!
//! // Causal, and each query keeps the 16 highest scored keys it may see.
//! let options = AttentionOptions::new().with_keep_window(16);
//! let out = dynamic_mask_attention(q.clone(), k, v, scores.clone(), options);
//! assert_eq!(out.dims(), [1, 4, 100, 32]);
//!
//! let grads = out.sum().backward();
//! assert!(q.grad(&grads).is_some() && scores.grad(&grads).is_some());
//! # }
//! ```
//!
//! # Where to begin
//!
//! - [`nn::DynamicMaskAttention`]: a self-attention layer that learns its scores; [`nn::DynamicMaskCrossAttention`]:
//!   its counterpart over another sequence;
//! - [`nn::mha`]: Burn's multi-head attention, for models that use it; [`nn::MaskedAttentionLayer`]: a layer under
//!   any mask;
//! - [`dynamic_mask_attention`]: attention with any scores, such as the paper's, [`zoh_scores`];
//! - [`Attention`]: a builder of attention with scores or without, which also returns the LSE, and takes a selection
//!   that several calls share; [`MaskedAttention`]: one under any mask and bias;
//! - [`PackedAttention`]: documents packed one after another, by cumulative lengths; [`Documents`]: documents and
//!   padding for every other call;
//! - [`split_qkv`] and [`split_kv`]: q, k and v from one packed tensor; [`merge_attention`]: merges parts over
//!   disjoint keys; [`learnable_sink`] and [`Attention::forward_with_sink`]: a logit without a key;
//!   [`Attention::probabilities`]: attention weights of chosen queries;
//! - [`linear`] and [`product`]: the products of a model's other layers; [`swiglu`] and [`swiglu_linear`]: the gate between them;
//!   [`split_heads`]: q, k and v from one product;
//! - [`cache`]: decoding, in memory that does not grow with the context;
//! - [`rms_norm`] and [`HeadEncoding`]: the steps before attention in a layer, in one pass each;
//! - [`engines`]: which engine computes a call, and why; [`finite`]: where a NaN comes from;
//! - [`memory`]: the device memory that a call needs, and the longest sequence that fits;
//! - [`select`]: the selection alone, to inspect or to share between calls; [`Selector`]: with recent keys, sinks,
//!   documents or windows per head; [`Intervals`]: any other, if it is one interval per key;
//! - [`ops`]: the operations below the `Tensor` API, to implement for your own backend.
//!
//! Each function has a `try_` form that returns an [`AttentionError`] where the plain form panics
//! with the same text. All arguments are validated before anything is computed.
//!
//! # Engines and features
//!
//! No backend is enabled by default; the features mirror Burn's.
//!
//! | feature | enables |
//! |---|---|
//! | `flex` | Burn's Flex backend on the CPU engine `flash-dma-cpu`: no GPU, no LLVM |
//! | `cpu`, `cuda`, `wgpu`, `vulkan`, `metal`, `rocm` | CubeCL's runtimes, on the kernels of `flash-dma-kernels` |
//! | `autodiff` | gradients of q, k, v, the scores and the LSE, one fused backward pass; `train`: parts of a training step |
//! | `fusion` | lazy execution among fused operations (CubeCL's runtimes) |
//! | `testing` | [`testing`]: checks of gradients and causality for your own tests |
//! | `train` | `train::SelectionMetric`: a metric of selections for Burn's training loop |
//! | `persistence` | compiled kernels and autotune's choices can be kept on disk (`cubecl.toml`) |
//! | `autotune` | Burn's autotune, for its own operations |
//! | `nvtx` | ranges for NVIDIA's profilers, where `libnvToolsExt.so.1` is found |
//!
//! With autodiff the graph keeps the inputs of attention, the output, the LSE and two integers per key. The results
//! of [`rms_norm`], [`swiglu`] and a [`HeadEncoding`] with a norm are not kept: the backward pass recomputes each
//! once from its inputs, which are. With Burn's gradient checkpointing it does so with Burn's cheap operations too.
//! Second derivatives are refused ([`AttentionError::SecondOrder`]).
//!
//! # Faults
//!
//! If a device runs out of memory or refuses a kernel, reading a result gives an error that names the operation (the
//! text of [`AttentionError::DeviceFailed`]); without fusion the call panics with that text. Nothing half-written is
//! ever returned, and a smaller problem runs in the same process. After the first 32 calls of an operation with results of
//! the same shapes the host no longer waits to learn this, and reading gives CubeCL's error alone. So does a failed step
//! over a [`cache`], which leaves a cache that must be reset or dropped: some of its tokens may be missing.
#![warn(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[macro_use]
mod twin;

mod backends;
pub mod cache;
mod documents;
pub mod engines;
pub mod fallback;
pub mod finite;
mod functions;
mod mask;
pub mod memory;
pub mod nn;
// A build without a backend dispatches to nothing, so the arguments are not read.
#[cfg_attr(not(any(feature = "cube", feature = "flex")), allow(unused_variables))]
pub mod ops;
mod spans;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "autodiff")]
pub mod train;
mod types;
mod validate;

pub use documents::Documents;
pub use flash_dma_problem::{
    AlibiSlopes, AttentionError, AttentionOptions, Dropout, ElementType, Interval, KeptKeys,
    MaskedProblem, NormProblem, OWN_OUTPUT_WEIGHT, PlanGeometry, Problem, Rotary, ScoreRole,
    SelectionRule, TensorName, cost,
};
pub use functions::attention::{Attention, dynamic_mask_attention, try_dynamic_mask_attention};
pub use functions::gating::{swiglu, swiglu_linear, try_swiglu, try_swiglu_linear};
pub use functions::inspection::IntervalStats;
pub use functions::masked::MaskedAttention;
pub use functions::merge::{merge_attention, try_merge_attention};
pub use functions::norm::{
    HeadEncoding, rms_norm, rms_norm_branch, try_rms_norm, try_rms_norm_branch,
};
pub use functions::packed::PackedAttention;
pub use functions::product::{linear, product, try_linear, try_product};
pub use functions::qkv::{
    split_heads, split_kv, split_qkv, try_split_heads, try_split_kv, try_split_qkv,
};
pub use functions::scores::{linear_scores, try_linear_scores, try_zoh_scores, zoh_scores};
pub use functions::selection::{Intervals, sliding_window, try_sliding_window};
pub use functions::selector::{Selector, Window, select, try_select};
pub use functions::sink::{learnable_sink, try_learnable_sink};
pub use functions::state;
pub use mask::{AttentionMask, BlockRule, KeyRanges, TilePlan};

/// The README's example, compiled and run with the documentation tests.
#[cfg(all(doctest, feature = "flex", feature = "autodiff"))]
#[doc = include_str!("../../../README.md")]
struct Readme;
