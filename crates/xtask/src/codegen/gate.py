"""The code-generation gate: compile CUDA C++ as CubeCL and the driver do, without a GPU, and compare what comes out.

    python gate.py [--full | --bless | --sources] DIR DOCS [PREFIX..]

DIR/NAME.cu, for each NAME and architecture of DIR/manifest.tsv, goes through NVRTC to PTX and through ptxas to machine
code, by the wheels that are installed beside this Python. A row has registers, spills, stack and shared memory (static and the
manifest's, the dynamic one, in bytes), the number of `mma` and `wgmma` instructions in the PTX, and a key: a hash of the
source and of everything that the row depends on. DOCS/codegen.tsv has the rows that were accepted, and a kernel whose key
is there, or in DIR-cache, is not compiled: --full compiles all. DOCS/codegen-spills.tsv says which spills are accepted, and why.
--bless writes DOCS/codegen.tsv anew. --sources compiles nothing and prints a variant and the hash of its source a line.
With prefixes, only rows whose names begin so are looked at: DIR has no others.
"""

import argparse
import collections
import ctypes
import fnmatch
import hashlib
import inspect
import multiprocessing
import os
import pathlib
import re
import stat
import subprocess
import sys
import sysconfig

SITE = pathlib.Path(sysconfig.get_path("purelib"))
NVIDIA = SITE / "nvidia"

COLUMNS = "variant arch registers spill_stores spill_loads stack shared mma wgmma key".split()
SPILL_COLUMNS = "variant arch bytes why".split()
Row = collections.namedtuple("Row", COLUMNS[2:])

# How much a kernel may grow: what a small change of the code may cost.
BOUNDS = {"registers": 8, "stack": 16, "shared": 256}
# The most shared memory that a cube may have, in bytes.
SHARED = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_120": 99 * 1024}


def load_nvrtc():
    folder = NVIDIA / "cuda_nvrtc/lib"
    # NVRTC looks for this one by name; loaded beforehand, it needs no search path.
    for builtins in folder.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(next(folder.glob("libnvrtc.so.*"))))


def canonical(source):
    """The source with its values numbered in the order they appear, and without the hash of the kernel's name: CubeCL's
    own numbers vary between runs, the hash with the kernel's Rust path, and nothing of the compiler's work shall depend
    on them. A modifier of PTX as `.v2` is no value."""
    names = {}
    source = re.sub(r"(__global__ [^;{]*?\b\w+)_[0-9a-f]{8}(?=\()", r"\1", source)
    return re.sub(r"(?<!\.)\bv\d+", lambda name: names.setdefault(name[0], f"w{len(names)}"), source)


def to_ptx(source, arch):
    """PTX of one source, with the flags CubeCL passes; raises RuntimeError with NVRTC's log."""
    nvrtc = load_nvrtc()
    program = ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None)
    if created != 0:
        raise RuntimeError(f"nvrtcCreateProgram: {created}")
    options = [f"--gpu-architecture={arch}", "-lineinfo"]
    options += [f"--include-path={NVIDIA / name / 'include'}" for name in ("cuda_runtime", "cuda_cccl")]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), array)

    size = ctypes.c_size_t()
    if status != 0:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.value.decode(errors="replace"))
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx.value


def resources(log):
    """The numbers in what `ptxas -v` says about its one kernel."""
    registers = re.findall(r"Used (\d+) registers", log)
    if len(registers) != 1:
        raise RuntimeError(f"expected one kernel, found {len(registers)}:\n{log}")
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    stack, stores, loads = (max(map(int, column)) for column in zip(*frames))
    shared = re.search(r"(\d+) bytes smem", log)
    return int(registers[0]), stores, loads, stack, int(shared.group(1)) if shared else 0


def tensor_instructions(ptx):
    """How many `mma` and `wgmma` instructions the text has."""
    return len(re.findall(rb"\bmma\.sync\b", ptx)), len(re.findall(rb"\bwgmma\.mma_async\b", ptx))


def figures_of(folder, name, arch, source, dynamic):
    """Compiles the source and counts."""
    ptx = folder / f"{name}.{arch}.ptx"
    ptx.write_bytes(to_ptx(source, arch))
    command = [str(NVIDIA / "cuda_nvcc/bin/ptxas"), f"-arch={arch}", "-v"]
    command += ["-o", str(ptx.with_suffix(".cubin")), str(ptx)]
    result = subprocess.run(command, capture_output=True, text=True)
    log = result.stdout + result.stderr
    if result.returncode != 0:
        raise RuntimeError(log)
    # Where ptxas cannot keep products in flight it waits for each, and only says so.
    if serialized := [line for line in log.splitlines() if "wgmma.mma_async" in line]:
        raise RuntimeError("\n".join(serialized))
    *figures, static = resources(log)
    return [*figures, static + dynamic, *tensor_instructions(ptx.read_bytes())]


