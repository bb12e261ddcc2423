"""FORMAT.md and PROTOCOL.md have every op, field, column, event and effect of the code, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, get_args

import pyarrow.parquet as pq
import pytest

from ray_ckpt.core import messages
from ray_ckpt.core import node_messages as node
from ray_ckpt.format import arena_page as arena
from ray_ckpt.format import jsontext, manifest, names, records, shard, snapshot, tree
from ray_ckpt.format import save_signal as agreed
from ray_ckpt.format.manifest import decode_checkpoint, encode_checkpoint
from ray_ckpt.format.zstd import FRAME_BYTES, MAX_FRAMES, MAX_STORED_BYTES
from ray_ckpt.storage.local.staging import MAX_MARK_BYTES, MAX_QUARANTINED, Staging
from ray_ckpt.types import ARENA_PAGE_BYTES, RootOf, SessionEnd, SessionInfo
from tests.support.code_blocks import ROOT
from tests.support.sample_run import write_run

FORMAT = (ROOT / "ray_ckpt/format/FORMAT.md").read_text()
PROTOCOL = (ROOT / "ray_ckpt/core/PROTOCOL.md").read_text()


def section(text: str, number: int) -> str:
    return text.split(f"\n## {number}. ")[1].split("\n## ")[0]


def tables(text: str, header: str) -> list[list[str]]:
    """Return the rows, as cells, of the table whose header row begins with this text."""
    rows = text.split(f"\n| {header}")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows]


def ticked(cell: str) -> list[str]:
    """Return the names in backticks, with a star behind those that may be missing."""
    return [name + star for name, star in re.findall(r"`(\w+)`(\*?)", cell)]


def starred(kind: Any, given: Iterable[str] | None = None) -> list[str]:
    return [
        field.name + ("" if field.default is field.default_factory is MISSING else "*")
        for field in fields(kind)
        if given is None or field.name in given
    ]


def test_the_format_has_every_op_with_its_fields() -> None:
    rows = {ticked(cells[0])[0]: ticked(cells[1]) for cells in tables(section(FORMAT, 7), "`op` | Fields |")}
    assert rows.keys() == records.OPS.keys()
    for name, kind in records.OPS.items():
        assert sorted(rows[name]) == sorted(starred(kind)), name


def test_the_format_has_every_field_of_a_record(tmp_path: Path) -> None:
    rows = [ticked(cells[0])[0] for cells in tables(section(FORMAT, 7), "Field |")]
    assert rows == [*(field.name for field in fields(records.LogRecord)), "digest*"]


def test_the_format_has_every_column_and_field_of_a_snapshot(tmp_path: Path) -> None:
    text = section(FORMAT, 8)
    columns = [name for cells in tables(text, "Column |") for name in ticked(cells[0])]
    later = snapshot._LATER
    assert columns == [name + ("*" if name in later else "") for name in snapshot.COLUMNS.names]
    run = write_run(tmp_path)
    run.log.snapshot(time_s=0.0)
    (file,) = (run.folder / names.SERVICE_DIR / names.LOG_DIR).glob("snapshot-*")
    rows = {name: cells[1] for cells in tables(text, "Field |") for name in ticked(cells[0])}
    assert rows.keys() == head_of(file).keys()
    listed = ticked(re.sub(r"\([^)]*\)", "", rows["sessions"]))
    assert sorted(listed) == sorted(starred(SessionInfo))
    ended = re.search(r"`ended`\*? \(null, or an object with (.*?) of its", rows["sessions"])
    assert ended and ticked(ended[1]) == [field.name for field in fields(SessionEnd)]


def head_of(file: Path) -> Mapping[str, Any]:
    """Return the sealed JSON of a Parquet file, with the seal itself."""
    data = pq.ParquetFile(file).metadata.metadata[snapshot.METADATA_KEY]
    return {**jsontext.loads_sealed(data, what="", max_bytes=len(data)), "digest": ""}


def test_the_format_has_every_column_and_field_of_a_fragment(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    file = next(run.directory(10).glob("manifest-*"))
    text = section(FORMAT, 5)
    columns = [name for cells in tables(text, "Column |") for name in ticked(cells[0])]
    assert sorted(columns) == sorted(manifest.COLUMNS.names)
    rows = {name for cells in tables(text, "Field |") for name in ticked(cells[0])}
    assert rows == head_of(file).keys()


def test_the_format_has_every_field_of_a_description(tmp_path: Path) -> None:
    rows = {name for cells in tables(section(FORMAT, 6), "Field |") for name in ticked(cells[0])}
    kinds: tuple[RootOf, ...] = get_args(RootOf)
    for root_of, version in zip(kinds, (manifest.DESCRIPTION_VERSION, 1), strict=True):
        folder = write_run(tmp_path / root_of, root_of=root_of).directory(10)
        data = (folder / names.CHECKPOINT_JSON).read_bytes()
        document = jsontext.loads_sealed(data, what="", max_bytes=len(data), indent=1, newest=version)
        assert document["format"] == version
        assert rows - {*kinds, "items"} | {root_of} == document.keys() | {"digest"}
        if root_of == "fragments":
            alone = json.loads(encode_checkpoint(replace(decode_checkpoint(data), items="model")))
            assert alone.keys() == rows - {"files"} and alone["format"] == manifest.ITEMS_VERSION


@pytest.mark.parametrize(
    ("number", "value"),
    [
        ("4,194,304 raw bytes", FRAME_BYTES),
        ("at most 4,210,688 stored bytes", MAX_STORED_BYTES),
        ("at most 1,048,576 frames", MAX_FRAMES),
        ("a page of 4096 bytes", ARENA_PAGE_BYTES),
        ("a ring of 16 blocks", arena.RING_BLOCKS),
        ("blocks of 8 MiB", arena.RING_BLOCK_BYTES >> 20),
        ("the last 4 checkpoints", MAX_QUARANTINED),
        ("At most 64 KiB; rewritten", MAX_MARK_BYTES >> 10),
        ("| log record | 1 MiB;", records.MAX_RECORD_BYTES >> 20),
        ("| snapshot | 256 MiB, 1,000,000 checkpoints", snapshot.MAX_SNAPSHOT_BYTES >> 20),
        ("256 MiB, 1,000,000 checkpoints", snapshot.MAX_CHECKPOINTS),
        ("| fragment | 64 MiB, 1,000,000 rows", manifest.MAX_FRAGMENT_BYTES >> 20),
        ("64 MiB, 1,000,000 rows", manifest.MAX_ROWS),
        ("| `checkpoint.json` | 64 MiB |", manifest.MAX_DESCRIPTION_BYTES >> 20),
        ("| 100,000,000 bytes", shard.MAX_HEADER_BYTES),
        ("| state file | 64 MiB;", tree.MAX_TREE_BYTES >> 20),
        ("values of 400 MiB in memory", jsontext.MAX_VALUES_BYTES >> 20),
        ("keep to 10,000,000 values", tree.MAX_VALUES),
        ("values and 100 levels", tree.MAX_DEPTH),
        ("begin at a multiple of 4096", shard.ALIGNMENT_BYTES),
        ("new names and more than 100 metrics", records.MAX_METRICS),
        ("Bits 0 to 47", agreed.MAX_STEP.bit_length() - 1),
        ("Bits 48 to 62", 48 + agreed.NUMBERS.bit_length() - 2),
    ],
)
def test_the_format_has_the_numbers_of_the_code(number: str, value: int) -> None:
    assert number in FORMAT
    assert value in [int(digits.replace(",", "")) for digits in re.findall(r"\d(?:[\d,]*\d)?", number)]


def test_the_format_has_every_dtype_and_tag() -> None:
    text = section(FORMAT, 3)
    sizes = {
        name: int(size)
        for names_of_size, size in re.findall(r"`?([A-Z][A-Z0-9_ ]+)` (\d)[;.]", text)
        for name in names_of_size.split()
    }
    assert sizes == dict(shard.ITEMSIZE)
    tags = set(re.findall(r'\{"(\$[\w.]+)":', section(FORMAT, 4)))
    assert tags == set(tree._READERS)


def test_the_format_has_the_files_of_a_staging_folder(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "staging")
    staging.write_mark("0" * 32, run_name="gpt", storage_path="/shared", epoch=1)
    files = {path.relative_to(staging.root).as_posix() for path in staging.root.rglob("*") if path.is_file()}
    staging.close()
    listed = {
        cells[0].strip("`").replace("<run uid>", "0" * 32) for cells in tables(section(FORMAT, 11), "Path |")
    }
    assert files <= listed


def test_the_protocol_has_every_event_and_effect_of_a_run() -> None:
    events = {kind.__name__ for kind in get_args(messages.Event)}
    effects = {kind.__name__ for kind in get_args(messages.Effect)}
    found = set(re.findall(r"`([A-Z]\w+)`", section(PROTOCOL, 9)))
    assert events <= found, events - found
    assert effects <= set(re.findall(r"`([A-Z]\w+)`", PROTOCOL)), "effects"
    assert found <= events | effects | {"TypeError"}


def test_the_protocol_has_every_event_and_effect_of_a_node() -> None:
    known = {kind.__name__ for kind in (*get_args(node.NodeEvent), *get_args(node.NodeEffect))}
    found = set(re.findall(r"`([A-Z]\w+)`", section(PROTOCOL, 10)))
    assert found == known
