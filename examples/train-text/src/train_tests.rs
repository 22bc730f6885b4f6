use std::path::PathBuf;
use std::sync::Mutex;

use burn::train::metric::NumericEntry;
use clap::Parser;

use super::*;
use crate::cli::Cli;
use crate::data::Corpus;

/// A device has one generator for the process: whoever seeds it holds this.
pub static GENERATOR: Mutex<()> = Mutex::new(());

fn scratch(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("train-text-{name}-{}", std::process::id()));
    fs::remove_dir_all(&dir).ok();
    dir
}

fn settings(extra: &[&str]) -> Settings {
    let tiny = [
        "train-text",
        "--seq",
        "24",
        "--window",
        "6",
        "--batch",
        "4",
        "--layers",
        "1",
        "--d-model",
        "32",
        "--heads",
        "2",
        "--kv-heads",
        "1",
        "--lr",
        "0.01",
    ];
    Settings::new(&Cli::parse_from([&tiny, extra].concat())).unwrap()
}

fn text() -> Arc<Text> {
    let bytes = b"the quick brown fox jumps over the lazy dog. ".repeat(40);
    Arc::new(
        Text::split(
            Corpus {
                source: "t".into(),
                files: 1,
                bytes,
            },
            24,
        )
        .unwrap(),
    )
}

fn weights(model: &Decoder, device: &Device) -> Vec<f32> {
    let tokens = Tensor::from_data(TensorData::new(vec![100i32; 8], [1, 8]), device);
    model.forward(tokens).try_into_vec_as::<f32>().unwrap()
}

#[test]
fn the_loss_falls_and_the_same_seed_gives_the_same_run() {
    let _generator = GENERATOR.lock();
    let (settings, text, device) = (
        settings(&["--steps", "30", "--evaluations", "2"]),
        text(),
        Device::flex(),
    );
    let dirs = [scratch("first"), scratch("second")];
    let runs = dirs
        .each_ref()
        .map(|dir| train(&settings, "sparse", &text, &device, dir, false).unwrap());
    let curve = &runs[0].curve;
    assert_eq!(curve.train.len(), 30);
    assert_eq!(curve.train[29].0, 30);
    assert_eq!(
        curve.valid.iter().map(|v| v.0).collect::<Vec<_>>(),
        [15, 30]
    );
    let (first, last) = (curve.train[0].1, curve.final_valid().unwrap());
    assert!(
        (first - 256f64.ln()).abs() < 0.5,
        "untrained, every byte is as likely: {first}"
    );
    assert!(last < first - 2.0, "{first} fell to {last} only");
    assert_eq!(curve.train, runs[1].curve.train);
    assert_eq!(curve.valid, runs[1].curve.valid);
    dirs.iter().for_each(|dir| fs::remove_dir_all(dir).unwrap());
}

#[test]
fn a_resumed_run_goes_on_at_the_next_epoch_and_ends_like_an_uninterrupted_one() {
    let _generator = GENERATOR.lock();
    let (text, device) = (text(), Device::flex());
    let settings = settings(&["--steps", "9", "--evaluations", "3"]);
    let (whole, cut) = (scratch("whole"), scratch("cut"));
    let uninterrupted = train(&settings, "sparse", &text, &device, &whole, false).unwrap();
    train(&settings, "sparse", &text, &device, &cut, false).unwrap();
    // As if the run had been killed within its third epoch, while writing the checkpoint.
    fs::remove_file(cut.join("checkpoint/scheduler-3.bpk")).unwrap();
    fs::remove_dir_all(cut.join("valid/epoch-3")).unwrap();
    assert_eq!(checkpoints::last(&cut), Some(2));
    let resumed = train(&settings, "sparse", &text, &device, &cut, true).unwrap();
    assert_eq!(resumed.curve.train.len(), 9);
    assert_eq!(resumed.curve.train, uninterrupted.curve.train);
    assert_eq!(resumed.curve.valid, uninterrupted.curve.valid);
    assert_eq!(
        weights(&resumed.model, &device),
        weights(&uninterrupted.model, &device)
    );
    [whole, cut]
        .iter()
        .for_each(|dir| fs::remove_dir_all(dir).unwrap());
}

