use std::collections::HashSet;

use super::*;

fn corpus(len: usize) -> Corpus {
    let bytes = (0..len).map(|i| (i % 251) as u8).collect();
    Corpus {
        source: "corpus.txt".into(),
        files: 1,
        bytes,
    }
}

fn scratch(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("train-text-data-{name}-{}", std::process::id()));
    fs::remove_dir_all(&dir).ok();
    fs::create_dir_all(&dir).unwrap();
    dir
}

#[test]
fn entropy_of_known_distributions() {
    assert_eq!(unigram_entropy(b"aaaa"), 0.0);
    assert!((unigram_entropy(b"abab") - 2f64.ln()).abs() < 1e-12);
    let all: Vec<u8> = (0..=255).collect();
    assert!((unigram_entropy(&all) - 256f64.ln()).abs() < 1e-12);
    // Probabilities 1/2, 1/4, 1/4: one and a half bits.
    assert!((unigram_entropy(b"aabc") - 1.5 * 2f64.ln()).abs() < 1e-12);
}

#[test]
fn training_and_validation_partition_the_corpus() {
    for len in [330, 1_000, 40_000, 1_000_003] {
        let text = Text::split(corpus(len), 32).unwrap();
        let mut owner = vec![0u8; len];
        for range in text.train.iter().chain(&text.valid) {
            owner[range.clone()].iter_mut().for_each(|o| *o += 1);
        }
        assert!(owner.iter().all(|&o| o == 1), "{len}");
        let share = text.valid_bytes() as f64 / len as f64;
        assert!((0.08..=0.1).contains(&share), "{len}: {share}");
        assert_eq!(text.train_bytes() + text.valid_bytes(), len);
    }
}

#[test]
fn no_training_window_touches_validation_text() {
    let text = Text::split(corpus(40_000), 32).unwrap();
    let held_out: HashSet<usize> = text.valid.iter().flat_map(Clone::clone).collect();
    assert_eq!(text.valid.len(), 16);
    for stream in 0..5_000 {
        let start = text.random_train_start(&mut Rng::new(1, stream));
        assert!(
            (start..start + 33).all(|byte| !held_out.contains(&byte)),
            "{start}"
        );
    }
    let windows = text.valid_starts(usize::MAX);
    for start in &windows {
        assert!(
            (*start..start + 33).all(|byte| held_out.contains(&byte)),
            "{start}"
        );
    }
    assert!(windows.windows(2).all(|pair| pair[1] >= pair[0] + 32));
}

#[test]
fn validation_windows_are_as_many_as_asked_for_and_spread() {
    let text = Text::split(corpus(40_000), 32).unwrap();
    let all = text.valid_starts(usize::MAX);
    let some = text.valid_starts(16);
    assert_eq!(some.len(), 16);
    assert!(some.iter().all(|start| all.contains(start)));
    assert!(
        some[15] > text.valid[14].start,
        "the last one lies near the end"
    );
}

#[test]
fn the_least_corpus_gives_one_validation_window_and_one_byte_less_is_refused() {
    let text = Text::split(corpus(330), 32).unwrap();
    assert_eq!(text.valid_starts(100).len(), 1);
    let error = Text::split(corpus(329), 32).unwrap_err().to_string();
    assert_eq!(
        error,
        "corpus.txt: 329 bytes are too few for --seq 32: at least 330 are needed"
    );
}

#[test]
fn a_directory_is_read_in_the_order_of_its_paths_without_what_is_no_text() {
    let dir = scratch("order");
    fs::create_dir_all(dir.join("a")).unwrap();
    fs::create_dir_all(dir.join("target")).unwrap();
    fs::write(dir.join("b.rs"), "two").unwrap();
    fs::write(dir.join("a").join("z.rs"), "one").unwrap();
    fs::write(dir.join("c.bin"), [0xff, 0xfe]).unwrap();
    fs::write(dir.join("d.rs"), "").unwrap();
    fs::write(dir.join(".hidden.rs"), "no").unwrap();
    fs::write(dir.join("target").join("x.rs"), "no").unwrap();
    let corpus = Corpus::read(&dir).unwrap();
    assert_eq!(corpus.bytes, b"one\ntwo");
    assert_eq!(corpus.files, 2);
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn missing_and_empty_sources_are_errors_that_name_them() {
    let dir = scratch("bad");
    let missing = Corpus::read(&dir.join("none.txt")).unwrap_err();
    assert!(matches!(missing, Error::Io { .. }));
    assert!(missing.to_string().contains("none.txt"));
    let empty = dir.join("empty.txt");
    fs::write(&empty, "").unwrap();
    assert!(matches!(Corpus::read(&empty).unwrap_err(), Error::EmptyCorpus(path) if path == empty));
    fs::remove_file(&empty).unwrap();
    assert!(matches!(
        Corpus::read(&dir).unwrap_err(),
        Error::EmptyCorpus(_)
    ));
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn the_default_corpus_is_this_repository() {
    let corpus = Corpus::own_repository().unwrap();
    assert!(
        corpus
            .source
            .join("examples/train-text/Cargo.toml")
            .is_file()
    );
    assert!(corpus.files >= 10);
    let this_file = include_bytes!("data_tests.rs");
    assert!(
        corpus
            .bytes
            .windows(this_file.len())
            .any(|window| window == this_file)
    );
}
