"""A prepared trainer beside what its user and Ray change in it: it still resumes exactly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train.huggingface.transformers import prepare_trainer as prepare_for_ray
from torch.utils.data import WeightedRandomSampler
from transformers import EarlyStoppingCallback, Trainer, default_data_collator

import ray_ckpt
from ray_ckpt.trainer.connection import Connection, set_connection
from tests.capture.local import LocalLink
from tests.interop.test_trainers import AT, TOTAL, Halt, assert_equal, build, connect
from tests.support.examples import every_few

Prepare = Callable[[Trainer], Trainer]
ORDERS: dict[str, Prepare] = {
    "ray first": lambda trainer: ray_ckpt.huggingface.prepare_trainer(prepare_for_ray(trainer)),
    "ray last": lambda trainer: prepare_for_ray(ray_ckpt.huggingface.prepare_trainer(trainer)),
}


@pytest.fixture(autouse=True)
def disconnect() -> Iterator[None]:
    yield
    set_connection(Connection())


def resume(folder: Path, prepare: Prepare, at: int = AT, **args: Any) -> tuple[Trainer, Trainer]:
    """Train to the end, and again in two pieces; return both trainers."""

    def train(link: LocalLink, until: int) -> Trainer:
        set_connection(Connection(link=link))
        trainer = build(folder / "hf", seed=link.given.session_key[1], **args)
        trainer.add_callback(Halt(until))
        trainer = prepare(trainer)
        trainer.train()
        trainer._ray_ckpt.checkpointer.close()
        return trainer

    total = at + TOTAL - AT
    args = {"max_steps": total, "save_steps": at, **args}
    whole = train(connect(), total)
    first = connect()
    train(first, at)
    second = first.resumed(folder, at)
    resumed = train(second, total)
    assert (list(first.files), list(second.files)) == ([at], [whole.state.global_step])
    return whole, resumed


@pytest.mark.parametrize("prepare", ORDERS.values(), ids=ORDERS)
def test_it_composes_with_that_of_ray(tmp_path: Path, prepare: Prepare) -> None:
    whole, resumed = resume(tmp_path, prepare)
    assert_equal(resumed.model.state_dict(), whole.model.state_dict())


def test_a_collator_that_seeds_its_noise_by_the_samples_resumes_exactly(tmp_path: Path) -> None:
    def masked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Replace random tokens, as for masked language models."""
        changed = []
        for sample in samples:
            ids = sample["input_ids"]
            seen = torch.Generator().manual_seed(int((ids * torch.arange(len(ids))).sum()))
            noisy = torch.where(torch.rand(ids.shape, generator=seen) < 0.3, 1, ids)
            changed.append({**sample, "input_ids": noisy})
        batch: dict[str, torch.Tensor] = default_data_collator(changed)
        return batch

    def prepare(trainer: Trainer) -> Trainer:
        trainer.data_collator = masked
        return ray_ckpt.huggingface.prepare_trainer(trainer)

    whole, resumed = resume(tmp_path, prepare)
    assert_equal(resumed.model.state_dict(), whole.model.state_dict())


def by_weight(trainer: Trainer) -> Trainer:
    trainer._get_train_sampler = lambda *args: WeightedRandomSampler([1.0] * 24, 24)
    return ray_ckpt.huggingface.prepare_trainer(trainer)


EPOCH = 6  # steps
PLACES = {"first epoch": AT, "its end": EPOCH, "second epoch": EPOCH + AT}
SAMPLERS: dict[str, tuple[Prepare, dict[str, Any]]] = {
    "by length": (ray_ckpt.huggingface.prepare_trainer, {"train_sampling_strategy": "group_by_length"}),
    "by weight": (by_weight, {}),
}


@pytest.mark.parametrize(("sampler", "place"), every_few(product(SAMPLERS, PLACES), 2))
def test_a_sampler_without_a_seed_goes_on_in_the_same_order(tmp_path: Path, sampler: str, place: str) -> None:
    """It draws the order from the global random state at the beginning of each epoch."""
    (prepare, args), at = SAMPLERS[sampler], PLACES[place]
    orders: list[list[int]] = []

    def watch(trainer: Trainer) -> Trainer:
        orders.append([])
        trainer.data_collator = collate
        return prepare(trainer)

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        orders[-1] += [int((sample["input_ids"] * torch.arange(8)).sum()) for sample in samples]
        batch: dict[str, torch.Tensor] = default_data_collator(samples)
        return batch

    whole, resumed = resume(tmp_path, watch, at, **args)
    assert orders[0][-16:] == orders[2][-16:]
    assert_equal(resumed.model.state_dict(), whole.model.state_dict())


def test_early_stopping_ends_at_the_same_step(tmp_path: Path) -> None:
    def prepare(trainer: Trainer) -> Trainer:
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=AT))
        return ray_ckpt.huggingface.prepare_trainer(trainer)

    ends: dict[str, Any] = {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # which falls
    whole, resumed = resume(tmp_path, prepare, eval_strategy="steps", eval_steps=1, max_steps=99, **ends)
    assert resumed.state.global_step == whole.state.global_step < TOTAL


class Number(float):
    """A logged number that may be read, and not copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("a save blocks for each entry of the log")


def test_a_save_writes_each_entry_of_the_log_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect()
    trainer = ray_ckpt.huggingface.prepare_trainer(build(tmp_path))
    item, state = trainer._ray_ckpt._state, trainer.state
    written: list[Any] = []
    dumps = json.dumps

    def note(value: Any, **args: Any) -> str:
        written.append(value)
        return dumps(value, **args)

    monkeypatch.setattr(json, "dumps", note)
    logged: list[dict[str, Any]] = []
    for entry in [{"loss": Number(0.5), "step": 1}, {"loss": float("nan"), "step": 2}]:
        state.log_history.append(entry)
        logged.append(entry)
        for _ in range(2):
            text = item.tree()["state"]
        assert dumps(json.loads(text)["log_history"]) == dumps(logged)
        assert (
            json.loads(text)["global_step"] == 0
            and "TrainerControl" in json.loads(text)["stateful_callbacks"]
        )
    assert [each for each in written if each in logged] == logged
    state.log_history = [{"step": 3}]  # as of another training
    assert json.loads(item.tree()["state"])["log_history"] == [{"step": 3}]
    state.log_history = [{"step": 4}, {"step": 5}]
    assert json.loads(item.tree()["state"])["log_history"] == [{"step": 4}, {"step": 5}]
    assert dataclasses.asdict(state).keys() == json.loads(item.tree()["state"]).keys()
