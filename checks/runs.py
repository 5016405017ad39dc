"""What the checks of training share: calling `roundpipe train`, reading its folder, writing rows."""
import functools
import json
import pathlib
import subprocess
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent


def conversation(*turns, system=None):
    """A row of `messages`: what user and assistant say in turn."""
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": [{"role": "system", "content": system}] * (system is not None) + messages}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(program, model, data, out, *arguments):
    """Trains on the processor, in f32 unless told otherwise, into the folder `out`, which must be new."""
    assert not out.exists(), f"{out} is there already"
    dtype = [] if any(word.startswith("dtype=") for word in arguments) else ["dtype=f32"]
    command = [program, "train", str(model), str(data), "--out", str(out), "devices=cpu", *dtype, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\nended with {done.returncode}")
    return out


def settings(run):
    return tomllib.loads((run / "run.toml").read_text())


def lines(run):
    """The records of the run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps(run):
    """The steps in the run's metrics, in order."""
    found = [line for line in lines(run) if line["type"] == "step"]
    assert [step["step"] for step in found] == list(range(1, len(found) + 1)), "steps are missing"
    return found


@functools.cache
def examples():
    """The examples of the workspace that the checks call, built; by name."""
    wanted = {"print_batches": "roundpipe-data", "new_adapter": "roundpipe-models"}
    command = ["cargo", "build", "-q", "--release", "--message-format=json"]
    for name, crate in wanted.items():
        command += ["-p", crate, "--example", name]
    lines = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    made = [json.loads(line) for line in lines]
    return {item["target"]["name"]: item["executable"] for item in made if item.get("executable")}


def example(name, *arguments):
    """What an example of the workspace prints."""
    command = [examples()[name], *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def batches(model, data, seq, batch, packing, seed, count):
    """The batches of a run with these settings, in order; each as lists under `ids`, `labels`, `positions`, `lens`."""
    word = "true" if packing else "false"
    text = example("print_batches", model, data, seq, batch, word, seed, count)
    return [json.loads(line) for line in text.splitlines()]
