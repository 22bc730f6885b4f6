//! The comptime configuration of the tensor-core decode kernel, and the rule that chooses it.

use crate::matrix::blueprint::{check_rows, has_mma};
use crate::matrix::logit_scale::LogitForm;
use crate::matrix::mma::Shape;
use cubecl::CubeDim;
use cubecl::ir::{DeviceProperties, HardwareProperties};
use flash_dma_problem::{DecodeProblem, ElementType, Obstacle, Storage};

pub(crate) const ROWS: usize = 16;

/// Elements of a 16-byte segment.
pub(crate) const SEGMENT: usize = 8;

/// The least number of key tiles worth a separate warp.
const LEAST_TILES: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DecodeMmaBlueprint {
    /// f16 or bf16.
    pub element: ElementType,
    /// A multiple of 32.
    pub head_dim: usize,
    /// Warps per cube; a power of two. Each warp has a part of the keys.
    pub warps: usize,
    /// Keys per tile; 16 or 32.
    pub key_tile: usize,
    /// Key tiles of a warp copied ahead, and the one in use.
    pub stages: usize,
    /// True if the cache has pages, not slots.
    pub paged: bool,
    /// True if keys carry scores, which hide keys if they are −∞.
    pub scored: bool,
    /// True if the scores rank and hide keys, and are not added to their logits.
    pub only_ranked: bool,
    pub softcap: bool,
}

impl DecodeMmaBlueprint {
    /// The form of its logits.
    pub(crate) fn logit_form(&self) -> LogitForm {
        LogitForm {
            capped: self.softcap,
            scored: self.scored && !self.only_ranked,
        }
    }

    /// The configuration for `problem`, or the reason why this engine does not support it. Supported are f16 and bf16
    /// on a device with `mma.sync` and `cp.async`, head dimensions that are multiples of 32, and pages of whole key
    /// tiles without a window.
    ///
    /// Two tiles of 8 KiB ahead of each of eight warps are four times the bytes in flight that a multiprocessor of an
    /// H200 needs to saturate the memory.
    pub(crate) fn choose(
        problem: &DecodeProblem,
        properties: &DeviceProperties,
    ) -> Result<Self, Obstacle> {
        let cache = problem.append.cache;
        let (element, dim) = (cache.element, cache.head_dim);
        let (on_device, fits) = (has_mma(element, properties), dim.is_multiple_of(32));
        check_rows(on_device, element, dim, fits, "multiples of 32")?;
        if cache.page_window().is_some() {
            return Err(Obstacle::PageWindow);
        }
        let blueprint = Self {
            element: cache.element,
            head_dim: cache.head_dim,
            warps: 4,
            key_tile: if cache.head_dim <= 64 { 32 } else { 16 },
            stages: 3,
            paged: matches!(cache.storage, Storage::Pages { .. }),
            scored: cache.has_scores(),
            only_ranked: cache.has_scores() && !cache.adds_scores(),
            softcap: problem.softcap.is_some(),
        };
        blueprint.check(problem, &properties.hardware)?;
        Ok(blueprint)
    }

    /// Refuses pages that are not whole tiles, and devices without room for the stages.
    pub(crate) fn check(
        &self,
        problem: &DecodeProblem,
        hardware: &HardwareProperties,
    ) -> Result<(), Obstacle> {
        match problem.append.cache.storage {
            Storage::Pages { page_len, .. } if !page_len.is_multiple_of(self.key_tile) => {
                Err(Obstacle::PageLength)
            }
            _ if self.shared_bytes() > hardware.max_shared_memory_size => {
                Err(Obstacle::SharedMemory)
            }
            _ => Ok(()),
        }
    }

    /// Bytes of shared memory per cube: keys, values and scores of every stage of every warp.
    pub(crate) fn shared_bytes(&self) -> usize {
        self.warps * self.stages * self.key_tile * (4 * self.head_dim + 4)
    }

    /// 16-byte segments per row.
    pub(crate) fn segments(&self) -> usize {
        self.head_dim / SEGMENT
    }

    pub(crate) fn stage_segments(&self) -> usize {
        self.key_tile * self.segments()
    }

    /// Segments that a lane copies of a key tile, and of a value tile.
    pub(crate) fn copies(&self) -> usize {
        self.stage_segments() / 32
    }

    /// `Q K^T`: 16 rows by a tile of keys.
    pub(crate) fn scores_shape(&self) -> Shape {
        Shape {
            element: self.element,
            fragments: 1,
            blocks: self.key_tile / 16,
            columns: self.head_dim,
            transposed: false,
            column: 0,
            cleaned: false,
        }
    }

    /// `P V`: 16 rows by 32 columns, over 16 keys.
    pub(crate) fn output_shape(&self) -> Shape {
        Shape {
            blocks: 2,
            transposed: true,
            ..self.scores_shape()
        }
    }

    /// CubeCL's layout of the units: lanes along x, warps along y.
    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(32, self.warps as u32)
    }

    /// Cubes that share the keys of a kv head and 16 of its group's `rows` query rows.
    ///
    /// They depend on the capacity of the cache, not on its content, so that the launches of a step never change.
    pub(crate) fn cubes(
        &self,
        problem: &DecodeProblem,
        rows: usize,
        hardware: &HardwareProperties,
    ) -> usize {
        let cache = problem.append.cache;
        let row_tiles = cache.batch * cache.kv_heads * rows.div_ceil(ROWS);
        let processors = hardware.num_streaming_multiprocessors.unwrap_or(1) as usize;
        let resident = (hardware.max_shared_memory_size / self.shared_bytes()).clamp(1, 4);
        let tiles = cache.capacity().div_ceil(self.key_tile);
        (processors * resident / row_tiles.max(1))
            .min(tiles.div_ceil(self.warps * LEAST_TILES))
            .max(1)
    }

    /// Parts of the keys that `cubes` share: one per warp, and one for the newcomers.
    pub(crate) fn parts(&self, cubes: usize) -> usize {
        cubes * self.warps + 1
    }
}
