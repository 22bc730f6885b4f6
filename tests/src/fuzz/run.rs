//! One problem on an engine, every output of it compared with the oracle.

use super::decode::{Decoder, prefix};
use super::inputs::{Drawn, DrawnMasked};
use super::selection::Selected;
use super::spec::{By, Decoding, Selecting, Spec, What};
use crate::engines::{Pass, take_notes};
use crate::expected::Expected;
use crate::masked::MaskedEngine;
use crate::{Competing, Engine, Raw, Refused};
use flash_dma_problem::{Interval, Problem, SelectionRule};
use flash_dma_reference::masked::MaskedInputs;
use flash_dma_reference::{Inputs, select};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Keys of a tile, and the tiles of a long problem.
const LONG: [usize; 3] = [1024, 64, 4];

/// An engine that the fuzzer runs.
pub trait Fuzzed: MaskedEngine + Decoder {}

impl<E: MaskedEngine + Decoder> Fuzzed for E {}

/// The outcome of a problem.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Every output is right.
    Passed(Passed),
    /// The engine or the element type does not support it; the reason.
    Skipped(&'static str),
    /// An output is wrong, or the engine refused or panicked.
    Failed(String),
}

/// A problem all of whose outputs are right.
#[derive(Clone, Debug)]
pub struct Passed {
    /// The passes that ran, with their implementations if the engine has several.
    pub passes: Vec<(Pass, &'static str)>,
    /// True if there are 1024 keys or more and those attended to fill four tiles of 64 or more.
    pub is_long: bool,
    /// True if the naive implementation's error had to be measured at [`YARDSTICKS`](super::YARDSTICKS) further seeds.
    pub looked_twice: bool,
}

/// The facts about a problem that passed.
#[derive(Default)]
struct Seen {
    tiles: usize,
    looked_twice: bool,
}

/// `None` is a problem whose results exceed its element type.
type Checked = Result<Option<Seen>, String>;

/// Computes a problem and compares everything.
pub fn run<E: Fuzzed>(engine: &E, spec: &Spec) -> Outcome {
    if !engine.supports(spec.element) {
        return Outcome::Skipped("the device does not have the element type");
    }
    if matches!(spec.what, What::Decoded(_)) && !engine.decodes() {
        return Outcome::Skipped("the engine does not decode");
    }
    if !E::COMPETES && spec.selecting().is_some_and(|by| by.competes) {
        return Outcome::Skipped("the engine has no ranks that compete");
    }
    if !E::SINKS && spec.sink {
        return Outcome::Skipped("the engine has no logits without keys");
    }
    drop(take_notes());
    let checked = catch_unwind(AssertUnwindSafe(|| match &spec.what {
        What::Plain | What::Scored { .. } => attention(engine, spec),
        What::Masked { .. } => masked(engine, spec),
        What::Decoded(decoding) => decoded(engine, spec, decoding),
    }));
    let notes = take_notes();
    match checked {
        Err(panic) => Outcome::Failed(format!("panicked: {}", message(&*panic))),
        Ok(Err(failure)) => Outcome::Failed(failure),
        Ok(Ok(None)) => Outcome::Skipped("results past the greatest number of the element type"),
        Ok(Ok(Some(seen))) => {
            let [keys, _, tiles] = LONG;
            Outcome::Passed(Passed {
                passes: served(spec, &notes),
                is_long: spec.k_len >= keys && seen.tiles >= tiles,
                looked_twice: seen.looked_twice,
            })
        }
    }
}

/// The passes of a problem.
pub fn passes(what: &What) -> &'static [Pass] {
    match what {
        What::Plain | What::Scored { .. } => &[Pass::Forward, Pass::Backward],
        What::Masked { .. } => &[Pass::MaskedForward, Pass::MaskedBackward],
        What::Decoded(_) => &[Pass::Decode],
    }
}

