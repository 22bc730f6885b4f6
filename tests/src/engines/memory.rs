//! The device memory that the kernels request, and the memory that they announce.

use super::kernels::{Kernels, Ran, Target, planned};
use flash_dma_kernels::internals::{Peak, peak_of};
use flash_dma_kernels::{self as engine, Backward as _, Engine as Kind, Forward as _};
use flash_dma_problem::ElementType::F32;
use flash_dma_problem::Problem;

/// A call of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Called {
    /// The selection.
    Select,
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
    /// The backward pass with runners-up.
    Ranked,
}

/// The workspace of a call.
#[derive(Clone, Copy, Debug)]
pub struct Workspace {
    /// The call.
    pub called: Called,
    /// The bytes that the call announced before it was made.
    pub said: usize,
    /// The bytes that it requested.
    pub peak: Peak,
}

impl<T: Target> Kernels<T> {
    /// The engine of a problem computed on `chosen` by the library: this target's engine if `chosen` uses tensor cores.
    pub(crate) fn forced(chosen: Kind) -> Kind {
        match T::ENGINE {
            Some(forced) if chosen != Kind::Portable => forced,
            _ => chosen,
        }
    }

    /// Makes each call of a problem once, on the engine of this target, and watches its buffers.
    pub fn workspaces(&self, problem: &Problem) -> Vec<Workspace> {
        let (client, p) = (&self.client, problem);
        let output = |shape: &[usize], element| self.output(shape, element, 0).binding();
        let [q, grad_out, grad_q] = [(); 3].map(|()| output(&p.q_shape(), p.element));
        let [k, v, grad_k, grad_v] = [(); 4].map(|()| output(&p.kv_shape(), p.element));
        let [scores, grad_scores] = [(); 2].map(|()| output(&p.scores_shape(), F32));
        let intervals = output(&p.intervals_shape(), F32);
        let mut all = Vec::new();
        let mut watch = |called, said, run: &dyn Fn()| {
            let peak = peak_of(client, run);
            all.push(Workspace { called, said, peak });
        };
        let selection = p.has_scores.then(|| engine::Selection {
            scores: scores.clone(),
            intervals: intervals.clone(),
            learning: None,
        });
        if p.has_scores {
            let said = engine::select_workspace(client, p.scores_shape(), p.window);
            watch(Called::Select, said, &|| {
                let (scores, intervals) = (scores.clone(), intervals.clone());
                engine::select(client, scores, p.window, intervals).expect("a selection");
            });
        }
        let inputs = engine::Inputs { q, k, v, selection };
        let forwarded = Ran::new(p, true, |shape, element| self.output(shape, element, 0));
        let saved = forwarded.saved(grad_out, None);
        let grads = engine::Gradients {
            q: grad_q,
            k: grad_k,
            v: grad_v,
            scores: p.scores_learn.then_some(grad_scores),
            rank: None,
        };
        let kind = Self::forced(planned(&p.plan_forward(client, &inputs, None)));
        let plan = || p.plan_forward(client, &inputs, Some(kind)).expect("a plan");
        watch(Called::Forward, plan().workspace_bytes(), &|| {
            let result = plan().run(forwarded.outputs());
            result.expect("a forward pass");
        });
        let kind = Self::forced(planned(&p.plan_backward(client, &inputs, &saved, None)));
        let plan = || {
            p.plan_backward(client, &inputs, &saved, Some(kind))
                .expect("a plan")
        };
        watch(Called::Backward, plan().workspace_bytes(), &|| {
            plan().run(grads.clone()).expect("a backward pass");
        });
        if let Some(selection) = &inputs.selection {
            let [ends, from, rank] = [(); 3].map(|()| output(&p.scores_shape(), F32));
            let selection = engine::Selection {
                learning: Some(engine::RankLearning {
                    ends,
                    max_live: p.window.saturating_add(p.window / 4),
                    kept_from: Some(from),
                }),
                ..selection.clone()
            };
            let inputs = engine::Inputs {
                selection: Some(selection),
                ..inputs.clone()
            };
            let grads = engine::Gradients {
                rank: Some(rank),
                ..grads.clone()
            };
            let plan = || {
                p.plan_backward(client, &inputs, &saved, Some(kind))
                    .expect("a plan")
            };
            watch(Called::Ranked, plan().workspace_bytes(), &|| {
                plan().run(grads.clone()).expect("a backward pass");
            });
        }
        all
    }
}
