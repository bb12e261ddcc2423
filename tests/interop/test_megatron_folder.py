"""The folder from which Megatron's loop goes on, written by rank 0 for all ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.capture.ranks import on_ranks

pytestmark = pytest.mark.slow  # the import of Megatron-core takes seconds


@pytest.fixture
def resume(monkeypatch: pytest.MonkeyPatch) -> object:
    """The function, in a run whose newest checkpoint is that of step 7."""
    from ray_ckpt.interop.megatron import folder

    monkeypatch.setattr(folder, "current", lambda: SimpleNamespace(step=7, where="/runs/gpt"))
    return folder.resume_folder


def test_all_ranks_get_a_folder_that_is_written(resume: object, tmp_path: Path) -> None:
    assert callable(resume)
    assert on_ranks(2, lambda rank: resume(tmp_path)) == [str(tmp_path / "iter_0000007")] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000007", "latest_checkpointed_iteration.txt"}


def test_a_folder_that_rank_0_cannot_write_is_an_error_on_all_ranks(resume: object, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def refused(rank: int) -> str:
        assert callable(resume)
        with pytest.raises(OSError, match=r"Not a directory|File exists") as caught:
            resume(tmp_path / "file")
        return str(caught.value)

    first, *others = on_ranks(3, refused)
    assert others == [f"Rank 0 cannot write {tmp_path / 'file'}: {first}"] * 2
