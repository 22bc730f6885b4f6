//! The default bodies of a cache, as an engine of their own, against Flex's engine.

use crate::case::{normal, values};
use burn::backend::Flex;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_flash_dma::fallback::cache as fallback;
use burn_flash_dma::ops::OptionalFloat;
use burn_flash_dma::ops::{
    CacheOps, ChunkKeys, DecodedPages, DecodedSlots, PageMap, PageTensors, SlotTensors,
    TokenTensors,
};
use burn_flash_dma::{AttentionOptions, ElementType};
use flash_dma_problem::{Appending, CacheShape, ScoreRole, SelectionRule};
use flash_dma_reference::Rng;
use flash_dma_reference::generate::Scores;
use std::sync::Arc;

const HEADS: [usize; 2] = [4, 2];
const DIM: usize = 8;

type Rows = Tensor<4>;

fn primitive<const D: usize>(tensor: Tensor<D>) -> burn_flex::FlexTensor {
    tensor.try_into_primitive::<Flex>().unwrap()
}

fn ints<const D: usize>(values: Vec<i32>, shape: [usize; D]) -> burn_flex::FlexTensor {
    let data = TensorData::new(values, shape);
    let tensor = Tensor::<D, Int>::from_data(data, (&Device::flex(), DType::I32));
    tensor.try_into_primitive::<Flex>().unwrap()
}

fn floats<const D: usize>(tensor: &burn_flex::FlexTensor) -> Vec<f64> {
    values(Tensor::<D>::from_primitive::<Flex>(tensor.clone()))
}

fn words<const D: usize>(tensor: &burn_flex::FlexTensor) -> Vec<i32> {
    let tensor = Tensor::<D, Int>::from_primitive::<Flex>(tensor.clone());
    tensor.into_data_as::<i32>().iter::<i32>().collect()
}

fn random(rng: &mut Rng, shape: [usize; 4]) -> Rows {
    normal(rng, shape, &Device::flex())
}

fn close(left: &[f64], right: &[f64]) {
    assert_eq!(left.len(), right.len());
    for (l, r) in left.iter().zip(right) {
        let same = l == r || (l.is_nan() && r.is_nan());
        assert!(same || (l - r).abs() < 1e-5, "{l} is not {r}");
    }
}

/// A key of a head: its position, its score and its rows, by their bits.
type Key = (i32, u64, Vec<u64>);

/// What the slots hold after `held` tokens, head by head, in order of position. A hidden key that is no longer recent
/// is nothing.
fn contents(slots: &SlotTensors<Flex>, rule: SelectionRule, held: usize) -> Vec<Vec<Key>> {
    let window = rule.window;
    let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<u64>>();
    let (k, v) = (floats::<4>(&slots.k), floats::<4>(&slots.v));
    let (score, position) = (floats::<3>(&slots.score), words::<3>(&slots.position));
    let key = |slot: usize| {
        let rows = slot * DIM..(slot + 1) * DIM;
        let rows = [bits(&k[rows.clone()]), bits(&v[rows])].concat();
        (position[slot], score[slot].to_bits(), rows)
    };
    let head = |head: usize| {
        let slots = head * window..(head + 1) * window;
        assert!(
            slots
                .clone()
                .all(|s| position[s] != -1 || score[s] == f64::NEG_INFINITY)
        );
        let holds = |&s: &usize| {
            let recent = position[s] >= 0 && rule.is_recent(position[s] as usize, held - 1);
            recent || score[s] != f64::NEG_INFINITY
        };
        let mut keys: Vec<Key> = slots.filter(holds).map(key).collect();
        keys.sort();
        keys
    };
    (0..position.len() / window).map(head).collect()
}

fn clone(slots: &SlotTensors<Flex>) -> SlotTensors<Flex> {
    SlotTensors {
        k: slots.k.clone(),
        v: slots.v.clone(),
        score: slots.score.clone(),
        position: slots.position.clone(),
        seen: slots.seen.clone(),
    }
}

/// Everything in the slots. What is not finite compares by its bits.
fn all_of(slots: &SlotTensors<Flex>) -> (Vec<u64>, Vec<i32>, Vec<i32>) {
    let score = floats::<3>(&slots.score);
    let rows = [floats::<4>(&slots.k), floats::<4>(&slots.v), score].concat();
    let bits = rows.into_iter().map(f64::to_bits).collect();
    (bits, words::<3>(&slots.position), words::<1>(&slots.seen))
}

