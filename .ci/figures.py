#!/usr/bin/env python3
"""Prints how dense the code is. Run from the repository root.

A token is an identifier, a number or one punctuation character; comments, strings, test modules,
tests, benches and examples are left out.
"""

import re
import subprocess
from collections import defaultdict

BANNED = r"\b(nobody|somebody|whoever|everybody|is told|are told|was told|one's own)\b"
FILES = subprocess.run(["git", "ls-files", "crates/*/src/*.rs"], capture_output=True, text=True, check=True)


def blank(text: str) -> str:
    """Without comments and the contents of strings."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def without_tests(text: str) -> str:
    at = re.search(r"#\[cfg\((all\()?test", text)
    return text[: at.start()] if at else text


def functions(code: str):
    """The tokens of each function's body."""
    for found in re.finditer(r"\bfn\s+(\w+)[^;{]*\{", code):
        depth, end = 1, found.end()
        while depth and end < len(code):
            depth += {"{": 1, "}": -1}.get(code[end], 0)
            end += 1
        yield found.group(1), len(re.findall(r"\w+|[^\w\s]", code[found.start() : end]))


def share(values, part):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * part))] if values else 0


def report(name: str, files: list[str]):
    lines = tokens = inline = banned = 0
    sizes, longest = [], (0, "")
    for file in files:
        text = without_tests(open(file, encoding="utf-8").read())
        code = blank(text)
        rows = [row for row in code.splitlines() if row.strip()]
        lines += len(rows)
        tokens += sum(len(re.findall(r"\w+|[^\w\s]", row)) for row in rows)
        inline += len(re.findall(r"^\s*// ", text, flags=re.M))
        banned += len(re.findall(BANNED, text, flags=re.I))
        sizes += [size for _, size in functions(code)]
        longest = max(longest, (len(text.splitlines()), file))
    print(
        f"{name:28} {lines:6} lines  {tokens / max(lines, 1):4.1f} tokens a line  per function p50/p90/p99 "
        f"{share(sizes, 0.5)}/{share(sizes, 0.9)}/{share(sizes, 0.99)}  comments {100 * inline / max(lines, 1):.1f} "
        f"per 100  banned words {banned}  longest {longest[0]} {longest[1]}"
    )


def main():
    files = FILES.stdout.split()
    report("all", files)
    for crate in ["roundpipe-tensor", "roundpipe-files", "roundpipe", "roundpipe-chat", "roundpipe-models", "roundpipe-cli"]:
        report(crate, [file for file in files if file.startswith(f"crates/{crate}/")])
    walk = [file for file in files if re.search(r"crates/roundpipe/src/(exec|engine)", file)]
    report("exec/ and engine/", walk)
    types = defaultdict(set)
    for file in files:
        for name in re.findall(r"^\s*(?:pub(?:\([^)]*\))? )?(?:struct|enum|trait) (\w+)", blank(open(file, encoding="utf-8").read()), flags=re.M):
            types[name].add(file)
    shared = sorted(name for name, where in types.items() if len(where) > 1 and name not in ("Error", "Result"))
    print(f"{len(types)} type names, {len(shared)} of them in several files: {' '.join(shared)}")
    kinds = subprocess.run(["git", "grep", "-lw", "DeviceKind", "--", "crates/*/src/*.rs"], capture_output=True, text=True, check=False)
    outside = [file for file in kinds.stdout.split() if not re.search(r"/(cpu|cuda|sim|meta|device|devices|lib)(/|\.rs)", file)]
    print(f"DeviceKind outside backends and devices.rs: {len(outside)} files: {' '.join(outside)}")


if __name__ == "__main__":
    main()
