//! The calls that a cache refuses, after which it is bit for bit unchanged.

use burn::tensor::{DType, Device, Tensor};
use burn_flash_dma::cache::{
    BlockTable, DynamicMaskCache, DynamicMaskCacheConfig, PagedCache, PagedCacheConfig,
};
use flash_dma_tests::prelude::*;

every_burn!(
    tokens_for_slots,
    tokens_for_pages,
    tables_from_outside,
    configurations,
);

fn ones<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::ones(shape, (device, DType::F32))
}

/// k, v and scores of `[2, 2, 3, 16]`.
struct New {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: Tensor<3>,
}

impl New {
    fn tokens(device: &Device) -> Self {
        Self {
            q: ones([2, 4, 3, 16], device),
            k: ones([2, 2, 3, 16], device),
            v: ones([2, 2, 3, 16], device),
            scores: ones([2, 2, 3], device),
        }
    }
}

fn refusal<T>(result: Result<T, AttentionError>) -> String {
    result.map(drop).unwrap_err().to_string()
}

type Change = fn(&mut New, &Device);

const UNFIT: [(Change, &str); 8] = [
    (
        |new, device| new.k = ones([3, 2, 3, 16], device),
        "k must have size 2 on axis 0, but has 3",
    ),
    (
        |new, device| new.v = ones([2, 2, 4, 16], device),
        "v must have size 3 on axis 2, but has 4",
    ),
    (
        |new, device| new.q = ones([2, 4, 2, 16], device),
        "q must have size 3 on axis 2, but has 2",
    ),
    (
        |new, device| new.q = ones([2, 3, 3, 16], device),
        "the 3 query heads are no positive multiple of the 2 key/value heads",
    ),
    (
        |new, device| new.scores = ones([2, 2, 2], device),
        "scores must have size 3 on axis 2, but has 2",
    ),
    (
        |new, _| new.k = new.k.clone().cast(DType::F16),
        "k must be f32, but is f16",
    ),
    (
        |new, _| new.v = new.v.clone().cast(DType::F16),
        "v must be f32, but is f16",
    ),
    (
        |new, _| new.q = new.q.clone().cast(DType::F16),
        "q must be f32, but is f16",
    ),
];

fn unfit(device: &Device) -> impl Iterator<Item = (New, &'static str)> {
    let cases = UNFIT.into_iter().map(|(change, text)| {
        let mut new = New::tokens(device);
        change(&mut new, device);
        (new, text)
    });
    let mut tracked = New::tokens(&device.clone().autodiff());
    tracked.k = tracked.k.require_grad();
    let text = "k is tracked by autodiff, but a cache has no gradients: use it without autodiff";
    cases.chain([(tracked, text)])
}

fn slots_bits(cache: &DynamicMaskCache) -> String {
    let record = serde_json::to_string(&cache.to_record_sync()).unwrap();
    format!("{record} {:?}", cache.lengths())
}

fn tokens_for_slots<B: Backend>(burn: &Burn<B>) {
    let device = burn.device();
    let options = AttentionOptions::new().with_keep_window(4);
    let mut cache = DynamicMaskCacheConfig::new(2, 2, 16, options).init(device);
    let new = New::tokens(device);
    let _ = cache.step(new.q, new.k, new.v, new.scores);
    let before = slots_bits(&cache);
    for (new, text) in unfit(device) {
        // Many tokens take a different path of checks.
        for repeat in [1, 20] {
            let many = |x: Tensor<4>| x.repeat_dim(2, repeat);
            let [q, k, v] = [&new.q, &new.k, &new.v].map(|x| many(x.clone()));
            let scores = new.scores.clone().repeat_dim(2, repeat);
            let error = refusal(cache.try_step(q, k.clone(), v.clone(), scores.clone()));
            if repeat == 1 {
                assert_eq!(error, text);
            }
            assert_eq!(slots_bits(&cache), before, "{text}");
            if !text.contains("quer") && !text.starts_with('q') {
                assert_eq!(refusal(cache.try_append(k, v, scores)), error);
                assert_eq!(slots_bits(&cache), before, "{text}");
            }
        }
    }
    let error = refusal(cache.try_reorder(&[0, 2]));
    assert_eq!(error, "there is no sequence 2: the cache has 2");
    assert_eq!(slots_bits(&cache), before);

    // Near the greatest position: a saved cache stores its position.
    let mut record = serde_json::to_value(cache.to_record_sync()).unwrap();
    let most = [i32::MAX - 2; 2].map(i32::to_le_bytes).concat();
    record["seen"]["bytes"] = serde_json::to_value(most).unwrap();
    let record = serde_json::from_value(record).unwrap();
    let mut cache = DynamicMaskCache::try_from_record(record, device).unwrap();
    let before = slots_bits(&cache);
    let new = New::tokens(device);
    let error = refusal(cache.try_step(new.q, new.k, new.v, new.scores));
    assert_eq!(
        error,
        "the cache has been given 2147483645 tokens: 3 more pass the greatest number of positions, 2147483647"
    );
    assert_eq!(slots_bits(&cache), before);
}

