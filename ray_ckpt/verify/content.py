"""Read every byte of a checkpoint at any location and compare the bytes with the digests.

Damage raises no error: each finding becomes a `Damage` that names the file and the byte range. A file of a
newer version is not damage but raises NewerFormat, because this version cannot check it. A copy of a
checkpoint's directory at another place can be verified too, with or without the root digest from the log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from ray_ckpt.errors import CorruptionError, FormatError, NewerFormat
from ray_ckpt.format import names
from ray_ckpt.format.blocks import BlockCutter, BlocksEnded
from ray_ckpt.format.digest import FRAGMENT_PREFIX, Digester, digest, root_digests
from ray_ckpt.format.manifest import (
    MAX_DESCRIPTION_BYTES,
    MAX_FRAGMENT_BYTES,
    CheckpointDescription,
    decode_checkpoint,
    decode_fragment,
    uncovered,
)
from ray_ckpt.location import StoragePath
from ray_ckpt.storage.checkpoint_files import (
    UNREADABLE,
    CheckpointFiles,
    SavedFiles,
    files_at,
    where_of,
)
from ray_ckpt.storage.parallel import map_in_order
from ray_ckpt.types import FileEntry, Fragment, ManifestRow, ProgressCallback

MAX_MISSING = 1000  # missing fragments reported; a damaged fragment may claim that there are a million
FILES_AT_A_TIME = 4  # each by one thread, to hide the latency of stores; at most 72 MiB in flight

ALL_FRAGMENTS = "manifest-*.parquet"

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One finding in a checkpoint's files.

    `where` is the label of the damaged byte range, such as `model.blocks.0.weight[0:64, 0:128]`, `header` or
    `state`; or a finding about the whole file: `missing`, `size`, `digest`, `content`, `unreadable`,
    `unlisted`, `attempt`, `files`, `ranks`, `coverage`, `root digest`.
    """

    file: str
    where: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of a pass over a checkpoint's files. Sizes count the saved bytes that were read."""

    where: str
    num_files: int
    num_slices: int
    size_bytes: int
    damages: tuple[Damage, ...]
    only_items: str = ""  # the folder has only these items, joined by commas, and is no whole checkpoint

    @property
    def ok(self) -> bool:
        return not self.damages

    @property
    def is_unread(self) -> bool:
        """True if files cannot be read, as without permission, and nothing shows damage."""
        return only_unreadable(self.damages)


def only_unreadable(damages: Sequence[Damage]) -> bool:
    """Return True if there are findings, and all are files that cannot be read."""
    return bool(damages) and all(damage.where == UNREADABLE for damage in damages)


def check_group(
    description: CheckpointDescription | None, fragments: Mapping[str, Fragment]
) -> Iterator[Damage]:
    """Check that the fragments belong together and, if none is missing, that they contain all ranks."""
    if not fragments:
        return
    first = description or next(iter(fragments.values()))
    group = (first.attempt, first.world_size, first.num_nodes)
    for name, f in fragments.items():
        is_same = (f.attempt, f.world_size, f.num_nodes) == group
        if not is_same or name != names.fragment_file(f.node_index, f.num_nodes):
            yield Damage(file=name, where="attempt", detail="It belongs to another checkpoint or node.")
    if len(fragments) != first.num_nodes:
        return
    ranks = sorted(rank for f in fragments.values() for rank in f.ranks)
    if ranks != list(range(first.world_size)):
        detail = f"They have {len(ranks)} ranks of {first.world_size}."
        yield Damage(file=ALL_FRAGMENTS, where="ranks", detail=detail)


def is_complete(fragments: Mapping[str, Fragment]) -> bool:
    """Return True if every node has a fragment in `fragments`."""
    return bool(fragments) and len(fragments) == next(iter(fragments.values())).num_nodes


def data_files(description: CheckpointDescription | None) -> dict[str, FileEntry] | None:
    """Return the shards and state files by name; None unless `checkpoint.json` lists them (format 1)."""
    if description is None or description.data_files is None:
        return None
    return {file.name: file for file in description.data_files}


def lists_all(description: CheckpointDescription | None, fragments: Mapping[str, Fragment]) -> bool:
    """Return True if all files are known, from `checkpoint.json` or from a fragment of every node."""
    return data_files(description) is not None or is_complete(fragments)


