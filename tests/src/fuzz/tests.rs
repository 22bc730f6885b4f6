//! Tests of the fuzzer's problems, of the defects that it finds, and of its reports.

use super::{
    CHOICES, Decoder, Decoding, Limits, Outcome, Palette, Profile, Record, Share, Spec, Step, What,
    fuzz, regression_test, run, shrunk,
};
use crate::engines::Cpu;
use crate::masked::{MaskedCall, MaskedEngine};
use crate::prelude::TYPES;
use crate::{Call, Engine, Outputs, Passes, Raw, Refused, Size};
use flash_dma_problem::{AttentionError, ElementType, Interval, KeptKeys};
use flash_dma_reference::Inputs;
use flash_dma_reference::generate::Scores;
use flash_dma_reference::round::epsilon;

fn profile(variants: usize) -> Profile {
    Profile {
        variants,
        ..Profile::of(&Cpu)
    }
}

fn palette(variants: usize, seed: u64) -> Palette {
    Palette::new(profile(variants), seed)
}

#[test]
fn a_problem_is_the_line_that_it_prints() {
    let profile = Profile {
        sinks: true,
        ..Profile::of(&Cpu)
    };
    let palette = Palette::new(profile, 3);
    for number in 0..3000 {
        let spec = palette.draw(number);
        let line = spec.to_string();
        assert_eq!(line.parse().as_ref(), Ok(&spec), "{line}");
    }
}

#[test]
fn a_line_that_is_no_problem_is_refused() {
    let good = "scored f16 b=2 kv=3 g=4 q=3 k=1773 d=64 causal window=728 scores=Normal seed=1";
    assert!(good.parse::<Spec>().is_ok());
    for (from, to) in [
        ("scored", "scores"),
        ("f16", "f64"),
        (" q=3", ""),
        ("window=728", "window=many"),
        ("scores=Normal", "scores=normal"),
        ("causal", "causal full"),
        ("causal", ""),
        ("seed=1", "seed=1 colour=red"),
        ("seed=1", "seed=1 lay=cccc"),
    ] {
        let bad = good.replacen(from, to, 1);
        assert!(bad.parse::<Spec>().is_err(), "{bad}");
    }
}

/// A number of a seed draws the same problem, regardless of other runs.
#[test]
fn a_number_of_a_seed_is_one_problem() {
    let draw = |seed, number| palette(0, seed).draw(number).to_string();
    assert_eq!(draw(1, 5), draw(1, 5));
    assert_ne!(draw(1, 5), draw(1, 6));
    assert_ne!(draw(1, 5), draw(2, 5));
}

/// The distribution covers what the contract allows, including the shapes of the defect with few queries under a
/// window.
#[test]
fn problems_are_of_every_kind() {
    let palette = palette(0, 7);
    let specs: Vec<Spec> = (0..4000).map(|number| palette.draw(number)).collect();
    let share = |name: &str, least: f64, is: &dyn Fn(&Spec) -> bool| {
        let found = specs.iter().filter(|spec| is(spec)).count() as f64 / specs.len() as f64;
        assert!(found >= least, "{name}: {found:.3}, less than {least}");
    };
    let pruning = |s: &Spec| s.window().is_some_and(|window| window < s.k_len);
    share("long", 0.4, &|s| s.k_len >= 1024);
    share("few queries, pruned", 0.05, &|s| {
        pruning(s) && s.k_len >= 700 && s.q_len <= 64 && s.window() >= Some(100)
    });
    share("one position, pruned", 0.02, &|s| {
        pruning(s) && !s.causal && s.q_len <= s.window().unwrap_or(0).max(1024)
    });
    share("as many queries as keys", 0.05, &|s| {
        s.q_len == s.k_len && !matches!(s.what, What::Decoded(_))
    });
    share("more queries than keys", 0.05, &|s| s.q_len > s.k_len);
    share("no queries or keys", 0.003, &|s| s.q_len * s.k_len == 0);
    for group in 1..=8 {
        share("a group", 0.03, &|s| s.group == group);
    }
    for dim in 1..=32 {
        share("a head dimension", 0.004, &|s| s.head_dim == 8 * dim);
    }
    for element in TYPES {
        share("a type", 0.3, &|s| s.element == element);
    }
    for place in ['c', 't', 'p', 'q', 'b', 'h', 'n'] {
        share("a place", 0.02, &|s| {
            let line = s.to_string();
            let layout = line.split(" lay=").nth(1).unwrap_or("c");
            layout.split(' ').next().unwrap_or("").contains(place)
        });
    }
    for word in [
        "scored",
        "plain",
        "masked",
        "decoded",
        "slots=",
        "pages=",
        "last=",
        "wrong=",
        "hidden",
        "padded",
        "det",
        "cap=",
        "drop=",
        "alibi",
        "scale=",
        "dev=30",
        "dev=0.1",
        "lse",
        "runners=",
        "recent=",
        "sinks=",
        "documents=",
        "narrower=",
        "ends=",
        "leave",
        "apart",
    ] {
        share(word, 0.02, &|s| s.to_string().contains(word));
    }
    for kind in Scores::ALL {
        // Problems without a key are rarely drawn.
        let least = match kind {
            Scores::AllPadded => 0.003,
            _ => 0.01,
        };
        share("scores", least, &|s| s.scores() == Some(kind));
    }
}

