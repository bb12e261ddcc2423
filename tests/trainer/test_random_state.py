"""Random state after a restore."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import ray_ckpt
from ray_ckpt.config import RunOptions
from tests.capture.local import LocalLink
from tests.capture.test_begun_schedules import Begins


def begun(link: LocalLink, seed: int) -> tuple[ray_ckpt.Checkpointer, StatefulDataLoader]:
    torch.manual_seed(seed)
    loader = StatefulDataLoader(list(range(40)), batch_size=2)
    checkpointer = ray_ckpt.Checkpointer(link=link, model=torch.nn.Linear(2, 2), loader=loader)
    checkpointer.restore()
    return checkpointer, loader


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_a_loader_that_draws_a_number_for_its_state_does_not_move_random_state(tmp_path: Path) -> None:
    link = LocalLink(RunOptions(memory="single", every_steps=100))
    checkpointer, loader = begun(link, 1)
    next(iter(loader))
    checkpointer.step(4)
    checkpointer.save(4)
    then = torch.get_rng_state()
    checkpointer.flush()
    checkpointer.close()

    restored, loader = begun(link.resumed(tmp_path, 4), 2)
    iter(loader)
    restored.restore_random_state()
    assert torch.equal(torch.get_rng_state(), then)
    restored.close()


@pytest.mark.parametrize("items", [("model",), ("model", "rng")])
def test_only_restored_random_state_is_set_again_before_the_first_step(
    items: tuple[str, ...], tmp_path: Path
) -> None:
    link = LocalLink(RunOptions(memory="single", every_steps=1))
    first = ray_ckpt.Checkpointer(link=link, model=torch.nn.Linear(2, 2))
    first.restore()
    then = torch.get_rng_state()
    first.step(1)
    first.flush()
    first.close()
    other = link.resumed(tmp_path, 1).given
    options = RunOptions(init_from="s3://bucket/other", init_items=items)
    begins = Begins(options=options, given=replace(other, checkpoint=None), other=other)
    ckpt = ray_ckpt.Checkpointer(link=begins, model=torch.nn.Linear(2, 2))
    steps = ckpt.steps(total=1)
    torch.manual_seed(1234)
    mine = torch.get_rng_state()
    next(steps)
    assert torch.equal(torch.get_rng_state(), then if "rng" in items else mine)
    ckpt.close()
