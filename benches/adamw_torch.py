"""Times torch.optim.AdamW(fused=True) and this crate's AdamW on the same number of f32 parameters.

`python adamw_torch.py [--params-millions 64] [--threads 2]`, from the crate's folder; needs PyTorch and cargo.
"""

import argparse
import re
import subprocess
import time

import torch

ROUNDS = 7


def torch_ms(params: int, threads: int) -> float:
    """The best of several steps, in milliseconds."""
    torch.set_num_threads(threads)
    param = torch.nn.Parameter(torch.rand(params) - 0.5)
    param.grad = torch.rand(params) - 0.5
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        optimizer.step()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params-millions", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    theirs = torch_ms(args.params_millions << 20, args.threads)
    bench = ["cargo", "bench", "--bench", "optim", "--", str(args.params_millions), str(args.threads)]
    report = subprocess.run(bench, check=True, capture_output=True, text=True).stdout
    ours = float(re.search(r"^AdamW f32 +([\d.]+) ms", report, re.MULTILINE)[1])
    print(report, end="")
    print(f"torch {torch.__version__} fused AdamW f32: {theirs:.2f} ms")
    print(f"ours {ours:.2f} ms: {theirs / ours:.2f} times as fast")


if __name__ == "__main__":
    main()
