"""The checks of rows by columns accept nothing that the checks row by row refuse, and all that is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.errors import FormatError
from ray_ckpt.format import manifest, parquet
from ray_ckpt.format.manifest import COLUMNS, MAX_ROWS, decode_columns, decode_fragment, encode_columns
from ray_ckpt.format.names import make_attempt
from ray_ckpt.format.row_columns import are_sound, rows_of
from ray_ckpt.types import FileEntry, Fragment
from tests.support.sample_run import make_checkpoint

FRAGMENT = make_checkpoint(make_attempt(run_uid="0" * 32, session=1, step=1, attempt=0), rows=8).fragments[0]

INTS = st.sampled_from([None, -(2**63), -1, 0, 1, 2, 8, 64, 2**31, 2**62, 2**63 - 1])
LISTS = st.none() | st.lists(st.sampled_from([-1, 0, 1, 2, 8, 2**62, 2**63 - 1]), max_size=3)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "kind": st.sampled_from([None, "header", "slice", "state", "other", ""]),
    "item": st.sampled_from([None, "", "model", "__metadata__"]),
    "name": st.sampled_from([None, "", "w", "__metadata__"]),
    "dtype": st.sampled_from([None, "F32", "BF16", "F4"]),
    "file": st.sampled_from([None, "", *(file.name for file in FRAGMENT.files), "shard-00009-of-00010"]),
    "digest": st.sampled_from([None, "", "0" * 32, "0" * 31, "G" * 32, "A" * 32, "0" * 33]),
    "byte_offset": INTS,
    "nbytes": INTS,
    "global_shape": LISTS,
    "offset": LISTS,
    "shape": LISTS,
}


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    """Return the rows as a reader gets them: through a file, with texts as dictionaries."""
    plain = pa.table({name: [row[name] for row in rows] for name in COLUMNS.names}, schema=COLUMNS)
    data = encode_columns(replace(FRAGMENT.metadata, num_rows=len(rows)), plain)
    return parquet.read_table(data, COLUMNS, max_rows=MAX_ROWS)


def is_right(table: pa.Table, files: tuple[FileEntry, ...]) -> bool:
    """Return True if the checks row by row accept the rows."""
    try:
        manifest._check_fragment(replace(FRAGMENT, files=files, rows=rows_of(table)))
    except FormatError:
        return False
    return True


def rows_as_dicts(fragment: Fragment) -> list[dict[str, Any]]:
    return list(manifest.rows_table([fragment]).to_pylist())


@given(data=st.data())
def test_no_broken_rule_passes_by_columns(data: st.DataObject) -> None:
    rows = rows_as_dicts(FRAGMENT)
    for _ in range(data.draw(st.integers(0, 3))):
        row = rows[data.draw(st.integers(0, len(rows) - 1))]
        name = data.draw(st.sampled_from(list(VALUES)))
        row[name] = data.draw(VALUES[name])
    match data.draw(st.sampled_from(["", "", "repeat", "drop", "reorder"])):
        case "repeat":
            rows.append(data.draw(st.sampled_from(rows)))
        case "drop":
            rows.pop(data.draw(st.integers(0, len(rows) - 1)))
        case "reorder":
            rows = data.draw(st.permutations(rows))
    files = FRAGMENT.files
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(files) - 1))
        files = (
            *files[:at],
            replace(files[at], size_bytes=data.draw(st.integers(0, 5000))),
            *files[at + 1 :],
        )
    table = table_of(rows)
    sound = are_sound(table, files, manifest._MAX_BYTES)
    assert not sound or is_right(table, files)
    rows_are_right = sorted(map(str, rows)) == sorted(map(str, rows_as_dicts(FRAGMENT)))
    assert sound or not rows_are_right or files != FRAGMENT.files


def test_right_rows_pass_by_columns() -> None:
    data = manifest.encode_fragment(FRAGMENT)
    metadata, table = decode_columns(data)
    assert metadata == FRAGMENT.metadata and are_sound(table, metadata.files, manifest._MAX_BYTES)
    assert rows_of(table) == FRAGMENT.rows == decode_fragment(data).rows


def test_a_fragment_without_files_has_no_rows() -> None:
    empty = replace(FRAGMENT, files=(), rows=())
    _, table = decode_columns(manifest.encode_fragment(empty))
    assert table.num_rows == 0 and are_sound(table, (), manifest._MAX_BYTES)


def test_a_broken_rule_is_named_with_its_row() -> None:
    rows = rows_as_dicts(FRAGMENT)
    rows[1]["digest"] = "x"
    plain = pa.table({name: [row[name] for row in rows] for name in COLUMNS.names}, schema=COLUMNS)
    with pytest.raises(FormatError, match="digest must be 32 hex digits"):
        decode_columns(encode_columns(FRAGMENT.metadata, plain))
