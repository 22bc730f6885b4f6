//! Page tables, kept on the host so that no step waits for the device.

use crate::fallback::tensors::ints;
use burn::tensor::{Device, Int, Tensor};
use flash_dma_problem::AttentionError;
use std::collections::HashMap;
use std::sync::Arc;

/// The page table, `[batch, max_pages]`; unused entries are 0.
pub(super) fn table_tensor(pool: &PagePool, max_pages: usize, device: &Device) -> Tensor<2, Int> {
    let row = |pages: &Vec<i32>| {
        let mut row = pages.clone();
        row.resize(max_pages, 0);
        row
    };
    let table = pool.table.iter().flat_map(row).collect();
    ints(table, [pool.table.len(), max_pages], device)
}

pub(super) fn lengths_tensor(lengths: &[usize], device: &Device) -> Tensor<1, Int> {
    let values = lengths.iter().map(|&n| n as i32).collect();
    ints(values, [lengths.len()], device)
}

#[cfg(test)]
mod tests;

/// Pages of all sequences. A page shared by several sequences is only read.
#[derive(Clone, Debug)]
pub(crate) struct PagePool {
    page_len: usize,
    pages: usize,
    /// Pages of each sequence in order.
    pub(crate) table: Arc<Vec<Vec<i32>>>,
    supply: Supply,
}

/// Owner of the page tables.
#[derive(Clone, Debug)]
enum Supply {
    /// The pool.
    Own {
        /// Pages of no sequence; the last is given out next.
        free: Vec<i32>,
        /// Number of sequences that have each page.
        owners: Vec<u32>,
    },
    /// The caller, with an external table.
    Given,
}

impl PagePool {
    pub(crate) fn new(batch: usize, page_len: usize, pages: usize) -> Self {
        Self::restored(page_len, pages, vec![Vec::new(); batch])
    }

    pub(crate) fn restored(page_len: usize, pages: usize, table: Vec<Vec<i32>>) -> Self {
        let mut owners = vec![0; pages];
        for &page in table.iter().flatten() {
            owners[page as usize] += 1;
        }
        let free = (0..pages as i32).rev();
        let free = free.filter(|&page| owners[page as usize] == 0).collect();
        Self {
            page_len,
            pages,
            table: Arc::new(table),
            supply: Supply::Own { free, owners },
        }
    }

    /// The same pages under external tables.
    pub(crate) fn given(&self, table: Vec<Vec<i32>>) -> Self {
        Self {
            table: Arc::new(table),
            supply: Supply::Given,
            ..*self
        }
    }

    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    pub(crate) fn used(&self) -> usize {
        match &self.supply {
            Supply::Own { free, .. } => self.pages - free.len(),
            Supply::Given => {
                let mut pages: Vec<i32> = self.table.iter().flatten().copied().collect();
                pages.sort_unstable();
                pages.dedup();
                pages.len()
            }
        }
    }

    pub(crate) fn check_own(&self) -> Result<(), AttentionError> {
        match self.supply {
            Supply::Own { .. } => Ok(()),
            Supply::Given => Err(AttentionError::BlockTable {
                reason: "it was given from outside, so its sequences change by another table"
                    .into(),
            }),
        }
    }

    /// Number of pages by which the pool must grow, in steps of `grow_by`, for `tokens` more tokens in each sequence.
    pub(crate) fn growth(
        &self,
        held: &[usize],
        tokens: usize,
        grow_by: usize,
    ) -> Result<usize, AttentionError> {
        let Supply::Own { free, .. } = &self.supply else {
            return self.check_room(held, tokens).map(|()| 0);
        };
        let needed = self.lacking(held, tokens) + self.shared_tails(held, tokens).len();
        let missing = needed.saturating_sub(free.len());
        if missing == 0 {
            return Ok(0);
        }
        if grow_by == 0 {
            let free = free.len();
            return Err(AttentionError::PagesUsed { needed, free });
        }
        // A number of pages that overflows is refused as it is.
        let growth = missing.checked_next_multiple_of(grow_by);
        Ok(growth.unwrap_or(usize::MAX))
    }

    pub(crate) fn grow(&mut self, pages: usize) {
        let new = self.pages..self.pages + pages;
        self.pages += pages;
        let Supply::Own { free, owners } = &mut self.supply else {
            unreachable!("tables from outside have room or are refused");
        };
        owners.resize(self.pages, 0);
        // After the existing pages, so these are given out first.
        let mut all: Vec<i32> = new.rev().map(|page| page as i32).collect();
        all.append(free);
        *free = all;
    }

    /// Gives each sequence pages for `tokens` more tokens, and its own copy of a shared page that they are written
    /// to. The pool must have grown enough.
    ///
    /// `None` if the table is unchanged; otherwise the pages `[from, to]` to copy before anything is written, none of
    /// which is in both columns.
    pub(crate) fn allocate(&mut self, held: &[usize], tokens: usize) -> Option<Vec<[i32; 2]>> {
        let tails = self.shared_tails(held, tokens);
        if tails.is_empty() && self.lacking(held, tokens) == 0 {
            return None;
        }
        let page_len = self.page_len;
        let Supply::Own { free, owners } = &mut self.supply else {
            return None;
        };
        let table = Arc::make_mut(&mut self.table);
        let mut take = || {
            let page = free.pop().expect("the pool has grown enough");
            owners[page as usize] += 1;
            page
        };
        let mut copies = Vec::new();
        for sequence in tails {
            let tail = &mut table[sequence][held[sequence] / page_len];
            let to = take();
            copies.push([std::mem::replace(tail, to), to]);
        }
        for (row, &held) in table.iter_mut().zip(held) {
            while row.len() * page_len < held + tokens {
                row.push(take());
            }
        }
        for &[from, _] in &copies {
            // The last owner keeps it.
            owners[from as usize] -= 1;
        }
        Some(copies)
    }

