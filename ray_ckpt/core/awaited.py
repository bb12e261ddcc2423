"""Ranks for which other ranks wait, with texts for the logs of ranks and for status."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ray_ckpt.core.values import RankProgress

AWAITED_AFTER_S = 5.0  # ranks reach the same step within this time, unless one evaluates or takes no part
MAX_NAMED = 20  # ranks listed in a text
AwaitedKind: TypeAlias = Literal["restore", "save", "report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """Ranks for which other ranks have waited at a restore, a save or a report for `since_s` seconds."""

    what: AwaitedKind
    step: int  # the step of the save or the report; 0 for a restore
    ranks: tuple[int, ...]  # the lowest MAX_NAMED of the awaited ranks
    since_s: float  # seconds since the first other rank has come
    speaker: int  # the lowest rank that waits: the rank that logs the text for all
    text: str


Progress: TypeAlias = Mapping[int, RankProgress]


def awaited_restore(missing: tuple[int, ...], since_s: float) -> Awaited:
    why = "Every rank must make a Checkpointer and call restore() or steps()."
    return _awaited("restore", 0, missing, since_s, "The restore", f". {why}")


def awaited_save(step: int, missing: tuple[int, ...], since_s: float, progress: Progress) -> Awaited:
    why = f"{where_text(missing[0], progress)}. Call step (or save) on every rank, for the same steps."
    return _awaited("save", step, missing, since_s, f"The save of step {step}", f"; {why}")


def awaited_report(step: int, missing: tuple[int, ...], since_s: float, progress: Progress) -> Awaited:
    why = f"{where_text(missing[0], progress)}. Call step on every rank, after every step."
    return _awaited("report", step, missing, since_s, f"The report to Ray Train at step {step}", f"; {why}")


def _awaited(
    what: AwaitedKind, step: int, missing: tuple[int, ...], since_s: float, subject: str, rest: str
) -> Awaited:
    text = f"{subject} waits for rank(s) {ranks_text(missing)}, {since_s:.0f} s by now{rest}"
    speaker = next((i for i, rank in enumerate(missing) if rank != i), len(missing))  # `missing` is sorted
    ranks = missing[:MAX_NAMED]
    return Awaited(what=what, step=step, ranks=ranks, since_s=since_s, speaker=speaker, text=text)


def where_text(rank: int, progress: Progress) -> str:
    """Return the last report of a rank as a text, such as `rank 1 has completed step 9 last`."""
    reported = progress.get(rank)
    if reported is None:
        return f"rank {rank} has reported nothing since the restore"
    did = "ended its loop with" if reported.is_over else "completed"
    return f"rank {rank} has {did} step {reported.step} last"


def ranks_text(ranks: Collection[int]) -> str:
    """Return the lowest MAX_NAMED ranks as a text, such as `1, 2, 3`, and the number of the others."""
    named = ", ".join(map(str, sorted(ranks)[:MAX_NAMED]))
    more = len(ranks) - MAX_NAMED
    return f"{named} and {more} more" if more > 0 else named
