//! Intervals under which many keys die at one position: documents that end inside tiles, and given ends. No plain
//! selection has more than one death per position, so lists that rely on that lose keys here. Nor do that many keys of
//! a selection begin or cease to be runners-up at one position.

use flash_dma_reference::compose;
use flash_dma_tests::given::GivenCase;
use flash_dma_tests::prelude::*;

every_engine!(
    documents_that_end_inside_tiles: of_documents(false),
    runners_up_of_documents: of_documents(true),
    thousands_of_deaths_at_one_position: of_deaths(false),
    thousands_of_runners_up_at_one_position: of_deaths(true),
    one_query_position_without_causal_masking,
);

mod on_tensor_cores {
    use super::*;

    matrix_engines!(
        documents_in_16_bits: of_documents_in_16_bits(false),
        runners_up_of_documents_in_16_bits: of_documents_in_16_bits(true),
        deaths_in_16_bits: narrow_deaths(false),
        deaths_of_wide_heads_in_16_bits: wide_deaths(false),
        runners_up_in_16_bits: narrow_deaths(true),
        runners_up_of_wide_heads_in_16_bits: wide_deaths(true),
    );
}

fn case(sizes: [usize; 4], element: ElementType, what: String) -> GivenCase {
    GivenCase {
        sizes,
        element,
        causal: true,
        intervals: Vec::new(),
        far: None,
        what,
    }
}

/// A case of documents of these lengths, with recent keys and sinks; a quarter of the window more are runners-up.
fn documents(
    lengths: &[usize],
    window: usize,
    sizes: [usize; 4],
    element: ElementType,
) -> GivenCase {
    let rule = SelectionRule {
        window,
        recent: window / 16,
        sinks: 1,
    };
    let mut rng = Rng::new(window as u64);
    let what = format!("documents of {lengths:?}, {rule:?}, {element}");
    let mut case = case(sizes, element, what);
    let k_len = lengths.iter().sum();
    for _ in 0..sizes[1] {
        let scores = Scores::Recency.head(k_len, &mut rng);
        let of = |rule| compose::intervals_by_heap(&scores, lengths, &rule);
        case.intervals.push(of(rule));
        let wider = of(rule.widened(window / 4));
        let far = case.far.get_or_insert_default();
        far.push(wider.iter().map(|interval| interval.end).collect());
    }
    case
}

/// Checks cases, with their runners-up or without.
fn check<E: Engine>(engine: &E, cases: Vec<GivenCase>, runners_up: bool) {
    for case in cases {
        let far = case.far.filter(|_| runners_up);
        GivenCase { far, ..case }.check(engine);
    }
}

/// The same case with runners-up: each key is one for such a time that all keys that die together end together.
fn with_runners_up(case: GivenCase) -> GivenCase {
    let far = case.intervals.iter().map(|head| {
        let far = |interval: &Interval| (interval.end as usize + 150).min(head.len()) as u32;
        head.iter().map(far).collect()
    });
    let far = Some(far.collect());
    GivenCase { far, ..case }
}

/// A case of `k_len` keys whose intervals end where `end(head, key)` says.
fn given(
    k_len: usize,
    sizes: [usize; 4],
    element: ElementType,
    what: &str,
    end: impl Fn(usize, usize) -> usize,
) -> GivenCase {
    let mut case = case(sizes, element, format!("{what}, {k_len} keys, {element}"));
    let interval = |head, key: usize| Interval {
        first: key as u32,
        end: end(head, key).clamp(key, k_len) as u32,
    };
    for head in 0..sizes[1] {
        let intervals = (0..k_len).map(|key| interval(head, key)).collect();
        case.intervals.push(intervals);
    }
    case
}

/// Cases of documents. The last is for portable kernels on a host: few queries about the end of a document of more keys
/// than the window.
fn of_documents<E: Engine>(engine: &E, runners_up: bool) {
    let small = [
        documents(&[93, 210, 41], 100, [2, 1, 344, 8], F32),
        documents(&[30, 2100, 23], 2048, [1, 1, 40, 8], F32),
    ];
    let medium = documents(&[2311, 37, 605], 2048, [1, 1, 2953, 8], F32);
    let device = documents(&[1211, 37, 1605, 1], 1024, [2, 1, 2854, 32], F32);
    let cases = E::cases_or_device(small, [medium], [device]);
    check(engine, cases, runners_up);
}

/// Ends without any bound: all keys at once, in turns, in waves whose survivors die two positions later.
fn deaths(k_len: usize, sizes: [usize; 4], element: ElementType) -> Vec<GivenCase> {
    let (middle, wave) = (k_len * 2 / 3 + 5, k_len / 5 + 3);
    let all = |_: usize, _: usize| middle;
    let two = |head: usize, key: usize| match (key + head).is_multiple_of(3) {
        true => middle + 2,
        false => middle,
    };
    let waves = |head: usize, key: usize| (key / wave + 1) * wave + 7 * (key % 2) + head;
    let all = given(k_len, sizes, element, "all die at once", all);
    let two = given(
        k_len,
        sizes,
        element,
        "nearly all die at two positions",
        two,
    );
    let waves = given(k_len, sizes, element, "waves of deaths", waves);
    [all, two, waves].map(with_runners_up).into()
}

fn of_deaths<E: Engine>(engine: &E, runners_up: bool) {
    let small = deaths(260, [2, 1, 260, 8], F32).into_iter().take(2);
    let medium = deaths(3100, [1, 1, 3100, 8], F32).into_iter().take(1);
    let fewer_queries = || deaths(3000, [2, 1, 1700, 8], F32).into_iter().skip(1);
    let device = deaths(4400, [2, 1, 4400, 8], F32).into_iter().take(1);
    let medium = medium.chain(fewer_queries());
    let cases = E::cases_or_device(small, medium, device.chain(fewer_queries()));
    check(engine, cases, runners_up);
}

fn one_query_position_without_causal_masking<E: Engine>(engine: &E) {
    let k_len = E::cases([150], [700], []).pop().unwrap_or(150);
    let end = |_: usize, key: usize| if key % 3 == 1 { k_len } else { key + 40 };
    let mut case = given(k_len, [2, 2, 70, 8], F32, "not causal", end);
    case.causal = false;
    case.check(engine);
}

fn of_documents_in_16_bits<E: Engine>(engine: &E, runners_up: bool) {
    let small = documents(&[93, 121], 60, [2, 1, 214, 32], F16);
    let medium = documents(&[611, 37, 700], 500, [4, 1, 1348, 64], Bf16);
    let device = [
        documents(&[1211, 37, 1305], 1024, [1, 1, 2553, 128], Bf16),
        documents(&[1211, 37, 1305], 1024, [2, 1, 2553, 64], F16),
    ];
    let cases = E::cases_or_device([small], [medium], device);
    check(engine, cases, runners_up);
}

fn narrow_deaths<E: Engine>(engine: &E, runners_up: bool) {
    let small = deaths(190, [2, 1, 190, 32], Bf16).into_iter().take(1);
    let medium = deaths(900, [2, 1, 900, 64], F16);
    let device = deaths(3300, [2, 1, 3300, 64], Bf16);
    let cases = E::cases_or_device(small, medium, device);
    check(engine, cases, runners_up);
}

fn wide_deaths<E: Engine>(engine: &E, runners_up: bool) {
    let cases = E::cases([], [], deaths(3000, [2, 1, 1700, 128], F16));
    check(engine, cases, runners_up);
}