# What a row depends on beside the source: what compiles and counts here, and the versions of the wheels. The rest of this
# program may change without a kernel being compiled again.
TOOLS = [inspect.getsource(step) for step in (canonical, to_ptx, resources, tensor_instructions, figures_of)]
TOOLS += sorted(path.name for path in SITE.glob("nvidia*.dist-info"))

# Figures by their keys; the pool's processes begin with a copy.
KNOWN = {}


def compile_one(job):
    """The kernel, its row, and whether it was compiled; a text in place of the row says what went wrong."""
    folder, name, arch, shared = job
    try:
        source = canonical((folder / f"{name}.cu").read_text())
        key = hashlib.sha256("\0".join([source, arch, shared, *TOOLS]).encode()).hexdigest()[:16]
        if key in KNOWN:
            return (name, arch), Row(*KNOWN[key], key), False
        figures = figures_of(folder, name, arch, source, int(shared))
        cache_of(folder).joinpath(key).write_text(" ".join(map(str, figures)))
        return (name, arch), Row(*figures, key), True
    except (RuntimeError, OSError) as error:
        return (name, arch), str(error)[:4000], True


def cache_of(folder):
    return folder.with_name(folder.name + "-cache")


def compile_all(jobs):
    """The rows of all jobs; ends the program when one cannot be compiled."""
    with multiprocessing.get_context("fork").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        results = list(pool.imap(compile_one, jobs))
    compiled = sum(anew for _, _, anew in results)
    print(f"codegen: {compiled} compiled, {len(jobs) - compiled} as the table has them", flush=True)
    rows = {kernel: row for kernel, row, _ in results}
    wrong = [f"{name} for {arch}: {row}" for (name, arch), row in rows.items() if isinstance(row, str)]
    if wrong:
        sys.exit("\n".join([*wrong, f"{len(wrong)} of {len(jobs)} compilations failed"]))
    return rows


def cells(text, columns, what):
    """The rows of a tab-separated text that begins with its columns."""
    header, *rows = [line.split("\t") for line in text.splitlines() if line]
    if header != columns:
        raise SystemExit(f"{what} has other columns than {' '.join(columns)}")
    if bad := [row for row in rows if len(row) != len(columns) or not all(cell.strip() for cell in row)]:
        raise SystemExit(f"{what} has a bad row: {' '.join(bad[0])}")
    return rows


def parse(text):
    """Rows by variant and architecture."""
    rows = cells(text, COLUMNS, "docs/codegen.tsv")
    return {(name, arch): Row(*map(int, figures), key) for name, arch, *figures, key in rows}


def written(rows):
    """The text that `parse` reads."""
    lines = ["\t".join(map(str, (*kernel, *row))) for kernel, row in sorted(rows.items())]
    return "\n".join(["\t".join(COLUMNS), *lines, ""])


def pretty(rows):
    """A table for a terminal."""
    lines = [COLUMNS, *([*kernel, *map(str, row)] for kernel, row in sorted(rows.items()))]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line[:-1], widths)) for line in lines)


def parse_spills(text):
    return [(name, arch, int(size)) for name, arch, size, _ in cells(text, SPILL_COLUMNS, "docs/codegen-spills.tsv")]


def spilled(row):
    return max(row.spill_stores, row.spill_loads)


def covers(spill, kernel):
    return all(map(fnmatch.fnmatchcase, kernel, spill[:2]))


def violations(rows, spills):
    """What no table excuses, and spills that none does."""
    for kernel, row in sorted(rows.items()):
        name, arch = kernel
        limit = SHARED.get(arch, 227 * 1024)
        if row.shared > limit:
            yield f"{name} {arch}: {row.shared} bytes of shared memory, the architecture has {limit}"
        step = name.rsplit(".", 1)[-1].split("-")[0]
        for instruction in ("mma", "wgmma"):
            # `delta_mma` sums rows, which it reads as the other `mma` kernels read them.
            if step.endswith("_" + instruction) and step != "delta_mma" and getattr(row, instruction) == 0:
                yield f"{name} {arch}: has no {instruction} instruction"
        allowed = max((spill[2] for spill in spills if covers(spill, kernel)), default=0)
        if spilled(row) > allowed:
            yield f"{name} {arch}: spills {spilled(row)} bytes, docs/codegen-spills.tsv allows {allowed}"


