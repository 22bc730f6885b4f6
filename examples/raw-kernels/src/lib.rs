//! Helpers for programs on CubeCL alone, also used by `own-kernel`: upload and download of tensors as `f64`, the
//! inputs of a problem, and the time of a launch.

use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use cubecl::server::Handle;
use flash_dma_kernels::{AttentionError, ElementType, Inputs, Selection, contiguous_strides};
use half::{bf16, f16};
use std::error::Error;
use std::time::{Duration, Instant};

/// Contents of a tensor.
#[derive(Clone, Copy)]
pub enum Kind {
    /// `q`, `k`, `v`, `out` and their gradients.
    Element(ElementType),
    /// Scores, their gradient and the LSE.
    F32,
    /// Intervals.
    U32,
}

impl Kind {
    fn size(self) -> usize {
        match self {
            Self::Element(element) => element.size(),
            Self::F32 | Self::U32 => 4,
        }
    }
}

/// A contiguous tensor of `values`, rounded to its type.
pub fn upload(client: &Client, values: &[f64], shape: &[usize], kind: Kind) -> TensorBinding {
    let bytes: Vec<u8> = match kind {
        Kind::Element(ElementType::F16) => bytes(values, |x| f16::from_f64(x).to_ne_bytes()),
        Kind::Element(ElementType::Bf16) => bytes(values, |x| bf16::from_f64(x).to_ne_bytes()),
        Kind::Element(ElementType::F32) | Kind::F32 => bytes(values, |x| (x as f32).to_ne_bytes()),
        Kind::U32 => bytes(values, |x| (x as u32).to_ne_bytes()),
    };
    binding(client.create_from_slice(&bytes), shape)
}

fn bytes<const N: usize>(values: &[f64], convert: impl Fn(f64) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&x| convert(x)).collect()
}

/// A contiguous tensor of undefined content.
///
/// `client.empty_tensor` would pad the rows on CUDA; a plain buffer keeps them contiguous.
pub fn empty(client: &Client, shape: &[usize], kind: Kind) -> TensorBinding {
    let bytes = shape.iter().product::<usize>() * kind.size();
    binding(client.empty(bytes), shape)
}

/// The tensor's values; waits for all earlier launches.
pub fn download(client: &Client, tensor: TensorBinding, kind: Kind) -> Vec<f64> {
    let bytes = client.read_one_unchecked_tensor(tensor.into_copy_descriptor(kind.size()));
    match kind {
        Kind::Element(ElementType::F16) => values(&bytes, |b| f16::from_ne_bytes(b).to_f64()),
        Kind::Element(ElementType::Bf16) => values(&bytes, |b| bf16::from_ne_bytes(b).to_f64()),
        Kind::Element(ElementType::F32) | Kind::F32 => {
            values(&bytes, |b| f64::from(f32::from_ne_bytes(b)))
        }
        Kind::U32 => values(&bytes, |b| f64::from(u32::from_ne_bytes(b))),
    }
}

fn values<const N: usize>(bytes: &[u8], convert: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    let (elements, _) = bytes.as_chunks::<N>();
    elements.iter().map(|&b| convert(b)).collect()
}

fn binding(handle: Handle, shape: &[usize]) -> TensorBinding {
    // SAFETY: every handle of this file holds the product of its shape.
    unsafe {
        TensorBinding::from_raw_parts(
            handle,
            contiguous_strides(shape).collect(),
            shape.iter().copied().collect(),
        )
    }
}

/// Inputs of a problem with scores. Its intervals are undefined until [`select`](flash_dma_kernels::select()) has
/// written them.
///
/// # Panics
///
/// If the problem has no scores.
pub fn inputs(client: &Client, host: &flash_dma_reference::Inputs) -> Inputs {
    let (p, typed) = (host.problem, Kind::Element(host.problem.element));
    let scores = host.scores.as_ref().expect("the problem has scores");
    Inputs {
        q: upload(client, &host.q, &p.q_shape(), typed),
        k: upload(client, &host.k, &p.kv_shape(), typed),
        v: upload(client, &host.v, &p.kv_shape(), typed),
        selection: Some(Selection {
            scores: upload(client, scores, &p.scores_shape(), Kind::F32),
            intervals: empty(client, &p.intervals_shape(), Kind::U32),
            learning: None,
        }),
    }
}

// ANCHOR: time
/// Times `samples` calls, each until the device has finished. The first one compiles.
///
/// # Errors
///
/// Errors of the call or the device.
pub fn time(
    client: &Client,
    samples: usize,
    call: impl Fn() -> Result<(), AttentionError>,
) -> Result<Vec<Duration>, Box<dyn Error>> {
    let mut times = Vec::with_capacity(samples);
    for _ in 0..samples {
        let start = Instant::now();
        call()?;
        // A launch returns before the kernel has run; failures of the device also show here.
        cubecl::future::block_on(client.sync())?;
        times.push(start.elapsed());
    }
    Ok(times)
}
// ANCHOR_END: time
