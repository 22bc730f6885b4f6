//! The program on CubeCL's CPU runtime.
#![cfg(feature = "cpu")]

use std::process::{Command, Output};

fn raw_kernels(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_raw-kernels"))
        .args(arguments)
        .output()
        .expect("cargo has built the program")
}

#[test]
fn every_pass_agrees_with_the_oracle() {
    for arguments in [&[][..], &["cpu", "f16"], &["cpu", "bf16"]] {
        let output = raw_kernels(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {error}");
        let text = String::from_utf8(output.stdout).expect("it prints text");
        let tensors = ["out", "lse", "dq", "dk", "dv", "dscores"];
        for tensor in tensors {
            let line = text.lines().find(|line| line.trim().starts_with(tensor));
            let line = line.unwrap_or_else(|| panic!("{tensor}: {text}"));
            assert!(line.contains("worst error"), "{line}");
        }
        assert!(text.contains("  intervals  equal; "), "{text}");
        assert!(
            text.ends_with("all equal to the oracle within its bounds\n"),
            "{text}"
        );
    }
}

#[test]
fn what_it_does_not_know_is_refused_in_one_line() {
    for (arguments, text) in [
        (
            &["tpu"][..],
            "raw-kernels: no device tpu: cpu, cuda or wgpu\n",
        ),
        (
            &["cpu", "f64"],
            "raw-kernels: no element type f64: f32, f16 or bf16\n",
        ),
    ] {
        let output = raw_kernels(arguments);
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(String::from_utf8_lossy(&output.stderr), text);
    }
}
