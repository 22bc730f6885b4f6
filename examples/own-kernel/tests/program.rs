//! The program at a small size.
#![cfg(feature = "cpu")]

use std::process::{Command, Output};

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_own-kernel"))
        .args(args)
        .output()
        .expect("the program starts")
}

#[test]
fn the_program_agrees_with_f64_and_times_a_launch() {
    let output = run(&[
        "--length",
        "48",
        "--window",
        "8",
        "--samples",
        "2",
        "--launches",
        "1",
    ]);
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for line in [
        "all keys together: 192.000;",
        "against f64: worst error",
        "the keys of head 0 with the greatest mass:",
        "a launch: median",
    ] {
        assert!(text.contains(line), "no {line:?} in\n{text}");
    }
}

#[test]
fn a_wrong_option_is_refused_by_name() {
    for (args, message) in [
        (&["--size", "48"][..], "no option --size"),
        (&["--length"], "--length needs a value"),
        (&["--element", "f64"], "no element type f64"),
        (&["--head-dim", "12"], "head dimension 12 is not supported"),
    ] {
        let output = run(args);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(message), "{text}");
    }
}
