"""The loader in the registry of the real vLLM on a CPU, for three families of models; no engine runs."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.plugins import load_general_plugins

import ray_ckpt.vllm
from ray_ckpt.capture.adapt import adapt
from ray_ckpt.catalog.load import OpenedCheckpoint
from ray_ckpt.errors import ConfigError
from ray_ckpt.interop.huggingface.files import FilesItem
from tests.catalog.test_load import save
from tests.interop.test_hf_export import MODELS
from tests.support.sample_run import RunLog

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    ray_ckpt.interop.vllm.RayCkptLoader.open_in_cluster = staticmethod(ray_ckpt.vllm._open_in_cluster)


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    """Load the plugins as each process of vLLM does."""
    load_general_plugins()


def saved(folder: Path, model: Any, *, with_files: bool = True, step: int = 10) -> str:
    items = {"model": adapt("model", model, {})}
    if with_files:
        items["files"] = FilesItem.of(model, None)
    save(RunLog(folder=folder / "gpt"), [items], step=step)
    return f"{folder}/gpt@{step}"


def loader(checkpoint: str, **extra: Any) -> Any:
    """Return the loader that vLLM makes for this configuration."""
    extra = {"checkpoint": checkpoint, **extra} if checkpoint else extra
    return get_model_loader(LoadConfig(load_format="ray_ckpt", model_loader_extra_config=extra))


class Engine(torch.nn.Module):
    """A model that takes weights by their hub names, as models of vLLM do, into a dtype of its own."""

    def __init__(self, shapes: dict[str, torch.Size], dtype: torch.dtype) -> None:
        super().__init__()
        self.order: list[str] = []
        self.dtypes: set[torch.dtype] = set()
        self.names = {name: name.replace(".", "/") for name in shapes}
        for name, shape in shapes.items():
            self.register_parameter(self.names[name], torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            self.order.append(name)
            self.dtypes.add(tensor.dtype)
            if name in self.names:
                self.get_parameter(self.names[name]).data.copy_(tensor)
        return {self.names[name] for name in self.order if name in self.names}


def config(model: str = "", quantization: str | None = None) -> Any:
    return SimpleNamespace(model=model, quantization=quantization, dtype=torch.bfloat16)


def test_the_entry_point_registers_the_loader() -> None:
    (entry,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "ray_ckpt"]
    assert entry.value == "ray_ckpt.vllm:register"
    found = loader("/runs/gpt@10")
    assert isinstance(found, BaseModelLoader) and type(found).__module__ == "ray_ckpt.interop.vllm"
    ray_ckpt.vllm.register()  # plugins may be loaded several times


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_an_engine_gets_what_save_pretrained_writes(tmp_path: Path, build: Callable[[], Any]) -> None:
    model = build()
    uri = saved(tmp_path, model)
    model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    engine = Engine({name: tensor.shape for name, tensor in theirs.items()}, torch.bfloat16)
    loader(uri).load_weights(engine, config(str(tmp_path)))
    assert sorted(engine.order) == sorted(theirs), "each once, tied ones too"
    assert engine.dtypes == {torch.float32}, "vLLM itself casts"
    for name, tensor in theirs.items():
        assert torch.equal(engine.get_parameter(engine.names[name]), tensor.bfloat16()), name
    layers = [
        int(part)
        for name in engine.order
        for part in name.split(".")
        if part.isdigit() and ".experts." not in name
    ]
    assert layers == sorted(layers)


def test_memory_holds_one_layer_while_an_engine_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["mixture"]()
    uri, theirs = saved(tmp_path, model), sum(t.nbytes for t in model.state_dict().values())
    engine = Engine({}, torch.bfloat16)
    peak = 0
    load = OpenedCheckpoint.load

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal peak
        found = load(self, *args, **kwargs)
        alive = {
            t.untyped_storage().data_ptr(): t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor
        }
        peak = max(peak, sum(alive.values()))
        return found

    before = sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor)
    monkeypatch.setattr(OpenedCheckpoint, "load", counting)
    loader(uri).load_weights(engine, config(str(tmp_path)))
    assert 0 < peak - before < theirs / 2


def test_the_small_files_are_a_model_for_vllm(tmp_path: Path) -> None:
    model = MODELS["mixture"]()
    uri = saved(tmp_path, model)
    folder = ray_ckpt.vllm.write_files(uri, tmp_path / "files")
    assert json.loads((tmp_path / "files" / "config.json").read_text())["architectures"] == [
        "MixtralForCausalLM"
    ]
    assert transformers.AutoConfig.from_pretrained(folder).num_local_experts == 4
    assert not list((tmp_path / "files").glob("*.safetensors"))


def test_the_configuration_may_be_that_of_vllms_model(tmp_path: Path) -> None:
    model = MODELS["untied"]()
    uri = saved(tmp_path, model, with_files=False)
    model.save_pretrained(tmp_path / "base")
    engine = Engine({}, torch.float32)
    loader(uri).load_weights(engine, config(str(tmp_path / "base")))
    assert "model.layers.0.self_attn.q_proj.weight" in engine.order
    with pytest.raises(ConfigError, match="has no item 'files'"):
        loader(uri).load_weights(engine, config("hub/name"))


def test_a_step_in_the_cluster_is_opened_there(tmp_path: Path) -> None:
    model = MODELS["tied"]()
    uri = saved(tmp_path, model)
    asked: list[Any] = []

    def opener(path: str, *, step: int | None, storage_options: Any) -> Any:
        asked.append((path, step, storage_options))
        return ray_ckpt.open(path).choose(step)

    ray_ckpt.interop.vllm.RayCkptLoader.open_in_cluster = staticmethod(opener)
    engine = Engine({}, torch.float32)
    loader(uri, in_cluster=True).load_weights(engine, config(str(tmp_path)))
    assert asked == [(f"{tmp_path}/gpt", 10, None)] and "transformer.wte.weight" in engine.order


def test_parameters_without_a_weight_are_an_error(tmp_path: Path) -> None:
    uri = saved(tmp_path, MODELS["tied"]())
    engine = Engine({"extra.weight": torch.Size((2,))}, torch.float32)
    with pytest.raises(ConfigError, match=r"1 parameters that are not in the checkpoint: extra/weight"):
        loader(uri).load_weights(engine, config(str(tmp_path)))
    loader(uri).load_weights(engine, config(str(tmp_path), quantization="fp8"))


def test_wrong_configurations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs a checkpoint"):
        loader("")
    with pytest.raises(ConfigError, match="has 'chekpoint'") as caught:
        loader("", chekpoint="/runs/gpt")
    assert "checkpoint" in str(caught.value.hint)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="would each choose the newest") as caught:
        loader("/runs/gpt").load_weights(Engine({}, torch.float32), config())
    assert "@<step>" in str(caught.value.hint)


def test_another_version_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_ckpt.interop.packages.version", lambda name: "0.99.0")
    with pytest.raises(ConfigError, match=r"vllm 0\.99\.0 is not supported"):
        loader("/runs/gpt@10")
