#!/usr/bin/env python3
"""Training with results of forwards kept for their recompute, and without, in turns on one GPU.

    python3 benches/keep_gpu.py ROUNDPIPE WORK [--once] [CASE...]

Cases are those of the table below, held to 24 GiB of the GPU; `--recompute-all` is the same without
keeping, left out with `--once`. One line of JSON for each run and one with the ratio; the losses of both must be
the same. Logs, with the times of all kernels, are in WORK. Needs nothing but Python and random weights.
"""
import json
import subprocess
import sys
from pathlib import Path

SMALL = ["qwen3-1.7b", "--batch", "16", "--seq", "4096", "--microbatches", "4", "--steps", "8", "--warm-up", "9"]
# name: arguments, goal in tokens per second
CASES = {
    "1.7b": (SMALL, 38_000),
    "1.7b-host": (SMALL + ["--host-memory", "56GiB"], 40_000),
    "1.7b-lag0": (SMALL + ["--lag", "0"], None),
    "1.7b-long": (
        ["qwen3-1.7b", "--batch", "2", "--seq", "65536", "--microbatches", "2", "--grain", "layer", "--steps", "2", "--warm-up", "4"],
        13_500,
    ),
    "1.7b-fp8": (SMALL + ["--fp8"], 45_000),
    "4b": (["qwen3-4b", "--batch", "16", "--seq", "4096", "--microbatches", "4", "--steps", "4", "--warm-up", "5"], 15_000),
    "8b": (
        ["qwen3-8b", "--batch", "16", "--seq", "4096", "--microbatches", "4", "--steps", "2", "--warm-up", "4", "--moments", "bf16"],
        7_000,
    ),
    "8b-lora": (["qwen3-8b", "--mode", "lora", "--batch", "16", "--seq", "4096", "--microbatches", "4"], None),
}
COMMON = ["--gpu-memory", "24GiB", "--devices", "cuda:0", "--kernels"]
FOUND = ["tokens_per_s", "steady_tokens_per_s", "gpu_peak_gib", "host_peak_gib", "kept_on_gpu_gib", "kept_in_host_gib", "loss"]


def bench(program, work, name, arguments):
    log = work / f"{name}.log"
    with open(log, "w") as out:
        command = [program, "bench", *arguments, *COMMON]
        subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=400, check=True)
    line = [line for line in log.read_text().splitlines() if line.startswith("{")][-1]
    found = {key: json.loads(line).get(key) for key in FOUND}
    print(json.dumps({"run": name} | found), flush=True)
    return found


def main():
    program, work = sys.argv[1], Path(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)
    wrong = False
    once = "--once" in sys.argv
    names = [name for name in sys.argv[3:] if name != "--once"]
    for name in names or ["1.7b", "1.7b-host", "1.7b-lag0"]:
        arguments, goal = CASES[name]
        kept = bench(program, work, name, arguments)
        if once:
            continue
        again = bench(program, work, f"{name}-again", arguments + ["--recompute-all"])
        ratio = kept["tokens_per_s"] / again["tokens_per_s"]
        same = kept["loss"] == again["loss"]
        wrong |= not same
        summary = {"case": name, "ratio": round(ratio, 3), "goal_tokens_per_s": goal, "same_loss": same}
        print(json.dumps(summary), flush=True)
    sys.exit(wrong)


main()
