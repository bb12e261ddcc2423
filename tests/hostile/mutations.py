"""Mutations of one file of a small run, chosen by a seed.

Most change the bytes or the kind of a file that the run has. The others, `LIES`, write the run anew with a
file that is absurd, and with digests that are right for it, as a hostile writer could.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ray_ckpt.format import names
from ray_ckpt.format.digest import digest
from ray_ckpt.format.manifest import encode_fragment
from ray_ckpt.train.pointers import POINTER_FILE, Pointer
from ray_ckpt.types import FileEntry, Fragment, ManifestRow, RootOf
from tests.format.test_parquet import BOMBS
from tests.support.sample_run import (
    START_S,
    RunLog,
    SampleCheckpoint,
    compress_shards,
    describe,
    make_checkpoint,
)

STEPS = (10, 20, 30)
LIE_AT = 30  # the newest, which commands take
STATE, SHARD = names.state_file(0, 2), names.shard_file(0, 2)
NUM_DEEP = 100_000
NUM_DIGITS = 10_000
SPARSE_BYTES = 1 << 40
DEEP = b"[" * NUM_DEEP + b"]" * NUM_DEEP + b"\n"

Change = Callable[[SampleCheckpoint], SampleCheckpoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A change of the run. `names_of_file` are the texts of which an error has to show one.

    A run that is `is_sound` shows no damage: all digests are right, so its content is a valid answer.
    """

    kind: str
    file: str
    names_of_file: tuple[str, ...]
    is_sound: bool = False


def build(storage: Path, change: Change = lambda saved: saved, *, root_of: RootOf = "fragments") -> Path:
    """Write the run `gpt` with three durable checkpoints and a pointer; `change` gives the newest."""
    log = RunLog(folder=storage / "gpt")
    log.create()
    log.session(1, after=None, world_size=2, num_nodes=2)
    for step in STEPS:
        saved = make_checkpoint(log.attempt(1, step), metrics={"loss": 4.0 / step}, root_of=root_of)
        saved = change(saved) if step == LIE_AT else saved
        log.commit(saved)
        log.drain(saved)
        if step == STEPS[0]:
            log.snapshot(time_s=START_S)
    pointer = Pointer(attempt=saved.attempt, run=str(log.folder))
    (log.folder / pointer.directory).mkdir()
    (log.folder / pointer.directory / POINTER_FILE).write_bytes(pointer.encode())
    return log.folder


def compress(run: Path) -> None:
    """Make the shards of all checkpoints compressed ones."""
    for folder in (run / names.SERVICE_DIR / names.CHECKPOINTS_DIR).iterdir():
        compress_shards(folder)


def mutate(run: Path, seed: int, root_of: RootOf = "fragments") -> Mutation:
    """Mutate one file of the run, which `build` has written."""
    rng = random.Random(seed)
    if rng.random() < 0.2:
        kind = rng.choice(sorted(LIES))
        shutil.rmtree(run)
        build(run.parent, LIES[kind](rng), root_of=root_of)
        if rng.random() < 0.3:
            compress(run)
        file = STATE if kind.startswith("state") else SHARD
        known = (file, "manifest-", "registered here", "has no item")
        return Mutation(kind=kind, file=file, names_of_file=known, is_sound=True)
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    groups = sorted({_group(path) for path in files})
    group = rng.choice(groups)
    path = rng.choice([path for path in files if _group(path) == group])
    kind = rng.choice(sorted(MUTATIONS))
    newest_record = max((run / names.SERVICE_DIR / names.LOG_DIR).glob("0*.json"))
    MUTATIONS[kind](path, rng)
    return Mutation(
        kind=kind,
        file=str(path.relative_to(run)),
        names_of_file=_names(path),
        is_sound=path == newest_record and kind in GONE,  # a log that was never longer
    )


def _group(path: Path) -> str:
    """Return the kind of a file, so that a kind with few files is chosen as often as others."""
    return path.name.partition("-")[0] if "-" in path.name else f"{path.parent.name[:3]}{path.suffix}"


