//! Properties: relations between two calls that hold for any results.

mod causality;
mod equalities;
mod masked_causality;
mod masked_suffixes;
#[cfg(feature = "burn")]
mod merged;
#[cfg(feature = "burn")]
mod packed;
#[cfg(feature = "burn")]
mod packed_tensors;
#[cfg(feature = "burn")]
mod probabilities;
mod repeats;
#[cfg(feature = "burn")]
mod selectors;
mod sequences;
#[cfg(feature = "burn")]
mod sink;
mod suffixes;
mod unselected;

use flash_dma_reference::generate::normal;
use flash_dma_tests::prelude::*;

type Results = Vec<(&'static str, Vec<f64>)>;

/// The outputs of a call for random gradients.
fn outputs<E: Engine>(engine: &E, inputs: &Inputs) -> Outputs {
    let grads = Grads::random(&inputs.problem, 1);
    let results = engine.backward(&call(engine, inputs, &grads));
    results.expect("a good case").0
}

fn run<E: Engine>(engine: &E, inputs: &Inputs) -> Results {
    let grads = Grads::random(&inputs.problem, 1);
    results(engine, &call(engine, inputs, &grads))
}

/// The call of these inputs, contiguous, with the engine's own selection.
fn call<E: Engine>(engine: &E, inputs: &Inputs, grads: &Grads) -> Call {
    engine.call(inputs, Layout::Contiguous, grads)
}

fn results<E: Engine>(engine: &E, call: &Call) -> Results {
    named(engine.backward(call).expect("a good case"))
}

/// All results of a case for these inputs and gradients.
fn masked_results<E: MaskedEngine>(
    engine: &E,
    case: &MaskedCase,
    inputs: &MaskedInputs,
    grads: &Grads,
) -> Results {
    let call = MaskedCall::new(inputs, case.layout, false, grads);
    named(engine.masked(&call).expect("a good case"))
}

fn named((outputs, grads): (Outputs, Gradients)) -> Results {
    let named = [
        ("out", outputs.out),
        ("lse", outputs.lse),
        ("dq", grads.q),
        ("dk", grads.k),
        ("dv", grads.v),
    ];
    let scores = grads.scores.map(|scores| ("dscores", scores));
    let bias = grads.bias.map(|bias| ("dbias", bias));
    named.into_iter().chain(scores).chain(bias).collect()
}

/// The bits of everything, NaN included.
fn bits(results: &Results) -> Vec<Vec<u64>> {
    results.iter().map(|(_, values)| bits_of(values)).collect()
}

fn bits_of(values: &[f64]) -> Vec<u64> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Changes to elements that should not matter.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// One value.
    Filled(f64),
    /// Other random numbers.
    Drawn,
}

impl Change {
    /// The great ones are infinite in f16.
    const ALL: [Self; 4] = [
        Self::Filled(f64::NAN),
        Self::Filled(1e30),
        Self::Filled(-1e30),
        Self::Drawn,
    ];

    fn write(self, values: &mut [f64], element: ElementType, rng: &mut Rng) {
        match self {
            Self::Filled(value) => values.fill(value),
            Self::Drawn => values.copy_from_slice(&normal(values.len(), 3.0, element, rng)),
        }
    }

    /// Writes over the rows `from..` of each head of `[heads, len, width]`.
    fn write_from(
        self,
        values: &mut [f64],
        [len, width, from]: [usize; 3],
        element: ElementType,
        rng: &mut Rng,
    ) {
        for head in values.chunks_mut(len * width) {
            self.write(&mut head[from * width..], element, rng);
        }
    }
}
