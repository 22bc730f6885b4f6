//! Token files: what is written is read, and nothing else is.

use crate::support::{Dir, below, documents, rng, write};
use flash_dma_models::data::{DataError, TokenFile, TokenFileWriter};
use std::fs;

/// Everything that a file says, against the documents that were written.
fn check(file: &TokenFile, documents: &[Vec<u32>], vocabulary: usize) {
    let all = documents.concat();
    assert_eq!(file.tokens(), all.len());
    assert_eq!(file.documents(), documents.len());
    assert_eq!(file.vocabulary(), vocabulary);
    let mut start = 0;
    for (number, document) in documents.iter().enumerate() {
        let range = start..start + document.len();
        assert_eq!(file.document(number), range);
        for token in range {
            assert_eq!(file.document_of(token), number);
        }
        start += document.len();
    }
    let rng = &mut rng(9);
    for _ in 0..50 {
        let start = below(rng, all.len());
        let end = start + below(rng, all.len() - start + 1);
        let mut ids = vec![17];
        file.read(start..end, &mut ids).unwrap();
        assert_eq!(ids[0], 17);
        assert_eq!(ids[1..], all[start..end]);
    }
    file.verify().unwrap();
}

#[test]
fn what_is_written_is_read() {
    let dir = Dir::new();
    for (seed, vocabulary) in [
        (1, 2),
        (2, 256),
        (3, 1 << 16),
        (4, (1 << 16) + 1),
        (5, 1 << 20),
    ] {
        let documents = documents(seed, 1 + 40 * seed as usize, 90, vocabulary);
        let path = dir.path("tokens");
        let written = write(&path, &documents, vocabulary);
        check(&written, &documents, vocabulary);
        let opened = TokenFile::open(&path).unwrap();
        assert_eq!(opened.fingerprint(), written.fingerprint());
        check(&opened, &documents, vocabulary);
    }
    assert_eq!(dir.names(), ["tokens"]);
}

#[test]
fn the_bytes_are_those_of_the_documented_format() {
    let dir = Dir::new();
    let documents = [vec![1, 0xfffe], vec![3]];
    let path = dir.path("tokens");
    let file = write(&path, &documents, 0xffff);

    let values = [1, 0xfffe, 1 << 32, 3, 1 << 32];
    let mut fingerprint: u64 = 0xcbf2_9ce4_8422_2325;
    for value in values {
        fingerprint = ((u128::from(fingerprint ^ value) * 0x100_0000_01b3) % (1 << 64)) as u64;
    }
    assert_eq!(file.fingerprint(), fingerprint);

    let mut expected = b"FDMATOKS\x01\0\0\0\x02\0\0\0".to_vec();
    for number in [0xffff, 3, 2, fingerprint, 0, 0] {
        expected.extend(number.to_le_bytes());
    }
    expected.extend([1, 0, 0xfe, 0xff, 3, 0, 0, 0]);
    for end in [2u64, 3] {
        expected.extend(end.to_le_bytes());
    }
    assert_eq!(fs::read(&path).unwrap(), expected);

    // Four bytes an id, and no padding.
    write(&path, &[vec![0x1_0000, 2]], 0x1_0001);
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes[12..16], [4, 0, 0, 0]);
    assert_eq!(bytes[64..72], [0, 0, 1, 0, 2, 0, 0, 0]);
    assert_eq!(bytes[72..], 2u64.to_le_bytes());
}

#[test]
fn a_document_without_tokens_is_left_out_and_a_file_may_be_empty() {
    let dir = Dir::new();
    let documents = [vec![], vec![5], vec![], vec![6, 7], vec![]];
    let file = write(&dir.path("tokens"), &documents, 10);
    check(&file, &[vec![5], vec![6, 7]], 10);
    let empty = write(&dir.path("empty"), &[], 10);
    assert_eq!((empty.tokens(), empty.documents()), (0, 0));
    empty.verify().unwrap();
}

#[test]
fn every_shorter_or_longer_file_is_refused() {
    let dir = Dir::new();
    let path = dir.path("tokens");
    write(&path, &documents(1, 4, 5, 100), 100);
    let bytes = fs::read(&path).unwrap();
    for len in 0..bytes.len() {
        let error = TokenFile::open(dir.file("short", &bytes[..len])).unwrap_err();
        match error {
            DataError::Magic { .. } => assert!(len < 64),
            DataError::Size {
                bytes: found,
                expected,
                ..
            } => assert_eq!((found, expected), (len as u64, bytes.len() as u64)),
            other => panic!("{len} bytes: {other}"),
        }
    }
    let longer = [&bytes[..], &[0]].concat();
    let error = TokenFile::open(dir.file("long", longer)).unwrap_err();
    assert!(matches!(error, DataError::Size { .. }), "{error}");
    assert!(matches!(
        TokenFile::open(dir.path("none")),
        Err(DataError::Io { .. })
    ));
    let folder = TokenFile::open(dir.path("")).unwrap_err();
    assert!(matches!(folder, DataError::Magic { .. }), "{folder}");
}

/// The error of a file with other bytes at a place.
fn with(dir: &Dir, at: usize, new: &[u8]) -> DataError {
    let mut bytes = fs::read(dir.path("tokens")).unwrap();
    bytes[at..at + new.len()].copy_from_slice(new);
    let path = dir.file("changed", bytes);
    TokenFile::open(path)
        .and_then(|file| file.verify())
        .unwrap_err()
}

