//! The `mma.sync` matrix engine, tensor cores of sm_80 and newer: products of fragments with shared-memory tiles. Each
//! is one block of PTX, inside which fragments of B are loaded and used. Written out in the kernel language, the same
//! products are forty lines of C++ each, and the backward kernels took NVRTC ten times as long.
//!
//! An accumulator block is 16 columns: for each group of 16 rows (*fragment*) the eight values that a lane holds of
//! `[16, 16]`, four of the left half, then four of the right, each `[row g: 2t, 2t + 1; row g + 8: the same]` with
//! `g = lane / 4`, `t = lane % 4`.

use crate::matrix::ptx::{ptx_type, value};
use cubecl::prelude::*;
use flash_dma_problem::ElementType;

/// Columns of a block of accumulators, and rows of a fragment.
const BLOCK: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub element: ElementType,
    /// Groups of 16 rows of A.
    pub fragments: usize,
    /// Blocks of 16 columns of the accumulators.
    pub blocks: usize,
    /// Elements per row of the tile.
    pub columns: usize,
    /// Not transposed, the tile's rows are B's columns, 16 per block; transposed, sixteen of them are B's rows.
    pub transposed: bool,
    /// The first column of the tile: of the 16 of A and B that are summed over; transposed, of the accumulators.
    pub column: usize,
    /// True if non-finite elements of the tile count as zero.
    pub cleaned: bool,
}

impl Shape {
    /// The same product, starting at another column.
    pub(crate) fn at(&self, column: usize) -> Self {
        Self { column, ..*self }
    }

    /// Values that a lane holds of an accumulator.
    pub(crate) fn values(&self) -> usize {
        8 * self.fragments * self.blocks
    }

    /// The index of the accumulator, among adjacent ones, that holds the columns `8 n ..` of fragment `m`, and the
    /// index of the first of the lane's four values there.
    pub(crate) fn place(&self, m: usize, n: usize) -> (usize, usize) {
        let (block, half) = (n / 2, n % 2);
        let within = block % self.blocks * self.fragments + m;
        (block / self.blocks, within * 8 + half * 4)
    }
}

/// A lane's part of the address of a fragment of a tile whose segments are placed by
/// [`swizzle`](crate::matrix::fragment::swizzle), in bytes.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct LanePlace {
    row: u32,
    twist: u32,
}

#[cube]
impl LanePlace {
    /// For A operands, and transposed B operands.
    pub(crate) fn rows(#[comptime] segments: usize) -> LanePlace {
        let lane = UNIT_POS_X;
        place(lane % 16, lane / 16, segments)
    }

    /// For B operands that are not transposed.
    pub(crate) fn columns(#[comptime] segments: usize) -> LanePlace {
        let lane = UNIT_POS_X;
        place(lane / 16 * 8 + lane % 8, lane / 8 % 2, segments)
    }
}

#[cube]
pub(crate) fn place(row: u32, segment: u32, #[comptime] segments: usize) -> LanePlace {
    let mut twist = row % 8;
    if comptime!(!segments.is_multiple_of(8)) {
        twist = row / 2 % 4;
    }
    LanePlace {
        row: row * comptime!(segments as u32 * 16),
        twist: (segment ^ twist) * 16,
    }
}

/// The A fragments of the rows from address `tile` on, at [`LanePlace::rows`]; a multiple of eight rows lies before
/// them.
#[cube]
pub(crate) fn load_a<N: Size>(
    tile: u32,
    place: &LanePlace,
    #[comptime] shape: Shape,
) -> Vector<u32, N> {
    let body = comptime!(load_asm(shape));
    let out: Vector<u32, N>;
    gpu_asm!(
        "{body} // {} {} {}",
        out(_) out,
        in(_) value::<u32>(tile + place.row),
        in(_) value::<u32>(place.twist),
        body = const body,
        options(explicit_mem, reads_address_space shared)
    );
    out
}