/// The scores and ranks of a chunk's keys, and the rows of those that are shown, by their bits.
fn chunk(keys: ChunkKeys<Flex>) -> [Vec<u64>; 4] {
    let bits = |x: Vec<f64>| x.iter().map(|x| x.to_bits()).collect::<Vec<u64>>();
    let scores = floats::<3>(&keys.scores);
    let rank = match &keys.rank {
        OptionalFloat::None => Vec::new(),
        OptionalFloat::Some(rank) => floats::<3>(rank),
    };
    let rows = |rows: &burn_flex::FlexTensor| {
        let rows = floats::<4>(rows);
        let shown = (rows.chunks(DIM).zip(&scores)).filter(|(_, z)| **z != f64::NEG_INFINITY);
        bits(shown.flat_map(|(row, _)| row).copied().collect())
    };
    let [k, v] = [rows(&keys.k), rows(&keys.v)];
    [k, v, bits(scores), bits(rank)]
}

#[test]
fn slots_by_plain_operations_equal_the_engine() {
    let device = Device::flex();
    let mut rng = Rng::new(4);
    let (batch, [q_heads, heads]) = (2, HEADS);
    let rules = [
        [1, 0, 0],
        [5, 0, 0],
        [12, 0, 0],
        [1, 1, 0],
        [5, 2, 1],
        [5, 5, 0],
        [12, 3, 9],
        [12, 0, 4],
    ];
    let kinds = Scores::ALL.into_iter();
    let cases = kinds.flat_map(|kind| rules.map(|rule| (kind, rule)));
    let roles = [ScoreRole::RankAndBias, ScoreRole::Rank];
    let cases = cases.flat_map(|(kind, rule)| roles.map(|role| (kind, rule, role)));
    for (kind, [window, recent, sinks], role) in cases {
        let rule = SelectionRule {
            window,
            recent,
            sinks,
        };
        let shape = CacheShape::slots(batch, heads, rule, DIM, ElementType::F32).unwrap();
        let shape = shape.with_score_role(role);
        let empty = || SlotTensors::<Flex> {
            k: primitive(Tensor::<4>::zeros(shape.kv_shape(), &device)),
            v: primitive(Tensor::<4>::zeros(shape.kv_shape(), &device)),
            score: primitive(Tensor::<3>::full(
                [batch, heads, window],
                f32::NEG_INFINITY,
                &device,
            )),
            position: ints(vec![-1; batch * heads * window], [batch, heads, window]),
            seen: ints(vec![0; batch], [batch]),
        };
        let (mut plain, mut engine) = (empty(), empty());
        let options = AttentionOptions::new().with_keep_window(window);
        let mut held = 0;
        for round in 0..12 {
            let n = 1 + rng.below(6);
            let kv = [batch, heads, n, DIM];
            let (k, v) = (random(&mut rng, kv), random(&mut rng, kv));
            let z: Vec<f32> = (0..batch * heads)
                .flat_map(|_| kind.head(n, &mut rng))
                .map(|z| z as f32)
                .collect();
            let z = Tensor::<3>::from_data(TensorData::new(z, [batch, heads, n]), &device);
            let tokens = || TokenTensors::<Flex> {
                k: primitive(k.clone()),
                v: primitive(v.clone()),
                scores: OptionalFloat::Some(primitive(z.clone())),
            };
            let scores = Some(&kv[..3]);
            let append = shape
                .append(&kv, &kv, scores, ElementType::F32, held)
                .unwrap();
            let chunks = [
                fallback::chunk_keys::<Flex>(clone(&plain), tokens(), append),
                Flex::cache_chunk_keys(clone(&plain), tokens(), append),
            ];
            let [left, right] = chunks.map(chunk);
            assert_eq!(left, right, "{kind:?} {rule:?}");
            if round % 3 == 0 {
                let problem = append;
                plain = fallback::append_slots::<Flex>(plain, tokens(), problem);
                engine = Flex::cache_append_slots(engine, tokens(), problem);
            } else {
                let q_shape = [batch, q_heads, n, DIM];
                let q = random(&mut rng, q_shape);
                let problem = shape
                    .decode(&q_shape, &kv, &kv, scores, ElementType::F32, held, &options)
                    .unwrap();
                let before = all_of(&plain);
                let guess = problem.with_appending(Appending::Later);
                let guess: DecodedSlots<Flex> =
                    fallback::decode_slots(primitive(q.clone()), clone(&plain), tokens(), guess);
                assert_eq!(all_of(&guess.slots), before, "{kind:?} {rule:?}");
                let left: DecodedSlots<Flex> =
                    fallback::decode_slots(primitive(q.clone()), plain, tokens(), problem);
                let written = |step: &DecodedSlots<Flex>| {
                    let all = [floats::<4>(&step.out), floats::<3>(&step.lse)].concat();
                    all.into_iter().map(f64::to_bits).collect::<Vec<u64>>()
                };
                assert_eq!(written(&guess), written(&left), "{kind:?} {rule:?}");
                let right = Flex::cache_decode_slots(primitive(q), engine, tokens(), problem);
                close(&floats::<4>(&left.out), &floats::<4>(&right.out));
                close(&floats::<3>(&left.lse), &floats::<3>(&right.lse));
                (plain, engine) = (left.slots, right.slots);
            }
            held += n;
            assert_eq!(
                contents(&plain, rule, held),
                contents(&engine, rule, held),
                "{kind:?} {rule:?}"
            );
            assert_eq!(words::<1>(&plain.seen), vec![held as i32; batch]);
        }
    }
}

