from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.frameworks.deepspeed import program
from tests.frameworks.deepspeed.conftest import Ranks


def assert_equal(found: Any, expected: Any, *, but: str = "") -> None:
    """Assert that all tensors of two states are equal, bit for bit, those that end with `but` aside."""
    names = [name for name in expected if not (but and name.endswith(but))]
    for name in names:
        assert found[name].dtype == expected[name].dtype, name
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_that_was_interrupted_goes_on_exactly(on_ranks: Ranks, storage: str, stage: int) -> None:
    config = program.config_of(stage)
    calm = on_ranks(2, program.run_engine, "calm", storage, config, 8)
    first = on_ranks(2, program.run_engine, "broken", storage, config, 4)
    second = on_ranks(2, program.run_engine, "broken", storage, config, 8)
    for whole, begun, resumed in zip(calm, first, second, strict=True):
        assert list(resumed["losses"]) == [5, 6, 7, 8]
        assert {**begun["losses"], **resumed["losses"]} == whole["losses"]
        assert resumed["numbers"] == whole["numbers"]
        assert resumed["numbers"]["counters"] == [8, 8 * 2 * 2 * 2, 16, 0]
        assert_equal(resumed["state"], whole["state"])
