"""The oracle finds what it is there for; it needs no cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.types import CheckpointInfo
from tests.fault.journal import Journal, last_step, read
from tests.fault.oracle import Verdict, judge, judge_afresh
from tests.fault.rig import flip, shards
from tests.support.sample_run import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "storage", "sample")
    return tmp_path / "storage" / "sample"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal", rank=0)


def verdict(run: Path) -> Verdict:
    return judge(run, run.parents[1] / "journal")


def ack(journal: Journal, checkpoint: CheckpointInfo, level: str, **fields: Any) -> None:
    journal.write("acked", checkpoint.step, attempt=checkpoint.id.attempt, level=level, **fields)


def test_a_sound_run_is_sound_also_for_a_fresh_process(run: Path, journal: Journal) -> None:
    newest = Catalog(run).checkpoints[-1]
    ack(journal, newest, newest.level.label)
    journal.write("reached", 3, digest="a")
    journal.write("restored", 3, digest="a")
    found = judge_afresh(run, run.parents[1] / "journal")
    assert (found.acked, found.restores, found.problems) == (1, 1, ())


def test_what_was_acknowledged_and_is_not_there_is_lost(run: Path, journal: Journal) -> None:
    journal.write("acked", 7, attempt="0123456789abcdef", level="local")
    assert ["step 7" in problem for problem in verdict(run).lost] == [True]


def test_a_level_that_was_acknowledged_and_not_recorded_is_lost(run: Path, journal: Journal) -> None:
    low = next(c for c in Catalog(run).checkpoints if c.level.label != "durable")
    ack(journal, low, "durable")
    assert len(verdict(run).lost) == 1


def test_two_states_of_one_step_are_wrong(run: Path, journal: Journal) -> None:
    journal.write("reached", 4, digest="a")
    journal.write("restored", 4, digest="b")
    assert verdict(run).wrong == ("rank 0 had 2 different states after step 4",)


def test_a_flipped_bit_on_the_storage_path_is_wrong(run: Path, journal: Journal) -> None:
    view = next(view for view in Catalog(run) if view.path is not None)
    assert view.path is not None
    path = shards(view.path)[0]
    flip(path, path.stat().st_size - 1)
    assert verdict(run).wrong


def test_a_line_that_a_kill_cut_off_did_not_happen(tmp_path: Path, journal: Journal) -> None:
    journal.write("reached", 1, digest="a")
    (path,) = (tmp_path / "journal").iterdir()
    path.write_text(path.read_text() + '{"kind": "reached", "rank": 0, "step": 2')
    assert [entry.step for entry in read(tmp_path / "journal")] == [1]
    assert last_step(tmp_path / "journal") == 1
