//! Caches as values: cloned, saved, restored.

use crate::case::{self, refused, refused_as, values};
use burn::store::ModuleRecord;
use burn::tensor::{Device, Tensor};
use burn_flash_dma::cache::{
    DynamicMaskCache, DynamicMaskCacheConfig, PagedCache, PagedCacheConfig,
};
use burn_flash_dma::{AttentionOptions, ScoreRole};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

fn random(heads: usize, tokens: usize) -> Tensor<4> {
    case::random([2, heads, tokens, 16], &Device::flex())
}

fn scores(tokens: usize) -> Tensor<3> {
    case::random([2, 2, tokens], &Device::flex())
}

/// A record read back from its file, after a change of the file.
fn reread<R: Serialize + DeserializeOwned>(record: &R, change: impl FnOnce(&mut Value)) -> R {
    let mut saved = serde_json::to_value(record).expect("it is saved");
    change(&mut saved);
    serde_json::from_value(saved).expect("it is read")
}

/// A cache restored from the record of another one.
fn restored(cache: &DynamicMaskCache) -> DynamicMaskCache {
    let record = reread(&cache.to_record_sync(), |_| ());
    DynamicMaskCache::try_from_record(record, &Device::flex()).expect("it fits")
}

fn config() -> DynamicMaskCacheConfig {
    let options = AttentionOptions::new()
        .with_keep_window(7)
        .with_softcap(9.0);
    DynamicMaskCacheConfig::new(2, 2, 16, options)
}

/// A cache with tokens, fewer in sequence 1 than in sequence 0.
fn used() -> DynamicMaskCache {
    let mut cache = config().init(&Device::flex());
    cache.append(random(2, 30), random(2, 30), scores(30));
    cache.reset(1);
    cache.append(random(2, 4), random(2, 4), scores(4));
    cache
}

/// Checks that two caches give the same next step and keep the same keys after it.
fn same(mut left: DynamicMaskCache, mut right: DynamicMaskCache) {
    assert_eq!(left.lengths(), right.lengths());
    assert_eq!(left.bytes(), right.bytes());
    let (q, k, v, z) = (random(4, 2), random(2, 2), random(2, 2), scores(2));
    let out = left.step(q.clone(), k.clone(), v.clone(), z.clone());
    assert_eq!(values(out), values(right.step(q, k, v, z)));
    assert_eq!(left.positions_sync(), right.positions_sync());
}

#[test]
fn a_clone_goes_its_own_way() {
    let cache = used();
    let before = cache.positions_sync();
    let mut clone = cache.clone();
    clone.append(random(2, 20), random(2, 20), scores(20));
    assert_eq!(cache.positions_sync(), before);
    assert_eq!(cache.lengths(), [34, 4]);
    assert_eq!(clone.lengths(), [54, 24]);
}

#[test]
fn serde_restores_slots() {
    let cache = used();
    same(restored(&cache), cache);
}

#[test]
fn a_record_says_what_its_scores_are_for() {
    let mut cache = (config().with_score_role(Some(ScoreRole::Rank))).init(&Device::flex());
    cache.append(random(2, 30), random(2, 30), scores(30));
    assert_eq!(restored(&cache).score_role(), ScoreRole::Rank);
    same(restored(&cache), cache);
}

#[test]
fn a_record_says_which_keys_stay_for_where_they_are() {
    let config = config().with_recent(Some(3)).with_sinks(Some(2));
    let mut cache = config.init(&Device::flex());
    cache.append(random(2, 30), random(2, 30), scores(30));
    assert_eq!(restored(&cache).rule(), cache.rule());
    same(restored(&cache), cache);
}

#[test]
fn a_module_record_restores_slots() {
    let cache = used();
    let path =
        std::env::temp_dir().join(format!("burn-flash-dma-cache-{}.bpk", std::process::id()));
    cache.to_module_record_sync().save(&path).unwrap();
    let record = ModuleRecord::load(&path).unwrap();
    let fresh = config().init(&Device::flex());
    let loaded = fresh.try_load_module_record_sync(record).unwrap();
    same(loaded, cache.clone());

    let other = DynamicMaskCacheConfig::new(3, 2, 16, config().options).init(&Device::flex());
    let record = cache.to_module_record_sync();
    refused(other.try_load_module_record_sync(record), "Record");
    // A record reads its file when it is used.
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn serde_restores_pages() {
    let device = Device::flex();
    for scored in [false, true] {
        let config = PagedCacheConfig::new(2, 2, 16, 100)
            .with_page_len(8)
            .with_grow_by(3)
            .with_scored(scored);
        let mut cache = config.init(&device);
        let some = |tokens| scored.then(|| scores(tokens));
        cache.append(random(2, 30), random(2, 30), some(30));
        cache.reset(0);
        cache.append(random(2, 3), random(2, 3), some(3));
        let record = reread(&cache.to_record_sync(), |_| ());
        let mut restored = PagedCache::try_from_record(record, &device).unwrap();
        assert_eq!(restored.lengths(), [3, 33]);
        // Takes new pages, so a page that was lost or given twice would show.
        let (q, k, v, z) = (random(4, 12), random(2, 12), random(2, 12), some(12));
        let out = cache.step(q.clone(), k.clone(), v.clone(), z.clone());
        assert_eq!(values(out), values(restored.step(q, k, v, z)));
    }
}

#[test]
fn records_that_do_not_fit_are_refused() {
    let device = Device::flex();
    let record = used().to_record_sync();
    let slots = |change: fn(&mut Value)| {
        DynamicMaskCache::try_from_record(reread(&record, change), &device)
    };
    let text = "the saved cache does not fit: k is [2, 2, 7, 16] of F32, not [2, 1, 7, 16] of F32";
    refused_as(slots(|json| json["config"]["kv_heads"] = 1.into()), text);
    let text = "the saved cache does not fit: seen is [2, 2, 7] of I32, not [2] of I32";
    refused_as(slots(|json| json["seen"] = json["position"].clone()), text);

    let mut pages = PagedCacheConfig::new(2, 2, 16, 32)
        .with_page_len(8)
        .init(&device);
    pages.append(random(2, 9), random(2, 9), None);
    let record = pages.to_record_sync();
    let pages =
        |change: fn(&mut Value)| PagedCache::try_from_record(reread(&record, change), &device);
    refused_as(
        pages(|json| json["table"][0][1] = json["table"][1][0].clone()),
        "the saved cache does not fit: a page is missing or has two places",
    );
    let text = "the saved cache does not fit: 2 pages for 17 tokens";
    refused_as(pages(|json| json["lengths"][0] = 17.into()), text);
}
