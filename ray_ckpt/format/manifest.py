"""The manifest: the slice and the digest of each byte range of each file.

Each node writes one fragment, a Parquet file that any tool can query; `checkpoint.json` lists the fragments
with their digests, so that a copied directory stays verifiable. Both are checked completely when read
and when written: a file that a reader would refuse is never stored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from ray_ckpt.errors import FormatError, NewerFormat
from ray_ckpt.format import jsontext, parquet
from ray_ckpt.format.digest import FRAGMENT_PREFIX, root_digest
from ray_ckpt.format.names import (
    CHECKPOINT_JSON,
    MAX_RANKS,
    check_directory,
    check_file,
    check_items,
    check_run_uid,
    fragment_file,
)
from ray_ckpt.format.row_columns import are_sound, rows_of
from ray_ckpt.format.shard import MAX_HEADER_BYTES, check_slice
from ray_ckpt.format.tree import MAX_TREE_BYTES
from ray_ckpt.types import AttemptId, FileEntry, Fragment, FragmentMetadata, ManifestRow, RootOf, Slice

MAX_FRAGMENT_BYTES = 64 * 2**20  # bounds a reader's memory; a million rows take about 40 MB
MAX_ROWS = 1_000_000  # rows of one fragment: eight ranks with 125,000 slices each
_SMALL_TABLE_BYTES = 8 * 2**20  # such a table of rows, texts included, is within all limits of `parquet`
MAX_DESCRIPTION_BYTES = 64 * 2**20  # size of checkpoint.json: about 300,000 files
DESCRIPTION_VERSION = 2  # of checkpoint.json with the fragments; 1: with all files
ITEMS_VERSION = 3  # of checkpoint.json of some items alone, which older versions must not take for all
_MAX_BYTES = {"state": MAX_TREE_BYTES, "header": 8 + MAX_HEADER_BYTES}  # size of the bytes of a row, by kind
MAX_CHOICES = 64  # combinations to try if fragments differ between holders, which is rare
MAX_COMPARED = 1_000_000  # pairs of slices of a tensor: about a second; more are checked by their corners
MAX_CORNERS = 1 << 24  # corners of the slices of a tensor: half a minute; a million slices in 4 dimensions
METADATA_KEY = b"ray_ckpt"

_INT64S = pa.list_(pa.int64())
COLUMNS = pa.schema(
    [
        pa.field("kind", pa.string()),
        pa.field("item", pa.string()),
        pa.field("name", pa.string()),
        pa.field("dtype", pa.string()),
        pa.field("global_shape", _INT64S),
        pa.field("offset", _INT64S),
        pa.field("shape", _INT64S),
        pa.field("file", pa.string()),
        pa.field("byte_offset", pa.int64()),
        pa.field("nbytes", pa.int64()),
        pa.field("digest", pa.string()),
    ]
)
"""The columns of a fragment; the columns from item to shape are null unless kind is "slice"."""

DIGEST = pa.schema([COLUMNS.field("digest")])
PLACES = pa.schema([field for field in COLUMNS if field not in DIGEST])
"""The columns that a restore is planned with. Digests are most of a fragment, and few of them are needed."""

_SLICE_COLUMNS = ("item", "name", "dtype", "global_shape", "offset", "shape")
_ROW_COLUMNS = ("kind", "file", "byte_offset", "nbytes", "digest")
_KINDS = {"shard": ("header", "slice"), "state": ("state",)}  # kinds of rows by kind of file

Region: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape in a global tensor


FragmentVersion: TypeAlias = tuple[FileEntry, Fragment]
"""A fragment of one holder, with the entry of the fragment's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDescription:
    """Content of `checkpoint.json`; `files` are those that `root_digest` covers, sorted by name."""

    attempt: AttemptId
    world_size: int
    num_nodes: int
    metrics: Mapping[str, float]
    files: tuple[FileEntry, ...]
    root_digest: str
    root_of: RootOf = "fragments"
    items: str = ""  # the only items in this directory, joined by commas; "": the whole checkpoint

    @property
    def fragments(self) -> tuple[FileEntry, ...]:
        return tuple(file for file in self.files if file.name.startswith(FRAGMENT_PREFIX))

    @property
    def data_files(self) -> tuple[FileEntry, ...] | None:
        """The shards and state files; None if the fragments alone list them."""
        if self.root_of == "fragments":
            return None
        return tuple(file for file in self.files if not file.name.startswith(FRAGMENT_PREFIX))


