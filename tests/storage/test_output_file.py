"""Files that somebody names for a result: what may be replaced, and what stays as it was."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ray_ckpt.errors import ConfigError
from ray_ckpt.storage.output_file import output_file, whole_file


def test_a_new_name_is_the_file_and_a_file_needs_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    there = tmp_path / "there"
    assert output_file("~/there") == output_file(there) == there
    there.write_text("mine")
    with pytest.raises(ConfigError, match=r"there is there already\. Give --force"):
        output_file(there)
    assert output_file(there, force=True) == there


def test_a_link_stays_and_leads_to_the_file(tmp_path: Path) -> None:
    link = tmp_path / "latest.html"
    link.symlink_to("page.html")
    for force in (False, True):
        with whole_file(output_file(link, force=force)) as temporary:
            temporary.write_text("new")
        assert link.is_symlink() and (tmp_path / "page.html").read_text() == "new"
    with pytest.raises(ConfigError, match="is there already"):
        output_file(link)


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_file_is_refused_with_force_too(tmp_path: Path, force: bool) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to null").symlink_to(os.devnull)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("fifo", "to null", "socket"):
            with pytest.raises(ConfigError, match=f"{name} is not a file"):
                output_file(tmp_path / name, force=force)
    with pytest.raises(ConfigError, match="is a folder"):
        output_file(tmp_path, force=force)
    with pytest.raises(ConfigError, match="There is no folder"):
        output_file(tmp_path / "no" / "file", force=force)


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(ConfigError, match="link is a link to itself"):
        output_file(link, force=True)
    with pytest.raises(ConfigError, match="There is no folder"):
        output_file(link / "file")


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(OSError, match="full"), whole_file(file) as temporary:
        temporary.write_text("half")
        raise OSError("full")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
