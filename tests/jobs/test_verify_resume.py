"""The output of the program, without a cluster; tests/cluster/test_check_resume.py has the checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.train_gpt import PARALLEL
from jobs.verify_resume import describe, parse
from ray_ckpt.errors import ResumeError
from ray_ckpt.train.check import ResumeCheck
from ray_ckpt.trainer.probe import Noted, Trace, compare


def check_of(first: str, second: str) -> ResumeCheck:
    """Return a check of one tensor in one state of one rank, with these digests in the two runs."""
    traces = (
        {0: Trace({"model": "model"}, [Noted("end", 7, {"model.w": f"tensor F32[2] {text}"})])}
        for text in (first, second)
    )
    return ResumeCheck(
        name="check-resume-1",
        folder=Path("/runs/check-resume-1/states"),
        at=6,
        steps=1,
        num_ranks=1,
        num_states=1,
        num_values=1,
        seconds={"first": 2.04, "second": 1.0},
        difference=compare(*traces),
    )


SAME, OTHER = check_of("0" * 32, "0" * 32), check_of("0" * 32, "1" * 32)


def test_all_layouts_are_checked_unless_some_are_named() -> None:
    assert parse([]).parallel == PARALLEL
    assert parse(["--parallel", "2d", "ddp"]).parallel == ["2d", "ddp"]


def test_runs_that_agree_are_true_and_raise_nothing() -> None:
    assert SAME and "the same bit for bit: 1 tensors and values" in str(SAME)
    SAME.raise_for_difference()


def test_runs_that_differ_are_false_and_raise_what_differs() -> None:
    assert not OTHER
    with pytest.raises(
        ResumeError, match=r"differs after step 7: model\.w \(tensor F32\[2\]\) has other"
    ) as caught:
        OTHER.raise_for_difference()
    assert caught.value.fields["names"] == ("model.w",)


def test_the_json_line_has_the_first_difference() -> None:
    same, other = (json.loads(json.dumps(describe("ddp", found))) for found in (SAME, OTHER))
    assert same["same"] and same["first_difference"] is None
    assert same["seconds"] == {"first": 2.0, "second": 1.0}
    assert not other["same"]
    assert other["first_difference"]["first_tensor"] == "model.w"
    assert other["first_difference"]["step"] == 7
