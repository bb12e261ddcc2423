"""Random state goes through the state file and continues where it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ray_ckpt.capture.rng import RngItem
from ray_ckpt.capture.walk import resolve_leaves, walk
from ray_ckpt.format.tree import decode_tree, encode_tree


@pytest.fixture(autouse=True)
def own_random_state() -> Iterator[None]:
    before = RngItem().tree()
    yield
    RngItem().load(before)


def draw() -> tuple[Any, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.randn(1).tolist(),
        torch.randn(3).tolist(),
        torch.nn.functional.dropout(torch.ones(20), 0.5).tolist(),
    )


@pytest.mark.parametrize("drawn_before", [0, 1, 7])
def test_all_generators_continue(drawn_before: int) -> None:
    for _ in range(drawn_before):  # an odd number of gauss draws leaves a cached one
        draw()
        random.gauss(0, 1)
        np.random.randn()
    walked = walk({"rng": RngItem()}, rank=3, world_size=4)
    data = encode_tree(dict(walked.trees))
    tensors = {live.slice.key: live.tensor.clone() for live in walked.slices}
    expected = [draw() for _ in range(3)]
    assert "rank3.rng.torch_cpu" in tensors and tensors["rank3.rng.torch_cpu"].dtype == torch.uint8

    RngItem().load(resolve_leaves(decode_tree(data)["rng"], tensors))
    assert [draw() for _ in range(3)] == expected


def test_a_tree_is_a_copy_of_the_state() -> None:
    tree = RngItem().tree()
    first = draw()
    RngItem().load(tree)
    assert draw() == first
    RngItem().load(tree)
    assert draw() == first


def test_device_state_of_another_machine_is_left_alone() -> None:
    tree = RngItem().tree()
    tree["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)
    RngItem().load(tree)


def test_it_belongs_to_its_rank() -> None:
    assert RngItem.per_rank and not RngItem().is_shared(("torch_cpu",))
