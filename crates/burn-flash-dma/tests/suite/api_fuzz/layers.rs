//! Calls of the layers.

use super::draw::Draw;
use crate::layer::recast;
use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};
use burn_flash_dma::nn::mha::*;
use burn_flash_dma::nn::*;
use burn_flash_dma::train::{
    DeviceGroup, PartLayers, Parts, Selections, StepInParts, send, try_in_parts,
};
use burn_flash_dma::{AlibiSlopes, AttentionError, KeyRanges, TilePlan};
use std::cell::Cell;
use std::ops::Range;

/// A width of tokens, mostly that of the heads.
#[derive(Debug)]
struct Widths {
    d_model: usize,
    n_heads: usize,
    kv_heads: Option<usize>,
    head_dim: Option<usize>,
}

fn widths(draw: &mut Draw) -> Widths {
    let n_heads = draw.pick(&[1, 2, 2, 4]);
    let mut widths = Widths {
        d_model: 8 * n_heads,
        n_heads,
        kv_heads: draw.pick(&[None, Some(1), Some(n_heads)]),
        head_dim: draw.pick(&[None, None, Some(8), Some(16)]),
    };
    if draw.one_in(20) {
        match draw.below(4) {
            0 => widths.d_model = draw.end("d_model"),
            1 => widths.n_heads = draw.end("n_heads"),
            2 => widths.kv_heads = Some(draw.end("kv_heads")),
            _ => widths.head_dim = Some(draw.end("head_dim")),
        }
    }
    draw.note(&widths);
    widths
}

/// Rotary encodings with few positions, with a refused extreme size or base, or none.
fn rotary(draw: &mut Draw) -> Option<Rope> {
    draw.maybe(|draw| {
        let positions = draw.choose("positions", &[40, 40, 40, 4, 1, 0, usize::MAX]);
        let base = draw.rarely(4, |draw| draw.number("base", &[1e4, 10.0]) as f32);
        Rope::new(positions).with_base(base.unwrap_or(1e4))
    })
}

fn qk_norm(draw: &mut Draw) -> QkNorm {
    match draw.one_in(3) {
        true => QkNorm::None,
        false => {
            let epsilon = draw.rarely(6, |draw| draw.number("epsilon", &[1e-5]));
            epsilon.map_or(QkNorm::default(), QkNorm::Rms)
        }
    }
}

fn learning(draw: &mut Draw) -> Option<ScoreLearning> {
    let learning = ScoreLearning::new()
        .with_runners_up(draw.rarely(4, |draw| draw.count("runners-up")))
        .with_kept(draw.one_in(2))
        .with_compete(draw.one_in(2))
        .with_tokens(draw.one_in(2));
    draw.maybe(|_| learning)
}

/// A layer in the type of the case, or in f32.
fn typed<M: Module>(draw: &mut Draw, layer: M) -> M {
    if draw.one_in(4) {
        return layer;
    }
    draw.note(("parameters", draw.dtype));
    recast(layer, draw.dtype)
}

fn sparse_config(draw: &mut Draw) -> DynamicMaskAttentionConfig {
    let widths = widths(draw);
    let mut config = DynamicMaskAttentionConfig::new(widths.d_model, widths.n_heads)
        .with_n_kv_heads(widths.kv_heads)
        .with_head_dim(widths.head_dim)
        .with_rope(rotary(draw))
        .with_learning(learning(draw))
        .with_qk_norm(qk_norm(draw));
    let selection = &mut config.selection;
    selection.window = draw.maybe(|draw| draw.count("window"));
    if selection.window.is_some() || draw.one_in(20) {
        selection.recent = draw.maybe(|draw| draw.pick(&[0, 1, 1, 2]));
        selection.sinks = draw.pick(&[0, 0, 0, 0, 1, 1, 2]);
    }
    config.scores = draw.pick(&[Scores::Ranking, Scores::Dma, Scores::Added]);
    let ranks = config.scores == Scores::Ranking || draw.one_in(10);
    selection.recency = draw.one_in(2);
    if ranks && draw.one_in(4) {
        selection.turns = Some(draw.count("run"));
    }
    config.bias = draw.one_in(2);
    config.logits = Logits::new()
        .with_causal(!draw.one_in(5))
        .with_scale(draw.rarely(6, |draw| draw.number("scale", &[0.5]) as f32))
        .with_softcap(draw.rarely(6, |draw| draw.number("softcap", &[5.0]) as f32))
        .with_alibi(draw.rarely(6, |_| AlibiSlopes::standard(config.n_heads.min(9))))
        .with_sink(draw.one_in(2));
    if draw.one_in(6) {
        config.logits.dropout = draw.number("rate", &[0.1, 0.0]);
    }
    draw.note(&config);
    config
}

