"""A small but real run on disk, written without Ray: what a training leaves behind on its storage path.

`write_run` writes a run of several saves; `RunLog` and `make_checkpoint` are its parts, for tests that need
another history, and `assemble` makes a checkpoint of any slices. Equal arguments give equal bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ray_ckpt.format import names, records, zstd
from ray_ckpt.format.digest import digest, root_digest, root_files
from ray_ckpt.format.manifest import CheckpointDescription, encode_checkpoint, encode_fragment
from ray_ckpt.format.shard import build_layout
from ray_ckpt.format.tree import TensorRef, encode_tree
from ray_ckpt.storage.local.files import temporary_name
from ray_ckpt.storage.log_store import CreateResult, PosixLogStore, read_run, write_snapshot
from ray_ckpt.storage.remote.file_store import FileStore
from ray_ckpt.types import AttemptId, FileEntry, Fragment, Level, ManifestRow, RootOf, Slice

START_S = 1_790_000_000.0  # the time of record 0
RECORD_S = 30.0  # between one record and the next
Array: TypeAlias = npt.NDArray[Any]

_DTYPES = {"float32": "F32", "uint16": "BF16", "int64": "I64", "uint8": "U8"}  # of the arrays below


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCheckpoint:
    """A checkpoint in memory. `tensors` are whole, by key; BF16 ones as their bits in uint16."""

    attempt: AttemptId
    world_size: int
    num_nodes: int
    metrics: Mapping[str, float]
    tensors: Mapping[str, Array]
    fragments: tuple[Fragment, ...]
    files: Mapping[str, bytes]  # all, checkpoint.json included
    root_of: RootOf = "fragments"

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """All files but checkpoint.json."""
        return tuple(_entry(n, data) for n, data in self.files.items() if n != names.CHECKPOINT_JSON)

    @property
    def root_digest(self) -> str:
        return root_digest(self.entries, self.root_of)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    def write(self, folder: Path) -> Path:
        """Return the files in `folder`."""
        folder.mkdir(parents=True)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRun:
    """A run written by `write_run`. `checkpoints` has the newest checkpoint of each step."""

    folder: Path  # <storage>/<name>
    log: RunLog
    checkpoints: Mapping[int, SampleCheckpoint]

    def directory(self, step: int) -> Path:
        """Return the directory of a durable checkpoint."""
        root = self.folder / names.SERVICE_DIR / names.CHECKPOINTS_DIR
        return root / self.checkpoints[step].attempt.directory


@dataclass(slots=True, kw_only=True)
class RunLog:
    """Appends to the log of the run at `folder` as a coordinator would."""

    folder: Path
    epoch: int = 0
    seq: int = 0
    prev: str = ""
    attempts: dict[tuple[int, int], int] = field(default_factory=dict)  # (session, step) -> tries so far

    @property
    def run_uid(self) -> str:
        return digest(self.folder.name.encode())

    def append(self, op: records.Op, *, time_s: float | None = None) -> None:
        """Append `op` as the next record, at Unix time `time_s`; an `Epoch` raises the epoch first."""
        self.epoch += isinstance(op, records.Epoch)
        record = records.LogRecord(
            seq=self.seq,
            epoch=self.epoch,
            writer="sample",
            prev=self.prev,
            time_s=START_S + RECORD_S * self.seq if time_s is None else time_s,
            op=op,
        )
        data = records.encode_record(record)
        whole = temporary_name(self._records)  # a reader must never see half a record
        whole.write_bytes(data)  # without the fsyncs of a store, of which no test loses one
        (self._records / names.record_file(self.seq)).hardlink_to(whole)
        whole.unlink()
        self.seq, self.prev = self.seq + 1, digest(data)

    @property
    def store(self) -> PosixLogStore:
        return PosixLogStore(self._records)

    @property
    def _records(self) -> Path:
        log = self.folder / names.SERVICE_DIR / names.LOG_DIR
        log.mkdir(parents=True, exist_ok=True)
        return log

    def snapshot(self, *, time_s: float) -> None:
        """Write a snapshot of all appended records, as made at Unix time `time_s`."""
        history, found = read_run(self.store)
        for record, record_digest in found:
            history.apply(record, record_digest)
        assert write_snapshot(self.store, history.to_snapshot(time_s)) is CreateResult.OK

    def create(self) -> None:
        self.append(records.Create(run_uid=self.run_uid, run_name=self.folder.name, format=1))
        self.append(records.Epoch())

    def session(
        self, number: int, *, after: SampleCheckpoint | None, world_size: int, num_nodes: int
    ) -> None:
        """Session `number` begins, from the checkpoint `after` or from scratch."""
        self.append(
            records.Session(
                session=number,
                service="sample",
                after=number - 1 if number > 1 else None,
                resumed_from=after.attempt.attempt if after else None,
                world_size=world_size,
                num_nodes=num_nodes,
            )
        )

    def attempt(self, session: int, step: int) -> AttemptId:
        """Return a new attempt."""
        number = self.attempts.get((session, step), 0)
        self.attempts[session, step] = number + 1
        return names.make_attempt(run_uid=self.run_uid, session=session, step=step, attempt=number)

    def commit(self, saved: SampleCheckpoint, *, replicas: int = 1, **facts: Any) -> None:
        op = records.Commit if saved.root_of == "files" else records.Commit2
        self.append(
            op(
                session=saved.attempt.session,
                step=saved.attempt.step,
                attempt=saved.attempt.attempt,
                level=Level.REPLICATED if replicas else Level.LOCAL,
                replicas=replicas,
                world_size=saved.world_size,
                num_nodes=saved.num_nodes,
                size_bytes=saved.size_bytes,
                root_digest=saved.root_digest,
                metrics=saved.metrics,
                **facts,
            )
        )

    def drain(self, saved: SampleCheckpoint, *, replicas: int = 1) -> None:
        """Copy its files to the storage path, and append the record of that."""
        root = self.folder / names.SERVICE_DIR / names.CHECKPOINTS_DIR
        saved.write(root / saved.attempt.directory)
        self.append(records.Promote(attempt=saved.attempt.attempt, level=Level.DURABLE, replicas=replicas))


def write_run(
    storage: Path,
    name: str = "gpt",
    *,
    steps: Sequence[int] = (10, 20, 30, 40),
    durable: Collection[int] = (10, 30),
    retired: Collection[int] = (),
    collected: Collection[int] = (),
    lost: Collection[int] = (),
    resume_at: int | None = None,
    resumed_steps: Sequence[int] = (),
    replicas: int = 1,
    world_size: int = 2,
    num_nodes: int = 2,
    rows: int = 8,
    root_of: RootOf = "fragments",
) -> SampleRun:
    """Write the run `name` below `storage`: a commit for each of `steps`, those in `durable` drained as well.

    With `resume_at` a second session resumes from that step and commits `resumed_steps`; it leaves the steps
    after `resume_at` off the lineage. Then come the records for `lost`, `retired` and `collected` (each of
    them retired first). `rows` scales the tensors: a checkpoint has about 100 * rows bytes of them.
    With `root_of="files"` the run is as older versions wrote it.
    """
    log = RunLog(folder=storage / name)
    log.create()
    saved: dict[int, SampleCheckpoint] = {}

    def train(session: int, wanted: Sequence[int]) -> None:
        for step in wanted:
            attempt = log.attempt(session, step)
            metrics = {"loss": 4.0 / step**0.5, "lr": 1e-3}
            saved[step] = make_checkpoint(
                attempt,
                world_size=world_size,
                num_nodes=num_nodes,
                metrics=metrics,
                rows=rows,
                root_of=root_of,
            )
            log.commit(saved[step], replicas=replicas)
            if step in durable:
                log.drain(saved[step], replicas=replicas)

    log.session(1, after=None, world_size=world_size, num_nodes=num_nodes)
    train(1, steps)
    if resume_at is not None:
        log.append(records.Epoch())
        log.session(2, after=saved[resume_at], world_size=world_size, num_nodes=num_nodes)
        train(2, resumed_steps)
    for step in lost:
        log.append(records.Lost(attempt=saved[step].attempt.attempt, reason="both nodes are gone"))
    for step in sorted({*retired, *collected}):
        log.append(records.Retired(attempt=saved[step].attempt.attempt, reason="older than the last 3"))
    run = SampleRun(folder=log.folder, log=log, checkpoints=saved)
    for step in collected:
        for path in run.directory(step).glob("*"):
            path.unlink()
        if step in durable:
            run.directory(step).rmdir()
        log.append(records.Collected(attempt=saved[step].attempt.attempt))
    return run


def make_checkpoint(
    attempt: AttemptId,
    *,
    world_size: int = 2,
    num_nodes: int = 2,
    metrics: Mapping[str, float] | None = None,
    rows: int = 8,
    root_of: RootOf = "fragments",
    base: Array | None = None,
) -> SampleCheckpoint:
    """Return a training state of `world_size` ranks on `num_nodes` nodes.

    Its tensors are cut by rows and by columns, whole, a scalar, empty, and one per rank. The bytes follow
    from the attempt's step. `base` is a matrix that is in still shards.
    """
    tensors = make_tensors(attempt.step, world_size=world_size, rows=rows)
    still = {} if base is None else {"base.weight": base}
    ranks = [
        RankState(
            slices=_slices(tensors, rank, world_size),
            items=_items(tensors, attempt.step, rank),
            still=_slices(still, rank, world_size),
        )
        for rank in range(world_size)
    ]
    return assemble(attempt, ranks, num_nodes=num_nodes, metrics=metrics, tensors=tensors, root_of=root_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The state of one rank: slices with their bytes, the trees of its items, and classes of some."""

    slices: Sequence[tuple[Slice, bytes]]
    items: Mapping[str, Any]
    classes: Mapping[str, str] = field(default_factory=dict)
    still: Sequence[tuple[Slice, bytes]] = ()  # in a shard of their own


