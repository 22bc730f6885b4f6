//! The text form of a problem: one line.

use super::large::Large;
use super::spec::{Axes, By, Decoding, Ends, Heads, Parts, Place, Selecting, Spec, Store, What};
use crate::masked::Pattern;
use core::fmt;
use core::str::FromStr;
use flash_dma_problem::{ElementType, ScoreRole};
use flash_dma_reference::generate::Scores;

const PLACES: [(char, Place); 7] = [
    ('c', Place::Contiguous),
    ('t', Place::Transposed),
    ('p', Place::Padded),
    ('q', Place::Packed),
    ('b', Place::Batch),
    ('h', Place::Heads),
    ('n', Place::Tokens),
];

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.what {
            What::Plain => "plain",
            What::Scored { .. } => "scored",
            What::Masked { .. } => "masked",
            What::Decoded(_) => "decoded",
        };
        write!(f, "{kind} {}", self.element)?;
        write!(f, " b={} kv={} g={}", self.batch, self.kv_heads, self.group)?;
        if !matches!(self.what, What::Decoded(_)) {
            write!(f, " q={} k={}", self.q_len, self.k_len)?;
        }
        write!(f, " d={}", self.head_dim)?;
        f.write_str(if self.causal { " causal" } else { " full" })?;
        match &self.what {
            What::Plain => {}
            What::Scored {
                window,
                scores,
                selecting,
            } => {
                if let Some(window) = window {
                    write!(f, " window={window}")?;
                }
                write!(f, " scores={scores:?}{selecting}")?;
            }
            What::Masked { mask, bias, hidden } => {
                if let Some((axes, pattern)) = mask {
                    // Removes the blank in `Tiles(16, 32)`.
                    write!(
                        f,
                        " mask={axes}:{}",
                        format!("{pattern:?}").replace(' ', "")
                    )?;
                }
                if let Some((axes, padded)) = bias {
                    write!(f, " bias={axes}{}", if *padded { ":padded" } else { "" })?;
                }
                if *hidden {
                    f.write_str(" hidden")?;
                }
            }
            What::Decoded(decoding) => write!(f, " {decoding}")?,
        }
        for (name, value) in [
            ("scale", self.scale),
            ("cap", self.softcap),
            ("drop", self.dropout),
        ] {
            if let Some(value) = value {
                write!(f, " {name}={value}")?;
            }
        }
        for (flag, is_set) in [
            ("alibi", self.alibi),
            ("sink", self.sink),
            ("det", self.deterministic),
            ("lse", self.grad_lse),
        ] {
            if is_set {
                write!(f, " {flag}")?;
            }
        }
        if let Some(large) = &self.large {
            write!(f, " large={:e}", large.size)?;
            f.write_str(if large.some { ":some" } else { "" })?;
            f.write_str(if large.products { ":products" } else { "" })?;
        }
        if self.deviation != 1.0 {
            write!(f, " dev={}", self.deviation)?;
        }
        if self.places != [Place::Contiguous; 6] {
            let letter = |place: &Place| {
                let named = PLACES.iter().find(|(_, p)| p == place);
                named.expect("all are named").0
            };
            let letters: String = self.places.iter().map(letter).collect();
            write!(f, " lay={letters}")?;
        }
        write!(f, " seed={}", self.seed)
    }
}

impl fmt::Display for Selecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.by {
            By::Rank(parts) => {
                let words = [
                    ("recent", Some(parts.recent).filter(|&n| n > 0)),
                    ("sinks", Some(parts.sinks).filter(|&n| n > 0)),
                    ("documents", parts.documents),
                    ("narrower", Some(parts.narrower).filter(|&n| n > 0)),
                ];
                for (name, value) in words {
                    if let Some(value) = value {
                        write!(f, " {name}={value}")?;
                    }
                }
            }
            By::Ends(ends) => write!(f, " ends={ends:?}")?,
        }
        if let Some(runners_up) = self.runners_up {
            write!(f, " runners={runners_up}")?;
        }
        if let Some(besides) = self.left_out {
            write!(f, " leave={besides}")?;
        }
        if let Some(factor) = self.softmax {
            write!(f, " compete={factor}")?;
        }
        f.write_str(if self.apart { " apart" } else { "" })
    }
}

impl fmt::Display for Decoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.storage {
            Store::Slots(window) => write!(f, "slots={window}")?,
            Store::Pages { page_len, .. } => write!(f, "pages={page_len}")?,
        }
        if let Some(last) = self.last() {
            write!(f, " last={last}")?;
        }
        if self.scored() {
            write!(f, " scores={:?}", self.scores)?;
        }
        if self.role == ScoreRole::Rank {
            f.write_str(" ranks")?;
        }
        let pieces: Vec<String> = self.pieces.iter().map(ToString::to_string).collect();
        write!(f, " prefill={} pieces={}", self.prefill, pieces.join("+"))?;
        if let Some(wrong) = self.wrong {
            write!(f, " wrong={wrong}")?;
        }
        match self.shared {
            0 => Ok(()),
            shared => write!(f, " shared={shared}"),
        }
    }
}

