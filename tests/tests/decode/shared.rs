//! Pages that several sequences share, pages that a window leaves, and tables from outside.

use super::sequences::{Sequences, Shape, Tokens, shape};
use burn::tensor::{Int, Tensor, TensorData};
use burn_flash_dma::cache::{BlockTable, PagedCache, PagedCacheConfig};
use flash_dma_tests::prelude::*;

every_burn!(
    shared_pages_equal_pages_of_ones_own,
    guesses_of_sequences_that_share,
    prefixes_of_requests,
    the_last_keys,
    tables_from_outside,
    a_record_keeps_what_is_shared,
);

const SHAPE: Shape = shape(F32);

const PAGE: usize = 4;

fn config(batch: usize) -> PagedCacheConfig {
    PagedCacheConfig::new(batch, SHAPE.kv_heads, SHAPE.dim, 2000)
        .with_page_len(PAGE)
        .with_pages(3)
        .with_grow_by(2)
}

fn sequences(config: &PagedCacheConfig, seed: u64) -> Sequences {
    let kind = config.scored.then_some(Scores::Padded);
    Sequences::new(SHAPE, config.batch, kind, config.options, seed).of_last(config.window)
}

/// Without scores and with; with all keys, and with the last ones.
fn configs<B: Backend>(batch: usize) -> Vec<PagedCacheConfig> {
    let plain = config(batch);
    let scored = plain.clone().with_scored(true);
    Burn::<B>::cases(
        [plain.clone(), scored.clone().with_window(Some(9))],
        [plain.with_window(Some(PAGE)), scored],
        [],
    )
}

fn rounds<B: Backend>(slow: usize, fast: usize) -> usize {
    Burn::<B>::cases([slow], [fast - slow], [])
        .into_iter()
        .sum()
}

fn table(pages: &[&[usize]], lengths: &[usize]) -> BlockTable {
    BlockTable {
        pages: pages.iter().map(|row| row.to_vec()).collect(),
        lengths: lengths.to_vec(),
    }
}

/// The output and the LSE of a step, by their bits.
fn bits(out: Tensor<4>, lse: Tensor<3>) -> [Vec<u8>; 2] {
    [out.into_data(), lse.into_data()].map(|data| data.as_bytes().to_vec())
}

fn step(cache: &mut PagedCache, tokens: &Tokens) -> (Tensor<4>, Tensor<3>) {
    let Tokens {
        q, k, v, scores, ..
    } = tokens.clone();
    cache.try_step_with_lse(q, k, v, scores).unwrap()
}

/// A step of `count` tokens against the oracle.
fn check_step(cache: &mut PagedCache, sequences: &mut Sequences, count: usize) {
    let tokens = sequences.grow(count, cache.device());
    let (out, lse) = step(cache, &tokens);
    sequences.check(&tokens, out, lse);
}

/// A cache whose sequences share pages, one of the same sequences with separate pages, and the oracle's sequences.
struct Both<'a, B> {
    burn: &'a Burn<B>,
    shared: PagedCache,
    apart: PagedCache,
    sequences: Sequences,
}

impl<'a, B: Backend> Both<'a, B> {
    fn new(burn: &'a Burn<B>, config: &PagedCacheConfig, seed: u64) -> Self {
        Self {
            burn,
            shared: config.init(burn.device()),
            apart: config.init(burn.device()),
            sequences: sequences(config, seed),
        }
    }

    fn reorder(&mut self, indices: &[usize]) {
        self.shared.reorder(indices);
        self.sequences.reorder(indices);
        // A cache for each sequence, and all of them joined.
        let one = |sequence| {
            let config = PagedCacheConfig {
                batch: 1,
                ..self.apart.config().clone()
            };
            let mut one = config.init(self.burn.device());
            let (k, v, scores) = self.sequences.given(sequence, self.burn.device());
            one.append(k, v, scores);
            one
        };
        self.apart = PagedCache::cat((0..indices.len()).map(one).collect());
    }

    /// `reorder` for a cache whose table is from outside.
    fn apart_reorder(&mut self, indices: &[usize]) {
        let shared = self.shared.clone();
        self.shared = self.apart.clone();
        self.reorder(indices);
        self.shared = shared;
    }

    fn attend(&mut self, count: usize) {
        let tokens = self.sequences.grow(count, self.burn.device());
        let (out, lse) = step(&mut self.shared, &tokens);
        self.sequences.check(&tokens, out.clone(), lse.clone());
        let (own, own_lse) = step(&mut self.apart, &tokens);
        assert_eq!(bits(out, lse), bits(own, own_lse));
    }

