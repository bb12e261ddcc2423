"""Command that plays restarts: `python -m tests.actors.prefetch_restarts --seeds 0:125`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from tests.actors.prefetch_restarts.schedule import NUM_RESTARTS, play

MAX_SHOWN = 5  # failures printed in full


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.actors.prefetch_restarts", description=__doc__)
    parser.add_argument("--seeds", default="0:125", help="first:last+1")
    parser.add_argument("--restarts", type=int, default=NUM_RESTARTS, help="at least so many for each seed")
    arguments = parser.parse_args()
    first, last = (int(number) for number in arguments.seeds.split(":"))
    logging.getLogger("ray_ckpt").setLevel(logging.CRITICAL)
    counts: Counter[str] = Counter()
    began_s = time.monotonic()
    for seed in range(first, last):
        try:
            counts += play(seed, arguments.restarts)
        except Exception as error:
            counts["violations"] += 1
            if counts["violations"] <= MAX_SHOWN:
                print(f"seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
                for note in getattr(error, "__notes__", ()):
                    print(f"  {note}", file=sys.stderr)
    seconds = time.monotonic() - began_s
    print(f"restarts: seeds {first} to {last - 1}, {seconds:.1f} s")
    for name, count in sorted(counts.items()):
        if name != "violations":
            print(f"  {count:14,} {name}")
    print(f"  {counts['violations']:14,} violations")
    return 1 if counts["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
