//! One case through the library's public functions, under autodiff.

use std::time::{Duration, Instant};

use burn::prelude::*;
use burn::tensor::FloatDType;
use burn_flash_dma::{
    Attention, AttentionMask, AttentionOptions, Documents, KeyRanges, MaskedAttention, Selector,
    TilePlan,
};

use crate::case::Case;
use crate::error::Error;

/// What a case computes. Floats are widened to f32, which is exact.
#[derive(Debug)]
pub struct Outcome {
    /// Float results by name: `out`, `lse`, and `dq`, `dk`, `dv`, `dscores` or `dbias` if there is a gradient.
    pub floats: Vec<(&'static str, TensorData)>,
    /// Intervals `[batch, kv_heads, k_len, 2]`, i32, if there are scores.
    pub intervals: Option<TensorData>,
    /// Time of the first run, kernels' compilation included.
    pub cold: Times,
    /// Median time of the later runs.
    pub warm: Times,
}

/// Wall-clock times up to the end of the device's work.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// Selection and forward.
    pub forward: Duration,
    /// Backward; zero without a gradient.
    pub backward: Duration,
}

/// The inputs of a case on a device.
struct Inputs {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    keys: Keys,
    dout: Option<Tensor<4>>,
    dlse: Option<Tensor<3>>,
    options: AttentionOptions,
}

/// What says which keys are attended to. A case has one, so its size does not matter.
#[allow(clippy::large_enum_variant)]
enum Keys {
    All,
    Scored {
        scores: Tensor<3>,
        selector: Selector,
    },
    Masked {
        seen: Seen,
        bias: Option<Tensor<4>>,
    },
}

/// What masked attention sees.
enum Seen {
    All,
    Mask(AttentionMask),
    /// Documents without a mask need none: each query sees one range of keys.
    Ranges(KeyRanges),
}

/// Results of one pass.
struct Pass {
    floats: Vec<(&'static str, TensorData)>,
    times: Times,
}

/// Runs a case once cold and `repeats` times warm.
///
/// # Errors
///
/// [`Error`] if the case is not one the library accepts, or the device fails.
pub fn run(
    case: &Case,
    device: &Device,
    dtype: FloatDType,
    repeats: usize,
) -> Result<Outcome, Error> {
    if !device.supports_dtype(dtype) {
        return Err(Error::UnsupportedDtype(format!("{dtype:?}")));
    }
    let inputs = Inputs::new(case, &device.clone().autodiff(), dtype)?;
    let Pass {
        floats,
        times: cold,
    } = inputs.pass(device)?;
    let mut times = Vec::with_capacity(repeats);
    for _ in 0..repeats {
        times.push(inputs.pass(device)?.times);
    }
    let warm = if times.is_empty() {
        cold
    } else {
        Times {
            forward: median(times.iter().map(|t| t.forward).collect()),
            backward: median(times.iter().map(|t| t.backward).collect()),
        }
    };
    Ok(Outcome {
        floats,
        intervals: inputs.intervals()?,
        cold,
        warm,
    })
}

impl Inputs {
    fn new(case: &Case, device: &Device, dtype: FloatDType) -> Result<Self, Error> {
        let operand = |name| Ok::<_, Error>(case.required::<4>(name, device)?.cast(dtype));
        let (q, k, v) = (operand("q")?, operand("k")?, operand("v")?);
        let inputs = Self {
            keys: Keys::new(case, device)?,
            dout: case.tensor("dout", device)?,
            dlse: case.tensor("dlse", device)?,
            options: case.options.attention(),
            q,
            k,
            v,
        };
        let [batch, heads, len, dim] = inputs.q.dims();
        if let Some(dout) = &inputs.dout {
            same_shape("dout", "out", &[batch, heads, len, dim], &dout.dims())?;
        }
        if let Some(dlse) = &inputs.dlse {
            same_shape("dlse", "lse", &[batch, heads, len], &dlse.dims())?;
        }
        Ok(inputs)
    }

    fn pass(&self, device: &Device) -> Result<Pass, Error> {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| x.clone().detach().require_grad());
        let leaf = |scores: &Tensor<3>| scores.clone().detach().require_grad();
        let (mut scores, mut bias) = (None, None);
        match &self.keys {
            Keys::Scored { scores: given, .. } => scores = Some(leaf(given)),
            Keys::Masked { bias: given, .. } => {
                bias = (given.as_ref()).map(|bias| bias.clone().detach().require_grad());
            }
            Keys::All => {}
        }
        sync(device)?;

        let begun = Instant::now();
        let rows = [q.clone(), k.clone(), v.clone()];
        let (out, lse) = self.forward(rows, scores.clone(), bias.clone())?;
        sync(device)?;
        let forward = begun.elapsed();
        let mut floats = vec![("out", read(out.clone())?), ("lse", read(lse.clone())?)];

