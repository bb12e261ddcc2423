"""Small directories of other trainers for mutations: made by torch, or unpacked from `tests/golden/foreign`.

The archives there are directories that DeepSpeed 0.19.8 and Megatron-core 0.16.1 wrote, on two ranks.
"""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ray_ckpt.interop.importers import Form
from tests.capture.ranks import on_ranks

GOLDEN = Path(__file__).parent.parent / "golden" / "foreign"
dcp: Any = checkpoint


def _trained() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def _state() -> dict[str, Any]:
    model, optimizer = _trained()
    odd = {
        "turned": torch.arange(12.0).view(3, 4).t(),
        "part": torch.arange(9)[2:5],
        "none": torch.zeros(0, 2),
    }
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "odd": odd,
        "seen": [1, ("a", 2.5)],
    }


def _dcp(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(_state(), checkpoint_id=folder, no_dist=True)


def _hf(folder: Path) -> None:
    weights = {name: tensor.contiguous() for name, tensor in _trained()[0].state_dict().items()}
    names = sorted(weights)
    files = {f"model-{k + 1:05}-of-00002.safetensors": names[k::2] for k in range(2)}
    for file, own in files.items():
        save_file({name: weights[name] for name in own}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in files.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "gpt2", "layers": 2}')


def _pt(folder: Path) -> None:
    torch.save(_state(), folder / "step_7.pt")


def _verl(folder: Path) -> None:
    def write(rank: int) -> None:
        model, _ = _trained()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        extra = {"lr_scheduler": {"last_epoch": 3}, "rng": {"cpu": torch.get_rng_state()}}
        for kind, value in (("model", model), ("optim", optimizer), ("extra_state", None)):
            state = extra if value is None else value.state_dict()
            torch.save(state, folder / f"{kind}_world_size_2_rank_{rank}.pt")

    on_ranks(2, write)
    (folder / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')


def _golden(name: str) -> Callable[[Path], None]:
    def unpack(folder: Path) -> None:
        with zipfile.ZipFile(GOLDEN / f"{name}.zip") as archive:
            archive.extractall(folder)

    return unpack


SAMPLES: Mapping[str, tuple[Form, Callable[[Path], None]]] = {
    "dcp": ("dcp", _dcp),
    "hf": ("hf", _hf),
    "pt": ("pt", _pt),
    "zero2": ("deepspeed", _golden("zero2")),
    "zero3": ("deepspeed", _golden("zero3")),
    "universal2": ("universal", _golden("universal2")),
    "universal3": ("universal", _golden("universal3")),
    "verl": ("verl", _verl),
    "torch_dist": ("torch_dist", _golden("torch_dist")),
}
"""The format of the import, and the function that writes the files to a folder, by the name of the sample."""


def source_of(name: str, folder: Path) -> Path:
    """Return what the command gets: the folder, or the file in it."""
    return folder / "step_7.pt" if name == "pt" else folder
