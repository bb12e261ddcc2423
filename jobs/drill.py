"""Recovery drills on a schedule: each turn plays a loss drawn by chance and prints its cost.

    python -m jobs.drill /shared/runs/gpt --every 60 --seed 1
    ray job submit --working-dir . -- python -m jobs.drill s3://bucket/runs/gpt --times 1

A turn loses a node, a failure domain or, if the run has durable checkpoints, all nodes; the seed and the
nodes that hold copies decide which. Every live checkpoint is read from what is left, and results go to the
run's log, as with `ray-ckpt drill`. Exits with 1 if a drill failed, else with 2 if one could not be held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from ray_ckpt.actors.attach import attached
from ray_ckpt.actors.live_run import RunDrills
from ray_ckpt.cli.drill import print_report, report_json
from ray_ckpt.cli.options import rate
from ray_ckpt.core.loss_scenarios import scenarios
from ray_ckpt.errors import CheckpointError, Unavailable
from ray_ckpt.location import locate
from ray_ckpt.verify.drill import DrillReport

MAX_MISSED = 3  # turns in a row without a drill because no service has the run; then the program ends
S_PER_MIN = 60.0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.drill",
        description="Rehearse losses of a run on a schedule.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", help="the run: <storage_path>/<run name>")
    parser.add_argument("--every", type=minutes, default=60.0, metavar="MIN", help="between two turns")
    parser.add_argument("--times", type=turns, default=0, help="turns; 0: until it is stopped")
    parser.add_argument("--seed", type=int, default=0, help="of the losses that are drawn")
    parser.add_argument("--step", type=int, help="this step alone instead of all live ones")
    parser.add_argument("--max-rate", type=rate, metavar="BYTES/S", help="read no faster, such as 200MB/s")
    parser.add_argument("--address", default="auto", help="the Ray cluster")
    parser.add_argument("--json", action="store_true", help="one JSON object per turn")
    return parser.parse_args(argv)


def minutes(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def turns(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def main(argv: Sequence[str] | None = None) -> int:
    args, out = parse(argv), sys.stdout
    try:
        with attached(args.address):
            return run_turns(args, out)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_turns(args: argparse.Namespace, out: TextIO) -> int:
    """Hold all turns and print them to `out`. Return 1 if a drill failed, 2 if one was not held."""
    location, draw = locate(args.path), random.Random(args.seed)
    turn, missed, has_failed, has_missed = 0, 0, False, False
    while True:
        start_s = time.monotonic()
        try:
            report, missed = hold(str(location), draw, args.step, args.max_rate), 0
            with contextlib.redirect_stdout(out):
                show(location.name, report, args.json)
            has_failed |= report.failed
        except CheckpointError as error:  # between two groups, or while the coordinator is restarted
            print(f"no drill: {error}", file=sys.stderr, flush=True)
            has_missed, missed = True, missed + 1
        turn += 1
        if turn == args.times or missed == MAX_MISSED:
            return 1 if has_failed else 2 if has_missed else 0
        time.sleep(max(0.0, args.every * S_PER_MIN - (time.monotonic() - start_s)))


def show(run_name: str, report: DrillReport, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report_json(report)), flush=True)
    else:
        print_report(run_name, report)


def hold(
    key: str, draw: random.Random, step: int | None, max_bytes_per_s: float | None = None
) -> DrillReport:
    """Run one drill for the loss of nodes that now hold copies. Raise Unavailable if there is no copy."""
    run = RunDrills(key, max_bytes_per_s=max_bytes_per_s)
    possible = scenarios(run.sources.live, run.sources.domains)
    if not possible:
        raise Unavailable("The run has no live checkpoint on any node or on its storage path.")
    report = run.drill(draw.choice(possible), step=step)
    for reason in run.unrecorded:
        print(f"not in the run's log: {reason}", file=sys.stderr, flush=True)
    return report


if __name__ == "__main__":
    sys.exit(main())
