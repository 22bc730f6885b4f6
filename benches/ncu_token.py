#!/usr/bin/env python3
"""The kernels of one token of `bench generation`, each with its own time, by Nsight Compute.

    python ncu_token.py bin/bench --prompt 32768 --window 2048 --json tokens.jsonl

The arguments behind the program are its own, but for `--json`. The program counts its launches first; `ncu` then runs it
again, skips those before the token and times those of the token, one kernel at a time and at the device's own clock.
Without autotune both runs launch the same. Prints one line of JSON.
"""

import argparse
import collections
import csv
import json
import os
import re
import subprocess
import sys
import tempfile

# Nanoseconds.
UNITS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}


def counted(command):
    """The launches before the token, and its own."""
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    counts = json.loads(output.strip().splitlines()[-1])
    if not counts["token"]:
        sys.exit("the token launches no kernels")
    return counts["before"], counts["token"]


def read(lines):
    """(kernel, milliseconds) of each launch in ncu's table."""
    begin = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        sys.exit("ncu has written no table:\n" + "".join(lines[-20:]))
    launches = []
    for row in csv.DictReader(lines[begin:]):
        if row["Metric Name"] == "gpu__time_duration.sum":
            # Versions of ncu abbreviate the unit or write it out, as `nsecond`.
            unit = UNITS[row["Metric Unit"].removesuffix("econd")]
            # The name without arguments of the type and of the function.
            name = re.split(r"[<(]", row["Kernel Name"])[0]
            launches.append((name, float(row["Metric Value"].replace(",", "")) * unit / 1e6))
    return launches


def timed(ncu, command, before, token):
    """(kernel, milliseconds) of each launch of the token."""
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "ncu.csv")
        watch = [ncu, "--clock-control", "none", "--metrics", "gpu__time_duration.sum", "--csv"]
        part = ["--launch-skip", str(before), "--launch-count", str(token), "--log-file", log]
        ended = subprocess.run(watch + part + command, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(ended.stdout[-2000:] + ended.stderr[-2000:])
        with open(log, encoding="utf-8") as file:
            return read(file.readlines())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ncu", default="ncu", help="the program ncu")
    parser.add_argument("--json", help="a file to append the line to")
    parser.add_argument("program", help="bench")
    args, options = parser.parse_known_args()
    command = [args.program, "generation", *options, "--count-only"]
    before, token = counted(command)
    launches = timed(args.ncu, command, before, token)
    if len(launches) != token:
        sys.exit(f"ncu has timed {len(launches)} launches of {token}")
    kernels = collections.defaultdict(lambda: [0, 0.0])
    for name, milliseconds in launches:
        kernels[name][0] += 1
        kernels[name][1] += milliseconds
    slowest = sorted(kernels.items(), key=lambda item: -item[1][1])
    row = {
        "by": "ncu",
        "options": options,
        "launches": token,
        "kernels_ms": sum(milliseconds for _, milliseconds in launches),
        "kernels": [[name, {"launches": n, "ms": ms}] for name, (n, ms) in slowest],
    }
    line = json.dumps(row)
    print(line, flush=True)
    if args.json:
        with open(args.json, "a", encoding="utf-8") as file:
            print(line, file=file)


if __name__ == "__main__":
    main()
