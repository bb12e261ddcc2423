"""Command that plays schedules: `python -m ray_ckpt.testing --seeds 0:9 --silences 0:9 --exhaustive 6`."""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from functools import lru_cache

from ray_ckpt.format.snapshot import decode_snapshot
from ray_ckpt.storage import log_store
from ray_ckpt.testing import exhaustive, schedules, silences

_OF_OPTIONS = ("parity files", "exports", "links")  # counts that are shown only if there are any
MAX_SHOWN = 5  # failures printed in full
MAX_SNAPSHOTS = 64  # decoded ones that are kept, because many readers decode the same bytes
GC_OBJECTS = 50_000  # between collections: worlds are large, and a tenth of the time went into collections


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ray_ckpt.testing", description=__doc__)
    parser.add_argument("--seeds", type=_range, default="0:200", help="first:last+1 of the random schedules")
    parser.add_argument("--events", type=int, default=schedules.NUM_EVENTS, help="of each schedule")
    few = schedules.FEW_NODES
    sizes = f"{few.start}:{few.stop}"
    parser.add_argument(
        "--nodes", type=_sizes, default=sizes, help="first:last+1 sizes of a cluster, drawn by seed"
    )
    parser.add_argument(
        "--parity", type=_range, default="0:0", help="first:last+1 of random schedules with parity"
    )
    parser.add_argument(
        "--remote-items", type=_range, default="0:0", help="the same with items that are uploaded alone"
    )
    parser.add_argument(
        "--silences", type=_range, default="0:0", help="first:last+1 of the schedules of silent links"
    )
    parser.add_argument("--exhaustive", type=_depth, default=0, metavar="DEPTH", help="steps in every order")
    parser.add_argument("--states", type=int, default=exhaustive.MAX_STATES, help="bound of each scene")
    arguments = parser.parse_args()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)
    vars(log_store)["decode_snapshot"] = lru_cache(MAX_SNAPSHOTS)(decode_snapshot)
    failed = _random(arguments.seeds, arguments.events, arguments.nodes)
    parity = arguments.parity
    if parity:
        failed += _random(parity, arguments.events, schedules.PARITY_NODES, with_parity=True)
    items = arguments.remote_items
    if items:
        failed += _random(items, arguments.events, arguments.nodes, with_items=True)
    failed += _silences(arguments.silences)
    if arguments.exhaustive:
        failed += _exhaustive(arguments.exhaustive, arguments.states)
    return 1 if failed else 0


def _random(
    seeds: range, num_events: int, sizes: range, *, with_parity: bool = False, with_items: bool = False
) -> int:
    counts: Counter[str] = Counter()
    events: Counter[str] = Counter()
    for seed in seeds:
        try:
            options = {"with_parity": with_parity, "with_items": with_items}
            played = schedules.play(seed, num_events, sizes, **options)
        except Exception as error:
            counts["violations"] += 1
            if counts["violations"] <= MAX_SHOWN:
                _show(error)
            continue
        counts["schedules"] += 1
        counts["events"] += played.events.total()
        counts["messages"] += played.num_messages
        counts["records"] += played.num_records
        counts["commits"] += played.num_commits
        counts["parity files"] += played.num_coded
        counts["exports"] += played.num_exported
        counts["links"] += played.num_links
        counts["sessions"] += played.num_sessions
        events += played.events
    kind = "random" + " with parity" * with_parity + " with items uploaded alone" * with_items
    print(f"{kind}: seeds {seeds.start} to {seeds.stop - 1}, {num_events} events each")
    print(f"  clusters of {sizes.start} to {sizes.stop - 1} nodes")
    for name in ("schedules", "events", "messages", "records", "commits", "sessions", *_OF_OPTIONS):
        if counts[name] or name not in _OF_OPTIONS:
            print(f"  {counts[name]:12,} {name}")
    for name, count in sorted(events.items()):
        print(f"  {count:12,} {name}")
    print(f"  {counts['violations']:12,} violations")
    return counts["violations"]


def _range(text: str) -> range:
    """Return `first:last` as a range. Raise ValueError, which argparse shows, for any other text."""
    first, last = (int(number) for number in text.split(":"))
    if not 0 <= first <= last:
        raise ValueError(text)
    return range(first, last)


def _sizes(text: str) -> range:
    found = _range(text)
    if not found or not found.start:
        raise ValueError(text)
    return found


def _depth(text: str) -> int:
    if (depth := int(text)) < 0:
        raise ValueError(text)
    return depth


def _silences(seeds: range) -> int:
    failed = num_commits = 0
    for seed in seeds:
        try:
            num_commits += silences.play(seed).num_commits
        except Exception as error:
            failed += 1
            if failed <= MAX_SHOWN:
                _show(error)
    if seeds:
        print(f"silences: seeds {seeds.start} to {seeds.stop - 1}")
        print(f"  {num_commits:12,} commits\n  {failed:12,} violations")
    return failed


def _exhaustive(depth: int, max_states: int) -> int:
    failed = 0
    for name in exhaustive.SCENES:
        try:
            found = exhaustive.explore(name, depth=depth, max_states=max_states)
        except Exception as error:
            failed += 1
            _show(error)
            continue
        whole = "all" if found.is_complete else "not all"
        print(f"exhaustive: {name}, {whole} orders of up to {found.depth} steps")
        print(f"  {found.num_states:12,} states\n  {found.num_steps:12,} steps\n  {0:12,} violations")
    return failed


def _show(error: BaseException) -> None:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(f"  {note}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
