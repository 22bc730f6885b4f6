//! The comptime configuration of the tensor-core forward kernel, and the rule that chooses it.

use crate::host::check::{elem_type, rows_are_segments};
use crate::host::engine::Instruction;
use crate::matrix::logit_scale::LogitForm;
use crate::pattern::kind::{Bias, Pattern};
use cubecl::CubeDim;
use cubecl::ir::features::MmaConfig;
use cubecl::prelude::*;
use flash_dma_problem::{ElementType, MaskedProblem, Obstacle, Problem};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaBlueprint {
    pub instruction: Instruction,
    /// f16 or bf16.
    pub element: ElementType,
    /// A multiple of 32, with `wgmma` of 16.
    pub head_dim: usize,
    /// Warps per cube; each owns 16 rows of the query tile.
    pub warps: usize,
    /// Keys per tile; a multiple of 16.
    pub key_tile: usize,
    /// Key tiles copied ahead, plus the one in use.
    pub stages: usize,
    /// Query heads of one kv head that share the rows of a tile.
    pub heads: usize,
    pub causal: bool,
    /// The keys that the kernel reads, and their biases.
    pub pattern: Pattern,
    pub softcap: bool,
    pub dropout: bool,
    pub alibi: bool,
    /// True if several cubes share a query tile, each with a part of its keys.
    pub split: bool,
    /// True if the residual of the output is requested, from this kernel or, if `split`, from the one that merges the
    /// parts. Then the sum that divides the output includes the greatest probabilities as rounded for the product with
    /// V: their rounding would lose as much as that of the output.
    pub residual: bool,
    /// True if the rounding error of the LSE is requested, as it is for every part if `split`.
    pub rest: bool,
    /// The way `wgmma` writes rows of 16-bit elements.
    pub stores: RowStores,
}

/// The way in which the four lanes that hold a row write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum RowStores {
    /// Each lane writes its own pairs of elements.
    Pairs,
    /// Each lane writes every fourth segment of 16 bytes, which it collects from the others: a quarter of the
    /// instructions, each of which touches as many rows.
    Segments,
}

impl RowStores {
    pub(crate) fn in_segments(yes: bool) -> Self {
        if yes { Self::Segments } else { Self::Pairs }
    }
}

/// Keys per tile of `wgmma`, and the most stages of them. More keys take more registers for their logits and
/// probabilities: next to an output of 128 columns they leave room for 96 keys if nothing but boxes of keys is read.
/// Tiles of a plan are its blocks, or halves.
fn wgmma_tiles(problem: &Problem, pattern: Pattern) -> (usize, usize) {
    let plain =
        pattern == Pattern::All(Bias::None) && problem.dropout.is_none() && problem.alibi.is_none();
    match problem.head_dim {
        65..=128 if plain => (96, 3),
        ..=128 => (64, 4),
        129..=208 => (64, 3),
        _ if pattern.is_planned() => (32, 4),
        _ => (48, 3),
    }
}

/// CubeCL's name of the devices with `wgmma`, which exists on sm_90 only.
const WGMMA_DEVICE: &str = "ptx_sm90";

pub(crate) fn has_wgmma(properties: &DeviceProperties) -> bool {
    properties.identity.fingerprint == WGMMA_DEVICE
}

/// True if a device has `mma.sync`, `ldmatrix` and `cp.async` for an element type or, for f32, which has no kernel
/// there, for bf16.
pub(crate) fn has_mma(element: ElementType, properties: &DeviceProperties) -> bool {
    let element = elem_type(match element {
        ElementType::F32 => ElementType::Bf16,
        element => element,
    });
    let instruction = MmaConfig {
        a_type: element,
        b_type: element,
        cd_type: f32::elem_type_native(),
        m: 16,
        n: 8,
        k: 16,
    };
    properties.features.matmul.mma.contains(&instruction)
        && properties.features.matmul.ldmatrix.contains(&element)
        && properties.features.copy_async
}

/// The reason why tensor cores with a device's instructions do not serve a problem's rows: their type or their length.
pub(crate) fn check_rows(
    on_device: bool,
    element: ElementType,
    head_dim: usize,
    fits: bool,
    served: &'static str,
) -> Result<(), Obstacle> {
    if !on_device {
        return Err(Obstacle::Device);
    }
    if element == ElementType::F32 {
        return Err(Obstacle::Element(element));
    }
    match fits {
        true => Ok(()),
        false => Err(Obstacle::HeadDim { head_dim, served }),
    }
}

/// The number of multiprocessors; 1 if the device does not report it.
pub(crate) fn processors(properties: &DeviceProperties) -> usize {
    (properties.hardware.num_streaming_multiprocessors).unwrap_or(1) as usize
}

/// Positions, strides and the copies are only correct for multiples of this: the swizzle is closed for rows of a
/// multiple of 64 bytes, and the products take 16 columns at a time.
const HEAD_DIM_STEP: usize = 32;

