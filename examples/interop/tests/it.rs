//! The program between two files: a case and its result.
#![cfg(feature = "flex")]

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::process::{Command, Output};
use testing::Scratch;

#[path = "../../testing.rs"]
mod testing;

type Tensor<'a> = (&'a str, &'a [usize], Vec<f32>);

impl Scratch {
    /// Runs the program on files of the folder, and options.
    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_interop"));
        let output = command.current_dir(self.path("")).args(arguments).output();
        output.expect("cargo has built the program")
    }

    /// Writes a case. A mask is bytes and documents are integers; everything else is f32.
    fn write(&self, file: &str, tensors: &[Tensor], options: &str) {
        let bytes: Vec<(Dtype, Vec<u8>)> = (tensors.iter())
            .map(|(name, _, values)| match *name {
                "mask" => (Dtype::BOOL, values.iter().map(|&x| x as u8).collect()),
                "documents" => {
                    let ids = values.iter().flat_map(|&x| (x as i64).to_le_bytes());
                    (Dtype::I64, ids.collect())
                }
                _ => {
                    let bytes = values.iter().flat_map(|x| x.to_le_bytes());
                    (Dtype::F32, bytes.collect())
                }
            })
            .collect();
        let views = tensors.iter().zip(&bytes);
        let views = views.map(|((name, shape, _), (dtype, bytes))| {
            let view = TensorView::new(*dtype, shape.to_vec(), bytes);
            (*name, view.expect("as many values as the shape says"))
        });
        let metadata = HashMap::from([("options".to_string(), options.to_string())]);
        let written = safetensors::serialize_to_file(views, Some(metadata), &self.path(file));
        written.expect("the folder is there");
    }

    /// The bytes of the result of a case.
    fn result(&self, tensors: &[Tensor], options: &str) -> Vec<u8> {
        self.write("case.safetensors", tensors, options);
        let output = self.run(&["--out", "out", "case.safetensors"]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        std::fs::read(self.path("out/case.safetensors")).expect("a result")
    }

    /// Text of a case's refusal.
    fn refusal(&self, tensors: &[Tensor], options: &str) -> String {
        self.write("bad.safetensors", tensors, options);
        let output = self.run(&["bad.safetensors"]);
        assert_eq!(output.status.code(), Some(1));
        let error = String::from_utf8(output.stderr).expect("it prints text");
        let line = error.lines().next().expect("a line");
        let line = line.strip_prefix("bad.safetensors: ");
        line.expect("the line names the case").to_string()
    }
}

fn words<'a>(result: &'a [u8], name: &str) -> impl Iterator<Item = [u8; 4]> + use<'a> {
    let file = SafeTensors::deserialize(result).expect("a file of tensors");
    let tensor = file.tensor(name).expect("the result has it");
    tensor.data().as_chunks::<4>().0.iter().copied()
}

fn floats(result: &[u8], name: &str) -> Vec<f32> {
    words(result, name).map(f32::from_le_bytes).collect()
}

fn intervals(result: &[u8]) -> Vec<i32> {
    words(result, "intervals").map(i32::from_le_bytes).collect()
}

fn ramp(len: usize, scale: f32) -> Vec<f32> {
    let number = |i| (i * 37 % 101) as f32 / 50.0 - 1.0;
    (0..len).map(|i| scale * number(i)).collect()
}

/// Three keys, the second of which has the best score.
fn three_keys() -> [Tensor<'static>; 5] {
    [
        ("q", &[1, 1, 3, 8], ramp(24, 1.0)),
        ("k", &[1, 1, 3, 8], ramp(24, 0.5)),
        ("v", &[1, 1, 3, 8], ramp(24, 2.0)),
        ("scores", &[1, 1, 3], vec![0.0, 1.0, 0.5]),
        ("dout", &[1, 1, 3, 8], vec![1.0; 24]),
    ]
}

