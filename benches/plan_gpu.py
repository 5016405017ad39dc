#!/usr/bin/env python3
"""Training figures on the GPU of this machine, each beside what `roundpipe plan` predicted for it.

    python3 benches/plan_gpu.py ROUNDPIPE WORK [--only NAME,...] [--no-doctor] [--trace NAME,...]

The cases are the table below: full training and LoRA, a mixture of experts, long and packed rows, both lags,
fp8, moments in bf16, weights in 4 and 8 bits, four sizes of GPU memory. `plan` says first what it expects of
this machine, with what `doctor` measured; then `bench` runs enough steps that the plan made from measured times
is used. Weights and tokens are random. Prints a line of JSON for each case and a table in Markdown at the end.
WORK keeps all lines (plan_gpu.jsonl) and logs with the times of all kernels. All of it takes twenty minutes on
an H200 and 110 GiB of host memory; --only takes some of it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

SMALL = dict(batch=16, seq=4096, microbatches=4, lag=1)
EXPERTS = dict(batch=8, seq=2048, microbatches=1, lag=1, lora=32)


class Case:
    def __init__(self, model, settings, gpu="24GiB", host=None, steps=(9, 8), goal=None):
        self.model, self.settings, self.gpu, self.host = model, settings, gpu, host
        self.warm_up, self.measured = steps
        self.goal = goal

    def memory(self):
        words = ["--gpu-memory", self.gpu]
        return words + (["--host-memory", self.host] if self.host else [])

    def bench(self):
        settings = dict(self.settings)
        words = ["bench", self.model, *self.memory()]
        rank = settings.pop("lora", None)
        if rank:
            words += ["--mode", "lora", "--rank", str(rank)]
        if settings.pop("fp8", False):
            words.append("--fp8")
        for key, value in settings.items():
            words += [f"--{key}", str(value)]
        return words + ["--warm-up", str(self.warm_up), "--steps", str(self.measured), "--devices", "cuda:0"]

    def plan(self):
        settings = dict(self.settings)
        words = ["plan", self.model, *self.memory()]
        rank = settings.pop("lora", None)
        if rank:
            words += ["--lora", f"lora_rank={rank}"]
        if settings.pop("fp8", False):
            words.append("--fp8")
        # Without data, `plan` takes rows to be full.
        settings.pop("documents", None)
        words += [f"{key}={value}" for key, value in settings.items()]
        return words + ["--devices", "cuda:0", "--json"]


CASES = {
    "1.7b": Case("qwen3-1.7b", SMALL, goal=38_000),
    "1.7b-host": Case("qwen3-1.7b", SMALL, host="56GiB", goal=40_000),
    "1.7b-lag0": Case("qwen3-1.7b", SMALL | dict(lag=0)),
    "1.7b-lag0-bf16": Case("qwen3-1.7b", SMALL | dict(lag=0, moments="bf16")),
    "1.7b-bf16": Case("qwen3-1.7b", SMALL | dict(moments="bf16")),
    "1.7b-packed": Case("qwen3-1.7b", SMALL | dict(documents=700)),
    "1.7b-fp8": Case("qwen3-1.7b", SMALL | dict(fp8=True), goal=45_000),
    "1.7b-long": Case("qwen3-1.7b", dict(batch=2, seq=65536, microbatches=2, lag=1, grain="layer"), host="60GiB", steps=(2, 2), goal=13_500),
    "4b": Case("qwen3-4b", SMALL, host="64GiB", steps=(4, 4), goal=15_000),
    "8b": Case("qwen3-8b", SMALL | dict(moments="bf16"), host="110GiB", steps=(3, 3), goal=7_000),
    "30b-int8": Case("qwen3-30b-a3b", EXPERTS | dict(quantize="int8"), steps=(4, 6), goal=12_000),
    "30b-nf4": Case("qwen3-30b-a3b", EXPERTS | dict(quantize="nf4"), steps=(4, 6), goal=16_000),
    "32b-nf4": Case("qwen3-32b", dict(batch=16, seq=2048, microbatches=4, lag=1, lora=32, quantize="nf4"), host="30GiB", steps=(3, 3), goal=2_900),
    "0.6b-12gib": Case("qwen3-0.6b", dict(batch=32, seq=2048, microbatches=8, lag=1, grain="layer"), gpu="12GiB", steps=(9, 6)),
    "0.6b-8gib": Case("qwen3-0.6b", dict(batch=8, seq=4096, microbatches=8, lag=0), gpu="8GiB", steps=(9, 6)),
    "4b-lora-16gib": Case("qwen3-4b", dict(batch=8, seq=4096, microbatches=4, lag=1, lora=32), gpu="16GiB", steps=(6, 4)),
}
FOUND = ["tokens_per_s", "steady_tokens_per_s", "gpu_peak_gib", "host_peak_gib", "kept_on_gpu_gib", "kept_in_host_gib", "held_weights_gib", "kept_weights_gib", "share_of_floor", "loss"]
HEAD = "| | goal | tokens/s, measured | predicted | | GPU GiB, measured | predicted | | host GiB, measured | predicted | |"


def run(command):
    print("$", " ".join(command), file=sys.stderr, flush=True)
    start = time.time()
    done = subprocess.run(command, capture_output=True, text=True)
    print(f"  {time.time() - start:.0f} s, status {done.returncode}", file=sys.stderr, flush=True)
    return done


def bench(binary, work, name, trace):
    words = CASES[name].bench() + ["--kernels"]
    if trace:
        words += ["--trace", str(work / f"{name}.trace.json")]
    done = run([binary, *words])
    (work / f"{name}.log").write_text(done.stdout + done.stderr)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return None, done.stderr.strip()[-300:]
    return {key: lines[-1].get(key) for key in FOUND}, ""


def plan(binary, name):
    done = run([binary, *CASES[name].plan()])
    if not done.stdout.strip():
        return None, done.stderr.strip()[-300:]
    answer = json.loads(done.stdout)
    found = answer["prediction"]
    if found is None:
        return None, answer.get("why") or ""
    gib = 1 << 30
    return {
        "tokens_per_s": round(found["speed"]["tokens_per_s"], 1),
        "gpu_peak_gib": round(found["gpu"]["peak_bytes"] / gib, 2),
        "host_peak_gib": round(found["host"]["peak_bytes"] / gib, 2),
    }, ""


def row(name, measured, predicted):
    def pair(ours, theirs, places):
        return f"{ours:,.{places}f} | {theirs:,.{places}f} | {100 * (theirs / ours - 1):+.1f}%"

    rate = measured["steady_tokens_per_s"] or measured["tokens_per_s"]
    goal = CASES[name].goal
    cells = [
        name,
        f"{goal:,}" if goal else "",
        pair(rate, predicted["tokens_per_s"], 0),
        pair(measured["gpu_peak_gib"], predicted["gpu_peak_gib"], 2),
        pair(measured["host_peak_gib"], predicted["host_peak_gib"], 2),
    ]
    return "| " + " | ".join(cells) + " |"


def names_of(text):
    names = list(filter(None, text.split(",")))
    unknown = [name for name in names if name not in CASES]
    if unknown:
        sys.exit(f"no case {unknown[0]}; there are {', '.join(CASES)}")
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", type=names_of, default=[])
    parser.add_argument("--trace", type=names_of, default=[])
    parser.add_argument("--no-doctor", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("ROUNDPIPE_CACHE", str(args.work.resolve()))
    binary = str(Path(args.binary).resolve())
    if not args.no_doctor:
        done = run([binary, "doctor"])
        (args.work / "doctor.log").write_text(done.stdout + done.stderr)
    lines = [HEAD, "|---" * 11 + "|"]
    for name in args.only or CASES:
        predicted, why_not = plan(binary, name)
        measured, failed = bench(binary, args.work, name, name in args.trace)
        line = json.dumps(dict(case=name, measured=measured, predicted=predicted))
        print(line, flush=True)
        with open(args.work / "plan_gpu.jsonl", "a") as kept:
            kept.write(line + "\n")
        if predicted is None or measured is None:
            lines.append(f"| {name} | {why_not or failed or 'failed'} |" + " |" * 9)
        else:
            lines.append(row(name, measured, predicted))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
