//! Calls on caches, in any order.

use super::draw::Draw;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_flash_dma::cache::*;
use burn_flash_dma::{AttentionError, ScoreRole};
use serde_json::Value;

/// The heads of a cache and their features.
#[derive(Clone, Copy)]
struct Heads {
    kv_heads: usize,
    dim: usize,
}

/// Element types of caches: those of the case, and f64, which they refuse.
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

/// What caches of slots, of pages and of either kind have in common.
trait Cache: Sized + Clone {
    fn step(
        &mut self,
        rows: [Tensor<4>; 3],
        scores: Option<Tensor<3>>,
    ) -> Result<Tensor<4>, AttentionError>;
    fn step_with_lse(
        &mut self,
        rows: [Tensor<4>; 3],
        scores: Option<Tensor<3>>,
    ) -> Result<(Tensor<4>, Tensor<3>), AttentionError>;
    fn append(
        &mut self,
        rows: [Tensor<4>; 2],
        scores: Option<Tensor<3>>,
    ) -> Option<Result<(), AttentionError>>;
    fn sequences(&self) -> usize;
    fn scored(&self) -> bool;
    fn reorder(&mut self, indices: &[usize]) -> Result<(), AttentionError>;
    fn reset(&mut self, sequence: usize) -> Result<(), AttentionError>;
    fn cat(caches: Vec<Self>) -> Result<Self, AttentionError>;
    fn hold(&mut self) -> Result<(), AttentionError>;
    fn accept(&mut self, count: usize) -> Result<(), AttentionError>;
    fn fork(&mut self, sequence: usize) -> Result<usize, AttentionError>;
    /// The names of the calls, in the order of [`CALLS`].
    const NAMES: [&'static str; 9];
}

macro_rules! names {
    ($kind:literal) => {
        [
            concat!($kind, "::try_step"),
            concat!($kind, "::try_step_with_lse"),
            concat!($kind, "::try_append"),
            concat!($kind, "::try_reorder"),
            concat!($kind, "::try_reset"),
            concat!($kind, "::try_cat"),
            concat!($kind, "::try_hold"),
            concat!($kind, "::try_accept"),
            concat!($kind, "::try_fork"),
        ]
    };
}

/// The methods of all three that are the same.
macro_rules! shared {
    () => {
        fn sequences(&self) -> usize {
            self.sequences()
        }

        fn reorder(&mut self, indices: &[usize]) -> Result<(), AttentionError> {
            self.try_reorder(indices)
        }

        fn reset(&mut self, sequence: usize) -> Result<(), AttentionError> {
            self.try_reset(sequence)
        }

        fn cat(caches: Vec<Self>) -> Result<Self, AttentionError> {
            Self::try_cat(caches)
        }

        fn hold(&mut self) -> Result<(), AttentionError> {
            self.try_hold()
        }

        fn accept(&mut self, count: usize) -> Result<(), AttentionError> {
            self.try_accept(count)
        }

        fn fork(&mut self, sequence: usize) -> Result<usize, AttentionError> {
            self.try_fork(sequence)
        }
    };
}

/// The steps of those whose scores may be absent.
macro_rules! steps {
    () => {
        fn step(
            &mut self,
            [q, k, v]: [Tensor<4>; 3],
            scores: Option<Tensor<3>>,
        ) -> Result<Tensor<4>, AttentionError> {
            self.try_step(q, k, v, scores)
        }

        fn step_with_lse(
            &mut self,
            [q, k, v]: [Tensor<4>; 3],
            scores: Option<Tensor<3>>,
        ) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
            self.try_step_with_lse(q, k, v, scores)
        }
    };
}

impl Cache for DynamicMaskCache {
    const NAMES: [&'static str; 9] = names!("DynamicMaskCache");

    fn step(
        &mut self,
        [q, k, v]: [Tensor<4>; 3],
        scores: Option<Tensor<3>>,
    ) -> Result<Tensor<4>, AttentionError> {
        self.try_step(q, k, v, scores.ok_or(AttentionError::CacheScores)?)
    }

    fn step_with_lse(
        &mut self,
        [q, k, v]: [Tensor<4>; 3],
        scores: Option<Tensor<3>>,
    ) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
        self.try_step_with_lse(q, k, v, scores.ok_or(AttentionError::CacheScores)?)
    }

    fn append(
        &mut self,
        [k, v]: [Tensor<4>; 2],
        scores: Option<Tensor<3>>,
    ) -> Option<Result<(), AttentionError>> {
        Some(self.try_append(k, v, scores?))
    }

    fn scored(&self) -> bool {
        true
    }

    shared!();
}

