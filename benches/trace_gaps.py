#!/usr/bin/env python3
"""Where the workers of a trace waited: `roundpipe bench … --trace T.json`, then

    python3 benches/trace_gaps.py T.json [--least MS] [--longest N]

For each call: how long its kernels took, how long its workers computed nothing in between, and what every lane
carried meanwhile. Then waits by what came before and behind them, and the longest ones. Times are milliseconds.
"""

import argparse
import collections
import json


def lanes_of(events):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("ph") == "M" and e["name"] == "thread_name"}


def spans_of(events):
    lanes = lanes_of(events)
    for e in events:
        if e.get("ph") == "X":
            start = e["ts"] / 1e3
            yield e["pid"], lanes[e["pid"], e["tid"]], e["cat"], e["name"], start, start + e["dur"] / 1e3, e.get("args", {})


def gaps_of(compute, least):
    for before, behind in zip(compute, compute[1:]):
        if behind[4] - before[5] >= least:
            yield behind[4] - before[5], before, behind


def table(title, head, rows):
    print(f"\n{title}\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(str(cell) for cell in row)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--least", type=float, default=0.05, help="shortest wait that counts")
    parser.add_argument("--longest", type=int, default=12, help="waits to list one by one")
    args = parser.parse_args()
    with open(args.trace) as file:
        spans = sorted(spans_of(json.load(file)["traceEvents"]), key=lambda span: span[4])
    workers = sorted({span[0] for span in spans if span[1] == "compute"})
    by_pair, longest = collections.Counter(), []
    for worker in workers:
        compute = [span for span in spans if span[:2] == (worker, "compute")]
        waits = collections.Counter()
        for gap, before, behind in gaps_of(compute, args.least):
            waits[behind[6].get("call")] += gap
            by_pair[before[2], behind[2]] += gap
            longest.append((gap, before, behind))
        rows = []
        for call in sorted({span[6]["call"] for span in compute}):
            own = [span for span in compute if span[6]["call"] == call]
            first, last = own[0][4], max(span[5] for span in own)
            carried = collections.Counter()
            for span in spans:
                if span[0] == worker and span[1] != "compute" and first <= span[4] < last:
                    carried[span[1]] += span[5] - span[4]
            busy = sum(span[5] - span[4] for span in own)
            lanes = ", ".join(f"{lane} {ms:.0f}" for lane, ms in carried.most_common())
            rows.append((call, f"{last - first:.0f}", f"{busy:.0f}", f"{waits[call]:.0f}", lanes))
        table(f"worker {worker}", ["call", "from first to last", "kernels", "waits", "other lanes busy"], rows)
    pairs = ((f"{before} to {behind}", f"{ms:.1f}") for (before, behind), ms in by_pair.most_common(8))
    table("waits by neighbours", ["from what to what", "ms"], pairs)
    rows = []
    for gap, before, behind in sorted(longest, key=lambda entry: -entry[0])[: args.longest]:
        rows.append((f"{gap:.2f}", f"{before[5]:.1f}", f"{before[2]} {before[3]}", f"{behind[2]} {behind[3]}", behind[6].get("call")))
    table("longest waits", ["ms", "at", "behind", "before", "call"], rows)


main()
