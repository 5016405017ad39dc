#!/usr/bin/env python3
"""Opens GGUF files of `roundpipe export` with llama.cpp, and compares tokens and greedy text with ours.

    python3 checks/llama_cpp_files.py ROUNDPIPE MODEL… [--made DIR --tokenizer MODEL] [--tokens 64] [--devices cpu]
    python3 checks/llama_cpp_files.py ROUNDPIPE MODEL… --convert llama.cpp/convert_hf_to_gguf.py --convert-python PYTHON

ROUNDPIPE is the program, each MODEL a Hugging Face folder with a tokenizer.json. With --made, small models with random
weights are made in DIR with the byte-level tokenizer of another, under several splitting rules, and checked too: a Qwen2, a Qwen3, a Qwen3-MoE, a GPT-OSS
and a Llama with Llama 3's rotary scaling. For each model:

- hard texts have the same tokens in llama.cpp as in the tokenizers library;
- the greedy text of the f16 and f32 files is that of `roundpipe generate --raw --dtype f16` (f32), token for token; or, at
  the first difference, the two tokens are llama.cpp's two best and closer than 16-bit arithmetic can tell (f16) or 1e-3
  (f32);
- bf16, q8_0 and q4_0 files open, and give the f16 text a likelihood that is close to its own (with random weights, which
  nothing has made robust: that is better than chance).

With --convert, llama.cpp's own script writes the model as well, and tensors and keys are compared byte by byte.
Needs llama-cpp-python, gguf, tokenizers, safetensors, numpy; --convert needs a Python with torch and transformers.
"""
import argparse
import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile

import gguf
import llama_cpp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0"]
PROMPTS = ["Once upon a time, there was a little girl named Lily. She", "The capital of France is"]
# Logits of 16-bit activations differ by more than those of f32.
TIE = {"f16": 0.15, "f32": 1e-3}
# Nats per token that the text of f16 may be less likely.
LOST = {"f32": 0.02, "bf16": 0.1, "q8_0": 0.1, "q4_0": 1.5}
HARD = [
    "", " ", "a", " a", "  a  b   c    ", "\n", "\n\n\n", "a\nb\r\nc\td\t\t", "Hello, world!", "HELLO's, I'VE he'll we'D",
    "don't DON'T don’t", "1234567890", "3.14159 and 1,000,000 or 0xFF", "x=1;y=2", "year2024month11", "½ ² ① Ⅷ ٣٤٥",
    "naïve café façade", "Straße größer ÄÖÜ", "Привет, мир", "γεια σου κόσμε", "你好，世界。今天天气很好", "こんにちは、カタカナ",
    "안녕하세요 세계", "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดีชาวโลก", "🚀 😶‍🌫️ 👩‍👩‍👧‍👦 🏳️‍🌈", "a\u200db\u00a0c\u3000d", "\u0001\u0002\u007f",
    "def f(x):\n    return x**2  # squared\n\n\n\nclass A:\n\tpass", "{\"a\": [1, 2, {\"b\": null}]}", "<html><b>x</b></html>",
    "https://example.com/a?b=c&d=e#f", "a" * 100, " " * 33 + "x", "!!!???...,,,;;;", "''''````\"\"\"\"", "~!@#$%^&*()_+-=[]{}|\\",
    "foo_bar-baz/qux.quux", "The quick brown fox", "I'm 25, it's 3:45pm—don't be late…", "e\u0301 decomposed", "\u2581 \u2581x",
]


def run(command, **more):
    # As bytes: Python would change line ends.
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, **more).stdout.decode()


class Opened:
    """A file opened by llama.cpp."""

    def __init__(self, path, wide=False):
        """`wide` keeps keys and values in f32; by default they are f16."""
        cache = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32} if wide else {}
        self.llm = llama_cpp.Llama(model_path=str(path), n_ctx=256, n_batch=256, n_threads=1, n_threads_batch=1,
                                   logits_all=True, verbose=False, **cache)

    def ids(self, text, bos):
        return self.llm.tokenize(text.encode(), add_bos=bos, special=True)

    def greedy(self, prompt, count, stop):
        """Ids, and the logits each was chosen from."""
        self.llm.reset()
        self.llm.eval(prompt)
        said, logits = [], []
        for _ in range(count):
            scores = np.array(self.llm.scores[self.llm.n_tokens - 1], dtype=np.float64)
            token = int(scores.argmax())
            logits.append(scores)
            if token in stop:
                break
            said.append(token)
            self.llm.eval([token])
        return said, logits

    def nats(self, prompt, said):
        """Mean negative log-likelihood of a continuation."""
        self.llm.reset()
        self.llm.eval(prompt + said)
        scores = np.array(self.llm.scores[len(prompt) - 1:len(prompt) + len(said) - 1], dtype=np.float64)
        top = scores.max(1)
        norm = top + np.log(np.exp(scores - top[:, None]).sum(1))
        return float((norm - scores[np.arange(len(said)), said]).mean())


