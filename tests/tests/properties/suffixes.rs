//! Queries are rows: the queries at the end of a sequence yield the tail of the pass over all of it, and the gradients
//! of a sequence in pieces add up to those of the whole. Decoding, chunked prefill and recomputed blocks rely on this.

use super::{Results, call, results};
use flash_dma_tests::case;
use flash_dma_tests::prelude::*;
use std::ops::Range;

every_engine!(
    a_suffix_of_queries_is_the_tail_of_the_pass,
    a_suffix_of_queries_has_the_dropout_and_alibi_of_the_pass,
    gradients_of_pieces_add_up_to_those_of_the_whole: add_up(0..1),
);

// Burn takes kernels of its own layouts, which a GPU compiles again: it runs the three above.
raw_engines!(
    // In full attention all queries stand at the last key, and select the same.
    a_suffix_of_queries_is_the_tail_of_full_attention: few_are_tails(Case::full),
    a_suffix_of_queries_is_the_tail_of_longer_full_attention,
    a_suffix_of_queries_is_the_tail_without_scores: few_are_tails(Case::plain),
    a_suffix_of_queries_is_the_tail_of_full_attention_without_scores:
        few_are_tails(|case| case.plain().full()),
    gradients_of_other_pieces_add_up_to_those_of_the_whole: add_up(1..6),
    gradients_of_pieces_add_up_without_scores,
);

/// A sequence of as many tokens, some of them kept by the window; the batch, its heads, their dimension and type.
fn sequence(
    [len, window, batch]: [usize; 3],
    heads: [usize; 2],
    dim: usize,
    element: ElementType,
) -> Case {
    let case = Case::new(len, len).window(window).heads(heads[0], heads[1]);
    let case = case.dim(dim).element(element);
    Case { batch, ..case }
}

/// The rows `range` of each head of `[heads, len, width]`.
pub(super) fn rows(values: &[f64], len: usize, width: usize, range: Range<usize>) -> Vec<f64> {
    let heads = values.chunks(len * width);
    let range = range.start * width..range.end * width;
    heads
        .flat_map(|head| head[range.clone()].to_vec())
        .collect()
}

/// The inverse: `values` as the rows `range` of each head, zeros elsewhere.
pub(super) fn placed(values: &[f64], len: usize, width: usize, range: Range<usize>) -> Vec<f64> {
    let heads = values.chunks(range.len() * width);
    let head = |part: &[f64]| {
        let mut head = vec![0.0; len * width];
        head[range.start * width..range.end * width].copy_from_slice(part);
        head
    };
    heads.flat_map(head).collect()
}

/// The queries `range` over the keys up to `k_len`, aligned bottom-right as they are in the whole.
fn piece(case: &Case, whole: &Inputs, queries: Range<usize>, k_len: usize) -> Inputs {
    let (len, dim) = (case.k_len, case.head_dim);
    let part = Case {
        q_len: queries.len(),
        k_len,
        ..case.clone()
    };
    Inputs {
        problem: part.problem(),
        q: rows(&whole.q, len, dim, queries),
        k: rows(&whole.k, len, dim, 0..k_len),
        v: rows(&whole.v, len, dim, 0..k_len),
        scores: (whole.scores.as_ref()).map(|z| rows(z, len, 1, 0..k_len)),
    }
}

fn of_rows(case: &Case, grads: &Grads, queries: Range<usize>) -> Grads {
    let (len, dim) = (case.q_len, case.head_dim);
    Grads {
        out: rows(&grads.out, len, dim, queries.clone()),
        lse: (grads.lse.as_ref()).map(|lse| rows(lse, len, 1, queries)),
    }
}

fn run<E: Engine>(engine: &E, inputs: &Inputs, grads: &Grads) -> Results {
    results(engine, &call(engine, inputs, grads))
}

/// The last queries with all keys, and their gradients.
fn tail_of(case: &Case, suffix: usize) -> (Inputs, Grads) {
    let (queries, whole) = (case.k_len - suffix..case.k_len, case.inputs());
    let grads = of_rows(case, &case.gradients(&whole), queries.clone());
    (piece(case, &whole, queries, case.k_len), grads)
}

