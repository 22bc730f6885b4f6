//! The table of mutants: what each mutant breaks, where, and which tests must notice.
//!
//! One block per mutant, one line per field, a field repeated for more lines:
//!
//! ```text
//! mutant  a-name-of-its-own
//! breaks  The promise that is broken, as a sentence.
//! file    crates/flash-dma-cpu/src/select.rs
//! in      host | kernel          plain Rust, or a `#[cube]` function
//! swap    expression | statement
//! find    text that occurs once, «of which this» is replaced; all of it without marks
//! put     what replaces it; nothing deletes a statement
//! on      cpu | cuda             where the tests run; cpu if left out
//! kill    PROGRAM FILTER..       programs are those of `PROGRAMS`
//! lives   why no test can notice: a survivor that is known
//! ```
//!
//! White space in `find` matches any white space, including none, so that a file may be reformatted.

use crate::process::{Result, read_file};
use std::path::Path;

/// The path of the table, relative to the root.
pub(super) const PATH: &str = "tests/mutants.txt";

/// The test programs: name in the table, directory of the package, and whether it is the package's own unit tests.
pub(super) const PROGRAMS: [(&str, &str, bool); 6] = [
    ("problem", "crates/flash-dma-problem", true),
    ("cpu", "crates/flash-dma-cpu", true),
    ("kernels", "crates/flash-dma-kernels", true),
    ("burn", "crates/burn-flash-dma", false),
    ("models", "crates/flash-dma-models", false),
    ("tests", "tests", false),
];

/// A small fault in one place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Mutant {
    pub(super) name: String,
    pub(super) breaks: String,
    pub(super) file: String,
    /// Whether it is in a `#[cube]` function: it is then chosen when the kernel is expanded.
    pub(super) kernel: bool,
    pub(super) statement: bool,
    find: String,
    put: String,
    /// Whether the tests run on a GPU.
    pub(super) cuda: bool,
    /// Programs and their filters.
    pub(super) kill: Vec<(String, Vec<String>)>,
    /// The reason why it is known to survive; empty if it must not.
    pub(super) lives: String,
}

/// Reads and checks the table of a checkout.
///
/// # Errors
/// When it cannot be read, or a block is wrong.
pub(super) fn load(root: &Path) -> Result<Vec<Mutant>> {
    parse(&read_file(&root.join(PATH))?)
}

fn parse(text: &str) -> Result<Vec<Mutant>> {
    let mut mutants: Vec<Mutant> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let fault = |what: &str| Err(format!("{PATH}:{}: {what}", number + 1));
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (key, value) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let value = value.trim();
        if key == "mutant" {
            if mutants.iter().any(|m| m.name == value) {
                return fault("the name is taken");
            }
            mutants.push(Mutant {
                name: value.into(),
                ..Mutant::default()
            });
            continue;
        }
        let Some(mutant) = mutants.last_mut() else {
            return fault("a field without a mutant");
        };
        match (key, value) {
            ("breaks", _) => append(&mut mutant.breaks, value, ' '),
            ("file", _) => mutant.file = value.into(),
            ("in", "host" | "kernel") => mutant.kernel = value == "kernel",
            ("swap", "expression" | "statement") => mutant.statement = value == "statement",
            ("find", _) => append(&mut mutant.find, value, '\n'),
            ("put", _) => append(&mut mutant.put, value, '\n'),
            ("on", "cpu" | "cuda") => mutant.cuda = value == "cuda",
            ("lives", _) => append(&mut mutant.lives, value, ' '),
            ("kill", _) => {
                let mut words = value.split_whitespace().map(String::from);
                let program = words.next().unwrap_or_default();
                let filters: Vec<String> = words.collect();
                if filters.is_empty() || !PROGRAMS.iter().any(|(name, ..)| *name == program) {
                    return fault("no such program, or no filter");
                }
                mutant.kill.push((program, filters));
            }
            _ => return fault("no such field or value"),
        }
    }
    for mutant in &mutants {
        let missing = [
            ("name", mutant.name.is_empty()),
            ("breaks", mutant.breaks.is_empty()),
            ("file", mutant.file.is_empty()),
            ("find", mutant.find.is_empty()),
            ("kill", mutant.kill.is_empty()),
            ("put", mutant.put.is_empty() && !mutant.statement),
        ];
        if let Some((field, _)) = missing.iter().find(|(_, missing)| *missing) {
            return Err(format!("{PATH}: mutant `{}` has no `{field}`", mutant.name));
        }
    }
    Ok(mutants)
}

fn append(field: &mut String, value: &str, between: char) {
    if !field.is_empty() {
        field.push(between);
    }
    field.push_str(value);
}

