"""Log records: every op round-trips, odd ones are refused, and the first ones ever written stay readable."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.errors import FormatError, NewerFormat
from ray_ckpt.format import jsontext, records
from ray_ckpt.format.records import (
    Annotated,
    Collected,
    Commit,
    Commit2,
    Create,
    Damaged,
    Drilled,
    Ended,
    Epoch,
    Exported,
    LogRecord,
    Lost,
    Note,
    Op,
    Pin,
    Promote,
    Restored,
    Retired,
    Session,
    Unpin,
    Verified,
    decode_record,
    encode_record,
)
from ray_ckpt.types import Level
from tests.support.examples import examples

GOLDEN = Path(__file__).parent.parent / "golden"
DIGEST = "0123456789abcdef" * 2
COMMIT = Commit(
    session=2,
    step=1000,
    attempt="00112233aabbccdd",
    level=Level.REPLICATED,
    replicas=1,
    world_size=8,
    num_nodes=2,
    size_bytes=123456789,
    root_digest=DIGEST,
    metrics={"loss": 0.25, "best": -math.inf},
)
COMMIT2 = Commit2(**{field.name: getattr(COMMIT, field.name) for field in fields(COMMIT)})
EACH_OP: tuple[Op, ...] = (
    COMMIT2,
    Create(run_uid=DIGEST, run_name="gpt-1", format=1),
    Epoch(service="s"),
    Session(session=1, service="s", after=None, resumed_from=None, world_size=2, num_nodes=1, owner="me"),
    Promote(attempt=COMMIT.attempt, level=Level.DURABLE, replicas=1),
    Exported(attempt=COMMIT.attempt, items="ema,model", root_digest=DIGEST, size_bytes=9),
    Lost(attempt=COMMIT.attempt, reason="gone"),
    Retired(attempt=COMMIT.attempt, reason="old"),
    Collected(attempt=COMMIT.attempt),
    Pin(attempt=COMMIT.attempt, owner="eval", expires_at_s=1.5),
    Unpin(attempt=COMMIT.attempt, owner="eval"),
    Verified(attempt=COMMIT.attempt),
    Damaged(attempt=COMMIT.attempt, fragments="0,7,12"),
    Damaged(attempt=COMMIT.attempt, fragments=""),
    Annotated(attempt=COMMIT.attempt, metrics={"digest": 1.0}),
    Restored(session=1, seconds=1.5, read_bytes={"peer": 7.0}, origin_step=3, connected_at_s=1.7e9),
    Ended(session=1, cause="node", step=3, first_at_s=1.0, last_at_s=None, stalled_s=0.5),
    Drilled(attempt=COMMIT.attempt, scenario="node", passed=True, seconds=1.0, read_bytes={}, text=""),
    Note(text='"digest": "\u00e9\\" \n'),
)
RECORD = LogRecord(seq=7, epoch=3, writer="node-a/1", prev=DIGEST, time_s=1700000000.5, op=COMMIT)


def unsealed(record: LogRecord) -> dict[str, Any]:
    """Return a record as the first writers wrote it: without a digest."""
    document: dict[str, Any] = json.loads(encode_record(record))
    del document["digest"]
    return document


def plain(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode() + b"\n"


def sealed(document: Mapping[str, Any]) -> bytes:
    return jsontext.dumps_sealed(document, what="it", max_bytes=2**20)


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
counts = st.integers(1, 999_999)
sizes = st.integers(0, 2**63 - 1)
attempts = st.text("0123456789abcdef", min_size=16, max_size=16)
digests = st.text("0123456789abcdef", min_size=32, max_size=32)
levels = st.sampled_from(Level)
moments = st.none() | st.floats(0, 1e10)
ops: st.SearchStrategy[Op] = st.one_of(
    st.builds(Create, run_uid=digests, run_name=st.just("gpt-1"), format=st.just(1)),
    st.builds(Epoch, service=words),
    st.builds(
        Session,
        session=sizes,
        service=words,
        after=st.none() | sizes,
        resumed_from=st.none() | attempts,
        world_size=counts,
        num_nodes=counts,
        owner=words,
        retention=words,
        noticed_at_s=moments,
        previous_ended_at_s=moments,
        started_at_s=moments,
    ),
    st.builds(
        Restored,
        session=sizes,
        seconds=st.floats(0, 1e10),
        read_bytes=st.dictionaries(words, st.floats(allow_nan=False), max_size=3),
        origin_step=st.none() | counts,
        connected_at_s=moments,
    ),
    *(
        st.builds(
            kind,
            session=sizes,
            step=st.integers(0, 10**12 - 1),
            attempt=attempts,
            level=levels,
            replicas=counts,
            world_size=counts,
            num_nodes=counts,
            size_bytes=sizes,
            root_digest=digests,
            metrics=st.dictionaries(words, st.floats(allow_nan=False), max_size=3),
        )
        for kind in (Commit, Commit2)
    ),
    st.builds(Promote, attempt=attempts, level=levels, replicas=counts),
    st.builds(Lost, attempt=attempts, reason=words),
    st.builds(Retired, attempt=attempts, reason=words),
    st.builds(Collected, attempt=attempts),
    st.builds(Pin, attempt=attempts, owner=words, expires_at_s=st.none() | st.floats(0, 1e10)),
    st.builds(Unpin, attempt=attempts, owner=words),
    st.builds(Verified, attempt=attempts),
    st.builds(
        Annotated,
        attempt=attempts,
        metrics=st.dictionaries(words, st.floats(allow_nan=False), max_size=3),
    ),
    st.builds(Note, text=words),
)


@given(
    st.builds(
        LogRecord,
        seq=counts,
        epoch=sizes,
        writer=words.filter(bool),
        prev=digests,
        time_s=st.floats(0, 1e10),
        op=ops,
    )
)
@examples(300)
def test_round_trip(record: LogRecord) -> None:
    data = encode_record(record)
    assert decode_record(data) == record
    assert data.endswith(b"}\n") and data.count(b"\n") == 1


def test_nan_metrics_come_back() -> None:
    record = decode_record(
        encode_record(replace(RECORD, op=replace(COMMIT, metrics={"loss": math.nan, "n": 3})))
    )
    assert isinstance(record.op, Commit)
    assert math.isnan(record.op.metrics["loss"]) and record.op.metrics["n"] == 3.0


def test_the_golden_records_are_read_forever() -> None:
    """The first writers gave a record no digest."""
    first, data = ((GOLDEN / name).read_bytes() for name in ("record-1.json", "record-1-digest.json"))
    assert decode_record(first) == decode_record(data) == RECORD
    assert encode_record(RECORD) == data
    assert first == jsontext.dumps(unsealed(RECORD), what="it", max_bytes=2**20)
    exported = decode_record((GOLDEN / "record-1-exported.json").read_bytes())
    assert exported.op == EACH_OP[5] and isinstance(exported.op, Exported)
    newer = (GOLDEN / "record-1-commit2.json").read_bytes()
    assert decode_record(newer) == replace(RECORD, op=COMMIT2)
    assert encode_record(replace(RECORD, op=COMMIT2)) == newer


def test_a_commit_names_the_files_of_its_root_digest_by_its_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that knows only the older op must not take one root digest for the other."""
    old, new = (encode_record(replace(RECORD, op=op)) for op in (COMMIT, COMMIT2))
    assert (json.loads(old)["op"], json.loads(new)["op"]) == ("commit", "commit2")
    assert (COMMIT.root_of, COMMIT2.root_of) == ("files", "fragments")
    assert decode_record(old).op != decode_record(new).op
    monkeypatch.delitem(records.OPS, "commit2")
    with pytest.raises(NewerFormat, match=r"of a newer version; update ray_ckpt.*'commit2'"):
        decode_record(new)


