"""Ranks that others wait for, with texts for the logs of ranks and for status."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ray_ckpt.core.values import RankProgress

AWAITED_AFTER_S = 5.0  # ranks of one step are this far apart at most, unless one evaluates or takes no part
MAX_NAMED = 20  # ranks in a text
AwaitedKind: TypeAlias = Literal["restore", "save", "report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """Ranks that have not reached a restore, a save or a report, for `since_s` seconds."""

    what: AwaitedKind
    step: int  # of the save or the report; 0 of a restore
    ranks: tuple[int, ...]  # the lowest MAX_NAMED of them
    since_s: float  # since the first other rank has come
    speaker: int  # the lowest rank that waits; it logs the text for all
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
    speaker = next((i for i, rank in enumerate(missing) if rank != i), len(missing))  # they are in order
    ranks = missing[:MAX_NAMED]
    return Awaited(what=what, step=step, ranks=ranks, since_s=since_s, speaker=speaker, text=text)


def where_text(rank: int, progress: Progress) -> str:
    """Return `rank 1 has completed step 9 last`."""
    reported = progress.get(rank)
    if reported is None:
        return f"rank {rank} has reported nothing since the restore"
    did = "ended its loop with" if reported.is_over else "completed"
    return f"rank {rank} has {did} step {reported.step} last"


def ranks_text(ranks: Collection[int]) -> str:
    """Return `1, 2, 3`, the lowest MAX_NAMED of them."""
    named = ", ".join(map(str, sorted(ranks)[:MAX_NAMED]))
    more = len(ranks) - MAX_NAMED
    return f"{named} and {more} more" if more > 0 else named
