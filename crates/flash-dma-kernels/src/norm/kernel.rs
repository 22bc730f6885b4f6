//! Rows that are normalised and rotated, forward and backward.
//!
//! The lanes of a row hold it in registers from its load to its store, so that every tensor passes through memory once.

use crate::norm::blueprint::{LaneSums, NormBlueprint};
use cubecl::prelude::*;

/// `x` and the weights of its features.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Normed<E: Float, G: Float, N: Size> {
    /// `[batch, len, heads, width]`, any strides.
    pub x: OwnedTensor<Vector<E, N>>,
    /// Contiguous `[width]`.
    pub gamma: Box<[Vector<G, N>]>,
}

/// The angles of all positions.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Angles<T: Size> {
    /// `[positions, width / 2, 2]`, any strides: cosine and sine, at once if `T` is 2.
    pub table: OwnedTensor<Vector<f32, T>>,
    /// The position of the first token.
    pub start: usize,
}

/// The numbers of sequences, tokens and heads.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RowCounts {
    batch: usize,
    len: usize,
    heads: usize,
}

/// The rows of `bp.heads` heads of a token, and this unit's place in each.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Rows {
    batch: usize,
    token: usize,
    /// The first head.
    head: usize,
    /// True if there are such rows.
    exist: bool,
    /// The unit among those of a row.
    lane: usize,
}

#[cube]
impl Rows {
    /// The rows of this unit, if the cube processes those from `first` on: heads vary fastest.
    fn this(first: usize, counts: &RowCounts, #[comptime] bp: NormBlueprint) -> Rows {
        let row = first + UNIT_POS as usize / comptime!(bp.lanes) * comptime!(bp.heads);
        let token = row / counts.heads;
        Rows {
            batch: token / counts.len,
            token: token % counts.len,
            head: row % counts.heads,
            exist: row < counts.batch * counts.len * counts.heads,
            lane: UNIT_POS as usize % comptime!(bp.lanes),
        }
    }

    /// The first feature of item `step` of this lane; past the width there is none.
    fn feature(&self, step: usize, #[comptime] bp: NormBlueprint) -> usize {
        (step * comptime!(bp.lanes) + self.lane) * comptime!(bp.item)
    }

    /// The start of the first row in a tensor of these strides.
    fn at(&self, batch: usize, token: usize, head: usize) -> usize {
        self.batch * batch + self.token * token + self.head * head
    }

    /// Loads this lane's features of the rows, the first at `at` and `stride` elements from one to the next, as f32; zeros
    /// if there are no such rows.
    fn load<E: Float, N: Size>(
        &self,
        tensor: &Tensor<Vector<E, N>>,
        at: usize,
        stride: usize,
        values: &mut Array<f32>,
        #[comptime] bp: NormBlueprint,
    ) {
        #[unroll]
        for head in 0..comptime!(bp.heads) {
            self.load_row::<E, N>(tensor, at + head * stride, values, head, false, bp);
        }
    }

    /// Loads this lane's features of row `head` at `at`, or adds them.
    fn load_row<E: Float, N: Size>(
        &self,
        tensor: &Tensor<Vector<E, N>>,
        at: usize,
        values: &mut Array<f32>,
        #[comptime] head: usize,
        #[comptime] adds: bool,
        #[comptime] bp: NormBlueprint,
    ) {
        let size = tensor.vector_size().comptime();
        #[unroll(bp.unroll())]
        for step in 0..comptime!(bp.steps()) {
            let feature = self.feature(step, bp);
            #[unroll]
            for piece in 0..comptime!(bp.item / size) {
                let mut part = Vector::<f32, N>::new(0.0f32);
                if self.exist && feature < comptime!(bp.width) {
                    part = Vector::cast_from(tensor[(at + feature) / size + piece]);
                }
                #[unroll]
                for e in 0..size {
                    let to =
                        step * comptime!(bp.item) + comptime!(bp.first(head) + piece * size + e);
                    if comptime!(adds) {
                        values[to] += part.extract(e);
                    } else {
                        values[to] = part.extract(e);
                    }
                }
            }
        }
    }

