//! The program between two files: a case and its result.
#![cfg(feature = "flex")]

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::Path;
use std::process::{Command, Output};

fn interop(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_interop"))
        .args(arguments)
        .output()
        .expect("cargo has built the program")
}

/// Four tokens of one head of 8 features: all logits are 0, and row `i` of v is `i`.
fn write_case(path: &Path) {
    let bytes = |numbers: Vec<f32>| -> Vec<u8> {
        let bytes = numbers.into_iter().flat_map(f32::to_le_bytes);
        bytes.collect()
    };
    let zeros = bytes(vec![0.0; 32]);
    let v = bytes((0..32).map(|n| (n / 8) as f32).collect());
    let ones = bytes(vec![1.0; 32]);
    let scores = bytes(vec![0.0, 0.0, -1e9, 0.0]);
    let rows = |data| TensorView::new(Dtype::F32, vec![1, 1, 4, 8], data).expect("32 numbers");
    let scores = TensorView::new(Dtype::F32, vec![1, 1, 4], &scores).expect("4 numbers");
    let tensors = [
        ("q", rows(&zeros)),
        ("k", rows(&zeros)),
        ("v", rows(&v)),
        ("dout", rows(&ones)),
        ("scores", scores),
    ];
    let options = HashMap::from([("options".to_string(), r#"{"window": 2}"#.to_string())]);
    safetensors::serialize_to_file(tensors, Some(options), path).expect("the folder is there");
}

fn numbers(file: &SafeTensors, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).expect("the result has it");
    let words = tensor.data().chunks_exact(4);
    words
        .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}

#[test]
fn a_case_becomes_a_result_and_a_bad_one_a_line() {
    let dir = std::env::temp_dir().join(format!("interop-programs-{}", std::process::id()));
    std::fs::remove_dir_all(&dir).ok();
    std::fs::create_dir_all(&dir).expect("the folder can be written");
    let (case, broken, out) = (
        dir.join("mean.safetensors"),
        dir.join("broken.safetensors"),
        dir.join("out"),
    );
    write_case(&case);
    std::fs::write(&broken, "no tensors").expect("the folder is there");
    let [case, broken, results] = [&case, &broken, &out].map(|path| path.display().to_string());

    let good = interop(&["--repeats", "1", "--out", &results, &case]);
    let error = String::from_utf8_lossy(&good.stderr);
    assert!(good.status.success(), "{error}");
    let printed = String::from_utf8(good.stdout).expect("it prints text");
    let row = printed.lines().nth(1).expect("a line per case");
    assert!(row.starts_with("mean ") && row.contains(" f32 "), "{row}");

    let result = std::fs::read(out.join("mean.safetensors")).expect("a result");
    let result = SafeTensors::deserialize(&result).expect("a file of tensors");
    // Key 2 ranks behind 0 and 1, and so does key 3, by its index: the mean of 0 and 1 from the second row on.
    let expected: Vec<f32> = [0.0, 0.5, 0.5, 0.5].iter().flat_map(|&x| [x; 8]).collect();
    assert_eq!(numbers(&result, "out"), expected);
    let dv: Vec<f32> = [2.5, 1.5, 0.0, 0.0].iter().flat_map(|&x| [x; 8]).collect();
    assert_eq!(numbers(&result, "dv"), dv);

    let bad = interop(&["--out", &results, &broken, &case]);
    assert_eq!(bad.status.code(), Some(1), "the other case is run");
    let error = String::from_utf8(bad.stderr).expect("it prints text");
    assert!(error.starts_with(&broken), "{error}");
    assert!(error.ends_with("interop: 1 of 2 cases failed\n"), "{error}");
    std::fs::remove_dir_all(&dir).expect("the folder is there");
}
