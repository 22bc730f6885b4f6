use std::collections::HashMap;

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::*;

/// A scratch directory with the files of one test.
struct Files {
    dir: PathBuf,
}

impl Files {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("interop-{name}-{}", std::process::id()));
        fs::remove_dir_all(&dir).ok();
        fs::create_dir_all(&dir).unwrap();
        Self { dir }
    }

    fn write(&self, name: &str, tensors: &[(&str, &[usize], Vec<f32>)], options: &str) -> PathBuf {
        let path = self.dir.join(name);
        // A mask is bytes and documents are integers; everything else is f32.
        let typed = tensors.iter().map(|(name, _, values)| match *name {
            "mask" => (Dtype::BOOL, values.iter().map(|&x| x as u8).collect()),
            "documents" => {
                let ids = values.iter().flat_map(|&x| (x as i64).to_le_bytes());
                (Dtype::I64, ids.collect())
            }
            _ => {
                let bytes = values.iter().flat_map(|x| x.to_le_bytes());
                (Dtype::F32, bytes.collect())
            }
        });
        let bytes: Vec<(Dtype, Vec<u8>)> = typed.collect();
        let views = tensors.iter().zip(&bytes);
        let views = views.map(|((name, shape, _), (dtype, bytes))| {
            let view = TensorView::new(*dtype, shape.to_vec(), bytes).unwrap();
            (*name, view)
        });
        let metadata = HashMap::from([("options".to_string(), options.to_string())]);
        safetensors::serialize_to_file(views, Some(metadata), &path).unwrap();
        path
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.dir).ok();
    }
}

fn ramp(len: usize) -> Vec<f32> {
    (0..len)
        .map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0)
        .collect()
}

/// A causal case of three keys with a window of one: every query copies one value row.
fn one_key_each(files: &Files, options: &str) -> PathBuf {
    let tensor = |scale: f32| {
        ramp(24)
            .into_iter()
            .map(|x| x * scale)
            .collect::<Vec<f32>>()
    };
    files.write(
        "case.safetensors",
        &[
            ("q", &[1, 1, 3, 8], tensor(1.0)),
            ("k", &[1, 1, 3, 8], tensor(0.5)),
            ("v", &[1, 1, 3, 8], tensor(2.0)),
            ("scores", &[1, 1, 3], vec![0.0, 1.0, 0.5]),
            ("dout", &[1, 1, 3, 8], vec![1.0; 24]),
        ],
        options,
    )
}

fn values(outcome: &run::Outcome, name: &str) -> Vec<f32> {
    let found = outcome.floats.iter().find(|(key, _)| *key == name).unwrap();
    found.1.clone().try_to_vec::<f32>().unwrap()
}