/// So 500 problems of 20 000 have it.
#[test]
fn every_option_is_in_one_of_forty_problems() {
    for variants in [0, 120] {
        let profile = profile(variants);
        let palette = Palette::new(profile.clone(), 5);
        let specs: Vec<Spec> = (0..8000).map(|number| palette.draw(number)).collect();
        for option in CHOICES.iter().filter(|option| (option.is_drawn)(&profile)) {
            let found = specs.iter().filter(|spec| (option.is_in)(spec)).count();
            let what = format!("{} with {variants} variants", option.name);
            assert!(found >= 200, "{what}: {found} of 8000");
        }
    }
}

#[test]
fn an_option_of_few_problems_is_named() {
    let (profile, least) = (Profile::of(&Cpu), 3);
    let (record, _) = fuzz(&Cpu, &palette(0, 1), &Limits::of(5));
    let rare = record.rare(least, &profile);
    let record = Record::of_json(&record.json(&[])).expect("a record");
    assert_eq!(rare, record.rare(least, &profile));
    for option in CHOICES.iter().filter(|option| (option.is_drawn)(&profile)) {
        let count = record.count(option.name);
        let line = format!("{}: {count}", option.name);
        assert_eq!(rare.contains(&line), count < least, "{line}");
    }
}

/// A run on a device draws its number of kernel variants, and many shapes of each.
#[test]
fn a_palette_has_its_number_of_variants() {
    let palette = palette(40, 9);
    let mut seen = std::collections::HashSet::new();
    for number in 0..4000 {
        let spec = palette.draw(number);
        let kind = core::mem::discriminant(&spec.what);
        let cap = spec.softcap.map(f32::to_bits);
        let shape = (spec.element, spec.head_dim, spec.group);
        seen.insert((kind, shape, spec.causal, cap));
    }
    assert!((35..=40).contains(&seen.len()), "{}", seen.len());
}

#[derive(Clone, Copy)]
enum Defect {
    /// One element of dk.
    KeyGradient,
    /// The gradients of runners-up after the first 64 keys.
    Rank,
    /// Kept keys do not learn.
    LeftOut,
    /// δ, by so many standard deviations of the error that the roundings of probabilities cause in it.
    Delta(f64),
    /// The gradients of keys that are attended to after the first 64.
    Tile,
    /// Causal masking.
    Causal,
    /// The bias of the last key.
    Bias,
    /// The cache's content in a step.
    Decode,
    /// It panics for many keys.
    Panics,
    /// It refuses many queries.
    Refuses,
}

struct Defective(Defect);

impl Engine for Defective {
    const NAME: &'static str = "defective";
    const SIZE: Size = Size::Medium;

    fn new() -> Self {
        Self(Defect::KeyGradient)
    }

    fn supports(&self, element: ElementType) -> bool {
        Cpu.supports(element)
    }

    fn select(&self, scores: &Raw, kept: impl Into<KeptKeys>) -> Result<Vec<Interval>, Refused> {
        Cpu.select(scores, kept)
    }

    fn forward(&self, call: &Call) -> Result<Outputs, Refused> {
        Cpu.forward(call)
    }

