//! The program on CubeCL's CPU runtime.
#![cfg(feature = "cpu")]

use testing::Program;

#[path = "../../testing.rs"]
mod testing;

const RAW_KERNELS: Program = Program(env!("CARGO_BIN_EXE_raw-kernels"));

#[test]
fn every_pass_agrees_with_the_oracle() {
    for arguments in ["", "cpu f16", "cpu bf16"] {
        let text = RAW_KERNELS.printed(arguments, &[]);
        let tensors = ["out", "lse", "dq", "dk", "dv", "dscores"];
        for tensor in tensors {
            let line = text.lines().find(|line| line.trim().starts_with(tensor));
            let line = line.unwrap_or_else(|| panic!("{tensor}: {text}"));
            assert!(line.contains("worst error"), "{line}");
        }
        assert!(text.contains("  intervals  equal; "), "{text}");
        let end = "all equal to the oracle within its bounds\n";
        assert!(text.ends_with(end), "{text}");
    }
}

#[test]
fn what_it_does_not_know_is_refused_in_one_line() {
    for (arguments, text) in [
        ("tpu", "no device tpu: cpu, cuda or wgpu"),
        ("cpu f64", "no element type f64: f32, f16 or bf16"),
    ] {
        let output = RAW_KERNELS.call(arguments, &[]);
        assert_eq!(output.status.code(), Some(1));
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(error, format!("raw-kernels: {text}\n"));
    }
}
