//! Page tables owned by a serving engine.

use super::config::PagedCacheConfig;
use super::paged::PagedCache;
use burn::tensor::{Int, Tensor};
use flash_dma_problem::AttentionError;

/// Pages of the sequences of a [`PagedCache`], and the number of tokens in them.
///
/// Page `i` of a sequence holds its tokens from `i * page_len` on. Pages beyond its tokens are where the next ones
/// are written. Several sequences may share a page, which is then only read, if it is full and at the same index in
/// all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockTable {
    /// Pages of each sequence in order, as indices into the pool.
    pub pages: Vec<Vec<usize>>,
    /// Number of tokens each sequence has received, which is the position of its next token.
    pub lengths: Vec<usize>,
}

impl BlockTable {
    /// The table of a tensor `[sequences, pages]`, in which a negative number ends a row, and the number of tokens of
    /// each sequence. Waits for the table's device.
    ///
    /// # Panics
    ///
    /// If the device fails.
    #[must_use]
    pub fn from_tensor_sync(table: Tensor<2, Int>, lengths: Vec<usize>) -> Self {
        let [sequences, width] = table.dims();
        let data = table.into_data_as::<i64>();
        let entries: Vec<i64> = data.iter::<i64>().collect();
        let row = |row: usize| {
            let entries = &entries[row * width..(row + 1) * width];
            let pages = entries.iter().map_while(|&page| usize::try_from(page).ok());
            pages.collect()
        };
        Self {
            pages: (0..sequences).map(row).collect(),
            lengths,
        }
    }

    /// Checks the table against a cache of this configuration, whose pool has `pages` pages.
    fn check(&self, config: &PagedCacheConfig, pages: usize) -> Result<(), AttentionError> {
        let refused = |reason| Err(AttentionError::BlockTable { reason });
        let (rows, lengths) = (self.pages.len(), self.lengths.len());
        if rows != lengths {
            return refused(format!("it has {rows} sequences and {lengths} lengths"));
        }
        // For each page: the last sequence that has it, at which index, and whether it is full there.
        let mut had = vec![None; pages];
        for (sequence, (row, &length)) in self.pages.iter().zip(&self.lengths).enumerate() {
            let (have, most) = (row.len(), config.max_pages());
            let has = format!("sequence {sequence} has {have} pages");
            if have > most {
                return refused(format!("{has}, past the limit of {most}"));
            }
            if have * config.page_len < length {
                return refused(format!("{has} for {length} tokens"));
            }
            for (index, &page) in row.iter().enumerate() {
                let full = (index + 1) * config.page_len <= length;
                let Some(had) = had.get_mut(page) else {
                    return refused(format!(
                        "sequence {sequence} has page {page}, but there are {pages}"
                    ));
                };
                let (other, how) = match had.replace((sequence, index, full)) {
                    None => continue,
                    Some((other, ..)) if other == sequence => {
                        return refused(format!("sequence {sequence} has page {page} twice"));
                    }
                    Some((other, place, _)) if place != index => (other, "at different places"),
                    Some((_, _, true)) if full => continue,
                    Some((other, ..)) => (other, "which is not full"),
                };
                return refused(format!(
                    "sequences {other} and {sequence} have page {page}, {how}"
                ));
            }
        }
        Ok(())
    }
}

impl PagedCache {
    twin! {
        /// Replaces the pages of all sequences by those of a table that the caller owns: a serving engine gives out,
        /// shares and reuses the pool's pages ([`PagedCacheConfig::pages`]). From here on the cache gives out none:
        /// each step writes to the pages that the table has for its tokens, and the next table may have more or fewer
        /// sequences. The pages keep their contents.
        ///
        /// ```
        /// # #[cfg(feature = "flex")] {
        /// # use burn::tensor::{Device, Tensor};
        /// # use burn_flash_dma::cache::{BlockTable, PagedCacheConfig};
        /// let device = Device::flex();
        /// let config = PagedCacheConfig::new(1, 2, 8, 64).with_page_len(16).with_pages(8);
        /// let mut cache = config.init(&device);
        /// cache.set_block_table(&BlockTable { pages: vec![vec![5, 2]], lengths: vec![0] });
        /// let kv = |batch, tokens| Tensor::<4>::ones([batch, 2, tokens, 8], &device);
        /// cache.append(kv(1, 20), kv(1, 20), None);
        /// // A second sequence begins with the same 16 tokens.
        /// let pages = vec![vec![5, 2], vec![5, 7]];
        /// cache.set_block_table(&BlockTable { pages, lengths: vec![20, 16] });
        /// let _ = cache.step(kv(2, 1), kv(2, 1), kv(2, 1), None);
        /// assert_eq!(cache.lengths(), [21, 17]);
        /// # }
        /// ```
        pub fn set_block_table(&mut self, table: &BlockTable) = Self::try_set_block_table;
    }

