#!/usr/bin/env python3
"""The model of examples/train-text in PyTorch: what a PyTorch user would train in its place.

bf16 autocast over f32 parameters, dense causal attention (cuDNN's kernel unless another is asked for) or a sliding window,
every other layer local, global clipping, fused AdamW. Windows are FlexAttention's. It prints the row that `bench step`
prints, as one line of JSON.
"""

import argparse
import collections
import functools
import json
import math
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}

# The first rule that a kernel's name contains the word of decides; the kinds are those of
# benches/src/kernel_kinds.rs.
KINDS = [
    ("triton_red", "reduction"),
    ("triton_per", "reduction"),
    ("triton_poi", "element_wise"),
    ("triton_tem", "product"),
    ("flash", "attention"),
    ("sdpa", "attention"),
    ("fmha", "attention"),
    ("attention", "attention"),
    ("multi_tensor_apply", "optimiser"),
    ("nvjet", "product"),
    ("gemm", "product"),
    ("cutlass", "product"),
    ("splitk", "product"),
    ("embedding", "lookup"),
    ("index", "lookup"),
    ("gather", "lookup"),
    ("norm", "norm"),
    ("reduce", "reduction"),
    ("softmax", "reduction"),
    ("copy", "copy"),
    ("memcpy", "copy"),
    ("memset", "copy"),
    ("fill", "copy"),
    ("catarray", "copy"),
    ("elementwise", "element_wise"),
]

# How ranges begin that PyTorch itself names.
RANGES = ("Optimizer.", "## ", "Torch-Compiled", "ProfilerStep")


def kind(kernel):
    """What a kernel does, by its name."""
    name = kernel.lower()
    return next((kind for word, kind in KINDS if word in name), "other")


