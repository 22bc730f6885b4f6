//! The drop-in for Burn's multi-head attention, compared with Burn's own on the same weights.

use crate::case::{grad, refused, refused_as, size, tracked, uniform, values, within};
use crate::layer::WIDTH;
use burn::module::{Initializer, Lora, Module, Param};
use burn::nn::Linear;
use burn::nn::attention::{self as theirs, generate_autoregressive_mask};
use burn::tensor::{Bool, DType, Device, Distribution, Gradients, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::nn::mha::{MhaCache, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn_store::{ModuleSnapshot, SafetensorsStore};

const BATCH: usize = 2;
const HEADS: usize = 4;

/// Both modules with the same parameters, none of them zero, and without dropout.
fn pair(quiet: bool, device: &Device) -> (theirs::MultiHeadAttention, MultiHeadAttention) {
    let config = theirs::MultiHeadAttentionConfig::new(WIDTH, HEADS)
        .with_dropout(0.0)
        .with_quiet_softmax(quiet);
    let theirs = config.init(device);
    let ours = MultiHeadAttentionConfig::new(WIDTH, HEADS)
        .with_dropout(0.0)
        .with_quiet_softmax(quiet)
        .init(device)
        .load_record(theirs.clone().into_record());
    (theirs, ours)
}

fn random(len: usize, device: &Device) -> Tensor<3> {
    tracked([BATCH, len, WIDTH], device)
}

/// Random bools that show every query the first key.
fn coin<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D, Bool> {
    let mut first = shape;
    first[D - 1] = 1;
    let hidden = uniform(shape, device).lower_elem(0.4);
    let none = Tensor::<D>::zeros(first, device).greater_elem(0.5);
    hidden.slice_assign(first.map(|size| 0..size), none)
}

/// Inputs of a problem.
struct Inputs {
    query: Tensor<3>,
    key: Tensor<3>,
    value: Tensor<3>,
    pad: Option<Tensor<2, Bool>>,
    attn: Option<Tensor<3, Bool>>,
}

/// The input of either module.
macro_rules! input {
    ($input:ty, $of:ident) => {{
        let (q, k, v) = (&$of.query, &$of.key, &$of.value);
        let mut input = <$input>::new(q.clone(), k.clone(), v.clone());
        if let Some(pad) = &$of.pad {
            input = input.mask_pad(pad.clone());
        }
        if let Some(attn) = &$of.attn {
            input = input.mask_attn(attn.clone());
        }
        input
    }};
}

impl Inputs {
    /// The gradients of the inputs and of the parameters.
    fn gradients(&self, layers: [&Linear; 4], grads: &Gradients) -> Vec<Vec<f64>> {
        let inputs = [&self.query, &self.key, &self.value].map(|input| grad(input, grads));
        let parameters = layers.into_iter().flat_map(|layer| {
            let bias = layer.bias.as_ref().expect("a bias");
            [grad(&layer.weight.val(), grads), grad(&bias.val(), grads)]
        });
        inputs.into_iter().chain(parameters).collect()
    }
}

fn context(layer: &MultiHeadAttention, input: MhaInput) -> Vec<f64> {
    values(layer.forward(input).context)
}

fn close(actual: &[f64], expected: &[f64], what: &str) {
    within(actual, expected, 5e-6 * size(expected).max(1.0), what);
}

#[test]
fn contexts_weights_and_gradients_are_burns() {
    let device = Device::flex().autodiff();
    for quiet in [false, true] {
        let (theirs, ours) = pair(quiet, &device);
        // Self-attention with and without masks; attention over a longer and a shorter sequence.
        for (q_len, k_len, padded, masked) in [
            (19, 19, false, false),
            (19, 19, true, false),
            (19, 19, false, true),
            (19, 19, true, true),
            (7, 70, true, true),
            (70, 7, false, false),
            (1, 33, true, false),
        ] {
            let what = format!("{q_len} over {k_len}, {padded} {masked}, quiet {quiet}");
            let inputs = Inputs {
                query: random(q_len, &device),
                key: random(k_len, &device),
                value: random(k_len, &device),
                pad: padded.then(|| coin([BATCH, k_len], &device)),
                attn: masked.then(|| coin([BATCH, q_len, k_len], &device)),
            };
            let slope = Tensor::random_like(&inputs.query, Distribution::Normal(0.0, 1.0));
            let expected = theirs.forward(input!(theirs::MhaInput, inputs));
            let actual = ours.forward(input!(MhaInput, inputs));
            let contexts = [&actual.context, &expected.context].map(|t| values(t.clone()));
            close(&contexts[0], &contexts[1], &what);
            let weights = [actual.weights(), expected.weights].map(values);
            close(&weights[0], &weights[1], &format!("{what}, weights"));
            let grads = (actual.context * slope.clone()).sum().backward();
            let layers = [&ours.query, &ours.key, &ours.value, &ours.output];
            let actual = inputs.gradients(layers, &grads);
            let grads = (expected.context * slope).sum().backward();
            let layers = [&theirs.query, &theirs.key, &theirs.value, &theirs.output];
            let expected = inputs.gradients(layers, &grads);
            let largest = expected.iter().map(|slope| size(slope)).fold(0.0, f64::max);
            for (at, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
                // The gradient of the keys' bias is zero without a quiet softmax: a difference of terms of the
                // others' size, which f32 rounds to 6e-8 of it each.
                let bound = (5e-6 * size(expected).max(1.0)).max(2e-6 * largest);
                let what = format!("{what}, gradient {at}");
                within(actual, expected, bound, what);
            }
        }
    }
}

#[test]
fn weights_have_gradients() {
    let device = Device::flex().autodiff();
    let (theirs, ours) = pair(false, &device);
    let x = random(9, &device);
    let square = |weights: Tensor<4>| weights.square().sum().backward();
    let actual = square(ours.forward(MhaInput::self_attn(x.clone())).weights());
    let output = theirs.forward(theirs::MhaInput::self_attn(x.clone()));
    let expected = square(output.weights);
    let [actual, expected] = [actual, expected].map(|grads| grad(&x, &grads));
    close(&actual, &expected, "dx");
}

/// Context and gradients are those of the weights after dropout.
#[test]
fn dropout_in_training_is_that_of_the_weights() {
    let device = Device::flex().autodiff();
    for quiet in [false, true] {
        let ours = MultiHeadAttentionConfig::new(WIDTH, HEADS)
            .with_dropout(0.5)
            .with_quiet_softmax(quiet)
            .init(&device);
        let x = random(13, &device);
        let mask = coin([BATCH, 13, 13], &device);
        let input = || MhaInput::self_attn(x.clone()).mask_attn(mask.clone());
        let actual = ours.forward(input());
        let weights = actual.weights();
        let rows = ours.value.forward(x.clone());
        let v = rows.reshape([BATCH, 13, HEADS, WIDTH / HEADS]);
        let heads = weights.clone().matmul(v.swap_dims(1, 2)).swap_dims(1, 2);
        let expected = ours.output.forward(heads.reshape([BATCH, 13, WIDTH]));
        let context = values(actual.context.clone());
        close(&context, &values(expected.clone()), "context");
        // One graph has one backward pass, so the gradients are those of the difference, compared with those of
        // another call.
        let slope = expected.random_like(Distribution::Normal(0.0, 1.0));
        let slopes = |context: Tensor<3>| grad(&x, &(context * slope.clone()).sum().backward());
        let difference = slopes(actual.context - expected);
        let bound = 5e-6 * size(&slopes(ours.forward(input()).context));
        within(&difference, &vec![0.0; difference.len()], bound, "dx");

        // Dropout removes half of the visible weights and doubles the others.
        let mut whole = ours.clone();
        whole.dropout.prob = 0.0;
        let whole = values(whole.forward(input()).weights());
        let weights = values(weights);
        let shown = whole.iter().zip(&weights);
        let shown: Vec<_> = shown.filter(|(weight, _)| **weight > 0.0).collect();
        let left: Vec<_> = shown.iter().filter(|(_, left)| **left > 0.0).collect();
        for (weight, left) in &left {
            assert!((*left / *weight - 2.0).abs() < 1e-5, "{left} of {weight}");
        }
        // Five standard deviations of a fair coin.
        let (count, left) = (shown.len() as f64, left.len() as f64);
        assert!((left - count / 2.0).abs() < 2.5 * count.sqrt(), "{left}");
    }
}

#[test]
fn every_call_in_training_drops_other_weights() {
    let device = Device::flex().autodiff();
    let x = random(13, &device);
    let config = MultiHeadAttentionConfig::new(WIDTH, HEADS).with_dropout(0.5);
    let ours = config.init(&device);
    let removed = [&ours, &ours, &ours.clone()].map(|layer| {
        let weights = layer.forward(MhaInput::self_attn(x.clone())).weights();
        values(weights)
            .iter()
            .map(|&weight| weight == 0.0)
            .collect::<Vec<_>>()
    });
    assert_ne!(removed[0], removed[1]);
    assert_ne!(removed[1], removed[2]);
    assert_ne!(removed[0], removed[2]);

    // Outside training there is none.
    let valid = || context(&ours.valid(), MhaInput::self_attn(x.clone().inner()));
    assert_eq!(valid(), valid());
}

#[test]
fn records_and_configurations_are_read_both_ways() {
    use burn::config::Config;
    let device = Device::flex();
    let ours_new = || MultiHeadAttentionConfig::new(WIDTH, HEADS).init(&device);
    let theirs_new = || theirs::MultiHeadAttentionConfig::new(WIDTH, HEADS).init(&device);
    let x = random(11, &device);
    let of_ours = |layer: &MultiHeadAttention| context(layer, MhaInput::self_attn(x.clone()));
    let of_theirs = |layer: &theirs::MultiHeadAttention| {
        let input = theirs::MhaInput::self_attn(x.clone());
        values(layer.forward(input).context)
    };

    let theirs = theirs_new();
    let expected = of_theirs(&theirs);
    let loaded = ours_new().load_record(theirs.clone().into_record());
    close(&of_ours(&loaded), &expected, "ours from a record");
    let back = theirs_new().load_record(loaded.into_record());
    assert_eq!(of_theirs(&back), expected);
    let converted = MultiHeadAttention::try_from(theirs.clone()).expect("its heads are ours");
    close(&of_ours(&converted), &expected, "ours from a module");

    let mut file = SafetensorsStore::from_bytes(None);
    theirs.save_into(&mut file).expect("it is saved");
    let mut file = SafetensorsStore::from_bytes(Some(file.get_bytes().unwrap()));
    let mut loaded = ours_new();
    let result = loaded.load_from(&mut file).expect("the names are the same");
    let all = result.missing.is_empty() && result.unused.is_empty();
    assert!(all, "{result}");
    close(&of_ours(&loaded), &expected, "ours from a file");

    let config = theirs::MultiHeadAttentionConfig::new(64, 2)
        .with_dropout(0.25)
        .with_quiet_softmax(true)
        .with_key_bias(false);
    let read: MultiHeadAttentionConfig = serde_json::from_str(&config.to_string()).unwrap();
    assert_eq!(read.to_string(), config.to_string());
    let path = std::env::temp_dir().join(format!("burn-flash-dma-mha-{}", std::process::id()));
    read.save(&path).unwrap();
    let back = theirs::MultiHeadAttentionConfig::load(&path).unwrap();
    assert_eq!(back.to_string(), config.to_string());
    std::fs::remove_file(&path).unwrap();
    // The defaults, including the initialiser's gain, are Burn's.
    let ours = MultiHeadAttentionConfig::new(64, 2).to_string();
    let theirs = theirs::MultiHeadAttentionConfig::new(64, 2).to_string();
    assert_eq!(ours, theirs);
}

#[test]
fn a_query_from_which_everything_is_hidden_gets_the_bias_of_the_output() {
    let device = Device::flex().autodiff();
    for quiet in [false, true] {
        let (_, ours) = pair(quiet, &device);
        let x = random(5, &device);
        // The first sequence is all padding.
        let pad = Tensor::<2, Bool>::from_data([[true; 5], [false; 5]], &device);
        let forward = || ours.forward(MhaInput::self_attn(x.clone()).mask_pad(pad.clone()));
        let output = forward();
        let bias = values(ours.output.bias.as_ref().unwrap().val());
        let context = values(output.context.clone());
        for row in context[..5 * WIDTH].chunks(WIDTH) {
            close(row, &bias, "a row");
        }
        let weights = values(output.weights());
        assert!(weights[..HEADS * 25].iter().all(|&weight| weight == 0.0));
        let dx = grad(&x, &output.context.square().sum().backward());
        assert!(dx[..5 * WIDTH].iter().all(|&slope| slope == 0.0), "{dx:?}");
        assert!(dx[5 * WIDTH..].iter().all(|slope| slope.is_finite()));
        let dx = grad(&x, &forward().weights().square().sum().backward());
        assert!(dx.iter().all(|slope| slope.is_finite()), "{dx:?}");
    }
}

#[test]
fn hidden_tokens_reach_nothing_whatever_they_hold() {
    let device = Device::flex();
    let (_, ours) = pair(true, &device);
    let pad = [[false, false, true, false, true]; BATCH];
    let pad = Tensor::<2, Bool>::from_data(pad, &device);
    let x = random(5, &device);
    let rows = pad.clone().unsqueeze_dim::<3>(2).expand(x.dims());
    let outputs = [0.0, f32::NAN].map(|fill| {
        let keys = x.clone().mask_fill(rows.clone(), fill);
        let input = MhaInput::new(x.clone(), keys.clone(), keys).mask_pad(pad.clone());
        context(&ours, input)
    });
    assert_eq!(outputs[0], outputs[1]);
}

#[test]
fn causal_masking_needs_no_mask() {
    let device = Device::flex();
    let (_, ours) = pair(false, &device);
    let x = random(21, &device);
    let mask = generate_autoregressive_mask(BATCH, 21, &device);
    let pad = coin([BATCH, 21], &device);
    let input = || MhaInput::self_attn(x.clone()).mask_pad(pad.clone());
    let [causal, masked] = [input().causal(), input().mask_attn(mask)].map(|input| {
        let output = ours.forward(input);
        [values(output.context.clone()), values(output.weights())]
    });
    close(&causal[0], &masked[0], "context");
    assert_eq!(causal[1], masked[1]);
}

#[test]
fn steps_over_a_cache_are_burns() {
    let device = Device::flex();
    let (theirs, ours) = pair(true, &device);
    let (x, context) = (random(9, &device), random(14, &device));
    let pad = coin([BATCH, 9], &device);
    let pad_context = coin([BATCH, 14], &device);
    let mut of_theirs = [
        theirs::MhaCache::autoregressive(),
        theirs::MhaCache::autoregressive_cross_attention(),
    ];
    let mut of_ours = [
        MhaCache::autoregressive(),
        MhaCache::autoregressive_cross_attention(),
    ];
    for len in 1..=9 {
        let (x, pad) = (x.clone().narrow(1, 0, len), pad.clone().narrow(1, 0, len));
        let problems = [
            (x.clone(), x.clone(), pad),
            (x, context.clone(), pad_context.clone()),
        ];
        for (at, (query, key, pad)) in problems.into_iter().enumerate() {
            let input = theirs::MhaInput::new(query.clone(), key.clone(), key.clone());
            let expected = theirs.forward_cache(input.mask_pad(pad.clone()), &mut of_theirs[at]);
            let input = MhaInput::new(query, key.clone(), key).mask_pad(pad);
            let actual = ours.forward_cache(input, &mut of_ours[at]);
            let [actual, expected] = [actual.context, expected.context].map(values);
            close(&actual, &expected, &format!("cache {at}, {len} tokens"));
        }
    }
}

#[test]
fn a_prompt_and_steps_are_the_causal_pass() {
    let device = Device::flex();
    let (_, ours) = pair(false, &device);
    let x = random(12, &device);
    let mask = coin([BATCH, 12, 12], &device);
    let input = |len: usize| {
        let mask = mask.clone().narrow(1, 0, len).narrow(2, 0, len);
        let x = x.clone().narrow(1, 0, len);
        MhaInput::self_attn(x).mask_attn(mask).causal()
    };
    let expected = ours.forward(input(12));
    let mut cache = MhaCache::autoregressive();
    for len in [5, 6, 10] {
        let _ = ours.forward_cache(input(len), &mut cache);
    }
    let actual = ours.forward_cache(input(12), &mut cache);
    let weights = values(expected.weights().narrow(2, 10, 2));
    close(&values(actual.weights()), &weights, "weights");
    let context = values(actual.context);
    close(&context, &values(expected.context), "context");

    // Refused without a trace.
    refused_as(
        ours.try_forward_cache(input(12), &mut cache),
        "the input is to be the whole sequence, 13 tokens or more: the cache holds 12, but it has 12",
    );
    let one = MhaInput::self_attn(x.clone().narrow(0, 0, 1).repeat_dim(1, 2));
    refused(ours.try_forward_cache(one, &mut cache), "Shape");
}

#[test]
fn weights_in_f16_are_finite_where_the_products_of_q_and_k_are_not() {
    let device = Device::flex();
    let config = MultiHeadAttentionConfig::new(8, 1).with_initializer(Initializer::Zeros);
    let mut layer = config.init(&device);
    let eye = Tensor::<2>::eye(8, &device).cast(DType::F16);
    for projection in [&mut layer.query, &mut layer.key, &mut layer.value] {
        projection.weight = Param::from_tensor(eye.clone());
    }
    // Their product, 66248, is past the greatest number in f16.
    let x = Tensor::<3>::full([1, 2, 8], 91.0, &device).cast(DType::F16);
    let output = layer.forward(MhaInput::self_attn(x));
    assert_eq!(output.weights().dtype(), DType::F16);
    assert_eq!(values(output.weights().cast(DType::F32)), [0.5; 4]);
}

#[test]
fn adapters_reach_every_projection() {
    let device = Device::flex().autodiff();
    let (_, ours) = pair(false, &device);
    let ours = ours.apply_lora(Lora::new(2, 4.0));
    let x = random(5, &device);
    let context = ours.forward(MhaInput::self_attn(x)).context;
    let grads = context.square().sum().backward();
    for projection in [&ours.query, &ours.key, &ours.value, &ours.output] {
        let adapter = projection.weight.adapter().expect("an adapter");
        assert!(adapter.b.val().grad(&grads).is_some());
        assert!(projection.weight.base().grad(&grads).is_none());
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = Device::flex();
    let new = MultiHeadAttentionConfig::new;
    let head_dim = AttentionError::HeadDim { head_dim: 4 };
    assert_eq!(new(32, 8).try_init(&device).unwrap_err(), head_dim);
    refused(new(34, 4).try_init(&device), "Shape");
    refused(new(32, 0).try_init(&device), "HeadRatio");
    let theirs = theirs::MultiHeadAttentionConfig::new(32, 8).init(&device);
    assert_eq!(MultiHeadAttention::try_from(theirs).unwrap_err(), head_dim);

    let (_, ours) = pair(false, &device);
    let x = random(6, &device);
    let none = |shape: [usize; 3]| Tensor::<3>::zeros(shape, &device).greater_elem(0.5);
    let pad = |shape: [usize; 2]| Tensor::<2>::zeros(shape, &device).greater_elem(0.5);
    let input = || MhaInput::self_attn(x.clone());
    let other = x.clone().narrow(1, 0, 5);
    for input in [
        MhaInput::new(x.clone(), x.clone(), other.clone()),
        MhaInput::self_attn(x.clone().narrow(2, 0, 8)),
        MhaInput::new(x.clone().narrow(0, 0, 1), x.clone(), x.clone()),
        input().mask_pad(pad([BATCH, 5])),
        input().mask_pad(pad([3, 6])),
        input().mask_attn(none([BATCH, 5, 6])),
        input().mask_attn(none([BATCH, 6, 5])),
    ] {
        refused(ours.try_forward(input), "Shape");
    }
    // One mask for all sequences.
    let input = input().mask_pad(pad([1, 6])).mask_attn(none([1, 6, 6]));
    let same = context(&ours, MhaInput::self_attn(x));
    close(&context(&ours, input), &same, "one mask");
}