    /// Like [`set_block_table`](Self::set_block_table), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::BlockTable`] if rows and lengths differ in number, a row is longer than `max_len` allows or
    /// has too few pages for its tokens, a page is not in the pool, twice in a row, or shared without being full and
    /// at the same index in all its rows; or if the cache has a window, which gives pages back.
    /// [`AttentionError::TooLarge`] for more sequences than can be addressed, or [`AttentionError::TokensWait`] if
    /// tokens wait. The cache is unchanged then.
    pub fn try_set_block_table(&mut self, table: &BlockTable) -> Result<(), AttentionError> {
        self.hold.check()?;
        if self.config.window.is_some() {
            return Err(AttentionError::BlockTable {
                reason: "a cache with a window gives out its pages itself".into(),
            });
        }
        table.check(&self.config, self.pool.pages())?;
        let config = PagedCacheConfig {
            batch: table.pages.len(),
            ..self.config.clone()
        };
        self.shape = config.shape(self.pool.pages())?;
        self.config = config;
        let row = |pages: &Vec<usize>| pages.iter().map(|&page| page as i32).collect();
        self.pool = self.pool.given(table.pages.iter().map(row).collect());
        self.lengths.clone_from(&table.lengths);
        self.dropped = vec![0; table.pages.len()];
        self.upload();
        Ok(())
    }

    /// Pages of all sequences, including those for the next tokens, and the number of tokens in them. With a window,
    /// only the pages a sequence has not left, and the tokens in those. Known on the host.
    #[must_use]
    pub fn block_table(&self) -> BlockTable {
        let row = |pages: &Vec<i32>| pages.iter().map(|&page| page as usize).collect();
        BlockTable {
            pages: self.pool.table.iter().map(row).collect(),
            lengths: self.held(),
        }
    }

    twin! {
        /// Copies pages `[from, to]` of an external table. If its owner lets sequences share a page that is not full,
        /// the page must be copied before one of them writes to it. No page may be in both columns, and none may be
        /// written twice.
        pub fn copy_pages(&mut self, pages: &[[usize; 2]]) = Self::try_copy_pages;
    }

    /// Like [`copy_pages`](Self::copy_pages), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::BlockTable`] if the cache gives out its pages itself, a page is not in the pool, or a page
    /// that is written is read or written by another copy; [`AttentionError::TokensWait`] if tokens wait. The cache
    /// is unchanged then.
    pub fn try_copy_pages(&mut self, pages: &[[usize; 2]]) -> Result<(), AttentionError> {
        self.hold.check()?;
        let refused = |reason| Err(AttentionError::BlockTable { reason });
        if self.pool.check_own().is_ok() {
            return refused("the cache gives out its pages itself, and copies them".into());
        }
        let there = self.pool.pages();
        if let Some(page) = pages.iter().flatten().find(|&&page| page >= there) {
            return refused(format!(
                "page {page} is to be copied, but there are {there}"
            ));
        }
        for (copy, &[_, to]) in pages.iter().enumerate() {
            let again = pages[copy + 1..].iter().any(|&[_, other]| other == to);
            if again || pages.iter().any(|&[from, _]| from == to) {
                return refused(format!("page {to} is written by two copies or read by one"));
            }
        }
        let pages = pages.iter().map(|copy| copy.map(|page| page as i32));
        self.copy(&pages.collect::<Vec<_>>());
        Ok(())
    }
}
