//! A `tokenizer.json`, without network.

use crate::data::support::ids;
use crate::dir::Dir;
use flash_dma_models::data::{DataError, TextFormat, Vocabulary, write_tokens};

/// Byte-level BPE of a few merges, with truncation, padding and a post-processor that adds a token, as in published
/// files.
const TOKENIZER: &str = r#"{
  "version": "1.0",
  "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
  "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
    "pad_id": 0, "pad_type_id": 0, "pad_token": "<|end|>"},
  "added_tokens": [
    {"id": 0, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
      "normalized": false, "special": true},
    {"id": 12, "content": "<|begin|>", "single_word": false, "lstrip": false, "rstrip": false,
      "normalized": false, "special": true}
  ],
  "normalizer": null,
  "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
  "post_processor": {"type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [12], "tokens": ["<|begin|>"]}}},
  "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
  "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
    "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
    "vocab": {"<|end|>": 0, "a": 1, "b": 2, "Ġ": 3, "ab": 4, "Ġab": 5, "Ã": 6, "©": 7, "c": 8, "<|begin|>": 12},
    "merges": [["a", "b"], ["Ġ", "ab"]]}
}"#;

fn vocabulary(dir: &Dir) -> Vocabulary {
    Vocabulary::from_file(dir.file("tokenizer.json", TOKENIZER)).unwrap()
}

#[test]
fn a_text_has_all_its_ids_and_no_others() {
    let dir = Dir::new();
    let vocabulary = vocabulary(&dir);
    // Neither truncated to two, nor padded to nine, nor begun by the post-processor.
    let ids = vocabulary.encode("ab ab cab").unwrap();
    assert_eq!(ids, [4, 5, 3, 8, 4]);
    assert_eq!(vocabulary.decode(&ids).unwrap(), "ab ab cab");
    // There are gaps between the ids.
    assert_eq!(vocabulary.size(), 13);
    assert_eq!(vocabulary.id("<|end|>"), Some(0));
    assert_eq!(vocabulary.id("no token"), None);
    assert!(vocabulary.clone().with_end(13).is_err());
    let own = vocabulary.clone().with_own_begin().unwrap();
    assert_eq!((own.begin(), vocabulary.begin()), (Some(12), None));
    let bytes = Vocabulary::bytes().with_own_begin().unwrap();
    assert_eq!(bytes.begin(), None);
    let framed = vocabulary.with_begin(12).unwrap().with_end(0).unwrap();
    assert_eq!((framed.begin(), framed.end()), (Some(12), Some(0)));
    assert_eq!(framed.encode_document("ab").unwrap(), [12, 4, 0]);
    assert_eq!(framed.decode(&[12, 4, 0, 99]).unwrap(), "ab");
    assert_eq!(framed.encode("b<|end|>b").unwrap(), [2, 0, 2]);
}

#[test]
fn a_stream_shows_what_decoding_at_once_shows() {
    let dir = Dir::new();
    let vocabulary = vocabulary(&dir).with_end(0).unwrap();
    let ids = vocabulary.encode("ab caé ab").unwrap();
    assert_eq!(ids[4..6], [6, 7]);
    let mut stream = vocabulary.stream();
    let shown: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    assert_eq!(shown, ["ab", " ", "c", "a", "", "é", " ab"]);
    assert_eq!(stream.push(0).unwrap(), "");
}

#[test]
fn what_is_left_of_a_stream_is_shown_at_its_end() {
    let dir = Dir::new();
    let vocabulary = vocabulary(&dir).with_end(0).unwrap();
    let mut stream = vocabulary.stream();
    // A space before a word, a letter of two tokens, its halves swapped, and its first half alone.
    let ids = [5, 4, 6, 7, 3, 7, 6, 1, 6, 0];
    let mut halves = 0;
    for end in 0..=ids.len() {
        let ids = &ids[..end];
        let shown: Result<String, _> = ids.iter().map(|&id| stream.push(id)).collect();
        let (shown, rest) = (shown.unwrap(), stream.finish().unwrap());
        halves += usize::from(!rest.is_empty());
        assert_eq!(shown + &rest, vocabulary.decode(ids).unwrap(), "{ids:?}");
        assert_eq!(stream.finish().unwrap(), "");
    }
    assert!(halves >= 4, "{halves}");
}

#[test]
fn documents_become_ids() {
    let dir = Dir::new();
    let vocabulary = vocabulary(&dir).with_end(0).unwrap();
    let input = dir.file("input", "ab ab\n\nz\n\ncab");
    let format = TextFormat::Separated(String::new());
    let written = write_tokens(dir.path("tokens"), [input], &format, &vocabulary).unwrap();
    // No token of this vocabulary spells a `z`, so the second document has none.
    assert_eq!(ids(&written.file), [4, 5, 0, 8, 4, 0]);
    assert_eq!((written.read, written.file.documents()), (3, 2));
    assert_eq!(written.file.vocabulary(), 13);
}

#[test]
fn what_is_no_tokenizer_is_refused() {
    let dir = Dir::new();
    for contents in ["", "{}", "[1]", &TOKENIZER[..400], "\u{fffd}"] {
        let error = Vocabulary::from_file(dir.file("tokenizer.json", contents)).unwrap_err();
        assert_error!(error, DataError::Tokenizer { .. });
    }
    let error = Vocabulary::from_file(dir.path("missing")).unwrap_err();
    assert_error!(error, DataError::Io { .. });
}
