"""A node in this process: arenas as the agent makes them, and a link that keeps what is sealed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load

from ray_ckpt.actors.agent.arena import RankArena, SignalPage, make_arena
from ray_ckpt.capture.walk import replace_refs
from ray_ckpt.config import RunOptions
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.node_messages import SaveOutcome
from ray_ckpt.core.values import RankProgress, Salvage, SessionKey
from ray_ckpt.errors import CheckpointError, Unavailable
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import make_attempt, shard_files, state_file
from ray_ckpt.format.tree import decode_tree
from ray_ckpt.plan.restore import RowKey
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.restore.manifest import ListedRows
from ray_ckpt.restore.reader import FileSource, RestoreTicket, SharedRows
from ray_ckpt.trainer.link import ArenaGrant, Identity, SealedShard, StepState
from ray_ckpt.types import (
    AttemptId,
    CheckpointInfo,
    Level,
    ManifestRow,
    RankRestore,
    RowKind,
    Slice,
)

T = TypeVar("T")


def resolve_leaves(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return a tree in which tensors, by key, and dtypes replace the placeholders of `walk`."""
    return replace_refs(tree, lambda ref, _: tensors[ref.key])


@dataclass(slots=True)
class LocalLink:
    """A `ray_ckpt.trainer.link.Link` of rank `rank`; `go` holds up every write while it is cleared."""

    options: RunOptions = field(default_factory=RunOptions)
    rank: int = 0
    world_size: int = 1
    fails: bool = False
    arena: RankArena | None = None
    grants: list[ArenaGrant] = field(default_factory=list)
    sealed: list[SealedShard] = field(default_factory=list)
    files: dict[int, bytes] = field(default_factory=dict)  # step -> the shard file
    still_files: dict[int, bytes] = field(default_factory=dict)  # step -> the shard of still slices, if any
    skipped: dict[int, str] = field(default_factory=dict)
    annotated: list[tuple[int, dict[str, float], AttemptId | None, Future[None]]] = field(
        default_factory=list
    )
    kept: list[StepState] = field(default_factory=list)
    question: Future[bool] = field(default_factory=Future)
    offers: list[tuple[int, ...]] = field(default_factory=list)
    decision: Future[Salvage] = field(default_factory=Future)
    page: SignalPage | None = None
    given: RestoreTicket = field(default_factory=lambda: RestoreTicket(session_key=(1, 1), checkpoint=None))
    whole: RestoreTicket | None = None
    num_whole: int = 0  # calls of `whole_ticket`
    reserved_bytes: int = 0
    recovered: int = 0
    go: threading.Event = field(default_factory=threading.Event)
    _opening: threading.Lock = field(default_factory=threading.Lock)
    identity: Identity = field(init=False)
    _outcomes: dict[str, Future[SaveOutcome]] = field(default_factory=dict)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2))

    def __post_init__(self) -> None:
        self.go.set()
        self.identity = Identity(
            run_uid="0" * 32,
            run_name="run",
            rank=self.rank,
            world_size=self.world_size,
            node_id="node",
            storage_path="/runs",
        )

    def whole_ticket(self, session_key: SessionKey) -> RestoreTicket:
        assert self.whole is not None
        self.num_whole += 1
        return self.whole

    def ticket(self, *, early: bool = False) -> RestoreTicket:
        return self.given

    def origin(self, session_key: SessionKey) -> RestoreTicket | None:
        return None

    def restored(self, session_key: SessionKey, report: RankRestore) -> Future[RestoreTicket | None]:
        return _done(None)

    def awaited(self) -> tuple[Awaited, ...]:
        return ()

    def reach_barrier(self, session_key: SessionKey, number: int) -> Future[tuple[int, ...]]:
        return _done(())

    def fetch(
        self, session_key: SessionKey, wants: Mapping[RowKey, tuple[int, ...]], taken: tuple[RowKey, ...]
    ) -> SharedRows:
        raise Unavailable("every rank reads for itself here")

    def reserve(self, size_bytes: int) -> None:
        self.reserved_bytes = size_bytes

    def open_arena(self, session_key: SessionKey, size_bytes: int, *, named: bool = False) -> ArenaGrant:
        if self.arena is not None:
            self.arena.close()
        mode = self.options.memory
        self.arena = make_arena(
            self.rank, size_bytes, mode=mode, all_bytes=size_bytes, free_bytes=1 << 34, named=named
        )
        self.arena.start_populating()
        paths = tuple(buffer.path for buffer in self.arena.buffers)
        self.grants.append(
            ArenaGrant(mode=self.arena.mode, paths=paths, size_bytes=self.arena.buffers[0].size_bytes)
        )
        return self.grants[-1]

    def signal_page(self, *, named: bool = False) -> str:
        with self._opening:  # the progress thread calls this, too
            if self.page is None:
                self.page = SignalPage(named=named)
            return self.page.path

    def seal(self, shard: SealedShard) -> Future[bool]:
        if self.fails:
            self._outcome(shard.attempt).set_exception(Unavailable("there is no agent"))
            raise Unavailable("there is no agent")
        arena = self.arena
        assert arena is not None
        buffer = arena.buffers[shard.buffer]
        if shard.layout is not None:
            buffer.layout = shard.layout
        assert buffer.layout is not None and buffer.layout.signature == shard.layout_signature
        self.sealed.append(shard)

        def write() -> bool:
            self.go.wait(30)
            layout = buffer.layout
            assert layout is not None
            data, *still = [
                b"".join(bytes(chunk) for chunk in arena.chunks(buffer, shard.attempt.attempt, number))
                for number in range(len(layout.shards))
            ]
            arena.check(buffer, shard.attempt.attempt)
            if still:
                assert shard.still_from is not None
                if not buffer.keeps_still(shard.still_from, digest(still[0])):
                    self.skip(shard.attempt, f"copied at step {shard.still_from.step}, changed since")
                    return True
                self.still_files[shard.attempt.step] = still[0]
            self.files[shard.attempt.step] = data
            self._outcome(shard.attempt).set_result(SaveOutcome(level=Level.LOCAL, error=None))
            return False

        return self._pool.submit(write)

    def outcome(self, attempt: AttemptId, level: Level) -> Future[SaveOutcome]:
        return self._outcome(attempt)

    def _outcome(self, attempt: AttemptId) -> Future[SaveOutcome]:
        return self._outcomes.setdefault(attempt.attempt, Future())

    def ended(self, session_key: SessionKey) -> Future[CheckpointError]:
        return Future()

    def skip(self, attempt: AttemptId, reason: str) -> None:
        self.skipped[attempt.step] = reason
        outcome = self._outcome(attempt)
        if not outcome.done():
            outcome.set_result(SaveOutcome(level=None, error=Unavailable(reason)))

    def progress(self, session_key: SessionKey, progress: RankProgress) -> None:
        pass

    def notify_preemption(self, notice: Notice) -> None:
        pass

    def annotate(self, step: int, metrics: Mapping[str, float], attempt: AttemptId | None) -> Future[None]:
        if self.fails:
            raise Unavailable("there is no agent")
        done: Future[None] = Future()
        self.annotated.append((step, dict(metrics), attempt, done))
        return done

    def keep(self, session_key: SessionKey, state: StepState) -> None:
        self.kept.append(state)

    def asked(self, session_key: SessionKey) -> Future[bool]:
        return self.question

    def offer(self, session_key: SessionKey, steps: tuple[int, ...]) -> Future[Salvage]:
        self.offers.append(steps)
        return self.decision

    def recover(self) -> None:
        self.recovered += 1

    def make_durable(self, attempt: AttemptId, timeout_s: float) -> Future[None]:
        return _done(None)

    # -- for tests -------------------------------------------------------------------------------------

    def resumed(self, folder: Path, step: int, options: RunOptions | None = None) -> LocalLink:
        """Return this rank in a new group, which restores the checkpoint of `step` from `folder`."""
        rows = self.write(folder, step)
        return restored_from(folder, step, rows, options or self.options)

    def write(self, folder: Path, step: int) -> tuple[ManifestRow, ...]:
        """Write the files of this rank's part of the checkpoint of `step`; return their rows."""
        sealed = next(s for s in self.sealed if s.attempt.step == step)
        layout = next(s.layout for s in reversed(self.sealed) if s.layout is not None)
        shards, state = shard_files(self.rank, self.world_size), state_file(self.rank, self.world_size)
        data = {shards[0]: self.files[step], state: sealed.state}
        if step in self.still_files:
            data[shards[1]] = self.still_files[step]
        for file, content in data.items():
            (folder / file).write_bytes(content)

        def row(file: str, at: int, nbytes: int, part: Slice | None = None) -> ManifestRow:
            kind: RowKind = "state" if part is None else "slice"
            found = digest(data[file][at : at + nbytes])
            return ManifestRow(kind=kind, file=file, byte_offset=at, nbytes=nbytes, digest=found, slice=part)

        return (
            row(state, 0, len(sealed.state)),
            *(
                row(file, placed.byte_offset, placed.nbytes, placed.slice)
                for file, shard in zip(shards, layout.shards, strict=False)
                for placed in shard.slices
            ),
        )

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """Return the tensors of the checkpoint of a step, by key."""
        still = load(self.still_files[step]) if step in self.still_files else {}
        return {**load(self.files[step]), **still}

    def state(self, step: int) -> dict[str, object]:
        """Return the state of the checkpoint of a step without its tensors."""
        tree: dict[str, object] = decode_tree(next(s.state for s in self.sealed if s.attempt.step == step))
        return tree


def restored_from(
    folder: Path,
    step: int,
    rows: Sequence[ManifestRow],
    options: RunOptions,
    *,
    saved_ranks: int = 1,
    rank: int = 0,
    world_size: int = 1,
) -> LocalLink:
    """Return a rank of a new group, which restores the checkpoint that `saved_ranks` wrote to `folder`."""
    attempt = make_attempt(run_uid="0" * 32, epoch=1, session=1, step=step, attempt=0)
    info = CheckpointInfo(
        id=attempt,
        seq=1,
        level=Level.LOCAL,
        world_size=saved_ranks,
        num_nodes=1,
        size_bytes=1,
        root_digest="",
        committed_at_s=0.0,
        metrics={},
    )
    files = {row.file for row in rows}
    sources = {file: (FileSource(tier="local", where="node", path=str(folder / file)),) for file in files}
    ticket = RestoreTicket(
        session_key=(1, 2), checkpoint=info, manifest=ListedRows(tuple(rows)), sources=sources
    )
    return LocalLink(options=options, rank=rank, world_size=world_size, given=ticket)


def _done(value: T) -> Future[T]:
    done: Future[T] = Future()
    done.set_result(value)
    return done
