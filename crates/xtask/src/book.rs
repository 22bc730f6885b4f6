//! `cargo xtask book`: renders the book.

use crate::process::{Result, root, run as run_command, switch, target_dir, try_output};
use crate::tidy;
use std::process::Command;

/// Checks the book's links and included code, then renders it with mdBook.
///
/// # Errors
/// When a link leads nowhere, or mdBook is missing or fails.
pub fn run(options: &[String]) -> Result {
    let open = switch(options, "--open")?;
    tidy::run()?;
    if try_output("mdbook", &["--version"]).is_none() {
        return Err("mdBook is not installed; `cargo install mdbook --locked` provides it".into());
    }
    let dest = target_dir().join("book");
    let mut build = Command::new("mdbook");
    build
        .arg("build")
        .arg("--dest-dir")
        .arg(&dest)
        .arg(root().join("book"));
    if open {
        build.arg("--open");
    }
    run_command(&mut build)?;
    println!("book: {}", dest.join("index.html").display());
    Ok(())
}
