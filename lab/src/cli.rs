//! The command line, and its runs.

use crate::Result;
use crate::arm::Arm;
use crate::device::{DeviceName, DtypeName, name};
use crate::options::Seeds;
use crate::rows;
use crate::settings::{Choice, Settings, Size, Sizes, Task};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Trains small models that differ in which keys their attention keeps, and reports what they learn and lose.
///
/// The arms of a seed begin with the same parameters and read the same texts in the same order. Each run adds a row
/// of JSON to --out. Runs that already have a row are skipped, so an interrupted call can be resumed.
#[derive(Debug, Clone, Parser)]
#[command(version)]
pub struct Cli {
    /// Training task.
    #[command(subcommand)]
    pub task: Command,
}

/// A task and its options.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Multi-query associative recall: pairs of a key and a value among fillers, and questions that name a key.
    Recall(Options),
    /// Running text: the validation loss by the position in the context, at the training length and at 4 times it.
    Text(Options),
    /// Facts in running text: answers to questions about them at 1, 2, 4 and 8 times the training length, read through
    /// the layers' caches.
    Needles(Options),
}

/// Options of the runs.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Defaults of the sizes below.
    #[arg(long, value_enum, default_value = "small")]
    pub size: Size,
    /// Device to train on.
    #[arg(long, value_enum, default_value = "flex")]
    pub device: DeviceName,
    /// Element type of the activations; parameters stay f32 [default: f32; for text and needles on cuda bf16].
    #[arg(long, value_enum)]
    pub dtype: Option<DtypeName>,
    /// Methods of selecting keys [default: for recall every arm, otherwise dense,ours,sliding].
    #[arg(long, value_enum, value_delimiter = ',')]
    pub arms: Vec<Arm>,
    /// Seeds of the parameters and of the texts: numbers, and inclusive ranges, as in 0,3..5.
    #[arg(long, value_delimiter = ',', default_value = "0")]
    pub seeds: Vec<Seeds>,
    /// Tokens of a training text; for recall 16 per pair, for text and needles bytes.
    #[arg(long, value_delimiter = ',')]
    pub tokens: Vec<usize>,
    /// A kv head keeps one key in this many of a training text, and the same number for longer ones. Arms that prune
    /// nothing are trained once.
    #[arg(long, value_delimiter = ',', default_value = "8")]
    pub shares: Vec<usize>,
    /// Peak learning rates; with several each arm is trained with each of them.
    #[arg(long, value_delimiter = ',')]
    pub rates: Vec<f64>,
    /// Recall only: takes the best rate of each arm from the rows in this file, made by an earlier call with several
    /// --rates.
    #[arg(long, value_name = "FILE", conflicts_with = "rates")]
    pub rates_from: Option<PathBuf>,
    /// How the layers select their keys.
    #[command(flatten)]
    pub choice: Choice,
    /// Text and needles only: makes odd layers local, which keep this many last keys and alone have the rotary
    /// encoding; 0 for none [default: for needles 32, for the size `table` 256].
    #[arg(long)]
    pub local_window: Option<usize>,
    /// Maximum number of training steps of a run.
    #[arg(long)]
    pub steps: Option<usize>,
    /// Texts per step.
    #[arg(long)]
    pub batch: Option<usize>,
    /// Width of the residual stream.
    #[arg(long)]
    pub width: Option<usize>,
    /// Transformer blocks.
    #[arg(long)]
    pub layers: Option<usize>,
    /// Query heads.
    #[arg(long)]
    pub heads: Option<usize>,
    /// Key and value heads.
    #[arg(long)]
    pub kv_heads: Option<usize>,
    /// Text and needles only: text to train on, a file or every UTF-8 file under a directory.
    #[arg(long, value_name = "FILE|DIR", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates"))]
    pub data: PathBuf,
    /// For text: maximum number of validation windows, at most 256. For needles: texts per length, kind and depth.
    #[arg(long)]
    pub texts: Option<usize>,
    /// Needles only: weight of an answer's byte in the training loss, where any other byte has 1.
    #[arg(long)]
    pub answer_weight: Option<f64>,
    /// Runs at once, each in a process of its own: small models leave a GPU waiting for the host. The rows are the
    /// same, except for their order and times.
    #[arg(long, default_value = "1")]
    pub processes: NonZeroUsize,
    /// Makes the runs ordered on the standard input, for the program that started this one.
    #[arg(long, hide = true)]
    pub worker: bool,
    /// File of rows.
    #[arg(long, value_name = "FILE", default_value = "runs/lab.json")]
    pub out: PathBuf,
    /// Folder for the parameters of each trained model.
    #[arg(long, value_name = "DIR")]
    pub checkpoints: Option<PathBuf>,
    /// Commit of the build [default: that of the working directory].
    #[arg(long)]
    pub commit: Option<String>,
    /// Description of the machine [default: Burn's name of the device, and the threads].
    #[arg(long)]
    pub machine: Option<String>,
}

impl Cli {
    /// The task and its options.
    pub fn options(&self) -> (Task, &Options) {
        match &self.task {
            Command::Recall(options) => (Task::Recall, options),
            Command::Text(options) => (Task::Text, options),
            Command::Needles(options) => (Task::Needles, options),
        }
    }
}

