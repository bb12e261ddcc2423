"""Still slices: their own shard, no copy where a buffer has them, and no stale byte whatever changes them."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import ray_ckpt
import ray_ckpt.capture.still as still_module
from ray_ckpt.actors.agent.arena import ArenaMemory
from ray_ckpt.capture import snapshot as snapshot_module
from ray_ckpt.capture.still import MAX_CHANGES, StillSlices, Taken
from ray_ckpt.capture.torch_private import copy_all
from ray_ckpt.capture.walk import walk
from ray_ckpt.config import RunOptions
from ray_ckpt.core.node_messages import SaveOutcome
from ray_ckpt.errors import ConfigError, FormatError, Unavailable
from ray_ckpt.format.shard import RankLayout
from ray_ckpt.trainer.link import SealedShard
from ray_ckpt.types import GroupPart
from tests.capture.local import LocalLink
from tests.capture.ranks import items_of
from tests.support.examples import every_few


class Adapted(nn.Module):
    """A frozen base and an adapter, as LoRA makes them; `seen` is a buffer that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Loop:
    """A loop that trains the adapter and compares each checkpoint with the state that it was taken of."""

    def __init__(self, link: LocalLink, **more: Any) -> None:
        torch.manual_seed(1)
        self.link, self.model = link, Adapted()
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.more = more
        self.ckpt = ray_ckpt.Checkpointer(link=link, model=self.model, optimizer=self.optimizer, **more)
        self.ckpt.restore()
        self.expected: dict[int, dict[str, torch.Tensor]] = {}

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 64)).square().mean().backward()
        self.optimizer.step()
        assert self.ckpt.save(step)
        walked = walk(self.ckpt._require_items().items, rank=0, world_size=1)
        self.expected[step] = {live.slice.key: live.tensor.clone() for live in walked.slices}
        self.ckpt.flush()

    def check(self) -> None:
        for step, expected in self.expected.items():
            found = self.link.tensors(step)
            assert found.keys() == expected.keys()
            wrong = [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)]
            assert not wrong, f"step {step}: {wrong} are of another step"


@pytest.fixture(autouse=True)
def _the_same_looks_in_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(still_module, "_LOOKS", itertools.count(500))


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(still_module, "MIN_STILL_BYTES", 1)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copying call."""
    sizes: list[int] = []
    real = copy_all

    def counted(views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        sizes.append(sum(view.nbytes for view in views))
        real(views, sources)

    monkeypatch.setattr(snapshot_module, "copy_all", counted)
    return sizes


def loop(
    memory: str = "double",
    link: type[LocalLink] = LocalLink,
    *,
    static: tuple[str, ...] = (),
    verify: bool = False,
    **more: Any,
) -> Loop:
    options = RunOptions(
        memory=memory, max_block_s=30.0, static_items=static, verify_captures=verify, overlap=False
    )
    return Loop(link(options), **more)


BASE_BYTES = (64 * 64 + 64) * 4


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize(("memory", "buffers"), [("single", 1), ("double", 2)])
def test_a_frozen_base_is_copied_once_into_each_buffer(copied: list[int], memory: str, buffers: int) -> None:
    training = loop(memory)
    by_step = []
    for step in range(1, 6):
        copied.clear()
        training.step(step)
        by_step.append(sum(copied))
    training.check()
    assert [size > BASE_BYTES for size in by_step] == [step <= buffers for step in range(1, 6)]
    still = training.link.still_files
    assert sorted(still) == [1, 2, 3, 4, 5] and len(set(still.values())) == 1, "equal bytes at each step"
    training.ckpt.close()


def test_a_small_base_and_a_model_without_one_are_saved_in_one_shard() -> None:
    training = loop()
    training.step(1)
    assert not training.link.still_files
    training.ckpt.close()


@pytest.mark.usefixtures("any_size")
def test_equal_slices_are_laid_out_once() -> None:
    still = StillSlices([], ("table",), 1)

    def layout(**items: Any) -> RankLayout:
        return still.layout(walk(items_of(**items), rank=0, world_size=1).slices)

    first = layout(table=torch.zeros(4), state=torch.zeros(3))
    assert layout(state=torch.ones(3), table=torch.ones(4)) is first
    assert len(first.shards) == 2
    assert layout(table=torch.zeros(4), state=torch.zeros(5)) != first
    assert layout(table=torch.zeros(4), state=torch.zeros(3)) == first


def test_a_slice_that_stands_twice_is_refused_after_a_layout_too() -> None:
    still, (live,) = StillSlices([], (), 1), walk(items_of(a=torch.zeros(3)), rank=0, world_size=1).slices
    still.layout([live])
    with pytest.raises(FormatError, match="twice"):
        still.layout([live, live])


@pytest.mark.usefixtures("any_size")
def test_a_stream_has_one_shard() -> None:
    training = loop("stream")
    training.step(1)
    training.step(2)
    training.check()
    assert not training.link.still_files
    training.ckpt.close()


def in_place(base: nn.Linear, step: int) -> None:
    base.weight[0, 0] += step


def through_data(base: nn.Linear, step: int) -> None:
    base.weight.data.mul_(0.5)


def other_memory(base: nn.Linear, step: int) -> None:
    base.weight.data = base.weight.data + step


def another_parameter(base: nn.Linear, step: int) -> None:
    base.weight = nn.Parameter(torch.full_like(base.weight, step), requires_grad=False)


def restored(base: nn.Linear, step: int) -> None:
    base.load_state_dict({name: tensor + step for name, tensor in base.state_dict().items()})


CHANGES = [in_place, through_data, other_memory, another_parameter, restored]


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("memory", ["single", "double"])
def test_no_checkpoint_has_a_base_of_another_step(
    memory: str, change: Callable[[nn.Linear, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever changes a frozen base is found, is saved, and is said once."""
    training = loop(memory)
    for step in range(1, 9):
        if step in (4, 7):
            with torch.no_grad():
                change(training.model.base, step)
        training.step(step)
    training.check()
    assert caplog.text.count("was expected to stay the same") == 1
    training.ckpt.close()


