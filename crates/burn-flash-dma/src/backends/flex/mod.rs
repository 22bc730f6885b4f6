//! Burn's Flex backend on the CPU engine.

mod attention;
mod cache;
mod masked;
mod norm;
mod packed;
mod tensors;

use crate::ops::product::ProductOps;
use crate::ops::scores::ScoreOps;
use crate::ops::training::TrainingOps;
use burn::backend::Flex;

// Burn's own products are threaded and blocked.
impl ProductOps for Flex {}
impl ScoreOps for Flex {}
impl TrainingOps for Flex {}