impl Options {
    /// Element type of a task's runs.
    pub fn dtype(&self, task: Task) -> DtypeName {
        self.dtype.unwrap_or(match (task, self.device) {
            (Task::Text | Task::Needles, DeviceName::Cuda) => DtypeName::Bf16,
            _ => DtypeName::F32,
        })
    }

    /// The requested runs, on a corpus with this fingerprint: all arms of a length and a seed, then the next seed. At
    /// least one.
    pub fn runs(&self, task: Task, corpus: &str) -> Result<Vec<Settings>> {
        let settings = self.settings(task, corpus);
        let or = |given: &[usize], default| match given {
            [] => vec![default],
            given => given.to_vec(),
        };
        let arms = match (&self.arms[..], task) {
            ([], Task::Recall) => Arm::value_variants(),
            ([], _) => &[Arm::Dense, Arm::Ours, Arm::Sliding],
            (arms, _) => arms,
        };
        let rates = arms.iter().map(|&arm| self.rates_of(arm, settings.rate));
        let rates = rates.collect::<Result<Vec<Vec<f64>>>>()?;
        let mut runs = Vec::new();
        for tokens in or(&self.tokens, settings.tokens) {
            for seed in self.seeds.iter().flat_map(Seeds::each) {
                for (&arm, rates) in arms.iter().zip(&rates) {
                    for &share in &self.shares {
                        for &rate in rates {
                            let run = self.run(&settings, arm, [tokens, share]);
                            let run = Settings { rate, seed, ..run };
                            run.check()?;
                            // An arm that prunes nothing is the same for every share.
                            if !runs.contains(&run) {
                                runs.push(run);
                            }
                        }
                    }
                }
            }
        }
        Ok(runs)
    }

    /// Rates to train an arm with.
    fn rates_of(&self, arm: Arm, default: f64) -> Result<Vec<f64>> {
        let Some(path) = &self.rates_from else {
            return Ok(match &self.rates[..] {
                [] => vec![default],
                rates => rates.to_vec(),
            });
        };
        let best = rows::best_rate(&rows::read(path)?, arm);
        let missing = || format!("{}: no row of the arm {}", path.display(), name(arm));
        Ok(vec![best.ok_or_else(missing)?])
    }

    /// Settings of an arm, without options that do not concern it.
    fn run(&self, settings: &Settings, arm: Arm, [tokens, share]: [usize; 2]) -> Settings {
        let (pruned, by_rank) = (arm.is_pruned(), arm.learns_by_rank());
        let of_text = settings.task == Task::Text;
        let mut choice = self.choice.clone();
        drop_unless(arm.has_recent(), &mut choice.recent);
        drop_unless(arm.deals(), &mut choice.without_recency);
        drop_unless(arm.deals(), &mut choice.turns);
        drop_unless(arm.has_runners_up(), &mut choice.runners_up);
        drop_unless(by_rank, &mut choice.with_tokens);
        drop_unless(by_rank, &mut choice.without_kept);
        drop_unless(by_rank, &mut choice.without_compete);
        drop_unless(pruned, &mut choice.narrowing);
        drop_unless(pruned, &mut choice.dense_layers);
        drop_unless(by_rank && of_text, &mut choice.other_windows);
        Settings {
            arm,
            tokens,
            window: pruned.then(|| tokens / share.max(1)),
            choice,
            ..settings.clone()
        }
    }

    /// Settings that do not depend on arm, length, seed and rate.
    fn settings(&self, task: Task, corpus: &str) -> Settings {
        let size = task.settings(self.size);
        Settings {
            device: self.device,
            dtype: self.dtype(task),
            local_window: match self.local_window {
                Some(0) => None,
                given => given.or(size.local_window),
            },
            sizes: Sizes {
                width: self.width.unwrap_or(size.sizes.width),
                layers: self.layers.unwrap_or(size.sizes.layers),
                heads: self.heads.unwrap_or(size.sizes.heads),
                kv_heads: self.kv_heads.unwrap_or(size.sizes.kv_heads),
            },
            steps: self.steps.unwrap_or(size.steps),
            batch: self.batch.unwrap_or(size.batch),
            corpus: corpus.into(),
            texts: self.texts.unwrap_or(size.texts),
            answer_weight: self.answer_weight.unwrap_or(size.answer_weight),
            ..size
        }
    }
}

