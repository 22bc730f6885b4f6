//! Random problems over everything that the contract allows, limited to the kernels that a device can compile and to
//! sizes that the oracle computes in milliseconds.

use super::fit::fit;
use super::large::Large;
use super::run::Fuzzed;
use super::spec::{
    Axes, By, Decoding, Ends, Heads, MAX_STEP, Parts, Place, Selecting, Spec, Store, What,
};
use crate::Size;
use crate::masked::Pattern;
use flash_dma_problem::ElementType::{self, Bf16, F16, F32};
use flash_dma_problem::ScoreRole;
use flash_dma_reference::Rng;
use flash_dma_reference::generate::Scores;

/// The settings for which problems are drawn.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Element types.
    pub elements: Vec<ElementType>,
    /// Number of kernel variants; 0 draws a new variant for each problem.
    pub variants: usize,
    /// True if caches are among the problems.
    pub decodes: bool,
    /// True if ranks compete.
    pub competes: bool,
    /// True if heads have sink logits, without keys.
    pub sinks: bool,
    /// Factor on the time that a problem may take the oracle: 1 is a few milliseconds.
    pub effort: f64,
    /// The size of the engine.
    pub size: Size,
}

impl Profile {
    /// The profile of an engine.
    pub fn of<E: Fuzzed>(engine: &E) -> Self {
        let elements = [F32, F16, Bf16].into_iter();
        Self {
            elements: elements.filter(|&e| engine.supports(e)).collect(),
            variants: match E::SIZE {
                Size::Small => 30,
                // Nothing is compiled.
                Size::Medium => 0,
                Size::Large => 120,
            },
            decodes: engine.decodes(),
            competes: E::COMPETES,
            sinks: E::SINKS,
            effort: 1.0,
            size: E::SIZE,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Plain,
    Scored,
    Masked,
    Decoded,
}

/// A combination that kernels are compiled for.
#[derive(Clone, Copy, Debug)]
struct Variant {
    kind: Kind,
    element: ElementType,
    head_dim: usize,
    group: usize,
    causal: bool,
    softcap: Option<f32>,
    alibi: bool,
    deterministic: bool,
    dropout: Option<f32>,
    /// True if every row begins at a multiple of 16 bytes, where the head dimension allows it.
    aligned: bool,
}

/// The variants of a run, from its seed, and the problems within them.
#[derive(Clone, Debug)]
pub struct Palette {
    profile: Profile,
    seed: u64,
    variants: Vec<Variant>,
}

/// The operations by their share, in twelfths.
const KINDS: [Kind; 12] = [
    Kind::Scored,
    Kind::Masked,
    Kind::Scored,
    Kind::Decoded,
    Kind::Scored,
    Kind::Plain,
    Kind::Scored,
    Kind::Masked,
    Kind::Scored,
    Kind::Masked,
    Kind::Scored,
    Kind::Decoded,
];

impl Palette {
    /// The palette of a seed.
    pub fn new(profile: Profile, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let variants = (0..profile.variants).map(|n| {
            // Every operation meets every type.
            let element = profile.elements[(n + n / KINDS.len()) % profile.elements.len()];
            variant(&mut rng, &profile, KINDS[n % KINDS.len()], element)
        });
        Self {
            variants: variants.collect(),
            profile,
            seed,
        }
    }

    /// Every variant has the same number of problems.
    fn variant_of(&self, number: u64) -> usize {
        number as usize % self.variants.len()
    }

    /// The index of the process that runs the problem with this number: each compiles the kernels of its own variants.
    pub fn process_of(&self, number: u64, processes: usize) -> usize {
        match self.variants.len() {
            0 => number as usize % processes,
            _ => self.variant_of(number) % processes,
        }
    }

    /// The problem with this number.
    pub fn draw(&self, number: u64) -> Spec {
        // Not the generator's own step: the numbers of one problem would be those of the next, one later.
        let mut rng = Rng::new(self.seed ^ (number + 1).wrapping_mul(0xd134_2543_de82_ef95));
        let rng = &mut rng;
        let variant = if self.variants.is_empty() {
            let (kind, element) = (one(rng, &KINDS), one(rng, &self.profile.elements));
            variant(rng, &self.profile, kind, element)
        } else {
            self.variants[self.variant_of(number)]
        };
        let most = match self.profile.size {
            Size::Small => 4e4,
            Size::Medium => 2.5e5,
            // Its heads are wider, so the oracle takes longer for the same number of pairs.
            Size::Large => 6e5,
        };
        // Many small problems, and a few that take as long as all of them.
        let times = match rng.below(32) {
            0 => 20.0,
            1..=5 => 4.0,
            _ => 1.0,
        };
        let budget = (self.profile.effort * times * most) as usize;
        problem(rng, &variant, &self.profile, budget)
    }
}

fn one<T: Copy>(rng: &mut Rng, of: &[T]) -> T {
    of[rng.below(of.len())]
}

fn chance(rng: &mut Rng, one_in: usize) -> bool {
    rng.below(one_in) == 0
}

/// One of the given sizes, or its neighbour.
fn around(rng: &mut Rng, of: &[usize]) -> usize {
    (one(rng, of) + rng.below(3)).saturating_sub(1).max(1)
}

fn variant(rng: &mut Rng, profile: &Profile, kind: Kind, element: ElementType) -> Variant {
    let kind = match kind {
        Kind::Decoded if !profile.decodes => Kind::Scored,
        kind => kind,
    };
    let head_dim = match (profile.size, rng.below(3)) {
        (Size::Small, _) => one(rng, &[8, 16, 24, 32, 40, 64]),
        // The oracle takes as long for the keys of one row of 256 as for those of eight.
        (Size::Medium, 0 | 1) => one(rng, &[8, 16, 16, 24, 32, 32, 40, 48, 64]),
        // Head dimensions that the tensor-core engines support, and others that they do not.
        (_, 0) => one(rng, &[64, 128]),
        (_, 1) => one(rng, &[16, 32, 64, 96, 128, 192, 256]),
        _ => 8 * (1 + rng.below(32)),
    };
    Variant {
        kind,
        element,
        head_dim,
        group: one(rng, &[1, 1, 2, 3, 4, 4, 5, 6, 7, 8]),
        causal: matches!(kind, Kind::Decoded) || rng.below(3) > 0,
        softcap: one(rng, &[None, None, None, Some(3.0), Some(30.0)]),
        deterministic: chance(rng, 4),
        // Drawn from separate numbers, so that the problems of a seed are otherwise unchanged by ALiBi.
        alibi: chance(&mut Rng::new(!rng.clone().next_u64()), 6),
        dropout: one(
            &mut Rng::new(rng.clone().next_u64()),
            &[None, None, None, None, Some(0.1), Some(0.5)],
        ),
        aligned: rng.below(5) > 0,
    }
}

fn problem(rng: &mut Rng, variant: &Variant, profile: &Profile, budget: usize) -> Spec {
    let mut k_len = keys(rng);
    let mut q_len = queries(rng, k_len);
    let mut batch = one(rng, &[1, 1, 2, 3]);
    if !matches!(variant.kind, Kind::Decoded) && chance(rng, 8) {
        *one_of(rng, [&mut q_len, &mut k_len, &mut batch]) = 0;
    }
    let deviations: &[f64] = match variant.element {
        // Greater deviations overflow more often than not.
        F16 => &[1.0, 1.0, 1.0, 1.0, 0.1, 8.0, 30.0],
        F32 | Bf16 => &[1.0, 1.0, 1.0, 1.0, 0.1, 30.0],
    };
    let mut spec = Spec {
        what: What::Plain,
        element: variant.element,
        batch,
        kv_heads: one(rng, &[1, 1, 2, 3]),
        group: variant.group,
        q_len,
        k_len,
        head_dim: variant.head_dim,
        causal: variant.causal,
        scale: one(rng, &[None, None, None, Some(1.0), Some(0.3), Some(-0.2)]),
        softcap: variant.softcap,
        alibi: variant.alibi,
        sink: false,
        large: None,
        deterministic: variant.deterministic,
        dropout: variant.dropout,
        grad_lse: rng.below(2) == 0,
        deviation: one(rng, deviations),
        places: places(rng, variant.aligned),
        seed: rng.next_u64() >> 32,
    };
    spec.what = match variant.kind {
        Kind::Plain => What::Plain,
        Kind::Scored => What::Scored {
            window: window(rng, &spec),
            scores: scores(rng),
            selecting: selecting(rng, &spec),
        },
        Kind::Masked => masked(rng, &spec),
        Kind::Decoded => decoded(rng),
    };
    if let Some(Selecting {
        by: By::Rank(parts),
        ..
    }) = spec.selecting()
        && parts.narrower > 0
    {
        spec.kv_heads = spec.kv_heads.max(2);
    }
    if let What::Decoded(decoding) = &spec.what {
        if decoding.shared_pages() > 0 {
            spec.batch = spec.batch.max(2);
        }
        // Options that do not apply to a cache; its tokens have one layout.
        (spec.causal, spec.deterministic, spec.grad_lse) = (true, false, false);
        (spec.alibi, spec.dropout) = (false, None);
        let place = one(rng, &[Place::Contiguous, Place::Transposed, Place::Padded]);
        spec.places = [Place::Contiguous; 6];
        spec.places[Spec::Q] = match variant.aligned {
            true => Place::Transposed,
            false => place,
        };
    }
    if !spec.alibi && spec.softcap.is_none() && chance(rng, 3) {
        make_large(rng, &mut spec);
    }
    let mut spec = spec.with_lengths();
    fit(rng, &mut spec, budget);
    if profile.competes && rng.below(2) == 0 {
        make_compete(&mut spec);
    }
    if profile.sinks && rng.below(3) == 0 {
        spec.sink = may_have_sink(&spec);
    }
    spec
}

/// True if a problem may have a sink. In 16 bits the product with a sink's share is rounded again, and the sums of its
/// gradient are of 16 bits, too: a tolerance would have to know them. A great LSE has lost the numbers from which a
/// sink's share is computed.
fn may_have_sink(spec: &Spec) -> bool {
    let competes = |by: &Selecting| by.competes;
    matches!(spec.what, What::Plain | What::Scored { .. })
        && spec.element == F32
        && spec.large.is_none()
        && !spec.selecting().is_some_and(competes)
        && spec.scores() != Some(Scores::Nan)
}

/// Lets ranks compete if they learn and are finite or hidden, under a rule that follows a tensor of positions.
fn make_compete(spec: &mut Spec) {
    let same = spec.q_len == spec.k_len;
    if spec.large.is_some() || spec.batch * spec.q_len * spec.k_len == 0 {
        return;
    }
    if let What::Scored {
        scores, selecting, ..
    } = &mut spec.what
        && let By::Rank(parts) = selecting.by
        && (selecting.runners_up.unwrap_or(0) > 0 || selecting.left_out)
        && !selecting.apart
        && *scores != Scores::Nan
        && (same || parts.documents.is_none())
    {
        selecting.competes = true;
        // Both are one tensor.
        selecting.constant = false;
    }
}

/// Gives a problem great logits, by an added bias or by its products.
fn make_large(rng: &mut Rng, spec: &mut Spec) {
    let adds = match &spec.what {
        What::Plain => false,
        What::Scored { .. } => true,
        What::Masked { bias, .. } => bias.is_some_and(|(axes, _)| axes.keys),
        What::Decoded(decoding) => decoding.scored() && decoding.role == ScoreRole::RankAndBias,
    };
    let products = !adds || chance(rng, 4);
    let size = match products {
        true => one(rng, &Large::PRODUCTS) * one(rng, &[1.0, -1.0]),
        false => one(rng, &Large::ADDED),
    };
    spec.large = Some(Large {
        size,
        some: rng.below(2) == 0,
        products,
    });
    // With these factors products are exact.
    spec.scale = match products {
        true => Some(1.0),
        false => one(rng, &[Some(0.125), Some(0.25), Some(1.0)]),
    };
    spec.deviation = 1.0;
}

fn one_of<'a, T, const N: usize>(rng: &mut Rng, of: [&'a mut T; N]) -> &'a mut T {
    let n = rng.below(N);
    of.into_iter().nth(n).expect("one of them")
}

