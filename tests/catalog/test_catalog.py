"""The catalog shows the content of the log, and `verify` finds every change of a checkpoint's files."""

from __future__ import annotations

import math
import random
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import zstandard

import ray_ckpt
from ray_ckpt.catalog.catalog import Catalog, Damage, find_runs, verify_directory
from ray_ckpt.catalog.tables import MAX_HTML_ROWS
from ray_ckpt.errors import ConfigError, CorruptionError, FormatError, NoRun, StoragePathError
from ray_ckpt.format import names, records, zstd
from ray_ckpt.format.digest import digest, root_digest, root_files
from ray_ckpt.format.manifest import decode_checkpoint, decode_fragment, encode_checkpoint, encode_fragment
from ray_ckpt.location import Location, locate
from ray_ckpt.storage.checkpoint_files import CheckpointFiles
from ray_ckpt.storage.log_store import trim_log
from ray_ckpt.storage.remote.file_store import Blocks, Children, PosixFiles
from ray_ckpt.storage.remote.tier import open_store
from ray_ckpt.texts import local_time_text, size_text
from ray_ckpt.types import AttemptId, FileEntry, Level, RootOf
from ray_ckpt.verify.content import verify_files
from tests.servers.stores import bucket_url
from tests.servers.strict_store import DropAfter, Fault, Match, Status, StrictStore, Truncate
from tests.support.examples import every_few
from tests.support.sample_run import SampleRun, compress_shards, copy_to, make_checkpoint, write_run

KINDS = ("shard-00001-of-00002.safetensors", "state-00000-of-00002.json", "manifest-00001-of-00002.parquet")
SHARD, STATE, FRAGMENT = KINDS


@pytest.fixture
def branched(tmp_path: Path) -> SampleRun:
    """10, 20, 30, 40 in session 1; session 2 resumed from 30 and saved 40 and 50."""
    return write_run(
        tmp_path,
        durable=(10, 30, 50),
        resume_at=30,
        resumed_steps=(40, 50),
        lost=(20,),
        collected=(10,),
    )


@pytest.fixture(params=get_args(RootOf))
def root_of(request: pytest.FixtureRequest) -> RootOf:
    found: RootOf = request.param
    return found


@pytest.fixture
def folder(tmp_path: Path, root_of: RootOf) -> Path:
    """An intact checkpoint, alone."""
    attempt = names.make_attempt(run_uid="ab" * 16, session=1, step=7, attempt=0)
    return make_checkpoint(attempt, rows=64, root_of=root_of).write(tmp_path / attempt.directory)


def with_unlisted(name: str, where: str, root_of: RootOf) -> list[tuple[str, str]]:
    """Return the expected findings for one bad file; newer versions list files in their fragment only."""
    is_unread = name == FRAGMENT and root_of == "fragments"
    return [
        (name, where),
        *([(SHARD, "unlisted"), (names.state_file(1, 2), "unlisted")] if is_unread else []),
    ]


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << position % 8
    path.write_bytes(data)


def found(folder: Path, root: str | None = None) -> list[tuple[str, str]]:
    return [(d.file, d.where) for d in verify_directory(folder, root_digest=root).damages]


# The content of the log


def test_a_run_is_read_from_its_folder_or_its_subfolder(branched: SampleRun) -> None:
    for path in (
        branched.folder,
        str(branched.folder),
        branched.folder / "ray_ckpt",
        f"file://{branched.folder}",
    ):
        catalog = Catalog(path)
        assert (catalog.run_name, catalog.run_uid) == ("gpt", branched.log.run_uid)
        assert catalog.path == branched.folder / "ray_ckpt"


def test_a_tilde_of_nobody_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate("~nosuchuser/x").folder == tmp_path / "~nosuchuser" / "x"
    with pytest.raises(ConfigError, match=r"no run at .*~nosuchuser"):
        Catalog("~nosuchuser/x")


def test_checkpoints_sessions_and_the_newest(branched: SampleRun) -> None:
    catalog = Catalog(branched.folder)
    assert [s.session for s in catalog.sessions] == [1, 2]
    assert [(c.step, c.id.session) for c in catalog.checkpoints] == [(30, 1), (40, 1), (40, 2), (50, 2)]
    assert [c.state for c in catalog.list(all=True)] == ["collected", "lost", "live", "live", "live", "live"]
    assert [(c.step, c.id.session) for c in catalog.lineage] == [(30, 1), (40, 2), (50, 2)]
    newest = catalog.newest()
    assert newest is not None and newest.info.step == 50
    assert [v.info.step for v in catalog] == [30, 40, 40, 50] and len(catalog) == 4
    assert 40 in catalog and 20 not in catalog


