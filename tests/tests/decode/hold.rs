//! Steps whose tokens are held: accepting some of them equals having stepped only those.

use super::sequences::{Decoder, Sequences, Tokens, shape};
use burn::tensor::{Distribution, Tensor};
use burn_flash_dma::cache::{AttentionCache, PagedCacheConfig};
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Selection};
use flash_dma_tests::prelude::*;

every_burn!(
    slots_take_any_count,
    pages_take_any_count,
    guesses_of_any_size,
    clones_have_the_same_tokens_waiting,
    other_calls_are_refused_while_tokens_wait,
    pages_are_given_back,
    a_layer_reads_a_guess,
);

/// The keys that a cache keeps: those of a rule, or all in pages, with scores or without.
#[derive(Clone, Copy, Debug)]
enum Kept {
    Rule(SelectionRule),
    All { scored: bool },
}

fn decoder<B: Backend>(burn: &Burn<B>, kept: Kept, kind: Scores, element: ElementType) -> Decoder {
    let options = AttentionOptions::new().with_softcap(6.0);
    let sequences = |kind, options| Sequences::new(shape(element), 2, kind, options, 3);
    match kept {
        Kept::Rule(rule) => {
            let sequences = sequences(Some(kind), options.with_keep_window(rule.window));
            sequences.under(rule).in_slots(burn)
        }
        Kept::All { scored } => {
            sequences(scored.then_some(kind), options).in_pages(burn, 400, 4, 40)
        }
    }
}

/// A cache whose sequences have different lengths.
fn uneven<B: Backend>(burn: &Burn<B>, kept: Kept, kind: Scores, element: ElementType) -> Decoder {
    let mut decoder = decoder(burn, kept, kind, element);
    decoder.step(13);
    decoder.reset(1);
    decoder.step(3);
    decoder
}

/// A step of `count` tokens against the oracle; `accepted` of them stay.
fn guess(decoder: &mut Decoder, count: usize, accepted: usize) {
    let before = decoder.cache.lengths().to_vec();
    decoder.cache.hold();
    decoder.attend(count);
    assert_eq!(decoder.cache.lengths(), before);
    assert_eq!(decoder.cache.waiting(), count);
    decoder.cache.accept(accepted);
    decoder.sequences.take_back(count - accepted);
    decoder.check_held();
}

/// The output, by its bits, of a step of the first `count` of the tokens.
fn step(cache: &mut AttentionCache, tokens: &Tokens, count: usize) -> Vec<u64> {
    let first = |x: &Tensor<4>| x.clone().narrow(2, 0, count);
    let scores = tokens.scores.as_ref();
    let out = cache.step(
        first(&tokens.q),
        first(&tokens.k),
        first(&tokens.v),
        scores.map(|scores| scores.clone().narrow(2, 0, count)),
    );
    let values = out.into_data();
    values.iter::<f64>().map(f64::to_bits).collect()
}

/// The bits of a cache; for pages only their assignment, unless `rows` are requested, too.
fn bits(cache: &AttentionCache, rows: bool) -> String {
    let mut record = match cache {
        AttentionCache::DynamicMask(cache) => serde_json::to_value(cache.to_record_sync()),
        AttentionCache::Paged(cache) => serde_json::to_value(cache.to_record_sync()),
    }
    .unwrap();
    if !rows {
        for name in ["k", "v", "scores"] {
            record[name].take();
        }
    }
    format!("{record} {:?} {}", cache.lengths(), cache.bytes())
}

/// Tests every number of held tokens and every count that is accepted of them.
fn take_any_count<B: Backend>(burn: &Burn<B>, kept: Kept, kind: Scores, element: ElementType) {
    if !burn.supports(element) {
        return;
    }
    let mut decoder = uneven(burn, kept, kind, element);
    let cache = decoder.cache.clone();
    for waiting in Burn::<B>::cases([3, 18], [1, 16, 21], []) {
        let tokens = decoder.grow(waiting);
        let next = decoder.grow(2);
        let mut stepped = cache.clone();
        let all = step(&mut stepped, &tokens, waiting);
        let every: Vec<usize> = (0..=waiting).collect();
        let counts = Burn::<B>::cases_or_device(vec![0, waiting - 1], every, vec![0, waiting / 2]);
        for count in counts {
            let what = format!("{count} of {waiting}, {kept:?} {kind:?} {element}");
            let mut held = cache.clone();
            held.hold();
            assert!(step(&mut held, &tokens, waiting) == all, "{what}");
            assert_eq!((held.waiting(), held.lengths()), (waiting, cache.lengths()));
            held.accept(count);
            let mut only = cache.clone();
            if count > 0 {
                let _ = step(&mut only, &tokens, count);
            }
            // A chunk is written into its pages to attend to it, and the part after the end stays there.
            let rows = matches!(kept, Kept::Rule(_)) || waiting <= 16;
            assert_eq!(bits(&held, rows), bits(&only, rows), "{what}");
            assert_eq!(held.waiting(), 0);
            let outputs = [&mut held, &mut only].map(|cache| step(cache, &next, 2));
            assert!(outputs[0] == outputs[1], "{what}");
            assert_eq!(bits(&held, rows), bits(&only, rows), "{what}");
        }
    }
}

