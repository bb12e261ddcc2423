"""Cases of FullyShardedDataParallel only; test_shapes.py has the moves between layouts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ray_ckpt.capture.overlap_guard import background_slices, guarded_storages
from ray_ckpt.capture.walk import walk
from ray_ckpt.errors import MismatchError, UnsupportedItem, UnsupportedLeaf
from ray_ckpt.format.manifest import check_coverage
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink
from tests.capture.ranks import Files, items_of, on_ranks
from tests.support.examples import every_few

CPU = torch.device("cpu")


class Net(nn.Module):
    """A buffer, extra state and a dimension that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 7), nn.Linear(7, 1)
        self.norm = nn.BatchNorm1d(7)
        self.seen = torch.zeros(0, dtype=torch.uint8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return y

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def build(kind: str) -> nn.Module:
    net = Net()
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape))
    if kind == "fsdp2":
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    if kind in ("orig", "flat"):
        return FSDP(
            net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=kind == "orig", device_id=CPU
        )
    return net


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(torch.linspace(0, 1 + step, 12).view(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


WORLD = {"whole": 1, "fsdp2": 2, "orig": 2, "flat": 2}


@pytest.mark.parametrize(("there", "here"), every_few(itertools.product(WORLD, WORLD), 3))
def test_training_goes_on_as_before(tmp_path: Path, there: str, here: str) -> None:
    """All ranks see the same batch, so every layout computes the same, but for rounding."""
    files = Files(tmp_path, WORLD[there])

    def before(rank: int) -> list[float]:
        model = build(there)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer, 2)
        files.save(items_of(model=model, optimizer=optimizer), rank)
        return train(model, optimizer, 3)

    def after(rank: int) -> list[float]:
        model = build(here)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.9)
        files.load(items_of(model=model, optimizer=optimizer), rank, WORLD[here])
        return train(model, optimizer, 3)

    expected = on_ranks(WORLD[there], before)
    check_coverage(files.rows)
    for losses in on_ranks(WORLD[here], after):
        assert losses == pytest.approx(expected[0], rel=1e-4)


def test_a_rank_that_does_not_save_holds_up_no_other() -> None:
    """Nothing is gathered: a save that one rank skips would meet the collectives of its next step."""

    def look(rank: int) -> int:
        model = build("orig")
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, 1)
        return (
            len(walk(items_of(model=model, optimizer=optimizer), rank=rank, world_size=2).slices)
            if rank
            else 0
        )

    assert on_ranks(2, look)[1] > 0


@pytest.mark.parametrize("kind", ["orig", "flat"])
def test_nothing_is_copied_and_parameters_may_be_captured_in_the_background(kind: str) -> None:
    def look(rank: int) -> None:
        model = build(kind)
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, 1)
        items = items_of(model=model, optimizer=optimizer)
        walked = walk(items, rank=rank, world_size=2)
        later = background_slices(walked.slices, guarded_storages([optimizer]))
        trained = {s.slice.key for s in walked.slices if s.slice.key.endswith(("weight", "exp_avg"))}
        assert trained and trained <= later
        train(model, optimizer, 1)
        assert walk(items, rank=rank, world_size=2, before=walked).slices is walked.slices

    on_ranks(2, look)


@pytest.mark.parametrize("kind", ["orig", "flat"])
def test_state_that_has_moved_is_seen(kind: str) -> None:
    """optimizer.load_state_dict makes new tensors, as this test does."""

    def look(rank: int) -> None:
        model = build(kind)
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, 1)
        items = items_of(model=model, optimizer=optimizer)
        walked = walk(items, rank=rank, world_size=2)
        for state in optimizer.state.values():
            state["exp_avg"] = torch.full_like(state["exp_avg"], 5.0)
        moved = [
            live
            for live in walk(items, rank=rank, world_size=2, before=walked).slices
            if live.slice.key.endswith("exp_avg")
        ]
        assert moved and all((live.tensor == 5.0).all() for live in moved)

    on_ranks(2, look)


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["orig", "flat"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"])
def test_changes_of_parameters_are_counted(strategy: str, kind: str) -> None:
    """FSDP1 makes its shards through `.data`, so they have version counters that nothing changes."""

    def look(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2)) if strategy == "HYBRID_SHARD" else None
        model = FSDP(
            Net(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=kind == "orig",
            sharding_strategy=ShardingStrategy[strategy],
            device_mesh=mesh,
            device_id=CPU,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, 1)
        items = items_of(model=model)
        walked = walk(items, rank=rank, world_size=4)
        slices = [live for live in walked.slices if live.slice.key.endswith((".weight", ".bias"))]
        assert slices
        before = [live.versions for live in slices]

        def changed() -> set[bool]:
            nonlocal before
            earlier, before = before, [live.versions for live in slices]
            assert walk(items, rank=rank, world_size=4, before=walked).slices is walked.slices
            return {now != then for now, then in zip(before, earlier, strict=True)}

        model(torch.ones(3, 4)).sum().backward()
        assert changed() == {False}
        optimizer.step()
        assert changed() == {True}
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2.0)
        assert changed() == {True}
        with FSDP.summon_full_params(model), torch.no_grad():
            for param in model.parameters():
                param.mul_(2.0)
        assert changed() == {True}

    on_ranks(4, look)


