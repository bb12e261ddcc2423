"""Data order and position: the same samples whatever the ranks, the restarts and the worker processes."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.items import Item
from ray_ckpt.capture.walk import walk
from ray_ckpt.config import RunOptions
from ray_ckpt.data import (
    Batches,
    GlobalBatchSampler,
    SeededSamples,
    is_bound_to_world_size,
    loader_problems,
    permute,
    round_keys,
)
from ray_ckpt.errors import ConfigError, MismatchError, UnsupportedItem
from ray_ckpt.format.tree import MAX_TREE_BYTES, decode_tree, encode_tree
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink, resolve_leaves
from tests.support.examples import every_few, examples

T = TypeVar("T")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
few_cores = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # torch, on a small machine


@pytest.fixture(autouse=True)
def own_random_state() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def take(batches: Iterable[T], count: int) -> list[T]:
    return list(itertools.islice(batches, count))


def sampler_of(
    num_samples: int, global_batch: int, *, rank: int = 0, world_size: int = 1, **options: Any
) -> GlobalBatchSampler:
    return GlobalBatchSampler(
        num_samples, global_batch=global_batch, rank=rank, world_size=world_size, **options
    )


def indices_of(num_samples: int, global_batch: int, **options: Any) -> Batches[list[int]]:
    """Bare indices: the sampler is its own loader."""
    sampler = sampler_of(num_samples, global_batch, **options)
    return sampler.batches(sampler)


def order_of(num_samples: int, *, seed: int, epoch: int = 0) -> list[int]:
    places = np.arange(num_samples, dtype=np.uint64)
    order: list[int] = permute(places, num_samples, round_keys(seed, epoch)).tolist()
    return order


class Checkpoint:
    """The state of one item as it goes through a checkpoint: a tree of JSON, and copies of its tensors."""

    def __init__(self, item: Item) -> None:
        walked = walk({"data": item}, rank=0, world_size=1)
        self.tree = encode_tree(dict(walked.trees))
        self.tensors = {live.slice.key: live.tensor.clone() for live in walked.slices}

    def load(self, item: Item) -> None:
        item.load(resolve_leaves(decode_tree(self.tree)["data"], self.tensors))


# -- the order ---------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(), st.integers(0, 10**6))
@examples(60)
def test_every_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    assert sorted(order_of(num_samples, seed=seed, epoch=epoch)) == list(range(num_samples))


@given(st.integers(1, 2**62), st.integers(), st.data())
@examples(60)
def test_samples_of_a_huge_data_set_are_in_range_and_distinct(
    num_samples: int, seed: int, data: st.DataObject
) -> None:
    count = min(num_samples, 50)
    first = data.draw(st.integers(0, num_samples - count))
    share = sampler_of(num_samples, count, seed=seed).share(first)
    assert len(set(share)) == count and all(0 <= index < num_samples for index in share)


@pytest.mark.parametrize("num_samples", [2, 3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_all_permutations_of_few_samples_come_equally_often(num_samples: int) -> None:
    seeds = 15 * math.factorial(num_samples)
    counts = Counter(tuple(order_of(num_samples, seed=seed)) for seed in range(seeds))
    possible = math.factorial(num_samples)
    expected = seeds / possible
    chi_square = sum((n - expected) ** 2 / expected for n in counts.values())
    chi_square += (possible - len(counts)) * expected
    assert abs(chi_square - (possible - 1)) < 4 * math.sqrt(2 * (possible - 1)), chi_square


@pytest.mark.parametrize("num_samples", [10, pytest.param(17, marks=pytest.mark.slow), 100])
def test_places_and_neighbours_are_spread_evenly(num_samples: int) -> None:
    seeds, n = 600, num_samples
    places, steps = np.zeros((n, n)), np.zeros(n)
    for seed in range(seeds):
        order = np.array(order_of(n, seed=seed, epoch=1))
        places[np.arange(n), order] += 1
        steps += np.bincount((order[1:] - order[:-1]) % n, minlength=n)
    for counts, freedom in ((places.ravel(), (n - 1) ** 2), (steps[1:], n - 2)):
        expected = counts.mean()
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom), chi_square


def test_the_order_of_a_name_never_changes() -> None:
    sampler = sampler_of(10**9, 4, seed=7)
    assert sampler.order == "feistel-8"
    assert sampler.share(0) == [657277283, 649424177, 576887142, 844729632]
    assert sampler.share(3 * 10**9 - 2) == [206293058, 735772517, 972970739, 148475686], (
        "two of epoch 2, two of epoch 3"
    )
    assert order_of(10, seed=0) == [5, 9, 6, 3, 4, 8, 2, 0, 7, 1]


def test_seeds_and_epochs_differ() -> None:
    orders = [order_of(50, seed=seed, epoch=epoch) for seed in (0, 1, -1) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 9


def test_without_shuffle_samples_come_in_sequence() -> None:
    assert take(indices_of(5, 3, shuffle=False), 4) == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


# -- ranks -------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(0, 40), st.integers(1, 60), st.integers(0, 10**6))
@examples(60)
def test_shares_make_up_the_global_batch(world_size: int, more: int, n: int, position: int) -> None:
    batch = world_size + more
    shares = [sampler_of(n, batch, rank=r, world_size=world_size).share(position) for r in range(world_size)]
    assert [index for share in shares for index in share] == sampler_of(n, batch).share(position)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1 and all(shares)
    assert [share.first for share in shares] == [
        position + sum(map(len, shares[:rank])) for rank in range(world_size)
    ]


class Group:
    """All ranks of one training group, restored from the state of the group before it."""

    def __init__(self, num_samples: int, global_batch: int, world_size: int, states: list[Checkpoint]):
        self.ranks = [
            indices_of(num_samples, global_batch, rank=r, world_size=world_size) for r in range(world_size)
        ]
        self.items = [adapt("batches", batches, {}) for batches in self.ranks]
        for rank, item in enumerate(self.items):
            if states:  # a rank that did not exist gets the state of rank 0
                states[rank if rank < len(states) else 0].load(item)
        self.iterators = [iter(batches) for batches in self.ranks]

    def step(self) -> list[int]:
        return [index for iterator in self.iterators for index in next(iterator)]

    def save(self) -> list[Checkpoint]:
        return [Checkpoint(item) for item in self.items]


@given(
    st.integers(1, 40),
    st.integers(5, 12),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(0, 3)), max_size=6),
)
@examples(50)
def test_restarts_at_other_world_sizes_change_no_global_batch(
    n: int, global_batch: int, chain: list[tuple[int, int, int]]
) -> None:
    consumed: list[list[int]] = []
    states: list[Checkpoint] = []
    for world_size, saved_steps, lost_steps in [(4, 2, 1), (2, 1, 0), (3, 2, 2), (1, 1, 0), *chain]:
        group = Group(n, global_batch, world_size, states)
        consumed += [group.step() for _ in range(saved_steps)]
        states = group.save()
        for _ in range(lost_steps):  # done again by the next group
            group.step()
    assert consumed == take(indices_of(n, global_batch), len(consumed))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7)), min_size=1, max_size=8))
@examples(50)
def test_another_global_batch_goes_on_at_the_same_sample(chain: list[tuple[int, int]]) -> None:
    consumed: list[int] = []
    state: Checkpoint | None = None
    for global_batch, steps in chain:
        batches = indices_of(23, global_batch)
        item = adapt("batches", batches, {})
        if state is not None:
            state.load(item)
        consumed += itertools.chain.from_iterable(take(batches, steps))
        state = Checkpoint(item)
        assert batches.position == len(consumed)
    assert consumed == list(itertools.chain.from_iterable(take(indices_of(23, 1), len(consumed))))


# -- a DataLoader between ----------------------------------------------------------------------------


def loaded(sampler: GlobalBatchSampler, **options: Any) -> Batches[Any]:
    """Batches of [x] with x float32 [share]: sample i is the number i."""
    data = TensorDataset(torch.arange(float(sampler.num_samples)))
    return sampler.batches(DataLoader(data, batch_sampler=sampler, **options))


def numbers(batches: Iterable[Any], count: int) -> list[list[int]]:
    return [batch[0].int().tolist() for batch in take(batches, count)]


@few_cores
@pytest.mark.parametrize("num_workers", [0, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_the_position_is_what_was_handed_out_and_not_what_was_prefetched(num_workers: int) -> None:
    expected = take(indices_of(20, 6), 9)
    first = loaded(sampler_of(20, 6), num_workers=num_workers)
    item = adapt("batches", first, {})
    assert numbers(first, 4) == expected[:4]
    assert first.state_dict()["position"] == first.position == 24

    second = loaded(sampler_of(20, 6), num_workers=num_workers)
    Checkpoint(item).load(adapt("batches", second, {}))
    assert numbers(second, 5) == expected[4:]


@few_cores
def test_ranks_with_worker_processes_restart_4_2_3_1() -> None:
    consumed: list[list[int]] = []
    state: Checkpoint | None = None
    for world_size, num_workers in ((4, 1), (2, 2), (3, 0), (1, 2)):
        ranks = [
            loaded(sampler_of(17, 7, rank=r, world_size=world_size), num_workers=num_workers)
            for r in range(world_size)
        ]
        items = [adapt("batches", batches, {}) for batches in ranks]
        for item in items:
            if state is not None:
                state.load(item)
        parts = [numbers(batches, 3) for batches in ranks]
        consumed += [list(itertools.chain(*shares)) for shares in zip(*parts, strict=True)]
        state = Checkpoint(items[-1])
    assert consumed == take(indices_of(17, 7), 12)


def test_accumulation_takes_several_batches_a_step() -> None:
    batches = indices_of(10, 4)
    item = adapt("batches", batches, {})
    iterator = iter(batches)
    steps = [[next(iterator) for _ in range(3)] for _ in range(2)]
    restarted = indices_of(10, 4)
    Checkpoint(item).load(adapt("batches", restarted, {}))
    steps += [take(restarted, 3)]
    assert list(itertools.chain(*steps)) == take(indices_of(10, 4), 9)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_making_an_iterator_leaves_random_state_alone(num_workers: int) -> None:
    batches = loaded(sampler_of(10, 4), num_workers=num_workers)
    before = torch.get_rng_state()
    numbers(batches, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_number_of_batches_is_that_of_the_whole_run() -> None:
    whole = list(indices_of(10, 4, num_batches=7))
    first = indices_of(10, 4, num_batches=7)
    item = adapt("batches", first, {})
    head = take(first, 3)
    second = indices_of(10, 4, num_batches=7)
    Checkpoint(item).load(adapt("batches", second, {}))
    assert head + list(second) == whole and len(whole) == 7
    assert list(second) == [], "the run is over"
    assert len(sampler_of(10, 4, num_batches=7)) == 7
    with pytest.raises(TypeError, match="no end"):
        len(sampler_of(10, 4))


def test_epochs_are_those_of_the_next_sample() -> None:
    batches = indices_of(10, 4)
    iterator = iter(batches)
    positions = [(batches.position, batches.epoch, batches.epoch_fraction)]
    for _ in range(6):
        next(iterator)
        positions += [(batches.position, batches.epoch, batches.epoch_fraction)]
    assert positions == [
        (0, 0, 0),
        (4, 0, 0.4),
        (8, 0, 0.8),
        (12, 1, 0.2),
        (16, 1, 0.6),
        (20, 2, 0),
        (24, 2, 0.4),
    ]


# -- wrong use ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "0 samples"),
        ({"num_samples": 2**62 + 1}, "2\\*\\*62"),
        ({"rank": 2}, "rank 2 among 2"),
        ({"rank": -1}, "rank -1"),
        ({"global_batch": 1}, "at least 2"),
        ({"num_samples": 10.0}, "num_samples is 10.0"),
        ({"num_samples": "10"}, "num_samples is '10'"),
        ({"global_batch": 4.5}, "global_batch is 4.5"),
        ({"rank": 0.0}, "rank is 0.0"),
        ({"world_size": None}, "world_size is None"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"num_batches": 2.5}, "num_batches is 2.5"),
        ({"num_batches": -1}, "-1 batches"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"num_samples": 10, "global_batch": 4, "rank": 0, "world_size": 2} | options
    with pytest.raises(ConfigError, match=message):
        GlobalBatchSampler(sizes.pop("num_samples"), **sizes)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterating_the_loader_itself_is_refused(num_workers: int) -> None:
    sampler = sampler_of(10, 4)
    loader = DataLoader(TensorDataset(torch.zeros(10)), batch_sampler=sampler, num_workers=num_workers)
    with pytest.raises(ConfigError, match=r"sampler\.batches\(loader\)"):
        iter(loader)
    numbers(sampler.batches(loader), 1)
    with pytest.raises(ConfigError, match="not the loader"):
        iter(loader)
    with pytest.raises(UnsupportedItem):
        adapt("sampler", sampler, {})


def test_a_loader_of_other_batches_is_refused() -> None:
    data = TensorDataset(torch.zeros(10))
    with pytest.raises(ConfigError, match="add_dist_sampler=False"):
        sampler_of(10, 4).batches(DataLoader(data, batch_size=4))
    with pytest.raises(ConfigError, match="add_dist_sampler"):
        sampler_of(10, 4).batches(sampler_of(10, 4))


def test_a_loader_without_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="in_order=True"):
        loaded(sampler_of(10, 4), num_workers=2, in_order=False)
    loaded(sampler_of(10, 4), num_workers=0, in_order=False)


def test_a_loader_that_begins_again_in_iter_is_begun_once() -> None:
    """ray.train.torch.prepare_data_loader makes such a loader: an iterator whose iter() is not itself."""

    class Prefetching:
        def __init__(self, sampler: GlobalBatchSampler) -> None:
            self.batch_sampler = sampler

        def __iter__(self) -> Prefetching:
            self.source = iter(self.batch_sampler)
            self.ahead = next(self.source)
            return self

        def __next__(self) -> list[int]:
            batch, self.ahead = self.ahead, next(self.source)
            return batch

    sampler = sampler_of(10, 4)
    batches = sampler.batches(Prefetching(sampler))
    assert take(batches, 4) == take(indices_of(10, 4), 4)
    assert batches.position == 16


def test_a_live_iterator_is_refused_and_a_dropped_one_is_not() -> None:
    batches = indices_of(10, 4, num_batches=2)
    iterator = iter(batches)
    with pytest.raises(UnsupportedItem, match="being iterated"):
        adapt("batches", batches, {})
    del iterator
    adapt("batches", batches, {})
    ended = iter(batches)
    assert len(list(ended)) == 2
    adapt("batches", batches, {})


def test_a_framework_may_reset_the_iterator() -> None:
    """Lightning checks that a loader can be iterated, and resets it by setting `_iterator`."""
    batches = indices_of(10, 4, num_batches=5)
    iter(batches)
    first = iter(batches)
    seen = [next(first), next(first)]
    batches._iterator = None
    assert batches._iterator is None and len(batches) == 5
    adapt("batches", batches, {})
    with pytest.raises(ConfigError, match="after the restore"):
        next(first)
    assert seen + list(batches) == list(indices_of(10, 4, num_batches=5))
    with pytest.raises(TypeError):
        len(indices_of(10, 4))


def test_an_iterator_of_an_earlier_position_raises() -> None:
    batches = indices_of(10, 4)
    first = iter(batches)
    next(first)
    second = iter(batches)
    with pytest.raises(ConfigError, match="after the restore"):
        next(first)
    batches.load_state_dict({**batches.state_dict(), "position": 8})
    with pytest.raises(ConfigError, match="after the restore"):
        next(second)
    assert batches.position == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 4}, "seed was 3 and is 4 here"),
        ({"num_samples": 11}, "num_samples was 10 and is 11 here"),
        ({"shuffle": False}, "order was 'feistel-8' and is 'sequence' here"),
    ],
)
def test_a_position_of_other_samples_is_refused(options: dict[str, Any], message: str) -> None:
    saved = indices_of(10, 4, seed=3)
    take(saved, 2)
    here = {"num_samples": 10, "seed": 3} | options
    other = indices_of(here.pop("num_samples"), 4, **here)
    with pytest.raises(MismatchError, match=message):
        other.load_state_dict(saved.state_dict())
    with pytest.raises(MismatchError, match="order was None"):
        other.load_state_dict({"_snapshot": {}})
    assert other.position == 0


# -- random augmentation -----------------------------------------------------------------------------


class Noisy:
    """Sample i with noise from each of the three generators that augmentation draws from."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[float, ...]:
        return index, random.random(), float(np.random.rand()), torch.rand(()).item()


