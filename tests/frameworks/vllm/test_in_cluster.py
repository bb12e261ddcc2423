"""An engine of vLLM with a step that no storage path has yet, of a training with frozen and tied weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_ckpt
from ray_ckpt.errors import ConfigError
from ray_ckpt.interop.huggingface.files import FilesItem
from tests.cluster.ranks import RankGroup
from tests.frameworks.vllm.engines import engine, from_checkpoint, generate
from tests.frameworks.vllm.models import expected, qwen

STEPS = 4


@pytest.fixture
def rank(node: str) -> Iterator[RankGroup]:
    group = RankGroup([node])
    yield group
    group.stop()


def train(storage: str) -> tuple[list[list[int]], list[list[int]]]:
    """Train all but the first layer, with one save in two steps; return tokens after the steps 2 and 4."""
    torch.manual_seed(0)
    model = qwen()
    model.model.layers[0].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    ray_ckpt.connect(
        run="gpt", storage_path=storage, rank=0, world_size=1, every_steps=2, remote_every=1000, replicas=0
    )
    ckpt = ray_ckpt.Checkpointer(model=model, optimizer=optimizer, files=FilesItem.of(model, None))
    tokens = []
    for step in ckpt.steps(total=STEPS):
        inputs = torch.randint(64, (2, 8))
        model(input_ids=inputs, labels=inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step)
        tokens.append(expected(model))
    ckpt.close()
    return tokens[1], tokens[3]


@pytest.mark.timeout(600)
def test_an_engine_reads_from_the_nodes(rank: RankGroup, tmp_path: Path) -> None:
    run = f"{tmp_path / 'storage'}/gpt"
    by_step = dict(zip((2, 4), rank.run(train, str(tmp_path / "storage"))[0], strict=True))
    assert by_step[2] != by_step[4]
    with pytest.raises(ConfigError, match="no durable checkpoint"):
        ray_ckpt.vllm.write_files(run, tmp_path / "files")
    for uri, tokens in {f"{run}@2": by_step[2], run: by_step[4]}.items():
        folder = ray_ckpt.vllm.write_files(uri, tmp_path / "files", in_cluster=True)
        options: dict[str, Any] = from_checkpoint(uri, in_cluster=True)
        with engine(folder, **options) as llm:
            assert generate(llm) == tokens
