"""The platform `cpu` of verl, for ranks without an accelerator; VERL_USE_EXTERNAL_MODULES imports it.

verl has platforms of accelerators alone. Its engines are registered for "cuda": VERL_ENGINE_DEVICE names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch.distributed.fsdp import _init_utils
from transformers import AutoModelForTokenClassification
from verl.plugin.platform import PlatformBase, PlatformRegistry

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "tests.frameworks.verl.cpu_platform",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
}


class Device(str):
    """The name of the device, where verl wants its number: `to("cpu")`, and "0" in f"{name}:{number}"."""

    def __format__(self, spec: str) -> str:
        return "0"


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


MEMORY = SimpleNamespace(
    empty_cache=_nothing,
    synchronize=_nothing,
    memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    max_memory_allocated=lambda *_: 0,
    max_memory_reserved=lambda *_: 0,
    mem_get_info=lambda *_: (0, 0),
    current_device=lambda: Device("cpu"),
)
"""The part of `torch.cuda` that verl's engines call."""

# verl asks for flash attention in critics, whatever the configuration of the model is.
_critic_from_pretrained = AutoModelForTokenClassification.from_pretrained
AutoModelForTokenClassification.from_pretrained = lambda *args, **kwargs: _critic_from_pretrained(
    *args, **{**kwargs, "attn_implementation": "sdpa"}
)

# FSDP1 refuses to broadcast the weights of rank 0 from a CPU, which gloo can do.
_init_utils._check_module_states_for_sync_module_states = _nothing


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = MEMORY

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return Device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None

    set_device = synchronize = manual_seed = manual_seed_all = staticmethod(_nothing)
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = staticmethod(_nothing)
