//! The functions on `Tensor`.

pub(crate) mod attention;
pub(crate) mod masked;
pub(crate) mod selection;
pub(crate) mod zoh;
