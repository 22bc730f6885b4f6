//! The lists of the tensor-core forward and dq kernels, held to sets of keys.

use crate::pattern::layout::{KEY_BLOCK, TILE_LIST_HEADER, TILE_LIST_WORDS};
use crate::pattern::mask::args::MaskBits;
use crate::pattern::mask::plan::plan;
use crate::pattern::mask::tile_lists::tile_lists;
use crate::testing::{client, contiguous, read_u32, zeros};
use flash_dma_problem::{ElementType, PlanGeometry};
use flash_dma_reference::Rng;

/// A mask, and the way it is drawn.
struct Case {
    mask: [usize; 4],
    lengths: [usize; 2],
    causal: bool,
    queries: usize,
    gather: bool,
    /// True if row `row` of the mask shows key `key` to query `query`.
    shows: fn(&mut Rng, usize, usize) -> bool,
    /// Index of a non-finite value.
    not_finite: Option<usize>,
}

/// The expected result for a tile: the keys of every query, and the resulting list.
struct Expected {
    entries: Vec<u32>,
    gathered: bool,
    /// Columns that all queries see, and all columns.
    columns: [usize; 2],
}

impl Case {
    fn stride(&self, axis: usize) -> usize {
        let own: usize = self.mask[axis + 1..].iter().product();
        if self.mask[axis] == 1 { 0 } else { own }
    }

    /// True if the mask, causal masking included, shows a key.
    fn sees(&self, visible: &[u32], row: usize, query: usize, key: usize) -> bool {
        let [q_len, k_len] = self.lengths;
        let at = row * self.mask[2] * self.mask[3] + query * self.stride(2) + key * self.stride(3);
        visible[at] != 0 && (!self.causal || key + q_len <= query + k_len)
    }

    fn expected(&self, visible: &[u32], row: usize, tile: usize) -> Expected {
        let [q_len, k_len] = self.lengths;
        let queries = tile * self.queries..((tile + 1) * self.queries).min(q_len);
        let count = |key: usize| {
            let sees = |&query: &usize| self.sees(visible, row, query, key);
            queries.clone().filter(sees).count()
        };
        let (mut all, mut some) = (Vec::new(), Vec::new());
        for key in 0..k_len {
            match count(key) {
                0 => {}
                n if n == queries.len() => all.push(key as u32),
                _ => some.push(key as u32),
            }
        }
        let keys = all.len() + some.len();
        let is_full = |block: &u32| {
            let of = |key: &&u32| *key / KEY_BLOCK as u32 == *block;
            all.iter().filter(of).count() == KEY_BLOCK
        };
        let mut blocks: Vec<u32> = (all.iter().chain(&some))
            .map(|key| key / KEY_BLOCK as u32)
            .collect();
        blocks.sort_unstable();
        blocks.dedup();
        let room = (k_len / 2).next_multiple_of(KEY_BLOCK);
        if self.gather && keys * 4 <= blocks.len() * KEY_BLOCK * 3 && keys <= room {
            return Expected {
                columns: [all.len(), keys],
                entries: [all, some].concat(),
                gathered: true,
            };
        }
        let (full, boundary): (Vec<u32>, Vec<u32>) = blocks.into_iter().partition(is_full);
        let blocks = [full.len(), full.len() + boundary.len()];
        Expected {
            columns: blocks.map(|blocks| blocks * KEY_BLOCK),
            entries: [full, boundary].concat(),
            gathered: false,
        }
    }

