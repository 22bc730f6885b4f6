//! Calls on caches, in any order.

use super::draw::Draw;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_flash_dma::ScoreRole;
use burn_flash_dma::cache::*;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::convert::identity;

/// Heads of a cache and their features.
#[derive(Clone, Copy)]
struct Heads {
    kv_heads: usize,
    dim: usize,
}

/// Element types of caches: those of the case, and f64, which caches refuse.
fn float(draw: &Draw) -> FloatDType {
    draw.dtype.into()
}

fn heads(draw: &mut Draw) -> Heads {
    let mut heads = Heads {
        kv_heads: draw.pick(&[1, 2]),
        dim: draw.pick(&[8, 16]),
    };
    if draw.one_in(20) {
        match draw.one_in(2) {
            true => heads.kv_heads = draw.end("kv_heads"),
            false => heads.dim = draw.end("head_dim"),
        }
    }
    heads
}

fn batch(draw: &mut Draw) -> usize {
    match draw.one_in(20) {
        true => draw.end("batch"),
        false => draw.batch(),
    }
}

fn slots_of(draw: &mut Draw, heads: Heads) -> Option<DynamicMaskCache> {
    let options = draw.options(heads.kv_heads.min(4), true);
    let batch = batch(draw);
    let mut config = DynamicMaskCacheConfig::new(batch, heads.kv_heads, heads.dim, options)
        .with_dtype(float(draw));
    if !draw.one_in(4) {
        config.options.keep_window = Some(draw.pick(&[1, 2, 4, 9]));
        (config.options.causal, config.options.alibi) = (true, None);
        config.options.dropout = None;
    }
    config.recent = draw.maybe(|draw| draw.pick(&[0, 1, 1, 2]));
    config.sinks = draw.maybe(|draw| draw.pick(&[0, 1, 1, 2]));
    config.score_role = draw.pick(&[None, Some(ScoreRole::Rank)]);
    draw.note(&config);
    let device = draw.device.clone();
    match draw.one_in(2) {
        true => call!(draw, DynamicMaskCache::try_new(&config, &device)),
        false => call!(draw, config.try_init(&device)),
    }
}

fn pages_of(draw: &mut Draw, heads: Heads) -> Option<PagedCache> {
    let (batch, mut max_len) = (batch(draw), draw.pick(&[1, 8, 30, 64]));
    if draw.one_in(20) {
        max_len = draw.choose("max_len", &[0, 1, usize::MAX]);
    }
    let mut config = PagedCacheConfig::new(batch, heads.kv_heads, heads.dim, max_len)
        .with_dtype(float(draw))
        .with_page_len(draw.pick(&[1, 4, 16]))
        .with_pages(draw.pick(&[0, 1, 9]))
        .with_grow_by(draw.pick(&[0, 1, 64]));
    if draw.one_in(20) {
        match draw.below(3) {
            0 => config.page_len = draw.end("page_len"),
            1 => config.pages = draw.choose("pages", &[0, usize::MAX]),
            _ => config.grow_by = draw.choose("grow_by", &[0, usize::MAX]),
        }
    }
    config.window = draw.rarely(4, |draw| draw.count("window"));
    if draw.one_in(6) {
        config.options = draw.options(heads.kv_heads.min(4), false);
    }
    config.scored = draw.one_in(3);
    draw.note(&config);
    let device = draw.device.clone();
    match draw.one_in(2) {
        true => call!(draw, PagedCache::try_new(&config, &device)),
        false => call!(draw, config.try_init(&device)),
    }
}

pub fn slots(draw: &mut Draw) {
    let heads = heads(draw);
    let Some(mut cache) = slots_of(draw, heads) else {
        return;
    };
    for _ in 0..draw.below(6) {
        match draw.one_in(4) {
            true => save_slots(draw, &cache),
            false => change_slots(draw, &mut cache, heads, |draw| slots_of(draw, heads)),
        }
    }
    draw.run("reading a cache", || drop(cache.positions_sync()));
}

