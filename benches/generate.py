#!/usr/bin/env python3
"""Times decoding beside PyTorch's, in turns in one run, and prints the ratios.

    python3 benches/generate.py BIN MODEL... [--threads N] [--rounds R] [--tokens T]

BIN is a release build of roundpipe; a MODEL is a folder in Hugging Face's layout. Needs torch and
transformers. Both sides continue a prompt of 32 tokens greedily with a cache, f32 and bf16, on the same
number of threads; the best of R rounds of each side counts. Time is per token after the first, so that
neither prompts nor loading count. The goal is 0.80 of PyTorch's speed.
"""

import argparse
import json
import os
import subprocess
import sys
import time

PROMPT = 32


def ours(binary, model, dtype, threads, tokens):
    command = [binary, "generate", model, "--bench", "--max-tokens", str(tokens), "--dtype", dtype]
    command += ["--devices", "cpu", "--pin", "off"]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
                          preexec_fn=lambda: os.sched_setaffinity(0, cores))
    return json.loads(done.stdout.splitlines()[-1])


class Torch:
    """transformers' model with its own cache, decoded by a plain loop: no generation config, no sampling."""

    def __init__(self, folder, dtype, threads):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()

    def ms_per_token(self, tokens):
        torch = self.torch
        ids = torch.tensor([[(i * 31) % self.model.config.vocab_size for i in range(PROMPT)]])
        with torch.inference_mode():
            out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            start = time.perf_counter()
            for _ in range(tokens - 1):
                out = self.model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
        return 1e3 * (time.perf_counter() - start) / (tokens - 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=["f32", "bf16"])
    args = parser.parse_args()
    missed = False
    for model in args.models:
        for dtype in args.dtypes:
            theirs = Torch(model, dtype, args.threads)
            theirs.ms_per_token(4)
            best = {"ours": float("inf"), "torch": float("inf")}
            for _ in range(args.rounds):
                line = ours(args.binary, model, dtype, args.threads, args.tokens)
                best["ours"] = min(best["ours"], line["ms_per_token"])
                best["torch"] = min(best["torch"], theirs.ms_per_token(args.tokens))
            ratio = best["torch"] / best["ours"]
            missed |= ratio < 0.8
            print(f"{model} {dtype}, {args.threads} threads: ours {best['ours']:.2f} ms per token, "
                  f"PyTorch {best['torch']:.2f}, ratio {ratio:.2f} [goal 0.80: {'met' if ratio >= 0.8 else 'MISSED'}]",
                  flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