def noisy(global_batch: int, num_workers: int = 0, **options: Any) -> Batches[Any]:
    sampler = sampler_of(10, global_batch, **options)
    loader = DataLoader(SeededSamples(Noisy(), seed=5), batch_sampler=sampler, num_workers=num_workers)
    return sampler.batches(loader)


def samples(batches: Iterable[Any], count: int) -> list[tuple[float, ...]]:
    """Return one tuple of numbers for each sample of the next `count` batches."""
    columns = [[column.tolist() for column in batch] for batch in take(batches, count)]
    return [sample for batch in columns for sample in zip(*batch, strict=True)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_seeded_samples_look_the_same_wherever_they_are_read(num_workers: int) -> None:
    expected = samples(noisy(3), 8)
    assert len({sample[1:] for sample in expected}) == 24, "an index looks otherwise in the next epoch"
    random.random(), np.random.rand(), torch.rand(1)
    parts = [samples(noisy(6, num_workers, rank=r, world_size=2), 4) for r in range(2)]
    shares = [part[i : i + 3] for i in range(0, 12, 3) for part in parts]
    assert list(itertools.chain(*shares)) == expected


def test_reading_seeded_samples_leaves_random_state_alone() -> None:
    iterator = iter(noisy(3))
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    next(iterator)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index]


