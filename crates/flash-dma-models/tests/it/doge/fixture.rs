//! The fixture, and changes to its files.

use crate::dir::Dir;
use burn::tensor::{Device, Int, Tensor, TensorData};
use flash_dma_models::doge::Doge;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::Deserialize;
use std::collections::BTreeMap;

/// Maximum difference of logits in f32: ours and theirs sum in another order.
pub const TOLERANCE: f32 = 1e-4;

/// Devices of the build's engines.
pub fn devices() -> Vec<Device> {
    vec![
        #[cfg(feature = "flex")]
        Device::flex(),
        #[cfg(feature = "cuda")]
        Device::cuda(0),
    ]
}

/// The first engine of the build.
pub fn device() -> Device {
    devices().swap_remove(0)
}

/// A model of the fixture. Its files are embedded, as the test program may run on another machine.
#[derive(Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    config: &'static str,
    /// The bytes of the tensors' file.
    pub tensors: &'static [u8],
    expected: &'static str,
}

macro_rules! case {
    ($name:literal) => {
        Case {
            name: $name,
            config: include_str!(concat!("../../fixtures/doge/", $name, "/config.json")),
            tensors: include_bytes!(concat!("../../fixtures/doge/", $name, "/model.safetensors")),
            expected: include_str!(concat!("../../fixtures/doge/", $name, "/expected.json")),
        }
    };
}

pub const TIED: Case = case!("tied");
pub const BIASED: Case = case!("biased");
pub const EXPERTS: Case = case!("experts");
pub const CASES: [Case; 3] = [TIED, BIASED, EXPERTS];

/// Every model on every engine.
pub fn everywhere() -> impl Iterator<Item = (Case, Device)> {
    let engines = devices().into_iter();
    engines.flat_map(|device| CASES.map(|case| (case, device.clone())))
}

/// Results of `transformers`.
#[derive(Deserialize)]
pub struct Expected {
    /// The prompt and the tokens of greedy generation.
    pub tokens: Vec<i32>,
    /// The length of the prompt.
    pub prompt: usize,
    /// Rows whose logits follow.
    pub rows: Vec<usize>,
    /// Logits of one call per token.
    pub logits_by_step: Vec<Vec<f32>>,
    /// Logits of one call over all tokens.
    pub logits_at_once: Vec<Vec<f32>>,
}

impl Case {
    pub fn expected(&self) -> Expected {
        serde_json::from_str(self.expected).expect("the fixture is readable")
    }

    /// Files of the model, to be changed.
    pub fn files(&self) -> Files {
        let tensors = SafeTensors::deserialize(self.tensors).expect("the fixture is readable");
        let values = tensors.tensors().into_iter().map(|(name, view)| {
            let value = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            (name, value)
        });
        Files {
            config: serde_json::from_str(self.config).expect("the fixture is readable"),
            tensors: values.collect(),
        }
    }

    /// A directory with the files of the fixture.
    pub fn directory(&self) -> Dir {
        let directory = Dir::new();
        directory.file("config.json", self.config);
        directory.file("model.safetensors", self.tensors);
        directory
    }

    pub fn model(&self, device: &Device) -> Doge {
        Doge::from_safetensors(self.directory().path(""), device).expect("the fixture fits")
    }
}

/// Element type, shape and bytes of a tensor in a file.
pub type Value = (Dtype, Vec<usize>, Vec<u8>);

/// The files of a model.
pub struct Files {
    pub config: serde_json::Value,
    pub tensors: BTreeMap<String, Value>,
}

impl Files {
    /// The values of a tensor of f32.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        let (dtype, _, bytes) = &self.tensors[name];
        assert_eq!(*dtype, Dtype::F32);
        let floats = bytes.chunks_exact(4);
        (floats.map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes")))).collect()
    }

    /// Replaces or adds a tensor of f32.
    pub fn set(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes());
        let value = (Dtype::F32, shape.to_vec(), bytes.collect());
        self.tensors.insert(name.into(), value);
    }

    pub fn write(&self) -> Dir {
        let directory = Dir::new();
        directory.file("config.json", self.config.to_string());
        directory.file("model.safetensors", self.tensors_of(|_| true));
        directory
    }

    /// A file with those tensors whose names pass.
    pub fn tensors_of(&self, pass: impl Fn(&str) -> bool) -> Vec<u8> {
        let views = self.tensors.iter().filter(|(name, _)| pass(name));
        let views = views.map(|(name, (dtype, shape, bytes))| {
            let view = TensorView::new(*dtype, shape.clone(), bytes);
            (name, view.expect("the bytes fit the shape"))
        });
        safetensors::serialize(views, None).expect("tensors are written")
    }

    pub fn read(&self, device: &Device) -> Doge {
        Doge::from_safetensors(self.write().path(""), device).expect("the files fit")
    }
}

/// One sequence.
pub fn sequence(tokens: &[i32], device: &Device) -> Tensor<2, Int> {
    let data = TensorData::new(tokens.to_vec(), [1, tokens.len()]);
    Tensor::from_data(data, device)
}

/// The rows of the logits of one sequence.
pub fn rows(logits: Tensor<3>) -> Vec<Vec<f32>> {
    let [_, _, vocabulary] = logits.dims();
    let values: Vec<f32> = logits.into_data().iter().collect();
    values.chunks(vocabulary).map(<[f32]>::to_vec).collect()
}

/// The greatest difference of two lists of rows.
pub fn difference(ours: &[Vec<f32>], theirs: &[Vec<f32>]) -> f32 {
    assert_eq!(ours.len(), theirs.len());
    let pairs = ours.iter().flatten().zip(theirs.iter().flatten());
    pairs.fold(0.0, |most: f32, (ours, theirs)| {
        let difference = (ours - theirs).abs();
        // NaN counts as the greatest.
        let is_nan = difference.is_nan();
        most.max(if is_nan { f32::INFINITY } else { difference })
    })
}

/// Fails with both numbers.
#[track_caller]
pub fn assert_close(what: &str, ours: &[Vec<f32>], theirs: &[Vec<f32>], tolerance: f32) {
    let difference = difference(ours, theirs);
    let text = format!("{what}: {difference} > {tolerance}");
    assert!(difference <= tolerance, "{text}");
}
