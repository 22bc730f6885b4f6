//! Decode steps against the last rows of the oracle's forward pass.

use crate::decode::args::{Cache, StepInputs, StepOutputs, Tokens};
use crate::decode::keys::DecodeBlueprint;
use crate::decode::launch::{DecodeStep, DecodeTuning, decode_tuned, plan};
use crate::decode::tests::{empty, empty_slots, live};
use crate::host::engine::Engine;
use crate::host::pass::{Config, Plan};
use crate::portable::blueprint::{Blueprint, Micro, micro};
use crate::testing::{Output, Placement, client, upload};
use cubecl::client::Client;
use flash_dma_problem::{
    AttentionError, AttentionOptions, CacheShape, DecodeProblem, ElementType, Problem, ScoreRole,
};
use flash_dma_reference::compare::{OUTPUT, compare, compare_lse};
use flash_dma_reference::generate::{Scores, inputs};
use flash_dma_reference::{Inputs, select};

const F32: ElementType = ElementType::F32;

/// A sequence that is decoded in pieces.
#[derive(Clone, Debug)]
struct Case {
    batch: usize,
    heads: [usize; 2],
    len: usize,
    head_dim: usize,
    element: ElementType,
    /// `None` is a cache of pages.
    window: Option<usize>,
    /// True if pages have scores.
    biased: bool,
    role: ScoreRole,
    scores: Scores,
    options: AttentionOptions,
    placement: Placement,
    /// Parts of the keys; `None` leaves the choice to the rule.
    parts: Option<usize>,
    /// The units of a cube; `None` leaves the choice to the rule.
    micro: Option<Micro>,
    /// Tokens of the steps, cycled through.
    pieces: Vec<usize>,
}

fn case(heads: [usize; 2], len: usize, head_dim: usize, window: Option<usize>) -> Case {
    Case {
        batch: 2,
        heads,
        len,
        head_dim,
        element: F32,
        window,
        biased: false,
        role: ScoreRole::default(),
        scores: Scores::Normal,
        options: AttentionOptions::new(),
        placement: Placement::Contiguous,
        parts: None,
        micro: None,
        pieces: vec![1],
    }
}

/// The tokens `from..to` of `[rows, len, width]`.
fn tokens(values: &[f64], [rows, len, width]: [usize; 3], from: usize, to: usize) -> Vec<f64> {
    let row = |r: usize| &values[(r * len + from) * width..(r * len + to) * width];
    (0..rows).flat_map(|r| row(r).to_vec()).collect()
}

impl Case {
    fn scored(&self) -> bool {
        self.window.is_some() || self.biased
    }

    fn inputs(&self, seed: u64) -> Inputs {
        inputs(self.problem(self.len, self.len), self.scores, 1.0, seed)
    }

    fn options(&self) -> AttentionOptions {
        AttentionOptions {
            keep_window: self.window,
            ..self.options
        }
    }

    /// A pass over the first `k_len` keys.
    fn problem(&self, q_len: usize, k_len: usize) -> Problem {
        let q = [self.batch, self.heads[0], q_len, self.head_dim];
        let k = [self.batch, self.heads[1], k_len, self.head_dim];
        let scores = self.scored().then_some(&k[..3]);
        Problem::new(&q, &k, &k, scores, self.element, &self.options()).unwrap()
    }

    fn cache(&self, p: &Problem) -> CacheShape {
        let (batch, heads, dim, element) = (p.batch, p.kv_heads, p.head_dim, p.element);
        let Some(window) = self.window else {
            let max_pages = self.len.div_ceil(8);
            let sizes = [max_pages * batch + 1, 8, max_pages];
            let shape = CacheShape::pages(batch, heads, sizes, dim, element).unwrap();
            return if self.biased {
                shape.with_scores()
            } else {
                shape
            };
        };
        let shape = CacheShape::slots(batch, heads, window, dim, element);
        shape.unwrap().with_score_role(self.role)
    }

    /// Decodes the sequence and compares each step with the oracle's last rows, and the live sets with its selection.
    fn check(&self, seed: u64) {
        self.check_inputs(&self.inputs(seed));
    }