fn rules(window: usize) -> Vec<SelectionRule> {
    let rule = |(recent, sinks)| SelectionRule {
        window,
        recent,
        sinks,
    };
    [(0, 0), (3, 2), (window, 0)].map(rule).into()
}

fn slots_take_any_count<B: Backend>(burn: &Burn<B>) {
    let kinds = Burn::<B>::cases([Scores::Padded], [Scores::Ties, Scores::Nan], []);
    for kind in kinds {
        for rule in Burn::<B>::cases([rules(7)[1]], rules(7), rules(24)) {
            take_any_count(burn, Kept::Rule(rule), kind, F32);
        }
    }
    for rule in Burn::<B>::cases([], rules(9), rules(24)) {
        take_any_count(burn, Kept::Rule(rule), Scores::Padded, Bf16);
    }
}

fn pages_take_any_count<B: Backend>(burn: &Burn<B>) {
    for scored in Burn::<B>::cases([true], [false], []) {
        for element in Burn::<B>::cases([F32], [Bf16], []) {
            take_any_count(burn, Kept::All { scored }, Scores::Padded, element);
        }
    }
}

/// Guesses and plain steps in turn, against the oracle.
fn guesses_of_any_size<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(11);
    let all = [false, true].map(|scored| Kept::All { scored });
    let rules = |window| rules(window).into_iter().map(Kept::Rule);
    let some = Burn::<B>::cases(rules(6).skip(1).take(1), rules(20).chain(all), []);
    for kept in some {
        for kind in Burn::<B>::cases([Scores::Padded], [Scores::Ties, Scores::Nan], []) {
            let mut decoder = decoder(burn, kept, kind, F32);
            for _ in 0..Burn::<B>::cases([5], [25], []).into_iter().sum::<usize>() {
                let most = [4, 16, 16, 40][rng.below(4)];
                let count = 1 + rng.below(most);
                match rng.below(4) {
                    0 => decoder.step(count),
                    _ => guess(&mut decoder, count, rng.below(count + 1)),
                }
            }
        }
    }
}

fn clones_have_the_same_tokens_waiting<B: Backend>(burn: &Burn<B>) {
    for kept in [Kept::Rule(rules(7)[1]), Kept::All { scored: true }] {
        let decoder = &mut uneven(burn, kept, Scores::Ties, F32);
        let tokens = decoder.grow(5);
        let mut cache = decoder.cache.clone();
        // Held, but without tokens yet.
        cache.hold();
        let mut other = cache.clone();
        let [left, right] = [&mut cache, &mut other].map(|cache| step(cache, &tokens, 5));
        assert!(left == right);
        let mut third = cache.clone();
        assert_eq!([cache.waiting(), other.waiting(), third.waiting()], [5; 3]);
        cache.accept(2);
        other.accept(2);
        third.accept(0);
        assert_eq!(bits(&cache, true), bits(&other, true));
        assert_eq!(bits(&third, true), bits(&decoder.cache, true));
    }
}