# Fragments


def encode_fragment(fragment: Fragment) -> bytes:
    """Return `fragment` as a Parquet file; equal fragments give equal bytes (with one version of pyarrow).

    Raise FormatError for a fragment that `decode_fragment` would refuse.
    """
    _check_fragment(fragment)
    table = rows_table([fragment])
    data = encode_columns(fragment.metadata, table)
    if table.nbytes <= _SMALL_TABLE_BYTES:
        return data
    try:
        _read_parquet(data, COLUMNS)  # checks a reader's limits of memory; many long names exceed them
    except FormatError as error:
        raise FormatError(
            f"A fragment of {len(fragment.rows)} rows is too large. {error.message}",
            hint="Spread the tensors over more nodes, or use shorter names.",
        ) from error
    return data


def encode_columns(fragment: FragmentMetadata, table: pa.Table) -> bytes:
    """Return a fragment whose rows are in `table` as a Parquet file. The rows are not checked.

    Raise FormatError for a file that is too large.
    """
    document = {
        **_attempt_json(fragment.attempt),
        "node_index": fragment.node_index,
        "num_nodes": fragment.num_nodes,
        "world_size": fragment.world_size,
        "ranks": list(fragment.ranks),
        "files": _files_json(fragment.files),
        "num_rows": fragment.num_rows,
        "replicated": list(fragment.replicated),
        "metrics": None if fragment.metrics is None else jsontext.metrics_json(fragment.metrics),
    }
    metadata = jsontext.dumps_sealed(document, what="The fragment", max_bytes=MAX_FRAGMENT_BYTES)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        COLUMNS,
        compression="zstd",
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        writer.write_table(table, row_group_size=MAX_ROWS)
        writer.add_key_value_metadata({METADATA_KEY: metadata})
    data = sink.getvalue().to_pybytes()
    jsontext.check_size(data, what="The fragment", max_bytes=MAX_FRAGMENT_BYTES)
    return bytes(data)


def decode_fragment(data: bytes) -> Fragment:
    """Return the fragment in a Parquet file. Raise FormatError for any violation of the format.

    Check names and bounds, and check that the rows of each file cover the file exactly once.
    """
    metadata, table = decode_columns(data)
    return _with_rows(metadata, table)


def decode_columns(data: bytes) -> tuple[FragmentMetadata, pa.Table]:
    """Return a fragment with its rows as columns, after the checks of `decode_fragment`.

    Texts are dictionaries. Raise FormatError for any violation of the format.
    """
    metadata, table = _decoded(data, COLUMNS)
    if not are_sound(table, metadata.files, _MAX_BYTES):
        _check_fragment(_with_rows(metadata, table))  # finds the row and the rule
    return metadata, table


def decode_places(data: bytes) -> tuple[FragmentMetadata, pa.Table]:
    """Return a fragment with the columns PLACES of its rows, faster than `decode_columns`.

    The rows are not checked. This is for a reader that compares the fragment with the committed digest, so
    that the writer has checked them, and that takes the few rows it needs with `take_rows`, which checks
    those again. Texts are dictionaries. Raise FormatError for any other violation of the format.
    """
    return _decoded(data, PLACES)


def read_digests(data: bytes) -> pa.Table:
    """Return the digests of the rows of a fragment, one column. They are not checked; see `take_rows`."""
    return _read_parquet(data, DIGEST)[1]


def take_rows(places: pa.Table, digests: pa.Table, at: pa.Array) -> tuple[ManifestRow, ...]:
    """Return the rows with the numbers `at` (int64) from the columns of `decode_places` and `read_digests`.

    Raise FormatError for a row that breaks a rule of rows.
    """
    rows = rows_of(places.take(at).append_column("digest", digests.column("digest").take(at)))
    for row in rows:
        _check_row(row)
    return rows


def _decoded(data: bytes, columns: pa.Schema) -> tuple[FragmentMetadata, pa.Table]:
    jsontext.check_size(data, what="The fragment", max_bytes=MAX_FRAGMENT_BYTES)
    sealed, table = _read_parquet(data, columns)
    metadata = _metadata(sealed)
    if metadata.num_rows != table.num_rows:
        raise FormatError(f"The fragment has {table.num_rows} rows, not {metadata.num_rows}.")
    return metadata, table


