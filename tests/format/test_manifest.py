"""Fragments and checkpoint.json: exact round trips, nothing false accepted, damage found, coverage proven."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.errors import FormatError, NewerFormat
from ray_ckpt.format import manifest, parquet
from ray_ckpt.format.digest import digest, root_digest, root_files
from ray_ckpt.format.jsontext import dumps_sealed, loads_sealed
from ray_ckpt.format.manifest import (
    CheckpointDescription,
    _fills,
    _overlap,
    _share,
    check_coverage,
    decode_checkpoint,
    decode_fragment,
    encode_checkpoint,
    encode_fragment,
    rows_table,
    uncovered,
)
from ray_ckpt.format.names import CHECKPOINT_JSON, fragment_file, shard_file, state_file
from ray_ckpt.format.shard import build_layout
from ray_ckpt.types import AttemptId, FileEntry, Fragment, ManifestRow, RootOf, Slice
from tests.support.examples import examples

GOLDEN = Path(__file__).parent.parent / "golden"
UID = "0123456789abcdef" * 2
ATTEMPT = AttemptId(run_uid=UID, session=1, step=1000, attempt="328ddb164b30f670")


def part(name: str, *spans: tuple[int, int, int], dtype: str = "F32") -> Slice:
    """Return a slice from one (offset, size, global size) per dimension."""
    offset, shape, total = zip(*spans, strict=True) if spans else ((), (), ())
    return Slice(item="model", name=name, dtype=dtype, global_shape=total, offset=offset, shape=shape)


def rows_of(file: str, parts: list[Slice]) -> list[ManifestRow]:
    layout = build_layout(parts)
    header = ManifestRow(
        kind="header", file=file, byte_offset=0, nbytes=len(layout.header), digest=digest(layout.header)
    )
    return [
        header,
        *(
            ManifestRow(
                kind="slice",
                file=file,
                byte_offset=placed.byte_offset,
                nbytes=placed.nbytes,
                digest=digest(bytes(placed.nbytes)),
                slice=placed.slice,
            )
            for placed in layout.slices
        ),
    ]


def fragment_of(parts: list[list[Slice]], *, node_index: int = 0, num_nodes: int = 1) -> Fragment:
    """Return a fragment with one shard per list of slices, and a state file of 17 bytes for each."""
    rows, files = [], []
    for rank, shard_parts in enumerate(parts):
        shard, state = shard_file(rank, len(parts)), state_file(rank, len(parts))
        shard_rows = rows_of(shard, shard_parts)
        rows += shard_rows
        rows.append(ManifestRow(kind="state", file=state, byte_offset=0, nbytes=17, digest=digest(b"state")))
        files.append(
            FileEntry(name=shard, size_bytes=sum(r.nbytes for r in shard_rows), digest=digest(b"shard"))
        )
        files.append(FileEntry(name=state, size_bytes=17, digest=digest(b"state")))
    return Fragment(
        attempt=ATTEMPT,
        node_index=node_index,
        num_nodes=num_nodes,
        world_size=len(parts),
        ranks=tuple(range(len(parts))),
        files=tuple(files),
        rows=tuple(rows),
    )


FRAGMENT = fragment_of(
    [
        [part("w", (0, 2, 6), (0, 4, 4)), part("step", dtype="I64"), part("empty", (0, 0, 0))],
        [part("w", (2, 4, 6), (0, 4, 4))],
    ]
)


def description_of(fragment: Fragment) -> CheckpointDescription:
    """Return the description that older versions wrote: with all files of the checkpoint."""
    data = encode_fragment(fragment)
    entry = FileEntry(name=fragment_file(0, 1), size_bytes=len(data), digest=digest(data))
    files = tuple(root_files((*fragment.files, entry), "files"))
    return CheckpointDescription(
        attempt=fragment.attempt,
        world_size=fragment.world_size,
        num_nodes=1,
        metrics={"loss": 0.25, "worst": math.inf},
        files=files,
        root_digest=root_digest(files, "files"),
        root_of="files",
    )


OLDER = description_of(FRAGMENT)
FRAGMENTS = tuple(
    FileEntry(name=fragment_file(index, 2), size_bytes=3000 + index, digest=digest(b"%d" % index))
    for index in range(2)
)
DESCRIPTION = replace(
    OLDER, num_nodes=2, files=FRAGMENTS, root_digest=root_digest(FRAGMENTS), root_of="fragments"
)
DESCRIPTIONS = pytest.mark.parametrize("description", [DESCRIPTION, OLDER], ids=["2", "1"])


@st.composite
def fragments(draw: st.DrawFn) -> Fragment:
    shards = []
    for _ in range(draw(st.integers(1, 3))):
        names = draw(
            st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=4, unique=True)
        )
        spans = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(6, 9))
        dtypes = st.sampled_from(["F32", "BF16", "U8"])
        shards.append([part(n, *draw(st.lists(spans, max_size=3)), dtype=draw(dtypes)) for n in names])
    return fragment_of(shards)


# Fragments


@given(fragments())
@examples(60)
def test_fragments_round_trip(fragment: Fragment) -> None:
    data = encode_fragment(fragment)
    assert decode_fragment(data) == fragment
    assert encode_fragment(fragment) == data


def test_any_parquet_reader_can_query_a_fragment() -> None:
    table = pq.read_table(io.BytesIO(encode_fragment(FRAGMENT)))
    assert table.column_names == manifest.COLUMNS.names
    assert table.num_rows == len(FRAGMENT.rows)
    first = next(row for row in table.to_pylist() if row["name"] == "w")
    assert (first["item"], first["dtype"], first["shape"], first["nbytes"]) == ("model", "F32", [2, 4], 32)
    both = rows_table([FRAGMENT, FRAGMENT])
    assert both.schema == manifest.COLUMNS and both.num_rows == 2 * len(FRAGMENT.rows)
    assert rows_table([]).num_rows == 0


def first_row(**changes: Any) -> Callable[[Fragment], Fragment]:
    return lambda f: replace(f, rows=(replace(f.rows[0], **changes), *f.rows[1:]))


def slice_row(**changes: Any) -> Callable[[Fragment], Fragment]:
    return lambda f: replace(f, rows=(f.rows[0], replace(f.rows[1], **changes), *f.rows[2:]))


def first_file(**changes: Any) -> Callable[[Fragment], Fragment]:
    return lambda f: replace(f, files=(replace(f.files[0], **changes), *f.files[1:]))


def with_attempt(**changes: Any) -> Callable[[Fragment], Fragment]:
    return lambda f: replace(f, attempt=replace(f.attempt, **changes))


FALSE: list[Callable[[Fragment], Fragment]] = [
    with_attempt(run_uid="x"),
    with_attempt(step=10**12),
    with_attempt(step=-1),
    with_attempt(session=-1),
    with_attempt(attempt="../../../etc/x.."),
    lambda f: replace(f, node_index=1),
    lambda f: replace(f, num_nodes=0),
    lambda f: replace(f, world_size=1),
    lambda f: replace(f, ranks=(1, 0)),
    lambda f: replace(f, ranks=(0, 0)),
    lambda f: replace(f, ranks=(-1,)),
    lambda f: replace(f, files=f.files[1:]),
    lambda f: replace(f, files=(*f.files, f.files[0])),
    lambda f: replace(f, files=(*f.files, FileEntry(name="checkpoint.json", size_bytes=0, digest=UID))),
    lambda f: replace(f, files=(*f.files, FileEntry(name=shard_file(9, 9), size_bytes=1, digest=UID))),
    first_file(name="../x"),
    first_file(size_bytes=-1),
    first_file(size_bytes=5000),
    first_file(digest="x"),
    first_row(kind="slice"),
    first_row(kind="state"),
    first_row(kind="other"),
    first_row(file="shard-00007-of-00008.safetensors"),
    first_row(byte_offset=8),
    first_row(byte_offset=-4096),
    first_row(nbytes=4095),
    first_row(nbytes=-1),
    first_row(nbytes=2**70),
    first_row(digest="0" * 31),
    slice_row(slice=None),
    slice_row(kind="header"),
    slice_row(slice=part("w", (0, 3, 6), (0, 4, 4))),
    slice_row(slice=part("w", (5, 2, 6), (0, 4, 4))),
    slice_row(slice=part("w", (0, 2, 6), (0, 4, 4), dtype="X32")),
    slice_row(slice=part("\ud800", (0, 1, 1), dtype="I64")),
    lambda f: replace(f, rows=f.rows[1:]),
    lambda f: replace(f, rows=(*f.rows, f.rows[0])),
]


@pytest.mark.parametrize("change", FALSE)
def test_a_false_fragment_is_neither_written_nor_read(
    change: Callable[[Fragment], Fragment], monkeypatch: pytest.MonkeyPatch
) -> None:
    false = change(FRAGMENT)
    with pytest.raises(FormatError):
        encode_fragment(false)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(manifest, "_check_fragment", lambda fragment: None)
        try:
            data = encode_fragment(false)
        except FormatError:
            return
    with pytest.raises(FormatError):
        decode_fragment(data)


def with_metadata(metadata: bytes | None) -> bytes:
    table = rows_table([FRAGMENT]).replace_schema_metadata(
        None if metadata is None else {manifest.METADATA_KEY: metadata}
    )
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def metadata_of(data: bytes) -> dict[str, Any]:
    document = json.loads(pq.read_schema(io.BytesIO(data)).metadata[manifest.METADATA_KEY])
    assert isinstance(document, dict)
    return document


def test_a_newer_format_is_named() -> None:
    document = metadata_of(encode_fragment(FRAGMENT))
    newer = dumps_sealed({**document, "format": 2, "extra": 1}, what="", max_bytes=10**6)
    with pytest.raises(FormatError, match=r"of a newer version; update ray_ckpt.*format 2.*up to format 1"):
        decode_fragment(with_metadata(newer))


@pytest.mark.parametrize(
    "changes",
    [{"num_rows": 3}, {"format": None}, {"format": 0}, {"ranks": 1}, {"files": [[1]]}, {"files": [[1, 2, 3]]}]
    + [{key: None} for key in ("run_uid", "session", "step", "attempt", "node_index", "num_nodes", "files")],
)
def test_false_metadata_is_refused(changes: dict[str, Any]) -> None:
    document = metadata_of(encode_fragment(FRAGMENT))
    del document["digest"]
    assert decode_fragment(with_metadata(dumps_sealed(document, what="", max_bytes=10**6))) == FRAGMENT
    with pytest.raises(FormatError):
        decode_fragment(with_metadata(dumps_sealed({**document, **changes}, what="", max_bytes=10**6)))


def test_other_parquet_files_are_refused() -> None:
    metadata = {
        manifest.METADATA_KEY: pq.read_schema(io.BytesIO(encode_fragment(FRAGMENT))).metadata[b"ray_ckpt"]
    }
    table = rows_table([FRAGMENT]).replace_schema_metadata(metadata)
    for other in (
        table.drop_columns(["digest"]),
        table.set_column(8, "byte_offset", pa.array(["x"] * table.num_rows)),
        table.slice(1),
        table.slice(0, 0),
        table.set_column(4, "global_shape", pa.array([[None]] * table.num_rows, pa.list_(pa.int64()))),
        table.set_column(10, "digest", pa.nulls(table.num_rows, pa.string())),
    ):
        sink = io.BytesIO()
        pq.write_table(other, sink)
        with pytest.raises(FormatError):
            decode_fragment(sink.getvalue())
    for data in (
        b"",
        b"PAR1",
        b"PAR1PAR1",
        with_metadata(None),
        with_metadata(b"\xff"),
        with_metadata(b"{}\n"),
    ):
        with pytest.raises(FormatError):
            decode_fragment(data)


def with_column(name: str, values: list[Any], kind: pa.DataType) -> bytes:
    """Return the file of FRAGMENT with other values, or values of another type, in a column."""
    table = rows_table([FRAGMENT])
    table = table.set_column(table.column_names.index(name), name, pa.array(values, kind))
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        known = pq.read_schema(io.BytesIO(encode_fragment(FRAGMENT))).metadata
        writer.add_key_value_metadata({manifest.METADATA_KEY: known[manifest.METADATA_KEY]})
    return sink.getvalue()


@pytest.mark.parametrize("name", ["global_shape", "offset", "shape"])
def test_a_null_in_a_list_is_refused(name: str) -> None:
    known = rows_table([FRAGMENT]).column(name).to_pylist()
    values = [None if each is None else [None] * len(each) for each in known]
    with pytest.raises(FormatError, match=f"{name} has a null in a list"):
        decode_fragment(with_column(name, values, pa.list_(pa.int64())))


@pytest.mark.parametrize("name", ["kind", "item", "name", "dtype", "file", "digest"])
@pytest.mark.parametrize("end", [b"", b"\xff"])
def test_bytes_in_place_of_text_are_refused(name: str, end: bytes) -> None:
    known = rows_table([FRAGMENT]).column(name).to_pylist()
    values = [None if each is None else each.encode() + end for each in known]
    with pytest.raises(FormatError, match=f"the column {name} is of"):
        decode_fragment(with_column(name, values, pa.binary()))


def test_size_limits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_fragment(FRAGMENT)
    for name, limit in (("MAX_FRAGMENT_BYTES", 1000), ("MAX_ROWS", 4)):
        with monkeypatch.context() as context:
            context.setattr(manifest, name, limit)
            with pytest.raises(FormatError):
                decode_fragment(data)


@pytest.mark.parametrize(
    ("name", "limit"), [("MAX_UNPACKED_BYTES", 400), ("MAX_TEXT_BYTES", 100), ("MAX_FREE_ROWS", -4000)]
)
def test_a_fragment_that_exceeds_the_limits_of_readers_is_not_written(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    data = encode_fragment(FRAGMENT)
    monkeypatch.setattr(manifest, "_SMALL_TABLE_BYTES", 0)
    monkeypatch.setattr(parquet, name, limit)
    with pytest.raises(FormatError):
        decode_fragment(data)
    with pytest.raises(FormatError, match=f"A fragment of {len(FRAGMENT.rows)} rows is too large"):
        encode_fragment(FRAGMENT)


def test_truncated_fragments_are_found() -> None:
    data = encode_fragment(FRAGMENT)
    for size in range(0, len(data), 5):
        with pytest.raises(FormatError):
            decode_fragment(data[:size])


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))])
def test_flipped_fragments_are_found(first: int) -> None:
    data = bytearray(encode_fragment(FRAGMENT))
    for index in range(first, len(data), 5):
        bit = index // 5 % 8
        data[index] ^= 1 << bit
        with suppress(FormatError):  # a flip that changes nothing we read (a writer's name) may pass
            assert decode_fragment(bytes(data)) == FRAGMENT
        data[index] ^= 1 << bit


@pytest.mark.parametrize(
    ("name", "root_of"), [("checkpoint-1.json", "files"), ("checkpoint-2.json", "fragments")]
)
def test_the_golden_fragment_and_descriptions_are_read_forever(name: str, root_of: RootOf) -> None:
    assert decode_fragment((GOLDEN / "manifest-1.parquet").read_bytes()) == FRAGMENT
    golden = (GOLDEN / name).read_bytes()
    description = decode_checkpoint(golden)
    assert (description.attempt, description.root_of) == (ATTEMPT, root_of)
    assert description.metrics == DESCRIPTION.metrics
    assert encode_checkpoint(description) == golden


def test_the_golden_description_of_some_items_is_read_forever() -> None:
    golden = (GOLDEN / "checkpoint-3.json").read_bytes()
    description = decode_checkpoint(golden)
    assert (description.attempt, description.items) == (ATTEMPT, "ema,model")
    assert encode_checkpoint(description) == golden
    whole = (GOLDEN / "checkpoint-2.json").read_bytes()
    assert decode_checkpoint(whole) == replace(description, items="")


@pytest.mark.parametrize("items", ["", "a,,b", "../model", "model.head", "a b", ","])
def test_a_description_of_impossible_items_is_refused(items: str) -> None:
    document = json.loads((GOLDEN / "checkpoint-3.json").read_bytes())
    del document["digest"]
    data = dumps_sealed(document | {"items": items}, what="it", max_bytes=2**20, indent=1)
    with pytest.raises(FormatError):
        decode_checkpoint(data)


# checkpoint.json


@DESCRIPTIONS
def test_descriptions_round_trip(description: CheckpointDescription) -> None:
    data = encode_checkpoint(description)
    assert decode_checkpoint(data) == description
    assert data.endswith(b"}\n")
    shuffled = replace(description, metrics=dict(sorted(description.metrics.items(), reverse=True)))
    assert encode_checkpoint(shuffled) == data
    nan = decode_checkpoint(encode_checkpoint(replace(description, metrics={"loss": math.nan})))
    assert math.isnan(nan.metrics["loss"])


def test_a_description_lists_the_files_of_its_root_digest() -> None:
    new, old = (json.loads(encode_checkpoint(each)) for each in (DESCRIPTION, OLDER))
    assert (new["format"], [name for name, _, _ in new["fragments"]]) == (2, [f.name for f in FRAGMENTS])
    assert "files" not in new and "fragments" not in old
    assert (old["format"], len(old["files"])) == (1, 1 + len(FRAGMENT.files))
    assert old["root_digest"] != new["root_digest"]


def test_a_version_that_knows_only_lists_of_all_files_calls_a_description_newer() -> None:
    with pytest.raises(NewerFormat, match=r"checkpoint.json is of a newer version; .* in format 2"):
        loads_sealed(encode_checkpoint(DESCRIPTION), what=CHECKPOINT_JSON, max_bytes=2**20, indent=1)


@DESCRIPTIONS
def test_every_flip_and_truncation_of_a_description_is_found(description: CheckpointDescription) -> None:
    data = bytearray(encode_checkpoint(description))
    for size in range(len(data)):
        with pytest.raises(FormatError, match=CHECKPOINT_JSON):
            decode_checkpoint(bytes(data[:size]))
    for index in range(len(data)):
        for bit in range(8):
            data[index] ^= 1 << bit
            with pytest.raises(FormatError, match=CHECKPOINT_JSON):
                decode_checkpoint(bytes(data))
            data[index] ^= 1 << bit


def with_files(old: CheckpointDescription, *files: FileEntry) -> CheckpointDescription:
    return replace(old, files=files, root_digest=root_digest(files, old.root_of))


def false_ones(true: CheckpointDescription) -> list[CheckpointDescription]:
    return [
        replace(true, root_digest=UID),
        replace(true, world_size=0),
        replace(true, num_nodes=3),
        replace(true, metrics={"a": "b"}),  # type: ignore[dict-item]
        replace(true, attempt=replace(ATTEMPT, attempt="..")),
        with_files(true, *reversed(true.files)),
        with_files(true, *true.files[1:]),
        with_files(true, *true.files, true.files[-1]),
        with_files(true, FileEntry(name=CHECKPOINT_JSON, size_bytes=1, digest=UID), *true.files),
        with_files(true, *true.files, FileEntry(name="../z", size_bytes=1, digest=UID)),
        with_files(true, *true.files, FileEntry(name="state-7-of-8.json", size_bytes=-1, digest=UID)),
        with_files(true, *true.files[:-1], FileEntry(name=fragment_file(1, 9), size_bytes=1, digest=UID)),
    ]


OTHER_FILE = FileEntry(name="state-7-of-8.json", size_bytes=1, digest=UID)


@pytest.mark.parametrize(
    "description",
    [
        *false_ones(DESCRIPTION),
        with_files(DESCRIPTION, *DESCRIPTION.files, OTHER_FILE),
        *false_ones(OLDER),
        replace(OLDER, root_of="fragments"),
        replace(OLDER, root_digest=root_digest(OLDER.files, "fragments")),
        replace(OLDER, root_digest=root_digest(OLDER.files, "fragments"), root_of="fragments"),
    ],
)
def test_a_false_description_is_neither_written_nor_read(
    description: CheckpointDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FormatError):
        encode_checkpoint(description)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(manifest, "_check_description", lambda description: None)
        try:
            data = encode_checkpoint(description)
        except FormatError:
            return
    with pytest.raises(FormatError):
        decode_checkpoint(data)


# Coverage


def covers(*parts: Slice) -> None:
    check_coverage(
        ManifestRow(kind="slice", file=shard_file(0, 1), byte_offset=0, nbytes=0, digest=UID, slice=p)
        for p in parts
    )


def test_exact_tilings_pass() -> None:
    covers()
    covers(part("scalar"))
    covers(part("scalar"), part("scalar"))
    covers(part("empty", (0, 0, 0)))
    covers(part("empty", (0, 0, 0), (0, 3, 3)), part("empty", (0, 0, 0), (1, 2, 3)))
    covers(part("w", (0, 2, 5)), part("w", (2, 3, 5)), part("w", (0, 2, 5)), part("w", (2, 0, 5)))
    covers(*FRAGMENT_SLICES)
    pinwheel = [((0, 2), (0, 1)), ((2, 1), (0, 2)), ((1, 2), (2, 1)), ((0, 1), (1, 2)), ((1, 1), (1, 1))]
    covers(*(part("w", (*a, 3), (*b, 3)) for a, b in pinwheel))


def test_tensors_of_ranks_under_one_key_may_differ_and_each_is_covered() -> None:
    def found(*parts: Slice) -> list[str]:
        row = ManifestRow(kind="slice", file=shard_file(0, 1), byte_offset=0, nbytes=0, digest=UID)
        return list(uncovered(replace(row, slice=p) for p in parts))

    whole, longer = part("w", (0, 2, 2)), part("w", (0, 3, 3))
    assert found(whole, longer, replace(whole, dtype="BF16")) == []
    assert found(whole, part("w", (0, 2, 3))) == ["1 elements of model.w are in no slice."]
    with pytest.raises(FormatError, match="differ"):
        covers(whole, longer)


FRAGMENT_SLICES = [row.slice for row in FRAGMENT.rows if row.slice is not None]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([part("w", (0, 2, 5))], "3 elements of model.w"),
        ([part("w", (0, 0, 5))], "5 elements of model.w"),
        ([part("w", (0, 3, 5)), part("w", (2, 3, 5))], "model.w overlap"),
        ([part("w", (0, 5, 5)), part("w", (1, 1, 5))], "model.w overlap"),
        ([part("w", (0, 3, 5)), part("w", (2, 2, 5))], "model.w overlap"),
        ([part("w", (0, 2, 5)), part("w", (2, 4, 6))], "model.w differ"),
        ([part("w", (0, 2, 5)), part("w", (2, 3, 5), dtype="F16")], "model.w differ"),
        ([part("w", (4, 2, 5)), part("w", (0, 3, 5))], "not inside"),
        ([part("w", (0, 2, 2), (0, 1, 2)), part("w", (0, 1, 2), (0, 2, 2))], "model.w overlap"),
    ],
)
def test_gaps_overlaps_and_disagreements_name_the_tensor(parts: list[Slice], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        covers(*parts)


boxes = st.tuples(st.integers(0, 2), st.integers(1, 3)).map(lambda p: (p[0], min(p[1], 3 - p[0]), 3))


@given(st.lists(st.tuples(boxes, boxes), min_size=1, max_size=5, unique=True))
@examples(300)
def test_coverage_agrees_with_counting_cells(regions: list[tuple[Any, Any]]) -> None:
    cells = [(x, y) for (a, m, _), (b, n, _) in regions for x in range(a, a + m) for y in range(b, b + n)]
    parts = [part("w", *region) for region in regions]
    if sorted(cells) == [(x, y) for x in range(3) for y in range(3)]:
        covers(*parts)
    else:
        with pytest.raises(FormatError):
            covers(*parts)


@given(st.lists(st.tuples(boxes, boxes), min_size=2, max_size=5, unique=True))
@examples(300)
def test_coverage_by_corners_agrees_with_coverage_by_comparisons(regions: list[tuple[Any, Any]]) -> None:
    whole = (3, 3)
    found = [(tuple(a for a, _, _ in spans), tuple(m for _, m, _ in spans)) for spans in regions]
    is_exact = sum(math.prod(shape) for _, shape in found) == math.prod(whole) and not _overlap(found, 2)
    assert _fills("w", whole, found) == is_exact


def test_many_chunks_are_cheap() -> None:
    covers(*(part("w", (0, 7, 7), (i, 1, 20_000)) for i in range(20_000)))


def test_a_grid_takes_time_in_proportion_to_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    num_compared = 0

    def share(one: Any, other: Any) -> bool:
        nonlocal num_compared
        num_compared += 1
        return _share(one, other)

    monkeypatch.setattr(manifest, "_share", share)
    monkeypatch.setattr(manifest, "MAX_COMPARED", 1000)
    grid = [part("w", (i, 1, 50), (k, 1, 50), (0, 9, 9)) for i in range(50) for k in range(50)]
    covers(*grid)
    for wrong in (grid[1:], [*grid[1:], part("w", (0, 1, 50), (1, 2, 50), (0, 9, 9))]):
        with pytest.raises(FormatError, match=r"Slices of model\.w overlap, or leave elements out"):
            covers(*wrong)
    assert num_compared <= 3 * 1000
    many = [part("w", *((i >> d & 1, 1, 2) for d in range(10))) for i in range(1024)]
    monkeypatch.setattr(manifest, "MAX_CORNERS", len(many) << 9)
    with pytest.raises(FormatError, match="too many slices"):
        covers(*many)