def test_seeded_samples_need_numbers() -> None:
    with pytest.raises(ConfigError, match="without sample numbers"):
        next(iter(DataLoader(SeededSamples(Noisy()), batch_size=2)))


# -- torchdata ---------------------------------------------------------------------------------------

SAMPLES, PER_BATCH = 11, 3  # 4 batches an epoch, the last one short
_made: list[Any] = []


@pytest.fixture(autouse=True)
def ended_workers() -> Iterator[None]:
    """End worker processes of torchdata now: the garbage collector waits up to 5 s for each."""
    yield
    for loader in _made:
        loader._iterator = None
    _made.clear()


def stateful_loader(data: TensorDataset, batch_size: int = 1, **options: Any) -> Any:
    _made.append(StatefulDataLoader(data, batch_size, **options))
    return _made[-1]


def stateful(num_workers: int, **options: Any) -> Any:
    data = TensorDataset(torch.arange(float(SAMPLES)))
    return stateful_loader(data, PER_BATCH, shuffle=True, num_workers=num_workers, **options)


Drawn: TypeAlias = tuple[list[int], float]
"""A batch, and what dropout would draw with it."""


def endless(loader: Any) -> Iterator[Drawn]:
    """Epoch after epoch. The first begins at once, as `it = iter(loader)` before a loop does."""
    epochs = itertools.chain([iter(loader)], (iter(loader) for _ in itertools.repeat(0)))
    return ((batch[0].int().tolist(), torch.rand(()).item()) for epoch in epochs for batch in epoch)


