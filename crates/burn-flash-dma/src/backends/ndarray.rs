//! Burn's NdArray backend has no engine of its own: the default bodies.

use crate::ops::attention::DynamicMaskOps;
use crate::ops::cache::CacheOps;
use crate::ops::masked::MaskedAttentionOps;
use crate::ops::norm::NormOps;
use crate::ops::packed::PackedOps;
use crate::ops::product::ProductOps;
use crate::ops::scores::ScoreOps;
use crate::ops::training::TrainingOps;
use burn::backend::NdArray;

impl DynamicMaskOps for NdArray {}
impl MaskedAttentionOps for NdArray {}
impl CacheOps for NdArray {}
impl NormOps for NdArray {}
impl PackedOps for NdArray {}
impl ProductOps for NdArray {}
impl ScoreOps for NdArray {}
impl TrainingOps for NdArray {}