/// Three of four problems have 1024 keys or more.
fn keys(rng: &mut Rng) -> usize {
    match rng.below(20) {
        0 => 1 + rng.below(20),
        1..=2 => 1 + rng.below(300),
        3 => around(rng, &[16, 32, 48, 64, 96, 128, 192, 256, 512]),
        4 => 300 + rng.below(724),
        5..=14 => 1024 + rng.below(600),
        15..=18 => around(rng, &[1025, 1088, 1152, 1280, 1536, 1773, 2048, 2304]),
        _ => around(rng, &[3072, 4096]),
    }
}

/// Far fewer queries than keys, as many, or more.
fn queries(rng: &mut Rng, k_len: usize) -> usize {
    match rng.below(20) {
        0..=2 => 1 + rng.below(8),
        3..=5 => 1 + rng.below(64),
        6..=8 => around(rng, &[4, 8, 16, 32, 64, 128, 256]),
        9..=12 => k_len,
        13..=14 => around(rng, &[512, 1024, 1088, 2048]),
        15..=16 => k_len + 1 + rng.below(300),
        _ => 1 + rng.below(k_len),
    }
}

/// Around tiles, chunks and lengths.
fn window(rng: &mut Rng, spec: &Spec) -> Option<usize> {
    let k_len = spec.k_len.max(1);
    let long = k_len >= 1024 && rng.below(5) > 0;
    Some(match rng.below(20) {
        0 => return None,
        1 => 1 + rng.below(k_len),
        2 => around(rng, &[k_len]),
        3 => around(rng, &[spec.q_len]),
        4 => k_len / 3 + 1,
        5..=9 if long => 193 + rng.below(k_len - 193),
        10..=19 if long => around(rng, &[200, 256, 512, 728, 1024]),
        5..=6 => around(rng, &[1]),
        _ => around(rng, &[8, 16, 32, 64, 96, 128, 256, 1024]),
    })
}