def test_a_step_is_looked_up_on_the_lineage_first(branched: SampleRun) -> None:
    catalog = Catalog(branched.folder)
    assert catalog[40].info.id.session == 2
    with pytest.raises(ConfigError, match=r"no live checkpoint of step 20.* 30, 40, 50"):
        catalog[20]
    with pytest.raises(ConfigError, match=r"step is .40., which is not an integer"):
        catalog["40"]  # type: ignore[index]
    gone = catalog.find(20, all=True)
    assert gone is not None and gone.info.state == "lost" and gone.path is None


def test_a_step_that_only_a_dead_branch_has_is_still_found(tmp_path: Path) -> None:
    run = write_run(tmp_path, resume_at=10, resumed_steps=(20,))
    catalog = Catalog(run.folder)
    assert catalog[20].info.id.session == 2
    assert catalog[40].info.id.session == 1
    newest = catalog.newest()
    assert newest is not None and newest.info.step == 20


def test_the_newest_of_a_level(tmp_path: Path) -> None:
    catalog = Catalog(write_run(tmp_path, durable=(10, 20)).folder)
    assert [v.info.step for level in Level if (v := catalog.newest(level))] == [40, 40, 20]
    catalog = Catalog(write_run(tmp_path, "fresh", durable=(), replicas=0).folder)
    assert catalog.newest(Level.REPLICATED) is None


def test_refresh_sees_what_was_written_since(branched: SampleRun) -> None:
    catalog = Catalog(branched.folder)
    branched.log.append(records.Retired(attempt=branched.checkpoints[50].attempt.attempt, reason="test"))
    assert len(catalog) == 4
    catalog.refresh()
    assert len(catalog) == 3


def test_the_table_of_checkpoints(branched: SampleRun) -> None:
    table = Catalog(branched.folder).to_arrow()
    rows = {(row["step"], row["session"]): row for row in table.to_pylist()}
    assert [key for key, row in rows.items() if row["on_storage"]] == [(30, 1), (50, 2)]
    assert [key for key, row in rows.items() if not row["on_lineage"]] == [(40, 1)]
    row = rows[50, 2]
    saved = branched.checkpoints[50]
    assert (row["level"], row["replicas"], row["world_size"], row["num_nodes"]) == ("durable", 1, 2, 2)
    assert (row["size_bytes"], row["root_digest"]) == (saved.size_bytes, saved.root_digest)
    assert row["directory"] == saved.attempt.directory and row["metric.lr"] == 1e-3
    assert row["committed_at"].isoformat() == "2026-09-21T14:19:20+00:00"
    assert str(table.schema.field("committed_at").type) == "timestamp[us, tz=UTC]"
    frame = Catalog(branched.folder).to_pandas()
    assert list(frame["state"]) == ["collected", "lost", *["live"] * 4]


def test_metrics_that_only_some_checkpoints_have(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(1,))
    attempt = run.log.attempt(1, 2)
    run.log.commit(make_checkpoint(attempt, metrics={"accuracy": float("nan")}))
    table = Catalog(run.folder).to_arrow()
    assert table["metric.loss"].to_pylist() == [4.0, None]
    assert str(table["metric.accuracy"].to_pylist()) == "[None, nan]"


def test_an_empty_run_has_empty_tables(tmp_path: Path) -> None:
    catalog = Catalog(write_run(tmp_path, steps=()).folder)
    assert catalog.to_arrow().num_rows == 0 and catalog.newest() is None and len(catalog) == 0
    with pytest.raises(ConfigError, match="no live checkpoint at all"):
        catalog[1]


def test_the_table_of_events(branched: SampleRun) -> None:
    branched.log.append(records.Note(text="a note"))
    events = Catalog(branched.folder).events().to_pylist()
    assert [e["seq"] for e in events] == list(range(len(events)))
    assert [e["op"] for e in events[:4]] == ["create", "epoch", "session", "commit"]
    assert events[10]["text"] == "from step 30, 2 ranks on 2 nodes"
    assert (events[13]["op"], events[13]["step"], events[13]["level"]) == ("promote", 50, "durable")
    assert events[-2]["op"] == "collected" and events[-2]["step"] == 10 and events[-1]["text"] == "a note"


def test_metrics_that_came_later_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10, 20))
    added = {"accuracy": 0.5, "worst": -math.inf}
    run.log.append(records.Annotated(attempt=run.checkpoints[10].attempt.attempt, metrics=added))
    catalog = Catalog(run.folder)
    assert catalog[10].info.metrics == {**run.checkpoints[10].metrics, **added}
    assert catalog[20].info.metrics == run.checkpoints[20].metrics
    assert catalog.to_arrow()["metric.accuracy"].to_pylist() == [0.5, None]
    event = catalog.events().to_pylist()[-1]
    assert (event["op"], event["step"], event["text"]) == ("annotated", 10, "accuracy=0.5, worst=-inf")


