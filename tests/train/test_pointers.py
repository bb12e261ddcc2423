"""Pointers in place of checkpoints: their content, opening one, and its errors. No cluster."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray.train
from pyarrow.fs import LocalFileSystem

from ray_ckpt.errors import ConfigError, NewerFormat
from ray_ckpt.format import jsontext
from ray_ckpt.train import open_checkpoint
from ray_ckpt.train.pointers import MAX_POINTER_BYTES, POINTER_FILE, Pointer
from ray_ckpt.types import AttemptId
from tests.support.sample_run import SampleRun, write_run

ATTEMPT = AttemptId(run_uid="0" * 32, session=3, step=20, attempt="abcdef")


@pytest.fixture
def run(tmp_path: Path) -> SampleRun:
    """10, 30 and 50 are durable; 40 is in the cluster only, 20 is retired, 60 is lost."""
    steps = (10, 20, 30, 40, 50, 60)
    return write_run(tmp_path, steps=steps, durable=(10, 20, 30, 50), retired=(20,), lost=(60,))


def pointer_to(run: SampleRun, step: int, **changes: Any) -> ray.train.Checkpoint:
    """Write the pointer that Ray Train has for a step, beside the run."""
    pointer = Pointer(attempt=run.checkpoints[step].attempt, run=str(run.folder))
    document = {**json.loads(pointer.encode()), **changes}
    del document["digest"]
    data = jsontext.dumps_sealed(document, what="it", max_bytes=MAX_POINTER_BYTES, indent=1)
    return write_pointer(run.folder.parent / "ray" / pointer.directory, data.decode())


def write_pointer(folder: Path, text: str) -> ray.train.Checkpoint:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / POINTER_FILE).write_text(text)
    return ray.train.Checkpoint(str(folder), filesystem=LocalFileSystem())


def test_a_pointer_gives_its_own_checkpoint_and_not_the_newest(run: SampleRun) -> None:
    opened = open_checkpoint(pointer_to(run, 30))
    assert opened.step == 30 and opened.metrics == run.checkpoints[30].metrics
    tensors = opened.load("model.*")
    assert tensors.keys() == {name for name in run.checkpoints[30].tensors if name.startswith("model.")}
    assert opened.load().keys() == opened.run.load(step=30).keys()


def test_a_pointer_whose_step_was_done_again_gives_what_it_was_made_for(
    tmp_path: Path,
) -> None:
    first = write_run(tmp_path, steps=(10, 20), durable=(10, 20))
    folder = first.folder.rename(tmp_path / "first")
    again = write_run(tmp_path, steps=(10, 20), durable=(10, 20), resume_at=10, resumed_steps=(20,))
    old = pointer_to(again, 20, attempt=first.checkpoints[20].attempt.attempt, session=1)
    assert folder.exists() and again.checkpoints[20].attempt != first.checkpoints[20].attempt
    assert open_checkpoint(old).info.id == first.checkpoints[20].attempt
    assert open_checkpoint(pointer_to(again, 20)).info.id == again.checkpoints[20].attempt


@pytest.mark.parametrize(("step", "why"), [(20, "retired"), (40, "in the cluster only"), (60, "lost")])
def test_a_pointer_to_what_is_gone_names_the_nearest_steps_that_are_kept(
    run: SampleRun, step: int, why: str
) -> None:
    hint = "The nearest durable steps are 10, 30, 50"
    with pytest.raises(ConfigError, match=f"{why} step {step}. {hint}") as caught:
        open_checkpoint(pointer_to(run, step))
    assert caught.value.fields["step"] == step


def test_a_pointer_into_another_life_of_the_run_is_refused(run: SampleRun) -> None:
    with pytest.raises(ConfigError, match="points to an earlier run"):
        open_checkpoint(pointer_to(run, 30, run_uid="f" * 32))
    with pytest.raises(ConfigError, match="has no record of this checkpoint of step 30"):
        open_checkpoint(pointer_to(run, 30, attempt="never"))


def test_a_pointer_can_be_waited_for_until_its_checkpoint_is_durable(
    run: SampleRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_ckpt.train.pointers.CHECK_S", 0.01)
    drain = threading.Timer(0.2, lambda: run.log.drain(run.checkpoints[40]))
    drain.start()
    assert open_checkpoint(pointer_to(run, 40), wait_s=60).step == 40
    drain.join()
    started_s = time.monotonic()
    with pytest.raises(ConfigError, match="retired"):
        open_checkpoint(pointer_to(run, 20), wait_s=60)
    assert time.monotonic() - started_s < 30, "nothing is waited for that cannot come"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        "{}",
        '{"ray_ckpt": 0}',
        '{"ray_ckpt": "3"}',
        "[" * 100_000,
        '{"ray_ckpt": 2, "run": 7}',
        '{"ray_ckpt": 2, "run": "/x", "storage_options": {"region": 1}}',
        '{"ray_ckpt": 2, "run": "/x", "run_uid": "u", "step": true, "session": 1, "attempt": "a"}',
        " " * (MAX_POINTER_BYTES + 1) + "{}",
    ],
)
def test_a_directory_that_is_no_pointer_of_ours_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="is not a pointer of ray_ckpt"):
        open_checkpoint(write_pointer(tmp_path / "pointer", text))


def test_a_pointer_of_a_newer_version_is_named(tmp_path: Path) -> None:
    with pytest.raises(NewerFormat, match=r"pointer.json: A pointer is of a newer version; update ray_ckpt"):
        open_checkpoint(write_pointer(tmp_path / "pointer", '{"ray_ckpt": 3}'))


def test_a_checkpoint_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match="is not a pointer of ray_ckpt"):
        open_checkpoint(ray.train.Checkpoint.from_directory(str(tmp_path)))


def test_pointers_of_version_1_are_still_read(run: SampleRun) -> None:
    assert open_checkpoint(pointer_to(run, 30, ray_ckpt=1)).step == 30
    document = {**json.loads(Pointer(attempt=ATTEMPT, run="/runs/gpt").encode()), "ray_ckpt": 1}
    del document["digest"], document["storage_options"]
    document["run"] = "bucket/runs/gpt"
    assert Pointer.decode(json.dumps(document).encode(), "s3").run == "s3://bucket/runs/gpt"
    assert Pointer.decode(json.dumps(document).encode(), "gcs").run == "gs://bucket/runs/gpt"
    with pytest.raises(ValueError, match="does not name the file system"):
        Pointer.decode(json.dumps(document).encode(), "py::fsspec")


def test_a_pointer_proves_its_own_bytes_and_those_from_before_are_read() -> None:
    pointer = Pointer(attempt=ATTEMPT, run="s3://bucket/runs/gpt", storage_options={"profile": "training"})
    data = bytearray(pointer.encode())
    for index in range(len(data)):
        for bit in range(8):
            data[index] ^= 1 << bit
            with pytest.raises(ValueError):
                Pointer.decode(bytes(data))
            data[index] ^= 1 << bit
    document = json.loads(data)
    del document["digest"]
    assert Pointer.decode(json.dumps(document, indent=1).encode()) == pointer


def test_a_pointer_has_the_options_that_open_a_bucket_and_no_secret() -> None:
    url = "s3://bucket/runs/gpt?endpoint_override=localhost:9000&scheme=http"
    pointer = Pointer(attempt=ATTEMPT, run=url, storage_options={"profile": "training"})
    assert Pointer.decode(pointer.encode()) == pointer
    elsewhere = Pointer(attempt=ATTEMPT, run="sftp://host/runs/gpt", storage_options={"host_id": "x"})
    assert Pointer.decode(elsewhere.encode()).storage_options == {}
