//! The tensors of a call, in the form in which an engine or a framework has them: `R` for rows of the problem's element
//! type, `W` for words (f32), `I` for intervals and `P` for positions. Every form has the same fields, and `map` goes
//! from one to the next.

/// The inputs of attention, shaped as the problem says.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<R, W = R, I = W, P = I> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: R,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: R,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: R,
    /// `None` for plain attention.
    pub selection: Option<Selection<W, I, P>>,
}

impl<R, W, I, P> Inputs<R, W, I, P> {
    /// q, k and v.
    pub fn rows(&self) -> [&R; 3] {
        [&self.q, &self.k, &self.v]
    }
}

/// The scores of the keys, and the keys that each query keeps.
#[derive(Clone, Copy, Debug)]
pub struct Selection<W, I = W, P = I> {
    /// `[batch, kv_heads, k_len]`: the score of a key is added to its logits.
    pub scores: W,
    /// `[batch, kv_heads, k_len]`: the [interval](crate::Interval) of each key. An engine's selection makes them of the
    /// scores. Any others serve, too, if each begins at its key and ends by `k_len`, and at most
    /// [`window`](crate::Problem::window) of a head hold any one position.
    pub intervals: I,
    /// Present if the tensor that ranks the keys has a gradient; only the backward pass reads it.
    pub learning: Option<RankLearning<P>>,
}

impl<W, I, P> Selection<W, I, P> {
    /// The same in another form.
    pub fn map<V, J, Q>(
        self,
        words: impl FnOnce(W) -> V,
        intervals: impl FnOnce(I) -> J,
        positions: impl FnMut(P) -> Q,
    ) -> Selection<V, J, Q> {
        Selection {
            scores: words(self.scores),
            intervals: intervals(self.intervals),
            learning: self.learning.map(|learning| learning.map(positions)),
        }
    }

    /// The same by reference.
    pub fn as_ref(&self) -> Selection<&W, &I, &P> {
        Selection {
            scores: &self.scores,
            intervals: &self.intervals,
            learning: self.learning.as_ref().map(RankLearning::as_ref),
        }
    }
}

/// The pairs by which the tensor that ranks the keys learns: runners-up, which just miss the window, and perhaps the keys
/// that a query keeps.
#[derive(Clone, Copy, Debug)]
pub struct RankLearning<P> {
    /// `[batch, kv_heads, k_len]`: one past the last position at which each key is a runner-up. It is one from the end of
    /// its interval on, and nowhere if that is not before.
    pub ends: P,
    /// The most keys of a head that one position would attend to if the intervals ended there: the window and its
    /// runners-up. The lists of keys have room for no more, so a number that is too small loses gradients.
    pub max_live: usize,
    /// Present if kept keys learn what they are [worth](crate::OWN_OUTPUT_WEIGHT): `[batch, kv_heads, k_len]`, the first
    /// position at which its rank keeps each key, not before the key itself; one from the end of its interval on is none.
    pub kept_from: Option<P>,
}

impl<P> RankLearning<P> {
    /// The same in another form.
    pub fn map<Q>(self, mut positions: impl FnMut(P) -> Q) -> RankLearning<Q> {
        RankLearning {
            ends: positions(self.ends),
            max_live: self.max_live,
            kept_from: self.kept_from.map(positions),
        }
    }

    /// The same by reference.
    pub fn as_ref(&self) -> RankLearning<&P> {
        RankLearning {
            ends: &self.ends,
            max_live: self.max_live,
            kept_from: self.kept_from.as_ref(),
        }
    }
}

/// The results of the forward pass.
#[derive(Clone, Copy, Debug)]
pub struct Outputs<R, W = R> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub out: R,
    /// As `out`: the part of it that rounding to 16 bits loses, itself rounded to 16 bits, for [`Saved::residual`]; 0
    /// where `out` is not finite. `None` does not compute it; f32 has none.
    pub residual: Option<R>,
    /// `[batch, q_heads, q_len]`: the natural logarithm of the sum of the exponentials of a query's logits.
    pub lse: W,
    /// As `lse`: the part of it that rounding loses, for [`Saved::lse_rest`]; 0 where `lse` is not finite. `None` does not
    /// compute it.
    pub lse_rest: Option<W>,
}

impl<R, W> Outputs<R, W> {
    /// Without the tensors that only a backward pass needs.
    #[must_use]
    pub fn new(out: R, lse: W) -> Self {
        Self {
            out,
            residual: None,
            lse,
            lse_rest: None,
        }
    }

    /// The same in another form.
    pub fn map<S, V>(
        self,
        mut rows: impl FnMut(R) -> S,
        mut words: impl FnMut(W) -> V,
    ) -> Outputs<S, V> {
        Outputs {
            out: rows(self.out),
            residual: self.residual.map(rows),
            lse: words(self.lse),
            lse_rest: self.lse_rest.map(words),
        }
    }

