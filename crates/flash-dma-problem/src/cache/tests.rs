//! The inputs that a cache accepts, and its errors for all others.

use super::*;

const KV: [usize; 4] = [2, 2, 3, 16];
const Q: [usize; 4] = [2, 4, 3, 16];

fn slots() -> CacheShape {
    CacheShape::slots(2, 2, 5, 16, ElementType::Bf16).unwrap()
}

fn pages() -> CacheShape {
    CacheShape::pages(2, 2, [7, 4, 3], 16, ElementType::Bf16).unwrap()
}

fn text<T: core::fmt::Debug>(result: Result<T, AttentionError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn memory_is_what_the_slots_take() {
    assert_eq!(slots().bytes(), 2 * 2 * 5 * (2 * 16 * 2 + 8) + 2 * 4);
    assert_eq!(pages().bytes(), 2 * 7 * 2 * 4 * 16 * 2 + 2 * 4 * 4);
    let scores = pages().with_scores().bytes() - pages().bytes();
    assert_eq!(scores, 7 * 2 * 4 * 4);
    assert_eq!(slots().with_scores(), slots());
    assert_eq!(pages().capacity(), 12);
}

#[test]
fn appends_that_do_not_fit_say_why() {
    let (bf16, scores) = (ElementType::Bf16, Some(&KV[..3]));
    let append = slots().append(&KV, &KV, scores, bf16, 1 << 20).unwrap();
    assert_eq!((append.tokens, append.kv_shape()), (3, KV));
    let f16 = slots().append(&KV, &KV, scores, ElementType::F16, 0);
    assert_eq!(text(f16), "k must be bf16, but is f16");
    let other = [3, 2, 3, 16];
    let other = slots().append(&other, &other, Some(&other[..3]), bf16, 0);
    assert_eq!(text(other), "k must have size 2 on axis 0, but has 3");
    let most = i32::MAX as usize;
    assert!(slots().append(&KV, &KV, scores, bf16, most - 3).is_ok());
    let past = "the cache has been given 2147483645 tokens: 3 more pass the greatest number of positions, 2147483647";
    assert_eq!(text(slots().append(&KV, &KV, scores, bf16, most - 2)), past);
    let without = "scores must be given exactly if the cache has them, as slots do";
    assert_eq!(text(slots().append(&KV, &KV, None, bf16, 0)), without);
    assert!(pages().append(&KV, &KV, None, bf16, 9).is_ok());
    let full = "the page table holds 10 tokens of 12: there is no room for 3 more";
    assert_eq!(text(pages().append(&KV, &KV, None, bf16, 10)), full);
    assert!(pages().append(&KV, &KV, None, bf16, usize::MAX).is_err());
    assert!(pages().append(&KV, &KV, scores, bf16, 0).is_err());
    let scored = pages().with_scores();
    assert!(scored.append(&KV, &KV, scores, bf16, 0).is_ok());
    assert!(scored.append(&KV, &KV, None, bf16, 0).is_err());
}

#[test]
fn a_step_agrees_with_its_cache() {
    let (bf16, scores) = (ElementType::Bf16, Some(&KV[..3]));
    let o = AttentionOptions::new;
    let step = |q: &[usize], options| slots().decode(q, &KV, &KV, scores, bf16, 0, &options);
    let decode = step(&Q, o().with_keep_window(5)).unwrap();
    assert_eq!((decode.group(), decode.q_shape()), (2, Q));
    assert_eq!(decode.scale, 0.25);
    let fewer = "the options keep 4 keys, but the cache keeps 5";
    assert_eq!(text(step(&Q, o().with_keep_window(4))), fewer);
    let all = "the options keep all keys, but the cache keeps 5";
    assert_eq!(text(step(&Q, o())), all);
    let full = o().with_keep_window(5).with_causal(false);
    assert_eq!(text(step(&Q, full)), "attention over a cache is causal");
    let queries = step(&[2, 4, 2, 16], o().with_keep_window(5));
    assert_eq!(text(queries), "q must have size 3 on axis 2, but has 2");
    let many = [2, 2, 17, 16];
    let error = pages().decode(&many, &many, &many, None, bf16, 0, &o());
    assert!(matches!(error, Err(AttentionError::PagesFull { .. })));
    let large = CacheShape::pages(2, 2, [7, 4, 30], 16, bf16).unwrap();
    let step = large.decode(&many, &many, &many, None, bf16, 0, &o());
    let error = step.unwrap().check_tokens().unwrap_err();
    assert!(matches!(error, AttentionError::TooLarge { limit: 16, .. }));
}

#[test]
fn caches_of_no_room_or_past_the_index_type_are_refused() {
    let bf16 = ElementType::Bf16;
    let empty = CacheShape::slots(1, 1, 0, 16, bf16);
    assert_eq!(empty, Err(AttentionError::ZeroWindow));
    let empty = CacheShape::pages(1, 1, [1, 0, 1], 16, bf16);
    assert_eq!(empty, Err(AttentionError::EmptyPages));
    assert_eq!(pages().with_window(0), Err(AttentionError::ZeroWindow));
    assert_eq!(pages().with_window(3).unwrap().page_window(), Some(3));
    assert_eq!(slots().with_window(3).unwrap(), slots());
    let rule = |recent, sinks| SelectionRule {
        window: 4,
        recent,
        sinks,
    };
    let parts = "3 recent keys and 2 sinks pass the window of 4 keys";
    assert_eq!(text(CacheShape::slots(1, 1, rule(3, 2), 16, bf16)), parts);
    let kept = CacheShape::slots(1, 1, rule(3, 1), 16, bf16).unwrap();
    assert_eq!((kept.capacity(), kept.rule()), (4, Some(rule(3, 1))));
    assert_eq!(pages().rule(), None);
    let error = CacheShape::pages(1, 1, [1, 1 << 20, 1 << 20], 16, bf16).unwrap_err();
    assert!(matches!(error, AttentionError::TooLarge { .. }));
    let error = CacheShape::slots(1 << 40, 1 << 20, 1 << 20, 16, bf16).unwrap_err();
    assert!(matches!(error, AttentionError::TooLarge { .. }));
}
