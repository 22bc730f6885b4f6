//! Packed documents and padded batches against a call per document: the same selection, and results up to rounding.

use burn::tensor::{Bool, Device, Distribution, Tensor, TensorData};
use burn_flash_dma::{
    Attention, AttentionMask, Documents, KeyRanges, MaskedAttention, PackedAttention, Selector,
    TilePlan,
};
use flash_dma_tests::prelude::*;

fast_burn!(
    dense_documents,
    scored_documents,
    masked_documents_of_two_lengths,
    the_definition_of_two_lengths,
    documents_in_both_directions: dense(&LENGTHS, AttentionOptions::new().with_causal(false)),
    padded_batches,
    padding_leaves_no_trace,
    one_selection_for_two_calls,
    nothing_at_all,
    refusals,
);
on_burn_cpu!(a_packed_call);

const DIM: usize = 16;
const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;

fn device<B: Backend>(burn: &Burn<B>) -> Device {
    burn.device().clone().autodiff()
}

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// A leaf that autodiff tracks, if there is autodiff.
fn tracked<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    match device.is_autodiff() {
        true => random(shape, device).require_grad(),
        false => random(shape, device),
    }
}

/// The start and the length of each document.
fn spans(lengths: &[usize]) -> Vec<(usize, usize)> {
    let mut start = 0;
    let span = |&len: &usize| {
        start += len;
        (start - len, len)
    };
    lengths.iter().map(span).collect()
}

fn cu_seqlens(lengths: &[usize]) -> Documents {
    let ends = spans(lengths).into_iter().map(|(start, len)| start + len);
    let cu: Vec<usize> = [0].into_iter().chain(ends).collect();
    Documents::try_from_cu_seqlens(&cu).expect("rising")
}

/// A leaf of the same values.
fn leaf<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    Tensor::from_inner(tensor.inner()).require_grad()
}

/// The rows of packed tokens, `[tokens, heads, DIM]`, and the weights of the loss.
struct Packed {
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    scores: Tensor<2>,
    out: Tensor<3>,
    lse: Tensor<2>,
}

impl Packed {
    fn new([q_len, k_len]: [usize; 2], device: &Device) -> Self {
        Self {
            q: tracked([q_len, Q_HEADS, DIM], device),
            k: tracked([k_len, KV_HEADS, DIM], device),
            v: tracked([k_len, KV_HEADS, DIM], device),
            scores: tracked([k_len, KV_HEADS], device),
            out: random([q_len, Q_HEADS, DIM], device),
            lse: random([Q_HEADS, q_len], device),
        }
    }

    fn rows(&self) -> [Tensor<3>; 3] {
        [self.q.clone(), self.k.clone(), self.v.clone()]
    }

    /// One document's part of every tensor, as separate leaves.
    fn part(&self, q: (usize, usize), k: (usize, usize)) -> Self {
        let queries = |t: &Tensor<3>| leaf(t.clone().narrow(0, q.0, q.1));
        let keys = |t: &Tensor<3>| leaf(t.clone().narrow(0, k.0, k.1));
        Self {
            q: queries(&self.q),
            k: keys(&self.k),
            v: keys(&self.v),
            scores: leaf(self.scores.clone().narrow(0, k.0, k.1)),
            out: self.out.clone().narrow(0, q.0, q.1),
            lse: self.lse.clone().narrow(1, q.0, q.1),
        }
    }

    /// `[1, heads, tokens, DIM]`.
    fn batch(&self) -> [Tensor<4>; 3] {
        self.rows().map(|t| t.swap_dims(0, 1).unsqueeze_dim(0))
    }

    fn batch_scores(&self) -> Tensor<3> {
        self.scores.clone().swap_dims(0, 1).unsqueeze_dim(0)
    }

