#!/usr/bin/env python3
"""Measure what a CUDA device can do at most, for the benchmarks' "% of the roof".

    python roof.py > roof.json

Medians of CUDA-event times: square matrix products by cuBLAS in bf16, f16 and f32 (without TF32), and
a copy of 4 GiB in device memory, which counts the bytes read and the bytes written.
"""

import json
import statistics

import torch


def milliseconds(call, repeats=15):
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def matrix_tflops(dtype, size):
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / milliseconds(lambda: torch.mm(a, b, out=out)) / 1e9


def copy_gbs():
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) / 1e6


def main():
    torch.backends.cuda.matmul.allow_tf32 = False
    rates = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bf16_tflops": matrix_tflops(torch.bfloat16, 8192),
        "f16_tflops": matrix_tflops(torch.float16, 8192),
        "f32_tflops": matrix_tflops(torch.float32, 8192),
        "copy_gbs": copy_gbs(),
    }
    print(json.dumps({k: round(v, 1) if isinstance(v, float) else v for k, v in rates.items()}))


if __name__ == "__main__":
    main()