def check_tensors(fragments: Mapping[str, Fragment]) -> Iterator[Damage]:
    """Report each tensor that is not covered exactly once, if no fragment is missing."""
    if is_complete(fragments):
        for detail in uncovered(row for fragment in fragments.values() for row in fragment.rows):
            yield Damage(file=ALL_FRAGMENTS, where="coverage", detail=detail)


def verify_directory(
    path: StoragePath,
    storage_options: Mapping[str, str] | None = None,
    *,
    root_digest: str | None = None,
    progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Call `verify_files` for a checkpoint's directory, or a copy of the directory under any name.

    Raises ConfigError if the path is invalid, or if credentials for the path are missing.
    """
    return verify_files(files_at(path, storage_options), root_digest=root_digest, progress=progress)


def verify_files(
    files: CheckpointFiles, *, root_digest: str | None = None, progress: ProgressCallback | None = None
) -> VerifyReport:
    """Read every byte of a checkpoint and report each difference from the digests.

    Raises NewerFormat for a manifest of a newer version, but no error for damage. A few files are read at a
    time, in blocks; only the manifest is kept in memory as a whole. `root_digest` is the root digest in the
    log; without it, as for a copy at another place, the files are compared with each other. If
    `checkpoint.json` is damaged, the readable fragments list the expected files.
    """
    check = Verification(files, progress or (lambda nbytes: None))
    description = check.read_description()
    fragments = check.read_fragments(description)
    check.refuse_newer()
    check.damages += check_group(description, fragments)
    check.damages += check_tensors(fragments)
    check.read_files(description, fragments)
    check.check_root(description, root_digest, is_whole=is_complete(fragments))
    if description is not None or fragments:
        check.check_unlisted(is_whole=lists_all(description, fragments))
    return VerifyReport(
        where=str(files.location),
        num_files=len(check.found),
        num_slices=check.num_slices,
        size_bytes=check.size_bytes,
        damages=tuple(check.damages),
        only_items=description.items if description is not None else "",
    )


@dataclass(slots=True)
class Checked:
    """The findings of one thread of a `Verification` about one file."""

    name: str
    found: FileEntry | None = None  # actual size and digest of the file; None if it cannot be read
    fragment: Fragment | None = None
    num_rows: int = 0  # number of complete rows, damaged or not
    num_slices: int = 0  # number of slices among these rows
    damages: list[Damage] = field(default_factory=list)
    newer: NewerFormat | None = None

    def report(self, where: str, detail: str) -> None:
        self.damages.append(Damage(file=self.name, where=where, detail=detail))

    def compare(self, entry: FileEntry) -> bool:
        """Return True if the file matches `entry`; otherwise report the difference."""
        assert self.found is not None
        if self.found.size_bytes != entry.size_bytes:
            self.report("size", f"{self.found.size_bytes} bytes, not {entry.size_bytes}.")
        elif self.found.digest != entry.digest:
            self.report("digest", f"Its bytes differ from their digest {entry.digest}.")
        return self.found == entry


class Verification:
    """One pass over the files at a location. `found` has the actual files, `expected` all expected names."""

    def __init__(self, files: SavedFiles, progress: ProgressCallback) -> None:
        self.damages: list[Damage] = []
        self.newer: NewerFormat | None = None  # error of the first file of a newer version
        self.found: dict[str, FileEntry] = {}
        self.expected: set[str] = set()
        self.num_slices = 0
        self.size_bytes = 0
        self._files = files
        self._progress = progress
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def report(self, file: str, where: str, detail: str) -> None:
        self.damages.append(Damage(file=file, where=where, detail=detail))

    def refuse_newer(self) -> None:
        """Raise NewerFormat if a file that was read is of a newer version."""
        if self.newer is not None:
            raise self.newer

    def read_description(self) -> CheckpointDescription | None:
        checked = Checked(names.CHECKPOINT_JSON)
        description = self._check_description(checked)
        self._take(checked)
        return description

    def read_fragments(self, description: CheckpointDescription | None) -> dict[str, Fragment]:
        """Read the intact fragments, by file name."""
        if description is not None:
            return self.read_named([(f.name, f) for f in description.fragments])
        there = [name for name in self._names_there() if name.startswith(FRAGMENT_PREFIX)]
        read = self.read_named([(name, None) for name in there])
        num_nodes = next((f.num_nodes for f in read.values()), 0)
        expected = (names.fragment_file(i, num_nodes) for i in range(num_nodes))
        missing = islice((name for name in expected if name not in read), MAX_MISSING)
        return read | self.read_named([(name, None) for name in missing if name not in there])

    def read_named(self, wanted: Sequence[tuple[str, FileEntry | None]]) -> dict[str, Fragment]:
        """Read the fragments in `wanted` that are intact and match their entry, if there is one."""
        read: dict[str, Fragment] = {}
        for checked in self._each(self._check_fragment, wanted):
            self._take(checked)
            if checked.fragment is not None:
                read[checked.name] = checked.fragment
        return read

    def read_files(
        self, description: CheckpointDescription | None, fragments: Mapping[str, Fragment]
    ) -> None:
        """Compare shards and state files with their rows in a fragment, or else with their digest."""
        described = data_files(description)
        listed = dict(described or {})
        rows: dict[str, list[ManifestRow]] = {}
        for name, fragment in fragments.items():
            for entry in fragment.files:
                if entry.name in rows or (described is not None and described.get(entry.name) != entry):
                    self.report(name, "files", f"It lists {entry.name} differently from the others.")
                listed.setdefault(entry.name, entry)
                rows.setdefault(entry.name, [])
            for row in fragment.rows:
                rows[row.file].append(row)
        all_there = description is not None and len(fragments) == description.num_nodes
        wanted = [
            (entry, sorted(rows.get(name, ()), key=lambda row: row.byte_offset))
            for name, entry in sorted(listed.items())
        ]
        for checked in self._each(self._check_data, wanted):
            if all_there and checked.name not in rows:
                self.report(checked.name, "files", "No fragment lists it.")
            self._take(checked)

    def check_root(
        self, description: CheckpointDescription | None, expected: str | None, *, is_whole: bool
    ) -> None:
        """Compare the files with those committed in the log, unless other damage explains a difference.

        `is_whole`: all fragments have been read.
        """
        files = [f for f in self.found.values() if f.name != names.CHECKPOINT_JSON]
        if description is not None:
            actual: tuple[str, ...] = (description.root_digest,)
        elif is_whole and all(damage.file == names.CHECKPOINT_JSON for damage in self.damages):
            actual = root_digests(files)
        else:
            return
        if expected is not None and expected not in actual:
            self.report(names.CHECKPOINT_JSON, "root digest", f"It is {actual[0]}; the log has {expected}.")

    def check_unlisted(self, *, is_whole: bool) -> None:
        """Report files that a standard safetensors reader would treat as part of the checkpoint.

        `is_whole`: all files of the checkpoint are known, because no fragment that lists some is missing. A
        fragment that only cannot be read may list them.
        """
        if not is_whole and only_unreadable(self.damages):
            return
        detail = "It is not part of this checkpoint." if is_whole else "No readable fragment lists it."
        for name in self._names_there():
            if name not in self.expected and (names.is_file_name(name) or name.endswith(".safetensors")):
                self.report(name, "unlisted", detail)

    # -- threads -----------------------------------------------------------------------------------------

    def _each(self, check: Callable[[T], R], things: Sequence[T]) -> list[R]:
        """Call `check` with each element of `things`, a few at a time. Results are in the same order."""
        return list(
            map_in_order(check, things, threads=FILES_AT_A_TIME, name="verify", stopped=self._stopped)
        )

    def _take(self, checked: Checked) -> None:
        self.expected.add(checked.name)
        self.damages += checked.damages
        self.newer = self.newer or checked.newer
        self.num_slices += checked.num_slices
        if checked.found is not None:
            self.found[checked.name] = checked.found

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.size_bytes += nbytes
            self._progress(nbytes)

    # -- files; the methods below run in several threads -----------------------------------------------------

    def _names_there(self) -> Sequence[str]:
        try:
            return self._files.names
        except OSError:
            return ()

    def _check_description(self, checked: Checked) -> CheckpointDescription | None:
        if (data := self._read_small(checked, MAX_DESCRIPTION_BYTES)) is None:
            return None
        try:
            description = decode_checkpoint(data)
        except FormatError as error:
            self._refused(checked, error)
            return None
        name = self._files.folder_name
        if names.is_directory_name(name) and name != description.attempt.directory:
            checked.report("attempt", f"It describes {description.attempt.directory}, not this one.")
        return description

    def _check_fragment(self, wanted: tuple[str, FileEntry | None]) -> Checked:
        name, entry = wanted
        checked = Checked(name)
        data = self._read_small(checked, MAX_FRAGMENT_BYTES)
        if data is not None and (entry is None or checked.compare(entry)):
            try:
                checked.fragment = decode_fragment(data)
            except FormatError as error:
                self._refused(checked, error)
        return checked

    def _refused(self, checked: Checked, error: FormatError) -> None:
        checked.report("content", str(error))
        if isinstance(error, NewerFormat):
            checked.newer = error.at(self._files.place(checked.name))

    def _read_small(self, checked: Checked, max_bytes: int) -> bytes | None:
        try:
            data = self._files.read_whole(checked.name, max_bytes)
        except CorruptionError as error:
            where = error.fields["where"]
            checked.report(where, error.message if where == "missing" else str(error))
            return None
        self._count(len(data))
        checked.found = FileEntry(name=checked.name, size_bytes=len(data), digest=digest(data))
        return data

    def _check_data(self, wanted: tuple[FileEntry, Sequence[ManifestRow]]) -> Checked:
        entry, rows = wanted
        checked, whole = Checked(entry.name), Digester()
        try:
            file = self._files.open(entry.name)
            if file is None:
                checked.report("missing", f"Its {entry.size_bytes} bytes are not there.")
                return checked
            with closing(file.read([(0, min(file.size_bytes, entry.size_bytes))])) as blocks:
                self._check_rows(checked, self._counted(blocks, whole), rows)
        except (OSError, EOFError) as error:
            checked.report(where_of(error), str(error))
            return checked
        except CorruptionError as error:  # from a compressed file
            checked.report("content", f"{error}{_cut_off(rows, checked.num_rows)}")
            return checked
        checked.found = FileEntry(name=entry.name, size_bytes=file.size_bytes, digest=whole.hexdigest())
        if file.size_bytes != entry.size_bytes:
            cut = _cut_off(rows, checked.num_rows)
            checked.report("size", f"{file.size_bytes} bytes, not {entry.size_bytes}.{cut}")
        elif not checked.damages:
            checked.compare(entry)
        return checked

    def _check_rows(
        self, checked: Checked, blocks: Iterator[memoryview], rows: Sequence[ManifestRow]
    ) -> None:
        """Read all of `blocks`, count the complete rows, and report each damaged row."""
        for row, found in zip(rows, _row_digests(blocks, rows), strict=False):
            checked.num_rows += 1
            checked.num_slices += row.slice is not None
            if found != row.digest:
                span = f"bytes {row.byte_offset} to {row.byte_offset + row.nbytes}"
                checked.report(row.label, f"The {span} differ from their digest {row.digest}.")
        for _ in blocks:  # the digest of the file includes the bytes outside of rows
            pass

    def _counted(self, blocks: Iterable[memoryview], whole: Digester) -> Iterator[memoryview]:
        for block in blocks:
            whole.update(block)
            self._count(block.nbytes)
            yield block
            if self._stopped.is_set():
                return


def _cut_off(rows: Sequence[ManifestRow], num_rows: int) -> str:
    """Name the rows that are lost if only the first `num_rows` rows exist."""
    return f" {rows[num_rows].label} and what follows are cut off." if num_rows < len(rows) else ""


def _row_digests(blocks: Iterator[memoryview], rows: Iterable[ManifestRow]) -> Iterator[str]:
    """Yield the digest of the bytes of each of `rows`, which are adjacent; stop early when the bytes end."""
    cutter = BlockCutter(blocks)
    for row in rows:
        state = Digester()
        try:
            for piece in cutter.pieces(row.nbytes):
                state.update(piece)
        except BlocksEnded:
            return
        yield state.hexdigest()
