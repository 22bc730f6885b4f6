//! `flash-dma-cpu`.

use super::{Step, steps, wrong_behind};
use crate::call::picked;
use crate::engines::cpu::{unwritten, view};
use crate::engines::{Host, narrow, of_element, sentinels, widen};
use crate::fuzz::spec::{Decoding, MAX_STEP, Spec, Store};
use crate::{Outputs, Raw};
use core::ops::Range;
use flash_dma_cpu::cache::{self, Cache, ChunkKeys, Pages, Slots, SlotsRef};
use flash_dma_cpu::{self as engine, Element, View};
use flash_dma_problem::{Appending, AttentionError, CacheShape, Interval, Problem};
use flash_dma_reference::Inputs;

/// [`Decoder::decode`](super::Decoder::decode) of the engine.
pub(super) fn decode(spec: &Spec, decoding: &Decoding, all: &Inputs) -> Result<Vec<Step>, String> {
    let steps = of_element!(spec.element, run(spec, decoding, all));
    steps.map_err(|error| error.to_string())
}

fn run<E: Host + Element>(
    spec: &Spec,
    decoding: &Decoding,
    all: &Inputs,
) -> Result<Vec<Step>, AttentionError> {
    let mut held = Held::<E>::new(spec, decoding)?;
    if decoding.prefill > 0 {
        held.append(&Part::new(spec, all, 0..decoding.prefill, 0))?;
        held.share(decoding.shared_pages());
    }
    let step = |tokens: Range<usize>| {
        let wrong = wrong_behind(decoding, tokens.len(), spec.k_len);
        let part = Part::new(spec, all, tokens.clone(), 0);
        let outputs = match (wrong, decoding.window()) {
            (Some(wrong), _) => {
                let guess = Part::new(spec, all, tokens.clone(), wrong);
                let outputs = held.decode(&guess, Appending::Later)?;
                held.append(&part)?;
                let (len, own) = (guess.kv[2], 0..tokens.len());
                Outputs {
                    out: picked(&outputs.out, len, spec.head_dim, own.clone()),
                    lse: picked(&outputs.lse, len, 1, own),
                }
            }
            (None, Some(_)) if tokens.len() > MAX_STEP => held.chunk(&part)?,
            (None, _) => held.decode(&part, Appending::Now)?,
        };
        let live = decoding.window().map(|window| held.live(window));
        Ok(Step {
            tokens,
            outputs,
            live,
        })
    };
    steps(decoding).map(step).collect()
}

/// The results of a step: `run` writes the output, of this shape, and the LSE.
fn outputs<E: Host>(
    shape: [usize; 4],
    run: impl FnOnce(&mut [E], &mut [f32]) -> Result<(), AttentionError>,
) -> Result<Outputs, AttentionError> {
    let mut out: Vec<E> = unwritten(&shape, 0);
    let mut lse: Vec<f32> = unwritten(&shape[..3], 0);
    run(&mut out, &mut lse)?;
    Ok(Outputs {
        out: widen(&out),
        lse: widen(&lse),
    })
}

struct Part<E> {
    tokens: Range<usize>,
    rows: [Raw; 3],
    typed: [Vec<E>; 3],
    scores: Option<Vec<f32>>,
    kv: [usize; 4],
}

impl<E: Host> Part<E> {
    /// The tokens of the range, followed by `wrong` others: the first of the sequence.
    fn new(spec: &Spec, all: &Inputs, range: Range<usize>, wrong: usize) -> Self {
        let (len, dim) = (spec.k_len, spec.head_dim);
        let kv = [spec.batch, spec.kv_heads, range.len() + wrong, dim];
        let q = [spec.batch, spec.q_heads(), range.len() + wrong, dim];
        let picks = range.clone().chain(0..wrong);
        let layout = spec.places[Spec::Q].layout();
        let place = |values: &[f64], shape: [usize; 4]| {
            let part = picked(values, len, dim, picks.clone());
            Raw::new(&part, &shape, spec.element, layout)
        };
        let rows = [place(&all.q, q), place(&all.k, kv), place(&all.v, kv)];
        Self {
            typed: [0, 1, 2].map(|n| narrow(&rows[n].values)),
            rows,
            scores: (all.scores.as_ref()).map(|z| narrow(&picked(z, len, 1, picks.clone()))),
            tokens: range,
            kv,
        }
    }

