//! Products on `wgmma`, the addition of their parts, and products of a few rows. CubeK's kernels are not checked here.

use super::{Case, with};
use crate::ElementType;
use crate::codegen::cuda::Gpu;
use crate::codegen::tensors::{operands, tensor};
use crate::product::{Choice, Route, Tile, product_by};
use cubecl::client::Client;

/// Sizes whose addresses fit 32 bits.
const TOKENS: usize = 32768;
const WIDTH: usize = 1024;

pub(super) fn all() -> Vec<Case> {
    use ElementType::{Bf16, F16, F32};
    let tall = [TOKENS, WIDTH, WIDTH];
    // Of a linear layer: `X W`, where the columns of A and the rows of B are contiguous, `dY Wᵀ` and `Xᵀ dY`.
    let forward = (tall, [false, false]);
    let weight = ([WIDTH, WIDTH, TOKENS], [true, false]);
    let passes = [
        ("forward", forward),
        ("input", (tall, [false, true])),
        ("weight", weight),
        ("turned", (tall, [true, true])),
    ];
    let wgmma = |tile, parts| Choice {
        route: Route::Wgmma(tile),
        parts,
    };
    let mut cases = Vec::new();
    for (name, pass) in passes {
        for tile in Tile::ALL {
            let base = format!("product-{name}-{}", tile.columns());
            cases.push(case(base.clone(), pass, wgmma(tile, 1), [Bf16; 2]));
            // Parts are f32.
            let name = format!("{base}-parts");
            cases.push(case(name, pass, wgmma(tile, 4), [Bf16; 2]));
        }
    }
    for (name, elements) in [
        ("f16", [F16; 2]),
        ("f16-f32", [F16, F32]),
        ("f32", [Bf16, F32]),
    ] {
        let tile = Tile::Columns256;
        let base = format!("product-{name}");
        cases.push(case(base.clone(), forward, wgmma(tile, 1), elements));
        let name = format!("{base}-parts");
        cases.push(case(name, weight, wgmma(tile, 4), elements));
    }
    let few_rows = Choice {
        route: Route::FewRows,
        parts: 1,
    };
    for element in [Bf16, F16, F32] {
        for (turned, order) in [(false, "forward"), (true, "turned")] {
            let rows: &[usize] = match element {
                Bf16 => &[1, 2, 4, 8],
                _ => &[1],
            };
            for &m in rows {
                let name = format!("product-few-{element}-{order}-{m}");
                let layout = ([m, WIDTH, WIDTH], [false, turned]);
                cases.push(case(name, layout, few_rows, [element; 2]));
            }
        }
    }
    // Terms after the last tile, and columns that are read one by one.
    let (name, layout) = (
        "product-few-bf16-odd".into(),
        ([3, 1023, 1001], [false, false]),
    );
    cases.push(case(name, layout, few_rows, [Bf16, F32]));
    cases
}

/// A product of these sizes; the columns of the factors in `turned` are contiguous.
fn case(
    name: String,
    (sizes, turned): ([usize; 3], [bool; 2]),
    choice: Choice,
    [element, out]: [ElementType; 2],
) -> Case {
    let run = move |client: &Client| {
        let operands = operands(client, sizes, turned, element);
        let [m, n, _] = sizes;
        let result = tensor(client, [m, n], out.size());
        product_by(client, &operands, &result, out, choice).expect("an H200 serves it");
    };
    with(super::case(name, run), |case| case.gpus = &[Gpu::H200])
}
