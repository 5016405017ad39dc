#!/usr/bin/env python3
"""How soon `roundpipe train` takes its first step on 1 GiB of JSON lines, and in how much memory.

    python3 checks/big_file.py ROUNDPIPE TOKENIZER

TOKENIZER is a folder with a tokenizer and a chat template (SmolLM2-135M-Instruct's, say); the model
is the preset `tiny` with random weights. Fails above 30 s or 500 MiB, the model included.
"""
import json, random, subprocess, sys, tempfile, time
from pathlib import Path

MOST_S, MOST_MIB = 30, 500


def make(path, size):
    rng = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(5000)]
    texts = [" ".join(rng.choices(words, k=rng.randint(5, 120))) for _ in range(3000)]
    with open(path, "w") as out:
        while size > 0:
            roles = [{"role": role, "content": rng.choice(texts)} for role in ("user", "assistant")]
            size -= out.write(json.dumps({"messages": roles}) + "\n")


def peak_mib(process):
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def main():
    program, tokenizer = sys.argv[1:]
    with tempfile.TemporaryDirectory() as work:
        data, run = Path(work, "big.jsonl"), Path(work, "run")
        make(data, 1 << 30)
        settings = ["steps=1000", "seq=512", "batch=2", "sample_every=0", "devices=cpu", "validation=off"]
        start, first, peak = time.time(), None, 0
        process = subprocess.Popen(
            [program, "train", "--init", "tiny", f"tokenizer={tokenizer}", str(data), "--out", str(run), *settings],
            stdout=subprocess.DEVNULL)
        # Twenty seconds of steps show what memory settles at.
        while process.poll() is None and (first is None or time.time() - start < first + 20):
            peak = max(peak, peak_mib(process))
            metrics = run / "metrics.jsonl"
            if first is None and metrics.exists() and '"type":"step"' in metrics.read_text():
                first = time.time() - start
            time.sleep(0.05)
        process.terminate()
        process.wait()
    print(json.dumps({"first_step_s": first and round(first, 1), "peak_mib": round(peak)}))
    sys.exit(first is None or first > MOST_S or peak > MOST_MIB)


main()
