#!/usr/bin/env python3
"""The model of `bench generation` in PyTorch: dense attention over a static cache, bf16 parameters.

It prints the row that `bench generation` prints, as far as PyTorch knows it, as one line of JSON. A prompt is not read:
the cache holds random rows. In the modes with fixed shapes (compiled, graph) each token attends to the whole cache, of
which the last rows, those of tokens yet to be written, are random as well; eager attends to what is there. What is written
means nothing, its time does.

    eager      Python launches each kernel
    graph      a token of the same captured in a CUDA graph
    compiled   torch.compile(mode="reduce-overhead"), which captures its kernels in CUDA graphs
"""

import argparse
import statistics
import sys
import time

import torch
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

import train_peer


class Attention(train_peer.Attention):
    """One token of each sequence over a cache."""

    def __init__(self, args):
        super().__init__(args)
        shape = (args.batch, self.kv_heads, args.seq, self.features)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(shape), persistent=False)
        self.whole = args.mode != "eager"

    def turn(self, x, position):
        cos, sin = self.rotary.cos[position], self.rotary.sin[position]
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def forward(self, x, position, held):
        q = self.turn(self.q_norm(self.rows(self.q(x), self.heads)).transpose(1, 2), position)
        k = self.turn(self.k_norm(self.rows(self.k(x), self.kv_heads)).transpose(1, 2), position)
        v = self.rows(self.v(x), self.kv_heads).transpose(1, 2)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        keys, values = self.keys, self.values
        if not self.whole:
            keys, values = keys[:, :, :held], values[:, :, :held]
        grouped = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, keys, values, enable_gqa=grouped)
        return self.out(out.transpose(1, 2).flatten(2))


class Model(train_peer.Model):
    """The next token of each sequence."""

    def __init__(self, args):
        super().__init__(args)
        for block in self.blocks:
            block.attention = Attention(args)

    def forward(self, tokens, position, held):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block.attention(block.attention_norm(x), position, held)
            y = block.mlp_norm(x)
            x = x + block.down(F.silu(block.gate(y)) * block.up(y))
        logits = self.norm(x[:, -1]) @ self.embedding.weight.T
        return logits.argmax(-1, keepdim=True)


class Generation:
    """A model in the middle of its sequences."""

    def __init__(self, args):
        self.args = args
        self.model = Model(args).to(args.device, torch.bfloat16).eval()
        self.tokens = torch.zeros(args.batch, 1, dtype=torch.long, device=args.device)
        self.position = torch.tensor([args.prompt], device=args.device)
        self.held = args.prompt
        self.run = self.model
        if args.mode == "compiled":
            self.run = torch.compile(self.model, mode="reduce-overhead")
        if args.mode == "graph":
            self.capture()

    def capture(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.model(self.tokens, self.position, 0)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.model(self.tokens, self.position, 0)

        def replay(*_):
            graph.replay()
            return out

        self.run = replay

    def rewind(self):
        self.position.fill_(self.args.prompt)
        self.held = self.args.prompt

    def step(self):
        self.held += 1
        held = self.held if self.args.mode == "eager" else 0
        self.tokens.copy_(self.run(self.tokens, self.position, held))
        self.position += 1
        return self.tokens


def synchronize(args):
    if args.device == "cuda":
        torch.cuda.synchronize()


def quartiles(times):
    quarters = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return {"median": quarters[1], "q1": quarters[0], "q3": quarters[2], "runs": len(times)}


def warm(generation):
    generation.rewind()
    for _ in range(generation.args.warm_up):
        generation.step()
    synchronize(generation.args)


def queued(generation):
    """The time of a token of each run, which the host waits for at its end."""
    args, times = generation.args, []
    warm(generation)
    for _ in range(args.runs):
        synchronize(args)
        start = time.perf_counter()
        for _ in range(args.tokens):
            generation.step()
        synchronize(args)
        times.append((time.perf_counter() - start) * 1e3 / args.tokens)
    return quartiles(times)


def token_read(generation):
    """The time of each token, which the host waits for."""
    args, times = generation.args, []
    warm(generation)
    for _ in range(args.tokens):
        start = time.perf_counter()
        generation.step().tolist()
        times.append((time.perf_counter() - start) * 1e3)
    return quartiles(times)


def profile(generation, queued_ms, kernels):
    """The kernels of a token under PyTorch's profiler."""
    warm(generation)
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        generation.step()
        torch.cuda.synchronize()
    return train_peer.shares(profiler, queued_ms, kernels)


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=["eager", "graph", "compiled"], default="eager")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--d-model", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--attention", choices=sorted(train_peer.BACKENDS), default="cudnn")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--kernels", type=int, default=24, help="kernels to list")
    parser.add_argument("--json", help="a file to append the row to")
    args = parser.parse_args()
    if min(args.prompt, args.batch, args.tokens, args.runs, args.warm_up) < 1:
        parser.error("--prompt, --batch, --tokens, --runs and --warm-up must be at least 1")
    if args.mode == "graph" and args.device != "cuda":
        parser.error("--mode graph needs --device cuda")
    # What the model of train_peer.py asks for: the room of the cache and of the rotary table.
    args.seq = args.prompt + args.warm_up + args.runs * args.tokens
    args.checkpoint = False
    return args


@torch.no_grad()
def measure(args):
    generation = Generation(args)
    with sdpa_kernel(train_peer.BACKENDS[args.attention]):
        start = time.perf_counter()
        generation.step()
        synchronize(args)
        first_token_ms = (time.perf_counter() - start) * 1e3
        in_a_row, read = queued(generation), token_read(generation)
        cuda = args.device == "cuda"
        of_kernels = None
        if cuda and not args.no_profile:
            of_kernels = profile(generation, in_a_row["median"], args.kernels)
    caches = [rows for rows in generation.model.buffers() if rows.dim() == 4]
    names = ("layers", "d_model", "heads", "kv_heads", "prompt", "batch", "tokens", "runs")
    return {
        "implementation": f"torch {torch.__version__} {args.mode}",
        "gpu": torch.cuda.get_device_name() if cuda else "cpu",
        **{key: getattr(args, key) for key in names},
        "window": None,
        "dtype": "bf16",
        "device": args.device,
        "warm_up": args.warm_up,
        "attention": args.attention,
        "parameters": sum(p.numel() for p in generation.model.parameters()),
        "cache_bytes": sum(rows.numel() * rows.element_size() for rows in caches),
        "first_token_ms": first_token_ms,
        "token_ms": {"queued": in_a_row, "token_read": read},
        "tokens_per_second": args.batch / in_a_row["median"] * 1e3,
        "peak_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "profile": of_kernels,
    }


def main():
    args = parse()
    torch.manual_seed(0)
    row = measure(args)
    if not all(value > 0 for value in (row["token_ms"]["queued"]["median"], row["parameters"])):
        sys.exit("nothing was timed")
    train_peer.write(row, args.json)


if __name__ == "__main__":
    main()
