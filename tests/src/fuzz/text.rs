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

/// Writes ` name=value`, if there is a value.
fn word(f: &mut fmt::Formatter<'_>, name: &str, value: Option<impl fmt::Display>) -> fmt::Result {
    value.map_or(Ok(()), |value| write!(f, " {name}={value}"))
}

fn flag(f: &mut fmt::Formatter<'_>, name: &str, is_set: bool) -> fmt::Result {
    match is_set {
        true => write!(f, " {name}"),
        false => Ok(()),
    }
}

/// A number, unless it is 0.
fn some(n: usize) -> Option<usize> {
    (n > 0).then_some(n)
}

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
                word(f, "window", *window)?;
                write!(f, " scores={scores:?}{selecting}")?;
            }
            What::Masked { mask, bias, hidden } => {
                // Without the blank in `Tiles(16, 32)`.
                let pattern = |pattern: Pattern| format!("{pattern:?}").replace(' ', "");
                let mask = mask.map(|(axes, of)| format!("{axes}:{}", pattern(of)));
                word(f, "mask", mask)?;
                let padded = |is_padded: bool| if is_padded { ":padded" } else { "" };
                let bias = bias.map(|(axes, is_padded)| format!("{axes}{}", padded(is_padded)));
                word(f, "bias", bias)?;
                flag(f, "hidden", *hidden)?;
            }
            What::Decoded(decoding) => write!(f, " {decoding}")?,
        }
        word(f, "scale", self.scale)?;
        word(f, "cap", self.softcap)?;
        word(f, "drop", self.dropout)?;
        flag(f, "alibi", self.alibi)?;
        flag(f, "sink", self.sink)?;
        flag(f, "det", self.deterministic)?;
        flag(f, "lse", self.grad_lse)?;
        if let Some(large) = &self.large {
            write!(f, " large={:e}", large.size)?;
            f.write_str(if large.some { ":some" } else { "" })?;
            f.write_str(if large.products { ":products" } else { "" })?;
        }
        word(f, "dev", Some(self.deviation).filter(|&x| x != 1.0))?;
        if self.places != [Place::Contiguous; 6] {
            let letter = |place: &Place| {
                let named = PLACES.iter().find(|(_, p)| p == place);
                named.expect("all are named").0
            };
            let letters: String = self.places.iter().map(letter).collect();
            word(f, "lay", Some(letters))?;
        }
        write!(f, " seed={}", self.seed)
    }
}

impl fmt::Display for Selecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.by {
            By::Rank(parts) => {
                word(f, "recent", some(parts.recent))?;
                word(f, "sinks", some(parts.sinks))?;
                word(f, "documents", parts.documents)?;
                word(f, "narrower", some(parts.narrower))?;
            }
            By::Ends(ends) => write!(f, " ends={ends:?}")?,
        }
        word(f, "runners", self.runners_up)?;
        flag(f, "leave", self.left_out)?;
        flag(f, "compete", self.competes)?;
        flag(f, "apart", self.apart)?;
        flag(f, "constant", self.constant)
    }
}

impl fmt::Display for Decoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.storage {
            Store::Slots(window) => write!(f, "slots={window}")?,
            Store::Pages { page_len, .. } => write!(f, "pages={page_len}")?,
        }
        word(f, "last", self.last())?;
        if self.scored() {
            write!(f, " scores={:?}", self.scores)?;
        }
        flag(f, "ranks", self.role == ScoreRole::Rank)?;
        let pieces: Vec<String> = self.pieces.iter().map(ToString::to_string).collect();
        write!(f, " prefill={} pieces={}", self.prefill, pieces.join("+"))?;
        word(f, "wrong", self.wrong)?;
        word(f, "shared", some(self.shared))
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

