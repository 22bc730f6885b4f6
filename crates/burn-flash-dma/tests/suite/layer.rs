//! A layer and its tokens, and helpers that several tests share.

use crate::case::{grad, random, values};
use burn::config::Config;
use burn::module::{Initializer, Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Gradients, Tensor};
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, Logits, ScoreLearning, Scorer, Selection,
};

/// The width of tokens.
pub const WIDTH: usize = 32;

/// Weights that give outputs of the size of the inputs: with those of an initial model, differences would be lost in
/// rounding.
pub const SPREAD: Initializer = Initializer::Normal {
    mean: 0.0,
    std: 0.3,
};

/// Four query heads on two key/value heads, each of which keeps five keys by their scores.
pub fn config() -> DynamicMaskAttentionConfig {
    DynamicMaskAttentionConfig::new(WIDTH, 4)
        .with_n_kv_heads(Some(2))
        .with_selection(Selection::keep(5).with_recent(Some(0)))
}

/// Changes within the groups of a configuration.
pub trait Groups {
    fn selection(self, change: impl FnOnce(Selection) -> Selection) -> Self;
    fn learning(self, change: impl FnOnce(ScoreLearning) -> ScoreLearning) -> Self;
    fn logits(self, change: impl FnOnce(Logits) -> Logits) -> Self;
}

impl Groups for DynamicMaskAttentionConfig {
    fn selection(mut self, change: impl FnOnce(Selection) -> Selection) -> Self {
        self.selection = change(self.selection);
        self
    }

    fn learning(mut self, change: impl FnOnce(ScoreLearning) -> ScoreLearning) -> Self {
        let learning = self
            .learning
            .unwrap_or_else(|| ScoreLearning::of(self.scores));
        self.learning = Some(change(learning));
        self
    }

    fn logits(mut self, change: impl FnOnce(Logits) -> Logits) -> Self {
        self.logits = change(self.logits);
        self
    }
}

pub fn tokens(batch: usize, len: usize, device: &Device) -> Tensor<3> {
    random([batch, len, WIDTH], device)
}

/// [`tokens`] on the device of a layer.
pub fn tokens_for(layer: &DynamicMaskAttention, batch: usize, len: usize) -> Tensor<3> {
    tokens(batch, len, &layer.q_proj.weight.device())
}

/// A layer of one configuration with the parameters of another.
pub fn like(
    layer: &DynamicMaskAttention,
    config: &DynamicMaskAttentionConfig,
) -> DynamicMaskAttention {
    let device = layer.q_proj.weight.device();
    config
        .init(&device)
        .load_record(layer.clone().into_record())
}

/// A configuration read back from its file.
pub fn reread(config: &DynamicMaskAttentionConfig) -> DynamicMaskAttentionConfig {
    Config::load_binary(config.to_string().as_bytes()).expect("what was saved")
}

/// True if a configuration does not load when `part` of its file is replaced. Panics if it has no such part.
pub fn broken(config: &DynamicMaskAttentionConfig, part: &str, by: &str) -> bool {
    let saved = config.to_string();
    assert!(saved.contains(part), "{saved}");
    DynamicMaskAttentionConfig::load_binary(saved.replace(part, by).as_bytes()).is_err()
}

/// The projection of the scores.
pub fn score_projection(scorer: &Scorer) -> &Param<Tensor<2>> {
    match scorer {
        Scorer::Zoh(zoh) => &zoh.dt_proj,
        Scorer::Linear(linear) => &linear.score_proj,
    }
}

/// Gradient of the projection of a layer's scores.
pub fn of_scores(layer: &DynamicMaskAttention, grads: &Gradients) -> Vec<f64> {
    grad(&score_projection(layer.scorer()).val(), grads)
}

/// Gradients of the squared outputs of two texts of `len` tokens. Panics if the scores learn nothing.
pub fn gradients_with_scores(layer: &DynamicMaskAttention, len: usize) -> Gradients {
    let out = layer.forward(tokens_for(layer, 2, len));
    let grads = out.powi_scalar(2).sum().backward();
    assert!(of_scores(layer, &grads).iter().any(|x| *x != 0.0));
    grads
}

/// A module with all parameters in an element type, cast in the graph of the old ones.
pub fn cast<M: Module>(module: M, dtype: DType) -> M {
    module.map(&mut Cast { dtype, anew: false })
}

/// [`cast`], with parameters that are trained themselves.
pub fn recast<M: Module>(module: M, dtype: DType) -> M {
    module.map(&mut Cast { dtype, anew: true })
}

struct Cast {
    dtype: DType,
    anew: bool,
}

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| match self.anew && value.device().is_autodiff() {
            true => value.cast(self.dtype).detach().require_grad(),
            false => value.cast(self.dtype),
        })
    }
}

/// A parameter of a module.
pub struct Parameter {
    pub name: String,
    pub trained: bool,
    pub gradient: Option<Vec<f64>>,
}

/// Parameters of a module in their order, with their gradients among these.
pub fn parameters<M: Module>(module: &M, gradients: &GradientsParams) -> Vec<Parameter> {
    struct Visitor<'a> {
        gradients: &'a GradientsParams,
        path: Vec<String>,
        found: Vec<Parameter>,
    }
    impl ModuleVisitor for Visitor<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.found.push(Parameter {
                name: self.path.join("."),
                trained: param.is_require_grad(),
                gradient: self.gradients.get::<D>(param.id).map(values),
            });
        }
    }
    let mut visitor = Visitor {
        gradients,
        path: Vec::new(),
        found: Vec::new(),
    };
    module.visit(&mut visitor);
    visitor.found
}
