#!/usr/bin/env python3
"""Loss curves of `roundpipe train` beside transformers and PEFT, in f32 on the processor.

    python3 checks/curve.py ROUNDPIPE MODEL [--parts full,lora,packing] [--steps 200] [--packing-steps 20] [--threads N]
                            [--padding-idx]

ROUNDPIPE is the program, MODEL a folder such as SmolLM2-135M-Instruct; one without a chat template gets prompts with
completions. --threads are those of PyTorch: 1 is fastest on a busy machine. Needs cargo, torch, transformers, peft.

full, lora: both sides train from the same weights on the same packed batches, in the same order and with the same
masks. Each step's loss must agree within 1e-3. PyTorch computes with one mean over the step's learned tokens, an
explicit block-diagonal mask, `torch.optim.AdamW` and `clip_grad_norm_`. transformers gives its embeddings a
`padding_idx`, for which PyTorch leaves the gradient of inputs out; where the padding token also ends turns, as in
SmolLM2, that is not the gradient of the loss. So it is taken away, unless --padding-idx keeps it.

packing: the same documents packed and one to a row. Losses at the same weights must agree as well as f32 allows, and
20 steps on all of them as well as two runs that differ only in the order of the documents.
"""
import argparse
import itertools
import math
import pathlib
import random
import sys
import tempfile
import time

import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM

import runs

LIMIT = 1e-3
SEED = 7
SEQ = 96
BATCH = 2
QUIET = ["validation=off", "sample_every=0", "save_every=1000000"]
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
WORDS = ("harbor lamp keeper gull rope winter copper island letter storm baker ferry seven quiet lantern map anchor "
         "salt bridge violet engine garden marble thunder window piano river candle falcon meadow").split()


def random_rows(count, most_words, seed, as_chat):
    """Conversations of one to three rounds; what is said cannot be guessed, so losses stay well above 0."""
    choose = random.Random(seed)

    def sentence():
        words = [choose.choice(WORDS) for _ in range(choose.randint(2, most_words))]
        return " ".join(words).capitalize() + choose.choice(".!?")

    if not as_chat:
        return [{"prompt": sentence(), "completion": " " + sentence()} for _ in range(count)]
    rows = []
    for _ in range(count):
        turns = 2 * choose.choice([1, 1, 1, 2, 3])
        rows.append(runs.conversation(*(sentence() for _ in range(turns)), system="Brief."))
    return rows


def has_template(model):
    return (model / "chat_template.jinja").exists() or "chat_template" in (model / "tokenizer_config.json").read_text()


def open_model(folder, dtype=torch.float32, adapter=None, padding_idx=False):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    if not padding_idx:
        model.get_input_embeddings().padding_idx = None
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    model.config.use_cache = False
    # Dropout would not repeat ours; these models and adapters have none.
    return model.train()


def mask(batch, width, dtype):
    """[B, 1, S, S]: 0 where a token sees another, of its own sequence and not behind it; else the smallest number."""
    seen = torch.ones(width, width, dtype=torch.bool).tril().repeat(len(batch["ids"]), 1, 1)
    for row, ends in enumerate(batch["lens"]):
        which = torch.zeros(width, dtype=torch.long)
        for end in ends[1:-1]:
            which[end:] += 1
        seen[row] &= which[:, None] == which[None, :]
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]


