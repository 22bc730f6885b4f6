//! Products on a recorded H200: what the host side of each route accepts.

use crate::ElementType::{Bf16, F32};
use crate::codegen::cuda::Gpu;
use crate::codegen::recorder;
use crate::codegen::tensors::{operands, tensor};
use crate::product::{Choice, Operands, Route, Tile, product_by};
use cubecl::client::Client;

fn served(client: &Client, operands: &Operands, route: Route, parts: usize) -> bool {
    let [m, n] = [operands.a.shape[0], operands.b.shape[1]];
    let out = tensor(client, [m, n], 4);
    product_by(client, operands, &out, F32, Choice { route, parts }).is_ok()
}

const LAYOUTS: [[bool; 2]; 4] = [[false, false], [false, true], [true, false], [true, true]];

/// Every route accepts a product or refuses it; none panics. Burn's own choice serves everything.
#[test]
fn any_product_is_served_or_refused() {
    let client = recorder::client(Gpu::H200);
    let sizes = [
        [1024, 512, 2048],
        [2752, 256, 1000],
        [17, 3, 33],
        [1, 1024, 257],
        [1000, 1, 17],
        [1, 1, 1],
    ];
    recorder::record(&client, |client| {
        for size in sizes {
            for turned in LAYOUTS {
                for (element, parts) in [(Bf16, 1), (Bf16, 3), (F32, 1)] {
                    let operands = operands(client, size, turned, element);
                    for route in Tile::ALL.map(Route::Wgmma) {
                        served(client, &operands, route, parts);
                    }
                    served(client, &operands, Route::FewRows, parts);
                    let what = format!("{size:?} {turned:?} {element}");
                    assert!(served(client, &operands, Route::Standard, parts), "{what}");
                }
            }
        }
    });
}

/// The shapes of a model are served by every tile of `wgmma`.
#[test]
fn large_products_are_served_by_tensor_cores() {
    let client = recorder::client(Gpu::H200);
    recorder::record(&client, |client| {
        for turned in LAYOUTS {
            let operands = operands(client, [4096, 1024, 2752], turned, Bf16);
            for tile in Tile::ALL {
                assert!(served(client, &operands, Route::Wgmma(tile), 1));
            }
        }
    });
}

/// A product is computed once, whatever else would serve it.
#[test]
fn the_standard_routine_is_one_launch() {
    let client = recorder::client(Gpu::H200);
    let products = [
        ([64, 64, 64], Bf16),
        ([1, 1024, 256], Bf16),
        ([33, 7, 65], F32),
    ];
    for (size, element) in products {
        let launched = recorder::record(&client, |client| {
            let operands = operands(client, size, [false; 2], element);
            assert!(served(client, &operands, Route::Standard, 1));
        });
        assert_eq!(launched.len(), 1, "{size:?} {element:?}");
    }
}
