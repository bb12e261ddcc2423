"""Reader of untrusted Parquet files in bounded memory.

A file of a few KB may unpack to gigabytes: a page that compresses well, a dictionary of one long text that
every row repeats, lists of any length. Therefore the size of each page is read before anything is unpacked,
and texts stay dictionaries, in which each text is created once. https://github.com/apache/parquet-format
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ray_ckpt.errors import FormatError

MAX_UNPACKED_BYTES = 256 * 2**20  # unpacked size of all pages; a million rows of a manifest take about 120 MB
MAX_TEXT_BYTES = 1024 * 2**20  # size of the texts of all rows, repeated texts included
MAX_FREE_VALUES = 2**20  # values of a column in any file; larger files may have one more for each byte
MAX_FREE_ROWS = 2**17  # rows in any file; larger files may have one more for each byte
MAX_THRIFT_ITEMS = 1000  # items of a list in the footer: row groups, columns
MAX_THRIFT_VALUES = 2**16  # values of a footer, read in 0.1 s; real footers have about 1,000
_CUT_SHORT = "its footer, or the header of a page, is cut short"
_MAX_DEPTH = 8  # nested structs and lists in the footer; real footers have 7

_PHYSICAL = {pa.string(): 6, pa.int64(): 2, pa.float64(): 5}  # BYTE_ARRAY, INT64, DOUBLE
T = TypeVar("T")


def read_table(
    data: bytes, schema: pa.Schema, *, max_rows: int, file_metadata: pq.FileMetaData | None = None
) -> pa.Table:
    """Return the columns of `schema` in the file, with texts as dictionaries.

    `file_metadata` is that of `open_metadata` for the same file, which spares another parse. Raise
    FormatError if the file exceeds the limits above; errors of pyarrow if it is no Parquet file.
    """
    _check_pages(data, schema)
    known = file_metadata or open_metadata(data)
    there = set(known.schema.to_arrow_schema().names)
    texts = [path for field in schema if field.name in there for path in _text_paths(field)]
    file = pq.ParquetFile(
        pa.BufferReader(data),
        page_checksum_verification=True,
        read_dictionary=texts,
        metadata=known,
        thrift_container_size_limit=MAX_THRIFT_ITEMS,
    )
    num_rows = file.metadata.num_rows
    if num_rows > min(max_rows, MAX_FREE_ROWS + len(data)):
        raise FormatError(f"it declares {num_rows} rows in {len(data)} bytes")
    names = [name for name in schema.names if name in there]
    table = file.read(columns=names, use_threads=False).combine_chunks()
    table.validate(full=True)
    if table.num_rows != num_rows:
        raise FormatError(f"it has {table.num_rows} rows, not {num_rows}")
    for name in names:
        if not _fits(table.field(name).type, schema.field(name).type):
            raise FormatError(f"the column {name} is of {table.field(name).type}")
        if pa.types.is_list(table.field(name).type) and column(table, name).values.null_count:
            raise FormatError(f"the column {name} has a null in a list")
    _check_texts(table)
    return table.select(names)


def open_metadata(data: bytes) -> pq.FileMetaData:
    """Return the footer of a file, parsed; errors of pyarrow for a bad file."""
    return pq.ParquetFile(pa.BufferReader(data), thrift_container_size_limit=MAX_THRIFT_ITEMS).metadata


def texts(array: pa.Array) -> list[str | None]:
    """Return the values of a dictionary of texts; equal ones are one object."""
    if len(array) < len(array.dictionary):  # few rows were taken, with the dictionary of all
        array = array.cast(pa.string()).dictionary_encode()
    values = array.dictionary.cast(pa.string()).to_pylist()
    return [None if index is None else values[index] for index in array.indices.to_pylist()]


def values(table: pa.Table, name: str) -> list[Any]:
    """Return a column as a list; equal texts are one object."""
    found = column(table, name)
    listed: list[Any] = texts(found) if pa.types.is_dictionary(found.type) else found.to_pylist()
    return listed


def column(table: pa.Table, name: str) -> pa.Array:
    """Return a column as one array."""
    found = table.column(name)
    return found.chunk(0) if found.num_chunks == 1 else found.combine_chunks()


def _fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a column of type `found`, with texts as dictionaries, is of the wanted type."""
    if wanted == pa.string():
        return bool(pa.types.is_dictionary(found) and found.value_type == wanted)
    if pa.types.is_map(wanted):
        return bool(
            pa.types.is_map(found)
            and _fits(found.key_type, wanted.key_type)
            and found.item_type == wanted.item_type
        )
    if pa.types.is_list(wanted):
        return bool(pa.types.is_list(found) and found.value_type == wanted.value_type)
    return bool(found == wanted)


def _text_paths(field: pa.Field) -> Iterator[str]:
    """Return the Parquet names of the leaves of a column that are texts."""
    if field.type == pa.string():
        yield field.name
    elif pa.types.is_map(field.type) and field.type.key_type == pa.string():
        yield f"{field.name}.key_value.key"


def _leaf_types(schema: pa.Schema) -> dict[str, Collection[int]]:
    """Return the physical types that the leaves of each column may have."""
    found: dict[str, Collection[int]] = {}
    for field in schema:
        kind = field.type
        leaves = [kind]
        if pa.types.is_map(kind):
            leaves = [kind.key_type, kind.item_type]
        elif pa.types.is_list(kind):
            leaves = [kind.value_type]
        found[field.name] = {_PHYSICAL[leaf] for leaf in leaves}
    return found


