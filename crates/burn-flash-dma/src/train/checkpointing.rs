//! Gradient checkpointing: blocks that run twice, so that only their inputs are kept.

use crate::Intervals;
use crate::fallback::tensors::constant;
use crate::nn::{DynamicMaskAttention, DynamicMaskInput};
use crate::ops::TrainingOps;
use crate::validate::expect;
use burn::backend::Dispatch;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Gradients, Tensor};
use flash_dma_problem::{AttentionError, Dropout};

/// Selections of a block's attention layers and seeds of their dropout, in call order: recorded in the first pass and
/// reused in the second, where scores that differ in their last bit would select other keys.
#[derive(Debug, Default)]
pub struct Selections {
    made: Vec<Intervals>,
    dropout: Vec<Option<Dropout>>,
    next: Option<usize>,
}

impl Selections {
    /// No selections yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// [`DynamicMaskAttention::forward`], with the first pass's selection if this is the second.
    ///
    /// # Panics
    ///
    /// If [`try_attend`](Self::try_attend) returns an error, with that error's text, or the first pass had fewer
    /// calls.
    pub fn attend(
        &mut self,
        layer: &DynamicMaskAttention,
        input: impl Into<DynamicMaskInput>,
    ) -> Tensor<3> {
        expect(self.try_attend(layer, input))
    }

    /// Like [`attend`](Self::attend), but returns the error.
    ///
    /// # Errors
    ///
    /// Errors of [`DynamicMaskAttention::try_forward_and_intervals`] and
    /// [`DynamicMaskAttention::try_forward_with_intervals`].
    ///
    /// # Panics
    ///
    /// If the first pass had fewer calls.
    pub fn try_attend(
        &mut self,
        layer: &DynamicMaskAttention,
        input: impl Into<DynamicMaskInput>,
    ) -> Result<Tensor<3>, AttentionError> {
        let input = input.into();
        let Some(next) = &mut self.next else {
            let dropout = layer.draw_dropout(input.tokens());
            let (out, intervals) = layer.select_and_attend(input, None, dropout)?;
            self.made.push(intervals);
            self.dropout.push(dropout);
            return Ok(out);
        };
        let intervals = self.made.get(*next);
        let intervals = intervals.expect("the first pass called attention as often");
        let dropout = self.dropout[*next];
        *next += 1;
        let (out, _) = layer.select_and_attend(input, Some(intervals), dropout)?;
        Ok(out)
    }

    /// The selections made so far.
    #[must_use]
    pub fn intervals(&self) -> &[Intervals] {
        &self.made
    }
}

/// Gradient checkpointing of a stack of blocks, one checkpoint per block: only inputs and selections are kept between
/// the passes. It costs a second forward pass of the blocks, and the memory of one block at a time.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig};
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, Selection};
/// use burn_flash_dma::train::{Checkpointed, Selections};
///
/// #[derive(Module, Debug)]
/// struct Block {
///     norm: RmsNorm,
///     attention: DynamicMaskAttention,
/// }
///
/// impl Block {
///     fn forward(&self, x: Tensor<3>, selections: &mut Selections) -> Tensor<3> {
///         let normal = self.norm.forward(x.clone());
///         x + selections.attend(&self.attention, normal)
///     }
/// }
///
/// #[derive(Module, Debug)]
/// struct Model {
///     blocks: Vec<Block>,
///     head: Linear,
/// }
///
/// let device = Device::flex().autodiff();
/// let block = || Block {
///     norm: RmsNormConfig::new(32).init(&device),
///     attention: DynamicMaskAttentionConfig::new(32, 4).with_selection(Selection::keep(8)).init(&device),
/// };
/// let model = Model {
///     blocks: vec![block(), block()],
///     head: LinearConfig::new(32, 1).init(&device),
/// };
/// let x = Tensor::random([2, 20, 32], Distribution::Default, &device);
/// let stack = Checkpointed::forward(&model.blocks, x, Block::forward);
/// let loss = model.head.forward(stack.output()).powi_scalar(2).mean();
/// let gradients = stack.backward(&loss, &model);
/// assert!(gradients.get::<2>(model.blocks[0].attention.q_proj.weight.id).is_some());
/// # }
/// ```
pub struct Checkpointed<'a, M, F> {
    blocks: &'a [M],
    run: F,
    /// The input with its graph.
    input: Tensor<3>,
    /// Input of each block, without a graph, and its selections.
    kept: Vec<(Tensor<3>, Selections)>,
    /// A leaf of the graph of everything that follows.
    output: Tensor<3>,
}

