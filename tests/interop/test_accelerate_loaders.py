"""The shuffled loaders of Accelerate: a resumed training has the batches of one that was not interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ray_ckpt
from ray_ckpt.trainer.connection import Connection, set_connection
from tests.capture.local import LocalLink
from tests.interop.test_trainers import connect

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's loader


@pytest.fixture(autouse=True)
def disconnect() -> Iterator[None]:
    yield
    set_connection(Connection())


def batches(link: LocalLink, *, until: int, is_seeded: bool = True) -> list[tuple[int, ...]]:
    """Train with a stateful loader, which counts its epochs of four batches; return the samples of each."""
    set_connection(Connection(link=link))
    accelerate.utils.set_seed(0)
    config = accelerate.DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=is_seeded)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    model: Any = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(8.0).reshape(8, 1))
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=2, shuffle=True)
    )
    ckpt = ray_ckpt.Checkpointer(**ray_ckpt.accelerate.items(accelerator))
    info = ckpt.restore()
    step, seen = info.step if info is not None else 0, []
    while step < until:
        for (batch,) in loader:
            seen.append(tuple(batch.flatten().int().tolist()))
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if ckpt.due(step):
                ckpt.save(step)
            if step == until:
                break
    ckpt.finish()
    ckpt.close()
    return seen


@pytest.mark.parametrize("at", [2, 4, 6])
def test_a_stateful_loader_goes_on_with_the_batches_that_follow(tmp_path: Path, at: int) -> None:
    first = connect(every_steps=at)
    begun = batches(first, until=at)
    assert begun + batches(first.resumed(tmp_path, at), until=12) == batches(connect(), until=12)


def test_a_shuffle_that_a_restart_does_not_repeat_is_named(caplog: pytest.LogCaptureFixture) -> None:
    batches(connect(), until=1)
    assert not caplog.records
    batches(connect(), until=1, is_seeded=False)
    assert "loader shuffles by a generator, which is not saved" in caplog.text