def _metadata(sealed: bytes) -> FragmentMetadata:
    document = jsontext.loads_sealed(sealed, what="The fragment", max_bytes=MAX_FRAGMENT_BYTES)
    metadata = FragmentMetadata(
        attempt=_attempt(document),
        node_index=jsontext.integer(document.get("node_index"), "node_index"),
        num_nodes=jsontext.integer(document.get("num_nodes"), "num_nodes"),
        world_size=jsontext.integer(document.get("world_size"), "world_size"),
        ranks=tuple(jsontext.integer(r, "ranks") for r in jsontext.array(document.get("ranks"), "ranks")),
        files=_files(document.get("files")),
        num_rows=jsontext.integer(document.get("num_rows"), "num_rows", high=MAX_ROWS),
        replicated=tuple(
            jsontext.text(d, "replicated")
            for d in jsontext.array(document.get("replicated", []), "replicated")
        ),
        metrics=_metrics(document.get("metrics")),
    )
    _check_metadata(metadata)
    return metadata


def _with_rows(metadata: FragmentMetadata, table: pa.Table) -> Fragment:
    return Fragment(
        attempt=metadata.attempt,
        node_index=metadata.node_index,
        num_nodes=metadata.num_nodes,
        world_size=metadata.world_size,
        ranks=metadata.ranks,
        files=metadata.files,
        rows=rows_of(table),
        replicated=metadata.replicated,
        metrics=metadata.metrics,
    )


def rows_table(fragments: Iterable[Fragment]) -> pa.Table:
    """Return all rows of `fragments`, in order, as one table with the columns COLUMNS."""
    rows = [row for fragment in fragments for row in fragment.rows]
    columns = {name: [getattr(row, name) for row in rows] for name in _ROW_COLUMNS}
    for name in _SLICE_COLUMNS:
        columns[name] = [None if row.slice is None else getattr(row.slice, name) for row in rows]
    try:
        return pa.table({name: columns[name] for name in COLUMNS.names}, schema=COLUMNS)
    except (pa.ArrowException, UnicodeError, OverflowError, TypeError) as error:
        raise FormatError(f"The rows do not fit the columns of a manifest: {error}.") from error


def _read_parquet(data: bytes, columns: pa.Schema) -> tuple[bytes, pa.Table]:
    """Return the metadata and some of the columns of a fragment, of the right types."""
    try:
        footer = parquet.open_metadata(data)
        metadata: bytes = footer.metadata[METADATA_KEY]
        jsontext.refuse_newer(metadata, what="The fragment", max_bytes=MAX_FRAGMENT_BYTES)
        table = parquet.read_table(data, columns, max_rows=MAX_ROWS, file_metadata=footer)
        if missing := set(columns.names) - set(table.column_names):
            raise FormatError(f"it has no column {min(missing)}")
    except NewerFormat:
        raise
    except Exception as error:  # the decoder's errors on damaged bytes have no common class
        raise FormatError(f"The fragment is not a Parquet file of a manifest: {error}.") from error
    return metadata, table


def version_files(version: FragmentVersion) -> tuple[FileEntry, ...]:
    """Return the entry of the fragment's file and the entries that the fragment lists."""
    entry, fragment = version
    return entry, *fragment.files


def choose_fragments(
    versions: Mapping[str, Mapping[str, Sequence[FileEntry]]], expected: str, of: RootOf
) -> dict[str, str] | None:
    """Return a digest for each fragment name, so that all files together have the root digest `expected`.

    Return None if none of the first MAX_CHOICES combinations has this root digest. `versions` has the
    `version_files` by fragment name and digest.
    """
    found = sorted(versions)
    for choice in islice(product(*(versions[name] for name in found)), MAX_CHOICES):
        chosen = dict(zip(found, choice, strict=True))
        files = (file for name in found for file in versions[name][chosen[name]])
        if root_digest(files, of) == expected:
            return chosen
    return None


# checkpoint.json


