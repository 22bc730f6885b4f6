//! Other methods as selections: one interval per key, and a picture of each.
//!
//! `cargo run -p tutorial -- selectors book/src/img` draws the book's pictures: keys down, positions across.

use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor};
use burn_flash_dma::{AttentionError, Documents, Intervals, Selector};
use std::fmt::Write as _;
use std::path::Path;

// ANCHOR: streaming
/// StreamingLLM's sliding window after a few sinks: a position attends to the first `sinks` keys and to the last
/// `window - sinks`.
pub fn streaming(scores: Tensor<3>, window: usize, sinks: usize) -> Intervals {
    let selector = Selector::top(window).sinks(sinks);
    selector.recent(window - sinks).select(scores)
}
// ANCHOR_END: streaming

// ANCHOR: dms
/// Delayed eviction of Dynamic Memory Sparsification: a key that a learned gate evicts is attended for `delay` more
/// positions, every other key forever.
pub fn delayed_eviction(evict: Tensor<3, Bool>, delay: usize) -> Result<Intervals, AttentionError> {
    let [batch, heads, k_len] = evict.dims();
    let keys = Tensor::<1, Int>::arange(0..k_len as i64, (&evict.device(), DType::I32));
    let ends = (keys.add_scalar(delay as i64)).clamp_max(k_len as i64);
    let ends = ends.reshape([1, 1, k_len]).expand([batch, heads, k_len]);
    Intervals::try_from_ends(ends.mask_fill(evict.bool_not(), k_len as i64))
}
// ANCHOR_END: dms

// ANCHOR: wg
/// A local window, then a global cache that admits only keys whose utility passes a threshold, as in write-gated
/// caches.
pub fn window_then_global(
    utility: Tensor<3>,
    window: usize,
    threshold: f32,
) -> Result<Intervals, AttentionError> {
    let refused = utility.greater_elem(threshold).bool_not();
    delayed_eviction(refused, window)
}
// ANCHOR_END: wg

// ANCHOR: heads
/// A separate budget for every head: most heads need little context, and a few need all of it.
pub fn windows_per_head(scores: Tensor<3>, windows: Vec<usize>, recent: usize) -> Intervals {
    Selector::top(windows).recent(recent).select(scores)
}
// ANCHOR_END: heads

/// The selection of one head: each key a bar over the positions that attend to it; recent positions are light.
pub fn picture(intervals: &Intervals, head: usize, recent: usize) -> String {
    const CELL: usize = 6;
    let [_, _, keys, _] = intervals.tensor().dims();
    let words = intervals.tensor().clone().into_data_as::<i32>();
    let words: Vec<usize> = words.iter::<i32>().map(|n| n as usize).collect();
    let size = keys * CELL;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {size} {size}\" width=\"{size}\" \
         height=\"{size}\">\n<rect width=\"{size}\" height=\"{size}\" fill=\"#f4f4f4\"/>\n"
    );
    for (key, pair) in words[2 * head * keys..][..2 * keys].chunks(2).enumerate() {
        let (first, end) = (pair[0], pair[1]);
        let border = end.min(first + recent);
        for (from, to, fill) in [(first, border, "#8fb8de"), (border, end, "#1f5a96")] {
            if from < to {
                let (x, y, width) = (from * CELL, key * CELL, (to - from) * CELL);
                let height = CELL - 1;
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\"/>"
                );
            }
        }
    }
    svg + "</svg>\n"
}

pub(crate) fn main(
    mut arguments: impl Iterator<Item = String>,
) -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::flex();
    device.seed(7);
    let scores = Tensor::<3>::random([1, 2, 96], Distribution::Normal(0.0, 1.0), &device);
    let documents = Documents::from_lengths([vec![41, 24, 31]]);
    let composed = Selector::top(16).recent(6).sinks(2).documents(documents);
    let evict = scores.clone().lower_elem(1.0);
    let select = |selector: Selector| selector.select(scores.clone());
    let gated = window_then_global(scores.clone(), 10, 0.8)?;
    let per_head = windows_per_head(scores.clone(), vec![8, 24], 4);
    let selections = [
        ("top", 0, select(Selector::top(16))),
        ("recent", 6, select(Selector::top(16).recent(6))),
        ("documents", 6, select(composed)),
        ("streaming", 14, streaming(scores.clone(), 16, 2)),
        ("delayed-eviction", 8, delayed_eviction(evict, 8)?),
        ("window-then-global", 10, gated),
        ("windows-per-head", 4, per_head),
    ];
    let to = arguments.next();
    for (name, recent, intervals) in &selections {
        let stats = intervals.stats();
        println!(
            "{name:18} at most {:2} keys at a position, in the mean {:4.1}; a key lives for {:4.1} positions",
            intervals.max_live(),
            stats.mean_alive,
            stats.mean_lifetime
        );
        if let Some(to) = &to {
            let file = Path::new(to).join(format!("selection-{name}.svg"));
            std::fs::write(file, picture(intervals, 0, *recent))?;
        }
    }
    Ok(())
}
