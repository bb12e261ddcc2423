"""Saved on one layout, restored on another.

After a restore, a rank must hold the same as if torch's own wrappers had sharded a model with the saved
values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ray_ckpt.format.manifest import check_coverage
from tests.capture.layouts import LAYOUTS, Layout, locals_of, make_state, unpadded
from tests.capture.ranks import Files, items_of, on_ranks

WEIGHTS, AVERAGES, SQUARES, OTHER = 1, 2, 3, 4  # seeds of the models that the values are taken from
STEP, LR = 7.0, 0.25


def states(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[tuple[torch.Tensor, Any]]:
    for param in model.parameters():
        if state := optimizer.state.get(param):
            yield param, state


def make(layout: Layout, *, has_state: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after a step; a restore overwrites both."""
    model = layout.build(OTHER)
    optimizer = layout.optimizer(model)
    if has_state:
        make_state(optimizer)
    return model, optimizer


def set_values(layout: Layout, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Known values everywhere."""
    twins = {key: layout.build(seed) for key, seed in (("exp_avg", AVERAGES), ("exp_avg_sq", SQUARES))}
    with torch.no_grad():
        for live, known in zip(locals_of(model), locals_of(layout.build(WEIGHTS)), strict=True):
            live.copy_(known)
        for key, twin in twins.items():
            known_of = dict(zip(map(id, model.parameters()), locals_of(twin), strict=True))
            for param, state in states(optimizer, model):
                unpadded(state[key], param).copy_(known_of[id(param)])
                state["step"].fill_(STEP)
    optimizer.param_groups[0]["lr"] = LR


def check_values(layout: Layout, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Known values everywhere, bit for bit."""
    twins = {key: layout.build(seed) for key, seed in (("exp_avg", AVERAGES), ("exp_avg_sq", SQUARES))}
    for live, known in zip(locals_of(model), locals_of(layout.build(WEIGHTS)), strict=True):
        assert torch.equal(live, known)
    with_elements = {
        id(param) for param, local in zip(model.parameters(), locals_of(model), strict=True) if local.numel()
    }
    assert with_elements <= {id(param) for param, _ in states(optimizer, model)}
    for key, twin in twins.items():
        known_of = dict(zip(map(id, model.parameters()), locals_of(twin), strict=True))
        for param, state in states(optimizer, model):
            assert torch.equal(unpadded(state[key], param), known_of[id(param)]), key
            assert state["step"].item() == STEP
    assert optimizer.param_groups[0]["lr"] == LR


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checkpoint of a layout; made once."""
    made: dict[str, Files] = {}

    def of(name: str) -> Files:
        if name not in made:
            layout = LAYOUTS[name]
            files = Files(tmp_path_factory.mktemp("saved"), layout.world_size)

            def save(rank: int) -> None:
                model, optimizer = make(layout)
                set_values(layout, model, optimizer)
                files.save(items_of(model=model, optimizer=optimizer), rank)

            on_ranks(layout.world_size, save)
            check_coverage(files.rows)
            made[name] = files
        return made[name]

    return of


def pairs() -> Iterator[Any]:
    """Yield every layout once as the saved and once as the restored one; the other pairs are slow."""
    names = list(LAYOUTS)
    for i, there in enumerate(names):
        for j, here in enumerate(names):
            is_quick = (j - i) % len(names) == 5 and i % 4 == 0
            yield pytest.param(there, here, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated:FutureWarning")
@pytest.mark.parametrize(("there", "here"), list(pairs()))
def test_every_layout_restores_every_other(saved: Any, there: str, here: str) -> None:
    """Half of the pairs restore into existing optimizer state, and half create it."""
    files, layout = saved(there), LAYOUTS[here]

    def restore(rank: int) -> None:
        model, optimizer = make(layout, has_state=len(there) % 2 == 0)
        files.load(items_of(model=model, optimizer=optimizer), rank, layout.world_size)
        check_values(layout, model, optimizer)

    on_ranks(layout.world_size, restore)
