//! Selectors against the definition: sets, position by position, for random rules, scores and documents.

use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use burn_flash_dma::{Attention, Documents, Intervals, Selector, select, sliding_window};
use flash_dma_reference::compose;
use flash_dma_tests::prelude::*;

fast_burn!(
    random_selectors,
    random_windows_per_head,
    long_documents_in_every_bucket,
    runners_up_of_tracked_scores,
    ids_and_cumulative_lengths,
    given_ends,
    questions,
    documents_are_sequences_of_their_own,
    one_tensor_ranks_and_another_is_added,
);
on_burn_cpu!(a_selector_of_everything);

/// A rule for every head, and the documents of every sequence.
#[derive(Debug)]
struct Drawn {
    rules: Vec<SelectionRule>,
    documents: Option<Vec<Vec<usize>>>,
    /// Per sequence and head.
    scores: Vec<Vec<f64>>,
    shape: [usize; 3],
}

impl Drawn {
    fn new(shape: [usize; 3], rules: Vec<SelectionRule>, rng: &mut Rng) -> Self {
        let [batch, heads, k_len] = shape;
        let mut kind = || Scores::ALL[rng.below(Scores::ALL.len())];
        let kinds: Vec<Scores> = (0..batch * heads).map(|_| kind()).collect();
        let scores = kinds.iter().map(|kind| kind.head(k_len, rng)).collect();
        let documents = match rng.below(4) {
            0 => None,
            1 => {
                let count = [1, 2, 3, 5][rng.below(4)];
                let equal = k_len.is_multiple_of(count);
                equal.then(|| vec![vec![k_len / count; count]; batch])
            }
            _ => Some((0..batch).map(|_| cut(k_len, rng)).collect()),
        };
        Self {
            rules,
            documents,
            scores,
            shape,
        }
    }

    fn tensor(&self, device: &Device) -> Tensor<3> {
        let values: Vec<f32> = self.scores.concat().iter().map(|&z| z as f32).collect();
        Tensor::from_data(TensorData::new(values, self.shape), device)
    }

    fn with_documents(&self, selector: Selector) -> Selector {
        match &self.documents {
            None => selector,
            Some(lengths) => selector.documents(Documents::from_lengths(lengths.clone())),
        }
    }

    /// Checks the intervals that a selector, inside the documents, makes from the scores.
    fn check_selector<B: Backend>(&self, selector: Selector, burn: &Burn<B>) {
        let selector = self.with_documents(selector);
        self.check(&selector.select(self.tensor(burn.device())));
    }

    fn lengths(&self, sequence: usize) -> Vec<usize> {
        let documents = self.documents.as_ref();
        documents.map_or(vec![self.shape[2]], |all| all[sequence].clone())
    }

    /// The intervals by definition, with `more` keys by rank.
    fn exact(&self, more: usize) -> Vec<Interval> {
        let [_, heads, k_len] = self.shape;
        let of = |(row, scores): (usize, &Vec<f64>)| {
            let lengths = self.lengths(row / heads);
            let rule = self.rules[row % heads].widened(more);
            match k_len {
                ..300 => compose::intervals(scores, &lengths, &rule),
                _ => compose::intervals_by_heap(scores, &lengths, &rule),
            }
        };
        self.scores.iter().enumerate().flat_map(of).collect()
    }

    fn check(&self, intervals: &Intervals) {
        assert_eq!(pairs(intervals), self.exact(0), "{self:?}");
        let most = self.rules.iter().map(|rule| rule.window).max();
        assert_eq!(Some(intervals.max_live()), most);
    }
}

/// Cuts `len` tokens into documents, empty ones included.
fn cut(len: usize, rng: &mut Rng) -> Vec<usize> {
    let mut lengths = vec![];
    let mut left = len;
    while left > 0 {
        lengths.push(rng.below(2 + len / 2).min(left));
        left -= lengths[lengths.len() - 1];
    }
    lengths
}

fn rule(rng: &mut Rng) -> SelectionRule {
    let window = 1 + rng.below(20);
    let recent = [0, rng.below(window + 1), window][rng.below(3)];
    let sinks = [0, rng.below(window - recent + 1)][rng.below(2)];
    SelectionRule {
        window,
        recent,
        sinks,
    }
}

