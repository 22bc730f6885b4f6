//! `cargo xtask new DIR`: an empty crate that depends on this checkout, with the README's example as its program.

use crate::process::{
    Result, cargo, read_file, remove_dir, root, run as run_command, target_dir, write_file,
};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Path of the checkout in the README's example of a dependency.
const CHECKOUT: &str = "../flash-dma/";

/// Creates the crate and runs it; with `--check` instead of a folder, in one that is removed again.
pub fn run(options: &[String]) -> Result {
    let [folder] = options else {
        let usage = "`cargo xtask new` takes one folder, e.g. `cargo xtask new ../my-model`";
        return Err(usage.into());
    };
    if folder == "--check" {
        return check_run();
    }
    let folder = make(Path::new(folder))?;
    println!("new: {}\n", folder.display());
    run_command(cargo(["run"]).current_dir(&folder))?;
    println!(
        "\nnew: its program is src/main.rs; change it and `cargo run` in {}",
        folder.display()
    );
    Ok(())
}

/// Creates a crate in a temporary folder and removes it again. Only its manifest is checked, which is all that
/// differs between this checkout and another's crate: a test compiles and runs the example.
pub fn check() -> Result {
    in_temporary_crate(cargo(["tree", "--quiet"]).stdout(Stdio::null()))
}

/// Creates such a crate and runs it.
pub fn check_run() -> Result {
    let mut run = cargo(["run"]);
    // The workspace builds half of its dependencies with the same features, in its own profile.
    run.env("CARGO_TARGET_DIR", target_dir());
    run.env("CARGO_PROFILE_DEV_DEBUG", "0");
    in_temporary_crate(run.env("CARGO_PROFILE_DEV_STRIP", "symbols"))
}

fn in_temporary_crate(command: &mut Command) -> Result {
    let folder = std::env::temp_dir().join(format!("new-{}", std::process::id()));
    let folder = make(&folder.join("new-crate"))?;
    let outcome = run_command(command.current_dir(&folder));
    remove_dir(folder.parent().unwrap_or(&folder))?;
    outcome
}

fn make(folder: &Path) -> Result<PathBuf> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    if !is_package_name(&name) {
        return Err(format!("`{name}` cannot be the name of a crate"));
    }
    let cannot = |e| format!("cannot make {}: {e}", folder.display());
    std::fs::create_dir_all(folder).map_err(cannot)?;
    let folder = folder.canonicalize().map_err(cannot)?;
    let root_folder = root().canonicalize();
    if root_folder.is_ok_and(|root| folder.starts_with(root)) {
        let _ = std::fs::remove_dir(&folder);
        return Err("the folder lies in this repository, whose workspace would claim it".into());
    }
    if folder.read_dir().map_err(cannot)?.next().is_some() {
        return Err(format!("{} is not empty", folder.display()));
    }
    let readme = read_file(&root().join("README.md"))?;
    let manifest = manifest(&name, &readme, &root())?;
    write_file(&folder.join("Cargo.toml"), manifest)?;
    write_file(&folder.join("src/main.rs"), program(&readme)?)?;
    write_file(&folder.join(".gitignore"), "/target\n")?;
    // The versions that this repository is tested with; cargo drops unused ones.
    let lock = read_file(&root().join("Cargo.lock"))?;
    write_file(&folder.join("Cargo.lock"), lock)?;
    Ok(folder)
}

fn is_package_name(name: &str) -> bool {
    let mut characters = name.chars();
    characters.next().is_some_and(|c| c.is_ascii_alphabetic())
        && characters.all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'))
}

fn manifest(name: &str, readme: &str, checkout: &Path) -> Result<String> {
    let dependencies = block(readme, "toml")?;
    if !dependencies.contains(CHECKOUT) {
        return Err(format!("the README's dependencies lack `{CHECKOUT}`"));
    }
    // TOML's literal string: a backslash in a path stands for itself.
    let dependencies = dependencies.replace(
        &format!("\"{CHECKOUT}crates/burn-flash-dma\""),
        &format!("'{}'", checkout.join("crates/burn-flash-dma").display()),
    );
    Ok(format!(
        "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n{dependencies}"
    ))
}

/// The README's example with its imports outside `main`.
fn program(readme: &str) -> Result<String> {
    let example = block(readme, "rust")?;
    let (imports, statements): (Vec<_>, Vec<_>) =
        example.lines().partition(|line| line.starts_with("use "));
    let statements = statements.join("\n    ").replace("\n    \n", "\n\n");
    let (imports, statements) = (imports.join("\n"), statements.trim());
    Ok(format!("{imports}\n\nfn main() {{\n    {statements}\n}}\n"))
}

fn block<'a>(text: &'a str, language: &str) -> Result<&'a str> {
    let begin = format!("```{language}\n");
    let rest = text.split_once(&begin).map(|(_, rest)| rest);
    let block = rest.and_then(|rest| rest.split_once("```"));
    let block = block.ok_or_else(|| format!("the README has no block of {language}"))?;
    Ok(block.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const README: &str = "# A\n\n```toml\n[dependencies]\nburn-flash-dma = { path = \
                          \"../flash-dma/crates/burn-flash-dma\" }\n```\n\n```rust\nuse a::b;\n\nlet x = b();\n\n\
                          assert!(x);\n```\n";

    #[test]
    fn a_crate_has_the_readmes_dependencies_and_example() {
        let expected = "[package]\nname = \"one\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[dependencies]\n\
                        burn-flash-dma = { path = '/there/crates/burn-flash-dma' }\n";
        let there = Path::new("/there");
        assert_eq!(manifest("one", README, there).unwrap(), expected);
        let expected =
            "use a::b;\n\nfn main() {\n    let x = b();\n\n    assert!(x);\n}\n".to_owned();
        assert_eq!(program(README).unwrap(), expected);
        assert!(manifest("one", "```toml\n```", there).is_err());
        assert!(program("```toml\n```").is_err());
    }

    #[test]
    fn a_folder_that_cannot_hold_a_crate_is_refused() {
        let inside = root().join("crates/../inside");
        let error = make(&inside).unwrap_err();
        assert!(error.contains("lies in this repository"), "{error}");
        assert!(!inside.exists());
        let error = make(Path::new("/tmp/1 2")).unwrap_err();
        assert_eq!(error, "`1 2` cannot be the name of a crate");
        let full = std::env::temp_dir().join(format!("full-{}", std::process::id()));
        write_file(&full.join("a"), "").unwrap();
        let error = make(&full).unwrap_err();
        std::fs::remove_dir_all(&full).unwrap();
        assert!(error.ends_with("is not empty"), "{error}");
        assert!(run(&[]).unwrap_err().contains("takes one folder"));
    }
}