    /// All results of both passes by name, in the packed layout; those of the scores only if there are any.
    fn passes(&self, (out, lse): (Tensor<3>, Tensor<2>)) -> Vec<(&'static str, Tensor<3>)> {
        // A row that sees nothing has an LSE of −∞, which a product would make NaN.
        let empty = lse.clone().equal_elem(f32::NEG_INFINITY);
        let shown = lse.clone().mask_fill(empty, 0.0);
        let loss = (out.clone() * self.out.clone()).sum() + (shown * self.lse.clone()).sum();
        let grads = loss.backward();
        let mut results = vec![("out", out.inner()), ("lse", lse.inner().unsqueeze_dim(2))];
        for (name, t) in [("dq", &self.q), ("dk", &self.k), ("dv", &self.v)] {
            results.push((name, t.grad(&grads).expect("a tracked tensor")));
        }
        let scores = self.scores.grad(&grads).map(|t| t.unsqueeze_dim(2));
        results.extend(scores.map(|t| ("dscores", t)));
        results
    }
}

fn unbatched((out, lse): (Tensor<4>, Tensor<3>)) -> (Tensor<3>, Tensor<2>) {
    let out = out.squeeze_dim::<3>(0).swap_dims(0, 1);
    (out, lse.squeeze_dim(0))
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data_as::<f32>().iter().collect()
}

/// Compares parts of packed results with those of one document.
fn near(what: &str, part: Tensor<3>, alone: Tensor<3>) {
    assert_eq!(part.dims(), alone.dims(), "{what}");
    let (part, alone) = (values(part), values(alone));
    let size = alone.iter().filter(|x| x.is_finite());
    let bound = 100.0 * f32::EPSILON * size.fold(1.0f32, |most, x| most.max(x.abs()));
    for (at, (a, b)) in part.into_iter().zip(alone).enumerate() {
        let same = a == b || (a - b).abs() < bound;
        assert!(same, "{what}, element {at}: {a}, alone {b}");
    }
}

