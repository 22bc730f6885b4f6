//! `cargo xtask gpu-pack`: one archive with the CUDA suite, the benchmarks and the examples.
//!
//! A GPU machine needs a driver, a CUDA toolkit (NVRTC and its headers) and a C library not older than the building
//! machine's; no Rust, no LLVM. LLVM is linked statically; other libraries that the binaries load and a minimal
//! system may lack are packed in `lib/`.

use crate::process::{
    Result, after, cargo, read, remove_dir, root, run as run_command, write_file,
};
use crate::setup;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// A package whose binaries and integration tests are packed: its name for `--only`, the package's, and additional
/// features.
type Part = (&'static str, &'static str, &'static [&'static str]);

const LAB: &str = "lab";

/// The part that calls the kernels alone, without Burn.
const RAW: &str = "raw-kernels";

const PARTS: [Part; 8] = [
    ("tests", "flash-dma-tests", &["programs"]),
    // For their tests of gradients and adapters.
    ("models", "flash-dma-models", &["autodiff"]),
    ("bench", "flash-dma-benches", &["extension"]),
    ("interop", "interop", &[]),
    (RAW, RAW, &[]),
    ("train-text", "train-text", &[]),
    ("endless", "endless", &[]),
    (LAB, LAB, &[]),
];

/// Features of a part: without autotune every process is ready within seconds; with it, Burn's defaults for CUDA, as
/// its users build.
fn features((name, _, also): Part, tuned: bool) -> impl Iterator<Item = &'static str> {
    let burn: &[_] = match (name, tuned) {
        (RAW, _) => &[],
        (_, false) => &["fusion", "persistence"],
        (_, true) => &["fusion", "persistence", "autotune"],
    };
    also.iter().chain(&["cuda"]).chain(burn).copied()
}

#[derive(Debug)]
struct Request {
    parts: Vec<Part>,
    tuned: bool,
    cargo: Vec<String>,
}

impl Request {
    /// Reads `[--only NAME,..] [--tuned]`; other options go to cargo.
    fn parse(options: &[String]) -> Result<Self> {
        let mut request = Self {
            parts: PARTS.to_vec(),
            tuned: false,
            cargo: Vec::new(),
        };
        let mut options = options.iter();
        while let Some(option) = options.next() {
            match option.as_str() {
                "--tuned" => request.tuned = true,
                "--only" => {
                    let names = options.next().ok_or("--only needs names")?;
                    let part = |name| {
                        let part = PARTS.into_iter().find(|part| part.0 == name);
                        let known = PARTS.map(|part| part.0);
                        part.ok_or(format!(
                            "nothing to pack is called `{name}`, only {known:?}"
                        ))
                    };
                    request.parts = names.split(',').map(part).collect::<Result<_>>()?;
                }
                other => request.cargo.push(other.into()),
            }
        }
        Ok(request)
    }

    fn directory(&self) -> &'static str {
        match self.tuned {
            false => "flash-dma-gpu",
            true => "flash-dma-gpu-tuned",
        }
    }

    fn packs(&self, name: &str) -> bool {
        self.parts.iter().any(|part| part.0 == name)
    }
}

/// Maximum size of the archive, so that it can be carried anywhere.
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

