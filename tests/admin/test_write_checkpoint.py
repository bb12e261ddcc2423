"""Checkpoints that are written without a cluster: the files, the log, who may continue, and interruptions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ray_ckpt.admin import rollback
from ray_ckpt.admin.rollback import QUIET_S, plan_rollback, read_tail, roll_back
from ray_ckpt.admin.write_checkpoint import NewCheckpoint, left_aside, open_or_begin, write_checkpoint
from ray_ckpt.analysis.goodput import measure_goodput
from ray_ckpt.catalog.catalog import Catalog, find_runs, verify_directory
from ray_ckpt.cli import app
from ray_ckpt.core import messages as m
from ray_ckpt.core.ownership import check_claim
from ray_ckpt.core.save_intervals import failures_in
from ray_ckpt.errors import (
    ConfigError,
    CorruptionError,
    Fenced,
    FormatError,
    RunInUse,
    RunSuperseded,
    UnsupportedLeaf,
)
from ray_ckpt.format import records
from ray_ckpt.format.tree import TensorRef, decode_state
from ray_ckpt.location import Location
from ray_ckpt.storage.log_store import CreateResult, LogStore, create_record
from ray_ckpt.storage.remote.tier import RemoteTier, open_store
from ray_ckpt.types import CheckpointInfo, Level, Slice
from tests.admin.test_rollback import on, refuse, trained
from tests.core.driver import SERVICE, START_S, one
from tests.servers.stores import bucket_url
from tests.servers.strict_store import StrictStore
from tests.support.sample_run import write_run

DATA = bytes(range(64))
PART = Slice(item="model", name="w", dtype="F32", global_shape=(16,), offset=(0,), shape=(16,))
FIRST = Slice(item="model", name="w", dtype="F32", global_shape=(16,), offset=(0,), shape=(4,))


def new(
    step: int = 30, part: Slice = PART, read: Callable[[], Iterator[bytes]] | None = None
) -> NewCheckpoint:
    return NewCheckpoint(
        step=step,
        tensors={part: read or (lambda: iter((DATA[:10], DATA[10:])))},
        items={"model": {"w": TensorRef("model.w")}, "step": step},
        imported_from={"format": "pt", "version": "", "source": "/a/b"},
    )


def write(run: Path | str, checkpoint: NewCheckpoint) -> CheckpointInfo:
    tier, tail = open_or_begin(run)
    return write_checkpoint(
        tier, tail.history, checkpoint, owner="ray-ckpt import", now_s=START_S, pause=refuse
    )


def directories(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "ray_ckpt/checkpoints").glob("*"))


# -- the checkpoint ------------------------------------------------------------------------------------


def test_a_new_run_has_one_durable_checkpoint_that_verifies(tmp_path: Path) -> None:
    info = write(tmp_path / "gpt", new())
    catalog = Catalog(tmp_path / "gpt")
    assert catalog.run_name == "gpt" and catalog.list(all=True) == (info,)
    assert (info.step, info.level, info.world_size, info.durable_at_s) == (30, Level.DURABLE, 1, START_S)
    view = catalog[30]
    assert not view.verify() and view.path is not None and verify_directory(view.path).ok
    assert sum(path.stat().st_size for path in view.path.glob("[ms]*")) == info.size_bytes
    (state,) = view.path.glob("state-*")
    assert decode_state(state.read_bytes()) == {
        "step": 30,
        "world_size": 1,
        "items": {"model": {"w": TensorRef("model.w")}, "step": 30},
        "imported_from": {"format": "pt", "version": "", "source": "/a/b"},
    }
    (session,) = catalog.sessions
    assert session.is_import and session.is_offline and not session.is_rollback
    assert session.owner == "ray-ckpt import" and session.resumed_from is None


def test_in_a_bucket_too(strict: StrictStore, credentials: None) -> None:
    url = bucket_url("s3", strict.endpoint, f"import/{uuid.uuid4().hex}/gpt")
    write(url, new())
    write(url, new(40))
    catalog = Catalog(url)
    assert [c.step for c in catalog.lineage] == [30, 40] and not catalog[40].verify()


def test_steps_in_their_order_make_one_lineage(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10, 20, 30), durable=(10, 20, 30)).folder
    history = read_tail(open_store(Location.parse(run / "ray_ckpt"), {})[1]).history
    assert [c.step for c in left_aside(history, 25)] == [30] and left_aside(history, 31) == ()
    write(run, new(40))
    write(run, new(25))
    assert [c.step for c in Catalog(run).lineage] == [10, 20, 25]
    write(run, new(25))
    write(run, new(35))
    catalog = Catalog(run)
    assert [c.step for c in catalog.lineage] == [10, 20, 25, 35]
    assert [c.step for c in catalog.checkpoints] == [10, 20, 30, 40, 25, 25, 35]
    assert len({c.id.attempt for c in catalog.checkpoints}) == 7
    write(run, new(5))
    assert [c.step for c in Catalog(run).lineage] == [5]


def test_a_rollback_to_the_step_of_an_import_undoes_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10, 20)).folder
    (before,) = (c.id for c in Catalog(run).checkpoints if c.step == 20)
    write(run, new(20))
    log = open_store(Location.parse(run / "ray_ckpt"), {})[1]
    for _ in range(2):  # the second time it is done
        plan = plan_rollback(read_tail(log).history, to=20)
        assert plan.checkpoint.id == before
        roll_back(log, plan, now_s=START_S + 1e6, pause=refuse)
    assert plan_rollback(read_tail(log).history, to=20).is_done
    write(run, new(30))
    assert plan_rollback(read_tail(log).history, to=30).checkpoint.step == 30, "there is no other one"


def test_an_import_is_no_failure_and_no_training(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10, 20)).folder
    write(run, new(40))
    catalog = Catalog(run)
    history = read_tail(open_store(Location.parse(run / "ray_ckpt"), {})[1]).history
    assert failures_in(history).count == 0
    found = measure_goodput(catalog.sessions, catalog.list(all=True))
    (interruption,) = found.interruptions
    assert interruption.cause is None and found.spans[-1].first_step == found.spans[-1].last_step == 40
    for command in (["report", "--html", str(tmp_path / "report.html")], ["tree"], ["goodput"], ["show"]):
        output = CliRunner().invoke(app, [command[0], str(run), *command[1:]], catch_exceptions=False)
        assert output.exit_code == 0, output.output
    page = (tmp_path / "report.html").read_text()
    assert "an import after step 20" in page and "imported step 40" in page


# -- the next group ------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", [SERVICE, "service-2"])
def test_the_next_group_continues_from_it(service: str, tmp_path: Path) -> None:
    run = trained(10, 20)
    tier = RemoteTier(Location.parse(tmp_path))
    tier._opened = tier.files, run.store
    before = read_tail(run.store).history
    info = write_checkpoint(tier, before, new(15), owner="import", now_s=START_S, pause=refuse)
    other = on(run, service=service)
    plan = one(other.feed(other.group("ab", owner="another")), m.StartSession).plan
    assert plan.resume is not None and plan.resume.checkpoint.id == info.id
    other.feed(*(other.restored(node) for node in "ab"))
    other.save(25)
    assert [c.step for c in read_tail(run.store).history.lineage()] == [10, 15, 25]


def test_what_is_left_aside_goes_after_the_first_save(tmp_path: Path) -> None:
    run = trained(10, 20, 30)
    tier = RemoteTier(Location.parse(tmp_path))
    tier._opened = tier.files, run.store
    write_checkpoint(tier, read_tail(run.store).history, new(15), owner="import", now_s=START_S, pause=refuse)
    other = on(run)
    other.feed(other.group("ab", owner="another"))
    other.feed(*(other.restored(node) for node in "ab"))
    assert [c.step for c in read_tail(run.store).history.live()] == [10, 20, 30, 15]
    other.save(18)
    assert [c.step for c in read_tail(run.store).history.live()] == [10, 15, 18]


def test_a_group_at_work_is_fenced_and_its_launcher_may_come_back(tmp_path: Path) -> None:
    run = trained(10, 20)
    tier = RemoteTier(Location.parse(tmp_path))
    tier._opened = tier.files, run.store
    write_checkpoint(tier, read_tail(run.store).history, new(25), owner="import", now_s=START_S, pause=refuse)
    history = read_tail(run.store).history
    assert not read_tail(run.store).is_at_work(START_S)
    check_claim(history, service=SERVICE, owner="driver")
    with pytest.raises(RunSuperseded):
        check_claim(history, service=SERVICE, owner=None)
    error = one(run.save(30), m.Supersede).error
    assert isinstance(error, RunSuperseded) and "has an imported checkpoint" in str(error)


def test_a_run_at_work_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10,))
    run.log.append(records.Note(text="now"), time_s=time.time() - QUIET_S / 2)
    source = tmp_path / "step_3.pt"
    source.write_bytes(b"never read")
    words = ["import", "pt", str(source), str(run.folder)]
    with pytest.raises(RunInUse, match="Run gpt may be at work"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    with pytest.raises(ConfigError, match="is no archive"):
        CliRunner().invoke(app, [*words, "--even-if-at-work"], catch_exceptions=False)


# -- what is refused, and interruptions ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "kind", "message"),
    [
        (new(0), ConfigError, "The step is 0"),
        (new(10**12), ConfigError, "The step is 1000000000000"),
        (new(part=FIRST), FormatError, "12 elements of model.w are in no slice"),
    ],
)
def test_what_cannot_be_written_leaves_nothing(
    checkpoint: NewCheckpoint, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        write(tmp_path / "gpt", checkpoint)
    assert not (tmp_path / "gpt").exists()


def test_a_value_that_needs_pickle_leaves_nothing(tmp_path: Path) -> None:
    bad = NewCheckpoint(step=1, tensors={}, items={"a": {"b": object()}}, imported_from={})
    with pytest.raises(UnsupportedLeaf, match=r"items\.a\.b is a object"):
        write(tmp_path / "gpt", bad)
    assert not (tmp_path / "gpt").exists()


def test_an_owner_that_the_log_cannot_hold_leaves_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10,)).folder
    before, seq = directories(run), len([*(run / "ray_ckpt/log").iterdir()])
    tier, tail = open_or_begin(run)
    with pytest.raises(ConfigError, match=r"The log cannot hold that.*surrogates"):
        write_checkpoint(tier, tail.history, new(), owner="\udcff", now_s=START_S, pause=refuse)
    assert directories(run) == before and len([*(run / "ray_ckpt/log").iterdir()]) == seq


def test_a_folder_that_holds_runs_becomes_no_run(tmp_path: Path) -> None:
    """A run there would hide them: `ls` of the folder would show its checkpoints."""
    (tmp_path / "runs").mkdir()
    for name in ("gpt", "bert"):
        write_run(tmp_path / "runs", name, steps=(10,))
    with pytest.raises(ConfigError, match=r"runs holds the runs bert, gpt\. Give .*/<run name>"):
        write(tmp_path / "runs", new())
    assert [run.name for run in find_runs(tmp_path / "runs")] == ["bert", "gpt"]
    write(tmp_path / "runs/llama", new())
    assert len(find_runs(tmp_path / "runs")) == 3


@pytest.mark.parametrize("name", ["-x", "a b"])
def test_a_new_run_needs_a_name_and_a_storage_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be a folder name"):
        write(tmp_path / name, new())
    with pytest.raises(ConfigError, match=r"There is no folder .*none, which a new run needs"):
        write(tmp_path / "none/gpt", new())
    with pytest.raises(ConfigError, match="There is no run"):
        write(tmp_path / "gpt/ray_ckpt", new())
    with pytest.raises(ConfigError, match="A bucket alone is no run"):
        write("memory://bucket", new())


def test_a_source_that_ends_early_leaves_no_file_and_no_record(tmp_path: Path) -> None:
    def short() -> Iterator[bytes]:
        yield DATA[:-1]

    def broken() -> Iterator[bytes]:
        yield DATA[:-1]
        raise KeyboardInterrupt

    run = write_run(tmp_path, steps=(10,)).folder
    before, seq = directories(run), len([*(run / "ray_ckpt/log").iterdir()])
    with pytest.raises(CorruptionError, match=r"model\.w has 63 bytes in its source, not 64"):
        write(run, new(read=short))
    with pytest.raises(KeyboardInterrupt):
        write(run, new(read=broken))
    assert directories(run) == before and len([*(run / "ray_ckpt/log").iterdir()]) == seq
    write(run, new())
    assert Catalog(run).lineage[-1].step == 30


def test_a_killed_import_leaves_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    run = write_run(tmp_path, steps=(10,)).folder
    with monkeypatch.context() as patch:
        patch.setattr("ray_ckpt.admin.write_checkpoint.write_ops", killed)
        with pytest.raises(KeyboardInterrupt):
            write(run, new())
    (left,) = {*directories(run)} - {c.directory for c in Catalog(run).list(all=True)}
    info = write(run, new())
    assert info.directory != left and Catalog(run).lineage[-1] == info


def test_another_writer_is_not_overtaken(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10,))
    tier, tail = open_or_begin(run.folder)
    before = directories(run.folder)

    def meanwhile() -> Iterator[bytes]:
        run.log.append(records.Epoch(service="another"))
        yield DATA

    with pytest.raises(Fenced, match="Another writer has written record"):
        write_checkpoint(tier, tail.history, new(read=meanwhile), owner="import", now_s=START_S, pause=refuse)
    assert [c.step for c in Catalog(run.folder).list(all=True)] == [10]
    assert directories(run.folder) == before


def test_a_commit_that_is_there_although_its_create_found_another_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot of a coordinator that read the commit covers it before a repeated create looks."""
    run = write_run(tmp_path, steps=(10,)).folder
    tier, tail = open_or_begin(run)
    commit = tail.history.next_seq + 2

    def covered(log: LogStore, seq: int, data: bytes) -> CreateResult:
        outcome = create_record(log, seq, data)
        return CreateResult.EXISTS if seq == commit else outcome

    monkeypatch.setattr(rollback, "create_record", covered)
    with pytest.raises(Fenced, match="Its records epoch, session are written"):
        write_checkpoint(tier, tail.history, new(), owner="import", now_s=START_S, pause=refuse)
    info = read_tail(tier.log).history.lineage()[-1]
    assert info.step == 30
    assert verify_directory(run / "ray_ckpt/checkpoints" / info.directory).ok


def test_a_writer_between_the_records_leaves_the_files_of_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, steps=(10,)).folder
    tier, tail = open_or_begin(run)
    promote = tail.history.next_seq + 3  # behind epoch, session and commit
    monkeypatch.setattr(
        rollback,
        "create_record",
        lambda log, seq, data: CreateResult.EXISTS if seq == promote else create_record(log, seq, data),
    )
    with pytest.raises(Fenced, match=f"has written record {promote} .*epoch, session, commit2 are written"):
        write_checkpoint(tier, tail.history, new(), owner="import", now_s=START_S, pause=refuse)
    view = Catalog(run)[30]
    assert view.where is not None and verify_directory(view.where).ok
