use super::*;

/// Every page is free, or has as many owners as sequences have it.
fn check(pool: &PagePool) {
    let Supply::Own { free, owners } = &pool.supply else {
        panic!("the pool gives out its pages");
    };
    let mut counts = vec![0; pool.pages];
    for row in pool.table.iter() {
        let mut pages = row.clone();
        pages.sort_unstable();
        pages.dedup();
        assert_eq!(pages.len(), row.len(), "a page twice in {row:?}");
        pages.iter().for_each(|&page| counts[page as usize] += 1);
    }
    assert_eq!(*owners, counts);
    let mut free = free.clone();
    free.sort_unstable();
    let unowned = (0..pool.pages as i32).filter(|&page| counts[page as usize] == 0);
    assert_eq!(free, unowned.collect::<Vec<_>>());
    assert_eq!(pool.used(), pool.pages - free.len());
}

fn free(pool: &PagePool) -> &[i32] {
    match &pool.supply {
        Supply::Own { free, .. } => free,
        Supply::Given => &[],
    }
}

/// Allocates; true if the table changed. Nothing may be shared.
fn takes(pool: &mut PagePool, held: &[usize], tokens: usize) -> bool {
    let copies = pool.allocate(held, tokens);
    assert!(copies.iter().all(Vec::is_empty));
    copies.is_some()
}

#[test]
fn pages_are_given_once_and_taken_back() {
    let mut pool = PagePool::new(2, 4, 3);
    assert_eq!(pool.growth(&[0, 0], 4, 0), Ok(0));
    assert!(takes(&mut pool, &[0, 0], 4) && !takes(&mut pool, &[3, 3], 1));
    check(&pool);
    assert_eq!(
        pool.growth(&[4, 4], 1, 0),
        Err(AttentionError::PagesUsed { needed: 2, free: 1 })
    );
    assert_eq!(pool.growth(&[4, 4], 1, 8), Ok(8));
    pool.grow(8);
    assert!(takes(&mut pool, &[4, 4], 1));
    check(&pool);
    pool.replace(0, Vec::new());
    check(&pool);
    assert_eq!((pool.table[0].len(), pool.table[1].len()), (0, 2));
}

#[test]
fn trimming_undoes_what_was_allocated() {
    let mut pool = PagePool::new(3, 4, 9);
    assert!(takes(&mut pool, &[0, 0, 0], 3) && takes(&mut pool, &[3, 3, 3], 2));
    let before = pool.clone();
    assert!(takes(&mut pool, &[5, 5, 5], 4));
    pool.trim(&[5, 5, 5]);
    assert_eq!((&pool.table, free(&pool)), (&before.table, free(&before)));
    check(&pool);
    pool.trim(&[5, 0, 1]);
    check(&pool);
    let owned: Vec<usize> = pool.table.iter().map(Vec::len).collect();
    assert_eq!(owned, [2, 0, 1]);
}

#[test]
fn joined_pools_have_the_pages_of_all() {
    let (mut left, mut right) = (PagePool::new(2, 4, 5), PagePool::new(1, 4, 3));
    assert!(takes(&mut left, &[0, 0], 5) && takes(&mut right, &[0], 7));
    left.reorder(&[0, 0]);
    let pool = PagePool::joined(&[&left, &right]);
    check(&pool);
    let moved: Vec<i32> = right.table[0].iter().map(|page| 5 + page).collect();
    assert_eq!(pool.table[..2], left.table[..]);
    assert_eq!(pool.table[2], moved);
    assert_eq!(free(&pool).last(), free(&left).last());
}

#[test]
fn sequences_wanted_twice_share_and_unwanted_ones_are_freed() {
    let mut pool = PagePool::new(3, 4, 6);
    assert!(takes(&mut pool, &[0, 0, 0], 8));
    pool.reorder(&[2, 0, 1]);
    assert_eq!(pool.used(), 6);
    let before = pool.table.clone();
    pool.reorder(&[0, 0, 1]);
    check(&pool);
    assert_eq!(pool.used(), 4);
    for (row, from) in pool.table.iter().zip([0, 0, 1]) {
        assert_eq!(*row, before[from]);
    }
}

#[test]
fn a_shared_page_is_copied_for_all_that_write_to_it_but_one() {
    let mut pool = PagePool::new(1, 4, 6);
    assert!(takes(&mut pool, &[0], 6));
    let old = pool.table[0].clone();
    pool.reorder(&[0, 0, 0]);
    let nothing = pool.clone().allocate(&[6, 6, 6], 0);
    assert_eq!(nothing, None, "no tokens write nothing");
    // Two copies, and no further page.
    assert_eq!(pool.growth(&[6, 6, 6], 2, 0), Ok(0));
    let copies = pool.allocate(&[6, 6, 6], 2).expect("another table");
    check(&pool);
    let copied: Vec<i32> = copies.iter().map(|&[from, _]| from).collect();
    assert_eq!(copied, [old[1]; 2]);
    assert!((0..3).all(|row| pool.table[row][0] == old[0]));
    assert_eq!(pool.table[2][1], old[1]);
    assert!(pool.allocate(&[7, 7, 7], 1).iter().all(Vec::is_empty));
    // A sequence that only reads a page keeps it, so the writing one gets a copy although it came first.
    pool.reorder(&[2]);
    pool.reorder(&[0, 0]);
    let [copy] = pool.allocate(&[7, 8], 1).expect("another table")[..] else {
        panic!("one copy");
    };
    assert_eq!((copy[0], copy[1]), (old[1], pool.table[0][1]));
    assert_eq!(pool.table[1][1], old[1]);
    check(&pool);
}

