#!/usr/bin/env python3
"""`roundpipe train` on a GPU: what saving costs, what packing costs, and a run that is killed.

    python3 benches/train_gpu.py ROUNDPIPE WORK CASE...

CASE is any of
  saving0, saving1   Qwen3-1.7B's shape, full, 16 rows of 4096 tokens, at lag 0 and 1: with a save every
           20 steps and without
  packed   Qwen3-1.7B's shape: rows of mixed lengths (mean 700) and full rows, tokens per second and by FLOPs
  kill     Qwen3-0.6B's shape, 100 steps, a save every 20, watched: killed, resumed, and not killed
Weights are random and tokens are bytes, in a vocabulary of Qwen3's size. One JSON line per run;
needs nothing but Python. `--gpu-memory` is 24GiB.
"""
import json, os, random, signal, subprocess, sys, time, urllib.request
from pathlib import Path

VOCAB = 151_936


def letter(byte):
    seen = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    if byte in seen:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in seen].index(byte))


def make_tokenizer(folder):
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {letter(b): b for b in range(256)}
    vocab |= {f"unused{i}": i for i in range(256, VOCAB - 1)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = {"id": VOCAB - 1, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False,
           "normalized": False, "special": True}
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
           "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(
        {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
         "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": bpe}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "pad_token": "<|end|>"}))


def make_data(path, tokens, length):
    """Rows of random words; `length()` says how many bytes each has."""
    rng = random.Random(1)
    words = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 9))) for _ in range(4000)]
    with open(path, "w") as out:
        while tokens > 0:
            n, text = length(rng), []
            while n > 0:
                text.append(rng.choice(words))
                n -= len(text[-1]) + 1
            text = " ".join(text)
            tokens -= len(text)
            out.write(json.dumps({"text": text}) + "\n")


def steps(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {r["step"]: r for r in records if r["type"] == "step"}, records


def command(bin, work, run, preset, data, more):
    return [bin, "train", "--init", preset, str(data), "--out", str(run), "--gpu-memory", "24GiB", f"tokenizer={work}/tokenizer",
            "devices=cuda:0", "validation=off", "sample_every=0", "dtype=bf16", "seq=4096", "batch=16", "microbatches=4",
            "lr=1e-4", "keep=1", *more]


def train(*arguments, watch=None):
    log = arguments[1] / "train.log"
    process = subprocess.Popen(command(*arguments), stdout=open(log, "w"), stderr=subprocess.STDOUT)
    if watch:
        watch(process)
    code = process.wait()
    if code not in (0, -signal.SIGKILL):
        print(log.read_text()[-3000:])
        raise SystemExit(f"exit {code}")


def told(name, **values):
    print(json.dumps({"case": name, **values}), flush=True)


def between(found, first, last):
    """Tokens per second from the end of one step to the end of another."""
    tokens = sum(found[s]["tokens"] for s in range(first + 1, last + 1))
    return tokens / (found[last]["elapsed_s"] - found[first]["elapsed_s"])


def saving(bin, work, lag):
    data = work / "mixed.jsonl"
    rates = {}
    for every in ("20", "100000"):
        run = work / f"saving-{lag}-{every}"
        subprocess.run(["rm", "-rf", str(run)], check=True)
        train(bin, work, run, "qwen3-1.7b", data, ["steps=26", f"save_every={every}", f"lag={lag}"])
        found, records = steps(run)
        saves = [(r["step"], round(r["seconds"], 2), r["bytes"]) for r in records if r["type"] == "save"]
        rates.setdefault(every, []).append(between(found, 5, 25))
        told("saving", lag=lag, save_every=every, tokens_per_s=round(rates[every][-1], 1), saves=saves,
             seconds=[round(found[s]["elapsed_s"] - found[s - 1]["elapsed_s"], 2) for s in range(18, 27)])
        subprocess.run(["rm", "-rf", str(run)], check=True)
    with_saves = sum(rates["20"]) / len(rates["20"])
    told("saving", lag=lag, ratio=round(with_saves / rates["100000"][0], 4))


def saving0(bin, work):
    saving(bin, work, "0")


def saving1(bin, work):
    saving(bin, work, "1")


def flops_per_token(path):
    """Of Qwen3-1.7B, forward and backward: products, and attention to the tokens before in a document."""
    lengths = [len(json.loads(line)["text"]) for line in open(path)]
    context = sum(n * n for n in lengths) / 2 / sum(lengths)
    return 6 * 1.7206e9 + 12 * 28 * 16 * 128 * context


def packed(bin, work):
    rates = {}
    for name in ("mixed", "full"):
        run, data = work / f"packed-{name}", work / f"{name}.jsonl"
        train(bin, work, run, "qwen3-1.7b", data, ["steps=16", "save_every=100000"])
        found, _ = steps(run)
        rate = between(found, 6, 15)
        rates[name] = rate * flops_per_token(data)
        told("packed", rows=name, tokens_per_s=round(rate, 1), limit_share=round(found[15]["limit_share"], 3),
             fill=round(sum(found[s]["tokens"] for s in found) / (len(found) * 16 * 4096), 4))
        subprocess.run(["rm", "-rf", str(run)], check=True)
    told("packed", ratio_by_flops=round(rates["mixed"] / rates["full"], 4), goal=0.95)


def kill(bin, work):
    data, settings = work / "mixed.jsonl", ["steps=100", "save_every=20", "lag=1"]
    whole, cut = work / "whole", work / "cut"
    train(bin, work, whole, "qwen3-0.6b", data, settings)

    def watch(process):
        while True:
            time.sleep(0.2)
            try:
                found, _ = steps(cut)
            except FileNotFoundError:
                continue
            if any(s >= 50 for s in found):
                break
        url = [line.split()[-1] for line in open(work / "train.log") if line.startswith("watch at ")][0]
        page = urllib.request.urlopen(url).read()
        told("kill", page_bytes=len(page), has_timeline=b"timeline" in page)
        process.send_signal(signal.SIGKILL)

    train(bin, work, cut, "qwen3-0.6b", data, [*settings, "--watch"], watch=watch)
    start = time.time()
    train(bin, work, cut, "qwen3-0.6b", data, settings)
    (a, _), (b, records) = steps(whole), steps(cut)
    resumed = [r.get("resumed_at") for r in records if r["type"] == "start"]
    equal = all(a[s]["loss"] == b[s]["loss"] and a[s]["grad_norm"] == b[s]["grad_norm"] for s in range(1, 101))
    weights = [subprocess.run(f"cat {run}/model/*.safetensors | sha256sum", shell=True, capture_output=True, text=True).stdout
               for run in (whole, cut)]
    told("kill", steps=len(b), resumed_at=resumed, same_losses_and_norms=equal, same_weights=weights[0] == weights[1],
         first=a[1]["loss"], last=a[100]["loss"], tokens_per_s=round(between(a, 5, 99), 1),
         saves=[(r["step"], round(r["seconds"], 2), r["bytes"]) for r in records if r["type"] == "save"],
         resume_s=round(time.time() - start, 1))


def main():
    bin, work, cases = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    work.mkdir(parents=True, exist_ok=True)
    make_tokenizer(work / "tokenizer")
    make_data(work / "mixed.jsonl", 3_000_000, lambda rng: min(4000, int(rng.expovariate(1 / 700)) + 20))
    make_data(work / "full.jsonl", 3_000_000, lambda rng: 4093)
    for case in cases:
        {"saving0": saving0, "saving1": saving1, "packed": packed, "kill": kill}[case](bin, work)


main()