        // The loss whose gradients at out and lse are the case's.
        let from_out = self
            .dout
            .clone()
            .map(|dout| (out.cast(FloatDType::F32) * dout).sum());
        let from_lse = self.dlse.clone().map(|dlse| (lse * dlse).sum());
        let loss = match (from_out, from_lse) {
            (Some(a), Some(b)) => Some(a + b),
            (a, b) => a.or(b),
        };
        sync(device)?;
        let begun = Instant::now();
        let Some(loss) = loss else {
            return Ok(Pass {
                floats,
                times: Times {
                    forward,
                    backward: Duration::ZERO,
                },
            });
        };
        let gradients = loss.backward();
        sync(device)?;
        let backward = begun.elapsed();
        for (name, input) in [("dq", &q), ("dk", &k), ("dv", &v)] {
            if let Some(gradient) = input.grad(&gradients) {
                floats.push((name, read(gradient)?));
            }
        }
        if let Some(gradient) = scores.and_then(|scores| scores.grad(&gradients)) {
            floats.push(("dscores", read(gradient)?));
        }
        if let Some(gradient) = bias.and_then(|bias| bias.grad(&gradients)) {
            floats.push(("dbias", read(gradient)?));
        }
        Ok(Pass {
            floats,
            times: Times { forward, backward },
        })
    }

    /// The output and the LSE.
    fn forward(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        scores: Option<Tensor<3>>,
        bias: Option<Tensor<4>>,
    ) -> Result<(Tensor<4>, Tensor<3>), Error> {
        let lengths = [q.dims()[2], k.dims()[2]];
        let plain = Attention::new(q.clone(), k.clone(), v.clone()).options(self.options);
        Ok(match (&self.keys, scores) {
            (Keys::Scored { selector, .. }, Some(scores)) => {
                let intervals = selector.try_select(scores.clone())?;
                let call = plain.scores(scores).intervals(&intervals);
                call.try_forward_with_lse()?
            }
            (Keys::Masked { seen, .. }, _) => {
                let call = MaskedAttention::new(q, k, v).bias(bias);
                let call = call.options(self.options);
                match seen {
                    Seen::All => call.try_forward_with_lse()?,
                    Seen::Mask(mask) => call.mask(mask.clone()).try_forward_with_lse()?,
                    Seen::Ranges(ranges) => {
                        let (ranges, causal) = (ranges.clone(), self.options.causal);
                        let plan = TilePlan::try_from_ranges(ranges, lengths, causal)?;
                        call.plan(&plan).try_forward_with_lse()?
                    }
                }
            }
            _ => plain.try_forward_with_lse()?,
        })
    }

    fn intervals(&self) -> Result<Option<TensorData>, Error> {
        let Keys::Scored { scores, selector } = &self.keys else {
            return Ok(None);
        };
        let scores = scores.clone().without_autodiff();
        let intervals = selector.try_select(scores)?.into_tensor();
        let data = intervals
            .try_into_data()
            .map_err(|error| Error::Device(error.to_string()))?;
        Ok(Some(data.convert::<i32>()))
    }
}

impl Keys {
    fn new(case: &Case, device: &Device) -> Result<Self, Error> {
        let documents = case.documents(device)?;
        if let Some(scores) = case.tensor("scores", device)? {
            let selector = Selector::top(case.options.window.unwrap_or(usize::MAX));
            let selector = match documents {
                Some(ids) => selector.documents(Documents::from_ids(ids)),
                None => selector,
            };
            return Ok(Self::Scored { scores, selector });
        }
        let bias = case.tensor("bias", device)?;
        let seen = match (case.mask(device)?, documents) {
            (None, None) if bias.is_none() => return Ok(Self::All),
            (None, None) => Seen::All,
            (Some(mask), None) => Seen::Mask(mask),
            (Some(mask), Some(ids)) => Seen::Mask(mask.and(AttentionMask::documents(ids))),
            (None, Some(ids)) => Seen::Ranges(KeyRanges::documents(ids)),
        };
        Ok(Self::Masked { seen, bias })
    }
}

fn same_shape(
    name: &'static str,
    of: &'static str,
    expected: &[usize],
    actual: &[usize],
) -> Result<(), Error> {
    if expected == actual {
        return Ok(());
    }
    Err(Error::GradientShape {
        name,
        of,
        expected: expected.into(),
        actual: actual.into(),
    })
}

fn sync(device: &Device) -> Result<(), Error> {
    device
        .sync()
        .map_err(|error| Error::Device(error.to_string()))
}

fn read<const D: usize>(tensor: Tensor<D>) -> Result<TensorData, Error> {
    let data = tensor.without_autodiff().try_into_data();
    Ok(data
        .map_err(|error| Error::Device(error.to_string()))?
        .convert::<f32>())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
