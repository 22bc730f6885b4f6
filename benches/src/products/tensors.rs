//! Operands on a device, a product of them, and its check.

use super::shapes::{Layer, Pass};
use crate::device;
use bytemuck::cast_slice;
use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::prelude::TensorBinding;
use cubecl::server::Handle;
use flash_dma_kernels::ElementType;
use flash_dma_kernels::product::{Choice, Operands, Sizes, product, product_by};
use flash_dma_reference::Rng;
use half::bf16;

/// Number of entries of a result compared with f64.
const SAMPLES: usize = 96;

/// Random numbers that all operands view.
pub struct Pool {
    host: [Vec<bf16>; 2],
    device: [Handle; 2],
}

impl Pool {
    /// Numbers enough for the layers' operands.
    pub fn new(client: &Client, layers: &[Layer], tokens: usize) -> Self {
        let widest = layers.iter().map(|layer| layer.d_in.max(layer.d_out));
        let len = tokens * widest.max().unwrap_or(1);
        // Whole tensors of random numbers would take longer than the products: a prime number of them repeats.
        let mut rng = Rng::new(7);
        let some: Vec<bf16> = (0..1_000_003)
            .map(|_| bf16::from_f64(2.0 * rng.uniform() - 1.0))
            .collect();
        let host = [0, 500_009].map(|from| {
            let numbers = some.iter().cycle().skip(from).take(len);
            numbers.copied().collect::<Vec<_>>()
        });
        let device = (host.each_ref()).map(|all| client.create_from_slice(cast_slice(all)));
        Self { host, device }
    }
}

/// A product of a layer.
pub struct Case<'a> {
    pool: &'a Pool,
    pub layer: Layer,
    pub pass: Pass,
    tokens: usize,
    /// True if each timed launch reads another weight, which no cache holds.
    pub cold: bool,
    /// Strides of A and B.
    strides: [[usize; 2]; 2],
    /// Element type of the result: an f32 parameter gets an f32 gradient.
    out_element: ElementType,
    out: Handle,
}

fn binding(handle: &Handle, shape: [usize; 2], strides: [usize; 2]) -> TensorBinding {
    TensorBinding {
        handle: handle.clone().binding(),
        strides: strides.to_vec().into(),
        shape: shape.to_vec().into(),
        tiling: Default::default(),
    }
}

impl<'a> Case<'a> {
    /// A layer's output for the tokens of a decoding step, which reads each weight once.
    pub fn decoding(client: &Client, pool: &'a Pool, layer: Layer, tokens: usize) -> Self {
        Self {
            cold: true,
            ..Self::new(client, pool, layer, Pass::Forward, tokens)
        }
    }

    /// A layer's product of this many tokens, at most those of the pool.
    pub fn new(client: &Client, pool: &'a Pool, layer: Layer, pass: Pass, tokens: usize) -> Self {
        let rows = |columns: usize| [columns, 1];
        let columns = |rows: usize| [1, rows];
        let Layer { d_in, d_out, .. } = layer;
        // W is [d_in, d_out], or the transposed embedding, and X and dY have rows of tokens.
        let strides = match (pass, layer.turned) {
            (Pass::Forward, false) => [rows(d_in), rows(d_out)],
            (Pass::Forward, true) => [rows(d_in), columns(d_in)],
            (Pass::Input, false) => [rows(d_out), columns(d_out)],
            (Pass::Input, true) => [rows(d_out), rows(d_in)],
            (Pass::Weight, _) => [columns(d_in), rows(d_out)],
        };
        let out_element = match pass {
            Pass::Weight => ElementType::F32,
            Pass::Forward | Pass::Input => ElementType::Bf16,
        };
        let Sizes { m, n, .. } = pass.sizes(&layer, tokens);
        Self {
            pool,
            layer,
            pass,
            tokens,
            cold: false,
            strides,
            out_element,
            out: client.empty(m * n * out_element.size()),
        }
    }

    pub fn sizes(&self) -> Sizes {
        self.pass.sizes(&self.layer, self.tokens)
    }

    /// Launches the product into `out`, or returns the reason for a refusal. B is the matrix number `index` of the
    /// pool's.
    fn launch(
        &self,
        client: &Client,
        candidate: Option<Choice>,
        out: &Handle,
        index: usize,
    ) -> Result<(), String> {
        let Sizes { m, n, k } = self.sizes();
        let [a, b] = &self.pool.device;
        let matrices = (self.pool.host[1].len() / (n * k)).max(1);
        let first = index % matrices * n * k * size_of::<bf16>();
        let b = &b.clone().offset_start(first as u64);
        let operands = Operands {
            a: binding(a, [m, k], self.strides[0]),
            b: binding(b, [k, n], self.strides[1]),
            element: ElementType::Bf16,
        };
        let out = binding(out, [m, n], [n, 1]);
        match candidate {
            None => product(client, &operands, &out, self.out_element),
            Some(choice) => product_by(client, &operands, &out, self.out_element, choice),
        }
        .map_err(|error| error.to_string())
    }

    /// Launches the product once over zeros, waits, and returns its greatest error, relative to the possible loss
    /// from rounding the result and summing in f32. Or the reason, if it is refused, fails, or an error is greater
    /// than 1.
    pub fn check(&self, client: &Client, candidate: Option<Choice>) -> Result<f64, String> {
        let Sizes { m, n, k } = self.sizes();
        // Zeros, so that a kernel that writes nothing is detected.
        let out = client.create_from_slice(&vec![0; m * n * self.out_element.size()]);
        self.launch(client, candidate, &out, 0)?;
        let failed = |error| format!("failed on the device: {error:?}");
        block_on(client.sync()).map_err(failed)?;
        let bytes = client.read_one(out).map_err(failed)?;
        let mut rng = Rng::new(11);
        let corners = [(0, 0), (m - 1, n - 1), (0, n - 1), (m - 1, 0)];
        let random: Vec<_> = (0..SAMPLES).map(|_| (rng.below(m), rng.below(n))).collect();
        let mut worst = 0.0f64;
        for (i, j) in corners.into_iter().chain(random) {
            let at = i * n + j;
            let (actual, step) = match self.out_element {
                ElementType::F32 => (f64::from(cast_slice::<_, f32>(&bytes)[at]), 0.0),
                _ => (f64::from(cast_slice::<_, bf16>(&bytes)[at]), 1.0 / 256.0),
            };
            let (mut exact, mut size) = (0.0, 0.0);
            for t in 0..k {
                let a = self.pool.host[0][i * self.strides[0][0] + t * self.strides[0][1]];
                let b = self.pool.host[1][t * self.strides[1][0] + j * self.strides[1][1]];
                let term = f64::from(a) * f64::from(b);
                exact += term;
                size += term.abs();
            }
            let allowed = step * exact.abs() + size * 2e-6 + 1e-6;
            let error = (actual - exact).abs() / allowed;
            if error.is_nan() || error > 1.0 {
                return Err(format!("wrong: [{i}, {j}] is {actual} instead of {exact}"));
            }
            worst = worst.max(error);
        }
        Ok(worst)
    }

    /// Device times of some launches, in milliseconds.
    pub fn times(&self, client: &Client, candidate: Option<Choice>, runs: usize) -> Vec<f64> {
        let launch = |run: usize| {
            let index = if self.cold { run } else { 0 };
            // It has been launched before.
            let _ = self.launch(client, candidate, &self.out, index);
        };
        (0..runs)
            .map(|run| device::time(client, || launch(run)))
            .collect()
    }
}
