//! The smallest problem that still fails.

use super::spec::{Axes, By, Decoding, Parts, Place, Selecting, Spec, Store, What};
use crate::masked::Pattern;
use flash_dma_problem::{ElementType, ScoreRole};
use flash_dma_reference::generate::Scores;
use std::time::{Duration, Instant};

/// Makes a problem simpler for as long as it `fails`, within the time.
pub fn shrink(spec: &Spec, limit: Duration, mut fails: impl FnMut(&Spec) -> bool) -> Spec {
    let start = Instant::now();
    let mut least = spec.clone();
    'shrinking: loop {
        for simpler in simpler(&least) {
            if start.elapsed() > limit {
                return least;
            }
            if fails(&simpler) {
                least = simpler;
                continue 'shrinking;
            }
        }
        return least;
    }
}

/// Problems that are simpler in one respect; those that save most come first.
fn simpler(spec: &Spec) -> Vec<Spec> {
    type Field = fn(&mut Spec) -> &mut usize;
    let mut all: Vec<Spec> = Vec::new();
    let mut with = |change: &dyn Fn(&mut Spec)| {
        let mut simpler = spec.clone();
        change(&mut simpler);
        let simpler = simpler.with_lengths();
        if simpler != *spec && !all.contains(&simpler) {
            all.push(simpler);
        }
    };
    let sizes: [(usize, Field); 3] = [
        (spec.batch, |s| &mut s.batch),
        (spec.kv_heads, |s| &mut s.kv_heads),
        (spec.group, |s| &mut s.group),
    ];
    for (size, of) in sizes {
        less(size).into_iter().for_each(|n| with(&|s| *of(s) = n));
    }
    if !matches!(spec.what, What::Decoded(_)) {
        for n in less(spec.q_len) {
            with(&|s| s.q_len = n);
            if spec.q_len == spec.k_len {
                with(&|s| (s.q_len, s.k_len) = (n, n));
            }
        }
        for n in less(spec.k_len) {
            with(&|s| s.k_len = n);
        }
        // The rest of a causal problem without the keys at its front.
        let both = spec.q_len.min(spec.k_len).saturating_sub(1);
        for n in [both / 2, 1].into_iter().filter(|&n| n <= both) {
            with(&|s| (s.q_len, s.k_len) = (s.q_len - n, s.k_len - n));
        }
    }
    for n in less(spec.head_dim / 8) {
        with(&|s| s.head_dim = 8 * n);
    }
    with(&|s| s.places = [Place::Contiguous; 6]);
    for place in 0..spec.places.len() {
        with(&|s| s.places[place] = Place::Contiguous);
    }
    with(&|s| s.scale = None);
    with(&|s| s.softcap = None);
    with(&|s| s.alibi = false);
    with(&|s| s.sink = false);
    with(&|s| s.large = None);
    with(&|s| s.large.iter_mut().for_each(|large| large.some = false));
    with(&|s| s.deterministic = false);
    with(&|s| s.dropout = None);
    with(&|s| s.grad_lse = false);
    with(&|s| s.deviation = 1.0);
    with(&|s| s.element = ElementType::F32);
    match &spec.what {
        What::Plain => {}
        What::Scored {
            window,
            scores,
            selecting,
        } => {
            let scored = |window, scores, selecting| {
                move |s: &mut Spec| {
                    s.what = What::Scored {
                        window,
                        scores,
                        selecting,
                    };
                }
            };
            with(&|s| s.what = What::Plain);
            for simpler in simpler_selecting(selecting) {
                with(&scored(*window, *scores, simpler));
            }
            with(&scored(None, *scores, *selecting));
            for n in less(window.unwrap_or(1)) {
                with(&scored(Some(n), *scores, *selecting));
            }
            with(&scored(*window, Scores::Normal, *selecting));
            with(&scored(*window, Scores::AllEqual, *selecting));
        }
        What::Masked { .. } => {
            type Mask = Option<(Axes, Pattern)>;
            type Bias = Option<(Axes, bool)>;
            let mut masked = |change: &dyn Fn(&mut Mask, &mut Bias, &mut bool)| {
                with(&|s| {
                    if let What::Masked { mask, bias, hidden } = &mut s.what {
                        change(mask, bias, hidden);
                    }
                });
            };
            masked(&|mask, _, hidden| (*mask, *hidden) = (None, false));
            masked(&|_, bias, _| *bias = None);
            masked(&|_, _, hidden| *hidden = false);
            masked(&|_, bias, _| bias.iter_mut().for_each(|(_, padded)| *padded = false));
            masked(&|mask, _, _| {
                mask.iter_mut()
                    .for_each(|(_, of)| *of = Pattern::Random(0.5))
            });
            for axis in 0..4 {
                let broadcast = |axes: &mut Axes| *axes = axes.without(axis);
                masked(&|mask, _, _| mask.iter_mut().for_each(|(axes, _)| broadcast(axes)));
                masked(&|_, bias, _| bias.iter_mut().for_each(|(axes, _)| broadcast(axes)));
            }
        }
        What::Decoded(decoding) => {
            for simpler in simpler_decoding(decoding) {
                with(&|s| s.what = What::Decoded(simpler.clone()));
            }
        }
    }
    all
}