/// Builds and writes the archive. `--only tests,bench` packs only the outputs of these packages, `--tuned` builds with
/// autotune; other options go to cargo, such as `--config profile.gpu.opt-level=1`. An archive that is too large is
/// an error.
pub fn run(options: &[String]) -> Result {
    let request = Request::parse(options)?;
    setup::build()?;
    let binaries = build(&request)?;

    let out = root().join("gpu-pack");
    let name = request.directory();
    let dir = out.join(name);
    remove_dir(&dir)?;
    for (name, path) in &binaries {
        copy(path, &dir.join("bin").join(name))?;
        for library in libraries(path)? {
            let name = library.file_name().expect("ldd prints paths of files");
            copy(&library, &dir.join("lib").join(name))?;
        }
    }
    let files = [
        ("interop", "examples/interop/torch_cases.py"),
        ("bench", "benches/roof.py"),
        ("bench", "benches/train_peer.py"),
        ("bench", "benches/generate_peer.py"),
        ("tests", "bench-results/h200/times.tsv"),
    ];
    let run = "crates/xtask/src/gpu_pack/run.sh";
    let files = files.iter().filter(|(part, _)| request.packs(part));
    for file in files.map(|(_, file)| *file).chain([run]) {
        let file = root().join(file);
        let name = file.file_name().expect("a file");
        // With its permissions: `run.sh` is executable.
        copy(&file, &dir.join(name))?;
    }
    write_file(&dir.join("COMMIT"), commit())?;

    let archive = out.join(format!("{name}.tar.xz"));
    println!("gpu-pack: compressing {} binaries", binaries.len());
    let start = Instant::now();
    let mut tar = Command::new("tar");
    // Binaries share most of LLVM and Burn with the previous one: the window spans the previous binary, the smallest
    // binaries, which lack Burn, come first, and no branch filter makes equal code differ. Higher presets take many
    // times as long for a few per cent.
    tar.env("XZ_OPT", "-T1 --lzma2=preset=1,dict=256MiB");
    tar.arg("-C").arg(&out).arg("-cJf").arg(&archive);
    run_command(tar.args(by_size(&dir)?))?;
    let bytes = std::fs::metadata(&archive)
        .map_err(|e| format!("{}: {e}", archive.display()))?
        .len();
    let megabytes = bytes as f64 / 1e6;
    let seconds = start.elapsed().as_secs();
    println!(
        "gpu-pack: {} ({megabytes:.1} MB, compressed in {seconds} s)",
        archive.display()
    );
    println!("gpu-pack: on the GPU machine: tar xf {name}.tar.xz && {name}/run.sh");
    if megabytes > MAX_MEGABYTES {
        return Err(format!("the archive is larger than {MAX_MEGABYTES} MB"));
    }
    Ok(())
}

/// Packed test programs: the part, cargo's name of the target, and the name in the archive. The examples' own tests
/// are not packed, and those of the models that run on Flex alone are not built.
const TESTS: [(&str, &str, &str); 2] = [("tests", "main", "tests"), ("models", "it", "models")];

/// Builds the binaries and the integration tests; returns their names in the archive and paths. One call of cargo has
/// one set of features, so Burn is compiled once, and again for the lab.
fn build(request: &Request) -> Result<BTreeMap<String, PathBuf>> {
    let tests = || TESTS.iter().filter(|(part, ..)| request.packs(part));
    let (lab, library): (Vec<Part>, Vec<Part>) =
        request.parts.iter().partition(|part| part.0 == LAB);
    println!("gpu-pack: building {} packages", request.parts.len());
    let targets: Vec<&str> = tests()
        .flat_map(|(_, target, _)| ["--test", target])
        .collect();
    let place = "--manifest-path lab/Cargo.toml --target-dir target";
    let place: Vec<&str> = place.split(' ').collect();
    let mut messages = String::new();
    for (parts, options) in [(library, &targets), (lab, &place)] {
        if parts.is_empty() {
            continue;
        }
        let mut build = cargo(["build", "--profile", "gpu", "--bins"]);
        build.args(options).arg("--no-default-features");
        build.args(["--message-format", "json-render-diagnostics"]);
        for part in parts {
            let (_, package, _) = part;
            build.args(["--package", package]);
            for feature in features(part, request.tuned) {
                build.args(["--features", &format!("{package}/{feature}")]);
            }
        }
        build.args(&request.cargo);
        messages += &read(&mut build)?;
    }
    let mut binaries: BTreeMap<_, _> = messages.lines().filter_map(executable).collect();
    // It needs the rendered book, which is not packed.
    binaries.remove("playground");
    match tests().find(|(.., name)| !binaries.contains_key(*name)) {
        Some((.., name)) => Err(format!("cargo built no {name}, only {:?}", binaries.keys())),
        None => Ok(binaries),
    }
}

