#!/usr/bin/env python3
"""Check the library against PyTorch, on the shapes made here or on your own.

    pip install torch numpy safetensors
    python torch_cases.py run --device flex

`run` does these three steps, in folders below runs/interop:

    python torch_cases.py make CASES
    cargo run --release -p interop -- --device flex --out RESULTS CASES/*.safetensors
    python torch_cases.py compare CASES RESULTS

`make` writes one safetensors file per case: `q [B, Hq, Nq, D]`, `k`, `v [B, Hkv, Nk, D]`, `dout
[B, Hq, Nq, D]`, `dlse [B, Hq, Nq]`, and the options as JSON in the metadata; `scores [B, Hkv, Nk]`,
or `mask` (bool) and `bias`, each `[B | 1, Hq | Hkv | 1, Nq | 1, Nk | 1]`; `documents [B, Nk]`, the
document of each token. A case for a 16-bit type holds numbers that the type can represent, so that
both sides compute with the same inputs. Any file of this form is a case: write your own, the
comparison takes it.

`compare` computes the truth from the definition, with the N x N selection or mask as a matrix, in
float64, and gradients by autograd. Where `torch.nn.functional.scaled_dot_product_attention` can say
the same, which is without a softcap, it must give the same output. For every tensor of every case it
prints the greatest absolute error and that error relative to the greatest absolute value of the
truth, which must be within

    dtype   out, dq, dk, dv, dscores, dbias    lse
    f32     1e-5                               1e-5
    f16     4e-3                               1e-3
    bf16    3e-2                               8e-3

NaN and infinities must stand at the same places, and the intervals (and with them the selected
keys) must be equal. It exits with 1 if a case fails or has no result.
"""

import argparse
import json
import math
import subprocess
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


def masked_cases():
    """(name, shape, options, parts), as above; `parts` has the shape of a mask, of a bias, and the
    lengths of documents."""
    full, none = {"causal": False}, {}
    yield "mask", (2, 4, 2, 113, 113, 64), none, {"mask": (2, 4, 113, 113)}
    yield "mask-kv-heads", (2, 4, 2, 50, 120, 32), full, {"mask": (1, 2, 50, 120)}
    yield "mask-keys", (2, 4, 2, 50, 120, 32), full, {"mask": (2, 1, 1, 120)}
    hides = {"causal": False, "mask_hides": True}
    yield "mask-hides", (2, 2, 2, 70, 70, 32), hides, {"mask": (2, 1, 70, 70)}
    yield "mask-rows", (1, 2, 1, 40, 40, 16), none, {"mask": (1, 1, 40, 1)}
    yield "bias", (2, 4, 2, 113, 113, 64), none, {"bias": (2, 4, 113, 113)}
    yield "bias-keys", (2, 4, 2, 90, 90, 32), none, {"bias": (1, 2, 1, 90)}
    yield "bias-queries", (1, 4, 4, 33, 77, 40), full, {"bias": (1, 1, 33, 1)}
    parts = {"mask": (2, 1, 130, 130), "bias": (1, 4, 130, 130)}
    yield "mask-bias", (2, 4, 1, 130, 130, 64), {"softcap": 3.0}, parts
    yield "documents", (2, 4, 2, 150, 150, 32), none, {"documents": [[40, 65, 45], [150]]}
    yield "documents-full", (1, 4, 2, 150, 150, 32), full, {"documents": [[1, 100, 49]]}
    parts = {"documents": [[40, 65, 45], [7, 143]], "mask": (1, 1, 150, 150), "bias": (2, 2, 1, 150)}
    yield "documents-mask-bias", (2, 4, 2, 150, 150, 32), none, parts
    yield "documents-window", (2, 4, 2, 200, 200, 64), {"window": 16}, {"documents": [[70, 30, 100], [200]]}
    for dtype in ("f16", "bf16"):
        parts = {"mask": (1, 1, 113, 113), "bias": (1, 2, 113, 113)}
        yield f"mask-bias-{dtype}", (1, 4, 2, 113, 113, 64), {"dtype": dtype}, parts


