//! What masks and biases of pairs add to the portable kernels: a row sees a tile of at most 32 keys through one word of
//! bits.

pub(crate) mod bias;
pub(crate) mod bits;
