//! The scores of Dynamic Mask Attention: `z = exp(a * softplus(v_cat . dt_projᵀ))`, where `v_cat`
//! concatenates the kv heads of a token.

/// The inputs of the scores.
#[derive(Clone, Debug)]
pub struct Zoh {
    /// Sequences.
    pub batch: usize,
    /// Heads of the values, of `dt_proj`'s rows and of `a`.
    pub heads: usize,
    /// Tokens.
    pub len: usize,
    /// Elements per head of a token.
    pub head_dim: usize,
    /// `[batch, heads, len, head_dim]`.
    pub v: Vec<f64>,
    /// `[heads, heads * head_dim]`.
    pub dt_proj: Vec<f64>,
    /// `[heads]`.
    pub a: Vec<f64>,
}

/// Gradients of [`Zoh::scores`].
#[derive(Clone, Debug)]
pub struct ZohBackward {
    /// `[batch, heads, len, head_dim]`.
    pub v: Vec<f64>,
    /// `[heads, heads * head_dim]`.
    pub dt_proj: Vec<f64>,
    /// `[heads]`.
    pub a: Vec<f64>,
}

/// `ln(1 + exp(x))` without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

impl Zoh {
    /// The scores, `[batch, heads, len]`.
    #[must_use]
    pub fn scores(&self) -> Vec<f64> {
        let score = |(b, h, n)| (self.a[h] * softplus(self.dt(b, h, n))).exp();
        self.rows().map(score).collect()
    }

    /// Gradients of the inputs from the gradient of the scores, `[batch, heads, len]`.
    #[must_use]
    pub fn backward(&self, grad: &[f64]) -> ZohBackward {
        let scores = self.scores();
        let mut grads = ZohBackward {
            v: vec![0.0; self.v.len()],
            dt_proj: vec![0.0; self.dt_proj.len()],
            a: vec![0.0; self.a.len()],
        };
        for (row, (b, h, n)) in self.rows().enumerate() {
            let dt = self.dt(b, h, n);
            let dexponent = grad[row] * scores[row];
            grads.a[h] += dexponent * softplus(dt);
            let ddt = dexponent * self.a[h] * sigmoid(dt);
            for (w, v) in self.terms(b, h, n) {
                grads.dt_proj[w] += ddt * self.v[v];
                grads.v[v] += ddt * self.dt_proj[w];
            }
        }
        grads
    }

    fn rows(&self) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
        let (batch, heads, len) = (self.batch, self.heads, self.len);
        (0..batch).flat_map(move |b| (0..heads).flat_map(move |h| (0..len).map(move |n| (b, h, n))))
    }

    fn dt(&self, b: usize, h: usize, n: usize) -> f64 {
        let terms = self.terms(b, h, n);
        terms.map(|(w, v)| self.dt_proj[w] * self.v[v]).sum()
    }

    /// The indices in `dt_proj` and in `v` of the products whose sum is `dt` of a head and token.
    fn terms(&self, b: usize, h: usize, n: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (heads, len, dim) = (self.heads, self.len, self.head_dim);
        (0..heads * dim).map(move |c| {
            let (from, d) = (c / dim, c % dim);
            let v = ((b * heads + from) * len + n) * dim + d;
            (h * heads * dim + c, v)
        })
    }
}