def make(directory, seed):
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    every = [(*case, {}) for case in cases()]
    for name, shape, options, parts in masked_cases():
        every.append((name, shape, options, "normal" if "window" in options else None, parts))
    for name, shape, options, kind, parts in every:
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
        if "mask" in parts:
            # A fifth of the pairs is hidden; a query may see nothing.
            tensors["mask"] = torch.rand(*parts["mask"], generator=generator) > 0.2
            if options.get("mask_hides"):
                tensors["mask"] = ~tensors["mask"]
        if "bias" in parts:
            tensors["bias"] = torch.randn(*parts["bias"], generator=generator)
        if "documents" in parts:
            ids = [[id for id, n in enumerate(row) for _ in range(n)] for row in parts["documents"]]
            tensors["documents"] = torch.tensor(ids, dtype=torch.int32)
        save_file(
            {key: value.contiguous() for key, value in tensors.items()},
            directory / f"{name}.safetensors",
            metadata={"options": json.dumps(options)},
        )
    print(f"{len(every)} cases in {directory}")


def scores(kind, shape, generator):
    z = torch.randn(*shape, generator=generator)
    if kind == "ties":
        z = (z * 2).round() / 2
    elif kind == "equal":
        z = torch.ones(shape)
    elif kind == "padding":
        z[..., : shape[-1] // 5] = z[..., -7:] = -INF
    elif kind == "hidden":
        z = torch.full(shape, -INF)
    elif kind == "nan":
        # Below every number: selected while fewer numbers than the window are visible.
        z[..., [3, 50]] = float("nan")
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


def selected_in_documents(z, window, positions, ids):
    """As `selected`, among the tokens of the query's own document. Needs as many queries as keys."""
    if ids is None:
        return selected(z, window, positions)
    mask = torch.zeros(len(positions), len(z), dtype=torch.bool)
    for id in ids.unique():
        at = torch.nonzero(ids == id).flatten()
        inside = selected(z[at], window, torch.arange(len(at)))
        mask[at[:, None], at[None, :]] = inside
    return mask


def intervals(z, window, ids):
    """The first position that attends to each key and one past the last; both the key's own index
    if none does."""
    keys = torch.arange(len(z))
    mask = selected_in_documents(z, window, keys, ids)
    count = mask.sum(0)
    first = torch.where(count > 0, mask.int().argmax(0), keys)
    assert bool(((first == keys) | (count == 0)).all()), "a key is attended from itself on"
    for j in range(len(z)):
        assert bool(mask[first[j] : first[j] + count[j], j].all()), "a key's positions are a range"
    return torch.stack([first, first + count], -1)


def scored_heads(tensors):
    """The scores of each kv head, and the documents of its tokens or `None`."""
    documents = tensors.get("documents", [None] * len(tensors["scores"]))
    return [(head, ids) for heads, ids in zip(tensors["scores"], documents) for head in heads]


def shown(tensors, options):
    """Which keys each query attends to, `[B, Hq, Nq, Nk]`."""
    batch, q_heads, q_len, _ = tensors["q"].shape
    kv_heads, k_len = tensors["k"].shape[1:3]
    causal = options.get("causal", True)
    # The position of a query is the index of the last key it may see.
    positions = torch.arange(q_len) + k_len - q_len if causal else torch.full((q_len,), k_len - 1)
    if "scores" in tensors:
        window = options.get("window") or k_len
        heads = scored_heads(tensors)
        heads = [selected_in_documents(z, window, positions, ids) for z, ids in heads]
        mask = torch.stack(heads).reshape(batch, kv_heads, q_len, k_len)
        return mask.repeat_interleave(q_heads // kv_heads, 1)
    mask = (torch.arange(k_len)[None, :] <= positions[:, None]).expand(batch, q_heads, q_len, k_len)
    if (documents := tensors.get("documents")) is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    if "mask" in tensors:
        given = tensors["mask"].bool() != bool(options.get("mask_hides"))
        mask = mask & per_query_head(given, q_heads, kv_heads)
    return mask


def per_query_head(tensor, q_heads, kv_heads):
    """A tensor `[B | 1, Hq | Hkv | 1, ..]` with `Hq | 1` heads."""
    of_kv_heads = tensor.shape[1] == kv_heads and kv_heads not in (1, q_heads)
    return tensor.repeat_interleave(q_heads // kv_heads, 1) if of_kv_heads else tensor


def truth(tensors, options):
    """Outputs, gradients and intervals in float64."""
    names = ("q", "k", "v", "scores", "bias")
    leaves = {key: tensors[key].double().requires_grad_() for key in names if key in tensors}
    q, k, v, z, bias = (leaves.get(key) for key in names)
    batch, q_heads, q_len, dim = q.shape
    kv_heads, k_len = k.shape[1:3]
    group = q_heads // kv_heads
    mask = shown(tensors, options)

    logits = q @ k.repeat_interleave(group, 1).transpose(-1, -2)
    logits = logits * (options.get("scale") or 1 / math.sqrt(dim))
    if options.get("softcap"):
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    if z is not None:
        # A hidden key is masked; -inf must not meet a gradient of 0.
        added = torch.where(z == -INF, 0.0, z).repeat_interleave(group, 1)[:, :, None, :]
    elif bias is not None:
        added = per_query_head(bias, q_heads, kv_heads)
    else:
        added = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    logits = logits + added
    logits = torch.where(mask, logits, -INF)
    something = mask.any(-1, keepdim=True)
    # A row without a key would be 0/0: it gets finite logits, and zeros afterwards.
    logits = torch.where(something, logits, 0.0)
    lse = torch.logsumexp(logits, -1)
    # A row with a NaN is NaN throughout: that must not reach the keys it does not select.
    weights = torch.where(mask, torch.softmax(logits, -1), 0.0)
    out = weights @ v.repeat_interleave(group, 1)
    something = something[..., 0]
    if not options.get("softcap") and not torch.isnan(added).any():
        against_torch([q, k, v], torch.where(mask, added, -INF), options.get("scale"), out, something)

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
        window = options.get("window") or k_len
        heads = [intervals(head, window, ids) for head, ids in scored_heads(tensors)]
        result["intervals"] = torch.stack(heads).reshape(batch, kv_heads, k_len, 2)
    return {key: value.detach().numpy() for key, value in result.items()}


def against_torch(rows, added, scale, out, something):
    """Checks an output against PyTorch's own attention, where a query sees something."""
    q, k, v = (tensor.detach() for tensor in rows)
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=added.detach().expand(*q.shape[:3], k.shape[2]), scale=scale
    )
    difference = torch.where(something[..., None], theirs - out.detach(), 0.0)
    assert float(difference.abs().max()) < 1e-12, "PyTorch's own attention says something else"


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


def run(device, directory, seed):
    cases_directory, results = directory / "cases", directory / "results"
    make(cases_directory, seed)
    files = sorted(str(path) for path in cases_directory.glob("*.safetensors"))
    features = ["--no-default-features", "--features", device]
    command = ["cargo", "run", "--release", "-p", "interop", *features, "--"]
    arguments = ["--device", device, "--out", str(results), *files]
    subprocess.run([*command, *arguments], check=True)
    return compare(cases_directory, results)


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
    runner = commands.add_parser("run", help="make, run and compare")
    runner.add_argument("--device", default="flex")
    runner.add_argument("--directory", type=Path, default=Path("runs/interop"))
    runner.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run(arguments.device, arguments.directory, arguments.seed)
    if arguments.command == "make":
        make(arguments.directory, arguments.seed)
        return 0
    return compare(arguments.cases, arguments.results)


if __name__ == "__main__":
    sys.exit(main())