def assemble(
    attempt: AttemptId,
    ranks: Sequence[RankState],
    *,
    num_nodes: int = 1,
    metrics: Mapping[str, float] | None = None,
    tensors: Mapping[str, Array] | None = None,
    root_of: RootOf = "fragments",
) -> SampleCheckpoint:
    """Return the files of a checkpoint that `ranks` saved, spread evenly over the nodes."""
    world_size = len(ranks)
    files: dict[str, bytes] = {}
    fragments = []
    for node in range(num_nodes):
        here = tuple(range(node * world_size // num_nodes, (node + 1) * world_size // num_nodes))
        manifest: list[ManifestRow] = []
        own: dict[str, bytes] = {}
        for rank in here:
            saved = ranks[rank]
            for number, slices in enumerate((saved.slices, saved.still)[: 2 if saved.still else 1]):
                file = names.shard_file(rank, world_size, number)
                own[file], shard_rows = _shard(slices, file)
                manifest += shard_rows
            classes = {"classes": dict(saved.classes)} if saved.classes else {}
            state = encode_tree(
                {"step": attempt.step, "world_size": world_size, **classes, "items": dict(saved.items)}
            )
            own[names.state_file(rank, world_size)] = state
            manifest.append(_row("state", names.state_file(rank, world_size), 0, state))
        fragment = Fragment(
            attempt=attempt,
            node_index=node,
            num_nodes=num_nodes,
            world_size=world_size,
            ranks=here,
            files=tuple(_entry(name, data) for name, data in sorted(own.items())),
            rows=tuple(manifest),
        )
        fragments.append(fragment)
        files |= own | {names.fragment_file(node, num_nodes): encode_fragment(fragment)}
    made = SampleCheckpoint(
        attempt=attempt,
        world_size=world_size,
        num_nodes=num_nodes,
        metrics=metrics or {},
        tensors=tensors or {},
        fragments=tuple(fragments),
        files=files,
        root_of=root_of,
    )
    files[names.CHECKPOINT_JSON] = describe(made)
    return made


def describe(saved: SampleCheckpoint) -> bytes:
    """checkpoint.json for its other files."""
    return encode_checkpoint(
        CheckpointDescription(
            attempt=saved.attempt,
            world_size=saved.world_size,
            num_nodes=saved.num_nodes,
            metrics=saved.metrics,
            files=tuple(root_files(saved.entries, saved.root_of)),
            root_digest=saved.root_digest,
            root_of=saved.root_of,
        )
    )


def compress_shards(folder: Path) -> None:
    """Compress the shards of a checkpoint, as a drain with `compress` does."""
    for path in folder.glob("shard-*.safetensors"):
        path.with_name(path.name + zstd.SUFFIX).write_bytes(b"".join(zstd.encode([path.read_bytes()], 1)))
        path.unlink()


def copy_to(store: FileStore, folder: Path) -> None:
    """Copy all files below `folder` to a store, under the same names."""
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            store.put(path.relative_to(folder).as_posix(), [data], max_bytes=len(data))


def make_tensors(seed: int, *, world_size: int, rows: int) -> dict[str, Array]:
    """Return whole tensors by key. `_cut` cuts those of several dimensions evenly."""
    random = np.random.default_rng(seed)
    tensors: dict[str, Array] = {
        "model.blocks.0.weight": random.standard_normal((rows, 6), dtype=np.float32),
        "model.blocks.0.bias": random.standard_normal(6, dtype=np.float32),
        "model.head": random.integers(0, 2**16, (4, 2 * rows), dtype=np.uint16),
        "model.unused": np.zeros((0, 3), np.float32),
        "optimizer.state.blocks.0.weight.exp_avg": random.standard_normal((rows, 6), dtype=np.float32),
        "optimizer.state.blocks.0.weight.step": np.array(seed, np.int64),
    }
    for rank in range(world_size):
        tensors[f"rank{rank}.rng.torch"] = random.integers(0, 256, 24, dtype=np.uint8)
    return tensors


def _shard(slices: Iterable[tuple[Slice, bytes]], file: str) -> tuple[bytes, list[ManifestRow]]:
    """Return a shard file, and its rows."""
    raw = {part.key: data for part, data in slices}
    layout = build_layout(part for part, _ in slices)
    data, rows = layout.header, [_row("header", file, 0, layout.header)]
    for placed in layout.slices:
        found = raw[placed.slice.key]
        rows.append(_row("slice", file, placed.byte_offset, found, placed.slice))
        data += found
    return data, rows


def _slices(tensors: Mapping[str, Array], rank: int, world_size: int) -> list[tuple[Slice, bytes]]:
    """Return the slices of whole tensors that a rank saves."""
    found = []
    for key, array in tensors.items():
        if (part := _cut(key, array, rank, world_size)) is not None:
            region = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
            found.append((part, np.ascontiguousarray(array[region]).tobytes()))
    return found


def _cut(key: str, array: Array, rank: int, world_size: int) -> Slice | None:
    """Return the slice that `rank` saves: part of a matrix, cut along its longer side, else all or none."""
    item, _, name = key.partition(".")
    owner = int(item.removeprefix("rank")) if item.startswith("rank") else 0
    offset, shape = [0] * array.ndim, list(array.shape)
    if array.ndim == 2 and array.size:
        axis = int(np.argmax(array.shape))
        start, stop = (array.shape[axis] * k // world_size for k in (rank, rank + 1))
        offset[axis], shape[axis] = start, stop - start
    elif rank != owner:
        return None
    return Slice(
        item=item,
        name=name,
        dtype=_DTYPES[str(array.dtype)],
        global_shape=array.shape,
        offset=tuple(offset),
        shape=tuple(shape),
    )


def _items(tensors: Mapping[str, Array], step: int, rank: int) -> dict[str, Any]:
    """Return the trees of a rank's items, as a Checkpointer makes them."""
    moments = {name: TensorRef(f"optimizer.state.blocks.0.weight.{name}") for name in ("exp_avg", "step")}
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "params": ["blocks.0.weight"]}
    return {
        "model": {k.removeprefix("model."): TensorRef(k) for k in tensors if k.startswith("model.")},
        "optimizer": {"state": {"blocks.0.weight": moments}, "param_groups": [group]},
        "scheduler": {"last_epoch": step},
        "loader": {"position": step * 8 + rank},
        "rng": {"torch": TensorRef(f"rank{rank}.rng.torch")},
    }


def _row(kind: Any, file: str, byte_offset: int, data: bytes, part: Slice | None = None) -> ManifestRow:
    return ManifestRow(
        kind=kind, file=file, byte_offset=byte_offset, nbytes=len(data), digest=digest(data), slice=part
    )


def _entry(name: str, data: bytes) -> FileEntry:
    return FileEntry(name=name, size_bytes=len(data), digest=digest(data))
