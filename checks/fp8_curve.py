#!/usr/bin/env python3
"""Loss curves of `roundpipe train` in bf16 and with --fp8, on the processor.

    python3 checks/fp8_curve.py ROUNDPIPE MODEL [--steps 300] [--seq 64] [--batch 2] [--lr 2e-4] [--work DIR]
    python3 checks/fp8_curve.py --compare WORK

ROUNDPIPE is the program, MODEL a folder such as stories15m. Three runs train every weight of the model on the guide's
chapters, side by side, with the same batches in the same order; 32 rows validate. The second run in bf16 has one
microbatch instead of two, which changes the rounding of gradients and nothing else: how far it is from the first is
what noise of that size does to a run. Prints tables of losses and differences (`--compare` those of runs that are
there), and fails where the validation loss of fp8 is more than 2% above bf16's or the losses of the second half are
more than 2% above on average.
"""
import argparse
import concurrent.futures
import json
import pathlib
import subprocess
import tempfile

import runs

WAYS = {"bf16": ["microbatches=2"], "bf16-one": ["microbatches=1"], "fp8": ["microbatches=2", "--fp8"]}


def train(arguments, data, work, way):
    command = [arguments.program, "train", arguments.model, str(data), "--out", str(work / way), "devices=cpu",
               "dtype=bf16", "format=text", f"steps={arguments.steps}", f"seq={arguments.seq}",
               f"batch={arguments.batch}", f"lr={arguments.lr}", "validation=32",
               f"eval_every={max(arguments.steps // 3, 1)}", "sample_every=0", "save_every=1000000", *WAYS[way]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\nended with {done.returncode}")


def losses(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record["loss"] for record in records if record["type"] == "step"]
    validation = [record["loss"] for record in records if record["type"] == "eval"]
    assert steps and validation, f"{run}: steps are missing"
    return steps, validation


def write_rows(path):
    """The guide as paragraphs: rows that validate come from everywhere."""
    chapters = sorted((runs.ROOT / "docs" / "src").glob("*.md"))
    texts = [text.strip() for chapter in chapters for text in chapter.read_text().split("\n\n")]
    return runs.write_rows(path, [{"text": text} for text in texts if len(text) > 80])


def mean(values):
    return sum(values) / len(values)


def differences(name, other, base):
    """Relative differences of two runs, of which the second is the base."""
    signed = [(a - b) / b for a, b in zip(other[0], base[0], strict=True)]
    half = mean(other[0][len(signed) // 2:]) / mean(base[0][len(signed) // 2:]) - 1
    gap = other[1][-1] / base[1][-1] - 1
    print(f"| {name} | {mean([abs(x) for x in signed]):.2%} | {max(abs(x) for x in signed):.2%} | {mean(signed):+.2%} | "
          f"{half:+.2%} | {gap:+.2%} |")
    return half, gap


def compare(work):
    found = {way: losses(work / way) for way in WAYS}
    print("| run | first loss | mean of the last 30 steps | validation |")
    print("|---|---|---|---|")
    for way, (steps, validation) in found.items():
        curve = ", ".join(f"{loss:.4f}" for loss in validation)
        print(f"| {way} | {steps[0]:.4f} | {mean(steps[-30:]):.4f} | {curve} |")
    print()
    print("| | mean difference of losses | largest | mean with its sign | mean loss of the second half | final validation |")
    print("|---|---|---|---|---|---|")
    differences("bf16-one against bf16", found["bf16-one"], found["bf16"])
    half, gap = differences("fp8 against bf16", found["fp8"], found["bf16"])
    if gap > 0.02 or half > 0.02:
        raise SystemExit("fp8 is further from bf16 than it should be")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", nargs="?")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--lr", default="2e-4")
    parser.add_argument("--work", type=pathlib.Path)
    parser.add_argument("--compare", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.compare:
        return compare(arguments.compare)
    if not arguments.model:
        parser.error("give the program and a model")
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or pathlib.Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        data = write_rows(work / "guide.jsonl")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(lambda way: train(arguments, data, work, way), WAYS))
        compare(work)


main()