impl fmt::Display for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = |has, letter| if has { letter } else { '1' };
        let heads = match self.heads {
            Heads::One => '1',
            Heads::Kv => 'g',
            Heads::Query => 'h',
        };
        write!(f, "{}{heads}", letter(self.batch, 'b'))?;
        write!(f, "{}{}", letter(self.queries, 'q'), letter(self.keys, 'k'))
    }
}

/// The parser of a line.
struct Reader<'a> {
    pairs: Vec<(&'a str, &'a str)>,
}

impl<'a> Reader<'a> {
    fn flag(&mut self, name: &str) -> bool {
        let at = self
            .pairs
            .iter()
            .position(|&(key, value)| key == name && value.is_empty());
        at.map(|at| self.pairs.remove(at)).is_some()
    }

    fn text(&mut self, name: &str) -> Option<&'a str> {
        let at = self
            .pairs
            .iter()
            .position(|&(key, value)| key == name && !value.is_empty())?;
        Some(self.pairs.remove(at).1)
    }

    fn maybe<T: FromStr>(&mut self, name: &str) -> Result<Option<T>, String> {
        (self.text(name).map(|text| {
            text.parse()
                .map_err(|_| format!("`{name}={text}` is no number"))
        }))
        .transpose()
    }

    fn number<T: FromStr>(&mut self, name: &str) -> Result<T, String> {
        self.maybe(name)?
            .ok_or_else(|| format!("`{name}` is missing"))
    }

    fn scores(&mut self) -> Result<Option<Scores>, String> {
        let Some(text) = self.text("scores") else {
            return Ok(None);
        };
        let kind = Scores::ALL
            .into_iter()
            .find(|kind| format!("{kind:?}") == text);
        kind.map(Some)
            .ok_or_else(|| format!("no scores are `{text}`"))
    }

    fn selecting(&mut self) -> Result<Selecting, String> {
        let ends = match self.text("ends") {
            None => None,
            Some("Random") => Some(Ends::Random),
            Some("Waves") => Some(Ends::Waves),
            Some(other) => return Err(format!("no ends are `{other}`")),
        };
        Ok(Selecting {
            by: match ends {
                Some(ends) => By::Ends(ends),
                None => By::Rank(Parts {
                    recent: self.maybe("recent")?.unwrap_or(0),
                    sinks: self.maybe("sinks")?.unwrap_or(0),
                    documents: self.maybe("documents")?,
                    narrower: self.maybe("narrower")?.unwrap_or(0),
                }),
            },
            runners_up: self.maybe("runners")?,
            left_out: self.maybe("leave")?,
            softmax: self.maybe("compete")?,
            apart: self.flag("apart"),
        })
    }

    fn decoding(&mut self) -> Result<Decoding, String> {
        let scores = self.scores()?;
        let storage = match (self.maybe("slots")?, self.maybe("pages")?) {
            (Some(window), None) => Store::Slots(window),
            (None, Some(page_len)) => Store::Pages {
                page_len,
                scored: scores.is_some(),
                last: self.maybe("last")?,
            },
            _ => return Err("a cache has `slots` or `pages`".into()),
        };
        let pieces = self.text("pieces").unwrap_or_default().split('+');
        let pieces = pieces.map(|n| n.parse().map_err(|_| format!("a piece of `{n}` tokens")));
        Ok(Decoding {
            storage,
            role: match self.flag("ranks") {
                true => ScoreRole::Rank,
                false => ScoreRole::RankAndBias,
            },
            scores: scores.unwrap_or(Scores::Normal),
            prefill: self.number("prefill")?,
            pieces: pieces.collect::<Result<_, _>>()?,
            wrong: self.maybe("wrong")?,
            shared: self.maybe("shared")?.unwrap_or(0),
        })
    }
}

