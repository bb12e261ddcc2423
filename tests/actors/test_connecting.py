"""Arguments of `connect` that cannot be, refused before Ray is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_ckpt.actors.connecting import begin_connect, connect
from ray_ckpt.errors import ConfigError


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late() -> None:
        raise AssertionError("Ray is used")

    monkeypatch.setattr(ray, "get_runtime_context", too_late)


@pytest.mark.parametrize("begin", [connect, begin_connect])
@pytest.mark.parametrize(("rank", "world_size"), [(3, 1), (2, 2), (-1, 1), (0, 0)])
def test_a_rank_outside_of_the_group_is_refused(
    begin: Callable[..., object], rank: int, world_size: int, tmp_path: Path
) -> None:
    """A program that gives `rank` and forgets `world_size` has the first pair."""
    with pytest.raises(ConfigError, match=f"rank {rank} of {world_size}") as caught:
        begin(run="gpt", storage_path=str(tmp_path), rank=rank, world_size=world_size)
    assert "world_size" in caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": "0"}, "rank is '0', which is not an integer. Give an int, such as rank=int(os.environ"),
        ({"world_size": 1.0}, "world_size is 1.0, which is not an integer."),
        ({"rank": True, "world_size": 2}, "rank is True, which is not an integer."),
        ({"part": "actor"}, "part is 'actor', and parts is not set. Give all processes the same `parts`"),
        ({"part": "actor", "parts": ["actor"]}, "parts is ['actor']. Give"),
        ({"part": "actor", "parts": {"actor": "1"}}, "parts is {'actor': '1'}. Give"),
        ({"part": "the actor", "parts": {"the actor": 1}}, "parts is {'the actor': 1}. Give"),
        ({"part": 1, "parts": {1: 1}}, "parts is {1: 1}. Give"),
        (
            {"part": "actor", "parts": {"actor": 2}},
            "part 'actor' with 1 ranks, and the parts are actor with 2",
        ),
        ({"parts": {"actor": 1}}, "part '' with 1 ranks"),
    ],
)
def test_wrong_parts_and_ranks_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(run="gpt", storage_path=str(tmp_path), **arguments)
    assert message in str(caught.value)
