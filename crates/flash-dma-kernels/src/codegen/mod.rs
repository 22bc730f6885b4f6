//! Every CUDA variant of the kernels as CUDA C++, without a GPU.
//!
//! The variants are not listed by hand: the library's own functions run on problems that cover what
//! they tell apart, on a device that records the kernels launched. What is generated is thus what a
//! CUDA machine would compile.

mod cases;
mod cuda;
mod recorder;

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::path::Path;

/// Writes `<variant>.cu` for every variant and `manifest.tsv` (name, dynamic shared memory in bytes,
/// cube dimensions) into the existing directory `out`. Returns the number of variants.
///
/// A variant is named after the first case that launches it and its kernel.
///
/// # Errors
///
/// The reason, if a file cannot be written or a kernel has no CUDA form.
pub fn write(out: &Path) -> Result<usize, String> {
    write_cases(cases::all(), out)
}

fn write_cases(cases: Vec<cases::Case>, out: &Path) -> Result<usize, String> {
    let client = recorder::client();
    let mut seen = HashSet::new();
    let mut names: HashMap<String, usize> = HashMap::new();
    let mut manifest = String::from("name\tshared_bytes\tcube_x\tcube_y\tcube_z\n");
    let save = |name: &str, text: &str| {
        let path = out.join(name);
        std::fs::write(&path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))
    };
    for case in cases {
        for kernel in recorder::record(&client, |client| (case.run)(client)) {
            let id = kernel.id();
            let mut code = id.clone();
            // Launches of another size share the code but for the bound on the units of a cube.
            code.cube_dim = *cubecl::CubeDim::new_single();
            if !seen.insert(code) {
                continue;
            }
            let mut name = format!("{}.{}", case.name, kernel_name(id.type_name()));
            let times = names.entry(name.clone()).or_default();
            *times += 1;
            if *times > 1 {
                write!(name, "-{times}").expect("a string takes everything");
            }
            let source = cuda::generate(&*kernel).map_err(|e| format!("{name}: {e}"))?;
            save(&format!("{name}.cu"), &source.text)?;
            let (dim, shared) = (id.cube_dim, source.shared_bytes);
            writeln!(
                manifest,
                "{name}\t{shared}\t{}\t{}\t{}",
                dim.x, dim.y, dim.z
            )
            .expect("a string takes everything");
        }
    }
    save("manifest.tsv", &manifest)?;
    Ok(seen.len())
}

/// `merge_blocks` of `…::merge_blocks_kernel::MergeBlocksKernel<…>`: the function that was written.
fn kernel_name(type_name: &str) -> &str {
    let path = type_name.split('<').next().unwrap_or(type_name);
    let function = path.rsplit("::").nth(1).unwrap_or(path);
    function.strip_suffix("_kernel").unwrap_or(function)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variant_is_named_after_the_kernel_function() {
        let name = "flash_dma_kernels::select::sort::merge_blocks_kernel::MergeBlocksKernel";
        assert_eq!(kernel_name(name), "merge_blocks");
        assert_eq!(kernel_name("a::b_kernel::BKernel<half::bf16>"), "b");
    }

    #[test]
    fn a_selection_takes_the_launches_its_documentation_says() {
        let launches = |name: &str| {
            let case = cases::all()
                .into_iter()
                .find(|case| case.name == name)
                .unwrap();
            recorder::record(&recorder::client(), |client| (case.run)(client)).len()
        };
        assert_eq!(launches("select"), 2);
        assert_eq!(launches("select-long"), 30);
        assert_eq!(launches("select-all"), 1);
        assert_eq!(launches("lists"), 2 + 1 + 1);
    }

    /// The attention kernels take longer; `cargo xtask codegen` generates and compiles them all.
    #[test]
    fn selection_and_lists_have_a_cuda_form() {
        let out = std::env::temp_dir().join(format!("flash-dma-codegen-{}", std::process::id()));
        std::fs::create_dir_all(&out).unwrap();
        let variants = write_cases(cases::selection(), &out).unwrap();
        let manifest = std::fs::read_to_string(out.join("manifest.tsv")).unwrap();
        std::fs::remove_dir_all(&out).unwrap();
        let names: HashSet<&str> = (manifest.lines().skip(1))
            .map(|line| line.split('\t').next().unwrap())
            .collect();
        // 7 kernels of a selection by sorting, 1 that keeps all and 2 of the lists, with 32 and 64 bit
        // addresses; 2 of a selection by blocks.
        assert_eq!((names.len(), variants), (22, 22));
        for name in [
            "select.thresholds",
            "select.evictions",
            "select-long.descend",
            "lists.tile_keys",
            "select-64bit.descend",
        ] {
            assert!(names.contains(name), "no {name} in\n{manifest}");
        }
    }
}
