"""Judge a run from outside: the log, the storage path and the ranks' journal, nothing else.

Run as a process of its own, so that it knows nothing of the cluster:
`python -m tests.fault.oracle RUN_FOLDER JOURNAL_FOLDER`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.types import CheckpointInfo, Level
from tests.fault.journal import Entry, read

LEVELS = {level.label: level for level in Level}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Counts, and every broken promise in words."""

    commits: int
    sessions: int
    restores: int
    acked: int
    lost: tuple[str, ...]  # P2: acknowledged and not in the log at that level, or gone without a successor
    doubled: tuple[str, ...]  # P3: a step twice within a lineage
    wrong: tuple[str, ...]  # P4: bytes that differ

    @property
    def problems(self) -> tuple[str, ...]:
        return (*self.lost, *self.doubled, *self.wrong)


def judge(run: str | Path, journal: Path) -> Verdict:
    """Read everything and compare. A log with a gap or a broken chain raises FormatError (P3)."""
    catalog, entries = Catalog(run), read(journal)
    acked = [entry for entry in entries if entry.kind == "acked"]
    return Verdict(
        commits=len(catalog.list(all=True)),
        sessions=len(catalog.sessions),
        restores=sum(entry.kind == "restored" and entry.step > 0 for entry in entries),
        acked=len({(entry.attempt, entry.level) for entry in acked}),
        lost=tuple(_lost(catalog, acked)),
        doubled=tuple(_doubled(catalog)),
        wrong=(*_wrong_states(entries), *_wrong_files(catalog)),
    )


def _lost(catalog: Catalog, acked: list[Entry]) -> Iterator[str]:
    known = {c.id.attempt: c for c in catalog.list(all=True)}
    for entry in acked:
        found, level = known.get(entry.attempt), LEVELS[entry.level]
        what = f"step {entry.step} ({entry.attempt}, acknowledged as {entry.level})"
        if found is None:
            yield f"{what} is not in the log"
        elif found.level < level:
            yield f"{what} is {found.level.label} in the log"
        elif found.state == "lost":
            yield f"{what} is recorded as lost"
        elif found.state != "live" and not _has_successor(catalog, found, level):
            yield f"{what} is {found.state}, and nothing newer has its level"


def _has_successor(catalog: Catalog, retired: CheckpointInfo, level: Level) -> bool:
    return any(c.seq > retired.seq and c.level >= level for c in catalog.checkpoints)


def _doubled(catalog: Catalog) -> Iterator[str]:
    for a, b in pairwise(catalog.lineage):
        if b.step <= a.step:
            yield f"step {b.step} of session {b.id.session} comes after step {a.step} of {a.id.session}"
    commits: dict[tuple[int, int], int] = defaultdict(int)
    for c in catalog.list(all=True):
        commits[c.id.session, c.step] += 1
    for (session, step), count in commits.items():
        if count > 1:
            yield f"step {step} of session {session} is committed {count} times"


def _wrong_states(entries: tuple[Entry, ...]) -> Iterator[str]:
    reached: dict[tuple[int, int], set[str]] = defaultdict(set)
    for entry in entries:
        if entry.kind == "reached" or (entry.kind == "restored" and entry.step > 0):
            reached[entry.rank, entry.step].add(entry.digest)
    for (rank, step), digests in sorted(reached.items()):
        if len(digests) > 1:
            yield f"rank {rank} had {len(digests)} different states after step {step}"


def _wrong_files(catalog: Catalog) -> Iterator[str]:
    for view in catalog:
        if view.where is not None:
            for damage in view.verify():
                yield f"step {view.info.step} on the storage path: {damage.file} {damage.where}"


def judge_afresh(run: str | Path, journal: Path) -> Verdict:
    """Return the verdict of a fresh process."""
    command = [sys.executable, "-m", "tests.fault.oracle", str(run), str(journal)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"the log cannot be read: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return Verdict(**found)


if __name__ == "__main__":
    print(json.dumps(asdict(judge(sys.argv[1], Path(sys.argv[2])))))