#[test]
fn the_metrics_say_what_the_layers_select_and_whether_the_scores_learn() {
    let _generator = GENERATOR.lock();
    let (text, device, dir) = (text(), Device::flex(), scratch("metrics"));
    let short = settings(&["--steps", "3", "--evaluations", "1"]);
    train(&short, "sparse", &text, &device, &dir, false).unwrap();
    let entries = |split: &str, name: &str| -> Vec<f64> {
        let log = dir.join(split).join("epoch-1").join(format!("{name}.log"));
        let log = fs::read_to_string(&log).unwrap_or_else(|e| panic!("{}: {e}", log.display()));
        let entry = |line| NumericEntry::deserialize(line).unwrap().current();
        log.lines().map(entry).collect()
    };
    let gradients = entries("train", "Gradient_of_scores");
    assert!(gradients.len() >= 3);
    assert!(gradients.iter().all(|&norm| norm.is_finite() && norm > 0.0));
    // Of 24 positions the first six see 1 to 6 keys, the others keep 6.
    let alive = entries("valid", "Keys_alive");
    assert!(!alive.is_empty());
    assert!(
        alive.iter().all(|&keys| (keys - 5.375).abs() < 1e-9),
        "{alive:?}"
    );
    let lifetimes = entries("valid", "Lifetime_of_keys");
    assert!(
        lifetimes.iter().all(|&n| (5.375..=24.0).contains(&n)),
        "{lifetimes:?}"
    );
    let ties = entries("valid", "Ties_of_scores");
    assert!(ties.iter().all(|&share| (0.0..=100.0).contains(&share)));
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_run_that_recomputes_its_blocks_learns_the_same() {
    let _generator = GENERATOR.lock();
    let (text, device) = (text(), Device::flex());
    let steps = ["--steps", "8", "--evaluations", "1"];
    let curves = [&[][..], &["--checkpoint"]].map(|extra| {
        let settings = Settings {
            layers: 2,
            ..settings(&[&steps, extra].concat())
        };
        let dir = scratch("recomputed");
        let run = train(&settings, "sparse", &text, &device, &dir, false).unwrap();
        fs::remove_dir_all(dir).unwrap();
        run.curve.train
    });
    let (first, last) = (curves[0][0].1, curves[0][7].1);
    assert!(last < first - 0.1, "{first} fell to {last} only");
    for (kept, recomputed) in curves[0].iter().zip(&curves[1]) {
        assert!(
            (kept.1 - recomputed.1).abs() < 1e-4,
            "{kept:?} and {recomputed:?}"
        );
    }
}

#[test]
fn a_new_run_leaves_nothing_of_an_earlier_one() {
    let _generator = GENERATOR.lock();
    let (text, device, dir) = (text(), Device::flex(), scratch("again"));
    let long = settings(&["--steps", "3", "--evaluations", "3"]);
    train(&long, "sparse", &text, &device, &dir, false).unwrap();
    let short = settings(&["--steps", "1", "--evaluations", "1"]);
    let run = train(&short, "sparse", &text, &device, &dir, false).unwrap();
    assert_eq!(checkpoints::last(&dir), Some(1));
    assert_eq!(run.curve.train.len(), 1);
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn the_schedule_rises_to_the_peak_and_falls_to_a_tenth() {
    let settings = settings(&["--steps", "200"]);
    let mut schedule = schedule(&settings);
    let rates: Vec<f64> = (0..200).map(|_| schedule.step().base()).collect();
    let peak = rates.iter().copied().fold(0.0, f64::max);
    assert!((peak - settings.lr).abs() < 1e-9);
    assert!(rates[0] <= settings.lr / 5.0);
    assert!(rates.windows(2).skip(12).all(|pair| pair[1] <= pair[0]));
    assert!(rates[199] < 0.11 * settings.lr);
}

#[test]
fn sixteen_bit_activations_train_f32_parameters() {
    let _generator = GENERATOR.lock();
    let (text, device, dir) = (text(), Device::flex(), scratch("bf16"));
    let settings = settings(&["--steps", "20", "--evaluations", "1", "--dtype", "bf16"]);
    let run = train(&settings, "sparse", &text, &device, &dir, false).unwrap();
    let (first, last) = (run.curve.train[0].1, run.curve.final_valid().unwrap());
    assert!(last < first - 1.0, "{first} fell to {last} only");
    struct Types(Vec<burn::tensor::DType>);
    impl burn::module::ModuleVisitor for Types {
        fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<D>>) {
            self.0.push(param.val().dtype());
        }
    }
    let mut types = Types(Vec::new());
    run.model.visit(&mut types);
    assert!(
        types.0.len() > 10
            && types
                .0
                .iter()
                .all(|&dtype| dtype == burn::tensor::DType::F32)
    );
    fs::remove_dir_all(dir).unwrap();
}
