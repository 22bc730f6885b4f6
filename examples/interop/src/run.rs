//! One case through the library's public functions, under autodiff.

use std::time::{Duration, Instant};

use burn::prelude::*;
use burn::tensor::FloatDType;
use burn_flash_dma::{Attention, AttentionOptions, try_select};

use crate::case::Case;
use crate::error::Error;

/// What a case computes. Floats are widened to f32, which is exact.
#[derive(Debug)]
pub struct Outcome {
    /// Float results by name: `out`, `lse`, and `dq`, `dk`, `dv`, `dscores` if there is a gradient.
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
    scores: Option<Tensor<3>>,
    dout: Option<Tensor<4>>,
    dlse: Option<Tensor<3>>,
    options: AttentionOptions,
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
            scores: case.tensor("scores", device)?,
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
        let scores = self
            .scores
            .as_ref()
            .map(|scores| scores.clone().detach().require_grad());
        sync(device)?;

        let begun = Instant::now();
        let attention = Attention::new(q.clone(), k.clone(), v.clone()).options(self.options);
        let (out, lse) = match scores.clone() {
            Some(scores) => attention.scores(scores).try_forward_with_lse()?,
            None => attention.try_forward_with_lse()?,
        };
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
        Ok(Pass {
            floats,
            times: Times { forward, backward },
        })
    }

    fn intervals(&self) -> Result<Option<TensorData>, Error> {
        let Some(scores) = self.scores.clone() else {
            return Ok(None);
        };
        let window = self.options.keep_window.unwrap_or(usize::MAX);
        let intervals = try_select(scores.without_autodiff(), window)?.into_tensor();
        let data = intervals
            .try_into_data()
            .map_err(|error| Error::Device(error.to_string()))?;
        Ok(Some(data.convert::<i32>()))
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