#[test]
fn every_part_of_a_file_is_checked() {
    let dir = Dir::new();
    // 64 bytes of header, 6 of ids and 2 of padding, the ends 2 and 3.
    write(&dir.path("tokens"), &[vec![1, 2], vec![3]], 100);
    let header = |at: usize, new: &[u8], what: &str| {
        let error = with(&dir, at, new);
        assert!(
            matches!(error, DataError::Header { what: found, .. } if found == what),
            "{error}"
        );
    };
    assert!(matches!(with(&dir, 0, b"f"), DataError::Magic { .. }));
    let version = with(&dir, 8, &[2]);
    assert!(matches!(version, DataError::Version { version: 2, .. }));
    assert!(version.to_string().ends_with("this is version 1"));
    header(12, &[3], "the width of an id");
    header(12, &[0], "the width of an id");
    header(16, &65_537u64.to_le_bytes(), "the vocabulary");
    header(48, &[1], "the bytes that are zeros");
    for tokens in [u64::MAX, u64::MAX / 2, u64::MAX / 4, 1 << 62] {
        header(24, &tokens.to_le_bytes(), "the sizes");
    }
    header(32, &u64::MAX.to_le_bytes(), "the sizes");
    // Four bytes an id are another size.
    assert!(matches!(with(&dir, 12, &[4]), DataError::Size { .. }));
    // The same size by other numbers: no document, and eight more bytes of ids.
    let numbers = [11u64.to_le_bytes(), 0u64.to_le_bytes()].concat();
    header(24, &numbers, "tokens without a document");
    let end = |at: usize, new: u64, number: usize| {
        let error = with(&dir, at, &new.to_le_bytes());
        assert!(
            matches!(error, DataError::DocumentEnd { document, .. } if document == number),
            "{error}"
        );
    };
    end(72, 0, 0);
    end(72, 3, 1);
    end(72, 4, 0);
    end(72, u64::MAX, 0);
    end(80, 2, 1);
    end(80, 4, 1);
    let beyond = with(&dir, 66, &[100]);
    assert!(
        matches!(
            beyond,
            DataError::Token {
                position: 1,
                id: 100,
                vocabulary: 100
            }
        ),
        "{beyond}"
    );
    // An id, an end, and the fingerprint itself.
    for (at, new) in [(64, 9), (72, 1), (40, 0x5a)] {
        let error = with(&dir, at, &[new]);
        assert!(matches!(error, DataError::Fingerprint { .. }), "{error}");
    }
}

#[test]
fn a_failed_read_adds_nothing() {
    let dir = Dir::new();
    write(&dir.path("tokens"), &[vec![1, 2, 3]], 100);
    let mut bytes = fs::read(dir.path("tokens")).unwrap();
    bytes[68] = 200;
    let file = TokenFile::open(dir.file("changed", bytes)).unwrap();
    let mut ids = vec![7];
    assert!(file.read(0..3, &mut ids).is_err());
    assert_eq!(ids, [7]);
    file.read(0..2, &mut ids).unwrap();
    assert_eq!(ids, [7, 1, 2]);
}

#[test]
fn unfinished_writing_leaves_what_was_there() {
    let dir = Dir::new();
    let path = dir.path("tokens");
    let before = write(&path, &[vec![1, 2, 3]], 10);
    let begin = || {
        let mut writer = TokenFileWriter::create(&path, 10).unwrap();
        // More than any buffer, so that most of it is on the disk.
        writer.push(&vec![4; 1 << 17]).unwrap();
        writer
    };
    let writer = begin();
    assert_eq!(dir.names().len(), 3);
    drop(writer);
    assert_eq!(dir.names(), ["tokens"]);

    // As a killed process leaves it.
    std::mem::forget(begin());
    let left: Vec<String> = dir.names();
    assert_eq!(left.len(), 3);
    for name in left.iter().filter(|name| *name != "tokens") {
        assert!(name.starts_with(".tokens.") && name.ends_with(".partial"));
        let error = TokenFile::open(dir.path(name)).unwrap_err();
        assert!(matches!(error, DataError::Magic { .. }), "{error}");
    }
    let now = TokenFile::open(&path).unwrap();
    assert_eq!(now.fingerprint(), before.fingerprint());
    // And nobody is in the next one's way; an open file stays what it was.
    let next = begin().finish().unwrap();
    assert_eq!((next.tokens(), before.tokens()), (1 << 17, 3));
    before.verify().unwrap();
}

#[test]
fn an_id_beyond_the_vocabulary_is_refused_and_nothing_is_added() {
    let dir = Dir::new();
    let mut writer = TokenFileWriter::create(dir.path("tokens"), 10).unwrap();
    writer.push(&[9]).unwrap();
    let error = writer.push(&[1, 2, 10]).unwrap_err();
    assert_eq!(error.to_string(), "token 2 is 10, of a vocabulary of 10");
    assert_eq!((writer.tokens(), writer.documents()), (1, 1));
    writer.push(&[8, 7]).unwrap();
    check(&writer.finish().unwrap(), &[vec![9], vec![8, 7]], 10);
}

#[test]
fn a_file_is_checked_against_a_model() {
    let dir = Dir::new();
    let file = write(&dir.path("tokens"), &[vec![9]], 10);
    file.check_vocabulary(10).unwrap();
    let error = file.check_vocabulary(9).unwrap_err();
    assert_eq!(error.to_string(), "a vocabulary of 10, where at most 9 fit");
    let missing = TokenFileWriter::create(dir.path("no/such/folder"), 10).unwrap_err();
    assert!(matches!(missing, DataError::Io { .. }), "{missing}");
    let large = TokenFileWriter::create(dir.path("large"), (1 << 32) + 1).unwrap_err();
    assert!(matches!(large, DataError::Vocabulary { .. }), "{large}");
}