def encode_checkpoint(description: CheckpointDescription) -> bytes:
    """Return the bytes of `checkpoint.json`; equal descriptions give equal bytes. Raise FormatError."""
    _check_description(description)
    is_old = description.root_of == "files"
    document = {
        **_attempt_json(description.attempt),
        "format": jsontext.FORMAT_VERSION if is_old else DESCRIPTION_VERSION,
        **({"format": ITEMS_VERSION, "items": description.items} if description.items else {}),
        "world_size": description.world_size,
        "num_nodes": description.num_nodes,
        "metrics": jsontext.metrics_json(description.metrics),
        description.root_of: _files_json(description.files),
        "root_digest": description.root_digest,
    }
    return jsontext.dumps_sealed(document, what=CHECKPOINT_JSON, max_bytes=MAX_DESCRIPTION_BYTES, indent=1)


def decode_checkpoint(data: bytes) -> CheckpointDescription:
    """Return the content of `checkpoint.json`. Raise FormatError if any byte was changed."""
    document = jsontext.loads_sealed(
        data, what=CHECKPOINT_JSON, max_bytes=MAX_DESCRIPTION_BYTES, indent=1, newest=ITEMS_VERSION
    )
    root_of: RootOf = "files" if document["format"] == jsontext.FORMAT_VERSION else "fragments"
    description = CheckpointDescription(
        attempt=_attempt(document),
        world_size=jsontext.integer(document.get("world_size"), "world_size"),
        num_nodes=jsontext.integer(document.get("num_nodes"), "num_nodes"),
        metrics=jsontext.metrics(document.get("metrics"), "metrics"),
        files=_files(document.get(root_of)),
        root_digest=jsontext.hex_digest(document.get("root_digest"), "root_digest"),
        root_of=root_of,
        items=jsontext.text(document.get("items"), "items") if document["format"] == ITEMS_VERSION else "",
    )
    if document["format"] == ITEMS_VERSION:
        check_items(description.items)
    _check_description(description)
    return description


# Coverage


def check_coverage(rows: Iterable[ManifestRow]) -> None:
    """Raise FormatError, with the tensor's name, unless the slices of each tensor cover the tensor exactly.

    The same region may be stored more than once; different regions must not overlap. All slices of a tensor
    must agree on dtype and global shape. The check takes one sort per tensor, and for grids over several
    dimensions time in proportion to the corners of the slices.
    """
    tensors: dict[str, dict[Region, Slice]] = defaultdict(dict)
    for row in rows:
        if row.slice is not None:
            tensors[row.slice.key].setdefault((row.slice.offset, row.slice.shape), row.slice)
            first = next(iter(tensors[row.slice.key].values()))
            if (row.slice.dtype, row.slice.global_shape) != (first.dtype, first.global_shape):
                raise FormatError(f"The slices of {first.key} differ in dtype or shape.", key=first.key)
    for key, parts in tensors.items():
        for part in parts.values():
            check_slice(part)
        _check_tiling(key, next(iter(parts.values())).global_shape, [r for r in parts if prod(r[1])])


def uncovered(rows: Iterable[ManifestRow]) -> Iterator[str]:
    """Yield a text about each tensor that fails `check_coverage`.

    Ranks save tensors of their own under one key, and these may differ in dtype and global shape. The slices
    of each such form must cover it.
    """
    for _, slices in by_tensor(rows):
        forms: dict[object, list[ManifestRow]] = defaultdict(list)
        for row in slices:
            if row.slice is not None:
                forms[row.slice.dtype, row.slice.global_shape].append(row)
        for form in forms.values():
            try:
                check_coverage(form)
            except FormatError as error:
                yield str(error)


def by_tensor(rows: Iterable[ManifestRow]) -> Iterator[tuple[str, Sequence[ManifestRow]]]:
    """Yield the item and the slices of each tensor."""
    tensors: dict[tuple[str, str], list[ManifestRow]] = {}
    for row in rows:
        if row.slice is not None:
            tensors.setdefault((row.slice.item, row.slice.key), []).append(row)
    for (item, _), slices in sorted(tensors.items()):
        yield item, slices


