//! The keys whose ranks learn at some position: runners-up, which just miss the window, from the end of their interval
//! to their `ends`; and kept keys that learn, from the position at which their rank keeps them to the end of their
//! interval.
//!
//! They are grouped into tiles by their first position. Runners-up move up through the ranks after the window together,
//! so the keys of a tile also leave it at about the same time, and a tile streams few queries for which it has no
//! runners-up. Within a tile they are grouped by the position at which they leave, so that each warp of a cube has keys
//! that begin and leave together. A key's positions do not begin at its own index, so both ends are listed. Where
//! tensor cores cut the queries into chunks, [`chunks`](super::chunks) lists them again for each.

use crate::args::{RankLearning, Selection};
use crate::finite::negative_infinity;
use crate::host::scratch::{address_type, bytes, cubes, scratch};
use cubecl::client::Client;
use cubecl::ir::HardwareProperties;
use cubecl::prelude::*;
use flash_dma_problem::Problem;
use std::iter;

#[cfg(test)]
mod tests;

/// Classes of first positions.
const CLASSES: usize = 256;
/// Classes that a cube sorts; it counts the keys of the classes before them.
const OWN_CLASSES: usize = 16;
/// Cubes per row.
const PARTS: usize = CLASSES / OWN_CLASSES;

/// The keys whose ranks learn, contiguous `[batch, kv_heads, k_len]`, 32-bit integers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RankedSource<'a> {
    /// Runners-up: [`RankLearning::ends`](flash_dma_problem::tensors::RankLearning::ends).
    RunnersUp(&'a TensorBinding),
    /// Kept keys: [`RankLearning::kept_from`](flash_dma_problem::tensors::RankLearning::kept_from).
    Kept(&'a TensorBinding),
}

/// The sources of keys whose ranks learn, one per launch.
pub(crate) fn sources(learning: &RankLearning) -> impl Iterator<Item = RankedSource<'_>> {
    let kept = learning.kept_from.as_ref().map(RankedSource::Kept);
    iter::once(RankedSource::RunnersUp(&learning.ends)).chain(kept)
}

/// The keys of one source, for each of the `batch * kv_heads` rows.
#[derive(Clone, Debug)]
pub(crate) struct RankedKeys {
    /// Contiguous `[batch * kv_heads, k_len]`, u32: the keys whose ranks some query trains, by ascending class of their
    /// first position, in a fixed order within a class; undefined past the count.
    pub keys: TensorBinding,
    /// Contiguous `[batch, kv_heads, k_len]`, pairs of u32: the first and one past the last position at which a
    /// key's rank learns; undefined for keys that are not listed.
    pub spans: TensorBinding,
    /// The span of each entry of `keys`, `[batch * kv_heads, k_len]` pairs; undefined past the count.
    pub listed: TensorBinding,
    /// Contiguous `[batch * kv_heads]`, u32.
    pub counts: TensorBinding,
}

impl RankedKeys {
    /// Sorts the `keys` of each tile of `tile` keys (at most a cube's units) by last position; leaves `listed`
    /// unchanged.
    pub(crate) fn order_tiles(&self, client: &Client, problem: &Problem, tile: usize) {
        let rows = problem.batch * problem.kv_heads;
        // SAFETY: a unit reads and writes an entry of its own tile, below the count.
        unsafe {
            order_tiles_kernel::launch_unchecked(
                client,
                CubeCount::Static(problem.k_len.div_ceil(tile) as u32, rows as u32, 1),
                CubeDim::new_1d(tile as u32),
                address_type([&self.keys, &self.spans, &self.counts]),
                self.keys.clone().into_buffer_arg(),
                self.spans.clone().into_buffer_arg(),
                self.counts.clone().into_buffer_arg(),
                problem.k_len as u32,
                tile,
            );
        }
    }

    fn shapes(problem: &Problem) -> ([usize; 2], [usize; 4], [usize; 1]) {
        let rows = problem.batch * problem.kv_heads;
        ([rows, problem.k_len], problem.intervals_shape(), [rows])
    }

    /// The bytes of the buffers that [`ranked_keys`] allocates for a selection; 0 if no rank learns.
    pub(crate) fn bytes(problem: &Problem, selection: Option<&Selection>) -> usize {
        let (keys, spans, counts) = Self::shapes(problem);
        match selection {
            Some(Selection {
                learning: Some(_), ..
            }) => bytes(keys) + 2 * bytes(spans) + bytes(counts),
            _ => 0,
        }
    }
}