impl Cache for PagedCache {
    const NAMES: [&'static str; 9] = names!("PagedCache");

    steps!();

    fn append(
        &mut self,
        [k, v]: [Tensor<4>; 2],
        scores: Option<Tensor<3>>,
    ) -> Option<Result<(), AttentionError>> {
        Some(self.try_append(k, v, scores))
    }

    fn scored(&self) -> bool {
        self.config().scored
    }

    shared!();
}

impl Cache for AttentionCache {
    const NAMES: [&'static str; 9] = names!("AttentionCache");

    steps!();

    fn append(
        &mut self,
        _: [Tensor<4>; 2],
        _: Option<Tensor<3>>,
    ) -> Option<Result<(), AttentionError>> {
        None
    }

    fn scored(&self) -> bool {
        self.has_scores()
    }

    shared!();
}

fn slots_config(draw: &mut Draw, heads: Heads) -> DynamicMaskCacheConfig {
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
    config
}

fn batch(draw: &mut Draw) -> usize {
    match draw.one_in(20) {
        true => draw.end("batch"),
        false => draw.batch(),
    }
}

fn slots_of(draw: &mut Draw, heads: Heads) -> Option<DynamicMaskCache> {
    let config = slots_config(draw, heads);
    let device = draw.device.clone();
    match draw.one_in(2) {
        true => draw.call("DynamicMaskCache::try_new", || {
            DynamicMaskCache::try_new(&config, &device)
        }),
        false => draw.call("DynamicMaskCacheConfig::try_init", || {
            config.try_init(&device)
        }),
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
    if draw.one_in(4) {
        config.window = Some(draw.count("window"));
    }
    if draw.one_in(6) {
        config.options = draw.options(heads.kv_heads.min(4), false);
    }
    config.scored = draw.one_in(3);
    draw.note(&config);
    let device = draw.device.clone();
    match draw.one_in(2) {
        true => draw.call("PagedCache::try_new", || {
            PagedCache::try_new(&config, &device)
        }),
        false => draw.call("PagedCacheConfig::try_init", || config.try_init(&device)),
    }
}

pub fn slots(draw: &mut Draw) {
    let heads = heads(draw);
    let Some(mut cache) = slots_of(draw, heads) else {
        return;
    };
    for _ in 0..draw.below(6) {
        match draw.one_in(4) {
            true => save_slots(draw, &mut cache),
            false => change(draw, &mut cache, heads, |draw| slots_of(draw, heads)),
        }
    }
    draw.run("reading a cache", || drop(cache.positions_sync()));
}

fn save_slots(draw: &mut Draw, cache: &mut DynamicMaskCache) {
    let device = draw.device.clone();
    if draw.one_in(2) {
        let record = draw.call("DynamicMaskCache::try_to_module_record_sync", || {
            cache.try_to_module_record_sync()
        });
        let other = slots_of(
            draw,
            Heads {
                kv_heads: 1,
                dim: 8,
            },
        );
        let into = match draw.one_in(3) {
            true => other.unwrap_or_else(|| cache.clone()),
            false => cache.clone(),
        };
        if let Some(record) = record {
            draw.call("DynamicMaskCache::try_load_module_record_sync", || {
                into.try_load_module_record_sync(record)
            });
        }
        return;
    }
    let record = draw.call("DynamicMaskCache::try_to_record_sync", || {
        cache.try_to_record_sync()
    });
    let Some(record) = record else { return };
    let mut saved = serde_json::to_value(record).expect("a record is saved");
    if draw.one_in(2) {
        damage(draw, &mut saved);
    }
    let Ok(record) = serde_json::from_value::<DynamicMaskCacheRecord>(saved) else {
        return;
    };
    let restored = draw.call("DynamicMaskCache::try_from_record", || {
        DynamicMaskCache::try_from_record(record, &device)
    });
    // A damaged one may hold anything that fits.
    drop(restored);
}

/// Changes one number, or the length of one list, of what was saved.
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
            // None that a cache could have, and take gigabytes for.
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
            _ => change(draw, &mut cache, heads, |draw| pages_of(draw, heads)),
        }
    }
}

fn save_pages(draw: &mut Draw, cache: &PagedCache) {
    let record = draw.call("PagedCache::try_to_record_sync", || {
        cache.try_to_record_sync()
    });
    let Some(record) = record else { return };
    let mut saved = serde_json::to_value(record).expect("a record is saved");
    if draw.one_in(2) {
        damage(draw, &mut saved);
    }
    let Ok(record) = serde_json::from_value::<PagedCacheRecord>(saved) else {
        return;
    };
    let device = draw.device.clone();
    draw.call("PagedCache::try_from_record", || {
        PagedCache::try_from_record(record, &device)
    });
}