    fn check_inputs(&self, all: &Inputs) {
        let (p, client) = (&all.problem, client());
        let [kv, dim] = [p.batch * p.kv_heads, p.head_dim];
        let shape = self.cache(p);
        let cache = empty(&client, &shape);
        let mut from = 0;
        for &piece in self.pieces.iter().cycle() {
            let to = (from + piece).min(self.len);
            let part = |values: &[f64], rows: usize, width: usize, from: usize| {
                tokens(values, [rows, self.len, width], from, to)
            };
            let scores = |from| (all.scores.as_ref()).map(|scores| part(scores, kv, 1, from));
            let prefix = Inputs {
                problem: self.problem(to - from, to),
                q: part(&all.q, p.batch * p.q_heads, dim, from),
                k: part(&all.k, kv, dim, 0),
                v: part(&all.v, kv, dim, 0),
                scores: scores(0),
            };

            let q = prefix.problem.q_shape();
            let new = [p.batch, p.kv_heads, to - from, dim];
            let up = |values: &[f64], shape: &[usize]| {
                upload(&client, values, shape, p.element, self.placement)
            };
            let contiguous = Placement::Contiguous;
            let given = Tokens {
                k: up(&part(&all.k, kv, dim, from), &new),
                v: up(&part(&all.v, kv, dim, from), &new),
                scores: scores(from).map(|z| upload(&client, &z, &new[..3], F32, contiguous)),
            };
            let out = Output::new(&client, &q, p.element);
            let lse = Output::new(&client, &q[..3], F32);
            let z = self.scored().then_some(&new[..3]);
            let problem = shape.decode(&q, &new, &new, z, p.element, from, &self.options());
            let problem = problem.unwrap();
            let inputs = StepInputs {
                q: up(&prefix.q, &q),
                tokens: given,
            };
            let outputs = StepOutputs {
                cache: cache.clone(),
                out: out.binding(),
                lse: lse.binding(),
            };
            let plan = self.plan(&client, &problem, all, &inputs);
            plan.and_then(|plan| plan.run(outputs)).unwrap();

            let context = || format!("tokens {from}..{to} of {self:?}");
            let exact = prefix.forward_for(self.role);
            let naive = prefix.naive_forward_for(self.role);
            let got = out.read(&client);
            compare("out", &q, &got, &exact.out, &naive.out, p.element, OUTPUT)
                .and_then(|_| compare_lse(&q[..3], &lse.read(&client), &exact.lse))
                .unwrap_or_else(|failure| panic!("{failure}\n{}", context()));
            if let (Cache::Slots(slots), Some(window)) = (&cache, self.window) {
                let want: Vec<Vec<usize>> = (prefix.scores.iter().flat_map(|z| z.chunks(to)))
                    .map(|head| select::selected(head, window, to as i64 - 1))
                    .collect();
                assert_eq!(live(&client, slots), want, "{}", context());
            }
            from = to;
            if from == self.len {
                return;
            }
        }
    }

    fn plan<'a>(
        &self,
        client: &'a Client,
        problem: &'a DecodeProblem,
        all: &Inputs,
        inputs: &'a StepInputs,
    ) -> Result<Plan<'a, StepOutputs>, AttentionError> {
        let engine = Engine::Portable;
        if let Some(micro) = self.micro {
            let blueprint = DecodeBlueprint {
                tile: Blueprint::with_micro(micro, &all.problem),
                paged: self.window.is_none(),
                only_ranked: self.window.is_some() && self.role == ScoreRole::Rank,
                windowed: false,
            };
            let config = Config::Portable((blueprint, self.parts.unwrap_or(1)));
            return Plan::with(client, engine, config, DecodeStep::new(problem, inputs));
        }
        let tuning = DecodeTuning {
            cubes: self.parts,
            ..Default::default()
        };
        decode_tuned(engine, tuning, client, problem, inputs)
    }
}

#[test]
fn a_token_at_a_time_equals_the_full_pass() {
    for (seed, scores) in Scores::ALL.into_iter().enumerate() {
        for window in [1, 6, 100] {
            Case {
                scores,
                ..case([4, 2], 40, 8, Some(window))
            }
            .check(seed as u64);
        }
    }
}

#[test]
fn several_tokens_see_what_each_would_alone() {
    for (seed, scores) in Scores::ALL.into_iter().enumerate() {
        for window in [1, 5, 17, 100] {
            Case {
                scores,
                pieces: vec![16, 3, 1, 7, 2, 13],
                ..case([2, 1], 58, 8, Some(window))
            }
            .check(seed as u64);
        }
    }
}

#[test]
fn scores_that_only_rank_add_nothing() {
    use Scores::{AllPadded, Large, Nan, Padded, Ties};
    for (seed, scores) in [Ties, Padded, AllPadded, Nan, Large]
        .into_iter()
        .enumerate()
    {
        for (window, parts) in [(1, None), (5, Some(2)), (17, None), (100, Some(3))] {
            Case {
                scores,
                parts,
                role: ScoreRole::Rank,
                pieces: vec![16, 3, 1, 7, 2, 13],
                ..case([4, 2], 58, 8, Some(window))
            }
            .check(seed as u64);
        }
    }
}

#[test]
fn pages_with_scores_have_a_key_bias() {
    for (seed, scores) in Scores::ALL.into_iter().enumerate() {
        Case {
            scores,
            biased: true,
            pieces: vec![1, 7, 2],
            ..case([4, 2], 33, 16, None)
        }
        .check(seed as u64);
    }
}

#[test]
fn groups_and_head_dimensions_match_the_oracle() {
    for (heads, head_dim, batch) in [
        ([1, 1], 32, 2),
        ([4, 2], 64, 1),
        ([4, 1], 128, 1),
        ([8, 1], 96, 1),
        ([16, 2], 40, 1),
        ([2, 2], 256, 1),
    ] {
        for window in [Some(9), None] {
            for pieces in [vec![1], vec![4, 9]] {
                Case {
                    batch,
                    pieces,
                    ..case(heads, 23, head_dim, window)
                }
                .check(head_dim as u64);
            }
        }
    }
}

