"""A loop that calls `due` and `save`, and whose saves fall into accumulation windows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ray_ckpt.config import RunOptions
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.trainer.rank_items import MAX_STEPPED
from tests.capture.local import LocalLink


def test_a_save_that_was_due_in_a_window_is_due_after_it() -> None:
    link = LocalLink(RunOptions(memory="double", every_steps=2, max_block_s=60.0))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(link=link, model=model, optimizer=optimizer)
    ckpt.restore()
    due = []
    for step in range(1, 8):  # every even step is in the middle of a window of two
        model(torch.ones(1, 2)).sum().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        if ckpt.due(step):
            due.append((step, ckpt.save(step)))
    ckpt.close()
    assert due == [(2, False), (3, True), (4, False), (5, True), (6, False), (7, True)]
    assert [s.attempt.step for s in link.sealed] == [3, 5, 7]


def saved_steps(link: LocalLink) -> list[int]:
    return [sealed.attempt.step for sealed in link.sealed]


def test_gradients_of_an_optimizer_that_does_not_step_delay_only_the_first_saves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The discriminator of a GAN is in the graph from step 1, and trained from step 200."""
    link = LocalLink(RunOptions(memory="double", every_steps=10, max_block_s=60.0))
    model, other = nn.Linear(2, 2), nn.Linear(2, 1)
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    ckpt = Checkpointer(link=link, model=model, other=other, first=first, second=second)
    ckpt.restore()
    for step in range(1, 301):
        first.zero_grad()
        second.zero_grad()
        other(model(torch.ones(1, 2))).sum().backward()
        first.step()
        if step >= 200:
            second.step()
        ckpt.step(step)
    ckpt.close()
    assert saved_steps(link) == [10 + MAX_STEPPED, *range(120, 301, 10)]
    assert caplog.text.count("the save waits no longer") == 1


def begun() -> tuple[LocalLink, nn.Module, torch.optim.Optimizer, Checkpointer]:
    link, model = LocalLink(RunOptions(memory="double", every_steps=10, max_block_s=60.0)), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(link=link, model=model, optimizer=optimizer)
    ckpt.restore()
    return link, model, optimizer, ckpt


def test_gradients_of_a_probe_behind_each_step_delay_only_the_first_saves() -> None:
    link, model, optimizer, ckpt = begun()
    for step in range(1, 151):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        model(torch.ones(1, 2)).sum().backward()  # the norm of its gradients is looked at
        ckpt.step(step)
    ckpt.close()
    assert saved_steps(link) == [10 + MAX_STEPPED, 120, 130, 140, 150]


def test_a_window_that_begins_after_ignored_gradients_is_waited_for() -> None:
    link, model, optimizer, ckpt = begun()
    for step in range(1, 150):
        model(torch.ones(1, 2)).sum().backward()
        if step < 125 or step % 7 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if step < 120:
            model(torch.ones(1, 2)).sum().backward()
        ckpt.step(step)
    ckpt.close()
    assert saved_steps(link) == [10 + MAX_STEPPED, 120, 133, 140]
