//! The versions that a program was built with, for its rows.

/// The manifest of the workspace, which pins Burn and CubeCL.
const MANIFEST: &str = include_str!("../../Cargo.toml");

/// `burn A, cubecl B`, as the workspace pins them.
///
/// # Panics
///
/// If the workspace pins one of them no longer.
pub fn versions() -> String {
    let named = |name| format!("{name} {}", pinned(name).expect("the workspace pins it"));
    ["burn", "cubecl"].map(named).join(", ")
}

/// The version behind `name = { version = "=`.
fn pinned(name: &str) -> Option<&'static str> {
    let start = format!("{name} = {{ version = \"=");
    let line = MANIFEST.lines().find_map(|line| line.strip_prefix(&start));
    line?.split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pinned_versions_are_found() {
        let versions = versions();
        let numbers = versions.split([' ', ',']).filter(|part| {
            let mut digits = part.split('.');
            digits.clone().count() == 3 && digits.all(|digit| digit.parse::<u32>().is_ok())
        });
        assert_eq!(numbers.count(), 2, "{versions}");
        assert_eq!(pinned("no-such-crate"), None);
    }
}