    fn backward(&self, call: &Call) -> Passes {
        let mut call = call.clone();
        match self.0 {
            Defect::Causal => call.problem.causal = false,
            Defect::LeftOut => call.kept_from = None,
            Defect::Delta(times) => spoil_delta(&mut call, times),
            Defect::Panics => assert!(call.problem.k_len < 100, "a panic of the engine"),
            Defect::Refuses if call.problem.q_len >= 20 => {
                return Err(AttentionError::ZeroWindow.into());
            }
            _ => {}
        }
        let (outputs, mut grads) = Cpu.backward(&call)?;
        let dim = call.problem.head_dim;
        match (self.0, grads.k.last_mut()) {
            (Defect::KeyGradient, Some(last)) => *last += 1.0,
            (Defect::Rank, _) => (grads.rank.iter_mut().flatten().skip(64)).for_each(|x| *x *= 1.5),
            (Defect::Tile, _) => grads.v.iter_mut().skip(64 * dim).for_each(|x| *x *= 1.5),
            _ => {}
        }
        Ok((outputs, grads))
    }
}

/// Makes δ wrong in every row. It is subtracted from `dO . v` as the gradient of the LSE is added.
fn spoil_delta(call: &mut Call, times: f64) {
    let p = call.problem;
    let kept = |row: usize| (row % p.q_len + 1).min(p.window) as f64;
    let (rows, dim) = (p.batch * p.q_heads * p.q_len, p.head_dim);
    let grad_lse = call.grad_lse.get_or_insert_with(|| vec![0.0; rows]);
    for (row, dlse) in grad_lse.iter_mut().enumerate() {
        let v = &call.v.values[row / p.q_len / p.group() * dim..][..dim];
        let grad_out = &call.grad_out.values[row * dim..][..dim];
        let product: f64 = v.iter().zip(grad_out).map(|(v, g)| v * g).sum();
        let sign = if row * 7 % 5 < 2 { 1.0 } else { -1.0 };
        // A rounding is evenly distributed up to half of the distance of two numbers. 1 is not rounded.
        let deviation = epsilon(p.element) / 2.0 / 3f64.sqrt();
        if kept(row) > 1.0 {
            *dlse += sign * times * deviation * product / kept(row).sqrt();
        }
    }
}

impl MaskedEngine for Defective {
    fn counts(&self, call: &MaskedCall) -> Result<Vec<u32>, Refused> {
        Cpu.counts(call)
    }

    fn masked_forward(&self, call: &MaskedCall) -> Result<Outputs, Refused> {
        Cpu.masked_forward(call)
    }

    fn masked(&self, call: &MaskedCall) -> Passes {
        let mut call = call.clone();
        if let (Defect::Bias, Some(last)) =
            (self.0, call.bias.as_mut().and_then(|b| b.values.last_mut()))
        {
            *last += 2.0;
        }
        Cpu.masked(&call)
    }
}

impl Decoder for Defective {
    fn decodes(&self) -> bool {
        true
    }

    fn decode(&self, spec: &Spec, decoding: &Decoding, all: &Inputs) -> Result<Vec<Step>, String> {
        let mut steps = Cpu.decode(spec, decoding, all)?;
        if let (Defect::Decode, [_, .., last]) = (self.0, &mut steps[..]) {
            last.outputs.lse.iter_mut().for_each(|x| *x += 0.01);
        }
        Ok(steps)
    }
}

/// The first problem of 500 that fails, and its shrunk form.
fn found(defect: Defect) -> (Record, Spec) {
    let engine = Defective(defect);
    // On one thread, so that the count of problems depends on nothing but their numbers: a second
    // thread goes on with further problems while the first one checks the wrong one.
    let limits = Limits {
        threads: 1,
        ..Limits::of(500)
    };
    let (record, failures) = fuzz(&engine, &palette(0, 11), &limits);
    let first = failures.first().expect("the defect is found");
    let least = shrunk(&engine, &first.spec).expect("it fails again");
    let again = least.spec.to_string().parse().expect("a line");
    let outcome = run(&engine, &again);
    assert!(matches!(outcome, Outcome::Failed(_)), "{again}");
    assert!(matches!(run(&Cpu, &again), Outcome::Passed(_)), "{again}");
    assert!(regression_test(&again).contains(&again.to_string()));
    (record, least.spec)
}

