//! The compile-time configuration of the norm kernels.

use crate::team::Team;
use cubecl::CubeDim;
use cubecl::client::Client;
use flash_dma_problem::NormProblem;

/// Units of a cube, except where units are threads of a processor.
const UNITS: usize = 256;
/// Units of a cube if shared memory does not hold the gradients of gamma of [`UNITS`] units.
const FEW_UNITS: usize = 128;
/// Bytes of shared memory that [`UNITS`] units need at most, and some to spare.
const SHARED_BYTES: usize = 40 << 10;
const PLANE: usize = 32;
/// The most items of a lane, if no more than a plane shares a row.
const LANE_ITEMS: usize = 4;
/// The most heads that a group of units holds at once, and the most of their features in a lane.
const HEADS: usize = 4;
const LANE_FEATURES: usize = 32;

/// How the units that share a row add up their sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LaneSums {
    /// One unit has the row to itself.
    Alone,
    /// By shuffles, then through shared memory if a row has several planes.
    Shuffles,
    /// Through shared memory: planes of another size than 32, or without operations.
    Shared,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NormBlueprint {
    pub width: usize,
    /// Neighbouring features that a lane owns at a time, a divisor of `width`; even with rotary encoding.
    pub item: usize,
    /// Units that share a row, a power of two: lane `l` owns the items `l`, `l + lanes` and so on.
    pub lanes: usize,
    /// Groups of units that share rows, in a cube.
    pub groups: usize,
    /// Heads of a token that a group holds at once, a divisor of their number. It reads the token's angles once, and
    /// waits for memory once.
    pub heads: usize,
    pub sums: LaneSums,
    /// True if there is a norm. This and the next two are also among the kernels' options, but CubeCL's disk cache does not
    /// see those, see `docs/upstream.md`.
    pub norm: bool,
    pub rotary: bool,
    /// True if the backward pass adds a gradient that the rows have already.
    pub adds: bool,
}

impl NormBlueprint {
    /// The configuration for tensors that are read in vectors of `vector` elements.
    pub(crate) fn choose(client: &Client, problem: &NormProblem, vector: usize) -> Self {
        let hardware = &client.properties().hardware;
        let most = match hardware.max_shared_memory_size >= SHARED_BYTES {
            true => UNITS,
            false => FEW_UNITS,
        };
        let team = Team::new(client, most / PLANE);
        let (sums, units) = match (team.lanes, team.planes) {
            (1, 1) => (LaneSums::Alone, 1),
            (1, _) => {
                let allowed = hardware.max_units_per_cube.max(1).ilog2();
                (LaneSums::Shared, most.min(1 << allowed))
            }
            _ => (LaneSums::Shuffles, team.units()),
        };
        Self::with(problem, vector, sums, units)
    }

    /// [`choose`](Self::choose) for cubes of `units` units that add up as given.
    pub(crate) fn with(problem: &NormProblem, vector: usize, sums: LaneSums, units: usize) -> Self {
        let width = problem.width;
        // Pairs of features stay in one lane.
        let item = vector.max(if width.is_multiple_of(2) { 2 } else { 1 });
        let items = width / item;
        let lanes = match items <= PLANE * LANE_ITEMS {
            true => items.next_power_of_two().min(PLANE).min(units),
            false => units,
        };
        let one = Self {
            width,
            item,
            lanes,
            groups: units / lanes,
            heads: 1,
            sums,
            norm: problem.epsilon.is_some(),
            rotary: problem.rotary.is_some(),
            adds: false,
        };
        // Loops over features that are not unrolled keep them in memory.
        let together = |&heads: &usize| {
            let fit = heads * one.features() <= LANE_FEATURES;
            one.unroll() && fit && problem.heads.is_multiple_of(heads)
        };
        let heads = (1..=HEADS).rev().find(together).unwrap_or(1);
        Self { heads, ..one }
    }

    /// Rows that a cube processes at once.
    pub(crate) fn rows(&self) -> usize {
        self.groups * self.heads
    }

    /// Items of a lane.
    pub(crate) fn steps(&self) -> usize {
        (self.width / self.item).div_ceil(self.lanes)
    }

    pub(crate) fn features(&self) -> usize {
        self.steps() * self.item
    }

    /// The first of a lane's features of row `head` among those of the rows that it holds.
    pub(crate) fn first(&self, head: usize) -> usize {
        head * self.features()
    }

    /// True if loops over a lane's features are unrolled, so that these stay in registers.
    pub(crate) fn unroll(&self) -> bool {
        self.sums != LaneSums::Alone
    }

    pub(crate) fn units(&self) -> usize {
        self.lanes * self.groups
    }

    /// Words of shared memory for the sums of rows.
    pub(crate) fn shared_sums(&self) -> usize {
        match self.sums {
            LaneSums::Alone => 1,
            LaneSums::Shuffles => (self.units() / PLANE).max(1),
            LaneSums::Shared => self.units(),
        }
    }

    /// Words of shared memory for the gradients of gamma of all lanes: none where lanes write them themselves.
    pub(crate) fn shared_gradients(&self) -> usize {
        match self.groups {
            1 => 1,
            groups => groups * self.width,
        }
    }

    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_1d(self.units() as u32)
    }
}

/// Compile-time configuration of the kernel that adds up the cubes' sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SumsBlueprint {
    pub columns: usize,
    /// Units that share a column.
    pub slices: usize,
}

impl SumsBlueprint {
    pub(crate) fn choose(client: &Client) -> Self {
        let hardware = &client.properties().hardware;
        // Where units are threads of a processor, one has a column to itself.
        if hardware.plane_size_max <= 1 {
            return Self {
                columns: 1,
                slices: 1,
            };
        }
        let slices = (hardware.max_units_per_cube as usize / PLANE).clamp(1, PLANE);
        Self {
            columns: PLANE,
            slices,
        }
    }

    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.columns as u32, self.slices as u32)
    }
}
