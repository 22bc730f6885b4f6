//! Host side of the selection by blocks of positions: two launches.

use crate::host::check::vector_size;
use crate::host::scratch::{address_type, bytes, cubes, scratch};
use crate::select::blueprint::BlocksBlueprint;
use crate::select::evictions::{EvictionsLaunch, evictions_kernel};
use crate::select::thresholds::{MAX_KEYS, THRESHOLD, thresholds_kernel};
use crate::team::Team;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::KeptKeys;

impl BlocksBlueprint {
    /// The configuration for `rows` of `n` keys, or `None` where sorting is better: on runtimes whose units are threads
    /// of a processor, and for rows so long that reading the keys before every edge costs more than a sort.
    pub(crate) fn choose(client: &Client, rows: usize, n: usize) -> Option<Self> {
        let properties = client.properties();
        let hardware = &properties.hardware;
        if hardware.plane_size_max <= 1 || n > LONGEST {
            return None;
        }
        // Short blocks fill the device, long ones read fewer keys.
        let keys = rows * n;
        let block = if keys <= 64 << 10 {
            256
        } else if keys <= 512 << 10 {
            512
        } else if n <= 128 << 10 {
            1024
        } else {
            2048
        };
        // A cube that writes intervals holds five words per position.
        let room = (hardware.max_shared_memory_size / 20 / 32 * 32).max(32);
        let mut team = Team::new(client, PLANES);
        if team.lanes == 1 {
            let units = (hardware.max_units_per_cube as usize).clamp(1, 256);
            team.planes = 1 << units.ilog2();
        }
        Some(Self {
            team,
            block: block.min(room),
            ptx: properties.features.copy_async,
        })
    }

    /// The shape of the thresholds at the edges of the blocks of `rows` of `n` keys.
    fn thresholds(&self, rows: usize, n: usize) -> [usize; 3] {
        [rows, n.div_ceil(self.block) + 1, THRESHOLD]
    }

    /// The bytes of the buffers that [`launch`] allocates.
    pub(crate) fn workspace(&self, rows: usize, n: usize) -> usize {
        bytes(self.thresholds(rows, n))
    }
}

/// Keys of a row beyond which the sort is faster.
const LONGEST: usize = 512 << 10;

const _: () = assert!(LONGEST <= MAX_KEYS);

/// Planes per cube: at least two cubes share a multiprocessor, so that one counts while another searches.
const PLANES: usize = 16;

/// Launches the selection of checked, non-empty `scores` `[batch, kv_heads, n]` into `intervals`; some of the `n` keys,
/// at most [`MAX_KEYS`], are kept for their ranks, but not all.
pub(crate) fn launch(
    client: &Client,
    scores: TensorBinding,
    kept: KeptKeys,
    intervals: TensorBinding,
    blueprint: BlocksBlueprint,
) {
    let (rows, n) = (scores.shape[0] * scores.shape[1], scores.shape[2]);
    let blocks = n.div_ceil(blueprint.block);
    let thresholds = scratch(client, blueprint.thresholds(rows, n));
    let vector = match n.is_multiple_of(4) {
        true => vector_size(&[&scores], size_of::<f32>()),
        false => 1,
    };
    let address = address_type([&scores, &intervals]);
    let dim = blueprint.team.cube_dim();
    // SAFETY: cubes past the edges return; `scores` was checked to hold its shape and strides, and its
    // rows begin at whole vectors.
    unsafe {
        thresholds_kernel::launch_unchecked(
            client,
            cubes(client, rows * (blocks + 1), dim),
            dim,
            address,
            vector,
            scores.clone().into_tensor_arg(),
            thresholds.clone().into_buffer_arg(),
            rows as u32,
            n as u32,
            kept.best as u32,
            blueprint,
        );
    }
    // SAFETY: cubes past the blocks return; the intervals hold `[rows, n, 2]`.
    unsafe {
        evictions_kernel::launch_unchecked(
            client,
            cubes(client, rows * blocks, dim),
            dim,
            address,
            vector,
            scores.into_tensor_arg(),
            thresholds.into_buffer_arg(),
            intervals.into_buffer_arg(),
            EvictionsLaunch::new(
                rows as u32,
                n as u32,
                kept.best as u32,
                kept.recent.min(n) as u32,
            ),
            blueprint,
        );
    }
}