fn save_slots(draw: &mut Draw, cache: &DynamicMaskCache) {
    let device = draw.device.clone();
    if draw.one_in(2) {
        let record = call!(draw, cache.try_to_module_record_sync());
        let (kv_heads, dim) = (1, 8);
        let other = slots_of(draw, Heads { kv_heads, dim });
        let into = other.filter(|_| draw.one_in(3));
        let into = into.unwrap_or_else(|| cache.clone());
        let Some(record) = record else { return };
        call!(draw, into.try_load_module_record_sync(record));
    } else if let Some(record) = call!(draw, cache.try_to_record_sync())
        && let Some(record) = reread(draw, record)
    {
        // A damaged record may hold anything that fits.
        call!(draw, DynamicMaskCache::try_from_record(record, &device));
    }
}

/// Reads a record back from its file, damaged half of the time; `None` if it cannot be read.
fn reread<R: Serialize + DeserializeOwned>(draw: &mut Draw, record: R) -> Option<R> {
    let mut saved = serde_json::to_value(record).expect("a record is saved");
    if draw.one_in(2) {
        damage(draw, &mut saved);
    }
    serde_json::from_value(saved).ok()
}

/// Changes one number, or the length of one list, of a saved value.
fn damage(draw: &mut Draw, saved: &mut Value) {
    match saved {
        Value::Object(fields) if !fields.is_empty() => {
            let names: Vec<String> = fields.keys().cloned().collect();
            let name = draw.choose("damaged", &names);
            damage(draw, fields.get_mut(&name).expect("it is there"));
        }
        Value::Array(items) if !items.is_empty() => match draw.one_in(3) {
            true => drop(items.pop()),
            false => {
                let at = draw.below(items.len());
                damage(draw, &mut items[at]);
            }
        },
        Value::Number(_) => {
            // No sizes that a cache could have and would allocate gigabytes for.
            let numbers = [0, 1, -1, 3, 255, i64::MAX];
            *saved = draw.choose("to", &numbers).into();
        }
        Value::Null => *saved = draw.choose("to", &[0, 1, 2]).into(),
        _ => {}
    }
}

pub fn pages(draw: &mut Draw) {
    let heads = heads(draw);
    let Some(mut cache) = pages_of(draw, heads) else {
        return;
    };
    for _ in 0..draw.below(6) {
        match draw.below(6) {
            0 => save_pages(draw, &cache),
            1 => share(draw, &mut cache),
            2 => table(draw, &mut cache),
            _ => change_pages(draw, &mut cache, heads, |draw| pages_of(draw, heads)),
        }
    }
}

fn save_pages(draw: &mut Draw, cache: &PagedCache) {
    let device = draw.device.clone();
    if let Some(record) = call!(draw, cache.try_to_record_sync())
        && let Some(record) = reread(draw, record)
    {
        call!(draw, PagedCache::try_from_record(record, &device));
    }
}

fn share(draw: &mut Draw, cache: &mut PagedCache) {
    let [from, into] = [0; 2].map(|_| sequence(draw, cache.sequences()));
    let tokens = match draw.one_in(3) {
        true => draw.end("tokens"),
        false => cache.lengths().first().copied().unwrap_or(0),
    };
    draw.note((from, into, tokens));
    call!(draw, cache.try_share_prefix(from, into, tokens));
}

fn table(draw: &mut Draw, cache: &mut PagedCache) {
    if draw.one_in(2) {
        let copies: Vec<[usize; 2]> = (0..draw.below(4))
            .map(|_| [0; 2].map(|_| draw.count("page").saturating_sub(1)))
            .collect();
        call!(draw, cache.try_copy_pages(&copies));
        return;
    }
    let mut table = cache.block_table();
    if draw.one_in(2) {
        let rows = draw.batch();
        let row = |draw: &mut Draw| (0..draw.below(3)).map(|_| draw.count("page")).collect();
        table.pages = (0..rows).map(|_| row(draw)).collect();
        let count = if draw.one_in(8) { rows + 1 } else { rows };
        table.lengths = (0..count).map(|_| draw.count("length")).collect();
    }
    draw.note(&table);
    call!(draw, cache.try_set_block_table(&table));
}

