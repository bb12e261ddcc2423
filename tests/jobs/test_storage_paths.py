"""The storage paths of jobs: folders become absolute, URLs stay as they are."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jobs import train_dcp, train_deepspeed, train_transformers


@pytest.mark.parametrize("job", [train_dcp, train_deepspeed, train_transformers])
@pytest.mark.parametrize("path", ["s3://bucket/runs", "gs://bucket/runs", "runs", "~/runs", "/shared/runs"])
def test_a_storage_path_may_be_a_folder_or_a_url(
    job: ModuleType, path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[str] = []

    def trainer(*args: Any, **config: Any) -> SimpleNamespace:
        found.append(config["run_config"].storage_path)
        return SimpleNamespace(fit=lambda: None)

    monkeypatch.setattr(job, "TorchTrainer", trainer)
    job.main(["--storage-path", path, "--name", "name"])
    wanted = path if "://" in path else str(Path(path).expanduser().absolute())
    assert found == [wanted]
    assert capsys.readouterr().out.endswith(f"; ray-ckpt ls {wanted}/name\n")