fn sparse_layer(draw: &mut Draw) -> Option<(DynamicMaskAttention, usize, usize)> {
    let config = sparse_config(draw);
    let device = draw.device.clone();
    let layer = call!(draw, config.try_init(&device))?;
    let kv_heads = config.resolved_kv_heads();
    // Parameters are made on first use, so too many of them are for Burn to refuse.
    Some((typed(draw, layer), config.d_model, kv_heads)).filter(|_| config.d_model < 100)
}

fn input(draw: &mut Draw, width: usize, kv_heads: usize) -> DynamicMaskInput {
    let (batch, len) = (draw.batch(), draw.len());
    let x = draw.tensor("x", [batch, len, width]);
    let mut input = DynamicMaskInput::new(x);
    if draw.one_in(4) {
        let lengths: Vec<usize> = (0..batch).map(|_| draw.below(len + 1)).collect();
        draw.note(&lengths);
        input = input.lengths(lengths);
    }
    if draw.one_in(4) {
        input = input.documents(draw.documents(batch, len));
    }
    if draw.one_in(4) {
        let shape = draw.part_of([batch, kv_heads, len, len]);
        input = input.mask(draw.mask(shape));
    }
    input
}

pub fn sparse(draw: &mut Draw) {
    let Some((mut layer, width, kv_heads)) = sparse_layer(draw) else {
        return;
    };
    if draw.one_in(5) {
        let window = draw.maybe(|draw| draw.end("window"));
        call!(draw, layer.try_set_keep_window(window));
    }
    let input = input(draw, width, kv_heads);
    match draw.below(9) {
        0 | 7 => finish!(draw, layer.try_forward(input)),
        1 => {
            let [batch, len] = [draw.batch(), draw.len()];
            let dtype = draw.pick(&[DType::F32, DType::F16]);
            let x = draw.tensor("x", [batch, len, width]);
            let scores = draw.tensor_in("scores", [batch, kv_heads, len], dtype);
            finish!(draw, layer.try_forward_with_scores(x, scores));
        }
        2 | 3 => {
            let made = call!(draw, layer.try_forward_and_intervals(input.clone()));
            let Some((out, intervals)) = made else { return };
            draw.finish(out);
            let input = match draw.one_in(8) {
                true => self::input(draw, width, kv_heads),
                false => input,
            };
            finish!(draw, layer.try_forward_with_intervals(input, &intervals));
        }
        6 => {
            let mut selections = Selections::new();
            finish!(draw, selections.try_attend(&layer, input));
        }
        4 => finish!(draw, layer.try_scores(input)),
        5 => {
            call!(draw, layer.try_selection(input));
        }
        _ => cached(draw, &layer, width),
    }
}

