"""The schedule of drills: its arguments, and how it ends where there is no cluster. See also
tests/cluster/test_drill.py."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from jobs.drill import main, parse, run_turns
from ray_ckpt.core.loss_scenarios import REMOTE_ONLY
from ray_ckpt.errors import Unavailable
from ray_ckpt.verify.drill import CheckpointDrill, DrillReport, Verdict
from tests.support.peer_nodes import live, sample


def test_arguments_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(["/shared/runs/gpt", "--every", "0.5", "--times", "3", "--seed", "7"])
    assert (args.every, args.times, args.seed, args.address) == (0.5, 3, 7, "auto")
    assert args.max_rate is None
    assert parse(["/shared/runs/gpt", "--max-rate", "200MB/s"]).max_rate == 200_000_000
    for every in ("0", "-1", "inf", "nan", "soon"):
        with pytest.raises(SystemExit) as caught:
            parse(["/shared/runs/gpt", f"--every={every}"])
        assert caught.value.code == 2 and "invalid minutes value" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["/shared/runs/gpt", "--times=-1"])
    assert "invalid turns value: '-1'" in capsys.readouterr().err


def test_no_cluster_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/shared/runs/gpt", "--times", "1", "--address", "127.0.0.1:1"]) == 2
    found = capsys.readouterr()
    assert "No Ray cluster answers" in found.err and found.err.count("\n") == 1 and not found.out


def report(verdict: Verdict) -> DrillReport:
    result = CheckpointDrill(
        checkpoint=live(sample(10)).checkpoint, verdict=verdict, is_covered=True, on_lineage=True
    )
    return DrillReport(scenario=REMOTE_ONLY, results=(result,), last_step=10, is_whole=True)


@pytest.mark.parametrize(
    ("turns", "code"),
    [
        (("passed", "passed"), 0),
        (("passed", None), 2),
        ((None, "passed"), 2),
        (("failed", None), 1),
        ((None, "failed"), 1),
        (("failed", "passed"), 1),
    ],
)
def test_a_turn_that_was_missed_hides_no_failed_drill(
    turns: tuple[Verdict | None, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: Iterator[Verdict | None] = iter(turns)

    def hold(*args: object) -> DrillReport:
        if (verdict := next(left)) is None:
            raise Unavailable("The service has not opened the run.")
        return report(verdict)

    monkeypatch.setattr("jobs.drill.hold", hold)
    args = parse(["/shared/runs/gpt", "--times", str(len(turns)), "--every", "0.0001"])
    assert run_turns(args, io.StringIO()) == code
