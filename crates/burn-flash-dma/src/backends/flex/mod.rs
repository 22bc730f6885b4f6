//! Burn's Flex backend on the CPU engine.

mod attention;
mod cache;
mod masked;
mod norm;
mod packed;
mod product;
mod tensors;

use crate::ops::scores::ScoreOps;
use crate::ops::training::TrainingOps;
use burn::backend::Flex;

impl ScoreOps for Flex {}
impl TrainingOps for Flex {}