    fn step(&mut self, count: usize) {
        self.attend(count);
        assert_eq!(self.shared.lengths(), self.sequences.lengths());
    }

    /// A step whose first tokens are right.
    fn guess(&mut self, count: usize, right: usize) {
        for cache in [&mut self.shared, &mut self.apart] {
            cache.hold();
        }
        self.attend(count);
        for cache in [&mut self.shared, &mut self.apart] {
            cache.accept(right);
        }
        self.sequences.take_back(count - right);
        assert_eq!(self.shared.lengths(), self.sequences.lengths());
    }
}

fn shared_pages_equal_pages_of_ones_own<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(21);
    for (case, config) in configs::<B>(1).iter().enumerate() {
        let mut both = Both::new(burn, config, case as u64);
        both.step(6);
        let rounds = rounds::<B>(40, 240);
        let mut saved = 0;
        for round in 0..rounds {
            if round % 6 == 0 {
                let batch = both.sequences.batch();
                let beams: Vec<usize> = (0..1 + rng.below(4)).map(|_| rng.below(batch)).collect();
                both.reorder(&beams);
            }
            both.step([1, 1, 1, 3, 17][rng.below(5)]);
            let [shared, apart] = [&both.shared, &both.apart].map(PagedCache::used_pages);
            assert!(shared <= apart);
            saved += apart - shared;
        }
        assert!(saved > 0, "nothing was shared");
    }
}

fn guesses_of_sequences_that_share<B: Backend>(burn: &Burn<B>) {
    for (case, config) in configs::<B>(1).iter().enumerate() {
        let mut both = Both::new(burn, config, 40 + case as u64);
        both.step(6);
        both.reorder(&[0, 0, 0]);
        for (guessed, right) in [(3, 1), (2, 0), (20, 5), (1, 1)] {
            both.guess(guessed, right);
            both.step(1);
            if right == 1 {
                both.reorder(&[1, 0, 1]);
            }
        }
    }
}

/// Requests that begin with the text of another one, which goes on.
fn prefixes_of_requests<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(22);
    for (case, config) in configs::<B>(3).iter().enumerate() {
        let mut cache = config.init(burn.device());
        let mut sequences = sequences(config, 60 + case as u64);
        for _ in 0..rounds::<B>(8, 80) {
            check_step(&mut cache, &mut sequences, 1 + rng.below(5));
            let (from, into) = (rng.below(3), rng.below(3));
            let tokens = rng.below(sequences.lengths()[from] + 1);
            match cache.try_share_prefix(from, into, tokens) {
                Ok(()) => sequences.share_prefix(from, into, tokens),
                // The window has left the keys that its next query would see.
                Err(error) => assert!(
                    config.window.is_some(),
                    "{error} of the {tokens} tokens of {from}"
                ),
            }
            assert_eq!(cache.lengths(), sequences.lengths());
        }
        let lengths = cache.lengths().to_vec();
        let refused = cache.try_share_prefix(0, 1, lengths[0] + 1);
        assert_eq!(refused.unwrap_err().kind(), "Prefix");
        assert_eq!(cache.lengths(), lengths);
    }
}

/// A query attends to the last keys, and pages that none will attend to again are given back.
fn the_last_keys<B: Backend>(burn: &Burn<B>) {
    for (window, scored) in Burn::<B>::cases(
        [(1, false), (6, true), (9, false)],
        [(1, true), (4, false), (5, true), (8, false), (500, false)],
        [],
    ) {
        // Far more tokens than a sequence has pages for, in a pool that does not grow.
        let most = (window + 2 * PAGE - 3) / PAGE;
        let room = most + 17usize.div_ceil(PAGE);
        let config = PagedCacheConfig {
            max_len: room * PAGE,
            ..config(2)
                .with_window(Some(window))
                .with_scored(scored)
                .with_pages(2 * room)
                .with_grow_by(0)
        };
        let mut cache = config.init(burn.device());
        let mut sequences = sequences(&config, window as u64);
        let mut greatest = 0;
        for round in 0..rounds::<B>(14, 140) {
            let count = if round % 7 == 6 { 17 } else { 1 };
            check_step(&mut cache, &mut sequences, count);
            assert_eq!(cache.lengths(), sequences.lengths());
            greatest = greatest.max(cache.used_pages());
            assert!(cache.used_pages() <= 2 * most);
            // The tokens of one more page than the window may still be held.
            let held = cache.block_table().lengths;
            assert!(held.iter().all(|&held| held < window + PAGE));
        }
        let full = cache.lengths()[0] >= window + PAGE;
        assert!(!full || greatest == 2 * most, "the bound is reached");
        cache.reset(0);
        sequences.reset(0);
        assert!(cache.used_pages() <= most);
        check_step(&mut cache, &mut sequences, 2);
        cache.reset(0);
        cache.reset(1);
        assert_eq!(cache.used_pages(), 0);
    }
}