def unused(rows, spills):
    """The accepted spills that no kernel of a complete table needs any more."""
    for spill in spills:
        if not any(spilled(row) and covers(spill, kernel) for kernel, row in rows.items()):
            yield f"{spill[0]} {spill[1]}: docs/codegen-spills.tsv excuses spills that are gone"


def growth(rows, committed):
    """What is worse than the committed rows by more than the bounds, and kernels that only one of the two has."""
    for (name, arch), row in sorted(rows.items()):
        if (old := committed.get((name, arch))) is None:
            yield f"{name} {arch}: not in the committed table"
            continue
        if row.key == old.key and row != old:
            yield f"{name} {arch}: compiles to {row[:-1]}, where the table has {old[:-1]} for the same source: remove its row and bless"
        for column, bound in BOUNDS.items():
            if getattr(row, column) > getattr(old, column) + bound:
                change = f"{getattr(old, column)} -> {getattr(row, column)}"
                yield f"{name} {arch}: {column} {change}, more than {bound} above"
        for column in ("mma", "wgmma"):
            if getattr(row, column) < getattr(old, column):
                yield f"{name} {arch}: {column} instructions {getattr(old, column)} -> {getattr(row, column)}"
    for name, arch in sorted(committed.keys() - rows.keys()):
        yield f"{name} {arch}: in the committed table, but no longer generated"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("docs", type=pathlib.Path)
    mode = parser.add_mutually_exclusive_group()
    for switch in ("--full", "--bless", "--sources"):
        mode.add_argument(switch, action="store_true")
    parser.add_argument("prefixes", nargs="*")
    args = parser.parse_args()

    header, *variants = [line.split("\t") for line in (args.dir / "manifest.tsv").read_text().splitlines()]
    variants = [dict(zip(header, variant)) for variant in variants]
    if args.sources:
        for variant in variants:
            source = canonical((args.dir / f"{variant['name']}.cu").read_text())
            print(variant["name"], hashlib.sha256(source.encode()).hexdigest()[:16], sep="\t")
        return
    jobs = [(args.dir, v["name"], arch, v["shared_bytes"]) for v in variants for arch in v["arches"].split(",")]
    if not jobs:
        sys.exit("no variant has such a name")
    table = args.docs / "codegen.tsv"
    try:
        committed = parse(table.read_text())
    except SystemExit:
        if not args.bless or args.prefixes:
            raise
        committed = {}
    spills = parse_spills((args.docs / "codegen-spills.tsv").read_text())
    about = {kernel for kernel in committed if kernel[0].startswith(tuple(args.prefixes) or "")}

    cache_of(args.dir).mkdir(exist_ok=True)
    if not args.full:
        KNOWN.update((path.name, path.read_text().split()) for path in cache_of(args.dir).iterdir())
        KNOWN.update((row.key, row[:-1]) for row in committed.values())
    ptxas = NVIDIA / "cuda_nvcc/bin/ptxas"
    if not os.access(ptxas, os.X_OK):  # pip does not keep the execute bit
        ptxas.chmod(ptxas.stat().st_mode | stat.S_IXUSR)
    rows = {kernel: Row(*map(int, row[:-1]), row.key) for kernel, row in compile_all(jobs).items()}

    faults = list(violations(rows, spills))
    if not args.prefixes:
        faults += unused(rows, spills)
    changed = {kernel: row for kernel, row in rows.items() if row[:-1] != committed.get(kernel, ())[:-1]}
    if shown := rows if args.prefixes else changed:
        print(pretty(shown))
    if args.bless:
        kept = {kernel: row for kernel, row in committed.items() if kernel not in about}
        table.write_text(written(kept | rows))
        print(f"codegen: wrote {table}")
    else:
        faults += growth(rows, {kernel: committed[kernel] for kernel in about})
    if faults:
        sys.exit("\n  ".join(["generated code is not what docs/codegen.tsv and docs/codegen-spills.tsv allow:", *faults]) + """
If it is what you meant, run `cargo xtask codegen --bless` and commit the table with the change. Spills need a row with a
reason in docs/codegen-spills.tsv.""")
    print(f"codegen: {len(rows)} kernels within the bounds of docs/codegen.tsv")


if __name__ == "__main__":
    main()
