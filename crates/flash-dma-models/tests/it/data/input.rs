//! Plain text and JSONL to token files.

use crate::data::support::{ids, names};
use crate::dir::Dir;
use flash_dma_models::data::{
    DataError, LineFault, TextFormat, TokenFile, Vocabulary, write_tokens,
};
use std::fs;
use std::path::Path;

/// The documents of a file of bytes, as text.
fn texts(file: &TokenFile) -> Vec<String> {
    let text = |document| {
        let mut ids = Vec::new();
        file.read(file.document(document), &mut ids).unwrap();
        Vocabulary::bytes().decode(&ids).unwrap()
    };
    (0..file.documents()).map(text).collect()
}

/// Documents of an input, and their number including empty ones.
fn read(contents: impl AsRef<[u8]>, format: &TextFormat) -> (Vec<String>, usize) {
    let dir = Dir::new();
    let input = dir.file("input", contents);
    let bytes = Vocabulary::bytes();
    let written = write_tokens(dir.path("tokens"), [input], format, &bytes).unwrap();
    (texts(&written.file), written.read)
}

fn jsonl() -> TextFormat {
    let field = "text".into();
    TextFormat::Jsonl { field }
}

#[test]
fn a_file_is_one_document() {
    let text = "two lines,\n\nand ünïcode\n";
    assert_eq!(read(text, &TextFormat::File), (vec![text.to_owned()], 1));
    assert_eq!(read("", &TextFormat::File), (vec![], 1));
}

#[test]
fn lines_that_separate_are_not_part_of_documents() {
    let blank = TextFormat::Separated(String::new());
    for (text, expected) in [
        ("a\nb\n\nc\n", &["a\nb", "c"][..]),
        ("a\nb\n\nc", &["a\nb", "c"]),
        ("\n\n\na\n\n\n\nb\n\n", &["a", "b"]),
        ("a\r\nb\r\n\r\nc\r\n", &["a\r\nb", "c"]),
        (" \n\nb", &[" ", "b"]),
        ("", &[]),
        ("\n\n", &[]),
    ] {
        assert_eq!(read(text, &blank).0, expected, "{text:?}");
    }
    let marked = TextFormat::Separated("<|end|>".into());
    let text = "a\n\nb\n<|end|>\n<|end|>\nc <|end|>\n <|end|>\n<|end|>";
    assert_eq!(read(text, &marked).0, ["a\n\nb", "c <|end|>\n <|end|>"]);
}

#[test]
fn a_line_of_jsonl_is_a_document() {
    let lines = concat!(
        "{\"id\": 7, \"text\": \"one\", \"meta\": {\"text\": \"not this\", \"n\": [1, {}]}}\n",
        "\n  \r\n",
        "{\"text\":\"a \\\"quoted\\\" line\\nand \\u00fc \\ud83d\\ude00\"}\r\n",
        "{\"text\": \"\"}\n",
        "{\"te\\u0078t\": \"an escaped name, no line end\"}",
    );
    let (texts, read) = read(lines, &jsonl());
    let [first, second] = ["one", "a \"quoted\" line\nand ü 😀"];
    assert_eq!(texts, [first, second, "an escaped name, no line end"]);
    assert_eq!(read, 4);
}

#[test]
fn inputs_are_joined_in_their_order() {
    let dir = Dir::new();
    let inputs = [("a", "1\n\n2"), ("b", ""), ("c", "3")];
    let inputs = inputs.map(|(name, contents)| dir.file(name, contents));
    let framed = Vocabulary::bytes().with_begin(1).unwrap();
    let framed = framed.with_end(0).unwrap();
    let format = TextFormat::Separated(String::new());
    let written = write_tokens(dir.path("tokens"), &inputs, &format, &framed).unwrap();
    assert_eq!(ids(&written.file), [1, 49, 0, 1, 50, 0, 1, 51, 0]);
    assert_eq!((written.read, written.bytes), (3, 3));
}

/// Error of an input. The previous output must be unchanged, and no other file left.
fn refused(contents: impl AsRef<[u8]>, format: &TextFormat) -> (usize, LineFault) {
    let dir = Dir::new();
    let out = dir.file("tokens", "before");
    let input = dir.file("input", contents);
    let error = write_tokens(&out, [&input], format, &Vocabulary::bytes()).unwrap_err();
    assert_eq!(fs::read(&out).unwrap(), b"before");
    assert_eq!(names(&dir), ["input", "tokens"]);
    let text = error.to_string();
    match error {
        DataError::Line { path, line, fault } => {
            assert_eq!(path, input);
            let place = format!("{}, line {line}: ", path.display());
            assert!(text.starts_with(&place), "{text}");
            (line, fault)
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_bad_line_is_named_by_its_number() {
    let good = "{\"text\": \"x\"}\n\n";
    for bad in [
        "{\"text\": \"x\"",
        "{\"text\": 3}",
        "{\"text\": null}",
        "[\"text\"]",
        "\"text\"",
        "{\"text\": \"x\"} {}",
        "{\"text\": \"\\ud800\"}",
        "plain",
    ] {
        let (line, fault) = refused(format!("{good}{good}{bad}\n{good}"), &jsonl());
        assert_eq!(line, 5, "{bad}");
        assert!(matches!(fault, LineFault::Json(_)), "{bad}: {fault}");
    }
    let (line, fault) = refused(format!("{good}{{\"body\": \"x\"}}"), &jsonl());
    assert_eq!((line, &*fault.to_string()), (3, "no field `text`"));
    let (line, fault) = refused(b"{\"text\": \"x\"}\n{\"text\": \"\xff\"}\n", &jsonl());
    assert!(line == 2 && matches!(fault, LineFault::Utf8));
    let separated = TextFormat::Separated(String::new());
    let (line, fault) = refused(b"a\n\n\nb\nc\xff\n\nd", &separated);
    assert!(line == 4 && matches!(fault, LineFault::Utf8), "{line}");
}

#[test]
fn the_first_fault_counts_on_any_number_of_cores() {
    let mut lines = "{\"text\": \"x\"}\n".repeat(500);
    lines += "{}\n";
    lines += &"nothing\n".repeat(500);
    let (line, fault) = refused(lines, &jsonl());
    assert!(line == 501 && matches!(fault, LineFault::NoField(_)));
}

#[test]
fn an_input_that_is_missing_is_named() {
    let dir = Dir::new();
    let missing = dir.path("missing");
    let out = dir.path("tokens");
    let error = write_tokens(&out, [&missing], &jsonl(), &Vocabulary::bytes()).unwrap_err();
    assert!(matches!(error, DataError::Io { path, .. } if path == missing));
    assert!(names(&dir).is_empty());
}

#[test]
fn the_file_does_not_depend_on_the_number_of_cores() {
    let dir = Dir::new();
    // More than fits in memory at a time.
    let text = |n: usize| format!("{}{n}", "ab ".repeat(n % 97));
    let line = |n| format!("{{\"text\": \"{}\"}}\n", text(n));
    let lines: String = (0..60_000).map(line).collect();
    assert!(lines.len() > 8 << 20);
    let input = dir.file("input", &lines);
    let written = |threads: usize, out: &Path| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        let pool = pool.build().unwrap();
        let write = || write_tokens(out, [&input], &jsonl(), &Vocabulary::bytes()).unwrap();
        pool.install(write)
    };
    let one = written(1, &dir.path("one"));
    let four = written(4, &dir.path("four"));
    assert_eq!((one.read, one.file.documents()), (60_000, 60_000));
    assert_eq!(one.file.fingerprint(), four.file.fingerprint());
    assert_eq!(texts(&one.file)[59_999], text(59_999));
}
