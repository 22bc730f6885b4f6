//! Clipping by the global norm and AdamW, through Burn: against f64, and against Burn's own optimiser.

use burn::module::ParamGroup;
use burn::module::{Module, Param};
use burn::optim::{AdamWConfig as BurnAdamW, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::train::{AdamWConfig, clip_gradients, optimize};
use flash_dma_tests::prelude::*;
use flash_dma_tests::tensors::{dtype, load, values};

every_burn!(
    clipped_steps,
    all_parameters_at_once,
    another_optimiser_is_refused,
    a_step_in_sixteen_bits,
    records_are_those_of_burn,
);

const RATE: f64 = 0.1;
const MAX_NORM: f64 = 2.0;
const SETTINGS: AdamWConfig = AdamWConfig {
    beta_1: 0.8,
    beta_2: 0.9,
    epsilon: 1e-3,
    weight_decay: 0.2,
};

#[derive(Module, Debug)]
struct Parameters {
    matrix: Param<Tensor<2>>,
    row: Param<Tensor<1>>,
}

impl Parameters {
    fn new(all: &[Vec<f64>; 2], shape: [usize; 2], element: ElementType, device: &Device) -> Self {
        let device = device.clone().autodiff();
        let matrix: Tensor<2> = load(&all[0], shape, element, &device);
        let row: Tensor<1> = load(&all[1], [shape[1]], element, &device);
        Self {
            matrix: Param::from_tensor(matrix.require_grad()),
            row: Param::from_tensor(row.require_grad()),
        }
    }

    fn values(&self) -> [Vec<f64>; 2] {
        [
            values(self.matrix.val().inner()),
            values(self.row.val().inner()),
        ]
    }

    fn gradients(&self, all: &[Vec<f64>; 2], element: ElementType) -> GradientsParams {
        let (shape, device) = (self.matrix.dims(), self.matrix.device().without_autodiff());
        let mut gradients = GradientsParams::new();
        let matrix: Tensor<2> = load(&all[0], shape, element, &device);
        gradients.register(self.matrix.id, matrix);
        let row: Tensor<1> = load(&all[1], [shape[1]], element, &device);
        gradients.register(self.row.id, row);
        gradients
    }
}

/// Numbers for a matrix and a row, which an f32 holds.
fn random(shape: [usize; 2], scale: f64, rng: &mut Rng) -> [Vec<f64>; 2] {
    [shape[0] * shape[1], shape[1]].map(|count| {
        let number = |_| f64::from((rng.normal() * scale) as f32);
        (0..count).map(number).collect()
    })
}

fn sizes<B: Backend>() -> Vec<[usize; 2]> {
    match B::SIZE {
        Size::Small => vec![[17, 33]],
        Size::Medium => vec![[17, 33], [64, 80]],
        // Vectors of four, and a number that they do not divide; both past one round of all cubes.
        Size::Large => vec![[17, 33], [1024, 1024], [1001, 999]],
    }
}

/// A parameter and its moments in f64.
struct Exact {
    p: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
}

impl Exact {
    fn new(p: &[f64]) -> Self {
        let zeros = vec![0.0; p.len()];
        Self {
            p: p.to_vec(),
            m: zeros.clone(),
            v: zeros,
        }
    }

    fn step(&mut self, g: &[f64], time: i32) {
        let [beta_1, beta_2] = [SETTINGS.beta_1, SETTINGS.beta_2].map(f64::from);
        for (at, g) in g.iter().enumerate() {
            let (p, m, v) = (&mut self.p[at], &mut self.m[at], &mut self.v[at]);
            *m = beta_1 * *m + (1.0 - beta_1) * g;
            *v = beta_2 * *v + (1.0 - beta_2) * g * g;
            let root = (*v / (1.0 - beta_2.powi(time))).sqrt() + f64::from(SETTINGS.epsilon);
            let decay = 1.0 - RATE * f64::from(SETTINGS.weight_decay);
            *p = *p * decay - RATE * *m / (1.0 - beta_1.powi(time)) / root;
        }
    }
}

fn near(actual: &[f64], exact: &[f64], [relative, absolute]: [f64; 2], what: &str) {
    assert_eq!(actual.len(), exact.len());
    for (at, (actual, exact)) in actual.iter().zip(exact).enumerate() {
        let error = (actual - exact).abs();
        let bound = relative * exact.abs() + absolute;
        assert!(
            error <= bound,
            "{what}, element {at}: {actual}, not {exact}"
        );
    }
}

fn clipped_steps<B: Backend>(burn: &Burn<B>) {
    for shape in sizes::<B>() {
        let mut rng = Rng::new(shape[0] as u64);
        let start = random(shape, 1.0, &mut rng);
        let mut exact = start.each_ref().map(|p| Exact::new(p));
        let mut model = Parameters::new(&start, shape, F32, burn.device());
        let mut at_once = model.clone();
        let [mut optimiser, mut second] = [SETTINGS.init(), SETTINGS.init()];
        // The second gradient is too short to be clipped.
        for (time, scale) in (1..).zip([3.0, 1e-6, 0.5, 20.0]) {
            // Moments that something else holds are not written over.
            let optimisers = [&optimiser, &second];
            let held = (time > 2).then(|| optimisers.map(ModuleOptimizer::to_record));
            let all = random(shape, scale, &mut rng);
            let mut gradients = model.gradients(&all, F32);
            let norm = clip_gradients(&model, &mut gradients, MAX_NORM);
            let squares: f64 = all.iter().flatten().map(|g| g * g).sum();
            let expected = squares.sqrt();
            near(&values(norm), &[expected], [1e-6, 0.0], "the norm");
            let factor = (MAX_NORM / (expected + 1e-6)).min(1.0);
            let raw = all;
            let scaled = |all: &Vec<f64>| all.iter().map(|g| g * factor).collect::<Vec<_>>();
            let all = raw.each_ref().map(scaled);
            let kept = gradients.get::<2>(model.matrix.id).expect("kept");
            near(&values(kept), &all[0], [2e-6, 0.0], "a clipped gradient");
            model = optimiser.step(RATE, model, gradients);
            let gradients = at_once.gradients(&raw, F32);
            let norm;
            (at_once, norm) = optimize(&mut second, RATE, at_once, gradients, MAX_NORM);
            near(&values(norm), &[expected], [1e-6, 0.0], "the norm");
            let both = model.values().into_iter().zip(at_once.values());
            for ((exact, g), both) in exact.iter_mut().zip(&all).zip(both) {
                exact.step(g, time);
                for p in [both.0, both.1] {
                    near(
                        &p,
                        &exact.p,
                        [0.0, 3e-6],
                        &format!("{shape:?}, step {time}"),
                    );
                }
            }
            drop(held);
        }
    }
}

#[derive(Module, Debug)]
struct Many {
    rows: Vec<Param<Tensor<1>>>,
}

/// More parameters than a launch takes, of several lengths, in two groups, one of them without a gradient: as one by one.
fn all_parameters_at_once<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    let mut rng = Rng::new(11);
    let mut row = |at: usize, device: &Device| -> Tensor<1> {
        let len = [8, 3, 64, 300][at % 4];
        let values: Vec<_> = (0..len).map(|_| f64::from(rng.normal() as f32)).collect();
        load(&values, [len], F32, device)
    };
    let rows = (0..40).map(|at| Param::from_tensor(row(at, &device).require_grad()));
    let mut model = Many {
        rows: rows.collect(),
    };
    let mut at_once = model.clone();
    let without = AdamWConfig {
        weight_decay: 0.0,
        ..SETTINGS
    }
    .build();
    let undecayed = ParamGroup::from_ids(model.rows.iter().step_by(3).map(|row| row.id).collect());
    let optimiser = || {
        SETTINGS
            .init()
            .with_group(undecayed.clone(), without.clone(), None)
    };
    let [mut optimiser, mut second] = [optimiser(), optimiser()];
    let still = values(model.rows[7].val().inner());
    for step in 0..3 {
        let mut all = GradientsParams::new();
        let mut same = GradientsParams::new();
        for (at, parameter) in model.rows.iter().enumerate() {
            let gradient = row(at, burn.device());
            if at != 7 {
                all.register(parameter.id, gradient.clone());
                same.register(parameter.id, gradient);
            }
        }
        if step == 2 {
            // Records are the same, too.
            let records = [&optimiser, &second].map(ModuleOptimizer::to_record);
            let [first, of_second] = records;
            optimiser = optimiser.load_record(of_second);
            second = second.load_record(first);
        }
        let norm = clip_gradients(&model, &mut all, MAX_NORM);
        model = optimiser.step(RATE, model, all);
        let norm_at_once;
        (at_once, norm_at_once) = optimize(&mut second, RATE, at_once, same, MAX_NORM);
        near(
            &values(norm_at_once),
            &values(norm),
            [1e-7, 0.0],
            "the norm",
        );
        for (one, other) in model.rows.iter().zip(&at_once.rows) {
            assert_eq!(one.id, other.id);
            assert!(other.val().is_require_grad());
            let [one, other] = [one, other].map(|row| values(row.val().inner()));
            near(&other, &one, [0.0, 1e-6], &format!("step {step}"));
        }
    }
    assert_eq!(values(at_once.rows[7].val().inner()), still);
}