#[test]
fn pages_by_plain_operations_equal_the_engine() {
    let device = Device::flex();
    let mut rng = Rng::new(5);
    let (batch, [q_heads, heads]) = (2, HEADS);
    let windows = [None, Some(1), Some(6), Some(40)];
    for (scored, window) in windows.into_iter().flat_map(|w| [(false, w), (true, w)]) {
        let shape = CacheShape::pages(batch, heads, [20, 4, 10], DIM, ElementType::F32).unwrap();
        let shape = if scored { shape.with_scores() } else { shape };
        let shape = match window {
            Some(keys) => shape.with_window(keys).unwrap(),
            None => shape,
        };
        let table: Vec<i32> = (0..20).map(|page| 19 - page).collect();
        let empty = || PageTensors::<Flex> {
            k: primitive(Tensor::<4>::zeros(shape.kv_shape(), &device)),
            v: primitive(Tensor::<4>::zeros(shape.kv_shape(), &device)),
            scores: match scored {
                false => OptionalFloat::None,
                true => OptionalFloat::Some(primitive(Tensor::<3>::zeros([20, heads, 4], &device))),
            },
            table: ints(table.clone(), [batch, 10]),
            lengths: ints(vec![0; batch], [batch]),
        };
        let (mut plain, mut engine) = (empty(), empty());
        let mut held = 0;
        while held < 34 {
            let n = 1 + rng.below(6);
            let kv = [batch, heads, n, DIM];
            let (k, v) = (random(&mut rng, kv), random(&mut rng, kv));
            let z = random(&mut rng, [batch, heads, n, 1]).squeeze_dim::<3>(3);
            let tokens = || TokenTensors::<Flex> {
                k: primitive(k.clone()),
                v: primitive(v.clone()),
                scores: match scored {
                    false => OptionalFloat::None,
                    true => OptionalFloat::Some(primitive(z.clone())),
                },
            };
            let map = PageMap {
                table: Arc::new(table.chunks(10).map(<[i32]>::to_vec).collect()),
                lengths: vec![held; batch],
            };
            let q_shape = [batch, q_heads, n, DIM];
            let q = random(&mut rng, q_shape);
            let problem = shape
                .decode(
                    &q_shape,
                    &kv,
                    &kv,
                    scored.then_some(&kv[..3]),
                    ElementType::F32,
                    held,
                    &AttentionOptions::new(),
                )
                .unwrap();
            let rows = |pages: &PageTensors<Flex>| {
                let lengths = words::<1>(&pages.lengths);
                (floats::<4>(&pages.k), floats::<4>(&pages.v), lengths)
            };
            let before = rows(&plain);
            let guess = problem.with_appending(Appending::Later);
            let (query, new) = (primitive(q.clone()), tokens());
            let guess: DecodedPages<Flex> =
                fallback::decode_pages(query, plain, new, map.clone(), guess);
            assert_eq!(rows(&guess.pages), before);
            plain = guess.pages;
            let left: DecodedPages<Flex> =
                fallback::decode_pages(primitive(q.clone()), plain, tokens(), map.clone(), problem);
            assert_eq!(floats::<4>(&guess.out), floats::<4>(&left.out));
            assert_eq!(floats::<3>(&guess.lse), floats::<3>(&left.lse));
            let right = Flex::cache_decode_pages(primitive(q), engine, tokens(), map, problem);
            close(&floats::<4>(&left.out), &floats::<4>(&right.out));
            close(&floats::<3>(&left.lse), &floats::<3>(&right.lse));
            (plain, engine) = (left.pages, right.pages);
            assert_eq!(floats::<4>(&plain.k), floats::<4>(&engine.k));
            assert_eq!(floats::<4>(&plain.v), floats::<4>(&engine.v));
            held += n;
        }
        assert_eq!(words::<1>(&plain.lengths), words::<1>(&engine.lengths));
    }
}

