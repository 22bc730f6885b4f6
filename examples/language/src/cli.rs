//! The command line, and the runs that it asks for.

use crate::arm::Arm;
use crate::settings::{Settings, Size, Sizes, Task};
use burn_flash_dma::nn::RoundRobin;
use burn_flash_dma::{LeaveOneOut, RankSoftmax};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;
use train_text::device::{DeviceName, DtypeName};
use train_text::factor;
use train_text::model::Positions;
use train_text::narrowing::Narrowing;
use train_text::seeds::Seeds;
use train_text::turns;

/// Trains byte-level language models that differ in which keys their attention keeps, and says what they lose.
///
/// The arms of a seed begin with the same parameters and read the same texts in the same order. A row of JSON is added
/// to --out after each run. Runs whose rows are there are skipped, so a call that was ended goes on.
#[derive(Debug, Clone, Parser)]
#[command(version)]
pub struct Cli {
    /// What the models are trained on.
    #[command(subcommand)]
    pub task: Command,
}

/// A task and its options.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Running text: the validation loss by the position in the context, at the training length and at 4 times it.
    Text(Options),
    /// Facts in running text: answers to questions about them at 1, 2, 4 and 8 times the training length, read through
    /// the layers' caches.
    Needles(Options),
}

/// What a run is made of.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Sizes that the options left out have.
    #[arg(long, value_enum, default_value = "smallest")]
    pub size: Size,
    /// Text to train on: a file, or every UTF-8 file under a directory [default: this repository's sources and
    /// documents].
    #[arg(long, value_name = "FILE|DIR")]
    pub data: Option<PathBuf>,
    /// Device to train on.
    #[arg(long, value_enum, default_value = "flex")]
    pub device: DeviceName,
    /// Element type of the activations; parameters stay f32 [default: f32, on cuda bf16].
    #[arg(long, value_enum)]
    pub dtype: Option<DtypeName>,
    /// What chooses the keys.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "dense,ours,sliding"
    )]
    pub arms: Vec<Arm>,
    /// Seeds of the parameters and of the texts: numbers, and ranges with both of their ends, as in 0,3..5.
    #[arg(long, value_delimiter = ',', default_value = "0")]
    pub seeds: Vec<Seeds>,
    /// Bytes of a training text.
    #[arg(long)]
    pub tokens: Option<usize>,
    /// A kv head keeps one key in so many of a training text, and as many of longer ones.
    #[arg(long, default_value = "8")]
    pub share: usize,
    /// The last keys that ours keeps whatever their scores, counted in its window [default: a quarter of it].
    #[arg(long)]
    pub recent: Option<usize>,
    /// What the position of a token adds to its score in ours, per byte: a key whose score is higher by 1 is kept as
    /// long as if it came so many bytes later as 1 divided by this.
    #[arg(long)]
    pub recency_slope: Option<f64>,
    /// Deals the bytes of a text to the key/value heads of ours in turn, so many at a time in the first layer and twice as
    /// many in each behind it; a head ranks others by the penalty lower, all below its own without one.
    #[arg(long, value_name = "RUN[:PENALTY]", value_parser = turns::parse)]
    pub round_robin: Option<RoundRobin>,
    /// Numbers of layers, counted from 1, that attend to all keys in the arms that prune.
    #[arg(long, value_delimiter = ',')]
    pub dense_layers: Vec<usize>,
    /// Factor on what tokens learn through their scores in ours, beside what they learn from the loss [default: 1].
    #[arg(long)]
    pub token_gradient_scale: Option<f64>,
    /// Lets the scores of kept keys learn what the outputs would lose without them, with this weight besides each in ours
    /// [without a number: 0.05].
    #[arg(long, value_name = "BESIDES", num_args = 0..=1, default_missing_value = "0.05", value_parser = factor::leave_one_out)]
    pub leave_one_out: Option<LeaveOneOut>,
    /// Charges what scores of a head gain to all of them, in the shares of a softmax of so many times the scores, in ours
    /// [without a number: 0, so that each pays by its time].
    #[arg(long, value_name = "FACTOR", num_args = 0..=1, default_missing_value = "0", value_parser = factor::rank_softmax)]
    pub rank_softmax: Option<RankSoftmax>,
    /// The keys ranked next whose scores learn in ours [default: a quarter of the window].
    #[arg(long)]
    pub runners_up: Option<usize>,
    /// The share of the steps in which pruned arms have a wider window: half of the text, then half of that, and so on;
    /// behind `gradual:` a little narrower with every step. All arms that prune do it alike.
    #[arg(long, default_value = "0")]
    pub narrowing: Narrowing,
    /// Gives every layer of every arm a learned logit per head that has no key: what no key answers can attend to nothing.
    #[arg(long)]
    pub sink: bool,
    /// How the layers know where a key is [default: of text rope, of needles rope-in-local-layers].
    #[arg(long, value_enum)]
    pub positions: Option<PositionsName>,
    /// Keys of a query in the local layers of rope-in-local-layers.
    #[arg(long)]
    pub local_window: Option<usize>,
    /// Training steps.
    #[arg(long)]
    pub steps: Option<usize>,
    /// Texts per step.
    #[arg(long)]
    pub batch: Option<usize>,
    /// Peak learning rate.
    #[arg(long)]
    pub rate: Option<f64>,
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
    /// Of text: the most validation windows, at most 256. Of needles: texts per length, kind and depth.
    #[arg(long)]
    pub texts: Option<usize>,
    /// Of text: evaluates ours with windows of so many keys as well, at the training length.
    #[arg(long, value_name = "KEYS", value_delimiter = ',')]
    pub other_windows: Vec<usize>,
    /// Of needles: the weight of the loss of an answer's byte in training, where that of any other byte is 1.
    #[arg(long)]
    pub answer_weight: Option<f64>,
    /// Lists the runs, and how long they may take by the rows of --out, and trains nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Begins no run that may not end within so many minutes from the start. One without rows like it is begun.
    #[arg(long)]
    pub minutes: Option<f64>,
    /// The file of rows.
    #[arg(long, value_name = "FILE", default_value = "runs/language.json")]
    pub out: PathBuf,
    /// Where to write the parameters of each trained model.
    #[arg(long, value_name = "DIR")]
    pub checkpoints: Option<PathBuf>,
    /// The commit that was built [default: that of the working directory].
    #[arg(long)]
    pub commit: Option<String>,
    /// The machine, in words [default: Burn's name of the device, and the threads].
    #[arg(long)]
    pub machine: Option<String>,
}

