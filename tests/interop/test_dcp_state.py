"""State dicts of DCP as items: what is saved of them, and what a load takes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as _dcp
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ray_ckpt.capture.load import SavedState, wanted_trees
from ray_ckpt.dcp import Reader, Writer
from ray_ckpt.errors import ConfigError, MismatchError, NotConnected, RestoreError, UnsupportedLeaf
from ray_ckpt.format.names import make_attempt
from ray_ckpt.interop.dcp.metadata import metadata_of
from ray_ckpt.interop.dcp.names import flat, nested
from ray_ckpt.interop.dcp.session import Session
from ray_ckpt.interop.dcp.state import items_of
from ray_ckpt.restore.manifest import ListedRows
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.trainer.connection import Connection, set_connection
from ray_ckpt.trainer.item_reader import ItemReader
from ray_ckpt.types import CheckpointInfo, Level
from tests.capture.local import LocalLink
from tests.capture.ranks import Files, on_ranks

dcp: Any = _dcp  # its functions have no stable types
WHOLE = torch.arange(1.0, 36.0).view(7, 5)


def state_of(placement: Any, world_size: int, *, is_filled: bool) -> dict[str, Any]:
    """Return a nested state dict with a DTensor, plain tensors and values."""
    mesh = init_device_mesh("cpu", (world_size,))
    source = WHOLE.clone() if is_filled else torch.zeros_like(WHOLE)
    return {
        "model": {"layer.weight": distribute_tensor(source, mesh, [placement], src_data_rank=None)},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0 if is_filled else 0.0)}},
            "param_groups": [{"lr": 0.1 if is_filled else 0.0, "betas": (0.9, 0.99), "params": [0]}],
        },
        "tables": [torch.full((2,), 5.0 if is_filled else 0.0), torch.zeros(0)],
        "step": 12 if is_filled else 0,
    }


def save(files: Files, state: dict[str, Any], rank: int, **options: Any) -> None:
    files.save(items_of(nested(*flat(state)), **options), rank)


def load(files: Files, state: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Fill a state dict as a Reader does; return the values that were handed over."""
    values: dict[str, Any] = {}
    saved = files.states[rank if rank < files.world_size else 0]["items"]
    items = items_of(nested(*flat(state)), saved=saved, put=values.__setitem__)
    files.states[rank] = {
        **files.states[rank if rank < files.world_size else 0],
        "items": wanted_trees(items, saved),
    }
    files.load(items, rank, world_size)
    return values


@pytest.mark.parametrize("placement", [Shard(1), Replicate()])
def test_a_state_dict_is_loaded_on_other_ranks_and_placements(tmp_path: Path, placement: Any) -> None:
    files = Files(tmp_path, 2)
    on_ranks(2, lambda rank: save(files, state_of(Shard(0), 2, is_filled=True), rank))

    def restore(rank: int) -> None:
        state, right = (state_of(placement, 3, is_filled=is_filled) for is_filled in (False, True))
        values = load(files, state, rank, 3)
        weights = [s["model"]["layer.weight"].to_local() for s in (state, right)]
        assert torch.equal(*weights)
        assert float(state["optimizer"]["state"][0]["step"]) == 3.0
        assert torch.equal(state["tables"][0], torch.full((2,), 5.0))
        assert values == {
            "step": 12,
            "optimizer.param_groups.0.lr": 0.1,
            "optimizer.param_groups.0.betas": (0.9, 0.99),
            "optimizer.param_groups.0.params": [0],
        }

    on_ranks(3, restore)


def test_a_part_of_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    files = Files(tmp_path, 1)
    state = {"model": {"a": torch.ones(2), "b": torch.full((2,), 2.0)}, "step": 4}
    on_ranks(1, lambda rank: save(files, state, rank))
    live = {"model": {"b": torch.zeros(2)}}
    assert load(files, live, 0, 1) == {}
    assert live["model"]["b"].tolist() == [2.0, 2.0]


def test_a_state_dict_of_a_module_is_one_item(tmp_path: Path) -> None:
    files, module = Files(tmp_path, 1), nn.Sequential(nn.Linear(3, 2))
    on_ranks(1, lambda rank: save(files, dict(module.state_dict()), rank))
    assert set(files.states[0]["items"]) == {"state"}
    live = {"0.bias": torch.zeros(2)}
    load(files, live, 0, 1)
    assert torch.equal(live["0.bias"], module.state_dict()["0.bias"])


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    files = Files(tmp_path, 1)
    saved = {"model": {"a": torch.ones(2), "b": torch.ones(3), "c": 1, "d": torch.ones(2)}}
    on_ranks(1, lambda rank: save(files, saved, rank))
    live: dict[str, Any] = {
        "model": {
            "a": torch.zeros(2, dtype=torch.float16),
            "b": torch.zeros(4),
            "c": torch.zeros(1),
            "d": 0,
            "e": torch.zeros(2),
        }
    }
    with pytest.raises(MismatchError, match="5 differences") as caught:
        load(files, live, 0, 1)
    text = str(caught.value)
    assert "model.e: not in the checkpoint" in text
    assert "model.c: a tensor here, a value in the checkpoint" in text
    assert "model.d: a value here, a tensor in the checkpoint" in text
    assert "F32" in text and "F16" in text, "a dtype is never converted"
    assert not live["model"]["a"].any(), "nothing is changed"


