//! The compile-time configuration of the kernel.

use crate::product::operands::Major;
use cubecl::CubeDim;
use cubecl::client::Client;

/// Units of a cube, except where units are threads of a processor.
const UNITS: usize = 256;
/// The most units that add up one value of the cube.
const HELPERS: usize = 32;
/// The most rows of a cube, whose sums are in registers.
const MOST_ROWS: usize = 8;
/// The most rows whose sums are in shared memory at once.
const ROUND: usize = 4;
/// Columns of a unit, or terms that it multiplies at once: the axis of B that is not contiguous.
const TILE: usize = 8;
/// Bytes of a row (or column) of B that neighbouring units read at once: at least a sector of the L2 cache, and a line
/// if there are enough cubes.
const SEGMENTS: [usize; 3] = [128, 64, 32];
/// Additional words between the sums of two values, so that they lie in different banks.
const PADDING: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    /// The layout of B `[k, n]`.
    pub b: Major,
    /// Neighbouring elements of B that are loaded at once.
    pub b_vector: usize,
    /// Neighbouring elements of A loaded at once, a divisor of [`terms`](Self::terms); 1 if these do not divide `k`.
    pub a_vector: usize,
    /// Rows of the result that a cube owns, a power of two.
    pub rows: usize,
    /// Rows whose sums meet in shared memory at once, a divisor of `rows`.
    pub round: usize,
    /// Units side by side, a power of two.
    pub lanes: usize,
    /// Units of a cube, a power of two.
    pub units: usize,
}

/// The product that a blueprint is for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    pub b: Major,
    pub b_vector: usize,
    pub m: usize,
    pub n: usize,
    /// Bytes of an element.
    pub size: usize,
}

impl Blueprint {
    /// The configuration for a device, with A read element by element. The number of rows decides how many a cube owns,
    /// and nothing about the order of a sum.
    pub(crate) fn choose(client: &Client, task: &Task) -> Self {
        let hardware = &client.properties().hardware;
        let processors = (hardware.num_streaming_multiprocessors).map_or(1, |n| n as usize);
        let units = match hardware.plane_size_max {
            0 | 1 => 1,
            _ => UNITS.min(1 << hardware.max_units_per_cube.max(1).ilog2()),
        };
        let mut blueprint = Self::with(task, units, processors);
        while blueprint.round > 1
            && blueprint.shared() * size_of::<f32>() > hardware.max_shared_memory_size
        {
            blueprint.round /= 2;
        }
        blueprint
    }

    /// The configuration for cubes of `units` units, a power of two, on a device with this many multiprocessors.
    pub(crate) fn with(task: &Task, units: usize, processors: usize) -> Self {
        let rows = task.m.next_power_of_two().min(MOST_ROWS);
        let mut blueprint = Self {
            b: task.b,
            b_vector: task.b_vector,
            a_vector: 1,
            rows,
            round: rows.min(ROUND),
            lanes: 1,
            units,
        };
        let most = units.min(HELPERS);
        let bytes = blueprint.unit_columns() * task.size;
        let fills =
            |lanes: &usize| task.n.div_ceil(blueprint.unit_columns() * lanes) >= 2 * processors;
        let widths = SEGMENTS.map(|segment| (segment / bytes).clamp(1, most));
        let narrowest = widths[SEGMENTS.len() - 1];
        blueprint.lanes = widths.into_iter().find(fills).unwrap_or(narrowest);
        blueprint
    }

    /// Terms that a unit multiplies at once.
    pub(crate) fn terms(&self) -> usize {
        match self.b {
            Major::Row => TILE,
            Major::Column => self.b_vector,
        }
    }

    pub(crate) fn unit_columns(&self) -> usize {
        match self.b {
            Major::Row => self.b_vector,
            Major::Column => TILE,
        }
    }

    pub(crate) fn columns(&self) -> usize {
        self.lanes * self.unit_columns()
    }

    /// Units that share the terms of a column.
    pub(crate) fn slices(&self) -> usize {
        self.units / self.lanes
    }

    /// True if `k` may have terms beyond the last tile.
    pub(crate) fn has_rest(&self) -> bool {
        self.b == Major::Row && self.a_vector == 1
    }

    pub(crate) fn sums(&self) -> usize {
        self.rows * self.unit_columns()
    }

    /// Sums of a unit that are in shared memory at once.
    pub(crate) fn round_sums(&self) -> usize {
        self.round * self.unit_columns()
    }

    /// Units that add up one value.
    pub(crate) fn helpers(&self) -> usize {
        self.units.min(HELPERS)
    }

    /// Words from one value to the next.
    pub(crate) fn stride(&self) -> usize {
        self.units + PADDING
    }

    /// Words of shared memory.
    pub(crate) fn shared(&self) -> usize {
        self.round_sums() * self.stride()
    }

    /// True if loops over rows are unrolled, so that their sums stay in registers.
    pub(crate) fn unroll(&self) -> bool {
        self.units > HELPERS
    }

    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_1d(self.units as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes(b: Major, n: usize, size: usize, b_vector: usize) -> usize {
        let task = Task {
            b,
            b_vector,
            m: 1,
            n,
            size,
        };
        Blueprint::with(&task, UNITS, 132).lanes
    }

    /// Narrow results have cubes of 16 columns, wide ones of 64: with 1024 columns every second multiprocessor of an
    /// H200 has some, and more cubes would read less than a sector.
    #[test]
    fn wide_results_have_wide_cubes() {
        assert_eq!(lanes(Major::Row, 1024, 2, 8), 2);
        assert_eq!(lanes(Major::Row, 32768, 2, 8), 8);
        assert_eq!(lanes(Major::Row, 10240, 2, 8), 4);
        assert_eq!(lanes(Major::Row, 1024, 4, 4), 2);
        assert_eq!(lanes(Major::Row, 1023, 2, 1), 16);
        assert_eq!(lanes(Major::Column, 256, 2, 8), 2);
    }
}
