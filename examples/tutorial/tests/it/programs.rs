//! The programs, as `cargo run -p tutorial -- NAME` runs them.

use crate::testing::{Program, Scratch};
use std::path::Path;

const TUTORIAL: Program = Program(env!("CARGO_BIN_EXE_tutorial"));

/// Output of a program.
fn printed(program: &str, arguments: &[&str]) -> String {
    TUTORIAL.printed(program, arguments)
}

/// The lines that begin with `start`.
fn lines<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
    let lines = text.lines();
    lines.filter(|line| line.starts_with(start)).collect()
}

/// The one line that begins with `start`.
fn line<'a>(text: &'a str, start: &str) -> &'a str {
    let [line] = lines(text, start)[..] else {
        panic!("not one line with {start:?}: {text}");
    };
    line
}

#[test]
fn every_program_is_listed_and_run_by_a_test() {
    let list = printed("", &[]);
    let programs = lines(&list, "  ");
    assert_eq!(programs.len(), 10, "{list}");
    for line in programs {
        let program = line.split_whitespace().next().expect("a name");
        let call = format!("printed(\"{program}\", ");
        assert!(include_str!("programs.rs").contains(&call), "{program}");
    }
}

#[test]
fn what_is_not_known_is_refused_in_one_line() {
    for line in [
        "arm: no program `arm`; without a name they are listed",
        "arms --steps many: `--steps` is followed by a number",
        "arms --json: `--json` is followed by a file",
        "arms 9 ten: behind the options are seeds, which are numbers",
        "demo --stepz 3: unknown option `--stepz`",
        "demo --out: `--out` needs a value",
        "demo --steps many: `--steps many`: invalid digit found in string",
    ] {
        let (call, message) = line.split_once(": ").expect("a call and a message");
        let output = TUTORIAL.call(call, &[]);
        assert_eq!(output.status.code(), Some(1));
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(error, format!("tutorial: {message}\n"));
    }
}

#[test]
fn the_intervals_of_sixteen_keys_are_printed() {
    let text = printed("intervals", &[]);
    let keys = lines(&text, "key ");
    assert_eq!(keys.len(), 16, "{text}");
    assert_eq!(keys[0], "key  0 is attended at the positions 0..8");
    assert_eq!(keys[10], "key 10 is attended at the positions 10..10");
}

#[test]
fn masks_leave_blocks_empty() {
    let text = printed("masks", &[]);
    // 16 tiles of queries and 4 blocks of keys; documents end at 100 and 200.
    assert_eq!(text, "39 of 64 blocks are empty\n");
}

#[test]
fn packed_documents_are_as_if_alone() {
    let text = printed("packed", &[]);
    let expected = "packed: the last document gets the rows that it gets alone\n\
                    padded: rows of padding are 0\n\
                    layer: [2, 20, 32]\n";
    assert_eq!(text, expected);
}

#[test]
fn parts_are_merged_and_rows_looked_into() {
    let text = printed("parts", &[]);
    let most = line(&text, "the last token attends most to key ");
    assert!(most.contains(" of the first head, with 0."), "{most}");
    let merged = "parts: merged, they are attention to all keys\n";
    assert!(text.ends_with(merged), "{text}");
}

#[test]
fn documents_padding_and_masks_do_what_the_book_says() {
    let text = printed("documents", &[]);
    for line in [
        "packed layer: three documents, the rows that each gets alone",
        "packed targets: rows [39, 64, 99] have no gradient",
        "padded: the gradient of the padding is 0",
        "mask of keys: the rows before the first hidden key are those without a mask",
        "mask of pairs: tokens behind the prefix move its first row by 0",
        "plan: 2020 pairs",
    ] {
        let mut printed = text.lines();
        assert!(printed.any(|printed| printed == line), "{line}: {text}");
    }
    let alive = line(&text, "packed tensors: ");
    assert!(alive.ends_with("keys at a position, 12 at most"), "{alive}");
}

#[test]
fn generation_goes_on_where_it_was_saved() {
    let text = printed("generation", &[]);
    let greedy = line(&text, "greedy: [");
    assert_eq!(greedy.matches(',').count(), 11, "{greedy}");
    // 2 layers of 2 heads: 16 slots of 2 * 8 * 4 + 8 bytes; 4 bytes per sequence.
    let bytes = 2 * (2 * 16 * (2 * 8 * 4 + 8) + 4);
    let caches = format!("caches: {bytes} bytes after 100 tokens");
    assert_eq!(lines(&text, "caches: "), [caches]);
    assert_eq!(lines(&text, "beams: [").len(), 1, "{text}");
    assert_eq!(lines(&text, "restored: "), ["restored: the same text"]);
}

/// The number after a text, in a line.
fn number(line: &str, before: &str) -> f64 {
    let (_, rest) = line.split_once(before).expect("the line has a number");
    let word = rest.split_whitespace().next().expect("a number");
    word.parse().expect("a number")
}

