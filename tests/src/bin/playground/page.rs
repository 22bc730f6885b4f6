//! Compares the page's drawing after each step of the driver with the reference and with the step's request.

use crate::cases::{Case, Expected};
use flash_dma_problem::SelectionRule;
use serde_json::Value;

/// The driver's moves of the range inputs, in order. Some do not fit with the others, and the page makes them fit.
pub const MOVES: [(&str, usize); 20] = [
    ("window", 1),
    ("window", 32),
    ("window", 9),
    ("recent", 3),
    ("recent", 9),
    ("recent", 0),
    ("recent", 2),
    ("sinks", 3),
    ("sinks", 7),
    ("sinks", 20),
    ("sinks", 1),
    ("runnersUp", 0),
    ("runnersUp", 5),
    ("runnersUp", 32),
    ("runnersUp", 4),
    ("sinks", 6),
    ("window", 4),
    ("recent", 4),
    ("recent", 1),
    ("window", 7),
];

/// The greatest error of a drawn score: scores are hundredths, and a bar of 0 is drawn as well.
const DRAWN: f64 = 0.02;

struct State<'a> {
    step: &'a str,
    /// The numbers of the range inputs: window, recent, sinks and runners-up.
    numbers: [usize; 4],
    scores: Vec<f64>,
    report: &'a Value,
}

/// Compares every state.
///
/// # Errors
///
/// The first state that is wrong, and how.
pub fn compare(report: &Value) -> Result<(), String> {
    let states = report["states"].as_array().map_or(&[][..], Vec::as_slice);
    let states: Vec<State> = (states.iter().map(State::read)).collect::<Result<_, _>>()?;
    let steps: Vec<&str> = states.iter().skip(1).map(|state| state.step).collect();
    let expected: Vec<String> = (MOVES.iter().map(|(name, to)| format!("move {name} {to}")))
        .chain(ACTIONS.iter().map(|(name, _)| (*name).to_owned()))
        .collect();
    if steps != expected {
        return Err(format!("the driver took the steps {steps:?}"));
    }
    for state in &states {
        state.check_drawing().map_err(|fault| state.fault(&fault))?;
    }
    let (moves, actions) = states.split_at(MOVES.len() + 1);
    for (pair, (name, to)) in moves.windows(2).zip(MOVES) {
        check_move(&pair[0], &pair[1], name, to).map_err(|fault| pair[1].fault(&fault))?;
    }
    let before = moves.last().into_iter().chain(actions);
    for ((before, after), (_, holds)) in before.zip(actions).zip(ACTIONS) {
        if before.numbers != after.numbers || !holds(&before.scores, &after.scores) {
            return Err(after.fault(&format!("before it, the scores were {:?}", before.scores)));
        }
        // Not every change of a single score moves a bar, but each of the strokes does.
        if after.step.starts_with("stroke") && before.report["bars"] == after.report["bars"] {
            return Err(after.fault("the stroke moved no bar"));
        }
    }
    Ok(())
}

/// Checks that the page has the width in which it should be driven, and that nothing overflows.
///
/// # Errors
///
/// Both widths, if not.
pub fn check_width(report: &Value, wanted: u64) -> Result<(), String> {
    let [content, page] = [0, 1].map(|at| report["width"][at].as_u64().unwrap_or(0));
    // A scroll bar takes some of the width.
    if page + 30 < wanted || page > wanted || content > page {
        return Err(format!(
            "the page is {page} pixels wide, its content {content}"
        ));
    }
    Ok(())
}

/// Checks that the inputs show the numbers that remain after a move to `to`, and that the picture has changed with
/// them.
fn check_move(before: &State, after: &State, name: &str, to: usize) -> Result<(), String> {
    let [mut window, mut recent, mut sinks, mut runners_up] = before.numbers;
    match name {
        "window" => window = to,
        "recent" => recent = to,
        "sinks" => sinks = to,
        _ => runners_up = to,
    }
    recent = recent.min(window);
    sinks = sinks.min(window - recent);
    let fitting = [window, recent, sinks, runners_up];
    if after.numbers != fitting || before.scores != after.scores {
        return Err(format!(
            "expected the numbers {fitting:?}, and scores as before"
        ));
    }
    if after.numbers != before.numbers && before.report["bars"] == after.report["bars"] {
        return Err("the numbers changed and the bars did not".into());
    }
    Ok(())
}

impl<'a> State<'a> {
    fn read(report: &'a Value) -> Result<Self, String> {
        let bad = || format!("not a state of the page: {report}");
        let number = |name: &str| report["rule"][name].as_u64().ok_or_else(bad);
        let scores = report["scores"].as_array().ok_or_else(bad)?;
        let score = |text: &Value| text.as_str()?.parse().ok();
        Ok(Self {
            step: report["step"].as_str().ok_or_else(bad)?,
            numbers: [
                number("window")? as usize,
                number("recent")? as usize,
                number("sinks")? as usize,
                number("runnersUp")? as usize,
            ],
            scores: (scores.iter().map(score))
                .collect::<Option<_>>()
                .ok_or_else(bad)?,
            report,
        })
    }

    /// The text of a fault, with the data that reproduces it.
    fn fault(&self, fault: &str) -> String {
        format!(
            "after `{}` with window, recent, sinks and runners-up {:?} and scores {:?}: {fault}",
            self.step, self.numbers, self.scores
        )
    }