def test_unknown_fields_are_tolerated_and_unknown_ops_are_not() -> None:
    document = unsealed(RECORD)
    assert decode_record(sealed({**document, "later": [1]})) == RECORD
    for write in (plain, sealed):
        with pytest.raises(NewerFormat, match=r"of a newer version; update ray_ckpt.*'teleport'") as caught:
            decode_record(write({**document, "op": "teleport"}))
        assert caught.value.fields["op"] == "teleport"


def test_a_record_without_a_digest_has_the_fields_of_its_time_only() -> None:
    """Or one whose seal has lost its name would pass for one."""
    with pytest.raises(FormatError, match=r"log record is damaged.*no digest.*'digesu'"):
        decode_record(encode_record(RECORD).replace(b'"digest"', b'"digesu"'))
    with pytest.raises(FormatError, match="does not match its own digest"):
        decode_record(encode_record(RECORD).replace(b'"loss": 0.25', b'"loss": 0.35'))


@pytest.mark.parametrize(
    ("op", "later"),
    [
        (Epoch(), ["service"]),
        (
            Session(session=1, service="s", after=None, resumed_from=None, world_size=2, num_nodes=1),
            ["owner", "retention"],
        ),
    ],
)
def test_records_from_before_a_field_are_read(op: Op, later: list[str]) -> None:
    record = replace(RECORD, op=op)
    document = unsealed(record)
    for name in later:
        assert document.pop(name) == ""
    assert decode_record(plain(document)) == decode_record(sealed(document)) == record


