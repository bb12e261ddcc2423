"""The objects that an Accelerator has prepared, as items of a Checkpointer.

Accelerate's wrappers of optimizers and schedulers stand before the objects that hold the state. The items
are the objects inside, so that hooks and loads reach them, and the wrappers see the loaded state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ray_ckpt.capture.items import Item
from ray_ckpt.errors import ConfigError, UnsupportedItem
from ray_ckpt.interop.packages import require

log = logging.getLogger("ray_ckpt")

PREPARED = {
    "model": "_models",
    "optimizer": "_optimizers",
    "scheduler": "_schedulers",
    "loader": "_dataloaders",
    "custom": "_custom_objects",
}
"""Private attributes of an Accelerator: lists of the objects that become the items of each name."""
OTHER_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "XLA")


def items(accelerator: Any) -> dict[str, Any]:
    """Return the items of a loop with Accelerate: `Checkpointer(**items(accelerator))`.

    Call this after `accelerator.prepare` and `register_for_checkpointing`. The items are `model`,
    `optimizer`, `scheduler`, `loader` and `custom` (second ones are `model_1` and so on), `scaler` with
    mixed precision of fp16, and `accelerator`, the position in gradient accumulation.

    `loader` is the epoch and the seed of the shuffle; a warning is logged for a shuffle without a seed. The
    position within an epoch is part of it only with `DataLoaderConfiguration(use_stateful_dataloader=True)`;
    else use `accelerator.skip_first_batches`, as without ray_ckpt.

    Raises ConfigError for a version of Accelerate that is not known or before `prepare`, UnsupportedItem
    under DeepSpeed, Megatron-LM or XLA.
    """
    require("accelerate", extra="accelerate", owner=accelerator, names=tuple(PREPARED.values()))
    engine = accelerator.distributed_type.value
    if engine in OTHER_ENGINES:
        raise UnsupportedItem(
            f"Accelerate runs {engine}, whose sharded state cannot be saved yet.",
            hint="Use DDP or FSDP2 of Accelerate.",
        )
    prepared = {name: getattr(accelerator, attribute) for name, attribute in PREPARED.items()}
    if not prepared["model"]:
        raise ConfigError(
            "The accelerator has prepared no model.", hint="Call items after accelerator.prepare."
        )
    for name in ("optimizer", "scheduler"):
        prepared[name] = [inner(wrapped, name) for wrapped in prepared[name]]
    prepared["loader"] = [_LoaderItem(loader) for loader in prepared["loader"]]
    if accelerator.is_main_process:
        for name, item in _named("loader", prepared["loader"]).items():
            item.warn_of_shuffle(name)
    found: dict[str, Any] = {}
    for name in ("model", "optimizer", "scheduler", "loader"):
        found |= _named(name, prepared[name])
    return found | own_items(accelerator) | {"accelerator": _PositionItem(accelerator)}


def own_items(accelerator: Any) -> dict[str, Any]:
    """Return the items of objects that only the accelerator holds: the scaler, and registered objects."""
    found = _named("custom", getattr(accelerator, PREPARED["custom"]))
    return found if accelerator.scaler is None else {**found, "scaler": accelerator.scaler}


def inner(wrapped: Any, attribute: str) -> Any:
    """Return the object inside Accelerate's wrapper, or the object itself if it is not wrapped."""
    while type(wrapped).__module__.startswith("accelerate."):
        wrapped = getattr(wrapped, attribute)
    return wrapped


def _named(name: str, objects: Sequence[Any]) -> dict[str, Any]:
    return {name if k == 0 else f"{name}_{k}": obj for k, obj in enumerate(objects)}


class _PositionItem(Item):
    """The number of batches since the last optimizer step, {"step"}."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def tree(self) -> Any:
        return {"step": self._accelerator.step}

    def load(self, tree: Any) -> None:
        self._accelerator.step = tree["step"]


class _LoaderItem(Item):
    """A prepared DataLoader: {"epoch", "seed"}, and {"loader"}, its position, if it is stateful."""

    per_rank = True

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def tree(self) -> Any:
        tree = {
            "epoch": self._loader.iteration + self._is_at_last_batch,
            "seed": getattr(self._loader.get_sampler(), "initial_seed", None),
        }
        return {**tree, "loader": self._loader.state_dict()} if self._is_stateful else tree

    def load(self, tree: Mapping[str, Any]) -> None:
        sampler = self._loader.get_sampler()
        if tree["seed"] is not None and hasattr(sampler, "initial_seed"):
            sampler.initial_seed = tree["seed"]
        self._loader.set_epoch(tree["epoch"])
        if self._is_stateful:
            self._loader.load_state_dict(tree["loader"])

    def problems(self, saved: Any) -> list[str]:
        if self._is_stateful and "loader" not in saved:
            return ["loader: was saved without use_stateful_dataloader, and has no position"]
        return []

    def warn_of_shuffle(self, name: str) -> None:
        """Log a warning if the order of the samples comes from a generator, whose state is not saved."""
        sampler = self._loader.get_sampler()
        if hasattr(sampler, "generator") and not hasattr(sampler, "initial_seed"):
            log.warning(
                "%s shuffles by a generator, which is not saved: after a restart the order is another one; "
                "use DataLoaderConfiguration(use_seedable_sampler=True)",
                name,
            )

    @property
    def _is_at_last_batch(self) -> bool:
        """True behind the last batch of an epoch that a stateful loader has not counted yet.

        The loader continues from there with a whole epoch, which must be the next one.
        """
        given = self._loader.end_of_dataloader and self._is_stateful
        return given and any(
            each is self._loader for each in self._loader.gradient_state.dataloader_references
        )

    @property
    def _is_stateful(self) -> bool:
        return bool(getattr(self._loader, "use_stateful_dataloader", False))
