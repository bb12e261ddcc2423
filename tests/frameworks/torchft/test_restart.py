"""Real groups of torchft whose checkpoint lies in a folder, without Ray: the restart of a whole job."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torchft.coordination import LighthouseServer

import ray_ckpt
from jobs.demo.free_ports import free_port
from jobs.train_torchft import Rank
from ray_ckpt.catalog.uri import Origin
from ray_ckpt.config import RunOptions
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.storage.remote.tier import RemoteRef
from ray_ckpt.trainer.connection import Connection, set_connection
from tests.capture.local import LocalLink
from tests.catalog.test_load import save
from tests.frameworks.torchft.test_groups import Journal, lines, replay
from tests.support.sample_run import RunLog

SAVED, DIES, TOTAL = 6, 8, 12
END_S = 400.0  # a calm machine needs a tenth


@dataclass(slots=True)
class FolderLink(LocalLink):
    """A run that has what the group that saves has written below `storage`."""

    storage: str = ""

    def ticket(self, *, early: bool = False) -> RestoreTicket:
        if not Path(self.storage, "gpt").exists():
            return self.given
        attempt = ray_ckpt.open(f"{self.storage}/gpt").choose(SAVED).info.id
        ref = RemoteRef(storage_path=self.storage, run_name="gpt")
        return Origin(uri=f"{self.storage}/gpt", storage=ref, attempt=attempt).ticket((1, 2))


@dataclass(frozen=True)
class Saving(Journal):
    """A journal that writes the checkpoint of step SAVED, of the group that saves."""

    storage: str = ""

    def __call__(self, manager: Any, ckpt: Any, *args: Any) -> None:
        if manager.current_step() == SAVED and ckpt.saves and not Path(self.storage, "gpt").exists():
            items = ckpt._checkpointer._require_items().items
            save(RunLog(folder=Path(self.storage, "gpt")), [items], step=SAVED)
        Journal.__call__(self, manager, ckpt, *args)


def connect(*, storage_path: str, rank: int, world_size: int, run: str, **options: Any) -> None:
    options.pop("resume", None)
    link = FolderLink(storage=storage_path, options=RunOptions(**options))
    set_connection(Connection(link=link))


def train(lighthouse: str, port: int, group: int, config: dict[str, Any], out: str) -> None:
    ray_ckpt.connect = connect  # type: ignore[assignment]
    rank = Rank()
    rank.join(lighthouse, port, group, 0, config)
    torch.save(rank.train(None), out)


def run(config: dict[str, Any], out: Path) -> dict[int, dict[str, Any]]:
    """Train with two groups, each a process; return the results of those that came to the end."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60_000)
    files = {group: out / f"result-{group}.pt" for group in (0, 1)}
    start = get_context("spawn").Process
    processes = [
        start(target=train, args=(lighthouse.address(), free_port(), group, config, str(file)))
        for group, file in files.items()
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(END_S)
        process.kill()
    lighthouse.shutdown()
    return {group: torch.load(file) for group, file in files.items() if file.exists()}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sync", [False, True], ids=["asynchronous quorum", "synchronous quorum"])
def test_all_groups_begin_again_at_the_checkpoint(tmp_path: Path, sync: bool) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    config: dict[str, Any] = {
        "run": "gpt",
        "storage_path": str(tmp_path),
        "steps": TOTAL,
        "groups": 2,
        "ranks": 1,
        "sync": sync,
        "options": {"every_steps": 1000},
    }
    assert not run({**config, "after_step": Saving(first, all_die_at=DIES, storage=str(tmp_path))}, first)
    found = run({**config, "after_step": Journal(second)}, second)
    before, after = ({g: lines(out, g) for g in (0, 1)} for out in (first, second))
    assert min(e["step"] for entries in after.values() for e in entries) == SAVED + 1
    history = {g: [e for e in before[g] if e["step"] <= SAVED] + after[g] for g in (0, 1)}
    nums = {e["step"]: e["num"] for entries in history.values() for e in entries}
    assert sorted(nums) == list(range(1, TOTAL + 1))
    weights = replay(history, TOTAL)
    for group in (0, 1):
        assert found[group]["step"] == TOTAL
        assert found[group]["batches_committed"] == sum(nums.values())
        used = [e["position"] for e in history[group] if e["counts"]]
        assert used == list(range(0, 8 * len(used), 8)), "no batch of a group is lost or used twice"
        assert found[group]["position"] == 8 * len(used)
        assert all(torch.equal(a, b) for a, b in zip(weights, found[group]["weights"], strict=True))