/// The parser of a line: names and values.
struct Reader<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Reader<'a> {
    /// Removes a word: a flag's value is empty.
    fn take(&mut self, name: &str, is_flag: bool) -> Option<&'a str> {
        let is = |&(key, value): &(&str, &str)| key == name && value.is_empty() == is_flag;
        let at = self.0.iter().position(is)?;
        Some(self.0.remove(at).1)
    }

    fn flag(&mut self, name: &str) -> bool {
        self.take(name, true).is_some()
    }

    fn text(&mut self, name: &str) -> Option<&'a str> {
        self.take(name, false)
    }

    fn maybe<T: FromStr>(&mut self, name: &str) -> Result<Option<T>, String> {
        let Some(text) = self.text(name) else {
            return Ok(None);
        };
        let number = text.parse::<T>().map(Some);
        number.map_err(|_| format!("`{name}={text}` is no number"))
    }

    fn number<T: FromStr>(&mut self, name: &str) -> Result<T, String> {
        self.maybe(name)?
            .ok_or_else(|| format!("`{name}` is missing"))
    }

    /// One of the values, as it is printed for debugging.
    fn one<T: fmt::Debug + Copy>(&mut self, name: &str, of: &[T]) -> Result<Option<T>, String> {
        let Some(text) = self.text(name) else {
            return Ok(None);
        };
        let found = of.iter().find(|one| format!("{one:?}") == text);
        found.map_or_else(
            || Err(format!("no {name} are `{text}`")),
            |&one| Ok(Some(one)),
        )
    }

    fn scores(&mut self) -> Result<Option<Scores>, String> {
        self.one("scores", &Scores::ALL)
    }

    fn selecting(&mut self) -> Result<Selecting, String> {
        Ok(Selecting {
            by: match self.one("ends", &[Ends::Random, Ends::Waves])? {
                Some(ends) => By::Ends(ends),
                None => By::Rank(Parts {
                    recent: self.maybe("recent")?.unwrap_or(0),
                    sinks: self.maybe("sinks")?.unwrap_or(0),
                    documents: self.maybe("documents")?,
                    narrower: self.maybe("narrower")?.unwrap_or(0),
                }),
            },
            runners_up: self.maybe("runners")?,
            left_out: self.flag("leave"),
            competes: self.flag("compete"),
            apart: self.flag("apart"),
            constant: self.flag("constant"),
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
        let element = match words.next().unwrap_or_default() {
            "f32" => ElementType::F32,
            "f16" => ElementType::F16,
            "bf16" => ElementType::Bf16,
            other => return Err(format!("no element type is `{other}`")),
        };
        let pairs = words.map(|word| word.split_once('=').unwrap_or((word, "")));
        let mut reader = Reader(pairs.collect());
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
            places: (reader.text("lay")).map_or(Ok([Place::Contiguous; 6]), places)?,
            seed: reader.number("seed")?,
        };
        match reader.0.first() {
            None => Ok(spec.with_lengths()),
            Some((name, _)) => Err(format!("`{name}` means nothing to {kind}")),
        }
    }
}

fn places(text: &str) -> Result<[Place; 6], String> {
    let place = |letter: char| {
        let named = PLACES.iter().find(|(l, _)| *l == letter);
        let (_, place) = named.ok_or_else(|| format!("no place is `{letter}`"))?;
        Ok::<_, String>(*place)
    };
    let places: Vec<Place> = text.chars().map(place).collect::<Result<_, _>>()?;
    (places.try_into()).map_err(|_| format!("six places, not `{text}`"))
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
    let parsed = match name {
        "Random" => numbers.parse().ok().map(Pattern::Random),
        "Tiles" => numbers.split_once(',').and_then(|(rows, columns)| {
            Some(Pattern::Tiles(rows.parse().ok()?, columns.parse().ok()?))
        }),
        "Nothing" => Some(Pattern::Nothing),
        "Top" => numbers.parse().ok().map(Pattern::Top),
        "Window" => numbers.parse().ok().map(Pattern::Window),
        "Columns" => numbers.parse().ok().map(Pattern::Columns),
        _ => None,
    };
    let pattern = parsed.ok_or_else(|| format!("no pattern is `{pattern}`"))?;
    Ok((axes(shape)?, pattern))
}