    /// Stores this lane's features of row `head` at `at`, if there is such a row.
    fn store<E: Float, N: Size>(
        &self,
        tensor: &mut Tensor<Vector<E, N>>,
        at: usize,
        values: &Array<f32>,
        #[comptime] head: usize,
        #[comptime] bp: NormBlueprint,
    ) {
        let size = tensor.vector_size().comptime();
        #[unroll(bp.unroll())]
        for step in 0..comptime!(bp.steps()) {
            let feature = self.feature(step, bp);
            if self.exist && feature < comptime!(bp.width) {
                #[unroll]
                for piece in 0..comptime!(bp.item / size) {
                    let mut part = Vector::<f32, N>::new(0.0f32);
                    #[unroll]
                    for e in 0..size {
                        let from = step * comptime!(bp.item)
                            + comptime!(bp.first(head) + piece * size + e);
                        part.insert(e, values[from]);
                    }
                    tensor[(at + feature) / size + piece] = Vector::cast_from(part);
                }
            }
        }
    }

    /// Cosine and sine of each of this lane's pairs of features at the token's position; zeros if there are no such rows,
    /// nothing without angles.
    fn turns<T: Size>(
        &self,
        angles: &ComptimeOption<Angles<T>>,
        #[comptime] bp: NormBlueprint,
    ) -> Array<f32> {
        let mut turns = Array::<f32>::new(comptime!(if bp.rotary { bp.features() } else { 1 }));
        #[comptime]
        if let ComptimeOption::Some(angles) = angles {
            self.read_turns::<T>(angles, &mut turns, bp);
        }
        turns
    }

    fn read_turns<T: Size>(
        &self,
        angles: &Angles<T>,
        turns: &mut Array<f32>,
        #[comptime] bp: NormBlueprint,
    ) {
        let table = &angles.table;
        let size = table.vector_size().comptime();
        let at = (angles.start + self.token) * table.stride(0);
        let stride = table.stride(1);
        #[unroll(bp.unroll())]
        for step in 0..comptime!(bp.steps()) {
            let feature = self.feature(step, bp);
            #[unroll]
            for pair in 0..comptime!(bp.item / 2) {
                let mut cos = 0.0f32;
                let mut sin = 0.0f32;
                if self.exist && feature < comptime!(bp.width) {
                    let angle = (at + (feature / 2 + pair) * stride) / size;
                    cos = table[angle].extract(0usize);
                    sin = table[angle].extract(comptime!(size - 1));
                    if comptime!(size == 1) {
                        sin = table[angle + 1].extract(0usize);
                    }
                }
                let first = step * comptime!(bp.item) + comptime!(2 * pair);
                turns[first] = cos;
                turns[first + 1] = sin;
            }
        }
    }
}

/// Turns a lane's pairs of features of row `head` by the angles of the token's position, or back.
#[cube]
fn rotate(
    values: &mut Array<f32>,
    turns: &Array<f32>,
    #[comptime] head: usize,
    #[comptime] back: bool,
    #[comptime] bp: NormBlueprint,
) {
    #[unroll(bp.unroll())]
    for pair in 0..comptime!(bp.features() / 2) {
        let cos = turns[2 * pair];
        let mut sin = turns[2 * pair + 1];
        if comptime!(back) {
            sin = -sin;
        }
        let first = 2 * pair + comptime!(bp.first(head));
        // Both are computed before either is stored.
        let turned = values[first] * cos - values[first + 1] * sin;
        let partner = values[first + 1] * cos + values[first] * sin;
        values[first] = turned;
        values[first + 1] = partner;
    }
}