#[test]
fn a_window_of_one_copies_the_best_key_so_far() {
    let files = Files::new("copies");
    let path = one_key_each(&files, r#"{"window": 1}"#);
    let case = Case::read(&path).unwrap();
    let outcome = run::run(&case, &Device::flex(), FloatDType::F32, 1).unwrap();
    let v: Vec<f32> = ramp(24).into_iter().map(|x| x * 2.0).collect();
    // Key 0 is the best one of the first query; key 1 of the other two.
    assert_eq!(
        values(&outcome, "out"),
        [&v[0..8], &v[8..16], &v[8..16]].concat()
    );
    let dv = values(&outcome, "dv");
    assert_eq!(dv, [[1.0; 8], [2.0; 8], [0.0; 8]].concat());
    assert!(
        values(&outcome, "dq").iter().all(|x| x.abs() < 1e-6),
        "one key: no logit matters"
    );
    let intervals = outcome.intervals.unwrap().try_to_vec::<i32>().unwrap();
    assert_eq!(intervals, [0, 1, 1, 3, 2, 2]);
}

/// Logits of 0 but for the bias, and row `i` of v is `i`: a query gets the mean index of what it sees.
fn indices(files: &Files, extra: &[(&str, &[usize], Vec<f32>)], options: &str) -> run::Outcome {
    let zeros = vec![0.0; 24];
    let v = (0..24).map(|at| (at / 8) as f32).collect();
    let mut tensors = vec![
        ("q", &[1, 1, 3, 8][..], zeros.clone()),
        ("k", &[1, 1, 3, 8], zeros),
        ("v", &[1, 1, 3, 8], v),
        ("dout", &[1, 1, 3, 8], vec![1.0; 24]),
    ];
    tensors.extend_from_slice(extra);
    let case = Case::read(&files.write("case.safetensors", &tensors, options)).unwrap();
    run::run(&case, &Device::flex(), FloatDType::F32, 0).unwrap()
}

/// The first feature of every row.
fn rows(outcome: &run::Outcome) -> Vec<f32> {
    values(outcome, "out").into_iter().step_by(8).collect()
}

#[test]
fn masks_and_biases_are_those_of_the_case() {
    let files = Files::new("masks");
    let full = r#"{"causal": false}"#;
    let shape = &[1, 1, 3, 3][..];
    let shown = vec![1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0];
    let outcome = indices(&files, &[("mask", shape, shown.clone())], full);
    assert_eq!(rows(&outcome), [1.0, 2.0, 0.0]);
    assert!(outcome.intervals.is_none());
    let hidden = shown.iter().map(|shown| 1.0 - shown).collect();
    let options = r#"{"causal": false, "mask_hides": true}"#;
    let outcome = indices(&files, &[("mask", shape, hidden)], options);
    assert_eq!(rows(&outcome), [1.0, 2.0, 0.0]);

    // So much that the one key is all, and so little that it is nothing.
    let bias = ("bias", &[1, 1, 1, 3][..], vec![0.0, 1e9, -1e9]);
    let outcome = indices(&files, std::slice::from_ref(&bias), full);
    assert_eq!(rows(&outcome), [1.0, 1.0, 1.0]);
    assert_eq!(values(&outcome, "dbias"), [0.0; 3]);
    let outcome = indices(&files, &[bias, ("mask", shape, shown)], full);
    assert_eq!(rows(&outcome), [0.0, 2.0, 0.0]);
}

#[test]
fn documents_are_apart_with_scores_and_without() {
    let files = Files::new("documents");
    let documents = ("documents", &[1, 3][..], vec![4.0, 4.0, 9.0]);
    let outcome = indices(&files, std::slice::from_ref(&documents), "{}");
    assert_eq!(rows(&outcome), [0.0, 0.5, 2.0]);
    let full = r#"{"causal": false}"#;
    let outcome = indices(&files, std::slice::from_ref(&documents), full);
    assert_eq!(rows(&outcome), [0.5, 0.5, 2.0]);

    // The first key ranks highest, in its own document.
    let scores = ("scores", &[1, 1, 3][..], vec![2.0, 1.0, 0.0]);
    let outcome = indices(&files, &[documents, scores], r#"{"window": 1}"#);
    assert_eq!(rows(&outcome), [0.0, 0.0, 2.0]);
    let intervals = outcome.intervals.unwrap().try_to_vec::<i32>().unwrap();
    assert_eq!(intervals, [0, 2, 1, 1, 2, 3]);
}

#[test]
fn a_result_file_holds_every_tensor_and_the_element_type() {
    let files = Files::new("result");
    let path = one_key_each(&files, r#"{"window": 2, "causal": false, "dtype": "bf16"}"#);
    let cli = Cli::parse_from(
        ["interop", "--repeats", "0", "--out"]
            .map(String::from)
            .into_iter()
            .chain([
                files.dir.join("out").display().to_string(),
                path.display().to_string(),
            ]),
    );
    fs::create_dir_all(&cli.out).unwrap();
    run_file(&path, &Device::flex(), &cli).unwrap();
    let bytes = fs::read(cli.out.join("case.safetensors")).unwrap();
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["dtype"], "bf16");
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut names = file.names();
    names.sort_unstable();
    assert_eq!(
        names,
        ["dk", "dq", "dscores", "dv", "intervals", "lse", "out"]
    );
    assert_eq!(file.tensor("intervals").unwrap().shape(), [1, 1, 3, 2]);
    assert_eq!(file.tensor("dscores").unwrap().shape(), [1, 1, 3]);
}

fn refusal(files: &Files, tensors: &[(&str, &[usize], Vec<f32>)], options: &str) -> String {
    let path = files.write("bad.safetensors", tensors, options);
    let case = Case::read(&path);
    let outcome = case.and_then(|case| run::run(&case, &Device::flex(), FloatDType::F32, 0));
    outcome.unwrap_err().to_string()
}

#[test]
fn bad_cases_are_refused_in_one_line() {
    let files = Files::new("bad");
    let operand = |name| (name, &[1, 1, 2, 8][..], ramp(16));
    let (q, k, v) = (operand("q"), operand("k"), operand("v"));
    let qkv = [q.clone(), k.clone(), v.clone()];
    let with = |extra| [&qkv[..], &[extra]].concat();
    assert_eq!(refusal(&files, &qkv[..2], "{}"), "v is missing");
    let bias = ("bias", &[1, 1, 2, 2][..], ramp(4));
    let both = [&with(bias)[..], &[("scores", &[1, 1, 2], ramp(2))]].concat();
    assert_eq!(
        refusal(&files, &both, "{}"),
        "a case has either scores or a mask and a bias"
    );
    assert_eq!(
        refusal(&files, &with(("mask", &[1, 2], vec![1.0; 2])), "{}"),
        "mask must have 4 axes, but has 2"
    );
    assert!(refusal(&files, &with(("mask", &[1, 1, 3, 2], vec![1.0; 6])), "{}").contains("mask"));
    assert!(refusal(&files, &with(("score", &[1, 1, 2], ramp(2))), "{}").contains("score;"));
    assert!(refusal(&files, &qkv, r#"{"windw": 2}"#).contains("windw"));
    assert_eq!(
        refusal(&files, &qkv, r#"{"window": 2}"#),
        "a keep window needs scores to rank the keys by"
    );
    assert_eq!(
        refusal(&files, &with(("scores", &[1, 2], ramp(2))), "{}"),
        "scores must have 3 axes, but has 2"
    );
    assert!(
        refusal(&files, &with(("dout", &[1, 1, 1, 8], ramp(8))), "{}").starts_with("dout must")
    );
}

#[test]
fn a_file_that_is_no_case_is_refused() {
    let files = Files::new("no-case");
    let path = files.dir.join("x.safetensors");
    assert!(matches!(Case::read(&path).unwrap_err(), Error::Io(_)));
    fs::write(&path, "hello").unwrap();
    assert!(matches!(Case::read(&path).unwrap_err(), Error::Format(_)));
}
