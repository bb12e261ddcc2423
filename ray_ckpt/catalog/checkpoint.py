"""One checkpoint in the catalog: facts from the log, files, manifest and tensors.

No file is trusted: each is compared with a digest that the root digest in the log proves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import pyarrow as pa

from ray_ckpt.catalog.lazy_tensor import LazyTensor, SavedTensors
from ray_ckpt.catalog.tables import MAX_HTML_METRICS, MAX_HTML_ROWS
from ray_ckpt.errors import ConfigError, CorruptionError, FormatError
from ray_ckpt.format import names
from ray_ckpt.format.digest import digest
from ray_ckpt.format.manifest import (
    MAX_DESCRIPTION_BYTES,
    MAX_FRAGMENT_BYTES,
    CheckpointDescription,
    decode_checkpoint,
    decode_columns,
    decode_fragment,
    decode_places,
    rows_table,
)
from ray_ckpt.location import Location
from ray_ckpt.restore.manifest import RowColumns
from ray_ckpt.storage.checkpoint_files import CheckpointFiles, files_on, readable
from ray_ckpt.storage.log_store import read_run
from ray_ckpt.storage.parallel import map_in_order
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.texts import html_table, local_time_text, metrics_text, size_text, to_datetime
from ray_ckpt.types import CheckpointInfo, FileEntry, Fragment, FragmentMetadata, ProgressCallback
from ray_ckpt.verify.content import Damage, verify_files

T = TypeVar("T")

REQUESTS_AT_A_TIME = 16  # requests for small files, in parallel because a bucket answers slowly


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """A checkpoint: its facts from the log and, once it is durable, its files.

    `tier` is None if the storage path has no files of the checkpoint; methods that read files then raise
    ConfigError. Damage raises CorruptionError with the name of the file. If the storage path has only some
    items (option `remote_items`), `items` has their names joined by commas, and the files are theirs alone.
    """

    info: CheckpointInfo
    tier: RemoteTier | None
    items: str = ""

    def __repr__(self) -> str:
        info, items = self.info, f" of {self.items}" if self.items else ""
        size, saved = size_text(self.size_bytes), local_time_text(info.committed_at_s)
        facts = f"step {info.step}, {info.level.label}, {info.state}, {size}{items}, saved {saved}"
        return f"CheckpointView({facts})"

    @property
    def step(self) -> int:
        return self.info.step

    @property
    def root_digest(self) -> str:
        """The root digest of the files, according to the log."""
        return self.info.exported_root if self.items else self.info.root_digest

    @property
    def size_bytes(self) -> int:
        """The size of the files in bytes, according to the log."""
        return self.info.exported_bytes if self.items else self.info.size_bytes

    @property
    def where(self) -> str | None:
        """The checkpoint's folder on the storage path: a path or a URL."""
        return None if self.tier is None else str(self._location(self.tier))

    @property
    def path(self) -> Path | None:
        """`where` as a Path, if the checkpoint is in a folder of this machine."""
        return None if self.tier is None or not self.tier.root.is_posix else self._location(self.tier).folder

    def files(self) -> CheckpointFiles:
        """Return the files without a request to the store. Raise ConfigError if the checkpoint has none."""
        if self.tier is None:
            there = "in the cluster only" if self.info.state == "live" else self.info.state
            raise ConfigError(
                f"Step {self.info.step} is {there}; the storage path has no files of it.",
                hint="Only live durable checkpoints can be read from the storage path.",
                step=self.info.step,
            )
        return files_on(self.tier, self.info.directory)

    def description(self) -> CheckpointDescription:
        """Return the content of `checkpoint.json`, checked against the log."""
        return self._description(self.files())

    def fragments(self) -> tuple[Fragment, ...]:
        """Return the manifest by node, each fragment checked against its digest in `checkpoint.json`."""
        return tuple(fragment for fragment, _ in self.each_fragment())

    def columns(self) -> RowColumns:
        """Return the manifest in columns, from which only wanted rows are made, and checked.

        It takes a tenth of the time and a third of the memory of `fragments`.
        """
        found = self._each(decode_places)
        return RowColumns((table, pa.py_buffer(data)) for (_, table), _, data in found)

    def each_fragment(self) -> Iterator[tuple[Fragment, FileEntry]]:
        """Yield each fragment with its file; memory holds one fragment and the bytes of a few others."""
        return ((fragment, entry) for fragment, entry, _ in self._each(decode_fragment))

    def each_table(self) -> Iterator[tuple[FragmentMetadata, pa.Table, FileEntry]]:
        """Yield each fragment as `format.manifest.decode_columns` returns it, with its file."""
        return ((metadata, table, entry) for (metadata, table), entry, _ in self._each(decode_columns))

    def _each(self, decode: Callable[[bytes], T]) -> Iterator[tuple[T, FileEntry, bytes]]:
        """Yield each fragment as `decode` returns it, its file, and the file's bytes."""
        files = self.files()
        listed = self._description(files).fragments
        read = map_in_order(
            partial(_fragment_bytes, files),
            listed,
            threads=REQUESTS_AT_A_TIME,
            name="manifest",
            max_results=REQUESTS_AT_A_TIME,
        )
        with closing(read):
            for data, entry in zip(read, listed, strict=True):
                yield _decoded(files, entry, data, decode), entry, data

    def slices(self) -> pa.Table:
        """Return the manifest as one table, a row per byte range; see format.manifest.COLUMNS."""
        return rows_table(self.fragments())

    def tensors(self) -> SavedTensors:
        """Return the tensors by their full names, without reading them. The last manifest is cached."""
        if self.tier is None:
            self.files()  # raises ConfigError with the reason
        assert self.tier is not None
        attempt, found = _LAST_TENSORS.get(self.tier, ("", None))
        if found is None or attempt != self.info.id.attempt:
            found = SavedTensors(self.files(), self.columns())
            _LAST_TENSORS[self.tier] = (self.info.id.attempt, found)
        return found

    def __getitem__(self, name: str) -> LazyTensor:
        """Return a tensor by its full name, such as `model.layers.0.weight`, to be read whole or in part.

        Raise ConfigError, with similar names, if no tensor has that name.
        """
        return self.tensors()[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors())

    def verify(self, progress: ProgressCallback | None = None) -> tuple[Damage, ...]:
        """Return the damages of the files; empty if every byte is as saved."""
        return verify_files(self.files(), root_digest=self.root_digest, progress=progress).damages

    def is_deleted(self) -> bool:
        """Read the log again and return whether the checkpoint is no longer live.

        The files of some items alone outlive a checkpoint that the nodes have lost. Raise StoragePathError
        or FormatError if the log cannot be read.
        """
        if self.tier is None:
            return self.info.state != "live"
        with readable(self.tier.root):
            history, found = read_run(self.tier.log)
        for record, record_digest in found:
            history.apply(record, record_digest)
        kept = history.live() + (history.lost_exported() if self.items else ())
        return self.info.id.attempt not in {info.id.attempt for info in kept}

    def _repr_html_(self) -> str:
        """Return the facts from the log for a notebook, escaped. No file is read."""
        info = self.info
        facts = (
            ("step", info.step),
            ("attempt", info.id.attempt),
            ("session", info.id.session),
            ("state", info.state),
            ("level", info.level.label),
            *((("parity groups", info.parity),) if info.parity else ()),
            ("ranks", f"{info.world_size} on {info.num_nodes} nodes"),
            *((("mesh", info.mesh),) if info.mesh else ()),
            ("bytes", info.size_bytes),
            *((("bytes linked", info.shared_bytes),) if info.shared_bytes else ()),
            ("saved at", to_datetime(info.committed_at_s) or ""),
            ("took", _phases_text(info)),
            ("verified at", to_datetime(info.verified_at_s) or ""),
            ("drill", info.drill),
            *((("damaged fragments", info.damaged),) if info.damaged else ()),
            *((("uploaded alone", info.exported),) if info.exported else ()),
            *((("drifted apart", info.suspect),) if info.suspect else ()),
            ("metrics", metrics_text(info.metrics, most=MAX_HTML_METRICS)),
            ("pins", ", ".join(islice(sorted(info.pins), MAX_HTML_ROWS))),
            ("root digest", info.root_digest),
            ("where", self.where or "no files on the storage path"),
        )
        return html_table(f"checkpoint of step {info.step}", (), facts)

    def _location(self, tier: RemoteTier) -> Location:
        return tier.root / tier.folder_of(self.info.directory)

    def _description(self, files: CheckpointFiles) -> CheckpointDescription:
        data = files.read_whole(names.CHECKPOINT_JSON, MAX_DESCRIPTION_BYTES)
        try:
            description = decode_checkpoint(data)
        except FormatError as error:
            raise error.at(files.place(names.CHECKPOINT_JSON), _DAMAGED) from error
        root_of = "fragments" if self.items else self.info.root_of
        committed = (self.info.id, root_of, self.root_digest, self.items)
        found = (description.attempt, description.root_of, description.root_digest, description.items)
        if found != committed:
            raise CorruptionError(
                f"{files.place(names.CHECKPOINT_JSON)} does not match the commit in the log.",
                hint=_DAMAGED,
                file=names.CHECKPOINT_JSON,
            )
        return description


