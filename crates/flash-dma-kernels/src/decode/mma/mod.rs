//! Attention of a decode step on tensor cores, for CUDA devices with `cp.async` and `mma.sync`.
//!
//! A step reads every live key and value once and multiplies each with a few rows, so it is bound by memory. Each warp
//! works alone: it streams its own part of the keys through its own stages of shared memory, and never waits at a
//! barrier of the cube. The rows of a kv head's group fill one fragment of 16 rows, padded.
//!
//! Keys that all rows attend to (slots that no token of the step takes, or the previous content of the pages) need no
//! visibility test: [`kernel`]. The few keys that only some rows attend to, the new tokens and the slots that they
//! take, form one more part, computed by selection: [`newcomers`].

pub(crate) mod blueprint;
pub(crate) mod kernel;
pub(crate) mod newcomers;
pub(crate) mod rows;
pub(crate) mod stream;
