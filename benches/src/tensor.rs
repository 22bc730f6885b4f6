//! Contiguous device tensors, and their elements on the host.

use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use cubecl::server::Handle;
use flash_dma_problem::{ElementType, contiguous_strides};
use flash_dma_reference::Rng;
use flash_dma_reference::round::round_f32;
use half::{bf16, f16};
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
    /// Of these elements.
    pub fn of<T: bytemuck::NoUninit>(client: &Client, shape: &[usize], elements: &[T]) -> Self {
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        Self {
            handle: client.create_from_slice(bytes),
            shape: shape.to_vec(),
            bytes: bytes.len(),
        }
    }

    /// Of elements of this size that nobody has written.
    pub fn empty(client: &Client, shape: &[usize], element_size: usize) -> Self {
        let bytes = shape.iter().product::<usize>() * element_size;
        Self {
            handle: client.empty(bytes),
            shape: shape.to_vec(),
            bytes,
        }
    }

    /// Of words, each by its index.
    pub fn words(client: &Client, shape: &[usize], word: impl FnMut(usize) -> u32) -> Self {
        let words: Vec<u32> = (0..shape.iter().product()).map(word).collect();
        Self::of(client, shape, &words)
    }

    /// Of zeros of 4 bytes.
    pub fn zeros(client: &Client, shape: &[usize]) -> Self {
        Self::words(client, shape, |_| 0)
    }

    /// Its sizes.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The argument of a launch.
    pub fn binding(&self) -> TensorBinding {
        TensorBinding {
            handle: self.handle.clone().binding(),
            strides: contiguous_strides(&self.shape).collect(),
            shape: self.shape.clone().into(),
            tiling: Default::default(),
        }
    }

    /// Its bytes. Waits for the device.
    ///
    /// # Panics
    ///
    /// If a launch failed.
    pub fn read(&self, client: &Client) -> Vec<u8> {
        let bytes = client.read_one(self.handle.clone());
        bytes.expect("the device works")[..self.bytes].to_vec()
    }

    /// Its words. Waits for the device.
    ///
    /// # Panics
    ///
    /// If a launch failed.
    pub fn read_words(&self, client: &Client) -> Vec<u32> {
        let bytes = self.read(client);
        let words = bytes.chunks_exact(4);
        words
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect()
    }

    /// Its elements. Waits for the device.
    ///
    /// # Panics
    ///
    /// If a launch failed.
    pub fn read_as(&self, client: &Client, element: ElementType) -> Vec<f32> {
        if element == ElementType::F32 {
            let words = self.read_words(client);
            return words.into_iter().map(f32::from_bits).collect();
        }
        let of = |b: &[u8]| match element {
            ElementType::F16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
            _ => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        };
        self.read(client).chunks_exact(2).map(of).collect()
    }
}

/// The bytes of values in an element type.
pub fn encode(values: &[f32], element: ElementType) -> Vec<u8> {
    let halves = |of: fn(f32) -> [u8; 2]| values.iter().flat_map(|&x| of(x)).collect();
    match element {
        ElementType::F32 => bytemuck::cast_slice(values).to_vec(),
        ElementType::F16 => halves(|x| f16::from_f32(x).to_le_bytes()),
        ElementType::Bf16 => halves(|x| bf16::from_f32(x).to_le_bytes()),
    }
}

/// Normal values of the element type. Generating them would dominate a long run, so the cores of the host share the
/// work; the values depend on the seed alone.
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
