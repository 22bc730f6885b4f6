//! The fuzzer with a fixed seed. Its tests on defective engines are next to its source.

use flash_dma_tests::fuzz::{Fuzzed, Limits, Palette, Profile, fuzz};
use flash_dma_tests::prelude::*;

raw_engines!(a_fixed_seed_finds_nothing);

fn a_fixed_seed_finds_nothing<E: Fuzzed>(engine: &E) {
    let mut profile = Profile::of(engine);
    // A device compiles for each variant, and CI has two minutes. On a GPU the fuzzer itself runs, in many processes.
    let (variants, problems) = match E::SIZE {
        Size::Small => (6, 30),
        Size::Medium => (0, 300),
        Size::Large => (2, 12),
    };
    profile.variants = variants;
    let (record, failures) = fuzz(engine, &Palette::new(profile, 20), &Limits::of(problems));
    if let Some(failure) = failures.first() {
        panic!("{} at {}:\n{}", E::NAME, failure.spec, failure.what);
    }
    assert!(record.counted() * 10 > problems * 9, "{record}");
}
