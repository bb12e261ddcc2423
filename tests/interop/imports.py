"""Imports in tests: the command, and restores of what it wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

import ray_ckpt
from ray_ckpt.capture.load import RestoreInfo
from ray_ckpt.catalog.uri import Origin
from ray_ckpt.cli import app
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.storage.remote.tier import RemoteRef
from tests.capture.local import LocalLink


def imported(form: str, source: Path, run: Path, *args: object) -> dict[str, Any]:
    """Import `source` into `run` and return the command's JSON. Raise the command's error."""
    run.parent.mkdir(exist_ok=True)
    words = ["import", form, str(source), str(run), "--json", *map(str, args)]
    found = CliRunner().invoke(app, words, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    document: dict[str, Any] = json.loads(found.stdout)
    return document


@dataclass(slots=True)
class ImportedLink(LocalLink):
    """A node in a group that resumes from the newest checkpoint of `run`."""

    run: str = ""

    def ticket(self, *, early: bool = False) -> RestoreTicket:
        storage, _, name = self.run.rpartition("/")
        attempt = ray_ckpt.open(self.run).choose().info.id
        ref = RemoteRef(storage_path=storage, run_name=name)
        return Origin(uri=self.run, storage=ref, attempt=attempt).ticket((1, 2))


def restore(run: Path, **objects: Any) -> RestoreInfo:
    """Restore the newest checkpoint of `run` into live objects by a Checkpointer."""
    checkpointer = ray_ckpt.Checkpointer(link=ImportedLink(run=str(run)), **objects)
    try:
        info = checkpointer.restore()
    finally:
        checkpointer.close()
    assert info is not None
    return info


def make(seed: int, optimizer: Any = torch.optim.AdamW) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, before its first step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    biases, weights = [p for p in model.parameters() if p.dim() == 1], [*model[0].parameters()][:1]
    groups = [{"params": [*biases]}, {"params": [*weights, model[2].weight], "lr": 0.5}]
    return model, optimizer(groups, lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = make(0)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def assert_same(
    one: tuple[torch.nn.Module, torch.optim.Optimizer], other: tuple[torch.nn.Module, torch.optim.Optimizer]
) -> None:
    """Assert that models and optimizers are equal, now and after a step."""
    for _ in range(2):
        for (name, a), b in zip(one[0].state_dict().items(), other[0].state_dict().values(), strict=True):
            assert torch.equal(a, b), name
        for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True):
            mine, theirs = one[1].state[a], other[1].state[b]
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
        step(*one)
        step(*other)
