//! The device buffers of a problem, and the calls on them.

use crate::tensor::{Tensor, encode, normal};
use cubecl::client::Client;
use flash_dma_kernels::internals::{Tuning, forward_tuned, list_all};
use flash_dma_kernels::{
    Engine, Far, Gradients, Inputs, LeftOut, Outputs, Saved, Selection, backward, forward, select,
};
use flash_dma_problem::{Interval, LeaveOneOut, Problem};
use flash_dma_reference::Rng;
use flash_dma_reference::generate::Scores;
use std::sync::OnceLock;

/// A call of the library on the buffers.
pub type Call = fn(&Buffers, &Client);

/// The device buffers of one problem, all contiguous.
#[derive(Debug)]
pub struct Buffers {
    /// Sizes and options.
    pub problem: Problem,
    /// The engine of the forward pass.
    pub engine: Engine,
    /// The fixed choices of the forward engine.
    pub tuning: Tuning,
    /// The engine of the backward pass.
    pub backward_engine: Engine,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Option<(Tensor, Tensor)>,
    pub out: Tensor,
    /// Given exactly if the problem has one.
    residual: Option<Tensor>,
    /// Zero before the first forward pass for a backward pass.
    lse_rest: Tensor,
    pub lse: Tensor,
    grad_out: Tensor,
    pub grads: [Tensor; 3],
    pub grad_scores: Option<Tensor>,
    /// Made when they are first used.
    runners_up: OnceLock<RunnersUp>,
}

/// The buffers of a quarter of the window as runners-up.
#[derive(Debug)]
struct RunnersUp {
    /// The intervals of the greater window.
    intervals: Tensor,
    /// Their ends.
    far: Tensor,
    grad_rank: Tensor,
    /// The index of each key: from there its rank keeps it.
    keys: Tensor,
}

impl RunnersUp {
    fn new(client: &Client, problem: &Problem, scores: &Tensor) -> Self {
        let intervals = Tensor::empty(client, &problem.intervals_shape(), 4);
        Self::select(client, problem, scores, &intervals);
        let ends: Vec<u32> = (intervals.read_words(client).chunks_exact(2))
            .map(|pair| pair[1])
            .collect();
        let shape = problem.scores_shape();
        Self {
            intervals,
            far: Tensor::of(client, &shape, &ends),
            grad_rank: Tensor::empty(client, &shape, 4),
            keys: Tensor::words(client, &shape, |key| (key % problem.k_len) as u32),
        }
    }

    /// The window with its runners-up.
    fn window(problem: &Problem) -> usize {
        problem.window.saturating_add(problem.window / 4)
    }

    fn select(client: &Client, problem: &Problem, scores: &Tensor, intervals: &Tensor) {
        let window = Self::window(problem);
        let intervals = intervals.binding();
        select(client, scores.binding(), window, intervals).expect("a valid problem");
    }
}

/// Host copies of the inputs, for the check.
#[derive(Debug)]
pub struct Host {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub scores: Vec<f32>,
    pub grad_out: Vec<f32>,
}

