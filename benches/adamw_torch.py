"""PyTorch's time for one fused AdamW step on the cpu.

    python adamw_torch.py --threads 2

64 Mi parameters in f32 with f32 gradients: 28 bytes of traffic a parameter (read gradient, weight and two
moments; write weight and moments), as many as ours has with bf16 gradients and working weights.
Prints one JSON line.
"""

import argparse
import json
import time

import torch

BYTES = 28


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--params-millions", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    count = args.params_millions << 20
    param = torch.nn.Parameter(torch.rand(count) - 0.5)
    param.grad = torch.rand(count) - 0.5
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()
    best = float("inf")
    for _ in range(args.repeats):
        start = time.perf_counter()
        optimizer.step()
        best = min(best, time.perf_counter() - start)
    report = {"bench": "adamw", "ms": round(best * 1e3, 2), "gbs": round(BYTES * count / best / 1e9, 2)}
    print(json.dumps(report | {"threads": args.threads, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
