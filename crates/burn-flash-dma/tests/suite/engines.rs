//! Engines by name: reported and forced.

use crate::case::{Case, data, values};
use crate::spans::spans_of;
use burn::tensor::{Device, Tensor};
use burn_flash_dma::engines::{Engine, EngineChoice, Obstacle, PassKind, engine_for, engines};
use burn_flash_dma::{
    AttentionError, AttentionOptions, ElementType, MaskedAttention, MaskedProblem,
    try_dynamic_mask_attention,
};
use flash_dma_reference::generate::Scores;

fn window(keys: usize) -> AttentionOptions {
    AttentionOptions::new().with_keep_window(keys)
}

fn forced(engine: Engine) -> AttentionOptions {
    window(7).with_engine(EngineChoice::Only(engine))
}

fn sample(kind: Scores, options: AttentionOptions) -> Case {
    let sizes = [2, 4, 2, 21, 33, 8];
    Case::new(sizes, Some(kind), ElementType::F32, options, 3)
}

#[test]
fn the_report_is_what_runs() {
    let device = Device::flex();
    assert_eq!(engines(&device), Ok(vec![Engine::Cpu]));
    for (options, expected) in [(window(7), Engine::Cpu), (forced(Engine::Cpu), Engine::Cpu)] {
        let case = sample(Scores::Normal, options);
        let autodiff = device.clone().autodiff();
        let report = engine_for(case.problem(), &autodiff).expect("a report");
        assert_eq!((report.forward, report.backward), (expected, expected));
        assert_eq!(report.why, []);
        let lines = spans_of(|| case.check(&autodiff));
        for (pass, engine) in [("forward", report.forward), ("backward", report.backward)] {
            let line = format!("{pass}({})", engine.name());
            let there = lines.iter().any(|other| other.trim() == line);
            assert!(there, "no {line} in {lines:?}");
            let other = |other: &&String| other.trim().starts_with(pass) && other.trim() != line;
            assert_eq!(lines.iter().find(other), None);
        }
    }
}

#[test]
fn an_engine_that_the_backend_has_not_is_refused_before_anything_runs() {
    let device = Device::flex();
    for engine in [Engine::Wgmma, Engine::Mma, Engine::Portable] {
        let expected = AttentionError::Engine {
            engine,
            pass: PassKind::Forward,
            obstacle: Obstacle::OtherBackend,
        };
        let case = sample(Scores::Normal, forced(engine));
        assert_eq!(engine_for(case.problem(), &device), Err(expected.clone()));
        let tensors = case.tensors(&device);
        let scores = tensors.scores.expect("there are scores");
        let (q, k, v) = (tensors.q, tensors.k, tensors.v);
        let lines = spans_of(|| {
            let rows = (q.clone(), k.clone(), v.clone());
            let result = try_dynamic_mask_attention(rows.0, rows.1, rows.2, scores, case.options);
            assert_eq!(result.unwrap_err(), expected);
            let mut options = case.options;
            options.keep_window = None;
            let masked = MaskedAttention::new(q, k, v).options(options);
            assert_eq!(masked.try_forward().unwrap_err(), expected);
        });
        assert_eq!(lines, ["attention", "masked_attention"]);
    }
}

#[test]
fn masked_problems_are_reported_too() {
    let (q, kv) = ([1, 4, 9, 8], [1, 2, 9, 8]);
    let bias = [1, 2, 1, 9];
    let options = AttentionOptions::new();
    let element = ElementType::F32;
    let problem = MaskedProblem::new(&q, &kv, &kv, None, Some(&bias), element, &options).unwrap();
    let report = engine_for(&problem, &Device::flex()).expect("a report");
    assert_eq!([report.forward, report.backward], [Engine::Cpu; 2]);
}

/// CubeCL's CPU runtime reports that it has no tensor cores, and the portable kernels if they are asked for.
#[cfg(feature = "cpu")]
#[test]
fn cubecl_devices_say_what_their_plans_say() {
    let _alone = crate::case::alone();
    let device = Device::cpu();
    assert_eq!(engines(&device), Ok(vec![Engine::Portable]));
    let case = sample(Scores::Normal, window(7));
    let report = engine_for(case.problem(), &device).expect("a report");
    assert_eq!([report.forward, report.backward], [Engine::Portable; 2]);
    let why = (report.why.iter()).map(|over| (over.pass, over.engine, over.obstacle));
    let why: Vec<_> = why.collect();
    let both = |pass| [Engine::Wgmma, Engine::Mma].map(|engine| (pass, engine, Obstacle::Device));
    let expected = [PassKind::Forward, PassKind::Backward].map(both);
    assert_eq!(why, expected.concat());
    let mma = sample(Scores::Normal, forced(Engine::Mma));
    let error = engine_for(mma.problem(), &device).unwrap_err();
    let text = "the mma kernels cannot run the forward pass: the device has no such instructions";
    assert_eq!(error.to_string(), text);
    let tensors = mma.tensors(&device);
    let scores = tensors.scores.expect("there are scores");
    let result = try_dynamic_mask_attention(tensors.q, tensors.k, tensors.v, scores, mma.options);
    assert_eq!(result.unwrap_err(), error);
    let portable = sample(Scores::Nan, forced(Engine::Portable));
    portable.check(&device.autodiff());
}

/// Rows of every second feature are not contiguous: a forced engine gets copies.
#[test]
fn forced_engines_take_any_strides() {
    let case = sample(Scores::Normal, forced(Engine::Cpu));
    let plain = case.tensors(&Device::flex());
    let mut strided = plain.clone();
    let [batch, heads, len, dim] = strided.q.dims();
    let twice = (values(plain.q.clone()).into_iter()).flat_map(|x| [x as f32; 2]);
    let wide = data(twice, [batch, heads, len, dim, 2]);
    let wide = Tensor::<5>::from_data(wide, &Device::flex());
    strided.q = wide.narrow(4, 0, 1).squeeze_dim(4);
    let [strided, plain] = [strided, plain].map(|rows| values(rows.attend(case.options)));
    assert_eq!(strided, plain);
}
