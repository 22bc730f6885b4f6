//! `cargo xtask gpu-pack`: one archive with the CUDA suite, the benchmarks and the examples.
//!
//! A GPU machine needs a driver, a CUDA toolkit (NVRTC and its headers) and a C library not older than
//! the building machine's; no Rust, no LLVM. LLVM is linked statically; what else the binaries load and a
//! minimal system may lack travels along in `lib/`.

use crate::process::{Result, cargo, read, root, run as run_command, write_file};
use crate::setup;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What is packed, and the features it is built with.
const PACKAGES: [(&str, &[&str]); 6] = [
    ("flash-dma-tests", &["cuda", "fusion"]),
    ("flash-dma-benches", &["cuda"]),
    ("interop", &["cuda", "fusion"]),
    ("raw-kernels", &["cuda"]),
    ("train-text", &["cuda", "fusion"]),
    ("endless", &["cuda", "fusion"]),
];

/// The archive's one directory, and its name.
const NAME: &str = "flash-dma-gpu";

/// Limit of the archive, so that it can be carried anywhere.
const MAX_MEGABYTES: f64 = 60.0;

/// Libraries of every GNU/Linux system; the C library must not be mixed with another's.
const SYSTEM_LIBRARIES: [&str; 8] = [
    "linux-vdso.so",
    "ld-linux",
    "libc.so",
    "libm.so",
    "libdl.so",
    "librt.so",
    "libpthread.so",
    "libgcc_s.so",
];

/// Builds and writes the archive. The options go to cargo, such as `--config profile.gpu.opt-level=1`.
///
/// # Errors
/// When something does not build, or the archive is too large.
pub fn run(options: &[String]) -> Result {
    setup::run(setup::Needs::BUILD)?;
    let binaries = build(options)?;

    let out = root().join("gpu-pack");
    let dir = out.join(NAME);
    if dir.exists() {
        std::fs::remove_dir_all(&dir)
            .map_err(|e| format!("cannot clear {}: {e}", dir.display()))?;
    }
    for (name, path) in &binaries {
        copy(path, &dir.join("bin").join(name))?;
        for library in libraries(path)? {
            let name = library.file_name().expect("ldd prints paths of files");
            copy(&library, &dir.join("lib").join(name))?;
        }
    }
    let script = dir.join("run.sh");
    write_file(&script, include_str!("run.sh"))?;
    make_executable(&script)?;
    for script in ["examples/interop/torch_cases.py", "benches/roof.py"] {
        let script = root().join(script);
        let name = script.file_name().expect("a file");
        copy(&script, &dir.join(name))?;
    }
    write_file(&dir.join("COMMIT"), commit())?;

    let archive = out.join(format!("{NAME}.tar.xz"));
    println!("gpu-pack: compressing {} binaries", binaries.len());
    let mut tar = Command::new("tar");
    // Most of each binary is the LLVM and the Burn of the one before: the window spans three, the smallest
    // come first, which know no Burn, and no filter for jumps makes equal code differ.
    tar.env("XZ_OPT", "-T1 --lzma2=preset=4,dict=512MiB");
    tar.arg("-C").arg(&out).arg("-cJf").arg(&archive);
    run_command(tar.args(by_size(&dir)?))?;
    let bytes = std::fs::metadata(&archive)
        .map_err(|e| format!("{}: {e}", archive.display()))?
        .len();
    let megabytes = bytes as f64 / 1e6;
    println!("gpu-pack: {} ({megabytes:.1} MB)", archive.display());
    println!("gpu-pack: on the GPU machine: tar xf {NAME}.tar.xz && {NAME}/run.sh tests");
    if megabytes > MAX_MEGABYTES {
        return Err(format!("the archive is larger than {MAX_MEGABYTES} MB"));
    }
    Ok(())
}

/// Builds the binaries and the integration test; returns their names in the archive and paths.
fn build(options: &[String]) -> Result<BTreeMap<String, PathBuf>> {
    let features: Vec<String> = PACKAGES
        .iter()
        .flat_map(|(package, features)| features.iter().map(move |f| format!("{package}/{f}")))
        .collect();
    let mut build = cargo(["build", "--profile", "gpu", "--bins", "--test", "*"]);
    build.args([
        "--no-default-features",
        "--message-format",
        "json-render-diagnostics",
    ]);
    build.args(["--features", &features.join(",")]);
    build.args(
        PACKAGES
            .iter()
            .flat_map(|(package, _)| ["--package", package]),
    );
    build.args(options);
    println!("gpu-pack: building {} packages", PACKAGES.len());

    let messages = read(&mut build)?;
    let mut binaries: BTreeMap<_, _> = messages.lines().filter_map(executable).collect();
    // It works on the repository, which stays here.
    binaries.remove("bench-report");
    if !binaries.contains_key("tests") {
        return Err(format!("cargo built no test, only {:?}", binaries.keys()));
    }
    Ok(binaries)
}