/// The sum of the values of the lanes of a row, which all units must request.
#[cube]
fn sum_of_lanes(value: f32, shared: &mut Shared<[f32]>, #[comptime] bp: NormBlueprint) -> f32 {
    let mut sum = value;
    if comptime!(bp.sums == LaneSums::Shuffles) {
        #[unroll]
        for step in 0..comptime!(bp.lanes.min(32).ilog2()) {
            sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
        }
        if comptime!(bp.lanes > 32) {
            let planes = comptime!(bp.lanes / 32);
            if UNIT_POS_PLANE == 0 {
                shared[UNIT_POS as usize / 32] = sum;
            }
            sync_cube();
            let first = UNIT_POS as usize / comptime!(bp.lanes) * planes;
            sum = 0.0f32;
            #[unroll]
            for plane in 0..planes {
                sum += shared[first + plane];
            }
            sync_cube();
        }
    }
    if comptime!(bp.sums == LaneSums::Shared) {
        shared[UNIT_POS as usize] = value;
        sync_cube();
        let first = UNIT_POS as usize / comptime!(bp.lanes) * comptime!(bp.lanes);
        sum = 0.0f32;
        for lane in 0..comptime!(bp.lanes) {
            sum += shared[first + lane];
        }
        sync_cube();
    }
    sum
}

/// `1 / sqrt(mean of x² + epsilon)` of row `head`.
#[cube]
fn reciprocal(
    x: &Array<f32>,
    epsilon: f32,
    shared: &mut Shared<[f32]>,
    #[comptime] head: usize,
    #[comptime] bp: NormBlueprint,
) -> f32 {
    let mut squares = 0.0f32;
    #[unroll(bp.unroll())]
    for n in 0..comptime!(bp.features()) {
        let x = x[n + comptime!(bp.first(head))];
        squares += x * x;
    }
    let squares = sum_of_lanes(squares, shared, bp);
    1.0f32 / (squares / comptime!(bp.width as f32) + epsilon).sqrt()
}

/// Multiplies this lane's features of row `head` by their weights, which are read again for every row: they stay in the L1 cache, and
/// in registers they would leave room for fewer rows.
#[cube]
fn weigh<G: Float, N: Size>(
    gamma: &[Vector<G, N>],
    rows: &Rows,
    values: &mut Array<f32>,
    #[comptime] head: usize,
    #[comptime] bp: NormBlueprint,
) {
    let size = N::value().comptime();
    #[unroll(bp.unroll())]
    for step in 0..comptime!(bp.steps()) {
        let feature = rows.feature(step, bp);
        if feature < comptime!(bp.width) {
            #[unroll]
            for piece in 0..comptime!(bp.item / size) {
                let part = Vector::<f32, N>::cast_from(gamma[feature / size + piece]);
                #[unroll]
                for e in 0..size {
                    let at =
                        step * comptime!(bp.item) + comptime!(bp.first(head) + piece * size + e);
                    values[at] *= part.extract(e);
                }
            }
        }
    }
}