def test_a_trimmed_log_gives_the_same_catalog(branched: SampleRun) -> None:
    whole = Catalog(branched.folder)
    for time_s in (0.0, 1.0):
        branched.log.snapshot(time_s=time_s)
        branched.log.append(records.Note(text="goes on"))
    assert trim_log(branched.log.store, 1e9) == 16
    catalog = Catalog(branched.folder)
    assert catalog.sessions == whole.sessions and catalog.list(all=True) == whole.list(all=True)
    assert catalog.lineage == whole.lineage and catalog.to_arrow() == whole.to_arrow()
    assert (catalog.run_uid, catalog.run_name) == (whole.run_uid, whole.run_name)
    assert [e["seq"] for e in catalog.events().to_pylist()] == [0, 17, 18]


def test_a_snapshot_alone_hides_no_event(branched: SampleRun) -> None:
    events = Catalog(branched.folder).events()
    branched.log.snapshot(time_s=0.0)
    assert Catalog(branched.folder).events() == events


def test_a_view_is_printed_on_one_line(branched: SampleRun) -> None:
    catalog = Catalog(branched.folder)
    found = catalog[30]
    assert found.step == 30
    saved = local_time_text(found.info.committed_at_s)
    size = size_text(found.size_bytes)
    assert repr(found) == f"CheckpointView(step 30, durable, live, {size}, saved {saved})"
    assert max(len(repr(view)) for view in catalog.views(all=True)) < 100
    lost = catalog.find(20, all=True)
    assert "step 20, replicated, lost, " in repr(lost)


# What it refuses


def test_a_path_without_a_run_names_the_runs_below(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run at .*<storage_path>/<run name>"):
        Catalog(tmp_path / "nowhere")
    write_run(tmp_path, "a", steps=())
    write_run(tmp_path, "b", steps=())
    (tmp_path / "c").mkdir()
    assert [run.name for run in find_runs(tmp_path)] == ["a", "b"]
    with pytest.raises(ConfigError, match="holds the runs a, b; open"):
        Catalog(tmp_path)
    with pytest.raises(ConfigError, match="holds credentials") as caught:
        Catalog("s3://key:canary@bucket/runs/a")
    assert "canary" not in str(caught.value)


def test_the_error_for_a_path_with_a_step_says_where_the_step_goes(branched: SampleRun) -> None:
    run = branched.folder
    for opens in (Catalog, ray_ckpt.open):
        with pytest.raises(NoRun, match=re.escape(f"Give the run alone, {run}, and the step apart: step=30")):
            opens(f"{run}@30")


def test_folders_that_may_not_be_read_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "private", "secret"):
        write_run(tmp_path, name, steps=())
    children = PosixFiles.children

    def refuse(files: PosixFiles, folder: str = "") -> Children:
        if folder.startswith(("private", "secret")):
            raise PermissionError(13, "Permission denied", folder)
        return children(files, folder)

    monkeypatch.setattr(PosixFiles, "children", refuse)
    sentence = f"No permission to read 2 folders in {tmp_path}; runs are private to the user that trained."
    with pytest.raises(NoRun, match=re.escape(sentence)):
        Catalog(tmp_path)
    with pytest.raises(NoRun, match=re.escape(f"Did you mean a? {sentence}")):
        Catalog(tmp_path / "aa")
    assert [run.name for run in find_runs(tmp_path)] == ["a"]
    assert caplog.messages == [sentence]