SESSION = Session(session=2, service="s", after=1, resumed_from=None, world_size=2, num_nodes=1)
RESTORED = Restored(session=2, seconds=1.0, read_bytes={})
ODD_TIMES: tuple[object, ...] = ("soon", "inf", "nan", True, [], {}, 1e12, -1e12, 10**400)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (SESSION, "noticed_at_s"),
        (SESSION, "previous_ended_at_s"),
        (SESSION, "started_at_s"),
        (RESTORED, "connected_at_s"),
    ],
)
def test_a_moment_of_a_recovery_is_a_time_or_unknown(op: Op, name: str) -> None:
    document = unsealed(replace(RECORD, op=op))
    known: dict[str, Any] = {name: 1.7e9}
    never: dict[str, Any] = {name: math.inf}
    assert name not in document, "an unknown one is not written, so bytes of older logs do not change"
    for write in (plain, sealed):
        found = decode_record(write({**document, **known}))
        assert found.op == replace(op, **known) and decode_record(encode_record(found)) == found
        assert decode_record(write({**document, name: None})).op == op
        for value in ODD_TIMES:
            with pytest.raises(FormatError, match=name):
                decode_record(write({**document, name: value}))
    with pytest.raises(FormatError):
        encode_record(replace(RECORD, op=replace(op, **never)))


@pytest.mark.parametrize("value", ["soon", float("inf"), True, []])
def test_a_pin_ends_at_a_time_or_never(value: object) -> None:
    pin = Pin(attempt=COMMIT.attempt, owner="eval", expires_at_s=None)
    document = unsealed(replace(RECORD, op=pin))
    with pytest.raises(FormatError, match=r"expires_at_s|not valid"):
        decode_record(plain({**document, "expires_at_s": value}))


@pytest.mark.parametrize("value", [None, [], {"loss": "small"}, {"loss": None}])
def test_an_annotation_has_numbers_by_name(value: object) -> None:
    annotated = Annotated(attempt=COMMIT.attempt, metrics={"loss": math.inf})
    document = unsealed(replace(RECORD, op=annotated))
    assert document["metrics"] == {"loss": "inf"} and document["op"] == "annotated"
    for write in (plain, sealed):
        with pytest.raises(FormatError, match="metrics"):
            decode_record(write({**document, "metrics": value}))