/// The text of a file with all its mutants applied, each behind its guard.
///
/// # Errors
/// When a mutant's text does not occur exactly once, or two overlap without being the same.
pub(super) fn with_mutants(text: &str, mutants: &[&Mutant]) -> Result<String> {
    let mut places = Vec::new();
    for mutant in mutants {
        let place = mutant
            .place(text)
            .map_err(|e| format!("mutant `{}` in {}: {e}", mutant.name, mutant.file))?;
        places.push((place, *mutant));
    }
    // From the back, so that earlier places do not move; alternatives of one place together.
    places.sort_by_key(|(place, _)| std::cmp::Reverse((place.start, place.end)));
    let mut text = text.to_owned();
    let mut begin = text.len();
    for same in places.chunk_by(|a, b| a.0 == b.0 && a.1.statement == b.1.statement) {
        let place = same[0].0.clone();
        if place.end > begin {
            let name = &same[0].1.name;
            return Err(format!("mutant `{name}` overlaps with another"));
        }
        begin = place.start;
        let mut code = text[place.clone()].to_owned();
        for (_, mutant) in same {
            code = mutant.guarded(&code);
        }
        let statement = same[0].1.statement;
        let code = if statement { code } else { format!("({code})") };
        text.replace_range(place, &code);
    }
    Ok(text)
}

impl Mutant {
    /// The range of bytes that it replaces.
    fn place(&self, text: &str) -> Result<std::ops::Range<usize>> {
        let marks = self.find.matches(['«', '»']).count();
        let (before, rest) = self.find.split_once('«').unwrap_or(("", &self.find));
        let (own, after) = rest.split_once('»').unwrap_or((rest, ""));
        if marks != 0 && (marks != 2 || own.contains('«') || after.contains('»')) {
            return Err("the marks are no pair".into());
        }
        let visible =
            |text: &str| -> Vec<char> { text.chars().filter(|c| !c.is_whitespace()).collect() };
        let (before, own, after) = (visible(before), visible(own), visible(after));
        let all = [before.as_slice(), &own, &after].concat();
        let chars: Vec<(usize, char)> =
            (text.char_indices().filter(|(_, c)| !c.is_whitespace())).collect();
        let mut found = chars
            .windows(all.len())
            .enumerate()
            .filter(|(_, window)| window.iter().map(|(_, c)| c).eq(&all));
        let Some((at, _)) = found.next() else {
            return Err("its text is not there any more".into());
        };
        if found.next().is_some() {
            return Err("its text is there more than once".into());
        }
        let (first, last) = (
            chars[at + before.len()],
            chars[at + before.len() + own.len() - 1],
        );
        Ok(first.0..last.0 + last.1.len_utf8())
    }

    /// Its text or else `code`, by the name of the active mutant.
    fn guarded(&self, code: &str) -> String {
        let (name, put) = (&self.name, &self.put);
        let guard = |not: &str| {
            let active = format!("{not}crate::mutant(\"{name}\")");
            match self.kernel {
                true => format!("comptime!({active})"),
                false => active,
            }
        };
        if put.is_empty() {
            return format!("if {} {{ {code} }}", guard("!"));
        }
        format!("if {} {{ {put} }} else {{ {code} }}", guard(""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "
# a comment
mutant off-by-one
breaks A sentence.
file   a.rs
in     kernel
find   if a «< b» { c
put    <= b
kill   cpu one two
kill   tests three
mutant none
breaks Another.
file   a.rs
swap   statement
find   sync();
on     cuda
kill   kernels all
lives  Nothing depends on it.
";

    #[test]
    fn a_table_is_read_field_by_field() {
        let mutants = parse(TABLE).unwrap();
        assert_eq!(mutants.len(), 2);
        assert_eq!(
            mutants[0].kill[0],
            ("cpu".into(), vec!["one".into(), "two".into()])
        );
        assert!(mutants[0].kernel && !mutants[0].statement && !mutants[0].cuda);
        assert!(mutants[1].statement && mutants[1].cuda && !mutants[1].kernel);
        assert_eq!(mutants[1].lives, "Nothing depends on it.");
        for (from, to) in [
            ("in     kernel", "in     shader"),
            ("kill   cpu one two", "kill   cpu"),
            ("mutant none", "mutant off-by-one"),
            ("put    <= b", "put"),
        ] {
            assert!(parse(&TABLE.replace(from, to)).is_err(), "{to}");
        }
    }

    #[test]
    fn a_mutant_stands_beside_the_text_it_replaces() {
        let mutants = parse(TABLE).unwrap();
        let all: Vec<_> = mutants.iter().collect();
        let text = "if a\n    < b {\n c }\nsync();\n";
        assert_eq!(
            with_mutants(text, &all).unwrap(),
            "if a\n    (if comptime!(crate::mutant(\"off-by-one\")) { <= b } else { < b }) {\n c }\n\
             if !crate::mutant(\"none\") { sync(); }\n"
        );
        for broken in [
            "if a < c { c } sync();",
            "if a<b { c } if a<b { c } sync();",
        ] {
            assert!(with_mutants(broken, &all).is_err(), "{broken}");
        }
    }

    #[test]
    fn two_mutants_of_one_place_are_alternatives() {
        let one = Mutant {
            name: "one".into(),
            find: "x «+ y»".into(),
            put: "- y".into(),
            ..Mutant::default()
        };
        let two = Mutant {
            name: "two".into(),
            put: "* y".into(),
            ..one.clone()
        };
        let text = with_mutants("x + y", &[&one, &two]).unwrap();
        assert_eq!(
            text,
            "x (if crate::mutant(\"two\") { * y } else { if crate::mutant(\"one\") { - y } else { + y } })"
        );
        let third = Mutant {
            name: "three".into(),
            find: "«x +» y".into(),
            ..one.clone()
        };
        assert!(with_mutants("x + y", &[&one, &third]).is_err());
    }
}