def test_tensors_that_differ_between_ranks_are_kept_where_the_user_says_so(tmp_path: Path) -> None:
    files = Files(tmp_path, 2)

    def work(rank: int) -> None:
        state = {"model": {"bn.mean": torch.full((2,), float(rank)), "w": torch.ones(2)}}
        save(files, state, rank, per_rank=("model.*.mean",))

    on_ranks(2, work)
    assert len([row for row in files.rows if row.slice and row.slice.key == "model.bn.mean"]) == 2
    assert len([row for row in files.rows if row.slice and row.slice.key == "model.w"]) == 1

    def restore(rank: int) -> None:
        live = {"model": {"bn.mean": torch.full((2,), 9.0)}}
        load(files, live, rank, 2)
        assert live["model"]["bn.mean"].tolist() == [rank, rank]

    on_ranks(2, restore)


def test_each_save_follows_its_own_names_of_tensors_that_differ(request: pytest.FixtureRequest) -> None:
    """The load before, which has no such names, has seen the same tensors. Rank 0 saves the larger ones."""
    request.addfinalizer(lambda: set_connection(Connection()))
    block = {f"t{i}": torch.ones(3) for i in range(20)}
    state = {"model": {"mean": torch.ones(30), "block": block}}
    link = LocalLink(rank=1, world_size=2)
    set_connection(Connection(link=link))
    session = Session()
    session.load(items_of(state, put=lambda name, value: None))

    def saved(step: int, *per_rank: str) -> set[str]:
        session.save(step, state, None, per_rank)(Level.LOCAL, 10.0)
        return {name for name in link.tensors(step) if name.startswith("model.")}

    mean, tensors = {"model.mean"}, {f"model.block.{name}" for name in block}
    assert saved(1, "model.mean") >= mean
    assert saved(2, "model.mean", "model.block.*") == mean | tensors
    assert saved(3, "model.block.*") == tensors


def test_metadata_has_sizes_dtypes_and_values_under_the_names_of_dcp(tmp_path: Path) -> None:
    files = Files(tmp_path, 1)
    state = {"model": {"w": torch.ones(2, 3, dtype=torch.bfloat16)}, "step": 4, "pair": [torch.ones(1)]}
    on_ranks(1, lambda rank: save(files, state, rank))
    metadata = metadata_of(SavedState.of(files.states[0]["items"], ListedRows(files.rows)))
    described = metadata.state_dict_metadata
    assert set(described) == {"model.w", "step", "pair.0"}
    weight = described["model.w"]
    assert isinstance(weight, TensorStorageMetadata) and weight.size == (2, 3)
    assert weight.properties.dtype is torch.bfloat16
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in weight.chunks] == [((0, 0), (2, 3))]
    assert isinstance(described["step"], BytesStorageMetadata)
    assert metadata.planner_data["pair.0"] == ("pair", 0)


# -- what is refused -----------------------------------------------------------------------------------


class Changing(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """A planner that changes what is saved."""


def test_outside_a_run_the_error_says_how_to_join_one() -> None:
    with pytest.raises(NotConnected, match="belongs to no run"):
        Reader()
    with pytest.raises(NotConnected, match="belongs to no run"):
        Writer(1).stage({"w": torch.ones(1)})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_ray_ckpt_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'safe' is not a level"):
        Writer(1, level="safe")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot be sent to another process") as caught:
        pickle.dumps(Writer(1))
    assert "THREAD" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="does not end with step 3"):
        Writer(3).reset("runs/step-4")
    Writer(4).reset("runs/step-4")
    with pytest.raises(BaseException, match="Changing may change what is saved"):
        dcp.save({"w": torch.ones(1)}, storage_writer=Writer(1), planner=Changing(), no_dist=True)
    cached = dcp.DefaultSavePlanner(enable_plan_caching=True)
    with pytest.raises(BaseException, match="enable_plan_caching"):
        dcp.save({"w": torch.ones(1)}, storage_writer=Writer(1), planner=cached, no_dist=True)


def test_the_writer_is_a_stager_for_torch() -> None:
    from torch.distributed.checkpoint.staging import AsyncStager

    assert isinstance(Writer(1), AsyncStager)


@pytest.mark.parametrize(
    "state",
    [{"a.b": 1, "a": {"b": 2}}, {"a": {"0": torch.zeros(1), 0: torch.ones(1)}}],
    ids=["dots", "numbers"],
)
def test_two_entries_of_one_name_are_refused_before_one_is_lost(state: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"two entries 'a\.[b0]'"):
        Writer(1).stage(state)


def test_a_checkpoint_whose_manifest_is_damaged_is_named() -> None:
    checkpoint = CheckpointInfo(
        id=make_attempt(run_uid="0" * 32, session=1, step=10, attempt=0),
        seq=1,
        level=Level.LOCAL,
        world_size=1,
        num_nodes=1,
        size_bytes=1,
        root_digest="",
        committed_at_s=0.0,
        metrics={},
    )
    ticket = RestoreTicket(session_key=(1, 1), checkpoint=checkpoint, damage=("fragment 0 is damaged",))
    with pytest.raises(RestoreError, match="state of rank 0 cannot be read") as caught:
        ItemReader(LocalLink(), {}).saved(lambda: ticket)
    assert caught.value.fields["damage"] == ("fragment 0 is damaged",)


def test_a_first_save_or_a_load_that_failed_may_be_repeated(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: set_connection(Connection()))
    link, state = LocalLink(), {"model": {"weight": torch.ones(3)}}
    set_connection(Connection(link=link))
    first = Session()
    with pytest.raises(UnsupportedLeaf):
        first.save(1, {**state, "bad": {"value": object()}}, None, ())
    first.save(2, state, None, ())(Level.LOCAL, 10.0)

    set_connection(Connection(link=link.resumed(tmp_path, 2)))
    second, found = Session(), {"weight": torch.zeros(3)}
    with pytest.raises(MismatchError):
        second.load(items_of({"model": {"weight": torch.zeros(4)}}))
    second.load(items_of({"model": found}, put=lambda name, value: None))
    assert second.is_begun and torch.equal(found["weight"], torch.ones(3))