impl Buffers {
    /// Random inputs, every head's scores of the given kind, and the engines of the two passes; by default the engines
    /// that the passes choose.
    pub fn new(
        client: &Client,
        problem: Problem,
        scores: Scores,
        [engine, backward]: [Option<Engine>; 2],
    ) -> (Self, Host) {
        let mut rng = Rng::new(7);
        let size = problem.element.size();
        let mut random = |shape: &[usize]| {
            let values = normal(shape.iter().product(), rng.next_u64(), problem.element);
            let bytes = encode(&values, problem.element);
            (Tensor::of(client, shape, &bytes), values)
        };
        let (q, q_host) = random(&problem.q_shape());
        let (k, k_host) = random(&problem.kv_shape());
        let (v, v_host) = random(&problem.kv_shape());
        let (grad_out, grad_out_host) = random(&problem.q_shape());
        let scores_host: Vec<f32> = if problem.has_scores {
            (0..problem.batch * problem.kv_heads)
                .flat_map(|_| scores.head(problem.k_len, &mut rng))
                .map(|z| z as f32)
                .collect()
        } else {
            Vec::new()
        };
        let scores = problem.has_scores.then(|| {
            let scores = Tensor::of(client, &problem.scores_shape(), &scores_host);
            (scores, Tensor::empty(client, &problem.intervals_shape(), 4))
        });
        let buffers = Self {
            q,
            k,
            v,
            scores,
            out: Tensor::empty(client, &problem.q_shape(), size),
            residual: (problem.residual_shape()).map(|shape| Tensor::empty(client, &shape, size)),
            lse_rest: Tensor::zeros(client, &problem.lse_shape()),
            lse: Tensor::empty(client, &problem.lse_shape(), 4),
            grad_out,
            grads: [
                Tensor::empty(client, &problem.q_shape(), size),
                Tensor::empty(client, &problem.kv_shape(), size),
                Tensor::empty(client, &problem.kv_shape(), size),
            ],
            grad_scores: problem
                .has_scores
                .then(|| Tensor::empty(client, &problem.scores_shape(), 4)),
            runners_up: OnceLock::new(),
            engine: Engine::Portable,
            tuning: Tuning::default(),
            backward_engine: Engine::Portable,
            problem,
        };
        let (inputs, saved) = (buffers.inputs(), buffers.saved());
        let buffers = Self {
            engine: engine.unwrap_or_else(|| {
                forward::plan(client, &problem, &inputs)
                    .map_or(Engine::Portable, |plan| plan.engine())
            }),
            backward_engine: backward.unwrap_or_else(|| {
                backward::plan(client, &problem, &inputs, &saved)
                    .map_or(Engine::Portable, |plan| plan.engine())
            }),
            ..buffers
        };
        let host = Host {
            q: q_host,
            k: k_host,
            v: v_host,
            scores: scores_host,
            grad_out: grad_out_host,
        };
        (buffers, host)
    }

    /// Bytes of the inputs and outputs together.
    pub fn bytes(&self) -> usize {
        let pairs = self.scores.iter().flat_map(|(s, i)| [s, i]);
        [
            &self.q,
            &self.k,
            &self.v,
            &self.out,
            &self.lse,
            &self.lse_rest,
            &self.grad_out,
        ]
        .into_iter()
        .chain(&self.grads)
        .chain(pairs)
        .chain(&self.grad_scores)
        .chain(&self.residual)
        .map(|t| t.bytes)
        .sum()
    }

    /// The intervals that the selection wrote; `None` without scores.
    ///
    /// # Panics
    ///
    /// If a launch failed.
    pub fn read_intervals(&self, client: &Client) -> Option<Vec<Interval>> {
        let (_, intervals) = self.scores.as_ref()?;
        let words = intervals.read_words(client);
        let interval = |pair: &[u32]| Interval {
            first: pair[0],
            end: pair[1],
        };
        Some(words.chunks_exact(2).map(interval).collect())
    }

    fn inputs(&self) -> Inputs {
        Inputs {
            q: self.q.binding(),
            k: self.k.binding(),
            v: self.v.binding(),
            selection: self.scores.as_ref().map(|(scores, intervals)| Selection {
                scores: scores.binding(),
                intervals: intervals.binding(),
                far: None,
            }),
        }
    }

    /// Launches the selection; nothing without scores.
    pub fn select(&self, client: &Client) {
        if let Some((scores, intervals)) = &self.scores {
            select(
                client,
                scores.binding(),
                self.problem.window,
                intervals.binding(),
            )
            .expect("a valid problem");
        }
    }

    /// Launches the selection of the runners-up; nothing without scores.
    pub fn select_runners_up(&self, client: &Client) {
        if let Some((scores, runners_up)) = self.runners_up(client) {
            RunnersUp::select(client, &self.problem, scores, &runners_up.intervals);
        }
    }

    /// The scores and the runners-up; `None` without scores.
    fn runners_up(&self, client: &Client) -> Option<(&Tensor, &RunnersUp)> {
        let (scores, _) = self.scores.as_ref()?;
        let made = || RunnersUp::new(client, &self.problem, scores);
        Some((scores, self.runners_up.get_or_init(made)))
    }

    /// Launches the key lists of the forward pass alone, for tiles of 128 rows, as in the tensor-core engines; nothing
    /// without scores.
    pub fn lists(&self, client: &Client) {
        if let Some(selection) = self.inputs().selection {
            let queries = (128 / self.problem.group()).max(1);
            list_all(client, &self.problem, &selection, queries);
        }
    }

    /// Launches the forward pass.
    ///
    /// # Panics
    ///
    /// If the engine does not support the problem.
    pub fn forward(&self, client: &Client) {
        self.launch_forward(client, false);
    }