    fn view(&self, n: usize) -> View<'_, E, 4> {
        view(&self.rows[n], &self.typed[n])
    }

    fn tokens(&self) -> cache::Tokens<'_, E> {
        let [batch, heads, len, _] = self.kv;
        cache::Tokens {
            k: self.view(1),
            v: self.view(2),
            scores: (self.scores.as_ref()).map(|z| View::contiguous(z, [batch, heads, len])),
        }
    }

    fn scores_shape(&self) -> Option<&[usize]> {
        self.scores.as_ref().map(|_| &self.kv[..3])
    }
}

/// A cache, with rows of NaN where it is empty.
struct Held<'a, E> {
    spec: &'a Spec,
    shape: CacheShape,
    k: Vec<E>,
    v: Vec<E>,
    score: Vec<f32>,
    /// Positions of slots, or the table of pages.
    index: Vec<i32>,
    seen: Vec<i32>,
}

impl<'a, E: Host + Element> Held<'a, E> {
    fn new(spec: &'a Spec, decoding: &Decoding) -> Result<Self, AttentionError> {
        let (batch, heads, dim) = (spec.batch, spec.kv_heads, spec.head_dim);
        let (shape, index) = match decoding.storage {
            Store::Slots(window) => {
                let shape = CacheShape::slots(batch, heads, window, dim, spec.element)?;
                let shape = shape.with_score_role(decoding.role);
                (shape, vec![-1; batch * heads * window])
            }
            Store::Pages {
                page_len,
                scored,
                last,
            } => {
                // With room for wrong tokens.
                let max_pages = (spec.k_len + MAX_STEP).div_ceil(page_len);
                let pages = max_pages * batch + 1;
                let sizes = [pages, page_len, max_pages];
                let mut shape = CacheShape::pages(batch, heads, sizes, dim, spec.element)?;
                if scored {
                    shape = shape.with_scores();
                }
                if let Some(keys) = last {
                    shape = shape.with_window(keys)?;
                }
                // Alternating, from the last page on.
                let page = |n: usize| pages - 1 - n % max_pages * batch - n / max_pages;
                let table = (0..batch * max_pages).map(|n| page(n) as i32);
                (shape, table.collect())
            }
        };
        let rows = shape.kv_shape().iter().product::<usize>();
        let nothing = match decoding.storage {
            Store::Slots(_) => f32::NEG_INFINITY,
            Store::Pages { .. } => f32::NAN,
        };
        Ok(Self {
            spec,
            shape,
            k: vec![E::from_f64(f64::NAN); rows],
            v: vec![E::from_f64(f64::NAN); rows],
            score: vec![nothing; rows / dim],
            index,
            seen: vec![0; batch],
        })
    }

