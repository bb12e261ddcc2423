"""`ray-ckpt import hf`: model folders that transformers and torch wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint

import ray_ckpt
from ray_ckpt.errors import CheckpointError, ConfigError, CorruptionError
from ray_ckpt.interop.importers import huggingface
from tests.catalog.test_export import export
from tests.interop.imports import imported, make, restore

dcp: Any = checkpoint
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
TENSORS = {
    "layer.weight": torch.arange(12.0).view(3, 4),
    "layer.bias": torch.ones(3, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 2),
    "count": torch.tensor(7),
}


def folder(tmp_path: Path, name: str = "checkpoint-30") -> Path:
    path = tmp_path / name
    path.mkdir()
    save_file(TENSORS, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text('{"a": 1}')
    (path / "tokenizer.model").write_bytes(b"\x00\x01")
    (path / "training_args.bin").write_bytes(b"a pickle")
    (path / "optimizer.pt").write_bytes(b"a pickle")
    (path / "trainer_state.json").write_text("{}")
    (path / "generation_config.json").write_text("")
    return path


def test_tensors_are_the_model_and_small_files_are_files(tmp_path: Path) -> None:
    source = folder(tmp_path)
    found = imported("hf", source, tmp_path / "gpt")
    assert found["items"] == ["model", "files"] and found["step"] == 30
    assert found["imported_from"] == {"format": "hf", "version": "", "source": str(source)}
    state = ray_ckpt.open(tmp_path / "gpt").load()
    assert state["model"].keys() == TENSORS.keys()
    assert all(torch.equal(tensor, state["model"][name]) for name, tensor in TENSORS.items())
    files = {name: bytes(data.numpy()) for name, data in state["files"].items()}
    assert files == {"config.json": b'{"a": 1}', "tokenizer.model": b"\x00\x01"}


def test_it_restores_into_a_model_and_leaves_the_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = make(0)
    source = tmp_path / "run-7"
    source.mkdir()
    save_file(model.state_dict(), source / "model.safetensors")
    (source / "config.json").write_text("{}")
    imported("hf", source, tmp_path / "gpt")
    other, _ = make(1)
    assert restore(tmp_path / "gpt", model=other).step == 7
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert "also has ['files'], which is not registered" in caplog.text
    with pytest.raises(ray_ckpt.errors.MismatchError, match="lacks 'optimizer', which is registered here"):
        restore(tmp_path / "gpt", model=other, optimizer=torch.optim.SGD(other.parameters()))


def test_a_model_that_transformers_saved_in_several_files_goes_there_and_back(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    source = tmp_path / "checkpoint-4"
    model.save_pretrained(source, max_shard_size="4KB")
    assert len([*source.glob("model-*.safetensors")]) > 1
    imported("hf", source, tmp_path / "gpt")
    state = ray_ckpt.open(tmp_path / "gpt").load()
    assert {"config.json", "generation_config.json"} == state["files"].keys()
    assert all(torch.equal(tensor, state["model"][name]) for name, tensor in model.state_dict().items())
    assert export(tmp_path / "gpt", tmp_path / "out", "--item", "model") == 0
    back = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(tensor, back[name]) for name, tensor in model.state_dict().items())


def test_a_whole_file_counts_before_the_index_that_an_earlier_save_left(tmp_path: Path) -> None:
    source = folder(tmp_path)
    _index(source, dict.fromkeys(TENSORS, "model-00001-of-00002.safetensors"))  # which was deleted
    imported("hf", source, tmp_path / "gpt")
    state = ray_ckpt.open(tmp_path / "gpt").load()
    assert all(torch.equal(tensor, state["model"][name]) for name, tensor in TENSORS.items())


def test_slices_of_a_distributed_save_stay_slices(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-4"
    source.mkdir()
    whole = torch.arange(12.0).view(3, 4)
    for rank, (begin, part) in enumerate({0: whole[:2], 2: whole[2:]}.items()):
        sharding = {"w": {"saved_offsets": [begin, 0]}}
        name = f"shard-0000{rank}-model-00001-of-00001.safetensors"
        save_file(
            {"w": part.contiguous()}, source / name, metadata={"DCP_SHARDING_INFO": json.dumps(sharding)}
        )
    imported("hf", source, tmp_path / "gpt")
    assert torch.equal(ray_ckpt.open(tmp_path / "gpt").load("model")["w"], whole)
    (source / "shard-00000-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptionError, match=r"8 elements of model\.w are in no slice"):
        imported("hf", source, tmp_path / "other")


def test_an_adapter_and_links_of_a_cache(tmp_path: Path) -> None:
    blobs, source = tmp_path / "blobs", tmp_path / "adapter-5"
    blobs.mkdir()
    source.mkdir()
    save_file(TENSORS, blobs / "a")
    (source / "adapter_model.safetensors").symlink_to(blobs / "a")
    (source / "adapter_config.json").write_text("{}")
    imported("hf", source, tmp_path / "gpt")
    state = ray_ckpt.open(tmp_path / "gpt").load()
    assert state["model"].keys() == TENSORS.keys() and state["files"].keys() == {"adapter_config.json"}


# -- what is refused -----------------------------------------------------------------------------------


def _index(path: Path, weights: dict[str, str]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def _cut(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-8])


def _header(path: Path, header: bytes) -> None:
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def _pickle_only(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def _pipe(path: Path) -> None:
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")


TENSOR = b'{"a": {"dtype": "%s", "shape": [1], "data_offsets": [0, %d]}}'
DAMAGES: dict[str, tuple[Callable[[Path], object], type[CheckpointError], str]] = {
    "the index names a missing file": (
        lambda path: _index(path, {"a": "model-00001-of-00002.safetensors", "count": "model.safetensors"}),
        CorruptionError,
        r"model-00001-of-00002\.safetensors is missing",
    ),
    "the index names a missing tensor": (
        lambda path: _index(path, {"layer.w": "model.safetensors"}),
        CorruptionError,
        r"does not have layer\.w, which the index names",
    ),
    "the index leads away": (
        lambda path: _index(path, {"a": "../model.safetensors", "count": "model.safetensors"}),
        CorruptionError,
        "outside of the folder",
    ),
    "the index is no index": (
        lambda path: (path / "model.safetensors.index.json").write_text("[]"),
        CorruptionError,
        "must be an object",
    ),
    "a short file": (_cut, CorruptionError, "does not have the bytes of its shape"),
    "a very short file": (
        lambda path: (path / "model.safetensors").write_bytes(b"1"),
        CorruptionError,
        "is cut short",
    ),
    "no safetensors": (
        lambda path: (path / "model.safetensors").write_bytes(bytes(7) + b"\x7f" + bytes(50)),
        CorruptionError,
        "is no safetensors file",
    ),
    "damaged JSON": (lambda path: _header(path, b"{]"), CorruptionError, "The header is not valid"),
    "a key twice": (lambda path: _header(path, b'{"a": 1, "a": 1}'), CorruptionError, "same key twice"),
    "a dtype": (lambda path: _header(path, TENSOR % (b"F4", 1)), CorruptionError, "has the dtype 'F4'"),
    "a size": (lambda path: _header(path, TENSOR % (b"F32", 5)), CorruptionError, "bytes of its shape"),
    "pickles only": (
        _pickle_only,
        ConfigError,
        "in pytorch_model.bin only, a pickle. Save .* `ray-ckpt import pt`",
    ),
    "nothing": (
        lambda path: (path / "model.safetensors").unlink(),
        ConfigError,
        "weights in training_args.bin only",
    ),
    "a pipe": (_pipe, ConfigError, "is no regular file"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    damage, kind, message = DAMAGES[name]
    source = folder(tmp_path)
    damage(source)
    with pytest.raises(kind, match=message):
        imported("hf", source, tmp_path / "gpt")
    assert not (tmp_path / "gpt").exists()


def test_too_many_small_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "MAX_FILES_BYTES", 9)
    with pytest.raises(ConfigError, match=r"more than 9 bytes. Move tokenizer\.model elsewhere"):
        imported("hf", folder(tmp_path), tmp_path / "gpt")


@pytest.mark.parametrize("name", ["model", "checkpoint-0"])
def test_the_step_is_needed(name: str, tmp_path: Path) -> None:
    source = folder(tmp_path, name)
    with pytest.raises(ConfigError, match=r"Give --step N|The step is 0"):
        imported("hf", source, tmp_path / "gpt")
    assert imported("hf", source, tmp_path / "gpt", "--step", 9)["step"] == 9
