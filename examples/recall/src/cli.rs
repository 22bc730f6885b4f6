//! The command line, and the runs that it asks for.

use crate::arm::Arm;
use crate::rates;
use crate::settings::{Settings, Size};
use crate::task::Layout;
use burn_flash_dma::nn::RoundRobin;
use burn_flash_dma::{LeaveOneOut, RankSoftmax};
use clap::Parser;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;
use train_text::device::{DeviceName, DtypeName};
use train_text::factor;
use train_text::narrowing::Narrowing;
use train_text::rows;
use train_text::seeds::Seeds;
use train_text::stages::Share;
use train_text::turns;

/// Trains small models on multi-query associative recall, one per arm, seed and size, and adds a row to --out after
/// each. Runs whose rows are there are skipped, so a run that was ended goes on.
#[derive(Debug, Clone, Parser)]
#[command(version)]
pub struct Cli {
    /// Sizes that the options left out have.
    #[arg(long, value_enum, default_value = "small")]
    pub size: Size,
    /// Device to train on.
    #[arg(long, value_enum, default_value = "flex")]
    pub device: DeviceName,
    /// Element type of the activations; parameters stay f32.
    #[arg(long, value_enum, default_value = "f32")]
    pub dtype: DtypeName,
    /// What chooses the keys [default: every arm].
    #[arg(long, value_enum, value_delimiter = ',')]
    pub arms: Vec<Arm>,
    /// Tokens per text, 16 per pair.
    #[arg(long, value_delimiter = ',')]
    pub tokens: Vec<usize>,
    /// A kv head keeps one key in so many. Arms that prune nothing are trained once.
    #[arg(long, value_delimiter = ',', default_value = "8")]
    pub shares: Vec<usize>,
    /// The share of the steps in which arms that prune have a wider window: half of the text, then half of that, and so
    /// on; behind `gradual:` a little narrower with every step.
    #[arg(long, default_value = "0")]
    pub narrowing: Narrowing,
    /// The share of the steps that have shorter texts, and as many questions: 64 tokens at first, then twice as many, and
    /// so on, in which arms that prune keep the same share of the keys.
    #[arg(long, default_value = "0")]
    pub lengthening: Share,
    /// Gives every other step a window of half of the text, in arms that prune: what the model has learned with it stays
    /// learned while the keys are few.
    #[arg(long)]
    pub every_other_wide: bool,
    /// Gives every layer a learned logit per head that has no key: what no key answers can attend to nothing.
    #[arg(long)]
    pub sink: bool,
    /// Runners-up of the arms that have some, in place of a quarter of the window.
    #[arg(long)]
    pub runners_up: Option<usize>,
    /// Deals the tokens of a text to the key/value heads in turn, so many at a time in the first layer and twice as many in
    /// the second; a head ranks others by the penalty lower, all below its own without one. In arms whose
    /// scores only rank.
    #[arg(long, value_name = "RUN[:PENALTY]", value_parser = turns::parse)]
    pub round_robin: Option<RoundRobin>,
    /// Factor on what tokens learn through their scores, beside what they learn from the loss, in arms that have
    /// runners-up [default: 1].
    #[arg(long)]
    pub token_gradient_scale: Option<f64>,
    /// Lets the scores of kept keys learn what the outputs would lose without them, with this weight besides each in arms
    /// whose scores only rank
    /// [without a number: 0.05].
    #[arg(long, value_name = "BESIDES", num_args = 0..=1, default_missing_value = "0.05", value_parser = factor::leave_one_out)]
    pub leave_one_out: Option<LeaveOneOut>,
    /// Charges what scores of a head gain to all of them, in the shares of a softmax of so many times the scores, in arms
    /// whose scores only rank
    /// [without a number: 0, so that each pays by its time].
    #[arg(long, value_name = "FACTOR", num_args = 0..=1, default_missing_value = "0", value_parser = factor::rank_softmax)]
    pub rank_softmax: Option<RankSoftmax>,
    /// Where the pairs stand.
    #[arg(long, value_enum, default_value = "scattered")]
    pub layout: Layout,
    /// Peak learning rates; with several each arm is trained with each of them.
    #[arg(long, value_delimiter = ',', default_value = "1e-3")]
    pub rates: Vec<f64>,
    /// Takes the best rate of each arm from the rows in this file, that an earlier call with several --rates has made.
    #[arg(long, value_name = "FILE", conflicts_with = "rates")]
    pub rates_from: Option<PathBuf>,
    /// Seeds of the parameters and of the texts: numbers, and ranges with both of their ends, as in 0,3..5.
    #[arg(long, value_delimiter = ',', default_value = "0")]
    pub seeds: Vec<Seeds>,
    /// The most steps of a run.
    #[arg(long)]
    pub steps: Option<usize>,
    /// Texts per step.
    #[arg(long)]
    pub batch: Option<usize>,
    /// Runs at once, each in a process of its own: small models leave a GPU waiting for the host. The rows are the same,
    /// but for their order and their times.
    #[arg(long, default_value = "1")]
    pub processes: NonZeroUsize,
    /// Makes the runs that the standard input orders, for the program that has started this one.
    #[arg(long, hide = true)]
    pub worker: bool,
    /// Lists the runs, and how long they may take by the rows of --out and --times-from, and trains nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Rows that say how long a run takes where --out has none of the device yet [default: those of --rates-from].
    #[arg(long, value_name = "FILE")]
    pub times_from: Option<PathBuf>,
    /// Begins no run that may not end within so many minutes from the start. One without rows like it is begun.
    #[arg(long)]
    pub minutes: Option<f64>,
    /// The file of rows.
    #[arg(long, value_name = "FILE", default_value = "runs/recall.json")]
    pub out: PathBuf,
    /// The commit that was built [default: that of the working directory].
    #[arg(long)]
    pub commit: Option<String>,
    /// The machine, in words [default: Burn's name of the device, and the threads].
    #[arg(long)]
    pub machine: Option<String>,
}

