"""Megatron-core's `dist_checkpointing` with the strategies of ray_ckpt, on a real node.

tests/frameworks/megatron_0_15 runs the same tests with the line before.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import ray
import torch
from torch import nn

import ray_ckpt
from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.errors import MismatchError
from tests.cluster.ranks import RankGroup
from tests.frameworks.megatron import optimizer_state, program

pytestmark = pytest.mark.timeout(900)  # each process takes long to import Megatron
OPTIONS = {"remote_every": 1000}


class Plain(nn.Module):
    """The weights of the tiny GPT in plain torch, by layer."""

    def __init__(self) -> None:
        super().__init__()
        width, hidden = program.WIDTH, 4 * program.WIDTH
        self.embedding = nn.Embedding(program.VOCABULARY, width)
        self.positions = nn.Embedding(8, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(program.LAYERS))
        self.proj = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(program.LAYERS))
        self.fc2 = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(program.LAYERS))


PLAIN = {  # parameters of Plain by keys of Megatron, which have the layer as first axis
    "embedding.weight": "embedding.word_embeddings.weight",
    "positions.weight": "embedding.position_embeddings.weight",
    "qkv": "decoder.layers.self_attention.linear_qkv.weight",
    "proj": "decoder.layers.self_attention.linear_proj.weight",
    "fc2": "decoder.layers.mlp.linear_fc2.weight",
}


def test_a_killed_run_goes_on_exactly_also_with_other_tensor_parallelism(
    cluster: LocalCluster, pair: RankGroup, single: RankGroup, storage: str, tmp_path: Path
) -> None:
    calm, broken = str(tmp_path / "calm"), str(tmp_path / "broken")
    doomed = RankGroup([cluster.nodes["node-a"].node_id] * 2)
    doomed.run(program.set_tensor_parallelism, 2)
    with pytest.raises(ray.exceptions.RayActorError):
        doomed.run(program.die_in_a_save, "broken", storage, broken, OPTIONS)
    doomed.stop()
    assert "metadata.json" not in program.files_of(broken, 6), "Megatron takes that folder for no checkpoint"
    again = pair.run(program.train, "broken", storage, broken, 2, 7, OPTIONS)
    for rank, seen in enumerate(again):
        assert seen["step"] == 4, "the newest committed one, of which rank 0 had captured the next"
        assert seen["folder"].endswith("broken/iter_0000004")
        assert seen["files"] == {"metadata.json", "ray_ckpt.json"}, "no pickle is left"
        assert isinstance(seen["args"], Namespace) and seen["args"].dtype is torch.bfloat16
        assert seen["args"].backend.name == "auto" and seen["args"].betas == (0.9, 0.99)
        assert seen["local"] == f"of rank {rank}"
        assert seen["rng_state"][0]["rank"] == rank and seen["rng_state"][0]["pair"] == (rank, b"x")
        assert seen["content_metadata"] == {"distrib_optim_sharding_type": "fully_reshardable"}
    (alone,) = single.run(program.train, "broken", storage, broken, 1, 8, OPTIONS)
    assert alone["step"] == 7 and alone["rng_state"] is None
    pair.run(program.train, "calm", storage, calm, 2, 8, OPTIONS)
    expected, found = (program.whole(f"{storage}/{run}", 8) for run in ("calm", "broken"))
    assert expected.keys() == found.keys() and len(expected) == 39
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    check_plain(ray_ckpt.open(f"{storage}/broken").load("model", step=7))


def check_plain(state: dict[str, torch.Tensor]) -> None:
    """Load the model that two ranks saved into a plain module."""
    plain = Plain()
    weights = {}
    for name, key in PLAIN.items():
        if "." in name:
            weights[name] = state[key]
        else:
            weights |= {f"{name}.{layer}.weight": tensor for layer, tensor in enumerate(state[key])}
    plain.load_state_dict(weights)  # strict: all names and shapes fit
    assert torch.equal(plain.state_dict()["fc2.1.weight"], state[PLAIN["fc2"]][1])


@pytest.mark.parametrize(
    ("form", "saved_tp", "loaded_tp"),
    [
        pytest.param("fully_reshardable", 2, 1, id="fully_reshardable, TP 2 to TP 1"),
        pytest.param("dp_reshardable", 1, 1, id="dp_reshardable, DP 2 to DP 1"),
    ],
)
def test_optimizer_state_is_resharded(
    pair: RankGroup, single: RankGroup, storage: str, folders: str, form: str, saved_tp: int, loaded_tp: int
) -> None:
    pair.run(optimizer_state.save_state, "formats", storage, folders, saved_tp, form, OPTIONS)
    found = single.run(optimizer_state.load_state, "formats", storage, folders, loaded_tp, form, OPTIONS)
    assert found == [True]


def test_state_that_is_reshardable_over_data_parallelism_only_is_refused_for_another_layout(
    pair: RankGroup, single: RankGroup, storage: str, folders: str
) -> None:
    pair.run(optimizer_state.save_state, "other", storage, folders, 2, "dp_reshardable", OPTIONS)
    with pytest.raises(MismatchError, match="dp_group_idx_0"):
        single.run(optimizer_state.load_state, "other", storage, folders, 1, "dp_reshardable", OPTIONS)


def test_misuse_is_named_on_all_ranks(pair: RankGroup, storage: str, folders: str) -> None:
    pair.run(program.train, "misuse", storage, folders, 2, 4, OPTIONS)
    for errors in pair.run(program.misuse, "misuse", storage, folders, OPTIONS):
        assert "checkpoint of step 4, which was not loaded" in errors["unloaded"]
        assert "is of step 2, and the run continues from step 4" in errors["older"]
        if program.HAS_WRAPPERS:
            assert "FullyParallelLoadStrategyWrapper" in errors["wrapped load"]
        assert "lacks 1 keys, such as other" in errors["missing"]
        assert "cannot be changed" in errors["removal"]
        assert "does not end with a step" in errors["unnumbered"]
        assert "'fully_sharded_model_space'" in errors["format"] and "UnsupportedItem" in errors["format"]
        assert "bad" in errors["object"] and "pickle" in errors["object"], "also on the rank without it"
        assert "common" in errors["common"] and "Identity" in errors["common"]


def test_megatron_finds_the_strategies_by_the_folder(pair: RankGroup, storage: str, folders: str) -> None:
    one, two = pair.run(program.wrap_and_describe, "wrapped", storage, folders, OPTIONS)
    saved = program.whole(f"{storage}/wrapped", 1)
    key = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    for seen in (one, two):
        assert seen["shapes"][key] == (2, 16, 64)
        assert seen["shapes"]["rng_state/shard_0_1"] == (1,)
        name = "optimizer.state.decoder.layers.mlp.linear_fc2.weight.exp_avg"
        assert torch.equal(seen["plain"][key], saved[name])
        assert key in seen["left"] and "rng_state" in seen["left"]


def test_rows_that_pad_a_vocabulary_may_differ(
    pair: RankGroup, single: RankGroup, storage: str, folders: str
) -> None:
    parts = pair.run(program.pad, "padded", storage, folders, 64, OPTIONS)
    for size in (72, 56):
        (found,) = single.run(program.pad, "padded", storage, folders, size, OPTIONS)
        for tensor, halves in zip(found, zip(*parts, strict=True), strict=True):
            whole = torch.cat([*halves, torch.zeros(8, program.WIDTH)])
            assert torch.equal(tensor, whole[:size])


def test_other_folders_are_saved_and_loaded_by_megatron_itself(single: RankGroup, tmp_path: Path) -> None:
    assert single.run(program.keep_stock, str(tmp_path / "stock")) == [True]
