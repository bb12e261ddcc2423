"""Settings of unusual kinds: named tuples, not-a-number, numbers that a tensor cannot hold."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ray_ckpt.capture.hyperparameters import Hyperparameters


def optimizer_of(**settings: Any) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """Return an optimizer and its only group."""
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(2))], **settings}], lr=0.1)
    return optimizer, optimizer.param_groups[0]


class Bounds(NamedTuple):
    low: float
    high: float


def test_a_kept_setting_may_be_a_named_tuple() -> None:
    optimizer, group = optimizer_of(clip=Bounds(0.0, 1.0))
    built = Hyperparameters({"o": optimizer})
    group["clip"] = (0.0, 2.0)
    (changed,) = built.loaded(["o.clip"])
    assert (changed.built, changed.saved) == ((0.0, 1.0), (0.0, 2.0))
    assert group["clip"] == Bounds(0.0, 1.0) and isinstance(group["clip"], Bounds)


@pytest.mark.parametrize("value", [math.nan, torch.tensor(math.nan), (1.0, math.nan)])
def test_not_a_number_is_no_difference_from_itself(value: Any) -> None:
    optimizer, group = optimizer_of(limit=value)
    built = Hyperparameters({"o": optimizer})
    group["limit"] = copy.deepcopy(value)
    assert built.loaded([]) == ()
    group["limit"] = 2.0
    (changed,) = built.loaded([])
    assert (changed.name, changed.saved) == ("o.limit", 2.0)


def test_a_number_that_a_tensor_cannot_hold_is_a_difference() -> None:
    optimizer, group = optimizer_of(lr=torch.tensor(0.5))
    built, group["lr"] = Hyperparameters({"o": optimizer}), 1j
    (changed,) = built.loaded(["o.lr"])
    assert (changed.built, changed.saved) == (0.5, 1j)
    assert torch.equal(group["lr"], torch.tensor(0.5))
