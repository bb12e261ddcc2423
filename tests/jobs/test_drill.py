"""The schedule of drills: its arguments, and how it ends where there is no cluster. See also
tests/cluster/test_drill.py."""

from __future__ import annotations

import pytest

from jobs.drill import main, parse


def test_arguments_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(["/shared/runs/gpt", "--every", "0.5", "--times", "3", "--seed", "7"])
    assert (args.every, args.times, args.seed, args.address) == (0.5, 3, 7, "auto")
    assert args.max_rate is None
    assert parse(["/shared/runs/gpt", "--max-rate", "200MB/s"]).max_rate == 200_000_000
    for every in ("0", "-1", "inf", "nan", "soon"):
        with pytest.raises(SystemExit) as caught:
            parse(["/shared/runs/gpt", f"--every={every}"])
        assert caught.value.code == 2 and "invalid minutes value" in capsys.readouterr().err


def test_no_cluster_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/shared/runs/gpt", "--times", "1", "--address", "127.0.0.1:1"]) == 2
    found = capsys.readouterr()
    assert "No Ray cluster answers" in found.err and found.err.count("\n") == 1 and not found.out
