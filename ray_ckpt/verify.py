"""Reading every byte of a checkpoint's directory against its digests.

Never raises for damage: whatever is wrong becomes a `Damage` that names file and place. Works on a directory
that was copied elsewhere, with the log's root digest or without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ray_ckpt.errors import CorruptionError, FormatError
from ray_ckpt.format import names
from ray_ckpt.format.digest import Digester, digest
from ray_ckpt.format.digest import root_digest as digest_of_files
from ray_ckpt.format.manifest import (
    MAX_DESCRIPTION_BYTES,
    MAX_FRAGMENT_BYTES,
    CheckpointDescription,
    check_coverage,
    decode_checkpoint,
    decode_fragment,
)
from ray_ckpt.storage.files import read_blocks, read_range
from ray_ckpt.types import FileEntry, Fragment, ManifestRow

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of bytes read since the last call."""


def is_fragment(name: str) -> bool:
    return name.startswith("manifest-")


def read_whole(path: Path, max_bytes: int) -> bytes:
    """A small file; CorruptionError if it is not there, is too large or cannot be read."""
    try:
        if not path.is_file():
            raise CorruptionError(f"{path} is missing.", file=path.name, where="missing")
        size_bytes = path.stat().st_size
        if size_bytes > max_bytes:
            raise CorruptionError(
                f"{path} has {size_bytes} bytes; the format allows {max_bytes}.", file=path.name, where="size"
            )
        return read_range(path, 0, size_bytes)
    except (OSError, EOFError) as error:
        raise CorruptionError(
            f"{path} cannot be read: {error}.", file=path.name, where="unreadable"
        ) from error


# Verifying


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing wrong with a checkpoint's files.

    `where` is the label of the damaged byte range, such as `model.blocks.0.weight[0:64, 0:128]`, `header` or
    `state`; or what is wrong with the whole file: `missing`, `size`, `digest`, `content`, `unreadable`,
    `unlisted`, `attempt`, `files`, `ranks`, `coverage`, `root digest`.
    """

    file: str
    where: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a pass over a checkpoint's directory found. Sizes are bytes that were read."""

    folder: Path
    num_files: int
    num_slices: int
    size_bytes: int
    damages: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        return not self.damages


