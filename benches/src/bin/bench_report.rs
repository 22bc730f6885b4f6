//! Writes the book's tables and plots, and the README's, from the records in `bench-results/`.
//!
//! ```text
//! cargo xtask bench-report
//! cargo xtask bench-report --check
//! ```

use clap::Parser;
use flash_dma_benches::report::{Output, Places};
use std::process::ExitCode;

/// Writes the marked blocks and the plots that the records in `bench-results/` give.
#[derive(Parser)]
struct Args {
    /// Writes nothing, and fails if a file is not what the records give.
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    places: Places,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("bench-report: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), String> {
    let outputs = args.places.outputs()?;
    let stale: Vec<(&Output, String)> = (outputs.iter())
        .filter_map(|output| Some((output, output.stale()?)))
        .collect();
    if args.check && !stale.is_empty() {
        let told: Vec<String> = stale.into_iter().map(|(_, told)| told).collect();
        return Err(format!(
            "not what the records give:\n  {}",
            told.join("\n  ")
        ));
    }
    for (Output { path, text }, _) in &stale {
        let name = path.display();
        println!("bench-report: {name}");
        std::fs::write(path, text).map_err(|e| format!("cannot write {name}: {e}"))?;
    }
    println!(
        "bench-report: {} files, {} of them changed",
        outputs.len(),
        stale.len()
    );
    Ok(())
}
