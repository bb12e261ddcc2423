"""Limits of the length of files: a reader has one file in mind at a time."""

from __future__ import annotations

from tests.support.code_blocks import ROOT

MAX_LINES = 600
MAX_ACTOR_LINES = 400  # actors only have endpoints, naming and liveness


def test_no_file_is_longer_than_a_reader_can_keep_in_mind() -> None:
    lengths = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for folder in ("ray_ckpt", "actors", "jobs")
        for path in (ROOT / folder).rglob("*.py")
    }
    limits = {path: MAX_ACTOR_LINES if path.parts[0] == "actors" else MAX_LINES for path in lengths}
    assert len(lengths) > 300
    assert not {str(path): lines for path, lines in lengths.items() if lines > limits[path]}