#[test]
fn a_window_of_one_copies_the_best_key_so_far() {
    let result = Scratch::new().result(&three_keys(), r#"{"window": 1}"#);
    let v = ramp(24, 2.0);
    // Key 0 is the best one of the first query; key 1 of the other two.
    let expected = [&v[0..8], &v[8..16], &v[8..16]].concat();
    assert_eq!(floats(&result, "out"), expected);
    let expected = [[1.0; 8], [2.0; 8], [0.0; 8]].concat();
    assert_eq!(floats(&result, "dv"), expected);
    let dq = floats(&result, "dq");
    assert!(dq.iter().all(|x| x.abs() < 1e-6), "no logit matters");
    assert_eq!(intervals(&result), [0, 1, 1, 3, 2, 2]);
}

/// Logits are 0 except for the bias, and row `i` of v is `i`: the output is the mean index of the keys a query sees.
fn indices(files: &Scratch, extra: &[Tensor], options: &str) -> (Vec<f32>, Vec<u8>) {
    let v = (0..24).map(|at| (at / 8) as f32).collect();
    let shape = &[1, 1, 3, 8][..];
    let zeros = |name| (name, shape, vec![0.0; 24]);
    let rows = [
        zeros("q"),
        zeros("k"),
        ("v", shape, v),
        ("dout", shape, vec![1.0; 24]),
    ];
    let result = files.result(&[&rows[..], extra].concat(), options);
    let out = floats(&result, "out").into_iter().step_by(8).collect();
    (out, result)
}

#[test]
fn masks_and_biases_are_those_of_the_case() {
    let files = Scratch::new();
    let full = r#"{"causal": false}"#;
    let shape = &[1, 1, 3, 3][..];
    let shown = vec![1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0];
    let (out, result) = indices(&files, &[("mask", shape, shown.clone())], full);
    assert_eq!(out, [1.0, 2.0, 0.0]);
    let file = SafeTensors::deserialize(&result).expect("a file of tensors");
    assert!(file.tensor("intervals").is_err());
    let hidden = shown.iter().map(|shown| 1.0 - shown).collect();
    let options = r#"{"causal": false, "mask_hides": true}"#;
    let (out, _) = indices(&files, &[("mask", shape, hidden)], options);
    assert_eq!(out, [1.0, 2.0, 0.0]);

    // One bias so large that its key gets all the weight, and one so low that its key gets none.
    let bias = ("bias", &[1, 1, 1, 3][..], vec![0.0, 1e9, -1e9]);
    let (out, result) = indices(&files, std::slice::from_ref(&bias), full);
    assert_eq!(out, [1.0, 1.0, 1.0]);
    assert_eq!(floats(&result, "dbias"), [0.0; 3]);
    let (out, _) = indices(&files, &[bias, ("mask", shape, shown)], full);
    assert_eq!(out, [0.0, 2.0, 0.0]);
}

#[test]
fn documents_are_apart_with_scores_and_without() {
    let files = Scratch::new();
    let documents = ("documents", &[1, 3][..], vec![4.0, 4.0, 9.0]);
    let (out, _) = indices(&files, std::slice::from_ref(&documents), "{}");
    assert_eq!(out, [0.0, 0.5, 2.0]);
    let full = r#"{"causal": false}"#;
    let (out, _) = indices(&files, std::slice::from_ref(&documents), full);
    assert_eq!(out, [0.5, 0.5, 2.0]);

    // The first key ranks highest, in its own document.
    let scores = ("scores", &[1, 1, 3][..], vec![2.0, 1.0, 0.0]);
    let (out, result) = indices(&files, &[documents, scores], r#"{"window": 1}"#);
    assert_eq!(out, [0.0, 0.0, 2.0]);
    assert_eq!(intervals(&result), [0, 2, 1, 1, 2, 3]);
}

#[test]
fn a_result_file_holds_every_tensor_and_the_element_type() {
    let options = r#"{"window": 2, "causal": false, "dtype": "bf16"}"#;
    let result = Scratch::new().result(&three_keys(), options);
    let (_, metadata) = SafeTensors::read_metadata(&result).expect("metadata");
    assert_eq!(metadata.metadata().as_ref().expect("some")["dtype"], "bf16");
    let file = SafeTensors::deserialize(&result).expect("a file of tensors");
    let mut names = file.names();
    names.sort_unstable();
    let expected = ["dk", "dq", "dscores", "dv", "intervals", "lse", "out"];
    assert_eq!(names, expected);
    let shape = |name| file.tensor(name).expect("it is there").shape().to_vec();
    assert_eq!(shape("intervals"), [1, 1, 3, 2]);
    assert_eq!(shape("dscores"), [1, 1, 3]);
}

#[test]
fn bad_cases_are_refused_in_one_line() {
    let files = Scratch::new();
    let operand = |name| (name, &[1, 1, 2, 8][..], ramp(16, 1.0));
    let qkv = [operand("q"), operand("k"), operand("v")];
    let with = |extra: &[Tensor<'static>]| [&qkv[..], extra].concat();
    let scores: Tensor = ("scores", &[1, 1, 2], ramp(2, 1.0));
    let bias: Tensor = ("bias", &[1, 1, 2, 2], ramp(4, 1.0));
    for (tensors, options, line) in [
        (qkv[..2].to_vec(), "{}", "v is missing"),
        (
            with(&[bias, scores]),
            "{}",
            "a case has either scores or a mask and a bias",
        ),
        (
            with(&[("mask", &[1, 2], vec![1.0; 2])]),
            "{}",
            "mask must have 4 axes, but has 2",
        ),
        (
            with(&[("score", &[1, 1, 2], ramp(2, 1.0))]),
            "{}",
            "unknown tensor score; a case holds q, k, v, scores, mask, bias, documents, dout, dlse",
        ),
        (
            qkv.to_vec(),
            r#"{"window": 2}"#,
            "a keep window needs scores to rank the keys by",
        ),
        (
            with(&[("scores", &[1, 2], ramp(2, 1.0))]),
            "{}",
            "scores must have 3 axes, but has 2",
        ),
        (
            with(&[("dout", &[1, 1, 1, 8], ramp(8, 1.0))]),
            "{}",
            "dout must have the shape of out, [1, 1, 2, 8], but has [1, 1, 1, 8]",
        ),
    ] {
        assert_eq!(files.refusal(&tensors, options), line);
    }
    let wide = with(&[("mask", &[1, 1, 3, 2], vec![1.0; 6])]);
    assert!(files.refusal(&wide, "{}").contains("mask"));
    let misspelt = files.refusal(&qkv, r#"{"windw": 2}"#);
    assert!(misspelt.starts_with("the metadata's options: unknown field `windw`"));
}

#[test]
fn a_bad_case_does_not_stop_the_others() {
    let files = Scratch::new();
    files.write("good.safetensors", &three_keys(), r#"{"window": 2}"#);
    files.file("broken.safetensors", "no tensors");
    let cases = [
        "broken.safetensors",
        "absent.safetensors",
        "good.safetensors",
    ];
    let output = files.run(&[&["--dtype", "f16", "--out", "out"][..], &cases].concat());
    assert_eq!(output.status.code(), Some(1));
    let printed = String::from_utf8(output.stdout).expect("it prints text");
    assert_eq!(printed, " f16  out/good.safetensors\n");
    let error = String::from_utf8(output.stderr).expect("it prints text");
    let lines: Vec<&str> = error.lines().collect();
    let starts = [
        "broken.safetensors: no valid safetensors file: ",
        "absent.safetensors: ",
        "interop: 2 of 3 cases failed",
    ];
    assert_eq!(lines.len(), starts.len(), "{error}");
    for (line, start) in lines.iter().zip(starts) {
        assert!(line.starts_with(start), "{error}");
    }
}
