//! Nodes whose output a backward pass recomputes instead of keeping it.

use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::autodiff::ops::{Backward, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::{Backend, tensor::FloatTensor};
use std::fmt::{self, Debug, Formatter};

/// A tensor of the graph, whatever the strategy of its device.
pub(crate) type Recorded<B> = FloatTensor<Autodiff<B>>;

/// Records a cheap function of `inputs`, which are kept in place of its output. In the backward pass `forward` runs
/// again when the first reader asks for the output, which then lives until its last reader is done. `state` makes the
/// state of the node's own backward step; its argument checkpoints the inputs.
///
/// Burn does the same with its own cheap operations on devices with `gradient_checkpointing()`; here it happens on
/// all, since the inputs are kept for the node's own gradients anyway. If nothing is tracked, the output is kept as
/// usual.
pub(crate) fn record<B, O, F, const N: usize>(
    node: O,
    inputs: [Recorded<B>; N],
    forward: F,
    state: impl FnOnce(&mut dyn FnMut() -> [NodeId; N]) -> O::State,
) -> Recorded<B>
where
    B: Backend,
    O: Backward<B, N>,
    F: Fn([FloatTensor<B>; N]) -> FloatTensor<B> + Clone + Send + 'static,
{
    let prepared = node.prepare::<BalancedCheckpointing>(inputs.each_ref().map(|t| t.node()));
    let tracked = || inputs.iter().filter(|input| input.is_tracked());
    let prepared = match tracked().next() {
        // No backward pass reaches such a node, so none could run it again.
        None => prepared.compute_bound(),
        Some(_) => {
            let again = Again::<B, F, N> {
                inputs: inputs.each_ref().map(|input| match input.is_tracked() {
                    true => Input::Node(input.id()),
                    false => Input::Constant(input.primitive().clone()),
                }),
                forward: forward.clone(),
            };
            prepared
                .memory_bound()
                .retro_forward(again)
                .parents(tracked())
        }
    };
    match prepared.stateful() {
        OpsKind::UnTracked(prep) => prep.finish(forward(inputs.map(|t| t.into_primitive()))),
        OpsKind::Tracked(mut prep) => {
            let state = state(&mut || inputs.each_ref().map(|input| prep.checkpoint(input)));
            prep.finish(state, forward(inputs.map(|t| t.into_primitive())))
        }
    }
}

/// An input of a node that runs again.
#[derive(Debug)]
enum Input<B: Backend> {
    /// A tensor whose value the graph has.
    Node(NodeId),
    /// A tensor outside the graph.
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
        let y = record(Double, [x.clone()], double, |_| ());
        assert!(y.is_tracked());
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
