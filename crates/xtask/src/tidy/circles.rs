//! Circles of files: no file of a crate may use what is defined in a file that, by whatever way, uses it. Uses are read
//! from `use` declarations; a path that is written out where it is used is not seen.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Adds a fault for every circle of files within a crate under `crates/`. `sources` are all files with their texts.
pub fn faults(root: &Path, sources: &[(PathBuf, String)], faults: &mut Vec<String>) {
    let mut crates: BTreeMap<String, Modules> = BTreeMap::new();
    for (path, text) in sources {
        let name = path
            .strip_prefix(root)
            .unwrap_or(path)
            .display()
            .to_string();
        let parts: Vec<_> = name.split('/').collect();
        if let ["crates", package, "src", inner @ ..] = parts.as_slice()
            && !inner.contains(&"tests")
            && !inner.contains(&"tests.rs")
        {
            let modules = crates.entry((*package).to_owned()).or_default();
            modules.insert(module_path(inner), name.clone(), text);
        }
    }
    for (package, modules) in &crates {
        let arrows = modules.arrows();
        for circle in circles(&arrows) {
            faults.push(format!("files that use each other: {}", circle.join(", ")));
        }
        for circle in circles(&of_rooms(&arrows)) {
            let rooms = circle.join(", ");
            faults.push(format!(
                "{package}: folders of `src` that use each other: {rooms}"
            ));
        }
    }
}

/// The module path of a file below `src`, without `crate`.
fn module_path(parts: &[&str]) -> Vec<String> {
    let mut path: Vec<_> = parts.iter().map(|part| (*part).to_owned()).collect();
    let file = path.pop().unwrap_or_default();
    match file.trim_end_matches(".rs") {
        "mod" | "lib" | "main" => {}
        stem => path.push(stem.to_owned()),
    }
    path
}

/// The files of one crate by module path.
#[derive(Default)]
struct Modules(BTreeMap<Vec<String>, Module>);

struct Module {
    file: String,
    uses: Vec<Use>,
}

struct Use {
    /// The full path without `crate`.
    path: Vec<String>,
    /// The name by which the module hands it on, if it does.
    handed_on: Option<String>,
}

impl Modules {
    fn insert(&mut self, at: Vec<String>, file: String, text: &str) {
        let uses = uses(text)
            .filter_map(|(handed_on, path)| {
                let path = absolute(&at, &path)?;
                Some(Use { path, handed_on })
            })
            .collect();
        self.0.insert(at, Module { file, uses });
    }

    /// The files that each file uses, itself excepted.
    fn arrows(&self) -> BTreeMap<&str, BTreeSet<&str>> {
        let arrow = |at: &[String], module: &Module, used: &Use| {
            let target = self.definition(&used.path, 0)?;
            // A folder's `mod.rs` that hands on what lies below it does not use it.
            let below = target.starts_with(at) && target != at;
            let file = self.0[&target].file.as_str();
            (!(used.handed_on.is_some() && below) && file != module.file).then_some(file)
        };
        let of = |(at, module): (&Vec<String>, &'_ Module)| {
            let files = module
                .uses
                .iter()
                .filter_map(|used| arrow(at, module, used));
            files.collect::<BTreeSet<_>>()
        };
        let modules = self.0.iter();
        modules
            .map(|(at, module)| (module.file.as_str(), of((at, module))))
            .collect()
    }

    /// The module that defines what a path names: the longest prefix that is a module, or where that one hands the next
    /// name on, the module that it has it from.
    fn definition(&self, path: &[String], depth: usize) -> Option<Vec<String>> {
        let known = (0..=path.len())
            .rev()
            .find(|n| self.0.contains_key(&path[..*n]))?;
        let (at, rest) = path.split_at(known);
        let Some(name) = rest.first().filter(|_| depth < 8) else {
            return Some(at.to_vec());
        };
        let uses = &self.0[at].uses;
        let named = |used: &&Use| used.handed_on.as_ref() == Some(name);
        if let Some(used) = uses.iter().find(named) {
            return self.definition(&used.path, depth + 1);
        }
        Some(at.to_vec())
    }
}

