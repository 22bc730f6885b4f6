//! Products of matrices on `wgmma`, the addition of parts of their sums, and products of a few rows. CubeK's kernels are not ours to check.

use super::{Case, tensor};
use crate::ElementType;
use crate::codegen::cuda::Gpu;
use crate::product::{Choice, Operands, Route, Tile, product_by};
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;

/// Sizes whose addresses fit 32 bits.
const TOKENS: usize = 32768;
const WIDTH: usize = 1024;

/// The product of a linear layer.
#[derive(Clone, Copy)]
enum Pass {
    /// `X W`: the columns of A and the rows of B are contiguous.
    Forward,
    /// `dY Wᵀ`.
    Input,
    /// `Xᵀ dY`.
    Weight,
    /// Both transposed.
    Turned,
}

pub(super) fn all() -> Vec<Case> {
    use ElementType::{Bf16, F16, F32};
    let passes = [
        ("forward", Pass::Forward),
        ("input", Pass::Input),
        ("weight", Pass::Weight),
        ("turned", Pass::Turned),
    ];
    let mut cases = Vec::new();
    for (name, pass) in passes {
        for tile in Tile::ALL {
            let columns = tile.columns();
            let base = format!("product-{name}-{columns}");
            cases.push(case(base.clone(), pass, tile, Bf16, Bf16, 1));
            // Parts are f32.
            cases.push(case(format!("{base}-parts"), pass, tile, Bf16, Bf16, 4));
        }
    }
    for (name, element, out) in [("f16", F16, F16), ("f16-f32", F16, F32), ("f32", Bf16, F32)] {
        let tile = Tile::Columns256;
        cases.push(case(
            format!("product-{name}"),
            Pass::Forward,
            tile,
            element,
            out,
            1,
        ));
        let name = format!("product-{name}-parts");
        cases.push(case(name, Pass::Weight, tile, element, out, 4));
    }
    for (element, name) in [(Bf16, "bf16"), (F16, "f16"), (F32, "f32")] {
        for (turned, order) in [(false, "forward"), (true, "turned")] {
            let rows: &[usize] = match element {
                Bf16 => &[1, 2, 4, 8],
                _ => &[1],
            };
            for &m in rows {
                let name = format!("product-few-{name}-{order}-{m}");
                cases.push(few_rows(name, [m, WIDTH, WIDTH], turned, element, element));
            }
        }
    }
    // Terms behind the last tile, and columns that are read one by one.
    let name = String::from("product-few-bf16-odd");
    cases.push(few_rows(name, [3, 1023, 1001], false, Bf16, F32));
    cases
}

/// The product of a few rows, with the columns of B contiguous if it is `turned`.
fn few_rows(
    name: String,
    [m, n, k]: [usize; 3],
    turned: bool,
    element: ElementType,
    out: ElementType,
) -> Case {
    let run = move |client: &Client| {
        let a = tensor(client, [m, k], element.size());
        let mut b = tensor(client, [k, n], element.size());
        if turned {
            b.strides = [1, k].into();
        }
        let operands = Operands { a, b, element };
        let result = tensor(client, [m, n], out.size());
        let choice = Choice {
            route: Route::FewRows,
            parts: 1,
        };
        product_by(client, &operands, &result, out, choice).expect("the rows are contiguous");
    };
    Case {
        name,
        gpus: &[Gpu::H200],
        run: Box::new(run),
    }
}

fn case(
    name: String,
    pass: Pass,
    tile: Tile,
    element: ElementType,
    out: ElementType,
    parts: usize,
) -> Case {
    let run = move |client: &Client| {
        let matrix = |[rows, columns]: [usize; 2], turned: bool| -> TensorBinding {
            let mut matrix = tensor(client, [rows, columns], element.size());
            if turned {
                matrix.strides = [1, rows].into();
            }
            matrix
        };
        let tall = [TOKENS, WIDTH];
        let ([m, k], a_turned, b_turned) = match pass {
            Pass::Forward => (tall, false, false),
            Pass::Input => (tall, false, true),
            Pass::Weight => ([WIDTH, TOKENS], true, false),
            Pass::Turned => (tall, true, true),
        };
        let operands = Operands {
            a: matrix([m, k], a_turned),
            b: matrix([k, WIDTH], b_turned),
            element,
        };
        let result = tensor(client, [m, WIDTH], out.size());
        let choice = Choice {
            route: Route::Wgmma(tile),
            parts,
        };
        product_by(client, &operands, &result, out, choice).expect("an H200 has wgmma");
    };
    Case {
        name,
        gpus: &[Gpu::H200],
        run: Box::new(run),
    }
}
