"""`python -m tests.hostile --seeds 0:2000`: what readers make of damaged and hostile files.

For each seed one file of a small run is mutated, and readers of it are called: commands of `ray-ckpt`, and
`load`. Each has to end within 20 s and 500 MB above the interpreter, with an error of ray_ckpt that names
the file, or with the answer of the undamaged run. By default each seed is read by `--readers` of them in
turn, which is what 15 minutes of one core allow; `--readers 0` takes them all.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.hostile.play import Player
from tests.hostile.readers import READERS

NUM_READERS = 4  # of a seed
SHOWN_EACH = 100  # seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="first:last+1")
    parser.add_argument("--readers", type=int, default=NUM_READERS, help="of each seed; 0: all")
    parser.add_argument("--reader", choices=READERS, help="this one only")
    arguments = parser.parse_args()
    first, last = (int(number) for number in arguments.seeds.split(":"))
    counts: Counter[str] = Counter()
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        player = Player(Path(folder) / "at")
        for seed in range(first, last):
            chosen = (arguments.reader,) if arguments.reader else some(seed, arguments.readers)
            for violation in player.play(seed, chosen):
                counts[violation.reader] += 1
                print(violation, flush=True)
            if (seed - first + 1) % SHOWN_EACH == 0:
                print(f"{seed - first + 1} seeds, {time.monotonic() - start_s:.0f} s", flush=True)
    print(f"seeds {first} to {last - 1}: {player.num_answers} answers, {player.num_errors} errors")
    print(f"  {time.monotonic() - start_s:.0f} s; slowest {player.slowest_s:.1f} s")
    print(f"  largest {player.largest_bytes / 1e6:.0f} MB; {counts.total()} violations {dict(counts)}")
    return 1 if counts else 0


def some(seed: int, count: int) -> tuple[str, ...]:
    """Return `count` readers in turn; all of them if `count` is 0."""
    count = count or len(READERS)
    return tuple(READERS[(seed * count + index) % len(READERS)] for index in range(count))


if __name__ == "__main__":
    sys.exit(main())
