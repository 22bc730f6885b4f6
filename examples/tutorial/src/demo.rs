//! The idea in a minute: a model learns which keys to keep.
//!
//! `cargo xtask demo` trains the same model three times, and shows which keys it keeps of a text before and after,
//! and its answers. `--steps N` sets the number of steps, `--out DIR` writes the pictures there, `--svg DIR` draws
//! them for the book.

use crate::model::Model;
use crate::picture::Picture;
use crate::task::{FACTS, LENGTH};
use crate::training::{Arm, Outcome, WINDOW, evaluate, train};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

const SEED: u64 = 9;

struct Options {
    steps: usize,
    out: PathBuf,
    svg: Option<PathBuf>,
}

pub fn main(arguments: impl Iterator<Item = String>) -> Result<(), String> {
    let options = options(arguments)?;
    println!(
        "A text of {LENGTH} tokens hides {FACTS} facts among distractors and ends in {FACTS} questions about them. A \
         query may\nattend to {WINDOW} keys per head. Which ones must be known before the question comes.\n"
    );
    let arm = Arm::LEARNED;
    let device = burn::tensor::Device::flex().autodiff();
    let before = evaluate(&Model::seeded(SEED, &device), arm.scores, &arm.selector());

    let start = Instant::now();
    let [learned, random, dense] = three(options.steps);
    println!("\ntrained in {:.0} s\n", start.elapsed().as_secs_f64());

    let made = std::fs::create_dir_all(&options.out);
    made.map_err(|e| format!("cannot make {}: {e}", options.out.display()))?;
    for (name, outcome) in [("before", &before), ("after", &learned)] {
        let picture = Picture::of(outcome, 0);
        println!(
            "What a head keeps {name} training: keys across, positions downwards; blocks are kept keys, dots dropped \
             ones, ▼ facts."
        );
        for line in picture.lines(std::io::stdout().is_terminal()) {
            println!("  {line}");
        }
        let path = options.out.join(format!("{name}.png"));
        picture.write_png(&path).map_err(unwritten(&path))?;
        println!("  {}\n", path.display());
        if let Some(folder) = &options.svg {
            let path = folder.join(format!("demo-{name}.svg"));
            std::fs::write(&path, picture.svg()).map_err(unwritten(&path))?;
        }
    }
    println!("{}", table(&learned, &random, &dense));
    Ok(())
}

fn unwritten(path: &Path) -> impl Fn(std::io::Error) -> String {
    move |error| format!("cannot write {}: {error}", path.display())
}

fn options(mut arguments: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        steps: 250,
        out: PathBuf::from("runs/demo"),
        svg: None,
    };
    while let Some(name) = arguments.next() {
        let value = arguments.next();
        let value = value.ok_or_else(|| format!("`{name}` needs a value"))?;
        match name.as_str() {
            "--steps" => {
                let steps = value.parse();
                options.steps = steps.map_err(|e| format!("`--steps {value}`: {e}"))?;
            }
            "--out" => options.out = PathBuf::from(value),
            "--svg" => options.svg = Some(PathBuf::from(value)),
            _ => return Err(format!("unknown option `{name}`")),
        }
    }
    Ok(options)
}

/// Learned, random and dense, side by side.
fn three(steps: usize) -> [Outcome; 3] {
    let trained = |arm: Arm| {
        let report = |step: usize, loss: f32, now: &Outcome| {
            if arm.name == Arm::LEARNED.name {
                println!(
                    "step {step:4}  loss {loss:.3}  facts kept {:5.1} %  questions answered {:5.1} %",
                    100.0 * now.kept,
                    100.0 * now.right
                );
            }
        };
        train(arm, SEED, steps, report)
    };
    thread::scope(|scope| {
        let arms = [Arm::LEARNED, Arm::RANDOM, Arm::DENSE];
        let running = arms.map(|arm| scope.spawn(move || trained(arm)));
        running.map(|thread| thread.join().expect("a training does not panic"))
    })
}

fn table(learned: &Outcome, random: &Outcome, dense: &Outcome) -> String {
    let mut table = format!(
        "{:<28} {:>12} {:>20}\n",
        "keys that a query keeps", "facts kept", "questions answered"
    );
    for (name, outcome) in [
        (format!("{WINDOW}, by learned scores"), learned),
        (format!("{WINDOW}, at random"), random),
        (format!("all {LENGTH}"), dense),
    ] {
        table += &format!(
            "{name:<28} {:>10.1} % {:>18.1} %\n",
            100.0 * outcome.kept,
            100.0 * outcome.right
        );
    }
    table
}
