//! The number of parts into which a step splits the keys of a cache.

use cubecl::ir::HardwareProperties;
use flash_dma_problem::DecodeProblem;

/// The least number of keys worth a separate cube.
const LEAST_KEYS: usize = 64;

/// Parts of the keys of every kv head for the portable engine: enough that `cubes` cubes with one part each become four
/// per multiprocessor, but no part has fewer than [`LEAST_KEYS`] keys. They depend on the capacity of the cache, not on
/// its content, so that the launches of a step never change.
pub(crate) fn parts(capacity: usize, cubes: usize, hardware: &HardwareProperties) -> usize {
    let processors = hardware.num_streaming_multiprocessors.unwrap_or(1) as usize;
    (4 * processors / cubes.max(1))
        .min(capacity.div_ceil(LEAST_KEYS))
        .max(1)
}

/// The shapes of the outputs and of the LSE of the given number of parts of the keys.
pub(crate) fn part_shapes(problem: &DecodeProblem, parts: usize) -> ([usize; 5], [usize; 4]) {
    let [batch, heads, len, dim] = problem.q_shape();
    ([parts, batch, heads, len, dim], [parts, batch, heads, len])
}