fn share(draw: &mut Draw, cache: &mut PagedCache) {
    let [from, into] = [0; 2].map(|_| sequence(draw, cache.sequences()));
    let tokens = match draw.one_in(3) {
        true => draw.end("tokens"),
        false => cache.lengths().first().copied().unwrap_or(0),
    };
    draw.note((from, into, tokens));
    draw.call("PagedCache::try_share_prefix", || {
        cache.try_share_prefix(from, into, tokens)
    });
}

fn table(draw: &mut Draw, cache: &mut PagedCache) {
    if draw.one_in(2) {
        let copies: Vec<[usize; 2]> = (0..draw.below(4))
            .map(|_| [0; 2].map(|_| draw.count("page").saturating_sub(1)))
            .collect();
        draw.call("PagedCache::try_copy_pages", || {
            cache.try_copy_pages(&copies)
        });
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
    draw.call("PagedCache::try_set_block_table", || {
        cache.try_set_block_table(&table)
    });
}

pub fn either(draw: &mut Draw) {
    let heads = heads(draw);
    let of = |draw: &mut Draw| match draw.one_in(2) {
        true => slots_of(draw, heads).map(AttentionCache::from),
        false => pages_of(draw, heads).map(AttentionCache::from),
    };
    let Some(mut cache) = of(draw) else { return };
    for _ in 0..draw.below(6) {
        change(draw, &mut cache, heads, of);
    }
}

/// The number of a sequence, mostly one that there is.
fn sequence(draw: &mut Draw, sequences: usize) -> usize {
    match draw.one_in(12) {
        true => draw.end("sequence"),
        false => draw.below(sequences.max(1)),
    }
}

/// One call on a cache.
fn change<C: Cache>(
    draw: &mut Draw,
    cache: &mut C,
    heads: Heads,
    other: impl Fn(&mut Draw) -> Option<C>,
) {
    let names = C::NAMES;
    match draw.below(10) {
        0 | 1 => {
            let (rows, scores) = tokens(draw, cache, heads);
            let out = draw.call(names[0], || cache.step(rows, scores));
            draw.finish(out);
        }
        2 => {
            let (rows, scores) = tokens(draw, cache, heads);
            let out = draw.call(names[1], || cache.step_with_lse(rows, scores));
            draw.finish(out);
        }
        3 => {
            let ([_, k, v], scores) = tokens(draw, cache, heads);
            let (kv, mut changed) = ([k, v], cache.clone());
            if let Some(done) = draw.run(names[2], || changed.append(kv, scores)).flatten() {
                draw.note(done.map_err(|error| error.to_string()));
                *cache = changed;
            }
        }
        4 => {
            let count = draw.below(4);
            let indices: Vec<usize> = (0..count)
                .map(|_| sequence(draw, cache.sequences()))
                .collect();
            draw.note(&indices);
            draw.call(names[3], || cache.reorder(&indices));
        }
        5 => {
            let sequence = sequence(draw, cache.sequences());
            draw.call(names[4], || cache.reset(sequence));
        }
        6 => {
            let mut caches = vec![cache.clone()];
            match draw.below(4) {
                0 => caches.clear(),
                1 => caches.extend(other(draw)),
                _ => caches.push(cache.clone()),
            }
            if let Some(joined) = draw.call(names[5], || C::cat(caches)) {
                *cache = joined;
            }
        }
        7 => {
            draw.call(names[6], || cache.hold());
        }
        8 => {
            let count = draw.count("accepted").saturating_sub(1);
            draw.call(names[7], || cache.accept(count));
        }
        _ => {
            let sequence = sequence(draw, cache.sequences());
            draw.call(names[8], || cache.fork(sequence));
        }
    }
}

/// New tokens, which mostly fit.
fn tokens<C: Cache>(
    draw: &mut Draw,
    cache: &C,
    heads: Heads,
) -> ([Tensor<4>; 3], Option<Tensor<3>>) {
    let Heads { kv_heads, dim } = heads;
    let (batch, len) = (cache.sequences(), draw.pick(&[0, 1, 1, 1, 2, 5, 20]));
    let autodiff = draw.one_in(8);
    let device = draw.device.clone();
    if !autodiff {
        draw.device = Device::flex();
    }
    let group = draw.pick(&[1, 1, 2]);
    let q = draw.tensor("q", [batch, group * kv_heads, len, dim]);
    let [k, v] = ["k", "v"].map(|name| draw.tensor(name, [batch, kv_heads, len, dim]));
    let scored = cache.scored() != draw.one_in(20);
    let scores = scored.then(|| draw.tensor("scores", [batch, kv_heads, len]));
    draw.device = device;
    ([q, k, v], scores)
}
