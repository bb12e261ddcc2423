"""Random state goes through the state file and continues where it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.items import Item
from ray_ckpt.capture.rng import RngItem
from ray_ckpt.capture.walk import walk
from ray_ckpt.errors import UnsupportedItem
from ray_ckpt.format.tree import decode_tree, encode_tree
from tests.capture.local import resolve_leaves

STREAMS_OF_7 = [2281931666, 144865154, 1567705271]  # of a tree that stands in its test


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


def test_device_state_of_another_kind_of_machine_is_left_alone() -> None:
    states = [torch.zeros(16, dtype=torch.uint8)]
    RngItem().load(RngItem().tree() | {"device": {"type": "other", "current": 0, "states": states}})


def test_the_current_device_goes_on_whichever_index_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    class Devices:
        """Stands for `torch.cuda` on a node with as many devices as there are states."""

        def __init__(self, states: list[int], current: int) -> None:
            self.states, self.current = states, current

        def get_rng_state(self, index: int) -> int:
            return self.states[index]

        def set_rng_state(self, state: int, index: int) -> None:
            self.states[index] = state

    def use(devices: Devices) -> None:
        monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(devices.states))
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: devices.current)

    use(Devices([7, 8, 9], current=2))
    tree = RngItem().tree()
    for current, num_devices, expected in ((2, 3, [7, 8, 9]), (0, 2, [9, 8]), (3, 4, [7, 8, 9, 9])):
        here = Devices([0] * num_devices, current)
        use(here)
        RngItem().load(tree)
        assert here.states == expected


def test_it_belongs_to_its_rank() -> None:
    assert RngItem.per_rank and not RngItem().is_shared(("torch_cpu",))


# -- generators that a user made ----------------------------------------------------------------------

GENERATORS: dict[str, Callable[[int], Any]] = {
    "python": random.Random,
    "pcg64": np.random.default_rng,
    "dxsm": lambda seed: np.random.Generator(np.random.PCG64DXSM(seed)),
    "mt19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "sfc64": lambda seed: np.random.Generator(np.random.SFC64(seed)),
    "random state": np.random.RandomState,
    "random state over pcg64": lambda seed: np.random.RandomState(np.random.PCG64(seed)),
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


def numbers(generator: Any) -> list[float]:
    """Draw numbers that leave half of a word, or a second gauss value, behind."""
    if isinstance(generator, torch.Generator):
        return [*torch.randn(3, generator=generator).tolist(), *torch.rand(2, generator=generator).tolist()]
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1), float(generator.getrandbits(7))]
    if isinstance(generator, np.random.Generator):
        return [*generator.normal(size=3), *generator.integers(0, 9, size=3, dtype=np.int32).tolist()]
    return [*generator.randn(3), *generator.rand(2)]


def through_the_file(items: Mapping[str, Item], *, rank: int = 0) -> Any:
    walked = walk(items, rank=rank, world_size=4)
    data = encode_tree(dict(walked.trees))
    tensors = {live.slice.key: live.tensor.clone() for live in walked.slices}
    return resolve_leaves(decode_tree(data), tensors)


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("num_draws", [0, 1, 5])
def test_a_registered_generator_continues_in_place(kind: str, num_draws: int) -> None:
    generator, other = GENERATORS[kind](3), GENERATORS[kind](4)
    for _ in range(num_draws):
        numbers(generator)
    tree = through_the_file({"dice": adapt("dice", generator, {})})["dice"]
    expected = [numbers(generator) for _ in range(3)]
    item = adapt("dice", other, {})
    assert item.per_rank and not item.problems(tree)
    item.load(tree)
    assert [numbers(other) for _ in range(3)] == expected


def test_a_generator_of_another_kind_is_a_difference() -> None:
    trees = {kind: adapt("dice", make(0), {}).tree() for kind, make in GENERATORS.items()}
    for kind, make in GENERATORS.items():
        fits = [other for other, tree in trees.items() if not adapt("dice", make(0), {}).problems(tree)]
        assert fits == [kind]
    (problem,) = adapt("dice", random.Random(), {}).problems({"x": 1})
    assert problem == "is a random.Random, in the checkpoint it is none"


def test_a_generator_without_state_is_refused() -> None:
    with pytest.raises(UnsupportedItem, match="SystemRandom"):
        adapt("dice", random.SystemRandom(), {})


# -- ranks that the checkpoint has no state of --------------------------------------------------------


def test_new_ranks_get_streams_of_their_own_and_always_the_same() -> None:
    tree = through_the_file({"rng": RngItem()})["rng"]
    first = draw()
    drawn: dict[int, tuple[Any, ...]] = {}
    for rank in (4, 5, 4):
        torch.randn(rank)  # whatever was drawn before
        RngItem().load_for_new_rank(tree, rank)
        drawn.setdefault(rank, draw())
        RngItem().load_for_new_rank(tree, rank)
        assert draw() == drawn[rank]
    RngItem().load(tree)
    assert draw() == first
    for each in zip(first, drawn[4], drawn[5], strict=True):
        assert len(set(map(str, each))) == 3


def test_another_checkpoint_gives_a_new_rank_other_streams() -> None:
    RngItem().load_for_new_rank(RngItem().tree(), 4)
    before = draw()
    RngItem().load_for_new_rank(RngItem().tree(), 4)
    assert draw() != before


def test_streams_of_new_ranks_stay_what_they_are() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    RngItem().load_for_new_rank({"python": (3, (1, 2), None), "torch_cpu": torch.arange(4)}, 7)
    assert [random.getrandbits(32), np.random.randint(2**31), torch.initial_seed() % 2**32] == STREAMS_OF_7


@pytest.mark.parametrize("kind", GENERATORS)
def test_registered_generators_of_new_ranks_differ_too(kind: str) -> None:
    tree = through_the_file({"dice": adapt("dice", GENERATORS[kind](3), {})})["dice"]
    found = [numbers(GENERATORS[kind](3))]
    for rank in (4, 5, 4):
        generator = GENERATORS[kind](0)
        numbers(generator)
        item = adapt("dice", generator, {})
        assert item.per_rank
        item.load_for_new_rank(tree, rank)
        found.append(numbers(generator))
    assert found[1] == found[3] and found[1][0] != 0
    assert len({str(values) for values in found}) == 3
