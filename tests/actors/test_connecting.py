"""Arguments of `connect` that cannot be, refused before Ray is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from ray_ckpt.actors.connecting import begin_connect, connect
from ray_ckpt.errors import ConfigError


@pytest.mark.parametrize("begin", [connect, begin_connect])
@pytest.mark.parametrize(("rank", "world_size"), [(3, 1), (2, 2), (-1, 1), (0, 0)])
def test_a_rank_outside_of_the_group_is_refused(
    begin: Callable[..., object], rank: int, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that gives `rank` and forgets `world_size` has the first pair."""

    def too_late() -> None:
        raise AssertionError("Ray is used")

    monkeypatch.setattr(ray, "get_runtime_context", too_late)
    with pytest.raises(ConfigError, match=f"rank {rank} of {world_size}") as caught:
        begin(run="gpt", storage_path=str(tmp_path), rank=rank, world_size=world_size)
    assert "world_size" in caught.value.hint