/// The tensors of [`RankedKeys`], overwritten.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RankedBuffers {
    pub keys: Box<[u32]>,
    pub spans: Box<[Vector<u32, Const<2>>]>,
    pub listed: Box<[Vector<u32, Const<2>>]>,
    pub counts: Box<[u32]>,
}

/// Sizes of a launch of [`ranked_keys_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RankedSizes {
    pub heads: u32,
    pub k_len: u32,
    /// The positions of the queries: the first that is not negative, and one past the last.
    pub from: u32,
    pub to: u32,
    /// Positions that a class spans.
    pub width: u32,
    /// The batch times the kv heads.
    pub rows: u32,
}

/// A counting sort, by class of first position, of the keys of a row: one cube for each [`OWN_CLASSES`] classes and
/// row, the classes of a row in adjacent cubes, every `units`-th key per unit. Cubes past the last return. The keys of
/// a class are in order of their units, then ascending.
///
/// | buffer | layout |
/// |---|---|
/// | `intervals` | contiguous `[batch, kv_heads, k_len]`, pairs of first and end |
/// | `bounds` | contiguous `[batch, kv_heads, k_len]`: of kept keys the first position, of others one past the last |
/// | `scores` | `[batch, kv_heads, k_len]`, any strides |
/// | `out` | [`RankedBuffers`] |
#[cube(launch_unchecked, address_type = "dynamic")]
fn ranked_keys_kernel(
    intervals: &[Vector<u32, Const<2>>],
    bounds: &[u32],
    scores: &Tensor<f32>,
    out: &mut RankedBuffers,
    sizes: &RankedSizes,
    #[comptime] kept: bool,
    #[comptime] units: usize,
) {
    let row = CUBE_POS / PARTS;
    if row >= sizes.rows as usize {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let base = row * sizes.k_len as usize;
    let heads = sizes.heads as usize;
    let given = GivenSpans {
        base,
        scores: row / heads * scores.stride(0) + row % heads * scores.stride(1),
        step: scores.stride(2),
        kept,
    };
    let first_class = CUBE_POS % PARTS * OWN_CLASSES;

    // For each own class and unit: the number of keys, then the place of the next. Last, the keys of earlier classes.
    let mut counters = Shared::<[u32]>::new_slice(comptime!((OWN_CLASSES + 1) * units));
    for class in 0..comptime!(OWN_CLASSES + 1) {
        counters[class * units + unit] = 0u32;
    }
    // Neighbours are read by neighbouring units.
    let mut first = unit;
    while first < sizes.k_len as usize {
        let read = given.read(intervals, bounds, scores, first, sizes, units);
        #[unroll]
        for n in 0..READS {
            let class = own_class(read[n], first_class, sizes);
            if class <= OWN_CLASSES {
                counters[class * units + unit] += 1u32;
            }
        }
        first += comptime!(READS * units);
    }
    sync_cube();
    let count = into_destinations(&mut counters, units);
    if unit == 0 && first_class + OWN_CLASSES == CLASSES {
        out.counts[row] = count;
    }
    let mut first = unit;
    while first < sizes.k_len as usize {
        let read = given.read(intervals, bounds, scores, first, sizes, units);
        #[unroll]
        for n in 0..READS {
            let class = own_class(read[n], first_class, sizes);
            if class < OWN_CLASSES {
                let counter = class * units + unit;
                let key = first + comptime!(n * units);
                let place = base + counters[counter] as usize;
                out.keys[place] = key as u32;
                out.spans[base + key] = read[n];
                out.listed[place] = read[n];
                counters[counter] += 1u32;
            }
        }
        first += comptime!(READS * units);
    }
}

/// Keys that a unit reads at once.
const READS: usize = 4;

/// The tensors that give a row's spans.
#[derive(CubeType, Clone, Copy)]
struct GivenSpans {
    /// The row's first key, and its first score with the stride of the scores.
    base: usize,
    scores: usize,
    step: usize,
    /// True if they are of kept keys.
    #[cube(comptime)]
    kept: bool,
}

#[cube]
impl GivenSpans {
    /// The spans of the keys `first`, `first + units` and so on; empty past the last.
    fn read(
        &self,
        intervals: &[Vector<u32, Const<2>>],
        bounds: &[u32],
        scores: &Tensor<f32>,
        first: usize,
        sizes: &RankedSizes,
        #[comptime] units: usize,
    ) -> Array<Vector<u32, Const<2>>> {
        let mut spans = Array::<Vector<u32, Const<2>>>::new(READS);
        #[unroll]
        for n in 0..READS {
            let key = first + comptime!(n * units);
            let there = min(key, sizes.k_len as usize - 1);
            let score = scores[self.scores + there * self.step];
            let score = select(key == there, score, negative_infinity());
            let at = self.base + there;
            spans[n] = span_of(intervals[at], bounds[at], score, sizes, self.kept);
        }
        spans
    }
}

/// Turns the numbers of keys in `counters`, `[OWN_CLASSES + 1, units]`, into the places in the list at which the keys
/// of each class and unit begin, and returns the place after them. All units of the cube take part.
#[cube]
fn into_destinations(counters: &mut Shared<[u32]>, #[comptime] units: usize) -> u32 {
    let parts = comptime!(parts_of(units));
    let length = comptime!(units.div_ceil(parts));
    let classes = comptime!(OWN_CLASSES + 1);
    let mut sums = Shared::<[u32]>::new_slice(comptime!(classes * parts));
    let mut item = UNIT_POS as usize;
    while item < classes * parts {
        let (class, part) = (item / parts, item % parts);
        let mut sum = 0u32;
        for other in part * length..min(part * length + length, units) {
            sum += counters[class * units + other];
        }
        sums[item] = sum;
        item += units;
    }
    let mut totals = Shared::<[u32]>::new_slice(classes);
    sync_cube();
    let mut class = UNIT_POS as usize;
    while class < classes {
        let mut total = 0u32;
        for part in 0..parts {
            total += sums[class * parts + part];
        }
        totals[class] = total;
        class += units;
    }
    sync_cube();
    let mut item = UNIT_POS as usize;
    while item < OWN_CLASSES * parts {
        let (class, part) = (item / parts, item % parts);
        let mut next = totals[OWN_CLASSES];
        for before in 0..class {
            next += totals[before];
        }
        for before in class * parts..item {
            next += sums[before];
        }
        for other in part * length..min(part * length + length, units) {
            let here = counters[class * units + other];
            counters[class * units + other] = next;
            next += here;
        }
        item += units;
    }
    let mut all = 0u32;
    for class in 0..classes {
        all += totals[class];
    }
    sync_cube();
    all
}

/// Sorts the keys of each tile of a row's list by their last positions, so that neighbours begin and leave together:
/// one cube for each tile (x) and row (y), one unit per key.
///
/// | buffer | layout |
/// |---|---|
/// | `keys`, `spans`, `counts` | see [`RankedKeys`]; `keys` are reordered |
#[cube(launch_unchecked, address_type = "dynamic")]
fn order_tiles_kernel(
    keys: &mut [u32],
    spans: &[Vector<u32, Const<2>>],
    counts: &[u32],
    k_len: u32,
    #[comptime] tile: usize,
) {
    let row = CUBE_POS_Y as usize;
    let base = row * k_len as usize;
    let unit = UNIT_POS as usize;
    let start = CUBE_POS_X as usize * tile;
    let count = counts[row] as usize;
    if start >= count {
        terminate!();
    }
    let listed = start + unit < count;
    let mut key = 0u32;
    // Units without a key come last.
    let mut far = u32::new(comptime!(u32::MAX as i64));
    if listed {
        key = keys[base + start + unit];
        far = spans[base + key as usize].extract(1usize);
    }
    let mut fars = Shared::<[u32]>::new_slice(tile);
    fars[unit] = far;
    // Every unit has read its key as well.
    sync_cube();
    let mut place = 0usize;
    for other in 0..tile {
        let theirs = fars[other];
        if theirs < far || (theirs == far && other < unit) {
            place += 1;
        }
    }
    if listed {
        keys[base + start + place] = key;
    }
}

/// The first and one past the last position at which a key's rank learns; the same number twice if there is none.
#[cube]
fn span_of(
    interval: Vector<u32, Const<2>>,
    bound: u32,
    score: f32,
    sizes: &RankedSizes,
    #[comptime] kept: bool,
) -> Vector<u32, Const<2>> {
    let mut first = interval.extract(1usize);
    let mut end = min(bound, sizes.k_len);
    if comptime!(kept) {
        end = first;
        first = bound;
    }
    let seen = first < end && first < sizes.to && end > sizes.from;
    // A key that is never attended to learns nothing.
    let runs = seen && score != negative_infinity();
    let mut span = Vector::<u32, Const<2>>::new(0u32);
    span.insert(0usize, select(runs, first, 0u32));
    span.insert(1usize, select(runs, end, 0u32));
    span
}

/// The class of a span among those of a cube; [`OWN_CLASSES`] if it is before them, more if after them or empty.
#[cube]
fn own_class(span: Vector<u32, Const<2>>, first_class: usize, sizes: &RankedSizes) -> usize {
    let first = span.extract(0usize);
    let class = min(first / sizes.width, comptime!(CLASSES as u32 - 1)) as usize;
    let mut own = comptime!(OWN_CLASSES + 1).runtime();
    if first < span.extract(1usize) {
        if class < first_class {
            own = OWN_CLASSES.runtime();
        } else if class < first_class + OWN_CLASSES {
            own = class - first_class;
        }
    }
    own
}

/// Lists the keys of every row whose ranks learn by `source`, which belongs to `selection`, in one launch.
pub(crate) fn ranked_keys(
    client: &Client,
    problem: &Problem,
    selection: &Selection,
    source: RankedSource,
) -> RankedKeys {
    let units = units_for(&client.properties().hardware);
    ranked_keys_with(client, problem, selection, source, units)
}

/// The units of a cube: as many as the device has, up to 512, halved until their counters fit its shared memory.
fn units_for(hardware: &HardwareProperties) -> usize {
    if hardware.plane_size_max <= 1 {
        return 1;
    }
    let mut units = (hardware.max_units_per_cube as usize).min(512);
    while units > 1 && shared_bytes(units) > hardware.max_shared_memory_size {
        units /= 2;
    }
    units
}

/// The shared memory of [`ranked_keys_kernel`].
fn shared_bytes(units: usize) -> usize {
    (OWN_CLASSES + 1) * (units + parts_of(units) + 1) * size_of::<u32>()
}

/// The adjacent parts in which the units' counters of a class are summed.
fn parts_of(units: usize) -> usize {
    (units / OWN_CLASSES).max(1)
}

fn ranked_keys_with(
    client: &Client,
    problem: &Problem,
    selection: &Selection,
    source: RankedSource,
    units: usize,
) -> RankedKeys {
    let (bounds, kept) = match source {
        RankedSource::RunnersUp(far) => (far, false),
        RankedSource::Kept(from) => (from, true),
    };
    let rows = problem.batch * problem.kv_heads;
    let (keys, spans, counts) = RankedKeys::shapes(problem);
    let out = RankedKeys {
        keys: scratch(client, keys),
        spans: scratch(client, spans),
        listed: scratch(client, spans),
        counts: scratch(client, counts),
    };
    // Positions before key 0 see nothing.
    let from = problem.position(0).max(0) as u32;
    let words = [&selection.intervals, &selection.scores, &out.spans];
    let dim = CubeDim::new_1d(units as u32);
    // SAFETY: the tensors were checked to hold `k_len` keys per row, and a key is listed once.
    unsafe {
        ranked_keys_kernel::launch_unchecked(
            client,
            cubes(client, rows * PARTS, dim),
            dim,
            address_type(words),
            selection.intervals.clone().into_buffer_arg(),
            bounds.clone().into_buffer_arg(),
            selection.scores.clone().into_tensor_arg(),
            RankedBuffersLaunch::new(
                out.keys.clone().into_buffer_arg(),
                out.spans.clone().into_buffer_arg(),
                out.listed.clone().into_buffer_arg(),
                out.counts.clone().into_buffer_arg(),
            ),
            RankedSizesLaunch::new(
                problem.kv_heads as u32,
                problem.k_len as u32,
                from,
                problem.k_len as u32,
                problem.k_len.div_ceil(CLASSES).max(1) as u32,
                rows as u32,
            ),
            kept,
            units,
        );
    }
    out
}