#[test]
fn a_model_changes_its_attention_and_keeps_its_weights() {
    let text = printed("your-model", &[]);
    for start in ["drop-in: ", "a window of all keys: "] {
        let line = line(&text, start);
        assert!(number(line, "differ by ") < 1e-4, "{line}");
    }
    let first = lines(&text, "32 keys: ")[0];
    let last = lines(&text, "8 keys: ")[0];
    let [begun, ended] = [number(first, "loss "), number(last, "to ")];
    assert!(begun > 2.0 && ended < begun / 4.0, "{text}");

    // Per block 2 norms of 2, 6 biases, and the scores; the last norm, and the bias of the head.
    let undecayed = lines(&text, "not decayed: ");
    assert_eq!(undecayed.len(), 2 * (4 + 6 + 1) + 3, "{text}");
    for name in ["score_proj", "q_proj.bias", "norm.gamma", "head.bias"] {
        assert!(undecayed.iter().any(|line| line.ends_with(name)), "{text}");
    }
    let weights = undecayed.iter().filter(|line| line.ends_with("weight"));
    assert_eq!(weights.count(), 0, "{text}");
    // Two factors of four projections and of the scores, in two blocks.
    assert_eq!(lines(&text, "adapters: "), ["adapters: 20 matrices train"]);
    let decoder = "decoder: 3 steps, each over 8 to 8 tokens";
    assert_eq!(lines(&text, "decoder: "), [decoder]);
}

/// The pictures in the book equal those that the program draws.
#[test]
fn the_book_has_the_pictures_of_the_selectors() {
    let scratch = Scratch::new();
    let text = printed("selectors", &[&scratch.text("")]);
    assert_eq!(text.lines().count(), 7, "{text}");
    let book = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../book/src/img");
    for line in text.lines() {
        assert!(line.contains("a key lives for"), "{line}");
        let name = line.split_whitespace().next().expect("a name");
        let file = format!("selection-{name}.svg");
        let drawn = std::fs::read_to_string(scratch.path(&file)).expect("a picture per line");
        let published = std::fs::read_to_string(book.join(&file)).expect("the book has it");
        let same = drawn == published;
        assert!(same, "book/src/img/{file} is not what the program draws");
    }
}

#[test]
fn the_tutorial_trains_every_arm() {
    let scratch = Scratch::new();
    let path = scratch.text("rows.jsonl");
    let text = printed("arms", &["--steps", "1", "--json", &path, "5"]);
    let (_, table) = text.split_once("\nscores ").expect("a table");
    let rows = table.lines().skip(1).filter(|row| !row.is_empty());
    let rows: Vec<&str> = rows.collect();
    assert_eq!(rows.len(), 6, "{text}");
    for (row, arm) in rows.iter().zip(["dense", "linear, runners-up"]) {
        assert!(row.starts_with(arm), "{row}");
    }
    // With all keys every fact is kept.
    let words: Vec<&str> = rows[0].split_whitespace().collect();
    assert_eq!(&words[1..6], ["128", "0", "5", "100.0", "%"], "{text}");
    assert_eq!(lines(&text, "step    0  loss ").len(), 6, "{text}");
    let written = std::fs::read_to_string(&path).expect("`--json` writes a file");
    let written: Vec<&str> = written.lines().collect();
    assert_eq!(written.len(), rows.len(), "{written:?}");
    let dense = "{\"arm\": \"dense\", \"window\": 128, \"runners_up\": 0, \"seed\": 5, \"steps\": 1, \
                 \"kept\": 1.000, \"right\": 0.";
    assert!(written[0].starts_with(dense), "{}", written[0]);
    for (line, row) in written.iter().zip(&rows) {
        let whole = line.ends_with('}') && line.contains("\"seconds\": ");
        assert!(whole, "{line}");
        let arm = line.split('"').nth(3).expect("a name");
        assert!(row.starts_with(arm), "{line}: {row}");
    }
}

#[test]
fn the_demo_shows_and_draws_what_is_kept() {
    let scratch = Scratch::new();
    let folder = scratch.text("");
    let options = ["--steps", "1", "--out", &folder, "--svg", &folder];
    let text = printed("demo", &options);
    line(&text, "16, by learned scores");
    line(&text, "16, at random");
    assert!(line(&text, "all 128").contains(" 100.0 % "), "{text}");
    for picture in ["before.png", "after.png"] {
        let bytes = std::fs::read(scratch.path(picture)).expect("a picture");
        assert!(bytes.starts_with(b"\x89PNG"), "{picture}");
    }
    for picture in ["demo-before.svg", "demo-after.svg"] {
        let text = std::fs::read_to_string(scratch.path(picture)).expect("a picture");
        assert!(text.starts_with("<svg"), "{picture}");
    }
}
