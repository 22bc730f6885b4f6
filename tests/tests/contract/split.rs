//! The forward pass with its keys in parts, on the engines that split them: the result of the whole, for any number of
//! parts. Each test fixes that number, which the library otherwise chooses by the size of the problem and the device.

use flash_dma_kernels::Engine as Kind;
use flash_dma_kernels::internals::Tuning;
use flash_dma_tests::engines::KernelsOnCuda;
use flash_dma_tests::prelude::*;

/// A matrix engine that splits keys.
struct Splitting {
    engine: Kind,
    dims: &'static [usize],
    /// Head dimensions, and the warps of its cubes there.
    sizes: &'static [(usize, usize)],
}

const MMA: Splitting = Splitting {
    engine: Kind::Mma,
    dims: &[32, 64, 96, 128, 192, 256],
    sizes: &[(128, 4), (128, 8)],
};
const WGMMA: Splitting = Splitting {
    engine: Kind::Wgmma,
    dims: &[32, 48, 64, 96, 128, 160, 192, 256],
    sizes: &[(64, 16), (64, 8), (128, 12), (128, 8), (128, 4), (256, 8)],
};

macro_rules! splitting_engines {
    ($($test:ident),* $(,)?) => {$(
        mod $test {
            #[test]
            fn kernels_cuda_mma() {
                super::MMA.run(super::$test);
            }

            #[test]
            fn kernels_cuda_wgmma() {
                super::WGMMA.run(super::$test);
            }
        }
    )*};
}

splitting_engines!(
    head_dims,
    numbers_of_parts,
    sizes_of_cubes,
    groups,
    options_and_layouts,
    empty_rows,
    not_finite,
    chosen_by_the_library,
    repeats_are_bit_equal,
);

impl Splitting {
    /// Runs a test if the device has the engine.
    fn run(&self, test: fn(&Self)) {
        let case = case(1, 1, 64, Bf16);
        match self.forward(&case, &case.inputs(), Tuning::default()) {
            Err(error @ AttentionError::Engine { .. }) => skip::<KernelsOnCuda>(&error.to_string()),
            _ => test(self),
        }
    }

    fn forward(
        &self,
        case: &Case,
        inputs: &Inputs,
        tuning: Tuning,
    ) -> Result<Outputs, AttentionError> {
        let device = shared::<KernelsOnCuda>();
        let grads = Grads::of_out(vec![0.0; inputs.q.len()]);
        let call = device.call(inputs, case.layout, &grads);
        device.forward_tuned(&call, self.engine, tuning)
    }

    fn check_inputs(&self, case: &Case, inputs: &Inputs, tuning: Tuning) {
        let how = format!("{:?} with {tuning:?}", self.engine);
        let outputs = self.forward(case, inputs, tuning);
        let outputs = outputs.unwrap_or_else(|error| panic!("{how} refuses {case:?}: {error}"));
        case.check_outputs(inputs, &outputs, &how);
    }

    fn check(&self, case: &Case, tuning: Tuning) {
        self.check_inputs(case, &case.inputs(), tuning);
    }
}

fn case(q_len: usize, k_len: usize, dim: usize, element: ElementType) -> Case {
    Case::new(q_len, k_len).dim(dim).element(element)
}

fn parts(parts: usize) -> Tuning {
    Tuning {
        parts: Some(parts),
        ..Tuning::default()
    }
}

fn head_dims(engine: &Splitting) {
    for &dim in engine.dims {
        let case = case(113, 777, dim, Bf16).heads(4, 2).window(500);
        engine.check(&case, parts(3));
        engine.check(&case.plain(), parts(3));
    }
    let case = case(113, 777, 64, F16).heads(4, 2);
    engine.check(&case, parts(3));
    engine.check(&case.plain(), parts(3));
}

/// One, fewer than key tiles, as many, and more; for one query, less than a tile, and tiles with different keys.
fn numbers_of_parts(engine: &Splitting) {
    for (q_len, k_len) in [(1, 777), (19, 640), (300, 777), (700, 700), (5, 3)] {
        for n in [1, 2, 5, 10, 40] {
            let case = case(q_len, k_len, 64, Bf16).window(k_len * 3 / 4);
            engine.check(&case, parts(n));
            engine.check(&case.clone().full(), parts(n));
            engine.check(&case.clone().plain(), parts(n));
            engine.check(&case.plain().full(), parts(n));
        }
    }
}