def continued(loader: Any, other: Any, *, after: int, count: int = 7) -> tuple[list[Drawn], list[Drawn]]:
    """Return the batches of `loader` after `after` batches, and those of `other`, restored at that point."""
    item, other_item = adapt("loader", loader, {}), adapt("loader", other, {})
    for part in (item, other_item):
        Checkpoint(part)  # the Checkpointer looks at every item before it restores
    batches = endless(loader)
    take(batches, after)
    saved, random_state = Checkpoint(item), torch.get_rng_state()
    whole = take(batches, count)
    saved.load(other_item)
    restarted = endless(other)
    torch.set_rng_state(random_state)  # as the Checkpointer does at the first step
    return whole, take(restarted, count)


@pytest.mark.parametrize(
    ("num_workers", "after"), [(0, k) for k in range(10)] + every_few([(2, 4), (2, 2), (2, 7)])
)
def test_a_stateful_loader_continues_exactly(num_workers: int, after: int) -> None:
    whole, restarted = continued(stateful(num_workers), stateful(num_workers), after=after)
    assert restarted == whole


def test_a_stateful_loader_of_snapshots_now_and_then_continues_exactly() -> None:
    first, second = (stateful(2, snapshot_every_n_steps=3) for _ in range(2))
    whole, restarted = continued(first, second, after=5)
    assert restarted == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_saved_between_epochs_gives_the_next_epoch(num_workers: int) -> None:
    loader, other = stateful(num_workers), stateful(num_workers)
    item, other_item = adapt("loader", loader, {}), adapt("loader", other, {})
    assert len(list(loader)) == 4
    saved = Checkpoint(item)
    whole = numbers(loader, 9)
    saved.load(other_item)
    assert numbers(other, 9) == whole and len(whole) == 4


