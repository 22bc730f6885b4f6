//! Words of bits, one bit per key.

use cubecl::prelude::*;

/// The lowest `count` bits of a word: none from 0 down, all from 32 up.
#[cube]
pub(crate) fn first_bits(count: i32) -> u32 {
    // Avoids a shift by 32, which no target defines.
    let shift = 32 - clamp(count, 1i32, 32i32);
    select(count > 0, 0xFFFF_FFFFu32 >> shift as u32, 0u32)
}

/// Which of the four bytes of a word are nonzero, one bit each.
#[cube]
pub(crate) fn nonzero_bytes(word: u32) -> u32 {
    // Bit 7 of each byte: its low bits carry into it unless all are 0.
    let flags = (((word & 0x7F7F_7F7Fu32) + 0x7F7F_7F7Fu32) | word) & 0x8080_8080u32;
    // The product moves bits 7, 15, 23, 31 to 28..=31, and no two bits to the same place, so nothing carries.
    (flags * 0x0020_4081u32) >> 28u32
}
