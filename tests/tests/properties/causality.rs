//! Causality: the future of a query changes its row only within rounding, whatever its content, and never its selected
//! set. Rounding may differ, because a tile of queries lists the keys of its latest one for all of them.

use super::{Change, call, results};
use flash_dma_tests::case;
use flash_dma_tests::prelude::*;

every_engine!(
    the_future_changes_no_row,
    the_future_changes_no_row_without_scores,
    the_future_changes_no_selection,
);

/// Fewer queries than keys, more, and as many; lengths off every tile, windows that prune.
fn problems<E: Engine>(engine: &E) -> Vec<Case> {
    let case = |q_len, k_len, dim, element| Case::new(q_len, k_len).dim(dim).element(element);
    let cases = E::cases(
        [case(40, 55, 16, F32)],
        [
            case(150, 150, 64, Bf16).heads(4, 2).window(40),
            case(90, 333, 64, F16).heads(3, 1).window(100),
            case(200, 120, 24, F32).heads(2, 2).window(17),
        ],
        [
            case(1100, 1100, 64, F16).heads(4, 1).window(300),
            case(700, 1773, 128, Bf16).heads(2, 1).window(728),
        ],
    );
    engine.supported(cases, |case| case.element)
}

/// Positions from which everything is changed: the edge of a tile if there is one, the middle of one, and the last.
pub(super) fn cuts(q_len: usize, k_len: usize) -> [usize; 3] {
    let first = k_len.saturating_sub(q_len);
    let visible = k_len - first;
    let half = first + visible / 2;
    let tile = Some(half.next_multiple_of(64)).filter(|&tile| tile < k_len);
    [tile.unwrap_or(half), first + visible / 3 + 1, k_len - 1]
}

/// True if the row of the LSE belongs to a query before the position.
fn is_past(inputs: &Inputs, row: usize, cut: usize) -> bool {
    inputs.problem.position(row % inputs.problem.q_len) < cut as i64
}

/// Overwrites keys, values and the scores or biases `added` from a position on, and the queries there and their
/// gradients.
pub(super) fn change(
    p: &Problem,
    [q, k, v, grad_out]: [&mut [f64]; 4],
    added: Option<&mut Vec<f64>>,
    change: Change,
    cut: usize,
    rng: &mut Rng,
) {
    let (dim, element) = (p.head_dim, p.element);
    for rows in [k, v] {
        change.write_from(rows, [p.k_len, dim, cut], element, rng);
    }
    if let Some(added) = added {
        change.write_from(added, [p.k_len, 1, cut], F32, rng);
    }
    let first = (0..p.q_len).find(|&i| p.position(i) >= cut as i64);
    for rows in [q, grad_out] {
        let queries = [p.q_len, dim, first.unwrap_or(p.q_len)];
        change.write_from(rows, queries, element, rng);
    }
}

/// The intervals as queries before a position see them.
fn clipped(intervals: &[Interval], k_len: usize, cut: usize) -> Vec<[u32; 2]> {
    let heads = intervals.chunks(k_len);
    heads
        .flat_map(|head| &head[..cut])
        .map(|interval| [interval.first, interval.end.min(cut as u32)])
        .collect()
}

fn holds<E: Engine>(engine: &E, case: &Case) {
    let inputs = case.inputs();
    let grads = case.gradients(&inputs);
    let clean_call = call(engine, &inputs, &grads);
    let clean = results(engine, &clean_call);
    let expected = case::expected(&inputs, &grads);
    let cuts = cuts(case.q_len, case.k_len);
    let mut rng = Rng::new(case.seed);
    for (n, future) in Change::ALL.into_iter().enumerate() {
        let cut = cuts[n % 3];
        let what = format!("{}, {future:?} from {cut} on, {case:?}", E::NAME);
        let (mut dirty, mut dirty_grads) = (inputs.clone(), grads.clone());
        let Inputs {
            problem,
            q,
            k,
            v,
            scores,
        } = &mut dirty;
        let rows = [q, k, v, &mut dirty_grads.out].map(|x| &mut x[..]);
        change(problem, rows, scores.as_mut(), future, cut, &mut rng);
        let dirty_call = call(engine, &dirty, &dirty_grads);
        let selections = [&clean_call.intervals, &dirty_call.intervals];
        let [before, after] = selections.map(|x| x.as_ref().map(|x| clipped(x, case.k_len, cut)));
        assert!(before == after, "{what}: another selection");
        let dirty = results(engine, &dirty_call);
        for ((name, clean), (_, dirty)) in clean.iter().zip(&dirty).take(3) {
            expected.check_same(name, clean, dirty, |row| is_past(&inputs, row, cut), &what);
        }
        // The change has an effect.
        assert!(clean[0] != dirty[0], "{what}");
    }
}

fn the_future_changes_no_row<E: Engine>(engine: &E) {
    for case in problems(engine) {
        holds(engine, &case);
    }
}

fn the_future_changes_no_row_without_scores<E: Engine>(engine: &E) {
    for case in problems(engine) {
        holds(engine, &case.plain());
    }
}

/// Every kind of scores, in rows on both sides of where a device changes the method.
fn the_future_changes_no_selection<E: Engine>(engine: &E) {
    let mut rng = Rng::new(17);
    for (len, window) in E::cases([(300, 40)], [(5000, 700)], [(100_000, 2048)]) {
        let kinds = Scores::ALL;
        let scores: Vec<f64> = (kinds.iter())
            .flat_map(|kind| kind.head(len, &mut rng))
            .collect();
        let select = |scores: &[f64]| {
            let shape = [kinds.len(), 1, len];
            let scores = Raw::new(scores, &shape, F32, Layout::Contiguous);
            engine.select(&scores, window).expect("good scores")
        };
        let clean = select(&scores);
        let futures = [
            Change::Filled(f64::INFINITY),
            Change::Filled(f64::NEG_INFINITY),
        ];
        for (n, future) in Change::ALL.into_iter().chain(futures).enumerate() {
            let cut = [len / 2, len - 1, window, len / 3 + 1][n % 4];
            let mut changed = scores.clone();
            future.write_from(&mut changed, [len, 1, cut], F32, &mut rng);
            let changed = select(&changed);
            let [before, after] = [&clean, &changed].map(|x| clipped(x, len, cut));
            if let Some(at) = (0..before.len()).find(|&at| before[at] != after[at]) {
                panic!(
                    "{}: {future:?} from {cut} on of {len} changes key {} of the head of {:?} from {:?} to {:?}",
                    E::NAME,
                    at % cut,
                    kinds[at / cut],
                    before[at],
                    after[at]
                );
            }
        }
    }
}
