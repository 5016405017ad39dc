#!/usr/bin/env python3
"""Loss of a small model by what AdamW's moments are kept in, in PyTorch: an independent copy of bitsandbytes' method.

    pip install torch transformers bitsandbytes
    python3 benches/moments_torch.py MODEL VARIANT [STEPS]

MODEL is a folder such as stories15m. VARIANT is what has 8 bits, by blocks of 256 with bitsandbytes' maps and the nearest
value: `none`, `all` (but parameters with fewer than 4,096 elements, as there), `layers` (all but the embedding) or
`first` (as `all`, but the embedding's second moment is f32). A step uses moments as computed and narrows them afterwards.
Rows of 4 x 64 tokens from the guide in docs/src, a constant 3e-4, clipped to a norm of 1: as checks/moments.py, in f32 and
with batches of its own. Prints the mean loss of every 25 steps.
"""
import pathlib
import sys

import bitsandbytes.functional as maps
import numpy
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "checks"))
import moments  # noqa: E402

BLOCK, LR, BETA1, BETA2, EPS, DECAY = 256, 3e-4, 0.9, 0.999, 1e-8, 0.01
BATCH, SEQ = 4, 64


class Map:
    """The nearest of 256 values, by a table over the upper 16 bits of a number and one comparison."""

    def __init__(self, signed):
        self.values = maps.create_dynamic_map(signed)
        middles = (self.values[1:] + self.values[:-1]) / 2
        upper = numpy.arange(1 << 16, dtype=numpy.uint32)
        least = numpy.where(upper >> 15, upper << 16 | 0xFFFF, upper << 16).astype(numpy.uint32).view(numpy.float32)
        least = torch.from_numpy(numpy.nan_to_num(least, nan=0.0, posinf=2.0, neginf=-2.0))
        self.first = torch.bucketize(least, middles)
        self.middles = torch.cat([middles, torch.tensor([float("inf")])])

    def codes(self, x):
        first = torch.take(self.first, (x.view(torch.int32) >> 16 & 0xFFFF).long())
        return first + (x > torch.take(self.middles, first)).long()

    def narrow(self, x):
        """What x is after it was kept in 8 bits."""
        blocks = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True)
        values = torch.take(self.values, self.codes(blocks / scales.clamp_min(1e-45))) * scales
        return values.reshape(-1)[:x.numel()].view_as(x)


def batches(model):
    """Tokens of the guide in an order of their own, again and again."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rows = [tokenizer.encode(row["text"]).ids for row in moments.paragraphs()]
    order = torch.Generator().manual_seed(1)
    size = BATCH * (SEQ + 1)
    while True:
        tokens = []
        for i in torch.randperm(len(rows), generator=order).tolist():
            tokens += rows[i]
            while len(tokens) >= size:
                yield torch.tensor(tokens[:size]).view(BATCH, SEQ + 1)
                tokens = tokens[size:]


def has_8_bits(variant, name, param):
    """Whether the first and the second moment of a parameter have 8 bits."""
    if variant == "none" or param.numel() < 4096:
        return False, False
    is_table = "embed" in name
    return {"all": (True, True), "layers": (not is_table, not is_table), "first": (True, not is_table)}[variant]


def update(param, state, step, narrow, by):
    first, second = state
    grad = param.grad.bfloat16().float()
    first.mul_(BETA1).add_(grad, alpha=1 - BETA1)
    second.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
    denominator = (second.sqrt() / (1 - BETA2**step) ** 0.5).add_(EPS)
    param.mul_(1 - LR * DECAY).addcdiv_(first, denominator, value=-LR / (1 - BETA1**step))
    for moment, is_narrow, kind in zip(state, narrow, by):
        if is_narrow:
            moment.copy_(kind.narrow(moment))


def main():
    model_path, variant = pathlib.Path(sys.argv[1]), sys.argv[2]
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 200
    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    params = dict(model.named_parameters())
    states = {name: [torch.zeros_like(param), torch.zeros_like(param)] for name, param in params.items()}
    by = [Map(True), Map(False)]
    losses = []
    for step, tokens in zip(range(1, steps + 1), batches(model_path)):
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
            for name, param in params.items():
                update(param, states[name], step, has_8_bits(variant, name, param), by)
        if step % 25 == 0:
            print(f"{variant} {step} {sum(losses[-25:]) / 25:.4f}", flush=True)


if __name__ == "__main__":
    main()
