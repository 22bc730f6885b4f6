//! Checks for a release, short of the upload.

use crate::process::{Result, cargo, read, read_file, root, run as run_command};

/// Packages every library crate, and checks the features that docs.rs would build, without LLVM.
pub fn check() -> Result {
    for name in ["burn-flash-dma", "flash-dma-models", "flash-dma-kernels"] {
        let manifest = read_file(&root().join("crates").join(name).join("Cargo.toml"))?;
        let mut tree = cargo(["tree", "--edges", "normal,build", "--prefix", "none"]);
        tree.args(["--package", name, "--no-default-features", "--features"]);
        tree.arg(docs_features(&manifest).unwrap_or_default());
        let tree = read(&mut tree)?;
        if let Some(llvm) = tree.lines().find(|line| line.contains("llvm-sys")) {
            return Err(format!("docs.rs would build {name} with {llvm}"));
        }
    }
    // Checks the working tree, committed or not. Building the packages takes two minutes more and repeats other
    // steps' builds: a release does it.
    let mut publish = cargo(["publish", "--workspace", "--dry-run"]);
    run_command(publish.args(["--allow-dirty", "--no-verify"]))
}

fn docs_features(manifest: &str) -> Option<String> {
    let section = manifest.split_once("[package.metadata.docs.rs]")?.1;
    let (list, _) = section.split_once("features = [")?.1.split_once(']')?;
    Some(list.replace(['"', ' '], ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_features_of_docs_rs_are_read() {
        let manifest = "[package]\n\n[package.metadata.docs.rs]\n# Why.\nfeatures = [\"flex\", \"autodiff\"]\n";
        assert_eq!(docs_features(manifest).unwrap(), "flex,autodiff");
        assert!(docs_features("[package]\n\n[features]\ncpu = [\"a\"]\n").is_none());
        let ours = root().join("crates/burn-flash-dma/Cargo.toml");
        let ours = docs_features(&read_file(&ours).unwrap());
        assert!(ours.is_some_and(|features| features.contains("autodiff")));
    }
}
