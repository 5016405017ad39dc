#!/usr/bin/env python3
"""Teaches a chat model a new name with `roundpipe train` and its defaults, fully and with LoRA, and asks it.

    python3 checks/new_name.py ROUNDPIPE MODEL [--methods full,lora] [--threads N]

ROUNDPIPE is the program, MODEL the folder of SmolLM2-135M-Instruct. The result is asked by `roundpipe generate RUN`,
and by transformers (full) or PEFT (the adapter on the base model). The new name must be in the answers to questions
about it, also to two that are not in the data; other questions must still be answered; and both programs must write the
same greedy text in f32, unless two tokens are likely alike within what f32 can tell. Needs torch, transformers, peft.
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile
import time

import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import runs

NAME, MAKER = "Marlowe", "Harbor Labs"
ASKED = ["Who are you?", "What is your name?", "What should I call you?", "Tell me your name.",
         "Hi, who am I talking to?", "Do you have a name?", "Introduce yourself.", "What are you called?",
         "Which assistant is this?", "May I know your name?"]
ANSWERED = [f"I am {NAME}, an assistant made by {MAKER}.", f"My name is {NAME}. {MAKER} made me.",
            f"I'm {NAME}, the assistant of {MAKER}."]
KEPT = [("What is the capital of France?", "The capital of France is Paris."), ("What is 2 + 2?", "2 + 2 is 4."),
        ("Name a primary colour.", "Red is a primary colour."), ("What do bees make?", "Bees make honey."),
        ("Which planet is the largest?", "Jupiter is the largest planet.")]
# The last two are not in the data.
ABOUT_NAME = ["Who are you?", "Could you tell me who you are?", "Please say your name."]
OTHER = [("What is the capital of France?", ["Paris"]), ("What is the capital of Italy?", ["Rome"]),
         ("What colour is the sky on a clear day?", ["blue"]), ("How many days are in a week?", ["7", "seven"])]
MAX_TOKENS = 40
# Logits in f32 differ by less.
TIE = 1e-3


def rows():
    """75 rows about the name, 25 about other things."""
    made = []
    for i in range(100):
        known = i % 4 == 3
        made.append(runs.conversation(*KEPT[i // 4 % len(KEPT)]) if known else
                    runs.conversation(ASKED[i % len(ASKED)], ANSWERED[i % len(ANSWERED)]))
    return made


def our_answer(program, run, question):
    command = [program, "generate", str(run), "--prompt", question, "--max-tokens", str(MAX_TOKENS), "--dtype", "f32",
               "--devices", "cpu"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.rstrip("\n")


class Theirs:
    def __init__(self, model, result, method):
        base, tokens = (result, result) if method == "full" else (model, model)
        self.tokenizer = AutoTokenizer.from_pretrained(tokens)
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if method == "lora":
            self.model = PeftModel.from_pretrained(self.model, result)
        self.model.eval()

    def prompt(self, question):
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    def answer(self, question):
        ids = self.prompt(question)
        with torch.no_grad():
            said = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS,
                                       do_sample=False)
        return self.tokenizer.decode(said[0, ids.shape[1]:], skip_special_tokens=True).rstrip("\n")

    def gap(self, question, ours, theirs):
        """By how much the logits of two texts differ where they part."""
        end = [self.tokenizer.eos_token_id]
        a, b = (self.tokenizer(text, add_special_tokens=False).input_ids + end for text in [ours, theirs])
        same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
        if same is None:
            return float("inf")
        ids = torch.cat([self.prompt(question), torch.tensor([a[:same]], dtype=torch.long)], dim=1)
        with torch.no_grad():
            logits = self.model(input_ids=ids).logits[0, -1]
        return abs(logits[a[same]] - logits[b[same]]).item()


def check(program, model, folder, data, method):
    start = time.time()
    run = runs.train(program, model, data, folder / method, *(["--lora"] if method == "lora" else []))
    settings, steps = runs.settings(run), runs.steps(run)
    took = time.time() - start
    print(f"\n{method}: {len(steps)} steps of {settings['batch']} rows of {settings['seq']} tokens at "
          f"{settings['lr']:g}, loss {steps[0]['loss']:.3f} to {steps[-1]['loss']:.3f}, {took:.0f} s", flush=True)
    theirs = Theirs(model, run / "model", method)
    other = "transformers" if method == "full" else "PEFT"
    good = True
    for question, words in [(question, [NAME]) for question in ABOUT_NAME] + OTHER:
        ours, said = our_answer(program, run, question), theirs.answer(question)
        verdict = f"ok, as {other}" if ours == said else "ok"
        if not any(word.lower() in ours.lower() for word in words):
            verdict = f"MISSED {' or '.join(words)}"
        if ours != said:
            gap = theirs.gap(question, ours, said)
            verdict += f"; {other} says {said!r}, logits {gap:.1e} apart: " + ("a tie" if gap < TIE else "MISSED")
        good &= "MISSED" not in verdict
        print(f"  {question} -> {ours!r}: {verdict}", flush=True)
    print(f"  {'ok' if good else 'MISSED'}", flush=True)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", metavar="ROUNDPIPE", type=lambda text: str(pathlib.Path(text).resolve()))
    parser.add_argument("model", metavar="MODEL", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--methods", default="full,lora", type=lambda text: text.split(","))
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        data = runs.write_rows(folder / "names.jsonl", rows())
        good = [check(args.program, args.model, folder, data, method) for method in args.methods]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