FULL = (4, 5)  # steps


class FullDisk(LocalLink):
    """An agent that releases the captures of two saves without a look at them."""

    def seal(self, shard: SealedShard) -> Future[bool]:
        if shard.attempt.step not in FULL:
            return LocalLink.seal(self, shard)
        assert shard.layout is None, "that of the last capture in the buffer"
        self._outcome(shard.attempt).set_result(
            SaveOutcome(level=None, error=Unavailable("the disk is full"))
        )
        released: Future[bool] = Future()
        released.set_result(False)
        return released


def flip(buffer: ArenaMemory) -> None:
    """Flip a bit of the last still slice, as faulty memory or a write to a wrong address does."""
    assert buffer.layout is not None
    buffer.data(buffer.layout, 1)[-5] ^= 4


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("memory", ["single", "double"])
def test_bytes_that_change_in_the_arena_are_in_no_checkpoint_and_cost_one_save_of_each_buffer(
    memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The rank finds its tensors unchanged and leaves them out of its copy; the agent finds other bytes."""
    training = loop(memory)
    for step in range(1, 6):
        training.step(step)
    assert training.link.arena is not None
    buffers = training.link.arena.buffers
    for buffer in buffers:
        flip(buffer)
    for step in range(6, 12):
        training.step(step)
    refused = list(range(6, 6 + len(buffers)))
    assert sorted(training.link.skipped) == refused
    assert caplog.text.count("was not saved: copied at step") == len(refused)
    for step in refused:
        del training.expected[step]
        assert step not in training.link.files
    training.check()
    assert len(set(training.link.still_files.values())) == 1 and len(training.link.grants) == 1
    training.ckpt.close()


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("memory", ["single", "double"])
def test_a_capture_that_was_not_stored_is_no_measure_for_the_next_one(memory: str) -> None:
    """Its slices had other bytes and were copied, and the agent has only seen those before."""
    training = loop(memory, FullDisk)
    for step in range(1, 4):
        training.step(step)
    moved(training.model.base)
    training.model.base.weight.data[0, 1] += 1  # one element, which a look may miss
    for step in range(4, 9):
        training.step(step)
    for step in FULL:
        del training.expected[step]
    training.check()
    assert sorted(training.link.files) == [1, 2, 3, 6, 7, 8] and not training.link.skipped
    training.ckpt.close()


@pytest.mark.usefixtures("any_size")
def test_a_shard_names_the_capture_that_copied_its_still_slices() -> None:
    training = loop("double")
    for step in range(1, 10):
        if step == 6:
            training.model.base.weight.data = training.model.base.weight.data.clone()
        training.step(step)
    copied = [shard.still_from.step if shard.still_from else 0 for shard in training.link.sealed]
    assert copied == [1, 2, 1, 2, 1, 6, 7, 6, 7]
    training.ckpt.close()


def moved(base: nn.Linear) -> None:
    """As a trainer that offloads a reference model and brings it back."""
    for param in base.parameters():
        param.data = param.data.clone()


def assigned(base: nn.Linear) -> None:
    base.load_state_dict({k: v.clone() for k, v in base.state_dict().items()}, assign=True)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("move", [moved, assigned])
@pytest.mark.parametrize("memory", ["single", "double"])
def test_a_base_that_only_moves_to_other_memory_stays_still(
    memory: str, move: Callable[[nn.Linear], None], caplog: pytest.LogCaptureFixture
) -> None:
    training = loop(memory)
    for step in range(1, MAX_CHANGES + 5):
        training.step(step)
        move(training.model.base)
    training.model.base.weight.data[0, 1] += 1  # one element, which a look may miss
    training.step(99)
    training.check()
    assert "was expected to stay the same" not in caplog.text
    *same, last = training.link.still_files.values()
    assert len(same) == MAX_CHANGES + 4 and len(set(same)) == 1 and last not in same
    training.ckpt.close()


@pytest.mark.usefixtures("any_size")
def test_a_static_item_whose_tensors_are_new_at_each_save_stays_still(
    caplog: pytest.LogCaptureFixture,
) -> None:
    extra = {"table": torch.arange(1000.0)}
    training = loop("single", static=("extra",), extra=extra)
    for step in range(1, MAX_CHANGES + 4):
        extra["table"] = extra["table"].clone()
        training.step(step)
    assert len(set(training.link.still_files.values())) == 1
    assert "was expected to stay the same" not in caplog.text
    extra["table"] = extra["table"] + 1
    training.step(99)
    training.check()
    assert caplog.text.count("extra.table was expected to stay the same") == 1
    training.ckpt.close()


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("is_same", [True, False])
def test_a_static_item_whose_tensor_becomes_an_inference_tensor_is_saved(is_same: bool) -> None:
    """Such a tensor has no version: it belongs to what is copied by each save."""
    extra = {"table": torch.arange(1000.0)}
    training = loop("single", static=("extra",), extra=extra)
    for step in range(1, 7):
        if step == 3:
            with torch.inference_mode():
                extra["table"] = extra["table"] + (not is_same)
        training.step(step)
    training.check()
    assert sorted(training.expected) == sorted(training.link.files) == [1, 2, 3, 4, 5, 6]
    training.ckpt.close()


@pytest.mark.usefixtures("any_size")
def test_an_exception_before_the_capture_costs_no_later_save(monkeypatch: pytest.MonkeyPatch) -> None:
    training = loop("single")
    with monkeypatch.context() as patch:
        patch.setattr(Taken, "of", Mock(side_effect=RuntimeError("no version")))
        assert not training.ckpt.save(1)
    training.step(2)
    training.step(3)
    training.check()
    assert sorted(training.link.files) == [2, 3]
    training.ckpt.close()


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("seed", every_few(range(10)))
def test_changes_of_any_tensor_at_any_step_are_saved(seed: int) -> None:
    chance = random.Random(seed)
    extra = {name: torch.zeros(500) for name in "abcdef"}
    training = loop(chance.choice(["single", "double"]), static=("extra",), extra=extra)
    for step in range(1, 10):
        if chance.random() < 0.4:
            extra[chance.choice("abcdef")].add_(1)
        training.step(step)
    training.check()
    training.ckpt.close()


@pytest.mark.usefixtures("any_size")
def test_after_several_changes_everything_moves() -> None:
    extra = {str(k): torch.zeros(100) for k in range(MAX_CHANGES + 2)}
    training = loop("single", static=("extra",), extra=extra)
    for step in range(1, MAX_CHANGES + 3):
        training.step(step)
        extra[str(step - 1)].add_(1)
    training.step(99)
    training.check()
    assert 99 not in training.link.still_files, "not even the base is still"
    training.ckpt.close()


@pytest.mark.usefixtures("any_size")
def test_verified_captures_copy_everything_and_find_what_no_counter_shows() -> None:
    training = loop("single", verify=True)
    for step in range(1, 4):
        training.model.base.weight.data[0, 1] += 1  # one element, which a look may miss
        training.step(step)
    training.check()
    training.ckpt.close()


def looks_equal(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    draws = still_module.new_draws()
    return torch.equal(still_module.look(tensor, draws), still_module.look(view, draws))


@pytest.mark.parametrize("shape", [(128, 96), (64, 64), (512, 784), (3, 64, 5), (96,)])
@pytest.mark.parametrize("part", ["first", "second", "even", "odd"])
@pytest.mark.parametrize("dim", [0, -1])
def test_a_look_finds_a_change_of_a_half_along_any_dimension(
    shape: tuple[int, ...], part: str, dim: int
) -> None:
    tensor = torch.zeros(shape)
    half = (shape[dim] + 1) // 2
    places = {
        "first": slice(None, half),
        "second": slice(shape[dim] - half, None),
        "even": slice(None, None, 2),
        "odd": slice(1, None, 2),
    }
    other = tensor.clone()
    other.movedim(dim, 0)[places[part]] = 1
    assert not looks_equal(tensor, other)
    assert looks_equal(tensor, tensor.clone())


def test_looks_find_a_small_change_that_stays() -> None:
    tensor = torch.zeros(1000)
    tensor[123:133] = 1
    assert not all(looks_equal(tensor, torch.zeros(1000)) for _ in range(100))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]
)
def test_a_look_compares_bits(dtype: torch.dtype) -> None:
    tensor = torch.arange(100).to(dtype)
    assert looks_equal(tensor, tensor.clone())
    assert not looks_equal(tensor, torch.zeros(100, dtype=dtype))
    assert looks_equal(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not looks_equal(torch.tensor(0.0), torch.tensor(-0.0))
    assert looks_equal(torch.tensor(1), torch.tensor(1)), "a scalar"
    assert looks_equal(torch.zeros(0), torch.zeros(0)), "no element"


@pytest.mark.usefixtures("any_size")
def test_a_change_of_all_columns_but_the_first_is_saved() -> None:
    """As an average of weights behind an input that is always 0; every look was at the first column once."""
    training = loop("single")
    for step in range(1, 6):
        training.step(step)
        training.model.base.weight.data[:, 1:] += 1
    training.check()
    training.ckpt.close()


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("memory", ["single", "double"])
def test_memory_that_a_frozen_base_has_left_is_free_after_the_next_save(memory: str) -> None:
    training = loop(memory)
    weight = training.model.base.weight
    used: list[weakref.ref[Any]] = []
    for step in range(1, 6):
        memory_of_step = weight.detach().numpy().copy()
        used.append(weakref.ref(memory_of_step))
        weight.data = torch.from_numpy(memory_of_step)
        del memory_of_step
        training.step(step)
    gc.collect()
    assert [at for at, found in enumerate(used) if found() is not None] == [4]
    assert len(set(training.link.still_files.values())) == 1
    training.ckpt.close()


@pytest.mark.usefixtures("any_size")
def test_an_optimizer_that_is_given_the_base_makes_it_move() -> None:
    training = loop("single")
    training.step(1)
    training.model.base.requires_grad_(True)
    training.optimizer.add_param_group({"params": list(training.model.base.parameters())})
    training.step(2)
    training.step(3)
    training.check()
    assert sorted(training.link.still_files) == [1]
    training.ckpt.close()


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("memory", ["single", "double"])
@pytest.mark.parametrize("static", ["model", "optimizer"])
def test_rows_that_an_optimizer_changes_in_a_static_item_are_those_of_the_step(
    fused: bool, memory: str, static: str
) -> None:
    """A fused step leaves the version of a tensor as it is, and a look at 64 elements misses a few rows."""
    model = nn.Embedding(5000, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=fused)
    options = RunOptions(memory=memory, max_block_s=30.0, static_items=(static,), overlap=False)
    link = LocalLink(options)
    ckpt = ray_ckpt.Checkpointer(link=link, model=model, optimizer=optimizer)
    ckpt.restore()
    for step in range(1, 9):
        if step not in (4, 5, 6):
            optimizer.zero_grad()
            model(torch.tensor([step, 7])).square().sum().backward()
            optimizer.step()
        assert ckpt.save(step)
        ckpt.flush()
        found, state = link.tensors(step), optimizer.state[model.weight]
        assert torch.equal(found["model.weight"], model.weight), step
        assert torch.equal(found["optimizer.state.weight.exp_avg"], state["exp_avg"]), step
    if fused:  # else its versions have shown that it moves
        assert len({link.still_files[step] for step in (4, 5, 6)}) == 1, "shared while no step has changed it"
    ckpt.close()


@pytest.mark.usefixtures("any_size")
def test_a_restore_reads_both_shards(tmp_path: Path) -> None:
    first = loop("single")
    first.step(1)
    first.step(2)
    first.ckpt.close()
    second = Loop(first.link.resumed(tmp_path, 2))
    for one, other in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    second.step(3)
    second.check()
    second.ckpt.close()


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("rank", [0, 1])
def test_tensors_that_each_rank_has_for_itself_stay_in_its_first_shard(rank: int) -> None:
    """A reader of format 1 takes a rank's own copy from `shard-<rank>`, and any rank's from other files."""
    model = Adapted()
    optimizer = torch.optim.AdamW(model.up.parameters())
    items = items_of(model=model, optimizer=optimizer, extra={"table": torch.zeros(10)})
    walked = walk(items, rank=rank, world_size=2)
    still = StillSlices([optimizer], ("model", "extra"), world_size=2)
    owned = walked.owned(rank)
    layout = still.layout(owned)
    in_second = {placed.slice.key for shard in layout.shards[1:] for placed in shard.slices}
    shared = {live.slice.key for live in owned if len(live.ranks) == 2}
    assert in_second == shared and "model.seen" not in in_second and "extra.table" not in in_second


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (1, 2), (0, 1)])
def test_a_static_item_of_which_nothing_can_be_shared_is_named_once(
    caplog: pytest.LogCaptureFixture, rank: int, world_size: int
) -> None:
    options = RunOptions(static_items=("model", "extra"))
    link = LocalLink(rank=rank, world_size=world_size, options=options)
    with caplog.at_level("WARNING"):
        ray_ckpt.Checkpointer(link=link, model=Adapted(), extra={"table": torch.zeros(4)}).restore()
    named = [record.getMessage() for record in caplog.records if "can be shared" in record.getMessage()]
    if (rank, world_size) == (0, 2):
        (warning,) = named
        assert "nothing of extra can" in warning
    else:
        assert not named


def test_a_static_item_that_is_not_registered_is_refused() -> None:
    with pytest.raises(ConfigError, match="static_items has 'modle'") as caught:
        loop(static=("modle",))
    assert "model" in caught.value.hint


PARTS = (GroupPart(name="actor", world_size=2), GroupPart(name="critic", world_size=2))


def of_part(rank: int, static: tuple[str, ...]) -> LocalLink:
    link = LocalLink(rank=rank, world_size=4, options=RunOptions(static_items=static, remote_items=("ref",)))
    part = PARTS[rank // 2].name
    link.identity = replace(link.identity, parts=PARTS, part=part)
    return link


@pytest.mark.parametrize("rank", range(4))
def test_a_static_item_may_belong_to_another_part(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    part = PARTS[rank // 2].name
    items: dict[str, Any] = {part: Adapted(), f"{part}_table": {"table": torch.zeros(4)}}
    if part == "actor":
        items["ref"] = Adapted()
    link = of_part(rank, ("ref", "actor_table", "critic_table"))
    ray_ckpt.Checkpointer(link=link, **items).restore()
    named = [record.getMessage() for record in caplog.records if "can be shared" in record.getMessage()]
    if rank in (0, 2):
        (warning,) = named
        assert f"nothing of {part}_table can" in warning
    else:
        assert not named
