"""A group that goes on with its live state, in place of a restore."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ray_ckpt
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import ConfigError
from tests.catalog.test_load import items_of, save
from tests.support.sample_run import RunLog
from tests.trainer.test_callbacks import AT, Resumed


def checkpointer(tmp_path: Path) -> tuple[ray_ckpt.Checkpointer, torch.nn.Linear, Resumed]:
    torch.manual_seed(0)
    save(RunLog(folder=tmp_path / "gpt"), [items_of(model=torch.nn.Linear(2, 2))], step=AT)
    live = torch.nn.Linear(2, 2)
    link = Resumed(storage=str(tmp_path), options=RunOptions(every_steps=1))
    return ray_ckpt.Checkpointer(link=link, model=live), live, link


def test_nothing_is_loaded_and_the_next_step_is_saved(tmp_path: Path) -> None:
    ckpt, live, link = checkpointer(tmp_path)
    before, random_state = live.weight.clone(), torch.get_rng_state()
    assert ckpt.restore(live_step=AT + 3) is None
    ckpt.restore_random_state()
    assert torch.equal(live.weight, before) and torch.equal(torch.get_rng_state(), random_state)
    with pytest.raises(ConfigError, match="does not come after"):
        ckpt.step(AT + 3)
    ckpt.step(AT + 4)
    ckpt.close()
    assert list(link.files) == [AT + 4]


def test_a_later_checkpoint_is_not_passed_over(tmp_path: Path) -> None:
    ckpt, _, link = checkpointer(tmp_path)
    with pytest.raises(ConfigError, match=f"checkpoint of {AT}"):
        ckpt.restore(live_step=AT - 1)
    ckpt.close()
    assert not link.sealed