/// Executable of one of cargo's messages: its name in the archive and its path.
fn executable(message: &str) -> Option<(String, PathBuf)> {
    let path = after(message, "\"executable\":\"")?;
    let target = message.split_once("\"target\":{")?.1;
    let name = after(target, "\"name\":\"")?;
    let name = match target.starts_with("\"kind\":[\"test\"]") {
        true => TESTS.iter().find(|(_, target, _)| *target == name)?.2,
        false => name,
    };
    Some((name.to_owned(), PathBuf::from(path)))
}

/// Shared libraries that a binary loads and not every system has. A missing one is an error, and so is LLVM, which
/// must not be linked dynamically.
fn libraries(binary: &Path) -> Result<Vec<PathBuf>> {
    let listing = read(Command::new("ldd").arg(binary))?;
    let mut found = Vec::new();
    for line in listing.lines() {
        let Some((name, rest)) = line.trim().split_once(" => ") else {
            continue;
        };
        let mut system = SYSTEM_LIBRARIES.iter();
        if system.any(|system| name.starts_with(system)) {
            continue;
        }
        if name.starts_with("libLLVM") || !rest.starts_with('/') {
            let binary = binary.display();
            return Err(format!("{binary} must not load {name} ({rest})"));
        }
        found.extend(rest.split(" (").next().map(PathBuf::from));
    }
    Ok(found)
}

/// Every file of the archive, smallest first, below the directory that holds `dir`.
fn by_size(dir: &Path) -> Result<Vec<PathBuf>> {
    let parent = dir.parent().unwrap_or(dir);
    let mut list = Command::new("find");
    list.arg(dir.strip_prefix(parent).unwrap_or(dir))
        .current_dir(parent);
    let listing = read(list.args(["-type", "f"]))?;
    let size = |file: &PathBuf| parent.join(file).metadata().map_or(0, |m| m.len());
    let mut files: Vec<PathBuf> = listing.lines().map(PathBuf::from).collect();
    files.sort_by_key(|file| (size(file), file.clone()));
    Ok(files)
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_name_parts_and_hand_the_rest_to_cargo() {
        let parse = |line: &str| {
            let options: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            Request::parse(&options)
        };
        let all = parse("").unwrap();
        assert_eq!((all.parts.len(), all.tuned), (PARTS.len(), false));
        let some = parse("--only tests,bench --tuned --timings").unwrap();
        assert_eq!(some.parts, [PARTS[0], PARTS[2]]);
        assert_eq!(some.cargo, ["--timings"]);
        assert_eq!(some.directory(), "flash-dma-gpu-tuned");
        assert!(features(PARTS[0], some.tuned).any(|feature| feature == "autotune"));
        assert!(some.packs("bench") && !some.packs("interop"));
        assert!(parse("--only").is_err());
        assert!(parse("--only test").unwrap_err().contains("tests"));
    }

    #[test]
    fn executables_are_read_from_cargo_messages() {
        let test = r#"{"reason":"compiler-artifact","package_id":"path+file:///r/tests#flash-dma-tests@0.1.0","manifest_path":"/r/tests/Cargo.toml","target":{"kind":["test"],"crate_types":["bin"],"name":"main","src_path":"/r/tests/suite/main.rs","edition":"2024"},"profile":{"opt_level":"2","test":true},"features":[],"filenames":["/t/gpu/deps/suite-1"],"executable":"/t/gpu/deps/suite-1","fresh":false}"#;
        let path = "\"/t/gpu/deps/suite-1\"";
        let bin = ("\"test\"]", "\"bin\"]");
        for (changes, name) in [
            (&[][..], Some("tests")),
            (&[("\"main\"", "\"it\"")], Some("models")),
            (&[("\"main\"", "\"cli\"")], None),
            (&[bin], Some("main")),
            (&[bin, (path, "null")], None),
        ] {
            let change = |text: String, (from, to): &(&str, &str)| text.replace(from, to);
            let message = changes.iter().fold(test.to_owned(), change);
            let expected = name.map(|name| (name.to_owned(), "/t/gpu/deps/suite-1".into()));
            assert_eq!(executable(&message), expected, "{changes:?}");
        }
        let end = r#"{"reason":"build-finished","success":true}"#;
        assert_eq!(executable(end), None);
    }
}