#[test]
fn types_options_and_strides_match_the_oracle() {
    for (element, placement) in [
        (ElementType::F16, Placement::TokenMajor),
        (ElementType::Bf16, Placement::Gaps),
        (F32, Placement::TokenMajor),
    ] {
        for window in [Some(7), None] {
            Case {
                element,
                placement,
                options: AttentionOptions::new().with_softcap(2.0).with_scale(0.7),
                pieces: vec![1, 5],
                ..case([4, 2], 31, 24, window)
            }
            .check(11);
        }
    }
}

#[test]
fn parts_of_the_keys_add_up() {
    for parts in [2, 3, 11] {
        for window in [Some(30), Some(3), None] {
            Case {
                parts: Some(parts),
                scores: Scores::Padded,
                pieces: vec![1, 2, 16],
                ..case([4, 2], 70, 16, window)
            }
            .check(parts as u64);
        }
    }
}

#[test]
fn cooperating_units_match_the_oracle() {
    for window in [Some(6), None] {
        Case {
            micro: Some(micro(2, 2, 2, 4)),
            parts: Some(2),
            pieces: vec![5, 1],
            ..case([4, 2], 20, 24, window)
        }
        .check(5);
    }
}

#[test]
fn what_is_not_attended_to_leaves_no_trace() {
    for window in [Some(4), None] {
        let case = Case {
            scores: Scores::Decreasing,
            pieces: vec![1, 6],
            ..case([2, 1], 30, 8, window)
        };
        let mut all = case.inputs(3);
        // Keys 9 and 20 of the first sequence: never alive with four slots, but visible to all queries with pages.
        for key in [9, 20] {
            all.k[key * 8 + 3] = f64::NAN;
            all.v[key * 8 + 5] = f64::INFINITY;
        }
        case.check_inputs(&all);
        // Increasing scores: each is alive for four tokens.
        let case = Case {
            scores: Scores::Increasing,
            ..case
        };
        let mut all = case.inputs(3);
        all.v[9 * 8 + 5] = f64::NAN;
        all.v[20 * 8 + 5] = f64::NEG_INFINITY;
        case.check_inputs(&all);
    }
}

#[test]
fn a_refused_step_leaves_the_cache_as_it_was() {
    let client = client();
    let shape = CacheShape::slots(1, 1, 3, 8, F32).unwrap();
    let slots = empty_slots(&client, &shape);
    let new = [1, 1, 2, 8];
    let options = AttentionOptions::new().with_keep_window(3);
    let problem = shape.decode(&new, &new, &new, Some(&new[..3]), F32, 0, &options);
    let problem = problem.unwrap();
    let up = |shape: &[usize]| {
        let values = vec![1.0; shape.iter().product()];
        upload(&client, &values, shape, F32, Placement::Contiguous)
    };
    let given = |len: usize| Tokens {
        k: up(&[1, 1, len, 8]),
        v: up(&new),
        scores: Some(up(&new[..3])),
    };
    let [out, lse] = [&new[..], &new[..3]].map(|shape| Output::new(&client, shape, F32));
    let run = |problem: &DecodeProblem, q: &[usize], tokens, cache| {
        let inputs = StepInputs { q: up(q), tokens };
        let outputs = StepOutputs {
            cache,
            out: out.binding(),
            lse: lse.binding(),
        };
        plan(&client, problem, &inputs)?.run(outputs)
    };
    let cache = || Cache::Slots(slots.clone());
    let step = |q: &[usize], tokens| run(&problem, q, tokens, cache());
    let error = step(&new, given(3)).unwrap_err();
    assert_eq!(error.to_string(), "k must have size 2 on axis 2, but has 3");
    let error = step(&[1, 1, 1, 8], given(2)).unwrap_err();
    assert!(matches!(error, AttentionError::Shape { .. }), "{error}");
    let pages = CacheShape::pages(1, 1, [3, 8, 2], 8, F32).unwrap();
    let error = run(&problem, &new, given(2), empty(&client, &pages));
    let text = "the device does not support pages where the problem has slots";
    assert_eq!(error.unwrap_err().to_string(), text);
    let many = [1, 1, 17, 8];
    let long = shape.decode(&many, &many, &many, Some(&many[..3]), F32, 0, &options);
    let error = run(&long.unwrap(), &many, given(2), cache());
    assert!(matches!(
        error,
        Err(AttentionError::TooLarge { limit: 16, .. })
    ));
    assert_eq!(live(&client, &slots), [[0usize; 0]]);
    assert!(out.read(&client).iter().all(|x| x.is_nan()));
    step(&new, given(2)).unwrap();
    assert_eq!(live(&client, &slots), [[0, 1]]);
}
