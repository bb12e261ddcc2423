"""A prepared trainer beside what its user and Ray change in it: it still resumes exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train.huggingface.transformers import prepare_trainer as prepare_for_ray
from transformers import EarlyStoppingCallback, Trainer, default_data_collator

import ray_ckpt
from ray_ckpt.trainer.connection import Connection, set_connection
from tests.capture.local import LocalLink
from tests.interop.test_trainers import AT, TOTAL, Halt, assert_equal, build, connect

Prepare = Callable[[Trainer], Trainer]
ORDERS: dict[str, Prepare] = {
    "ray first": lambda trainer: ray_ckpt.huggingface.prepare_trainer(prepare_for_ray(trainer)),
    "ray last": lambda trainer: prepare_for_ray(ray_ckpt.huggingface.prepare_trainer(trainer)),
}


@pytest.fixture(autouse=True)
def disconnect() -> Iterator[None]:
    yield
    set_connection(Connection())


def resume(folder: Path, prepare: Prepare, **args: Any) -> tuple[Trainer, Trainer]:
    """Train to the end, and again in two pieces; return both trainers."""

    def train(link: LocalLink, until: int) -> Trainer:
        set_connection(Connection(link=link))
        trainer = build(folder / "hf", seed=link.given.session_key[1], **args)
        trainer.add_callback(Halt(until))
        trainer = prepare(trainer)
        trainer.train()
        trainer._ray_ckpt.checkpointer.close()
        return trainer

    whole = train(connect(), TOTAL)
    first = connect()
    train(first, AT)
    second = first.resumed(folder, AT)
    resumed = train(second, TOTAL)
    assert (list(first.files), list(second.files)) == ([AT], [whole.state.global_step])
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


def test_early_stopping_ends_at_the_same_step(tmp_path: Path) -> None:
    def prepare(trainer: Trainer) -> Trainer:
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=AT))
        return ray_ckpt.huggingface.prepare_trainer(trainer)

    ends = {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # which falls
    whole, resumed = resume(tmp_path, prepare, eval_strategy="steps", eval_steps=1, max_steps=99, **ends)
    assert resumed.state.global_step == whole.state.global_step < TOTAL
