//! The oracle of flash-dma: the results that every engine must compute, in f64, by definition.
//!
//! Everything here is written from the semantics of the operation — sort the visible keys, keep the best, softmax over
//! them — and shares no algorithm with the engines: no intervals inside the attention, no tiles, no online softmax. It
//! visits selected pairs only, so that a NaN reaches exactly the elements that depend on it.
//!
//! - [`select`]: the keys each position attends to, by definition and (for long sequences) by a heap;
//! - [`compose`]: the same with recent keys, sinks and documents;
//! - [`slots`]: the same sets from a cache that holds no more keys than the window;
//! - [`Inputs`]: dynamic-mask attention with its gradients; [`Inputs::forward_last`]: attention to the last keys;
//! - [`Inputs::rounded`]: the same over the logits as f32 rounds them;
//! - [`masked`]: attention under arbitrary masks and biases with every broadcast;
//! - [`norm`]: RMS norm of rows and rotary encoding of heads;
//! - [`zoh`]: the scores of Dynamic Mask Attention from the values;
//! - [`Inputs::naive_forward`] and [`Inputs::naive_backward`]: a same-dtype unfused implementation, whose error is the
//!   yardstick for an engine's; [`Inputs::naive_autograd`]: its gradients by automatic differentiation;
//! - [`sampled`]: rows of outputs and gradients of problems too large to compute whole;
//! - [`generate`]: seeded inputs; [`round`]: to the element types;
//! - [`compare`]: the tolerance rule, with a report of the worst element.
//!
//! Tensors are contiguous `Vec<f64>`s in the shapes of [`flash_dma_problem`]'s table.
#![warn(missing_docs)]

mod attention;
pub mod compare;
pub mod compose;
pub mod generate;
mod last;
pub mod masked;
mod naive;
pub mod norm;
mod rng;
pub mod round;
mod rounded;
mod rows;
pub mod sampled;
pub mod select;
pub mod slots;
pub mod zoh;

pub use attention::{Backward, Inputs};
pub use compare::{Exact, Failure, Report};
pub use naive::{NaiveBackward, NaiveForward};
pub use rng::Rng;
pub use rounded::Rounded;
pub use rows::Forward;
