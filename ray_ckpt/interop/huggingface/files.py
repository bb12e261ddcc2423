"""The small files of a model directory: config.json, generation_config.json, those of the tokenizer."""

from __future__ import annotations

import logging
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ray_ckpt.capture.items import Item
from ray_ckpt.capture.wrappers import unwrap

log = logging.getLogger("ray_ckpt")

DEFAULT_ADAPTER = "default"  # the adapter of PEFT whose files are in a model's directory itself
MAX_BYTES = 64 << 20  # of all files together; tokenizers have some 20 MB


class FilesItem(Item):
    """Files as tensors of bytes, {name: uint8 [size]}; a load leaves them, since the model is built already.

    `ray-ckpt export --to hf` writes them beside the weights.
    """

    def __init__(self, files: dict[str, torch.Tensor]) -> None:
        self._files = files

    @classmethod
    def of(cls, model: Any, processing: Any) -> FilesItem:
        """Take the files that `save_pretrained` of a model's configuration and a tokenizer would write.

        Rank 0 makes them for all ranks, so that they are equal. Without files, the item is empty; with more
        than MAX_BYTES of them too, and a warning is logged.
        """
        found: list[dict[str, bytes]] = [{}]
        is_group = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if not is_group or torch.distributed.get_rank() == 0:
            found = [_files_of(model, processing)]
        if is_group:
            torch.distributed.broadcast_object_list(found, src=0)
        return cls(
            {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in found[0].items()}
        )

    def tree(self) -> Any:
        return self._files

    def load(self, tree: Any) -> None:
        pass

    def is_shared(self, path: tuple[str, ...]) -> bool:
        return True

    def changes_in_step(self, path: tuple[str, ...]) -> bool:
        return False

    def is_replaced(self, path: tuple[str, ...]) -> bool:
        return True


def _files_of(model: Any, processing: Any) -> dict[str, bytes]:
    model = unwrap(model)
    with TemporaryDirectory(prefix="ray_ckpt-") as folder:
        _save(_config(model), folder)
        _save(getattr(model, "generation_config", None), folder)
        _save(_adapter_config(model), folder)
        _save(processing, folder)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
    files = {name: data for name, data in files.items() if data}
    if (size := sum(map(len, files.values()))) > MAX_BYTES:
        log.warning("the model's small files have %d bytes, more than %d, and are not saved", size, MAX_BYTES)
        return {}
    return files


def _config(model: Any) -> Any:
    """Return the model's configuration with the name of its class, which `save_pretrained` would add."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(base, "config"):
        return None
    config = copy(base.config)
    config.architectures = [type(base).__name__.removeprefix("FSDP")]  # fully_shard adds the prefix
    return config


def _adapter_config(model: Any) -> Any:
    """Return the configuration of PEFT's adapter "default", or of the first adapter."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not configs:
        return configs
    return configs.get(DEFAULT_ADAPTER, next(iter(configs.values())))


def _save(obj: Any, folder: str) -> None:
    """Write the files of a configuration or a tokenizer."""
    if hasattr(obj, "save_pretrained"):
        obj.save_pretrained(folder)
