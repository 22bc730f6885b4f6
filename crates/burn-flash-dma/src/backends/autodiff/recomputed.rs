//! Nodes whose output a backward pass computes again instead of keeping it.

use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::autodiff::ops::{Backward, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::{Backend, tensor::FloatTensor};
use std::fmt::{self, Debug, Formatter};

/// A tensor of the graph, whatever the strategy of its device.
pub(crate) type Recorded<B> = FloatTensor<Autodiff<B>>;

/// Prepares a node of a cheap function of `inputs`, which are kept in place of its output: `forward` runs again when the
/// first of its readers asks for the output in the backward pass, and what it gives stays until the last one has.
///
/// That is how Burn treats its own cheap operations on devices with `gradient_checkpointing()`; here on all of them,
/// since the inputs are kept for the node's own gradients anyway. If nothing is tracked, the output is like any other.
pub(crate) fn prepare<B, O, F, const N: usize>(
    node: O,
    inputs: [&Recorded<B>; N],
    forward: F,
) -> OpsKind<O, B, O::State, BalancedCheckpointing, N>
where
    B: Backend,
    O: Backward<B, N>,
    F: Fn([FloatTensor<B>; N]) -> FloatTensor<B> + Send + 'static,
{
    let prepared = node.prepare::<BalancedCheckpointing>(inputs.map(|input| input.node()));
    let tracked = || inputs.into_iter().filter(|input| input.is_tracked());
    if tracked().next().is_none() {
        // No backward pass comes by such a node, so none could run it again.
        return prepared.compute_bound().stateful();
    }
    let inputs: [Input<B>; N] = inputs.map(|input| match input.is_tracked() {
        true => Input::Node(input.id()),
        false => Input::Constant(input.primitive().clone()),
    });
    let again = Again { inputs, forward };
    let prepared = prepared.memory_bound().retro_forward(again);
    prepared.parents(tracked()).stateful()
}

/// An input of a node that runs again.
#[derive(Debug)]
enum Input<B: Backend> {
    /// The graph has its value.
    Node(NodeId),
    /// The graph knows nothing of it.
    Constant(FloatTensor<B>),
}

/// The forward pass of a node, to be run again.
struct Again<B: Backend, F, const N: usize> {
    inputs: [Input<B>; N],
    forward: F,
}

impl<B: Backend, F, const N: usize> Debug for Again<B, F, N> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Again")
            .field("inputs", &self.inputs)
            .finish_non_exhaustive()
    }
}

impl<B, F, const N: usize> RetroForward for Again<B, F, N>
where
    B: Backend,
    F: Fn([FloatTensor<B>; N]) -> FloatTensor<B> + Send + 'static,
{
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let inputs = self.inputs.each_ref().map(|input| match input {
            Input::Node(id) => states.get_state::<FloatTensor<B>>(id),
            Input::Constant(tensor) => tensor.clone(),
        });
        states.save(out_node, (self.forward)(inputs));
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::backend::autodiff::checkpoint::base::Checkpointer;
    use burn::backend::autodiff::grads::Gradients;
    use burn::backend::autodiff::ops::Ops;
    use burn::backend::ops::FloatTensorOps;
    use burn::backend::{AutodiffBackend, Flex};
    use burn::tensor::TensorData;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[derive(Debug)]
    struct Double;

    impl Backward<Flex, 1> for Double {
        type State = ();

        fn backward(self, ops: Ops<(), 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let gradient = grads.consume::<Flex>(&ops.node);
            if let [Some(parent)] = ops.parents {
                let gradient = Flex::float_mul_scalar(gradient, 2.0.into());
                grads.register::<Flex>(parent.id, gradient);
            }
        }
    }

    #[test]
    fn a_result_is_computed_once_more_whatever_reads_it() {
        type Graph = Autodiff<Flex>;
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = runs.clone();
        let double = move |[x]: [FloatTensor<Flex>; 1]| {
            counted.fetch_add(1, Ordering::Relaxed);
            Flex::float_mul_scalar(x, 2.0.into())
        };
        let x = Graph::float_from_data(TensorData::from([3.0f32]), &Default::default());
        let x = Graph::float_set_require_grad(x, true);
        let y = match prepare(Double, [&x], double.clone()) {
            OpsKind::Tracked(prep) => prep.finish((), double([x.primitive().clone()])),
            OpsKind::UnTracked(_) => panic!("it is tracked"),
        };
        // (2 x)⁴, by products that keep their factors.
        let product = Graph::float_mul;
        let fourth = product(product(y.clone(), y.clone()), product(y.clone(), y));
        let grads = Graph::backward(fourth);
        let gradient = Graph::grad(&x, &grads).expect("it is tracked");
        let gradient = burn::tensor::read_sync(Flex::float_into_data(gradient)).unwrap();
        assert_eq!(gradient.iter::<f32>().next(), Some(64.0 * 27.0));
        assert_eq!(runs.load(Ordering::Relaxed), 2);
    }
}