class Model:
    def __init__(self, program, folder, devices, is_random):
        self.program, self.folder, self.devices, self.is_random = program, folder, devices, is_random
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.config = json.loads((folder / "config.json").read_text())
        stop = self.config.get("eos_token_id")
        self.stop = set(stop if isinstance(stop, list) else [stop])
        settings = folder / "tokenizer_config.json"
        if settings.exists():
            token = json.loads(settings.read_text()).get("eos_token")
            token = token["content"] if isinstance(token, dict) else token
            self.stop.add(self.tokenizer.token_to_id(token) if token else None)

    def export(self, dtype, out):
        return run([self.program, "export", self.folder, "--to", "gguf", "--dtype", dtype, "--out", out])

    def ours(self, prompt, dtype, count):
        text = run([self.program, "generate", self.folder, "--raw", "--prompt", prompt, "--max-tokens", count, "--dtype",
                    dtype, "--devices", self.devices])
        return text[:-1]

    def text(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def check_tokens(model, opened):
    """Hard texts, with and without what stands around a text."""
    # One that is normalized first is found in a text only where the normalizer leaves it alone.
    added = model.tokenizer.get_added_tokens_decoder().values()
    special = [token.content for token in added if token.special and not token.normalized][:3]
    texts = HARD + ["x".join(special), "".join(f"{token}\nhello" for token in special)]
    wrong = []
    for text in texts:
        for bos in (False, True):
            want = model.tokenizer.encode(text, add_special_tokens=bos).ids
            got = opened.ids(text, bos)
            if got != want:
                wrong.append((text, want, got))
    print(f"  tokens: {len(texts) * 2 - len(wrong)} of {len(texts) * 2} encodings are the same")
    for text, want, got in wrong:
        print(f"    {text!r}: tokenizers {want[:12]}, llama.cpp {got[:12]}")
    return [case for case in wrong if not is_known(case[0], model)]


def is_known(text, model):
    """llama.cpp does not normalize, so that texts whose NFC is another have other tokens."""
    normalizer = model.tokenizer.normalizer
    return normalizer is not None and type(normalizer).__name__ == "NFC" and normalizer.normalize_str(text) != text


def check_text(model, opened, dtype, count):
    failed = 0
    for prompt in PROMPTS:
        ids = model.tokenizer.encode(prompt).ids
        theirs, logits = opened.greedy(ids, count, model.stop)
        ours = model.ours(prompt, dtype, count)
        if model.text(theirs) == ours:
            print(f"  {dtype}: {len(theirs)} tokens are the same: {ours[:60]!r}…")
            continue
        at = next(n for n in range(len(theirs) + 1) if n == len(theirs) or not ours.startswith(model.text(theirs[:n + 1])))
        at = min(at, len(logits) - 1)
        scores = logits[at]
        best, second = np.argsort(scores)[-2:][::-1]
        margin = scores[best] - scores[second]
        swapped = ours.startswith(model.text(theirs[:at] + [int(second)]))
        tie = swapped and margin < TIE[dtype]
        failed += not tie
        print(f"  {dtype}: differs at token {at}: best {model.text([int(best)])!r} {scores[best]:.4f}, second "
              f"{model.text([int(second)])!r} {scores[second]:.4f}, margin {margin:.2e}; ours takes "
              f"{'the second' if swapped else 'another'}{'' if tie else ': FAILED'}")
    return failed


def check_likelihood(model, files, count):
    reference = Opened(files["f16"])
    prompt = model.tokenizer.encode(PROMPTS[0]).ids
    said, _ = reference.greedy(prompt, count, model.stop)
    own = reference.nats(prompt, said)
    del reference
    failed = 0
    for dtype in ("f32", "bf16", "q8_0", "q4_0"):
        opened = Opened(files[dtype])
        nats = opened.nats(prompt, said)
        theirs, _ = opened.greedy(prompt, count, model.stop)
        same = next((n for n, pair in enumerate(zip(theirs, said)) if pair[0] != pair[1]), min(len(theirs), len(said)))
        chance = math.log(model.config["vocab_size"])
        good = nats < chance if model.is_random else nats - own < LOST[dtype]
        failed += not good
        print(f"  {dtype}: {nats:.4f} nats per token of f16's text (f16 {own:.4f}), {same} of {len(said)} greedy tokens the "
              f"same, {files[dtype].stat().st_size / 1e6:.1f} MB{'' if good else ': FAILED'}")
    return failed


# The script knows the splitting rules of published tokenizers only, and stops at others.
CONVERT = """
import pathlib, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent / 'gguf-py'))
import conversion.base
known = conversion.base.TextModel.get_vocab_base_pre
def name(self, tokenizer):
    try:
        return known(self, tokenizer)
    except NotImplementedError:
        return 'not known'
conversion.base.TextModel.get_vocab_base_pre = name
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def check_converted(model, files, script, python, work):
    """Beside what llama.cpp's own script writes."""
    failed = 0
    for dtype in ("f32", "f16", "bf16", "q8_0"):
        theirs = work / f"theirs-{dtype}.gguf"
        run([python, "-c", CONVERT, script, model.folder, "--outtype", dtype, "--outfile", theirs],
            stderr=subprocess.DEVNULL)
        want, got = gguf.GGUFReader(theirs), gguf.GGUFReader(files[dtype])
        ours = {tensor.name: tensor for tensor in got.tensors}
        equal = 0
        for tensor in want.tensors:
            mine = ours.pop(tensor.name, None)
            same = mine is not None and mine.tensor_type == tensor.tensor_type and list(mine.shape) == list(tensor.shape)
            if same and tensor.name == "rope_freqs.weight":
                same = np.allclose(mine.data, tensor.data, rtol=1e-6)
            elif same:
                same = np.array_equal(mine.data, tensor.data)
            equal += same
            if not same:
                print(f"    {tensor.name}: differs")
        names = [name for name in want.fields if not name.startswith(("GGUF.", "general."))]
        fields = 0
        for name in names:
            value = want.fields[name].contents()
            mine = got.fields[name].contents() if name in got.fields else None
            if value == mine:
                fields += 1
            elif name == "tokenizer.ggml.scores":
                print("    tokenizer.ggml.scores: the script's are all alike without tokenizer.model; ours are the merges' order")
            else:
                print(f"    {name}: theirs {str(value)[:60]}, ours {str(mine)[:60]}")
        print(f"  {dtype}: {equal} of {len(want.tensors)} tensors are the script's, {len(ours)} more; {fields} of {len(names)} "
              "keys")
        failed += equal != len(want.tensors) or bool(ours)
        theirs.unlink()
    return failed


QWEN_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
              r"\s+(?!\S)|\s+")
