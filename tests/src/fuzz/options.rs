//! The options of problems, by which a record counts them.

use super::draw::Profile;
use super::spec::{By, Decoding, MAX_STEP, Parts, Place, Selecting, Spec, Store, What};
use flash_dma_reference::generate::Scores;

/// An option of a problem.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// Its name in a record.
    pub name: &'static str,
    /// True if a problem has it.
    pub is_in: fn(&Spec) -> bool,
    /// True if problems of a profile have it.
    pub is_drawn: fn(&Profile) -> bool,
}

const fn always(name: &'static str, is_in: fn(&Spec) -> bool) -> Choice {
    of(name, is_in, |_| true)
}

const fn decoding(name: &'static str, is_in: fn(&Spec) -> bool) -> Choice {
    of(name, is_in, |profile| profile.decodes)
}

const fn of(
    name: &'static str,
    is_in: fn(&Spec) -> bool,
    is_drawn: fn(&Profile) -> bool,
) -> Choice {
    Choice {
        name,
        is_in,
        is_drawn,
    }
}

/// Every option.
pub const CHOICES: &[Choice] = &[
    always("no scores", |s| matches!(s.what, What::Plain)),
    always("scores", |s| matches!(s.what, What::Scored { .. })),
    always("great biases and scores of all keys", |s| {
        s.large.is_some_and(|large| !large.some && !large.products)
    }),
    always("great biases and scores of some keys", |s| {
        s.large.is_some_and(|large| large.some && !large.products)
    }),
    always("great products", |s| {
        s.large.is_some_and(|large| large.products)
    }),
    always("every key", |s| !s.causal),
    always("groups", |s| s.group > 1),
    always("scale", |s| s.scale.is_some()),
    always("softcap", |s| s.softcap.is_some()),
    always("ALiBi", |s| s.alibi),
    always("dropout", |s| s.dropout.is_some()),
    always("deterministic", |s| s.deterministic),
    always("gradient of the LSE", |s| s.grad_lse),
    always("no sequences", |s| s.batch == 0),
    always("no queries", |s| s.q_len == 0),
    always("no keys", |s| s.k_len == 0),
    always("one query", |s| s.q_len == 1),
    always("transposed", |s| s.places.contains(&Place::Transposed)),
    always("padded rows", |s| s.places.contains(&Place::Padded)),
    always("packed", |s| s.places.contains(&Place::Packed)),
    always("read for all", |s| {
        let once = [Place::Batch, Place::Heads, Place::Tokens];
        once.iter().any(|place| s.places.contains(place))
    }),
    always("runners-up", |s| is_by(s, |by| by.runners_up.is_some())),
    always("kept keys that learn", |s| is_by(s, |by| by.left_out)),
    always("turns", |s| s.scores() == Some(Scores::Turns)),
    always("slopes", |s| s.scores() == Some(Scores::Recency)),
    always("ranks apart", |s| is_by(s, |by| by.apart)),
    always("constant scores", |s| {
        is_by(s, Selecting::has_constant_scores)
    }),
    of("learned sinks", |s| s.sink, |profile| profile.sinks),
    of(
        "ranks that compete",
        |s| is_by(s, |by| by.competes),
        |profile| profile.competes,
    ),
    always("given ends", |s| {
        is_by(s, |by| matches!(by.by, By::Ends(_)))
    }),
    always("recent keys", |s| has_part(s, |parts| parts.recent > 0)),
    always("sinks", |s| has_part(s, |parts| parts.sinks > 0)),
    always("documents", |s| {
        has_part(s, |parts| parts.documents.is_some())
    }),
    always("windows of heads", |s| {
        s.kv_heads > 1 && has_part(s, |parts| parts.narrower > 0)
    }),
    always("mask", |s| {
        matches!(s.what, What::Masked { mask: Some(_), .. })
    }),
    always("mask of hidden pairs", |s| {
        matches!(s.what, What::Masked { hidden: true, .. })
    }),
    always("bias", |s| {
        matches!(s.what, What::Masked { bias: Some(_), .. })
    }),
    decoding("slots", |s| is_held(s, |d| d.window().is_some())),
    decoding("slots that scores only rank", |s| {
        is_held(s, |d| d.role == flash_dma_problem::ScoreRole::Rank)
    }),
    decoding("chunks", |s| {
        let long = |d: &Decoding| d.pieces.iter().any(|&piece| piece > MAX_STEP);
        is_held(s, |d| d.window().is_some() && long(d))
    }),
    decoding("pages", |s| is_held(s, |d| d.window().is_none())),
    decoding("pages with scores", |s| {
        is_held(s, |d| {
            matches!(d.storage, Store::Pages { scored: true, .. })
        })
    }),
    decoding("last keys of pages", |s| is_held(s, |d| d.last().is_some())),
    decoding("shared pages", |s| {
        s.batch > 1 && is_held(s, |d| d.shared_pages() > 0)
    }),
    decoding("wrong guesses", |s| is_held(s, |d| d.wrong.is_some())),
];

fn is_by(spec: &Spec, is: impl Fn(&Selecting) -> bool) -> bool {
    spec.selecting().is_some_and(is)
}

fn has_part(spec: &Spec, has: impl Fn(&Parts) -> bool) -> bool {
    is_by(spec, |selecting| match &selecting.by {
        By::Rank(parts) => has(parts),
        By::Ends(_) => false,
    })
}

fn is_held(spec: &Spec, is: impl Fn(&Decoding) -> bool) -> bool {
    matches!(&spec.what, What::Decoded(decoding) if is(decoding))
}
