"""The client's side of the story: what the ranks saw, fsynced before it counts.

One file per process, JSON lines. A line that a kill has cut off did not happen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["reached", "acked", "restored"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One observation of a rank at a step.

    reached: its state after `step` has `digest`. acked: `attempt` has reached `level` (recorded by rank 0
    only). restored: the group began with the state after `step`, with `digest`; step 0 is from scratch.
    """

    kind: Kind
    rank: int
    step: int
    digest: str = ""
    session: int = 0
    attempt: str = ""
    level: str = ""


class Journal:
    """The file of this process. An entry is on the disk when `write` returns."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / f"{rank}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._rank = rank

    def write(self, kind: Kind, step: int, **fields: Any) -> None:
        entry = Entry(kind=kind, rank=self._rank, step=step, **fields)
        os.write(self._file, (json.dumps(asdict(entry)) + "\n").encode())
        os.fsync(self._file)


def read(folder: Path) -> tuple[Entry, ...]:
    """Return all complete entries, file by file, so not in the order of time between processes."""
    return tuple(entry for path in sorted(folder.glob("*.jsonl")) for entry in _read_file(path))


def _read_file(path: Path) -> Iterator[Entry]:
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield Entry(**json.loads(line))


def last_step(folder: Path) -> int:
    """Return the last step that any rank has journalled as reached; 0 if none."""
    return max((entry.step for entry in read(folder) if entry.kind == "reached"), default=0)
