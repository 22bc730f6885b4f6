//! Device buffers of a problem, and the calls on them.

use super::row::Phase;
use crate::tensor::{Tensor, normal};
use cubecl::client::Client;
use flash_dma_kernels::internals::{Tuning, forward_tuned, list_all};
use flash_dma_kernels::{
    Backward, Engine, Forward, Gradients, Inputs, Outputs, RankLearning, Saved, Selection, select,
};
use flash_dma_problem::{Interval, Problem};
use flash_dma_reference::Rng;
use flash_dma_reference::generate::Scores;
use std::sync::OnceLock;

/// Device buffers of one problem, all contiguous.
#[derive(Debug)]
pub struct Buffers {
    /// Sizes and options.
    pub problem: Problem,
    /// The engine of the forward pass.
    pub engine: Engine,
    /// Fixed choices of the forward engine.
    pub tuning: Tuning,
    /// The engine of the backward pass.
    pub backward_engine: Engine,
    /// `q`, `k`, `v` and the gradient of `out`, with copies for the checks.
    pub rows: [(Tensor, Vec<f32>); 4],
    /// A copy of the scores for the checks.
    pub host_scores: Option<Vec<f32>>,
    /// Scores with their intervals.
    scores: Option<(Tensor, Tensor)>,
    pub out: Tensor,
    /// Present exactly if the problem has a residual.
    residual: Option<Tensor>,
    /// Zero before the first forward pass for a backward pass.
    lse_rest: Tensor,
    pub lse: Tensor,
    pub grads: [Tensor; 3],
    pub grad_scores: Option<Tensor>,
    /// Made on first use.
    runners_up: OnceLock<RunnersUp>,
}

/// Buffers for runners-up of a quarter of the window.
#[derive(Debug)]
struct RunnersUp {
    /// The window including its runners-up.
    window: usize,
    /// Intervals of this larger window.
    intervals: Tensor,
    /// Ends of these intervals.
    far: Tensor,
    grad_rank: Tensor,
    /// Index of each key: its rank keeps it from there.
    keys: Tensor,
}

impl RunnersUp {
    fn new(client: &Client, problem: &Problem, scores: &Tensor) -> Self {
        let window = problem.window.saturating_add(problem.window / 4);
        let intervals = Tensor::empty(client, &problem.intervals_shape(), 4);
        launch_select(client, scores, window, &intervals);
        let ends = intervals.read::<u32>(client).into_iter().skip(1).step_by(2);
        let ends: Vec<u32> = ends.collect();
        let shape = problem.scores_shape();
        Self {
            window,
            intervals,
            far: Tensor::of(client, &shape, &ends),
            grad_rank: Tensor::empty(client, &shape, 4),
            keys: Tensor::words(client, &shape, |key| (key % problem.k_len) as u32),
        }
    }
}

fn launch_select(client: &Client, scores: &Tensor, window: usize, intervals: &Tensor) {
    select(client, scores.binding(), window, intervals.binding()).expect("a valid problem");
}

impl Buffers {
    /// Random inputs, with scores of the given kind in every head, and the engines of the two passes, by default
    /// those that the passes choose.
    pub fn new(
        client: &Client,
        problem: Problem,
        scores: Scores,
        [engine, backward_engine]: [Option<Engine>; 2],
    ) -> Self {
        let mut rng = Rng::new(7);
        let element = problem.element;
        let (q, kv, lse) = (problem.q_shape(), problem.kv_shape(), problem.lse_shape());
        let rows = [q, kv, kv, q].map(|shape| {
            let values = normal(shape.iter().product(), rng.next_u64(), element);
            (Tensor::rounded(client, &shape, &values, element), values)
        });
        let keys = problem.scores_shape();
        let host_scores = problem.has_scores.then(|| -> Vec<f32> {
            let heads = 0..problem.batch * problem.kv_heads;
            let scores = heads.flat_map(|_| scores.head(problem.k_len, &mut rng));
            scores.map(|z| z as f32).collect()
        });
        let scores = host_scores.as_ref().map(|scores| {
            let intervals = Tensor::empty(client, &problem.intervals_shape(), 4);
            (Tensor::of(client, &keys, scores), intervals)
        });
        let empty = |shape: [usize; 4]| Tensor::empty(client, &shape, element.size());
        let mut buffers = Self {
            rows,
            host_scores,
            scores,
            out: empty(q),
            residual: problem.residual_shape().map(empty),
            lse_rest: Tensor::zeros(client, &lse),
            lse: Tensor::empty(client, &lse, 4),
            grads: [q, kv, kv].map(empty),
            grad_scores: (problem.has_scores).then(|| Tensor::empty(client, &keys, 4)),
            runners_up: OnceLock::new(),
            engine: Engine::Portable,
            tuning: Tuning::default(),
            backward_engine: Engine::Portable,
            problem,
        };
        let (inputs, saved) = (buffers.inputs(), buffers.saved());
        buffers.engine = engine.unwrap_or_else(|| {
            problem
                .plan_forward(client, &inputs, None)
                .map_or(Engine::Portable, |plan| plan.engine())
        });
        buffers.backward_engine = backward_engine.unwrap_or_else(|| {
            problem
                .plan_backward(client, &inputs, &saved, None)
                .map_or(Engine::Portable, |plan| plan.engine())
        });
        buffers
    }

