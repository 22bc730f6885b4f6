//! Every CUDA variant of the kernels as CUDA C++, without a GPU.
//!
//! The variants are not listed by hand: the library's own functions run on problems that cover all of their cases, on
//! devices that record the launched kernels. The generated code is thus the code that such a machine would compile.

mod cases;
mod cuda;
#[cfg(test)]
mod engines;
#[cfg(test)]
mod memory;
mod recorder;
#[cfg(test)]
mod routes;
mod tensors;
#[cfg(test)]
mod upstream;

use crate::codegen::cuda::Gpu;
use cubecl::CubeKernel;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Mutex;

/// Writes `<variant>.cu` for every variant whose name begins with one of `prefixes` (for all without any)
/// and `manifest.tsv` (name, architectures, dynamic shared memory in bytes, cube dimensions) into the existing
/// directory `out`. Returns the number of variants.
///
/// A variant is named after the first case that launches it and its kernel; it has the architectures of its devices.
///
/// # Errors
///
/// The reason, if a file cannot be written or a kernel has no CUDA form.
pub fn write(out: &Path, prefixes: &[String]) -> Result<usize, String> {
    let mut variants = variants(cases::all);
    variants.retain(|v| prefixes.is_empty() || prefixes.iter().any(|p| v.name.starts_with(p)));
    write_variants(variants, out)
}

struct Variant {
    name: String,
    kernel: Box<dyn CubeKernel>,
    gpus: Vec<Gpu>,
}

/// The kernels that the cases launch, each once.
fn variants(cases: fn() -> Vec<cases::Case>) -> Vec<Variant> {
    let mut places = HashMap::new();
    let mut names: HashMap<String, usize> = HashMap::new();
    let mut variants: Vec<Variant> = Vec::new();
    for gpu in Gpu::ALL {
        let client = recorder::client(gpu);
        for case in cases() {
            if !case.gpus.contains(&gpu) {
                continue;
            }
            for kernel in recorder::record(&client, |client| (case.run)(client)) {
                let mut code = kernel.id();
                let mut name = format!("{}.{}", case.name, kernel_name(code.type_name()));
                // Launches of different sizes share the code, except for the bound on the units of a cube.
                code.cube_dim = *cubecl::CubeDim::new_single();
                if let Some(&place) = places.get(&code) {
                    let known: &mut Variant = &mut variants[place];
                    if !known.gpus.contains(&gpu) {
                        known.gpus.push(gpu);
                    }
                    continue;
                }
                places.insert(code, variants.len());
                if gpu != Gpu::ALL[0] {
                    write!(name, "-{gpu:?}").expect("a string takes everything");
                }
                let times = names.entry(name.clone()).or_default();
                *times += 1;
                if *times > 1 {
                    write!(name, "-{times}").expect("a string takes everything");
                }
                let gpus = vec![gpu];
                variants.push(Variant { name, kernel, gpus });
            }
        }
    }
    variants
}

