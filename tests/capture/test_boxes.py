"""Tensors that name their own boxes, of torch's real classes: saved on some ranks, restored on others."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from ray_ckpt.capture.walk import walk
from ray_ckpt.errors import UnsupportedLeaf
from ray_ckpt.format.manifest import check_coverage
from ray_ckpt.trainer.handoff import SharedDigest
from ray_ckpt.trainer.link import Identity
from tests.capture.ranks import Files, items_of, on_ranks

WHOLE = torch.arange(1.0, 61.0).view(10, 6)


def columns(rank: int, *, is_filled: bool) -> LocalShardsWrapper:
    """Return a rank's blocks of WHOLE, cut unevenly by rows and columns as no placement can say."""
    rows = (slice(0, 7), slice(7, 10))[rank]
    blocks = [WHOLE[rows, 0:1], WHOLE[rows, 1:6]]
    offsets: list[tuple[int, ...]] = [(rows.start, 0), (rows.start, 1)]
    return LocalShardsWrapper([b.clone() if is_filled else torch.zeros_like(b) for b in blocks], offsets)


def uneven_dtensor(rank: int, *, is_filled: bool) -> Any:
    """Return a DTensor of which the local tensor has the boxes; its placement says rows 0:5 and 5:10."""
    local = columns(rank, is_filled=is_filled)
    mesh = init_device_mesh("cpu", (2,))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=WHOLE.shape, stride=(6, 1))


def sharded_tensor(rank: int, *, is_filled: bool) -> ShardedTensor:
    """Return a ShardedTensor whose ranks hold 7 and 3 rows."""
    rows = (slice(0, 7), slice(7, 10))[rank]
    local = WHOLE[rows].clone() if is_filled else torch.zeros_like(WHOLE[rows])
    shard = LocalShard.from_tensor_and_offsets(local, [rows.start, 0], rank)
    return init_from_local_shards([shard], *WHOLE.shape)


def megatron(rank: int, *, is_filled: bool, replica: int = 0) -> Any:
    """Return Megatron's ShardedTensor of 5 rows on each of two ranks, with an axis prepended."""
    with warnings.catch_warnings():  # without a GPU its packages warn when they are imported
        warnings.simplefilter("ignore")
        from megatron.core.dist_checkpointing.mapping import ShardedTensor
    rows = slice(5 * rank, 5 * rank + 5)
    local = WHOLE[rows].clone() if is_filled else torch.zeros(5, 6)
    return ShardedTensor.from_rank_offsets("w", local, (0, rank, 2), replica_id=replica)


def test_ranks_that_all_hold_several_boxes_of_a_tensor_compare_the_bytes_of_each() -> None:
    """Megatron's replicas and DTensors with boxes have several slices under one name."""
    texts: list[str] = []
    for changed in (None, 0, 1):
        local = columns(0, is_filled=True)
        if changed is not None:
            local.local_shards()[changed][0, 0] += 1

        def digest(rank: int, local: LocalShardsWrapper = local) -> str:
            mesh, size = init_device_mesh("cpu", (2,)), torch.Size((7, 6))
            whole = DTensor.from_local(local, mesh, [Replicate()], run_check=False, shape=size, stride=(6, 1))
            walked = walk(items_of(w=whole), rank=rank, world_size=2)
            assert [live.ranks for live in walked.slices] == [(0, 1)] * 2
            identity = Identity(run_uid="", run_name="", rank=rank, world_size=2, node_id="")
            made = SharedDigest(walked, identity, content=True, window=None, on_unwatched=print)
            made.add_now(frozenset())
            made.complete()
            return made.text()

        one, other = on_ranks(2, digest)
        assert one == other
        texts.append(one)
    assert len(set(texts)) == 3


