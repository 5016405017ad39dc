#!/usr/bin/env python3
"""Times two builds of the program in turns on one GPU and prints the ratio of their rates.

    python3 benches/old_new.py OLD NEW [--rounds R] [--floor 0.99] "qwen3-1.7b --batch 16 --lag 1" ...

OLD and NEW are paths of two `roundpipe` programs; every further argument is what follows `roundpipe bench`, and there is a
list of cases if none is given. A round runs old and new once, and each round begins with the other. Warm-up is long enough
that the planner has measured the copies. Beside the rates, the most memory that the driver counted for the card is printed.
The program exits with 1 if the new build is slower than the floor in some case or does not run.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import threading

CASES = [
    "qwen3-1.7b --batch 16 --lag 1",
    "qwen3-1.7b --batch 16 --lag 0",
    "qwen3-1.7b --batch 32 --lag 1",
    "qwen3-1.7b --batch 32 --lag 0",
    "qwen3-8b --mode lora --batch 8 --lag 1",
]
COMMON = {"--gpu-memory": "24GiB", "--warm-up": "6", "--steps": "4"}


def memory_used():
    """MiB of the first card in use, as its driver counts, or 0 without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        return int(subprocess.run(query, text=True, capture_output=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return 0


def watch(stop, before, peak):
    """Keeps the most memory taken since `before` in `peak[0]` until `stop` is set."""
    while not stop.wait(0.5):
        peak[0] = max(peak[0], memory_used() - before)


def run(program, case):
    """The JSON line of one `bench` with the driver's peak, or None with the program's last line printed."""
    stop, peak = threading.Event(), [0]
    watcher = threading.Thread(target=watch, args=(stop, memory_used(), peak))
    watcher.start()
    command = [program, "bench", *shlex.split(case), *defaults_for(case)]
    done = subprocess.run(command, text=True, capture_output=True)
    stop.set()
    watcher.join()
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not found:
        lines = (done.stderr + done.stdout).strip().splitlines()
        print(f"  {program} failed ({done.returncode}): {lines[-1] if lines else 'no output'}", flush=True)
        return None
    return json.loads(found[-1]) | {"driver_mib": peak[0]}


def defaults_for(case):
    """The common options that the case does not set itself."""
    given = shlex.split(case)
    for name, value in COMMON.items():
        if name not in given:
            yield from (name, value)


def compare(old, new, case, rounds):
    """Prints the rates of one case and returns the ratio of medians, or None if a build failed."""
    results = {old: [], new: []}
    for turn in range(rounds):
        for program in (old, new) if turn % 2 == 0 else (new, old):
            result = run(program, case)
            if result is None:
                return None
            results[program].append(result)
    rates = {program: [r["tokens_per_s"] for r in results[program]] for program in (old, new)}
    ratio = statistics.median(rates[new]) / statistics.median(rates[old])
    for name, program in (("old", old), ("new", new)):
        last = results[program][-1]
        print(
            f"  {name}: {' '.join(f'{rate:.0f}' for rate in rates[program])} tokens/s, GPU peak {last['gpu_peak_gib']} GiB, "
            f"driver {last['driver_mib']} MiB, host {last['host_peak_gib']} GiB, loss {last['loss']}",
            flush=True,
        )
    return ratio


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--floor", type=float, default=0.99)
    args = parser.parse_args()
    missed = False
    for case in args.cases or CASES:
        print(case, flush=True)
        ratio = compare(args.old, args.new, case, args.rounds)
        if ratio is None:
            missed = True
            continue
        missed |= ratio < args.floor
        print(f"  new over old: {ratio:.3f}  [floor {args.floor}: {'met' if ratio >= args.floor else 'MISSED'}]", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
