//! Runs the kernel; see `--help` for the options. The book's chapter has the command for a GPU.

use clap::Parser;
use flash_dma_kernels::{AttentionOptions, ElementType, Problem};
use flash_dma_problem::cost::active_pairs;
use flash_dma_reference::compare::compare_by;
use flash_dma_reference::generate::{self, Scores};
use own_kernel::{attention_mass, blueprint, exact_mass, forward_pass};
use raw_kernels::{Kind, download, empty, time};
use std::error::Error;

/// Computes the mass that every key receives: the keys with the most, the error against f64, and the time of a
/// launch.
#[derive(Parser)]
struct Cli {
    #[arg(long, default_value = "cpu", value_parser = ["cpu", "cuda"])]
    device: String,
    #[arg(long, default_value = "f32", value_parser = ["f32", "f16", "bf16"])]
    element: String,
    #[arg(long, default_value_t = 256)]
    length: usize,
    #[arg(long, default_value_t = 32)]
    window: usize,
    #[arg(long, default_value_t = 64)]
    head_dim: usize,
    /// Launches in each of five measurements.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    launches: u32,
}

fn main() {
    if let Err(error) = run(&Cli::parse()) {
        eprintln!("own-kernel: {error}");
        std::process::exit(1);
    }
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let client = match cli.device.as_str() {
        "cuda" => cubecl::Device::cuda(0)?.client(),
        _ => cubecl::Device::cpu()?.client(),
    };
    let element = match cli.element.as_str() {
        "f16" => ElementType::F16,
        "bf16" => ElementType::Bf16,
        _ => ElementType::F32,
    };
    let [q, k] = [4, 2].map(|heads| [1, heads, cli.length, cli.head_dim]);
    let options = AttentionOptions::new().with_keep_window(cli.window);
    let problem = Problem::new(&q, &k, &k, Some(&k[..3]), element, &options)?;
    println!("{problem:?}\non {}\n", client.name());
    let host = generate::inputs(problem, Scores::Recency, 1.0, 42);

    let (inputs, lse) = forward_pass(&client, &host)?;
    let (shape, blueprint) = (problem.scores_shape(), blueprint(&client, &problem)?);
    let mass = empty(&client, &shape, Kind::F32);
    let launch = || attention_mass(&client, &problem, &inputs, &lse, &mass, blueprint);
    launch()?;
    let values = download(&client, mass.clone(), Kind::F32);
    let total: f64 = values.iter().sum();
    println!("all keys together: {total:.3}; every query hands out 1");
    // With more tokens f64 would take minutes.
    if cli.length <= 2048 {
        let exact = exact_mass(&host);
        let report = compare_by("mass", &shape, &values, &exact, 0.0, ElementType::F32, 1.0)?;
        let (error, percent) = (report.error, report.ratio * 100.0);
        println!("against f64: worst error {error:.1e}, {percent:.0} % of its bound");
    }
    let mut keys: Vec<usize> = (0..problem.k_len).collect();
    keys.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    let best = keys.iter().take(5);
    let best: Vec<String> = best.map(|&j| format!("{j} ({:.2})", values[j])).collect();
    let best = best.join(", ");
    println!("the keys of head 0 with the greatest mass: {best}");

    // ANCHOR: time
    let sample = || (0..cli.launches).try_for_each(|_| launch());
    // The first launch, above, has compiled.
    let mut times = time(&client, 5, sample)?;
    times.sort_unstable();
    let [least, median, most] = [0, 2, 4].map(|at| times[at] / cli.launches);
    let products = (2 * problem.head_dim) as f64 * active_pairs(&problem) as f64;
    let rate = products / median.as_secs_f64() * 1e-9;
    println!("a launch: median {median:.2?} ({least:.2?} to {most:.2?}), {rate:.2} GFLOP/s");
    // ANCHOR_END: time
    Ok(())
}