class RmsNorm(nn.Module):
    """RMS norm whose weight takes the type of its input."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype))


class Rotary(nn.Module):
    """Rotary position encoding of rows `[batch, heads, tokens, features]`."""

    def __init__(self, tokens, features):
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, features, 2).float() / features)
        angles = torch.outer(torch.arange(tokens).float(), frequencies)
        self.register_buffer("cos", angles.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angles.sin().bfloat16(), persistent=False)

    def forward(self, x, at=slice(None)):
        cos, sin = self.cos[at], self.sin[at]
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def windows(args):
    """The last keys that a query of each layer attends to, None for all: odd layers, counted from 1, are local."""
    is_local = [bool(args.local_window) and number % 2 == 1 for number in range(1, args.layers + 1)]
    return [args.local_window if local else args.window for local in is_local]


@functools.cache
def band(window, tokens, device):
    """The blocks of a sliding window."""

    def sees(_batch, _head, query, key):
        return (query >= key) & (query - key < window)

    # Uncompiled it makes a matrix of all pairs, as FlexAttention itself.
    return torch.compile(create_block_mask)(sees, None, None, tokens, tokens, device=device)


flex = torch.compile(flex_attention)


class Attention(nn.Module):
    """Causal attention with shared key and value heads, normalised and, where the window is the local one or no layer is
    local, rotated per head."""

    def __init__(self, args, window):
        super().__init__()
        self.window, self.band = window, None
        self.rotates = window == args.local_window or not args.local_window
        self.heads, self.kv_heads = args.heads, args.kv_heads
        self.features = args.d_model // args.heads
        self.q, self.k, self.v = (
            nn.Linear(args.d_model, heads * self.features, bias=False)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        self.out = nn.Linear(self.heads * self.features, args.d_model, bias=False)
        self.q_norm, self.k_norm = RmsNorm(self.features), RmsNorm(self.features)
        self.rotary = Rotary(args.seq, self.features)

    def rows(self, x, heads):
        return x.unflatten(-1, (heads, self.features))

    def qkv(self, x, at=slice(None)):
        q = self.q_norm(self.rows(self.q(x), self.heads)).transpose(1, 2)
        k = self.k_norm(self.rows(self.k(x), self.kv_heads)).transpose(1, 2)
        if self.rotates:
            q, k = self.rotary(q, at), self.rotary(k, at)
        return q, k, self.rows(self.v(x), self.kv_heads).transpose(1, 2)

    def attend(self, kernel, q, k, v, **options):
        grouped = self.heads != self.kv_heads
        out = kernel(q.to(v.dtype), k.to(v.dtype), v, enable_gqa=grouped, **options)
        return self.out(out.transpose(1, 2).flatten(2))

    def forward(self, x):
        qkv = self.qkv(x)
        if self.window:
            return self.attend(flex, *qkv, block_mask=self.band)
        return self.attend(F.scaled_dot_product_attention, *qkv, is_causal=True)


class Block(nn.Module):
    """Attention, then SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, args, window):
        super().__init__()
        hidden = (args.d_model * 8 // 3 + 31) // 32 * 32
        self.attention_norm, self.mlp_norm = RmsNorm(args.d_model), RmsNorm(args.d_model)
        self.attention = Attention(args, window)
        self.gate, self.up = (nn.Linear(args.d_model, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, args.d_model, bias=False)

    def forward(self, x, *where):
        x = x + self.attention(self.attention_norm(x), *where)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Bytes to the logits of the next byte; the embedding is read backwards at the end."""

    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.d_model)
        nn.init.normal_(self.embedding.weight, std=0.5 / math.sqrt(args.d_model))
        self.blocks = nn.ModuleList(Block(args, window) for window in windows(args))
        self.norm = RmsNorm(args.d_model)
        self.checkpoint = args.checkpoint

    def forward(self, tokens, targets):
        x = self.embedding(tokens).bfloat16()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        logits = self.norm(x) @ self.embedding.weight.to(x.dtype).T
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Layer(nn.Module):
    """The attention layer alone, on an input that gets a gradient, too."""

    def __init__(self, args):
        super().__init__()
        self.attention = Attention(args, args.window)

    def forward(self, x, slope):
        return (self.attention(x) * slope).mean()


class Training:
    """A module, its optimiser, and what it is trained on."""

    def __init__(self, args):
        self.args = args
        module = Model(args) if args.what == "model" else Layer(args)
        self.module = module.to(args.device)
        # Here, as a compiled step would make them anew each time.
        for layer in module.modules():
            if isinstance(layer, Attention) and layer.window:
                layer.band = band(layer.window, args.seq, args.device)
        self.compiled = torch.compile(self.module) if args.compile else self.module
        self.optimiser = torch.optim.AdamW(
            self.module.parameters(),
            lr=3e-4,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=args.device == "cuda",
        )
        if args.what == "layer":
            shape = (args.batch, args.seq, args.d_model)
            options = {"device": args.device, "dtype": torch.bfloat16}
            self.x = torch.randn(shape, **options).requires_grad_()
            self.slope = torch.randn(shape, **options)

    def inputs(self):
        args = self.args
        if args.what == "layer":
            return self.x, self.slope
        shape = (args.batch, args.seq + 1)
        tokens = torch.randint(0, args.vocabulary, shape, device=args.device)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self):
        with torch.autocast(self.args.device, torch.bfloat16):
            with sdpa_kernel(BACKENDS[self.args.attention]):
                return self.compiled(*self.inputs())

    def update(self):
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        if self.args.what == "layer":
            self.x.grad = None

    def step(self):
        loss = self.loss()
        loss.backward()
        self.update()
        return loss.detach()


def synchronize(args):
    if args.device == "cuda":
        torch.cuda.synchronize()


def clock(call, args):
    """The milliseconds of a call, from an idle device until it is idle again, and what it returned."""
    synchronize(args)
    start = time.perf_counter()
    returned = call()
    synchronize(args)
    return (time.perf_counter() - start) * 1e3, returned


def quartiles(times):
    quarters = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return {"median": quarters[1], "q1": quarters[0], "q3": quarters[2], "runs": len(times)}


def profile(call, whole_ms, kernels):
    """The kernels of a call that took `whole_ms` unwatched, by kind, and the slowest by name: by PyTorch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize()
    by_kind, by_kernel = (collections.defaultdict(lambda: [0, 0.0]) for _ in range(2))
    for event in profiler.events():
        # Ranges that a program has named lie on the device, too, around its kernels.
        named = getattr(event, "is_user_annotation", False) or event.name.startswith(RANGES)
        if event.device_type != torch.autograd.DeviceType.CUDA or named:
            continue
        for share in (by_kind[kind(event.name)], by_kernel[event.name]):
            share[0] += 1
            share[1] += event.time_range.elapsed_us() / 1e3
    as_json = lambda share: {"launches": share[0], "ms": share[1]}
    total = sum(share[1] for share in by_kernel.values())
    slowest = sorted(by_kernel.items(), key=lambda item: -item[1][1])[:kernels]
    return {
        "launches": sum(share[0] for share in by_kernel.values()),
        "kernels_ms": total,
        "host_gap_ms": whole_ms - total,
        "kinds": {name: as_json(share) for name, share in by_kind.items()},
        "kernels": [[name[:120], as_json(share)] for name, share in slowest],
    }


def parser_of(description, **numbers):
    """The options that both peers have, and whole numbers of one, with their defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = {"layers": 8, "d_model": 1024, "heads": 8, "kv_heads": 2, "batch": 1, "runs": 9}
    for name, default in {**shared, **numbers}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--window", type=int, help="a sliding window; all keys if left out")
    parser.add_argument("--local-window", type=int, default=256, help="that of every other layer; 0 if none is local")
    parser.add_argument("--attention", choices=sorted(BACKENDS), default="cudnn")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--kernels", type=int, default=24, help="kernels to list")
    parser.add_argument("--json", help="a file to append the row to")
    return parser


def parse():
    parser = parser_of(__doc__, seq=32768, warm_up=4)
    parser.add_argument("--what", choices=["model", "layer"], default="model")
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--checkpoint", action="store_true", help="compute each block twice")
    parser.add_argument("--compile", action="store_true", help="torch.compile, else eager")
    args = parser.parse_args()
    if min(args.runs, args.warm_up) < 1:
        parser.error("--warm-up and --runs must be at least 1")
    return args


def origin(args, mode, module, names):
    """The beginning of a row: whose it is, and the options of these names."""
    return {
        "implementation": f"torch {torch.__version__} {mode}",
        "gpu": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        **{name: getattr(args, name) for name in names.split()},
        "window": args.window,
        "local_window": args.local_window,
        "dtype": "bf16",
        "parameters": sum(p.numel() for p in module.parameters()),
    }


def write(row, path):
    """Prints a row, and appends it to the file, if there is one."""
    line = json.dumps(row)
    print(line, flush=True)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            print(line, file=file)


def main():
    args = parse()
    torch.manual_seed(0)
    cuda = args.device == "cuda"
    training = Training(args)
    first_step_ms, first_loss = clock(training.step, args)
    for _ in range(1, args.warm_up):
        clock(training.step, args)
    state = torch.cuda.memory_allocated() if cuda else None
    steps = [clock(training.step, args) for _ in range(args.runs)]
    losses = [first_loss.item(), steps[-1][1].item()]
    if not all(map(math.isfinite, losses)):
        sys.exit(f"the loss went from {losses[0]} to {losses[1]}")
    step_ms = quartiles([milliseconds for milliseconds, _ in steps])
    names = "device what layers d_model heads kv_heads seq batch checkpoint attention runs warm_up"
    row = {
        **origin(args, "compiled" if args.compile else "eager", training.module, names),
        "first_step_ms": first_step_ms,
        "step_ms": step_ms,
        "tokens_per_second": args.batch * args.seq / step_ms["median"] * 1e3,
        # Before the profiled step, whose tracing allocates.
        "peak_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "memory": {"state_bytes": state} if cuda else None,
        "losses": losses,
        "profile": None,
    }
    if cuda and not args.no_profile:
        row["profile"] = profile(training.step, step_ms["median"], args.kernels)
    write(row, args.json)


if __name__ == "__main__":
    main()