fn scores(rng: &mut Rng) -> Scores {
    match rng.below(6) {
        0..=1 => Scores::Normal,
        // Scores that layers modify by position.
        2 => one(rng, &[Scores::Turns, Scores::Recency]),
        // Nothing is attended with these scores, so a few problems suffice.
        _ => match one(rng, &Scores::ALL) {
            Scores::AllPadded if rng.below(3) > 0 => Scores::Padded,
            kind => kind,
        },
    }
}

/// Half of the selections are by a window alone.
fn selecting(rng: &mut Rng, spec: &Spec) -> Selecting {
    if rng.below(2) == 0 {
        return Selecting::default();
    }
    let runners_up = (rng.below(4) > 0).then(|| match rng.below(4) {
        0 => rng.below(3),
        1 => 1 + rng.below(2 * spec.k_len.max(1)),
        _ => around(rng, &[8, 16, 64, 128, 512]),
    });
    let part = |rng: &mut Rng| match rng.below(3) {
        0 => 0,
        1 => 1 + rng.below(8),
        _ => around(rng, &[16, 32, 64, 128]),
    };
    let by = match rng.below(6) {
        0..=1 => By::default(),
        2 => By::Ends(one(rng, &[Ends::Random, Ends::Waves])),
        // Recent keys, sinks and documents are those of a position, so there must be several.
        _ => By::Rank(Parts {
            recent: if spec.causal { part(rng) } else { 0 },
            sinks: if spec.causal && rng.below(3) > 0 {
                part(rng).div_ceil(4)
            } else {
                0
            },
            documents: (spec.causal && rng.below(2) == 0).then(|| 1 + rng.below(spec.k_len.max(1))),
            narrower: one(rng, &[0, 1, 40]),
        }),
    };
    Selecting {
        by,
        runners_up,
        left_out: chance(rng, 3),
        competes: false,
        apart: chance(rng, 3),
        constant: chance(rng, 2),
    }
}