/// Compares both passes of a packed call with those of a call per document.
fn check(
    [q_lengths, k_lengths]: [&[usize]; 2],
    all: Vec<(&'static str, Tensor<3>)>,
    mut alone: impl FnMut(usize) -> Vec<(&'static str, Tensor<3>)>,
) {
    let both = spans(q_lengths).into_iter().zip(spans(k_lengths));
    for (document, (q, k)) in both.enumerate() {
        if q.1 == 0 || k.1 == 0 {
            continue;
        }
        let alone = alone(document);
        assert_eq!(alone.len(), all.len());
        for ((name, all), (same, alone)) in all.iter().zip(alone) {
            assert_eq!(*name, same);
            let (axis, (start, len)) = match *name {
                "out" | "dq" => (0, q),
                "lse" => (1, q),
                _ => (0, k),
            };
            let what = format!("{name} of document {document}");
            near(&what, all.clone().narrow(axis, start, len), alone);
        }
    }
}

const LENGTHS: [usize; 6] = [130, 1, 0, 77, 92, 64];

fn total(lengths: &[usize]) -> usize {
    lengths.iter().sum()
}

fn dense_documents<B: Backend>(burn: &Burn<B>) {
    let options = AttentionOptions::new().with_softcap(5.0).with_scale(0.4);
    dense(burn, &LENGTHS, options);
    dense(burn, &[0, 70, 0], options);
}

fn dense<B: Backend>(burn: &Burn<B>, lengths: &[usize], options: AttentionOptions) {
    let packed = Packed::new([total(lengths); 2], &device(burn));
    let [q, k, v] = packed.rows();
    let attention = PackedAttention::new(q, k, v, &cu_seqlens(lengths));
    let all = packed.passes(attention.options(options).forward_with_lse());
    check([lengths; 2], all, |document| {
        let span = spans(lengths)[document];
        let part = packed.part(span, span);
        let [q, k, v] = part.batch();
        let attention = Attention::new(q, k, v).options(options);
        part.passes(unbatched(attention.forward_with_lse()))
    });
}

fn scored_documents<B: Backend>(burn: &Burn<B>) {
    let device = device(burn);
    let documents = cu_seqlens(&LENGTHS);
    for rule in [
        None,
        Some(Selector::top(24).recent(8).sinks(2)),
        Some(Selector::top(20).runners_up(9)),
    ] {
        let packed = Packed::new([total(&LENGTHS); 2], &device);
        let options = match &rule {
            None => AttentionOptions::new().with_keep_window(24),
            Some(_) => AttentionOptions::new(),
        };
        let [q, k, v] = packed.rows();
        let attention = PackedAttention::new(q, k, v, &documents).scores(packed.scores.clone());
        let attention = match &rule {
            None => attention,
            Some(rule) => attention.selector(rule.clone()),
        };
        let all = packed.passes(attention.options(options).forward_with_lse());
        let rule = rule.unwrap_or(Selector::top(24));
        let selected = rule.clone().documents(documents.clone());
        let selected = selected.select(packed.batch_scores());
        check([&LENGTHS; 2], all, |document| {
            let span = spans(&LENGTHS)[document];
            let part = packed.part(span, span);
            let intervals = rule.select(part.batch_scores());
            let positions = |t: Tensor<4, burn::tensor::Int>| {
                let data = t.into_data_as::<i32>();
                data.iter::<i32>().collect::<Vec<_>>()
            };
            let own = selected.tensor().clone().narrow(2, span.0, span.1);
            let own = positions(own.sub_scalar(span.0 as i32));
            assert_eq!(own, positions(intervals.tensor().clone()));
            let [q, k, v] = part.batch();
            let attention = Attention::new(q, k, v).scores(part.batch_scores());
            let attention = attention.intervals(&intervals);
            part.passes(unbatched(attention.forward_with_lse()))
        });
    }
}

fn coin(shape: [usize; 4], device: &Device) -> Tensor<4, Bool> {
    Tensor::<4>::random(shape, Distribution::Default, device).greater_elem(0.4)
}

fn masked_documents_of_two_lengths<B: Backend>(burn: &Burn<B>) {
    let device = device(burn);
    // Fewer queries than keys, as many, more (the first of them see nothing), none, and no keys.
    let q_lengths = [33, 70, 90, 0, 7, 1];
    let k_lengths = [120, 70, 41, 12, 0, 65];
    let lengths = [total(&q_lengths), total(&k_lengths)];
    let [q_documents, k_documents] = [&q_lengths, &k_lengths].map(|lengths| cu_seqlens(lengths));
    for (masked, causal) in [(false, true), (true, true), (true, false)] {
        let packed = Packed::new(lengths, &device);
        let options = AttentionOptions::new().with_causal(causal);
        let mask = masked.then(|| coin([1, Q_HEADS, lengths[0], lengths[1]], &device));
        let bias = random([1, KV_HEADS, 1, lengths[1]], &device).require_grad();
        let [q, k, v] = packed.rows();
        let attention = PackedAttention::new(q, k, v, &k_documents);
        let attention = attention.query_documents(&q_documents).options(options);
        let attention = attention.mask(mask.clone().map(AttentionMask::visible));
        let (out, lse) = attention.bias(bias.clone()).forward_with_lse();
        // The queries of the document without keys.
        let none = spans(&q_lengths)[4];
        let zeros = values(out.clone().narrow(0, none.0, none.1));
        assert!(zeros.iter().all(|&x| x == 0.0));
        let all = packed.passes((out, lse));
        check([&q_lengths, &k_lengths], all, |document| {
            let (q_span, k_span) = (spans(&q_lengths)[document], spans(&k_lengths)[document]);
            let part = packed.part(q_span, k_span);
            let [q, k, v] = part.batch();
            let cut = |t: Tensor<4, Bool>| {
                let t = t.narrow(2, q_span.0, q_span.1);
                AttentionMask::visible(t.narrow(3, k_span.0, k_span.1))
            };
            let attention = MaskedAttention::new(q, k, v).mask(mask.clone().map(cut));
            let bias = leaf(bias.clone().narrow(3, k_span.0, k_span.1));
            let attention = attention.bias(bias).options(options);
            part.passes(unbatched(attention.forward_with_lse()))
        });
    }
}

/// Documents of two lengths as one problem of the f64 oracle, under the mask that shows each query its own document.
fn the_definition_of_two_lengths<B: Backend>(burn: &Burn<B>) {
    let (q_lengths, k_lengths) = ([33, 40, 0, 7], [50, 21, 12, 7]);
    let lengths = [total(&q_lengths), total(&k_lengths)];
    let packed = Packed::new(lengths, &device(burn));
    let [q, k, v] = packed.rows();
    let attention = PackedAttention::new(q, k, v, &cu_seqlens(&k_lengths));
    let attention = attention.query_documents(&cu_seqlens(&q_lengths));
    let results = packed.passes(attention.forward_with_lse());
    let f64s = |t: Tensor<3>| -> Vec<f64> { values(t).into_iter().map(f64::from).collect() };
    let heads_first = |t: &Tensor<3>| f64s(t.clone().swap_dims(0, 1));

    let mut shown = vec![false; lengths[0] * lengths[1]];
    for ((q_start, m), (k_start, n)) in spans(&q_lengths).into_iter().zip(spans(&k_lengths)) {
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            shown[(q_start + i) * lengths[1] + k_start + j] = j + m <= i + n;
        }
    }
    let full = AttentionOptions::new().with_causal(false);
    let q_shape = [1, Q_HEADS, lengths[0], DIM];
    let kv_shape = [1, KV_HEADS, lengths[1], DIM];
    let p = problem(q_shape, kv_shape, false, F32, &full);
    let inputs = MaskedInputs {
        problem: p,
        q: heads_first(&packed.q),
        k: heads_first(&packed.k),
        v: heads_first(&packed.v),
        visible: Some(Broadcast {
            shape: [1, 1, lengths[0], lengths[1]],
            values: shown,
        }),
        bias: None,
    };
    // The loss leaves out the LSE of rows that see nothing.
    let (lse, weights) = (inputs.forward().lse.values, packed.lse.clone());
    let weights = f64s(weights.unsqueeze_dim(2)).into_iter().zip(&lse);
    let of_lse = weights.map(|(weight, lse)| if lse.is_finite() { weight } else { 0.0 });
    let grads = Grads {
        out: heads_first(&packed.out),
        lse: Some(of_lse.collect()),
    };
    let (grad_out, grad_lse) = grads.parts();
    let naive = inputs.naive_backward(grad_out, grad_lse);
    let expected = MaskedCase::expected_by(&inputs, &grads, naive);
    let outputs = Outputs {
        out: heads_first(&results[0].1),
        lse: f64s(results[1].1.clone()),
    };
    let gradients: Vec<_> = results[2..].iter().map(|(_, t)| heads_first(t)).collect();
    let gradients: Vec<&[f64]> = gradients.iter().map(Vec::as_slice).collect();
    expected.check(Vec::new, &outputs, &gradients, B::NAME);
}

/// Three sequences of a batch of 90 tokens, dense and with scores.
fn padded_batches<B: Backend>(burn: &Burn<B>) {
    let device = device(burn);
    let (lengths, len) = ([90, 41, 0], 90);
    let documents = Documents::try_from_padded(lengths, len).expect("lengths that fit");
    assert_eq!(documents.lengths(), [vec![90], vec![41], vec![0]]);
    let rows = |heads| random([3, heads, len, DIM], &device);
    let (q, k, v, scores) = (
        rows(Q_HEADS),
        rows(KV_HEADS),
        rows(KV_HEADS),
        random([3, KV_HEADS, len], &device),
    );
    let rule = Selector::top(20).recent(5).sinks(1);
    let shape = [3, KV_HEADS, len];
    let dense = Attention::new(q.clone(), k.clone(), v.clone());
    let dense = dense.intervals(&documents.intervals(shape, &device));
    let sparse = Attention::new(q.clone(), k.clone(), v.clone()).scores(scores.clone());
    let selected = rule.clone().documents(documents.clone());
    let sparse = sparse.intervals(&selected.select(scores.clone()));
    let ranges = KeyRanges::packed([&documents, &documents], true, &device);
    let plan = TilePlan::from_ranges(ranges, [len, len], false);
    let masked = MaskedAttention::new(q.clone(), k.clone(), v.clone()).plan(&plan);
    let masked = masked.options(AttentionOptions::new().with_causal(false));
    let all = [dense.forward(), sparse.forward(), masked.forward()];
    for (index, own) in lengths.into_iter().enumerate() {
        for out in all.iter().filter(|_| own < len) {
            let padding = values(out.clone().narrow(0, index, 1).narrow(2, own, len - own));
            assert!(padding.iter().all(|&x| x == 0.0), "sequence {index}");
        }
        if own == 0 {
            continue;
        }
        let cut = |t: &Tensor<4>| t.clone().narrow(0, index, 1).narrow(2, 0, own);
        let scores = scores.clone().narrow(0, index, 1).narrow(2, 0, own);
        let attention = || Attention::new(cut(&q), cut(&k), cut(&v));
        let sparse = attention().scores(scores.clone());
        let sparse = sparse.intervals(&rule.select(scores)).forward();
        let dense = attention().forward();
        for (out, alone) in all.iter().zip([dense.clone(), sparse, dense]) {
            let part = cut(out).squeeze_dim(0);
            near(
                &format!("out of sequence {index}"),
                part,
                alone.squeeze_dim(0),
            );
        }
    }
}

/// NaN in padded rows and scores reaches nothing, and their gradients are exactly 0.
fn padding_leaves_no_trace<B: Backend>(burn: &Burn<B>) {
    let device = device(burn);
    let (own, len) = (41, 60);
    let documents = Documents::try_from_padded([own], len).expect("lengths that fit");
    let spoiled = |heads| {
        let rows = random([1, heads, own, DIM], &device);
        let nan = Tensor::full([1, heads, len - own, DIM], f32::NAN, &device);
        Tensor::cat(vec![rows, nan], 2).detach().require_grad()
    };
    let (q, k, v) = (spoiled(Q_HEADS), spoiled(KV_HEADS), spoiled(KV_HEADS));
    let scores = random([1, KV_HEADS, own], &device);
    let nan = Tensor::full([1, KV_HEADS, len - own], f32::NAN, &device);
    let scores = Tensor::cat(vec![scores, nan], 2).detach().require_grad();
    let selector = Selector::top(9).recent(3).runners_up(4);
    let intervals = selector.documents(documents).select(scores.clone());
    let attention = Attention::new(q.clone(), k.clone(), v.clone()).scores(scores.clone());
    let out = attention.intervals(&intervals).forward();
    let grads = out.clone().powi_scalar(2).sum().backward();
    let rows = [&q, &k, &v].map(|t| t.grad(&grads).expect("a tracked tensor"));
    let of_scores = scores.grad(&grads).expect("a tracked tensor");
    for t in [out.inner()].into_iter().chain(rows) {
        let all = values(t.clone());
        assert!(all.iter().all(|x| x.is_finite()));
        assert!(all.iter().any(|&x| x != 0.0));
        assert!(
            values(t.narrow(2, own, len - own))
                .iter()
                .all(|&x| x == 0.0)
        );
    }
    let padding = values(of_scores.narrow(2, own, len - own));
    assert!(padding.iter().all(|&x| x == 0.0));
}

fn one_selection_for_two_calls<B: Backend>(burn: &Burn<B>) {
    let packed = Packed::new([total(&LENGTHS); 2], burn.device());
    let documents = cu_seqlens(&LENGTHS);
    let call = || {
        let [q, k, v] = packed.rows();
        PackedAttention::new(q, k, v, &documents).scores(packed.scores.clone())
    };
    let rule = Selector::top(12).recent(4);
    let intervals = rule.clone().documents(documents.clone());
    let intervals = intervals.select(packed.batch_scores());
    let shared = values(call().intervals(&intervals).forward());
    assert_eq!(shared, values(call().selector(rule).forward()));
}

fn nothing_at_all<B: Backend>(burn: &Burn<B>) {
    let packed = Packed::new([0, 0], burn.device());
    for documents in [cu_seqlens(&[]), cu_seqlens(&[0, 0])] {
        let call = || {
            let [q, k, v] = packed.rows();
            PackedAttention::new(q, k, v, &documents)
        };
        let (out, lse) = call().forward_with_lse();
        assert_eq!((out.dims(), lse.dims()), ([0, Q_HEADS, DIM], [Q_HEADS, 0]));
        let both = call().options(AttentionOptions::new().with_causal(false));
        assert_eq!(both.forward().dims(), [0, Q_HEADS, DIM]);
        let scored = call().scores(packed.scores.clone());
        assert_eq!(scored.forward().dims(), [0, Q_HEADS, DIM]);
    }
}

fn refusals<B: Backend>(burn: &Burn<B>) {
    let packed = Packed::new([10, 10], burn.device());
    let call = |lengths: &[usize]| {
        let [q, k, v] = packed.rows();
        PackedAttention::new(q, k, v, &cu_seqlens(lengths))
    };
    let kind = |result: Result<Tensor<3>, AttentionError>| match result {
        Err(error) => error.kind(),
        Ok(_) => "none",
    };
    assert_eq!(kind(call(&[4, 5]).try_forward()), "DocumentTokens");
    let queries = cu_seqlens(&[4, 4, 2]);
    let other = call(&[4, 6]).query_documents(&queries);
    assert_eq!(kind(other.try_forward()), "DocumentCounts");
    let full = AttentionOptions::new().with_causal(false);
    let scored = call(&[4, 6]).scores(packed.scores.clone());
    assert_eq!(
        kind(scored.options(full).try_forward()),
        "SelectionNotCausal"
    );
    let window = AttentionOptions::new().with_keep_window(3);
    assert_eq!(
        kind(call(&[4, 6]).options(window).try_forward()),
        "WindowWithoutScores"
    );
    let shape = [1, 3, 1, 10];
    let shows = Tensor::<4, Bool>::from_data(TensorData::new(vec![true; 30], shape), burn.device());
    let masked = call(&[4, 6]).mask(AttentionMask::visible(shows));
    assert_eq!(kind(masked.try_forward()), "Broadcast");
    let two = Documents::from_lengths([vec![10], vec![10]]);
    let [q, k, v] = packed.rows();
    let two = PackedAttention::new(q, k, v, &two);
    assert_eq!(kind(two.try_forward()), "DocumentBatch");
    assert!(Documents::try_from_padded([3, 11], 10).is_err());
}

/// One call of each kind: Burn on CubeCL's CPU runtime compiles each operation for seconds.
#[cfg(feature = "cpu")]
fn a_packed_call<B: Backend>(burn: &Burn<B>) {
    let packed = Packed::new([40, 40], burn.device());
    let documents = cu_seqlens(&[13, 0, 27]);
    let rows = || {
        let [q, k, v] = packed.rows();
        PackedAttention::new(q, k, v, &documents)
    };
    let dense = values(rows().forward());
    // The same call through ranges of keys.
    let same = values(rows().query_documents(&documents).bias(None).forward());
    let ones = Tensor::<2>::zeros([40, KV_HEADS], burn.device());
    let all = values(rows().scores(ones).forward());
    for ((a, b), c) in dense.into_iter().zip(same).zip(all) {
        assert!(
            (a - b).abs() < 1e-5 && (a - c).abs() < 1e-5,
            "{a}, {b}, {c}"
        );
    }
}