def test_a_relative_path_counts_from_the_working_directory(
    branched: SampleRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(branched.folder.parent)
    assert Catalog("gpt").path == branched.folder / "ray_ckpt"
    assert [run.name for run in find_runs(".")] == ["gpt"]


def test_a_log_without_records_is_no_run_yet(tmp_path: Path) -> None:
    (tmp_path / "gpt" / "ray_ckpt" / "log").mkdir(parents=True)
    with pytest.raises(ConfigError, match="not started"):
        Catalog(tmp_path / "gpt")


def test_a_gap_in_the_log_is_an_error_not_a_shorter_history(branched: SampleRun) -> None:
    catalog = Catalog(branched.folder)
    log = branched.folder / "ray_ckpt" / "log"
    (log / names.record_file(5)).unlink()
    with pytest.raises(FormatError, match="no record 5, but record 16"):
        catalog.refresh()
    assert len(catalog) == 4


def test_a_gap_after_a_snapshot_is_an_error_and_one_before_it_is_none(branched: SampleRun) -> None:
    branched.log.snapshot(time_s=0.0)
    for text in "abc":
        branched.log.append(records.Note(text=text))
    store = branched.log.store
    store.delete(names.record_file(5))
    assert len(Catalog(branched.folder)) == 4
    assert [e["seq"] for e in Catalog(branched.folder).events().to_pylist()] == [0, *range(6, 20)]
    store.delete(names.record_file(18))
    with pytest.raises(FormatError, match="no record 18, but record 19"):
        Catalog(branched.folder)


def test_a_flip_in_a_record_that_no_other_one_names_is_found(branched: SampleRun) -> None:
    """The last one, and record 0 when a snapshot stands for those after it."""
    attempt = branched.checkpoints[50].attempt.attempt
    branched.log.append(records.Annotated(attempt=attempt, metrics={"loss": 0.25}))
    path = max((branched.folder / "ray_ckpt" / "log").glob("0*.json"))
    _expect_damage(branched, path, b"0.25", b"0.35")
    branched.log.snapshot(time_s=0.0)
    first = path.with_name(names.record_file(0))
    _expect_damage(branched, first, branched.log.run_uid.encode(), digest(b"another").encode())
    assert Catalog(branched.folder)[50].info.metrics["loss"] == 0.25


def _expect_damage(run: SampleRun, path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    with pytest.raises(FormatError, match=f"{path.name}.*does not match its own digest"):
        Catalog(run.folder)
    path.write_bytes(data)


def test_a_damaged_snapshot_is_an_error_only_without_its_records(branched: SampleRun) -> None:
    whole = Catalog(branched.folder)
    branched.log.snapshot(time_s=0.0)
    flip(branched.folder / "ray_ckpt" / "log" / names.snapshot_file(16), 200)
    assert Catalog(branched.folder).list(all=True) == whole.list(all=True)
    branched.log.store.delete(names.record_file(9))
    with pytest.raises(FormatError, match="no record 9, but a snapshot of record 16"):
        Catalog(branched.folder)


def test_a_changed_record_is_an_error(branched: SampleRun) -> None:
    record = branched.folder / "ray_ckpt" / "log" / names.record_file(8)
    other = replace(records.decode_record(record.read_bytes()), time_s=0.0)
    record.write_bytes(records.encode_record(other))
    with pytest.raises(FormatError, match="record 9 does not follow"):
        Catalog(branched.folder)


def test_a_log_that_cannot_be_read_is_an_error(branched: SampleRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, name: str) -> bytes:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr("ray_ckpt.storage.log_store.PosixLogStore.read", refuse)
    with pytest.raises(StoragePathError, match="as that user"):
        Catalog(branched.folder)


# The files of a checkpoint


def test_a_durable_checkpoint_shows_its_manifest(branched: SampleRun) -> None:
    view = Catalog(branched.folder)[50]
    saved = branched.checkpoints[50]
    assert view.path == branched.directory(50) and view.where == str(view.path)
    assert view.fragments() == saved.fragments
    assert view.description().files == tuple(root_files(saved.entries, "fragments"))
    table = view.slices()
    assert table.num_rows == sum(len(f.rows) for f in saved.fragments)
    seen: list[int] = []
    assert view.verify(seen.append) == ()
    assert sum(seen) == saved.size_bytes + len(saved.files[names.CHECKPOINT_JSON])


def test_a_checkpoint_in_the_cluster_has_no_files_here(branched: SampleRun) -> None:
    view = Catalog(branched.folder)[40]
    for read in (view.description, view.fragments, view.slices, view.verify):
        with pytest.raises(ConfigError, match="Step 40 is in the cluster only"):
            read()


def test_a_retired_checkpoint_has_a_path_until_its_bytes_are_gone(tmp_path: Path) -> None:
    run = write_run(tmp_path, retired=(10,))
    catalog = Catalog(run.folder)
    gone = catalog.list(all=True)[0]
    assert gone.state == "retired" and catalog.view(gone).path == run.directory(10)
    assert catalog.to_arrow()["on_storage"].to_pylist() == [True, False, True, False]
    shutil.rmtree(run.directory(10))
    assert catalog.view(gone).path is None and catalog.views(all=True)[0].path is None
    assert catalog.to_arrow()["on_storage"].to_pylist() == [False, False, True, False]


def test_reading_a_damaged_manifest_is_an_error_that_names_the_file(branched: SampleRun) -> None:
    view = Catalog(branched.folder)[50]
    flip(branched.directory(50) / FRAGMENT, 100)
    with pytest.raises(CorruptionError, match=FRAGMENT):
        view.slices()
    (branched.directory(50) / FRAGMENT).unlink()
    with pytest.raises(CorruptionError, match=f"{FRAGMENT} is missing"):
        view.fragments()


def test_another_checkpoint_in_its_place_is_found(branched: SampleRun) -> None:
    shutil.rmtree(branched.directory(50))
    shutil.copytree(branched.directory(30), branched.directory(50))
    view = Catalog(branched.folder)[50]
    assert [d.where for d in view.verify()] == ["attempt", "root digest"]
    with pytest.raises(CorruptionError, match="not match the commit in the log"):
        view.description()


def test_the_catalog_imports_neither_ray_nor_torch() -> None:
    code = "import sys, ray_ckpt.cli; print({'ray', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


# Verifying


def test_an_intact_directory_is_fine_wherever_it_lies(folder: Path, tmp_path: Path) -> None:
    report = verify_directory(folder)
    assert report.ok and report.num_files == 7 and report.num_slices == 11
    assert report.size_bytes == sum(p.stat().st_size for p in folder.iterdir())
    (folder / "README").write_text("notes of a person are no damage")
    assert verify_directory(folder.rename(tmp_path / "copy")).ok


@pytest.mark.parametrize("seed", every_few(range(5), 5))
@pytest.mark.parametrize("name", [*KINDS, names.CHECKPOINT_JSON])
def test_a_flipped_byte_is_found_where_it_is(folder: Path, name: str, seed: int, root_of: RootOf) -> None:
    path = folder / name
    pristine = path.read_bytes()
    rows = decode_fragment((folder / FRAGMENT).read_bytes()).rows
    rng = random.Random(f"{name} {seed}")
    for _ in range(4):
        position = rng.randrange(len(pristine))
        flip(path, position)
        damages = verify_directory(folder).damages
        path.write_bytes(pristine)
        assert [d.file for d in damages] == [file for file, _ in with_unlisted(name, "", root_of)], position
        if name == SHARD:
            hit = next(r for r in rows if r.file == name and 0 <= position - r.byte_offset < r.nbytes)
            assert damages[0].where == hit.label
        elif name == STATE:
            assert damages[0].where == "state"
    assert verify_directory(folder).ok


def test_every_slice_of_a_shard_is_named_as_people_call_it(folder: Path) -> None:
    (row,) = [
        r
        for r in decode_fragment((folder / FRAGMENT).read_bytes()).rows
        if r.slice is not None and r.slice.key == "model.blocks.0.weight"
    ]
    flip(folder / SHARD, row.byte_offset)
    flip(folder / SHARD, 20)
    assert found(folder) == [(SHARD, "header"), (SHARD, "model.blocks.0.weight[32:64, 0:6]")]


@pytest.mark.parametrize("block_bytes", [1, 7, 4096])
def test_blocks_need_not_end_where_slices_do(folder: Path, block_bytes: int) -> None:
    class Chopped(PosixFiles):
        def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
            for block in super().read(name, ranges):
                for start in range(0, block.nbytes, block_bytes):
                    yield block[start : start + block_bytes]

    assert verify_files(CheckpointFiles(locate(folder), Chopped(folder))).ok
    flip(folder / SHARD, 4096 + 5)
    assert len(verify_files(CheckpointFiles(locate(folder), Chopped(folder))).damages) == 1


@pytest.mark.parametrize("name", [*KINDS, names.CHECKPOINT_JSON])
def test_a_missing_file_is_found(folder: Path, name: str, root_of: RootOf) -> None:
    (folder / name).unlink()
    assert found(folder) == with_unlisted(name, "missing", root_of)


def test_a_folder_or_a_dangling_link_is_no_file(folder: Path, root_of: RootOf) -> None:
    (folder / SHARD).unlink()
    (folder / SHARD).mkdir()
    (folder / FRAGMENT).unlink()
    (folder / FRAGMENT).symlink_to(folder / "nothing")
    other = (SHARD, "missing") if root_of == "files" else (names.state_file(1, 2), "unlisted")
    assert found(folder) == [(FRAGMENT, "missing"), other]


@pytest.mark.parametrize("name", [*KINDS, names.CHECKPOINT_JSON])
@pytest.mark.parametrize("change", [-1, -150, 1])
def test_a_file_of_another_size_is_found(folder: Path, name: str, change: int, root_of: RootOf) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:change] if change < 0 else data + b"\0")
    where = "content" if name == names.CHECKPOINT_JSON else "size"
    assert found(folder) == with_unlisted(name, where, root_of)