    /// Launches the forward pass as autodiff does, with the residual of the output if there is one.
    ///
    /// # Panics
    ///
    /// If the engine does not support the problem.
    pub fn forward_with_residual(&self, client: &Client) {
        self.launch_forward(client, true);
    }

    fn launch_forward(&self, client: &Client, for_backward: bool) {
        let mut outputs = Outputs::new(self.out.binding(), self.lse.binding());
        if for_backward {
            outputs.residual = self.residual.as_ref().map(Tensor::binding);
            outputs.lse_rest = Some(self.lse_rest.binding());
        }
        forward_tuned(
            self.engine,
            self.tuning,
            client,
            &self.problem,
            &self.inputs(),
        )
        .and_then(|plan| plan.run(outputs))
        .expect("a problem that the engine serves");
    }

    /// Launches the selection and the forward pass.
    ///
    /// # Panics
    ///
    /// If the engine does not support the problem.
    pub fn end_to_end(&self, client: &Client) {
        self.select(client);
        self.forward(client);
    }

    fn saved(&self) -> Saved {
        Saved {
            out: self.out.binding(),
            residual: None,
            lse: self.lse.binding(),
            lse_rest: Some(self.lse_rest.binding()),
            grad_out: self.grad_out.binding(),
            grad_lse: None,
        }
    }

    /// Launches the backward pass; reads what the forward pass wrote.
    ///
    /// # Panics
    ///
    /// If the engine does not support the problem.
    pub fn backward(&self, client: &Client) {
        self.launch_backward(client, &self.problem, self.saved(), None);
    }

    /// Launches the backward pass as autodiff does; reads what [`forward_with_residual`](Self::forward_with_residual)
    /// wrote.
    ///
    /// # Panics
    ///
    /// If the engine does not support the problem.
    pub fn backward_with_residual(&self, client: &Client) {
        self.launch_backward(client, &self.problem, self.saved_with_residual(), None);
    }

    /// As [`backward_with_residual`](Self::backward_with_residual), with runners-up.
    ///
    /// # Panics
    ///
    /// If the engine does not support the problem.
    pub fn backward_with_runners_up(&self, client: &Client) {
        self.backward_by_rank(client, None);
    }

    /// As [`backward_with_runners_up`](Self::backward_with_runners_up), with what kept keys are worth.
    ///
    /// # Panics
    ///
    /// If the engine does not support the problem.
    pub fn backward_leaving_out(&self, client: &Client) {
        self.backward_by_rank(client, Some(LeaveOneOut::default()));
    }

    fn backward_by_rank(&self, client: &Client, how: Option<LeaveOneOut>) {
        let runners_up = self.runners_up(client).map(|(_, runners_up)| runners_up);
        let learned = runners_up.map(|runners_up| (runners_up, how));
        self.launch_backward(client, &self.problem, self.saved_with_residual(), learned);
    }

    fn saved_with_residual(&self) -> Saved {
        Saved {
            residual: self.residual.as_ref().map(Tensor::binding),
            ..self.saved()
        }
    }

    /// Launches the backward pass with a fixed order of all sums.
    ///
    /// # Panics
    ///
    /// If the engine does not support the problem.
    pub fn backward_deterministic(&self, client: &Client) {
        let mut problem = self.problem;
        problem.deterministic = true;
        self.launch_backward(client, &problem, self.saved(), None);
    }

    fn launch_backward(
        &self,
        client: &Client,
        problem: &Problem,
        saved: Saved,
        learned: Option<(&RunnersUp, Option<LeaveOneOut>)>,
    ) {
        let [q, k, v] = self.grads.each_ref().map(Tensor::binding);
        let scores = self.grad_scores.as_ref().map(Tensor::binding);
        let grads = Gradients {
            q,
            k,
            v,
            scores,
            rank: learned.map(|(runners_up, _)| runners_up.grad_rank.binding()),
        };
        let mut inputs = self.inputs();
        if let Some(selection) = &mut inputs.selection {
            selection.far = learned.map(|(runners_up, how)| Far {
                ends: runners_up.far.binding(),
                max_live: RunnersUp::window(problem),
                left_out: how.map(|how| LeftOut {
                    from: runners_up.keys.binding(),
                    how,
                }),
            });
        }
        backward::plan_on(self.backward_engine, client, problem, &inputs, &saved)
            .and_then(|plan| plan.run(grads))
            .expect("a problem that the engine serves");
    }
}
