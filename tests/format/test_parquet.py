"""Parquet files that unpack to far more than they are: refused in little memory and time."""

from __future__ import annotations

import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ckpt.errors import FormatError
from ray_ckpt.format import manifest, parquet, snapshot
from ray_ckpt.format.manifest import decode_fragment
from ray_ckpt.format.snapshot import decode_snapshot

MOST_BYTES = 300 << 20  # above what the process has already
MOST_S = 20.0


def fragment_columns(num_rows: int) -> dict[str, pa.Array]:
    columns = {field.name: pa.nulls(num_rows, field.type) for field in manifest.COLUMNS}
    for name in ("kind", "file", "digest"):
        columns[name] = repeated("x", num_rows)
    for name in ("byte_offset", "nbytes"):
        columns[name] = pa.array([0]).take(pa.array([0] * num_rows))
    return columns


def repeated(text: str, num_rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), pa.array([text]))


def written(columns: dict[str, pa.Array], *, row_group_size: int = 10**6, **options: Any) -> bytes:
    """Return a file of these columns, with metadata that is read before them."""
    sink, table = pa.BufferOutputStream(), pa.table(columns)
    with pq.ParquetWriter(
        sink, table.schema, compression="zstd", store_schema=False, write_statistics=False, **options
    ) as writer:
        writer.write_table(table, row_group_size=row_group_size)
        writer.add_key_value_metadata({manifest.METADATA_KEY: b'{"format": 1}\n'})
    return bytes(sink.getvalue().to_pybytes())


def a_text_in_every_row() -> bytes:
    return written(fragment_columns(200) | {"name": repeated("a" * (16 << 20), 200)})


def a_long_text() -> bytes:
    return written(fragment_columns(1) | {"name": pa.array(["a" * (300 << 20)])}, use_dictionary=False)


def many_rows() -> bytes:
    return written(fragment_columns(900_000))


def a_long_list() -> bytes:
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 30_000_000, pa.int8()), pa.array([7])).cast(
        pa.int64()
    )
    return written(fragment_columns(1) | {"shape": pa.ListArray.from_arrays([0, len(values)], values)})


def many_groups() -> bytes:
    return written(fragment_columns(3000), row_group_size=1)


def a_long_fixed_text() -> bytes:
    kind = pa.binary(1 << 20)
    return written(fragment_columns(200) | {"name": pa.array([b"a" * (1 << 20)] * 30 + [None] * 170, kind)})


def a_footer_without_end() -> bytes:
    return b"PAR1" + b"\x15" * 100 + struct.pack("<I", 2**31 - 1) + b"PAR1"


def lists_of_bools_in_the_footer() -> bytes:
    """Return a file with one more field in its footer, whose lists pyarrow skips: 0.6 MB of bools."""
    data, num_lists, bools = written(fragment_columns(1)), 600, b"\xf1\xe7\x07"  # a list of 999 bools
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    group = b"\x11\x11\x19\xf9\xe7\x07" + bools * 999  # where a bool has no byte: the end, and one more list
    values = bytearray((bools * 999 + group * num_lists)[: num_lists * 1002])
    for at in range(0, len(values), 1002):
        values[at : at + 3] = bools
    lists = bytes((0x89, 0xF9, num_lists & 127 | 128, num_lists >> 7))
    footer = data[start:-9] + lists + values + b"\x00"
    return data[:start] + footer + struct.pack("<I", len(footer)) + b"PAR1"


def keys_of_a_map() -> bytes:
    columns = {field.name: pa.nulls(1, field.type) for field in snapshot.COLUMNS}
    keys = pa.array(["k" * (1 << 20)] * 1100)
    columns["pins"] = pa.MapArray.from_arrays([0, len(keys)], keys, pa.nulls(len(keys), pa.float64()))
    return written(columns)


SLOW_BOMBS = (
    "keys_of_a_map",
    "many_groups",
    "a_long_list",
    "a_long_text",
    "a_text_in_every_row",
)  # they take seconds
BOMBS: dict[str, Callable[[], bytes]] = {
    make.__name__: make
    for make in (
        a_text_in_every_row,
        a_long_text,
        many_rows,
        a_long_list,
        many_groups,
        a_long_fixed_text,
        a_footer_without_end,
        lists_of_bools_in_the_footer,
        keys_of_a_map,
    )
}

_READ = """
import resource, sys
from pathlib import Path
from tests.format.test_parquet import refuse
print(refuse(Path(sys.argv[1]).read_bytes()))
"""


def refuse(data: bytes) -> int:
    """Return the bytes by which the peak memory of this process grows while `data` is read and refused."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for decode in (decode_fragment, decode_snapshot):
        with pytest.raises(FormatError, match=r"is not a Parquet file of|not valid|has"):
            decode(data)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_BOMBS else ()) for name in BOMBS]
)
def test_a_bomb_is_refused_in_little_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(BOMBS[name]())
    assert path.stat().st_size < 8 << 20
    start_s = time.monotonic()
    command = [sys.executable, "-c", _READ, str(path)]
    grown = int(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    assert grown < MOST_BYTES, f"{grown / 2**20:.0f} MiB"
    assert time.monotonic() - start_s < MOST_S + 20, "Python's own start included"


def test_pages_are_found_as_pyarrow_writes_them() -> None:
    data = written(fragment_columns(5000), row_group_size=1000, data_page_size=100)
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    chunks = list(parquet._chunks(data))
    assert len(chunks) == metadata.num_row_groups * metadata.num_columns
    for index, chunk in enumerate(chunks):
        group, column = divmod(index, metadata.num_columns)
        known = metadata.row_group(group).column(column)
        pages = list(parquet._pages(data, chunk))
        assert sum(nbytes for nbytes, _ in pages) <= known.total_uncompressed_size
        assert sum(values for _, values in pages) == known.num_values


@pytest.mark.parametrize("size", range(0, 60, 7))
def test_headers_of_pages_that_are_none(size: int) -> None:
    data = bytes(range(255, 255 - size, -1))
    with pytest.raises(FormatError):
        parquet._Thrift(data, 0, size).struct()