def test_truncation_names_what_is_cut_off(folder: Path) -> None:
    rows = [r for r in decode_fragment((folder / FRAGMENT).read_bytes()).rows if r.file == SHARD]
    first, second = rows[1], rows[2]
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[: second.byte_offset + 3])
    flip(folder / SHARD, first.byte_offset)
    damages = verify_directory(folder).damages
    assert [d.where for d in damages] == [first.label, "size"]
    assert second.label in damages[1].detail


def test_an_empty_or_absent_directory_is_damage_not_an_error(folder: Path, tmp_path: Path) -> None:
    assert found(tmp_path / "absent") == [(names.CHECKPOINT_JSON, "missing")]
    (folder / names.CHECKPOINT_JSON).write_bytes(b"")
    assert found(folder) == [(names.CHECKPOINT_JSON, "content")]


def test_a_file_that_cannot_be_read_is_damage(folder: Path) -> None:
    class Broken(PosixFiles):
        def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
            if name == SHARD:
                raise OSError(5, "Input/output error")
            yield from super().read(name, ranges)

    (damage,) = verify_files(CheckpointFiles(locate(folder), Broken(folder))).damages
    assert (damage.file, damage.where) == (SHARD, "unreadable") and "Input/output" in damage.detail


def test_whoever_has_had_enough_does_not_wait_for_the_end(folder: Path) -> None:
    def stop(nbytes: int) -> None:
        if nbytes > 4096:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_directory(folder, progress=stop)


