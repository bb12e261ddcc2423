"""What RAY_CKPT_VERL may be, the folders of verl, and the step that its trainer resumes from."""

from __future__ import annotations

import logging
import sys
import uuid
from importlib.util import module_from_spec
from pathlib import Path

import pytest

from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.errors import ConfigError
from ray_ckpt.interop.verl.hooks import _Finder
from ray_ckpt.interop.verl.resume import latest_folder
from ray_ckpt.interop.verl.settings import ENV, TRACKER, Settings, StepFolder, is_wanted, write_tracker
from ray_ckpt.location import Location
from ray_ckpt.storage.remote.tier import open_store
from tests.servers.stores import bucket_url
from tests.servers.strict_store import StrictStore
from tests.support.sample_run import copy_to, write_run


def set_to(monkeypatch: pytest.MonkeyPatch, text: str) -> Settings:
    monkeypatch.setenv(ENV, text)
    return Settings.from_environment()


def test_the_folder_of_verl_is_the_run_unless_the_user_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path("/shared/checkpoints/gsm8k/ppo")
    assert set_to(monkeypatch, "1").run_of(root) == ("/shared/checkpoints/gsm8k", "ppo")
    found = set_to(monkeypatch, '{"storage_path": "s3://b/runs", "keep_best": ["loss", "min", 1]}')
    assert found.run_of(root) == ("s3://b/runs", "ppo")
    assert found.options == {"keep_best": ("loss", "min", 1)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yes", "not valid JSON"),
        ("[1]", "in JSON, such as"),
        ('{"resume": "never"}', "trainer.resume_mode decides"),
        ('{"every_steps": 5}', "trainer.save_freq decides"),
        ('{"parts": {"actor": 2, "critic": 2}}', "storage_path and run"),
        ('{"storage_path": "/a", "run": "b", "parts": ["actor"]}', "has parts"),
        ('{"storage_path": "/a", "run": "b", "parts": {"actor": "2"}}', "has parts"),
        ('{"storage_path": "/a", "run": "b", "parts": {"actor": 0}}', "has parts"),
        ('{"run": 5}', "has run 5, which is no text"),
        ('{"storage_path": ["/runs"]}', "which is no text"),
    ],
)
def test_a_setting_that_verl_has_too_or_that_is_no_json_is_an_error(
    monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        set_to(monkeypatch, text)


@pytest.mark.parametrize(("text", "expected"), [("", False), ("0", False), ("1", True), ("{}", True)])
def test_the_user_chooses(monkeypatch: pytest.MonkeyPatch, text: str, expected: bool) -> None:
    monkeypatch.setenv(ENV, text)
    assert is_wanted() is expected


def test_folders_of_verl_have_a_step_and_perhaps_a_role() -> None:
    assert StepFolder.of("/runs/a/global_step_12/critic") == StepFolder(Path("/runs/a"), 12, "critic")
    assert StepFolder.of("/runs/a/global_step_12") == StepFolder(Path("/runs/a"), 12, "")
    assert StepFolder.of("runs/global_step_3").root == Path("runs").absolute()
    with pytest.raises(ConfigError, match="neither a folder global_step_N"):
        StepFolder.of("/runs/a/checkpoint-12")


def test_the_tracker_is_replaced_whole(tmp_path: Path) -> None:
    write_tracker(tmp_path, 9)
    write_tracker(tmp_path, 10)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {TRACKER: "10"}


def test_a_hook_runs_behind_the_import_of_its_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "of_verl.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    finder = _Finder({"of_verl": lambda module: setattr(module, "value", module.value + 1)})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    spec = finder.find_spec("of_verl", None)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.value == 2
    assert finder.find_spec("of_others", None) is None


def test_the_log_decides_from_which_step_verl_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_run(tmp_path).folder
    steps = [checkpoint.step for checkpoint in Catalog(root).lineage]
    assert len(steps) >= 2
    settings = Settings()
    assert latest_folder(settings, str(tmp_path / "none")) is None, "verl looks at its own tracker"
    (root / TRACKER).write_text("99")
    assert latest_folder(settings, str(root)) == str(root / f"global_step_{steps[-1]}")
    assert (root / TRACKER).read_text() == str(steps[-1])

    (root / f"global_step_{steps[-2]}").mkdir()
    (root / f"global_step_{steps[-2]}" / "data.pt").touch()
    with caplog.at_level(logging.WARNING, "ray_ckpt"):
        assert latest_folder(settings, str(root)) == str(root / f"global_step_{steps[-2]}")
    assert f"step {steps[-1]} has no data.pt" in caplog.text
    (root / f"global_step_{steps[-1]}" / "data_0.pt").touch()
    assert latest_folder(settings, str(root)) == str(root / f"global_step_{steps[-1]}")


def test_the_log_may_be_in_a_bucket_that_is_named_with_parameters(
    tmp_path: Path, strict: StrictStore, credentials: None
) -> None:
    run = write_run(tmp_path)
    storage = bucket_url("s3", strict.endpoint, f"verl/{uuid.uuid4().hex}")
    copy_to(open_store(Location.parse(storage), None)[0], run.folder.parent)
    root = tmp_path / "here" / run.folder.name
    settings = Settings(storage_path=storage, run=run.folder.name, options={})
    newest = Catalog(run.folder).lineage[-1].step
    assert latest_folder(settings, str(root)) == str(root / f"global_step_{newest}")


def test_a_wrong_option_is_no_run_that_has_not_started(tmp_path: Path) -> None:
    root = write_run(tmp_path).folder
    settings = Settings(
        storage_path="s3://bucket/runs", run=root.name, options={"storage_options": {"re": "x"}}
    )
    with pytest.raises(ConfigError, match="re"):
        latest_folder(settings, str(root))
    (root / "ray_ckpt/log").rename(root / "old")
    (root / "ray_ckpt/log").mkdir()
    assert latest_folder(Settings(), str(root)) is None, "its log has no records"
