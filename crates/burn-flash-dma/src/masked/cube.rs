//! Every CubeCL runtime: on the default bodies.

use super::ops::MaskedAttentionOps;
use burn_cubecl::CubeBackend;

impl MaskedAttentionOps for CubeBackend {}