/// An owner of pages that gives them out at random, and lets sequences share full ones.
fn tables_from_outside<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(23);
    let pages = 64;
    for scored in [false, true] {
        let config = config(1).with_pages(pages).with_scored(scored);
        let mut both = Both::new(burn, &config, 80 + u64::from(scored));
        let mut table = table(&[&[]], &[0]);
        for round in 0..rounds::<B>(8, 60) {
            if round % 5 == 4 {
                // Another sequence begins with the full pages of one that there is.
                let batch = table.lengths.len();
                let from = rng.below(batch);
                let full = table.lengths[from] / PAGE * PAGE;
                let beams: Vec<usize> = (0..batch).chain([from]).skip(batch / 3).collect();
                both.apart_reorder(&beams);
                let last = beams.len() - 1;
                both.sequences.share_prefix(last, last, full);
                both.apart.share_prefix(last, last, full);
                table.pages.push(table.pages[from][..full / PAGE].to_vec());
                table.lengths.push(full);
                table.pages.drain(..batch / 3);
                table.lengths.drain(..batch / 3);
            }
            let count = [1, 2, 18][rng.below(3)];
            for row in 0..table.pages.len() {
                while table.pages[row].len() * PAGE < table.lengths[row] + count {
                    let used: Vec<usize> = table.pages.concat();
                    let free: Vec<usize> = (0..pages).filter(|page| !used.contains(page)).collect();
                    if free.is_empty() {
                        return;
                    }
                    table.pages[row].push(free[rng.below(free.len())]);
                }
            }
            both.shared.set_block_table(&table);
            assert_eq!(both.shared.block_table(), table);
            both.step(count);
            table.lengths.iter_mut().for_each(|n| *n += count);
            let refused = both.shared.try_reorder(&[0]);
            assert_eq!(refused.unwrap_err().kind(), "BlockTable");
        }
    }
    copies_for_the_owner(burn);
}

/// Two sequences have a page that is not full, until the owner asks for a copy.
fn copies_for_the_owner<B: Backend>(burn: &Burn<B>) {
    let config = config(1).with_pages(8);
    let mut both = Both::new(burn, &config, 90);
    both.shared.set_block_table(&table(&[&[6, 1]], &[0]));
    both.step(6);
    both.apart_reorder(&[0, 0]);
    let shared = table(&[&[6, 1], &[6, 1]], &[6, 6]);
    assert!(both.shared.try_set_block_table(&shared).is_err());
    both.shared.copy_pages(&[[1, 3]]);
    both.shared
        .set_block_table(&table(&[&[6, 1, 0], &[6, 3, 5]], &[6, 6]));
    both.step(1);
    both.step(4);
    // The same table as a tensor.
    let entries = TensorData::from([[6, 1, 0, -1], [6, 3, 5, 2]]);
    let entries = Tensor::<2, Int>::from_data(entries, burn.device());
    let read = BlockTable::from_tensor_sync(entries, vec![11, 11]);
    assert_eq!(read, table(&[&[6, 1, 0], &[6, 3, 5, 2]], &[11, 11]));
    both.shared.set_block_table(&read);
    both.step(1);
}

fn a_record_keeps_what_is_shared<B: Backend>(burn: &Burn<B>) {
    for (case, config) in configs::<B>(1).iter().enumerate() {
        let mut both = Both::new(burn, config, 30 + case as u64);
        both.step(7);
        both.reorder(&[0, 0]);
        let record = serde_json::to_string(&both.shared.to_record_sync()).unwrap();
        let record = serde_json::from_str(&record).unwrap();
        let used = both.shared.used_pages();
        both.shared = PagedCache::try_from_record(record, burn.device()).unwrap();
        assert_eq!(both.shared.used_pages(), used);
        assert!(used < both.apart.used_pages());
        both.step(2);
        both.step(20);
        let pages = both.shared.block_table().pages;
        let in_both = pages[0].iter().filter(|page| pages[1].contains(page));
        let apart = both.apart.used_pages();
        assert_eq!(both.shared.used_pages(), apart - in_both.count());
    }
}
