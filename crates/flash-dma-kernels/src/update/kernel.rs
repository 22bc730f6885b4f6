//! The kernels of an update, each a pass over a parameter's elements in the order of memory.

use cubecl::prelude::*;

/// Numbers of a step of AdamW, see [`AdamWStep`](flash_dma_problem::AdamWStep).
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Step {
    pub rate: f32,
    pub decay: f32,
    pub beta_1: f32,
    pub beta_2: f32,
    pub epsilon: f32,
    pub correction_1: f32,
    pub correction_2: f32,
}

/// A parameter's elements and what a step of AdamW has of them; all buffers are of one length.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Update<E: Float, N: Size> {
    pub parameter: Box<[Vector<E, N>]>,
    pub gradient: Box<[Vector<E, N>]>,
    pub moment_1: Box<[Vector<E, N>]>,
    pub moment_2: Box<[Vector<E, N>]>,
    /// Where the new parameter goes, perhaps the buffer of the old one.
    pub new: Box<[Vector<E, N>]>,
    /// The first unit that has a vector of this parameter, and their number.
    pub first: usize,
    pub items: usize,
}

/// A step of AdamW on `count` parameters, writing over their moments: a unit owns a vector of one of them. CubeCL's disk cache
/// would not see the length of the sequence, or that new parameters are written over old ones (`in_place`).
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn adamw_kernel<E: Float, N: Size>(
    updates: &mut Sequence<Update<E, N>>,
    factor: &[f32],
    step: Step,
    #[comptime] count: usize,
    #[comptime] _in_place: bool,
    #[define(E)] _element: ElemType,
) {
    let unit = ABSOLUTE_POS;
    let mut g = Vector::<f32, N>::new(0.0f32);
    let mut m = Vector::<f32, N>::new(0.0f32);
    let mut v = Vector::<f32, N>::new(0.0f32);
    let mut p = Vector::<f32, N>::new(0.0f32);
    // Only the transfers are written out for each parameter, since the kernel is compiled when it is first called.
    #[unroll]
    for index in 0..count {
        let update = &updates[index];
        if unit >= update.first && unit < update.first + update.items {
            let at = unit - update.first;
            g = Vector::cast_from(update.gradient[at]);
            m = Vector::cast_from(update.moment_1[at]);
            v = Vector::cast_from(update.moment_2[at]);
            p = Vector::cast_from(update.parameter[at]);
        }
    }
    g *= Vector::new(factor[0]);
    m = m * Vector::new(step.beta_1) + g * Vector::new(1.0f32 - step.beta_1);
    v = v * Vector::new(step.beta_2) + g * g * Vector::new(1.0f32 - step.beta_2);
    let root = (v / Vector::new(step.correction_2)).sqrt() + Vector::new(step.epsilon);
    let change = m / Vector::new(step.correction_1) / root;
    p = p * Vector::new(step.decay) - change * Vector::new(step.rate);
    #[unroll]
    for index in 0..count {
        let update = &mut updates[index];
        if unit >= update.first && unit < update.first + update.items {
            let at = unit - update.first;
            update.moment_1[at] = Vector::cast_from(m);
            update.moment_2[at] = Vector::cast_from(v);
            update.new[at] = Vector::cast_from(p);
        }
    }
}

/// `out = x * factor[0]`: a unit owns a vector of elements.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn scale_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    factor: &[f32],
    out: &mut [Vector<E, N>],
    items: usize,
    #[define(E)] _element: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < items {
        let scaled = Vector::<f32, N>::cast_from(x[at]) * Vector::new(factor[0]);
        out[at] = Vector::cast_from(scaled);
    }
}

/// Adds to `sums[c]` the squares of the vectors of cube `c`: those of its units in every row of `CUBE_COUNT` cubes, of
/// one tensor after another. The order of additions is fixed. CubeCL's disk cache would not see the length of the sequence.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn add_squares_kernel<E: Float, N: Size>(
    tensors: &Sequence<Squared<E, N>>,
    sums: &mut [f32],
    #[comptime] count: usize,
    #[comptime] units: usize,
    #[define(E)] _element: ElemType,
) {
    let size = N::value().comptime();
    let unit = UNIT_POS as usize;
    let mut sum = 0.0f32;
    #[unroll]
    for index in 0..count {
        let tensor = &tensors[index];
        let mut at = ABSOLUTE_POS;
        while at < tensor.items {
            let value = Vector::<f32, N>::cast_from(tensor.x[at]);
            let squares = value * value;
            #[unroll]
            for e in 0..size {
                sum += squares.extract(e);
            }
            at += CUBE_COUNT * units;
        }
    }
    if comptime!(units > 1) {
        let mut shared = Shared::<[f32]>::new_slice(units);
        shared[unit] = sum;
        sync_cube();
        let mut half = comptime!(units / 2).runtime();
        while half > 0 {
            if unit < half {
                shared[unit] += shared[unit + half];
            }
            sync_cube();
            half /= 2;
        }
        sum = shared[0usize];
    }
    if unit == 0 {
        sums[CUBE_POS] += sum;
    }
}

/// A tensor whose squares are added.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Squared<E: Float, N: Size> {
    pub x: Box<[Vector<E, N>]>,
    /// Its vectors.
    pub items: usize,
}