impl Cli {
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

    /// The runs that are asked for: all arms of a length and a seed, then the next seed.
    ///
    /// # Errors
    ///
    /// One line that says which option is wrong.
    pub fn runs(&self) -> Result<Vec<Settings>, String> {
        let arms = match &self.arms[..] {
            [] => Arm::all(),
            arms => arms,
        };
        let arms = arms.iter().map(|&arm| Ok((arm, self.rates_of(arm)?)));
        let arms: Vec<(Arm, Vec<f64>)> = arms.collect::<Result<_, String>>()?;
        let tokens = match &self.tokens[..] {
            [] => vec![self.size.tokens()],
            tokens => tokens.to_vec(),
        };
        let mut runs = Vec::new();
        for tokens in tokens {
            for seed in self.seeds.iter().flat_map(Seeds::each) {
                for (arm, rates) in &arms {
                    for &share in &self.shares {
                        for &rate in rates {
                            let run = self.run(*arm, [tokens, share], rate, seed)?;
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

    /// The rates to train an arm with.
    fn rates_of(&self, arm: Arm) -> Result<Vec<f64>, String> {
        let Some(path) = &self.rates_from else {
            return Ok(self.rates.clone());
        };
        let best = rates::best(&rows::read(path)?, arm);
        let missing = || format!("{}: no row of the arm {}", path.display(), arm.name());
        Ok(vec![best.ok_or_else(missing)?])
    }

    fn run(
        &self,
        arm: Arm,
        [tokens, share]: [usize; 2],
        rate: f64,
        seed: u64,
    ) -> Result<Settings, String> {
        let run = Settings {
            device: self.device,
            dtype: self.dtype,
            layout: self.layout,
            tokens,
            window: Settings::window(arm, tokens, share.max(1)),
            narrowing: match arm.is_pruned() {
                true => self.narrowing,
                false => Narrowing::default(),
            },
            lengthening: self.lengthening,
            every_other_wide: self.every_other_wide && arm.is_pruned(),
            sink: self.sink,
            runners_up: self.runners_up.filter(|_| arm.has_runners_up()),
            round_robin: self.round_robin.filter(|_| arm.deals()),
            token_gradient_scale: self.token_gradient_scale.filter(|_| arm.has_runners_up()),
            leave_one_out: self.leave_one_out.filter(|_| arm.learns_by_rank()),
            rank_softmax: self.rank_softmax.filter(|_| arm.learns_by_rank()),
            steps: self.steps.unwrap_or(self.size.steps()),
            batch: self.batch.unwrap_or(self.size.batch()),
            rate,
            seed,
            ..Settings::of(arm, self.size)
        };
        if tokens < 16 {
            return Err("--tokens must be at least 16, for one pair".into());
        }
        if run.window < 4 {
            let window = run.window;
            return Err(format!(
                "--shares {share} of {tokens} tokens is a window of {window}: at least 4 are needed"
            ));
        }
        if run.steps == 0 || run.batch == 0 {
            return Err("--steps and --batch must be at least 1".into());
        }
        if !(rate > 0.0 && rate.is_finite()) {
            return Err(format!("--rates {rate}: a rate is above 0"));
        }
        factor::check("--token-gradient-scale", self.token_gradient_scale)?;
        Ok(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(line: &str) -> Result<Vec<Settings>, String> {
        let words = std::iter::once("recall").chain(line.split_whitespace());
        Cli::parse_from(words).runs()
    }

    #[test]
    fn every_combination_is_run_once() {
        let all = runs("--size table --shares 8,16 --seeds 0,1 --rates 1e-3,2e-3").unwrap();
        // Two arms prune nothing.
        assert_eq!(all.len(), (2 * (Arm::all().len() - 2) + 2) * 2 * 2);
        let windows = |arm| {
            let of_arm = all.iter().filter(move |run| run.arm == arm);
            let mut windows: Vec<_> = of_arm.map(|run| run.window).collect();
            windows.dedup();
            windows
        };
        assert_eq!(windows(Arm::Dense), [256]);
        assert_eq!(windows(Arm::Sliding), [32, 16, 32, 16]);
    }

    #[test]
    fn what_is_no_factor_on_a_gradient_is_refused() {
        for scale in ["-1", "NaN", "inf", "1e39"] {
            let error = runs(&format!("--token-gradient-scale={scale}")).unwrap_err();
            assert!(error.contains("--token-gradient-scale"), "{error}");
        }
        assert!(runs("--token-gradient-scale 0").is_ok());
    }

    #[test]
    fn kept_keys_learn_in_the_arms_whose_scores_learn_by_rank_alone() {
        let all = runs("--arms ours,centred,added,frozen,dense --leave-one-out").unwrap();
        let how: Vec<_> = all.iter().map(|run| run.leave_one_out).collect();
        let default = Some(LeaveOneOut::default());
        assert_eq!(how, [default, default, None, None, None]);
        let given = runs("--arms ours --leave-one-out 0.3").unwrap();
        assert_eq!(given[0].leave_one_out, LeaveOneOut::new(0.3).ok());
        for none in ["0", "-1", "NaN", "much"] {
            let words = ["recall".to_owned(), format!("--leave-one-out={none}")];
            assert!(Cli::try_parse_from(words).is_err(), "{none}");
        }
    }

    #[test]
    fn heads_take_turns_in_the_arms_whose_scores_only_rank() {
        let all = runs("--arms ours,centred,added,frozen,dense --round-robin 4").unwrap();
        let dealt: Vec<_> = (all.iter().map(|run| run.round_robin.map(|d| d.run))).collect();
        assert_eq!(dealt, [Some(4), Some(4), None, Some(4), None]);
    }

    #[test]
    fn short_texts_have_as_many_questions_and_as_large_a_share_of_the_keys() {
        let line =
            "--arms no-recent,ours,dense --tokens 512 --lengthening 0.5 --steps 90 --batch 2";
        for run in runs(line).unwrap() {
            let windows = match run.arm {
                Arm::Dense => [64, 128, 256, 512],
                Arm::Ours => [32, 32, 32, 64],
                _ => [8, 16, 32, 64],
            };
            for (stage, step) in [0, 15, 30, 45].into_iter().enumerate() {
                let trained = run.step(step);
                assert_eq!(trained.task.tokens, 64 << stage, "{:?}", run.arm);
                assert_eq!(trained.window, windows[stage], "{:?}", run.arm);
                assert_eq!(trained.batch * trained.task.pairs, 64);
                assert_eq!(trained.task.vocabulary(), run.task().vocabulary());
                assert_eq!(run.is_easier(step), stage < 3);
            }
        }
    }

    #[test]
    fn runners_up_are_told_to_the_arms_that_have_some() {
        let all = runs("--arms ours,frozen,dense,added-no-runners-up,zoh --runners-up 9").unwrap();
        let told: Vec<_> = all.iter().map(|run| run.runners_up).collect();
        assert_eq!(told, [Some(9), None, None, None, Some(9)]);
    }

    #[test]
    fn every_arm_has_the_sink_and_those_that_prune_the_wide_steps() {
        let line =
            "--arms ours,dense --shares 32 --size small --sink --every-other-wide --narrowing 0.5";
        let all = runs(line).unwrap();
        let windows = |run: &Settings| [0, 1, 999].map(|step| run.step(step).window);
        assert_eq!(
            all.iter().map(windows).collect::<Vec<_>>(),
            [[64, 64, 64], [128; 3]]
        );
        assert_eq!(all[0].step(998).window, 4);
        assert_eq!([0, 1, 999].map(|step| all[0].window_at(step)), [64, 64, 4]);
        assert!(all.iter().all(|run| run.sink));
        assert!(!runs("--arms ours").unwrap()[0].sink);
    }

    #[test]
    fn ranges_of_seeds_have_both_of_their_ends() {
        let all = runs("--arms ours --seeds 7,1..3").unwrap();
        let seeds: Vec<u64> = all.iter().map(|run| run.seed).collect();
        assert_eq!(seeds, [7, 1, 2, 3]);
        for wrong in ["3..1", "1..", "a"] {
            let words = ["recall", "--seeds", wrong];
            assert!(Cli::try_parse_from(words).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_cannot_be_trained_is_refused() {
        for (line, text) in [
            ("--tokens 8", "--tokens"),
            ("--tokens 64 --shares 32", "a window of 2"),
            ("--steps 0", "--steps"),
            ("--rates 0", "--rates 0"),
        ] {
            assert!(runs(line).unwrap_err().contains(text), "{line}");
        }
        assert!(
            runs("--rates-from none.json")
                .unwrap_err()
                .contains("dense")
        );
    }
}