def _names(path: Path) -> tuple[str, ...]:
    known = [path.name, path.name.removesuffix(".zst")]  # a missing one has the name that it was saved by
    if path.name == POINTER_FILE:
        known.append(path.parent.name)
    if path.parent.name == names.LOG_DIR and path.suffix == ".json":
        known.append(f"record {int(path.stem)}")
    return tuple(known)


# Of the bytes, and of the kind


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 3, 50))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _flip_end(path: Path, rng: random.Random) -> None:
    """Flip a bit where formats have their footers or the sizes of headers."""
    data = bytearray(path.read_bytes())
    data[rng.choice((1, -1)) * rng.randrange(1, 16) % len(data)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _extend(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.choice((1, 8, 5000))))


def _zero(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    size = min(rng.choice((1, 16, 512, 4096)), len(data) - at)
    data[at : at + size] = bytes(size)
    path.write_bytes(data)


def _sparse(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.choice((600 << 20, SPARSE_BYTES)))


def _replace(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _fifo(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _link(target: str) -> Callable[[Path, random.Random], None]:
    def link(path: Path, rng: random.Random) -> None:
        path.unlink()
        path.symlink_to(target)

    return link


def _link_out(path: Path, rng: random.Random) -> None:
    """Put the same bytes outside of the run, and a link to them in place of the file."""
    run = next(parent for parent in path.parents if parent.name == "gpt")
    outside = run.parent / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


def _bomb(path: Path, rng: random.Random) -> None:
    path.write_bytes(_bomb_bytes(rng.choice(sorted(BOMBS))))


_made: dict[str, bytes] = {}


def _bomb_bytes(name: str) -> bytes:
    if name not in _made:
        _made[name] = BOMBS[name]()
    return _made[name]


def _number(path: Path, rng: random.Random) -> None:
    """Put an absurd number in place of one of a JSON document, or of its text; seal it if it has a seal."""
    value = rng.choice((10**NUM_DIGITS, 10**15, -1, float("nan"), float("inf"), 1e308, 2**63))
    try:
        document = json.loads(path.read_bytes())
    except ValueError:
        path.write_bytes(_dumps(value)[:300] + path.read_bytes())
        return
    if isinstance(document, dict):
        numbers = [name for name, found in sorted(document.items()) if type(found) in (int, float)]
        document[rng.choice(numbers or ["format"])] = value
        if document.pop("digest", None):
            document["digest"] = digest(_dumps(document))
    path.write_bytes(_dumps(document))


def _dumps(document: object) -> bytes:
    """Encode as the format does, but also numbers that Python itself would not write."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return _plain_dumps(document)
    finally:
        sys.set_int_max_str_digits(limit)


def _plain_dumps(document: object) -> bytes:
    return json.dumps(document, ensure_ascii=False, sort_keys=True).encode() + b"\n"


MUTATIONS: dict[str, Callable[[Path, random.Random], None]] = {
    "flip": _flip,
    "flip at an end": _flip_end,
    "cut": _cut,
    "extend": _extend,
    "zeros": _zero,
    "sparse": _sparse,
    "named pipe": _fifo,
    "folder": _folder,
    "missing": lambda path, rng: path.unlink(),
    "empty": lambda path, rng: _replace(path, b""),
    "noise": lambda path, rng: _replace(path, rng.randbytes(path.stat().st_size)),
    "link to /dev/zero": _link("/dev/zero"),
    "link to nothing": _link("nothing-is-there"),
    "link to itself": lambda path, rng: _link(path.name)(path, rng),
    "link out of the run": _link_out,
    "bomb": _bomb,
    "deep": lambda path, rng: _replace(path, DEEP),
    "many small lists": lambda path, rng: _replace(path, b"[" + b"[]," * (20 << 20) + b"[]]\n"),
    "absurd number": _number,
}
GONE = ("missing", "link to nothing")


# With digests that are right


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lie(SampleCheckpoint):
    """A checkpoint whose manifest and log agree, whatever its files are."""

    listed: tuple[FileEntry, ...]

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        return self.listed


def _lie_state(data: Callable[[], bytes]) -> Callable[[random.Random], Change]:
    """Replace the state of rank 0 by `data`."""
    return lambda rng: lambda saved: _resealed(saved, STATE, data())


def _lie_size(rng: random.Random) -> Change:
    """Make the shard of rank 0 end in a slice that is far larger than the file."""
    num_rows = 1 << rng.randrange(53, 58)  # beyond what a file system gives room for

    def change(saved: SampleCheckpoint) -> SampleCheckpoint:
        return _resealed(saved, SHARD, saved.files[SHARD], num_rows=num_rows)

    return change


def _resealed(
    saved: SampleCheckpoint, file: str, data: bytes, *, num_rows: int | None = None
) -> SampleCheckpoint:
    """Return `saved` with another state, or with another size of a shard in the manifest, sealed again."""
    files, fragments = {**saved.files, file: data}, []
    for fragment in saved.fragments:
        if any(entry.name == file for entry in fragment.files):
            fragment = _relabeled(fragment, file, data, num_rows)
            files[names.fragment_file(fragment.node_index, 2)] = encode_fragment(fragment)
        fragments.append(fragment)
    del files[names.CHECKPOINT_JSON]
    known_entries = {entry.name: entry for fragment in fragments for entry in fragment.files}
    entries = tuple(
        known_entries.get(name, FileEntry(name=name, size_bytes=len(found), digest=digest(found)))
        for name, found in sorted(files.items())
    )
    known = {field.name: getattr(saved, field.name) for field in dataclasses.fields(saved)}
    lie = _Lie(**{**known, "files": files, "fragments": tuple(fragments), "listed": entries})
    files[names.CHECKPOINT_JSON] = describe(lie)
    return lie


def _relabeled(fragment: Fragment, file: str, data: bytes, num_rows: int | None) -> Fragment:
    entry = FileEntry(name=file, size_bytes=len(data), digest=digest(data))
    rows = [row for row in fragment.rows if row.file != file]
    if num_rows is None:
        rows.append(
            ManifestRow(kind="state", file=file, byte_offset=0, nbytes=len(data), digest=digest(data))
        )
        return _with(fragment, entry, rows)
    own = [row for row in fragment.rows if row.file == file]
    (torch,) = (row for row in own if row.slice is not None and row.slice.key == "rank0.rng.torch")
    assert torch.slice is not None
    long = dataclasses.replace(torch.slice, global_shape=(num_rows,), shape=(num_rows,))
    longer = num_rows - torch.nbytes
    rows += [
        _moved(row, longer) if row.byte_offset > torch.byte_offset else row for row in own if row is not torch
    ]
    rows.append(dataclasses.replace(torch, slice=long, nbytes=num_rows))
    size_bytes = sum(row.nbytes for row in rows if row.file == file)
    return _with(fragment, dataclasses.replace(entry, size_bytes=size_bytes), rows)


def _moved(row: ManifestRow, by: int) -> ManifestRow:
    return dataclasses.replace(row, byte_offset=row.byte_offset + by)


def _with(fragment: Fragment, entry: FileEntry, rows: list[ManifestRow]) -> Fragment:
    files = tuple(entry if old.name == entry.name else old for old in fragment.files)
    return dataclasses.replace(fragment, files=files, rows=tuple(rows))


LIES: dict[str, Callable[[random.Random], Change]] = {
    "size of a shard": _lie_size,
    "state: deep": _lie_state(lambda: DEEP),
    "state: deep items": _lie_state(lambda: b'{"items": {"model": ' + DEEP[:-1] + b'}, "step": 1}\n'),
    "state: many digits": _lie_state(lambda: b'{"items": {"a": ' + b"9" * NUM_DIGITS + b"}}\n"),
    "state: NaN": _lie_state(lambda: b'{"items": {"a": NaN}}\n'),
    "state: many small lists": _lie_state(lambda: b'{"items": {"a": [' + b"[]," * (1 << 20) + b"[]]}}\n"),
    "state: a number": _lie_state(lambda: b"1\n"),
    "state: no items": _lie_state(lambda: b"{}\n"),
    "state: parts are numbers": _lie_state(lambda: b'{"items": {}, "parts": [1]}\n'),
    "state: items are a list": _lie_state(lambda: b'{"items": [1], "step": 30, "world_size": 2}\n'),
}
