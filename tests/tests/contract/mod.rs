//! The results of every kind of problem against the oracle, and the refused calls.

mod bad_input;
mod empty;
#[cfg(all(feature = "flex", feature = "cpu"))]
mod every_error;
mod given;
#[cfg(all(feature = "flex", feature = "wgpu"))]
mod layer_on_wgpu;
mod nan;
mod results;
mod selection;
#[cfg(feature = "cuda")]
mod split;
mod tensor_cores;
mod troubleshooting;
#[cfg(feature = "cuda")]
mod wgmma;
