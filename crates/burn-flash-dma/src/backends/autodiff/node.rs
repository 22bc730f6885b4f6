//! The node of an attention pass in the autodiff graph.

use super::handed::HandedGradient;
use crate::types::{Forwarded, Saved, Wanted};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, Backend, TensorMetadata};
use flash_dma_problem::tensors::{self, Outputs};
use flash_dma_problem::{AttentionError, TensorName};
use std::fmt::Debug;
use std::marker::PhantomData;

/// An attention pass of `N` inputs, some of which may be absent, and everything else it keeps.
pub(crate) trait Pass<B: Backend, const N: usize>:
    Clone + Debug + Send + Sync + 'static
{
    fn forward(&self, inputs: [Option<FloatTensor<B>>; N], wanted: Wanted) -> Forwarded<B>;

    /// Gradients of the inputs that are `tracked`.
    fn backward(
        self,
        inputs: [Option<FloatTensor<B>>; N],
        saved: Saved<B>,
        tracked: [bool; N],
    ) -> [Option<FloatTensor<B>>; N];
}

pub(super) type Recorded<B, C> = FloatTensor<Autodiff<B, C>>;

/// Records the forward pass. The first of the inputs is present.
///
/// If `lse` must be differentiable, it is the node with the inputs as parents, and `out` a node on top of it, see
/// [`HandedGradient`]. So there is still one backward pass.
pub(crate) fn record<B: Backend, C: CheckpointStrategy, P: Pass<B, N>, const N: usize>(
    inputs: [Option<Recorded<B, C>>; N],
    pass: P,
    wanted: Wanted,
) -> Forwarded<Autodiff<B, C>> {
    let inner =
        |inputs: [Option<Recorded<B, C>>; N]| inputs.map(|input| input.map(|t| t.into_primitive()));
    if wanted == Wanted::Saved {
        return constants(pass.forward(inner(inputs), wanted));
    }
    let first = inputs[0].as_ref().expect("the first input is present");
    // A node has as many parents for every call. An absent input is a constant, so that nothing counts it: a distributed
    // parameter waits for a gradient from every node that has it as a parent.
    let nodes = inputs.each_ref().map(|input| match input {
        Some(input) => input.node(),
        None => Autodiff::<B, C>::from_inner(first.primitive().clone()).node(),
    });
    let node = AttentionNode::<P>(PhantomData);
    match node.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::UnTracked(prep) => {
            let results = pass.forward(inner(inputs), wanted).into_tensors();
            let out = prep.finish(results.out);
            let lse = Autodiff::<B, C>::from_inner(results.lse);
            Forwarded::from_tensors(Outputs::new(out, lse))
        }
        OpsKind::Tracked(mut prep) => {
            let checkpoints = (inputs.each_ref()).map(|t| t.as_ref().map(|t| prep.checkpoint(t)));
            let results = pass.forward(inner(inputs), Wanted::Saved).into_tensors();
            let (out, lse) = (results.out.clone(), results.lse.clone());
            let shared = (wanted == Wanted::OutAndLse).then(HandedGradient::<B>::new);
            let state = State {
                inputs: checkpoints,
                pass,
                results,
                grad_out: shared.clone(),
            };
            let Some(shared) = shared else {
                let lse = Autodiff::<B, C>::from_inner(lse);
                return Forwarded::from_tensors(Outputs::new(prep.finish(state, out), lse));
            };
            let tracked_lse = prep.finish(state, lse.clone());
            let prep = OutNode.prepare::<C>([tracked_lse.node()]);
            let out = match prep.compute_bound().stateful() {
                OpsKind::Tracked(prep) => prep.finish((shared, lse), out),
                OpsKind::UnTracked(prep) => prep.finish(out),
            };
            Forwarded::from_tensors(Outputs::new(out, tracked_lse))
        }
    }
}

#[derive(Clone, Debug)]
struct State<B: Backend, P, const N: usize> {
    inputs: [Option<NodeId>; N],
    pass: P,
    results: Outputs<FloatTensor<B>>,
    /// Present if the node's own gradient is that of `lse` rather than of `out`.
    grad_out: Option<HandedGradient<B>>,
}

/// The node whose parents are the inputs. It runs the backward pass.
#[derive(Debug)]
struct AttentionNode<P>(PhantomData<P>);