def _check_pages(data: bytes, schema: pa.Schema) -> None:
    """Check that the unpacked pages of the columns of `schema` are within the limits."""
    types, unpacked_bytes = _leaf_types(schema), 0
    num_values: dict[str, int] = {}
    for chunk in _chunks(data):
        name = chunk.name
        if name not in types:
            continue
        if chunk.kind not in types[name]:
            raise FormatError(f"the column {name} is of another type")
        for page_bytes, page_values in _pages(data, chunk):
            unpacked_bytes += page_bytes
            num_values[name] = num_values.get(name, 0) + page_values
            if unpacked_bytes > MAX_UNPACKED_BYTES:
                raise FormatError(f"its columns unpack to more than {MAX_UNPACKED_BYTES} bytes")
            if num_values[name] > 2 * (MAX_FREE_VALUES + len(data)):  # twice, because a map has two leaves
                raise FormatError(f"the column {name} has too many values for {len(data)} bytes")


class _Chunk(NamedTuple):
    """One leaf of a column in a row group: its physical type, and the range of its pages."""

    name: str
    kind: int
    start: int
    end: int


def _chunks(data: bytes) -> Iterator[_Chunk]:
    """Yield the column chunks from the footer, without pyarrow, which some damaged footers crash."""
    size = int.from_bytes(data[-8:-4], "little")
    if len(data) < 12 or data[-4:] != b"PAR1" or size > len(data) - 12:
        raise FormatError("it has no footer")
    footer = _Thrift(data, len(data) - 8 - size, len(data) - 8).struct()
    for group in _of(footer, 4, list):
        for column in _of(group, 1, list):
            meta = _of(column, 3, dict)
            if not _of(meta, 5, int):  # no values: no page is read, and there may be no page
                continue
            first, path = _of(meta, 9, int), _of(meta, 3, list)
            start = meta.get(11)
            start = start if isinstance(start, int) and 0 < start < first else first
            end = start + _of(meta, 7, int)
            if not 0 <= start <= end <= len(data) or not path or not isinstance(path[0], bytes):
                raise FormatError("a column lies outside of the file")
            yield _Chunk(path[0].decode(), _of(meta, 1, int), start, end)


def _of(struct: Any, field: int, kind: type[T]) -> T:
    """Return a field of a struct of the footer."""
    value = struct.get(field) if isinstance(struct, dict) else None
    if type(value) is not kind:
        raise FormatError("its footer is damaged")
    return value


def _pages(data: bytes, chunk: _Chunk) -> Iterator[tuple[int, int]]:
    """Yield the unpacked bytes and the number of values of each page of a column chunk."""
    reader = _Thrift(data, chunk.start, chunk.end)
    while reader.at < chunk.end:
        header = reader.struct()
        unpacked, stored = _of(header, 2, int), _of(header, 3, int)
        kinds = [header[field] for field in (5, 7, 8) if field in header]
        num_values = _of(kinds[0], 1, int) if len(kinds) == 1 else -1
        if min(unpacked, stored, num_values) < 0:
            raise FormatError("the header of a page is damaged")
        yield unpacked, num_values if 7 not in header else 0
        reader.skip(stored)


def _check_texts(table: pa.Table) -> None:
    """Check that the texts of all rows together are within the limit."""
    total = 0
    for name in table.column_names:
        array = column(table, name)
        if pa.types.is_map(array.type):
            array = array.keys
        if not pa.types.is_dictionary(array.type):
            continue
        lengths = pc.binary_length(array.dictionary)
        most = (pc.max(lengths).as_py() or 0) * len(array)
        if total + most > MAX_TEXT_BYTES:
            most = pc.sum(lengths.cast(pa.int64()).take(array.indices)).as_py() or 0
        total += most
        if total > MAX_TEXT_BYTES:
            raise FormatError(f"its texts are longer than {MAX_TEXT_BYTES} bytes together")


class _Thrift:
    """Parser of structs in Thrift's compact protocol, for footers and page headers."""

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self._data = data
        self._end = end
        self._num_values = 0
        self.at = at

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Return the fields by number: ints, texts, lists and structs; None for a float."""
        if depth == 0:
            self._num_values = 0
        found: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            self._count(depth)
            delta, kind = head >> 4, head & 15
            field = field + delta if delta else self._int()
            found[field] = self._int() if 4 <= kind <= 6 else self._value(kind, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._int()
            case 7:
                self.skip(8)
            case 8:
                size = self._varint()
                self.skip(size)
                return self._data[self.at - size : self.at]
            case 9 | 10:
                head = self._byte()
                size = head >> 4 if head >> 4 < 15 else self._varint()
                if size > MAX_THRIFT_ITEMS:
                    raise FormatError(f"a list of {size} in its footer")
                return [self._element(head & 15, depth + 1) for _ in range(size)]
            case 12:
                return self.struct(depth + 1)
            case _:
                raise FormatError(f"its footer has a field of type {kind}")
        return None

    def _element(self, kind: int, depth: int) -> Any:
        """Return an element of a list; a bool is a byte here, and part of the field's type in a struct."""
        self._count(depth)
        return self._byte() == 1 if kind in (1, 2) else self._value(kind, depth)

    def _count(self, depth: int) -> None:
        """Count a value at this depth. Raise FormatError if values are too many or nested too deep."""
        self._num_values += 1
        if depth > _MAX_DEPTH or self._num_values > MAX_THRIFT_VALUES:
            raise FormatError(f"its footer is nested too deep, or has more than {MAX_THRIFT_VALUES} values")

    def skip(self, nbytes: int) -> None:
        if nbytes > self._end - self.at:
            raise FormatError(_CUT_SHORT)
        self.at += nbytes

    def _byte(self) -> int:
        at = self.at
        if at >= self._end:
            raise FormatError(_CUT_SHORT)
        self.at = at + 1
        return self._data[at]

    def _varint(self) -> int:
        value = self._byte()
        if value < 128:  # most have one byte
            return value
        value &= 127
        for shift in range(7, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise FormatError("its footer has a number without end")

    def _int(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