/// Smaller numbers, the smallest first, but not below 1.
fn less(n: usize) -> Vec<usize> {
    let mut less = vec![
        1,
        n / 4,
        n / 2,
        n - n / 4,
        n.saturating_sub(8),
        n.saturating_sub(1),
    ];
    less.retain(|&m| m > 0 && m < n);
    less.sort_unstable();
    less.dedup();
    less
}

fn simpler_selecting(selecting: &Selecting) -> Vec<Selecting> {
    let mut all = vec![Selecting::default()];
    let mut with = |change: &dyn Fn(&mut Selecting)| {
        let mut simpler = *selecting;
        change(&mut simpler);
        all.push(simpler);
    };
    with(&|s| s.runners_up = None);
    for n in less(selecting.runners_up.unwrap_or(0)) {
        with(&|s| s.runners_up = Some(n));
    }
    with(&|s| s.competes = false);
    with(&|s| s.left_out = false);
    with(&|s| s.apart = false);
    with(&|s| s.constant = false);
    match selecting.by {
        By::Ends(_) => with(&|s| s.by = By::default()),
        By::Rank(parts) => {
            let mut with = |change: &dyn Fn(&mut Parts)| {
                let mut simpler = parts;
                change(&mut simpler);
                with(&|s| s.by = By::Rank(simpler));
            };
            with(&|parts| parts.recent = 0);
            with(&|parts| parts.sinks = 0);
            with(&|parts| parts.narrower = 0);
            with(&|parts| parts.documents = None);
            for n in less(parts.recent) {
                with(&|parts| parts.recent = n);
            }
            for n in less(parts.sinks) {
                with(&|parts| parts.sinks = n);
            }
            for n in less(parts.documents.unwrap_or(0)) {
                with(&|parts| parts.documents = Some(n));
            }
        }
    }
    all
}

fn simpler_decoding(decoding: &Decoding) -> Vec<Decoding> {
    let mut all = Vec::new();
    let mut with = |change: &dyn Fn(&mut Decoding)| {
        let mut simpler = decoding.clone();
        change(&mut simpler);
        if simpler != *decoding && !simpler.pieces.is_empty() {
            all.push(simpler);
        }
    };
    with(&|d| d.prefill = 0);
    for n in less(decoding.prefill) {
        with(&|d| d.prefill = n);
    }
    with(&|d| d.pieces.truncate(1));
    with(&|d| d.pieces.truncate(d.pieces.len() - 1));
    with(&|d| d.wrong = None);
    with(&|d| d.shared = 0);
    for n in less(decoding.shared) {
        with(&|d| d.shared = n);
    }
    for n in decoding.wrong.into_iter().flat_map(less) {
        with(&|d| d.wrong = Some(n));
    }
    for n in 0..decoding.pieces.len() {
        with(&|d| {
            d.pieces.remove(n);
        });
        for piece in less(decoding.pieces[n]) {
            with(&|d| d.pieces[n] = piece);
        }
    }
    match decoding.storage {
        Store::Slots(window) => {
            for n in less(window) {
                with(&|d| d.storage = Store::Slots(n));
            }
        }
        Store::Pages {
            page_len,
            scored,
            last,
        } => {
            let mut pages = |page_len, scored, last| {
                let storage = Store::Pages {
                    page_len,
                    scored,
                    last,
                };
                with(&|d| {
                    d.storage = storage;
                    if !scored {
                        d.scores = Scores::Normal;
                    }
                });
            };
            pages(page_len, false, last);
            pages(page_len, scored, None);
            for keys in less(last.unwrap_or(0)) {
                pages(page_len, scored, Some(keys));
            }
            for page_len in less(page_len) {
                pages(page_len, scored, last);
            }
        }
    }
    with(&|d| d.scores = Scores::Normal);
    with(&|d| d.role = ScoreRole::default());
    all
}