fn of(rule: SelectionRule) -> Selector {
    let selector = Selector::top(rule.window).recent(rule.recent);
    selector.sinks(rule.sinks)
}

fn pairs(intervals: &Intervals) -> Vec<Interval> {
    let words = intervals.tensor().clone().into_data_as::<i32>();
    let words: Vec<u32> = words.iter::<i32>().map(|n| n as u32).collect();
    let pair = |w: &[u32]| Interval {
        first: w[0],
        end: w[1],
    };
    words.chunks_exact(2).map(pair).collect()
}

fn random_selectors<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(41);
    for _ in 0..150 {
        let shape = [1 + rng.below(3), 1 + rng.below(3), 1 + rng.below(90)];
        let rule = rule(&mut rng);
        let drawn = Drawn::new(shape, vec![rule; shape[1]], &mut rng);
        drawn.check_selector(of(rule), burn);
    }
}

fn random_windows_per_head<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(42);
    for _ in 0..40 {
        let shape = [1 + rng.below(2), 1 + rng.below(6), 1 + rng.below(70)];
        let least = rule(&mut rng);
        let mut window = || least.window + [0, 0, 3, 7][rng.below(4)];
        let windows: Vec<usize> = (0..shape[1]).map(|_| window()).collect();
        let rule = |&window: &usize| SelectionRule { window, ..least };
        let drawn = Drawn::new(shape, windows.iter().map(rule).collect(), &mut rng);
        let selector = Selector::top(windows).recent(least.recent);
        drawn.check_selector(selector.sinks(least.sinks), burn);
    }
}

fn long_documents_in_every_bucket<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(43);
    let lengths = [1, 700, 2, 64, 65, 1023, 3, 33, 0, 1, 2049, 17];
    let k_len = lengths.iter().sum();
    for (recent, sinks) in [(0, 0), (128, 4)] {
        let rule = SelectionRule {
            window: 300,
            recent,
            sinks,
        };
        let mut drawn = Drawn::new([2, 2, k_len], vec![rule; 2], &mut rng);
        let mut reversed = lengths.to_vec();
        reversed.reverse();
        drawn.documents = Some(vec![lengths.to_vec(), reversed]);
        drawn.check_selector(of(rule), burn);
    }
}

fn runners_up_of_tracked_scores<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(44);
    for turn in 0..30 {
        let shape = [1 + rng.below(2), 2, 1 + rng.below(60)];
        let rule = rule(&mut rng);
        let other = SelectionRule {
            window: rule.window + turn % 2,
            ..rule
        };
        let drawn = Drawn::new(shape, vec![rule, other], &mut rng);
        let selector = Selector::top(vec![rule.window, other.window]);
        let selector = selector.recent(rule.recent).sinks(rule.sinks).runners_up(5);
        let selector = drawn.with_documents(selector);
        let untracked = drawn.tensor(burn.device());
        assert!(selector.select(untracked).runner_up_ends().is_none());
        let device = burn.device().clone().autodiff();
        assert!(
            selector
                .select(drawn.tensor(&device))
                .runner_up_ends()
                .is_none()
        );
        let intervals = selector.select(drawn.tensor(&device).require_grad());
        drawn.check(&intervals);
        let far = intervals.runner_up_ends().expect("tracked scores").clone();
        assert_eq!(far.dims(), shape);
        let far: Vec<i32> = far.into_data_as::<i32>().iter::<i32>().collect();
        let exact: Vec<i32> = drawn.exact(5).iter().map(|i| i.end as i32).collect();
        assert_eq!(far, exact);
    }
}

fn ids_and_cumulative_lengths<B: Backend>(burn: &Burn<B>) {
    let ids = Tensor::<2, Int>::from_ints([[7, 7, 7, 2, 2, 7], [0, 1, 1, 1, 1, 1]], burn.device());
    let documents = Documents::from_ids(ids);
    assert_eq!(documents.lengths(), [vec![3, 2, 1], vec![1, 5]]);
    let packed = Documents::try_from_cu_seqlens(&[0, 3, 5, 5, 6]).expect("rising");
    assert_eq!(packed.lengths(), [vec![3, 2, 0, 1]]);
}