def verify_directory(
    folder: Path, *, root_digest: str | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Read every byte of a checkpoint's directory and report all that differs from its digests.

    Never raises for damage. Data passes in blocks of 8 MiB; only the manifest is held whole. `root_digest` is
    the one in the log; without it a directory is checked against itself, which a copy elsewhere allows.
    If `checkpoint.json` is damaged, the fragments that can be read say what should be there.
    """
    check = _Verification(folder, progress or (lambda nbytes: None))
    description = check.read_description()
    fragments = check.read_fragments(description)
    check.check_group(description, fragments)
    check.read_files(description, fragments)
    check.check_root(description, root_digest)
    check.check_unlisted()
    return VerifyReport(
        folder=folder,
        num_files=len(check.found),
        num_slices=check.num_slices,
        size_bytes=check.size_bytes,
        damages=tuple(check.damages),
    )


class _Verification:
    """One pass over a directory. `found` has each file that was read as it is, `expected` each name."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.folder = folder
        self.damages: list[Damage] = []
        self.found: dict[str, FileEntry] = {}
        self.expected: set[str] = set()
        self.num_slices = 0
        self.size_bytes = 0
        self._progress = progress

    def report(self, file: str, where: str, detail: str) -> None:
        self.damages.append(Damage(file=file, where=where, detail=detail))

    def read_description(self) -> CheckpointDescription | None:
        data = self._read_small(names.CHECKPOINT_JSON, MAX_DESCRIPTION_BYTES)
        if data is None:
            return None
        try:
            description = decode_checkpoint(data)
        except FormatError as error:
            self.report(names.CHECKPOINT_JSON, "content", str(error))
            return None
        if names.is_directory_name(self.folder.name) and self.folder.name != description.attempt.directory:
            self.report(
                names.CHECKPOINT_JSON,
                "attempt",
                f"It describes {description.attempt.directory}, not this one.",
            )
        return description

    def read_fragments(self, description: CheckpointDescription | None) -> dict[str, Fragment]:
        """The fragments that are intact, by file name."""
        if description is not None:
            listed = {f.name: f for f in description.files if is_fragment(f.name)}
            read = {name: self._read_fragment(name, entry) for name, entry in listed.items()}
        else:
            read = {n: self._read_fragment(n, None) for n in self._names_there() if is_fragment(n)}
            num_nodes = next((f.num_nodes for f in read.values() if f is not None), 0)
            for name in {names.fragment_file(i, num_nodes) for i in range(num_nodes)} - set(read):
                read[name] = self._read_fragment(name, None)
        return {name: fragment for name, fragment in read.items() if fragment is not None}

    def check_group(
        self, description: CheckpointDescription | None, fragments: Mapping[str, Fragment]
    ) -> None:
        """That the fragments belong together, and if all are there, that they describe whole tensors."""
        if not fragments:
            return
        first = description or next(iter(fragments.values()))
        for name, f in fragments.items():
            same = (f.attempt, f.world_size, f.num_nodes) == (
                first.attempt,
                first.world_size,
                first.num_nodes,
            )
            if not same or name != names.fragment_file(f.node_index, f.num_nodes):
                self.report(name, "attempt", "It belongs to another checkpoint or node.")
        if len(fragments) != first.num_nodes:
            return
        ranks = sorted(rank for f in fragments.values() for rank in f.ranks)
        if ranks != list(range(first.world_size)):
            self.report(_ALL_FRAGMENTS, "ranks", f"They have {len(ranks)} ranks of {first.world_size}.")
        try:
            check_coverage(row for f in fragments.values() for row in f.rows)
        except FormatError as error:
            self.report(_ALL_FRAGMENTS, "coverage", str(error))

    def read_files(
        self, description: CheckpointDescription | None, fragments: Mapping[str, Fragment]
    ) -> None:
        """Shards and state files, against their rows where a fragment has them, else against their digest."""
        listed = {f.name: f for f in description.files if not is_fragment(f.name)} if description else {}
        rows: dict[str, list[ManifestRow]] = {}
        for name, fragment in fragments.items():
            for entry in fragment.files:
                if entry.name in rows or (description and listed.get(entry.name) != entry):
                    self.report(name, "files", f"It lists {entry.name} otherwise than the others do.")
                listed.setdefault(entry.name, entry)
                rows.setdefault(entry.name, [])
            for row in fragment.rows:
                rows[row.file].append(row)
        all_there = description is not None and len(fragments) == description.num_nodes
        for name, entry in sorted(listed.items()):
            if all_there and name not in rows:
                self.report(name, "files", "No fragment lists it.")
            self._read_data(entry, sorted(rows.get(name, []), key=lambda row: row.byte_offset))

    def check_root(self, description: CheckpointDescription | None, expected: str | None) -> None:
        """That these are the files that the log committed; said only if no other damage shows it."""
        files = [f for f in self.found.values() if f.name != names.CHECKPOINT_JSON]
        if description is not None:
            actual = description.root_digest
        elif all(damage.file == names.CHECKPOINT_JSON for damage in self.damages):
            actual = digest_of_files(files)
        else:
            return
        if expected is not None and actual != expected:
            self.report(names.CHECKPOINT_JSON, "root digest", f"It is {actual}; the log has {expected}.")

    def check_unlisted(self) -> None:
        """Files that a stock reader of safetensors would take for part of the checkpoint."""
        for name in self._names_there():
            if name not in self.expected and (names.is_file_name(name) or name.endswith(".safetensors")):
                self.report(name, "unlisted", "It is not part of this checkpoint.")

    def _names_there(self) -> list[str]:
        try:
            return sorted(path.name for path in self.folder.iterdir())
        except OSError:
            return []

    def _read_small(self, name: str, max_bytes: int) -> bytes | None:
        self.expected.add(name)
        try:
            data = read_whole(self.folder / name, max_bytes)
        except CorruptionError as error:
            self.report(name, error.fields["where"], str(error))
            return None
        self._count(len(data))
        self.found[name] = FileEntry(name=name, size_bytes=len(data), digest=digest(data))
        return data

    def _read_fragment(self, name: str, entry: FileEntry | None) -> Fragment | None:
        if (data := self._read_small(name, MAX_FRAGMENT_BYTES)) is None:
            return None
        if entry is not None and self.found[name] != entry:
            self._report_difference(entry)
            return None
        try:
            return decode_fragment(data)
        except FormatError as error:
            self.report(name, "content", str(error))
            return None

    def _read_data(self, entry: FileEntry, rows: Sequence[ManifestRow]) -> None:
        self.expected.add(entry.name)
        path, whole = self.folder / entry.name, Digester()
        num_read = len(self.damages)
        try:
            if not path.is_file():
                self.report(entry.name, "missing", f"Its {entry.size_bytes} bytes are not there.")
                return
            size_bytes = path.stat().st_size
            num_whole = self._check_rows(self._blocks(path, min(size_bytes, entry.size_bytes), whole), rows)
        except (OSError, EOFError) as error:
            self.report(entry.name, "unreadable", str(error))
            return
        self.found[entry.name] = FileEntry(name=entry.name, size_bytes=size_bytes, digest=whole.hexdigest())
        if size_bytes != entry.size_bytes:
            cut = (
                f", which cuts off {rows[num_whole].label} and what follows" if num_whole < len(rows) else ""
            )
            self.report(entry.name, "size", f"{size_bytes} bytes, not {entry.size_bytes}{cut}.")
        elif len(self.damages) == num_read:
            self._report_difference(entry)

    def _report_difference(self, entry: FileEntry) -> None:
        found = self.found[entry.name]
        if found.size_bytes != entry.size_bytes:
            self.report(entry.name, "size", f"{found.size_bytes} bytes, not {entry.size_bytes}.")
        elif found.digest != entry.digest:
            self.report(entry.name, "digest", f"Its bytes differ from their digest {entry.digest}.")

    def _check_rows(self, blocks: Iterator[bytes], rows: Sequence[ManifestRow]) -> int:
        """Read all of `blocks`; report each damaged row; the number of rows that are there entirely."""
        num_whole = 0
        for row, found in zip(rows, _row_digests(blocks, rows), strict=False):
            num_whole += 1
            self.num_slices += row.slice is not None
            if found != row.digest:
                span = f"bytes {row.byte_offset} to {row.byte_offset + row.nbytes}"
                self.report(row.file, row.label, f"The {span} differ from their digest {row.digest}.")
        for _ in blocks:  # what no row describes still counts for the digest of the file
            pass
        return num_whole

    def _blocks(self, path: Path, size_bytes: int, whole: Digester) -> Iterator[bytes]:
        for block in read_blocks(path, 0, size_bytes):
            whole.update(block)
            self._count(len(block))
            yield block

    def _count(self, nbytes: int) -> None:
        self.size_bytes += nbytes
        self._progress(nbytes)


_ALL_FRAGMENTS = "manifest-*.parquet"


def _row_digests(blocks: Iterator[bytes], rows: Iterable[ManifestRow]) -> Iterator[str]:
    """The digest of the bytes of each of `rows`, which follow one another; ends early where the bytes do."""
    rest = memoryview(b"")
    for row in rows:
        state, left = Digester(), row.nbytes
        while left:
            if not rest and not (rest := memoryview(next(blocks, b""))):
                return
            piece, rest = rest[:left], rest[left:]
            state.update(piece)
            left -= piece.nbytes
        yield state.hexdigest()
