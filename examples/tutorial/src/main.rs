//! The programs of the book's chapters: `cargo run --release -p tutorial` lists them.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let Some(name) = arguments.next() else {
        print!("{}", tutorial::USAGE);
        return ExitCode::SUCCESS;
    };
    match tutorial::run(&name, arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tutorial: {error}");
            ExitCode::FAILURE
        }
    }
}
