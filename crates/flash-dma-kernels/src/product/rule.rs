//! The choice of a product's kernel and of its number of parts.

use super::few_rows;
use super::operands::{Operands, Sizes};
use super::wgmma::{Tile, refusal};
use crate::host::engine::{Engine, is_allowed};
use cubecl::client::Client;

/// The kernel of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Route {
    /// CubeK's kernel without autotune, as in Burn: a simple tensor-core routine, or single units without tensor cores.
    Standard,
    /// The `wgmma` kernel of this crate.
    Wgmma(Tile),
    /// This crate's kernel for a few rows, never cut into parts. A row's sums are the same, bit for bit, in any number
    /// of rows.
    FewRows,
}

/// The decisions about a product before it is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Choice {
    /// The kernel.
    pub route: Route,
    /// Number of parts into which the sums over `k` are cut, each computed in tiles of its own; 1 for none. The parts are
    /// f32 and are added in a fixed order. A kernel may use fewer.
    pub parts: usize,
}

/// Sums shorter than this are never cut.
const LONG: usize = 4096;

const SHORTEST_PART: usize = 512;

const MOST_PARTS: usize = 64;

/// The cost of starting and finishing a tile of the result, in steps along `k`.
const TILE_COST: usize = 256;

/// Elements of the result that are written as a part, read and added in the time of a step along `k` of a full wave of
/// cubes: 2350 bytes per clock of the memory of an H200 against 16 clocks per step of a 128 x 256 tile.
const ADDED_PER_STEP: usize = 4700;

/// Multiplications of a product below which starting it costs more than computing it.
const LARGE: usize = 1 << 27;

/// The most rows that always count as few: their product is bound by the memory from which B is read.
const FEW_ROWS: usize = 16;

/// The most rows that count as few if the product is not [`LARGE`]: tiles of 128 rows would compute more than twice the
/// requested rows, on fewer cubes than the device has multiprocessors.
const MOST_ROWS: usize = 64;

impl Choice {
    /// The choices for a product on a device, the best first. The last one serves every product.
    ///
    /// It reads sizes, strides, element types and [`ENGINE_VARIABLE`](crate::host::engine::ENGINE_VARIABLE), and nothing
    /// that changes between two calls: the same product always
    /// takes the same kernel, so that repeats are bit-equal.
    #[must_use]
    pub fn of(client: &Client, operands: &Operands) -> Vec<Self> {
        let sizes = operands.sizes();
        let processors = (client.properties().hardware.num_streaming_multiprocessors)
            .map_or(1, |count| count as usize);
        let with = |route: Route| Self {
            route,
            parts: (route.tile()).map_or(1, |tile| parts(sizes, tile, processors)),
        };
        let mut choices = Vec::new();
        let large = sizes.m.saturating_mul(sizes.n).saturating_mul(sizes.k) >= LARGE;
        let few_rows = || few_rows::Plan::new(client, operands).map(|_| with(Route::FewRows));
        if sizes.m <= FEW_ROWS {
            choices.extend(few_rows());
        }
        let refused = || refusal(client.properties(), operands).is_some();
        if large && is_allowed(Engine::Wgmma) && !refused() {
            choices.push(with(Route::Wgmma(Tile::for_columns(sizes.n))));
        }
        if (FEW_ROWS + 1..=MOST_ROWS).contains(&sizes.m) {
            choices.extend(few_rows());
        }
        choices.push(with(Route::Standard));
        choices
    }
}

impl Route {
    /// The rows and columns that a cube computes at a time, for the estimate of waves; `None` if sums are never cut.
    fn tile(self) -> Option<[usize; 2]> {
        match self {
            Self::Standard => Some([128, 128]),
            Self::Wgmma(tile) => Some([Tile::ROWS, tile.columns()]),
            Self::FewRows => None,
        }
    }
}

/// The number of parts with the least estimated time: waves of tiles over the multiprocessors, each as long as a part
/// and the start of a tile, plus the parts' writes and reads.
fn parts(sizes: Sizes, [rows, columns]: [usize; 2], processors: usize) -> usize {
    let Sizes { m, n, k } = sizes;
    if k < LONG || processors <= 1 {
        return 1;
    }
    let tiles = m.div_ceil(rows) * n.div_ceil(columns);
    let time = |parts: usize| {
        let waves = (tiles * parts).div_ceil(processors);
        let added = match parts {
            1 => 0,
            _ => parts * m * n / ADDED_PER_STEP,
        };
        waves * (k.div_ceil(parts) + TILE_COST) + added
    };
    (1..=MOST_PARTS.min(k / SHORTEST_PART))
        .min_by_key(|&parts| time(parts))
        .unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The weight gradients of a model with `d_model` 1024, two key/value heads and 32K tokens, on an H200.
    #[test]
    fn weight_gradients_fill_the_multiprocessors() {
        let parts = |m, n| {
            let sizes = Sizes { m, n, k: 32768 };
            parts(sizes, [128, 256], 132)
        };
        assert_eq!(parts(1024, 1024), 4);
        assert_eq!(parts(1024, 256), 16);
        assert_eq!(parts(1024, 2752), 3);
        assert_eq!(parts(2752, 1024), 3);
    }

    #[test]
    fn short_sums_and_full_devices_are_not_cut() {
        let tall = Sizes {
            m: 32768,
            n: 1024,
            k: 2752,
        };
        assert_eq!(parts(tall, [128, 256], 132), 1);
        let deep = Sizes { k: 65536, ..tall };
        assert_eq!(parts(deep, [128, 256], 132), 1);
        let small = Sizes { m: 8, n: 8, ..deep };
        assert_eq!(parts(small, [128, 256], 1), 1);
    }
}
