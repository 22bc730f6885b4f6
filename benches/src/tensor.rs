//! Contiguous device tensors, and their elements on the host.

use bytemuck::{AnyBitPattern, NoUninit};
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use cubecl::server::Handle;
use flash_dma_problem::{ElementType, contiguous_strides};
use flash_dma_reference::Rng;
use flash_dma_reference::round::round_f32;
use half::prelude::*;
use std::sync::Mutex;

/// A contiguous device tensor.
#[derive(Clone, Debug)]
pub struct Tensor {
    handle: Handle,
    shape: Vec<usize>,
    /// Bytes of all elements.
    pub bytes: usize,
}

impl Tensor {
    /// A tensor of these elements.
    pub fn of<T: NoUninit>(client: &Client, shape: &[usize], elements: &[T]) -> Self {
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        Self {
            handle: client.create_from_slice(bytes),
            shape: shape.to_vec(),
            bytes: bytes.len(),
        }
    }

    /// A tensor of these numbers, rounded to an element type.
    pub fn rounded(client: &Client, shape: &[usize], values: &[f32], element: ElementType) -> Self {
        match element {
            ElementType::F32 => Self::of(client, shape, values),
            ElementType::F16 => Self::of(client, shape, &Vec::<f16>::from_f32_slice(values)),
            ElementType::Bf16 => Self::of(client, shape, &Vec::<bf16>::from_f32_slice(values)),
        }
    }

    /// A tensor with elements of this size, uninitialised.
    pub fn empty(client: &Client, shape: &[usize], element_size: usize) -> Self {
        let bytes = shape.iter().product::<usize>() * element_size;
        Self {
            handle: client.empty(bytes),
            shape: shape.to_vec(),
            bytes,
        }
    }

    /// A tensor of words, each computed from its index.
    pub fn words(client: &Client, shape: &[usize], word: impl FnMut(usize) -> u32) -> Self {
        let words: Vec<u32> = (0..shape.iter().product()).map(word).collect();
        Self::of(client, shape, &words)
    }

    /// A tensor of 4-byte zeros.
    pub fn zeros(client: &Client, shape: &[usize]) -> Self {
        Self::words(client, shape, |_| 0)
    }

    /// Sizes of the axes.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Argument of a launch.
    pub fn binding(&self) -> TensorBinding {
        TensorBinding {
            handle: self.handle.clone().binding(),
            strides: contiguous_strides(&self.shape).collect(),
            shape: self.shape.clone().into(),
            tiling: Default::default(),
        }
    }

    /// Its elements, as they are stored. Waits for the device. Panics if a launch failed.
    pub fn read<T: AnyBitPattern>(&self, client: &Client) -> Vec<T> {
        let bytes = client.read_one(self.handle.clone());
        let bytes = &bytes.expect("the device works")[..self.bytes];
        let elements = bytes.chunks_exact(size_of::<T>());
        elements.map(bytemuck::pod_read_unaligned).collect()
    }

    /// Its elements of this type, as numbers. Waits for the device. Panics if a launch failed.
    pub fn read_as(&self, client: &Client, element: ElementType) -> Vec<f32> {
        match element {
            ElementType::F32 => self.read(client),
            ElementType::F16 => self.read::<f16>(client).to_f32_vec(),
            ElementType::Bf16 => self.read::<bf16>(client).to_f32_vec(),
        }
    }
}

/// Normal values of the element type. Generating them would dominate a long run, so the host's cores share the work;
/// the values depend only on the seed.
pub fn normal(len: usize, seed: u64, element: ElementType) -> Vec<f32> {
    const CHUNK: usize = 1 << 20;
    let mut values = vec![0.0; len];
    let chunks = Mutex::new(values.chunks_mut(CHUNK).enumerate());
    let fill = || {
        while let Some((i, chunk)) = { chunks.lock().expect("nothing panics").next() } {
            let mut rng = Rng::new(seed ^ Rng::new(i as u64).next_u64());
            chunk.fill_with(|| round_f32(rng.normal() as f32, element));
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(fill);
        }
    });
    values
}
