//! Calls that together launch every variant. A case only adds what no earlier one has launched.

use crate::lists::{QueryTiles, live_keys, tile_key_lists};
use crate::{AttentionOptions, ElementType, Problem, Selection, select};
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;

/// A call of the library.
pub(super) struct Case {
    /// Names the variants it adds.
    pub name: String,
    /// Makes the call.
    pub run: Box<dyn Fn(&Client)>,
}

/// Keys enough for three levels of the selection's tree, and heads enough to fill cubes.
const HEADS: usize = 8;
const K_LEN: usize = 128 << 10;
/// Keys of problems whose buffers pass 32-bit indices.
const LONG_K_LEN: usize = 512 << 20;

pub(super) fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    for (suffix, k_len) in [("", K_LEN), ("-64bit", LONG_K_LEN)] {
        cases.push(case(format!("select{suffix}"), move |client| {
            selected(client, k_len, 2048);
        }));
        cases.push(case(format!("select-all{suffix}"), move |client| {
            selected(client, k_len, k_len);
        }));
        cases.push(case(format!("lists{suffix}"), move |client| {
            let options = AttentionOptions::new().with_keep_window(2048);
            let shape = [1, HEADS, k_len, 64];
            let scores = Some(&shape[..3]);
            let problem = Problem::new(&shape, &shape, &shape, scores, ElementType::Bf16, &options)
                .expect("a valid problem");
            let live = live_keys(client, &problem, &selected(client, k_len, 2048));
            let tiles = QueryTiles::new(&problem, 64);
            let slice = tiles.slices(HEADS).next().expect("there are queries");
            tile_key_lists(client, &problem, &live, &tiles, slice);
        }));
    }
    cases
}

fn case(name: String, run: impl Fn(&Client) + 'static) -> Case {
    Case {
        name,
        run: Box::new(run),
    }
}

/// Scores and what the selection made of them.
fn selected(client: &Client, k_len: usize, window: usize) -> Selection {
    let scores = tensor(client, [1, HEADS, k_len], size_of::<f32>());
    let intervals = tensor(client, [1, HEADS, k_len, 2], size_of::<u32>());
    select(client, scores.clone(), window, intervals.clone()).expect("a valid selection");
    Selection { scores, intervals }
}

/// A contiguous tensor of undefined content.
fn tensor<const R: usize>(client: &Client, shape: [usize; R], elem_size: usize) -> TensorBinding {
    let mut strides = [1; R];
    for axis in (1..R).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    let handle = client.empty(shape.iter().product::<usize>() * elem_size);
    // SAFETY: the buffer holds the product of the shape, and the strides are those of that shape.
    unsafe { TensorBinding::from_raw_parts(handle, strides.into(), shape.into()) }
}
