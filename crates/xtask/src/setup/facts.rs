//! The facts about the machine.

use super::Needs;
use super::plan::{DISTRIBUTION, Facts, Prefix, Rights};
use crate::process::{Result, read_file, root, try_output};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Seconds after which the release server counts as unreachable.
const REACH_SECONDS: u64 = 15;

/// Inspects the machine; the network is queried only if there is no LLVM yet.
///
/// # Errors
/// When `Cargo.lock` does not name the bundler, or there is no home directory.
pub fn gather(needs: Needs) -> Result<Facts> {
    let bundle_version = locked_version(&read_file(&root().join("Cargo.lock"))?)
        .ok_or("Cargo.lock has no package tracel-llvm-bundler")?;
    let prefix = data_dir()
        .ok_or("cannot tell the home directory: set HOME")?
        .join(format!("tracel/tracel-llvm-{bundle_version}"));

    let state = prefix_state(&prefix);
    Ok(Facts {
        release_reachable: state == Prefix::Absent && reachable(&release_url(&bundle_version)),
        state,
        prefix,
        bundle_version,
        rights: rights(),
        missing_packages: missing(&super::plan::LLVM_PACKAGES),
        cxx: cxx_works(),
        python: !needs.python || runs("python3", &["-c", "import venv, ensurepip"]),
    })
}

/// The file by which the bundler recognises a complete prefix.
pub fn marker(prefix: &Path) -> PathBuf {
    prefix.join(".tracel-llvm-installed")
}

/// Whether an `llvm-config` runs.
pub fn works(llvm_config: &Path) -> bool {
    // A shell pipeline succeeds with its last command, so only the output is conclusive.
    try_output(&llvm_config.to_string_lossy(), &["--version"])
        .is_some_and(|output| output.stdout.first().is_some_and(u8::is_ascii_digit))
}

fn prefix_state(prefix: &Path) -> Prefix {
    let llvm_config = prefix.join("bin/llvm-config");
    let is_wrapper = std::fs::read_to_string(&llvm_config)
        .is_ok_and(|text| text.contains(&format!("llvm-config-{DISTRIBUTION}")));
    let complete = marker(prefix).exists() && works(&llvm_config);
    match (complete, is_wrapper) {
        (true, true) => Prefix::Wrapper,
        (true, false) => Prefix::Complete,
        (false, true) => Prefix::OrphanWrapper,
        (false, false) if marker(prefix).exists() || llvm_config.exists() => Prefix::Broken,
        (false, false) => Prefix::Absent,
    }
}

