//! The comptime configuration of the attention kernels, and the rule that chooses it.

use crate::pattern::kind::Pattern;
use cubecl::CubeDim;
use cubecl::ir::HardwareProperties;
use flash_dma_problem::{AttentionError, Problem};

/// Elements of one shared-memory vector: rows are read 16 bytes at a time.
pub(crate) const LANES: usize = 4;

/// The kernel that a blueprint is for: they differ in the content of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Owns queries; streams keys and values.
    Forward,
    /// Owns queries and output gradients; streams keys and values.
    GradQuery,
    /// Owns keys and values; streams queries and output gradients.
    GradKeyValue,
}

/// Units per cube and the rows that each holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Micro {
    /// Units along the inner rows and the head dimension.
    pub units_x: usize,
    /// Units along the outer rows.
    pub units_y: usize,
    /// Outer rows per unit.
    pub outer: usize,
    /// Inner rows per unit; a multiple of `LANES`, so that weights are stored as vectors.
    pub inner: usize,
}

pub(crate) const fn micro(units_x: usize, units_y: usize, outer: usize, inner: usize) -> Micro {
    Micro {
        units_x,
        units_y,
        outer,
        inner,
    }
}

/// Choices for GPUs, in order of preference. With 8 units along x, a plane of 32 reads 4 outer and 8 inner rows: one
/// wavefront of shared memory each, 8 reads for the 64 multiply-adds of a 4 x 4 register tile.
const PARALLEL: [Micro; 6] = [
    micro(8, 16, 4, 4),
    micro(8, 16, 2, 4),
    micro(4, 16, 2, 4),
    micro(4, 8, 2, 4),
    micro(2, 8, 1, 4),
    micro(1, 8, 1, 4),
];

/// Runtimes whose planes are single units (the CPU): one thread per unit and a spinning barrier make cooperation cost
/// more than it saves, so a unit works alone.
const SERIAL: [Micro; 3] = [micro(1, 1, 16, 16), micro(1, 1, 8, 8), micro(1, 1, 4, 4)];

/// Choices for GPUs and the few query rows of a decode step, in the order in which they are tried.
const PARALLEL_ROWS: [Micro; 4] = [
    micro(8, 4, 1, 4),
    micro(8, 8, 1, 4),
    micro(8, 16, 1, 4),
    micro(4, 8, 1, 4),
];

/// Choices for the few query rows of a decode step where a unit works alone.
const SERIAL_ROWS: [Micro; 3] = [micro(1, 1, 4, 8), micro(1, 1, 16, 8), micro(1, 1, 4, 4)];

/// Comptime configuration of one attention kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Blueprint {
    /// Units and register tile.
    pub micro: Micro,
    /// Elements per row, a multiple of 8.
    pub head_dim: usize,
    /// The keys that the kernel reads, and their biases.
    pub(crate) pattern: Pattern,
    /// Bottom-right aligned causal masking.
    pub causal: bool,
    /// True if the scaled product is capped.
    pub softcap: bool,
    /// True if there is ALiBi.
    pub alibi: bool,
    /// True if pairs are dropped out.
    pub dropout: bool,
    /// True if the rounding error of the LSE is requested from the forward kernel.
    pub(crate) rest: bool,
}

impl Blueprint {
    /// The first configuration whose cube fits the device. Outer tiles of 64 rows are used only for forward and dq with
    /// `head_dim <= 128`: otherwise, and in dk/dv with its two accumulators, they would exceed the registers of a unit.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Unsupported`] if no configuration fits.
    pub fn choose(
        kernel: Kernel,
        problem: &Problem,
        hardware: &HardwareProperties,
    ) -> Result<Self, AttentionError> {
        let serial = hardware.plane_size_max <= 1;
        let narrow = problem.head_dim <= 128 && kernel != Kernel::GradKeyValue;
        let candidates: &[Micro] = if serial { &SERIAL } else { &PARALLEL };
        candidates
            .iter()
            .filter(|micro| serial || micro.outer <= if narrow { 4 } else { 2 })
            .map(|&micro| Self::with_micro(micro, problem))
            .find(|blueprint| blueprint.fits(kernel, hardware))
            .ok_or_else(|| no_tile(problem.head_dim, hardware))
    }

    /// The configuration for `rows` query rows of a decode step: the first that has that many rows, or 16, and fits;
    /// otherwise any that fits.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Unsupported`] if no configuration fits.
    pub(crate) fn choose_rows(
        rows: usize,
        head_dim: usize,
        pattern: Pattern,
        softcap: bool,
        hardware: &HardwareProperties,
    ) -> Result<Self, AttentionError> {
        let candidates: &[Micro] = match hardware.plane_size_max {
            0 | 1 => &SERIAL_ROWS,
            _ => &PARALLEL_ROWS,
        };
        let with = |&micro: &Micro| Self {
            micro,
            head_dim,
            pattern,
            causal: true,
            softcap,
            alibi: false,
            dropout: false,
            rest: false,
        };
        let fits = |blueprint: &Self| blueprint.fits(Kernel::Forward, hardware);
        let fit = || candidates.iter().map(with).filter(fits);
        fit()
            .find(|blueprint| blueprint.outer_rows() >= rows.min(16))
            .or_else(|| fit().next())
            .ok_or_else(|| no_tile(head_dim, hardware))
    }

    /// The blueprint of `problem` with the register tile `micro`.
    pub(crate) fn with_micro(micro: Micro, problem: &Problem) -> Self {
        Self {
            micro,
            head_dim: problem.head_dim,
            pattern: Pattern::scored(problem),
            causal: problem.causal,
            softcap: problem.softcap.is_some(),
            alibi: problem.alibi.is_some(),
            dropout: problem.dropout.is_some(),
            rest: false,
        }
    }

