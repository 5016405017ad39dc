#!/usr/bin/env python3
"""Greedy texts of the program beside transformers', token for token.

    python3 checks/generate.py BIN MODEL [--tokens N]

BIN is a build of roundpipe, MODEL a folder with a chat template. Questions of unequal lengths are asked one by one
(`generate`) and as turns of one conversation (`chat`, which keeps its cache from turn to turn), in f32 on the
processor; transformers answers the same messages. Ends with status 1 if any text differs.
"""

import argparse
import subprocess
import sys

QUESTIONS = [
    "Hi!",
    "What is the capital of France?",
    "Name three animals that live in the sea, and say for each of them what it eats.",
    "Why?",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()

    def theirs(messages):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**ids, max_new_tokens=args.tokens, do_sample=False)
        return tokenizer.decode(out[0, ids["input_ids"].shape[1]:], skip_special_tokens=True)

    common = ["--max-tokens", str(args.tokens), "--dtype", "f32", "--devices", "cpu"]

    def run(command, **more):
        return subprocess.run(command, text=True, capture_output=True, check=True, **more).stdout

    wrong = 0
    messages = []
    for question in QUESTIONS:
        alone = theirs([{"role": "user", "content": question}])
        ours = run([args.binary, "generate", args.model, "--prompt", question, *common])
        wrong += ours != alone + "\n"
        print(f"{'same' if ours == alone + chr(10) else 'DIFFERS'}: generate {question!r}", flush=True)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": theirs(messages)})
    said = run([args.binary, "chat", args.model, "--temperature", "0", *common], input="\n".join(QUESTIONS) + "\n")
    expected = "".join(m["content"] + "\n" for m in messages if m["role"] == "assistant")
    wrong += said != expected
    print(f"{'same' if said == expected else 'DIFFERS'}: chat, {len(QUESTIONS)} turns")
    if said != expected:
        print(repr(said), repr(expected), sep="\n")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
