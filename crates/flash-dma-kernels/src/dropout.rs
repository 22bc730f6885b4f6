//! The attention dropout mask on the device, word by word as [`flash_dma_problem::dropout`] defines it.

use cubecl::prelude::*;
use flash_dma_problem::dropout::MIX;
use flash_dma_problem::{Dropout, Problem};

/// The parameters of a mask, see [`PairMask`](flash_dma_problem::dropout::PairMask).
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct DropoutSeed {
    /// Lower half of the seed.
    pub low: u32,
    /// Upper half of the seed.
    pub high: u32,
    /// The part of the column words that depends on the seed.
    pub columns: u32,
    /// Pairs of smaller words are dropped.
    pub threshold: u32,
    /// The factor of the other pairs.
    pub factor: f32,
}

/// Given exactly if the problem has dropout.
pub(crate) type DropoutArg = ComptimeOption<DropoutSeed>;

/// The launch argument of a problem's dropout. The seed is a scalar, so calls with other seeds share a kernel.
pub(crate) fn dropout(problem: &Problem) -> Option<DropoutSeedLaunch> {
    let mask = problem.dropout.map(Dropout::mask)?;
    let [low, high] = mask.words;
    Some(DropoutSeedLaunch::new(
        low,
        high,
        mask.columns,
        mask.threshold,
        mask.factor,
    ))
}

/// The word of the rows of a query head, counted over all sequences.
#[cube]
pub(crate) fn head_word(head: usize, seed: &DropoutSeed) -> u32 {
    mix(mix(head as u32 ^ seed.low) + seed.high)
}

#[cube]
pub(crate) fn row_word(head: u32, query: usize, q_len: usize, k_len: usize) -> u32 {
    // Wraps for queries before the first key.
    let position = query as u32 + k_len as u32 - q_len as u32;
    mix(mix(position) ^ head) | 1u32
}

#[cube]
pub(crate) fn column_word(key: usize, seed: &DropoutSeed) -> u32 {
    mix(key as u32 ^ seed.columns) | 1u32
}

#[cube]
pub(crate) fn pair_word(row: u32, column: u32) -> u32 {
    row * column
}

#[cube]
impl DropoutSeed {
    /// A copy for a struct to own.
    pub(crate) fn copied(&self) -> DropoutSeed {
        DropoutSeed {
            low: self.low,
            high: self.high,
            columns: self.columns,
            threshold: self.threshold,
            factor: self.factor,
        }
    }

    pub(crate) fn drops(&self, row: u32, column: u32) -> bool {
        pair_word(row, column) < self.threshold
    }

    /// The factor of a pair's probability.
    pub(crate) fn weight(&self, row: u32, column: u32) -> f32 {
        select(self.drops(row, column), 0.0f32, self.factor)
    }
}

/// A copy of the argument for a struct to own.
#[cube]
pub(crate) fn copied(dropout: &DropoutArg) -> DropoutArg {
    dropout.as_ref().map(|seed| seed.copied())
}

#[cube]
fn mix(word: u32) -> u32 {
    let x = (word ^ (word >> 16u32)) * u32::new(comptime!(MIX[0] as i64));
    let x = (x ^ (x >> 15u32)) * u32::new(comptime!(MIX[1] as i64));
    x ^ (x >> 16u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{client, problem, read_u32, zeros};
    use flash_dma_problem::{AttentionOptions, ElementType, dropout as host};

    /// Unit `n` writes the word of query `n / k_len` and key `n % k_len` of head `CUBE_POS_Y`.
    #[cube(launch_unchecked)]
    fn words_kernel(words: &mut Tensor<u32>, seed: &DropoutArg) {
        let (q_len, k_len) = (words.shape(1), words.shape(2));
        let n = ABSOLUTE_POS_X as usize;
        let head = CUBE_POS_Y as usize;
        if n < q_len * k_len {
            #[comptime]
            match seed {
                ComptimeOption::Some(seed) => {
                    let row = row_word(head_word(head, seed), n / k_len, q_len, k_len);
                    words[head * q_len * k_len + n] = pair_word(row, column_word(n % k_len, seed));
                }
                ComptimeOption::None => {}
            }
        }
    }

    #[test]
    fn words_are_those_of_the_host() {
        let client = client();
        for (q_len, k_len, seed) in [(40, 9, 3), (7, 90, u64::MAX - 5), (1, 1, 0)] {
            let (q, kv) = ([1, 5, q_len, 8], [5, k_len]);
            let given = Dropout::new(0.5, seed).unwrap();
            let options = AttentionOptions::new().with_dropout(given);
            let p = problem(q, kv, false, ElementType::F32, &options);
            let words = zeros(&client, &[5, q_len, k_len]);
            let cubes = (q_len * k_len).div_ceil(4) as u32;
            // SAFETY: units past the pairs write nothing.
            unsafe {
                words_kernel::launch_unchecked(
                    &client,
                    CubeCount::Static(cubes, 5, 1),
                    CubeDim::new_1d(4),
                    words.clone().into_tensor_arg(),
                    dropout(&p).into(),
                );
            }
            let mask = given.mask();
            let mut expected = Vec::new();
            for head in 0..5 {
                for query in 0..q_len {
                    let row = host::row_word(mask.head_word(head), p.dropout_position(query));
                    let columns = (0..k_len as u32).map(|key| host::column_word(mask.columns, key));
                    expected.extend(columns.map(|column| host::pair_word(row, column)));
                }
            }
            assert_eq!(read_u32(&client, words), expected);
        }
    }
}
