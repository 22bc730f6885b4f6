#!/usr/bin/env python3
"""Check the library against PyTorch, on the shapes made here or on your own.

    pip install torch numpy safetensors
    python torch_cases.py make CASES
    cargo run --release -p interop -- --device flex --out RESULTS CASES/*.safetensors
    python torch_cases.py compare CASES RESULTS

`make` writes one safetensors file a case: `q [B, Hq, Nq, D]`, `k`, `v [B, Hkv, Nk, D]`, `scores
[B, Hkv, Nk]`, `dout [B, Hq, Nq, D]`, `dlse [B, Hq, Nq]`, and the options as JSON in the metadata. A
case for a 16-bit type holds numbers that the type can represent, so that both sides compute with
the same inputs. Any file of this form is a case: write your own, the comparison takes it.

`compare` computes the truth from the definition, with the N x N selection as a matrix, in float64,
and gradients by autograd. It prints for every tensor of every case the greatest absolute error and
that error relative to the greatest absolute value of the truth, which must be within

    dtype   out, dq, dk, dv, dscores    lse
    f32     1e-5                        1e-5
    f16     4e-3                        1e-3
    bf16    3e-2                        8e-3

NaN and infinities must stand at the same places, and the intervals (and with them the selected
keys) must be equal. It exits with 1 if a case fails or has no result.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {"f32": 1e-5, "f16": 4e-3, "bf16": 3e-2}
LSE_TOLERANCE = {"f32": 1e-5, "f16": 1e-3, "bf16": 8e-3}

INF = float("inf")


def cases():
    """(name, shape, options, kind of scores); a shape is (B, Hq, Hkv, Nq, Nk, D)."""
    yield "small", (1, 1, 1, 17, 17, 8), {"window": 5}, "normal"
    yield "gqa", (2, 8, 2, 113, 113, 64), {"window": 32}, "normal"
    yield "mqa", (1, 4, 1, 239, 239, 32), {"window": 64}, "normal"
    yield "long", (1, 4, 2, 1023, 1023, 64), {"window": 128}, "normal"
    yield "window-1", (1, 2, 1, 65, 65, 16), {"window": 1}, "normal"
    yield "window-all", (1, 2, 2, 64, 64, 32), {"window": 64}, "normal"
    yield "no-window", (1, 2, 1, 77, 77, 24), {}, "normal"
    yield "no-scores", (1, 4, 2, 100, 100, 40), {}, None
    yield "full", (2, 4, 2, 50, 120, 64), {"window": 30, "causal": False}, "normal"
    yield "decode", (2, 8, 2, 1, 257, 128), {"window": 64}, "normal"
    yield "suffix", (1, 2, 1, 33, 257, 64), {"window": 48}, "normal"
    yield "more-queries", (1, 2, 1, 40, 24, 16), {"window": 8}, "normal"
    yield "ties", (1, 4, 2, 200, 200, 32), {"window": 24}, "ties"
    yield "all-equal", (1, 2, 1, 130, 130, 16), {"window": 16}, "equal"
    yield "padding", (2, 2, 2, 150, 150, 32), {"window": 40}, "padding"
    yield "all-hidden", (1, 2, 1, 20, 20, 16), {"window": 4}, "hidden"
    yield "nan", (1, 4, 2, 90, 90, 32), {"window": 12}, "nan"
    yield "recent", (1, 4, 2, 300, 300, 64), {"window": 50}, "recent"
    yield "softcap", (1, 4, 2, 128, 128, 64), {"window": 32, "softcap": 2.0}, "normal"
    yield "scale", (1, 2, 2, 96, 96, 80), {"window": 24, "scale": 0.3}, "normal"
    yield "head-256", (1, 2, 1, 64, 64, 256), {"window": 16}, "normal"
    for dtype in ("f16", "bf16"):
        yield f"gqa-{dtype}", (2, 8, 2, 113, 113, 64), {"window": 32, "dtype": dtype}, "normal"
        yield f"suffix-{dtype}", (1, 4, 2, 70, 250, 128), {"window": 60, "dtype": dtype}, "ties"


def make(directory, seed):
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    count = 0
    for name, shape, options, kind in cases():
        dtype = DTYPES[options.get("dtype", "f32")]
        batch, q_heads, kv_heads, q_len, k_len, dim = shape

        def normal(*size):
            return torch.randn(*size, generator=generator).to(dtype).float()

        tensors = {
            "q": normal(batch, q_heads, q_len, dim),
            "k": normal(batch, kv_heads, k_len, dim),
            "v": normal(batch, kv_heads, k_len, dim),
            "dout": normal(batch, q_heads, q_len, dim),
            "dlse": normal(batch, q_heads, q_len),
        }
        if kind is not None:
            tensors["scores"] = scores(kind, (batch, kv_heads, k_len), generator)
        save_file(
            {key: value.contiguous() for key, value in tensors.items()},
            directory / f"{name}.safetensors",
            metadata={"options": json.dumps(options)},
        )
        count += 1
    print(f"{count} cases in {directory}")


def scores(kind, shape, generator):
    z = torch.randn(*shape, generator=generator)
    if kind == "ties":
        z = (z * 2).round() / 2
    elif kind == "equal":
        z = torch.ones(shape)
    elif kind == "padding":
        z[..., : shape[-1] // 5] = -INF
        z[..., -7:] = -INF
    elif kind == "hidden":
        z = torch.full(shape, -INF)
    elif kind == "nan":
        # Below every number: selected while fewer numbers than the window are visible.
        z[..., 3] = float("nan")
        z[..., 50] = float("nan")
    elif kind == "recent":
        z = z + torch.arange(shape[-1]) * 0.02
    return z


def selected(z, window, positions):
    """Which keys the query at each position attends to, straight from the definition: the `window`
    keys of greatest score up to the position; a tie to the lower index; NaN below every number;
    a score of -inf never. `z [Nk]`; the result is `[len(positions), Nk]`."""
    number = (~torch.isnan(z)) & (z > -INF)
    order = torch.argsort(torch.where(number, z, -INF), descending=True, stable=True)
    order = order[number[order]]
    order = torch.cat([order, torch.nonzero(torch.isnan(z)).flatten()])
    visible = order[None, :] <= positions[:, None]
    kept = visible & (visible.cumsum(1) <= window)
    mask = torch.zeros(len(positions), len(z), dtype=torch.bool)
    mask[:, order] = kept
    return mask


def intervals(z, window):
    """The first position that attends to each key and one past the last; both the key's own index
    if none does."""
    k_len = len(z)
    mask = selected(z, window, torch.arange(k_len))
    keys = torch.arange(k_len)
    count = mask.sum(0)
    first = torch.where(count > 0, mask.int().argmax(0), keys)
    assert bool(((first == keys) | (count == 0)).all()), "a key is attended from itself on"
    for j in range(k_len):
        assert bool(mask[first[j] : first[j] + count[j], j].all()), "a key's positions are a range"
    return torch.stack([first, first + count], -1)


def truth(tensors, options):
    """Outputs, gradients and intervals in float64."""
    leaves = {
        key: tensors[key].double().requires_grad_() for key in ("q", "k", "v", "scores") if key in tensors
    }
    q, k, v, z = (leaves.get(key) for key in ("q", "k", "v", "scores"))
    batch, q_heads, q_len, dim = q.shape
    kv_heads, k_len = k.shape[1:3]
    group = q_heads // kv_heads
    window = options.get("window") or k_len
    causal = options.get("causal", True)
    # The position of a query is the index of the last key it may see.
    positions = torch.arange(q_len) + k_len - q_len if causal else torch.full((q_len,), k_len - 1)

    mask = torch.empty(batch, kv_heads, q_len, k_len, dtype=torch.bool)
    for b in range(batch):
        for h in range(kv_heads):
            z_head = tensors["scores"][b, h] if z is not None else torch.zeros(k_len)
            mask[b, h] = selected(z_head, window, positions)
    mask = mask.repeat_interleave(group, 1)

    logits = q @ k.repeat_interleave(group, 1).transpose(-1, -2)
    logits = logits * (options.get("scale") or 1 / math.sqrt(dim))
    if options.get("softcap"):
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    if z is not None:
        # A hidden key is masked; -inf must not meet a gradient of 0.
        bias = torch.where(z == -INF, 0.0, z)
        logits = logits + bias.repeat_interleave(group, 1)[:, :, None, :]
    logits = torch.where(mask, logits, -INF)
    something = mask.any(-1, keepdim=True)
    # A row without a key would be 0/0: it gets finite logits, and zeros afterwards.
    logits = torch.where(something, logits, 0.0)
    lse = torch.logsumexp(logits, -1)
    # A row with a NaN is NaN throughout: that must not reach the keys it does not select.
    weights = torch.where(mask, torch.softmax(logits, -1), 0.0)
    out = weights @ v.repeat_interleave(group, 1)
    something = something[..., 0]

    result = {"out": out, "lse": torch.where(something, lse, -INF)}
    loss = 0.0
    if "dout" in tensors:
        loss = loss + (out * tensors["dout"].double()).sum()
    if "dlse" in tensors:
        loss = loss + (torch.where(something, lse, 0.0) * tensors["dlse"].double()).sum()
    if torch.is_tensor(loss):
        loss.backward()
        for key, leaf in leaves.items():
            result["d" + key] = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
    if z is not None:
        heads = [intervals(head, window) for head in tensors["scores"].reshape(-1, k_len)]
        result["intervals"] = torch.stack(heads).reshape(batch, kv_heads, k_len, 2)
    return {key: value.detach().numpy() for key, value in result.items()}


def read(path):
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}


def compare_tensor(actual, expected, tolerance):
    """(absolute error, relative error, what is wrong or None)."""
    if actual.shape != expected.shape:
        return INF, INF, f"shape {actual.shape}, expected {expected.shape}"
    finite = np.isfinite(expected)
    special = np.where(finite, 0.0, expected)
    actual_special = np.where(np.isfinite(actual), 0.0, actual)
    if not np.array_equal(special, actual_special, equal_nan=True):
        return INF, INF, "NaN or infinity at another place"
    error = np.abs(np.where(finite, actual, 0.0) - np.where(finite, expected, 0.0))
    largest = np.abs(np.where(finite, expected, 0.0)).max(initial=0.0)
    absolute = error.max(initial=0.0)
    relative = absolute / largest if largest > 0 else absolute
    if relative <= tolerance:
        return absolute, relative, None
    worst = np.unravel_index(error.argmax(), error.shape)
    where = tuple(int(i) for i in worst)
    return absolute, relative, f"{actual[worst]:.9g} at {where}, expected {expected[worst]:.9g}"


def compare(cases_directory, results_directory):
    failed = 0
    paths = sorted(cases_directory.glob("*.safetensors"))
    for path in paths:
        tensors, metadata = read(path)
        result_path = results_directory / path.name
        if not result_path.exists():
            print(f"{path.stem}: no result")
            failed += 1
            continue
        result, result_metadata = read(result_path)
        dtype = result_metadata["dtype"]
        for key in ("q", "k", "v"):
            # As the other side did, when it was asked for a narrower type than the case's.
            tensors[key] = tensors[key].to(DTYPES[dtype])
        expected = truth(tensors, json.loads(metadata.get("options", "{}")))
        wrong = []
        numbers = []
        for key, value in expected.items():
            if key not in result:
                wrong.append(f"{key}: not in the result")
            elif key == "intervals":
                differing = int((result[key].numpy() != value).any(-1).sum())
                if differing:
                    wrong.append(f"intervals: {differing} keys differ")
            else:
                tolerance = (LSE_TOLERANCE if key == "lse" else TOLERANCE)[dtype]
                actual = result[key].double().numpy()
                absolute, relative, problem = compare_tensor(actual, value, tolerance)
                numbers.append(f"{key} {absolute:.1e}/{relative:.1e}")
                if problem:
                    wrong.append(f"{key}: {problem}")
        print(f"{'FAIL' if wrong else 'ok':<4} {path.stem:<16} {dtype:<4} {'  '.join(numbers)}")
        for line in wrong:
            print(f"     {line}")
        failed += bool(wrong)
    print(f"{len(paths) - failed} passed, {failed} failed (absolute/relative error)")
    return 1 if failed or not paths else 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make", help="write the cases")
    maker.add_argument("directory", type=Path)
    maker.add_argument("--seed", type=int, default=0)
    comparer = commands.add_parser("compare", help="compare results with the truth")
    comparer.add_argument("cases", type=Path)
    comparer.add_argument("results", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.directory, arguments.seed)
        return 0
    return compare(arguments.cases, arguments.results)


if __name__ == "__main__":
    sys.exit(main())
