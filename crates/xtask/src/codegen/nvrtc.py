"""Compile CUDA C++ as CubeCL and the driver do, without a GPU.

    python nvrtc.py DIR TABLE VARIANT:ARCH:SHARED...
    python nvrtc.py --sources DIR VARIANT...

DIR/VARIANT.cu goes through NVRTC to PTX and through ptxas to machine code. One row a job on standard output,
tab-separated: variant, arch, registers, spill stores, spill loads, stack, shared memory (static and SHARED, the dynamic
one, in bytes), `mma` and `wgmma` instructions (counted in the PTX), and the key: a hash of the source and of everything
that the row depends on.
The toolkit is that of the wheels installed beside this Python. What TABLE, rows of this form, or DIR-cache know by
their key is not compiled, but for the keys of SAMPLE: they are compiled anew, and it is an error if TABLE has other
figures. With --sources nothing is compiled: a row is a variant and the hash of its source, as far as CubeCL writes the
same one in every run.
"""

import ctypes
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
# One kernel of 16 is compiled whatever the table says of it, so that a table made otherwise is found out.
SAMPLE = "0"


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


def compile_one(job):
    """The job's row and whether it was compiled; a text in place of the row says what went wrong."""
    folder, name, arch, shared = job
    try:
        source = canonical((folder / f"{name}.cu").read_text())
        key = hashlib.sha256("\0".join([source, arch, shared, *TOOLS]).encode()).hexdigest()[:16]
        record = RECORDED.get(key)
        cached = folder.with_name(folder.name + "-cache") / key
        if cached.exists():
            figures = cached.read_text().split()
        elif record and not key.startswith(SAMPLE):
            return [name, arch, *record, key], False
        else:
            figures = [str(figure) for figure in figures_of(folder, name, arch, source, int(shared))]
            cached.parent.mkdir(exist_ok=True)
            cached.write_text(" ".join(figures))
        if record and figures != record:
            raise RuntimeError(f"compiles to {figures}, where the table has {record} for the same source")
        return [name, arch, *figures, key], True
    except (RuntimeError, OSError) as error:
        return f"{name} for {arch}: {str(error)[:4000]}", True


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

# The figures of TABLE by their keys; the pool's processes begin with a copy.
RECORDED = {}


def print_sources(folder, names):
    for name in names:
        source = canonical((folder / f"{name}.cu").read_text())
        print(name, hashlib.sha256(source.encode()).hexdigest()[:16], sep="\t")


def main():
    if sys.argv[1] == "--sources":
        return print_sources(pathlib.Path(sys.argv[2]), sys.argv[3:])
    folder, table = map(pathlib.Path, sys.argv[1:3])
    rows = [line.split("\t") for line in table.read_text().splitlines()]
    RECORDED.update((key, figures) for _, _, *figures, key in rows)
    jobs = [(folder, *argument.rsplit(":", 2)) for argument in sys.argv[3:]]
    ptxas = NVIDIA / "cuda_nvcc/bin/ptxas"
    if not os.access(ptxas, os.X_OK):  # pip does not keep the execute bit
        ptxas.chmod(ptxas.stat().st_mode | stat.S_IXUSR)

    failures = compiled = 0
    with multiprocessing.get_context("fork").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        for row, anew in pool.imap(compile_one, jobs):
            compiled += anew
            if isinstance(row, str):
                failures += 1
                print(row, file=sys.stderr)
            else:
                print(*row, sep="\t")
    print(f"codegen: {compiled} compiled, {len(jobs) - compiled} as the table has them", file=sys.stderr)
    if failures:
        sys.exit(f"{failures} of {len(jobs)} compilations failed")


if __name__ == "__main__":
    main()