/// `out` = the rows of `x`, each divided by its root mean square and weighted by gamma if there is one, then rotated if
/// there are angles. A cube owns `bp.rows` rows at a time, `bp.lanes` neighbouring units one of them.
///
/// | buffer | layout |
/// |---|---|
/// | `x` | `[batch, len, heads, width]`, any strides |
/// | `gamma` | contiguous `[width]` of `G` |
/// | `angles` | see [`Angles`] |
/// | `out` | `[batch, heads, len, width]`, any strides, overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn norm_forward_kernel<E: Float, G: Float, N: Size, T: Size>(
    x: &Tensor<Vector<E, N>>,
    gamma: &ComptimeOption<Box<[Vector<G, N>]>>,
    angles: &ComptimeOption<Angles<T>>,
    out: &mut Tensor<Vector<E, N>>,
    epsilon: f32,
    #[comptime] bp: NormBlueprint,
    #[define(E)] _element: ElemType,
    #[define(G)] _weight: ElemType,
) {
    let counts = RowCounts {
        batch: x.shape(0),
        len: x.shape(1),
        heads: x.shape(2),
    };
    let mut shared = Shared::<[f32]>::new_slice(comptime!(bp.shared_sums()));
    let mut values = Array::<f32>::new(comptime!(bp.heads * bp.features()));
    let count = counts.batch * counts.len * counts.heads;
    let mut first = CUBE_POS * comptime!(bp.rows());
    while first < count {
        let rows = Rows::this(first, &counts, bp);
        let turns = rows.turns::<T>(angles, bp);
        let at = rows.at(x.stride(0), x.stride(1), x.stride(2));
        rows.load::<E, N>(x, at, x.stride(2), &mut values, bp);
        let at = rows.at(out.stride(0), out.stride(2), out.stride(1));
        #[unroll]
        for head in 0..comptime!(bp.heads) {
            #[comptime]
            if let ComptimeOption::Some(gamma) = gamma {
                let r = reciprocal(&values, epsilon, &mut shared, head, bp);
                #[unroll(bp.unroll())]
                for n in 0..comptime!(bp.features()) {
                    values[n + comptime!(bp.first(head))] *= r;
                }
                weigh::<G, N>(gamma, &rows, &mut values, head, bp);
            }
            if comptime!(bp.rotary) {
                rotate(&mut values, &turns, head, false, bp);
            }
            let to = at + head * out.stride(1);
            rows.store::<E, N>(out, to, &values, head, bp);
        }
        first += CUBE_COUNT * comptime!(bp.rows());
    }
}

/// The gradient of `x`, and of gamma the sum over the rows of each cube. Rows are owned as in the forward pass; a cube
/// owns the rows that follow one another, so which rows a sum has depends on the number of cubes alone. With `g` the
/// gradient of `out` rotated back, `r` the reciprocal root mean square and `m` the mean of `g * gamma * x` over a row:
///
/// `grad_x = r * (g * gamma - x * r² * m) + other`, `grad_gamma = sum over rows of g * x * r`.
///
/// | buffer | layout |
/// |---|---|
/// | `grad_out` | `[batch, heads, len, width]`, any strides |
/// | `normed` | see [`Normed`]; none without a norm |
/// | `angles` | see [`Angles`] |
/// | `other` | `[batch, len, heads, width]`, any strides; given exactly if `bp.adds` |
/// | `grad_x` | `[batch, len, heads, width]`, any strides, overwritten |
/// | `grad_gamma` | contiguous `[cubes, width]`, f32, overwritten; given exactly if `normed` is |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn norm_backward_kernel<E: Float, G: Float, N: Size, T: Size>(
    grad_out: &Tensor<Vector<E, N>>,
    normed: &ComptimeOption<Normed<E, G, N>>,
    angles: &ComptimeOption<Angles<T>>,
    other: &ComptimeOption<OwnedTensor<Vector<E, N>>>,
    grad_x: &mut Tensor<Vector<E, N>>,
    grad_gamma: &mut ComptimeOption<Box<[f32]>>,
    epsilon: f32,
    #[comptime] bp: NormBlueprint,
    #[define(E)] _element: ElemType,
    #[define(G)] _weight: ElemType,
) {
    let counts = RowCounts {
        batch: grad_out.shape(0),
        len: grad_out.shape(2),
        heads: grad_out.shape(1),
    };
    let mut shared = Shared::<[f32]>::new_slice(comptime!(bp.shared_sums()));
    let mut values = Array::<f32>::new(comptime!(bp.heads * bp.features()));
    let mut grads = Array::<f32>::new(comptime!(bp.heads * bp.features()));
    let mut sums = Array::<f32>::new(comptime!(bp.features()));
    #[unroll(bp.unroll())]
    for n in 0..comptime!(bp.features()) {
        sums[n] = 0.0f32;
    }
    let count = counts.batch * counts.len * counts.heads;
    let passes = count.div_ceil(comptime!(bp.rows())).div_ceil(CUBE_COUNT);
    let begin = CUBE_POS * passes * comptime!(bp.rows());
    for pass in 0..passes {
        let rows = Rows::this(begin + pass * comptime!(bp.rows()), &counts, bp);
        let turns = rows.turns::<T>(angles, bp);
        let at = rows.at(grad_out.stride(0), grad_out.stride(2), grad_out.stride(1));
        rows.load::<E, N>(grad_out, at, grad_out.stride(1), &mut grads, bp);
        #[comptime]
        if let ComptimeOption::Some(normed) = normed {
            let x = &normed.x;
            let at = rows.at(x.stride(0), x.stride(1), x.stride(2));
            rows.load::<E, N>(x, at, x.stride(2), &mut values, bp);
        }
        let at = rows.at(grad_x.stride(0), grad_x.stride(1), grad_x.stride(2));
        #[unroll]
        for head in 0..comptime!(bp.heads) {
            if comptime!(bp.rotary) {
                rotate(&mut grads, &turns, head, true, bp);
            }
            #[comptime]
            if let ComptimeOption::Some(normed) = normed {
                let r = reciprocal(&values, epsilon, &mut shared, head, bp);
                #[unroll(bp.unroll())]
                for n in 0..comptime!(bp.features()) {
                    let of = n + comptime!(bp.first(head));
                    sums[n] += grads[of] * (values[of] * r);
                }
                weigh::<G, N>(&normed.gamma, &rows, &mut grads, head, bp);
                let mut dot = 0.0f32;
                #[unroll(bp.unroll())]
                for n in 0..comptime!(bp.features()) {
                    let of = n + comptime!(bp.first(head));
                    dot += grads[of] * values[of];
                }
                let dot = sum_of_lanes(dot, &mut shared, bp);
                let mean = dot * r * r / comptime!(bp.width as f32);
                #[unroll(bp.unroll())]
                for n in 0..comptime!(bp.features()) {
                    let of = n + comptime!(bp.first(head));
                    grads[of] = r * (grads[of] - values[of] * mean);
                }
            }
            #[comptime]
            if let ComptimeOption::Some(other) = other {
                let from = rows.at(other.stride(0), other.stride(1), other.stride(2));
                let from = from + head * other.stride(2);
                rows.load_row::<E, N>(other, from, &mut grads, head, true, bp);
            }
            let to = at + head * grad_x.stride(2);
            rows.store::<E, N>(grad_x, to, &grads, head, bp);
        }
    }
    #[comptime]
    if let ComptimeOption::Some(grad_gamma) = grad_gamma {
        store_sums(&sums, grad_gamma, bp);
    }
}

