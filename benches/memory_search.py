#!/usr/bin/env python3
"""Searches for plans that are accepted and then run out of memory.

Random models, batches, caps, grains and lags run 20 steps on workers that only count
(`roundpipe bench --dry-run`). Each case must be refused by the planner or run; what fails later is
printed with its command, and the exit status is 1.

    cargo build --release
    python3 benches/memory_search.py [cases [seed]]
"""

import random
import subprocess
import sys

MODELS = ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "llama-3.2-1b", "qwen3-30b-a3b"]
REFUSALS = ("model_memory_limit:", "stage_memory_limit:", "memory:")


def case(dice: random.Random) -> list[str]:
    batch = dice.choice([1, 2, 3, 4, 6, 8, 16])
    args = [dice.choice(MODELS), "--batch", str(batch)]
    args += ["--seq", str(dice.choice([256, 512, 1024, 2048, 4096, 8192]))]
    args += ["--gpu-memory", f"{dice.choice([1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24]) * 1024:.0f}MiB"]
    args += ["--mode", dice.choice(["full", "lora"]), "--grain", dice.choice(["stage", "layer"])]
    args += ["--lag", dice.choice(["0", "1"])]
    microbatches = dice.choice([None, 1, 2, 3, 4, 8])
    if microbatches:
        args += ["--microbatches", str(min(microbatches, batch))]
    return args


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    dice = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    ran = refused = failed = 0
    for _ in range(count):
        command = ["target/release/roundpipe", "bench", *case(dice), "--dry-run", "--steps", "20"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        last = (done.stdout + done.stderr).strip().splitlines()[-1]
        if done.returncode == 0:
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