_DAMAGED = "Run `ray-ckpt verify` on the checkpoint, and restore another step."

_LAST_TENSORS: WeakKeyDictionary[RemoteTier, tuple[str, SavedTensors]] = WeakKeyDictionary()
# last attempt and its tensors of each open run: views are short-lived, and a manifest may be large


def _phases_text(info: CheckpointInfo) -> str:
    """Return the known durations, such as `0.12 s stall, 1.3 s capture`."""
    phases = {
        "stall": info.stall_s,
        "capture": info.capture_s,
        "local": info.local_s,
        "replication": info.replicate_s,
        "drain": info.drain_s,
    }
    return ", ".join(f"{time_s:.3g} s {name}" for name, time_s in phases.items() if time_s is not None)


def _decoded(files: CheckpointFiles, entry: FileEntry, data: bytes, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(data)
    except FormatError as error:
        raise error.at(files.place(entry.name), _DAMAGED) from error


def _fragment_bytes(files: CheckpointFiles, entry: FileEntry) -> bytes:
    data = files.read_whole(entry.name, MAX_FRAGMENT_BYTES)
    if digest(data) != entry.digest:
        raise CorruptionError(
            f"{files.place(entry.name)} differs from its digest.", hint=_DAMAGED, file=entry.name
        )
    return data
