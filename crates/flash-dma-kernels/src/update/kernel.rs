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

/// The elements that a step of AdamW reads, or those it writes; all buffers are of one length.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct State<E: Float, N: Size> {
    pub parameter: Box<[Vector<E, N>]>,
    pub moment_1: Box<[Vector<E, N>]>,
    pub moment_2: Box<[Vector<E, N>]>,
}

/// A step of AdamW: a unit owns a vector of elements. With `in_place` the buffers of `new` are those of `old`, which
/// CubeCL's disk cache would not see.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn adamw_kernel<E: Float, N: Size>(
    old: &State<E, N>,
    gradient: &[Vector<E, N>],
    new: &mut State<E, N>,
    step: Step,
    items: usize,
    #[comptime] _in_place: bool,
    #[define(E)] _element: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < items {
        let g = Vector::<f32, N>::cast_from(gradient[at]);
        let m = Vector::<f32, N>::cast_from(old.moment_1[at]);
        let v = Vector::<f32, N>::cast_from(old.moment_2[at]);
        let p = Vector::<f32, N>::cast_from(old.parameter[at]);
        let m = m * Vector::new(step.beta_1) + g * Vector::new(1.0f32 - step.beta_1);
        let v = v * Vector::new(step.beta_2) + g * g * Vector::new(1.0f32 - step.beta_2);
        let root = (v / Vector::new(step.correction_2)).sqrt() + Vector::new(step.epsilon);
        let change = m / Vector::new(step.correction_1) / root;
        let p = p * Vector::new(step.decay) - change * Vector::new(step.rate);
        new.moment_1[at] = Vector::cast_from(m);
        new.moment_2[at] = Vector::cast_from(v);
        new.parameter[at] = Vector::cast_from(p);
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

/// `out[c] = sums[c]` + the squares of the vectors of cube `c`: those of its units in every row of `CUBE_COUNT` cubes.
/// The order of additions is fixed.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn add_squares_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    sums: &[f32],
    out: &mut [f32],
    items: usize,
    #[comptime] units: usize,
    #[define(E)] _element: ElemType,
) {
    let size = N::value().comptime();
    let unit = UNIT_POS as usize;
    let mut sum = 0.0f32;
    let mut at = ABSOLUTE_POS;
    while at < items {
        let value = Vector::<f32, N>::cast_from(x[at]);
        let squares = value * value;
        #[unroll]
        for e in 0..size {
            sum += squares.extract(e);
        }
        at += CUBE_COUNT * units;
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
        out[CUBE_POS] = sums[CUBE_POS] + sum;
    }
}