fn cached(draw: &mut Draw, layer: &DynamicMaskAttention, width: usize) {
    let layer = match draw.one_in(4) {
        true => layer.clone(),
        false => layer.valid(),
    };
    let batch = draw.batch();
    let cache = call!(draw, layer.try_init_cache(batch));
    let Some(mut cache) = cache else { return };
    for _ in 0..draw.below(4) {
        let len = draw.pick(&[0, 1, 1, 2, 20]);
        let device = std::mem::replace(&mut draw.device, burn::tensor::Device::flex());
        let x = draw.tensor("x", [batch, len, width]);
        draw.device = device;
        if draw.one_in(4) {
            let recorded = draw.one_in(2);
            cache.set_recorded(recorded);
        }
        finish!(draw, layer.try_forward_cached(x, &mut cache));
        if batch > 0 && draw.one_in(3) {
            call!(draw, cache.try_reset(0));
        }
    }
}

pub fn in_parts(draw: &mut Draw) {
    let Some((layer, width, _)) = sparse_layer(draw) else {
        return;
    };
    let layer = layer.fork(&draw.device.clone().autodiff());
    // No sequence, no token and parts of none are refused by a panic.
    let [batch, len] = [draw.batch(), draw.len()].map(|size| size.max(1));
    let part = draw.choose("part", &[1, 2, 7, 50, usize::MAX]);
    let x = draw.tensor("x", [batch, len, width]);
    if x.dims()[1] != len {
        // The parts would not be its own.
        return;
    }
    let mut parts = Parts::new(batch, len, part);
    if draw.one_in(3) {
        let documents = draw.documents(batch, len);
        let with = call!(draw, parts.try_with_documents(documents));
        let Some(with) = with else { return };
        parts = with;
    }
    let (attended, refused) = (Cell::new(0), Cell::new(0));
    draw.call("try_in_parts", || {
        let features =
            |layer: &DynamicMaskAttention, tokens: Range<usize>, parts: &mut PartLayers| {
                let out = parts.try_attend(layer, x.clone().narrow(1, tokens.start, tokens.len()));
                attended.set(attended.get() + 1);
                refused.set(refused.get() + usize::from(out.is_err()));
                out
            };
        try_in_parts(&layer, &parts, features, |_, _, out| {
            Ok(out.cast(DType::F32).sum())
        })
    });
    let counts = draw
        .counts
        .entry("PartLayers::try_attend".into())
        .or_default();
    *counts = [counts[0] + attended.get(), counts[1] + refused.get()];
}

/// A layer alone, on tokens of which each device has a part.
struct Alone(Tensor<3>);

impl StepInParts<DynamicMaskAttention> for Alone {
    type Block = DynamicMaskAttention;

    fn to_device(&self, device: &Device) -> Self {
        Self(send(self.0.clone(), device))
    }

    fn input(
        &self,
        _: &DynamicMaskAttention,
        tokens: Range<usize>,
    ) -> Result<Tensor<3>, AttentionError> {
        let x = self.0.clone().narrow(1, tokens.start, tokens.len());
        Ok(x.autodiff())
    }

    fn blocks<'a>(&self, layer: &'a DynamicMaskAttention) -> &'a [DynamicMaskAttention] {
        std::slice::from_ref(layer)
    }

    fn block(
        &self,
        layer: &DynamicMaskAttention,
        x: Tensor<3>,
        layers: &mut PartLayers,
    ) -> Result<Tensor<3>, AttentionError> {
        layers.try_attend(layer, x)
    }

    fn loss(
        &self,
        _: &DynamicMaskAttention,
        _: Range<usize>,
        out: Tensor<3>,
    ) -> Result<Tensor<1>, AttentionError> {
        Ok(out.cast(DType::F32).sum())
    }
}