/// The version of the bundler in a lock file.
fn locked_version(lock: &str) -> Option<String> {
    let mut lines = lock
        .lines()
        .skip_while(|line| *line != r#"name = "tracel-llvm-bundler""#);
    let version = lines
        .nth(1)?
        .strip_prefix("version = \"")?
        .strip_suffix('"')?;
    Some(version.to_owned())
}

/// The directory the bundler uses: `dirs::data_local_dir`.
fn data_dir() -> Option<PathBuf> {
    let home = || std::env::home_dir().filter(|home| home.is_absolute());
    if cfg!(target_os = "macos") {
        return Some(home()?.join("Library/Application Support"));
    }
    match std::env::var_os("XDG_DATA_HOME").map(PathBuf::from) {
        Some(dir) if dir.is_absolute() => Some(dir),
        _ => Some(home()?.join(".local/share")),
    }
}

fn release_url(version: &str) -> String {
    let os = if cfg!(target_os = "macos") {
        "macos"
    } else {
        "linux"
    };
    let arch = if cfg!(target_arch = "aarch64") {
        "AArch64"
    } else {
        "x64"
    };
    let releases = "https://github.com/tracel-ai/tracel-llvm/releases/download";
    format!("{releases}/v{version}/{os}-{arch}.tar.xz")
}

/// Requests the headers of the release's archive.
fn reachable(url: &str) -> bool {
    println!("setup: is {url} within reach?");
    let seconds = REACH_SECONDS.to_string();
    if runs("curl", &["--version"]) {
        return runs(
            "curl",
            &["-fsIL", "-o", "/dev/null", "--max-time", &seconds, url],
        );
    }
    if runs("wget", &["--version"]) {
        let timeout = format!("--timeout={seconds}");
        return runs("wget", &["-q", "--spider", "--tries=1", &timeout, url]);
    }
    // Neither is installed: a connection has to suffice.
    let timeout = Duration::from_secs(REACH_SECONDS);
    ("github.com", 443)
        .to_socket_addrs()
        .is_ok_and(|mut found| found.any(|a| TcpStream::connect_timeout(&a, timeout).is_ok()))
}

/// Whether this user may install packages, and how.
pub fn rights() -> Rights {
    let apt = runs("apt-get", &["--version"]);
    Rights {
        apt,
        root: id() == Some(0),
        sudo: apt && runs("sudo", &["-n", "true"]),
    }
}

/// The packages that are not installed.
pub fn missing(packages: &[&'static str]) -> Vec<&'static str> {
    let installed = |package: &&str| {
        try_output("dpkg-query", &["-W", "-f=${Status}", package])
            .is_some_and(|o| o.stdout.ends_with(b" installed"))
    };
    let packages = packages.iter().copied();
    packages.filter(|package| !installed(package)).collect()
}

/// Whether there is a C++ compiler: LLVM is written in it, and so is a part of `cubecl-llvm`.
fn cxx_works() -> bool {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    // The headers come with the library to link.
    runs(
        &compiler,
        &[
            "-fsyntax-only",
            "-include",
            "string",
            "-x",
            "c++",
            "/dev/null",
        ],
    )
}

/// Whether there are a Vulkan loader and a driver manifest.
pub fn has_vulkan() -> bool {
    let libraries = try_output("ldconfig", &["-p"])
        .or_else(|| try_output("/sbin/ldconfig", &["-p"]))
        .is_some_and(|o| String::from_utf8_lossy(&o.stdout).contains("libvulkan.so.1"));
    let described = |dir: &&str| {
        std::fs::read_dir(dir).is_ok_and(|mut files| {
            files.any(|file| file.is_ok_and(|f| f.path().extension().is_some_and(|e| e == "json")))
        })
    };
    let dirs = ["/etc/vulkan/icd.d", "/usr/share/vulkan/icd.d"];
    libraries && dirs.iter().any(described)
}

fn id() -> Option<u32> {
    let output = try_output("id", &["-u"])?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

/// Whether a program starts and succeeds.
pub fn runs(program: &str, args: &[&str]) -> bool {
    try_output(program, args).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_file_names_the_bundler() {
        let lock = "[[package]]\nname = \"tracel-llvm\"\nversion = \"1.0.0\"\n\n[[package]]\n\
                    name = \"tracel-llvm-bundler\"\nversion = \"23.1.0-4\"\nsource = \"registry\"\n";
        assert_eq!(locked_version(lock).as_deref(), Some("23.1.0-4"));
        assert_eq!(
            locked_version("[[package]]\nname = \"tracel\"\nversion = \"1\"\n"),
            None
        );
    }

    #[test]
    fn a_prefix_is_told_from_its_files() {
        let dir = std::env::temp_dir().join(format!("xtask-prefix-{}", std::process::id()));
        let prefix = dir.join("prefix");
        assert_eq!(prefix_state(&prefix), Prefix::Absent);

        std::fs::create_dir_all(prefix.join("bin")).unwrap();
        assert_eq!(prefix_state(&prefix), Prefix::Absent);
        std::fs::write(marker(&prefix), "").unwrap();
        assert_eq!(prefix_state(&prefix), Prefix::Broken);

        // An archive that was unpacked half-way: no marker yet.
        std::fs::remove_file(marker(&prefix)).unwrap();
        std::fs::write(prefix.join("bin/llvm-config"), "not a program").unwrap();
        assert_eq!(prefix_state(&prefix), Prefix::Broken);

        std::fs::write(
            prefix.join("bin/llvm-config"),
            format!("llvm-config-{DISTRIBUTION}"),
        )
        .unwrap();
        assert_eq!(prefix_state(&prefix), Prefix::OrphanWrapper);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
