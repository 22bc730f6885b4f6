//! Training, and the written model.

use crate::common::{DOGE, read};
use crate::testing::{Scratch, text};
use burn::tensor::Tensor;
use flash_dma_models::doge::Doge;
use std::path::Path;

/// A new model, and the call that trains it on documents that are easy to learn, without `--out`.
fn prepare(scratch: &Scratch) -> (String, String) {
    let document = |number: usize| format!("{}\n\n", "abcd efgh ".repeat(3 + number % 4));
    prepare_on(scratch, "documents.txt", (0..40).map(document).collect())
}

fn prepare_on(scratch: &Scratch, name: &str, documents: String) -> (String, String) {
    let (model, data) = (scratch.fresh("model"), scratch.file(name, documents));
    let line = format!("fine-tune --weights {model} --data {data}");
    (model, line)
}

/// The losses before and after the training.
fn losses(printed: &str) -> [f64; 2] {
    ["loss before", "loss after"].map(|when| {
        let mut lines = printed.lines().filter_map(|line| line.strip_prefix(when));
        let number = lines.next().and_then(|rest| rest.trim().parse().ok());
        number.unwrap_or_else(|| panic!("{when} in {printed}"))
    })
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

#[test]
fn adapters_learn_and_are_added_to_the_weights_that_they_stand_on() {
    let scratch = Scratch::new();
    let (model, line) = prepare(&scratch);
    let (out, dir) = (scratch.path("out"), scratch.text("out"));
    let sizes = "--length 48 --batch 4 --epochs 3 --rate 2e-2";
    let said = DOGE.printed(&format!("{line} {sizes} --out"), &[&dir]);
    let [before, after] = losses(&said);
    assert!((before - 258f64.ln()).abs() < 0.2, "{said}");
    assert!(after < before - 0.3, "{said}");
    assert!(out.join("training/valid/epoch-3").exists(), "{said}");

    let [old, new] = [read(Path::new(&model)), read(&out)];
    assert_eq!(old.config(), new.config());
    let [a, b] = [&old, &new].map(|doge| values(doge.embedding.weight.val()));
    assert_eq!(a, b);
    for (old, new) in old.blocks.iter().zip(&new.blocks) {
        let matrices = |block: &flash_dma_models::nn::DecoderBlock| {
            let (attention, feed) = (&block.attention, &block.feed_forward);
            [&attention.q_proj, &attention.o_proj, &feed.gate, &feed.down]
                .map(|layer| values(layer.weight.val()))
        };
        for (old, new) in matrices(old).iter().zip(&matrices(new)) {
            assert_ne!(old, new);
        }
        let [a, b] = [old, new].map(|block| values(block.attention_norm.gamma.val()));
        assert_eq!(a, b);
    }
    for name in ["config.json", "tokenizer.json"] {
        let [a, b] = [Path::new(&model), &out].map(|dir| std::fs::read(dir.join(name)).unwrap());
        assert!(a == b, "{name}");
    }
    // Writes the file that the script of the fixtures compares with `transformers`.
    DOGE.call("check --loss 5 --expected --weights", &[&dir]);
    let expected = std::fs::read(out.join("expected.json")).expect("it is written");
    let expected: serde_json::Value = serde_json::from_slice(&expected).expect("JSON");
    let length = |name: &str| expected[name].as_array().map(Vec::len);
    // The sentence ends with the window.
    assert_eq!([length("tokens"), length("rows")], [Some(32), Some(8)]);
    let logits = &expected["logits_by_step"][0];
    assert_eq!(logits.as_array().map(Vec::len), Some(258));

    // The written model continues where the loss said.
    let write = format!("write --weights {dir} --max-new 4 --prompt");
    assert!(!DOGE.printed(&write, &["abcd efgh abcd"]).is_empty());
}

#[test]
fn every_parameter_may_be_trained_on_lines_of_json_and_only_what_is_named_gets_adapters() {
    let scratch = Scratch::new();
    let json =
        |number: usize| format!("{{\"story\": \"{}\"}}\n", "one two ".repeat(4 + number % 3));
    let (model, line) = prepare_on(&scratch, "documents.jsonl", (0..24).map(json).collect());
    let sizes = "--length 32 --batch 4 --field story --rate 5e-3";
    let run = |out: &Path, options: &str| {
        DOGE.printed(&format!("{line} {sizes} {options} --out"), &[&text(out)])
    };
    let [full, scores] = [scratch.path("full"), scratch.path("scores")];
    let said = run(&full, "--full");
    let [before, after] = losses(&said);
    assert!(after < before, "{said}");
    run(&scores, "--targets dt_proj$ --rank 2");
    let [old, full, scores] = [read(Path::new(&model)), read(&full), read(&scores)];
    let norm = |doge: &Doge| values(doge.norm.gamma.val());
    let q = |doge: &Doge| values(doge.blocks[0].attention.q_proj.weight.val());
    assert_ne!(norm(&old), norm(&full));
    assert_ne!(q(&old), q(&full));
    assert_eq!(norm(&old), norm(&scores));
    assert_eq!(q(&old), q(&scores));
    let dt = |doge: &Doge| match doge.blocks[0].attention.scorer() {
        burn_flash_dma::nn::Scorer::Zoh(zoh) => values(zoh.dt_proj.val()),
        other => panic!("{other:?}"),
    };
    assert_ne!(dt(&old), dt(&scores));
}

#[test]
fn a_training_that_stopped_goes_on_and_writes_the_same_bytes() {
    let scratch = Scratch::new();
    let (_, line) = prepare(&scratch);
    let sizes = "--length 32 --batch 4 --epochs 2 --checkpoints 2";
    // The second also trains vectors, which decay differently from matrices.
    for (name, options) in [("adapters", "--rate 1e-2"), ("full", "--full")] {
        let out = scratch.path(name);
        let line = format!("{line} {sizes} {options} --out {}", text(&out));
        DOGE.printed(&line, &[]);
        let measured = |part: usize| out.join(format!("training/valid/epoch-{part}"));
        assert!(measured(3).exists() && measured(4).exists());
        let weights = || std::fs::read(out.join("model.safetensors")).expect("it is written");
        let whole = weights();

        // As if the program had been killed in the middle of the second epoch, while writing a checkpoint.
        let checkpoint = |file: &str| out.join("training/checkpoint").join(file);
        for file in ["optim-4.bpk", "scheduler-4.bpk"] {
            std::fs::remove_file(checkpoint(file)).expect("the last checkpoint");
        }
        std::fs::write(checkpoint("model-4.bpk"), b"half").expect("the last checkpoint");
        std::fs::remove_file(out.join("model.safetensors")).expect("it is written");
        let line = line + " --resume";
        let forget = || std::fs::remove_dir_all(out.join("training/valid")).expect("logs");
        forget();
        DOGE.printed(&line, &[]);
        assert!(!measured(3).exists() && measured(4).exists());
        assert!(weights() == whole, "{name}: another model");

        // A completed training is unchanged, and another one is not resumed.
        forget();
        DOGE.printed(&line, &[]);
        assert!(!measured(4).exists());
        assert!(weights() == whole);
        let error = DOGE.refused(&line, &["--seed", "9"]);
        assert!(error.contains("train = "), "{error}");
        let documents = std::fs::read_to_string(scratch.path("documents.txt"));
        let documents = documents.expect("it is there") + "And one more.\n";
        let other = scratch.file("other.txt", documents);
        let error = DOGE.refused(&line, &["--data", &other]);
        assert!(error.contains("train = "), "{error}");
        assert!(weights() == whole);
    }
}

#[test]
fn what_cannot_be_trained_is_said_in_one_line() {
    let scratch = Scratch::new();
    let (_, line) = prepare(&scratch);
    let line = format!("{line} --out {}", scratch.text("out"));
    let sizes = "--batch, --epochs, --length, --checkpoints and --rank must be";
    for (options, reason) in [
        ("--rank 0", "--rank must be at least 1"),
        ("--targets nothing", "no weight is called nothing"),
        ("--targets (", "--targets"),
        ("--length 1000", "--length must be at most 512"),
        ("--batch 0", sizes),
        ("--batch 999", "999"),
        ("--rate 0", "--rate must be above 0"),
        ("--length 32 --checkpoints 999", "999 parts of an epoch of "),
    ] {
        let error = DOGE.refused(&format!("{line} {options}"), &[]);
        assert!(error.contains(reason), "{error}");
    }
    assert!(!scratch.path("out/model.safetensors").exists());
}