/// The last queries alone, and the whole pass without the others' gradients: the same rows, the same key gradients.
fn is_the_tail<E: Engine>(engine: &E, case: &Case, suffix: usize) {
    if engine.lacks(case.element) {
        return;
    }
    let (len, dim) = (case.k_len, case.head_dim);
    let queries = len - suffix..len;
    let whole = case.inputs();
    let (tail, grads) = tail_of(case, suffix);
    let zeros_before = Grads {
        out: placed(&grads.out, len, dim, queries.clone()),
        lse: (grads.lse.as_ref()).map(|lse| placed(lse, len, 1, queries.clone())),
    };
    let expected = case::expected(&tail, &grads);
    let others = if case.element == F32 { 0 } else { 3 };
    let expected = expected.with_yardsticks((1..=others).map(|n| {
        let seed = case.seed.wrapping_add(n << 32);
        let case = case.clone();
        let (tail, grads) = tail_of(&Case { seed, ..case }, suffix);
        case::expected(&tail, &grads)
    }));
    let whole = run(engine, &whole, &zeros_before);
    let tail = run(engine, &tail, &grads);
    for ((name, whole), (_, tail)) in whole.iter().zip(&tail) {
        let whole = match *name {
            "out" | "dq" => rows(whole, len, dim, queries.clone()),
            "lse" => rows(whole, len, 1, queries.clone()),
            _ => whole.clone(),
        };
        let what = format!("{}, the last {suffix} queries of {case:?}", E::NAME);
        if matches!(*name, "out" | "lse") {
            expected.check_same(name, &whole, tail, |_| true, what);
        } else {
            // The rounding of `out`, which may differ, is in every gradient: each is held to the oracle.
            expected.check_one(name, &whole, format!("{what}, of the whole"));
            expected.check_one(name, tail, what);
        }
    }
}

/// Few queries over many keys, of which the window keeps some: the gradients of most keys are zero, and those of the
/// rest come from few rows.
fn suffixes<E: Engine>() -> Vec<(Case, Vec<usize>)> {
    let mut cases = E::cases(
        [(sequence([50, 18, 2], [2, 1], 16, F32), vec![1, 7, 30])],
        [
            (sequence([300, 110, 1], [4, 2], 64, F32), vec![3, 200]),
            (sequence([333, 100, 2], [3, 1], 64, Bf16), vec![1, 64, 150]),
            (sequence([290, 250, 1], [2, 2], 128, F16), vec![3, 65]),
        ],
        [
            (sequence([1773, 728, 2], [8, 2], 64, F16), vec![3, 64]),
            (
                sequence([1773, 728, 1], [1, 1], 128, Bf16),
                vec![3, 65, 700],
            ),
            (sequence([2500, 100, 1], [4, 2], 64, Bf16), vec![7, 130]),
            (sequence([4096, 1500, 1], [2, 1], 128, F16), vec![16, 300]),
        ],
    );
    if E::SIZE == Size::Large {
        // A GPU compiles kernels for each: the short ones in f32, and the long ones.
        cases.drain(1..4);
    }
    cases
}

/// The number of cases that is enough if a device compiles kernels for each.
fn few<E: Engine>() -> usize {
    if E::SIZE == Size::Large { 3 } else { 4 }
}

fn few_are_tails<E: Engine>(engine: &E, change: impl Fn(Case) -> Case) {
    are_tails(engine, suffixes::<E>().into_iter().take(few::<E>()), change);
}

/// Checks each case, as `change` makes it, and each of its suffixes.
fn are_tails<E: Engine>(
    engine: &E,
    cases: impl IntoIterator<Item = (Case, Vec<usize>)>,
    change: impl Fn(Case) -> Case,
) {
    for (case, suffixes) in cases {
        let case = change(case);
        for suffix in suffixes {
            is_the_tail(engine, &case, suffix);
        }
    }
}

fn a_suffix_of_queries_is_the_tail_of_the_pass<E: Engine>(engine: &E) {
    are_tails(engine, suffixes::<E>(), |case| case);
}

