"""A model loader of vLLM for checkpoints of ray_ckpt: `load_format="ray_ckpt"`.

vLLM reads the configuration and the tokenizer from its `model`, which `write_files` makes of the checkpoint,
and the weights from the loader, by their names on the hub, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from ray_ckpt.catalog.load import OpenedCheckpoint
from ray_ckpt.catalog.uri import CheckpointUri
from ray_ckpt.errors import ConfigError
from ray_ckpt.interop.packages import require
from ray_ckpt.texts import did_you_mean

LOAD_FORMAT = "ray_ckpt"
MAX_LISTED = 5  # names in one error


class InCluster(Protocol):
    """Function that opens a checkpoint from the nodes of the Ray cluster, as `ray_ckpt.open_in_cluster`."""

    def __call__(
        self, path: str, *, step: int | None, storage_options: Mapping[str, str] | None
    ) -> OpenedCheckpoint: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """vLLM's `model_loader_extra_config` for this loader."""

    checkpoint: str
    """URI of the checkpoint: `<storage path>/<run>@<step>`; without a step, the newest one."""
    item: str = "model"
    """The item with the model."""
    in_cluster: bool = False
    """Read from the memory and the disks of the nodes of this Ray cluster, also before the checkpoint is on
    the storage path."""
    storage_options: Mapping[str, str] | None = None
    """Options to open the storage path, as in the options of a run."""

    @classmethod
    def parse(cls, given: Any) -> LoaderConfig:
        """Return the configuration. Raises ConfigError for unknown options, and if there is no checkpoint."""
        known = [field.name for field in fields(cls)]
        options = dict(given) if isinstance(given, Mapping) else {}
        if unknown := sorted(set(options) - set(known)):
            raise ConfigError(
                f"model_loader_extra_config has {unknown[0]!r}.", hint=did_you_mean(unknown[0], known)
            )
        if not options.get("checkpoint"):
            raise ConfigError(
                'load_format="ray_ckpt" needs a checkpoint.',
                hint='Give model_loader_extra_config={"checkpoint": "<storage path>/<run>@<step>"}.',
            )
        return cls(**options)

    def open(self, in_cluster: InCluster) -> OpenedCheckpoint:
        """Open the checkpoint. Raises the errors of `ray_ckpt.open` and of `ray_ckpt.open_in_cluster`."""
        uri = CheckpointUri.parse(self.checkpoint)
        if not self.in_cluster:
            return uri.open(self.storage_options, items=(self.item, "files"))  # hub.FILES_ITEM
        return in_cluster(str(uri.run), step=uri.step, storage_options=self.storage_options)


class RayCkptLoader(BaseModelLoader):  # type: ignore[misc]
    """Loads the weights of a model from a checkpoint of ray_ckpt; memory holds one layer at most."""

    open_in_cluster: ClassVar[InCluster]

    def __init__(self, load_config: Any) -> None:
        """Take vLLM's LoadConfig. Raises ConfigError for an unknown version of vLLM, and as `parse`."""
        require("vllm", extra="vllm", owner=BaseModelLoader, names=("download_model", "load_weights"))
        super().__init__(load_config)
        self._config = LoaderConfig.parse(load_config.model_loader_extra_config)

    def download_model(self, model_config: Any) -> None:
        """Do nothing: every rank reads what it loads."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill a model of vLLM.

        Raises ConfigError if ranks could choose different checkpoints, and if a parameter stays without a
        value; the errors of `ray_ckpt.huggingface.tensors`.
        """
        self._check_step()
        weights = self.get_all_weights(model_config, model)
        loaded = model.load_weights(weights)  # type: ignore[operator]
        if loaded is None or model_config.quantization is not None:
            return  # the model does not report what it has loaded
        if missing := _missing({name for name, _ in model.named_parameters()}, set(loaded)):
            raise ConfigError(
                f"{type(model).__name__} has {len(missing)} parameters that are not in the checkpoint: "
                f"{', '.join(missing[:MAX_LISTED])}.",
                hint="Give vLLM the configuration of the model that was trained.",
            )

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names on the hub and whole tensors on the CPU, in the dtype in which they were saved.

        vLLM's `reload_weights` calls it by this name.
        """
        from ray_ckpt.interop.huggingface.hub import FILES_ITEM, HubModel  # may want another Transformers

        opened = self._config.open(type(self).open_in_cluster)
        folder = Path(model_config.model)
        has_files = FILES_ITEM in opened.saved().trees
        like = folder if folder.is_dir() and not has_files else None
        hub = HubModel(opened, item=self._config.item, like=like)
        for name in hub:
            yield name, hub.load(name)

    def _check_step(self) -> None:
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if several and CheckpointUri.parse(self._config.checkpoint).step is None:
            raise ConfigError(
                f"The ranks of vLLM would each choose the newest checkpoint of {self._config.checkpoint}.",
                hint=f'Name one: "checkpoint": "{self._config.checkpoint}@<step>".',
            )


def _missing(parameters: set[str], loaded: set[str]) -> list[str]:
    """Return the parameters that no loaded name stands for.

    vLLM reports the weights of experts under the module around theirs: `experts.w2_weight` stands for
    `experts.routed_experts.w2_weight`.
    """
    around = {tuple(name.rsplit(".", 1)) for name in loaded - parameters}
    return sorted(
        name
        for name in parameters - loaded
        if not around & {(module, name.rsplit(".", 1)[-1]) for module in _modules_around(name)}
    )


def _modules_around(parameter: str) -> list[str]:
    """Return the names of the modules that contain the module of a parameter."""
    parts = parameter.split(".")[:-2]
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def register(open_in_cluster: InCluster) -> None:
    """Register the loader with vLLM; a second call changes nothing but logs a warning of vLLM."""
    RayCkptLoader.open_in_cluster = staticmethod(open_in_cluster)
    register_model_loader(LOAD_FORMAT)(RayCkptLoader)