    /// Checks bars, mask and scores as drawn.
    fn check_drawing(&self) -> Result<(), String> {
        let [window, recent, sinks, runners_up] = self.numbers;
        let rule = SelectionRule {
            window,
            recent,
            sinks,
        };
        rule.check().map_err(|error| error.to_string())?;
        let case = Case {
            scores: self.scores.clone(),
            rule,
            runners_up,
        };
        let expected = case.expected();
        self.check_bars(&expected)?;
        for (name, at) in [
            ("attended", &expected.attended),
            ("runner", &expected.runners),
        ] {
            let mut drawn =
                pairs(&self.report["mask"][name]).ok_or("the mask is no list of pairs")?;
            drawn.sort_unstable();
            let mut wanted: Vec<[usize; 2]> = (at.iter().enumerate())
                .flat_map(|(position, keys)| keys.iter().map(move |&key| [key, position]))
                .collect();
            wanted.sort_unstable();
            if drawn != wanted {
                return Err(format!(
                    "the mask's {name} [key, query]: drawn {drawn:?}, expected {wanted:?}"
                ));
            }
        }
        for (key, &score) in self.scores.iter().enumerate() {
            let drawn = self.report["heights"][key].as_f64();
            let right = match drawn {
                None => score == f64::NEG_INFINITY,
                Some(drawn) => (drawn - score).abs() <= DRAWN,
            };
            if !right {
                return Err(format!("the score of key {key} is drawn at {drawn:?}"));
            }
        }
        Ok(())
    }

    /// Checks that there is one bar per key, by its attributes and by its rectangles.
    fn check_bars(&self, expected: &Expected) -> Result<(), String> {
        let bars = self.report["bars"].as_array().ok_or("there are no bars")?;
        if bars.len() != self.scores.len() {
            return Err(format!(
                "{} bars for {} keys",
                bars.len(),
                self.scores.len()
            ));
        }
        for (key, bar) in bars.iter().enumerate() {
            let (end, far) = (expected.ends[key], expected.fars[key]);
            let range = |from: usize, to: usize| match from == to {
                true => Value::Null,
                false => Value::from(vec![from, to]),
            };
            let right = bar["key"] == key
                && bar["end"] == end
                && bar["far"] == far
                && bar["attended"] == range(key, end)
                && bar["runner"] == range(end, far);
            if !right {
                return Err(format!(
                    "key {key} ends at {end}, far {far}; drawn is {bar}"
                ));
            }
        }
        Ok(())
    }
}

fn pairs(list: &Value) -> Option<Vec<[usize; 2]>> {
    let number = |value: &Value| value.as_u64().map(|n| n as usize);
    let pair = |pair: &Value| Some([number(&pair[0])?, number(&pair[1])?]);
    list.as_array()?.iter().map(pair).collect()
}

/// A step that changes scores, and the test of whether the scores after it follow from those before.
type Action = (&'static str, fn(&[f64], &[f64]) -> bool);

/// The driver's steps after the moves.
const ACTIONS: [Action; 15] = [
    ("stroke up", |before, after| {
        let rising = line((3, 0.2), (9, 0.95));
        let stroke = rising.into_iter().chain(line((9, 0.95), (20, 0.95)));
        only(before, after, stroke)
    }),
    ("stroke back", |before, after| {
        only(before, after, line((30, 0.5), (12, 0.05)))
    }),
    ("stroke point", |before, after| {
        only(before, after, [(5, 1.0)])
    }),
    ("stroke hides", |before, after| {
        only(before, after, (14..=18).map(|key| (key, f64::NEG_INFINITY)))
    }),
    ("press random", |before, after| {
        before != after && (after.iter()).all(|score| (0.0..=1.0).contains(score))
    }),
    ("press ascending", |_, after| {
        after.windows(2).all(|pair| pair[0] < pair[1])
    }),
    ("press descending", |_, after| {
        after.windows(2).all(|pair| pair[0] > pair[1])
    }),
    ("press ties", |_, after| {
        (after.iter()).all(|score| [0.25, 0.5, 0.75].contains(score))
    }),
    ("press hide", |before, after| {
        let mut hidden = before.iter().zip(after).enumerate();
        let newly = hidden.by_ref().filter(|(_, (old, new))| old != new);
        let newly: Vec<usize> = newly.map(|(key, _)| key).collect();
        newly.len() == 4
            && only(
                before,
                after,
                newly.iter().map(|&key| (key, f64::NEG_INFINITY)),
            )
    }),
    // The last stroke left key 18 chosen, and the key to the left came next.
    ("key ArrowUp", |before, after| {
        let hidden = before[17] == f64::NEG_INFINITY;
        let score = if hidden { 0.0 } else { before[17] + 0.05 };
        only(before, after, [(17, score)])
    }),
    ("key ArrowRight", |before, after| before == after),
    ("key Delete", |before, after| {
        only(before, after, [(18, f64::NEG_INFINITY)])
    }),
    ("key ArrowUp", |before, after| {
        only(before, after, [(18, 0.0)])
    }),
    ("key ArrowRight", |before, after| before == after),
    ("key ArrowDown", |before, after| {
        only(before, after, [(19, before[19] - 0.05)])
    }),
];

/// The scores of the keys on a line, both ends included.
fn line(from: (usize, f64), to: (usize, f64)) -> Vec<(usize, f64)> {
    let keys = from.0.min(to.0)..=from.0.max(to.0);
    let slope = (to.1 - from.1) / (to.0 as f64 - from.0 as f64);
    keys.map(|key| (key, from.1 + slope * (key as f64 - from.0 as f64)))
        .collect()
}

/// True if these keys have these scores and all others are unchanged.
fn only(before: &[f64], after: &[f64], changed: impl IntoIterator<Item = (usize, f64)>) -> bool {
    let mut wanted = before.to_vec();
    for (key, score) in changed {
        wanted[key] = score;
    }
    let near = |(&wanted, &after): (&f64, &f64)| wanted == after || (wanted - after).abs() <= DRAWN;
    wanted.len() == after.len() && wanted.iter().zip(after).all(near)
}
