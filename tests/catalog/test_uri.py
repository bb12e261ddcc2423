"""Names of checkpoints to begin with."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.catalog.uri import CheckpointUri, find_origin, own_resume, uri_of
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import ConfigError
from ray_ckpt.location import Location
from ray_ckpt.storage.remote.tier import RemoteRef
from tests.support.sample_run import RunLog, make_checkpoint

FOLDER = "000000003000-0123456789abcdef"


@pytest.mark.parametrize("base", ["/runs", "s3://bucket/runs", "gs://bucket", "memory://runs"])
@pytest.mark.parametrize(
    "rest, step, directory",
    [
        ("gpt", None, None),
        ("gpt/", None, None),
        ("gpt/ray_ckpt", None, None),
        ("gpt@3000", 3000, None),
        (f"gpt/ray_ckpt/checkpoints/{FOLDER}", 3000, FOLDER),
        (f"gpt/ray_ckpt_{FOLDER}", 3000, FOLDER),
        (f"gpt/{FOLDER}", 3000, FOLDER),
    ],
)
def test_a_checkpoint_is_named_by_its_run_and_a_step_or_folder(
    base: str, rest: str, step: int | None, directory: str | None
) -> None:
    uri = CheckpointUri.parse(f"{base}/{rest}")
    assert uri == CheckpointUri(run=Location.parse(base) / "gpt", step=step, directory=directory)


def test_the_query_of_a_bucket_stays_with_it() -> None:
    uri = CheckpointUri.parse("s3://bucket/runs/gpt@7?region=eu-1")
    assert (str(uri.run), uri.step) == ("s3://bucket/runs/gpt?region=eu-1", 7)
    assert uri_of(str(uri.run), 7) == "s3://bucket/runs/gpt@7?region=eu-1"
    assert uri_of("/runs/gpt", 7) == "/runs/gpt@7"


@pytest.mark.parametrize("text", ["s3://key:secret@bucket/gpt", "/runs/%2e/../gpt\0"])
def test_what_is_no_place_for_a_run_is_refused(text: str) -> None:
    with pytest.raises((ConfigError, ValueError)):
        CheckpointUri.parse(text).open(None)


def test_a_run_s_own_checkpoint_means_going_back() -> None:
    run = Location.parse("/runs/gpt")
    assert own_resume("/runs/gpt@7", run) == "step:7"
    assert own_resume("/runs/gpt", run) == "must"
    assert own_resume("/runs/gpt-2@7", run) == "/runs/gpt-2@7"
    assert own_resume("auto", run) == "auto"


def test_a_run_s_own_checkpoint_is_known_by_another_spelling_of_its_place(tmp_path: Path) -> None:
    bucket = Location.parse("s3://bucket/runs/gpt?region=us-east-1")
    assert own_resume("s3://bucket/runs/gpt@7", bucket) == "step:7"
    assert own_resume("s3://bucket/runs/gpt@7?region=us-east-1", Location.parse("s3://bucket/runs/gpt")) == (
        "step:7"
    )
    one, other = (f"s3://bucket/runs/gpt@7?endpoint_override={host}:9000" for host in ("a", "b"))
    assert own_resume(one, CheckpointUri.parse(other).run) == one
    plain = Location.parse("s3://bucket/runs/gpt")
    assert own_resume(one, plain) == one
    assert own_resume(one, plain, {"endpoint_url": "https://b:9000"}) == one
    assert own_resume(one, plain, {"endpoint_url": "https://a:9000"}) == "step:7"
    assert own_resume("s3://bucket/runs/gpt@7", plain, {"endpoint_url": "https://a:9000"}) == "step:7"
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to("runs")
    assert own_resume(f"{tmp_path}/link/gpt@7", Location.parse(tmp_path / "runs/gpt")) == "step:7"


def test_the_folder_of_a_run_with_another_name_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.realpath", None)  # a mount may hang
    assert own_resume("/other/gpt-2@7", Location.parse("/runs/gpt")) == "/other/gpt-2@7"
    assert own_resume("/runs/gpt@7", Location.parse("/runs/gpt")) == "step:7"


def test_a_folder_of_a_run_s_own_checkpoint_has_to_be_on_the_lineage(tmp_path: Path) -> None:
    log = RunLog(folder=tmp_path / "gpt")
    log.create()
    log.session(1, after=None, world_size=2, num_nodes=2)
    first, left, twice = (make_checkpoint(log.attempt(1, step)) for step in (10, 20, 30))
    for saved in (first, left, twice):
        log.commit(saved)
    log.session(2, after=first, world_size=2, num_nodes=2)
    again = make_checkpoint(log.attempt(2, 30))
    log.commit(again)
    run = Location.parse(log.folder)
    for saved, step in ((first, 10), (again, 30)):
        assert own_resume(f"{run}/ray_ckpt_{saved.attempt.directory}", run) == f"step:{step}"
    with pytest.raises(ConfigError, match="not on the lineage") as caught:
        own_resume(f"{run}/ray_ckpt_{left.attempt.directory}", run)
    assert "rollback" in caught.value.hint and "--to 20" in caught.value.hint
    with pytest.raises(ConfigError, match="not on the lineage") as caught:
        own_resume(f"{run}/ray_ckpt/checkpoints/{twice.attempt.directory}", run)
    assert again.attempt.directory in caught.value.hint
    with pytest.raises(ConfigError, match="has no checkpoint"):
        own_resume(f"{run}/ray_ckpt_{FOLDER}", run)


def test_without_a_name_there_is_no_origin() -> None:
    assert find_origin(RunOptions(), RemoteRef(storage_path="/runs", run_name="gpt")) is None


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"resume": "gpt@7"}, "resume is 'gpt@7'"),
        ({"init_from": "gpt"}, "init_from is 'gpt'"),
        ({"init_from": "/runs/a", "init_items": ()}, "init_items"),
        ({"init_from": "/runs/a", "init_items": "model"}, "init_items"),
        ({"init_from": "/runs/a", "resume": "/runs/b"}, "resume and init_from both name a checkpoint"),
        ({"keep": "optimizer.lr"}, "keep is 'optimizer.lr'"),
        ({"unprotected_after": 0}, "unprotected_after"),
        ({"unprotected_after": True}, "unprotected_after"),
        ({"unprotected_after": 1.5}, "unprotected_after"),
        ({"unprotected_after": timedelta(0)}, "unprotected_after"),
        ({"unprotected_after": timedelta(minutes=1), "every_s": 60.0}, "a save is due only every 60.0 s"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        RunOptions(**options)
    assert caught.value.hint