def test_a_generator_given_to_a_stateful_loader_changes_its_next_epoch() -> None:
    """The reason for the module's warning. If this fails, torchdata has changed; see the module docstring."""
    first, second = (stateful(0, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    whole, restarted = continued(first, second, after=2, count=4)
    assert restarted[:2] == whole[:2], "what is left of the epoch"
    assert restarted[2:] != whole[2:]


@pytest.mark.parametrize(
    ("num_workers", "in_batch_sampler"),
    [(0, False), (0, True), pytest.param(2, False, marks=pytest.mark.slow), (2, True)],
)
def test_a_stateful_loader_continues_in_the_epoch_of_its_distributed_sampler(
    num_workers: int, in_batch_sampler: bool
) -> None:
    data = TensorDataset(torch.arange(float(SAMPLES)))

    def made() -> tuple[Any, Item]:
        sampler: Any = DistributedSampler(data, num_replicas=1, rank=0, seed=5)
        batch_sampler = BatchSampler(sampler, PER_BATCH, drop_last=False)
        size, by = (
            (1, {"batch_sampler": batch_sampler}) if in_batch_sampler else (PER_BATCH, {"sampler": sampler})
        )
        loader = stateful_loader(data, size, num_workers=num_workers, **by)
        item = adapt("loader", loader, {})
        Checkpoint(item)  # the Checkpointer looks at every item before it restores
        return sampler, item

    sampler, item = made()
    loader = item.obj  # type: ignore[attr-defined]
    assert len(list(loader)) == 4
    sampler.set_epoch(1)
    batches = iter(loader)
    first = [next(batches)[0].tolist() for _ in range(2)]
    saved = Checkpoint(item)
    rest = [batch[0].tolist() for batch in batches]

    other_sampler, other_item = made()
    saved.load(other_item)
    Checkpoint(other_item)  # and again before the first step
    other_sampler.set_epoch(1)
    other = other_item.obj  # type: ignore[attr-defined]
    assert [batch[0].tolist() for batch in other] == rest and first != rest
    assert other_sampler.epoch == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_live_stateful_loader_is_refused(num_workers: int) -> None:
    loader = stateful(num_workers)
    take(loader, 1)
    with pytest.raises(UnsupportedItem, match="being iterated"):
        adapt("loader", loader, {})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_state_of_a_stateful_loader_is_small(num_workers: int) -> None:
    data = TensorDataset(torch.arange(1_000_000))
    loader = stateful_loader(data, 64, shuffle=num_workers == 0, num_workers=num_workers)
    item = adapt("loader", loader, {})
    take(loader, 2)
    assert len(Checkpoint(item).tree) < 4096 < MAX_TREE_BYTES


@pytest.mark.parametrize(("then", "now"), [(0, 2), (2, 0), (2, 1)])
def test_another_number_of_workers_is_named(then: int, now: int) -> None:
    saved = stateful(then)
    take(saved, 1)
    [problem] = loader_problems(stateful(now), saved.state_dict())
    assert problem.startswith(f"num_workers: was {then} and is {now} here")
    assert "the same num_workers, or use ray_ckpt.data.GlobalBatchSampler" in problem
    assert loader_problems(stateful(then), saved.state_dict()) == []


def test_torchdata_itself_refuses_another_number_of_workers_late() -> None:
    saved, loader = stateful(2), stateful(0)
    loader.load_state_dict(saved.state_dict())
    with pytest.raises(AssertionError):
        iter(loader)


def test_other_objects_have_no_loader_problems() -> None:
    batches = loaded(sampler_of(10, 4))
    assert loader_problems(batches, {**batches.state_dict(), "position": 4}) == []
    assert len(loader_problems(batches, {"position": 4})) == len(loader_problems(batches, None)) == 3
    assert loader_problems(torch.nn.Linear(1, 1), {}) == []


def test_a_stateful_loader_loses_samples_at_another_world_size() -> None:
    """The reason why a loader is bound to its world size: torchdata reports no error."""
    data = TensorDataset(torch.arange(12.0))

    def loader(rank: int, world_size: int) -> Any:
        sampler = StatefulDistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=False)
        return stateful_loader(data, 2, sampler=sampler)

    ranks = [loader(rank, 2) for rank in range(2)]
    before = [numbers(part, 2) for part in ranks]
    alone = loader(0, 1)
    alone.load_state_dict(ranks[0].state_dict())
    seen = Counter(itertools.chain(*itertools.chain(*before), *numbers(alone, 9)))
    assert seen != Counter(range(12))
    assert is_bound_to_world_size(alone) and is_bound_to_world_size(ranks[0].sampler)


def test_what_is_bound_to_the_world_size() -> None:
    data = TensorDataset(torch.zeros(4))
    assert is_bound_to_world_size(DistributedSampler(data, num_replicas=1, rank=0))
    assert not is_bound_to_world_size(loaded(sampler_of(10, 4)))
    assert not is_bound_to_world_size(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_inside_batches_moves_to_another_world_size(num_workers: int) -> None:
    data = TensorDataset(torch.arange(20.0))

    def batches_of(rank: int, world_size: int) -> Batches[Any]:
        sampler = sampler_of(20, 6, rank=rank, world_size=world_size)
        return sampler.batches(stateful_loader(data, batch_sampler=sampler, num_workers=num_workers))

    whole = take(indices_of(20, 6), 6)
    first = batches_of(0, 1)
    item = adapt("batches", first, {})
    assert numbers(first, 3) == whole[:3]
    saved = Checkpoint(item)
    parts = []
    for rank in range(2):
        batches = batches_of(rank, 2)
        saved.load(adapt("batches", batches, {}))
        parts.append(numbers(batches, 3))
    assert [a + b for a, b in zip(*parts, strict=True)] == whole[3:]


def test_a_stateful_loader_of_our_sampler_is_not_to_be_registered_itself() -> None:
    sampler = sampler_of(10, 4)
    loader = stateful_loader(TensorDataset(torch.zeros(10)), batch_sampler=sampler)
    with pytest.raises(ConfigError, match=r"register `batches`"):
        Checkpoint(adapt("loader", loader, {}))


# -- in a training loop ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_checkpoint_of_a_loop_has_the_position_after_its_step(num_workers: int) -> None:
    link = LocalLink(options=RunOptions(every_steps=1))
    batches = loaded(sampler_of(10, 4), num_workers=num_workers)
    ckpt = Checkpointer(link=link, batches=batches, model=torch.nn.Linear(1, 1))
    for step, _ in zip(ckpt.steps(total=5), batches, strict=False):
        ckpt.step(step)
    ckpt.close()
    positions = {
        shard.attempt.step: decode_tree(shard.state)["items"]["batches"]["position"] for shard in link.sealed
    }
    assert positions[5] == 20 and all(position == 4 * step for step, position in positions.items())
