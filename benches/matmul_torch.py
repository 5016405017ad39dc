"""PyTorch's GFLOP/s for square products in f32 and bf16.

    python matmul_torch.py --threads 2

bf16 is measured twice: with every instruction set oneDNN finds, and limited to
AVX512_CORE_BF16, that is without AMX. The limit must be set before torch is
loaded, so each measurement runs in a process of its own; one that is killed
(some virtual machines forbid AMX) is reported, not hidden. Prints JSON lines.
"""

import argparse
import json
import os
import subprocess
import sys
import time

SIZES = (1024, 2048)
LIMIT = "ONEDNN_MAX_CPU_ISA"
# (instruction set limit or None, element types)
MEASUREMENTS = ((None, ("float32", "bfloat16")), ("AVX512_CORE_BF16", ("bfloat16",)))


def gflops(dtype, n, warmup, repeats):
    """From the least time of a product into a fixed output."""
    import torch

    a, b = (torch.randn(n, n).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    times = []
    for i in range(warmup + repeats):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        if i >= warmup:
            times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times) / 1e9


def measure(args):
    """Runs in the child process."""
    import torch

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for dtype in args.dtypes:
        for n in SIZES:
            report = {
                "bench": "matmul",
                "dtype": dtype,
                "n": n,
                "gflops": round(gflops(dtype, n, args.warmup, args.repeats), 1),
                "isa_limit": os.environ.get(LIMIT),
                "threads": args.threads,
                "torch": torch.__version__,
            }
            print(json.dumps(report), flush=True)


def spawn(args, isa_limit, dtypes):
    environment = {name: value for name, value in os.environ.items() if name != LIMIT}
    if isa_limit:
        environment[LIMIT] = isa_limit
    command = [sys.executable, __file__, "--threads", str(args.threads), "--warmup", str(args.warmup)]
    command += ["--repeats", str(args.repeats), "--dtypes", *dtypes]
    code = subprocess.run(command, env=environment).returncode
    if code:
        print(json.dumps({"bench": "matmul", "isa_limit": isa_limit, "failed_with": code}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtypes", nargs="+", help="measure these here and now, in this process")
    args = parser.parse_args()
    if args.dtypes:
        measure(args)
        return
    for isa_limit, dtypes in MEASUREMENTS:
        spawn(args, isa_limit, dtypes)


if __name__ == "__main__":
    main()
