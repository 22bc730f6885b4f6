//! The kernels of cross-entropy: a plane owns a row.

use crate::team::{Member, Team};
use cubecl::prelude::*;

/// Numbers of rows, and of vectors of a row.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RowSizes {
    pub rows: usize,
    pub items: usize,
}

/// `losses[r]` = the cross-entropy of row `r`, and its two parts of the normaliser. A lane's sum is of differences to the
/// greatest logit that it has seen, so that logits are read once.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn losses_kernel<E: Float, N: Size>(
    logits: &[Vector<E, N>],
    targets: &[i32],
    losses: &mut [f32],
    normaliser: &mut [f32],
    sizes: RowSizes,
    #[comptime] team: Team,
    #[define(E)] _element: ElemType,
) {
    let size = N::value().comptime();
    let member = Member::this(team);
    let row = CUBE_POS * comptime!(team.planes) + member.plane;
    if row < sizes.rows {
        let first = row * sizes.items;
        // A finite number, whose difference to a logit of −∞ is −∞, too.
        let mut greatest = f32::min_value();
        let mut sum = 0.0f32;
        // As many rounds for every lane, since shuffles ask which lanes are active: one that is past the end reads the last
        // vector again, and adds nothing.
        for round in 0..sizes.items.div_ceil(team.lanes) {
            let item = round * comptime!(team.lanes) + member.lane;
            let last = min(item, sizes.items - 1);
            let x = Vector::<f32, N>::cast_from(logits[first + last]);
            let mut most = greatest;
            #[unroll]
            for e in 0..size {
                most = most.max(x.extract(e));
            }
            let terms = (x - Vector::new(most)).exp();
            let mut more = 0.0f32;
            #[unroll]
            for e in 0..size {
                more += terms.extract(e);
            }
            sum = sum * (greatest - most).exp() + select(item == last, more, 0.0f32);
            greatest = most;
        }
        if comptime!(team.lanes > 1) {
            let most = plane_max(greatest);
            sum = plane_sum(sum * (greatest - most).exp());
            greatest = most;
        }
        if member.lane == 0 {
            let target = targets[row] as usize;
            let log_sum = sum.ln();
            let mut hit = f32::new(f32::NAN);
            if target < sizes.items * size {
                let x = Vector::<f32, N>::cast_from(logits[first + target / size]);
                #[unroll]
                for e in 0..size {
                    if target % size == e {
                        hit = x.extract(e);
                    }
                }
            }
            losses[row] = (greatest - hit) + log_sum;
            normaliser[row * 2] = greatest;
            normaliser[row * 2 + 1] = log_sum;
        }
    }
}

/// The gradient of the logits from that of each row's loss. CubeCL's disk cache would not see that it is written over the
/// logits (`in_place`).
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn losses_gradient_kernel<E: Float, N: Size>(
    logits: &[Vector<E, N>],
    targets: &[i32],
    normaliser: &[f32],
    grad_losses: &[f32],
    grad_logits: &mut [Vector<E, N>],
    sizes: RowSizes,
    #[comptime] team: Team,
    #[comptime] _in_place: bool,
    #[define(E)] _element: ElemType,
) {
    let size = N::value().comptime();
    let member = Member::this(team);
    let row = CUBE_POS * comptime!(team.planes) + member.plane;
    if row < sizes.rows {
        let first = row * sizes.items;
        let target = targets[row] as usize;
        let greatest = normaliser[row * 2];
        let log_sum = normaliser[row * 2 + 1];
        let gradient = grad_losses[row];
        let mut item = member.lane;
        while item < sizes.items {
            let x = Vector::<f32, N>::cast_from(logits[first + item]);
            let mut share = ((x - Vector::new(greatest)) - Vector::new(log_sum)).exp();
            #[unroll]
            for e in 0..size {
                if item * size + e == target {
                    share.insert(e, share.extract(e) - 1.0f32);
                }
            }
            grad_logits[first + item] = Vector::cast_from(share * Vector::new(gradient));
            item += comptime!(team.lanes);
        }
    }
}
