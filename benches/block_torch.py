"""PyTorch's time and memory for one transformer block, forward and backward.

    python block_torch.py --threads 2

The block: pre-norm RMSNorm, rotary, causal fused attention, SwiGLU; hidden 512,
8 heads, intermediate 1536, batch 4, sequence 512, f32, eager. Gradients of all
weights and of the input. Prints one JSON line.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F

BATCH, SEQ, HIDDEN, HEADS, INTERMEDIATE = 4, 512, 512, 8, 1536
EPS, THETA = 1e-5, 10000.0


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = torch.nn.RMSNorm(HIDDEN, eps=EPS)
        self.norm2 = torch.nn.RMSNorm(HIDDEN, eps=EPS)
        self.wq, self.wk, self.wv, self.wo = (torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate = torch.nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up = torch.nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down = torch.nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x, cos, sin):
        h = self.norm1(x)
        q, k, v = (w(h).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        h = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.wo(h.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def rope_tables():
    dim = HIDDEN // HEADS
    angle = torch.arange(SEQ)[:, None] / THETA ** (torch.arange(0, dim, 2) / dim)
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def memory_mib(field):
    """VmRSS (now) or VmHWM (peak) of this process."""
    with open("/proc/self/status") as lines:
        line = next(line for line in lines if line.startswith(f"{field}:"))
    return round(int(line.split()[1]) / 1024, 1)


def timed(step, warmup, repeats):
    """Median and least milliseconds of a step."""
    for _ in range(warmup):
        step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), min(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    before = memory_mib("VmRSS")

    block = Block()
    x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
    upstream = torch.randn(BATCH, SEQ, HIDDEN)
    cos, sin = rope_tables()

    def step():
        block.zero_grad(set_to_none=True)
        x.grad = None
        block(x, cos, sin).backward(upstream)

    median_ms, least_ms = timed(step, args.warmup, args.repeats)
    report = {
        "bench": "block_forward_backward_f32",
        "ms": round(median_ms, 2),
        "least_ms": round(least_ms, 2),
        "peak_rss_mib": memory_mib("VmHWM"),
        "rss_before_model_mib": before,
        "threads": args.threads,
        "repeats": args.repeats,
        "torch": torch.__version__,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
