"""Shows that `roundpipe verify` finds faults: python3 checks/planted.py [--profile dev] [--target FOLDER]

Builds the program with the feature `planted-faults` in a target folder of its own, runs `verify --quick` without a
fault, which must hold, and with each fault of crates/roundpipe/src/planted.rs, which must fail in the claims that the
fault breaks. An ordinary program is not touched and knows no fault.
"""
import argparse
import json
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent

# The fault, and claims that must not hold with it. Others may fail too.
FAULTS = {
    "missing-event": {"every copy is ordered"},
    "rounded-twice": {"engine = plain loop"},
    "second-worker": {"1 worker = 3 workers", "resident = offloaded"},
    "no-moments": {"resumed = uninterrupted"},
    "late-moments": {"weights first = in one pass"},
}
# Claims that must hold all the same: a fault is found where it is, not everywhere.
UNTOUCHED = {
    "missing-event": {"engine = plain loop", "packed = unpacked rows"},
    "rounded-twice": {"packed = unpacked rows", "resumed = uninterrupted"},
    "second-worker": {"engine = plain loop", "stage grain = layer grain"},
    "no-moments": {"engine = plain loop", "1 worker = 3 workers", "every copy is ordered"},
    "late-moments": {"engine = plain loop", "resumed = uninterrupted"},
}


def build(profile, target):
    command = ["cargo", "build", "-q", "-p", "roundpipe-cli", "--features", "planted-faults", "--profile", profile]
    subprocess.run([*command, "--target-dir", str(target)], check=True, cwd=ROOT)
    return target / {"dev": "debug"}.get(profile, profile) / "roundpipe"


def verify(program, fault=None):
    """The report of a run, and its status."""
    environment = {k: v for k, v in os.environ.items() if k != "ROUNDPIPE_PLANTED_FAULT"}
    if fault:
        environment["ROUNDPIPE_PLANTED_FAULT"] = fault
    command = [program, "verify", "--quick", "--devices", "cpu", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if not done.stdout:
        raise SystemExit(f"verify with {fault or 'no fault'} ended with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout), done.returncode


def broken(report):
    """Claims that do not hold for some subject, with the first comparison of each."""
    found = {}
    for comparison in report["comparisons"]:
        if comparison["outcome"] == "differs":
            found.setdefault(comparison["claim"], comparison)
    return found


def line(comparison):
    differ = sum(counted["differ"] for counted in comparison["counted"])
    values = sum(counted["values"] for counted in comparison["counted"])
    return f"{comparison['claim']} ({comparison['subject']}): {differ} of {values} differ; {comparison['note']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="release", help="cargo's profile")
    parser.add_argument("--target", type=pathlib.Path, default=ROOT / "target" / "planted", help="the target folder")
    arguments = parser.parse_args()
    program = build(arguments.profile, arguments.target)
    report, status = verify(program)
    assert status == 0 and report["holds"], f"without a fault: {broken(report)}"
    print(f"no fault: every claim holds, {report['values']} values in {report['seconds']:.1f} s")
    for fault, wanted in FAULTS.items():
        report, status = verify(program, fault)
        found = broken(report)
        assert status == 1 and not report["holds"], f"{fault}: verify ended with {status}"
        missed = wanted - found.keys()
        assert not missed, f"{fault}: {missed} hold; broken are {list(found)}"
        touched = UNTOUCHED[fault] & found.keys()
        assert not touched, f"{fault}: {touched} should hold"
        print(f"{fault}: found")
        for claim in found:
            print(f"    {line(found[claim])}")
    print("every planted fault was found where it is")


if __name__ == "__main__":
    main()