pub fn either(draw: &mut Draw) {
    let heads = heads(draw);
    let of = |draw: &mut Draw| match draw.one_in(2) {
        true => slots_of(draw, heads).map(AttentionCache::from),
        false => pages_of(draw, heads).map(AttentionCache::from),
    };
    let Some(mut cache) = of(draw) else { return };
    for _ in 0..draw.below(6) {
        change_either(draw, &mut cache, heads, of);
    }
}

/// Index of a sequence, mostly a valid one.
fn sequence(draw: &mut Draw, sequences: usize) -> usize {
    match draw.one_in(12) {
        true => draw.end("sequence"),
        false => draw.below(sequences.max(1)),
    }
}

/// Defines a function that makes one call on a kind of cache. After the kind: whether new tokens have scores, how to
/// make its own from them, and the name of its append method, if any.
macro_rules! change {
    (
        $change:ident($draw:ident, $cache:ident),
        $kind:ident, $scored:expr, $own:path $(, $append:ident)?
    ) => {
        fn $change(
            $draw: &mut Draw,
            $cache: &mut $kind,
            heads: Heads,
            other: impl Fn(&mut Draw) -> Option<$kind>,
        ) {
            let sequences = $cache.sequences();
            match $draw.below(10) {
                0 | 1 => {
                    let scored = $scored;
                    let (q, k, v, scores) = tokens($draw, sequences, heads, scored);
                    finish!($draw, $cache.try_step(q, k, v, $own(scores)));
                }
                2 => {
                    let scored = $scored;
                    let (q, k, v, scores) = tokens($draw, sequences, heads, scored);
                    finish!($draw, $cache.try_step_with_lse(q, k, v, $own(scores)));
                }
                3 => {
                    $(
                        let scored = $scored;
                        let (_, k, v, scores) = tokens($draw, sequences, heads, scored);
                        call!($draw, $cache.$append(k, v, $own(scores)));
                    )?
                }
                4 => {
                    let count = $draw.below(4);
                    let indices = (0..count).map(|_| sequence($draw, sequences));
                    let indices = indices.collect::<Vec<_>>();
                    $draw.note(&indices);
                    call!($draw, $cache.try_reorder(&indices));
                }
                5 => {
                    let sequence = sequence($draw, sequences);
                    call!($draw, $cache.try_reset(sequence));
                }
                6 => {
                    let mut caches = vec![$cache.clone()];
                    match $draw.below(4) {
                        0 => caches.clear(),
                        1 => caches.extend(other($draw)),
                        _ => caches.push($cache.clone()),
                    }
                    if let Some(joined) = call!($draw, $kind::try_cat(caches)) {
                        *$cache = joined;
                    }
                }
                7 => {
                    call!($draw, $cache.try_hold());
                }
                8 => {
                    let count = $draw.count("accepted").saturating_sub(1);
                    call!($draw, $cache.try_accept(count));
                }
                _ => {
                    let sequence = sequence($draw, sequences);
                    call!($draw, $cache.try_fork(sequence));
                }
            }
        }
    };
}

change!(
    change_slots(draw, cache),
    DynamicMaskCache,
    true,
    Option::unwrap,
    try_append
);
change!(
    change_pages(draw, cache),
    PagedCache,
    cache.config().scored != draw.one_in(20),
    identity,
    try_append
);
change!(
    change_either(draw, cache),
    AttentionCache,
    cache.has_scores() != draw.one_in(20),
    identity
);

/// q, k, v and scores of new tokens, mostly fitting.
fn tokens(
    draw: &mut Draw,
    sequences: usize,
    Heads { kv_heads, dim }: Heads,
    scored: bool,
) -> (Tensor<4>, Tensor<4>, Tensor<4>, Option<Tensor<3>>) {
    let len = draw.pick(&[0, 1, 1, 1, 2, 5, 20]);
    let device = draw.device.clone();
    if !draw.one_in(8) {
        draw.device = Device::flex();
    }
    let group = draw.pick(&[1, 1, 2]);
    let q = draw.tensor("q", [sequences, group * kv_heads, len, dim]);
    let [k, v] = ["k", "v"].map(|name| draw.tensor(name, [sequences, kv_heads, len, dim]));
    let scores = scored.then(|| draw.tensor("scores", [sequences, kv_heads, len]));
    draw.device = device;
    (q, k, v, scores)
}
