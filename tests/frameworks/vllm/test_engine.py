"""Engines of vLLM with the weights of a checkpoint, beside those with the files of `save_pretrained`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm

import ray_ckpt.vllm
from ray_ckpt.errors import ConfigError
from tests.frameworks.vllm.engines import OPTIONS, engine, from_checkpoint, generate, parameters, stop
from tests.frameworks.vllm.models import MODELS, expected, gpt2, llama, mixtral, qwen, saved


def assert_equal(found: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert found.keys() == other.keys() and found
    assert all(torch.equal(found[name], other[name]) for name in found)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_an_engine_equals_that_of_save_pretrained(tmp_path: Path, build: Callable[[], Any]) -> None:
    model = build()
    uri, tokens = saved(tmp_path, model), expected(model)
    model.save_pretrained(tmp_path / "theirs")
    with engine(ray_ckpt.vllm.write_files(uri, tmp_path / "files"), **from_checkpoint(uri)) as llm:
        mine = parameters(llm)
        assert generate(llm) == tokens
    with engine(tmp_path / "theirs", load_format="safetensors") as llm:
        assert_equal(mine, parameters(llm))
        assert generate(llm) == tokens


def test_the_program_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = saved(tmp_path, llama())
    options = {name: value for name, value in OPTIONS.items() if name != "skip_tokenizer_init"}
    monkeypatch.setattr(vllm, "LLM", partial(vllm.LLM, **options))
    program = Path(__file__).with_name("serve.py").read_text()
    for name, here in {"/shared/runs/gpt@3000": uri, "gpt-files": str(tmp_path / "files")}.items():
        assert name in program
        program = program.replace(name, here)
    printed: list[Any] = []
    names: dict[str, Any] = {"print": printed.append}
    exec(program, names)
    stop(names.pop("llm"))
    assert len(printed[0][0].outputs[0].text.split()) > 1


def test_weights_have_the_dtype_of_the_engine(tmp_path: Path) -> None:
    model = qwen().to(torch.bfloat16)
    uri = saved(tmp_path, model)
    folder = ray_ckpt.vllm.write_files(uri, tmp_path / "files")
    model.save_pretrained(tmp_path / "theirs")
    for dtype, expected_dtype in {"auto": torch.bfloat16, "float32": torch.float32}.items():
        with engine(folder, dtype=dtype, **from_checkpoint(uri)) as llm:
            mine = parameters(llm)
        assert {tensor.dtype for tensor in mine.values()} == {expected_dtype}
        with engine(tmp_path / "theirs", dtype=dtype, load_format="safetensors") as llm:
            assert_equal(mine, parameters(llm))


def test_a_checkpoint_without_files_takes_the_configuration_of_a_folder(tmp_path: Path) -> None:
    model = gpt2()
    uri = saved(tmp_path, model, has_files=False)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "files")
    with engine(tmp_path / "files", **from_checkpoint(uri)) as llm:
        assert generate(llm) == expected(model)


def test_an_engine_reloads_its_weights(tmp_path: Path) -> None:
    model = qwen()
    uri = saved(tmp_path, model)
    with engine(ray_ckpt.vllm.write_files(uri, tmp_path / "files"), **from_checkpoint(uri)) as llm:
        before = parameters(llm)
        llm.apply_model(lambda model: [parameter.data.zero_() for parameter in model.parameters()] and None)
        assert not any(tensor.any() for tensor in parameters(llm).values())
        llm.collective_rpc("reload_weights")
        assert_equal(parameters(llm), before)
        assert generate(llm) == expected(model)


@pytest.mark.parametrize("build", [llama, mixtral])
def test_parameters_that_the_checkpoint_lacks_are_named(tmp_path: Path, build: Callable[[], Any]) -> None:
    uri = saved(tmp_path, build())
    folder = Path(ray_ckpt.vllm.write_files(uri, tmp_path / "files"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    experts = {"w13_weight", "w2_weight"} if build is mixtral else set()
    with pytest.raises(ConfigError) as caught, engine(folder, **from_checkpoint(uri)):
        pass
    message = str(caught.value)
    assert "model.layers.2.input_layernorm.weight" in message and "model.layers.1." not in message
    assert all(f"block_sparse_moe.experts.routed_experts.{name}" in message for name in experts)


def test_the_options_are_checked(tmp_path: Path) -> None:
    uri = saved(tmp_path, llama())
    folder = ray_ckpt.vllm.write_files(uri, tmp_path / "files")
    with pytest.raises(ConfigError, match="needs a checkpoint"), engine(folder, load_format="ray_ckpt"):
        pass
    with (
        pytest.raises(ConfigError, match="has 'items'"),
        engine(folder, **from_checkpoint(uri, items="model")),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="no item 'ema'"),
        engine(folder, **from_checkpoint(uri, item="ema")),
    ):
        pass
