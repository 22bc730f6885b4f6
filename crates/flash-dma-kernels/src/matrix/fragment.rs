//! Fragments of `mma.sync.m16n8k16` and the shared-memory tiles they are loaded from.
//!
//! With `g = lane / 4` and `t = lane % 4`, a lane holds of the accumulator `[16, 8]` row `g`, columns
//! `2t, 2t + 1` (register 0) and the same of row `g + 8` (register 1). A row lies in the four lanes of a
//! quad. Two accumulators of adjacent columns are, converted, the A fragment `[16, 16]`.

use crate::matrix::ptx::{ptx_type, shuffle_xor, value};
use crate::vectors::Segment;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use flash_dma_problem::ElementType;

/// Accumulators of 16 rows by 8 columns each.
pub(crate) type Accumulators<N> = Sequence<Array<Vector<f32, N>>>;

/// Offset of segment `col` of row `row` in a tile of `segments` segments per row. The XOR maps one column of eight
/// successive rows to eight different groups of four banks, for every row length in use.
#[cube]
pub(crate) fn swizzle(row: usize, col: usize, #[comptime] segments: usize) -> usize {
    if comptime!(segments.is_multiple_of(8)) {
        row * segments + (col ^ (row % 8))
    } else {
        // Rows of 64 or 192 bytes: the row's parity already selects the upper or lower banks.
        row * segments + (col ^ ((row / 2) % 4))
    }
}

#[cube]
pub(crate) fn zeros<N: Size>(#[comptime] count: usize) -> Accumulators<N> {
    let mut all = Accumulators::<N>::new();
    #[unroll]
    for _ in 0..count {
        let mut registers = Array::<Vector<f32, N>>::new(2usize);
        registers[0] = Vector::new(0.0f32);
        registers[1] = Vector::new(0.0f32);
        all.push(registers);
    }
    all
}

#[cube]
pub(crate) fn set<N: Size>(
    fragment: &mut Array<Vector<f32, N>>,
    #[comptime] register: usize,
    value: Vector<f32, N>,
) {
    fragment[register] = value;
}

/// This lane's elements of `count` adjacent accumulators, in the layout of `wgmma`: for accumulator `n`, the two
/// columns of the upper row at `4 n` and of the lower row at `4 n + 2`.
#[cube]
pub(crate) fn gathered<NC: Size, N: Size>(
    all: &Accumulators<NC>,
    #[comptime] count: usize,
) -> Vector<f32, N> {
    let mut values = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for n in 0..count {
        #[unroll]
        for register in 0..2usize {
            let pair = all[n][register];
            #[unroll]
            for e in 0..2usize {
                values.insert(comptime!(n * 4 + register * 2 + e), pair.extract(e));
            }
        }
    }
    values
}

/// Sets `count` accumulators to `values`, in the layout of [`gathered`].
#[cube]
pub(crate) fn set_all<NC: Size, N: Size>(
    all: &mut Accumulators<NC>,
    values: &Vector<f32, N>,
    #[comptime] count: usize,
) {
    #[unroll]
    for n in 0..count {
        #[unroll]
        for register in 0..2usize {
            let mut pair = Vector::<f32, NC>::new(0.0f32);
            #[unroll]
            for e in 0..2usize {
                pair.insert(e, values.extract(comptime!(n * 4 + register * 2 + e)));
            }
            set(&mut all[n], register, pair);
        }
    }
}

/// Multiplies each of the two rows of every accumulator by its factor.
#[cube]
pub(crate) fn scale_rows<N: Size>(
    all: &mut Accumulators<N>,
    upper: f32,
    lower: f32,
    #[comptime] count: usize,
) {
    #[unroll]
    for n in 0..count {
        let first = all[n][0] * Vector::new(upper);
        let second = all[n][1] * Vector::new(lower);
        set(&mut all[n], 0usize, first);
        set(&mut all[n], 1usize, second);
    }
}

/// `out[n / 8] += a * B[.., n]` and the next eight columns, where `B` is `[16, 16]` at the sixteen rows to which the
/// lanes' `segment`s point.
///
/// Not transposed, the tile's rows are B's columns (keys of `Q K^T`): lane `l` points at row `(l / 16) * 8 + l % 8`,
/// segment `(l / 8) % 2`. Transposed, they are B's rows (keys of `P V`): at row `l % 16`, segment `l / 16`.
#[cube]
pub(crate) fn multiply_pair<E: Float, NA: Size, NB: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    a: &Array<Vector<E, NA>>,
    segment: &[Segment<E>],
    out: &mut Accumulators<NC>,
    #[comptime] n: usize,
    #[comptime] transposed: bool,
) {
    let r = def.load_matrix::<_, NB>(segment, MatrixIdent::B, 4usize, transposed);
    let mut first = Array::<Vector<E, NB>>::new(2usize);
    let mut second = Array::<Vector<E, NB>>::new(2usize);
    first[0] = r[0];
    first[1] = r[1];
    second[0] = r[2];
    second[1] = r[3];
    def.execute_inplace(a, &first, &mut out[comptime!(n / 8)]);
    def.execute_inplace(a, &second, &mut out[comptime!(n / 8 + 1)]);
}

/// The greatest value among the four lanes of a quad, NaN ignored.
#[cube]
pub(crate) fn quad_max(x: f32) -> f32 {
    let pair = max(x, shuffle_xor(x, 1u32));
    max(pair, shuffle_xor(pair, 2u32))
}

/// The sum over the four lanes of a quad.
#[cube]
pub(crate) fn quad_sum(x: f32) -> f32 {
    let pair = x + shuffle_xor(x, 1u32);
    pair + shuffle_xor(pair, 2u32)
}

/// Two values of an accumulator, rounded, as one register of an A operand: of 16 columns it holds
/// `[4j, 4j + 1], [4j + 2, 4j + 3], [4j + 4, 4j + 5], [4j + 6, 4j + 7]` of the accumulator.
#[cube]
pub(crate) fn pack(first: f32, second: f32, #[comptime] element: ElementType) -> u32 {
    let body = comptime!(format!("cvt.rn.{}x2.f32 ", ptx_type(element)));
    let out: u32;
    gpu_asm!(
        "{body} {}, {}, {};",
        out(_) out,
        in(_) value::<f32>(second),
        in(_) value::<f32>(first),
        body = const body,
        options(pure, nomem)
    );
    out
}
