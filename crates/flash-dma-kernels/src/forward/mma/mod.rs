//! The forward pass on tensor cores.

mod blueprint;
mod kernel;
mod launch;
mod logits;
mod mask;
mod pairs;
mod repair;
mod rows;
mod split;
mod stream;
mod wgmma;

pub(crate) use blueprint::{Instruction, MmaBlueprint, has_wgmma};
pub(crate) use launch::{launch, launch_slice, rows_are_chunks, workspace};
pub(crate) use logits::{LogitScale, exp_of, rescale_to, score, sees};
pub(crate) use mask::{
    BitCopies, HEADER, KEY_BLOCK, MaskRows, TILE_WORDS, is_set, score_row, until,
};
pub(crate) use pairs::PairBias;
pub(crate) use repair::SlotKey;
pub(crate) use rows::{CubeTile, TileKeys, TileRow, copy_queries, write_row};
pub(crate) use stream::{KeyCopies, RowAddress, Stages, zero_not_finite};