/// The executable of one of cargo's messages: its name in the archive and its path.
fn executable(message: &str) -> Option<(String, PathBuf)> {
    let path = after(message, "\"executable\":\"")?;
    let target = message.split_once("\"target\":{")?.1;
    let name = match target.starts_with("\"kind\":[\"test\"]") {
        true => "tests",
        false => after(target, "\"name\":\"")?,
    };
    Some((name.to_owned(), PathBuf::from(path)))
}

/// A JSON string's content after the mark; paths and names here hold nothing that JSON escapes.
fn after<'a>(text: &'a str, mark: &str) -> Option<&'a str> {
    text.split_once(mark)?.1.split('"').next()
}

/// The shared libraries that a binary loads and that not every system has.
///
/// # Errors
/// When one is missing here, or LLVM is among them: it is not to be linked dynamically.
fn libraries(binary: &Path) -> Result<Vec<PathBuf>> {
    let listing = read(Command::new("ldd").arg(binary))?;
    let mut found = Vec::new();
    for line in listing.lines() {
        let Some((name, rest)) = line.trim().split_once(" => ") else {
            continue;
        };
        if SYSTEM_LIBRARIES
            .iter()
            .any(|system| name.starts_with(system))
        {
            continue;
        }
        if name.starts_with("libLLVM") || !rest.starts_with('/') {
            return Err(format!(
                "{} must not load {name} ({rest})",
                binary.display()
            ));
        }
        found.extend(rest.split(" (").next().map(PathBuf::from));
    }
    Ok(found)
}

/// Every file of the archive, smallest first, below the directory that holds `dir`.
fn by_size(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for folder in [dir.to_path_buf(), dir.join("lib"), dir.join("bin")] {
        let Ok(entries) = std::fs::read_dir(&folder) else {
            continue;
        };
        for entry in entries.flatten() {
            let size = entry.metadata().map_or(0, |m| m.len());
            if entry.path().is_file() {
                files.push((size, entry.path()));
            }
        }
    }
    files.sort();
    let parent = dir.parent().unwrap_or(dir);
    let relative = |path: PathBuf| path.strip_prefix(parent).map(Path::to_path_buf);
    files
        .into_iter()
        .map(|(_, path)| relative(path).map_err(|e| e.to_string()))
        .collect()
}

/// The commit that is packed, with a mark if the tree differs from it.
fn commit() -> String {
    let mut git = Command::new("git");
    git.args(["describe", "--always", "--dirty", "--abbrev=12"])
        .current_dir(root());
    read(&mut git).unwrap_or_else(|_| "unknown\n".into())
}

fn copy(from: &Path, to: &Path) -> Result {
    let copy = || {
        std::fs::create_dir_all(to.parent().unwrap_or(to))?;
        std::fs::copy(from, to)
    };
    copy().map_err(|e| format!("cannot copy {} to {}: {e}", from.display(), to.display()))?;
    Ok(())
}

fn make_executable(path: &Path) -> Result {
    run_command(Command::new("chmod").arg("+x").arg(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_are_read_from_cargo_messages() {
        let test = r#"{"reason":"compiler-artifact","package_id":"path+file:///r/tests#flash-dma-tests@0.1.0","manifest_path":"/r/tests/Cargo.toml","target":{"kind":["test"],"crate_types":["bin"],"name":"suite","src_path":"/r/tests/suite/main.rs","edition":"2024"},"profile":{"opt_level":"2","test":true},"features":[],"filenames":["/t/gpu/deps/suite-1"],"executable":"/t/gpu/deps/suite-1","fresh":false}"#;
        assert_eq!(
            executable(test),
            Some(("tests".into(), "/t/gpu/deps/suite-1".into()))
        );
        let bin = test.replace(r#""kind":["test"]"#, r#""kind":["bin"]"#);
        assert_eq!(
            executable(&bin),
            Some(("suite".into(), "/t/gpu/deps/suite-1".into()))
        );
        let library = bin.replace(
            r#""executable":"/t/gpu/deps/suite-1""#,
            r#""executable":null"#,
        );
        assert_eq!(executable(&library), None);
        assert_eq!(
            executable(r#"{"reason":"build-finished","success":true}"#),
            None
        );
    }
}
