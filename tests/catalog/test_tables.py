"""The catalog as tables: log and manifests in Arrow, DuckDB and Parquet, in bounded memory."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ckpt.analysis.report import page, read_report, to_json
from ray_ckpt.catalog import checkpoint as view_module
from ray_ckpt.catalog import tables
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.catalog.tables import TABLES, Cuts
from ray_ckpt.cli import main
from ray_ckpt.errors import ConfigError, CorruptionError
from ray_ckpt.format import records
from ray_ckpt.format.digest import digest
from ray_ckpt.storage.checkpoint_files import CheckpointFiles
from ray_ckpt.types import Level, ManifestRow, Slice
from tests.support.sample_run import START_S, SampleRun, make_checkpoint, write_run


@pytest.fixture
def run(tmp_path: Path) -> SampleRun:
    """10, 20, 30, 40 in session 1; session 2 resumed from 30 and saved 40 and 50."""
    return write_run(
        tmp_path,
        durable=(10, 30, 50),
        resume_at=30,
        resumed_steps=(40, 50),
        lost=(20,),
        collected=(10,),
    )


def ray_ckpt_cli(*args: object) -> int:
    """Run a command; return its exit code."""
    try:
        main(list(map(str, args)))
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code
    return 0


def rows(table: pa.Table, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in table.select(columns).to_pylist()]


# The log


def test_a_checkpoint_shows_how_long_it_took_and_what_became_of_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10,), durable=(10,), replicas=2)
    saved = make_checkpoint(run.log.attempt(1, 20))
    attempt = saved.attempt.attempt
    run.log.append(
        records.Commit(
            session=1,
            step=20,
            attempt=attempt,
            level=Level.REPLICATED,
            replicas=1,
            world_size=2,
            num_nodes=2,
            size_bytes=saved.size_bytes,
            root_digest=saved.root_digest,
            metrics={},
            stall_s=0.25,
            capture_s=1.5,
            local_s=3.0,
            replicate_s=4.5,
        )
    )
    committed = run.log.seq - 1
    run.log.append(records.Note(text="later"))
    run.log.drain(saved)
    run.log.append(records.Verified(attempt=attempt))
    read = {"remote": 9.0}
    drilled = records.Drilled(
        attempt=attempt, scenario="remote-only", passed=True, seconds=1.0, read_bytes=read, text=""
    )
    run.log.append(drilled)
    run.log.append(records.Pin(attempt=attempt, owner="eval", expires_at_s=START_S + 1000))
    run.log.append(records.Pin(attempt=attempt, owner="paper", expires_at_s=None))
    first, second = Catalog(run.folder).to_arrow().to_pylist()
    phases = ("stall_s", "capture_s", "local_s", "replicate_s", "drain_s")
    assert [second[name] for name in phases] == [0.25, 1.5, 3.0, 4.5, 60.0]
    assert [first[name] for name in phases] == [None, None, None, None, 30.0]
    times = [second[name] for name in ("committed_at", "durable_at", "verified_at", "drilled_at")]
    assert [t.timestamp() - START_S for t in times] == [30.0 * (committed + k) for k in (0, 2, 3, 4)]
    assert (first["verified_at"], first["drill"], second["drill"]) == (None, None, "passed: remote-only")
    owners = [(pin["owner"], pin["until"] and pin["until"].timestamp()) for pin in second["pins"]]
    assert owners == [("eval", START_S + 1000), ("paper", None)] and first["pins"] == []
    assert (first["replicas"], first["tiers"]) == (2, ["local", "peer", "remote"])
    shown = Catalog(run.folder)[20]._repr_html_()
    assert "0.25 s stall" in shown and "60 s drain" in shown and "passed: remote-only" in shown


def test_replicas_that_differed_are_in_every_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, steps=(10,), durable=(10,))
    text = "model.w: rank(s) 1 on node(s) b differ from 2 others"
    known = Catalog(run.folder)[10].info
    run.log.append(
        records.Commit2(
            session=known.id.session,
            step=20,
            attempt="f" * 16,
            level=Level.LOCAL,
            replicas=0,
            world_size=known.world_size,
            num_nodes=known.num_nodes,
            size_bytes=1,
            root_digest="0" * 32,
            metrics={},
            suspect=text,
        )
    )
    catalog = Catalog(run.folder)
    assert rows(catalog.to_arrow(), "step", "suspect") == [(10, None), (20, text)]
    assert text in catalog.to_arrow("events").to_pylist()[-1]["text"]
    assert text in catalog[20]._repr_html_() and "drifted" not in catalog[10]._repr_html_()
    assert ray_ckpt_cli("show", run.folder, 20) == 0
    assert f"drifted apart  {text}" in capsys.readouterr().out
    verdict = next(v for v in to_json(read_report(catalog, START_S))["verdicts"] if v["title"] == "Replicas")
    assert (verdict["tone"], verdict["head"], verdict["text"]) == (
        "bad",
        "differed at 1 save",
        f"Step 20: {text}.",
    )


def test_tables_and_pages_name_the_damage_that_a_scrub_has_found(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10, 20), durable=(10, 20))
    attempts = [run.checkpoints[step].attempt.attempt for step in (10, 20)]
    for attempt, fragments in ((attempts[0], "0"), (attempts[1], "1"), (attempts[0], "")):
        run.log.append(records.Damaged(attempt=attempt, fragments=fragments))
    catalog = Catalog(run.folder)
    assert rows(catalog.to_arrow(), "step", "damaged") == [(10, None), (20, "1")]
    assert catalog.events()["text"].to_pylist()[-2:] == ["fragments 1", "none any more"]
    assert "damaged" in catalog[20]._repr_html_() and "damaged" not in catalog[10]._repr_html_()
    verdict = next(v for v in to_json(read_report(catalog, START_S))["verdicts"] if v["title"] == "Damage")
    assert (verdict["tone"], verdict["head"]) == ("bad", "1 checkpoint")
    assert (
        verdict["text"]
        == "Found by a scrub on the storage path, or not readable there; the newest is step 20."
    )


def test_tables_and_pages_name_parity_groups(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10,), durable=(10,))
    later = make_checkpoint(run.log.attempt(1, 20))
    run.log.commit(later, replicas=2, parity="6+2")
    catalog = Catalog(run.folder)
    assert rows(catalog.to_arrow(), "step", "parity") == [(10, None), (20, "6+2")]
    assert "2 losses allowed by parity 6+2" in catalog.to_arrow("events").to_pylist()[-1]["text"]
    assert "parity groups" in catalog[20]._repr_html_() and "parity" not in catalog[10]._repr_html_()


def test_parity_is_no_copy_on_another_node(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10,), durable=())
    run.log.commit(make_checkpoint(run.log.attempt(1, 20)), replicas=2, parity="6+2")
    found = rows(Catalog(run.folder).to_arrow(), "tiers", "parity")
    assert found == [(["local", "peer"], None), (["local"], "6+2")]


def test_tiers_are_those_of_the_log(tmp_path: Path) -> None:
    run = write_run(tmp_path, durable=(10, 30), replicas=0, lost=(20,), retired=(30,))
    found = rows(Catalog(run.folder).to_arrow(), "step", "tiers", "on_storage")
    assert found == [
        (10, ["local", "remote"], True),
        (20, [], False),
        (30, ["remote"], True),
        (40, ["local"], False),
    ]


def test_sessions_have_their_lineage_restore_and_end(run: SampleRun) -> None:
    run.log.append(records.Restored(session=2, seconds=1.25, read_bytes={"peer": 7.0, "remote": 5.0}))
    run.log.append(
        records.Ended(
            session=2,
            cause="node",
            step=57,
            first_at_s=START_S,
            last_at_s=START_S + 9.5,
            stalled_s=0.5,
        )
    )
    catalog = Catalog(run.folder)
    first, second = catalog.to_arrow("sessions").to_pylist()
    assert (first["parent"], first["resumed_from"], first["branch"]) == (None, None, 1)
    assert (second["parent"], second["resumed_from_step"], second["branch"]) == (1, 30, 2)
    assert second["resumed_from"] == run.checkpoints[30].attempt.attempt
    assert first["on_lineage"] and second["on_lineage"]
    assert (first["num_checkpoints"], second["num_checkpoints"]) == (4, 2)
    assert second["read_bytes"] == [("peer", 7.0), ("remote", 5.0)] and first["read_bytes"] == []
    assert (second["end_cause"], second["last_step"], second["stalled_s"]) == ("node", 57, 0.5)
    assert second["last_step_at"].timestamp() == START_S + 9.5 and first["end_cause"] is None
    texts = catalog.events()["text"].to_pylist()
    restored = "restored step 30 in 1.25 s: 7 B from other nodes, 5 B from the storage path"
    assert texts[-2:] == [restored, "node, at step 57"]
    assert list(catalog.to_pandas("sessions")["branch"]) == [1, 2]


def test_a_session_has_the_step_of_another_run_from_which_it_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, steps=())
    run.log.append(records.Restored(session=1, seconds=2.0, read_bytes={"remote": 5.0}, origin_step=50_000))
    catalog = Catalog(run.folder)
    (session,) = catalog.to_arrow("sessions").to_pylist()
    assert (session["resumed_from_step"], session["origin_step"]) == (None, 50_000)
    assert catalog.events()["text"].to_pylist()[-1] == (
        "restored step 50000 of another run in 2.00 s: 5 B from the storage path"
    )
    assert ray_ckpt_cli("tree", run.folder) == 0
    assert "session 1  from step 50000 of another run" in capsys.readouterr().out
    found = read_report(catalog, START_S + 60)
    assert "session 1, from step 50,000 of another run" in page(found)
    assert found.newest_step == 50_000, "a restart begins with the same one"


def test_a_branch_goes_on_from_its_last_commit_and_begins_anywhere_else(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10, 20), durable=())
    at = dict(run.checkpoints)

    def session(number: int, after: int | None, *steps: int) -> None:
        run.log.session(number, after=None if after is None else at[after], world_size=2, num_nodes=2)
        for step in steps:
            at[step] = make_checkpoint(run.log.attempt(number, step))
            run.log.commit(at[step])

    session(2, 20, 30)  # goes on
    session(3, 30)  # goes on, and commits nothing
    session(4, 30, 40)  # goes on
    session(5, 30, 50)  # 40 is left behind
    session(6, 50, 60)  # goes on there
    session(7, None)  # from scratch
    session(8, 40, 70)  # the first branch again
    catalog = Catalog(run.folder)
    found = rows(catalog.to_arrow("sessions"), "session", "branch", "on_lineage")
    assert [branch for _, branch, _ in found] == [1, 1, 1, 1, 5, 5, 7, 1]
    assert [number for number, _, is_on in found if is_on] == [1, 2, 4, 8]
    checkpoints = rows(catalog.to_arrow(), "step", "branch", "resumed_from_step", "on_lineage")
    assert checkpoints[-2:] == [(60, 5, 50, False), (70, 1, 40, True)]


def test_times_that_no_calendar_holds_are_null() -> None:
    found = tables._times([None, -1.0, 0.0, 1.5, 1e300, float("inf")]).to_pylist()
    assert [t and t.timestamp() for t in found] == [None, None, 0.0, 1.5, None, None]


# Manifests


def test_every_file_and_slice_of_what_is_durable_has_a_row(run: SampleRun) -> None:
    catalog = Catalog(run.folder)
    shards = catalog.to_arrow("shards")
    for step in (30, 50):
        saved = run.checkpoints[step]
        found = {
            row["file"]: (row["size_bytes"], row["digest"])
            for row in shards.to_pylist()
            if row["step"] == step and row["attempt"] == saved.attempt.attempt
        }
        assert found == {entry.name: (entry.size_bytes, entry.digest) for entry in saved.entries}
    assert set(shards["step"].to_pylist()) == {30, 50}
    kinds = rows(shards.slice(0, 5), "kind", "rank", "node_index")
    assert kinds == [
        ("shard", 0, 0),
        ("state", 0, 0),
        ("manifest", None, 0),
        ("shard", 1, 1),
        ("state", 1, 1),
    ]
    for row in catalog.to_arrow("slices", steps=[50]).to_pylist():
        data = (run.directory(50) / row["file"]).read_bytes()
        assert digest(data[row["byte_offset"] : row["byte_offset"] + row["nbytes"]]) == row["digest"]
        whole = run.checkpoints[50].tensors[row["tensor"]]
        box = tuple(slice(o, o + n) for o, n in zip(row["offset"], row["shape"], strict=True))
        assert data[row["byte_offset"] :][: row["nbytes"]] == np.ascontiguousarray(whole[box]).tobytes()
        assert row["tensor"] == f"{row['item']}.{row['name']}" and f"-{row['rank']:05d}-of" in row["file"]


def test_cuts_show_how_tensors_are_cut(run: SampleRun) -> None:
    """The sample run cuts matrices in two along their longer side, most bytes along the second dimension."""
    catalog = Catalog(run.folder)
    assert catalog.to_arrow(steps=[30, 50])["cuts"].to_pylist() == [["2", "1x2", "1"]] * 2
    assert catalog.to_arrow()["cuts"].null_count == 6


def test_steps_may_be_a_column_or_an_iterator(run: SampleRun, tmp_path: Path) -> None:
    catalog = Catalog(run.folder)
    frame = catalog.to_pandas()
    column = frame["step"][frame["step"].isin([30, 50])]
    several: list[Any] = [column, column.to_numpy(), (n for n in (50, 30)), {np.int32(30), 50}]
    for steps in several:
        assert [view.info.step for view in catalog.durable(steps)] == [30, 50]
    assert catalog.to_arrow(steps=iter([50])).num_rows == 1
    assert catalog.to_arrow("slices", steps=column.tail(1)).num_rows > 0
    assert catalog.write_parquet(tmp_path / "out", steps=(step for step in (30, 50)))["shards"] > 0
    assert catalog.durable(column.head(0)) == ()
    with pytest.raises(ConfigError, match="step 20"):
        catalog.durable(np.array([20, 30]))


def cuts(parts: Sequence[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]) -> tuple[str, ...]:
    """Return the texts for slices (name, global shape, offset, shape) of bytes."""
    found = Cuts()
    for name, whole, offset, shape in parts:
        part = Slice(item="m", name=name, dtype="U8", global_shape=whole, offset=offset, shape=shape)
        nbytes = part.num_elements
        row = ManifestRow(kind="slice", file="f", byte_offset=0, nbytes=nbytes, digest="", slice=part)
        found.add([row])
    return found.texts()


def test_cuts_of_a_grid_of_whole_tensors_and_of_empty_ones() -> None:
    grid = [("grid", (4, 6), (i, j), (2, 3)) for i in (0, 2) for j in (0, 3)]
    fsdp = [("fsdp", (9, 2), (start, 0), (3, 2)) for start in (0, 3, 6)]
    rest: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
        ("scalar", (), (), ()),
        ("empty", (0, 3), (0, 0), (0, 3)),
        ("nothing", (9, 2), (9, 0), (0, 2)),
    ]
    assert cuts([*grid, *fsdp, *rest]) == ("2x2", "3", "1")
    assert cuts([]) == ()


def test_cuts_of_tensors_of_ranks_that_differ_in_form_under_one_key() -> None:
    """Each rank has saved a tensor of its own as a whole, which nobody has cut."""
    assert cuts([("w", (3,), (0,), (3,)), ("w", (2, 5), (0, 0), (2, 5)), ("w", (), (), ())]) == ("1",)


@pytest.mark.parametrize(
    ("table", "steps", "message"),
    [
        ("nope", None, "no table 'nope'"),
        ("events", [30], "no table 'events' of single steps"),
        ("slices", [30, 40], "no live durable checkpoint of step 40.* 30, 50"),
        ("checkpoints", [10], "no live durable checkpoint of step 10"),
    ],
)
def test_wrong_names_and_steps_are_refused(run: SampleRun, table: Any, steps: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Catalog(run.folder).to_arrow(table, steps=steps)


# Elsewhere


def test_duckdb_reads_every_table(run: SampleRun) -> None:
    catalog = Catalog(run.folder)
    for name in TABLES:
        found = catalog.to_arrow(name)
        assert len(duckdb.sql("select * from found").to_arrow_table()) == found.num_rows > 0, name
    connection = duckdb.connect()
    for name in ("checkpoints", "slices"):
        connection.register(name, catalog.to_arrow(name))
    sums = connection.sql(
        """select step, level, sum(nbytes)::bigint, count(distinct tensor)
        from checkpoints join slices using (step, attempt)
        where on_lineage and list_contains(tiers, 'remote') group by all order by step"""
    ).fetchall()
    sizes = {step: sum(t.nbytes for t in run.checkpoints[step].tensors.values()) for step in (30, 50)}
    assert sums == [(step, "durable", sizes[step], 8) for step in (30, 50)]


def test_parquet_has_what_arrow_has(run: SampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROW_GROUP_ROWS", 5)
    catalog = Catalog(run.folder)
    seen: list[int] = []
    out = tmp_path / "a" / "tables"
    found = catalog.write_parquet(out, progress=seen.append)
    assert sorted(path.name for path in out.iterdir()) == sorted(f"{name}.parquet" for name in TABLES)
    assert seen == [1, 1]
    for name in TABLES:
        table = pq.read_table(out / f"{name}.parquet")
        expected = catalog.to_arrow(name)
        assert found[name] == table.num_rows == expected.num_rows
        kept = [column for column in table.column_names if column != "cuts"]
        assert table.select(kept).to_pylist() == expected.select(kept).to_pylist(), name
    assert rows(pq.read_table(out / "checkpoints.parquet"), "step", "cuts")[2:4] == [
        (30, ["2", "1x2", "1"]),
        (40, None),
    ]
    assert pq.ParquetFile(out / "slices.parquet").num_row_groups > 2, "written a few rows at a time"
    path = out / "slices.parquet"
    ((number,),) = duckdb.sql(f"select count(*) from '{path}' where nbytes > 0").fetchall()
    assert 0 < number < found["slices"]
    assert catalog.write_parquet(out, steps=[50])["shards"] == found["shards"] // 2


def test_an_empty_run_has_empty_parquet_files(tmp_path: Path) -> None:
    catalog = Catalog(write_run(tmp_path, steps=()).folder)
    found = catalog.write_parquet(tmp_path / "out")
    assert found == {"checkpoints": 0, "shards": 0, "slices": 0, "events": 3, "sessions": 1}
    assert pq.read_table(tmp_path / "out" / "slices.parquet").schema == tables.SLICES


def test_damage_leaves_no_new_file_and_the_old_ones(run: SampleRun, tmp_path: Path) -> None:
    catalog = Catalog(run.folder)
    catalog.write_parquet(tmp_path / "out", steps=[30])
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    fragment = run.directory(50) / "manifest-00001-of-00002.parquet"
    fragment.write_bytes(fragment.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptionError, match="manifest-00001-of-00002"):
        catalog.write_parquet(tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def deletes(run: SampleRun, step: int, *, after: int) -> Callable[[CheckpointFiles, str, int], bytes]:
    """Return a `CheckpointFiles.read_whole` that deletes `step`, as retention does, after `after` files."""
    read = CheckpointFiles.read_whole
    seen: list[str] = []

    def then_deleted(files: CheckpointFiles, name: str, max_bytes: int) -> bytes:
        if str(files.location) == str(run.directory(step)):
            if len(seen) == after:
                run.log.append(records.Retired(attempt=run.checkpoints[step].attempt.attempt, reason="old"))
                shutil.rmtree(run.directory(step))
            seen.append(name)
        return read(files, name, max_bytes)

    return then_deleted


@pytest.mark.parametrize("after", [0, 1, 2])
def test_what_is_deleted_meanwhile_is_left_out(
    run: SampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(view_module, "REQUESTS_AT_A_TIME", 1)
    expected = Catalog(run.folder).to_arrow("slices", steps=[50]).num_rows
    catalog = Catalog(run.folder)
    monkeypatch.setattr(CheckpointFiles, "read_whole", deletes(run, 30, after=after))
    if after == 2:
        table = catalog.to_arrow("slices")
        assert set(table["step"].to_pylist()) == {50} and table.num_rows == expected
    seen: list[int] = []
    assert catalog.write_parquet(tmp_path / "out", progress=seen.append)["slices"] == expected
    checkpoints = pq.read_table(tmp_path / "out" / "checkpoints.parquet")
    assert (30, "retired", None) in rows(checkpoints, "step", "state", "cuts")


def test_the_folder_of_parquet_files_may_be_below_home(
    run: SampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(run.folder)
    Catalog(run.folder).write_parquet("~/tabs", steps=[50])
    assert ray_ckpt_cli("ls", run.folder, "--parquet=~/tabs") == 0
    assert (tmp_path / "tabs" / "slices.parquet").exists() and not (run.folder / "~").exists()


def test_a_chosen_step_that_is_deleted_meanwhile_is_an_error(
    run: SampleRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(run.folder)
    monkeypatch.setattr(CheckpointFiles, "read_whole", deletes(run, 30, after=0))
    with pytest.raises(CorruptionError, match="deleted since the log was read"):
        catalog.to_arrow("slices", steps=[30])


# The command


def test_ls_writes_parquet(run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert ray_ckpt_cli("ls", run.folder, "--parquet", out, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["table"] for row in document["tables"]] == list(TABLES)
    for row in document["tables"]:
        assert pq.read_metadata(row["file"]).num_rows == row["rows"]
    assert ray_ckpt_cli("ls", run.folder, "--parquet", out, "--step", 30) == 0
    captured = capsys.readouterr()
    assert str(out / "slices.parquet") in captured.out and captured.err == ""
    assert set(pq.read_table(out / "slices.parquet")["step"].to_pylist()) == {30}


@pytest.mark.parametrize("folder", ["foo:bar", "T14:00", "caf\udce9"])
def test_ls_writes_parquet_into_a_folder_of_any_name(
    run: SampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """pyarrow takes a relative path with a colon for a URL."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), errors="backslashreplace"))
    assert ray_ckpt_cli("ls", run.folder, "--parquet", folder, "--step", 30) == 0
    assert sorted(path.name for path in (tmp_path / folder).iterdir()) == sorted(
        f"{t}.parquet" for t in TABLES
    )


def test_ls_writes_parquet_nowhere_if_the_folder_is_an_empty_text(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a variable of the shell that is not set."""
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    assert ray_ckpt_cli("ls", run.folder, "--parquet", "") == 2
    assert "--parquet has no folder" in capsys.readouterr().err and set(tmp_path.iterdir()) == before


def test_ls_writes_parquet_to_no_url(
    run: SampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ray_ckpt_cli("ls", run.folder, "--parquet", "s3://bucket/tables") == 2
    assert "is not a folder" in capsys.readouterr().err and sorted(tmp_path.iterdir()) == [run.folder]


def test_ls_reports_why_it_cannot_write(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for args, message in (
        (("--step", 30), "--step goes with --parquet"),
        (("--parquet", tmp_path / "out", "--step", 40), "no live durable checkpoint of step 40"),
        (("--parquet", tmp_path / "file"), "file"),
    ):
        assert ray_ckpt_cli("ls", run.folder, *args) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    next(run.directory(30).glob("manifest-*")).unlink()
    assert ray_ckpt_cli("ls", run.folder, "--parquet", tmp_path / "out") == 1
    assert "is missing" in capsys.readouterr().err
