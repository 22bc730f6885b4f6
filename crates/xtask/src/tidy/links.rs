//! Checks of the links in Markdown files and of the code that the book includes.

use std::path::Path;

/// Faults of a Markdown file: links to missing files, and `{{#include}}`s of missing files or anchors.
pub fn faults(path: &Path, text: &str, name: &str, faults: &mut Vec<String>) {
    let dir = path.parent().unwrap_or(Path::new("."));
    let mut fenced = false;
    for (number, line) in text.lines().enumerate() {
        let mut fault = |what: String| faults.push(format!("{name}:{}: {what}", number + 1));
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        for include in between(line, "{{#include ", "}}") {
            if let Some(what) = include_fault(dir, include.trim()) {
                fault(what);
            }
        }
        if fenced {
            continue;
        }
        let line = without_code_spans(line);
        for target in between(&line, "](", ")") {
            let file = target.split(['#', ' ']).next().unwrap_or_default();
            if file.is_empty() || file.contains("://") || file.starts_with("mailto:") {
                continue;
            }
            if !dir.join(file).exists() {
                fault(format!("link to {file}, which does not exist"));
            }
        }
    }
}

/// Faults of an include of the form `path`, `path:anchor` or `path:first:last`.
fn include_fault(dir: &Path, include: &str) -> Option<String> {
    let (file, anchor) = include.split_once(':').unwrap_or((include, ""));
    let Ok(text) = std::fs::read_to_string(dir.join(file)) else {
        return Some(format!("includes {file}, which does not exist"));
    };
    if anchor.is_empty() || anchor.starts_with(|c: char| c.is_ascii_digit() || c == ':') {
        return None;
    }
    let has = |mark: &str| {
        let mark = format!("{mark}: {anchor}");
        text.lines().any(|line| line.trim_end().ends_with(&mark))
    };
    (!has("ANCHOR") || !has("ANCHOR_END"))
        .then(|| format!("includes {file}, which has no anchor {anchor}"))
}

fn without_code_spans(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

/// Texts between the two marks, for each occurrence.
fn between<'a>(line: &'a str, open: &'a str, close: &'a str) -> impl Iterator<Item = &'a str> {
    line.split(open)
        .skip(1)
        .filter_map(move |rest| rest.split_once(close).map(|(inner, _)| inner))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::write_file;

    #[test]
    fn broken_links_and_includes_are_found() {
        let dir = std::env::temp_dir().join(format!("xtask-links-{}", std::process::id()));
        let code = "// ANCHOR: all\nfn a() {}\n// ANCHOR_END: all\n";
        write_file(&dir.join("code.rs"), code).unwrap();
        let page = dir.join("page.md");
        let check = |text: &str| {
            let mut found = Vec::new();
            faults(&page, text, "page.md", &mut found);
            found
        };

        let good = "[a](code.rs) [b](https://x.y/z) [c](#here) [d](code.rs#L1) `v[i](x)`\n\
                    ```rust\n{{#include code.rs:all}}\n{{#include code.rs:1:2}}\nlet y = f[0](z);\n```\n";
        assert_eq!(check(good), [] as [String; 0]);

        let bad = "ok\n[a](none.rs) ![b](none.png)\n```\n{{#include code.rs:any}}\n{{#include none.rs}}\n```\n";
        assert_eq!(
            check(bad),
            [
                "page.md:2: link to none.rs, which does not exist",
                "page.md:2: link to none.png, which does not exist",
                "page.md:4: includes code.rs, which has no anchor any",
                "page.md:5: includes none.rs, which does not exist",
            ]
        );
        std::fs::remove_dir_all(dir).unwrap();
    }
}
