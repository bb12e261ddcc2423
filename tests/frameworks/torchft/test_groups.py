"""Replica groups of torchft that die, come back and begin again, on real nodes with the real lighthouse."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.demo.local_cluster import LocalCluster
from jobs.train_torchft import build, run_groups
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.types import Level

EVERY = 4  # steps between saves
DURABLE_S = 60.0  # longest wait for an upload
PACE_S = 0.1  # stands for a larger model: steps are to outlast the restart of a group


@dataclass(frozen=True)
class Journal:
    """Called after each committed step: writes what the rank did, and kills processes as a test requires."""

    out: Path
    writer_dies_at: int = (
        0  # then the other group names the step at which all die, once two are at work again
    )
    all_die_at: int = 0
    run: str = ""  # its checkpoint of that step is on the storage path before all die

    def __call__(
        self, manager: Any, ckpt: Any, group: int, rank: int, position: int, batch: Any, loss: float
    ) -> None:
        step = manager.current_step()
        line = {
            "step": step,
            "position": position,
            "batch": batch.tolist(),
            "loss": loss,
            "counts": manager.is_participating(),
            "num": manager.num_participants(),
            "batches": manager.batches_committed(),
            "saves": ckpt.saves,
        }
        with (self.out / f"{group}-{rank}.jsonl").open("a") as file:
            print(json.dumps(line), file=file)
        if self.writer_dies_at:
            self._break(step, ckpt, group, line["num"])
        elif step == self.all_die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _break(self, step: int, ckpt: Any, group: int, num: int) -> None:
        died, end = self.out / "writer-died", self.out / "end"
        if end.exists() and step == int(end.read_text()):
            self._await_durable(step - 2)
            os.kill(os.getpid(), signal.SIGKILL)
        if not died.exists():
            if step == self.writer_dies_at and ckpt.saves:
                died.write_text(str(group))
                os.kill(os.getpid(), signal.SIGKILL)
            return
        time.sleep(PACE_S)
        if num == 2 and step > self.writer_dies_at and ckpt.saves and not end.exists():
            whole = end.with_suffix(".tmp")
            whole.write_text(str(step // EVERY * EVERY + 2 * EVERY + 2))
            whole.rename(end)

    def _await_durable(self, step: int) -> None:
        end_s = time.monotonic() + DURABLE_S
        while time.monotonic() < end_s:
            newest = Catalog(self.run).newest()
            if newest is not None and newest.info.step >= step and newest.info.level is Level.DURABLE:
                return
            time.sleep(PACE_S)


def lines(out: Path, group: int, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{group}-{rank}.jsonl").read_text().splitlines()]


def replay(history: Mapping[int, list[dict[str, Any]]], steps: int) -> list[torch.Tensor]:
    """Train one plain model on the batches that counted, by `history`; compare the losses on the way."""
    model, optimizer = build()
    for step in range(1, steps + 1):
        entries = [e for entries in history.values() for e in entries if e["step"] == step]
        optimizer.zero_grad()
        total = [torch.zeros_like(p) for p in model.parameters()]
        for entry in entries:
            batch = torch.tensor(entry["batch"])
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            if entry["counts"]:
                assert float(loss.detach()) == entry["loss"], (step, entry)
                for gradient, part in zip(
                    total, torch.autograd.grad(loss, [*model.parameters()]), strict=True
                ):
                    gradient += part
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient / entries[0]["num"]
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.timeout(600)
def test_a_group_dies_the_other_saves_on_and_the_whole_job_restarts(tmp_path: Path) -> None:
    storage, run = str(tmp_path / "storage"), f"{tmp_path}/storage/run"
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    options: dict[str, Any] = {"every_steps": EVERY, "remote_every": 1, "max_block_s": 30.0}
    with LocalCluster(tmp_path / "nodes", ["node-a"]):
        journal = Journal(first, writer_dies_at=6, run=run)
        ended = run_groups("run", storage, 10_000, max_failures=1, after_step=journal, **options)
    assert not ended, "all processes were killed"
    dead, end = int((first / "writer-died").read_text()), int((first / "end").read_text())
    saved, total = end - 2, end + 6
    before = {group: lines(first, group) for group in (0, 1)}
    other = {entry["step"]: entry for entry in before[1 - dead]}
    assert list(other) == list(range(min(other), end + 1)) and min(other) < 6, "the other goes on at once"
    assert [step for step in other if other[step]["saves"]] == list(range(7, end + 1)), "and takes over"
    again = [entry for entry in before[dead] if entry["step"] > 6]
    assert again and not any(entry["saves"] for entry in again), "the group that comes back does not save"
    assert all(entry["batches"] == other[entry["step"]]["batches"] for entry in again), "its state is live"
    assert [session.resumed_from is None for session in Catalog(run).sessions] == [True, False]
    newest = Catalog(run).newest()
    assert newest is not None and (newest.info.step, newest.info.level) == (saved, Level.DURABLE)

    with LocalCluster(tmp_path / "new-nodes", ["node-a"]):  # no memory, no disk of the first cluster
        found = run_groups("run", storage, total, max_failures=0, after_step=Journal(second), **options)
    after = {group: lines(second, group) for group in (0, 1)}
    assert min(entry["step"] for entries in after.values() for entry in entries) == saved + 1
    history = {g: [e for e in before[g] if e["step"] <= saved] + after[g] for g in (0, 1)}
    nums = {e["step"]: e["num"] for entries in history.values() for e in entries}
    assert sorted(nums) == list(range(1, total + 1)) and set(nums.values()) == {1, 2}
    weights = replay(history, total)
    for group in (0, 1):
        assert found[group]["step"] == total
        assert found[group]["batches_committed"] == sum(nums.values())
        used = [entry["position"] for entry in history[group] if entry["counts"]]
        assert used == list(range(0, 8 * len(used), 8)), "no batch of a group is lost or used twice"
        assert found[group]["position"] == 8 * len(used)
        assert all(torch.equal(a, b) for a, b in zip(weights, found[group]["weights"], strict=True))
    assert len(Catalog(run).sessions) == 3


@pytest.mark.timeout(600)
def test_a_job_of_two_groups_of_two_ranks_resumes_exactly(tmp_path: Path) -> None:
    storage, calm, broken = str(tmp_path / "storage"), tmp_path / "calm", tmp_path / "broken"
    calm.mkdir()
    broken.mkdir()
    setup: dict[str, Any] = {"ranks": 2, "sync": True, "max_failures": 0, "every_steps": EVERY}
    with LocalCluster(tmp_path / "nodes", ["node-a"]):
        whole = run_groups("calm", storage, 14, after_step=Journal(calm), **setup)
        journal = Journal(broken, all_die_at=10)
        assert not run_groups("broken", storage, 14, after_step=journal, **setup)
        found = run_groups("broken", storage, 14, after_step=Journal(broken), **setup)
    newest = Catalog(f"{storage}/broken").newest()
    assert newest is not None and newest.info.step == 14 and newest.info.world_size == 2
    assert len(Catalog(f"{storage}/broken").sessions) == 2
    for group in (0, 1):
        for rank in (0, 1):
            once, twice = (
                {
                    (e["step"], e["position"], e["loss"], e["batches"], str(e["batch"]))
                    for e in lines(out, group, rank)
                }
                for out in (calm, broken)
            )
            assert once == twice, "a step that is done twice is the same"
        assert found[group]["batches_committed"] == whole[group]["batches_committed"] == 28
        assert found[group]["position"] == whole[group]["position"]
        pairs = zip(found[group]["weights"], whole[group]["weights"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