/// The most heads of a group, at most `most`, that divide it.
pub(crate) fn heads_per_tile(problem: &Problem, most: usize) -> usize {
    let group = problem.group();
    let mut all = (1..=group.min(most)).rev();
    all.find(|n| group.is_multiple_of(*n)).unwrap_or(1)
}

impl MmaBlueprint {
    /// The form of its logits.
    pub(crate) fn logit_form(&self) -> LogitForm {
        LogitForm {
            capped: self.softcap,
            scored: self.pattern.adds_scores() || self.alibi,
        }
    }

    /// Chooses the widest stores that the alignment of all rows and starts written by `wgmma` allows, and the rows'
    /// length: a quad collects four segments at a time. Parts are f32, whose pairs are wide enough.
    pub(crate) fn writing<'a>(self, rows: impl IntoIterator<Item = &'a TensorBinding>) -> Self {
        let size = self.element.size();
        let wide = self.instruction == Instruction::Wgmma
            && !self.split
            && self.segments().is_multiple_of(4)
            && rows.into_iter().all(|rows| rows_are_segments(rows, size));
        Self {
            stores: RowStores::in_segments(wide),
            ..self
        }
    }

    /// The configuration for `problem` on an instruction, or the reason why it is not supported.
    ///
    /// - `mma`: f16 and bf16 on a device with `mma.sync` and `cp.async` (sm_80 and newer through the C++ generator),
    ///   head dimensions that are multiples of 32. A warp holds `16 x head_dim` of Q and of O in registers, so eight
    ///   warps of 255 registers fill a multiprocessor; 64 keys per tile keep its tensor cores busy between two
    ///   barriers, and 32 leave room for the registers of `head_dim > 128`. Four warps are used for problems that would
    ///   leave multiprocessors idle with eight.
    /// - `wgmma`: f16 and bf16 on sm_90, head dimensions that are multiples of 16, at least 32. The warpgroups of a
    ///   cube share every key that is copied, and while one computes its softmax the tensor cores work for the others.
    ///   There are as many as the registers of an output and two products in flight allow: four of 128 registers, three
    ///   of 168 or two of 255. Problems of few cubes take the number that wastes least of the last wave of
    ///   multiprocessors.
    pub(crate) fn choose(
        instruction: Instruction,
        problem: &Problem,
        properties: &DeviceProperties,
    ) -> Result<Self, Obstacle> {
        let pattern = Pattern::scored(problem);
        Self::choose_heads(instruction, problem, pattern, properties, 64)?.fitting(properties)
    }

    /// [`choose`](Self::choose) with at most `most` heads per tile, and stages that may not fit.
    fn choose_heads(
        instruction: Instruction,
        problem: &Problem,
        pattern: Pattern,
        properties: &DeviceProperties,
        most: usize,
    ) -> Result<Self, Obstacle> {
        let (element, head_dim) = (problem.element, problem.head_dim);
        let (on_device, fits, served) = match instruction {
            Instruction::Mma => (
                has_mma(element, properties),
                head_dim.is_multiple_of(HEAD_DIM_STEP),
                "multiples of 32",
            ),
            Instruction::Wgmma => (
                properties.features.copy_async && has_wgmma(properties),
                head_dim >= 32 && head_dim.is_multiple_of(16),
                "multiples of 16 from 32 on",
            ),
        };
        check_rows(on_device, element, head_dim, fits, served)?;
        let heads = heads_per_tile(problem, most);
        let with = |warps| Self::of(instruction, problem, pattern, heads, warps);
        let processors = processors(properties);
        Ok(match instruction {
            Instruction::Mma if with(8).cubes(problem) < processors => with(4),
            Instruction::Mma => with(8),
            Instruction::Wgmma => (with(4).sizes().iter())
                .map(|&warps| with(warps))
                .min_by_key(|cube| match cube.cubes(problem).div_ceil(processors) {
                    rounds @ ..4 => rounds * cube.warps,
                    _ => 0,
                })
                .expect("a kernel has sizes"),
        })
    }

    /// The configuration for a supported problem in tiles of `heads` heads, with as many stages as are useful.
    pub(crate) fn of(
        instruction: Instruction,
        problem: &Problem,
        pattern: Pattern,
        heads: usize,
        warps: usize,
    ) -> Self {
        let head_dim = problem.head_dim;
        let (key_tile, stages) = match (instruction, head_dim <= 128) {
            (Instruction::Mma, true) => (64, 3),
            (Instruction::Mma, false) => (32, 3),
            (Instruction::Wgmma, _) => wgmma_tiles(problem, pattern),
        };
        Self {
            instruction,
            element: problem.element,
            head_dim,
            warps,
            key_tile,
            stages,
            heads,
            causal: problem.causal,
            pattern,
            softcap: problem.softcap.is_some(),
            dropout: problem.dropout.is_some(),
            alibi: problem.alibi.is_some(),
            split: false,
            residual: false,
            rest: false,
            stores: RowStores::Pairs,
        }
    }

    /// [`choose`](Self::choose) for a problem with a mask or a bias. The heads of a tile's rows share both.
    pub(crate) fn choose_masked(
        instruction: Instruction,
        problem: &MaskedProblem,
        properties: &DeviceProperties,
    ) -> Result<Self, Obstacle> {
        let shapes = [problem.plan.map(|plan| plan.mask), problem.bias];
        let shared = |shape: &[usize; 4]| problem.heads_each(shape[1]) >= problem.attention.group();
        let most = match shapes.iter().flatten().all(shared) {
            true => 64,
            false => 1,
        };
        let pattern = Pattern::masked(problem, Bias::of(problem));
        Self::choose_heads(instruction, &problem.attention, pattern, properties, most)?
            .fitting(properties)
    }

    /// The configuration with as many stages as fit, but at least two or, with `wgmma`, whose stages are filled again two
    /// tiles behind their use, three.
    fn fitting(self, properties: &DeviceProperties) -> Result<Self, Obstacle> {
        let most = properties.hardware.max_shared_memory_size;
        let least = match self.instruction {
            Instruction::Mma => 2,
            Instruction::Wgmma => 3,
        };
        let with = |stages| Self { stages, ..self };
        let mut all = (least..=self.stages).rev().map(with);
        all.find(|blueprint| blueprint.shared_bytes() <= most)
            .ok_or(Obstacle::SharedMemory)
    }

    /// True if the `mma` kernel masks a boundary tile in a separate pass after its logits, not by a branch at each of
    /// them. This is 7 % faster at a head dimension of 128, but was not faster at 64 with lists of keys.
    pub(crate) fn hides_apart(&self) -> bool {
        !self.pattern.has_intervals() || self.head_dim >= 128
    }

    /// Bytes of shared memory per cube: keys, values, scores and intervals of every stage, the mark of values that are
    /// not finite, and the queries if they do not stay in registers.
    pub(crate) fn shared_bytes(&self) -> usize {
        let key = 2 * 16 * self.segments() + 4;
        let queries = match self.instruction {
            Instruction::Mma => 0,
            Instruction::Wgmma => self.tile_rows() * self.head_dim * 2,
        };
        let words = 4 * self.column_words() * self.key_tile;
        let stage = self.key_tile * key + self.stage_intervals() * 8 + words;
        self.stages * stage + queries + 4 * 1024
    }

    /// Intervals per stage in shared memory, or of the data in their place.
    pub(crate) fn stage_intervals(&self) -> usize {
        if self.pattern.is_planned() {
            self.queries() + 1
        } else {
            self.key_tile
        }
    }

    /// Rows per tile; the last rows may belong to no query.
    pub(crate) fn tile_rows(&self) -> usize {
        self.warps * 16
    }

    pub(crate) fn queries(&self) -> usize {
        self.tile_rows() / self.heads
    }

    /// 16-byte segments per row.
    pub(crate) fn segments(&self) -> usize {
        self.head_dim / 8
    }

    /// Elements of the vector in which a lane of `wgmma` holds its part of an output: CubeCL aligns a vector to its
    /// length, which must be a power of two; the elements after the last column are never used.
    pub(crate) fn output_elements(&self) -> usize {
        (self.head_dim / 2).next_power_of_two()
    }

    pub(crate) fn units(&self) -> usize {
        self.warps * 32
    }

    /// Words noted for every column of a stage: the key's word of the dropout mask, and its place for ALiBi.
    pub(crate) fn column_words(&self) -> usize {
        usize::from(self.dropout) + usize::from(self.alibi)
    }

    pub(crate) fn notes_columns(&self) -> bool {
        self.column_words() > 0
    }

    /// Arrivals by which a stage of `wgmma` is full: every unit's copies, and the words of keys.
    pub(crate) fn fillers(&self) -> usize {
        self.units() + usize::from(self.notes_columns()) * self.key_tile
    }

    /// Rows of a key tile that a unit copies, one segment of each.
    pub(crate) fn copies(&self) -> usize {
        (self.key_tile * self.segments()).div_ceil(self.units())
    }

    /// True if all segments of a tile that a unit copies are in one column, whole groups of eight rows apart.
    pub(crate) fn regular_copies(&self) -> bool {
        self.instruction == Instruction::Wgmma && self.units().is_multiple_of(8 * self.segments())
    }

    /// Alignment of a stage in shared memory.
    pub(crate) fn alignment(&self) -> usize {
        match self.instruction {
            Instruction::Mma => 128,
            Instruction::Wgmma => 1024,
        }
    }

    /// CubeCL's layout of the units: lanes along x, warps along y.
    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(32, self.warps as u32)
    }
}