fn pages_bits(cache: &PagedCache) -> String {
    let record = serde_json::to_string(&cache.to_record_sync()).unwrap();
    format!("{record} {}", cache.bytes())
}

fn tokens_for_pages<B: Backend>(burn: &Burn<B>) {
    let device = burn.device();
    let config = PagedCacheConfig::new(2, 2, 16, 8)
        .with_page_len(4)
        .with_pages(3)
        .with_grow_by(0);
    let mut cache = config.init(device);
    let step = |cache: &mut PagedCache, new: New, scores: bool| {
        let scores = scores.then_some(new.scores);
        cache.try_step(new.q, new.k, new.v, scores).map(drop)
    };
    step(&mut cache, New::tokens(device), false).unwrap();
    let before = pages_bits(&cache);
    for (new, text) in unfit(device) {
        if text.starts_with("scores") {
            continue;
        }
        assert_eq!(refusal(step(&mut cache, new, false)), text);
        assert_eq!(pages_bits(&cache), before, "{text}");
    }
    let error = refusal(step(&mut cache, New::tokens(device), true));
    assert_eq!(
        error,
        "scores must be given exactly if the cache has them, as slots do"
    );
    // 3 tokens of each sequence are held. 3 more need a second page for both, and one is free.
    let error = refusal(step(&mut cache, New::tokens(device), false));
    assert_eq!(error, "2 pages are needed, but the pool has 1");
    assert_eq!(pages_bits(&cache), before);
    assert!(cache.try_reorder(&[0, 7]).is_err());
    assert!(cache.try_fork(2).is_err());
    assert!(cache.try_share_prefix(0, 2, 1).is_err());
    assert!(cache.try_copy_pages(&[[0, 2]]).is_err());
    assert_eq!(
        refusal(cache.try_share_prefix(0, 1, 4)),
        "sequence 0 can share its first 0 to 3 tokens, but 4 were asked for"
    );
    assert_eq!(pages_bits(&cache), before);
    // Two sequences have one page: a copy of it and a second page for both.
    let mut shared = cache.clone();
    shared.reorder(&[0, 0]);
    let before = pages_bits(&shared);
    let error = refusal(step(&mut shared, New::tokens(device), false));
    assert_eq!(error, "3 pages are needed, but the pool has 2");
    assert_eq!(pages_bits(&shared), before);

    // The table has room for 8 tokens of a sequence, whatever the pool has.
    let mut cache = config.with_grow_by(4).init(device);
    for _ in 0..2 {
        step(&mut cache, New::tokens(device), false).unwrap();
    }
    let before = pages_bits(&cache);
    let error = refusal(step(&mut cache, New::tokens(device), false));
    assert_eq!(
        error,
        "the page table holds 6 tokens of 8: there is no room for 3 more"
    );
    assert_eq!(pages_bits(&cache), before);
}

/// Pages, lengths, and the reason why they are refused.
type Case = (&'static [&'static [usize]], &'static [usize], &'static str);

