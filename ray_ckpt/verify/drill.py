"""Recovery drills: read live checkpoints from the copies that a loss would leave, and keep nothing.

A drill reads each byte as a restore does, with the same retries and further sources, compares it with the
digest, and drops it. At the end the slices must cover each tensor exactly. The files of a node are read from
its agent, with the requests of a peer. A drill writes nothing and changes nothing on the nodes. Memory does
not depend on the size of the checkpoint: the limits are the manifest of one node, the largest number of
slices in a manifest, and the buffers of the few threads of a `SourceReader`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias
from zlib import crc32

from ray_ckpt.core.loss_scenarios import Leftovers, LiveCheckpoint, Scenario, leftovers
from ray_ckpt.errors import ConfigError
from ray_ckpt.format.digest import root_digest
from ray_ckpt.format.manifest import (
    MAX_ROWS,
    uncovered,
)
from ray_ckpt.restore.reader import FileSource, SourceReader
from ray_ckpt.types import (
    CheckpointInfo,
    FileEntry,
    Fragment,
    ManifestRow,
    ParityGroup,
    ProgressCallback,
    RestoredPart,
    Tier,
)
from ray_ckpt.verify.live_manifest import SHORT_ID, LiveManifest, ReadAccess

MAX_PROBLEMS = 20  # problems listed for one checkpoint; more would give no new information
MAX_SLICES = MAX_ROWS  # slices in memory for the coverage check; more need several turns: see `_uncovered`

Verdict: TypeAlias = Literal["passed", "failed", "not covered", "retired"]
"""`failed`: it must survive the loss and does not. `not covered`: it does not survive, and need not.
`retired`: it was retired while it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRead:
    """Bytes read from a tier, and the read time. `local` are bytes that a node holds for its own ranks."""

    size_bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: TierRead) -> TierRead:
        return TierRead(size_bytes=self.size_bytes + other.size_bytes, seconds=self.seconds + other.seconds)

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDrill:
    """The drill of one checkpoint.

    `problems` are parts without an intact source; `notes` are bad sources of parts that have another, intact
    source. Both name the file, the tensor and the node. `groups` are the parity groups of the checkpoint.
    """

    checkpoint: CheckpointInfo
    verdict: Verdict
    is_covered: bool  # the checkpoint must survive the loss
    on_lineage: bool
    seconds: float = 0.0
    reads: Mapping[Tier, TierRead] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    groups: tuple[ParityGroup, ...] = ()

    @property
    def read_bytes(self) -> dict[str, float]:
        """The number of bytes read, by tier."""
        return {tier: float(read.size_bytes) for tier, read in self.reads.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillReport:
    """The result of a drill. `last_step` is the last completed step of the run, None if unknown."""

    scenario: Scenario
    results: tuple[CheckpointDrill, ...]
    last_step: int | None
    is_whole: bool  # all live checkpoints were read, not only those of one step

    @property
    def passed(self) -> bool:
        """True if at least one checkpoint, and every one that must survive, has survived the loss."""
        return not self.failed and any(result.verdict == "passed" for result in self.results)

    @property
    def failed(self) -> bool:
        """True if a checkpoint that must survive the loss has not survived it."""
        return any(result.verdict == "failed" for result in self.results)

    @property
    def is_covered(self) -> bool:
        """True if a checkpoint must survive the loss; otherwise the drill tests no promise."""
        return any(result.is_covered for result in self.results if result.verdict != "retired")

    @property
    def is_conclusive(self) -> bool:
        """True if the drill shows from which checkpoint a run would continue.

        This requires that all checkpoints were read, and that none newer than the remaining checkpoints of
        the lineage was retired in the meantime.
        """
        newest = self._newest_left()
        return self.is_whole and (newest is None or newest.verdict == "passed")

    @property
    def resume(self) -> CheckpointInfo | None:
        """The checkpoint from which a run would continue; None if none is left, or if unclear."""
        newest = self._newest_left()
        return newest.checkpoint if self.is_conclusive and newest is not None else None

    @property
    def steps_lost(self) -> int | None:
        """The number of completed steps to repeat; a lower bound if the last step is unknown.

        None if the drill is inconclusive.
        """
        if not self.is_conclusive:
            return None
        newest = max((r.checkpoint.step for r in self.results if r.on_lineage), default=0)
        return max(self.last_step or 0, newest) - (self.resume.step if self.resume else 0)

    def _newest_left(self) -> CheckpointDrill | None:
        """Return the newest remaining checkpoint of the lineage, even if it was retired in the meantime."""
        left = [r for r in self.results if r.on_lineage and r.verdict in ("passed", "retired")]
        return max(left, key=lambda r: r.checkpoint.seq, default=None)

    @property
    def reads(self) -> dict[Tier, TierRead]:
        """The reads of all checkpoints together, by tier."""
        total: dict[Tier, TierRead] = {}
        for result in self.results:
            for tier, read in result.reads.items():
                total[tier] = total.get(tier, TierRead()) + read
        return total


Retry: TypeAlias = Callable[[LiveCheckpoint], tuple[LiveCheckpoint, ReadAccess] | None]
"""Returns the current state of a live checkpoint, and the access to it; None once it is retired."""


def choose(live: Iterable[LiveCheckpoint], step: int | None) -> tuple[LiveCheckpoint, ...]:
    """Return all checkpoints, or those of one step. Raises ConfigError if there are none."""
    live = tuple(live)
    found = tuple(c for c in live if step is None or c.checkpoint.step == step)
    if not found:
        of_step = "" if step is None else f" of step {step}"
        raise ConfigError(f"The run has no live checkpoint{of_step}.", hint="`ray-ckpt ls` shows them.")
    return found


def drill(
    live: Iterable[LiveCheckpoint],
    scenario: Scenario,
    access: ReadAccess,
    *,
    step: int | None = None,
    last_step: int | None,
    retry: Retry,
    record: Callable[[CheckpointDrill], None] | None = None,
    progress: ProgressCallback | None = None,
) -> DrillReport:
    """Simulate the loss for each checkpoint in `live`, or those of one step, from the newest to the oldest.

    If the drill of a checkpoint fails and `retry` finds the checkpoint at other holders, it is read once
    more. `record` is called with each result that tests a promise. Raises ConfigError if there are no
    checkpoints, or if all of them were retired during the drill.
    """
    live = tuple(live)
    chosen, results = choose(live, step), list[CheckpointDrill]()
    for known in sorted(chosen, key=lambda c: -c.checkpoint.seq):
        result = dry_run(known, scenario, access, progress)
        if result.problems and (found := retry(known)) != (known, access):
            result = replace(result, verdict="retired")
            if found is not None:
                result = dry_run(found[0], scenario, found[1], progress)
        if record is not None and result.verdict in ("passed", "failed"):
            record(result)
        results.append(result)
    if all(result.verdict == "retired" for result in results):
        raise ConfigError(
            "All checkpoints were retired while they were read.", hint="`ray-ckpt ls` shows what is live."
        )
    return DrillReport(
        scenario=scenario, results=tuple(results), last_step=last_step, is_whole=len(chosen) == len(live)
    )


def dry_run(
    live: LiveCheckpoint, scenario: Scenario, access: ReadAccess, progress: ProgressCallback | None = None
) -> CheckpointDrill:
    """Read a checkpoint from the copies that `scenario` leaves. Damage and silent peers raise no error."""
    left = leftovers(live, scenario)
    result = CheckpointDrill(
        checkpoint=left.checkpoint,
        verdict="passed",
        is_covered=left.is_covered,
        on_lineage=live.on_lineage,
        problems=left.problems,
        groups=tuple(places.group for places in live.groups),
    )
    if not result.problems:
        result = _CheckpointReading(left, access, progress or (lambda nbytes: None)).read(result)
    if result.problems:
        return replace(result, verdict="failed" if left.is_covered else "not covered")
    return result


class _CheckpointReading:
    """The reading of one checkpoint, fragment after fragment."""

    def __init__(
        self,
        left: Leftovers,
        access: ReadAccess,
        progress: ProgressCallback,
        committed: Mapping[str, str] | None = None,
    ) -> None:
        """Take as `committed` the digests of fragments by name, needed if holders have different versions."""
        self._left = left
        self._access = access
        self._progress = progress
        self._lock = threading.Lock()
        self._manifest = LiveManifest(
            left.checkpoint,
            left.holders,
            access,
            is_remote=left.is_remote,
            groups=left.groups,
            committed=committed,
            on_read=self._count_fragment,
        )
        self._sources: dict[str, tuple[FileSource, ...]] = {}  # for each file of the fragments read
        self._reader = SourceReader(
            left.checkpoint.id,
            self._sources,
            credentials=access.credentials,
            remote=access.remote,
            limiter=access.limiter,
        )
        self._reads: dict[Tier, TierRead] = {}
        self._num_slices = 0
        self._slices: list[ManifestRow] = []  # all slices, or [] if there are too many

    def read(self, result: CheckpointDrill) -> CheckpointDrill:
        """Read the checkpoint and add the findings to `result`."""
        start_s = time.monotonic()
        entries: list[FileEntry] = []
        manifest, lost = self._manifest, self._manifest.lost
        for index in range(len(self._left.holders)):
            entries += self._read_fragment(index)
            if len(lost) > MAX_PROBLEMS:  # the log may name a million nodes
                break
        checkpoint = self._left.checkpoint
        is_other = not lost and root_digest(entries, checkpoint.root_of) != checkpoint.root_digest
        if is_other and manifest.committed is None and (chosen := manifest.choose()) is not None:
            return _CheckpointReading(self._left, self._access, self._progress, chosen).read(result)
        damage = [*lost, *self._reader.damage]
        if not damage and is_other:
            damage.append("the manifest is not the one that was committed")
        if not damage:
            damage = [*self._uncovered(), *lost]
        notes = [*manifest.notes, *self._reader.rejected]
        unnoted = [line for line in damage if not any(note.startswith(line) for note in notes)]
        return replace(
            result,
            seconds=time.monotonic() - start_s,
            reads=self._reads,
            problems=_bounded([*notes, *unnoted]) if damage else (),
            notes=() if damage else _bounded(notes),
        )

    def _read_fragment(self, index: int) -> list[FileEntry]:
        """Compare the bytes of a fragment's files. Return the entries of the files, [] if it is lost."""
        found = self._manifest.version(index)
        if found is None:
            return []
        entry, fragment = found
        self._keep_slices(fragment)
        sources = self._manifest.sources_of(index)
        self._sources.update(dict.fromkeys((file.name for file in fragment.files), sources))
        before, start_s = len(self._reader.parts), time.monotonic()
        self._reader.read(fragment.rows, self._sink)
        seconds = time.monotonic() - start_s
        self._tally(self._reader.parts[before:], seconds, self._left.live.home(index))
        return [*fragment.files, entry]

    def _keep_slices(self, fragment: Fragment) -> None:
        slices = _slices(fragment)
        self._num_slices += len(slices)
        self._slices += slices
        if self._num_slices > MAX_SLICES:
            self._slices.clear()

    def _uncovered(self) -> Iterator[str]:
        """Report tensors that the slices do not cover exactly once.

        If there are too many slices, the manifest is read several times, each time for a part of the tensors.
        """
        num_turns = -(-self._num_slices // MAX_SLICES)
        if num_turns <= 1:
            yield from uncovered(self._slices)
            return
        for turn in range(num_turns):
            found = list(uncovered(row for row in self._slices_again() if _turn_of(row, num_turns) == turn))
            if self._manifest.lost:
                return
            yield from found

    def _slices_again(self) -> Iterator[ManifestRow]:
        for index in range(len(self._left.holders)):
            found = self._manifest.version(index)
            if found is None:
                return
            yield from _slices(found[1])

    def _count_fragment(self, index: int, source: FileSource, nbytes: int, seconds: float) -> None:
        self._add(source.tier, source.where, self._left.live.home(index), nbytes, seconds)
        self._count(nbytes)

    def _tally(self, parts: Sequence[RestoredPart], seconds: float, home: str) -> None:
        """Add parts that took `seconds` in parallel, divided among tiers by the time of their parts."""
        total_s = sum(part.seconds for part in parts)
        for part in parts:
            share_s = seconds * part.seconds / total_s if total_s else 0.0
            self._add(part.tier, part.where, home, part.size_bytes, share_s)

    def _add(self, tier: Tier, where: str, home: str, size_bytes: int, seconds: float) -> None:
        if home and where == home[:SHORT_ID]:
            tier = "local"
        read = TierRead(size_bytes=size_bytes, seconds=seconds)
        self._reads[tier] = self._reads.get(tier, TierRead()) + read

    def _sink(self, row: ManifestRow) -> _Counted:
        return _Counted(self._count)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._progress(nbytes)


@dataclass(frozen=True, slots=True)
class _Counted:
    """A sink that counts bytes and drops them."""

    count: ProgressCallback

    def write(self, view: memoryview) -> None:
        self.count(view.nbytes)

    def finish(self) -> None:
        pass


def _slices(fragment: Fragment) -> list[ManifestRow]:
    return [row for row in fragment.rows if row.slice is not None]


def _turn_of(row: ManifestRow, num_turns: int) -> int:
    """Return the turn, out of `num_turns`, in which the tensor of a slice is checked."""
    assert row.slice is not None
    return crc32(f"{row.slice.item}\0{row.slice.key}".encode()) % num_turns


def _bounded(lines: Sequence[str]) -> tuple[str, ...]:
    more = len(lines) - MAX_PROBLEMS
    return (*lines[:MAX_PROBLEMS], *((f"and {more} more",) if more > 0 else ()))