    /// Bytes of all inputs and outputs.
    pub fn bytes(&self) -> usize {
        let rows = self.rows.iter().map(|(rows, _)| rows);
        rows.chain([&self.out, &self.lse, &self.lse_rest])
            .chain(&self.grads)
            .chain(self.scores.iter().flat_map(|(s, i)| [s, i]))
            .chain(&self.grad_scores)
            .chain(&self.residual)
            .map(|t| t.bytes)
            .sum()
    }

    /// Intervals that the selection wrote; `None` without scores. Panics if a launch failed.
    pub fn read_intervals(&self, client: &Client) -> Option<Vec<Interval>> {
        let (_, intervals) = self.scores.as_ref()?;
        let words = intervals.read::<u32>(client);
        let interval = |pair: &[u32]| Interval {
            first: pair[0],
            end: pair[1],
        };
        Some(words.chunks_exact(2).map(interval).collect())
    }

    /// Launches a phase, or nothing if it needs scores and there are none. A backward pass reads the results of
    /// [`Phase::ForwardResidual`]. Panics if the engine does not support the problem.
    pub fn launch(&self, client: &Client, phase: Phase) {
        match phase {
            Phase::Select => self.select(client),
            Phase::SelectRunnersUp => {
                if let (Some((scores, _)), Some(runners_up)) =
                    (&self.scores, self.runners_up(client))
                {
                    launch_select(client, scores, runners_up.window, &runners_up.intervals);
                }
            }
            Phase::Lists => self.lists(client),
            Phase::Forward => self.forward(client, false),
            Phase::ForwardResidual => self.forward(client, true),
            Phase::EndToEnd => {
                self.select(client);
                self.forward(client, false);
            }
            Phase::Backward
            | Phase::BackwardResidual
            | Phase::BackwardRunnersUp
            | Phase::BackwardLeaveOneOut
            | Phase::BackwardDeterministic => self.backward(client, phase),
            Phase::Cold => unreachable!("it is timed otherwise"),
        }
    }

    fn select(&self, client: &Client) {
        if let Some((scores, intervals)) = &self.scores {
            launch_select(client, scores, self.problem.window, intervals);
        }
    }

    /// Only the key lists of the forward pass, for tiles of 128 rows, as in the tensor-core engines.
    fn lists(&self, client: &Client) {
        if let Some(selection) = self.inputs().selection {
            let queries = (128 / self.problem.group()).max(1);
            list_all(client, &self.problem, &selection, queries);
        }
    }

    fn forward(&self, client: &Client, for_backward: bool) {
        let mut outputs = Outputs::new(self.out.binding(), self.lse.binding());
        if for_backward {
            outputs.residual = self.residual.as_ref().map(Tensor::binding);
            outputs.lse_rest = Some(self.lse_rest.binding());
        }
        let (problem, inputs) = (&self.problem, self.inputs());
        forward_tuned(self.engine, self.tuning, client, problem, &inputs)
            .and_then(|plan| plan.run(outputs))
            .expect("a problem that the engine serves");
    }

    fn backward(&self, client: &Client, phase: Phase) {
        let (mut problem, mut inputs, mut saved) = (self.problem, self.inputs(), self.saved());
        problem.deterministic = phase == Phase::BackwardDeterministic;
        if !matches!(phase, Phase::Backward | Phase::BackwardDeterministic) {
            saved.residual = self.residual.as_ref().map(Tensor::binding);
        }
        let runners_up = match phase {
            Phase::BackwardRunnersUp | Phase::BackwardLeaveOneOut => self.runners_up(client),
            _ => None,
        };
        if runners_up.is_some() {
            problem = problem.with_constant_scores();
        }
        if let Some(selection) = &mut inputs.selection {
            selection.learning = runners_up.map(|runners_up| RankLearning {
                ends: runners_up.far.binding(),
                max_live: runners_up.window,
                kept_from: (phase == Phase::BackwardLeaveOneOut).then(|| runners_up.keys.binding()),
            });
        }
        let [q, k, v] = self.grads.each_ref().map(Tensor::binding);
        let grads = Gradients {
            q,
            k,
            v,
            scores: (self.grad_scores.as_ref())
                .filter(|_| problem.scores_learn)
                .map(Tensor::binding),
            rank: runners_up.map(|runners_up| runners_up.grad_rank.binding()),
        };
        problem
            .plan_backward(client, &inputs, &saved, Some(self.backward_engine))
            .and_then(|plan| plan.run(grads))
            .expect("a problem that the engine serves");
    }

    /// `None` without scores.
    fn runners_up(&self, client: &Client) -> Option<&RunnersUp> {
        let (scores, _) = self.scores.as_ref()?;
        let made = || RunnersUp::new(client, &self.problem, scores);
        Some(self.runners_up.get_or_init(made))
    }

    fn inputs(&self) -> Inputs {
        let [q, k, v, _] = self.rows.each_ref().map(|(rows, _)| rows.binding());
        Inputs {
            q,
            k,
            v,
            selection: self.scores.as_ref().map(|(scores, intervals)| Selection {
                scores: scores.binding(),
                intervals: intervals.binding(),
                learning: None,
            }),
        }
    }

    /// Results of the forward pass, without the residual.
    fn saved(&self) -> Saved {
        Saved {
            out: self.out.binding(),
            residual: None,
            lse: self.lse.binding(),
            lse_rest: Some(self.lse_rest.binding()),
            grad_out: self.rows[3].0.binding(),
            grad_lse: None,
        }
    }
}
