"""Trainings of each stage of ZeRO on two ranks, saved by DeepSpeed and imported; each is made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.frameworks.deepspeed_files.ranks import run, to_universal, train
from tests.interop.imports import imported

STAGES = {1: ("--bf16",), 2: (), 3: ("--bf16",)}
STEPS = 3
TAG = f"global_step{STEPS}"
FP32 = """
import sys, torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as whole
torch.save({name: tensor.clone() for name, tensor in whole(*sys.argv[1:3]).items()}, sys.argv[3])
"""


class Saved:
    """A training of one stage: its folder, and what DeepSpeed's own tools make of it."""

    def __init__(self, folder: Path, stage: int) -> None:
        self.seen = train(folder / "ds", 2, "--stage", stage, "--steps", STEPS, *STAGES[stage])
        self.tag = folder / "ds" / TAG
        self.universal = to_universal(self.tag, folder / "universal" / TAG)
        run("-c", FP32, folder / "ds", TAG, folder / "fp32.pt")
        self.fp32 = torch.load(folder / "fp32.pt", weights_only=True)
        self.runs = folder / "runs"
        self.runs.mkdir()
        for form, source in (("deepspeed", self.tag), ("universal", self.universal)):
            self.__dict__[f"{form}_items"] = imported(form, source, self.runs / form)["items"]


def flat(value: Any, path: str = "") -> dict[str, Any]:
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if inner is None:
        return {path: value}
    return {name: leaf for key, each in inner for name, leaf in flat(each, f"{path}/{key}").items()}


def assert_equal(one: Any, other: Any) -> None:
    mine, theirs = flat(one), flat(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name
        else:
            assert value == theirs[name], name
