"""Engines of DeepSpeed as items: `Checkpointer(engine=engine)`; see docs/guides/deepspeed.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ray_ckpt.capture.items import Item
from ray_ckpt.capture.wrappers import is_deepspeed_engine
from ray_ckpt.errors import UnsupportedItem
from ray_ckpt.interop.deepspeed import position
from ray_ckpt.interop.deepspeed.items import EngineModelItem, EngineOptimizerItem
from ray_ckpt.interop.deepspeed.partitions import check_names, is_zero
from ray_ckpt.interop.packages import require

PLAIN = ("engine", "model")
"""Names of an engine whose items are called `model`, `optimizer` and `scheduler`."""


def parts_of(name: str, obj: object) -> Mapping[str, object]:
    """Return the model, the optimizer and the scheduler of an engine; any other object itself."""
    if not is_deepspeed_engine(obj):
        return {name: obj}
    engine: Any = obj
    check(name, engine)
    model = "model" if name in PLAIN else name
    prefix = "" if name in PLAIN else f"{name}_"
    parts = {model: engine, f"{prefix}optimizer": engine.optimizer}
    scheduler = engine.lr_scheduler
    return parts if scheduler is None else {**parts, f"{prefix}scheduler": scheduler}


def adapt(name: str, obj: object, owners: Mapping[str, nn.Module | nn.Parameter]) -> Item | None:
    """Return the item of an engine's module or optimizer. UnsupportedItem for an optimizer alone."""
    if is_deepspeed_engine(obj):
        return EngineModelItem(obj)
    if not is_zero(obj):
        return None
    engines: list[Any] = [owner for owner in owners.values() if is_deepspeed_engine(owner)]
    engine = next((found for found in engines if found.optimizer is obj), None)
    if engine is None:
        raise UnsupportedItem(
            f"{name!r} is the optimizer of an engine of DeepSpeed, which is not registered.",
            hint="Register the engine: Checkpointer(engine=engine).",
            item=name,
        )
    return EngineOptimizerItem(name, engine, owners)


def check(name: str, engine: Any) -> None:
    """Raise UnsupportedItem if the state of an engine cannot be saved, ConfigError for other versions."""
    require("deepspeed", extra="deepspeed", owner=engine, names=(position.FORCED, position.UNMANAGED))
    for what, has in REFUSED.items():
        if has(engine):
            raise UnsupportedItem(
                f"The engine {name!r} has {what}, which cannot be saved.",
                hint="Use ZeRO 1, 2 or 3 without it; docs/guides/deepspeed.md lists what works.",
                item=name,
            )
    check_names(engine.optimizer)


def _kinds(obj: object) -> set[str]:
    return {kind.__name__ for kind in type(obj).__mro__}


def _device(config: Any) -> str:
    """Return the device that a part of ZeRO's configuration offloads to; "none" without offload."""
    return "none" if config is None else str(getattr(config.device, "value", config.device))


def _is_muon(engine: Any) -> bool:
    return "MuonWithAuxAdam" in _kinds(getattr(engine.optimizer, "optimizer", None))


REFUSED: Mapping[str, Callable[[Any], bool]] = {
    "pipeline parallelism": lambda e: "PipelineEngine" in _kinds(e) or e.pipeline_parallelism,
    "the hybrid engine": lambda e: "DeepSpeedHybridEngine" in _kinds(e),
    "experts (MoE or AutoEP)": lambda e: e.has_moe_layers,
    "tensor parallelism (AutoTP or an mpu)": lambda e: e.autotp_size() > 1 or e.mp_world_size > 1,
    "sequence parallelism": lambda e: e.sequence_parallel_size > 1,
    "NVMe offload of the optimizer": lambda e: _device(e.zero_offload_optimizer()) == "nvme",
    "NVMe offload of parameters": lambda e: _device(e.zero_offload_param()) == "nvme",
    "ZenFlow": lambda e: e.zenflow_config() is not None,
    "SuperOffload": lambda e: e.super_offload(),
    "an offload ratio below 1": lambda e: (
        e.zero_offload_optimizer() is not None and e.zero_partial_offload() < 1
    ),
    "zero_hpz_partition_size above 1": lambda e: e.zero_hpz_partition_size() > 1,
    "quantized weights": lambda e: e.zero_quantized_weights() or e.zero_quantized_nontrainable_weights(),
    "DeepCompile": lambda e: e.is_deepcompile_enabled(),
    "the optimizer Muon": _is_muon,
    "a gradient scaler of torch.autocast": lambda e: (
        getattr(e.optimizer, "torch_autocast_gradscaler", None) is not None
    ),
    "random layer token dropping": lambda e: e.random_ltd_enabled(),
    "data efficiency": lambda e: e.data_efficiency_enabled(),
    "LoRA of OptimizedLinear": lambda e: e.optimized_linear_lora_enabled,
    "no optimizer of ZeRO 1, 2 or 3": lambda e: not is_zero(e.optimizer),
}
"""The features that are refused, each with its test on an engine."""
