"""Weights for vLLM from checkpoints of ray_ckpt; see docs/guides/vllm.md.

vLLM calls `register` in each of its processes, by the entry point group `vllm.general_plugins`. Nothing of
vLLM is imported before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray_ckpt.catalog.load import OpenedCheckpoint

__all__ = ["register", "write_files"]

log = logging.getLogger("ray_ckpt")

_is_registered = False


def register() -> None:
    """Register `load_format="ray_ckpt"` with the vLLM of this process, once.

    In a vLLM that has no such registry a warning is logged: engines with other formats must start.
    """
    global _is_registered
    if _is_registered:
        return
    try:
        from ray_ckpt.interop import vllm as loader
    except ImportError as error:
        log.warning('load_format="ray_ckpt" is not available: %s', error)
        return
    loader.register(_open_in_cluster)
    _is_registered = True


def write_files(
    checkpoint: str,
    folder: str | Path,
    *,
    item: str = "model",
    in_cluster: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> str:
    """Write the configuration and the tokenizer of a checkpoint to `folder`, for vLLM's `model`; return it.

    `item` is the item with the model, as in the configuration of the loader.

    Raises ConfigError if the checkpoint has no item `files`, the errors of `ray_ckpt.open`, and with
    `in_cluster` those of `ray_ckpt.open_in_cluster`.
    """
    from ray_ckpt.catalog.uri import CheckpointUri
    from ray_ckpt.interop.huggingface.hub import HubModel

    uri = CheckpointUri.parse(checkpoint)
    opened = (
        _open_in_cluster(str(uri.run), step=uri.step, storage_options=storage_options)
        if in_cluster
        else uri.open(storage_options, items=(item, "files"))
    )
    files = HubModel(opened, item=item).files
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        Path(folder, name).write_bytes(data)
    return str(folder)


def _open_in_cluster(
    path: str, *, step: int | None, storage_options: Mapping[str, str] | None
) -> OpenedCheckpoint:
    import ray

    from ray_ckpt.actors.live_checkpoint import open_in_cluster

    if not ray.is_initialized():  # a worker of vLLM that Ray did not start
        ray.init(address="auto", log_to_driver=False)
    return open_in_cluster(path, step=step, storage_options=storage_options)
