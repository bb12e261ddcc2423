"""docs/tour.md is what `python -m docs.tour` writes today, and leaves no command out."""

from __future__ import annotations

import re
from pathlib import Path

from docs import tour
from tests.support.code_blocks import ROOT, blocks, our_commands

PAGE = ROOT / "docs/tour.md"


def lines_of_the_page() -> list[str]:
    shell = [
        block.text for block in blocks() if block.document == "docs/tour.md" and block.language == "bash"
    ]
    return [line.partition("   # ")[0].rstrip() for text in shell for line in text.splitlines()]


def test_the_page_has_the_commands_of_the_tour() -> None:
    stops = [f"ray-ckpt {stop.line}" for stop in tour.stops()]
    assert lines_of_the_page() == stops + [line for _, line, _ in tour.with_a_service()]


def test_no_command_is_left_out() -> None:
    assert {line.split()[1] for line in lines_of_the_page()} == our_commands().keys()
    assert tour.commands() == our_commands().keys()


def test_its_pictures_are_there_and_small() -> None:
    pictures = re.findall(r"!\[\w+\]\((\S+)\)", PAGE.read_text())
    assert pictures == [stop.picture for stop in tour.stops() if stop.picture]
    for name in pictures:
        assert 1000 < (PAGE.parent / name).stat().st_size <= tour.MAX_PICTURE_BYTES


def test_ids_and_moments_of_this_machine_are_not_in_it(tmp_path: Path) -> None:
    found = "0f" * 8 + "a1" * 8
    normalise = tour.Normaliser(tmp_path)
    text = f"uid {found} at {tmp_path}/demo-out: 3 min ago, 2026-11-22 10:00:00\n"
    assert normalise(text) == f"uid {'01' * 16} at demo-out: 2026-01-01 10:00:00"
    assert normalise(f"{found} {found[:16]}") == f"{'01' * 16} {'02' * 8}"
    page = PAGE.read_text()
    assert not re.findall(r"\b(?!(?:(\w\w)\1+)\b)[0-9a-f]{32}\b", page)
    assert "/tmp" not in page and str(ROOT) not in page
