"""Values without pickle, names of pipeline stages, and the wait in another process; no cluster."""

from __future__ import annotations

import io
import multiprocessing
import threading
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ray_ckpt.capture.load import SavedState, wanted_trees
from ray_ckpt.capture.trees import TreeItem
from ray_ckpt.errors import ConfigError, FormatError, MismatchError, UnsupportedLeaf
from ray_ckpt.format.manifest import check_coverage
from ray_ckpt.format.tree import encode_tree
from ray_ckpt.restore.manifest import ListedRows
from tests.capture.ranks import Files, on_ranks
from tests.frameworks.megatron.program import quiet

with quiet():
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.rerun_state_machine import RerunMode

    from ray_ckpt.interop.megatron import folder, sharded_items, values
    from ray_ckpt.interop.megatron.agreement import Agreement
    from ray_ckpt.interop.megatron.pending import Pending, wait_for_end

WHOLE = torch.arange(1.0, 61.0).view(10, 6)


def test_values_of_megatron_are_stored_without_pickle() -> None:
    value: dict[str, Any] = {
        "args": Namespace(lr=0.1, dtype=torch.bfloat16, mode=RerunMode.DISABLED, inner=SimpleNamespace(x=1)),
        "rng": [(3, b"x"), np.arange(3, dtype=np.uint32), torch.arange(3, dtype=torch.uint8)],
        "extra": io.BytesIO(b"data"),
        "sizes": [{(torch.float32, torch.bfloat16): [3, 4]}],
        "order": OrderedDict(b=torch.tensor(1.5), a=torch.empty(0, 2)),
        "path": PosixPath("/data"),
        "shape": torch.Size([2, 3]),
        values.MARK: "a key like ours",
    }
    data = values.encode(value, "common")
    found = values.decode(data)
    assert found["args"] == value["args"] and found["args"].mode is RerunMode.DISABLED
    assert found["rng"][0] == (3, b"x") and np.array_equal(found["rng"][1], value["rng"][1])
    assert found["rng"][1].dtype == np.uint32 and torch.equal(found["rng"][2], value["rng"][2])
    assert found["extra"].getvalue() == b"data" and found["sizes"] == value["sizes"]
    assert list(found["order"]) == ["b", "a"] and found["order"]["b"].item() == 1.5
    assert found["order"]["a"].shape == (0, 2) and found["path"] == PosixPath("/data")
    assert found["shape"] == (2, 3) and found[values.MARK] == "a key like ours"
    assert values.encode(found, "common") == data


@pytest.mark.parametrize("value", [object(), torch.nn.Identity, lambda: 0, {"a": [threading.Lock()]}])
def test_a_value_that_needs_pickle_is_named(value: Any) -> None:
    with pytest.raises(UnsupportedLeaf, match=r"^rng_state: .*pickle"):
        values.encode(value, "rng_state")


@pytest.mark.parametrize(
    "form",
    [
        {values.MARK: "os.system", "value": "true"},
        {values.MARK: ["Tensor"]},
        {values.MARK: "Tensor", "dtype": "F32", "shape": [3], "value": b"1234"},
        {values.MARK: "Tensor", "dtype": "F32", "shape": [1 << 62, 1 << 62], "value": b"1234"},
        {values.MARK: "Enum", "class": "Namespace", "value": "x"},
        {values.MARK: "Enum", "class": "RerunMode", "value": "__class__"},
        {values.MARK: "dict", "value": [[[], 1]]},
        {values.MARK: "dict", "value": 3},
        {values.MARK: "Namespace", "value": [1]},
        {values.MARK: "BytesIO", "value": 3},
        {values.MARK: "Path", "value": None},
    ],
)
def test_a_form_that_no_save_makes_is_an_error(form: Any) -> None:
    with pytest.raises(FormatError):
        values.decode(encode_tree({"x": [form]}))


def of_layer(number: int, data: torch.Tensor) -> Any:
    return ShardedTensor.from_rank_offsets("layers", data, (0, number, 4), prepend_axis_num=1)


