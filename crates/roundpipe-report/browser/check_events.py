#!/usr/bin/env python3
"""Reads our event files with TensorBoard's own reader and compares them with the metrics file; not part of `cargo test`.

    python3 -m venv VENV && VENV/bin/pip install tensorboard
    VENV/bin/python crates/roundpipe-report/browser/check_events.py

Run it from the repository's root. It makes a sample run with the example `sample_report` and a second
one that was resumed, whose orphaned steps TensorBoard must drop.
"""
import json
import pathlib
import struct
import subprocess
import tempfile

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

LIMITS = {"scalars": 0, "tensors": 0}
checks = 0


def check(what, is_true):
    global checks
    checks += 1
    if not is_true:
        raise SystemExit(f"FAILED: {what}")


def made(folder, *arguments):
    command = ["cargo", "run", "--quiet", "-p", "roundpipe-report", "--example", "sample_report", "--", str(folder), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def read(folder):
    events = EventAccumulator(str(folder), size_guidance=LIMITS)
    events.Reload()
    # TensorBoard turns scalars of the first version into tensors of the second.
    return {tag: [(event.step, make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)] for tag in events.Tags()["tensors"]} | {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def single(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        made(folder / "whole")
        records = [json.loads(line) for line in (folder / "whole/metrics.jsonl").read_text().splitlines()]
        seen = read(folder / "whole")
        for kind, prefix, fields in [("step", "train", ["loss", "lr", "epoch", "grad_norm", "tokens_per_s", "limit_share"]), ("eval", "eval", ["loss", "perplexity"])]:
            for field in fields:
                wanted = [(record["step"], single(record[field])) for record in records if record["type"] == kind]
                found = [(step, float(value)) for step, value in seen[f"{prefix}/{field}"]]
                check(f"{prefix}/{field}: {len(found)} of {len(wanted)}", found == wanted and len(wanted) > 10)
        texts = [(step, value.item().decode()) for step, value in seen["sample"]]
        samples = [record for record in records if record["type"] == "sample"]
        check("samples", len(texts) == len(samples) and all(sample["text"].splitlines()[0] in text for sample, (_, text) in zip(samples, texts)))
        made(folder / "resumed", "60", "--resumed")
        steps = [step for step, _ in read(folder / "resumed")["train/loss"]]
        check(f"a resumed run has every step once: {steps}", steps == list(range(1, 61)))
        check("from two files", len(list((folder / "resumed").glob("events.out.tfevents.*"))) == 2)
    print(f"{checks} passed, 0 failed")


if __name__ == "__main__":
    main()
