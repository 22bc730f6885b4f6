//! The instruction, for operands of either layout.

use crate::matrix::ptx::{ptx_type, value};
use crate::matrix::wgmma::panel::Panels;
use crate::product::operands::Major;
use crate::product::wgmma::blueprint::{Blueprint, DEPTH};
use cubecl::prelude::*;
use std::fmt::Write as _;

/// The upper word of a descriptor: a swizzle of 128 bytes, and 1024 bytes between groups of eight rows of a panel.
const UPPER: u32 = 1 << 30 | 64;

/// 16-byte units from a panel of [`DEPTH`] rows to the next, which holds the next 64 columns.
const NEXT_PANEL: usize = DEPTH * 64 / 8;

/// The lower word's stride, and the 16-byte units of a step of 16 along k.
///
/// A panel's rows hold 64 elements. Where they run along k, a step moves within them; where they run across, a step is
/// 16 rows, and the next 64 elements across are in the next panel.
fn steps(along_k: bool) -> (usize, usize) {
    if along_k {
        (0, 2)
    } else {
        (NEXT_PANEL << 16, 16 * 64 / 8)
    }
}

/// `$0[64, n] = $1 + A[64, DEPTH] B[DEPTH, n]`; `$2` and `$3` are the addresses of A's and B's panels.
fn multiply_asm(bp: Blueprint, registers: usize) -> String {
    let (n, ty) = (bp.tile.columns(), ptx_type(bp.element));
    let (a_across, b_across) = (
        usize::from(bp.a == Major::Column),
        usize::from(bp.b == Major::Row),
    );
    let (a_lead, a_step) = steps(a_across == 0);
    let (b_lead, b_step) = steps(b_across == 0);
    let mut s = format!(
        "{{ .reg .pred p; .reg .b32 h, a, b; .reg .b64 da, db; mov.b32 h, {UPPER}; setp.eq.b32 p, 0, 0;\n"
    );
    for i in 0..registers {
        write!(s, "mov.f32 %{i}, %{};", registers + i).expect("a string takes everything");
    }
    s += "\nwgmma.fence.sync.aligned;\n";
    for step in 0..DEPTH / 16 {
        write!(
            s,
            "add.u32 a, $2, {}; or.b32 a, a, {a_lead}; mov.b64 da, {{a, h}};\n\
             add.u32 b, $3, {}; or.b32 b, b, {b_lead}; mov.b64 db, {{b, h}};\n\
             wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ty}.{ty} $0, da, db, p, 1, 1, {a_across}, {b_across};\n",
            step * a_step,
            step * b_step
        )
        .expect("a string takes everything");
    }
    s += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0; // $1\n}";
    s
}

/// `acc + A B` of one stage: A is 64 rows of the tile's panels `a`, B the panels `b`. It waits for the result: meanwhile
/// the tensor cores work for the other warpgroup.
#[cube]
pub(crate) fn multiply_add<N: Size>(
    acc: Vector<f32, N>,
    a: &Panels,
    b: &Panels,
    #[comptime] bp: Blueprint,
) -> Vector<f32, N> {
    let registers = N::value();
    let body = comptime!(multiply_asm(bp, registers));
    let out: Vector<f32, N>;
    gpu_asm!(
        "{body} // {} {} {} {}",
        out(_) out,
        in(_) value::<Vector<f32, N>>(acc),
        in(_) value::<u32>(a.address),
        in(_) value::<u32>(b.address),
        body = const body,
        options(explicit_mem, reads_address_space shared)
    );
    out
}