fn given_ends<B: Backend>(burn: &Burn<B>) {
    // At position 2 three keys are alive, which then die at once.
    let ends = Tensor::<3, Int>::from_ints([[[3, 3, 3, 5, 4]], [[0, 1, 2, 3, 5]]], burn.device());
    let intervals = Intervals::try_from_ends(ends).expect("good ends");
    assert_eq!(intervals.max_live(), 3);
    let again = Intervals::try_from_tensor(intervals.tensor().clone()).expect("the same");
    assert_eq!(pairs(&again), pairs(&intervals));
    assert_eq!(pairs(&intervals)[8], Interval { first: 3, end: 3 });
    let windows = sliding_window([2, 1, 5], 2, burn.device());
    let expected =
        [(0, 2), (1, 3), (2, 4), (3, 5), (4, 5)].map(|(first, end)| Interval { first, end });
    assert_eq!(pairs(&windows), [expected, expected].concat());
    assert_eq!(windows.max_live(), 2);
}

fn questions<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(45);
    for _ in 0..20 {
        let shape = [1 + rng.below(2), 1 + rng.below(2), 1 + rng.below(40)];
        let [batch, heads, k_len] = shape;
        let rule = rule(&mut rng);
        let drawn = Drawn::new(shape, vec![rule; heads], &mut rng);
        let selector = drawn.with_documents(of(rule));
        let intervals = selector.select(drawn.tensor(burn.device()));
        let exact = drawn.exact(0);

        let position = rng.below(k_len + 2);
        let live: Vec<bool> = intervals.live_at(position).into_data().iter().collect();
        let expected: Vec<bool> = exact.iter().map(|i| i.contains(position as i64)).collect();
        assert_eq!(live, expected);

        let q_len = 1 + rng.below(k_len + 5);
        let mask = intervals.as_mask(q_len);
        assert_eq!(mask.dims(), [batch, heads, q_len, k_len]);
        let mask: Vec<bool> = mask.into_data().iter().collect();
        let at = |query: usize| query as i64 + k_len as i64 - q_len as i64;
        let rows = exact.chunks(k_len).flat_map(|head| {
            (0..q_len).flat_map(move |query| head.iter().map(move |i| i.contains(at(query))))
        });
        assert_eq!(mask, rows.collect::<Vec<bool>>());

        let lifetimes = intervals.lifetimes().into_data_as::<i32>();
        let lifetimes: Vec<u32> = lifetimes.iter::<i32>().map(|n| n as u32).collect();
        let expected: Vec<u32> = exact.iter().map(|i| i.end - i.first).collect();
        assert_eq!(lifetimes, expected);

        // Pair by pair.
        let (mut recent, mut sinks, mut ranked) = (0, 0, 0);
        for (row, head) in exact.chunks(k_len).enumerate() {
            let lengths = drawn.lengths(row / heads);
            for (key, interval) in head.iter().enumerate() {
                let mut start = 0;
                for len in &lengths {
                    if start + len > key {
                        break;
                    }
                    start += len;
                }
                for position in key..k_len {
                    match interval.contains(position as i64) {
                        false => {}
                        true if position < key + rule.recent => recent += 1,
                        true if key < start + rule.sinks => sinks += 1,
                        true => ranked += 1,
                    }
                }
            }
        }
        let stats = intervals.stats();
        let pairs = recent + sinks + ranked;
        assert_eq!(stats.pairs, pairs);
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} instead of {b}");
        near(stats.recent * pairs as f64, recent as f64);
        near(stats.sinks * pairs as f64, sinks as f64);
        near(stats.mean_alive * exact.len() as f64, pairs as f64);
        let never = exact.iter().filter(|i| i.is_empty()).count();
        near(stats.never_alive * exact.len() as f64, never as f64);
        let ever = (exact.len() - never) as f64;
        near(stats.mean_lifetime * ever, pairs as f64);
    }
}

/// The output, and the gradients of q, k, v and the scores.
type Passes = [Tensor<4>; 5];

