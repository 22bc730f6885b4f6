//! The worked example of the book: sixteen scores and their intervals.

// ANCHOR: intervals
use burn::tensor::{Device, Tensor};
use burn_flash_dma::select;

pub fn main() {
    let scores = [
        0.5,
        0.2,
        0.9,
        0.3,
        0.6,
        0.1,
        0.4,
        0.7,
        0.6,
        0.2,
        f32::NEG_INFINITY,
        0.5,
        0.3,
        0.8,
        0.4,
        0.65,
    ];
    // [batch, kv_heads, keys]
    let scores = Tensor::<3>::from_data([[scores]], &Device::flex());
    // [batch, kv_heads, keys, 2]: the first position that attends to the key, and one past the last.
    let intervals = select(scores, 4).into_tensor().into_data().convert::<i64>();
    let expected = [
        [0, 8],
        [1, 4],
        [2, 16],
        [3, 6],
        [4, 15],
        [5, 5],
        [6, 7],
        [7, 16],
        [8, 13],
        [9, 9],
        [10, 10],
        [11, 11],
        [12, 12],
        [13, 16],
        [14, 14],
        [15, 16],
    ];
    assert_eq!(intervals.try_to_vec::<i64>().unwrap(), expected.concat());
    for (key, [first, end]) in expected.into_iter().enumerate() {
        println!("key {key:2} is attended at the positions {first}..{end}");
    }
}
// ANCHOR_END: intervals