impl FromStr for Spec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split_whitespace();
        let kind = words.next().ok_or("an empty line")?;
        let element = match words.next() {
            Some("f32") => ElementType::F32,
            Some("f16") => ElementType::F16,
            Some("bf16") => ElementType::Bf16,
            other => {
                return Err(format!(
                    "no element type is `{}`",
                    other.unwrap_or_default()
                ));
            }
        };
        let mut reader = Reader {
            pairs: words
                .map(|word| word.split_once('=').unwrap_or((word, "")))
                .collect(),
        };
        let what = match kind {
            "plain" => What::Plain,
            "scored" => What::Scored {
                window: reader.maybe("window")?,
                scores: reader.scores()?.ok_or("`scores` is missing")?,
                selecting: reader.selecting()?,
            },
            "masked" => What::Masked {
                mask: reader.text("mask").map(mask).transpose()?,
                bias: reader.text("bias").map(bias).transpose()?,
                hidden: reader.flag("hidden"),
            },
            "decoded" => What::Decoded(reader.decoding()?),
            other => return Err(format!("no operation is `{other}`")),
        };
        let causal = match (reader.flag("causal"), reader.flag("full")) {
            (true, false) => true,
            (false, true) => false,
            _ => return Err("either `causal` or `full`".into()),
        };
        let decoded = matches!(what, What::Decoded(_));
        let mut length = |name| if decoded { Ok(0) } else { reader.number(name) };
        let (q_len, k_len) = (length("q")?, length("k")?);
        let spec = Self {
            what,
            element,
            batch: reader.number("b")?,
            kv_heads: reader.number("kv")?,
            group: reader.number("g")?,
            q_len,
            k_len,
            head_dim: reader.number("d")?,
            causal,
            scale: reader.maybe("scale")?,
            softcap: reader.maybe("cap")?,
            alibi: reader.flag("alibi"),
            sink: reader.flag("sink"),
            large: reader.text("large").map(large).transpose()?,
            deterministic: reader.flag("det"),
            dropout: reader.maybe("drop")?,
            grad_lse: reader.flag("lse"),
            deviation: reader.maybe("dev")?.unwrap_or(1.0),
            places: reader
                .text("lay")
                .map_or(Ok([Place::Contiguous; 6]), places)?,
            seed: reader.number("seed")?,
        };
        match reader.pairs.first() {
            None => Ok(spec.with_lengths()),
            Some((name, _)) => Err(format!("`{name}` means nothing to {kind}")),
        }
    }
}

fn places(text: &str) -> Result<[Place; 6], String> {
    let place = |letter: char| {
        let named = PLACES.iter().find(|(l, _)| *l == letter);
        named
            .map(|&(_, place)| place)
            .ok_or_else(|| format!("no place is `{letter}`"))
    };
    let places: Vec<Place> = text.chars().map(place).collect::<Result<_, _>>()?;
    places
        .try_into()
        .map_err(|_| format!("six places, not `{text}`"))
}

fn large(text: &str) -> Result<Large, String> {
    let mut words = text.split(':');
    let size = words.next().and_then(|size| size.parse().ok());
    let mut large = Large {
        size: size.ok_or_else(|| format!("no size is `{text}`"))?,
        some: false,
        products: false,
    };
    for word in words {
        match word {
            "some" => large.some = true,
            "products" => large.products = true,
            _ => return Err(format!("logits are not large by `{word}`")),
        }
    }
    Ok(large)
}

fn axes(text: &str) -> Result<Axes, String> {
    let wrong = || format!("no axes are `{text}`");
    let [b, h, q, k] = text.as_bytes() else {
        return Err(wrong());
    };
    let has = |found: &u8, letter: u8| match found {
        b'1' => Ok(false),
        found if *found == letter => Ok(true),
        _ => Err(wrong()),
    };
    Ok(Axes {
        batch: has(b, b'b')?,
        heads: match h {
            b'1' => Heads::One,
            b'g' => Heads::Kv,
            b'h' => Heads::Query,
            _ => return Err(wrong()),
        },
        queries: has(q, b'q')?,
        keys: has(k, b'k')?,
    })
}

fn bias(text: &str) -> Result<(Axes, bool), String> {
    match text.split_once(':') {
        None => Ok((axes(text)?, false)),
        Some((text, "padded")) => Ok((axes(text)?, true)),
        Some((_, kind)) => Err(format!("no bias is `{kind}`")),
    }
}

fn mask(text: &str) -> Result<(Axes, Pattern), String> {
    let (shape, pattern) = text.split_once(':').ok_or("a mask is `axes:pattern`")?;
    let (name, numbers) = match pattern.split_once('(') {
        Some((name, rest)) => (name, rest.trim_end_matches(')')),
        None => (pattern, ""),
    };
    let wrong = |_| format!("no pattern is `{pattern}`");
    let whole = |text: &str| text.parse::<usize>().map_err(|_| ()).map_err(wrong);
    let pattern = match name {
        "Random" => Pattern::Random(numbers.parse().map_err(|_| ()).map_err(wrong)?),
        "Tiles" => {
            let (rows, columns) = numbers.split_once(',').ok_or(()).map_err(wrong)?;
            Pattern::Tiles(whole(rows)?, whole(columns)?)
        }
        "Nothing" => Pattern::Nothing,
        "Top" => Pattern::Top(whole(numbers)?),
        "Window" => Pattern::Window(whole(numbers)?),
        "Columns" => Pattern::Columns(whole(numbers)?),
        _ => return Err(wrong(())),
    };
    Ok((axes(shape)?, pattern))
}