def test_a_shard_that_nobody_lists_is_found(folder: Path) -> None:
    extra = "shard-00002-of-00003.safetensors"
    shutil.copy(folder / SHARD, folder / extra)
    shutil.copy(folder / SHARD, folder / "model.safetensors")
    assert found(folder) == [("model.safetensors", "unlisted"), (extra, "unlisted")]


def test_damaged_data_is_found_without_the_fragment_that_describes_it(folder: Path, root_of: RootOf) -> None:
    """The finding is a wrong digest if checkpoint.json lists the file, else a file that no fragment lists."""
    (folder / FRAGMENT).unlink()
    flip(folder / SHARD, 5000)
    where = "digest" if root_of == "files" else "unlisted"
    assert found(folder)[:2] == [(FRAGMENT, "missing"), (SHARD, where)]


def test_damaged_data_is_found_without_checkpoint_json(folder: Path) -> None:
    (folder / names.CHECKPOINT_JSON).unlink()
    flip(folder / SHARD, 4100)
    damages = found(folder)
    assert damages[0] == (names.CHECKPOINT_JSON, "missing")
    assert damages[1][0] == SHARD and "[" in damages[1][1]
    (folder / FRAGMENT).unlink()
    assert found(folder)[:2] == [(names.CHECKPOINT_JSON, "missing"), (FRAGMENT, "missing")]


def test_the_log_decides_which_bytes_are_right(folder: Path) -> None:
    root = decode_checkpoint((folder / names.CHECKPOINT_JSON).read_bytes()).root_digest
    assert found(folder, root) == []
    assert found(folder, "0" * 32) == [(names.CHECKPOINT_JSON, "root digest")]
    (folder / names.CHECKPOINT_JSON).unlink()
    assert found(folder, root) == [(names.CHECKPOINT_JSON, "missing")]
    assert found(folder, "0" * 32)[1:] == [(names.CHECKPOINT_JSON, "root digest")]


def test_a_directory_under_the_name_of_another_is_found(folder: Path) -> None:
    moved = folder.rename(folder.with_name("000000000008-" + "0" * 16))
    assert found(moved) == [(names.CHECKPOINT_JSON, "attempt")]


# Compressed shards


@pytest.fixture
def compressed(folder: Path) -> Path:
    compress_shards(folder)
    return folder


def test_a_compressed_checkpoint_is_verified_as_it_was_saved(
    tmp_path: Path, folder: Path, compressed: Path, root_of: RootOf
) -> None:
    attempt = names.make_attempt(run_uid="ab" * 16, session=1, step=7, attempt=0)
    plain = make_checkpoint(attempt, rows=64, root_of=root_of)
    assert replace(verify_directory(compressed), where="") == replace(
        verify_directory(plain.write(tmp_path / "plain")), where=""
    )
    assert not (folder / SHARD).exists()


@pytest.mark.parametrize("seed", every_few(range(20)))
def test_a_flipped_byte_of_a_compressed_shard_is_found(compressed: Path, seed: int) -> None:
    path = compressed / f"{SHARD}.zst"
    position = random.Random(seed).randrange(path.stat().st_size)
    flip(path, position)
    damages = verify_directory(compressed).damages
    assert {d.file for d in damages} == {SHARD}, position


@pytest.mark.parametrize("size", [0, 5, 200, -1, -20])
def test_a_compressed_shard_that_is_cut_short_is_found(compressed: Path, size: int) -> None:
    path = compressed / f"{SHARD}.zst"
    path.write_bytes(path.read_bytes()[:size])
    assert found(compressed) == [(SHARD, "content")]


def test_damage_before_compression_is_named_by_its_slice(compressed: Path) -> None:
    path = compressed / f"{SHARD}.zst"
    raw = bytearray(zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read())
    for change, where in (
        ((4096, 4097), "model.blocks.0.weight[32:64, 0:6]"),
        ((len(raw) - 1, len(raw)), "size"),
    ):
        changed = raw.copy()
        changed[slice(*change)] = b"" if where == "size" else bytes([raw[4096] ^ 1])
        path.write_bytes(b"".join(zstd.encode([changed], 1)))
        assert verify_directory(compressed).damages[0].where == where


def test_a_compressed_shard_that_nobody_lists_is_found(compressed: Path) -> None:
    extra = "shard-00002-of-00003.safetensors"
    shutil.copy(compressed / f"{SHARD}.zst", compressed / f"{extra}.zst")
    shutil.copy(compressed / f"{SHARD}.zst", compressed / "notes.zst")
    assert found(compressed) == [(extra, "unlisted")]


# Manifests that are whole but wrong


def reseal(folder: Path) -> None:
    """checkpoint.json anew, for the fragments as they are."""
    old = decode_checkpoint((folder / names.CHECKPOINT_JSON).read_bytes())
    entries = tuple(_entry(folder / f.name) for f in old.files if (folder / f.name).exists())
    new = replace(old, files=entries, root_digest=root_digest(entries, old.root_of))
    (folder / names.CHECKPOINT_JSON).write_bytes(encode_checkpoint(new))


