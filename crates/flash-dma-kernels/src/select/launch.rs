//! Host side: the kernels that run, their order and their buffers.

use crate::host::scratch::{address_type, bytes, one_unit_each, scratch};
use crate::select::blocks;
use crate::select::blueprint::BlocksBlueprint;
use crate::select::quantile::{
    IntervalSizesLaunch, LevelLaunch, LevelSizesLaunch, QueriesLaunch, RUN, SPAN,
    count_digits_kernel, descend_kernel, keep_each_kernel, scan_spans_kernel, start_queries_kernel,
    write_intervals_kernel,
};
use crate::select::sort::{BLOCK, merge_blocks_kernel, sort_blocks_kernel};
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::KeptKeys;

/// The most bits per digit. More bits would save levels but count more values than they skip.
const MAX_WIDTH: u32 = 4;

/// Words per key of a selection by sorting: order and sort key twice each, three of query state, all held to the end.
const SORT_WORDS: usize = 7;

/// Sizes that every launch of one selection shares.
struct Selecting<'a> {
    client: &'a Client,
    rows: usize,
    n: usize,
    /// For buffers of up to one word per key and the digit tables.
    address: AddressType,
}

/// The keys of every row in rank order: contiguous `[rows, n]`, u32.
struct Ranked {
    /// Key indices.
    order: TensorBinding,
    /// Their sort keys.
    keys: TensorBinding,
    /// Two free buffers.
    spare: [TensorBinding; 2],
}

/// Launches the selection of checked `scores` `[batch, kv_heads, n]` into `intervals`.
pub(crate) fn launch(
    client: &Client,
    scores: TensorBinding,
    kept: KeptKeys,
    intervals: TensorBinding,
) {
    let (rows, n) = (scores.shape[0] * scores.shape[1], scores.shape[2]);
    if rows * n == 0 {
        return;
    }
    if let Some(lifetime) = equal_lifetimes(kept, n) {
        return keep_each(client, scores, intervals, [rows, n], lifetime);
    }
    if let Some(blueprint) = BlocksBlueprint::choose(client, rows, n) {
        return blocks::launch(client, scores, kept, intervals, blueprint);
    }
    let selecting = Selecting {
        client,
        rows,
        n,
        address: address_type([&scores, &intervals]),
    };
    let ranked = selecting.sort(scores);
    selecting.find_ends(ranked, kept, intervals);
}

/// The positions that every key lives, at most `n`, if its rank does not matter.
fn equal_lifetimes(kept: KeptKeys, n: usize) -> Option<usize> {
    match kept.best {
        best if best >= n => Some(n),
        0 => Some(kept.recent.min(n)),
        _ => None,
    }
}

/// The bytes of the buffers that [`launch`] allocates for `rows` of `n` keys, at its peak.
pub(crate) fn workspace(client: &Client, rows: usize, n: usize, kept: KeptKeys) -> usize {
    if rows * n == 0 || equal_lifetimes(kept, n).is_some() {
        return 0;
    }
    if let Some(blueprint) = BlocksBlueprint::choose(client, rows, n) {
        return blueprint.workspace(rows, n);
    }
    let tables = digit_widths(index_bits(n))
        .map(|width| digit_tables(rows, n, width).map(bytes).iter().sum())
        .max();
    SORT_WORDS * bytes([rows, n]) + tables.unwrap_or(0)
}

fn keep_each(
    client: &Client,
    scores: TensorBinding,
    intervals: TensorBinding,
    [rows, n]: [usize; 2],
    lifetime: usize,
) {
    let (count, dim) = one_unit_each(client, rows * n);
    let address = address_type([&scores, &intervals]);
    // SAFETY: units past `rows * n` return, and the buffers were checked to hold their shapes.
    unsafe {
        keep_each_kernel::launch_unchecked(
            client,
            count,
            dim,
            address,
            scores.into_tensor_arg(),
            intervals.into_buffer_arg(),
            rows as u32,
            n as u32,
            lifetime as u32,
        );
    }
}

