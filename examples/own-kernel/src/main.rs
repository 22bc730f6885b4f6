//! Runs the kernel: the keys with the greatest mass, the comparison with f64, and the time of a launch.
//!
//! ```text
//! cargo run -p own-kernel -- --device cpu --length 256 --window 32
//! cargo run --release -p own-kernel --no-default-features --features cuda -- --device cuda --length 32768 --window 2048
//! ```

use cubecl::Device;
use cubecl::client::Client;
use flash_dma_kernels::{AttentionOptions, ElementType, Problem};
use flash_dma_problem::cost::active_pairs;
use flash_dma_reference::compare::compare_by;
use flash_dma_reference::generate::{self, Scores};
use own_kernel::forward::forward_pass;
use own_kernel::launch::attention_mass;
use own_kernel::oracle;
use own_kernel::tensors::{download, empty};
use own_kernel::timing::time;
use std::error::Error;
use std::process::ExitCode;

/// Problems of more tokens are not compared with f64, which would take minutes.
const MOST_COMPARED: usize = 2048;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match Settings::parse(&args).and_then(|settings| run(&settings)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("own-kernel: {e}");
            ExitCode::FAILURE
        }
    }
}

/// What the command line says.
struct Settings {
    device: String,
    element: ElementType,
    length: usize,
    window: usize,
    head_dim: usize,
    samples: usize,
    launches: u32,
}

impl Settings {
    fn parse(args: &[String]) -> Result<Self, Box<dyn Error>> {
        let mut settings = Self {
            device: "cpu".into(),
            element: ElementType::F32,
            length: 256,
            window: 32,
            head_dim: 64,
            samples: 5,
            launches: 4,
        };
        for pair in args.chunks(2) {
            let [option, value] = pair else {
                return Err(format!("{} needs a value", pair[0]).into());
            };
            match option.as_str() {
                "--device" => settings.device.clone_from(value),
                "--element" => settings.element = element(value)?,
                "--length" => settings.length = value.parse()?,
                "--window" => settings.window = value.parse()?,
                "--head-dim" => settings.head_dim = value.parse()?,
                "--samples" => settings.samples = value.parse::<usize>()?.max(1),
                "--launches" => settings.launches = value.parse::<u32>()?.max(1),
                other => {
                    let known = "--device, --element, --length, --window, --head-dim, --samples, --launches";
                    return Err(format!("no option {other}: {known}").into());
                }
            }
        }
        Ok(settings)
    }
}

fn element(name: &str) -> Result<ElementType, Box<dyn Error>> {
    match name {
        "f32" => Ok(ElementType::F32),
        "f16" => Ok(ElementType::F16),
        "bf16" => Ok(ElementType::Bf16),
        other => Err(format!("no element type {other}: f32, f16 or bf16").into()),
    }
}

fn client(device: &str) -> Result<Client, Box<dyn Error>> {
    match device {
        "cpu" => Ok(Device::cpu()?.client()),
        "cuda" => Ok(Device::cuda(0)?.client()),
        other => Err(format!("no device {other}: cpu or cuda").into()),
    }
}

fn run(settings: &Settings) -> Result<(), Box<dyn Error>> {
    let client = client(&settings.device)?;
    let (q_shape, kv_shape) = (
        [1, 4, settings.length, settings.head_dim],
        [1, 2, settings.length, settings.head_dim],
    );
    let problem = Problem::new(
        &q_shape,
        &kv_shape,
        &kv_shape,
        Some(&kv_shape[..3]),
        settings.element,
        &AttentionOptions::new().with_keep_window(settings.window),
    )?;
    println!("{problem:?}\non {}\n", client.name());
    let host = generate::inputs(problem, Scores::Recency, 1.0, 42);

    let inputs = forward_pass(&client, &host)?;
    let mass = empty(&client, &problem.scores_shape(), 4);
    attention_mass(&client, &problem, &inputs, &mass)?;
    let values = download(&client, mass.clone());
    let total: f64 = values.iter().sum();
    println!("all keys together: {total:.3}; every query hands out 1");
    if settings.length <= MOST_COMPARED {
        let (shape, exact) = (problem.scores_shape(), oracle::attention_mass(&host));
        let report = compare_by("mass", &shape, &values, &exact, 0.0, ElementType::F32, 1.0)?;
        let (error, percent) = (report.error, report.ratio * 100.0);
        println!("against f64: worst error {error:.1e}, {percent:.0} % of its bound");
    } else {
        println!("against f64: not compared, as there are more than {MOST_COMPARED} tokens");
    }
    show_greatest(&values[..problem.k_len]);

    let timing = time(&client, settings.samples, settings.launches, || {
        attention_mass(&client, &problem, &inputs, &mass)
    })?;
    let (least, median, most) = (timing.least, timing.median, timing.most);
    let flops = (2 * problem.head_dim) as f64 * active_pairs(&problem) as f64;
    let rate = flops / median.as_secs_f64() * 1e-9;
    println!(
        "a launch: median {median:.2?} ({least:.2?} to {most:.2?}), {rate:.2} GFLOP/s of useful products"
    );
    Ok(())
}

fn show_greatest(mass: &[f64]) {
    let mut keys: Vec<usize> = (0..mass.len()).collect();
    keys.sort_by(|&a, &b| mass[b].total_cmp(&mass[a]));
    let greatest = keys
        .iter()
        .take(5)
        .map(|&j| format!("{j} ({:.2})", mass[j]));
    let greatest: Vec<String> = greatest.collect();
    let unused = mass.iter().filter(|&&m| m == 0.0).count();
    println!(
        "the keys of head 0 with the greatest mass: {}",
        greatest.join(", ")
    );
    println!("keys without any: {unused} of {}", mass.len());
}