def _entry(path: Path) -> FileEntry:
    data = path.read_bytes()
    return FileEntry(name=path.name, size_bytes=len(data), digest=digest(data))


def test_a_tensor_that_is_not_covered_is_found(folder: Path) -> None:
    fragment = decode_fragment((folder / FRAGMENT).read_bytes())
    rows = tuple(
        replace(r, slice=replace(r.slice, offset=(0, 0)))
        if r.slice is not None and r.slice.key == "model.blocks.0.weight"
        else r
        for r in fragment.rows
    )
    (folder / FRAGMENT).write_bytes(encode_fragment(replace(fragment, rows=rows)))
    reseal(folder)
    (damage,) = verify_directory(folder).damages
    assert damage.where == "coverage" and "model.blocks.0.weight" in damage.detail


def test_a_fragment_of_another_checkpoint_is_found(folder: Path) -> None:
    other = AttemptId(run_uid="cd" * 16, session=1, step=7, attempt="0" * 16)
    fragment = decode_fragment((folder / FRAGMENT).read_bytes())
    (folder / FRAGMENT).write_bytes(encode_fragment(replace(fragment, attempt=other)))
    reseal(folder)
    assert found(folder) == [(FRAGMENT, "attempt")]


def test_ranks_and_files_that_no_fragment_has_are_found(folder: Path, root_of: RootOf) -> None:
    fragment = decode_fragment((folder / FRAGMENT).read_bytes())
    fragment = replace(
        fragment,
        ranks=(),
        files=tuple(f for f in fragment.files if f.name == SHARD),
        rows=tuple(r for r in fragment.rows if r.file == SHARD),
    )
    (folder / FRAGMENT).write_bytes(encode_fragment(fragment))
    reseal(folder)
    where = "files" if root_of == "files" else "unlisted"
    assert found(folder) == [("manifest-*.parquet", "ranks"), (names.state_file(1, 2), where)]


def test_a_digest_of_a_row_that_is_wrong_is_found(folder: Path) -> None:
    fragment = decode_fragment((folder / FRAGMENT).read_bytes())
    rows = (replace(fragment.rows[0], digest="0" * 32), *fragment.rows[1:])
    (folder / FRAGMENT).write_bytes(encode_fragment(replace(fragment, rows=rows)))
    reseal(folder)
    expected = Damage(file=SHARD, where="header", detail="")
    (damage,) = verify_directory(folder).damages
    assert replace(damage, detail="") == expected


# In a bucket


@pytest.fixture
def storage(strict: StrictStore, credentials: None) -> str:
    """A storage path of S3 that nobody else has."""
    return bucket_url("s3", strict.endpoint, f"catalog/{uuid.uuid4().hex}")


def put(folder: Path, url: str) -> None:
    copy_to(open_store(Location.parse(url), None)[0], folder)


@pytest.mark.parametrize("scheme", ["s3", pytest.param("gs", marks=pytest.mark.slow), "memory"])
def test_a_store_gives_the_same_catalog_as_a_folder(
    branched: SampleRun, strict: StrictStore, credentials: None, scheme: str
) -> None:
    storage = f"memory://catalog/{uuid.uuid4().hex}"
    if scheme != "memory":
        storage = bucket_url(scheme, strict.endpoint, f"catalog/{uuid.uuid4().hex}")
    branched.log.snapshot(time_s=0.0)
    branched.log.append(records.Note(text="goes on"))
    local = Catalog(branched.folder)
    put(branched.folder.parent, storage)
    (run,) = find_runs(storage)
    for path in (run, str(run), f"{run / 'ray_ckpt'}"):
        catalog = Catalog(path)
        assert catalog.where == str(run / "ray_ckpt") and catalog.path is None
    assert catalog.list(all=True) == local.list(all=True) and catalog.sessions == local.sessions
    assert catalog.to_arrow() == local.to_arrow() and catalog.events() == local.events()
    assert all(catalog.to_arrow(name) == local.to_arrow(name) for name in ("sessions", "shards", "slices"))
    view, same = catalog[50], local[50]
    assert view.where == str(run / "ray_ckpt" / "checkpoints" / view.info.directory) and view.path is None
    assert view.fragments() == same.fragments() and view.slices() == same.slices()
    seen: list[int] = []
    assert view.verify(seen.append) == ()
    assert sum(seen) == sum(f.stat().st_size for f in branched.directory(50).iterdir())
    assert verify_directory(view.where).ok


def test_folders_of_what_was_retired_are_listed_at_once(
    tmp_path: Path, storage: str, strict: StrictStore
) -> None:
    steps = tuple(range(10, 100, 10))
    run = write_run(tmp_path, steps=steps, durable=steps, retired=(10, 20, 30))
    put(run.folder, storage_of(storage))
    catalog = Catalog(storage_of(storage))
    before = listings(strict)
    assert catalog.view(catalog.list(all=True)[0]).where is not None
    assert listings(strict) == before + 1
    before = listings(strict)
    assert catalog.to_arrow()["on_storage"].to_pylist() == [True] * 9
    assert listings(strict) == before + 1