/// The mask, and distances, go by the positions of queries and keys, not by their places in a call.
fn a_suffix_of_queries_has_the_dropout_and_alibi_of_the_pass<E: Engine>(engine: &E) {
    let dropout = Dropout::new(0.3, 17).expect("a probability");
    let cases = suffixes::<E>().into_iter().take(2);
    are_tails(engine, cases, |case| {
        let slopes = AlibiSlopes::standard(case.q_heads);
        case.options(|o| o.with_dropout(dropout).with_alibi(slopes))
    });
}

fn a_suffix_of_queries_is_the_tail_of_longer_full_attention<E: Engine>(engine: &E) {
    let longer = suffixes::<E>().into_iter().skip(few::<E>());
    if longer.len() == 0 {
        return skip::<E>("the longer passes");
    }
    are_tails(engine, longer, Case::full);
}

/// Checks pieces that end at each of `cuts` and at the end, each with the keys up to its own end: their rows follow
/// each other, and their gradients of a key add up.
fn adds_up<E: Engine>(engine: &E, case: &Case, cuts: &[usize]) {
    if engine.lacks(case.element) {
        return;
    }
    let (len, dim, inputs) = (case.k_len, case.head_dim, case.inputs());
    let grads = case.gradients(&inputs);
    let expected = case::expected(&inputs, &grads);
    let whole = run(engine, &inputs, &grads);
    let mut parts = vec![Vec::new(); whole.len()];
    let mut begin = 0;
    for &end in cuts.iter().chain([&len]) {
        let queries = begin..end;
        let part = piece(case, &inputs, queries.clone(), end);
        let part = run(engine, &part, &of_rows(case, &grads, queries.clone()));
        for (parts, (name, part)) in parts.iter_mut().zip(part) {
            parts.push(match name {
                "out" | "dq" => placed(&part, len, dim, queries.clone()),
                "lse" => placed(&part, len, 1, queries.clone()),
                "dscores" => placed(&part, len, 1, 0..end),
                _ => placed(&part, len, dim, 0..end),
            });
        }
        begin = end;
    }
    for ((name, whole), parts) in whole.iter().zip(&parts) {
        let what = format!("{} in pieces cut at {cuts:?}, {case:?}", E::NAME);
        match *name {
            "dk" | "dv" | "dscores" => expected.check_sum(name, whole, parts, what),
            _ => {
                let sum = |at| parts.iter().map(|part| part[at]).sum();
                let rows: Vec<f64> = (0..whole.len()).map(sum).collect();
                expected.check_same(name, whole, &rows, |_| true, what);
            }
        }
    }
}

/// Long pieces and short ones.
fn pieces<E: Engine>() -> Vec<(Case, Vec<usize>)> {
    let long = [1773 - 767, 1773 - 67, 1773 - 3];
    let mut cases = E::cases(
        [(sequence([40, 15, 1], [2, 1], 16, F32), vec![27, 37])],
        [
            (sequence([300, 110, 1], [4, 2], 64, F32), vec![33, 233, 297]),
            (sequence([333, 100, 2], [3, 1], 64, Bf16), vec![180, 332]),
            (sequence([290, 60, 1], [2, 2], 128, F16), vec![64, 128, 285]),
        ],
        [
            (sequence([1773, 728, 1], [4, 2], 64, F16), long.into()),
            (sequence([1773, 728, 2], [1, 1], 128, Bf16), long.into()),
        ],
    );
    if E::SIZE == Size::Large {
        // As of the suffixes.
        cases.drain(1..4);
    }
    cases
}

fn add_up<E: Engine>(engine: &E, range: Range<usize>) {
    for (case, cuts) in pieces::<E>().into_iter().take(range.end).skip(range.start) {
        adds_up(engine, &case, &cuts);
        adds_up(engine, &case.scores(Scores::Recency), &cuts);
    }
}

fn gradients_of_pieces_add_up_without_scores<E: Engine>(engine: &E) {
    for (case, cuts) in pieces::<E>() {
        adds_up(engine, &case.plain(), &cuts);
    }
}