fn served(spec: &Spec, notes: &[(Pass, &'static str)]) -> Vec<(Pass, &'static str)> {
    let of = |&pass: &Pass| {
        let noted = notes.iter().copied().filter(|note| note.0 == pass);
        let noted: Vec<_> = noted.collect();
        match noted.is_empty() {
            true => vec![(pass, "")],
            false => noted,
        }
    };
    passes(&spec.what).iter().flat_map(of).collect()
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a message".into())
}

fn refused(refused: Refused) -> String {
    format!("refused: {}", refused.error)
}

fn tiles(keys: usize) -> usize {
    keys.div_ceil(LONG[1])
}

fn attention<E: Engine>(engine: &E, spec: &Spec) -> Checked {
    let drawn = Drawn::new(spec);
    let p = drawn.inputs.problem;
    let mut call = drawn.call(spec);
    let mut live = (p.position(p.q_len.saturating_sub(1)) + 1).clamp(0, p.k_len as i64) as usize;
    if let Some(raw) = &drawn.rank(spec) {
        if let (Some(selecting), Some(selected)) = (spec.selecting(), &drawn.selected) {
            check_composed(engine, spec, selecting, raw, selected)?;
        } else {
            let intervals = engine.select(raw, p.window).map_err(refused)?;
            check_selection(&p, drawn.ranks().expect("scores"), p.window, &intervals)?;
            call.intervals = Some(intervals);
        }
        live = most_live(&p, call.intervals.as_ref().expect("a selection"));
    }
    let competing = spec.selecting().and_then(|by| competing(spec, by));
    let passes = match &competing {
        None => engine.backward(&call),
        Some(rule) => engine.compete(&call, rule).expect("ranks compete"),
    };
    let (outputs, grads) = passes.map_err(refused)?;
    let apart = grads.rank.is_some();
    let expected = drawn.expected(apart);
    if expected.exceeds_its_type() {
        return Ok(None);
    }
    // In one tensor with the rank, constant scores leave its gradient.
    if grads.scores.is_some() != (p.scores_learn || p.has_scores && !apart) {
        return Err("dscores is given exactly if there are scores that learn".into());
    }
    let others = || (Drawn::others(spec).map(|other| other.expected(apart))).collect();
    let looked_twice = expected.compare(others, &outputs, &grads.given())?;
    Ok(Some(Seen {
        tiles: tiles(live),
        looked_twice,
    }))
}

fn competing(spec: &Spec, selecting: &Selecting) -> Option<Competing> {
    let By::Rank(parts) = &selecting.by else {
        return None;
    };
    selecting.competes.then(|| Competing {
        rules: spec.rules(parts),
        documents: parts.documents.map(|_| spec.documents(parts)),
        runners_up: selecting.runners_up.unwrap_or(0),
        left_out: selecting.left_out,
    })
}

/// Checks that the intervals are exactly those of the definition.
fn check_selection(
    p: &Problem,
    scores: &[f64],
    window: usize,
    intervals: &[Interval],
) -> Result<(), String> {
    // The definition takes time that grows with the square of the length.
    let exact = |head: &[f64]| match p.k_len {
        0..=256 => select::intervals(head, window),
        _ => select::intervals_by_heap(head, window),
    };
    let exact: Vec<Interval> = scores.chunks(p.k_len.max(1)).flat_map(exact).collect();
    same_intervals(p.k_len, intervals, &exact)
}

fn same_intervals(k_len: usize, actual: &[Interval], exact: &[Interval]) -> Result<(), String> {
    if actual.len() != exact.len() {
        return Err(format!("{} intervals of {}", actual.len(), exact.len()));
    }
    match actual.iter().zip(exact).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => Err(format!(
            "selection: key {} of head {} has {:?} instead of {:?}",
            at % k_len,
            at / k_len,
            actual[at],
            exact[at]
        )),
    }
}

/// Checks that an engine composes, and selects by a window alone, exactly the intervals of the definition.
fn check_composed<E: Engine>(
    engine: &E,
    spec: &Spec,
    selecting: &Selecting,
    rank: &Raw,
    selected: &Selected,
) -> Result<(), String> {
    let By::Rank(parts) = &selecting.by else {
        return Ok(());
    };
    let documents = parts.documents.map(|_| spec.documents(parts));
    for more in [Some(0), selecting.runners_up].into_iter().flatten() {
        let rules: Vec<SelectionRule> = spec.rules(parts).iter().map(|r| r.widened(more)).collect();
        let composed = engine.compose(rank, &rules, documents.as_deref());
        let [rule, others @ ..] = &rules[..] else {
            continue;
        };
        let alone = rule.sinks == 0 && documents.is_none() && others.iter().all(|r| r == rule);
        let composed = composed.or_else(|| alone.then(|| engine.select(rank, rule.kept())));
        let Some(composed) = composed else {
            continue;
        };
        let composed = composed.map_err(refused)?;
        let exact = match (more, &selected.far) {
            (0, _) | (_, None) => selected.intervals.clone(),
            (_, Some(far)) => (selected.intervals.iter().zip(far))
                .map(|(interval, &end)| Interval { end, ..*interval })
                .collect(),
        };
        same_intervals(spec.k_len, &composed, &exact)?;
    }
    Ok(())
}

/// The most keys of a head that some query attends to.
fn most_live(p: &Problem, intervals: &[Interval]) -> usize {
    if p.q_len * p.k_len == 0 {
        return 0;
    }
    let (from, to) = (p.position(0), p.position(p.q_len - 1));
    let is_live =
        |i: &&Interval| i64::from(i.first) <= to && i64::from(i.end) > from && i.first < i.end;
    let heads = intervals.chunks_exact(p.k_len);
    let live = heads.map(|head| head.iter().filter(is_live).count());
    live.max().unwrap_or(0)
}

fn masked<E: MaskedEngine>(engine: &E, spec: &Spec) -> Checked {
    let drawn = DrawnMasked::new(spec);
    let expected = drawn.expected();
    if expected.exceeds_its_type() {
        return Ok(None);
    }
    let (outputs, grads) = engine.masked(&drawn.call(spec)).map_err(refused)?;
    if grads.bias.is_some() != drawn.inputs.bias.is_some() {
        return Err("dbias is given exactly if there is a bias".into());
    }
    let looked_twice = expected.compare(|| drawn.others(spec), &outputs, &grads.given())?;
    Ok(Some(Seen {
        tiles: visible_tiles(&drawn.inputs),
        looked_twice,
    }))
}

/// Blocks of 64 keys in which some query sees one.
fn visible_tiles(inputs: &MaskedInputs) -> usize {
    let p = &inputs.problem;
    let seen = (p.position(p.q_len.saturating_sub(1)) + 1).clamp(0, p.k_len as i64) as usize;
    let Some(mask) = &inputs.visible else {
        return tiles(seen);
    };
    let keys = mask.shape[3];
    if keys <= 1 {
        let shows = mask.values.contains(&true);
        return if shows { tiles(seen) } else { 0 };
    }
    let block = |n: usize| n * LONG[1]..((n + 1) * LONG[1]).min(seen);
    let rows = || mask.values.chunks_exact(keys);
    let is_seen = |&n: &usize| rows().any(|row| row[block(n)].contains(&true));
    (0..tiles(seen)).filter(is_seen).count()
}

fn decoded<E: Decoder>(engine: &E, spec: &Spec, decoding: &Decoding) -> Checked {
    let all = Drawn::new(spec).inputs;
    let steps = engine.decode(spec, decoding, &all)?;
    let tokens = steps.iter().map(|step| step.tokens.clone());
    if !tokens.eq(super::decode::steps(decoding)) {
        return Err("the steps are those of the pieces".into());
    }
    let mut seen = Seen::default();
    let expect = |inputs: &Inputs| {
        if spec.large.is_some() {
            return super::large::step(decoding, inputs);
        }
        let (exact, naive) = match decoding.last() {
            Some(keys) => (inputs.forward_last(keys), inputs.naive_forward_last(keys)),
            None => (
                inputs.forward_for(decoding.role),
                inputs.naive_forward_for(decoding.role),
            ),
        };
        Expected::new(&inputs.problem, exact, &naive)
    };
    for step in &steps {
        let prefix = |all: &Inputs| expect(&prefix(spec, all, &step.tokens));
        let expected = prefix(&all);
        let others = || (Drawn::others(spec).map(|other| prefix(&other.inputs))).collect();
        let looked_twice = (expected.compare(others, &step.outputs, &[]))
            .map_err(|failure| format!("tokens {:?}: {failure}", step.tokens))?;
        seen.looked_twice |= looked_twice;
        let keys = match (decoding.window(), &all.scores) {
            (Some(window), Some(scores)) => {
                let live = step.live.as_ref();
                let live = live.ok_or("a cache of slots knows what it holds")?;
                check_live(scores, spec.k_len, step.tokens.end, window, live)?;
                live.iter().map(Vec::len).max().unwrap_or(0)
            }
            _ => step.tokens.end,
        };
        seen.tiles = seen.tiles.max(tiles(keys));
    }
    Ok(Some(seen))
}

/// Checks that the content of slots after `held` tokens is exactly the selection.
fn check_live(
    scores: &[f64],
    len: usize,
    held: usize,
    window: usize,
    live: &[Vec<usize>],
) -> Result<(), String> {
    for (row, (scores, live)) in scores.chunks_exact(len).zip(live).enumerate() {
        let want = select::selected(&scores[..held], window, held as i64 - 1);
        if *live != want {
            return Err(format!(
                "selection: head {row} holds {live:?} after {held}, not {want:?}"
            ));
        }
    }
    Ok(())
}
