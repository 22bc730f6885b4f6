//! The `wgmma` matrix engine: warpgroup products of sm_90, by inline PTX.
//!
//! A warpgroup (four warps) multiplies 64 rows. With `g = lane / 4` and `t = lane % 4`, a lane of warp
//! `w` holds of the accumulator `[64, n]` the values `4j` and `4j + 1`: row `16w + g`, columns
//! `8j + 2t, 8j + 2t + 1`; and `4j + 2` and `4j + 3`: the same columns of row `16w + g + 8`.
//!
//! A product is a block of PTX that starts it. Its result is in flight, and only [`finish`](product::finish) turns it
//! into values: that block waits, and then moves the registers, so that no read of them can be scheduled before. The
//! assembler keeps a product in flight only while registers suffice; otherwise it reports that products "are
//! serialized" (C7512), which fails the code-generation gate.
//!
//! Operands in shared memory are *panels*: `[rows, w]` of a 16-bit type, `w` of 64, 32 or 16 columns (128, 64 or 32
//! bytes per row), their 16-byte segments permuted by the swizzle of that width, their start aligned to 1024 bytes. A
//! tile of `d` columns is `d / w` consecutive panels of the widest kind that divides it.

#[cfg(feature = "internals")]
pub(crate) mod alone;
pub(crate) mod boxes;
pub(crate) mod key_boxes;
pub(crate) mod panel;
pub(crate) mod product;
pub(crate) mod ring;
pub(crate) mod rows;