def _check_tiling(key: str, global_shape: tuple[int, ...], regions: Sequence[Region]) -> None:
    has_overlap = _overlap(regions, len(global_shape))
    if has_overlap is None:
        if not _fills(key, global_shape, regions):
            raise FormatError(f"Slices of {key} overlap, or leave elements out.", key=key)
        return
    if has_overlap:
        raise FormatError(f"Slices of {key} overlap.", key=key)
    missing = prod(global_shape) - sum(prod(shape) for _, shape in regions)
    if missing:
        raise FormatError(f"{missing} elements of {key} are in no slice.", key=key)


def _overlap(regions: Sequence[Region], num_dims: int) -> bool | None:
    """Return whether two of the non-empty, distinct `regions` overlap; sweep the axis with most cuts.

    Return None if more than MAX_COMPARED comparisons do not decide it.
    """
    if len(regions) < 2:
        return False
    left = MAX_COMPARED
    axis = max(range(num_dims), key=lambda d: len({offset[d] for offset, _ in regions}))
    reached: list[Region] = []  # regions that contain the sweep line
    for region in sorted(regions, key=lambda r: r[0][axis]):
        start = region[0][axis]
        reached = [r for r in reached if r[0][axis] + r[1][axis] > start]
        left -= len(reached)
        if left < 0:
            return None
        if any(_share(region, other) for other in reached):
            return True
        reached.append(region)
    return False


def _share(one: Region, other: Region) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True))


def _fills(key: str, global_shape: tuple[int, ...], regions: Sequence[Region]) -> bool:
    """Return whether the non-empty `regions` cover a tensor exactly. Raise FormatError for too many corners.

    The corners of a region count 1 and -1 in turn. The sums at all points determine how often each element is
    covered, so the sums of an exact cover are those of the whole tensor. (A sum of indicator functions with
    bounded support is the integral, over all axes, of its mixed derivative, which has these sums as weights.)
    """
    axes = [d for d, size in enumerate(global_shape) if any(shape[d] != size for _, shape in regions)]
    if len(regions) << len(axes) > MAX_CORNERS:
        text = f"{key} has too many slices to check: {len(regions)}, cut along {len(axes)} dimensions."
        raise FormatError(text, key=key)
    sums: defaultdict[tuple[int, ...], int] = defaultdict(int)
    whole = ((0,) * len(global_shape), global_shape)
    for weight, boxes in ((1, regions), (-1, [whole])):
        for offset, shape in boxes:
            for ends in product((0, 1), repeat=len(axes)):
                corner = tuple(offset[d] + end * shape[d] for d, end in zip(axes, ends, strict=True))
                sums[corner] += -weight if sum(ends) % 2 else weight
                if not sums[corner]:
                    del sums[corner]
    return not sums


# Checks shared by both directions


def _attempt_json(attempt: AttemptId) -> dict[str, Any]:
    return {
        "format": jsontext.FORMAT_VERSION,
        "run_uid": attempt.run_uid,
        "session": attempt.session,
        "step": attempt.step,
        "attempt": attempt.attempt,
        **({"epoch": attempt.epoch} if attempt.epoch else {}),  # older checkpoints do not have the field
    }


def _attempt(document: Mapping[str, Any]) -> AttemptId:
    return AttemptId(
        run_uid=jsontext.text(document.get("run_uid"), "run_uid"),
        session=jsontext.integer(document.get("session"), "session"),
        step=jsontext.integer(document.get("step"), "step"),
        attempt=jsontext.text(document.get("attempt"), "attempt"),
        epoch=jsontext.integer(document.get("epoch", 0), "epoch"),
    )


def _metrics(value: object) -> Mapping[str, float] | None:
    return None if value is None else jsontext.metrics(value, "metrics")


def _files_json(files: Iterable[FileEntry]) -> list[list[Any]]:
    return [[file.name, file.size_bytes, file.digest] for file in files]


def _files(value: object) -> tuple[FileEntry, ...]:
    return tuple(_file(jsontext.array(entry, "files")) for entry in jsontext.array(value, "files"))


def _file(entry: Sequence[Any]) -> FileEntry:
    if len(entry) != 3:
        raise FormatError("An entry of files must be a name, a size and a digest.")
    name, size_bytes, digest = entry
    return FileEntry(name=name, size_bytes=size_bytes, digest=digest)


