"""Parity of 6 + 2 nodes in memory: bytes of members per second of one core's CPU time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jobs.bench.context import Context
from jobs.bench.row import Reference, Row, core_rates
from ray_ckpt.format.galois import Bytes, StripeSum, solve
from ray_ckpt.restore.parity import WINDOW_BYTES

MEMBERS, LOST = 6, (4, 1)  # of a stripe; the exponents of two lost members
GB_PER_S = 2.5  # of a core, at least
TIMES = 10  # windows in a sample: 500 MB of members


def rows(context: Context) -> Iterator[Row]:
    source = np.random.default_rng(0)
    members = [source.integers(0, 256, WINDOW_BYTES, np.uint8) for _ in range(MEMBERS)]
    times = 1 if context.quick else TIMES
    stored = [_sum(members, index) for index in (0, 1)]

    def code() -> None:
        for index in (0, 1):
            _sum(members, index)

    def compute() -> None:
        left = [None if MEMBERS - 1 - at in LOST else member for at, member in enumerate(members)]
        found = solve(LOST, {index: _sum(left, index) ^ stored[index] for index in (0, 1)})
        assert all(np.array_equal(found[lost], members[MEMBERS - 1 - lost]) for lost in LOST)

    yield Row(
        name="parity-code",
        what=f"GB/s of a core, bytes of {MEMBERS} members into P and Q",
        unit="GB/s",
        samples=core_rates(code, MEMBERS * WINDOW_BYTES, times, context.repeat),
        reference=Reference(name="limit", samples=(GB_PER_S,)),
        reach=">= 1",
    )
    yield Row(
        name="parity-compute",
        what="GB/s of a core, bytes of two lost members from P, Q and the other four",
        unit="GB/s",
        samples=core_rates(compute, len(LOST) * WINDOW_BYTES, times, context.repeat),
    )


def _sum(members: list[Bytes] | list[Bytes | None], index: int) -> Bytes:
    """Return P or Q; a member that is left out is None."""
    found = StripeSum(WINDOW_BYTES, index)
    for member in members:
        found.begin()
        if member is not None:
            found.add(0, member.data)
    return found.finish()
