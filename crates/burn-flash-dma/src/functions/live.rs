//! The keys that are alive at the end of some positions, as rows of a fixed number.

use crate::fallback::running::{arange, running_sum};
use burn::tensor::{DType, FloatDType, Int, Tensor};

/// The keys, of a number per head, that later positions can attend to or have as runners-up, as rows in the order of the
/// keys. There are as many rows for every head; where a head has fewer keys, the first rows are empty.
#[derive(Clone, Debug)]
pub(crate) struct LiveKeys {
    /// Key of each row, `[batch, kv_heads, rows]` i32; any of an empty row.
    key: Tensor<3, Int>,
    /// Empty rows first: how many there are, `[batch, kv_heads, 1]` i32.
    empty: Tensor<3, Int>,
    /// Row of each key, `[batch, kv_heads, keys]` i32; −1 of one that is not alive.
    row: Tensor<3, Int>,
}

impl LiveKeys {
    /// Of keys that are attended or runners-up up to `ends`, `[batch, kv_heads, keys]`, at most `rows` of which are alive at
    /// the last position, the last `recent` keys included, hidden or not. With `from`, `[batch, 1, 1]`, only keys from there on
    /// are: those of a document that goes on.
    pub(crate) fn new(
        ends: Tensor<3, Int>,
        recent: usize,
        rows: usize,
        from: Option<Tensor<3, Int>>,
    ) -> Self {
        let shape @ [batch, heads, keys] = ends.dims();
        let device = ends.device();
        let options = (&device, DType::I32);
        let recent_from = keys.saturating_sub(recent) as i64;
        let places = arange(0..keys as i64, options).reshape([1, 1, keys]);
        let is_recent = places.clone().greater_equal_elem(recent_from);
        let alive = ends.greater_equal_elem(keys as i64);
        let alive = alive.bool_or(is_recent.expand(shape));
        let alive = match from {
            None => alive,
            Some(from) => {
                let goes_on = places.expand(shape).greater_equal(from.expand(shape));
                alive.bool_and(goes_on)
            }
        };
        let ones = alive.clone().int().cast(DType::I32);
        let counts = running_sum(ones.reshape([batch * heads, keys])).reshape(shape);
        let all = counts.clone().narrow(2, keys - 1, 1);
        let empty = all * -1 + rows as i32;
        let row = counts.clone() + empty.clone() - 1;
        let nth = arange(1..rows as i64 + 1, options).reshape([1, 1, rows]);
        let nth = nth.expand([batch, heads, rows]) - empty.clone().expand([batch, heads, rows]);
        Self {
            key: first_reaching(&counts, nth),
            empty,
            row: row.mask_fill(alive.bool_not(), -1),
        }
    }

    /// The rows of `keys`, `[batch, kv_heads, keys, width]`.
    pub(crate) fn rows_of(&self, keys: Tensor<4>) -> Tensor<4> {
        let [batch, heads, rows] = self.key.dims();
        let [_, _, _, width] = keys.dims();
        let index = self.key.clone().unsqueeze_dim::<4>(3);
        keys.gather(2, index.expand([batch, heads, rows, width]))
    }

    /// A number per key as a number per row, `empty` of empty rows.
    pub(crate) fn numbers_of(&self, keys: Tensor<3>, empty: f32) -> Tensor<3> {
        let shape @ [_, _, rows] = self.key.dims();
        let options = (&keys.device(), DType::I32);
        let places = arange(0..rows as i64, options).reshape([1, 1, rows]);
        let is_empty = places.expand(shape).lower(self.empty.clone().expand(shape));
        keys.gather(2, self.key.clone()).mask_fill(is_empty, empty)
    }

    /// Gradients of rows, `[batch, kv_heads, rows, width]`, by key: `[batch, kv_heads, keys, width]`, 0 of keys that
    /// have no row.
    pub(crate) fn asked_of_keys(&self, rows: Tensor<4>) -> Tensor<4> {
        let [batch, heads, keys] = self.row.dims();
        let [_, _, _, width] = rows.dims();
        let shape = [batch, heads, keys, width];
        let row = self.row.clone().unsqueeze_dim::<4>(3);
        let none = row.clone().lower_elem(0).expand(shape);
        rows.gather(2, row.clamp_min(0).expand(shape))
            .mask_fill(none, 0)
    }
}

/// Children of a node of [`first_reaching`].
const CHILDREN: usize = 64;

