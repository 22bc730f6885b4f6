//! `cargo xtask setup`: installs what a CubeCL runtime needs besides Rust and a C compiler, by `setup.sh`.

use crate::process::{Result, read, read_file, root, run as run_command};
use std::process::Command;

/// Installs everything the project's commands use: the dependencies of [`build`], and Python, which installs the
/// spelling checker, and installs and drives NVIDIA's compilers. If something cannot be installed, the error lists
/// the commands.
pub fn all() -> Result {
    run_command(llvm()?.arg("python"))
}

/// Installs what building a CubeCL runtime takes, LLVM's libraries and a C++ compiler, in the same way.
pub fn build() -> Result {
    run_command(&mut llvm()?)
}

fn llvm() -> Result<Command> {
    let lock = read_file(&root().join("Cargo.lock"))?;
    let mut llvm = script("llvm");
    llvm.arg(bundler(&lock).ok_or("Cargo.lock has no package tracel-llvm-bundler")?);
    Ok(llvm)
}

/// Installs a Vulkan loader and a driver that runs on the CPU, unless both a loader and a driver exist.
pub fn vulkan() -> Result {
    run_command(&mut script("vulkan"))
}

/// A headless browser; installs the distribution's Chromium if there is none.
pub fn browser() -> Result<String> {
    Ok(read(&mut script("browser"))?.trim().to_owned())
}

fn script(what: &str) -> Command {
    let mut script = Command::new("sh");
    script.arg(root().join("crates/xtask/src/setup/setup.sh"));
    script.arg(what);
    script
}