impl Selecting<'_> {
    fn words(&self) -> TensorBinding {
        scratch(self.client, [self.rows, self.n])
    }

    fn sort(&self, scores: TensorBinding) -> Ranked {
        let (rows, n) = (self.rows as u32, self.n as u32);
        let (mut keys, mut order) = (self.words(), self.words());
        let mut spare = [self.words(), self.words()];
        let (count, dim) = one_unit_each(self.client, self.rows * self.n);
        // SAFETY: units past `rows * n` return; `scores` was checked to hold its shape and strides,
        // and every other access is within `[rows, n]`.
        unsafe {
            sort_blocks_kernel::launch_unchecked(
                self.client,
                count.clone(),
                dim,
                self.address,
                scores.into_tensor_arg(),
                keys.clone().into_buffer_arg(),
                order.clone().into_buffer_arg(),
                rows,
                n,
            );
        }
        let mut block = BLOCK;
        while block < n {
            // SAFETY: as above; a block and its sibling end at `n` at the latest.
            unsafe {
                merge_blocks_kernel::launch_unchecked(
                    self.client,
                    count.clone(),
                    dim,
                    self.address,
                    keys.clone().into_buffer_arg(),
                    order.clone().into_buffer_arg(),
                    spare[0].clone().into_buffer_arg(),
                    spare[1].clone().into_buffer_arg(),
                    rows,
                    n,
                    block,
                );
            }
            let [new_keys, new_order] = spare;
            spare = [keys, order];
            (keys, order) = (new_keys, new_order);
            block *= 2;
        }
        Ranked { order, keys, spare }
    }

    fn find_ends(&self, ranked: Ranked, kept: KeptKeys, intervals: TensorBinding) {
        let (rows, n) = (self.rows as u32, self.n as u32);
        let queries = [(); 3].map(|()| self.words());
        let queries = || {
            let [nodes, candidates, wanted] = queries.clone().map(TensorBinding::into_buffer_arg);
            QueriesLaunch::new(nodes, candidates, wanted)
        };
        let (count, dim) = one_unit_each(self.client, self.rows * self.n);
        // SAFETY: units past `rows * n` return.
        unsafe {
            start_queries_kernel::launch_unchecked(
                self.client,
                count.clone(),
                dim,
                self.address,
                queries(),
                rows,
                n,
                kept.best as u32,
            );
        }
        let mut level = ranked.order.clone();
        let mut spare = ranked.spare.into_iter();
        let mut next = spare.next();
        let mut bits = index_bits(self.n);
        for width in digit_widths(bits) {
            bits -= width;
            let (in_span, spans) = self.count_digits(&level, bits, width);
            // The rank order itself is kept, so the first two levels go to the spare buffers.
            let below = next.take().expect("two buffers take turns");
            // SAFETY: units past `rows * n` return. A level is a permutation of `0..n`, so a node
            // begins at its least index and holds its candidates; tables were sized for the digit.
            unsafe {
                descend_kernel::launch_unchecked(
                    self.client,
                    count.clone(),
                    dim,
                    self.address,
                    LevelLaunch::new(
                        level.clone().into_buffer_arg(),
                        in_span.into_buffer_arg(),
                        spans.into_buffer_arg(),
                    ),
                    below.clone().into_buffer_arg(),
                    queries(),
                    LevelSizesLaunch::new(rows, n, bits, width),
                );
            }
            next = spare.next().or(Some(level));
            level = below;
        }
        // SAFETY: units past `rows * n` return; ranks and indices are permutations of `0..n`.
        unsafe {
            write_intervals_kernel::launch_unchecked(
                self.client,
                count,
                dim,
                self.address,
                ranked.order.into_buffer_arg(),
                ranked.keys.into_buffer_arg(),
                level.into_buffer_arg(),
                queries(),
                intervals.into_buffer_arg(),
                IntervalSizesLaunch::new(rows, n, kept.recent.min(self.n) as u32, bits),
            );
        }
    }

    /// Counts of the digits of `level`, within spans and over spans.
    fn count_digits(
        &self,
        level: &TensorBinding,
        shift: u32,
        width: u32,
    ) -> (TensorBinding, TensorBinding) {
        let [in_span, spans] = digit_tables(self.rows, self.n, width);
        let [_, span_count, values] = spans;
        let [in_span, spans] = [in_span, spans].map(|shape| scratch(self.client, shape));
        let (count, dim) = one_unit_each(self.client, self.rows * span_count * values);
        // SAFETY: units past `rows * span_count * values` return; reads end at `n`.
        unsafe {
            count_digits_kernel::launch_unchecked(
                self.client,
                count,
                dim,
                self.address,
                level.clone().into_buffer_arg(),
                in_span.clone().into_buffer_arg(),
                spans.clone().into_buffer_arg(),
                self.rows as u32,
                self.n as u32,
                shift,
                width,
            );
        }
        let (count, dim) = one_unit_each(self.client, self.rows * values);
        // SAFETY: units past `rows * values` return.
        unsafe {
            scan_spans_kernel::launch_unchecked(
                self.client,
                count,
                dim,
                self.address,
                spans.clone().into_buffer_arg(),
                self.rows as u32,
                span_count as u32,
                values as u32,
            );
        }
        (in_span, spans)
    }
}

/// The shapes of the counts of the digits of a level, within spans and over spans.
fn digit_tables(rows: usize, n: usize, width: u32) -> [[usize; 3]; 2] {
    let (values, spans) = (1 << width, n.div_ceil(SPAN as usize));
    let runs = spans * (SPAN / RUN) as usize;
    [[rows, runs, values], [rows, spans, values]]
}

fn index_bits(n: usize) -> u32 {
    usize::BITS - (n - 1).leading_zeros()
}

/// The widths of the digits from the most significant one, down to nodes of [`RUN`] elements.
fn digit_widths(bits: u32) -> impl Iterator<Item = u32> {
    let mut rest = bits.saturating_sub(RUN.ilog2());
    std::iter::from_fn(move || {
        let width = rest.min(MAX_WIDTH);
        rest -= width;
        (width > 0).then_some(width)
    })
}
