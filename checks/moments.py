#!/usr/bin/env python3
"""Loss curves of `roundpipe train` by what the optimizer's moments are kept in, and the host bytes per parameter.

    python3 checks/moments.py ROUNDPIPE MODEL [--steps 300] [--seq 64] [--batch 4] [--lr 3e-4]

ROUNDPIPE is the program, MODEL a small model's folder, such as stories15m. Each of `moments` = f32, bf16 and 8bit trains
all weights in bf16 with AdamW on the same batches: the paragraphs of the guide in docs/src. The table has the mean loss
of each sixth of the run, the mean distance of a step's loss to that with f32 moments, and the bytes of host memory per
trained parameter, as the run accounts for them. Beside them stands f32 with another seed (of the order of rows), which
says how far two sound runs are apart.

With 8bit the moments of embeddings stay f32; stories15m is a table of embeddings to 60%, so its bytes per parameter are
far above those of a model with a small vocabulary.

Fails where the last sixth with fewer bits is worse than with f32 by more than that distance or 1% of the loss.
Needs no packages.
"""
import argparse
import pathlib
import sys
import tempfile

import runs

PARTS = 6
MOMENTS = ["f32", "bf16", "8bit"]


def paragraphs():
    """Rows of text from the guide; blocks of code are left out."""
    rows = []
    for chapter in sorted((runs.ROOT / "docs" / "src").glob("*.md")):
        is_code = False
        for line in chapter.read_text().splitlines():
            if line.startswith("```"):
                is_code = not is_code
            elif not is_code and len(line) > 80 and not line.startswith("|"):
                rows.append({"text": line})
    return rows


def train(arguments, data, out, moments, seed, lag, steps):
    settings = {
        "dtype": "bf16", "moments": moments, "steps": steps, "seq": arguments.seq, "batch": arguments.batch,
        "microbatches": 1, "lr": arguments.lr, "schedule": "constant", "seed": seed, "lag": lag, "validation": "off",
        "sample_every": 0, "save_every": 1000000,
    }
    return runs.train(arguments.roundpipe, arguments.model, data, out, *(f"{k}={v}" for k, v in settings.items()))


def losses(run):
    return [step["loss"] for step in runs.steps(run)]


def bytes_per_parameter(run):
    """What the run states about host memory, activations left out, by its trained parameters."""
    start = next(line for line in runs.lines(run) if line.get("memory"))
    names = {"weights", "gradients", "masters", "moments"}
    held = {part["name"]: part["bytes"] for part in start["memory"] if part["place"] == "host"}
    trained = start["trained_parameters"]
    return {name: held[name] / trained for name in names}


def mean(values):
    return sum(values) / len(values)


def sixths(values):
    size = len(values) // PARTS
    return [mean(values[i * size:(i + 1) * size]) for i in range(PARTS)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roundpipe")
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", default="3e-4")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        data = runs.write_rows(folder / "guide.jsonl", paragraphs())
        curves, held = {}, {}
        for name, moments, seed in [(m, m, 1) for m in MOMENTS] + [("f32, another seed", "f32", 2)]:
            run = train(arguments, data, folder / name.replace(" ", "-"), moments, seed, 0, arguments.steps)
            curves[name] = losses(run)
            held[name, 0] = bytes_per_parameter(run)
        for moments in MOMENTS:
            run = train(arguments, data, folder / f"{moments}-lag", moments, 1, 1, 2)
            held[moments, 1] = bytes_per_parameter(run)
    ends = "".join(f" {(i + 1) * arguments.steps // PARTS} |" for i in range(PARTS))
    print(f"| moments | mean loss up to step{ends} distance to f32, per step |")
    print("|---" * (PARTS + 2) + "|")
    for name, curve in curves.items():
        distance = mean([abs(a - b) for a, b in zip(curve, curves["f32"])])
        cells = " | ".join(f"{value:.4f}" for value in sixths(curve))
        print(f"| {name} | {cells} | {distance:.4f} |")
    print("\n| moments | weights | gradients | masters | moments | bytes per parameter, lag 0 | lag 1 |")
    print("|---" * 7 + "|")
    for moments in MOMENTS:
        parts = held[moments, 0]
        cells = " | ".join(f"{parts[name]:.3f}" for name in ("weights", "gradients", "masters", "moments"))
        later = sum(held[moments, 1].values())
        print(f"| {moments} | {cells} | {sum(parts.values()):.3f} | {later:.3f} |")
    last = {name: sixths(curve)[-1] for name, curve in curves.items()}
    allowed = max(abs(last["f32, another seed"] - last["f32"]), 0.01 * last["f32"])
    worse = [m for m in MOMENTS if last[m] - last["f32"] > allowed]
    if worse:
        sys.exit(f"worse than f32 by more than {allowed:.4f}: {', '.join(worse)}")


if __name__ == "__main__":
    main()