fn places(rng: &mut Rng, aligned: bool) -> [Place; 6] {
    let all = match rng.below(10) {
        0..=2 => Some(Place::Contiguous),
        3 => Some(Place::Packed),
        4..=5 => Some(Place::Transposed),
        6 if !aligned => Some(Place::Padded),
        _ => None,
    };
    let mut places = [Place::Contiguous; 6].map(|_| {
        all.unwrap_or_else(|| match rng.below(10) {
            0..=2 => Place::Contiguous,
            3 => Place::Packed,
            4..=5 => Place::Transposed,
            6 => Place::Batch,
            7 => Place::Heads,
            8 if chance(rng, 3) => Place::Tokens,
            _ if aligned => Place::Contiguous,
            _ => Place::Padded,
        })
    });
    // Scores must be contiguous along the keys.
    if places[Spec::SCORES] == Place::Tokens {
        places[Spec::SCORES] = Place::Contiguous;
    }
    places
}

fn axes(rng: &mut Rng) -> Axes {
    Axes {
        batch: rng.below(2) == 0,
        heads: one(rng, &[Heads::One, Heads::Kv, Heads::Query]),
        queries: rng.below(3) > 0,
        keys: rng.below(5) > 0,
    }
}

fn masked(rng: &mut Rng, spec: &Spec) -> What {
    let kept = 1 + rng.below(spec.k_len.max(1));
    let pattern = match rng.below(9) {
        0 => Pattern::Random(0.02),
        1 => Pattern::Random(0.5),
        2 => Pattern::Random(0.98),
        3 => Pattern::Tiles(1 + rng.below(130), 1 + rng.below(130)),
        4 => Pattern::Tiles(16 << rng.below(4), 32 << rng.below(3)),
        5 => Pattern::Top(around(rng, &[kept, 16, 64, 128])),
        6 => Pattern::Window(around(rng, &[kept, 16, 64, 128])),
        7 => Pattern::Columns(one(rng, &[2, 3, 16, 64])),
        _ if chance(rng, 6) => Pattern::Nothing,
        _ => Pattern::Window(64 + rng.below(1000)),
    };
    let mask = (rng.below(5) > 0).then(|| (axes(rng), pattern));
    What::Masked {
        mask,
        bias: (rng.below(4) > 0).then(|| (axes(rng), chance(rng, 3))),
        hidden: mask.is_some() && rng.below(2) == 0,
    }
}