    fn cache(&mut self) -> Cache<'_, E> {
        match self.shape.storage {
            flash_dma_problem::Storage::Slots { .. } => Cache::Slots(Slots {
                k: &mut self.k,
                v: &mut self.v,
                score: &mut self.score,
                position: &mut self.index,
                seen: &mut self.seen,
            }),
            _ => Cache::Pages(Pages {
                k: &mut self.k,
                v: &mut self.v,
                scores: self.shape.has_scores().then_some(&mut self.score[..]),
                table: &self.index,
                lengths: &mut self.seen,
            }),
        }
    }

    fn append(&mut self, part: &Part<E>) -> Result<(), AttentionError> {
        let (kv, element) = (&part.kv, self.spec.element);
        let held = part.tokens.start;
        let problem = (self.shape).append(kv, kv, part.scores_shape(), element, held)?;
        cache::append(&problem, self.cache(), part.tokens())
    }

    /// Replaces the first pages of every sequence by those of the first one; its own are rows of NaN then.
    fn share(&mut self, pages: usize) {
        let (dim, max_pages) = (
            self.spec.head_dim,
            self.index.len() / self.spec.batch.max(1),
        );
        let rows = self.k.len() / dim / (max_pages * self.spec.batch + 1).max(1);
        for sequence in 1..self.spec.batch {
            for page in 0..pages {
                let own = self.index[sequence * max_pages + page] as usize;
                self.index[sequence * max_pages + page] = self.index[page];
                for tensor in [&mut self.k, &mut self.v] {
                    tensor[own * rows * dim..][..rows * dim].fill(E::from_f64(f64::NAN));
                }
                self.score[own * rows..][..rows].fill(f32::NAN);
            }
        }
    }

    fn decode(&mut self, part: &Part<E>, appending: Appending) -> Result<Outputs, AttentionError> {
        let (kv, element) = (&part.kv, self.spec.element);
        let (q, held, options) = (part.view(0), part.tokens.start, self.spec.options());
        let scores = part.scores_shape();
        let problem = (self.shape).decode(&q.shape, kv, kv, scores, element, held, &options)?;
        let problem = problem.with_appending(appending);
        let (cache, tokens) = (self.cache(), part.tokens());
        outputs(problem.q_shape(), |out, lse| match appending {
            Appending::Now => cache::decode(&problem, q, cache, tokens, out, lse),
            Appending::Later => cache::attend(&problem, q, cache.read(), tokens, out, lse),
        })
    }

    /// The forward pass over the slots' keys and the tokens, which are then appended.
    fn chunk(&mut self, part: &Part<E>) -> Result<Outputs, AttentionError> {
        let (spec, kv, options) = (self.spec, part.kv, self.spec.options());
        let held = part.tokens.start;
        let append = (self.shape).append(&kv, &kv, part.scores_shape(), spec.element, held)?;
        let window = self.shape.capacity();
        let keys = [kv[0], kv[1], window + kv[2], kv[3]];
        let [mut k, mut v] = [(); 2].map(|()| sentinels(keys.iter().product()));
        let mut z: Vec<f32> = sentinels(keys[..3].iter().product());
        let slots = SlotsRef {
            k: &self.k,
            v: &self.v,
            score: &self.score,
            position: &self.index,
            seen: &self.seen,
        };
        let target = ChunkKeys {
            k: &mut k,
            v: &mut v,
            scores: &mut z,
            rank: None,
        };
        cache::chunk_keys(&append, slots, part.tokens(), target)?;

        let mut intervals = vec![Interval { first: 0, end: 0 }; z.len()];
        let scores = View::contiguous(&z, [keys[0], keys[1], keys[2]]);
        engine::select(scores, window, &mut intervals)?;
        if !self.shape.adds_scores() {
            // Hidden keys are in no interval.
            z.fill(0.0);
        }
        let scores = View::contiguous(&z, [keys[0], keys[1], keys[2]]);
        let q = part.view(0);
        let scored = Some(&keys[..3]);
        let problem = Problem::new(&q.shape, &keys, &keys, scored, spec.element, &options)?;
        let inputs = engine::Inputs {
            q,
            k: View::contiguous(&k, keys),
            v: View::contiguous(&v, keys),
            selection: Some(engine::Selection {
                scores,
                intervals: &intervals,
                learning: None,
            }),
        };
        let outputs = outputs(problem.q_shape(), |out, lse| {
            engine::forward(&problem, inputs, engine::Outputs::new(out, lse))
        })?;
        self.append(part)?;
        Ok(outputs)
    }

    fn live(&self, window: usize) -> Vec<Vec<usize>> {
        let row = |slots: &[i32]| {
            let held = slots.iter().filter(|&&position| position >= 0);
            let mut live: Vec<usize> = held.map(|&position| position as usize).collect();
            live.sort_unstable();
            live
        };
        self.index.chunks_exact(window).map(row).collect()
    }
}
