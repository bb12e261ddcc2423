"""The bench runs and says what it has to say; how fast anything is, is for its reader."""

from __future__ import annotations

import io
import json
from functools import partial

import pytest
from rich.console import Console

from jobs.bench import __main__ as bench
from jobs.bench import catalog, coordinator, retention, simulator
from jobs.bench.row import Machine, Row, measure

FIELDS = {
    "name",
    "what",
    "unit",
    "samples",
    "median",
    "spread",
    "limit",
    "ratio",
    "verdict",
    "skipped",
    "cores",
    "load",
    "cpu_share",
}
MACHINE = Machine(cores=2, load=1.5, cpu_share=0.9)


def row(*samples: float, limit: float | None = None) -> Row:
    return Row(name="row", what="something", unit="ms", samples=samples, limit=limit, machine=MACHINE)


def table(*rows: Row) -> str:
    console = Console(file=io.StringIO())
    bench.print_table(rows, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_row_is_a_median_beside_its_limit() -> None:
    measured = row(3, 1, 2, limit=4)
    assert (measured.median, measured.spread, measured.ratio, measured.verdict) == (2, 1, 0.5, "pass")
    assert row(5, limit=4).verdict == "miss"
    assert row(5).verdict == "-"
    skipped = Row(name="row", what="something", unit="ms", limit=4, skipped="not here")
    assert (skipped.median, skipped.spread, skipped.ratio, skipped.verdict) == (None, None, None, "skipped")


def test_each_repeat_is_a_sample() -> None:
    samples = iter((1.0, 5.0, 3.0))
    measured = measure("row", "something", "ms", lambda: next(samples), repeat=3)
    assert measured.samples == (1.0, 5.0, 3.0)
    assert measured.machine is not None and measured.machine.cores > 0


def test_the_table_shows_numbers_limits_and_what_was_skipped() -> None:
    skipped = Row(name="other", what="a message", unit="ms", skipped="Ray does not start")
    heading, measured, other = table(row(1, 2, 3, limit=4), skipped).splitlines()
    assert heading.split() == ["row", "what", "median", "spread", "limit", "ratio", "machine"]
    for text in ("2 ms", "100%", "4 ms", "0.50", "pass", "2 cores, load 1.5, CPU 90%"):
        assert text in measured
    assert "a message: Ray does not start" in other and "skipped" in other


def test_a_fleet_saves_retires_drains_and_restores() -> None:
    names = ["save-4", "retire-4", "drain-4", "open-4"]
    measured = list(coordinator.rows(2, sizes=(4,)))
    assert [r.name for r in measured] == names
    assert all(len(r.samples) == 2 for r in measured)


def test_a_fleet_commits_each_step_and_resumes_from_the_last() -> None:
    fleet = coordinator.Fleet(3)
    for _ in range(2):
        fleet.save()
        fleet.answer_all()
    assert [c.step for c in fleet.machine.history.lineage()] == [1, 2]
    assert all(c.replicas == 1 for c in fleet.machine.history.lineage())
    fleet.open_group()
    assert fleet.plan.resume is not None and fleet.plan.resume.checkpoint.step == 2
    assert len(coordinator.stored_events(3)[0].files) == 17


def test_a_long_log_is_listed_and_retained() -> None:
    (listed,) = catalog.rows(2, num_checkpoints=50, num_records=10)
    (retained,) = retention.rows(2, num_checkpoints=50)
    assert (listed.name, retained.name) == ("list", "retention")
    assert listed.limit == retained.limit == 1.0
    assert "50 checkpoints" in listed.what and "50 checkpoints" in retained.what


def test_the_command_prints_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(simulator, "rows", partial(simulator.rows, num_schedules=1))
    assert bench.main(["--rows", "simulator", "--repeat", "2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert set(found) == FIELDS
    assert found["name"] == "schedule" and len(found["samples"]) == 2


def test_a_missed_limit_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "rows", lambda repeat: iter([row(5, limit=4)]))
    assert bench.main(["--rows", "simulator"]) == 1


@pytest.mark.parametrize("wrong", (["--repeat", "0"], ["--rows", "nothing"]))
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(wrong)