fn decoded(rng: &mut Rng) -> What {
    let prefill = match rng.below(10) {
        0..=1 => 0,
        2 => 1 + rng.below(64),
        3 => around(rng, &[16, 32, 64, 128, 256]),
        4..=7 => 1024 + rng.below(600),
        _ => around(rng, &[1025, 1088, 1536, 2048]),
    };
    let storage = match rng.below(5) {
        0..=2 => Store::Slots(match rng.below(4) {
            0 => around(rng, &[1, 16, 32, 64, 128]),
            1 => 1 + rng.below(100),
            2 => around(rng, &[256, 512, 1024]),
            _ => 193 + rng.below(400),
        }),
        n => Store::Pages {
            page_len: one(rng, &[1, 3, 16, 16, 32, 64, 64, 128]),
            scored: n == 3,
            last: None,
        },
    };
    let mut piece = || match rng.below(12) {
        0..=4 => 1,
        5..=6 => 2 + rng.below(4),
        7 => 1 + rng.below(MAX_STEP),
        8 => MAX_STEP,
        // A chunk, with slots; pages have no chunks.
        _ => match storage {
            Store::Slots(_) => MAX_STEP + 1 + rng.below(80),
            Store::Pages { .. } => MAX_STEP - 1,
        },
    };
    let mut pieces = [(); 6].map(|()| piece());
    if matches!(storage, Store::Slots(_)) && chance(rng, 4) {
        pieces[0] = MAX_STEP + 1 + rng.below(80);
    }
    let count = 1 + rng.below(pieces.len());
    let scores = match storage {
        Store::Pages { scored: false, .. } => Scores::Normal,
        _ => scores(rng),
    };
    let mut decoding = Decoding {
        storage,
        scores,
        prefill,
        pieces: pieces[..count].to_vec(),
        wrong: (rng.below(3) == 0).then(|| rng.below(MAX_STEP)),
        shared: match storage {
            Store::Pages { page_len, .. } if rng.below(4) > 0 => {
                page_len * (1 + rng.below((prefill / page_len).max(1))) + rng.below(page_len)
            }
            _ => 0,
        },
        role: match storage {
            Store::Slots(_) if chance(rng, 2) => ScoreRole::Rank,
            _ => ScoreRole::RankAndBias,
        },
    };
    if let Store::Pages { last, .. } = &mut decoding.storage {
        *last = (rng.below(3) > 0).then(|| around(rng, &[1, 16, 64, 128, 1024]));
    }
    What::Decoded(decoding)
}
