"""Windows and digests of what ranks hold in common."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.capture.replica_watch import MAX_PIECES, WINDOWS, ReplicaWatch, device_sums
from ray_ckpt.capture.walk import DTYPE_NAMES, LiveSlice
from ray_ckpt.core.replica_findings import finding, merged
from ray_ckpt.types import Slice, Watched

RANKS = (0, 1, 2)
SUMMED = (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
DTYPES = [dtype for dtype in DTYPE_NAMES if dtype is not torch.bool]


def live(name: str, tensor: torch.Tensor, ranks: tuple[int, ...] = RANKS) -> LiveSlice:
    shape = tuple(tensor.shape)
    dtype = DTYPE_NAMES[tensor.dtype]
    part = Slice(
        item="model", name=name, dtype=dtype, global_shape=shape, offset=(0,) * len(shape), shape=shape
    )
    return LiveSlice(slice=part, tensor=tensor, path=(name,), ranks=ranks, leaf=tensor)


def reports(slices: list[LiveSlice], step: int, rank: int = 0) -> tuple[Watched, ...]:
    found = ReplicaWatch(slices).digests(slices, step, rank)
    found.add_now(frozenset(s.slice.key for s in slices[::2]))  # the others are read with the copy
    found.complete()
    return found.reports()


def flip(tensor: torch.Tensor, bit: int) -> None:
    raw = tensor.reshape(-1).view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8


def state(seed: int = 0, count: int = 12) -> list[LiveSlice]:
    """Tensors of all kinds of sizes and dtypes, equal for equal seeds."""
    made, numbers = random.Random(seed), torch.Generator().manual_seed(seed)

    def tensors() -> Iterator[LiveSlice]:
        for index in range(count):
            shape = [made.randint(0, 9) for _ in range(made.randint(0, 3))]
            dtype = made.choice(DTYPES)
            raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=numbers)
            yield live(f"t{index}", raw.reshape(-1).view(dtype).reshape(shape))

    return list(tensors())


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(0, 5))
def test_each_bit_is_in_one_window_of_a_rotation(seed: int, count: int, first: int) -> None:
    """A flipped bit changes one digest in WINDOWS saves, and names its tensor or the piece with it."""
    slices, other = state(seed, count), state(seed, count)
    full = [s for s in other if s.nbytes]
    if not full:
        return
    changed = random.Random(seed).choice(full)
    flip(changed.tensor, random.Random(seed).randrange(changed.nbytes * 8))
    found = []
    for step in range(first, first + WINDOWS):
        by_rank = {rank: reports(other if rank == 2 else slices, step, rank) for rank in RANKS}
        assert all(len(watched.digests) <= MAX_PIECES for watched in by_rank[0])
        nodes = {f"node{rank}": merged({rank: watched}) for rank, watched in by_rank.items()}
        if text := finding(nodes):
            found.append(text)
    assert len(found) == 1 and "rank(s) 2 on node(s) node2 differ from 2 others" in found[0]


@pytest.mark.parametrize("every", [1, 2, 10, 52, 53, 54, 100, 106, 1000, 53 * 53])
def test_saves_at_a_regular_distance_reach_every_window(every: int) -> None:
    watch = ReplicaWatch([], every_steps=every)
    assert {watch.window(step) for step in range(every, every * (WINDOWS + 1), every)} == set(range(WINDOWS))


def test_replicas_of_a_mesh_compare_their_own_shards_and_what_all_hold() -> None:
    """2 x 2: ranks 0 and 2 hold one shard, 1 and 3 the other; all hold the bias; buffers are not watched."""

    def slices(rank: int) -> list[LiveSlice]:
        replicas = (0, 2) if rank % 2 == 0 else (1, 3)
        shard = torch.full((WINDOWS,), float(rank % 2))
        return [
            live("w", shard, replicas),
            live("b", torch.ones(WINDOWS), (0, 1, 2, 3)),
            live("mean", torch.full((WINDOWS,), float(rank)), (rank,)),
        ]

    for step in range(WINDOWS):
        nodes = {f"n{rank}": merged({rank: reports(slices(rank), step, rank)}) for rank in range(4)}
        assert [len(found) for found in nodes.values()] == [2] * 4
        assert finding(nodes) == ""
        bad = slices(3)
        bad[0].tensor[step] += 1
        nodes["n3"] = merged({3: reports(bad, step, 3)})
        assert finding(nodes) == "model.w: rank(s) 1 and rank(s) 3 differ, no majority shows which is wrong"


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("elements", [1, 7, 1000])
def test_a_sum_notices_every_bit(dtype: torch.dtype, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_ckpt.capture.replica_watch.SUM_ELEMENTS", 64)
    raw = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype)
    before = device_sums([tensor]).item()
    for bit in range(0, len(raw) * 8, max(1, len(raw) // 16)):
        flip(tensor, bit)
        assert device_sums([tensor]).item() != before, bit
        flip(tensor, bit)
    assert device_sums([tensor]).item() == before
    if elements > 1:
        swapped = raw.reshape(elements, -1).flip(0).reshape(-1).contiguous().view(dtype)
        assert device_sums([swapped]).item() != before, "order counts"


def test_tensors_that_are_not_contiguous_are_read_in_their_own_order() -> None:
    plain = torch.arange(60.0).reshape(6, 10)
    assert reports([live("w", plain)], 7) == reports([live("w", plain.t().contiguous().t())], 7)


def test_sums_of_a_device_are_digests_too_and_not_compared_with_those_of_a_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_host = {step: reports(state(3), step) for step in range(WINDOWS)}
    monkeypatch.setattr("ray_ckpt.capture.replica_watch._is_on_host", lambda live: False)
    found = set()
    for step in range(WINDOWS):
        there, other = state(3), state(3)
        flip(other[-1].tensor, 5)
        assert reports(there, step) == reports(state(3), step)
        if reports(there, step) != reports(other, step):
            found.add(step)
        groups = {watched.group for watched in reports(there, step)}
        assert groups.isdisjoint(watched.group for watched in on_host[step])
    assert len(found) == 1


def test_tensors_that_lie_elsewhere_on_another_rank_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_host = {"model.a"}
    monkeypatch.setattr("ray_ckpt.capture.replica_watch._is_on_host", lambda live: live.slice.key in on_host)
    slices = [live("a", torch.ones(80)), live("b", torch.ones(79))]  # one window of three has both
    groups = {watched.group for step in range(WINDOWS) for watched in reports(slices, step)}
    on_host = {"model.b"}
    assert groups.isdisjoint(watched.group for step in range(WINDOWS) for watched in reports(slices, step))


def test_a_tensor_that_changes_before_it_is_read_is_no_finding() -> None:
    """As in a loop that clamps weights without `ckpt.lock()`: ranks read before or after that."""
    ones = torch.ones(WINDOWS)
    by_rank = {}
    for rank in RANKS:
        slices = [live("clamped", ones.clone()), live("other", ones.clone(), ranks=(0, 1, 2, 3))]
        found = ReplicaWatch(slices).digests(slices, 1, rank)
        found.add_now(frozenset(s.slice.key for s in slices))
        if rank == 2:
            slices[0].tensor.clamp_(max=0.5)
        found.complete()
        by_rank[rank] = found.reports()
    assert [len(by_rank[rank]) for rank in RANKS] == [2, 2, 1]
    assert not finding({f"node{rank}": merged({rank: by_rank[rank]}) for rank in RANKS})


@pytest.mark.slow
def test_ten_thousand_saves_of_equal_replicas_have_no_finding() -> None:
    """Each replica makes the same steps on its own bytes; then a last bit differs, as a check of the test."""
    replicas = [[s for s in state(4) if s.nbytes] for _ in RANKS]
    watches = [ReplicaWatch(replica) for replica in replicas]

    def found_at(step: int) -> str:
        nodes = {}
        for rank, (watch, replica) in enumerate(zip(watches, replicas, strict=True)):
            digests = watch.digests(replica, step, rank)
            digests.add_now(frozenset(s.slice.key for s in replica))
            digests.complete()
            nodes[f"node{rank}"] = merged({rank: digests.reports()})
        return finding(nodes)

    for step in range(10_000):
        for replica in replicas:
            tensor = replica[step % len(replica)].tensor
            tensor.reshape(-1).view(torch.uint8).add_(step % 251)
        assert found_at(step) == ""
    flip(replicas[1][0].tensor, 0)
    assert sum(found_at(step) != "" for step in range(WINDOWS)) == 1