    fn fits(&self, kernel: Kernel, hardware: &HardwareProperties) -> bool {
        self.shared_bytes(kernel) <= hardware.max_shared_memory_size
            && self.units() <= hardware.max_units_per_cube as usize
    }

    /// The same kernel for other keys and biases.
    pub(crate) fn with_pattern(self, pattern: Pattern) -> Self {
        Self { pattern, ..self }
    }

    /// Units per cube.
    pub fn units(&self) -> usize {
        self.micro.units_x * self.micro.units_y
    }

    /// The units in CubeCL's layout.
    pub fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.micro.units_x as u32, self.micro.units_y as u32)
    }

    /// True if register tiles are unrolled: a lone unit holds them in memory and loops.
    pub fn unroll(&self) -> bool {
        self.units() > 1
    }

    /// Rows of the outer tile.
    pub fn outer_rows(&self) -> usize {
        self.micro.units_y * self.micro.outer
    }

    /// Rows of an inner tile.
    pub fn inner_rows(&self) -> usize {
        self.micro.units_x * self.micro.inner
    }

    pub(crate) fn rows(&self, outer: bool) -> usize {
        if outer {
            self.outer_rows()
        } else {
            self.inner_rows()
        }
    }

    /// Vectors of a row that a unit accumulates.
    pub(crate) fn unit_vectors(&self) -> usize {
        self.head_dim.div_ceil(LANES * self.micro.units_x)
    }

    /// Vectors of a row in shared memory; past `head_dim` they are zero.
    pub(crate) fn vectors(&self) -> usize {
        self.unit_vectors() * self.micro.units_x
    }

    /// Row stride in shared memory, in vectors: one more than a row has, to keep rows read at once in different banks.
    pub(crate) fn row_stride(&self) -> usize {
        self.vectors() + 1
    }

    /// Vectors of weights that a unit writes for each of its outer rows.
    pub(crate) fn weight_vectors(&self) -> usize {
        self.micro.inner / LANES
    }

    /// Row stride of the weights, in vectors.
    pub(crate) fn weight_stride(&self) -> usize {
        self.micro.units_x * self.weight_vectors() + 1
    }

    /// Bytes of shared memory per cube: rows, weights, partial row results, and a few words per row.
    fn shared_bytes(&self, kernel: Kernel) -> usize {
        let (outer, inner) = (self.outer_rows(), self.inner_rows());
        let (outer_tiles, inner_tiles, weights) = match kernel {
            Kernel::Forward => (1, 2, 1),
            Kernel::GradQuery => (2, 2, 1),
            Kernel::GradKeyValue => (2, 2, 2),
        };
        let rows = (outer * outer_tiles + inner * inner_tiles) * self.row_stride();
        let vectors = rows + outer * weights * self.weight_stride();
        let mask = if self.dropout { outer + inner } else { 0 };
        let places = if self.alibi { outer + inner + 1 } else { 0 };
        let words = outer * self.micro.units_x + 5 * (outer + inner) + mask + places + 3;
        16 * vectors + 4 * words
    }
}

fn no_tile(head_dim: usize, hardware: &HardwareProperties) -> AttentionError {
    AttentionError::Unsupported {
        what: format!(
            "head dimension {head_dim}: its {} bytes of shared memory hold no tile",
            hardware.max_shared_memory_size
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::client;
    use flash_dma_problem::{AttentionOptions, ElementType};

    const KERNELS: [Kernel; 3] = [Kernel::Forward, Kernel::GradQuery, Kernel::GradKeyValue];

    fn hardware(plane: u32, shared: usize, units: u32) -> HardwareProperties {
        let mut hardware = client().properties().hardware.clone();
        hardware.plane_size_max = plane;
        hardware.max_shared_memory_size = shared;
        hardware.max_units_per_cube = units;
        hardware
    }

    fn problem(head_dim: usize) -> Problem {
        let shape = [1, 1, 9, head_dim];
        let options = AttentionOptions::new();
        Problem::new(&shape, &shape, &shape, None, ElementType::F32, &options).unwrap()
    }

    #[test]
    fn the_choice_fits_the_device() {
        for (plane, units) in [(1, 2), (32, 256), (32, 1024), (64, 64)] {
            for shared in [16 << 10, 32 << 10, 48 << 10, 99 << 10, 227 << 10] {
                for head_dim in (8..=256).step_by(8) {
                    for kernel in KERNELS {
                        let hardware = hardware(plane, shared, units);
                        match Blueprint::choose(kernel, &problem(head_dim), &hardware) {
                            Ok(blueprint) => {
                                assert!(blueprint.shared_bytes(kernel) <= shared);
                                assert!(blueprint.units() <= units as usize);
                                assert_eq!(blueprint.unroll(), plane > 1);
                            }
                            Err(e) => assert!(head_dim > 128 && shared < 32 << 10, "{e}"),
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_large_gpu_gets_the_tiles_that_the_registers_hold() {
        let hardware = hardware(32, 227 << 10, 1024);
        let rows = |kernel, head_dim| {
            let blueprint = Blueprint::choose(kernel, &problem(head_dim), &hardware).unwrap();
            (blueprint.outer_rows(), blueprint.inner_rows())
        };
        assert_eq!(rows(Kernel::Forward, 128), (64, 32));
        assert_eq!(rows(Kernel::GradQuery, 128), (64, 32));
        assert_eq!(rows(Kernel::GradKeyValue, 128), (32, 32));
        assert_eq!(rows(Kernel::Forward, 256), (32, 32));
    }
}