/// Operands: `out`, the lane's row, its twist. The address of a fragment is made where it is used: kept for all
/// columns, as the compiler would do, the addresses took too many registers.
fn load_asm(shape: Shape) -> String {
    let row = 4 * shape.fragments;
    let mut s = format!(
        "{{ .reg .b32 t; xor.b32 t, %{}, {}; add.u32 t, t, %{row};\n",
        row + 1,
        2 * shape.column
    );
    for fragment in 0..shape.fragments {
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| 4 * fragment + i);
        let offset = fragment * 2 * BLOCK * shape.columns;
        s += &format!(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%{a}, %{b}, %{c}, %{d}}}, [t+{offset}];\n"
        );
    }
    s + "}"
}

/// `acc + A B` for every fragment of `a` (four registers each) and every block of `acc` (`[blocks, fragments, 8]`). B's
/// rows begin at address `tile`, a multiple of eight rows before them; `place` is [`LanePlace::columns`], or transposed
/// [`LanePlace::rows`].
#[cube]
pub(crate) fn multiply<N: Size, NA: Size>(
    acc: Vector<f32, N>,
    a: Vector<u32, NA>,
    tile: u32,
    place: &LanePlace,
    #[comptime] shape: Shape,
) -> Vector<f32, N> {
    let body = comptime!(multiply_asm(shape));
    let out: Vector<f32, N>;
    gpu_asm!(
        "{body} // {} {} {} {} {}",
        out(_) out,
        in(_) value::<Vector<f32, N>>(acc),
        in(_) value::<Vector<u32, NA>>(a),
        in(_) value::<u32>(tile + place.row),
        in(_) value::<u32>(place.twist),
        body = const body,
        options(explicit_mem, reads_address_space shared)
    );
    out
}

/// Operands: `out`, `acc`, `a`, the lane's row, its twist.
fn multiply_asm(shape: Shape) -> String {
    let Shape {
        element,
        fragments,
        blocks,
        columns,
        transposed,
        column,
        cleaned,
    } = shape;
    let ty = ptx_type(element);
    let exponent: u32 = match element {
        ElementType::F16 => 0x7c00,
        _ => 0x7f80,
    };
    let values = shape.values();
    let row = 2 * values + 4 * fragments;
    let trans = if transposed { ".trans" } else { "" };
    let mut s = String::from("{ .reg .b32 t, b0, b1, b2, b3; .reg .pred p;\n");
    for block in 0..blocks {
        // The next block, in bytes: of columns, or of rows if transposed.
        let (columns, rows) = if transposed {
            (2 * column + 32 * block, 0)
        } else {
            (2 * column, 2 * BLOCK * columns * block)
        };
        s += &format!(
            "xor.b32 t, %{}, {columns}; add.u32 t, t, %{row};\n\
             ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{b0, b1, b2, b3}}, [t+{rows}];\n",
            row + 1
        );
        let cleaned_registers = if cleaned { 4 } else { 0 };
        for register in 0..cleaned_registers {
            for (bits, rest) in [(exponent, 0xffff_0000u32), (exponent << 16, 0x0000_ffff)] {
                s += &format!(
                    "and.b32 t, b{register}, {bits}; setp.eq.u32 p, t, {bits}; \
                     @p and.b32 b{register}, b{register}, {rest};\n"
                );
            }
        }
        for fragment in 0..fragments {
            let [a0, a1, a2, a3] = [0, 1, 2, 3].map(|i| 2 * values + 4 * fragment + i);
            for half in 0..2 {
                let to = (block * fragments + fragment) * 8 + half * 4;
                let registers = |from: usize| {
                    let list = [0, 1, 2, 3].map(|i| format!("%{}", from + i));
                    list.join(", ")
                };
                let (out, acc) = (registers(to), registers(values + to));
                s += &format!(
                    "mma.sync.aligned.m16n8k16.row.col.f32.{ty}.{ty}.f32 {{{out}}}, \
                     {{%{a0}, %{a1}, %{a2}, %{a3}}}, {{b{}, b{}}}, {{{acc}}};\n",
                    2 * half,
                    2 * half + 1
                );
            }
        }
    }
    s + "}"
}