fn sizes_of_cubes(engine: &Splitting) {
    for &(dim, warps) in engine.sizes {
        let tuning = Tuning {
            warps: Some(warps),
            parts: Some(4),
        };
        for (q_len, k_len) in [(150, 900), (520, 520)] {
            let case = case(q_len, k_len, dim, Bf16).heads(8, 2);
            engine.check(&case, tuning);
            engine.check(&case.plain(), tuning);
        }
    }
}

/// Groups that divide the rows of a tile and groups that do not.
fn groups(engine: &Splitting) {
    for (q_heads, kv_heads) in [(1, 1), (3, 1), (7, 1), (12, 2), (65, 1)] {
        let case = case(41, 500, 64, F16).heads(q_heads, kv_heads);
        engine.check(&case, parts(4));
        engine.check(&case.plain(), parts(4));
    }
}

fn options_and_layouts(engine: &Splitting) {
    let case = || case(33, 450, 64, Bf16).heads(4, 1);
    for case in [
        case().options(|o| o.with_softcap(2.0)),
        case().plain().options(|o| o.with_softcap(20.0)),
        case().options(|o| o.with_scale(-0.3)),
        case().deviation(30.0),
        case().window(1),
        case().layout(Layout::Transposed),
        case().plain().layout(Layout::Transposed),
    ] {
        engine.check(&case, parts(3));
    }
}

/// Queries that see no key, keys that none attends to, and parts without any of a row's keys.
fn empty_rows(engine: &Splitting) {
    for case in [
        case(300, 170, 64, Bf16),
        case(300, 170, 64, Bf16).plain(),
        case(1100, 130, 64, Bf16).plain(),
    ] {
        engine.check(&case, parts(3));
    }
    for kind in Scores::ALL {
        let case = case(200, 600, 64, Bf16).scores(kind);
        engine.check(&case, parts(3));
        engine.check(&case.window(2).full(), parts(3));
    }
}

/// NaN and infinities in every input, in keys of every part, attended to by few rows, by many and by none.
fn not_finite(engine: &Splitting) {
    let (nan, infinite) = (f64::NAN, f64::INFINITY);
    let base = case(300, 500, 64, F16);
    for case in [
        base.clone().window(20),
        base.clone().window(500),
        base.clone().window(20).full(),
        base.plain(),
    ] {
        for (value, which) in [(nan, 0), (nan, 1), (nan, 2), (infinite, 0), (infinite, 1)] {
            let mut inputs = case.inputs();
            let dim = case.head_dim;
            for row in [3, 131, 210, 290, 430, 499] {
                match which {
                    0 => inputs.k[row * dim + 5] = value,
                    1 => inputs.v[(500 + row) * dim + 11] = value,
                    _ => inputs.q[row * dim + 40] = value,
                }
            }
            engine.check_inputs(&case, &inputs, parts(3));
        }
    }
    let case = case(300, 500, 64, F16)
        .window(20)
        .scores(Scores::Increasing);
    let mut inputs = case.inputs();
    let scores = inputs.scores.as_mut().expect("the case has scores");
    scores[225] = infinite;
    scores[700] = nan;
    engine.check_inputs(&case, &inputs, parts(3));
}

/// Few queries and many keys, which any device of more than a few multiprocessors splits.
fn chosen_by_the_library(engine: &Splitting) {
    for (q_len, k_len) in [(1, 8193), (7, 9000), (150, 4099)] {
        let case = case(q_len, k_len, 128, Bf16).heads(8, 2);
        engine.check(&case, Tuning::default());
        engine.check(&case.clone().window(4000), Tuning::default());
        engine.check(&case.plain(), Tuning::default());
    }
}

fn repeats_are_bit_equal(engine: &Splitting) {
    let case = case(77, 1500, 128, Bf16).heads(8, 2);
    for case in [case.clone().window(1000), case.plain()] {
        let inputs = case.inputs();
        let run = || {
            let outputs = engine.forward(&case, &inputs, parts(5));
            let outputs = outputs.expect("a good case");
            [outputs.out, outputs.lse]
        };
        let first = run();
        for _ in 0..50 {
            assert!(run() == first, "another result of the same call");
        }
    }
}