def test_a_run_of_a_newer_format_is_refused() -> None:
    create = Create(run_uid=DIGEST, run_name="gpt", format=2)
    with pytest.raises(FormatError, match=r"format 2.*up to format 1"):
        encode_record(LogRecord(seq=0, epoch=1, writer="a", prev="", time_s=0.0, op=create))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq", -1),
        ("seq", True),
        ("seq", 1.0),
        ("seq", 10**20),
        ("epoch", None),
        ("writer", ""),
        ("writer", "\ud800"),
        ("prev", ""),
        ("prev", DIGEST.upper()),
        ("time_s", "nan"),
        ("time_s", 10**400),
        ("op", None),
        ("step", 10**12),
        ("attempt", "../../../etc/x.."),
        ("level", "cosmic"),
        ("level", 1),
        ("level", []),
        ("time_s", 1e12),
        ("time_s", -1e12),
        ("stall_s", 1e308),
        ("replicas", -1),
        ("replicas", 10**6),
        ("world_size", 0),
        ("world_size", 10**12),
        ("num_nodes", 10**12),
        ("metrics", {str(n): 0.0 for n in range(10_001)}),
        ("root_digest", DIGEST + "\n"),
        ("metrics", []),
        ("metrics", {"a": None}),
        ("metrics", {"a": "NaN"}),
        ("metrics", {"a": []}),
        ("metrics", {"a": True}),
    ],
)
def test_odd_fields_are_refused(field: str, value: object) -> None:
    for write in (plain, sealed):
        with pytest.raises(FormatError, match=r"^(?!.*damaged)"):
            decode_record(write({**unsealed(RECORD), field: value}))


@pytest.mark.parametrize("field", sorted(unsealed(RECORD)))
def test_missing_fields_are_refused(field: str) -> None:
    document = unsealed(RECORD)
    del document[field]
    for write in (plain, sealed):
        with pytest.raises(FormatError, match=r"^(?!.*damaged)"):
            decode_record(write(document))


@pytest.mark.parametrize(
    "record",
    [
        replace(RECORD, seq=-1),
        replace(RECORD, prev=""),
        replace(RECORD, seq=0),
        replace(RECORD, time_s=math.inf),
        replace(RECORD, op=Note(text="x" * 2**20)),
        replace(RECORD, op=Note(text="\ud800")),
        replace(RECORD, op=replace(COMMIT, attempt="short")),
        replace(RECORD, op=replace(COMMIT, metrics={"a": "b"})),  # type: ignore[dict-item]
        replace(RECORD, op="commit"),  # type: ignore[arg-type]
        replace(RECORD, op=Create(run_uid=DIGEST, run_name="../up", format=1)),
    ],
)
def test_what_no_reader_would_take_is_not_written(record: LogRecord) -> None:
    with pytest.raises(FormatError):
        encode_record(record)


@pytest.mark.parametrize("op", [COMMIT, *EACH_OP], ids=lambda op: type(op).__name__)
def test_every_truncation_and_every_flip_is_found(op: Op) -> None:
    """Nothing but its own digest proves the last record."""
    record = replace(RECORD, op=op)
    if isinstance(op, Create):
        record = replace(record, seq=0, prev="")
    data = bytearray(encode_record(record))
    for size in range(len(data)):
        with pytest.raises(FormatError):
            decode_record(bytes(data[:size]))
    for index in range(len(data)):
        for bit in range(8):
            data[index] ^= 1 << bit
            with pytest.raises(FormatError):
                decode_record(bytes(data))
            data[index] ^= 1 << bit
    for index in range(len(data) + 1):
        with pytest.raises(FormatError):
            decode_record(bytes(data[:index] + b" " + data[index:]))


def test_flips_in_a_record_without_a_digest_stay_format_errors() -> None:
    data = bytearray((GOLDEN / "record-1.json").read_bytes())
    for index in range(len(data)):
        for bit in range(8):
            data[index] ^= 1 << bit
            with suppress(FormatError):
                assert decode_record(bytes(data)) != RECORD or data[index] in b" "
            data[index] ^= 1 << bit


@given(st.binary(max_size=60))
def test_any_bytes_give_a_record_or_a_format_error(data: bytes) -> None:
    with suppress(FormatError):
        decode_record(data + b"\n")


@pytest.mark.parametrize("text", ["[]", "1", "{}", "null", "[" * 100_000])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        decode_record(text.encode() + b"\n")


def test_every_op_of_the_union_has_a_name() -> None:
    assert set(records.OPS.values()) == set(Op.__args__) == {type(op) for op in (*EACH_OP, COMMIT)}
