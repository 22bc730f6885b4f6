//! The worked example of the book: sixteen scores and their intervals.

// ANCHOR: intervals
use burn::tensor::{Device, Tensor};
use burn_flash_dma::select;

pub fn main() {
    let none = f32::NEG_INFINITY;
    let scores = [
        0.5, 0.2, 0.9, 0.3, 0.6, 0.1, 0.4, 0.7, 0.6, 0.2, none, 0.5, 0.3, 0.8, 0.4, 0.65,
    ];
    // [batch, kv_heads, keys]
    let scores = Tensor::<3>::from_data([[scores]], &Device::flex());
    // [batch, kv_heads, keys, 2]: the first position that attends to the key, its own, and one past the last.
    let intervals = select(scores, 4).into_tensor().into_data().convert::<i64>();
    let ends = [8, 4, 16, 6, 15, 5, 7, 16, 13, 9, 10, 11, 12, 16, 14, 16];
    let expected: Vec<[i64; 2]> = (0..).zip(ends).map(|(key, end)| [key, end]).collect();
    assert_eq!(intervals.try_to_vec::<i64>().unwrap(), expected.concat());
    for [key, end] in expected {
        println!("key {key:2} is attended at the positions {key}..{end}");
    }
}
// ANCHOR_END: intervals