def loss_of(model, batch, dtype=torch.float32):
    ids, labels, positions = (torch.tensor(batch[name]) for name in ["ids", "labels", "positions"])
    logits = model(input_ids=ids, position_ids=positions, attention_mask=mask(batch, ids.shape[1], dtype)).logits
    # Labels stand where they are predicted.
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def theirs(model, batches, rates, settings):
    """Losses and gradient norms of PyTorch's training."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, **ADAM)
    for batch, rate in zip(batches, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, settings["clip"])
        optimizer.step()
        yield loss.item(), norm.item()


def expected_rate(step, settings):
    """Linear to the peak, then a cosine down to a share of it."""
    peak, warmup, least = settings["lr"], settings["warmup"], settings["min_lr"]
    if step < warmup:
        return peak * step / warmup
    done = (step - warmup) / (settings["steps"] - warmup)
    return peak * (least + (1 - least) * (1 + math.cos(math.pi * done)) / 2)


def curve(program, model, folder, method, steps, padding_idx):
    """Trains on both sides; says whether all losses agree."""
    data = runs.write_rows(folder / "curve.jsonl", random_rows(400, 9, SEED, has_template(model)))
    options = [f"method={method}", f"steps={steps}", f"seq={SEQ}", f"batch={BATCH}", "microbatches=2", f"seed={SEED}"]
    start = time.time()
    run = runs.train(program, model, data, folder / method, *options, *QUIET)
    ours_s = time.time() - start
    settings, ours = runs.settings(run), runs.steps(run)
    assert len(ours) == steps and not any(step["skipped"] for step in ours)
    wrong_rate = max(abs(step["lr"] / expected_rate(step["step"], settings) - 1) for step in ours)
    batches = runs.batches(model, data, SEQ, BATCH, True, SEED, steps)
    learned = sum(map(tokens_learned, batches))
    assert learned == ours[-1]["tokens_trained"], "the batches are not those of the run"
    adapter = None
    if method == "lora":
        adapter = folder / "adapter"
        runs.example("new_adapter", model, adapter, settings["lora_rank"], settings["lora_alpha"], SEED)
    start = time.time()
    reference = open_model(model, adapter=adapter, padding_idx=padding_idx)
    pairs = theirs(reference, batches, [step["lr"] for step in ours], settings)
    worst = worst_norm = 0.0
    sequences = sum(len(lens) - 1 for batch in batches for lens in batch["lens"])
    print(f"\n{method}: {steps} steps of {BATCH} rows of {SEQ} tokens, {sequences} sequences, {learned} tokens "
          f"learned, lr {settings['lr']:g}, weight decay {settings['weight_decay']:g}, clip {settings['clip']:g}")
    print("  step        lr      ours    theirs  difference    norm ours  norm theirs", flush=True)
    good = wrong_rate < 1e-9
    for step, (loss, norm) in zip(ours, pairs, strict=True):
        difference = abs(step["loss"] - loss)
        good &= difference <= LIMIT
        worst, worst_norm = max(worst, difference), max(worst_norm, abs(step["grad_norm"] / norm - 1))
        number = step["step"]
        if difference > LIMIT or number in (1, 2, 3, 5, 10) or number % 20 == 0:
            print(f"  {number:4} {step['lr']:9.2e} {step['loss']:9.5f} {loss:9.5f} {difference:11.1e} "
                  f"{step['grad_norm']:12.4f} {norm:12.4f}{'  MISSED' if difference > LIMIT else ''}", flush=True)
    print(f"  largest difference: loss {worst:.1e} (limit {LIMIT:g}), gradient norm {worst_norm:.1e} of it, "
          f"rates {wrong_rate:.0e} of the schedule; {ours_s:.0f} s ours, {time.time() - start:.0f} s PyTorch: "
          f"{'ok' if good else 'MISSED'}", flush=True)
    return good


def weighted(losses_and_tokens):
    total = sum(tokens for _, tokens in losses_and_tokens)
    return sum(loss * tokens for loss, tokens in losses_and_tokens) / total


def tokens_learned(batch):
    return sum(label != -100 for row in batch["labels"] for label in row)


def at_fixed_weights(program, model, folder, data, packed_rows, documents):
    """The mean loss of the same documents: packed in one step, and each in a step of its own, at a rate of 0."""
    keep = ["lr=0", "shuffle=false", f"seq={SEQ}", *QUIET]
    packed = runs.train(program, model, data, folder / "at_once", *keep, "steps=1", f"batch={packed_rows}")
    alone = runs.train(program, model, data, folder / "alone", *keep, f"steps={documents}", "batch=1", "packing=false")
    [one] = runs.batches(model, data, SEQ, packed_rows, True, "off", 1)
    many = runs.batches(model, data, SEQ, 1, False, "off", documents)
    tokens = [tokens_learned(batch) for batch in many]
    found = {
        "ours, packed": runs.steps(packed)[0]["loss"],
        "ours, one by one": weighted([(step["loss"], n) for step, n in zip(runs.steps(alone), tokens, strict=True)]),
    }
    for name, dtype in [("f32", torch.float32), ("f64", torch.float64)]:
        reference = open_model(model, dtype)
        with torch.no_grad():
            found[f"PyTorch {name}, packed"] = loss_of(reference, one, dtype).item()
            each = [(loss_of(reference, batch, dtype).item(), n) for batch, n in zip(many, tokens, strict=True)]
            found[f"PyTorch {name}, one by one"] = weighted(each)
    exact = found["PyTorch f64, one by one"]
    for name, loss in found.items():
        print(f"  {name:24} {loss:.9f}  {loss - exact:+.1e}")
    floor = abs(found["PyTorch f32, one by one"] - exact)
    # Eight times the unit of f32; or what PyTorch's sums lose.
    allowed = max(floor, 1e-6 * exact)
    apart = abs(found["ours, packed"] - found["ours, one by one"])
    from_exact = max(abs(found[name] - exact) for name in ["ours, packed", "ours, one by one"])
    good = apart <= allowed and from_exact <= allowed and abs(found["PyTorch f64, packed"] - exact) < 1e-9
    print(f"  ours packed beside one by one: {apart:.1e}, both within {from_exact:.1e} of f64; PyTorch's f32 is "
          f"{floor:.1e} from it; allowed {allowed:.1e}: {'ok' if good else 'MISSED'}", flush=True)
    return good


def largest(some, others):
    return max(abs(x - y) for x, y in zip(some, others, strict=True))


def in_steps(program, model, folder, files, packed_rows, documents, steps):
    """Trains on all documents at once, packed and not; the noise is what their order in the file changes."""
    options = [f"steps={steps}", f"seq={SEQ}", "shuffle=false", *QUIET]

    def losses(name, data, *more):
        run = runs.train(program, model, data, folder / name, *options, *more)
        return [step["loss"] for step in runs.steps(run)]

    packed = losses("packed", files[0], f"batch={packed_rows}")
    rows = [losses(f"rows{i}", data, f"batch={documents}", "packing=false") for i, data in enumerate(files)]
    noise = max(largest(one, other) for one, other in itertools.combinations(rows, 2))
    apart = largest(packed, rows[0])
    good = apart <= 2 * noise
    print(f"  {steps} steps on all documents: loss {rows[0][0]:.5f} to {rows[0][-1]:.5f}; packed beside rows "
          f"{apart:.1e}; rows in other orders {noise:.1e}: {'ok' if good else 'MISSED'}", flush=True)
    return good


def packing(program, model, folder, steps):
    """Packed beside unpacked; says whether they agree within the noise of f32."""
    rows = random_rows(10, 9, SEED + 1, has_template(model))
    orders = [rows, rows[::-1], rows[5:] + rows[:5]]
    files = [runs.write_rows(folder / f"order{i}.jsonl", order) for i, order in enumerate(orders)]
    documents = len(rows)
    # Rows are closed at the end of an epoch, so one batch of all its rows is all documents.
    learned = [tokens_learned(batch) for batch in runs.batches(model, files[0], SEQ, 1, True, "off", documents)]
    [everything] = map(tokens_learned, runs.batches(model, files[0], SEQ, documents, False, "off", 1))
    packed_rows = next(n for n in range(1, documents + 1) if sum(learned[:n]) == everything)
    print(f"\npacking: {documents} documents, {everything} tokens learned, in {packed_rows} packed rows of {SEQ} "
          f"or {documents} rows", flush=True)
    good = at_fixed_weights(program, model, folder, files[0], packed_rows, documents)
    if steps:
        good &= in_steps(program, model, folder, files, packed_rows, documents, steps)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", metavar="ROUNDPIPE", type=lambda text: str(pathlib.Path(text).resolve()))
    parser.add_argument("model", metavar="MODEL", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--packing-steps", type=int, default=20)
    parser.add_argument("--parts", default="full,lora,packing", type=lambda text: text.split(","))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--padding-idx", action="store_true")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        good = True
        for part in args.parts:
            if part == "packing":
                good &= packing(args.program, args.model, folder, args.packing_steps)
            else:
                good &= curve(args.program, args.model, folder, part, args.steps, args.padding_idx)
    print("\nall agree" if good else "\nMISSED")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
