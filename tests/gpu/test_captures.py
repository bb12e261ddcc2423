"""Captures from a CUDA device, beside steps that begin as soon as a save has returned."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ray_ckpt.capture import overlap_guard as guard
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink
from tests.capture.test_overlap import Training, options

DEVICE = torch.device("cuda")
SETUP_S = 60.0  # until memory for 256 MiB is ready, on any machine


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    with DEVICE:
        yield


@pytest.mark.parametrize("memory", ["single", "double", "stream"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_no_checkpoint_mixes_two_steps(memory: str, kind: str) -> None:
    training = Training(0, LocalLink(options(memory=memory)), kind=kind)
    for step in range(1, 41):
        training.step(step)
        training.save(step)
    assert training.check() >= 10
    assert not training.link.skipped
    training.ckpt.close()


def large(link: LocalLink) -> tuple[torch.Tensor, torch.optim.Optimizer, Checkpointer]:
    """Return the weight of a model, 256 MiB whose copy takes some milliseconds, and what saves it."""
    model = nn.Linear(8192, 8192, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ckpt = Checkpointer(link=link, model=model, optimizer=optimizer)
    ckpt.restore()
    deadline_s = time.monotonic() + SETUP_S
    while ckpt.setup_s is None:  # a save before is skipped
        assert time.monotonic() < deadline_s, "the arena did not become ready"
        time.sleep(0.01)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()  # a save waits for the step that uses a gradient
    return model.weight, optimizer, ckpt


def test_the_host_does_not_wait_for_a_copy_and_the_device_does() -> None:
    link = LocalLink(options())
    weight, optimizer, ckpt = large(link)
    for step in range(1, 6):
        before = weight.detach().clone()
        assert ckpt.save(step)
        optimizer.step()
        assert guard.running._copies, "the copy had ended before the step; nothing was overlapped"
        optimizer.step()
        ckpt.flush()
        assert torch.equal(link.tensors(step)["model.weight"], before.cpu())
    assert not link.skipped
    ckpt.close()


def test_without_the_hook_a_mixed_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    link = LocalLink(options())
    _, optimizer, ckpt = large(link)
    assert ckpt.save(1)
    ckpt.flush()
    monkeypatch.setattr(guard.running, "wait", lambda: None)
    assert ckpt.save(2)
    optimizer.step()
    ckpt.flush()
    assert "changed outside optimizer.step()" in link.skipped[2]
    ckpt.close()


def test_a_graph_replayed_under_the_lock_waits_for_the_copy() -> None:
    link = LocalLink(options())
    weight, _, ckpt = large(link)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        weight.add_(1)
    for step in range(1, 6):
        before = weight.detach().clone()
        assert ckpt.save(step)
        with ckpt.lock():
            graph.replay()
        ckpt.flush()
        assert torch.equal(link.tensors(step)["model.weight"], before.cpu())
    ckpt.close()
