//! Token files: exactly the written tokens are read back.

use crate::data::support::{below, documents, names, rng, write};
use crate::dir::Dir;
use flash_dma_models::data::{DataError, TokenFile, TokenFileWriter};
use std::fs;

/// Compares everything a file reports with the documents that were written.
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
}

#[test]
fn what_is_written_is_read() {
    let dir = Dir::new();
    for (seed, vocabulary) in (1..).zip([2, 256, 1 << 16, (1 << 16) + 1, 1 << 20]) {
        let documents = documents(seed, 1 + 40 * seed as usize, 90, vocabulary);
        let path = dir.path("tokens");
        let written = write(&path, &documents, vocabulary);
        check(&written, &documents, vocabulary);
        let opened = TokenFile::open(&path, vocabulary).unwrap();
        assert_eq!(opened.fingerprint(), written.fingerprint());
        check(&opened, &documents, vocabulary);
    }
    assert_eq!(names(&dir), ["tokens", "tokens.starts"]);
}

/// The bytes of an index.
fn numbers(numbers: &[u64]) -> Vec<u8> {
    let bytes = numbers.iter().map(|number| number.to_le_bytes());
    bytes.flatten().collect()
}

#[test]
fn the_bytes_are_those_of_the_documented_format() {
    let dir = Dir::new();
    let path = dir.path("tokens");
    write(&path, &[vec![1, 0xfffe], vec![3]], 0x1_0000);
    assert_eq!(fs::read(&path).unwrap(), [1, 0, 0xfe, 0xff, 3, 0]);
    let starts = dir.path("tokens.starts");
    assert_eq!(fs::read(&starts).unwrap(), numbers(&[0, 2, 3]));

    // Four bytes an id.
    write(&path, &[vec![0x1_0000, 2]], 0x1_0001);
    assert_eq!(fs::read(&path).unwrap(), [0, 0, 1, 0, 2, 0, 0, 0]);
    assert_eq!(fs::read(&starts).unwrap(), numbers(&[0, 2]));
}

#[test]
fn a_document_without_tokens_is_left_out_and_a_file_may_be_empty() {
    let dir = Dir::new();
    let documents = [vec![], vec![5], vec![], vec![6, 7], vec![]];
    let file = write(&dir.path("tokens"), &documents, 10);
    check(&file, &[vec![5], vec![6, 7]], 10);
    let empty = write(&dir.path("empty"), &[], 10);
    assert_eq!((empty.tokens(), empty.documents()), (0, 0));
}

#[test]
fn every_shorter_or_longer_file_is_refused() {
    let dir = Dir::new();
    let path = dir.path("tokens");
    write(&path, &documents(1, 4, 5, 100), 100);
    let names = ["tokens", "tokens.starts"];
    let whole = names.map(|name| fs::read(dir.path(name)).unwrap());
    let open = |at: usize, bytes: &[u8]| {
        for (name, bytes) in names.iter().zip(&whole) {
            dir.file(name, bytes);
        }
        dir.file(names[at], bytes);
        TokenFile::open(&path, 100)
    };
    for at in [0, 1] {
        let longer = [&whole[at][..], &[0]].concat();
        for len in (0..=longer.len()).filter(|&len| len != whole[at].len()) {
            match open(at, &longer[..len]).unwrap_err() {
                DataError::Index { .. } => assert!(at == 1 && (len == 0 || len % 8 != 0), "{len}"),
                DataError::Size { bytes, .. } => {
                    let here = [len, whole[0].len()][at];
                    assert_eq!(bytes, here as u64);
                }
                other => panic!("{len} bytes: {other}"),
            }
        }
    }
    open(0, &whole[0]).unwrap();
    fs::remove_file(dir.path("tokens.starts")).unwrap();
    for missing in [&path, &dir.path("none"), &dir.path("")] {
        let error = TokenFile::open(missing, 100).unwrap_err();
        assert_error!(error, DataError::Io { .. });
    }
}

#[test]
fn every_number_of_an_index_is_checked() {
    let dir = Dir::new();
    let path = dir.path("tokens");
    write(&path, &[vec![1, 2], vec![3]], 100);
    let with = |starts: &[u64]| {
        dir.file("tokens.starts", numbers(starts));
        TokenFile::open(&path, 100).map(|_| ())
    };
    with(&[0, 2, 3]).unwrap();
    for middle in [0, 3, 4, u64::MAX] {
        assert_error!(with(&[0, middle, 3]).unwrap_err(), DataError::Index { .. });
    }
    for starts in [&[1, 2, 3][..], &[3], &[0, 2, 3, 3]] {
        assert_error!(with(starts).unwrap_err(), DataError::Index { .. });
    }
    for starts in [&[0][..], &[0, 2], &[0, 2, 4], &[0, u64::MAX], &[0, 1 << 63]] {
        assert_error!(with(starts).unwrap_err(), DataError::Size { bytes: 6, .. });
    }
    // Four bytes an id are another size.
    with(&[0, 2, 3]).unwrap();
    let error = TokenFile::open(&path, 1 << 17).unwrap_err();
    let end = "6 bytes, which are not 3 numbers of 4 bytes";
    assert!(error.to_string().ends_with(end), "{error}");
}

#[test]
fn a_failed_read_adds_nothing() {
    let dir = Dir::new();
    let path = dir.path("tokens");
    write(&path, &[vec![1, 2, 200]], 256);
    let file = TokenFile::open(&path, 200).unwrap();
    let mut ids = vec![7];
    let error = file.read(1..3, &mut ids).unwrap_err();
    assert_eq!(error.to_string(), "token 2 is 200, of a vocabulary of 200");
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
        // More than any buffer, so most of it is on disk.
        writer.push(&vec![4; 1 << 17]).unwrap();
        writer
    };
    let writer = begin();
    assert_eq!(names(&dir).len(), 4);
    drop(writer);
    assert_eq!(names(&dir), ["tokens", "tokens.starts"]);

    // As a killed process leaves it.
    std::mem::forget(begin());
    assert_eq!(names(&dir).len(), 4);
    let now = TokenFile::open(&path, 10).unwrap();
    assert_eq!(now.fingerprint(), before.fingerprint());
    // It does not hinder the next one, and an open file is unchanged.
    let next = begin().finish().unwrap();
    assert_eq!((next.tokens(), before.tokens()), (1 << 17, 3));
    check(&before, &[vec![1, 2, 3]], 10);
    assert_eq!(names(&dir), ["tokens", "tokens.starts"]);
}

#[test]
fn an_id_beyond_the_vocabulary_is_refused_and_nothing_is_added() {
    let dir = Dir::new();
    let mut writer = TokenFileWriter::create(dir.path("tokens"), 10).unwrap();
    writer.push(&[9]).unwrap();
    let error = writer.push(&[1, 2, 10]).unwrap_err();
    assert_eq!(error.to_string(), "token 2 is 10, of a vocabulary of 10");
    writer.push(&[8, 7]).unwrap();
    check(&writer.finish().unwrap(), &[vec![9], vec![8, 7]], 10);
}

#[test]
fn a_file_that_cannot_be_written_is_refused() {
    let dir = Dir::new();
    let missing = TokenFileWriter::create(dir.path("no/such/folder"), 10).unwrap_err();
    assert!(matches!(missing, DataError::Io { .. }), "{missing}");
    let large = TokenFileWriter::create(dir.path("large"), (1 << 32) + 1).unwrap_err();
    assert!(matches!(large, DataError::Vocabulary { .. }), "{large}");
}