/// Resets an option that an arm does not use.
fn drop_unless<T: Default>(used: bool, option: &mut T) {
    if !used {
        *option = T::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("lab").chain(line.split_whitespace()))
    }

    fn runs(line: &str) -> Result<Vec<Settings>> {
        let cli = parsed(line)?;
        let (task, options) = cli.options();
        options.runs(task, "0")
    }

    #[test]
    fn every_combination_is_run_once() {
        let all = runs("recall --size table --shares 8,16 --seeds 0,1 --rates 1e-3,2e-3").unwrap();
        // Two arms prune nothing.
        let runs_of_a_seed = 2 * (Arm::value_variants().len() - 2) + 2;
        assert_eq!(all.len(), runs_of_a_seed * 2 * 2);
        let windows = |arm| {
            let of_arm = all.iter().filter(move |run| run.arm == arm);
            let mut windows: Vec<_> = of_arm.map(|run| run.window).collect();
            windows.dedup();
            windows
        };
        assert_eq!(windows(Arm::Dense), [None]);
        assert_eq!(windows(Arm::Sliding), [32, 16, 32, 16].map(Some));
    }

    #[test]
    fn every_arm_of_a_seed_is_run_before_the_next_seed() {
        let all = runs("text --size table --device cuda --seeds 0,2..3").unwrap();
        let order: Vec<_> = all.iter().map(|run| (run.seed, run.arm)).collect();
        let arms = [Arm::Dense, Arm::Ours, Arm::Sliding];
        let expected = [0, 2, 3].map(|seed| arms.map(|arm| (seed, arm)));
        assert_eq!(order, expected.concat());
        let windows = all.iter().map(|run| run.window);
        assert!(windows.take(3).eq([None, Some(1024), Some(1024)]));
        assert!(all.iter().all(|run| run.dtype == DtypeName::Bf16));
    }

    #[test]
    fn options_are_told_to_the_arms_that_have_a_use_for_them() {
        let options = "--without-kept --without-compete --turns 4 --runners-up 9 --with-tokens";
        let all = runs(&format!("recall --arms ours,added,frozen,dense {options}")).unwrap();
        let told = |of: fn(&Choice) -> bool| -> Vec<bool> {
            all.iter().map(|run| of(&run.choice)).collect()
        };
        let none = [false; 3];
        assert_eq!(
            told(|of| of.without_kept && of.without_compete && of.with_tokens),
            [&[true][..], &none].concat()
        );
        assert_eq!(told(|of| of.turns == Some(4)), [true, false, true, false]);
        assert_eq!(
            told(|of| of.runners_up == Some(9)),
            [true, true, false, false]
        );
    }

    #[test]
    fn short_texts_have_as_many_questions_and_as_large_a_share_of_the_keys() {
        let line = "recall --arms no-recent,ours,dense --tokens 512 --lengthening 0.5 --steps 90 --batch 2";
        for run in runs(line).unwrap() {
            let windows = match run.arm {
                Arm::Dense => [None; 4],
                _ => [8, 16, 32, 64].map(Some),
            };
            for (stage, step) in [0, 15, 30, 45].into_iter().enumerate() {
                let trained = run.step(step);
                let task = run.recall().shortened(trained.divisor);
                assert_eq!(task.tokens, 64 << stage, "{:?}", run.arm);
                assert_eq!(trained.window, windows[stage], "{:?}", run.arm);
                assert_eq!(trained.batch * task.pairs, 64);
                assert_eq!(run.is_easier(step), stage < 3);
            }
        }
    }

    #[test]
    fn every_arm_has_the_sink_and_those_that_prune_narrow() {
        let line = "recall --arms ours,dense --shares 32 --sink --narrowing 0.5";
        let all = runs(line).unwrap();
        let windows = |run: &Settings| [0, 1, 999].map(|step| run.step(step).window);
        assert_eq!(windows(&all[0]), [64, 64, 4].map(Some));
        assert_eq!(windows(&all[1]), [None; 3]);
        assert!(all.iter().all(|run| run.choice.sink));
        assert!(!runs("recall --arms ours").unwrap()[0].choice.sink);
    }

    #[test]
    fn local_layers_have_a_default() {
        let local = |line| runs(line).unwrap()[0].local_window;
        assert_eq!(local("text"), None);
        assert_eq!(local("needles --size table"), Some(256));
        assert_eq!(local("needles --local-window 0"), None);
        assert_eq!(local("text --size table --local-window 64"), Some(64));
    }

    #[test]
    fn what_cannot_be_trained_is_refused() {
        for (line, text) in [
            ("recall --tokens 8", "--tokens 8"),
            ("recall --tokens 64 --shares 32", "a window of 2"),
            ("recall --rates 0", "--rates 0"),
            ("recall --local-window 8", "--local-window"),
            ("recall --rates-from none.json", "dense"),
            ("text --tokens 8", "--tokens 8"),
            ("text --arms oracle", "--arms oracle"),
            ("needles --tokens 128", "--tokens 128"),
            ("needles --lengthening 0.5", "--lengthening"),
            ("text --shares 64", "a window of 2"),
            ("text --steps 0", "--steps"),
            ("text --recent 17", "--recent 17"),
            ("recall --arms ours --turns 0", "--turns 0"),
            ("text --arms ours --dense-layers 2,3", "--dense-layers 3"),
            ("text --arms ours --dense-layers 0", "--dense-layers 0"),
            (
                "text --arms ours --recent 8 --other-windows 16,7",
                "--other-windows 7: at least 8",
            ),
            ("text --texts 257", "--texts 257"),
            ("needles --answer-weight=-1", "--answer-weight"),
        ] {
            let error = runs(line).unwrap_err().to_string();
            assert!(error.contains(text), "{line}: {error}");
        }
    }
}
