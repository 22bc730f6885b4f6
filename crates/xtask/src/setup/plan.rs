//! What to do about LLVM, decided from facts alone.

use std::path::PathBuf;

/// The distribution's LLVM version that replaces the bundled one; others were not tried.
pub const DISTRIBUTION: &str = "22";

/// The Debian and Ubuntu packages that linking the distribution's LLVM takes.
pub const LLVM_PACKAGES: [&str; 5] = [
    "llvm-22-dev",
    "libpolly-22-dev",
    "libzstd-dev",
    "libxml2-dev",
    "zlib1g-dev",
];

/// The facts about the machine.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Version of the bundler in `Cargo.lock`, e.g. `23.1.0-4`.
    pub bundle_version: String,
    /// Where the bundler looks for LLVM.
    pub prefix: PathBuf,
    /// The state of the prefix.
    pub state: Prefix,
    /// Whether the bundler's release can be downloaded; checked only if the prefix is absent.
    pub release_reachable: bool,
    /// The packages of [`LLVM_PACKAGES`] that are not installed.
    pub missing_packages: Vec<&'static str>,
    /// Whether a C++ compiler and its library are installed.
    pub cxx: bool,
    /// Whether Python with `venv` is installed, or not needed.
    pub python: bool,
    /// The rights to install packages.
    pub rights: Rights,
}

/// Whether this user may install packages, and how.
#[derive(Clone, Copy, Debug)]
pub struct Rights {
    /// Whether `apt-get` exists.
    pub apt: bool,
    /// Whether this is root.
    pub root: bool,
    /// Whether sudo works without a password.
    pub sudo: bool,
}

/// The state of the prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefix {
    /// There is no prefix.
    Absent,
    /// The bundle, marked complete, and its `llvm-config` runs.
    Complete,
    /// Our wrapper, which runs.
    Wrapper,
    /// Our wrapper, whose packages were removed or whose set-up was interrupted.
    OrphanWrapper,
    /// Something else that does not work.
    Broken,
}

/// What to do.
#[derive(Debug, PartialEq, Eq)]
pub struct Plan {
    /// What to do about LLVM, once the packages are there.
    pub llvm: Llvm,
    /// Packages to install first.
    pub packages: Vec<&'static str>,
    /// How to install them.
    pub privilege: Privilege,
}

/// Where LLVM comes from.
#[derive(Debug, PartialEq, Eq)]
pub enum Llvm {
    /// It is there already.
    Keep,
    /// From the bundler's release, downloaded by the build itself.
    Download,
    /// From the distribution: write the prefix that refers to it.
    Distribution,
}

/// How packages are installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privilege {
    /// This is root.
    Root,
    /// Through sudo, which asks for no password.
    Sudo,
}

/// Decides what to do.
///
/// # Errors
/// When packages are missing and cannot be installed from here, with the commands to type; and when the
/// prefix holds something that neither works nor was written by us.
pub fn plan(facts: &Facts) -> Result<Plan, String> {
    let llvm = match facts.state {
        Prefix::Complete | Prefix::Wrapper => Llvm::Keep,
        Prefix::Absent if facts.release_reachable => Llvm::Download,
        Prefix::Absent | Prefix::OrphanWrapper => Llvm::Distribution,
        Prefix::Broken => {
            return Err(format!(
                "{0} holds an LLVM that does not work, perhaps half unpacked. Remove it and try again:\n\
                 \x20   rm -r '{0}'",
                facts.prefix.display()
            ));
        }
    };
    let mut packages = match facts.state {
        Prefix::Wrapper if !facts.rights.apt => Vec::new(), // not Debian: package names say nothing
        _ if llvm == Llvm::Distribution => facts.missing_packages.clone(),
        Prefix::Wrapper => facts.missing_packages.clone(),
        _ => Vec::new(),
    };
    if !facts.cxx {
        packages.push("g++");
    }
    if !facts.python {
        packages.push("python3-venv");
    }

    Ok(Plan {
        llvm,
        privilege: facts.rights.to_install(&packages)?,
        packages,
    })
}

impl Rights {
    /// How to install the packages.
    ///
    /// # Errors
    /// When there are any and they cannot be installed from here, with the commands to type.
    pub fn to_install(self, packages: &[&str]) -> Result<Privilege, String> {
        match (self.apt, self.root, self.sudo) {
            (true, true, _) => Ok(Privilege::Root),
            (true, false, true) => Ok(Privilege::Sudo),
            // Nothing to install: it does not matter.
            _ if packages.is_empty() => Ok(Privilege::Root),
            (true, false, false) => Err(format!(
                "this is not root, and sudo wants a password. {}",
                manual(packages)
            )),
            (false, ..) => Err(format!("there is no apt-get here. {}", manual(packages))),
        }
    }
}

