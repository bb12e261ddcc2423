"""Runs with ZeRO 1, 2 and 3 that are interrupted, or move to other stages, numbers of ranks and FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.frameworks.deepspeed import program
from tests.frameworks.deepspeed.conftest import Ranks

pytestmark = pytest.mark.timeout(900)


def assert_equal(found: Any, expected: Any, *, but: str = "nothing") -> None:
    """Assert that all tensors of two states are equal, bit for bit, those that end with `but` aside."""
    names = [name for name in expected if not name.endswith(but)]
    assert len(names) > 20
    for name in names:
        assert found[name].dtype == expected[name].dtype, name
        assert torch.equal(found[name], expected[name]), name


@pytest.fixture(scope="module")
def begun(on_ranks: Ranks, storage: str) -> Sequence[Any]:
    """Runs on two ranks: `calm` did 8 steps, `broken` ended after 4, and its processes with it."""
    return on_ranks(2, program.run_stages, storage, {"calm": 8, "broken": 4})


def test_a_run_that_was_interrupted_goes_on_exactly(
    on_ranks: Ranks, storage: str, begun: Sequence[Any]
) -> None:
    resumed = on_ranks(2, program.run_stages, storage, {"broken": 8})
    for rank, (before, after) in enumerate(zip(begun, resumed, strict=True)):
        for stage in program.STAGES:
            calm, first, second = before[f"calm-{stage}"], before[f"broken-{stage}"], after[f"broken-{stage}"]
            assert list(second["losses"]) == [5, 6, 7, 8], (rank, stage)
            assert {**first["losses"], **second["losses"]} == calm["losses"]
            assert second["numbers"] == calm["numbers"]
            assert second["numbers"]["counters"] == [8, 8 * 2 * 2 * 2, 16, 0]
            assert_equal(second["state"], calm["state"])


def test_a_state_moves_between_stages_numbers_of_ranks_and_fsdp2(
    on_ranks: Ranks, storage: str, begun: Sequence[Any]
) -> None:
    saved = {stage: begun[0][f"calm-{stage}"] for stage in program.STAGES}
    sharded = on_ranks(3, program.restore_fsdp2, "calm-3", storage)
    for rank in sharded:  # of ZeRO 3 on two ranks
        assert rank["step"] == 8 and rank["schedule"] == saved[3]["numbers"]["schedule"]
        assert set(saved[3]["state"]) - set(rank["state"]) == {
            n for n in saved[3]["state"] if n[-3:] == ".16"
        } - {
            "frozen.weight.16",
            "frozen.bias.16",
        }
        assert_equal({**saved[3]["state"], **rank["state"]}, saved[3]["state"])
    back = on_ranks(2, program.restore_stages, storage, {"calm-3": 3})
    for rank in back:  # of FSDP2 on three ranks
        assert rank["calm-3"]["step"] == 9
        assert rank["calm-3"]["numbers"]["counters"] == [9, 9 * 8, 18, 0]
        assert_equal(rank["calm-3"]["state"], sharded[0]["after"])
    (alone,) = on_ranks(1, program.restore_stages, storage, {"calm-1": 1, "calm-2": 2, "calm-3": 1})
    assert [alone[run]["step"] for run in ("calm-1", "calm-2", "calm-3")] == [8, 8, 10]
    assert_equal(alone["calm-1"]["state"], saved[1]["state"])
    assert_equal(alone["calm-2"]["state"], saved[2]["state"])
    assert_equal(alone["calm-3"]["state"], back[0]["calm-3"]["after"])  # of ZeRO 3 on two ranks
    both = on_ranks(2, program.restore_stages, storage, {"calm-1": 1, "calm-2": 2, "calm-3": 3})
    for rank in both:
        for run in ("calm-1", "calm-2", "calm-3"):
            assert rank[run]["step"] == alone[run]["step"] + 1
            assert_equal(rank[run]["state"], alone[run]["after"])
