//! `playground --book DIR --browser PATH`: the playground page of the rendered book, in a headless browser.
//!
//! Compares what the page's functions compute with the reference on seeded cases, then drives the page, wide and
//! narrow, and compares what it draws. A script error, a console error or a missing file fails, too.

mod browser;
mod cases;
mod page;
mod server;

use browser::Browser;
use cases::Case;
use serde_json::{Value, json};
use server::Server;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

const HELP: &str = "\
Usage: playground --book DIR --browser PATH

  --book DIR      The rendered book.
  --browser PATH  Chromium, or another browser that takes its options.
";

/// The page, in the book's folder.
const PAGE: &str = "playground.html";

/// The longest time until the page has posted its report.
const LIMIT: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|a| a == "--help" || a == "-h") {
        print!("{HELP}");
        return ExitCode::SUCCESS;
    }
    match options(&arguments).and_then(|(book, browser)| run(book, &browser)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("{text}");
            ExitCode::FAILURE
        }
    }
}

/// The book's folder and the browser.
fn options(arguments: &[String]) -> Result<(PathBuf, PathBuf), String> {
    let (mut book, mut browser) = (None, None);
    for pair in arguments.chunks(2) {
        match pair {
            [name, value] if name == "--book" => book = Some(PathBuf::from(value)),
            [name, value] if name == "--browser" => browser = Some(PathBuf::from(value)),
            [other, ..] => return Err(format!("{other}: no such option, or no value\n\n{HELP}")),
            [] => {}
        }
    }
    let missing = |name| format!("{name} is missing\n\n{HELP}");
    let book = book.ok_or_else(|| missing("--book"))?;
    let browser = browser.ok_or_else(|| missing("--browser"))?;
    if !book.join(PAGE).is_file() {
        return Err(format!("{} has no {PAGE}", book.display()));
    }
    Ok((book, browser))
}

/// Checks the page in two widths, with two columns and with one.
fn run(book: PathBuf, browser: &std::path::Path) -> Result<(), String> {
    let cases = cases::generate();
    println!("{}", cases::coverage(&cases)?);
    let work: Vec<Value> = cases.iter().map(Case::to_json).collect();
    let work = json!({ "cases": work, "moves": page::MOVES });
    let server = Server::start(book, PAGE, work.to_string())?;
    for width in [1100, 400] {
        let report = drive(&server, browser, width)?;
        let mut faults = faults(&cases, &report, &server.missing());
        faults.extend(page::check_width(&report, width.into()).err());
        if !faults.is_empty() {
            return Err(format!(
                "with a page {width} pixels wide:\n{}",
                faults.join("\n")
            ));
        }
        println!(
            "page {width} pixels wide: {} cases and {} states of the page agree with the reference",
            cases.len(),
            report["states"].as_array().map_or(0, Vec::len)
        );
    }
    Ok(())
}

fn drive(server: &Server, browser: &std::path::Path, width: u32) -> Result<Value, String> {
    let mut browser = Browser::start(browser, &server.url(width))?;
    let report = browser.wait_for(LIMIT, |pause| server.report(pause))?;
    serde_json::from_str(&report).map_err(|error| format!("the report: {error}"))
}

/// What is wrong with a report, the first fault of each part.
fn faults(cases: &[Case], report: &Value, missing: &[String]) -> Vec<String> {
    let mut faults = Vec::new();
    for error in report["errors"].as_array().into_iter().flatten() {
        faults.push(format!("in the browser: {error}"));
    }
    for path in missing {
        faults.push(format!("the page asks for {path}, which the book has not"));
    }
    faults.extend(cases::compare(cases, &report["cases"]).err());
    faults.extend(page::compare(report).err());
    faults
}
