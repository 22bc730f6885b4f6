//! `cargo xtask book`: renders the book, and drives its playground in a browser.

use crate::process::{Result, cargo, root, run as run_command, switch, target_dir};
use crate::{setup, tidy, tools};
use std::path::PathBuf;

/// Checks the book's links and included code, then renders it with mdBook.
pub fn run(options: &[String]) -> Result {
    let open = switch(options, "--open")?;
    tidy::run()?;
    let book = render(open)?;
    println!("book: {}", book.join("index.html").display());
    Ok(())
}

/// Renders the book and compares its playground, in a headless browser, with the reference.
pub fn check() -> Result {
    let book = render(false)?;
    let browser = setup::browser()?;
    let mut playground = cargo(["run", "--quiet", "--package", "flash-dma-tests"]);
    // Without features, so that neither Burn nor CubeCL is built.
    playground.args(["--no-default-features", "--features", "programs"]);
    playground
        .args(["--bin", "playground", "--", "--book"])
        .arg(book);
    run_command(playground.arg("--browser").arg(browser))
}

fn render(open: bool) -> Result<PathBuf> {
    let dest = target_dir().join("book");
    let mut build = tools::MDBOOK.command()?;
    build.args(["build", "--dest-dir"]).arg(&dest);
    build.arg(root().join("book"));
    run_command(build.args(open.then_some("--open")))?;
    Ok(dest)
}