    /// The same by reference.
    pub fn as_ref(&self) -> Outputs<&R, &W> {
        Outputs {
            out: &self.out,
            residual: self.residual.as_ref(),
            lse: &self.lse,
            lse_rest: self.lse_rest.as_ref(),
        }
    }

    /// The same by mutable reference.
    pub fn as_mut(&mut self) -> Outputs<&mut R, &mut W> {
        Outputs {
            out: &mut self.out,
            residual: self.residual.as_mut(),
            lse: &mut self.lse,
            lse_rest: self.lse_rest.as_mut(),
        }
    }
}

impl<T> Outputs<T> {
    /// Every tensor that is present.
    pub fn all(&self) -> impl Iterator<Item = &T> {
        let always = [&self.out, &self.lse].into_iter();
        always.chain(&self.residual).chain(&self.lse_rest)
    }
}

/// The results of the forward pass that the backward pass needs, and the incoming gradients.
#[derive(Clone, Copy, Debug)]
pub struct Saved<R, W = R> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub out: R,
    /// [`Outputs::residual`]; `None` is zero. Then the gradients of logits, and with them those of scores and biases, have
    /// the rounding of `out` in them, which adds up over the queries of a key.
    pub residual: Option<R>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub lse: W,
    /// [`Outputs::lse_rest`]; `None` is zero. Then the probabilities of a row have a factor of up to `exp(ulp(lse) / 2)`,
    /// which is 1.00003 at an LSE of 1000 and 8e13 at 1e9.
    pub lse_rest: Option<W>,
    /// `[batch, q_heads, q_len, head_dim]`.
    pub grad_out: R,
    /// Contiguous `[batch, q_heads, q_len]`; `None` is zero.
    pub grad_lse: Option<W>,
}

impl<R, W> Saved<R, W> {
    /// The results of a forward pass, and the gradients of `out` and of the LSE.
    pub fn new(results: Outputs<R, W>, grad_out: R, grad_lse: Option<W>) -> Self {
        Self {
            out: results.out,
            residual: results.residual,
            lse: results.lse,
            lse_rest: results.lse_rest,
            grad_out,
            grad_lse,
        }
    }

    /// The same in another form.
    pub fn map<S, V>(
        self,
        mut rows: impl FnMut(R) -> S,
        mut words: impl FnMut(W) -> V,
    ) -> Saved<S, V> {
        Saved {
            out: rows(self.out),
            residual: self.residual.map(&mut rows),
            lse: words(self.lse),
            lse_rest: self.lse_rest.map(&mut words),
            grad_out: rows(self.grad_out),
            grad_lse: self.grad_lse.map(words),
        }
    }

    /// The same by reference.
    pub fn as_ref(&self) -> Saved<&R, &W> {
        Saved {
            out: &self.out,
            residual: self.residual.as_ref(),
            lse: &self.lse,
            lse_rest: self.lse_rest.as_ref(),
            grad_out: &self.grad_out,
            grad_lse: self.grad_lse.as_ref(),
        }
    }

    /// `out`, its gradient, and the residual if there is one.
    pub fn rows(&self) -> impl Iterator<Item = &R> {
        let always = [&self.out, &self.grad_out].into_iter();
        always.chain(&self.residual)
    }
}

/// The gradients of the inputs.
#[derive(Clone, Copy, Debug)]
pub struct Gradients<R, W = R> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: R,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: R,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: R,
    /// `[batch, kv_heads, k_len]`; present exactly if the problem has scores that learn.
    pub scores: Option<W>,
    /// `[batch, kv_heads, k_len]`: of the tensor that ranks the keys; present exactly if there is a [`RankLearning`].
    pub rank: Option<W>,
}

impl<R, W> Gradients<R, W> {
    /// The same in another form.
    pub fn map<S, V>(
        self,
        mut rows: impl FnMut(R) -> S,
        mut words: impl FnMut(W) -> V,
    ) -> Gradients<S, V> {
        Gradients {
            q: rows(self.q),
            k: rows(self.k),
            v: rows(self.v),
            scores: self.scores.map(&mut words),
            rank: self.rank.map(words),
        }
    }

    /// The same by reference.
    pub fn as_ref(&self) -> Gradients<&R, &W> {
        Gradients {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            scores: self.scores.as_ref(),
            rank: self.rank.as_ref(),
        }
    }
}

impl<T> Gradients<T> {
    /// Every tensor that is present.
    pub fn all(&self) -> impl Iterator<Item = &T> {
        let rows = [&self.q, &self.k, &self.v].into_iter();
        rows.chain(&self.scores).chain(&self.rank)
    }
}