pub fn over_devices(draw: &mut Draw) {
    let devices = vec![draw.device.clone(); draw.choose("devices", &[0, 1, 2, 3])];
    let group = call!(draw, DeviceGroup::try_new(&devices));
    let Some((layer, width, _)) = sparse_layer(draw) else {
        return;
    };
    let Some(mut group) = group else { return };
    let layer = layer.fork(&draw.device.clone().autodiff());
    // No sequence, no part and parts without a token are refused by a panic.
    let batch = draw.batch().max(1);
    let count = if draw.one_in(8) { 1 } else { devices.len() };
    let lengths: Vec<usize> = (0..count).map(|_| draw.len().max(1)).collect();
    let len = lengths.iter().sum();
    let x = draw.tensor("x", [batch, len, width]);
    if x.dims()[1] != len {
        // The parts would not be its own.
        return;
    }
    let (parts, step) = (Parts::of_lengths(batch, &lengths), Alone(x));
    draw.call("DeviceGroup::try_gradients", || {
        let learned = group.try_gradients(&layer, &parts, &step);
        // On a device's thread, the group catches it.
        learned.inspect_err(|error| assert!(!error.to_string().contains("panicked"), "{error}"))
    });
}

pub fn masked(draw: &mut Draw) {
    let widths = widths(draw);
    let mut config = MaskedAttentionLayerConfig::new(widths.d_model, widths.n_heads)
        .with_n_kv_heads(widths.kv_heads)
        .with_head_dim(widths.head_dim)
        .with_rope(rotary(draw))
        .with_qk_norm(qk_norm(draw));
    config.causal = !draw.one_in(3);
    config.bias = draw.one_in(3);
    config.scale = draw.rarely(6, |draw| draw.number("scale", &[0.5]) as f32);
    config.softcap = draw.rarely(6, |draw| draw.number("softcap", &[5.0]) as f32);
    config.alibi = draw.rarely(6, |_| AlibiSlopes::standard(widths.n_heads.min(9)));
    draw.note(&config);
    let device = draw.device.clone();
    let layer = call!(draw, config.try_init(&device));
    let Some(layer) = layer.filter(|_| config.d_model < 100) else {
        return;
    };
    let layer = typed(draw, layer);
    let (batch, len) = (draw.batch(), draw.len());
    let mut input = MaskedInput::new(draw.tensor("x", [batch, len, config.d_model]));
    let pairs = [batch, widths.n_heads, len, len];
    let (of_mask, of_bias) = (draw.part_of(pairs), draw.part_of(pairs));
    match draw.below(3) {
        0 => input = input.mask(draw.mask(of_mask)),
        1 => {
            let causal = config.causal != draw.one_in(10);
            let window = draw.end("window");
            let ranges = run!(draw, KeyRanges::sliding_window([len; 2], window, &device));
            let Some(ranges) = ranges else { return };
            let plan = call!(draw, TilePlan::try_from_ranges(ranges, [len; 2], causal));
            if let Some(plan) = plan {
                input = input.plan(&plan);
            }
        }
        _ => {}
    }
    if draw.one_in(3) {
        input = input.bias(draw.tensor("bias", of_bias));
    }
    finish!(draw, layer.try_forward(input));
}

fn cross_layer(draw: &mut Draw) -> Option<(DynamicMaskCrossAttention, [usize; 3])> {
    let widths = widths(draw);
    let mut config = DynamicMaskCrossAttentionConfig::new(widths.d_model, widths.n_heads)
        .with_n_kv_heads(widths.kv_heads)
        .with_head_dim(widths.head_dim)
        .with_d_context(draw.pick(&[None, None, Some(5), Some(0)]));
    config.window = draw.maybe(|draw| draw.count("window"));
    config.learning = learning(draw);
    config.qk_norm = qk_norm(draw);
    config.bias = draw.one_in(3);
    config.scores = draw.pick(&[Scores::Ranking, Scores::Dma, Scores::Added]);
    config.scale = draw.rarely(6, |draw| draw.number("scale", &[0.5]) as f32);
    config.softcap = draw.rarely(6, |draw| draw.number("softcap", &[5.0]) as f32);
    draw.note(&config);
    let device = draw.device.clone();
    let layer = call!(draw, config.try_init(&device))?;
    let context = config.d_context.unwrap_or(config.d_model);
    let kv_heads = config.n_kv_heads.unwrap_or(config.n_heads);
    let sizes = [config.d_model, context, kv_heads];
    Some((typed(draw, layer), sizes)).filter(|_| config.d_model < 100)
}