/// The names of [`Positions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PositionsName {
    /// Rotary encoding in every layer.
    Rope,
    /// Layers in turn: a local one with rotary encoding, the same in every arm, and one that sees all of the text,
    /// without an encoding.
    RopeInLocalLayers,
}

/// The most validation windows: each of them is a number in the row.
const MOST_WINDOWS: usize = 256;

impl Cli {
    /// The task and its options.
    pub fn options(&self) -> (Task, &Options) {
        match &self.task {
            Command::Text(options) => (Task::Text, options),
            Command::Needles(options) => (Task::Needles, options),
        }
    }
}

impl Options {
    /// The time after which nothing is to run, from the start.
    ///
    /// # Errors
    ///
    /// One line if --minutes is negative or no number.
    pub fn time(&self) -> Result<Option<Duration>, String> {
        let seconds = self.minutes.map(|minutes| 60.0 * minutes);
        let time = seconds.map(Duration::try_from_secs_f64).transpose();
        time.map_err(|error| format!("--minutes: {error}"))
    }

    /// The runs that are asked for, on a corpus with this fingerprint: all arms of a seed, then the next seed. There is
    /// at least one.
    ///
    /// # Errors
    ///
    /// One line that says which option is wrong.
    pub fn runs(&self, task: Task, corpus: &str) -> Result<Vec<Settings>, String> {
        let mut runs = Vec::new();
        for seed in self.seeds.iter().flat_map(Seeds::each) {
            for &arm in &self.arms {
                let run = Settings {
                    arm,
                    seed,
                    corpus: corpus.into(),
                    ..self.settings(task)
                };
                let run = Settings {
                    window: (arm != Arm::Dense).then(|| run.tokens / self.share.max(1)),
                    recent: self.recent.filter(|_| arm == Arm::Ours),
                    recency_slope: self.recency_slope.filter(|_| arm == Arm::Ours),
                    round_robin: self.round_robin.filter(|_| arm == Arm::Ours),
                    dense_layers: match arm {
                        Arm::Dense => Vec::new(),
                        _ => self.dense_layers.clone(),
                    },
                    token_gradient_scale: (self.token_gradient_scale).filter(|_| arm == Arm::Ours),
                    leave_one_out: self.leave_one_out.filter(|_| arm == Arm::Ours),
                    rank_softmax: self.rank_softmax.filter(|_| arm == Arm::Ours),
                    other_windows: match (task, arm) {
                        (Task::Text, Arm::Ours) => self.other_windows.clone(),
                        _ => Vec::new(),
                    },
                    runners_up: self.runners_up.filter(|_| arm == Arm::Ours),
                    narrowing: match arm {
                        Arm::Dense => Narrowing::default(),
                        _ => self.narrowing,
                    },
                    ..run
                };
                run.check()?;
                if task == Task::Text && run.texts > MOST_WINDOWS {
                    return Err(format!("--texts {}: at most {MOST_WINDOWS}", run.texts));
                }
                if !runs.contains(&run) {
                    runs.push(run);
                }
            }
        }
        Ok(runs)
    }