fn tables_from_outside<B: Backend>(burn: &Burn<B>) {
    let device = burn.device();
    let config = PagedCacheConfig::new(2, 2, 16, 8)
        .with_page_len(4)
        .with_pages(3);
    let mut cache = config.init(device);
    let new = || New::tokens(device);
    cache.append(new().k, new().v, None);
    let before = pages_bits(&cache);
    let refused = |cache: &mut PagedCache, pages: &[&[usize]], lengths: &[usize]| {
        let table = BlockTable {
            pages: pages.iter().map(|row| row.to_vec()).collect(),
            lengths: lengths.to_vec(),
        };
        let text = refusal(cache.try_set_block_table(&table));
        let reason = text.strip_prefix("the block table does not fit: ");
        reason.expect("a table that does not fit").to_string()
    };
    let cases: [Case; 8] = [
        (
            &[&[0, 1], &[1, 2]],
            &[8, 8],
            "sequences 0 and 1 have page 1, at different places",
        ),
        (&[&[0]], &[3, 3], "it has 1 sequences and 2 lengths"),
        (
            &[&[0], &[3]],
            &[3, 3],
            "sequence 1 has page 3, but there are 3",
        ),
        (&[&[0, 0]], &[8], "sequence 0 has page 0 twice"),
        (
            &[&[0], &[1]],
            &[3, 5],
            "sequence 1 has 1 pages for 5 tokens",
        ),
        (
            &[&[0, 1, 2]],
            &[3],
            "sequence 0 has 3 pages, past the limit of 2",
        ),
        // Full in one of the two, and in none.
        (
            &[&[0, 1], &[2, 1]],
            &[8, 7],
            "sequences 0 and 1 have page 1, which is not full",
        ),
        (
            &[&[0, 1], &[2, 1]],
            &[4, 4],
            "sequences 0 and 1 have page 1, which is not full",
        ),
    ];
    for (pages, lengths, reason) in cases {
        assert_eq!(refused(&mut cache, pages, lengths), reason);
        assert_eq!(pages_bits(&cache), before, "{reason}");
    }
    let windowed = config.clone().with_window(Some(2));
    assert_eq!(
        refused(&mut windowed.init(device), &[&[0], &[1]], &[3, 3]),
        "a cache with a window gives out its pages itself"
    );

    let table = BlockTable {
        pages: vec![vec![2], vec![0, 1]],
        lengths: vec![3, 3],
    };
    cache.set_block_table(&table);
    let before = pages_bits(&cache);
    let texts = [
        cache.try_append(new().k, new().v, None),
        cache.try_reset(0),
        cache.try_reorder(&[1, 0]),
        cache.try_share_prefix(0, 1, 2),
        PagedCache::try_cat(vec![cache.clone()]).map(drop),
        cache.try_copy_pages(&[[0, 3]]),
        cache.try_copy_pages(&[[0, 2], [1, 2]]),
        cache.try_copy_pages(&[[0, 1], [1, 2]]),
    ];
    let changes = "it was given from outside, so its sequences change by another table";
    let reasons = [
        "sequence 0 has 1 pages for 6 tokens",
        changes,
        changes,
        changes,
        changes,
        "page 3 is to be copied, but there are 3",
        "page 2 is written by two copies or read by one",
        "page 1 is written by two copies or read by one",
    ];
    for (result, reason) in texts.into_iter().zip(reasons) {
        let text = format!("the block table does not fit: {reason}");
        assert_eq!(refusal(result), text);
    }
    assert_eq!(pages_bits(&cache), before);
    cache.hold();
    let step = cache.try_step(new().q, new().k, new().v, None);
    assert!(step.is_err(), "no room for what waits");
    assert_eq!(pages_bits(&cache), before);
}

fn configurations<B: Backend>(burn: &Burn<B>) {
    let device = burn.device();
    let options = AttentionOptions::new().with_keep_window(4);
    let slots =
        |dim, options| refusal(DynamicMaskCacheConfig::new(1, 2, dim, options).try_init(device));
    assert_eq!(
        slots(12, options),
        "head dimension 12 is not supported: it must be a multiple of 8 from 8 to 256"
    );
    assert_eq!(
        slots(16, options.with_keep_window(0)),
        "the keep window must be at least 1"
    );
    assert_eq!(
        slots(16, options.with_causal(false)),
        "attention over a cache is causal"
    );
    let kept = DynamicMaskCacheConfig::new(1, 2, 16, options);
    let kept = |recent| kept.clone().with_recent(Some(recent)).with_sinks(Some(1));
    assert_eq!(
        refusal(kept(4).try_init(device)),
        "4 recent keys and 1 sinks pass the window of 4 keys"
    );
    let rule = kept(3).try_init(device).unwrap().rule();
    assert_eq!((rule.window, rule.recent, rule.sinks), (4, 3, 1));
    assert_eq!(
        slots(16, AttentionOptions::new()),
        "the options keep all keys, but the cache keeps a window of them"
    );
    assert!(slots(16, options.with_softcap(-1.0)).starts_with("the softcap must be positive"));
    let pages = |config: PagedCacheConfig| refusal(config.try_init(device));
    assert_eq!(
        pages(PagedCacheConfig::new(1, 2, 16, 64).with_page_len(0)),
        "a page must hold at least one token, and a sequence at least one page"
    );
    assert_eq!(
        pages(PagedCacheConfig::new(1, 2, 16, 64).with_window(Some(0))),
        "the keep window must be at least 1"
    );
    assert_eq!(
        pages(PagedCacheConfig::new(1, 2, 16, 64).with_options(options)),
        "the options keep 4 keys, but the cache keeps all"
    );
}
