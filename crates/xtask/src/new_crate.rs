//! `cargo xtask new DIR`: an empty crate that depends on this checkout, with the README's example as its program.

use crate::process::{Result, cargo, read_file, root, run as run_command, target_dir, write_file};
use std::path::{Path, PathBuf};

/// The checkout as the README's example of a dependency calls it.
const CHECKOUT: &str = "../flash-dma/";

/// Makes the crate and runs it.
///
/// # Errors
/// When the options are not one folder, the folder is not empty or lies in this repository, or the crate does not run.
pub fn run(options: &[String]) -> Result {
    let [folder] = options else {
        return Err(
            "`cargo xtask new` takes one folder, e.g. `cargo xtask new ../my-model`".into(),
        );
    };
    let folder = make(Path::new(folder))?;
    println!("new: {}\n", folder.display());
    run_command(cargo(["run"]).current_dir(&folder))?;
    println!(
        "\nnew: its program is src/main.rs; change it and `cargo run` in {}",
        folder.display()
    );
    Ok(())
}

/// Makes a crate in the system's folder for temporary files, runs it and removes it.
///
/// # Errors
/// When it does not run.
pub fn check() -> Result {
    let folder = std::env::temp_dir().join(format!("flash-dma-new-{}", std::process::id()));
    let folder = make(&folder)?;
    let build = target_dir().join("new");
    let outcome = run_command(
        cargo(["run"])
            .current_dir(&folder)
            .env("CARGO_TARGET_DIR", build),
    );
    std::fs::remove_dir_all(&folder)
        .map_err(|e| format!("cannot remove {}: {e}", folder.display()))?;
    outcome
}

/// Writes the crate's files; returns its folder.
fn make(folder: &Path) -> Result<PathBuf> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    if !is_package_name(&name) {
        return Err(format!("`{name}` cannot be the name of a crate"));
    }
    // `..` is resolved: from the repository `../my-model` does not lie in it.
    let parent = std::path::absolute(folder).and_then(|path| match path.parent() {
        Some(parent) => parent.canonicalize(),
        None => Ok(path),
    });
    let parent = parent.map_err(|e| format!("cannot make {}: {e}", folder.display()))?;
    let folder = parent.join(&*name);
    let repository = root().canonicalize().unwrap_or_else(|_| root());
    if folder.starts_with(repository) {
        return Err("the folder lies in this repository, whose workspace would claim it".into());
    }
    if folder
        .read_dir()
        .is_ok_and(|mut files| files.next().is_some())
    {
        return Err(format!("{} is not empty", folder.display()));
    }
    let readme = read_file(&root().join("README.md"))?;
    let manifest = manifest(&name, &readme, &root())?;
    write_file(&folder.join("Cargo.toml"), manifest)?;
    write_file(&folder.join("src/main.rs"), program(&readme)?)?;
    write_file(&folder.join(".gitignore"), "/target\n")?;
    // The versions that this repository is tested with; cargo drops what the crate does not use.
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
        return Err(format!(
            "the README's dependencies do not name `{CHECKOUT}`"
        ));
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
    let mut program = imports.join("\n") + "\n\nfn main() {\n";
    for line in statements.iter().skip_while(|line| line.is_empty()) {
        let indent = if line.is_empty() { "" } else { "    " };
        program += &format!("{indent}{line}\n");
    }
    Ok(program + "}\n")
}

/// The first code block of a language.
fn block<'a>(text: &'a str, language: &str) -> Result<&'a str> {
    let begin = format!("```{language}\n");
    text.split_once(&begin)
        .and_then(|(_, rest)| rest.split_once("```"))
        .map(|(block, _)| block)
        .ok_or_else(|| format!("the README has no block of {language}"))
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
        let error = make(&root().join("../nowhere/one")).unwrap_err();
        assert!(error.starts_with("cannot make "), "{error}");
        let full = std::env::temp_dir().join(format!("new-{}", std::process::id()));
        write_file(&full.join("a"), "").unwrap();
        let error = make(&full).unwrap_err();
        std::fs::remove_dir_all(&full).unwrap();
        assert!(error.ends_with("is not empty"), "{error}");
        assert!(run(&[]).unwrap_err().contains("takes one folder"));
    }
}
