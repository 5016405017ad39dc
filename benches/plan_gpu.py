#!/usr/bin/env python3
"""Predictions of `roundpipe plan` beside `roundpipe bench` on the GPU of this machine.

    python3 benches/plan_gpu.py ROUNDPIPE WORK [--only NAME,...] [--no-doctor]

Eight configurations: full and LoRA, a mixture of experts, long rows, both lags, both grains, three
sizes of memory. `bench` runs enough steps that the plan made from measured times is used; `plan`
then says what it predicts for the same settings on this machine. Prints a line each and a table in
Markdown at the end, and keeps all JSON in WORK/plan_gpu.jsonl. About six minutes on an H200.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

# name, model, settings, GPU memory, warm-up steps, measured steps
CASES = [
    ("full-lag1", "qwen3-1.7b", dict(batch=16, seq=4096, microbatches=4, lag=1), "24GiB", 9, 4),
    ("full-lag0", "qwen3-1.7b", dict(batch=16, seq=4096, microbatches=4, lag=0), "24GiB", 9, 4),
    ("small-layer", "qwen3-0.6b", dict(batch=32, seq=2048, microbatches=8, lag=1, grain="layer"), "12GiB", 9, 6),
    ("small-cap", "qwen3-0.6b", dict(batch=8, seq=4096, microbatches=8, lag=0), "8GiB", 9, 6),
    ("long", "qwen3-1.7b", dict(batch=1, seq=32768, microbatches=1, lag=1, grain="layer"), "16GiB", 9, 3),
    ("four-full", "qwen3-4b", dict(batch=8, seq=4096, microbatches=4, lag=1), "24GiB", 9, 2),
    ("lora", "qwen3-4b", dict(batch=8, seq=4096, microbatches=4, lag=1, method="lora", lora_rank=32), "16GiB", 9, 3),
    ("experts", "qwen3-30b-a3b", dict(batch=8, seq=2048, microbatches=2, lag=1, method="lora", lora_rank=32), "24GiB", 2, 2),
]


def run(command, **more):
    print("$", " ".join(command), file=sys.stderr, flush=True)
    start = time.time()
    done = subprocess.run(command, capture_output=True, text=True, **more)
    print(f"  {time.time() - start:.0f} s, status {done.returncode}", file=sys.stderr, flush=True)
    return done


def bench(binary, model, settings, memory, warm_up, steps):
    settings = dict(settings)
    command = [binary, "bench", model, "--gpu-memory", memory]
    if settings.pop("method", "full") == "lora":
        command += ["--mode", "lora", "--rank", str(settings.pop("lora_rank"))]
    for key, value in settings.items():
        command += [f"--{key}", str(value)]
    done = run(command + ["--warm-up", str(warm_up), "--steps", str(steps), "--devices", "cuda:0"])
    if done.returncode != 0:
        return None, done.stderr.strip()
    return json.loads(done.stdout.strip().splitlines()[-1]), ""


def plan(binary, model, settings, memory):
    words = [f"{key}={value}" for key, value in settings.items()]
    done = run([binary, "plan", model, *words, "--gpu-memory", memory, "--devices", "cuda:0", "--json"])
    if not done.stdout.strip():
        return None, done.stderr.strip()
    answer = json.loads(done.stdout)
    return answer["prediction"], answer.get("why") or ""


def off(ours, theirs):
    return f"{100 * (ours / theirs - 1):+.1f}%"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-doctor", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("ROUNDPIPE_CACHE", str(args.work.resolve()))
    binary = str(Path(args.binary).resolve())
    if not args.no_doctor:
        done = run([binary, "doctor"])
        if done.returncode not in (0, 1):
            print(f"no doctor ({done.stderr.strip()[:200]}): the table of cards is used", file=sys.stderr)
    wanted = set(filter(None, args.only.split(",")))
    lines = ["| | tokens/s, predicted | measured | | GPU GiB | measured | | host GiB | measured | |", "|---" * 10 + "|"]
    with open(args.work / "plan_gpu.jsonl", "a") as kept:
        for name, model, settings, memory, warm_up, steps in CASES:
            if wanted and name not in wanted:
                continue
            predicted, why_not = plan(binary, model, settings, memory)
            measured, failed = bench(binary, model, settings, memory, warm_up, steps)
            kept.write(json.dumps(dict(name=name, predicted=predicted, measured=measured)) + "\n")
            kept.flush()
            if predicted is None or measured is None:
                lines.append(f"| {name} | {why_not or failed or 'failed'} |" + " |" * 8)
                print(lines[-1], flush=True)
                continue
            gib = 1 << 30
            speed = (predicted["speed"]["tokens_per_s"], measured["tokens_per_s"])
            gpu = (predicted["gpu"]["peak_bytes"] / gib, measured["gpu_peak_gib"])
            host = (predicted["host"]["peak_bytes"] / gib, measured["host_peak_gib"])
            lines.append(
                f"| {name} | {speed[0]:,.0f} | {speed[1]:,.0f} | {off(*speed)} "
                f"| {gpu[0]:.2f} | {gpu[1]:.2f} | {off(*gpu)} | {host[0]:.2f} | {host[1]:.2f} | {off(*host)} |"
            )
            print(lines[-1], flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