def test_stages_of_a_pipeline_are_loaded_by_one_rank(tmp_path: Path) -> None:
    """Each rank has keys of its own; there are uneven boxes, replicas, and objects of each rank."""
    files = Files(tmp_path, 2)

    def state(rank: int, *, is_filled: bool) -> dict[str, Any]:
        rows = (slice(0, 7), slice(7, 10))[rank]
        block = WHOLE[rows].clone() if is_filled else torch.zeros_like(WHOLE[rows])
        layer = torch.full((4,), rank + 1.0) if is_filled else torch.zeros(4)
        return {
            "uneven": ShardedTensor(
                "w", block, block.dtype, tuple(block.shape), (10, 6), (rows.start, 0), None
            ),
            f"stage{rank}": ShardedTensor.from_rank_offsets(f"optimizer.stage{rank}", layer.clone()),
            f"state{rank}": ShardedTensor.from_rank_offsets(f"optimizer.state.exp.w{rank}", layer - 5),
            "layers": [
                ShardedTensor.from_rank_offsets(
                    "layers", layer + 10 * k, (0, 2 * k + rank, 4), prepend_axis_num=1
                )
                for k in (0, 1)
            ],
            "same": ShardedTensor.from_rank_offsets("same", layer.clone(), replica_id=(0, rank)),
            "of rank": ShardedObject("of_rank", {"rank": rank}, (2,), (rank,)),
        }

    def save(rank: int) -> None:
        boxes, names, data = Agreement().agree(
            lambda: (
                sharded_items.saved_boxes(state(rank, is_filled=True)),
                values.encode({"step": 3}, "common"),
            )
        )
        files.save(sharded_items.items_to_save(boxes, names, values.plain(data)), rank)

    on_ranks(2, save)
    check_coverage(files.rows)
    saved = SavedState.of(files.states[1]["items"], ListedRows(files.rows))
    assert values.restored(saved.trees["common"]) == {"step": 3}

    def load(rank: int) -> None:
        both = {str(k): state(k, is_filled=False) for k in (0, 1)}
        both["twice"] = state(1, is_filled=False)["uneven"]
        wanted = sharded_items.Wanted.of(both, saved)
        files.states[0]["items"] = wanted_trees(wanted.items, files.states[0]["items"])
        files.load(wanted.items, rank, 1)
        loaded = wanted.loaded(both)
        assert torch.equal(torch.cat([loaded["0"]["uneven"], loaded["1"]["uneven"]]), WHOLE)
        assert torch.equal(loaded["twice"], WHOLE[7:]), "a box that two tensors name fills both"
        for k in (0, 1):
            assert torch.equal(loaded[str(k)][f"stage{k}"], torch.full((4,), k + 1.0))
            assert torch.equal(loaded[str(k)][f"state{k}"], torch.full((4,), k - 4.0))
            assert [t[0].item() for t in loaded[str(k)]["layers"]] == [k + 1.0, k + 11.0]
            assert torch.equal(loaded[str(k)]["same"], torch.ones(4)), "of the first replica"
            assert loaded[str(k)]["of rank"] == {"rank": k}
        with pytest.raises(MismatchError, match="such as absent"):
            sharded_items.Wanted.of({"x": ShardedTensor.from_rank_offsets("absent", torch.zeros(1))}, saved)

    on_ranks(1, load)
    described = sharded_items.described(saved, with_objects=True)
    assert described["optimizer.state.exp.w1"].global_shape == (4,)
    assert "optimizer.state.w1.exp" in {row.slice.key for row in files.rows if row.slice is not None}
    assert described["optimizer.stage0"].global_shape == (4,) and described["layers"].global_shape == (4, 4)
    assert described["of_rank/shard_1_2"].global_shape == (2,)


