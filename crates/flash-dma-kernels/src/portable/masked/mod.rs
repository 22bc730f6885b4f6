//! The portable kernels under an arbitrary mask and bias: a row sees a tile of at most 32 keys through one word of
//! bits.

pub(crate) mod bias;
pub(crate) mod dkdv;
pub(crate) mod dq;
pub(crate) mod forward;
pub(crate) mod seen;
