//! The extension through Burn: on Flex, and on CubeCL's CPU runtime with fusion if the build has it.

mod alone;
#[cfg(all(feature = "testing", feature = "train"))]
mod api_fuzz;
mod builders;
mod cache;
mod case;
#[cfg(feature = "testing")]
mod causal;
mod checkpointing;
mod compete;
#[cfg(all(feature = "cpu", feature = "fusion"))]
mod cube;
mod debug_page;
#[cfg(all(feature = "flex", feature = "autodiff"))]
mod device_group;
mod dropout;
mod engines;
mod errors;
mod finite;
mod gradients;
mod heads;
#[cfg(feature = "cpu")]
mod held;
mod inspection;
mod kept;
mod layer;
mod leave_one_out;
mod lora;
mod masked;
#[cfg(feature = "train")]
mod metric;
mod mha;
mod module;
mod module_alibi;
mod module_cached;
mod module_cross;
mod module_input;
mod module_mask;
mod module_masked;
mod module_recency;
mod module_scores;
mod module_sink;
mod module_token_gradient;
mod module_turns;
mod no_tokens;
mod norm;
mod operations;
mod product;
mod ranges;
mod recomputed;
mod refused;
mod second_order;
mod spans;
mod training;
mod values;