def test_objects_of_an_import_are_plain_values_with_tensors(tmp_path: Path) -> None:
    """An import has Megatron's list of one object, and optimizer state under Megatron's own key."""
    files = Files(tmp_path, 1)
    key, draws = "optimizer.state.exp.w", torch.arange(4.0)
    imported = {
        "model": {},
        "optimizer": {key: torch.ones(4)},
        "objects": {"rng/shard_0_1": [{"draws": [draws], "seed": 3}], "none/shard_0_1": [None]},
        "common": {"step": 3},
    }
    on_ranks(1, lambda rank: files.save({name: TreeItem(tree) for name, tree in imported.items()}, rank))
    saved = SavedState.of(files.states[0]["items"], ListedRows(files.rows))

    def load(rank: int) -> None:
        state = {
            "w": ShardedTensor.from_rank_offsets(key, torch.zeros(2), (0, 1, 2)),
            "rng": ShardedObject("rng", None, (1,), (0,)),
            "none": ShardedObject("none", None, (1,), (0,)),
        }
        wanted = sharded_items.Wanted.of(state, saved)
        files.states[0]["items"] = wanted_trees(wanted.items, files.states[0]["items"])
        files.load(wanted.items, rank, 1)
        loaded = wanted.loaded(state)
        assert torch.equal(loaded["w"], torch.ones(2)) and loaded["none"] is None
        assert torch.equal(loaded["rng"]["draws"][0], draws) and loaded["rng"]["seed"] == 3

    on_ranks(1, load)
    assert sharded_items.described(saved, with_objects=False)[key].global_shape == (4,)


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    agreement = [Agreement(), Agreement()]

    def save(rank: int) -> str:
        state = {"x": ShardedObject("x", object() if rank else 1, (2,), (rank,))}
        with pytest.raises(UnsupportedLeaf, match="x: "):
            agreement[rank].agree(lambda: (sharded_items.saved_boxes(state), b""))
        good = {f"x{rank}": ShardedTensor.from_rank_offsets(f"x{rank}", torch.ones(1))}
        _, names, data = agreement[rank].agree(lambda: (sharded_items.saved_boxes(good), str(rank).encode()))
        assert names["model"] == (("x0",), ("x1",)) and data == b"0"
        assert agreement[rank].agree(lambda: (sharded_items.saved_boxes(good), b""))[1] is names, (
            "names are kept"
        )
        return str(dist.get_rank())

    assert on_ranks(2, save) == ["0", "1"]


def _ignore(result: object) -> None: ...


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_waits_until_the_save_has_ended(method: str) -> None:
    event = threading.Event()
    pending = Pending(lambda: _ignore(event.wait(60)))
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=wait_for_end, args=(pending.path,))
    process.start()
    process.join(1.0)
    assert process.is_alive()
    event.set()
    process.join(60.0)
    assert process.exitcode == 0 and not Path(pending.path).exists()
    pending.result()
    wait_for_end(pending.path)  # at once


def test_the_error_of_a_save_is_that_of_its_finalization() -> None:
    def fail() -> None:
        raise ConfigError("no disk")

    with pytest.raises(ConfigError, match="no disk"):
        Pending(fail).result()


def test_a_folder_is_a_reference(tmp_path: Path) -> None:
    folder.write_reference(tmp_path, "s3://bucket/runs/gpt", 3)
    assert folder.read_reference(tmp_path) == ("s3://bucket/runs/gpt", 3)
    for text in ("", "[]", '{"run": 3, "step": 3}', '{"run": "x", "step": true}', "x" * (1 << 20)):
        (tmp_path / folder.REFERENCE).write_text(text)
        with pytest.raises(ConfigError, match="names no checkpoint"):
            folder.read_reference(tmp_path)
    assert folder.step_of("x/iter_0000100/") == 100
    for name in ("x/iter_0", "latest", "/"):
        with pytest.raises(ConfigError, match="does not end with a step"):
            folder.step_of(name)


def test_common_state_that_only_pickle_can_load_is_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.nn.Identity()}, tmp_path / "common.pt")
    with pytest.raises(Exception, match="only pickle can load"):
        folder.take_common(tmp_path)
