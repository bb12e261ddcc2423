"""An import from DeepSpeed refuses partitions in another order. `tests/frameworks` imports real files."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ckpt.errors import ConfigError
from ray_ckpt.interop.importers.deepspeed import _check_order


def test_partitions_in_turns_are_refused() -> None:
    with pytest.raises(ConfigError, match="round_robin_gradients"):
        _check_order({"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, "a file")


@pytest.mark.parametrize(
    "config",
    [None, {}, {"zero_optimization": {"stage": 1}}, {"zero_optimization": {"round_robin_gradients": 0}}],
)
def test_partitions_in_the_order_of_the_group_are_not(config: Any) -> None:
    _check_order(config, "a file")
