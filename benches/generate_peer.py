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

import sys
import time

import torch
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

import train_peer


class Attention(train_peer.Attention):
    """One token of each sequence over a cache, which wraps around where the layer has a window."""

    def __init__(self, args, window):
        super().__init__(args, window)
        self.room = window or args.seq
        shape = (args.batch, self.kv_heads, self.room, self.features)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(shape), persistent=False)
        self.whole = args.mode != "eager"

    def forward(self, x, position, held):
        q, k, v = self.qkv(x, position)
        self.keys.index_copy_(2, position % self.room, k)
        self.values.index_copy_(2, position % self.room, v)
        keys, values = self.keys, self.values
        if not self.whole:
            keys, values = keys[:, :, :held], values[:, :, :held]
        return self.attend(F.scaled_dot_product_attention, q, keys, values)


class Model(train_peer.Model):
    """The next token of each sequence."""

    def __init__(self, args):
        super().__init__(args)
        for block, window in zip(self.blocks, train_peer.windows(args)):
            block.attention = Attention(args, window)

    def forward(self, tokens, position, held):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, position, held)
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


def warm(generation):
    generation.rewind()
    for _ in range(generation.args.warm_up):
        generation.step()
    train_peer.synchronize(generation.args)


def queued(generation):
    """The time of a token of each run, which the host waits for at its end."""
    args = generation.args

    def tokens():
        for _ in range(args.tokens):
            generation.step()

    warm(generation)
    runs = (train_peer.clock(tokens, args) for _ in range(args.runs))
    return train_peer.quartiles([milliseconds / args.tokens for milliseconds, _ in runs])


def token_read(generation):
    """The time of each token, which the host waits for."""
    times = []
    warm(generation)
    for _ in range(generation.args.tokens):
        start = time.perf_counter()
        generation.step().tolist()
        times.append((time.perf_counter() - start) * 1e3)
    return train_peer.quartiles(times)


def parse():
    parser = train_peer.parser_of(__doc__, prompt=8192, tokens=64, warm_up=8)
    parser.add_argument("--mode", choices=["eager", "graph", "compiled"], default="eager")
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
        first_token_ms, _ = train_peer.clock(generation.step, args)
        in_a_row, read = queued(generation), token_read(generation)
        cuda, of_kernels = args.device == "cuda", None
        if cuda and not args.no_profile:
            warm(generation)
            of_kernels = train_peer.profile(generation.step, in_a_row["median"], args.kernels)
    caches = [rows for rows in generation.model.buffers() if rows.dim() == 4]
    names = "device layers d_model heads kv_heads prompt batch tokens runs warm_up attention"
    return {
        **train_peer.origin(args, args.mode, generation.model, names),
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