    /// Returns pages that the tokens do not need, in the order that undoes [`allocate`](Self::allocate).
    pub(crate) fn trim(&mut self, held: &[usize]) {
        if let Supply::Given = self.supply {
            return;
        }
        for (sequence, held) in held.iter().enumerate().rev() {
            let kept = held.div_ceil(self.page_len);
            let row = &mut Arc::make_mut(&mut self.table)[sequence];
            let unused = row.split_off(kept);
            self.release(&unused);
        }
    }

    /// Returns the first `pages` pages of a sequence.
    pub(crate) fn trim_front(&mut self, sequence: usize, pages: usize) {
        let row = &mut Arc::make_mut(&mut self.table)[sequence];
        let rest = row.split_off(pages);
        let dropped = std::mem::replace(row, rest);
        self.release(&dropped);
    }

    /// Sequence `i` gets the pages of sequence `indices[i]`.
    pub(crate) fn reorder(&mut self, indices: &[usize]) {
        let rows = indices.iter().map(|&index| self.table[index].clone());
        let rows: Vec<Vec<i32>> = rows.collect();
        rows.iter().for_each(|row| self.own(row));
        let old = std::mem::replace(&mut self.table, Arc::new(rows));
        old.iter().for_each(|row| self.release(row));
    }

    /// Replaces the pages of a sequence by these, which others may have.
    pub(crate) fn replace(&mut self, sequence: usize, pages: Vec<i32>) {
        self.own(&pages);
        let row = &mut Arc::make_mut(&mut self.table)[sequence];
        let old = std::mem::replace(row, pages);
        self.release(&old);
    }

    /// Concatenates pools, pages and sequences; the free pages of the first are given out first.
    pub(crate) fn joined(pools: &[&Self]) -> Self {
        let (mut table, mut owners, mut free) = (Vec::new(), Vec::new(), Vec::new());
        let mut first = 0;
        for pool in pools {
            let Supply::Own {
                free: own,
                owners: of,
            } = &pool.supply
            else {
                unreachable!("checked: tables from outside are not joined");
            };
            let moved =
                |pages: &Vec<i32>| -> Vec<i32> { pages.iter().map(|page| first + page).collect() };
            table.extend(pool.table.iter().map(moved));
            owners.extend(of);
            free.push(moved(own));
            first += pool.pages as i32;
        }
        Self {
            page_len: pools[0].page_len,
            pages: first as usize,
            table: Arc::new(table),
            supply: Supply::Own {
                free: free.into_iter().rev().flatten().collect(),
                owners,
            },
        }
    }

    /// Number of pages missing for `tokens` more tokens in each sequence.
    fn lacking(&self, held: &[usize], tokens: usize) -> usize {
        let pages = |held: usize| (held + tokens).div_ceil(self.page_len);
        (self.table.iter().zip(held))
            .map(|(row, &held)| pages(held).saturating_sub(row.len()))
            .sum()
    }

    /// Sequences that need a copy of the page their next token is written to: all but one of those that share it, or
    /// all if another sequence only reads it.
    fn shared_tails(&self, held: &[usize], tokens: usize) -> Vec<usize> {
        let Supply::Own { owners, .. } = &self.supply else {
            return Vec::new();
        };
        // The sequences that do not get a copy.
        let mut others: HashMap<i32, u32> = HashMap::new();
        let copies = |&(sequence, &held): &(usize, &usize)| {
            if tokens == 0 || held.is_multiple_of(self.page_len) {
                return false;
            }
            let page = self.table[sequence][held / self.page_len];
            let others = others.entry(page).or_insert(owners[page as usize] - 1);
            let shared = *others > 0;
            *others -= u32::from(shared);
            shared
        };
        let sequences = held.iter().enumerate().filter(copies);
        sequences.map(|(sequence, _)| sequence).collect()
    }

    /// Refuses tokens that external tables have no room for.
    fn check_room(&self, held: &[usize], tokens: usize) -> Result<(), AttentionError> {
        for (sequence, (row, &held)) in self.table.iter().zip(held).enumerate() {
            if row.len() * self.page_len < held + tokens {
                let (pages, tokens) = (row.len(), held + tokens);
                return Err(AttentionError::BlockTable {
                    reason: format!("sequence {sequence} has {pages} pages for {tokens} tokens"),
                });
            }
        }
        Ok(())
    }

    /// Counts one more owner of these pages.
    fn own(&mut self, pages: &[i32]) {
        if let Supply::Own { owners, .. } = &mut self.supply {
            for &page in pages {
                owners[page as usize] += 1;
            }
        }
    }

    /// Counts one owner fewer; pages without an owner are free.
    fn release(&mut self, pages: &[i32]) {
        if let Supply::Own { free, owners } = &mut self.supply {
            for &page in pages.iter().rev() {
                let left = &mut owners[page as usize];
                *left -= 1;
                if *left == 0 {
                    free.push(page);
                }
            }
        }
    }
}