/// The path from the crate's root, if it is one within the crate.
fn absolute(at: &[String], path: &[String]) -> Option<Vec<String>> {
    let ups = path.iter().take_while(|part| *part == "super").count();
    let base = match path.first()?.as_str() {
        "crate" => return Some(path[1..].to_vec()),
        "self" => return Some([at, &path[1..]].concat()),
        "super" => &at[..at.len().checked_sub(ups)?],
        _ => return None,
    };
    Some([base, &path[ups..]].concat())
}

/// The text up to the first module of tests that is written out in it.
fn without_tests(text: &str) -> &str {
    let is_head = |line: &str| line.starts_with("#[cfg(") && line.contains("test");
    let mut at = 0;
    let mut after_head = None;
    for line in text.split_inclusive('\n') {
        if let Some(head) = after_head.filter(|_| line.starts_with("mod ") && line.ends_with("{\n"))
        {
            return &text[..head];
        }
        after_head = is_head(line).then_some(at);
        at += line.len();
    }
    text
}

/// The paths of a file's `use` declarations, tests excepted, and for each that is handed on (`pub`) the name there. A
/// child module's name counts as `self::`.
fn uses(text: &str) -> impl Iterator<Item = (Option<String>, Vec<String>)> {
    let text = without_tests(text);
    let children: BTreeSet<_> = text.lines().filter_map(child).collect();
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(start) = rest.find("use ") {
        let line = rest[..start].rfind('\n').map_or(0, |n| n + 1);
        let before = rest[line..start].trim();
        rest = &rest[start + 4..];
        if !(before.is_empty() || (before.starts_with("pub") && !before.contains("//"))) {
            continue;
        }
        let end = rest.find(';').unwrap_or(rest.len());
        let mut paths = Vec::new();
        expand(&rest[..end].replace('\n', " "), &[], &mut paths);
        for (mut path, name) in paths {
            if path
                .first()
                .is_some_and(|name| children.contains(name.as_str()))
            {
                path.insert(0, "self".to_owned());
            }
            found.push((before.starts_with("pub").then_some(name), path));
        }
        rest = &rest[end..];
    }
    found.into_iter()
}

/// The name in `mod name;`.
fn child(line: &str) -> Option<&str> {
    let (before, name) = line.trim().strip_suffix(';')?.rsplit_once("mod ")?;
    (before.is_empty() || before.starts_with("pub")).then_some(name)
}

/// Adds the paths of a use tree, `a::{b, c::d as e}`, and the names by which they are used.
fn expand(tree: &str, prefix: &[String], paths: &mut Vec<(Vec<String>, String)>) {
    let mut path = prefix.to_vec();
    let mut rest = tree.trim();
    while let Some((part, tail)) = rest
        .split_once("::")
        .filter(|(part, _)| !part.starts_with('{'))
    {
        path.push(part.trim().to_owned());
        rest = tail.trim();
    }
    match rest
        .strip_prefix('{')
        .and_then(|rest| rest.strip_suffix('}'))
    {
        Some(inner) => {
            let (mut depth, mut from) = (0_usize, 0);
            for (at, c) in inner.char_indices().chain([(inner.len(), ',')]) {
                match c {
                    '{' => depth += 1,
                    '}' => depth -= 1,
                    ',' if depth == 0 => {
                        if !inner[from..at].trim().is_empty() {
                            expand(&inner[from..at], &path, paths);
                        }
                        from = at + 1;
                    }
                    _ => {}
                }
            }
        }
        None => {
            let (own, name) = rest.split_once(" as ").unwrap_or((rest, rest));
            if !matches!(own, "self" | "*") {
                path.push(own.to_owned());
            }
            paths.push((path, name.to_owned()));
        }
    }
}