def storage_of(url: str) -> str:
    return str(Location.parse(url) / "gpt")


def listings(strict: StrictStore) -> int:
    """Wait until all requests are counted: each is counted after its answer."""
    while (stats := strict.stats())["in_flight"]:
        pass
    return sum(stats["requests"]["ListObjectsV2"].values())


def test_damage_in_a_bucket_is_found_where_it_is(branched: SampleRun, storage: str) -> None:
    flip(branched.directory(50) / SHARD, 4100)
    (branched.directory(50) / STATE).unlink()
    compress_shards(branched.directory(30))
    flip(branched.directory(30) / f"{SHARD}.zst", 200)
    put(branched.folder, storage_of(storage))
    catalog = Catalog(storage_of(storage))
    assert [(d.file, d.where) for d in catalog[50].verify()] == [
        (SHARD, "model.blocks.0.weight[4:8, 0:6]"),
        (STATE, "missing"),
    ]
    assert [(d.file, d.where) for d in catalog[30].verify()] == [(SHARD, "content")]


def test_an_answer_that_breaks_off_is_no_damage(
    branched: SampleRun, storage: str, strict: StrictStore
) -> None:
    put(branched.folder, storage_of(storage))
    view = Catalog(storage_of(storage))[50]
    for action in (Truncate(100), Status(503), DropAfter()):
        strict.add_fault(Fault(action=action, match=Match(operation="GetObject", key=SHARD), times=1))
    assert view.verify() == ()


def test_marker_objects_of_folders_are_neither_runs_nor_files(
    branched: SampleRun, storage: str, strict: StrictStore
) -> None:
    """pyarrow, with which Ray Train writes, leaves such objects."""
    import pyarrow.fs as pafs

    put(branched.folder, storage_of(storage))
    location = Location.parse(storage_of(storage))
    fs = pafs.S3FileSystem(
        access_key="strict", secret_key="strict-secret", endpoint_override=strict.endpoint, region="us-east-1"
    )
    for folder in ("", "/ray_ckpt", "/ray_ckpt/log", "/ray_ckpt/checkpoints", "_other"):
        fs.create_dir(f"{location.path}{folder}", recursive=False)
    fs.create_dir(f"{location.path}/ray_ckpt/checkpoints/{branched.checkpoints[50].attempt.directory}")
    assert [run.name for run in find_runs(storage)] == ["gpt"]
    catalog = Catalog(location)
    assert catalog.list(all=True) == Catalog(branched.folder).list(all=True)
    assert catalog[50].verify() == () and catalog.to_arrow() == Catalog(branched.folder).to_arrow()


def test_a_store_that_fails_is_an_error_with_a_hint(
    branched: SampleRun, storage: str, strict: StrictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(branched.folder, storage_of(storage))
    catalog = Catalog(storage_of(storage))
    elsewhere = bucket_url("s3", strict.endpoint, "gpt", bucket="nobody")
    with pytest.raises(StoragePathError, match=r"NoSuchBucket.*Check bucket, endpoint and credentials"):
        Catalog(elsewhere)
    with pytest.raises(StoragePathError, match="NoSuchBucket"):
        find_runs(elsewhere)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    with pytest.raises(StoragePathError, match="SignatureDoesNotMatch") as caught:
        Catalog(storage_of(storage))
    assert "canary" not in str(caught.value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="no AWS credentials"):
        Catalog(storage_of(storage))
    strict.add_fault(Fault(action=Status(403), match=Match(operation="GetObject")))
    with pytest.raises(StoragePathError, match="403"):
        catalog.refresh()
    assert len(catalog) == 4
    assert {d.where for d in catalog[50].verify()} == {"unreadable"}


def test_a_gap_in_a_log_in_a_bucket_is_an_error(branched: SampleRun, storage: str) -> None:
    (branched.folder / "ray_ckpt" / "log" / names.record_file(5)).unlink()
    put(branched.folder, storage_of(storage))
    with pytest.raises(FormatError, match="no record 5, but record 16"):
        Catalog(storage_of(storage))


# Notebooks


def test_html_is_escaped_and_bounded(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=range(1, 31), durable=(30,))
    metrics = {f"<script>{k}": 1.5 for k in range(7)}
    run.log.commit(make_checkpoint(run.log.attempt(1, 31), metrics=metrics))
    catalog = Catalog(run.folder)
    html = catalog._repr_html_()
    assert html.count("<tr>") == 1 + MAX_HTML_ROWS and "and 11 older ones" in html
    assert "31 (newest)" in html and "<script>" not in html and "&lt;script&gt;4 1.5, ..." in html
    html = catalog[30]._repr_html_()
    assert str(run.directory(30)) in html and run.checkpoints[30].root_digest in html
    assert "&lt;script" in catalog[31]._repr_html_() and "no files on" in catalog[31]._repr_html_()