/// Contents of the pages, and the tokens that each sequence should read from its own.
struct Model {
    pool: PagePool,
    grow_by: usize,
    page_len: usize,
    /// `[page][offset]`.
    memory: Vec<Vec<u32>>,
    /// The tokens that each sequence holds.
    sequences: Vec<Vec<u32>>,
    next: u32,
}

impl Model {
    fn held(&self) -> Vec<usize> {
        self.sequences.iter().map(Vec::len).collect()
    }

    /// Appends; false if there is no room.
    fn append(&mut self, tokens: usize) -> bool {
        let held = self.held();
        let before = self.pool.clone();
        let Ok(growth) = self.pool.growth(&held, tokens, self.grow_by) else {
            assert_eq!(before.table, self.pool.table);
            return false;
        };
        if growth > 0 {
            self.pool.grow(growth);
            self.memory.resize(self.pool.pages, vec![0; self.page_len]);
        }
        let copies = self.pool.allocate(&held, tokens);
        let old = self.memory.clone();
        for &[from, to] in copies.iter().flatten() {
            self.memory[to as usize].clone_from(&old[from as usize]);
        }
        assert_eq!(copies.is_some(), before.table != self.pool.table);
        for (sequence, held) in held.into_iter().enumerate() {
            for token in held..held + tokens {
                let page = self.pool.table[sequence][token / self.page_len];
                self.memory[page as usize][token % self.page_len] = self.next;
                self.sequences[sequence].push(self.next);
                self.next += 1;
            }
        }
        true
    }

    fn check(&self) {
        check(&self.pool);
        for (row, tokens) in self.pool.table.iter().zip(&self.sequences) {
            assert_eq!(row.len(), tokens.len().div_ceil(self.page_len));
            for (token, &want) in tokens.iter().enumerate() {
                let page = row[token / self.page_len] as usize;
                assert_eq!(self.memory[page][token % self.page_len], want);
            }
        }
    }
}

/// A pseudorandom number below `n` from the 64-bit state `x`.
fn below(x: &mut u64, n: usize) -> usize {
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    (*x % n as u64) as usize
}

#[test]
fn sequences_read_what_they_were_given_whatever_they_share() {
    let mut refused = 0;
    for seed in 1..41 {
        let mut x = 0x9E37_79B9_7F4A_7C15u64.wrapping_mul(seed);
        let (page_len, pages) = (1 + below(&mut x, 5), 12 + below(&mut x, 20));
        let mut model = Model {
            pool: PagePool::new(2, page_len, pages),
            grow_by: 3 * (seed as usize % 2),
            page_len,
            memory: vec![vec![0; page_len]; pages],
            sequences: vec![Vec::new(); 2],
            next: 1,
        };
        for _ in 0..300 {
            let batch = model.sequences.len();
            let (one, other) = (below(&mut x, batch), below(&mut x, batch));
            match below(&mut x, 8) {
                0..=3 => refused += usize::from(!model.append(below(&mut x, 7))),
                4 => {
                    let indices: Vec<usize> = (0..1 + below(&mut x, 4))
                        .map(|_| below(&mut x, batch))
                        .collect();
                    model.pool.reorder(&indices);
                    let sequences = indices.iter().map(|&i| model.sequences[i].clone());
                    model.sequences = sequences.collect();
                }
                5 => {
                    let tokens = below(&mut x, model.sequences[one].len() + 1);
                    let row = model.pool.table[one][..tokens.div_ceil(page_len)].to_vec();
                    model.pool.replace(other, row);
                    model.sequences[other] = model.sequences[one][..tokens].to_vec();
                }
                6 => {
                    model.pool.replace(one, Vec::new());
                    model.sequences[one].clear();
                }
                _ => {
                    let pages = below(&mut x, model.sequences[one].len() / page_len + 1);
                    model.pool.trim_front(one, pages);
                    model.sequences[one].drain(..pages * page_len);
                }
            }
            model.check();
        }
        // Nothing is lost.
        for sequence in 0..model.sequences.len() {
            model.pool.replace(sequence, Vec::new());
        }
        assert_eq!(model.pool.used(), 0);
        check(&PagePool {
            table: Arc::new(Vec::new()),
            ..model.pool
        });
    }
    assert!(refused > 0, "pools that do not grow have run out");
}

#[test]
fn a_table_from_outside_is_never_changed() {
    let mut pool = PagePool::new(1, 4, 6).given(vec![vec![3, 5], vec![3]]);
    assert_eq!(pool.used(), 2);
    assert_eq!(pool.growth(&[6, 3], 1, 8), Ok(0));
    let error = pool.growth(&[6, 4], 1, 8).unwrap_err().to_string();
    assert_eq!(
        error,
        "the block table does not fit: sequence 1 has 1 pages for 5 tokens"
    );
    assert_eq!(pool.allocate(&[6, 3], 1), None);
    pool.trim(&[0, 0]);
    assert_eq!(*pool.table, [vec![3, 5], vec![3]]);
    assert!(pool.check_own().is_err());
}
