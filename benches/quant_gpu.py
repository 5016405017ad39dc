#!/usr/bin/env python3
"""LoRA beside frozen weights in 8 and 4 bits on a GPU, held to 24 GiB of it.

    python3 benches/quant_gpu.py ROUNDPIPE WORK [CASE...]

Cases: `30b-int8` and `30b-nf4`, Qwen3-30B-A3B, 8 rows of 2048 tokens; `32b-nf4`, Qwen3-32B, 16 rows of
2048; `30b-bf16`, the same without quantisation, only when it is named. Random codes. One line of JSON
for each, with the goal. Logs, with the times of all kernels, are in WORK. Needs
nothing but Python; 128 GiB of host memory are enough.
"""
import json
import subprocess
import sys
from pathlib import Path

MOE = ["qwen3-30b-a3b", "--batch", "8", "--seq", "2048", "--microbatches", "2"]
DENSE = ["qwen3-32b", "--batch", "16", "--seq", "2048", "--microbatches", "4"]
# name: arguments, goal in tokens per second, goal in GiB of host memory
CASES = {
    "30b-int8": (MOE + ["--quantize", "int8"], 12_000, None),
    "30b-nf4": (MOE + ["--quantize", "nf4"], 16_000, None),
    "32b-nf4": (DENSE + ["--quantize", "nf4"], 2_900, 30),
    "30b-bf16": (MOE, None, None),
}
COMMON = ["--mode", "lora", "--rank", "32", "--gpu-memory", "24GiB", "--devices", "cuda:0", "--steps", "4", "--warm-up", "4"]


def run(program, work, name):
    arguments, rate, host = CASES[name]
    log = work / f"{name}.log"
    command = [program, "bench", *arguments, *COMMON, "--kernels"]
    with open(log, "w") as out:
        status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=280).returncode
    lines = log.read_text().splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    line = {"case": name, "status": status, "goal_tokens_per_s": rate, "goal_host_gib": host}
    keys = ["tokens_per_s", "steady_tokens_per_s", "seconds_per_step", "gpu_peak_gib", "host_peak_gib", "share_of_floor", "loss"]
    if found:
        line |= {key: found[-1].get(key) for key in keys}
    line["ready"] = next((text for text in lines if " ready in " in text), None)
    print(json.dumps(line), flush=True)
    return status


def main():
    program, work = sys.argv[1], Path(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)
    names = sys.argv[3:] or ["30b-int8", "30b-nf4", "32b-nf4"]
    unknown = [name for name in names if name not in CASES]
    if unknown:
        sys.exit(f"no case {unknown[0]}; there are {', '.join(CASES)}")
    sys.exit(max(run(program, work, name) for name in names))


main()