/// Both passes with the loss `(out * weights).sum()`; q, k, v and scores are tracked.
fn passes(
    rows: [Tensor<4>; 3],
    scores: Tensor<3>,
    weights: Tensor<4>,
    selector: &Selector,
) -> Passes {
    let [q, k, v] = rows.map(Tensor::require_grad);
    let scores = scores.require_grad();
    let attention = Attention::new(q.clone(), k.clone(), v.clone()).scores(scores.clone());
    let out = attention
        .intervals(&selector.select(scores.clone()))
        .forward();
    let grads = (out.clone() * weights).sum().backward();
    let grad = |x: &Tensor<4>| x.grad(&grads).expect("a tracked tensor");
    let of_scores = scores.grad(&grads).expect("a tracked tensor");
    let [q, k, v] = [&q, &k, &v].map(grad);
    [out.inner(), q, k, v, of_scores.unsqueeze_dim(3)]
}

fn documents_are_sequences_of_their_own<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    let normal = Distribution::Normal(0.0, 1.0);
    let lengths = [130, 1, 77, 92];
    let k_len = lengths.iter().sum();
    let random = |heads: usize| Tensor::<4>::random([1, heads, k_len, 16], normal, &device);
    let (q, k, v, weights) = (random(4), random(2), random(2), random(4));
    let scores = Tensor::<3>::random([1, 2, k_len], normal, &device);
    let selector = Selector::top(24).recent(8).sinks(2);
    let documents = Documents::from_lengths([lengths.to_vec()]);
    let all = passes(
        [q.clone(), k.clone(), v.clone()],
        scores.clone(),
        weights.clone(),
        &selector.clone().documents(documents),
    );
    let mut start = 0;
    for len in lengths {
        let cut = |x: &Tensor<4>| x.clone().narrow(2, start, len).detach();
        let alone = passes(
            [cut(&q), cut(&k), cut(&v)],
            scores.clone().narrow(2, start, len).detach(),
            cut(&weights),
            &selector,
        );
        let names = ["out", "dq", "dk", "dv", "dscores"].iter();
        for (name, (all, alone)) in names.zip(all.iter().zip(alone)) {
            let part = all.clone().narrow(2, start, len);
            let size = part.clone().abs().max().into_scalar::<f32>().max(1.0);
            let most: f32 = (part - alone).abs().max().into_scalar();
            let bound = 100.0 * f32::EPSILON * size;
            assert!(
                most < bound,
                "{name} of the document from {start} on: {most}, not below {bound}"
            );
        }
        start += len;
    }
}

fn one_tensor_ranks_and_another_is_added<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    let random = |shape: [usize; 3]| Tensor::<3>::random(shape, Distribution::Default, &device);
    let rows = || Tensor::<4>::random([1, 2, 50, 16], Distribution::Default, &device);
    let [rank, bias] = [(); 2].map(|()| random([1, 2, 50]).require_grad());
    let intervals = select(rank.clone(), 7);
    let attention = Attention::new(rows(), rows(), rows()).scores(bias.clone());
    let (out, lse) = attention.intervals(&intervals).forward_with_lse();
    let grads = (out.sum() + lse.sum()).backward();
    assert!(rank.grad(&grads).is_none());
    // The gradients of the bias are zero exactly where no position attends to the key.
    let bias = bias.grad(&grads).expect("a tracked tensor");
    let zero: Vec<bool> = bias.equal_elem(0.0).into_data().iter().collect();
    let dead = intervals.lifetimes().equal_elem(0).into_data();
    let dead: Vec<bool> = dead.iter().collect();
    assert!(dead.contains(&true) && dead.contains(&false));
    assert_eq!(zero, dead);
}

/// One selector with all parts: Burn on CubeCL's CPU runtime compiles each operation for seconds.
#[cfg(feature = "cpu")]
fn a_selector_of_everything<B: Backend>(burn: &Burn<B>) {
    let mut rng = Rng::new(46);
    let rule = SelectionRule {
        window: 9,
        recent: 3,
        sinks: 2,
    };
    let mut drawn = Drawn::new([2, 2, 60], vec![rule, rule], &mut rng);
    drawn.documents = Some(vec![vec![13, 30, 17], vec![60]]);
    drawn.check_selector(of(rule), burn);
}
