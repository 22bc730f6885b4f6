//! Clipping by the global norm and AdamW, through Burn: against f64, and against Burn's own optimiser.

use burn::module::{Module, Param};
use burn::optim::{AdamWConfig as BurnAdamW, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::train::{AdamWConfig, clip_gradients};
use flash_dma_tests::prelude::*;
use flash_dma_tests::tensors::{dtype, load, values};

every_burn!(
    clipped_steps,
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
        let mut optimiser = SETTINGS.init();
        // The second gradient is too short to be clipped.
        for (time, scale) in (1..).zip([3.0, 1e-6, 0.5, 20.0]) {
            let all = random(shape, scale, &mut rng);
            let mut gradients = model.gradients(&all, F32);
            let norm = clip_gradients(&model, &mut gradients, MAX_NORM);
            let squares: f64 = all.iter().flatten().map(|g| g * g).sum();
            let expected = squares.sqrt();
            near(&values(norm), &[expected], [1e-6, 0.0], "the norm");
            let factor = (MAX_NORM / (expected + 1e-6)).min(1.0);
            let all = all.map(|all| all.into_iter().map(|g| g * factor).collect::<Vec<_>>());
            let kept = gradients.get::<2>(model.matrix.id).expect("kept");
            near(&values(kept), &all[0], [2e-6, 0.0], "a clipped gradient");
            model = optimiser.step(RATE, model, gradients);
            for ((exact, g), p) in exact.iter_mut().zip(&all).zip(model.values()) {
                exact.step(g, time);
                near(
                    &p,
                    &exact.p,
                    [0.0, 3e-6],
                    &format!("{shape:?}, step {time}"),
                );
            }
        }
    }
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
            let mut optimiser = SETTINGS.init();
            let model = optimiser.step(RATE, model, gradients);
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
