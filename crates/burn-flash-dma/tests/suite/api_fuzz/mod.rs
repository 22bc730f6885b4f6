//! Random calls of the public interface, with sizes from 0, every float type, wrong shapes and extreme options. Every
//! refusal is an error whose text prints no number that stands for something else, and nothing panics.
//!
//! A case is a number that determines its calls. `FLASH_DMA_API_FUZZ` sets the number of calls.

/// A call by a method of [`Draw`], under its own name.
macro_rules! named {
    ($how:ident, $draw:ident, $value:ident.$name:ident $given:tt) => {{
        let name = $crate::api_fuzz::method(&$value, stringify!($name));
        $draw.$how(&name, || $value.$name $given)
    }};
    ($how:ident, $draw:ident, $type:ident::$name:ident $given:tt) => {
        $draw.$how(concat!(stringify!($type), "::", stringify!($name)), || $type::$name $given)
    };
    ($how:ident, $draw:ident, $name:ident $given:tt) => {
        $draw.$how(stringify!($name), || $name $given)
    };
}

/// `call!(draw, value.name(arguments))`, `call!(draw, Type::name(arguments))` or `call!(draw, name(arguments))`:
/// [`Draw::call`].
macro_rules! call {
    ($($call:tt)*) => { named!(call, $($call)*) };
}

/// `call!` that also reads and differentiates the result.
macro_rules! finish {
    ($draw:ident, $($call:tt)*) => {{
        let results = call!($draw, $($call)*);
        $draw.finish(results)
    }};
}

/// `call!` for functions that refuse nothing: [`Draw::run`].
macro_rules! run {
    ($($call:tt)*) => { named!(run, $($call)*) };
}

mod caches;
mod draw;
mod functions;
mod layers;

use draw::Draw;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The name of a value's method, `Type::name`.
fn method<T>(_value: &T, name: &str) -> String {
    let path = std::any::type_name::<T>().split('<').next();
    let owner = path.and_then(|path| path.rsplit("::").next());
    format!("{}::{name}", owner.expect("a type has a name"))
}

/// Calls of an ordinary run.
const CALLS: usize = 10_000;

/// Minimum number of calls of every function in a run of 100 000 calls or more.
const LEAST: usize = 200;

/// A case: its draws determine its calls.
type Case = fn(&mut Draw);

const CASES: &[Case] = &[
    functions::attention,
    functions::scored_attention,
    functions::scored_attention,
    functions::zoh_scores,
    functions::masked_attention,
    functions::masks,
    functions::packed_attention,
    functions::given_intervals,
    functions::documents,
    functions::selections,
    functions::packed_tensors,
    functions::packed_tensors,
    functions::heads,
    functions::parts,
    functions::products,
    functions::gates_and_scores,
    functions::norms,
    functions::checks,
    functions::overwritten,
    functions::causality,
    functions::gradients,
    functions::losses,
    layers::sparse,
    layers::sparse,
    layers::sparse,
    layers::sparse,
    layers::sparse,
    layers::in_parts,
    layers::in_parts,
    layers::over_devices,
    layers::over_devices,
    layers::masked,
    layers::cross,
    layers::cross,
    layers::multi_head,
    caches::slots,
    caches::slots,
    caches::pages,
    caches::pages,
    caches::pages,
    caches::either,
    caches::either,
];

#[test]
fn no_call_of_the_public_interface_panics() {
    let calls = std::env::var("FLASH_DMA_API_FUZZ").ok();
    let calls = calls.map_or(CALLS, |calls| calls.parse().expect("a number of calls"));
    let mut counts: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    let (mut findings, mut case) = (Vec::new(), 0);
    draw::print_no_findings();
    // Calls on a result are not calls of the function itself.
    let made = |counts: &BTreeMap<String, [usize; 2]>| {
        let calls = counts.iter().filter(|(name, _)| !name.contains(' '));
        calls.map(|(_, n)| n[0]).sum::<usize>()
    };
    while made(&counts) < calls && findings.len() < 20 {
        let mut draw = Draw::new(case);
        CASES[case as usize % CASES.len()](&mut draw);
        for (name, [called, refused]) in draw.counts {
            let all = counts.entry(name).or_default();
            *all = [all[0] + called, all[1] + refused];
        }
        findings.extend(draw.findings);
        case += 1;
    }
    for (name, [called, refused]) in &counts {
        println!("{called:7} calls, {refused:7} refused: {name}");
    }
    println!("{} calls of {case} cases", made(&counts));
    assert!(findings.is_empty(), "{}", findings.join("\n"));
    let least = if calls < 100_000 { 1 } else { LEAST };
    let rare: Vec<_> = public()
        .into_iter()
        .filter(|name| counts.get(name).map_or(0, |n| n[0]) < least)
        .collect();
    assert!(rare.is_empty(), "called less than {least} times: {rare:?}");
}

/// Every public function `try_*` of the crate: `Type::try_name`, or the name alone.
fn public() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    search(&sources, &mut names);
    assert!(names.len() > 100, "{names:?}");
    names
}

fn search(dir: &Path, names: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(dir).expect("the sources are there") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            search(&path, names);
        } else if path.extension().is_some_and(|end| end == "rs") {
            let text = std::fs::read_to_string(&path).expect("a source");
            let (mut owners, mut calls) = (Vec::new(), String::new());
            for line in text.lines() {
                if let Some(name) = line.strip_prefix("macro_rules! ") {
                    calls = name.replace(" {", "!(");
                } else if line.starts_with("impl") {
                    owners = vec![owner_of(line)];
                } else if line.trim_start().starts_with("impl $") {
                    // Written by a macro, for each type that it is called with.
                    let types = text.lines().filter_map(|line| line.strip_prefix(&calls));
                    owners = types.map(|of| of.trim_end_matches(");").into()).collect();
                }
                let Some((indent, rest)) = line.split_once("pub fn try_") else {
                    continue;
                };
                let name = rest.split(['(', '<']).next().unwrap_or_default();
                if indent.is_empty() {
                    names.insert(format!("try_{name}"));
                } else {
                    names.extend(owners.iter().map(|owner| format!("{owner}::try_{name}")));
                }
            }
        }
    }
}

/// The type of a line that begins an `impl`, without its parameters.
fn owner_of(line: &str) -> String {
    let line = line.trim_start_matches("impl");
    // After the parameters of the `impl` itself.
    let line = match line.strip_prefix('<') {
        Some(rest) => rest.split_once("> ").map_or(rest, |(_, rest)| rest),
        None => line,
    };
    let name = line.split(" for ").last().unwrap_or_default();
    let name = name.split(['<', '{']).next().unwrap_or_default();
    name.trim().to_string()
}