fn bundler(lock: &str) -> Option<&str> {
    let (_, package) = lock.split_once("name = \"tracel-llvm-bundler\"\nversion = \"")?;
    Some(package.split_once('"')?.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::write_file;
    use std::path::PathBuf;

    /// A machine whose only programs are those that the script needs, and stand-ins.
    struct Machine(PathBuf);

    /// A Debian machine as root, on which downloads fail and all packages are missing.
    const DEBIAN: [(&str, &str); 5] = [
        (
            "apt-get",
            "echo \"$@\" >>$HOME/apt; ln -sf llvm $HOME/bin/llvm-config-22",
        ),
        ("dpkg-query", "false"),
        ("id", "echo 0"),
        ("c++", "true"),
        ("curl", "echo $4 >>$HOME/curl; false"),
    ];

    impl Machine {
        fn new(name: &str) -> Self {
            let home = std::env::temp_dir().join(format!("setup-{name}-{}", std::process::id()));
            let machine = Self(home);
            for tool in ["cat", "chmod", "grep", "ln", "mkdir", "sed", "uname"] {
                machine.program(tool, &format!("PATH=/bin:/usr/bin; exec {tool} \"$@\""));
            }
            machine.program("env", "shift; exec \"$@\"");
            machine.program("llvm", "echo 22.1.0 /usr/lib/libz3.so");
            for (name, body) in DEBIAN {
                machine.program(name, body);
            }
            machine
        }

        fn program(&self, name: &str, body: &str) {
            let file = self.0.join("bin").join(name);
            write_file(&file, format!("#!/bin/sh\n{body}\n")).unwrap();
            let mut chmod = Command::new("chmod");
            run_command(chmod.arg("755").arg(file)).unwrap();
        }

        fn without(&self, name: &str) {
            std::fs::remove_file(self.0.join("bin").join(name)).unwrap();
        }

        /// Runs the script: true for success, and its output.
        fn run(&self, args: &[&str]) -> (bool, String) {
            let script = root().join("crates/xtask/src/setup/setup.sh");
            let mut shell = Command::new("/bin/sh");
            shell.arg(script).args(args).env_clear();
            shell.env("PATH", self.0.join("bin")).env("HOME", &self.0);
            let output = shell.output().unwrap();
            let text = [output.stdout, output.stderr].concat();
            (output.status.success(), String::from_utf8(text).unwrap())
        }

        /// Runs it for LLVM 1; it must fail and print `what`.
        fn fails(&self, more: &[&str], what: &str) -> String {
            let (fine, said) = self.run(&[&["llvm", "1"], more].concat());
            assert!(!fine && said.contains(what), "{said}");
            said
        }

        /// Runs it for LLVM 1; it must succeed. Returns its output.
        fn succeeds(&self, more: &[&str]) -> String {
            let (fine, said) = self.run(&[&["llvm", "1"], more].concat());
            assert!(fine, "{said}");
            said
        }

        fn prefix(&self) -> PathBuf {
            self.0.join(".local/share/tracel/tracel-llvm-1")
        }

        fn noted(&self, name: &str) -> String {
            std::fs::read_to_string(self.0.join(name)).unwrap_or_default()
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_distribution_serves_where_the_release_is_out_of_reach() {
        let machine = Machine::new("distribution");
        machine.program("c++", "false");
        let said = machine.succeeds(&[]);
        let served = said.contains("now refers to the distribution's LLVM 22");
        assert!(served, "{said}");
        let packages = "--no-install-recommends llvm-22-dev libpolly-22-dev libzstd-dev libxml2-dev zlib1g-dev g++\n";
        assert!(machine.noted("apt").ends_with(packages));
        let config = machine.prefix().join("bin/llvm-config");
        let mut config = Command::new(config);
        let libraries = read(config.env("PATH", machine.0.join("bin"))).unwrap();
        assert_eq!(libraries, "22.1.0 -lz3\n");

        // A working wrapper is kept, and missing linker inputs are installed.
        machine.program("c++", "true");
        let installed = "[ $3 = libzstd-dev ] || echo install ok installed";
        machine.program("dpkg-query", installed);
        let said = machine.succeeds(&[]);
        assert!(said.ends_with("nothing to do\n"), "{said}");
        assert!(machine.noted("apt").ends_with("-recommends libzstd-dev\n"));
        machine.without("apt-get");
        machine.succeeds(&[]);

        // One whose packages were removed is completed.
        machine.without("llvm-config-22");
        machine.fails(&[], "there is no apt-get here.");
        machine.program("apt-get", DEBIAN[0].1);
        machine.succeeds(&[]);
        assert_eq!(machine.noted("curl").lines().count(), 1);
    }

    #[test]
    fn the_release_comes_before_the_distribution() {
        let machine = Machine::new("release");
        machine.program("curl", "[ ${4##*/download/} = v1/linux-x64.tar.xz ]");
        machine.program("uname", "echo Linux");
        let said = machine.succeeds(&[]);
        let downloads = said.contains("the build itself will download LLVM 1");
        assert!(downloads, "{said}");
        assert_eq!(machine.noted("apt"), "");
        assert!(!machine.prefix().exists());
    }

    #[test]
    fn what_cannot_be_installed_is_told_with_its_commands() {
        let machine = Machine::new("user");
        machine.program("id", "echo 1000");
        machine.program("sudo", "false");
        let why = "this is not root, and sudo wants a password.";
        let said = machine.fails(&["python"], why);
        let command = "sudo apt-get update && sudo apt-get install -y llvm-22-dev libpolly-22-dev libzstd-dev \
                       libxml2-dev zlib1g-dev python3-venv\n";
        for part in [command, "apt.llvm.org"] {
            assert!(said.contains(part), "{said}");
        }
        machine.program("sudo", "echo \"$@\" >>$HOME/sudo");
        machine.program("llvm-config-22", "echo 22");
        machine.succeeds(&["python"]);
        assert!(machine.noted("sudo").contains("apt-get install -y"));
    }

    #[test]
    fn a_foreign_prefix_is_kept_if_it_works_and_never_overwritten() {
        let machine = Machine::new("foreign");
        let prefix = machine.prefix();
        let marker = prefix.join(".tracel-llvm-installed");
        write_file(&marker, "").unwrap();
        let config = prefix.join("bin/llvm-config");
        for half in ["", "not a program"] {
            machine.fails(&[], &format!("rm -r '{}'", prefix.display()));
            write_file(&config, half).unwrap();
        }
        let works = "../.local/share/tracel/tracel-llvm-1/bin/llvm-config";
        machine.program(works, "echo 23");
        machine.without("apt-get");
        let said = machine.succeeds(&[]);
        assert!(said.ends_with("nothing to do\n"), "{said}");
        std::fs::remove_file(marker).unwrap();
        machine.fails(&[], "");
    }

    #[test]
    fn a_browser_is_named_and_a_driver_is_installed() {
        let machine = Machine::new("browser");
        let (fine, said) = machine.run(&["browser"]);
        let why = "Chromium is installed and does not run\n";
        assert!(!fine && said.ends_with(why), "{said}");
        machine.program("google-chrome", "true");
        let named = "google-chrome\n".to_owned();
        assert_eq!(machine.run(&["browser"]), (true, named));
        assert!(machine.run(&["vulkan"]).0);
        let packages = "libvulkan1 mesa-vulkan-drivers\n";
        assert!(machine.noted("apt").ends_with(packages));
    }

    #[test]
    fn the_lock_file_names_the_bundler() {
        let lock = "[[package]]\nname = \"tracel-llvm\"\nversion = \"1.0.0\"\n\n[[package]]\n\
                    name = \"tracel-llvm-bundler\"\nversion = \"23.1.0-4\"\nsource = \"registry\"\n";
        assert_eq!(bundler(lock), Some("23.1.0-4"));
        let other = "[[package]]\nname = \"tracel\"\nversion = \"1\"\n";
        assert_eq!(bundler(other), None);
        assert!(bundler(&read_file(&root().join("Cargo.lock")).unwrap()).is_some());
    }
}
