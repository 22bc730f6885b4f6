//! The products, and the conversion of an accumulator to an A operand.

use crate::matrix::ptx::{ptx_type, value};
use crate::matrix::wgmma::panel::{Panels, panel_width};
use cubecl::prelude::*;
use flash_dma_problem::ElementType;

/// A step of 16 along the columns of a panel, in 16-byte units.
const COLUMN_STEP: usize = 2;

/// The upper word of the descriptor of a panel `width` elements wide: the swizzle of 128, 64 or 32 bytes, and the
/// stride between groups of eight rows in 16-byte units.
fn upper_word(width: usize) -> u32 {
    let swizzle = match width {
        64 => 1,
        32 => 2,
        _ => 3,
    };
    swizzle << 30 | width as u32
}

/// `$0[64, n] = A[64, depth] B[n, depth]^T`; `$1` and `$2` are the addresses of A and B, both panels. `$0` is a vector
/// of `r` registers, of which the first `n / 2` are used.
fn nt_asm(element: ElementType, n: usize, depth: usize, r: usize) -> String {
    let ty = ptx_type(element);
    let out = match n / 2 == r {
        true => "$0".to_owned(),
        false => first_registers(n / 2),
    };
    let width = panel_width(depth);
    let upper = upper_word(width);
    let mut s = format!(
        "{{ .reg .pred p; .reg .b32 h; .reg .b32 a, b; .reg .b64 da, db; mov.b32 h, {upper};\n\
         wgmma.fence.sync.aligned;\n"
    );
    for step in 0..depth / 16 {
        let (panel, inner) = (step * 16 / width, step * 16 % width / 16);
        let a = panel * 64 * width / 8 + inner * COLUMN_STEP;
        let b = panel * n * width / 8 + inner * COLUMN_STEP;
        let set = match step {
            0 => "setp.ne.b32 p, 0, 0;",
            _ => "setp.eq.b32 p, 0, 0;",
        };
        s += &format!(
            "add.u32 a, $1, {a}; add.u32 b, $2, {b}; mov.b64 da, {{a, h}}; mov.b64 db, {{b, h}}; {set}\n\
             wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ty}.{ty} {out}, da, db, p, 1, 1, 0, 0;\n"
        );
    }
    s += "wgmma.commit_group.sync.aligned; }";
    s
}

/// The first `n` registers of operand 0.
fn first_registers(n: usize) -> String {
    let all: Vec<_> = (0..n).map(|i| format!("%{i}")).collect();
    format!("{{{}}}", all.join(", "))
}

/// Waits until at most `under_way` products are in flight, and then moves the first `n` of the `r` registers of `$1` to
/// `$0`: the moves cost nothing, but bind what follows.
fn finish_asm(n: usize, under_way: usize, r: usize) -> String {
    let mut s = format!("wgmma.wait_group.sync.aligned {under_way};\n");
    for i in 0..n {
        s += &format!("mov.b32 %{i}, %{};", r + i);
    }
    s
}

/// The result of the product `started`: waits for all products that this warpgroup has started.
#[cube]
pub(crate) fn finish<N: Size>(started: Vector<f32, N>, #[comptime] n: usize) -> Vector<f32, N> {
    finish_but::<N>(started, 0usize, n)
}

/// [`finish`] without waiting for the last `under_way` products.
#[cube]
pub(crate) fn finish_but<N: Size>(
    started: Vector<f32, N>,
    #[comptime] under_way: usize,
    #[comptime] n: usize,
) -> Vector<f32, N> {
    let registers = N::value();
    let body = comptime!(finish_asm(n, under_way, registers));
    let out: Vector<f32, N>;
    gpu_asm!(
        "{body} // {} {}",
        out(_) out,
        in(_) value::<Vector<f32, N>>(started),
        body = const body,
        options(explicit_mem, reads_address_space shared)
    );
    out
}

/// Starts `A B^T` of 64 rows of panels `a` and the `n` rows of panels `b`, both `depth` columns wide.
#[cube]
pub(crate) fn start_nt<N: Size>(
    a: &Panels,
    b: &Panels,
    #[comptime] element: ElementType,
    #[comptime] n: usize,
    #[comptime] depth: usize,
) -> Vector<f32, N> {
    let registers = N::value();
    let body = comptime!(nt_asm(element, n, depth, registers));
    let out: Vector<f32, N>;
    gpu_asm!(
        "{body} // {} {} {}",
        out(_) out,
        in(_) value::<u32>(a.address),
        in(_) value::<u32>(b.address),
        body = const body,
        options(explicit_mem, reads_address_space shared)
    );
    out
}

/// `$0[64, n] = $1 + A[64, rows] B[rows, n]`; A is the registers of `$2`, `$3` the address of B's panels. `$0` and `$1`
/// are vectors of `r` registers, of which the first `n / 2` are used.
fn pv_asm(element: ElementType, n: usize, rows: usize, r: usize) -> String {
    let ty = ptx_type(element);
    let width = panel_width(n);
    let upper = upper_word(width);
    // The next panel holds the next columns.
    let lead = (rows * width / 8) << 16;
    let mut s = format!(
        "{{ .reg .pred p; .reg .b32 h, b; .reg .b64 db; mov.b32 h, {upper}; setp.eq.b32 p, 0, 0;\n"
    );
    for i in 0..r {
        s += &format!("mov.f32 %{i}, %{};", r + i);
    }
    s += "\nwgmma.fence.sync.aligned;\n";
    let out = first_registers(n / 2);
    for step in 0..rows / 16 {
        let [a0, a1, a2, a3] = [0, 1, 2, 3].map(|i| 2 * r + 4 * step + i);
        s += &format!(
            "add.u32 b, $3, {}; or.b32 b, b, {lead}; mov.b64 db, {{b, h}};\n\
             wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ty}.{ty} {out}, \
             {{%{a0}, %{a1}, %{a2}, %{a3}}}, db, p, 1, 1, 1;\n",
            step * 16 * width / 8
        );
    }
    s += "wgmma.commit_group.sync.aligned; // $0 $1 $2\n}";
    s
}

/// Starts `acc + A B`: A is 64 rows of `rows` values in registers, see [`pack`](crate::matrix::fragment::pack), B the
/// panels `b` of `rows` rows and `n` columns. A lane's part of an accumulator is the first `n / 2` elements of its
/// vector.
#[cube]
pub(crate) fn start_pv<N: Size, NA: Size>(
    acc: Vector<f32, N>,
    a: Vector<u32, NA>,
    b: &Panels,
    #[comptime] element: ElementType,
    #[comptime] n: usize,
    #[comptime] rows: usize,
) -> Vector<f32, N> {
    let registers = N::value();
    let body = comptime!(pv_asm(element, n, rows, registers));
    let out: Vector<f32, N>;
    gpu_asm!(
        "{body} // {} {} {} {}",
        out(_) out,
        in(_) value::<Vector<f32, N>>(acc),
        in(_) value::<Vector<u32, NA>>(a),
        in(_) value::<u32>(b.address),
        body = const body,
        options(explicit_mem, reads_address_space shared)
    );
    out
}