pub fn cross(draw: &mut Draw) {
    let Some((layer, [width, d_context, kv_heads])) = cross_layer(draw) else {
        return;
    };
    let context = input(draw, d_context, kv_heads);
    let (batch, len) = (draw.batch(), draw.len());
    let x = draw.tensor("x", [batch, len, width]);
    if draw.one_in(2) {
        return finish!(draw, layer.try_forward(x, context));
    }
    let keys = call!(draw, layer.try_keys(context));
    let Some(keys) = keys else { return };
    // Keys of the layer itself or of another one, which mostly do not fit.
    let layer = match draw.one_in(2) {
        true => cross_layer(draw).map(|(layer, _)| layer),
        false => Some(layer),
    };
    let Some(layer) = layer else { return };
    let batch = match draw.one_in(8) {
        true => batch,
        false => keys.scores().dims()[0],
    };
    let width = layer.q_proj.weight.val().dims()[0];
    let x = draw.tensor("x", [batch, len, width]);
    finish!(draw, layer.try_forward_with_keys(x, &keys));
}

pub fn multi_head(draw: &mut Draw) {
    let n_heads = draw.pick(&[1, 2, 2, 4]);
    let (mut d_model, mut heads) = (8 * n_heads, n_heads);
    if draw.one_in(20) {
        match draw.one_in(2) {
            true => d_model = draw.end("d_model"),
            false => heads = draw.end("n_heads"),
        }
    }
    let mut config = MultiHeadAttentionConfig::new(d_model, heads);
    config.dropout = draw.number("rate", &[0.0, 0.1]);
    config.quiet_softmax = draw.one_in(3);
    config.key_bias = draw.one_in(2);
    draw.note(&config);
    let device = draw.device.clone();
    let layer = call!(draw, config.try_init(&device));
    let Some(layer) = layer.filter(|_| d_model < 100) else {
        return;
    };
    let layer = typed(draw, layer);
    if draw.one_in(2) {
        let (batch, q_len) = (draw.batch(), draw.len());
        let k_len = if draw.one_in(2) { q_len } else { draw.len() };
        let input = mha_input(draw, [batch, q_len, k_len, d_model]);
        let output = call!(draw, layer.try_forward(input));
        return mha_output(draw, output, true);
    }
    let mut cache = match draw.one_in(2) {
        true => MhaCache::autoregressive(),
        false => MhaCache::autoregressive_cross_attention(),
    };
    let (batch, mut len) = (draw.batch(), 0);
    for _ in 0..3 {
        len += draw.pick(&[0, 1, 1, 3]);
        let input = mha_input(draw, [batch, len, len, d_model]);
        let output = call!(draw, layer.try_forward_cache(input, &mut cache));
        mha_output(draw, output, false);
    }
}

fn mha_input(draw: &mut Draw, [batch, q_len, k_len, width]: [usize; 4]) -> MhaInput {
    let query = draw.tensor("query", [batch, q_len, width]);
    let [key, value] = ["key", "value"].map(|name| draw.tensor(name, [batch, k_len, width]));
    let mut input = MhaInput::new(query, key, value);
    if draw.one_in(3) {
        let sequences = draw.pick(&[1, batch]);
        input = input.mask_pad(draw.bools("pad", [sequences, k_len]));
    }
    if draw.one_in(3) {
        let sequences = draw.pick(&[1, batch]);
        input = input.mask_attn(draw.bools("attn", [sequences, q_len, k_len]));
    }
    match draw.one_in(2) {
        true => input.causal(),
        false => input,
    }
}

/// `graph`: true if no later output shares the graph, as outputs of a cache do.
fn mha_output(draw: &mut Draw, output: Option<MhaOutput>, graph: bool) {
    let Some(output) = output else { return };
    let weights: Option<Tensor<4>> = run!(draw, output.weights());
    if graph {
        draw.finish((weights, output.context));
    }
}
