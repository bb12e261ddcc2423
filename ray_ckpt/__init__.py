"""ray_ckpt: checkpoints for distributed PyTorch training on Ray.

Importing this package imports neither ray nor torch; its names load what they need when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ray_ckpt import accelerate as accelerate
    from ray_ckpt import dcp as dcp
    from ray_ckpt import huggingface as huggingface
    from ray_ckpt import lightning as lightning
    from ray_ckpt import megatron as megatron
    from ray_ckpt import torchft as torchft
    from ray_ckpt import torchtitan as torchtitan
    from ray_ckpt import vllm as vllm
    from ray_ckpt.actors.client import annotate, exposure, pin, unpin
    from ray_ckpt.actors.connecting import connect
    from ray_ckpt.actors.live_checkpoint import open_in_cluster
    from ray_ckpt.capture.load import RestoreInfo
    from ray_ckpt.catalog.catalog import Catalog
    from ray_ckpt.catalog.load import open
    from ray_ckpt.data import GlobalBatchSampler
    from ray_ckpt.train.check import ResumeCheck, check_resume
    from ray_ckpt.trainer.checkpointer import Checkpointer

_HOMES = {
    "Catalog": "ray_ckpt.catalog.catalog",
    "Checkpointer": "ray_ckpt.trainer.checkpointer",
    "GlobalBatchSampler": "ray_ckpt.data",
    "RestoreInfo": "ray_ckpt.capture.load",
    "ResumeCheck": "ray_ckpt.train.check",
    "annotate": "ray_ckpt.actors.client",
    "check_resume": "ray_ckpt.train.check",
    "connect": "ray_ckpt.actors.connecting",
    "exposure": "ray_ckpt.actors.client",
    "open": "ray_ckpt.catalog.load",
    "open_in_cluster": "ray_ckpt.actors.live_checkpoint",
    "pin": "ray_ckpt.actors.client",
    "unpin": "ray_ckpt.actors.client",
}

_MODULES = (
    "accelerate",
    "dcp",
    "huggingface",
    "lightning",
    "megatron",
    "torchft",
    "torchtitan",
    "vllm",
)  # for other trainers; each needs the packages of its trainer

__all__ = [
    "Catalog",
    "Checkpointer",
    "GlobalBatchSampler",
    "RestoreInfo",
    "ResumeCheck",
    "__version__",
    "annotate",
    "check_resume",
    "connect",
    "exposure",
    "open",
    "open_in_cluster",
    "pin",
    "unpin",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"ray_ckpt.{name}")
    raise AttributeError(f"module 'ray_ckpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
