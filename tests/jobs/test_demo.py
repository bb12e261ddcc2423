"""The folder of a demonstration: wiped if it is its own, else refused with a message."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.demo.comparison import MARKER, prepare


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION", "RAY_DEDUP_LOGS"):
        monkeypatch.setenv(name, "0")


def test_only_an_empty_folder_or_one_of_the_demo_is_wiped(tmp_path: Path) -> None:
    out = tmp_path / "a/out"
    prepare(out)
    (out / "left").touch()
    prepare(out)
    assert [path.name for path in out.iterdir()] == [MARKER]
    (out / MARKER).rename(out / "mine")
    with pytest.raises(SystemExit, match="not a folder of this demo"):
        prepare(out)
    assert (out / "mine").exists()


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_what_is_no_folder_is_refused(kind: str, tmp_path: Path) -> None:
    out, target = tmp_path / "out", tmp_path / "target"
    if kind == "file":
        out.touch()
    else:
        out.symlink_to(target)
    if kind == "link":
        prepare(target)
    with pytest.raises(SystemExit, match="out is not a folder"):
        prepare(out)
    assert out.is_symlink() or out.is_file()