def _check_group(attempt: AttemptId, world_size: int, num_nodes: int, files: Sequence[FileEntry]) -> None:
    check_run_uid(attempt.run_uid)
    check_directory(attempt.directory)
    jsontext.integer(attempt.session, "session")
    jsontext.integer(attempt.step, "step")
    jsontext.integer(world_size, "world_size", low=1, high=MAX_RANKS)
    jsontext.integer(num_nodes, "num_nodes", low=1, high=MAX_RANKS)
    for file in files:
        check_file(jsontext.text(file.name, "A file name"))
        jsontext.integer(file.size_bytes, f"{file.name}: size")
        jsontext.hex_digest(file.digest, f"{file.name}: digest")
    if len({file.name for file in files}) != len(files):
        raise FormatError("A file is listed twice.")


def _check_description(description: CheckpointDescription) -> None:
    files = description.files
    _check_group(description.attempt, description.world_size, description.num_nodes, files)
    names = [file.name for file in files]
    if names != sorted(names) or CHECKPOINT_JSON in names:
        raise FormatError(f"{CHECKPOINT_JSON} must list the other files in the order of their names.")
    fragments = {file.name for file in description.fragments}
    if len(fragments) != description.num_nodes or fragments != {
        fragment_file(index, description.num_nodes) for index in range(description.num_nodes)
    }:
        raise FormatError(f"{CHECKPOINT_JSON} does not list the {description.num_nodes} fragments.")
    if description.root_of == "fragments" and len(files) != len(fragments):
        raise FormatError(f"{CHECKPOINT_JSON} lists other files than fragments.")
    if root_digest(files, description.root_of) != description.root_digest:
        raise FormatError(f"{CHECKPOINT_JSON}: the root digest is not that of its {description.root_of}.")


def _check_metadata(fragment: FragmentMetadata) -> None:
    _check_group(fragment.attempt, fragment.world_size, fragment.num_nodes, fragment.files)
    jsontext.integer(fragment.node_index, "node_index", high=fragment.num_nodes - 1)
    for rank in fragment.ranks:
        jsontext.integer(rank, "ranks", high=fragment.world_size - 1)
    if list(fragment.ranks) != sorted(set(fragment.ranks)):
        raise FormatError("The ranks of a fragment must be distinct and in order.")
    if fragment.num_rows > MAX_ROWS:
        raise FormatError(f"A fragment has {fragment.num_rows} rows; the format allows {MAX_ROWS}.")
    if not all(file.name.startswith(tuple(_KINDS)) for file in fragment.files):
        raise FormatError("A fragment lists shards and state files only.")


def _check_fragment(fragment: Fragment) -> None:
    _check_metadata(fragment.metadata)
    spans: dict[str, list[tuple[int, int]]] = {file.name: [] for file in fragment.files}
    for row in fragment.rows:
        if row.file not in spans:
            raise FormatError(f"A row names {row.file!r}, which the fragment does not list.")
        _check_row(row)
        spans[row.file].append((row.byte_offset, row.nbytes))
    for file in fragment.files:
        _check_cover(file, spans[file.name])


def _check_row(row: ManifestRow) -> None:
    jsontext.text(row.file, "The file of a row")
    if row.kind not in _KINDS.get(row.file.split("-")[0], ()) or (row.kind == "slice") != (
        row.slice is not None
    ):
        raise FormatError(f"{row.file} cannot have a row of kind {row.kind!r}.", file=row.file)
    jsontext.integer(
        row.byte_offset, f"{row.file}: byte_offset", high=0 if row.kind == "header" else jsontext.MAX_INT
    )
    jsontext.integer(row.nbytes, f"{row.file}: nbytes", high=_MAX_BYTES.get(row.kind, jsontext.MAX_INT))
    jsontext.hex_digest(row.digest, f"{row.file}: digest")
    if row.slice is not None and check_slice(row.slice) != row.nbytes:
        raise FormatError(f"{row.label} cannot have {row.nbytes} bytes.", file=row.file)


def _check_cover(file: FileEntry, spans: list[tuple[int, int]]) -> None:
    end = 0
    for byte_offset, nbytes in sorted(spans):
        if byte_offset != end:
            raise FormatError(f"The rows of {file.name} leave out or repeat bytes at {end}.", file=file.name)
        end += nbytes
    if end != file.size_bytes:
        raise FormatError(
            f"The rows of {file.name} end at byte {end}, the file at {file.size_bytes}.", file=file.name
        )
