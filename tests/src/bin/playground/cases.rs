//! Seeded cases for the page's functions, and the comparison with the reference.

use flash_dma_problem::SelectionRule;
use flash_dma_reference::generate::Scores;
use flash_dma_reference::{Rng, compose};
use serde_json::{Value, json};

/// Number of cases of each kind of scores, and of those that the page must refuse.
const EACH: usize = 110;
const REFUSED: usize = 40;
const LONGEST: usize = 96;

/// Scores of one head and a rule.
#[derive(Clone, Debug)]
pub struct Case {
    /// The score of each key.
    pub scores: Vec<f64>,
    /// The rule by which a position selects its keys.
    pub rule: SelectionRule,
    /// Number of runners-up: keys that rank just after the window.
    pub runners_up: usize,
}

/// The reference's results for a case.
#[derive(Debug, PartialEq, Eq)]
pub struct Expected {
    /// One past the last position that attends to each key.
    pub ends: Vec<usize>,
    /// One past the last position that would attend to each key if the window included the runners-up.
    pub fars: Vec<usize>,
    /// The keys that each position attends to, ascending.
    pub attended: Vec<Vec<usize>>,
    /// The runners-up of each position, ascending.
    pub runners: Vec<Vec<usize>>,
}

impl Case {
    /// The results by the reference's definition.
    pub fn expected(&self) -> Expected {
        let wider = self.rule.widened(self.runners_up);
        let len = self.scores.len();
        let ends = |rule: &SelectionRule| -> Vec<usize> {
            let intervals = compose::intervals(&self.scores, &[len], rule);
            intervals.iter().map(|i| i.end as usize).collect()
        };
        let attended = |rule: &SelectionRule| -> Vec<Vec<usize>> {
            let at = |position| compose::attended(&self.scores, rule, position);
            (0..len).map(at).collect()
        };
        let kept = attended(&self.rule);
        let mut runners = attended(&wider);
        for (runners, kept) in runners.iter_mut().zip(&kept) {
            runners.retain(|key| !kept.contains(key));
        }
        Expected {
            ends: ends(&self.rule),
            fars: ends(&wider),
            attended: kept,
            runners,
        }
    }

    /// The form that the driver reads: numbers that JSON lacks are texts.
    pub fn to_json(&self) -> Value {
        let number = |&score: &f64| match score {
            f64::INFINITY => json!("Infinity"),
            f64::NEG_INFINITY => json!("-Infinity"),
            _ if score.is_nan() => json!("NaN"),
            _ => json!(score),
        };
        json!({
            "scores": self.scores.iter().map(number).collect::<Vec<_>>(),
            "window": self.rule.window,
            "recent": self.rule.recent,
            "sinks": self.rule.sinks,
            "runnersUp": self.runners_up,
        })
    }
}

/// The cases, the same in every run.
pub fn generate() -> Vec<Case> {
    let mut rng = Rng::new(2025);
    let kinds = Scores::ALL.iter().flat_map(|kind| [kind; EACH]);
    let mut cases: Vec<Case> = kinds.map(|&kind| case(kind, &mut rng)).collect();
    for _ in 0..REFUSED {
        let mut case = case(Scores::Normal, &mut rng);
        case.rule.window = rng.below(6);
        case.rule.recent = rng.below(case.rule.window + 1);
        case.rule.sinks = case.rule.window - case.rule.recent + 1 + rng.below(3);
        cases.push(case);
    }
    cases
}

fn case(kind: Scores, rng: &mut Rng) -> Case {
    let longest = [LONGEST, LONGEST, LONGEST, 4][rng.below(4)];
    let len = 1 + rng.below(longest);
    let mut scores = kind.head(len, rng);
    if rng.below(4) == 0 {
        scores.iter_mut().for_each(|score| *score = score.round());
    }
    for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        if rng.below(5) == 0 {
            for _ in 0..1 + rng.below(len) {
                scores[rng.below(len)] = special;
            }
        }
    }
    let window = match rng.below(6) {
        0 => len + rng.below(20),
        1 | 2 => 1 + rng.below(len),
        _ => 1 + rng.below(10),
    };
    let mut part = |most: usize| match rng.below(3) {
        0 => 0,
        1 => rng.below(most + 1),
        _ => rng.below(most.min(4) + 1),
    };
    let recent = part(window);
    let sinks = part(window - recent);
    let rule = SelectionRule {
        window,
        recent,
        sinks,
    };
    Case {
        scores,
        rule,
        runners_up: part(len + 4),
    }
}

/// Counts the cases that have each property by which a selection can go wrong.
///
/// # Errors
///
/// If few cases have one, so that the comparison would say little.
pub fn coverage(cases: &[Case]) -> Result<String, String> {
    let counts = COVERED.map(|(name, has)| (name, cases.iter().filter(|case| has(case)).count()));
    let text = counts
        .map(|(name, count)| format!("{count} {name}"))
        .join(", ");
    let text = format!("{} cases: {text}", cases.len());
    if cases.len() < 1200 || counts.iter().any(|&(_, count)| count < 30) {
        return Err(format!("too few of some kind in {text}"));
    }
    Ok(text)
}

/// A name, and the test of whether a case is of that kind.
type Kind = (&'static str, fn(&Case) -> bool);

const COVERED: [Kind; 10] = [
    ("with equal scores", |case| {
        let mut sorted = case.scores.clone();
        sorted.retain(|score| score.is_finite());
        sorted.sort_by(f64::total_cmp);
        sorted.windows(2).any(|pair| pair[0] == pair[1])
    }),
    ("with NaN", |case| case.scores.iter().any(|z| z.is_nan())),
    ("with −∞", |case| {
        case.scores.contains(&f64::NEG_INFINITY)
    }),
    ("with +∞", |case| case.scores.contains(&f64::INFINITY)),
    ("of one key", |case| case.scores.len() == 1),
    ("with w ≥ N", |case| case.rule.window >= case.scores.len()),
    ("with recent keys", |case| case.rule.recent > 0),
    ("with sinks", |case| case.rule.sinks > 0),
    ("with runners-up", |case| case.runners_up > 0),
    ("to refuse", |case| case.rule.check().is_err()),
];

/// Compares the results of the page's functions.
///
/// # Errors
///
/// The first case that differs, with both results.
pub fn compare(cases: &[Case], results: &Value) -> Result<(), String> {
    let results = results.as_array().map_or(&[][..], Vec::as_slice);
    if results.len() != cases.len() {
        return Err(format!(
            "{} of {} cases have results",
            results.len(),
            cases.len()
        ));
    }
    for (number, (case, result)) in cases.iter().zip(results).enumerate() {
        let expected = match case.rule.check() {
            Err(refused) => vec![("refused", json!(format!("RangeError: {refused}")))],
            Ok(()) => {
                let expected = case.expected();
                vec![
                    ("ends", json!(expected.ends)),
                    ("fars", json!(expected.fars)),
                    ("attended", json!(expected.attended)),
                ]
            }
        };
        for (part, expected) in expected {
            if result[part] != expected {
                return Err(format!(
                    "case {number}, {}\n  {part} of the reference {expected}\n  {part} of the page {}{}",
                    case.to_json(),
                    result[part],
                    result["refused"],
                ));
            }
        }
    }
    Ok(())
}
