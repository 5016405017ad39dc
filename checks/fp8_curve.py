#!/usr/bin/env python3
"""Loss curves of `roundpipe train` in bf16 and with --fp8, on the processor.

    python3 checks/fp8_curve.py ROUNDPIPE MODEL [--steps 300] [--seq 64] [--batch 2] [--lr 2e-4] [--f32] [--work DIR]

ROUNDPIPE is the program, MODEL a folder such as stories15m. The runs train every weight of the model on the guide's
chapters, side by side, with the same batches in the same order; 32 rows validate. --f32 adds a run in f32, a yardstick:
how far bf16 is from it says what rounding does to a run of this length. Prints tables of losses and differences, and
fails where the validation loss of fp8 is more than 2% above bf16's or a loss of the last tenth differs by more than 5%.
"""
import argparse
import concurrent.futures
import json
import pathlib
import subprocess
import tempfile

import runs

WAYS = {"f32": ["dtype=f32"], "bf16": ["dtype=bf16"], "fp8": ["dtype=bf16", "--fp8"]}


def train(arguments, data, work, way):
    out = work / way
    command = [arguments.program, "train", arguments.model, str(data), "--out", str(out), "devices=cpu", "format=text",
               f"steps={arguments.steps}", f"seq={arguments.seq}", f"batch={arguments.batch}", "microbatches=2",
               f"lr={arguments.lr}", "validation=32", f"eval_every={max(arguments.steps // 3, 1)}", "sample_every=0",
               "save_every=1000000", *WAYS[way]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\nended with {done.returncode}")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["type"] == "step"]
    validation = [record["loss"] for record in records if record["type"] == "eval"]
    assert len(losses) == arguments.steps and validation, f"{way}: steps are missing"
    return losses, validation


def rows(path):
    """The guide as paragraphs: rows that validate come from everywhere."""
    chapters = sorted((runs.ROOT / "docs" / "src").glob("*.md"))
    texts = [text.strip() for chapter in chapters for text in chapter.read_text().split("\n\n")]
    return runs.write_rows(path, [{"text": text} for text in texts if len(text) > 80])


def compare(name, other, base):
    """Relative differences of the losses of two runs."""
    differences = [abs(a - b) / b for a, b in zip(other[0], base[0], strict=True)]
    tail = differences[-max(len(differences) // 10, 1):]
    mean = lambda values: sum(values) / len(values)
    signed = mean([(a - b) / b for a, b in zip(other[0], base[0], strict=True)])
    gap = other[1][-1] / base[1][-1] - 1
    print(f"| {name} | {mean(differences):.2%} | {max(differences):.2%} | {signed:+.2%} | {mean(tail):.2%} | "
          f"{max(tail):.2%} | {gap:+.2%} |")
    return max(tail), gap


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--lr", default="2e-4")
    parser.add_argument("--f32", action="store_true")
    parser.add_argument("--work", type=pathlib.Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or pathlib.Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        data = rows(work / "guide.jsonl")
        ways = [way for way in WAYS if way != "f32" or arguments.f32]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            results = pool.map(lambda way: train(arguments, data, work, way), ways)
            found = dict(zip(ways, results))
    print("| run | first loss | last loss (mean of the last tenth) | validation |")
    print("|---|---|---|---|")
    for way, (losses, validation) in found.items():
        tail = losses[-max(len(losses) // 10, 1):]
        curve = " ".join(f"{loss:.4f}" for loss in validation)
        print(f"| {way} | {losses[0]:.4f} | {sum(tail) / len(tail):.4f} | {curve} |")
    print()
    print("| | mean difference of losses | largest | with its sign | mean, last tenth | largest, last tenth | "
          "final validation |")
    print("|---|---|---|---|---|---|---|")
    if arguments.f32:
        compare("bf16 against f32", found["bf16"], found["f32"])
    largest, gap = compare("fp8 against bf16", found["fp8"], found["bf16"])
    if gap > 0.02 or largest > 0.05:
        raise SystemExit("fp8 is further from bf16 than it should be")


main()