#[test]
fn one_wrong_element_is_found_and_shrunk() {
    let (record, least) = found(Defect::KeyGradient);
    assert!(record.counted() < 50, "{record}");
    let size = least.batch * least.kv_heads * least.q_len * least.k_len;
    assert!(size == 1 && least.head_dim == 8, "{least}");
}

#[test]
fn a_wrong_gradient_of_runners_up_is_found_and_shrunk() {
    let (record, least) = found(Defect::Rank);
    assert!(record.counted() < 50, "{record}");
    let text = least.to_string();
    assert!(text.contains(" runners=1") && least.k_len <= 100, "{least}");
}

#[test]
fn kept_keys_that_do_not_learn_are_found_and_shrunk() {
    let (record, least) = found(Defect::LeftOut);
    assert!(record.counted() < 50, "{record}");
    assert!(least.to_string().contains(" leave "), "{least}");
}

/// All keys of a head read one row of v, so that the gradients are only the error of δ.
const ONE_ROW: &str =
    "scored bf16 b=1 kv=2 g=2 q=300 k=300 d=64 causal window=64 scores=Normal lay=ccnccc seed=5";

fn outcome_of_one_row(defect: Defect) -> Outcome {
    run(&Defective(defect), &ONE_ROW.parse().expect("a problem"))
}

#[test]
fn probabilities_of_sixteen_bits_may_read_one_row_for_all_keys() {
    let outcome = outcome_of_one_row(Defect::Delta(3.0));
    assert!(matches!(outcome, Outcome::Passed(_)), "{outcome:?}");
}

#[test]
fn a_wrong_delta_is_found_where_all_keys_read_one_row() {
    let outcome = outcome_of_one_row(Defect::Delta(60.0));
    assert!(matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
}

#[test]
fn a_wrong_second_tile_is_shrunk_to_two_tiles() {
    let (_, least) = found(Defect::Tile);
    assert!(least.batch * least.kv_heads * least.k_len <= 66, "{least}");
}

#[test]
fn a_forgotten_causal_mask_is_found_and_shrunk() {
    let (record, least) = found(Defect::Causal);
    assert!(record.counted() < 50, "{record}");
    assert!(least.causal && least.k_len <= 2, "{least}");
}

#[test]
fn a_wrong_bias_is_found_and_shrunk() {
    let (record, least) = found(Defect::Bias);
    assert!(record.counted() < 100, "{record}");
    let is_masked = matches!(least.what, What::Masked { mask: None, .. });
    assert!(is_masked, "{least}");
}

#[test]
fn a_wrong_step_is_found_and_shrunk() {
    let (_, least) = found(Defect::Decode);
    assert_eq!(least.k_len, 2, "{least}");
}

#[test]
fn a_panic_is_a_failure() {
    let (_, least) = found(Defect::Panics);
    assert_eq!(least.k_len, 100, "{least}");
}

#[test]
fn a_refusal_is_a_failure() {
    let (_, least) = found(Defect::Refuses);
    assert_eq!(least.q_len, 20, "{least}");
}

#[test]
fn processes_share_the_problems_and_join_their_records() {
    for variants in [0, 6] {
        let palette = palette(variants, 3);
        let shares = (0..4).map(|process| Share {
            process,
            processes: 4,
        });
        let run = |share| {
            let limits = Limits {
                share,
                ..Limits::of(40)
            };
            let (record, _) = fuzz(&Cpu, &palette, &limits);
            Record::of_json(&record.json(&[])).expect("a record")
        };
        let mut joined = Record::default();
        for record in shares.map(run) {
            assert!(record.counted() > 0 && record.counted() < 40, "{record}");
            joined.join(record);
        }
        let whole = run(Share::ALL);
        assert_eq!(joined.to_string(), whole.to_string());
    }
}

#[test]
fn cells_with_few_problems_are_named() {
    let (record, _) = fuzz(&Cpu, &palette(0, 1), &Limits::of(5));
    assert!(!record.wanting(50, &TYPES, true).is_empty());
    assert!(Record::default().wanting(1, &TYPES, true).len() == 15);
    let json = record.json(&[("engine", "cpu".into())]);
    assert_eq!((&json["problems"], &json["wrong"]), (&5.into(), &0.into()));
    assert_eq!(json["engine"], "cpu");
}
