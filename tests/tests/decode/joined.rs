//! Joined caches: the steps of the sequences are those that they would have taken separately.

use super::sequences::{Decoder, Sequences, Shape, shape};
use burn_flash_dma::cache::{AttentionCache, DynamicMaskCacheConfig, PagedCacheConfig};
use flash_dma_tests::prelude::*;

every_burn!(
    slots_of_several_caches,
    pages_of_several_caches,
    what_differs_is_refused,
);

const SHAPE: Shape = shape(F32);

const RULE: SelectionRule = SelectionRule {
    window: 8,
    recent: 2,
    sinks: 1,
};

fn slots(batch: usize) -> DynamicMaskCacheConfig {
    let options = AttentionOptions::new().with_keep_window(RULE.window);
    DynamicMaskCacheConfig::new(batch, SHAPE.kv_heads, SHAPE.dim, options)
        .with_recent(Some(RULE.recent))
        .with_sinks(Some(RULE.sinks))
}

fn pages(batch: usize) -> PagedCacheConfig {
    PagedCacheConfig::new(batch, SHAPE.kv_heads, SHAPE.dim, 400)
        .with_page_len(4)
        .with_pages(3)
        .with_grow_by(2)
}

/// Groups of prompts of three lengths, joined; and then steps, beams and resets of all.
fn several<B: Backend>(group: impl Fn(usize, u64) -> Decoder) {
    let mut rng = Rng::new(21);
    let sizes = Burn::<B>::cases([(1, 5), (2, 21)], [(3, 0), (1, 40)], []);
    let mut parts = Vec::new();
    let mut all: Option<Sequences> = None;
    for (seed, (batch, prompt)) in sizes.into_iter().enumerate() {
        let mut decoder = group(batch, seed as u64);
        if prompt > 0 {
            decoder.step(prompt);
        }
        parts.push(decoder.cache);
        match &mut all {
            None => all = Some(decoder.sequences),
            Some(all) => all.join(decoder.sequences),
        }
    }
    let sequences = all.expect("there are parts");
    let mut joined = Decoder::new(sequences, AttentionCache::cat(parts.clone()));
    for count in Burn::<B>::cases([1, 3, 20], [1, 16, 2, 30, 1], []) {
        joined.step(count);
        if rng.below(2) == 0 {
            joined.reset(joined.sequences.batch() - 1);
        }
    }
    joined.reorder(&[1, 1, 0]);
    joined.step(2);
    // The parts are still independent.
    for (part, length) in parts.iter_mut().zip([5, 21]) {
        assert_eq!(part.lengths()[0], length);
    }
}

fn slots_of_several_caches<B: Backend>(burn: &Burn<B>) {
    for element in Burn::<B>::cases([F32], [Bf16], []) {
        if !burn.supports(element) {
            continue;
        }
        for role in Burn::<B>::cases([ScoreRole::Rank], [ScoreRole::RankAndBias], []) {
            several::<B>(|batch, seed| {
                let (kind, options) = (Some(Scores::Padded), slots(batch).options);
                let sequences = Sequences::new(shape(element), batch, kind, options, seed);
                sequences.under(RULE).with_role(role).in_slots(burn)
            });
        }
    }
}

fn pages_of_several_caches<B: Backend>(burn: &Burn<B>) {
    for scored in Burn::<B>::cases([false], [true], []) {
        several::<B>(|batch, seed| {
            let (kind, options) = (scored.then_some(Scores::Padded), AttentionOptions::new());
            let sequences = Sequences::new(SHAPE, batch, kind, options, seed);
            // Pools of different sizes.
            sequences.in_pages(burn, 400, 4, 1 + 4 * batch)
        });
    }
}

fn what_differs_is_refused<B: Backend>(burn: &Burn<B>) {
    let device = burn.device();
    let of_slots = |config: DynamicMaskCacheConfig| AttentionCache::from(config.init(device));
    let of_pages = |config: PagedCacheConfig| AttentionCache::from(config.init(device));
    let refused = |caches: Vec<AttentionCache>| {
        let result: Result<_, AttentionError> = AttentionCache::try_cat(caches);
        result.unwrap_err().to_string()
    };
    let differ = |what| format!("cache 1 cannot be joined to cache 0: they differ in their {what}");
    assert_eq!(refused(Vec::new()), "there are no caches to join");
    let kinds = vec![of_slots(slots(1)), of_pages(pages(1))];
    assert_eq!(refused(kinds), differ("kinds"));

    let other = |change: fn(&mut DynamicMaskCacheConfig)| {
        let mut config = slots(2);
        change(&mut config);
        refused(vec![of_slots(slots(1)), of_slots(config)])
    };
    assert_eq!(other(|c| c.kv_heads = 1), differ("sizes"));
    assert_eq!(other(|c| c.head_dim = 8), differ("sizes"));
    assert_eq!(other(|c| c.recent = Some(3)), differ("sizes"));
    assert_eq!(other(|c| c.options.keep_window = Some(9)), differ("sizes"));
    assert_eq!(other(|c| c.options.softcap = Some(2.0)), differ("options"));
    let ranks = other(|c| c.score_role = Some(ScoreRole::Rank));
    assert_eq!(ranks, differ("roles of scores"));

    let other = |change: fn(&mut PagedCacheConfig)| {
        let mut config = pages(2);
        change(&mut config);
        refused(vec![of_pages(pages(1)), of_pages(config)])
    };
    assert_eq!(other(|c| c.kv_heads = 1), differ("sizes"));
    assert_eq!(other(|c| c.page_len = 8), differ("sizes"));
    assert_eq!(other(|c| c.max_len = 8), differ("sizes"));
    assert_eq!(other(|c| c.scored = true), differ("sizes"));
    assert_eq!(other(|c| c.options.scale = Some(2.0)), differ("options"));
}
