//! The kernels of SwiGLU: a unit owns a vector of elements.

use cubecl::prelude::*;

#[cube]
fn sigmoid<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::new(1.0f32);
    one / (one + (x * Vector::new(-1.0f32)).exp())
}

/// `out = silu(gate) * up`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn swiglu_kernel<E: Float, N: Size>(
    gate: &[Vector<E, N>],
    up: &[Vector<E, N>],
    out: &mut [Vector<E, N>],
    items: usize,
    #[define(E)] _element: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < items {
        let x = Vector::<f32, N>::cast_from(gate[at]);
        let up = Vector::<f32, N>::cast_from(up[at]);
        out[at] = Vector::cast_from(x * sigmoid(x) * up);
    }
}

/// Gradients of `gate` and `up` from that of `out`, and `out` itself if there is a buffer for it. CubeCL's disk cache would see
/// neither that (`again`) nor that results are written over arguments (`in_place`).
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn swiglu_backward_kernel<E: Float, N: Size>(
    gate: &[Vector<E, N>],
    up: &[Vector<E, N>],
    grad_out: &[Vector<E, N>],
    grad_gate: &mut [Vector<E, N>],
    grad_up: &mut [Vector<E, N>],
    out: &mut ComptimeOption<Box<[Vector<E, N>]>>,
    items: usize,
    #[comptime] _again: bool,
    #[comptime] _in_place: bool,
    #[define(E)] _element: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < items {
        let x = Vector::<f32, N>::cast_from(gate[at]);
        let up = Vector::<f32, N>::cast_from(up[at]);
        let gradient = Vector::<f32, N>::cast_from(grad_out[at]);
        let sigmoid = sigmoid(x);
        let silu = x * sigmoid;
        let slope = sigmoid + silu * (Vector::new(1.0f32) - sigmoid);
        grad_gate[at] = Vector::cast_from(gradient * up * slope);
        grad_up[at] = Vector::cast_from(gradient * silu);
        #[comptime]
        if let ComptimeOption::Some(out) = out {
            out[at] = Vector::cast_from(silu * up);
        }
    }
}