/// Two sequences with the same first pages, and the last keys of both: the default bodies against the engine.
#[test]
fn shared_pages_by_plain_operations_equal_the_engine() {
    let mut rng = Rng::new(6);
    let (batch, [q_heads, heads], page_len) = (2, HEADS, 4);
    for window in [None, Some(3), Some(11)] {
        let shape = CacheShape::pages(batch, heads, [9, 4, 5], DIM, ElementType::F32).unwrap();
        let shape = match window {
            Some(keys) => shape.with_window(keys).unwrap(),
            None => shape,
        };
        // The first sequence is in its last page, the second has filled what they share.
        let table = vec![vec![7, 2, 4, 0, 0], vec![7, 2, 1, 3, 0]];
        let lengths = vec![11, 8];
        let (k, v) = (
            random(&mut rng, shape.kv_shape()),
            random(&mut rng, shape.kv_shape()),
        );
        let pages = || PageTensors::<Flex> {
            k: primitive(k.clone()),
            v: primitive(v.clone()),
            scores: OptionalFloat::None,
            table: ints(table.concat(), [batch, 5]),
            lengths: ints(vec![11, 8], [batch]),
        };
        let map = || PageMap {
            table: Arc::new(table.clone()),
            lengths: lengths.clone(),
        };
        for n in [1, 5] {
            let (kv, q_shape) = ([batch, heads, n, DIM], [batch, q_heads, n, DIM]);
            let [new_k, new_v] = [(); 2].map(|()| random(&mut rng, kv));
            let q = random(&mut rng, q_shape);
            let tokens = || TokenTensors::<Flex> {
                k: primitive(new_k.clone()),
                v: primitive(new_v.clone()),
                scores: OptionalFloat::None,
            };
            let options = AttentionOptions::new();
            let problem = shape
                .decode(&q_shape, &kv, &kv, None, ElementType::F32, 11, &options)
                .unwrap();
            let query = || primitive(q.clone());
            let left: DecodedPages<Flex> =
                fallback::decode_pages(query(), pages(), tokens(), map(), problem);
            let right = Flex::cache_decode_pages(query(), pages(), tokens(), map(), problem);
            close(&floats::<4>(&left.out), &floats::<4>(&right.out));
            close(&floats::<3>(&left.lse), &floats::<3>(&right.lse));
            // What they share is as it was, and they agree on the rest.
            let read = |rows: &burn_flex::FlexTensor| floats::<4>(rows);
            assert_eq!(read(&left.pages.k), read(&right.pages.k));
            assert_eq!(read(&left.pages.v), read(&right.pages.v));
            let before = values(k.clone());
            let size = heads * page_len * DIM;
            for page in [7, 2] {
                let rows = page * size..(page + 1) * size;
                assert_eq!(read(&left.pages.k)[rows.clone()], before[rows]);
            }
            assert_eq!(
                words::<1>(&left.pages.lengths),
                [11, 8].map(|held| held + n as i32)
            );
        }
    }
}