def test_names_are_those_without_wrappers_and_no_flat_ones() -> None:
    def look(rank: int) -> tuple[set[str], set[str]]:
        model = build("flat")
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, 1)
        trees = walk(items_of(model=model, optimizer=optimizer), rank=rank, world_size=2).trees
        return set(trees["model"]), set(trees["optimizer"]["state"])

    names, optimized = on_ranks(2, look)[0]
    assert names == set(Net().state_dict())
    assert optimized == {name for name, _ in Net().named_parameters()}


def test_extra_state_of_another_size_and_buffers_come_back(tmp_path: Path) -> None:
    files = Files(tmp_path, 2)

    def save(rank: int) -> None:
        model: Any = build("flat")
        model.module.seen = torch.arange(5, dtype=torch.uint8)
        model.module.norm.running_mean.fill_(rank + 1)
        files.save(items_of(model=model), rank)

    def restore(rank: int) -> None:
        model: Any = build("orig")
        files.load(items_of(model=model), rank, 2)
        assert model.module.seen.tolist() == [0, 1, 2, 3, 4]
        assert model.module.norm.running_mean.tolist() == [rank + 1] * 7

    on_ranks(2, save)
    on_ranks(2, restore)


def test_a_flat_parameter_needs_the_state_of_all_that_is_in_it(tmp_path: Path) -> None:
    files = Files(tmp_path, 1)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    del optimizer.state[model.first.bias]
    files.save(items_of(model=model, optimizer=optimizer), 0)

    def restore(rank: int) -> None:
        here = build("flat")
        items = items_of(model=here, optimizer=torch.optim.Adam(here.parameters()))
        with pytest.raises(MismatchError, match=r"optimizer\.state\.first\.bias: not in the checkpoint"):
            files.load(items, rank, 2)

    on_ranks(2, restore)


def test_parameters_that_fsdp_ignores_stay_whole(tmp_path: Path) -> None:
    def wrap() -> nn.Module:
        net = Net()
        return FSDP(net, ignored_modules=[net.last], use_orig_params=True, device_id=CPU)

    def look(rank: int) -> dict[str, tuple[int, ...]]:
        walked = walk(items_of(model=wrap()), rank=rank, world_size=2)
        return {s.slice.key: s.ranks for s in walked.slices}

    for found in on_ranks(2, look):
        assert found["model.last.weight"] == (0, 1)


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated:FutureWarning")
def test_what_is_whole_on_every_rank_is_saved_by_one(tmp_path: Path) -> None:
    files = Files(tmp_path, 2)

    def save(rank: int) -> None:
        model = FSDP(nn.Linear(4, 7), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=CPU)
        optimizer = torch.optim.Adam(model.parameters())
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        files.save(items_of(model=model, optimizer=optimizer), rank)

    on_ranks(2, save)
    keys = [row.slice.key for row in files.rows if row.slice]
    assert len(keys) == len(set(keys)) == 2 * (1 + 3)


def test_unclear_forms_of_fsdp1_are_refused() -> None:
    class Rows(torch.optim.SGD):
        """State that follows from how the parameter was cut."""

        def step(self, closure: Any = None) -> Any:
            for param in self.param_groups[0]["params"]:
                self.state[param]["rows"] = torch.zeros(param.numel() + 1)

    def refuse(rank: int) -> None:
        model = build("orig")
        optimizer = Rows(model.parameters(), lr=1.0)
        optimizer.step()
        with pytest.raises(UnsupportedLeaf, match=r"optimizer\.state\.\S+\.rows has shape"):
            walk(items_of(model=model, optimizer=optimizer), rank=rank, world_size=2)
        net = Net()
        net.first.weight = nn.Parameter(net.first.weight.detach().t().contiguous().t())
        with pytest.raises(UnsupportedItem, match="not contiguous"):
            items_of(model=FSDP(net, use_orig_params=True, device_id=CPU))
        with pytest.raises(UnsupportedItem, match="belongs to no registered item"):
            items_of(model=model, optimizer=torch.optim.SGD(Net().parameters(), lr=1.0))

    on_ranks(2, refuse)


def test_a_save_goes_on_beside_training(tmp_path: Path) -> None:
    """Through the Checkpointer and its arena: several slices of a parameter in one shard."""

    def save(rank: int) -> dict[str, torch.Tensor]:
        model = build("orig")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        link = LocalLink(rank=rank, world_size=2)
        ckpt = Checkpointer(link=link, model=model, optimizer=optimizer)
        ckpt.restore()
        train(model, optimizer, 1)
        items = items_of(model=model, optimizer=optimizer)
        owned = walk(items, rank=rank, world_size=2).owned(rank)
        right = {live.slice_key: live.tensor.clone() for live in owned}
        assert ckpt.save(1)
        train(model, optimizer, 1)
        ckpt.flush()
        layout = link.sealed[0].layout
        assert layout is not None
        for placed in (placed for placed in layout.slices if "rng" not in placed.slice.key):
            part = link.files[1][placed.byte_offset : placed.byte_offset + placed.nbytes]
            tensor = right[placed.slice.key, placed.slice.offset]
            assert part == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), placed.slice
        ckpt.close()
        return link.tensors(1)

    found = on_ranks(2, save)
    assert any("@" in name for tensors in found for name in tensors)
