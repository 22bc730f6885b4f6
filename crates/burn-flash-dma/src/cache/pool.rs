//! The pages that each sequence owns, kept on the host so that no step waits for the device.

use flash_dma_problem::AttentionError;
use std::sync::Arc;

/// The pages of all sequences.
#[derive(Clone, Debug)]
pub(crate) struct PagePool {
    page_len: usize,
    pages: usize,
    /// The pages of each sequence in order.
    pub(crate) table: Arc<Vec<Vec<i32>>>,
    /// Pages without an owner; the last is given out next.
    free: Vec<i32>,
}

/// The copies that [`PagePool::reorder`] asks for: page `i` becomes a copy of page
/// `source[i]`. `None` where tables alone change.
pub(crate) type Copies = Option<Vec<i32>>;

impl PagePool {
    pub(crate) fn new(batch: usize, page_len: usize, pages: usize) -> Self {
        Self {
            page_len,
            pages,
            table: Arc::new(vec![Vec::new(); batch]),
            free: (0..pages as i32).rev().collect(),
        }
    }

    /// A pool with these tables.
    pub(crate) fn restored(page_len: usize, pages: usize, table: Vec<Vec<i32>>) -> Self {
        let used: std::collections::HashSet<i32> = table.iter().flatten().copied().collect();
        let free = (0..pages as i32).rev().filter(|page| !used.contains(page));
        Self {
            page_len,
            pages,
            free: free.collect(),
            table: Arc::new(table),
        }
    }

    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    /// Pages that the sequences lack for `tokens` more tokens each.
    fn lacking(&self, lengths: &[usize], tokens: usize) -> usize {
        (self.table.iter().zip(lengths))
            .map(|(table, &held)| (held + tokens).div_ceil(self.page_len) - table.len())
            .sum()
    }

    /// The number of pages by which the pool must grow for `tokens` more tokens per sequence, in steps of `grow_by`.
    pub(crate) fn growth(
        &self,
        lengths: &[usize],
        tokens: usize,
        grow_by: usize,
    ) -> Result<usize, AttentionError> {
        let needed = self.lacking(lengths, tokens);
        let missing = needed.saturating_sub(self.free.len());
        if missing == 0 {
            return Ok(0);
        }
        if grow_by == 0 {
            let free = self.free.len();
            return Err(AttentionError::PagesUsed { needed, free });
        }
        Ok(missing.next_multiple_of(grow_by))
    }

    pub(crate) fn grow(&mut self, pages: usize) {
        let new = self.pages..self.pages + pages;
        self.pages += pages;
        // Behind the pages there are, so these are given out first.
        let mut free: Vec<i32> = new.rev().map(|page| page as i32).collect();
        free.append(&mut self.free);
        self.free = free;
    }

    /// Gives each sequence the pages for `tokens` more tokens, and returns whether a table changed. The pool must
    /// have grown enough.
    pub(crate) fn allocate(&mut self, lengths: &[usize], tokens: usize) -> bool {
        if self.lacking(lengths, tokens) == 0 {
            return false;
        }
        let table = Arc::make_mut(&mut self.table);
        for (table, &held) in table.iter_mut().zip(lengths) {
            while table.len() * self.page_len < held + tokens {
                table.push(self.free.pop().expect("the pool has grown enough"));
            }
        }
        true
    }

    /// Takes back the pages that the tokens do not need, in the order that undoes [`allocate`](Self::allocate).
    pub(crate) fn trim(&mut self, lengths: &[usize]) {
        let table = Arc::make_mut(&mut self.table);
        for (table, held) in table.iter_mut().zip(lengths).rev() {
            let unused = table.split_off(held.div_ceil(self.page_len));
            self.free.extend(unused.into_iter().rev());
        }
    }

    /// Takes the pages of a sequence back.
    pub(crate) fn release(&mut self, sequence: usize) {
        let table = Arc::make_mut(&mut self.table);
        let pages = std::mem::take(&mut table[sequence]);
        self.free.extend(pages.into_iter().rev());
    }

    /// The pages and the sequences of all pools, one pool behind the other; those of the first are given out first.
    pub(crate) fn joined(pools: &[&Self]) -> Self {
        let firsts = pools.iter().scan(0, |sum, pool| {
            let first = *sum;
            *sum += pool.pages;
            Some(first as i32)
        });
        let placed: Vec<(i32, &Self)> = firsts.zip(pools.iter().copied()).collect();
        let move_by = |first: i32| move |page: &i32| first + page;
        let table = (placed.iter()).flat_map(|&(first, pool)| {
            (pool.table.iter()).map(move |pages| pages.iter().map(move_by(first)).collect())
        });
        let free =
            (placed.iter().rev()).flat_map(|&(first, pool)| pool.free.iter().map(move_by(first)));
        Self {
            page_len: pools[0].page_len,
            pages: pools.iter().map(|pool| pool.pages).sum(),
            table: Arc::new(table.collect()),
            free: free.collect(),
        }
    }