def test_boxes_of_megatron_are_saved_once_and_restored_on_every_replica(tmp_path: Path) -> None:
    files = Files(tmp_path, 4)

    def made(rank: int, *, is_filled: bool) -> Any:
        return megatron(rank % 2, is_filled=is_filled, replica=rank // 2)

    on_ranks(4, lambda rank: files.save(items_of(state={"w": made(rank, is_filled=True)}), rank))
    check_coverage(files.rows)
    assert sum(row.nbytes for row in files.rows) == WHOLE.nbytes, "each element once"

    def restore(rank: int) -> None:
        live = made(rank, is_filled=False)
        files.load(items_of(state={"w": live}), rank, 4)
        assert torch.equal(live.data, made(rank, is_filled=True).data)

    on_ranks(4, restore)


def test_megatron_names_the_axis_that_a_local_tensor_lacks(tmp_path: Path) -> None:
    kind = type(megatron(0, is_filled=True))
    files = Files(tmp_path, 2)

    def save(rank: int) -> None:
        layer = kind.from_rank_offsets("w", WHOLE[rank].clone(), (0, rank, 2), prepend_axis_num=1)
        files.save(items_of(state={"w": layer}), rank)

    on_ranks(2, save)
    live = torch.zeros(2, 6)
    on_ranks(1, lambda rank: files.load(items_of(state={"w": live}), rank, 1))
    assert torch.equal(live, WHOLE[:2])


@pytest.mark.parametrize("made", [uneven_dtensor, sharded_tensor])
def test_boxes_that_a_tensor_names_are_saved_and_restored_on_any_ranks(made: Any, tmp_path: Path) -> None:
    files = Files(tmp_path, 2)
    on_ranks(2, lambda rank: files.save(items_of(state={"w": made(rank, is_filled=True)}), rank))
    check_coverage(files.rows)
    assert sum(row.nbytes for row in files.rows) == WHOLE.nbytes, "each element once"

    def restore_same(rank: int) -> None:
        live = made(rank, is_filled=False)
        files.load(items_of(state={"w": live}), rank, 2)
        local = live.to_local() if isinstance(live, DTensor) else live
        expected = made(rank, is_filled=True)
        expected = expected.to_local() if isinstance(expected, DTensor) else expected
        pairs = zip(parts_of(local), parts_of(expected), strict=True)
        assert all(torch.equal(here, there) for here, there in pairs)

    def restore_plain(rank: int) -> None:
        live = {"w": torch.zeros_like(WHOLE)}
        files.load(items_of(state=live), rank, 3)
        assert torch.equal(live["w"], WHOLE)

    on_ranks(2, restore_same)
    on_ranks(3, restore_plain)


def parts_of(local: Any) -> list[torch.Tensor]:
    shards = local.local_shards()
    return [shard if isinstance(shard, torch.Tensor) else shard.tensor for shard in shards]


def test_a_plain_tensor_is_restored_into_boxes(tmp_path: Path) -> None:
    files = Files(tmp_path, 1)
    on_ranks(1, lambda rank: files.save(items_of(state={"w": WHOLE.clone()}), rank))

    def restore(rank: int) -> None:
        live = sharded_tensor(rank, is_filled=False)
        files.load(items_of(state={"w": live}), rank, 2)
        (shard,) = live.local_shards()
        assert torch.equal(shard.tensor, WHOLE[slice(0, 7) if rank == 0 else slice(7, 10)])

    on_ranks(2, restore)


def test_a_replicated_dtensor_with_boxes_is_saved_once(tmp_path: Path) -> None:
    def made(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        local = LocalShardsWrapper([WHOLE.clone()], [(0, 0)])
        return DTensor.from_local(
            local, mesh, [Replicate()], run_check=False, shape=WHOLE.shape, stride=(6, 1)
        )

    files = Files(tmp_path, 2)
    on_ranks(2, lambda rank: files.save(items_of(state={"w": made(rank)}), rank))
    assert [row.nbytes for row in files.rows] == [WHOLE.nbytes]


class Crooked:
    """An object with the protocol whose shard has not the shape of its box."""

    shape, dtype = WHOLE.shape, WHOLE.dtype

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return LocalShardsWrapper([WHOLE], [(0, 0)]).__create_write_items__(fqn, WHOLE)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return WHOLE[:3]


def test_boxes_that_cannot_be_stored_are_named() -> None:
    with pytest.raises(UnsupportedLeaf, match=r"state\.w: a Crooked gives a shard of shape \(3, 6\)"):
        walk(items_of(state={"w": Crooked()}), rank=0, world_size=1)