    /// The settings without arm and seed.
    fn settings(&self, task: Task) -> Settings {
        let size = task.settings(self.size);
        let sizes = Sizes {
            width: self.width.unwrap_or(size.sizes.width),
            layers: self.layers.unwrap_or(size.sizes.layers),
            heads: self.heads.unwrap_or(size.sizes.heads),
            kv_heads: self.kv_heads.unwrap_or(size.sizes.kv_heads),
        };
        let local = |window: usize| Positions::RopeInLocalLayers {
            window: self.local_window.unwrap_or(window),
        };
        let positions = match (self.positions, size.positions) {
            (Some(PositionsName::Rope), _) => Positions::Rope,
            (None, Positions::Rope) => Positions::Rope,
            (_, Positions::RopeInLocalLayers { window }) => local(window),
            (Some(PositionsName::RopeInLocalLayers), Positions::Rope) => {
                local(self.size.local_window())
            }
        };
        Settings {
            device: self.device,
            dtype: self.dtype.unwrap_or(match self.device {
                DeviceName::Cuda => DtypeName::Bf16,
                _ => DtypeName::F32,
            }),
            positions,
            tokens: self.tokens.unwrap_or(size.tokens),
            sizes,
            steps: self.steps.unwrap_or(size.steps),
            batch: self.batch.unwrap_or(size.batch),
            rate: self.rate.unwrap_or(size.rate),
            texts: self.texts.unwrap_or(size.texts),
            answer_weight: self.answer_weight.unwrap_or(size.answer_weight),
            sink: self.sink,
            ..size
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(line: &str) -> Result<Vec<Settings>, String> {
        let words = std::iter::once("language").chain(line.split_whitespace());
        let cli = Cli::parse_from(words);
        let (task, options) = cli.options();
        options.runs(task, "0")
    }

    #[test]
    fn every_arm_of_a_seed_is_run_before_the_next_seed() {
        let all = runs("text --size table --device cuda --seeds 0,2..3").unwrap();
        let order: Vec<_> = all.iter().map(|run| (run.seed, run.arm)).collect();
        let arms = [Arm::Dense, Arm::Ours, Arm::Sliding];
        let expected = [0, 2, 3].map(|seed| arms.map(|arm| (seed, arm)));
        assert_eq!(order, expected.concat());
        let windows = [None, Some(1024), Some(1024)];
        assert!(
            all.iter()
                .zip(windows)
                .all(|(run, window)| run.window == window)
        );
        assert!(all.iter().all(|run| run.dtype == DtypeName::Bf16));
        assert!(all[1].differs_in_arm(&all[0]) && !all[1].differs_in_arm(&all[4]));
    }

    #[test]
    fn positions_have_a_default_and_a_window() {
        let positions = |line| runs(line).unwrap()[0].positions;
        let local = |window| Positions::RopeInLocalLayers { window };
        assert_eq!(positions("text"), Positions::Rope);
        assert_eq!(positions("needles --size table"), local(256));
        assert_eq!(positions("needles --positions rope"), Positions::Rope);
        let line = "text --size table --positions rope-in-local-layers";
        assert_eq!(positions(line), local(256));
        assert_eq!(positions(&format!("{line} --local-window 64")), local(64));
    }

    #[test]
    fn what_cannot_be_trained_is_refused() {
        for (line, text) in [
            ("text --tokens 8", "--tokens 8"),
            ("needles --tokens 128", "--tokens 128"),
            ("text --share 64", "a window of 2"),
            ("text --steps 0", "--steps"),
            ("text --recent 17", "--recent 17"),
            ("text --arms ours --recency-slope -1", "--recency-slope -1"),
            ("text --arms ours --recency-slope 1e39", "finite in f32"),
            ("text --arms ours --dense-layers 2,3", "--dense-layers 3"),
            ("text --arms ours --dense-layers 0", "--dense-layers 0"),
            (
                "text --arms ours --token-gradient-scale -1",
                "--token-gradient-scale -1",
            ),
            (
                "text --arms ours --recent 8 --other-windows 16,7",
                "--other-windows 7: at least 8",
            ),
            ("text --rate 0", "--rate 0"),
            ("text --width 60", "--width 60"),
            ("text --texts 257", "--texts 257"),
            ("needles --answer-weight -1", "--answer-weight"),
        ] {
            let line = line.replace(" -1", "=-1");
            assert!(runs(&line).unwrap_err().contains(text), "{line}");
        }
    }
}
