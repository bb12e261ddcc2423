"""Option `replicate`: who saves what several ranks hold, and what each rank restores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from ray_ckpt.capture.replica_watch import WindowDigests
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import ConfigError
from ray_ckpt.format.manifest import check_coverage
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink, restored_from

RANKS = 2


def model(rank: int) -> torch.nn.Module:
    """Return a model that has drifted apart: each rank has its own bytes."""
    made = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(rank + 1.0)
    return made


def frozen(rank: int) -> torch.nn.Module:
    """Return a model whose weights could be still slices, with bytes of the rank."""
    made = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(4, 4))
    made[0].requires_grad_(False)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(rank + 1.0)
    return made


def saved(
    folder: Path, options: RunOptions, model_of: Callable[[int], torch.nn.Module] = model
) -> list[LocalLink]:
    links = []
    for rank in range(RANKS):
        link = LocalLink(options, rank=rank, world_size=RANKS)
        ckpt = Checkpointer(link=link, model=model_of(rank))
        ckpt.restore()
        assert ckpt.save(1)
        ckpt.wait("local")
        ckpt.close()
        links.append(link)
    return links


@pytest.mark.parametrize("memory", ["double", "stream"])
def test_with_full_each_rank_saves_all_and_restores_its_own_bytes(tmp_path: Path, memory: str) -> None:
    options = RunOptions(replicate="full", memory=memory)
    links = saved(tmp_path, options)
    rows = [row for link in links for row in link.write(tmp_path, 1)]
    check_coverage(rows)
    assert len({row.file for row in rows if row.kind == "slice"}) == RANKS
    assert all("/content" not in text for link in links for text in link.sealed[0].replicated)
    for world_size, expected in ((2, (1.0, 2.0)), (1, (1.0,)), (3, (1.0, 1.0, 1.0))):
        for rank in range(world_size):
            link = restored_from(
                tmp_path, 1, rows, options, saved_ranks=RANKS, rank=rank, world_size=world_size
            )
            restored = model(7)
            ckpt = Checkpointer(link=link, model=restored)
            ckpt.restore()
            ckpt.close()
            values = {value for p in restored.parameters() for value in p.detach().view(-1).tolist()}
            assert values == {expected[rank]}, (world_size, rank)


@pytest.mark.parametrize("static_items", [(), ("model",)])
def test_with_full_each_rank_restores_its_own_frozen_parameters(
    tmp_path: Path, static_items: tuple[str, ...]
) -> None:
    options = RunOptions(replicate="full", static_items=static_items)
    links = saved(tmp_path, options, frozen)
    rows = [row for link in links for row in link.write(tmp_path, 1)]
    for rank in range(RANKS):
        restored = frozen(7)
        link = restored_from(tmp_path, 1, rows, options, saved_ranks=RANKS, rank=rank, world_size=RANKS)
        ckpt = Checkpointer(link=link, model=restored)
        ckpt.restore()
        ckpt.close()
        values = {value for p in restored.parameters() for value in p.detach().view(-1).tolist()}
        assert values == {rank + 1.0}


def test_with_full_what_ranks_share_stays_in_the_first_shard(tmp_path: Path) -> None:
    """A reader of format 1 prefers the first shard of its rank only."""
    assert all(link.still_files for link in saved(tmp_path, RunOptions(), frozen)[:1])
    links = saved(tmp_path, RunOptions(replicate="full"), frozen)
    assert not any(link.still_files for link in links)


def test_with_shared_each_tensor_is_saved_once(tmp_path: Path) -> None:
    links = saved(tmp_path, RunOptions())
    keys = [row.slice.key for link in links for row in link.write(tmp_path, 1) if row.slice]
    names = [key for key in keys if "rng" not in key]
    assert len(names) == len(set(names))
    assert any("/content" in text for text in links[0].sealed[0].replicated)


def test_the_watch_can_be_turned_off() -> None:
    link = LocalLink(RunOptions(replica_watch=False), world_size=RANKS)
    ckpt = Checkpointer(link=link, model=model(0))
    ckpt.restore()
    assert ckpt.save(1)
    ckpt.close()
    assert link.sealed[0].watched == ()


@pytest.mark.parametrize("method", ["add_now", "complete", "reports"])
def test_a_failure_of_the_watch_costs_no_save(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    link = LocalLink(RunOptions(max_block_s=30.0), world_size=RANKS)
    ckpt = Checkpointer(link=link, model=model(0))
    ckpt.restore()
    with monkeypatch.context() as patch:
        patch.setattr(WindowDigests, method, Mock(side_effect=torch.OutOfMemoryError("no 50 MB")))
        for step in (1, 2):
            assert ckpt.save(step)
            ckpt.flush()
    assert ckpt.save(3)
    ckpt.close()
    assert [shard.attempt.step for shard in link.sealed if shard.watched] == [3]
    assert sorted(link.files) == [1, 2, 3] and not link.skipped
    assert caplog.text.count("replicas are not compared at step 1: no 50 MB") == 1
    assert caplog.text.count("are not compared") == 1


def test_another_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"replicate is 'all'.*shared, full"):
        RunOptions(replicate="all")