impl<'a, M: Module, F: Fn(&M, Tensor<3>, &mut Selections) -> Tensor<3>> Checkpointed<'a, M, F> {
    /// Applies `run` to the blocks in turn, on `input` of any shape that they take.
    ///
    /// `run` is called again for the backward pass and must compute the same: use [`Selections::attend`] for
    /// attention, which repeats its dropout, and no other dropout. It may cast the block's parameters. `input` may
    /// have a graph, such as an embedding's, and must be associated with autodiff.
    #[must_use]
    pub fn forward(blocks: &'a [M], input: Tensor<3>, run: F) -> Self {
        let mut x = constant(input.clone());
        let mut kept = Vec::with_capacity(blocks.len());
        for block in blocks {
            let mut selections = Selections::new();
            // Records nothing: Burn frees a graph that nobody holds only with the next backward pass.
            let untracked = untracked(block);
            let out = run(&untracked, x.clone(), &mut selections).detach();
            kept.push((x, selections));
            x = out;
        }
        Self {
            blocks,
            run,
            input,
            kept,
            output: x.set_require_grad(true),
        }
    }

    /// Output of the last block, for the loss, which may depend on the blocks through it alone.
    #[must_use]
    pub fn output(&self) -> Tensor<3> {
        self.output.clone()
    }

    /// Selections of each block's attention layers.
    pub fn selections(&self) -> impl Iterator<Item = &[Intervals]> {
        (self.kept.iter()).map(|(_, selections)| selections.intervals())
    }

    /// Gradients of a loss of [`output`](Self::output) for all parameters of `module`, which contains the blocks and
    /// everything that made the input. A parameter with several uses gets their sum.
    ///
    /// # Panics
    ///
    /// If the loss has no graph, or `run` calls attention more often than in the first pass.
    #[must_use]
    pub fn backward<P: Module>(self, loss: &Tensor<1>, module: &P) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        let mut add = |mut grads: Gradients, x: Option<&Tensor<3>>| {
            module.visit(&mut Add {
                from: &mut grads,
                to: &mut gradients,
            });
            x.and_then(|x| x.grad_remove(&mut grads))
        };
        let mut slope = add(loss.backward(), Some(&self.output));
        drop(self.output);
        for (block, (x, selections)) in self.blocks.iter().zip(self.kept).rev() {
            // The loss does not depend on the blocks.
            let Some(gradient) = slope else {
                return gradients;
            };
            let x = x.set_require_grad(true);
            let mut selections = Selections {
                next: Some(0),
                ..selections
            };
            let out = (self.run)(block, x.clone(), &mut selections);
            slope = add(resumed(out, gradient).backward(), Some(&x));
        }
        if let Some(gradient) = slope
            && self.input.is_tracked()
        {
            add(resumed(self.input, gradient).backward(), None);
        }
        gradients
    }
}

/// A copy of a module whose passes record nothing.
pub(super) fn untracked<M: Module>(module: &M) -> M {
    module.visit(&mut Initialise);
    module.clone().no_grad()
}

/// Initialises lazy parameters: until then a copy shares with its original whether it is trained.
struct Initialise;

impl ModuleVisitor for Initialise {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        drop(param.val());
    }
}

/// A zero, `[1]`, whose backward pass gives `output` the gradient.
pub(super) fn resumed<const D: usize>(output: Tensor<D>, gradient: Tensor<D>) -> Tensor<1> {
    let zero = Dispatch::training_resume(output.into_dispatch(), gradient.into_dispatch());
    Tensor::from_dispatch(zero)
}

/// Adds the gradients of a backward pass for the parameters of `module` to earlier ones, `to`.
pub fn add_gradients<M: Module>(module: &M, mut from: Gradients, to: &mut GradientsParams) {
    module.visit(&mut Add {
        from: &mut from,
        to,
    });
}

struct Add<'a> {
    from: &'a mut Gradients,
    to: &'a mut GradientsParams,
}

impl ModuleVisitor for Add<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() {
            return;
        }
        let Some(gradient) = param.val().grad_remove(self.from) else {
            return;
        };
        let gradient = match self.to.remove::<D>(param.id) {
            None => gradient,
            Some(earlier) => earlier + gradient,
        };
        self.to.register(param.id, gradient);
    }
}