/// First key at which a running count reaches each of the numbers `nth`; some key if none does. A search down a tree whose
/// nodes each read all of their children at once: a binary search would be many more launches, and a sort or a scatter the
/// work of few units of a GPU.
fn first_reaching(counts: &Tensor<3, Int>, nth: Tensor<3, Int>) -> Tensor<3, Int> {
    let keys = counts.dims()[2];
    let shape @ [batch, heads, rows] = nth.dims();
    let options = (&nth.device(), DType::I32);
    let child = arange(1..CHILDREN as i64 + 1, options).reshape([1, 1, 1, CHILDREN]);
    let nth = nth.unsqueeze_dim::<4>(3);
    // Nodes in front of the one that holds the key, on the way down.
    let mut before = nth.zeros_like();
    let levels = keys.max(2).ilog2() / CHILDREN.ilog2() + 1;
    for level in (0..levels).rev() {
        let node = CHILDREN.pow(level) as i32;
        before = before * CHILDREN as i32;
        // A last node that is not full ends with the last key.
        let last = (before.clone() + child.clone()) * node - 1;
        let last = last.clamp_max(keys as i64 - 1);
        let last = last.reshape([batch, heads, rows * CHILDREN]);
        let count = counts.clone().gather(2, last);
        let is_before = count
            .reshape([batch, heads, rows, CHILDREN])
            .lower(nth.clone());
        before = before + is_before.int().cast(DType::I32).sum_dim(3);
    }
    before.reshape(shape).clamp_max(keys as i64 - 1)
}

/// Positions, of those from `first` on, at which its rank keeps each key or it is a runner-up: `[batch, kv_heads, keys]`, f32.
/// `ends` as those of [`LiveKeys::new`]; a key is kept by its rank once `recent` later ones have come.
pub(crate) fn ranked_positions(ends: Tensor<3, Int>, recent: usize, first: usize) -> Tensor<3> {
    let shape @ [_, _, keys] = ends.dims();
    let options = (&ends.device(), DType::I32);
    let from = arange(0..keys as i64, options) + recent.min(keys) as i32;
    let from = from
        .clamp_min(first as i64)
        .reshape([1, 1, keys])
        .expand(shape);
    (ends - from).clamp_min(0).cast(FloatDType::F32)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData};

    /// Heads of which every key, some keys, and none are alive, in more and in fewer rows than keys.
    #[test]
    fn rows_are_the_live_keys_in_order() {
        let device = Device::flex();
        for keys in [1, 7, 8, 300] {
            let alive = |head: usize, key: usize| match head {
                0 => true,
                1 => (key * key + key / 3) % 5 < 2,
                _ => false,
            };
            let recent = 3.min(keys);
            let ends =
                |head: usize| (0..keys).map(move |key| if alive(head, key) { keys } else { key });
            let ends: Vec<i32> = (0..3).flat_map(ends).map(|end| end as i32).collect();
            let ends = Tensor::from_data(TensorData::new(ends, [1, 3, keys]), &device);
            let rows = keys + 2;
            let live = LiveKeys::new(ends, recent, rows, None);
            let numbers = Tensor::<1, Int>::arange(0..keys as i64, &device).float();
            let numbers = numbers.reshape([1, 1, keys]).expand([1, 3, keys]);
            let gathered = live.numbers_of(numbers.clone(), -1.0);
            let same = live.rows_of(numbers.unsqueeze_dim(3)).reshape([1, 3, rows]);
            let asked = live.asked_of_keys(gathered.clone().unsqueeze_dim(3));
            let [gathered, same] =
                [gathered, same].map(|t| t.into_data().try_to_vec::<f32>().unwrap());
            let asked = asked.into_data().try_to_vec::<f32>().unwrap();
            for head in 0..3 {
                let is_live = |&key: &usize| alive(head, key) || key + recent >= keys;
                let kept: Vec<f32> = (0..keys).filter(is_live).map(|key| key as f32).collect();
                let (empty, full) = gathered[head * rows..][..rows].split_at(rows - kept.len());
                assert_eq!(full, kept);
                assert!(empty.iter().all(|&row| row == -1.0));
                assert_eq!(same[head * rows..][..rows][empty.len()..], kept);
                for (key, &asked) in asked[head * keys..][..keys].iter().enumerate() {
                    let expected = if is_live(&key) { key as f32 } else { 0.0 };
                    assert_eq!(asked, expected);
                }
            }
        }
    }

    #[test]
    fn positions_are_those_at_which_ranks_decide() {
        let ends = Tensor::<3, Int>::from_ints([[[5, 4, 2, 9, 9, 9, 6, 9, 9]]], &Device::flex());
        let positions = ranked_positions(ends, 2, 3).into_data();
        // Key j is kept by its rank from j + 2 on, and positions count from 3.
        let expected = [2.0, 1.0, 0.0, 4.0, 3.0, 2.0, 0.0, 0.0, 0.0];
        assert_eq!(positions.try_to_vec::<f32>().unwrap(), expected);
    }
}
