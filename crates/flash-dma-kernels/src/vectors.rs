//! Vector types of several kernels.

use cubecl::prelude::*;

/// 16 bytes of a 16-bit type: what a copy moves and `ldmatrix` reads a row of.
pub(crate) type Chunk<E> = Vector<E, Const<8>>;
