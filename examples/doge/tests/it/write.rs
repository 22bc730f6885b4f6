//! Texts on the terminal, the check of a loss, and the calls that documents show.

use crate::common::{DOGE, letter_of};
use crate::testing::Scratch;
use flash_dma_models::data::Vocabulary;

#[test]
fn the_same_text_is_written_alone_in_a_batch_in_chunks_and_by_speculation() {
    let scratch = Scratch::new();
    let (model, draft) = (scratch.model("model", 1), scratch.model("draft", 2));
    let prompts = ["Once upon a time", "a", "to be or not to be, to be or"];
    let write = |prompts: &[&str], options: &str| {
        let prompts = prompts.iter().flat_map(|prompt| ["--prompt", prompt]);
        let line = format!("write --weights {model} --max-new 40{options}");
        DOGE.printed(&line, &prompts.collect::<Vec<_>>())
    };
    let alone = prompts.map(|prompt| write(&[prompt], ""));
    let long = |text: &String| text.trim_end().chars().count() >= 20;
    assert!(alone.iter().all(long), "{alone:?}");
    assert!(alone[0] != alone[1] && alone[1] != alone[2], "{alone:?}");
    for (prompt, alone) in prompts.iter().zip(&alone) {
        assert_eq!(&write(&[prompt], " --chunk 5"), alone);
        assert_eq!(&write(&[prompt], " --lookup --ahead 3"), alone);
        assert_eq!(&write(&[prompt], &format!(" --draft {draft}")), alone);
        // The model itself guesses right.
        let line = format!("write --weights {model} --draft {model} --prompt");
        let report = DOGE.call(&line, &[prompt]).stderr;
        let report = String::from_utf8_lossy(&report);
        let line = report.lines().find(|line| line.contains("proposed"));
        let words = line.expect("a report").split(' ');
        let counts: Vec<usize> = words.filter_map(|word| word.parse().ok()).collect();
        assert!(counts[0] == counts[1] && counts[0] > 0, "{report}");
    }
    // Each line of one of several texts comes after the number of its prompt.
    let together = write(&prompts, "");
    for (index, alone) in alone.iter().enumerate() {
        let mark = format!("{index}: ");
        let lines = together.lines().filter_map(|line| line.strip_prefix(&mark));
        let lines: Vec<&str> = lines.collect();
        assert_eq!(lines.join("\n"), alone.trim_end_matches('\n'), "{together}");
    }
}

#[test]
fn texts_are_drawn_by_a_seed_and_end_with_a_stop() {
    let scratch = Scratch::new();
    let model = scratch.model("model", 3);
    let line = format!("write --weights {model} --prompt x");
    let write = |options: &[&str]| DOGE.printed(&line, options);
    let drawn = |seed| write(&["--temperature", "1.5", "--top-k", "200", "--seed", seed]);
    assert_eq!(drawn("1"), drawn("1"));
    assert_ne!(drawn("1"), drawn("2"));
    let greedy = write(&[]);
    let stop = letter_of(&greedy);
    let (before, _) = greedy.split_once(stop).expect("it is in the text");
    let stopped = write(&["--stop", &stop.to_string()]);
    assert_eq!(stopped, format!("{before}{stop}\n"));
    // One beam is the greedy text.
    assert_eq!(write(&["--beams", "1"]), greedy);
    assert!(!write(&["--beams", "3"]).is_empty());

    // A token named in the configuration also ends the text, and is not shown.
    let path = scratch.path("model/config.json");
    let config = std::fs::read_to_string(&path).expect("it is there");
    let named = format!("{{\"eos_token_id\": {},", stop as u32);
    std::fs::write(&path, config.replacen('{', &named, 1)).expect("it can be written");
    // Bytes of an incomplete letter are shown as such, also at the end of a text.
    assert_eq!(write(&[]), format!("{before}\n"));
}

#[test]
fn a_loss_is_compared_and_the_exit_code_says_how() {
    let scratch = Scratch::new();
    let dir = scratch.fresh("fresh");
    let line = format!("check --weights {dir}");
    let output = DOGE.call(&line, &[]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stdout).expect("text");
    let loss = said.strip_prefix("loss ").expect("the loss");
    let (loss, _) = loss.split_once(',').expect("the loss");
    let expected = format!("loss {loss}, expected 2.779: does not agree\n");
    assert_eq!(said, expected);
    // New parameters know nothing: the logarithm of 258 tokens.
    let value: f64 = loss.parse().expect("a number");
    assert!((value - 258f64.ln()).abs() < 0.1, "{loss}");
    let agreed = DOGE.printed(&line, &["--loss", loss]);
    assert_eq!(agreed, format!("loss {loss}, expected {value}: agrees\n"));
    // The third decimal counts.
    let near = [8e-4, -8e-4].map(|off| (off, 0));
    let far = [12e-4, -12e-4, f64::NAN].map(|off| (off, 1));
    for (off, code) in near.into_iter().chain(far) {
        let other = (value + off).to_string();
        let output = DOGE.call(&line, &["--loss", &other]);
        assert_eq!(output.status.code(), Some(code), "{other}");
    }
}

#[test]
fn every_byte_has_a_token_of_its_own() {
    let scratch = Scratch::new();
    scratch.fresh("fresh");
    let path = scratch.path("fresh/tokenizer.json");
    let vocabulary = Vocabulary::from_file(path).expect("a tokenizer");
    let letters: String = ('\0'..='\u{7ff}').chain(['€', '😀']).collect();
    let ids = vocabulary.encode(&letters).expect("ids");
    assert_eq!(ids, Vocabulary::bytes().encode(&letters).expect("ids"));
    assert_eq!(vocabulary.size(), 258);
}

#[test]
fn what_cannot_be_done_is_said_in_one_line() {
    let scratch = Scratch::new();
    let model = scratch.model("model", 4);
    let nowhere = scratch.text("nowhere");
    let error = DOGE.refused("write --prompt x --weights", &[&nowhere]);
    assert!(error.contains("config.json"), "{error}");
    let line = format!("write --weights {model} --prompt");
    let error = DOGE.refused(&line, &["x", "--temperature=-1"]);
    assert!(error.contains("temperature"), "{error}");
    let text = DOGE.printed(&line, &[&"x".repeat(500), "--max-new", "1"]);
    assert_eq!(text.lines().count(), 1);

    let tokenizer = scratch.path("model/tokenizer.json");
    std::fs::remove_file(&tokenizer).expect("it is there");
    let error = DOGE.refused(&line, &["x"]);
    assert!(error.contains("tokenizer.json"), "{error}");
    std::fs::write(&tokenizer, "{}").expect("it can be written");
    let error = DOGE.refused(&line, &["x"]);
    assert!(error.contains("tokenizer.json"), "{error}");
}

#[test]
fn calls_in_documents_are_read() {
    let pages = ["book/src/fine-tune", "book/src/serve", "examples/README"];
    let calls = DOGE.reads_calls_in(&pages);
    assert!(calls >= 8, "{calls} calls were found");
}