fn write_variants(variants: Vec<Variant>, out: &Path) -> Result<usize, String> {
    let count = variants.len();
    let todo = Mutex::new(variants.into_iter().enumerate());
    let rows = Mutex::new(BTreeMap::new());
    // A large kernel takes seconds, and kernels are independent.
    let work = || {
        while let Some((i, variant)) = { todo.lock().expect("nothing panics").next() } {
            let row = write_variant(&variant, out);
            rows.lock().expect("nothing panics").insert(i, row);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let mut manifest = String::from("name\tarches\tshared_bytes\tcube_x\tcube_y\tcube_z\n");
    for row in rows.into_inner().expect("nothing panics").into_values() {
        manifest += &row?;
    }
    save(&out.join("manifest.tsv"), &manifest)?;
    Ok(count)
}

/// Writes one source; returns its row of the manifest.
fn write_variant(variant: &Variant, out: &Path) -> Result<String, String> {
    let Variant { name, kernel, gpus } = variant;
    let source = cuda::generate(&**kernel).map_err(|e| format!("{name}: {e}"))?;
    save(&out.join(format!("{name}.cu")), &source.text)?;
    let arches: Vec<&str> = gpus.iter().map(|gpu| gpu.arch()).collect();
    let (arches, dim, shared) = (arches.join(","), kernel.id().cube_dim, source.shared_bytes);
    Ok(format!(
        "{name}\t{arches}\t{shared}\t{}\t{}\t{}\n",
        dim.x, dim.y, dim.z
    ))
}

fn save(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))
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
    use std::collections::HashSet;

    /// The names of the kernels of a case, in order.
    fn launches(gpu: Gpu, name: &str) -> Vec<String> {
        let case = cases::all().into_iter().find(|case| case.name == name);
        let run = case.expect("a case").run;
        recorder::names(&recorder::client(gpu), |client| run(client))
    }

    #[test]
    fn a_variant_is_named_after_the_kernel_function() {
        let name = "flash_dma_kernels::select::sort::merge_blocks_kernel::MergeBlocksKernel";
        assert_eq!(kernel_name(name), "merge_blocks");
        assert_eq!(kernel_name("a::b_kernel::BKernel<half::bf16>"), "b");
    }

    /// CubeCL's disk cache goes by the stable hash alone: two kernels of one hash would run as each other.
    #[test]
    fn every_kernel_has_a_stable_hash_of_its_own() {
        let mut hashes = HashMap::new();
        for variant in variants(cases::all) {
            let id = variant.kernel.id();
            if let Some(other) = hashes.insert(id.stable_hash(), variant.name.clone()) {
                panic!("{} and {other} have one hash", variant.name);
            }
        }
        assert!(hashes.len() > 100);
    }

    #[test]
    fn a_selection_takes_the_launches_its_documentation_says() {
        let launches = |name: &str| launches(Gpu::H200, name).len();
        assert_eq!(launches("select"), 2);
        assert_eq!(launches("select-long"), 30);
        assert_eq!(launches("select-all"), 1);
        assert_eq!(launches("lists"), 2 + 1 + 1);
    }

    /// Without `wgmma`, attention runs on `mma`, with or without masks, whatever shared memory the device has.
    #[test]
    fn every_device_takes_tensor_cores() {
        let attention = ["forward_mma", "dq_mma", "dkdv_mma"].as_slice();
        for gpu in Gpu::ALL {
            for (name, kernels) in [
                ("masked-mma-d64", attention),
                ("masked-mma-d128", attention),
                ("mma-d64", attention),
                ("mma-d128", attention),
                ("mma-d64-dense", attention),
                ("mma-d128-dense", attention),
                ("decode-mma-d64-slots", &["decode_mma"]),
                ("decode-mma-d128-slots", &["decode_mma"]),
                ("decode-mma-d128-pages", &["decode_mma"]),
            ] {
                let launched = launches(gpu, name);
                for kernel in kernels {
                    let found = launched.iter().any(|name| name == kernel);
                    assert!(found, "{gpu:?} {name} {kernel}");
                }
            }
        }
    }

    /// A case calls the engines in turn: portable, mma, wgmma, first forward, then backward.
    #[test]
    fn a_pass_takes_the_launches_that_the_notes_say() {
        let launches = |name| launches(Gpu::H200, name);
        let sparse = launches("bf16-d128");
        let forward = sparse.iter().position(|k| k == "forward_wgmma").unwrap();
        assert_eq!(
            sparse[forward - 3..=forward],
            ["forward_mma", "live_keys", "tile_keys", "forward_wgmma"]
        );
        assert_eq!(
            sparse[sparse.len() - 9..],
            [
                "live_keys",
                "delta_mma",
                "tile_keys",
                "dq_wgmma",
                "chunk_keys",
                "fill",
                "clear_sums",
                "dkdv_wgmma",
                "round_sums"
            ]
        );
        let dense = launches("bf16-d128-dense");
        let backward = ["delta_mma", "dq_wgmma", "dkdv_wgmma"];
        assert_eq!(dense[dense.len() - 3..], backward);
        assert_eq!(dense[..3], ["forward", "forward_mma", "forward_wgmma"]);
        let pairs = launches("masked-bf16-d128-pairs-no-mask");
        assert_eq!(
            pairs[pairs.len() - 4..],
            ["delta_mma", "dq_wgmma", "dkdv_wgmma", "bias_wgmma"]
        );
        let few = launches("bf16-d128-few-dense");
        assert_eq!(
            few,
            ["forward", "forward_mma", "merge", "forward_wgmma", "merge"]
        );
    }

    /// The attention kernels take longer; `cargo xtask codegen` generates and compiles them all.
    #[test]
    fn selection_and_lists_have_a_cuda_form() {
        let out = std::env::temp_dir().join(format!("flash-dma-codegen-{}", std::process::id()));
        std::fs::create_dir_all(&out).unwrap();
        let variants = write_variants(variants(cases::selection), &out).unwrap();
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
