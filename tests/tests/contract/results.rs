//! Output, LSE and all gradients over the shapes, options, types and layouts.

use flash_dma_tests::prelude::*;

every_engine!(
    lengths,
    more_queries_than_keys,
    fewer_queries_than_keys,
    head_dims,
    gqa,
    element_types,
    transposed: in_layout(Layout::Transposed),
    padded: in_layout(Layout::Padded),
    windows,
    kinds_of_scores,
    plain_attention,
    softcap_and_scale,
    great_logits,
    great_capped_logits,
    full_attention,
);

on_burn_cpu!(element_types, transposed: in_layout(Layout::Transposed), plain_attention);

/// Lengths off every tile.
fn lengths<E: Engine>(engine: &E) {
    for len in E::cases([1, 17, 113, 239, 257], [1023], [1024, 4099]) {
        Case::new(len, len).check(engine);
    }
}

/// The first queries see nothing.
fn more_queries_than_keys<E: Engine>(engine: &E) {
    for (q_len, k_len) in E::cases([(67, 33)], [(257, 113), (239, 1)], [(2100, 1023)]) {
        Case::new(q_len, k_len).check(engine);
    }
}

/// As in decoding: the first query sees many keys.
fn fewer_queries_than_keys<E: Engine>(engine: &E) {
    for (q_len, k_len) in E::cases(
        [(1, 129), (19, 70)],
        [(113, 257), (7, 1023)],
        [(1, 8193), (129, 4099)],
    ) {
        Case::new(q_len, k_len).check(engine);
    }
}

fn head_dims<E: Engine>(engine: &E) {
    // A GPU compiles kernels for each.
    let few = |n: usize| E::SIZE < Size::Large || n.is_multiple_of(3);
    let rest = [16, 24, 32, 48, 72, 80, 96, 112, 136, 160, 192, 248];
    let rest = rest.into_iter().enumerate().filter(|&(n, _)| few(n));
    let rest = rest.map(|(_, dim)| dim);
    for dim in E::cases([8, 40, 64, 128, 256], rest, []) {
        Case::new(33, 41).dim(dim).check(engine);
    }
    for dim in E::cases([], [64, 128], [96, 192, 256]) {
        Case::new(300, 300).dim(dim).heads(4, 2).check(engine);
    }
}

/// Groups of 1, 2, 3, 4 and 8 query heads, one kv head and several.
fn gqa<E: Engine>(engine: &E) {
    let small = [(1, 1), (4, 2), (3, 1), (8, 1)];
    let medium = [(2, 2), (4, 1), (8, 2), (6, 3)];
    for (q_heads, kv_heads) in E::cases(small, medium, [(32, 8), (16, 16)]) {
        Case::new(37, 45).heads(q_heads, kv_heads).check(engine);
    }
}

fn element_types<E: Engine>(engine: &E) {
    for element in TYPES {
        let shapes = E::cases(
            [(29, 37, 16)],
            [(113, 113, 64), (257, 301, 128)],
            [(1023, 1023, 128)],
        );
        for (q_len, k_len, dim) in shapes {
            let case = Case::new(q_len, k_len).dim(dim).heads(4, 2);
            case.element(element).check(engine);
        }
    }
}

fn in_layout<E: Engine>(engine: &E, layout: Layout) {
    for element in TYPES {
        let case = |len, k_len| Case::new(len, k_len).heads(4, 2).element(element);
        case(21, 35).layout(layout).check(engine);
        for len in E::cases([], [130], [1023]) {
            case(len, len).dim(64).layout(layout).check(engine);
        }
    }
}

/// Windows of one key to more keys than there are.
fn windows<E: Engine>(engine: &E) {
    for window in E::cases([1, 49, 50], [2, 3, 16, 48, usize::MAX], []) {
        Case::new(49, 49).window(window).check(engine);
    }
    for window in E::cases([], [1, 64, 500], [1024, 2048]) {
        Case::new(600, 600).window(window).check(engine);
    }
    for window in E::cases([], [], [1, 512]) {
        let case = Case::new(4096, 4096).dim(64).window(window);
        case.element(F16).check(engine);
    }
}

/// All kinds of the oracle; the blocks leave whole tiles inactive between active ones.
fn kinds_of_scores<E: Engine>(engine: &E) {
    for kind in Scores::ALL {
        let short = matches!(kind, Scores::AllEqual | Scores::AllPadded);
        let small = if short { (19, 23) } else { (45, 70) };
        for (q_len, k_len) in E::cases([small], [(70, 45), (333, 333)], [(1023, 1023)]) {
            Case::new(q_len, k_len).scores(kind).check(engine);
        }
    }
}

/// No scores: every visible key.
fn plain_attention<E: Engine>(engine: &E) {
    for (q_len, k_len) in E::cases([(35, 35)], [(113, 257), (257, 113)], [(1023, 1023)]) {
        let case = Case::new(q_len, k_len).plain();
        case.check(engine);
        case.full().heads(4, 2).check(engine);
    }
}

fn softcap_and_scale<E: Engine>(engine: &E) {
    for (q_len, k_len) in E::cases([(31, 39)], [(113, 130)], [(700, 1023)]) {
        let case = || Case::new(q_len, k_len);
        case().options(|o| o.with_softcap(1.5)).check(engine);
        let both = case().options(|o| o.with_scale(0.7).with_softcap(20.0));
        both.clone().check(engine);
        for element in E::cases([], [F16, Bf16], []) {
            both.clone().dim(64).element(element).check(engine);
        }
        // With 0 every logit is only its score, and no gradient reaches q and k.
        for scale in [0.0, -0.25] {
            case().options(|o| o.with_scale(scale)).check(engine);
        }
    }
}

/// Logits in the thousands: their exponential is far beyond every type.
fn great_logits<E: Engine>(engine: &E) {
    great::<E>().for_each(|case| case.check(engine));
}

fn great_capped_logits<E: Engine>(engine: &E) {
    let capped = great::<E>().map(|case| case.options(|o| o.with_softcap(30.0)));
    capped.for_each(|case| case.check(engine));
}

fn great<E: Engine>() -> impl Iterator<Item = Case> {
    let shapes = E::cases([(40, 16)], [(113, 64)], [(1023, 128)]);
    // A GPU compiles kernels for each, so it runs only the widest.
    let first = if E::SIZE == Size::Large { 2 } else { 0 };
    shapes.into_iter().skip(first).flat_map(|(len, dim)| {
        let case = Case::new(len, len).dim(dim).deviation(30.0);
        TYPES.map(|element| Case {
            batch: 1,
            ..case.clone().element(element)
        })
    })
}

/// Every query sees all keys, so selects the same.
fn full_attention<E: Engine>(engine: &E) {
    for (q_len, k_len) in E::cases([(41, 33)], [(113, 239), (300, 20)], [(1023, 2047)]) {
        for kind in E::cases(
            [Scores::Normal],
            [Scores::Padded, Scores::Ties, Scores::Nan],
            [],
        ) {
            Case::new(q_len, k_len).full().scores(kind).check(engine);
        }
    }
}