fn another_optimiser_is_refused<B: Backend>(burn: &Burn<B>) {
    let shape = [3, 5];
    let start = random(shape, 1.0, &mut Rng::new(2));
    let model = Parameters::new(&start, shape, F32, burn.device());
    let gradients = model.gradients(&start, F32);
    let row = ParamGroup::from_ids(vec![model.row.id]);
    let burns = burn::optim::SgdConfig::new().build();
    let mut mixed = SETTINGS.init().with_group(row, burns, None);
    let step = || optimize(&mut mixed, RATE, model, gradients, MAX_NORM);
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(step));
    let refused = refused.expect_err("a group of another optimiser");
    let text = refused.downcast_ref::<String>().expect("a text");
    assert!(text.contains("must have AdamW of this crate"), "{text}");
    // The pass that panicked is over: a step by itself is a step.
    let model = Parameters::new(&start, shape, F32, burn.device());
    let gradients = model.gradients(&start, F32);
    let model = SETTINGS.init().step(RATE, model, gradients);
    let mut exact = Exact::new(&start[0]);
    exact.step(&start[0], 1);
    near(&model.values()[0], &exact.p, [0.0, 3e-6], "a step");
}

/// Each type stays what it is, and its numbers are rounded once.
fn a_step_in_sixteen_bits<B: Backend>(burn: &Burn<B>) {
    let grains = [(F16, 2f64.powi(-11)), (Bf16, 2f64.powi(-8))];
    for (element, grain) in grains.into_iter().filter(|&(of, _)| burn.supports(of)) {
        for shape in sizes::<B>() {
            let mut rng = Rng::new(7);
            let [start, all] = [1.0, 0.5].map(|scale| {
                random(shape, scale, &mut rng)
                    .map(|all| {
                        all.into_iter()
                            .map(|x| flash_dma_reference::round::round(x, element))
                    })
                    .map(Iterator::collect::<Vec<_>>)
            });
            let model = Parameters::new(&start, shape, element, burn.device());
            let mut gradients = model.gradients(&all, element);
            let _ = clip_gradients(&model, &mut gradients, 1e9);
            let same = model.gradients(&all, element);
            let [mut optimiser, mut second] = [SETTINGS.init(), SETTINGS.init()];
            let (at_once, _) = optimize(&mut second, RATE, model.clone(), same, f64::INFINITY);
            let model = optimiser.step(RATE, model, gradients);
            for model in [model, at_once] {
                assert_eq!(model.matrix.dtype(), dtype(element));
                for ((start, g), p) in start.iter().zip(&all).zip(model.values()) {
                    let mut exact = Exact::new(start);
                    exact.step(g, 1);
                    let bounds = [grain, 2e-6];
                    near(&p, &exact.p, bounds, &format!("{shape:?} of {element}"));
                }
            }
        }
    }
}