/// The commands that install packages by hand.
pub fn manual(packages: &[&str]) -> String {
    let mut text = format!(
        "Type this, or what your distribution has for it, and try again:\n\
         \x20   sudo apt-get update && sudo apt-get install -y {}",
        packages.join(" ")
    );
    if packages
        .iter()
        .any(|package| LLVM_PACKAGES.contains(package))
    {
        text += "\nA release without LLVM 22 gets it from https://apt.llvm.org (llvm.sh 22). None of it is \
                 needed where github.com can be reached: the build then downloads its LLVM.";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fresh machine without network, as root.
    fn fresh() -> Facts {
        Facts {
            bundle_version: "23.1.0-4".into(),
            prefix: "/data/tracel/tracel-llvm-23.1.0-4".into(),
            state: Prefix::Absent,
            release_reachable: false,
            missing_packages: LLVM_PACKAGES.to_vec(),
            cxx: true,
            python: true,
            rights: ROOT,
        }
    }

    const ROOT: Rights = Rights {
        apt: true,
        root: true,
        sudo: false,
    };
    const USER: Rights = Rights {
        root: false,
        ..ROOT
    };

    #[test]
    fn a_complete_prefix_is_kept_whatever_else_is_missing() {
        let facts = Facts {
            state: Prefix::Complete,
            rights: Rights { apt: false, ..USER },
            ..fresh()
        };
        let plan = plan(&facts).unwrap();
        assert_eq!((plan.llvm, plan.packages), (Llvm::Keep, vec![]));
    }

    #[test]
    fn the_release_comes_before_the_distribution() {
        let facts = Facts {
            release_reachable: true,
            rights: USER,
            ..fresh()
        };
        let plan = plan(&facts).unwrap();
        assert_eq!((plan.llvm, plan.packages), (Llvm::Download, vec![]));
    }

    #[test]
    fn without_the_release_the_missing_packages_are_installed() {
        let facts = Facts {
            missing_packages: vec!["libpolly-22-dev"],
            cxx: false,
            ..fresh()
        };
        let expected = Plan {
            llvm: Llvm::Distribution,
            packages: vec!["libpolly-22-dev", "g++"],
            privilege: Privilege::Root,
        };
        assert_eq!(plan(&facts), Ok(expected));

        let facts = Facts {
            rights: Rights { sudo: true, ..USER },
            ..fresh()
        };
        assert_eq!(plan(&facts).unwrap().privilege, Privilege::Sudo);
    }

    #[test]
    fn installed_packages_need_no_privilege() {
        let facts = Facts {
            missing_packages: vec![],
            rights: USER,
            ..fresh()
        };
        let plan = plan(&facts).unwrap();
        assert_eq!((plan.llvm, plan.packages), (Llvm::Distribution, vec![]));
    }

    #[test]
    fn what_cannot_be_installed_is_told_with_its_commands() {
        let facts = Facts {
            rights: USER,
            python: false,
            ..fresh()
        };
        let text = plan(&facts).unwrap_err();
        assert!(
            text.starts_with("this is not root, and sudo wants a password."),
            "{text}"
        );
        let command = "sudo apt-get update && sudo apt-get install -y llvm-22-dev libpolly-22-dev \
                       libzstd-dev libxml2-dev zlib1g-dev python3-venv\n";
        assert!(text.contains(command), "{text}");
        assert!(text.contains("apt.llvm.org"), "{text}");

        let text = plan(&Facts {
            rights: Rights { apt: false, ..ROOT },
            ..fresh()
        })
        .unwrap_err();
        assert!(text.starts_with("there is no apt-get here."), "{text}");
    }

    #[test]
    fn a_wrapper_without_its_packages_is_completed() {
        let facts = Facts {
            state: Prefix::OrphanWrapper,
            ..fresh()
        };
        let plan = plan(&facts).unwrap();
        assert_eq!(
            (plan.llvm, plan.packages),
            (Llvm::Distribution, LLVM_PACKAGES.to_vec())
        );
    }

    #[test]
    fn a_working_wrapper_is_kept_and_what_linking_lacks_is_installed() {
        let facts = Facts {
            state: Prefix::Wrapper,
            missing_packages: vec!["libzstd-dev"],
            ..fresh()
        };
        let with_apt = plan(&facts).unwrap();
        assert_eq!(
            (with_apt.llvm, with_apt.packages),
            (Llvm::Keep, vec!["libzstd-dev"])
        );

        let without = plan(&Facts {
            rights: Rights { apt: false, ..ROOT },
            ..facts
        })
        .unwrap();
        assert_eq!((without.llvm, without.packages), (Llvm::Keep, vec![]));
    }

    #[test]
    fn a_foreign_prefix_is_never_overwritten() {
        let text = plan(&Facts {
            state: Prefix::Broken,
            ..fresh()
        })
        .unwrap_err();
        assert!(
            text.contains("rm -r '/data/tracel/tracel-llvm-23.1.0-4'"),
            "{text}"
        );
    }
}
