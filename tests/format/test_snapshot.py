"""Snapshots of the log: what goes in comes out, and damage is found."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.errors import FormatError
from ray_ckpt.format import snapshot as module
from ray_ckpt.format.digest import digest
from ray_ckpt.format.jsontext import dumps_sealed
from ray_ckpt.format.snapshot import COLUMNS, LogSnapshot, decode_snapshot, encode_snapshot
from ray_ckpt.types import AttemptId, CheckpointInfo, Level, SessionInfo
from tests.support.examples import examples

GOLDEN = Path(__file__).parent.parent / "golden"
UID = "ab" * 16


def checkpoint(
    seq: int, *, session: int = 1, epoch: int = 0, step: int | None = None, **fields: Any
) -> CheckpointInfo:
    attempt = AttemptId(
        run_uid=UID,
        session=session,
        step=seq * 10 if step is None else step,
        attempt=f"{seq:016x}",
        epoch=epoch,
    )
    known: dict[str, Any] = {
        "level": Level.REPLICATED,
        "world_size": 4,
        "num_nodes": 2,
        "size_bytes": 10**12,
        "root_digest": digest(b"%d" % seq),
        "committed_at_s": 1.7e9 + seq,
        "metrics": {"loss": 0.1 * seq, "lr": 1e-3},
        "replicas": 1,
    }
    return CheckpointInfo(id=attempt, seq=seq, **(known | fields))


def a_session(number: int, **fields: Any) -> SessionInfo:
    known: dict[str, Any] = {
        "parent": number - 1 or None,
        "resumed_from": None,
        "world_size": 4,
        "num_nodes": 2,
        "opened_at_s": 1.7e9,
    }
    return SessionInfo(session=number, **(known | fields))


SNAPSHOT = LogSnapshot(
    seq=40,
    last_digest=digest(b"record 40"),
    time_s=1.75e9,
    run_uid=UID,
    run_name="gpt",
    epoch=3,
    writer="node-a/1",
    service="cluster-a",
    sessions=(
        a_session(1),
        a_session(
            2,
            resumed_from=f"{7:016x}",
            opened_by=2,
            service="cluster-a",
            owner="driver/1",
            retention="last 3",
        ),
    ),
    checkpoints=(
        checkpoint(3, state="collected", metrics={}, root_of="files"),
        checkpoint(5, state="retired", verified_at_s=1.71e9, root_of="files"),
        checkpoint(7, level=Level.DURABLE, pins={"eval": None, "paper, née \n": 1.8e9}),
        checkpoint(9, state="lost", metrics={"best": -math.inf, "naïve\n": 2.0}),
        checkpoint(21, session=2, epoch=2, step=0, level=Level.LOCAL, replicas=0),
    ),
)


def changed(checkpoints: tuple[CheckpointInfo, ...] | None = None, **fields: Any) -> LogSnapshot:
    new = replace(SNAPSHOT, **fields)
    return new if checkpoints is None else replace(new, checkpoints=checkpoints)


def test_round_trip() -> None:
    assert decode_snapshot(encode_snapshot(SNAPSHOT)) == SNAPSHOT
    begun = changed((), sessions=(), seq=0)
    assert decode_snapshot(encode_snapshot(begun)) == begun
    assert encode_snapshot(SNAPSHOT) == encode_snapshot(SNAPSHOT)
    damaged = changed(tuple(replace(each, damaged="0,11") for each in SNAPSHOT.checkpoints))
    assert decode_snapshot(encode_snapshot(damaged)) == damaged


def test_only_a_session_that_began_with_another_run_has_its_step() -> None:
    """Readers from before that field refuse one that they do not know."""
    begun = changed(sessions=(a_session(1, origin_step=50_000), a_session(2)), checkpoints=())
    data = encode_snapshot(begun)
    assert decode_snapshot(data) == begun and data.count(b'"origin_step"') == 1


def test_a_session_that_resumes_from_itself_or_a_later_one_is_refused() -> None:
    """A reader follows sessions back to their beginning, which such a snapshot would not have."""
    for sessions in (
        (a_session(1, resumed_from=f"{7:016x}"), a_session(2)),
        (a_session(1, resumed_from=f"{21:016x}"), a_session(2, resumed_from=f"{7:016x}")),
    ):
        with pytest.raises(FormatError, match="resumes from"):
            encode_snapshot(changed(sessions=sessions))


MOMENTS = ("noticed_at_s", "previous_ended_at_s", "started_at_s", "connected_at_s")


def test_only_known_moments_of_a_recovery_are_written() -> None:
    known = dict(zip(MOMENTS, (1.70e9, 1.71e9, 1.72e9, 1.73e9), strict=True))
    begun = changed(sessions=(a_session(1, **known), a_session(2)), checkpoints=())
    data = encode_snapshot(begun)
    assert decode_snapshot(data) == begun
    assert [data.count(b'"%s"' % name.encode()) for name in MOMENTS] == [1, 1, 1, 1]


@pytest.mark.parametrize("name", MOMENTS)
@pytest.mark.parametrize("value", ["soon", "nan", True, [], 1e12, -1e12])
def test_odd_moments_of_a_recovery_are_refused(name: str, value: object) -> None:
    with pytest.raises(FormatError, match=name):
        decode_snapshot(rewritten(head=lambda head: head["sessions"][0].update({name: value})))


def test_nan_metrics_come_back() -> None:
    back = decode_snapshot(
        encode_snapshot(changed((checkpoint(3, metrics={"loss": math.nan}),), sessions=(a_session(1),)))
    )
    assert math.isnan(back.checkpoints[0].metrics["loss"])


def test_the_golden_snapshot_is_read_forever() -> None:
    """Before the column `root_of`, root digests were those of all files."""
    assert decode_snapshot((GOLDEN / "snapshot-1-root-of.parquet").read_bytes()) == SNAPSHOT
    older = tuple(replace(known, root_of="files") for known in SNAPSHOT.checkpoints)
    assert decode_snapshot((GOLDEN / "snapshot-1.parquet").read_bytes()) == changed(older)


def test_any_tool_can_read_the_table() -> None:
    table = pq.read_table(io.BytesIO(encode_snapshot(SNAPSHOT)))
    assert table.column_names == COLUMNS.names
    row = table.to_pylist()[2]
    assert (row["step"], row["level"], row["state"]) == (70, "durable", "live")
    assert row["pins"] == [("eval", None), ("paper, née \n", 1.8e9)]


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 18, 3))])
def test_every_flipped_byte_is_found_or_changes_nothing(first: int) -> None:
    """Some bytes of a Parquet footer have no effect, such as the name of the program that wrote it."""
    data = bytearray(encode_snapshot(SNAPSHOT))
    found = 0
    for index in range(first, len(data), 18):
        data[index] ^= 1 << index // 18 % 8
        try:
            assert decode_snapshot(bytes(data)) == SNAPSHOT, index
        except FormatError:
            found += 1
        data[index] ^= 1 << index // 18 % 8
    assert found > 0.75 * len(data) / 18


def test_every_truncation_is_found() -> None:
    data = encode_snapshot(SNAPSHOT)
    for size in range(0, len(data), 7):
        with pytest.raises(FormatError):
            decode_snapshot(data[:size])


@given(st.binary(max_size=100))
@examples(100)
def test_any_bytes_are_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_snapshot(data)


@pytest.mark.parametrize(
    "bad",
    [
        changed(seq=-1),
        changed(last_digest="x"),
        changed(time_s=math.inf),
        changed(run_uid="short"),
        changed(run_name="../up"),
        changed(epoch=-1),
        changed(seq=20),
        changed(sessions=(a_session(1),)),
        changed(sessions=(a_session(1), a_session(1), a_session(2))),
        changed(sessions=(a_session(1), a_session(2, resumed_from="f" * 16))),
        changed(sessions=(a_session(1, world_size=0), a_session(2))),
        changed(sessions=(a_session(1, noticed_at_s=math.inf), a_session(2))),
        changed((checkpoint(5), checkpoint(3))),
        changed((checkpoint(3), replace(checkpoint(4), id=checkpoint(3).id))),
        changed((checkpoint(3, session=9),)),
        changed((checkpoint(0),)),
        changed((checkpoint(3, step=10**12),)),
        changed((checkpoint(3, state="asleep"),)),
        changed((checkpoint(3, root_of="file"),)),
        changed((checkpoint(3, damaged="0,"),)),
        changed((checkpoint(3, root_digest="x" * 32),)),
        changed((checkpoint(3, root_digest="A" * 32),)),
        changed((checkpoint(3, root_digest="a" * 31 + "\n"),)),
        changed((checkpoint(3, root_digest="a" * 31), checkpoint(4, root_digest="a" * 33))),
        changed((checkpoint(3, size_bytes=-1),)),
        changed((checkpoint(3, size_bytes=2**63),)),
        changed((checkpoint(3, world_size=0),)),
        changed((checkpoint(3, committed_at_s=math.nan),)),
        changed((checkpoint(3, verified_at_s=math.inf),)),
        changed((checkpoint(3, pins={"eval": math.inf}),)),
        changed((checkpoint(3, metrics={"loss": None}),)),
        changed((checkpoint(3, metrics={"loss": "low"}),)),
        changed((checkpoint(3, metrics={"\ud800": 1.0}),)),
        changed((replace(checkpoint(3), id=replace(checkpoint(3).id, attempt="../../etc/passwd")),)),
    ],
)
def test_content_that_no_log_could_have_is_not_written(bad: LogSnapshot) -> None:
    with pytest.raises(FormatError):
        encode_snapshot(bad)


def test_a_snapshot_beyond_the_bounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_snapshot(SNAPSHOT)
    monkeypatch.setattr(module, "MAX_CHECKPOINTS", len(SNAPSHOT.checkpoints) - 1)
    with pytest.raises(FormatError, match="5 checkpoints; the format allows 4"):
        encode_snapshot(SNAPSHOT)
    with pytest.raises(FormatError, match="declares 5 rows"):
        decode_snapshot(data)
    monkeypatch.setattr(module, "MAX_SNAPSHOT_BYTES", len(data) - 1)
    with pytest.raises(FormatError, match="the format allows"):
        decode_snapshot(data)


def rewritten(
    head: Callable[[dict[str, Any]], object] = bool, table: Callable[[pa.Table], pa.Table] = lambda t: t
) -> bytes:
    """Return the snapshot written by another version: its head and table changed, and sealed again."""
    data = encode_snapshot(SNAPSHOT)
    file = pq.ParquetFile(io.BytesIO(data))
    document = json.loads(file.metadata.metadata[module.METADATA_KEY])
    del document["digest"]
    head(document)
    sealed = dumps_sealed(document, what="test", max_bytes=2**20)
    sink, new = io.BytesIO(), table(file.read())
    with pq.ParquetWriter(sink, new.schema, write_page_checksum=True, store_schema=False) as writer:
        writer.write_table(new)
        writer.add_key_value_metadata({module.METADATA_KEY: sealed})
    return sink.getvalue()


def test_another_writers_file_is_read() -> None:
    assert decode_snapshot(rewritten()) == SNAPSHOT


def test_a_session_from_before_a_field_is_read() -> None:
    def drop(head: dict[str, Any]) -> None:
        for name in ("opened_by", "owner", "retention"):
            del head["sessions"][0][name]

    assert decode_snapshot(rewritten(head=drop)) == SNAPSHOT


def swap_steps(table: pa.Table) -> pa.Table:
    steps = table.column("step").to_pylist()
    return table.set_column(table.column_names.index("step"), "step", pa.array(steps[::-1], pa.int64()))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (rewritten(head=lambda d: d.update(format=2)), "format 2"),
        (rewritten(head=lambda d: d.update(later=1)), r"newer version.*has later"),
        (rewritten(head=lambda d: d.pop("service")), "does not have service"),
        (rewritten(head=lambda d: d["sessions"][0].update(later=1)), r"newer version.*has later"),
        (rewritten(table=lambda t: t.append_column("later", pa.array([1] * 5))), r"newer version.*has later"),
        (rewritten(table=lambda t: t.drop_columns(["pins"])), "does not have pins"),
        (rewritten(table=lambda t: t.slice(1)), "rows of the snapshot are damaged"),
        (rewritten(table=swap_steps), "rows of the snapshot are damaged"),
    ],
)
def test_additions_of_another_version_are_not_passed_over(data: bytes, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        decode_snapshot(data)
