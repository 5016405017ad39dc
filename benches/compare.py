#!/usr/bin/env python3
"""Times our cpu backend beside PyTorch in one run and prints the ratios.

    python3 benches/compare.py [--threads N] [--rounds R] [matmul] [block] [adamw]

Needs a Rust toolchain and a Python with torch (2.11 was used). Ours and PyTorch's programs take turns,
R rounds each, and the best of each side counts, so that a disturbance hits neither side alone.
The goals in brackets are the project's; a line that misses one says so.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def lines(command, **env):
    """The JSON lines a program prints."""
    done = subprocess.run(command, cwd=HERE.parent, env=os.environ | env, text=True, stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def build():
    """Path of the program that times ours."""
    command = ["cargo", "bench", "-q", "-p", "roundpipe-tensor", "--bench", "figures", "--no-run", "--message-format=json"]
    found = [l.get("executable") for l in lines(command) if l.get("target", {}).get("name") == "figures"]
    return next(path for path in found if path)


def verdict(label, ratio, goal):
    met = "met" if ratio >= goal else "MISSED"
    print(f"{label}: {ratio:.2f}x  [goal {goal:.2f}x: {met}]")


def matmul(ours, threads, rounds):
    best = {}
    rivals = HERE / "rivals"
    subprocess.run(["cargo", "build", "-q", "--release", "--target-dir", "target"], cwd=rivals, check=True)
    for _ in range(rounds):
        for line in lines([ours, "matmul", threads]) + lines([rivals / "target/release/rivals", threads]):
            key = (line["what"], line["size"])
            best[key] = max(best.get(key, 0), line["gflops"])
        for line in lines([sys.executable, HERE / "matmul_torch.py", "--threads", threads]):
            if "gflops" not in line:
                continue
            # bf16 counts without AMX: what PyTorch reaches on the vector units.
            name = {"float32": "torch f32", "bfloat16": "torch bf16"}[line["dtype"]]
            key = (name + (" without AMX" if line["isa_limit"] else ""), line["n"])
            best[key] = max(best.get(key, 0), line["gflops"])
    for (what, size), rate in sorted(best.items(), key=lambda item: (item[0][1], -item[1])):
        print(f"  matmul {size}^3  {what:<28} {rate:8.1f} GFLOP/s")
    for size in (1024, 2048):
        others = [rate for (what, s), rate in best.items() if s == size and what not in ("f32", "bf16") and "bf16" not in what]
        verdict(f"matmul {size}^3 f32, ours over the best other", best["f32", size] / max(others), 0.90)
        amx = "amx_bf16" in pathlib.Path("/proc/cpuinfo").read_text() if pathlib.Path("/proc/cpuinfo").exists() else False
        ratio = best["bf16", size] / best["torch bf16 without AMX", size]
        if amx:
            verdict(f"matmul {size}^3 bf16, ours over PyTorch without AMX", ratio, 5.0)
        else:
            print(f"matmul {size}^3 bf16, ours over PyTorch: {ratio:.2f}x  [no AMX here, no goal]")


def block(ours, threads, rounds):
    mine, torch = [], []
    for _ in range(rounds):
        mine += lines([ours, "block", threads])
        torch += lines([sys.executable, HERE / "block_torch.py", "--threads", threads])
    ms, ms_torch = min(l["ms"] for l in mine), min(l["least_ms"] for l in torch)
    rss, rss_torch = mine[0]["rss_mib"], torch[0]["peak_rss_mib"]
    above = rss_torch - torch[0]["rss_before_model_mib"]
    print(f"  block forward+backward: ours {ms:.1f} ms, {rss} MiB in all, {mine[0]['arena_mib']} MiB for the step")
    print(f"  block forward+backward: PyTorch {ms_torch:.1f} ms, {rss_torch:.0f} MiB in all, {above:.0f} MiB above its start")
    verdict("block, PyTorch's time over ours", ms_torch / ms, 1.0)
    verdict("block, PyTorch's memory over ours", rss_torch / rss, 4.0)


def adamw(ours, threads, rounds):
    mine, torch = [], []
    for _ in range(rounds):
        mine += lines([ours, "adamw", threads])
        torch += lines([sys.executable, HERE / "adamw_torch.py", "--threads", threads])
    step, copy = max(l["step_gbs"] for l in mine), max(l["copy_gbs"] for l in mine)
    print(f"  adamw: {step:.1f} GB/s at 28 bytes a parameter; copy {copy:.1f} GB/s; PyTorch fused {max(l['gbs'] for l in torch):.1f} GB/s")
    verdict("adamw, bandwidth over copy's", step / copy, 0.80)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default=str(os.cpu_count()))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("what", nargs="*", choices=["matmul", "block", "adamw", []], default=[])
    args = parser.parse_args()
    ours = build()
    for name in args.what or ["matmul", "block", "adamw"]:
        globals()[name](ours, args.threads, args.rounds)


if __name__ == "__main__":
    main()
