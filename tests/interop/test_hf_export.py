"""Checkpoints as model directories of Hugging Face, beside what `save_pretrained` writes."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import core_model_loading

import ray_ckpt
from ray_ckpt.capture.adapt import adapt
from ray_ckpt.catalog.load import OpenedCheckpoint
from ray_ckpt.errors import ConfigError
from ray_ckpt.interop.huggingface.files import FilesItem
from tests.catalog.test_export import export
from tests.catalog.test_load import save
from tests.support.examples import every_few
from tests.support.sample_run import RunLog

SMALL = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}


def gpt2(num_layers: int = 2) -> Any:
    config = transformers.GPT2Config(**SMALL, n_embd=16, n_layer=num_layers, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def untied() -> Any:
    config = transformers.LlamaConfig(
        **SMALL, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def mixture() -> Any:
    config = transformers.MixtralConfig(
        **SMALL,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return transformers.MixtralForCausalLM(config)


def qwen() -> Any:
    config = transformers.Qwen3Config(
        **SMALL,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    return transformers.Qwen3ForCausalLM(config)


MODELS = {"tied": partial(gpt2, 12), "untied": untied, "mixture": mixture, "tied, with norms of heads": qwen}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def saved(folder: Path, model: Any, step: int = 10) -> Path:
    """Save a run with one checkpoint of a model and its files."""
    items = {"model": adapt("model", model, {}), "files": FilesItem.of(model, None)}
    save(RunLog(folder=folder / "gpt"), [items], step=step)
    return folder / "gpt"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(12).reshape(1, 12)).logits
    return found


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("limit", [pytest.param("5GB", marks=pytest.mark.slow), "6KB"])
def test_the_folder_equals_that_of_save_pretrained(
    tmp_path: Path, build: Callable[[], Any], limit: str
) -> None:
    model = build()
    run, out, theirs = saved(tmp_path, model), tmp_path / "out", tmp_path / "theirs"
    assert export(run, out, "--to", "hf", "--max-file", limit) == 0
    model.save_pretrained(theirs, max_shard_size=limit)
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in theirs.iterdir())
    assert len([*out.glob("*.safetensors")]) == (
        1 if limit == "5GB" else len([*theirs.glob("*.safetensors")])
    )
    for file in out.glob("*.safetensors"):
        mine, other = load_file(file), load_file(theirs / file.name)
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text()) == json.loads((theirs / name).read_text())
    loaded = type(model).from_pretrained(out)
    assert torch.equal(logits(loaded), logits(model))


def based(folder: Path, make: Callable[..., Any], **options: Any) -> Any:
    """Return a model with an adapter on a base in a folder; all that it trains is drawn by chance."""
    untied().save_pretrained(folder)
    base = transformers.LlamaForCausalLM.from_pretrained(folder)
    model: Any = peft.get_peft_model(base, make(base_model_name_or_path=str(folder), **options))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    return model


QUERIES = {"r": 2, "target_modules": ["q_proj", "o_proj"]}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own use
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (peft.LoraConfig, QUERIES),
        (peft.LoraConfig, {**QUERIES, "modules_to_save": ["lm_head"]}),
        (peft.LoraConfig, {**QUERIES, "trainable_token_indices": [1, 2]}),
        pytest.param(peft.LoraConfig, {**QUERIES, "use_dora": True}, marks=pytest.mark.slow),
        (peft.VeraConfig, QUERIES),  # its random projections are in its file
        pytest.param(
            peft.VBLoRAConfig,
            {**QUERIES, "num_vectors": 8, "vector_length": 4, "topk": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["LoRA", "LoRA and a whole module", "LoRA and tokens", "DoRA", "VeRA", "VB-LoRA"],
)
def test_an_adapter_is_exported_as_peft_writes_it(
    tmp_path: Path, make: Callable[..., Any], options: dict[str, Any]
) -> None:
    model = based(tmp_path / "base", make, **options)
    run, out, theirs = saved(tmp_path, model), tmp_path / "out", tmp_path / "theirs"
    assert export(run, out, "--to", "hf") == 0
    model.save_pretrained(theirs)
    assert {p.name for p in out.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    mine, other = (load_file(folder / "adapter_model.safetensors") for folder in (out, theirs))
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    again = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base"), out
    )
    assert torch.equal(logits(again), logits(model))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("make", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_an_adapter_that_peft_computes_from_a_live_model_is_refused(
    tmp_path: Path, make: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model = based(tmp_path / "base", make, task_type="CAUSAL_LM", num_virtual_tokens=3)
    assert export(saved(tmp_path, model), tmp_path / "out", "--to", "hf") == 2
    assert re.search(r"is a P\w+_TUNING, whose file.*\s.*save_pretrained", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def adapted(adapters: dict[str, dict[str, Any]]) -> Any:
    """Return a model with the adapters of PEFT, by name."""
    model: Any = None
    for name, options in adapters.items():
        config = peft.LoraConfig(**options)
        if model is None:
            model = peft.get_peft_model(untied(), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    ("adapters", "exported"),
    [
        (
            {
                "default": {"r": 2, "target_modules": ["q_proj"]},
                "more": {"r": 4, "target_modules": ["v_proj"]},
            },
            "",
        ),
        (
            {
                "more": {"r": 4, "target_modules": ["v_proj"]},
                "default": {"r": 2, "target_modules": ["q_proj"]},
            },
            "",
        ),
        ({"mine": {"r": 2, "target_modules": ["q_proj"]}}, "mine"),
    ],
    ids=["of two the default one", "in any order", "the only one"],
)
def test_of_several_adapters_the_files_are_those_of_one(
    tmp_path: Path, adapters: dict[str, dict[str, Any]], exported: str
) -> None:
    model = adapted(adapters)
    run, out, theirs = saved(tmp_path, model), tmp_path / "out", tmp_path / "theirs"
    assert export(run, out, "--to", "hf") == 0
    model.save_pretrained(theirs)
    mine, other = (load_file(folder / "adapter_model.safetensors") for folder in (out, theirs / exported))
    assert mine.keys() == other.keys() and mine
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_several_adapters_of_which_none_is_the_default_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = adapted({name: {"r": 2, "target_modules": ["q_proj"]} for name in ("one", "two")})
    assert export(saved(tmp_path, model), tmp_path / "out", "--to", "hf") == 2
    assert "adapters one, two" in capsys.readouterr().err


def test_a_cast_changes_floats_and_the_configuration(tmp_path: Path) -> None:
    model = mixture()
    run, out = saved(tmp_path, model), tmp_path / "out"
    assert export(run, out, "--to", "hf", "--dtype", "bfloat16") == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    model.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    mine, other = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "theirs"))
    assert all(mine[name].dtype == torch.bfloat16 and torch.equal(mine[name], other[name]) for name in other)


@pytest.mark.parametrize("dtype", ["int8", "float4_e2m1fn_x2", "nn"])
def test_a_dtype_that_is_none_is_refused(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved(tmp_path, gpt2())
    assert export(run, tmp_path / "out", "--to", "hf", "--dtype", dtype) == 2
    assert "such as bfloat16" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_tensors_come_in_the_order_of_layers_and_memory_holds_one_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved(tmp_path, mixture())
    held: list[int] = []
    convert = core_model_loading.revert_weight_conversion

    def counting(model: Any, state: Any) -> Any:
        held.append(sum(t.nbytes for t in state.values() if t.device.type == "cpu"))
        return convert(model, state)

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", counting)
    found = dict(ray_ckpt.huggingface.tensors(run))
    layers = [int(name.split(".")[2]) for name in found if ".layers." in name]
    assert layers == sorted(layers)
    assert "model.layers.2.block_sparse_moe.experts.3.w2.weight" in found
    total = sum(tensor.nbytes for tensor in found.values())
    assert 0 < max(held) < total / 2.5, "one of three layers at a time"
    assert sum(held) < 1.01 * total, "no tensor is read twice"


@pytest.mark.parametrize("build", every_few(MODELS.values(), 2), ids=MODELS)
def test_memory_holds_the_tensors_of_one_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[], Any]
) -> None:
    model = build()
    run = saved(tmp_path, model)
    live, peak = 0, 0
    load = OpenedCheckpoint.load

    def released(nbytes: int) -> None:
        nonlocal live
        live -= nbytes

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal live, peak
        found = load(self, *args, **kwargs)
        for tensor in found.values():
            live += tensor.nbytes
            weakref.finalize(tensor.untyped_storage(), released, tensor.nbytes)
        peak = max(peak, live)
        return found

    monkeypatch.setattr(OpenedCheckpoint, "load", counting)
    gc.collect()
    gc.disable()  # tensors in a cycle would stay
    try:
        for _ in ray_ckpt.huggingface.tensors(run):
            pass
    finally:
        gc.enable()
    layers: dict[str, int] = defaultdict(int)
    for name, tensor in model.state_dict().items():
        layers[name.split(".")[2] if ".layers." in name else name] += tensor.nbytes
    assert 0 < peak <= max(layers.values()) + max(tensor.nbytes for tensor in model.state_dict().values())


def test_the_small_files_are_a_model_for_vllm(tmp_path: Path) -> None:
    run = saved(tmp_path, mixture())
    folder = ray_ckpt.vllm.write_files(f"{run}@10", tmp_path / "files")
    assert transformers.AutoConfig.from_pretrained(folder).num_local_experts == 4
    assert not list((tmp_path / "files").glob("*.safetensors"))


def test_the_small_files_for_vllm_are_those_of_the_item_with_the_model(tmp_path: Path) -> None:
    model = untied()
    items = {"policy": adapt("policy", model, {}), "files": FilesItem.of(model, None)}
    save(RunLog(folder=tmp_path / "gpt"), [items])
    folder = ray_ckpt.vllm.write_files(f"{tmp_path}/gpt@10", tmp_path / "files", item="policy")
    assert transformers.AutoConfig.from_pretrained(folder).num_hidden_layers == 2


def test_a_configuration_may_come_from_another_directory(tmp_path: Path) -> None:
    model = gpt2()
    save(RunLog(folder=tmp_path / "gpt"), [{"model": adapt("model", model, {})}])
    model.save_pretrained(tmp_path / "like")
    run, out = tmp_path / "gpt", tmp_path / "out"
    assert export(run, out, "--to", "hf") == 2
    assert export(run, out, "--to", "hf", "--like", str(tmp_path / "like")) == 0
    assert torch.equal(logits(type(model).from_pretrained(out)), logits(model))
    with safe_open(out / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_the_configuration_of_another_model_is_refused(tmp_path: Path) -> None:
    run = saved(tmp_path, gpt2(12))
    untied().save_pretrained(tmp_path / "like")
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM, which has no transformer\.h\.0.* and 14\d more"
    ):
        list(ray_ckpt.huggingface.tensors(run, like=tmp_path / "like"))
    with pytest.raises(ConfigError, match="no item 'policy'"):
        list(ray_ckpt.huggingface.tensors(run, item="policy"))


@pytest.mark.parametrize("name", ["../stolen", "/{folder}/stolen", "a/stolen", ".."])
def test_a_hostile_file_name_is_refused_and_writes_nothing(name: str, tmp_path: Path) -> None:
    model = untied()
    files = FilesItem.of(model, None).tree()
    hostile = name.replace("/{folder}", str(tmp_path))
    files[hostile] = torch.zeros(3, dtype=torch.uint8)
    items = {"model": adapt("model", model, {}), "files": FilesItem(files)}
    save(RunLog(folder=tmp_path / "gpt"), [items])
    with pytest.raises(ConfigError, match="is not the name of a file"):
        list(ray_ckpt.huggingface.tensors(tmp_path / "gpt"))
    with pytest.raises(ConfigError, match="is not the name of a file"):
        ray_ckpt.vllm.write_files(str(tmp_path / "gpt"), tmp_path / "files")
    assert not (tmp_path / "files").exists()
    assert not [*tmp_path.rglob("stolen")]


@pytest.mark.parametrize(
    "is_compiled",
    [pytest.param(True, id="compiled", marks=pytest.mark.slow), pytest.param(False, id="in DDP")],
)  # 4 s
def test_the_small_files_of_a_wrapped_model_are_those_of_the_model(is_compiled: bool) -> None:
    model = untied()
    wrapped = object.__new__(torch.nn.parallel.DistributedDataParallel)  # its __init__ needs a group
    torch.nn.Module.__init__(wrapped)
    wrapped.module = model
    found = FilesItem.of(torch.compile(model) if is_compiled else wrapped, None).tree()
    expected = FilesItem.of(model, None).tree()
    assert found.keys() == expected.keys() >= {"config.json", "generation_config.json"}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_small_files_that_are_too_large_are_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ray_ckpt.interop.huggingface.files.MAX_BYTES", 100)
    assert FilesItem.of(untied(), None).tree() == {}
    assert "more than 100, and are not saved" in caplog.text


@pytest.mark.parametrize("kind", ["none", "empty", "another item"])
def test_an_item_files_without_a_configuration_is_refused(kind: str, tmp_path: Path) -> None:
    model = untied()
    files: dict[str, dict[str, Any]] = {
        "none": {},
        "empty": {"files": FilesItem({})},
        "another item": {"files": adapt("files", torch.nn.Linear(1, 1), {})},
    }
    save(RunLog(folder=tmp_path / "gpt"), [{"model": adapt("model", model, {}), **files[kind]}])
    with pytest.raises(ConfigError, match="no item 'files' with a configuration"):
        list(ray_ckpt.huggingface.tensors(tmp_path / "gpt"))


REMOTE = '{"model_type": "none", "auto_map": {"AutoConfig": "nobody/none--configuration.Config"}}'


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"model_type": "none"}', REMOTE])
def test_a_directory_without_a_configuration_of_transformers_is_refused(
    text: str | None, tmp_path: Path
) -> None:
    run, like = saved(tmp_path, gpt2()), tmp_path / "like"
    like.mkdir()
    (like / "tokenizer.json").write_text("{}")
    if text is not None:
        (like / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        list(ray_ckpt.huggingface.tensors(run, like=like))