    fn check(&self, name: &str) {
        let client = client();
        let [q_len, k_len] = self.lengths;
        let mut rng = Rng::new(7);
        let [batch, heads, mask_queries, mask_keys] = self.mask;
        let visible: Vec<u32> = (0..self.mask.iter().product())
            .map(|at| {
                let (query, key) = (at / mask_keys % mask_queries, at % mask_keys);
                u32::from((self.shows)(&mut rng, query, key))
            })
            .collect();
        let geometry = PlanGeometry::new(&self.mask, self.lengths, self.causal).unwrap();
        let bits = MaskBits {
            bits: zeros(&client, &geometry.bits_shape()),
            counts: zeros(&client, &geometry.counts_shape()),
        };
        let mask = contiguous(&client, &visible, &self.mask);
        plan(&client, &geometry, mask, 4, false, bits.clone()).unwrap();
        let shape = [1, 2, k_len, 16];
        let mut values = vec![1.0f32; shape.iter().product()];
        if let Some(at) = self.not_finite {
            values[at] = f32::NAN;
        }
        let (watched, f32) = (contiguous(&client, &values, &shape), ElementType::F32);
        let (queries, gather) = (self.queries, self.gather);
        let lists = tile_lists(&client, &geometry, &bits, queries, &watched, f32, gather);
        let [.., tiles, capacity] = lists.list.shape[..] else {
            unreachable!()
        };
        let [list, totals] = [lists.list, lists.counts].map(|words| read_u32(&client, words));
        assert_eq!(totals[2], u32::from(self.not_finite.is_some()), "{name}");
        let room = totals[3] as usize;
        for row in 0..batch * heads {
            let expected = |tile| self.expected(&visible, row, tile);
            let all: Vec<Expected> = (0..tiles).map(expected).collect();
            let mut turns: Vec<usize> = (0..tiles).collect();
            turns.sort_by_key(|&tile| (all[tile].columns[1], tile));
            turns.reverse();
            for (tile, expected) in all.iter().enumerate() {
                let item = row * tiles + tile;
                let at = TILE_LIST_HEADER + item * TILE_LIST_WORDS;
                let [full, total] = expected.columns;
                let words = [full, total, usize::from(expected.gathered), turns[tile]];
                let words = words.map(|word| word as u32);
                assert_eq!(totals[at..at + TILE_LIST_WORDS], words, "{name} {item}");
                let own = &list[item * capacity..][..capacity];
                let entries = &expected.entries;
                assert_eq!(&own[..entries.len()], entries, "{name} {item}");
                if !expected.gathered {
                    continue;
                }
                for column in 0..entries.len().next_multiple_of(KEY_BLOCK) {
                    for n in 0..self.queries {
                        let query = (tile * self.queries + n).min(q_len - 1);
                        let word = room + (column / 64 * self.queries + n) * 2 + column / 32 % 2;
                        let seen = (entries.get(column))
                            .is_some_and(|&key| self.sees(&visible, row, query, key as usize));
                        let bit = own[word] >> (column % 32) & 1 == 1;
                        assert_eq!(bit, seen, "{name} {item} column {column} query {n}");
                    }
                }
            }
        }
    }
}

fn often(rng: &mut Rng, _: usize, _: usize) -> bool {
    rng.below(8) > 0
}

fn seldom(rng: &mut Rng, _: usize, _: usize) -> bool {
    rng.below(40) == 0
}

fn window(_: &mut Rng, query: usize, key: usize) -> bool {
    key <= query && query < key + 100
}

/// Every fifth key, which are gathered, and later too many for that; and a stretch of whole blocks.
fn columns(_: &mut Rng, query: usize, key: usize) -> bool {
    key.is_multiple_of(5) || query > 200 && (64..320).contains(&key)
}

#[test]
fn lists_hold_the_blocks_or_keys_that_tiles_see() {
    let base = Case {
        mask: [1, 2, 300, 421],
        lengths: [300, 421],
        causal: false,
        queries: 48,
        gather: true,
        shows: often,
        not_finite: None,
    };
    base.check("often");
    let causal = Case {
        causal: true,
        shows: seldom,
        not_finite: Some(9000),
        ..base
    };
    causal.check("seldom, causal");
    Case {
        gather: false,
        ..causal
    }
    .check("blocks alone");
    Case {
        queries: 32,
        shows: window,
        not_finite: Some(2 * 421 * 16 - 1),
        ..base
    }
    .check("window");
    Case {
        shows: columns,
        ..base
    }
    .check("columns");
    Case {
        mask: [2, 1, 1, 421],
        shows: seldom,
        causal: true,
        ..base
    }
    .check("of keys");
    Case {
        mask: [2, 1, 300, 1],
        shows: often,
        causal: true,
        queries: 64,
        ..base
    }
    .check("of queries");
}
