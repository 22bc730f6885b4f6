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
        let bytes: Vec<Vec<u8>> = tensors
            .iter()
            .map(|(_, _, values)| values.iter().flat_map(|x| x.to_le_bytes()).collect())
            .collect();
        let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
            (
                *name,
                TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap(),
            )
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
    assert_eq!(
        refusal(&files, &with(("bias", &[1, 1, 2, 2], ramp(4))), "{}"),
        "mask and bias are not supported yet"
    );
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
