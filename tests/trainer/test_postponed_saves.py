"""A loop that calls `due` and `save`, and whose saves fall into accumulation windows."""

from __future__ import annotations

import torch
from torch import nn

from ray_ckpt.config import RunOptions
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink


def test_a_save_that_was_due_in_a_window_is_due_after_it() -> None:
    link = LocalLink(RunOptions(memory="double", every_steps=2))
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