LLAMA_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def split(regex):
    rule = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [rule, BYTES]}


DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                                {**BYTES, "use_regex": True, "trim_offsets": True}]}


def make(folder, tokens, kind):
    """A small model with random weights, large enough for text that is not one token again and again."""
    rng = np.random.default_rng(7)
    tokenizer = json.loads((tokens / "tokenizer.json").read_text())
    vocab = 1 + max(max(tokenizer["model"]["vocab"].values()), max(t["id"] for t in tokenizer["added_tokens"]))
    rows = (vocab + 70) // 64 * 64
    hidden, layers, heads, kv, dim, inner = 128, 3, 4, 2, 32, 256
    config = {"vocab_size": rows, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
              "num_key_value_heads": kv, "intermediate_size": inner, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
              "hidden_act": "silu", "rope_theta": 10000.0, "dtype": "float16", "tie_word_embeddings": False,
              "eos_token_id": 2, "bos_token_id": 1}
    experts, top = 8, 2
    named = {"qwen2": ("qwen2", "Qwen2ForCausalLM", split(QWEN_SPLIT)), "qwen3": ("qwen3", "Qwen3ForCausalLM", DIGITS),
             "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM", split(QWEN_SPLIT)),
             "gpt_oss": ("gpt_oss", "GptOssForCausalLM", split(LLAMA_SPLIT)),
             "llama3": ("llama", "LlamaForCausalLM", split(LLAMA_SPLIT))}
    family, architecture, pre = named[kind]
    config.update(model_type=family, architectures=[architecture])
    if kind in ("qwen3", "qwen3_moe", "gpt_oss"):
        dim = 64
        config["head_dim"] = dim
    if kind == "qwen2":
        config["tie_word_embeddings"] = True
    if kind == "qwen3_moe":
        config.update(num_experts=experts, num_experts_per_tok=top, moe_intermediate_size=64, norm_topk_prob=True,
                      decoder_sparse_step=1, mlp_only_layers=[])
    if kind == "gpt_oss":
        config.update(num_local_experts=experts, num_experts_per_tok=top, intermediate_size=64, sliding_window=16,
                      attention_bias=True, num_hidden_layers=4,
                      layer_types=["sliding_attention", "full_attention"] * 2, rope_theta=150000.0,
                      rope_scaling={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                    "original_max_position_embeddings": 4096, "truncate": True})
        layers = 4
    if kind == "llama3":
        config["rope_scaling"] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                  "original_max_position_embeddings": 64}
        tokenizer["model"]["ignore_merges"] = True
    tokenizer["pre_tokenizer"] = pre

    def normal(*shape, scale=None):
        scale = scale or 1.6 / math.sqrt(shape[-1])
        return (rng.standard_normal(shape) * scale).astype(np.float16)

    def norm(width):
        return (1 + 0.2 * rng.standard_normal(width)).astype(np.float16)

    tensors = {"model.embed_tokens.weight": normal(rows, hidden, scale=0.5), "model.norm.weight": norm(hidden)}
    # Rows that no token has are never the best.
    tensors["model.embed_tokens.weight"][vocab:] = 0
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(rows, hidden, scale=0.3)
        tensors["lm_head.weight"][vocab:] = 0
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors[f"{at}.input_layernorm.weight"] = norm(hidden)
        tensors[f"{at}.post_attention_layernorm.weight"] = norm(hidden)
        sizes = {"q": (heads * dim, hidden), "k": (kv * dim, hidden), "v": (kv * dim, hidden), "o": (hidden, heads * dim)}
        for name, (outputs, inputs) in sizes.items():
            tensors[f"{at}.self_attn.{name}_proj.weight"] = normal(outputs, inputs)
            if kind == "gpt_oss" or (kind == "qwen2" and name != "o"):
                tensors[f"{at}.self_attn.{name}_proj.bias"] = normal(outputs, scale=0.1)
        if kind in ("qwen3", "qwen3_moe"):
            tensors[f"{at}.self_attn.q_norm.weight"] = norm(dim)
            tensors[f"{at}.self_attn.k_norm.weight"] = norm(dim)
        if kind == "qwen3_moe":
            tensors[f"{at}.mlp.gate.weight"] = normal(experts, hidden)
            for expert in range(experts):
                for name, shape in (("gate", (64, hidden)), ("up", (64, hidden)), ("down", (hidden, 64))):
                    tensors[f"{at}.mlp.experts.{expert}.{name}_proj.weight"] = normal(*shape)
        elif kind == "gpt_oss":
            tensors[f"{at}.self_attn.sinks"] = normal(heads, scale=1.0)
            tensors[f"{at}.mlp.router.weight"] = normal(experts, hidden)
            tensors[f"{at}.mlp.router.bias"] = normal(experts, scale=0.1)
            tensors[f"{at}.mlp.experts.gate_up_proj"] = normal(experts, hidden, 128, scale=0.12)
            tensors[f"{at}.mlp.experts.gate_up_proj_bias"] = normal(experts, 128, scale=0.1)
            tensors[f"{at}.mlp.experts.down_proj"] = normal(experts, 64, hidden, scale=0.2)
            tensors[f"{at}.mlp.experts.down_proj_bias"] = normal(experts, hidden, scale=0.1)
        else:
            for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                tensors[f"{at}.mlp.{name}_proj.weight"] = normal(*shape)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (tokens / name).exists():
            shutil.copy(tokens / name, folder / name)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("models", type=pathlib.Path, nargs="*")
    parser.add_argument("--made", type=pathlib.Path)
    parser.add_argument("--tokenizer", type=pathlib.Path)
    parser.add_argument("--kinds", default="qwen2,qwen3,qwen3_moe,gpt_oss,llama3")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--convert", type=pathlib.Path)
    parser.add_argument("--convert-python", default=sys.executable)
    options = parser.parse_args()
    models = list(options.models)
    if options.made:
        for kind in options.kinds.split(","):
            folder = options.made / kind
            shutil.rmtree(folder, ignore_errors=True)
            make(folder, options.tokenizer, kind)
            models.append(folder)
    failed = 0
    for folder in models:
        model = Model(options.program, folder, options.devices, folder not in options.models)
        print(f"{folder.name}: {model.config['model_type']}, {model.config['num_hidden_layers']} blocks")
        with tempfile.TemporaryDirectory() as work:
            work = pathlib.Path(work)
            files = {dtype: work / f"{dtype}.gguf" for dtype in TYPES}
            for dtype, out in files.items():
                model.export(dtype, out)
            if options.convert:
                failed += check_converted(model, files, options.convert, options.convert_python, work)
            opened = Opened(files["f16"])
            failed += len(check_tokens(model, opened))
            failed += check_text(model, opened, "f16", options.tokens)
            del opened
            failed += check_text(model, Opened(files["f32"], wide=True), "f32", options.tokens)
            failed += check_likelihood(model, files, options.tokens)
        sys.stdout.flush()
    print("all as it should be" if not failed else f"{failed} FAILED")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