/// The arrows between the folders of a crate's `src`, of which a file there is one.
fn of_rooms<'a>(
    files: &BTreeMap<&'a str, BTreeSet<&'a str>>,
) -> BTreeMap<&'a str, BTreeSet<&'a str>> {
    let room = |file: &'a str| file.split('/').nth(3).unwrap_or(file);
    let mut rooms: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (file, uses) in files {
        let uses = uses
            .iter()
            .map(|used| room(used))
            .filter(|used| *used != room(file));
        rooms.entry(room(file)).or_default().extend(uses);
    }
    rooms
}

/// Groups of two or more files that reach each other.
fn circles<'a>(arrows: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> Vec<Vec<&'a str>> {
    let reach = |from: &'a str| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(file) = next.pop() {
            let news = arrows.get(file).into_iter().flatten();
            next.extend(news.filter(|file| seen.insert(**file)));
        }
        seen
    };
    let reached: BTreeMap<_, _> = arrows.keys().map(|file| (*file, reach(file))).collect();
    let mut found: Vec<Vec<&str>> = Vec::new();
    for (file, reaches) in &reached {
        let circle: Vec<_> = reaches
            .iter()
            .copied()
            .filter(|other| reached.get(other).is_some_and(|back| back.contains(file)))
            .collect();
        if circle.len() > 1 && !found.contains(&circle) {
            found.push(circle);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let file = |(name, text): &(&str, &str)| (PathBuf::from(name), (*text).to_owned());
        let sources: Vec<_> = files.iter().map(file).collect();
        let mut found = Vec::new();
        faults(Path::new(""), &sources, &mut found);
        found
    }

    #[test]
    fn a_circle_is_found_through_what_a_folder_hands_on() {
        let lib = ("crates/a/src/lib.rs", "mod b;\nmod c;\npub use b::B;\n");
        let folder = (
            "crates/a/src/b/mod.rs",
            "mod inner;\npub use inner::{B, D};\n",
        );
        let inner = (
            "crates/a/src/b/inner.rs",
            "use crate::c::{C, more::E as F};\n",
        );
        let back = "use crate::b::{self, B};\n#[cfg(test)]\nmod tests {\n    use crate::d::D;\n}\n";
        let files = [lib, folder, inner, ("crates/a/src/c.rs", back)];
        let of_files = "files that use each other: crates/a/src/b/inner.rs, crates/a/src/c.rs";
        let of_folders = "a: folders of `src` that use each other: b, c.rs";
        assert_eq!(found(&files), [of_files, of_folders]);
    }

    #[test]
    fn renamed_items_and_what_stands_behind_a_file_of_tests_count() {
        let lib = (
            "crates/a/src/lib.rs",
            "#[cfg(test)]\nmod tests;\nmod b;\nmod c;\npub use b::inner::B as D;\n",
        );
        let folder = ("crates/a/src/b/mod.rs", "pub mod inner;\n");
        let inner = ("crates/a/src/b/inner.rs", "use crate::c as other;\n");
        let c = ("crates/a/src/c.rs", "use crate::D;\n");
        let of_files = "files that use each other: crates/a/src/b/inner.rs, crates/a/src/c.rs";
        assert_eq!(found(&[lib, folder, inner, c])[0], of_files);
    }

    #[test]
    fn what_runs_one_way_is_no_circle() {
        let lib = ("crates/a/src/lib.rs", "mod b;\nmod c;\npub use b::B;\n");
        let folder = (
            "crates/a/src/b/mod.rs",
            "mod inner;\npub(crate) use inner::B;\n",
        );
        let inner = (
            "crates/a/src/b/inner.rs",
            "use super::super::c::C;\nuse std::fmt;\n",
        );
        // Tests may use what they like, and one crate knows nothing of another's files.
        let c = (
            "crates/a/src/c.rs",
            "#[cfg(test)]\nmod tests {\n    use crate::b::B;\n}\n",
        );
        let other = ("crates/z/src/c.rs", "use crate::b::B;\n");
        assert!(found(&[lib, folder, inner, c, other]).is_empty());
    }
}