/// Checks the texts of the errors, and that the cache is unchanged after them.
fn other_calls_are_refused_while_tokens_wait<B: Backend>(burn: &Burn<B>) {
    let wait = "4 tokens are held: accept those that stay, or none, before this";
    for kept in [Kept::Rule(rules(7)[1]), Kept::All { scored: true }] {
        let decoder = &mut uneven(burn, kept, Scores::Padded, F32);
        let tokens = decoder.grow(4);
        let mut cache = decoder.cache.clone();
        let refused = |result: Result<(), AttentionError>| result.unwrap_err().to_string();
        let not_holding =
            "the cache does not hold: call hold before the step whose tokens are to wait";
        assert_eq!(refused(cache.try_accept(0)), not_holding);
        assert_eq!(refused(cache.try_accept(2)), not_holding);
        cache.hold();
        assert_eq!(
            refused(cache.try_accept(1)),
            "1 tokens cannot be accepted: 0 are held"
        );
        // Held, and not yet stepped: nothing waits, and a second time changes nothing.
        cache.hold();
        let _ = step(&mut cache, &tokens, 4);

        let Tokens {
            q, k, v, scores, ..
        } = tokens.clone();
        let again = cache.try_step(q, k.clone(), v.clone(), scores.clone());
        assert_eq!(refused(again.map(drop)), wait);
        assert_eq!(refused(cache.try_hold()), wait);
        assert_eq!(refused(cache.try_reorder(&[1, 0])), wait);
        assert_eq!(refused(cache.try_reset(0)), wait);
        let joined = AttentionCache::try_cat(vec![decoder.cache.clone(), cache.clone()]);
        assert_eq!(refused(joined.map(drop)), wait);
        let (append, saved) = match &mut cache {
            AttentionCache::DynamicMask(cache) => {
                let module = cache.try_to_module_record_sync();
                assert_eq!(refused(module.map(drop)), wait);
                let append = cache.try_append(k, v, scores.expect("slots have scores"));
                (append, cache.try_to_record_sync().map(drop))
            }
            AttentionCache::Paged(cache) => {
                let append = cache.try_append(k, v, scores);
                (append, cache.try_to_record_sync().map(drop))
            }
        };
        assert_eq!(refused(append), wait);
        assert_eq!(refused(saved), wait);
        assert_eq!(
            refused(cache.try_accept(5)),
            "5 tokens cannot be accepted: 4 are held"
        );
        assert_eq!(cache.waiting(), 4);
        cache.accept(3);
        let _ = step(&mut decoder.cache, &tokens, 3);
        assert_eq!(bits(&cache, true), bits(&decoder.cache, true));
        // Holding has ended.
        assert_eq!(refused(cache.try_accept(0)), not_holding);
    }
}

/// A used-up pool refuses the step, a growing one stays as large, and the pages of dropped tokens are free.
fn pages_are_given_back<B: Backend>(burn: &Burn<B>) {
    let mut decoder = decoder(burn, Kept::All { scored: false }, Scores::Normal, F32);
    for (grow_by, larger) in [(0, false), (2, true)] {
        let config = PagedCacheConfig::new(2, 2, 16, 40)
            .with_page_len(4)
            .with_pages(2)
            .with_grow_by(grow_by)
            .with_options(AttentionOptions::new().with_softcap(6.0));
        let mut cache = AttentionCache::from(config.init(burn.device()));
        let tokens = decoder.grow(6);
        let _ = step(&mut cache, &tokens, 3);
        let (before, bytes) = (bits(&cache, true), cache.bytes());
        cache.hold();
        let Tokens { q, k, v, .. } = tokens.clone();
        let result = cache.try_step(q, k, v, None);
        assert_eq!(result.is_ok(), larger);
        assert_eq!(cache.bytes() > bytes, larger);
        cache.accept(0);
        match larger {
            false => assert_eq!(bits(&cache, true), before),
            true => {
                assert_eq!(cache.lengths(), [3, 3]);
                // As many tokens as before have room without another page.
                let grown = cache.bytes();
                let _ = step(&mut cache, &tokens, 6);
                assert_eq!(cache.bytes(), grown);
            }
        }
    }
}

/// The model's own code is unaware of it.
fn a_layer_reads_a_guess<B: Backend>(burn: &Burn<B>) {
    for window in [Some(6), None] {
        let layer = DynamicMaskAttentionConfig::new(32, 4)
            .with_n_kv_heads(Some(2))
            .with_selection(window.map_or_else(Selection::new, Selection::keep))
            .init(burn.device());
        let normal = Distribution::Normal(0.0, 1.0);
        let x = |len: usize| Tensor::<3>::random([1, len, 32], normal, burn.device());
        let (prompt, guess, next) = (x(9), x(4), x(1));
        let mut held = layer.init_cache(1);
        let mut only = layer.init_cache(1);
        for cache in [&mut held, &mut only] {
            let _ = layer.forward_cached(prompt.clone(), cache);
        }
        held.hold();
        let seen = layer.forward_cached(guess.clone(), &mut held);
        held.accept(2);
        let right = layer.forward_cached(guess.narrow(1, 0, 2), &mut only);
        let far =
            |left: Tensor<3>, right: Tensor<3>| (left - right).abs().max().into_scalar::<f32>();
        assert!(far(seen.narrow(1, 0, 2), right) < 1e-5);
        let [left, right] =
            [&mut held, &mut only].map(|cache| layer.forward_cached(next.clone(), cache));
        assert!(far(left, right) < 1e-5);
    }
}
