"""A loop that calls back, as frameworks have it: the guide's callback in a small one, resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import ray_ckpt
from ray_ckpt.catalog.uri import Origin
from ray_ckpt.config import RunOptions
from ray_ckpt.data import GlobalBatchSampler
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.storage.remote.tier import RemoteRef
from ray_ckpt.trainer.connection import Connection, set_connection
from tests.capture.local import LocalLink
from tests.catalog.test_load import save
from tests.support.code_blocks import find, run_python
from tests.support.sample_run import RunLog

AT, TOTAL = 4, 8


@dataclass(slots=True)
class Resumed(LocalLink):
    """The run has what `save` has written below `storage`."""

    storage: str = ""

    def ticket(self, *, early: bool = False) -> RestoreTicket:
        attempt = ray_ckpt.open(f"{self.storage}/gpt").choose(AT).info.id
        ref = RemoteRef(storage_path=self.storage, run_name="gpt")
        return Origin(uri=f"{self.storage}/gpt", storage=ref, attempt=attempt).ticket((1, 2))


class Trainer:
    """A framework's loop: it makes the iterator itself, and calls back."""

    def __init__(self, callback: Any, folder: Path) -> None:
        torch.manual_seed(0)
        self.callback, self.folder = callback, folder
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        sampler = GlobalBatchSampler(40, global_batch=4, rank=0, world_size=1, num_batches=TOTAL)
        data: Any = list(torch.arange(160.0).reshape(40, 4) / 160)
        self.batches = sampler.batches(DataLoader(data, batch_sampler=sampler))
        self.global_step = 0

    def train(self, *, until: int = TOTAL) -> None:
        self.callback.on_train_begin(self)
        assert len(self.batches) == TOTAL  # of the whole run, also after a restore
        torch.rand(3)  # what building an iterator, or a first validation, draws
        for batch in self.batches:
            self.callback.on_step_begin(self)
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.global_step += 1
            self.callback.on_step_end(self)
            if self.global_step == AT and until == TOTAL:
                save(RunLog(folder=self.folder / "gpt"), [self.callback.ckpt._require_items().items], step=AT)
        self.callback.on_train_end(self)


@pytest.fixture
def protect() -> Iterator[Any]:
    given = {"ray_ckpt": ray_ckpt, "Callback": object}
    block = find("docs/guides/training-loop.md", "ckpt.restore_random_state()")
    yield run_python(block, given, {})["Protect"]
    set_connection(Connection())


def run(protect: Any, link: LocalLink, folder: Path, until: int) -> tuple[Trainer, Any]:
    set_connection(Connection(link=link))
    callback = protect()
    trainer = Trainer(callback, folder)
    trainer.train(until=until)
    callback.ckpt.wait("local")
    callback.ckpt.close()
    return trainer, callback


def test_a_loop_that_calls_back_resumes_exactly(protect: Any, tmp_path: Path) -> None:
    options = RunOptions(every_steps=100, memory="single", max_block_s=10.0)
    whole, first = run(protect, LocalLink(options), tmp_path, TOTAL)
    assert first.resume_step == 0
    link = Resumed(options, storage=str(tmp_path))
    resumed, second = run(protect, link, tmp_path, -1)
    assert (second.resume_step, resumed.global_step) == (AT, TOTAL)
    assert list(link.files) == [TOTAL], "the last step, which is not due by the cadence"
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_without_the_random_state_it_is_another_run(
    protect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RunOptions(every_steps=100, memory="single", max_block_s=10.0)
    whole, _ = run(protect, LocalLink(options), tmp_path, TOTAL)
    monkeypatch.setattr(ray_ckpt.Checkpointer, "restore_random_state", lambda self: None)
    resumed, _ = run(protect, Resumed(options, storage=str(tmp_path)), tmp_path, -1)
    states = [trainer.model.state_dict()["0.weight"] for trainer in (whole, resumed)]
    assert not torch.equal(*states)


def test_random_state_is_put_back_once_and_not_after_a_step(tmp_path: Path) -> None:
    ckpt = ray_ckpt.Checkpointer(link=LocalLink(RunOptions()), model=torch.nn.Linear(2, 2))
    ckpt.restore()
    ckpt._rng = ckpt._require_items().items["rng"].tree()
    first = torch.rand(1)
    ckpt.restore_random_state()
    assert torch.equal(torch.rand(1), first)
    ckpt.restore_random_state()
    assert not torch.equal(torch.rand(1), first)
    ckpt._rng = ckpt._require_items().items["rng"].tree()
    ckpt.step(1)
    assert ckpt._rng is None
    ckpt.close()
