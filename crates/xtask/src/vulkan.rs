//! `cargo xtask test-vulkan`: the kernels' tests through wgpu, and a layer of Burn.

use crate::process::{Result, cargo, switch, target_dir};
use crate::{setup, test};

/// Runs every test of the kernels on Vulkan, through WGSL, or with `--spirv` through CubeCL's own SPIR-V: without
/// Burn and LLVM, so in a folder of its own. Then builds Burn for the test of a layer, which is compared with Flex.
/// The error names every test that failed.
pub fn run(options: &[String]) -> Result {
    let (feature, engine) = match switch(options, "--spirv")? {
        true => ("vulkan", "kernels_vulkan"),
        false => ("wgpu", "kernels_wgpu"),
    };
    setup::vulkan()?;
    let run = |features: &str, name| {
        let mut tests = cargo(["test", "--package", "flash-dma-tests", "--test", "main"]);
        tests.args(["--no-default-features", "--features", features]);
        tests.env("CARGO_TARGET_DIR", target_dir().join("vulkan"));
        test::run_programs(tests.args(["--", name]))
    };
    run(feature, engine)?;
    run(&format!("flex,{feature}"), "layer_on_wgpu")
}
