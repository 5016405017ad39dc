#!/usr/bin/env python3
"""Searches for plans that are accepted and then run out of memory.

Random models, batches, caps, grains, lags, rows of one or many documents, weights in 4 and 8 bits, products
in 8 bits, types of moments and limits of host memory run 20 steps on workers that only count (`roundpipe bench
--dry-run`). Each case must be refused by the planner or run, with a peak below its cap; what fails later is
printed with its command, and the exit status is 1.

    cargo build --release
    python3 benches/memory_search.py [cases [seed]]
"""

import json
import random
import subprocess
import sys

MODELS = ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-32b", "llama-3.2-1b", "qwen3-30b-a3b"]
GIB = [1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24]
REFUSALS = ("model_memory_limit:", "stage_memory_limit:", "memory:")


def case(dice: random.Random) -> tuple[list[str], float]:
    batch = dice.choice([1, 2, 3, 4, 6, 8, 16])
    seq = dice.choice([256, 512, 1024, 2048, 4096, 8192])
    gib = dice.choice(GIB)
    mode = dice.choice(["full", "lora"])
    args = [dice.choice(MODELS), "--batch", str(batch), "--seq", str(seq), "--gpu-memory", f"{gib * 1024:.0f}MiB"]
    args += ["--mode", mode, "--grain", dice.choice(["stage", "layer"]), "--lag", dice.choice(["0", "1"])]
    microbatches = dice.choice([None, 1, 2, 3, 4, 8])
    if microbatches:
        args += ["--microbatches", str(min(microbatches, batch))]
    quantize = dice.choice([None, "int8", "nf4"]) if mode == "lora" else None
    if quantize:
        args += ["--quantize", quantize]
    elif dice.random() < 0.25:
        args.append("--fp8")
    if mode == "full":
        args += ["--moments", dice.choice(["f32", "bf16", "8bit"])]
    if dice.random() < 0.3:
        args += ["--documents", str(dice.randint(1, seq))]
    if dice.random() < 0.4:
        args += ["--host-memory", f"{dice.choice([16, 32, 64, 128, 256])}GiB"]
    if dice.random() < 0.1:
        args.append("--recompute-all")
    return args, gib


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    dice = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    ran = refused = failed = 0
    for _ in range(count):
        args, gib = case(dice)
        command = ["target/release/roundpipe", "bench", *args, "--dry-run", "--steps", "20"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        last = (done.stdout + done.stderr).strip().splitlines()[-1]
        if done.returncode == 0 and json.loads(last)["gpu_peak_gib"] <= gib:
            ran += 1
        elif last.removeprefix("error: ").startswith(REFUSALS):
            refused += 1
        else:
            failed += 1
            print(" ".join(command), last, sep="\n    ", flush=True)
    print(f"{count} cases: {ran} ran, {refused} refused, {failed} failed after they were accepted")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
