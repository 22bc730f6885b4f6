//! `cargo xtask setup`: what a build of a CubeCL runtime needs beyond Rust and a C compiler.
//!
//! `cubecl-llvm` links LLVM (the CUDA and the CPU runtime both contain it) and finds it in a prefix that the build
//! script of `tracel-llvm-bundler` fills from a GitHub release. Where that cannot be reached, the distribution's LLVM
//! is used: the prefix then holds a two-line `llvm-config` that calls the distribution's. [`mod@plan`] decides from
//! facts alone, [`facts`] looks at the machine.

mod facts;
mod plan;

use crate::process::{Result, run as run_command, write_file};
use facts::{gather, marker};
use plan::{Llvm, Plan, Privilege, plan};
use std::path::Path;
use std::process::Command;

/// The prerequisites of the command to run.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// Whether Python is needed: it installs the spelling checker, and installs and drives NVIDIA's compilers.
    pub python: bool,
}

impl Needs {
    /// Everything the project's commands use.
    pub const ALL: Self = Self { python: true };
    /// The prerequisites for building a CubeCL runtime.
    pub const BUILD: Self = Self { python: false };
}

/// A wrapper for the distribution's `llvm-config`. The latter names some system libraries by their absolute path, from
/// which the bundler makes flags like `-llibz3`; as `-lz3` they pass through it unharmed.
const LLVM_CONFIG_WRAPPER: &str = "\
#!/bin/sh
# Written by `cargo xtask setup`: the distribution's LLVM in place of the bundled one.
# Absolute library paths become -l flags, which is what the bundler understands.
llvm-config-VERSION \"$@\" | sed 's#/[^ ]*/lib\\([^/ ]*\\)\\.so#-l\\1#g'
";

/// Runs the command.
///
/// # Errors
/// When something is missing that cannot be installed from here: the text lists the commands.
pub fn run(needs: Needs) -> Result {
    let facts = gather(needs)?;
    let Plan {
        llvm,
        packages,
        privilege,
    } = plan(&facts)?;

    if !packages.is_empty() {
        install(&packages, privilege)?;
    }
    let prefix = facts.prefix.display();
    match llvm {
        Llvm::Keep => println!("setup: LLVM is in {prefix}; nothing to do"),
        Llvm::Download => println!(
            "setup: the build itself will download LLVM {} (once, to {prefix})",
            facts.bundle_version
        ),
        Llvm::Distribution => {
            write_prefix(&facts.prefix)?;
            println!(
                "setup: {prefix} now refers to the distribution's LLVM {}",
                plan::DISTRIBUTION
            );
        }
    }
    Ok(())
}

/// Installs a Vulkan loader and a driver that runs on the CPU, unless both a loader and a driver exist.
///
/// # Errors
/// When they are missing and cannot be installed from here: the text lists the commands.
pub fn vulkan() -> Result {
    if facts::has_vulkan() {
        println!("setup: there is a Vulkan driver; nothing to do");
        return Ok(());
    }
    let packages = facts::missing(&VULKAN_PACKAGES);
    install(&packages, facts::rights().to_install(&packages)?)
}

/// A browser that runs without a window: one of [`BROWSERS`], or else the distribution's Chromium, which is installed.
///
/// # Errors
/// When there is none and it cannot be installed from here: the text lists the commands.
pub fn browser() -> Result<&'static str> {
    let found = || {
        BROWSERS
            .into_iter()
            .find(|name| facts::runs(name, &["--version"]))
    };
    if let Some(browser) = found() {
        return Ok(browser);
    }
    let privilege = facts::rights().to_install(&BROWSER_PACKAGES)?;
    install(&BROWSER_PACKAGES, privilege)?;
    found().ok_or_else(|| "Chromium is installed and does not run".into())
}

/// Browsers that take Chromium's options.
const BROWSERS: [&str; 4] = [
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
];

const BROWSER_PACKAGES: [&str; 1] = ["chromium"];

/// The loader, and Mesa's drivers: lavapipe among them, which needs no GPU.
const VULKAN_PACKAGES: [&str; 2] = ["libvulkan1", "mesa-vulkan-drivers"];

fn install(packages: &[&str], privilege: Privilege) -> Result {
    println!("setup: installing {}", packages.join(" "));
    let apt = |args: &[&str]| {
        let mut command = match privilege {
            Privilege::Root => Command::new("apt-get"),
            Privilege::Sudo => {
                let mut sudo = Command::new("sudo");
                sudo.args(["-n", "DEBIAN_FRONTEND=noninteractive", "apt-get"]);
                sudo
            }
        };
        command.env("DEBIAN_FRONTEND", "noninteractive").args(args);
        run_command(&mut command)
    };
    let mut args = vec!["install", "-y", "-qq", "--no-install-recommends"];
    args.extend(packages);
    if apt(&args).is_ok() {
        return Ok(());
    }
    println!("setup: trying again with fresh package lists");
    let manual = || plan::manual(packages);
    apt(&["update", "-qq"]).map_err(|e| format!("{e}\n{}", manual()))?;
    apt(&args).map_err(|e| format!("{e}\n{}", manual()))
}

/// Writes the prefix that refers to the distribution's LLVM; the marker last, so that an interrupted
/// run leaves a prefix that the next one completes.
fn write_prefix(prefix: &Path) -> Result {
    let wrapper = prefix.join("bin/llvm-config");
    write_file(
        &wrapper,
        LLVM_CONFIG_WRAPPER.replace("VERSION", plan::DISTRIBUTION),
    )?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&wrapper, std::fs::Permissions::from_mode(0o755))
            .map_err(|e| format!("cannot make {} executable: {e}", wrapper.display()))?;
    }
    if !facts::works(&wrapper) {
        return Err(format!(
            "{} does not run; is llvm-config-22 in PATH?",
            wrapper.display()
        ));
    }
    write_file(&marker(prefix), "")
}