/// Writes the sums over the cube's rows: those of its lanes, added up group by group.
#[cube]
fn store_sums(sums: &Array<f32>, grad_gamma: &mut [f32], #[comptime] bp: NormBlueprint) {
    let row = UNIT_POS as usize / comptime!(bp.lanes);
    let lane = UNIT_POS as usize % comptime!(bp.lanes);
    let to = CUBE_POS * comptime!(bp.width);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(bp.shared_gradients()));
    #[unroll(bp.unroll())]
    for step in 0..comptime!(bp.steps()) {
        let feature = (step * comptime!(bp.lanes) + lane) * comptime!(bp.item);
        if feature < comptime!(bp.width) {
            #[unroll]
            for e in 0..comptime!(bp.item) {
                let sum = sums[step * comptime!(bp.item) + e];
                if comptime!(bp.groups == 1) {
                    grad_gamma[to + feature + e] = sum;
                } else {
                    shared[row * comptime!(bp.width) + feature + e] = sum;
                }
            }
        }
    }
    if comptime!(bp.groups > 1) {
        sync_cube();
        let mut feature = UNIT_POS as usize;
        while feature < comptime!(bp.width) {
            let mut sum = 0.0f32;
            for row in 0..comptime!(bp.groups) {
                sum += shared[row * comptime!(bp.width) + feature];
            }
            grad_gamma[to + feature] = sum;
            feature += comptime!(bp.units());
        }
    }
}