impl<B: Backend, P: Pass<B, N>, const N: usize> Backward<B, N> for AttentionNode<P> {
    type State = State<B, P, N>;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let state = ops.state;
        let (grad_out, grad_lse) = match state.grad_out {
            None => (grad, None),
            Some(shared) => {
                // If the loss depends only on `lse`, the node of `out` never ran.
                let grad_out = shared.take();
                let grad_out = grad_out.unwrap_or_else(|| zeros_like::<B>(&state.results.out));
                (grad_out, Some(grad))
            }
        };
        let inputs = (state.inputs)
            .map(|id| id.map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id)));
        let saved = tensors::Saved::new(state.results, grad_out, grad_lse);
        let saved = Saved::from_tensors(saved);
        let tracked = ops.parents.each_ref().map(Option::is_some);
        let results = state.pass.backward(inputs, saved, tracked);
        for (parent, grad) in ops.parents.into_iter().zip(results) {
            if let (Some(parent), Some(grad)) = (parent, grad) {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

/// The node of `out` on top of a differentiable `lse`: passes its gradient on.
#[derive(Debug)]
struct OutNode;

impl<B: Backend> Backward<B, 1> for OutNode {
    /// The slot for the gradient, and `lse`, which gives the shape of its zeros.
    type State = (HandedGradient<B>, FloatTensor<B>);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let (shared, lse) = ops.state;
        shared.put(grad);
        if let [Some(parent)] = ops.parents {
            // The parent's step runs next and needs a gradient, whatever the loss uses.
            grads.register::<B>(parent.id, zeros_like::<B>(&lse));
        }
    }
}

fn zeros_like<B: Backend>(tensor: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_zeros(tensor.shape(), &tensor.device(), tensor.dtype().into())
}

/// Saved tensors of a pass, off the graph.
pub(crate) fn inner<B: Backend, C: CheckpointStrategy>(saved: Saved<Autodiff<B, C>>) -> Saved<B> {
    let inner = saved.into_tensors();
    Saved::from_tensors(inner.map(|t| t.into_primitive(), |t| t.into_primitive()))
}

/// The results of a pass as constants of the graph.
fn constants<B: Backend, C: CheckpointStrategy>(
    results: Forwarded<B>,
) -> Forwarded<Autodiff<B, C>> {
    let constant = Autodiff::<B, C>::from_inner;
    Forwarded::from_tensors(results.into_tensors().map(constant, constant))
}

/// Refuses tracked tensors in a backward pass: its results are constants, so a second derivative would silently be
/// zero.
///
/// # Panics
///
/// With the text of [`AttentionError::SecondOrder`].
pub(crate) fn first_order<const N: usize>(tensors: [(TensorName, bool); N]) {
    if let Some((tensor, _)) = tensors.into_iter().find(|&(_, tracked)| tracked) {
        panic!("{}", AttentionError::SecondOrder { tensor });
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::backend::Flex;
    use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
    use burn::backend::ops::FloatTensorOps;
    use burn::tensor::TensorData;
    use std::sync::{Arc, Mutex};

    type Graph = Autodiff<Flex>;

    /// Hands its first input on, and notes which inputs its backward pass finds tracked.
    #[derive(Clone, Debug, Default)]
    struct First(Arc<Mutex<Vec<[bool; 3]>>>);

    impl Pass<Flex, 3> for First {
        fn forward(&self, [x, ..]: [Option<FloatTensor<Flex>>; 3], _: Wanted) -> Forwarded<Flex> {
            let x = x.expect("it is present");
            Forwarded::from_tensors(Outputs::new(x.clone(), x))
        }

        fn backward(
            self,
            _: [Option<FloatTensor<Flex>>; 3],
            saved: Saved<Flex>,
            tracked: [bool; 3],
        ) -> [Option<FloatTensor<Flex>>; 3] {
            self.0.lock().expect("no test panics").push(tracked);
            [Some(saved.into_tensors().grad_out), None, None]
        }
    }

    #[test]
    fn an_absent_input_is_no_parent() {
        let tensor = || Graph::float_from_data(TensorData::from([3.0f32]), &Default::default());
        let x = Graph::float_set_require_grad(tensor(), true);
        let pass = First::default();
        for second in [None, Some(tensor())] {
            let inputs = [Some(x.clone()), second, None];
            let wanted = Wanted::Out;
            let out = record::<Flex, NoCheckpointing, _, 3>(inputs, pass.clone(), wanted);
            let grads = Graph::backward(out.into_tensors().out);
            assert!(Graph::grad(&x, &grads).is_some());
        }
        let found = pass.0.lock().expect("no test panics").clone();
        assert_eq!(found, [[true, false, false]; 2]);
    }
}