/// Two steps of one optimiser, and a third one of the other from the record of the first.
fn records_are_those_of_burn<B: Backend>(burn: &Burn<B>) {
    let shape = sizes::<B>()[0];
    let ours = || SETTINGS.init();
    let burns = || {
        BurnAdamW::new()
            .with_beta_1(SETTINGS.beta_1)
            .with_beta_2(SETTINGS.beta_2)
            .with_epsilon(SETTINGS.epsilon)
            .with_weight_decay(SETTINGS.weight_decay)
            .init()
    };
    let run = |first: ModuleOptimizer, second: ModuleOptimizer| {
        let mut rng = Rng::new(3);
        let start = random(shape, 1.0, &mut rng);
        let mut model = Parameters::new(&start, shape, F32, burn.device());
        let mut optimiser = first;
        for step in 0..3 {
            if step == 2 {
                optimiser = second.clone().load_record(optimiser.to_record());
            }
            let gradients = model.gradients(&random(shape, 1.0, &mut rng), F32);
            model = optimiser.step(RATE, model, gradients);
        }
        model.values()
    };
    let expected = run(burns(), burns());
    for actual in [
        run(ours(), ours()),
        run(ours(), burns()),
        run(burns(), ours()),
    ] {
        for (actual, expected) in actual.iter().zip(&expected) {
            near(actual, expected, [0.0, 1e-6], "a third step");
        }
    }
}
