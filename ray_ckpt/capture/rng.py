"""Random state of this process, and of generators that a user registered.

A process has the generators of python, numpy and torch, where torch has one on the CPU and one on each
device; `RngItem` saves them automatically. `generator_item` adapts registered generators, which are restored
in place.

A rank that did not exist when a checkpoint was saved has no state in it. Such a rank gets its own streams,
seeded by a digest of rank 0's saved state and by the rank number (numpy's SeedSequence; O'Neill's seed_seq).
The streams are the same for the same checkpoint, and independent of the streams of all other ranks.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ray_ckpt.capture.per_rank import PerRankItem
from ray_ckpt.format.digest import Digester


class RngItem(PerRankItem):
    """The generators of this process; registered automatically on every rank."""

    def tree(self) -> Any:
        """Return copies of the states: "python", "numpy", "torch_cpu", and "device" with an accelerator."""
        tree = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch_cpu": torch.get_rng_state(),
        }
        device = torch.accelerator.current_accelerator(check_available=True)
        return tree if device is None else tree | {"device": _device_states(device)}

    def load(self, tree: Any) -> None:
        random.setstate(tree["python"])
        np.random.set_state(tree["numpy"])
        torch.set_rng_state(tree["torch_cpu"])
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is not None and tree.get("device", {}).get("type") == device.type:
            _set_device_states(device, tree["device"])

    def load_for_new_rank(self, tree: Any, rank: int) -> None:
        """Start streams for a rank that the checkpoint does not have; `tree` is the tree of rank 0.

        As torch.manual_seed does, all devices get the CPU's seed.
        """
        python, for_numpy, for_torch = _seeds(tree, rank).spawn(3)
        random.seed(_number(python))
        np.random.seed(for_numpy.generate_state(8))
        torch.manual_seed(_number(for_torch) % 2**64)


def _device_states(device: torch.device) -> dict[str, Any]:
    """Return the state of every device of the accelerator, and the current device. Waits for no device."""
    module = torch.get_device_module(device)
    states = [module.get_rng_state(index) for index in range(torch.accelerator.device_count())]
    return {"type": device.type, "current": torch.accelerator.current_device_index(), "states": states}


def _set_device_states(device: torch.device, saved: Any) -> None:
    """Set the saved states; the current device gets the state of the device that was current at the save."""
    module = torch.get_device_module(device)
    for index, state in enumerate(saved["states"][: torch.accelerator.device_count()]):
        module.set_rng_state(state, index)
    module.set_rng_state(saved["states"][saved["current"]], torch.accelerator.current_device_index())


# -- generators that a user made ----------------------------------------------------------------------


class GeneratorItem(PerRankItem, ABC):
    """A generator, restored in place: {"kind": which generator and algorithm, "state": ...}."""

    def tree(self) -> Any:
        return {"kind": self.kind, "state": self._state()}

    def load(self, tree: Any) -> None:
        self._set_state(tree["state"])

    def load_for_new_rank(self, tree: Any, rank: int) -> None:
        """Start a stream for a rank that the checkpoint does not have, as RngItem does."""
        self._seed(_seeds(tree, rank))

    def problems(self, saved: Any) -> list[str]:
        kind = saved.get("kind") if isinstance(saved, dict) else None
        return [] if kind == self.kind else [f"is a {self.kind}, in the checkpoint it is {kind or 'none'}"]

    @property
    @abstractmethod
    def kind(self) -> str: ...

    @abstractmethod
    def _state(self) -> Any: ...

    @abstractmethod
    def _set_state(self, state: Any) -> None: ...

    @abstractmethod
    def _seed(self, seeds: np.random.SeedSequence) -> None: ...


class _PythonGenerator(GeneratorItem):
    kind = "random.Random"

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def _state(self) -> Any:
        return self._generator.getstate()

    def _set_state(self, state: Any) -> None:
        self._generator.setstate(state)

    def _seed(self, seeds: np.random.SeedSequence) -> None:
        self._generator.seed(_number(seeds))


class _NumpyGenerator(GeneratorItem):
    """A generator over any BitGenerator; the number of spawned children is not part of its state."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._bits = generator.bit_generator

    @property
    def kind(self) -> str:
        return f"numpy Generator over {type(self._bits).__name__}"

    def _state(self) -> Any:
        return self._bits.state

    def _set_state(self, state: Any) -> None:
        self._bits.state = state

    def _seed(self, seeds: np.random.SeedSequence) -> None:
        self._bits.state = type(self._bits)(seeds).state


class _NumpyRandomState(GeneratorItem):
    def __init__(self, generator: np.random.RandomState) -> None:
        self._generator = generator

    @property
    def kind(self) -> str:
        return f"numpy RandomState over {self._state()['bit_generator']}"

    def _state(self) -> Any:
        return self._generator.get_state(legacy=False)

    def _set_state(self, state: Any) -> None:
        self._generator.set_state(state)

    def _seed(self, seeds: np.random.SeedSequence) -> None:
        bits = getattr(np.random, self._state()["bit_generator"])
        self._generator.set_state({**bits(seeds).state, "has_gauss": 0, "gauss": 0.0})


class _TorchGenerator(GeneratorItem):
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    @property
    def kind(self) -> str:
        return f"torch.Generator on {self._generator.device.type}"

    def _state(self) -> Any:
        return self._generator.get_state()

    def _set_state(self, state: Any) -> None:
        self._generator.set_state(state)

    def _seed(self, seeds: np.random.SeedSequence) -> None:
        self._generator.manual_seed(_number(seeds) % 2**64)


def generator_item(obj: object) -> GeneratorItem | None:
    """Return the adapter for a generator; None for other objects and the stateless random.SystemRandom."""
    match obj:
        case random.SystemRandom():
            return None
        case random.Random():
            return _PythonGenerator(obj)
        case np.random.Generator():
            return _NumpyGenerator(obj)
        case np.random.RandomState():
            return _NumpyRandomState(obj)
        case torch.Generator():
            return _TorchGenerator(obj)
    return None


# -- streams for new ranks ----------------------------------------------------------------------------


def _seeds(tree: Any, rank: int) -> np.random.SeedSequence:
    digester = Digester()
    for part in _bytes_of(tree):
        digester.update(part)
    return np.random.SeedSequence(int(digester.hexdigest(), 16), spawn_key=(rank,))


def _number(seeds: np.random.SeedSequence) -> int:
    """Return a seed of 256 bits."""
    return int.from_bytes(seeds.generate_state(8).astype("<u4").tobytes(), "little")


def _bytes_of(value: Any) -> Iterator[bytes]:
    """Yield the same bytes for the same state on every machine."""
    if isinstance(value, dict):
        for key in sorted(value):
            yield key.encode()
            yield from _bytes_of(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _bytes_of(item)
    elif isinstance(value, torch.Tensor | np.ndarray):
        yield np.asarray(value).tobytes()
    else:
        yield f"{value},".encode()
