#!/usr/bin/env python3
"""Training with and without fp8 on a GPU, in turns, so that a clock that drifts favours neither.

    python3 benches/fp8_gpu.py ROUNDPIPE WORK [--rounds 3] [--model qwen3-1.7b] [--batch 16] [--seq 4096]
                               [--microbatches 4] [--gpu-memory 24GiB]

Each round runs `roundpipe bench` in bf16 and with --fp8, on random weights and tokens. One line of JSON for each run,
and one at the end with the medians and their ratio. The first round also writes a trace of each, WORK/bf16.trace.json
and WORK/fp8.trace.json, for Perfetto. Needs nothing but Python, and a card with fp8 (Ada, Hopper, Blackwell).
"""
import argparse
import json
import pathlib
import statistics
import subprocess

KEYS = ["tokens_per_s", "seconds_per_step", "gpu_peak_gib", "product_tflops", "share_of_floor", "loss"]


def run(arguments, kind, number):
    command = [arguments.program, "bench", arguments.model, "--batch", str(arguments.batch), "--seq", str(arguments.seq),
               "--microbatches", str(arguments.microbatches), "--gpu-memory", arguments.gpu_memory, "--steps", "4"]
    command += ["--fp8"] if kind == "fp8" else []
    command += ["--trace", str(arguments.work / f"{kind}.trace.json")] if number == 0 else []
    log = arguments.work / f"{kind}.{number}.log"
    with open(log, "w") as out:
        status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=500).returncode
    text = log.read_text()
    if status:
        raise SystemExit(f"{' '.join(command)}\n{text[-3000:]}\nended with {status}")
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")][-1]
    print(json.dumps({"run": kind, "round": number} | {key: found.get(key) for key in KEYS}), flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="qwen3-1.7b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--gpu-memory", default="24GiB")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    rates = {"bf16": [], "fp8": []}
    for number in range(arguments.rounds):
        for kind in rates:
            rates[kind].append(run(arguments, kind, number)["tokens_per_s"])
    middle = {kind: statistics.median(all_of) for kind, all_of in rates.items()}
    print(json.dumps({"median_tokens_per_s": middle, "ratio": round(middle["fp8"] / middle["bf16"], 3)}))


main()