    /// Pages that [`reorder`](Self::reorder) needs for sequences that are wanted more than once, beyond those
    /// that it frees.
    pub(crate) fn reorder_growth(
        &self,
        indices: &[usize],
        grow_by: usize,
    ) -> Result<usize, AttentionError> {
        let wanted: usize = indices.iter().map(|&i| self.table[i].len()).sum();
        let missing = wanted.saturating_sub(self.pages);
        match (missing, grow_by) {
            (0, _) => Ok(0),
            (_, 0) => Err(AttentionError::PagesUsed {
                needed: wanted,
                free: self.pages,
            }),
            _ => Ok(missing.next_multiple_of(grow_by)),
        }
    }

    /// Replaces sequence `i` by sequence `indices[i]`. The first taker of a sequence gets its pages, the others
    /// copies.
    pub(crate) fn reorder(&mut self, indices: &[usize]) -> Copies {
        let old = std::mem::take(Arc::make_mut(&mut self.table));
        for (sequence, pages) in old.iter().enumerate() {
            if !indices.contains(&sequence) {
                self.free.extend(pages.iter().rev());
            }
        }
        let mut taken = vec![false; old.len()];
        let mut source: Vec<i32> = (0..self.pages as i32).collect();
        let mut copied = false;
        let mut table = Vec::with_capacity(indices.len());
        for &index in indices {
            if !std::mem::replace(&mut taken[index], true) {
                table.push(old[index].clone());
                continue;
            }
            copied |= !old[index].is_empty();
            let copy = |&page: &i32| {
                let new = self.free.pop().expect("the pool has grown enough");
                source[new as usize] = page;
                new
            };
            table.push(old[index].iter().map(copy).collect());
        }
        self.table = Arc::new(table);
        copied.then_some(source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every page belongs to one sequence or is free.
    fn check(pool: &PagePool) {
        let mut pages: Vec<i32> = pool
            .table
            .iter()
            .flatten()
            .chain(&pool.free)
            .copied()
            .collect();
        pages.sort_unstable();
        assert_eq!(pages, (0..pool.pages as i32).collect::<Vec<_>>());
    }

    #[test]
    fn pages_are_given_once_and_taken_back() {
        let mut pool = PagePool::new(2, 4, 3);
        assert_eq!(pool.growth(&[0, 0], 4, 0), Ok(0));
        assert!(pool.allocate(&[0, 0], 4) && !pool.allocate(&[3, 3], 1));
        check(&pool);
        assert_eq!(
            pool.growth(&[4, 4], 1, 0),
            Err(AttentionError::PagesUsed { needed: 2, free: 1 })
        );
        assert_eq!(pool.growth(&[4, 4], 1, 8), Ok(8));
        pool.grow(8);
        assert!(pool.allocate(&[4, 4], 1));
        check(&pool);
        pool.release(0);
        check(&pool);
        assert_eq!((pool.table[0].len(), pool.table[1].len()), (0, 2));
    }

    #[test]
    fn trimming_undoes_what_was_allocated() {
        let mut pool = PagePool::new(3, 4, 9);
        assert!(pool.allocate(&[0, 0, 0], 3) && pool.allocate(&[3, 3, 3], 2));
        let before = pool.clone();
        assert!(pool.allocate(&[5, 5, 5], 4));
        pool.trim(&[5, 5, 5]);
        assert_eq!((&pool.table, &pool.free), (&before.table, &before.free));
        check(&pool);
        pool.trim(&[5, 0, 1]);
        check(&pool);
        let owned: Vec<usize> = pool.table.iter().map(Vec::len).collect();
        assert_eq!(owned, [2, 0, 1]);
    }

    #[test]
    fn joined_pools_have_the_pages_of_all() {
        let (mut left, mut right) = (PagePool::new(2, 4, 5), PagePool::new(1, 4, 3));
        assert!(left.allocate(&[0, 0], 5) && right.allocate(&[0], 7));
        let pool = PagePool::joined(&[&left, &right]);
        check(&pool);
        let moved: Vec<i32> = right.table[0].iter().map(|page| 5 + page).collect();
        assert_eq!(pool.table[..2], left.table[..]);
        assert_eq!(pool.table[2], moved);
        assert_eq!(pool.free.last(), left.free.last());
    }

    #[test]
    fn sequences_wanted_twice_are_copied_and_unwanted_ones_freed() {
        let mut pool = PagePool::new(3, 4, 6);
        assert!(pool.allocate(&[0, 0, 0], 8));
        assert_eq!(pool.reorder(&[2, 0, 1]), None);
        let before = pool.table.clone();
        assert_eq!(pool.reorder_growth(&[0, 0, 1], 0), Ok(0));
        let source = pool.reorder(&[0, 0, 1]).expect("sequence 0 is copied");
        check(&pool);
        assert_eq!(pool.table[0], before[0]);
        assert_eq!(pool.table[2], before[1]);
        for (&new, &old) in pool.table[1].iter().zip(&before[0]) {
            assert_eq!(source[new as usize], old);
        }
        assert!(pool.reorder_growth(&[0, 0, 1, 2], 0).is_err());
    }
}
