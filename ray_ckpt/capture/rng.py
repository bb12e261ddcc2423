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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ray_ckpt.capture.items import Item
from ray_ckpt.format.digest import Digester


class RngItem(Item):
    """The generators of this process; registered automatically on every rank."""

    per_rank = True

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


@dataclass(frozen=True, slots=True)
class GeneratorItem(Item):
    """A generator, restored in place: {"kind": which generator and algorithm, "state": ...}."""

    kind: str
    get_state: Callable[[], Any]
    set_state: Callable[[Any], object]
    seed: Callable[[np.random.SeedSequence], object]

    per_rank = True

    def tree(self) -> Any:
        return {"kind": self.kind, "state": self.get_state()}

    def load(self, tree: Any) -> None:
        self.set_state(tree["state"])

    def load_for_new_rank(self, tree: Any, rank: int) -> None:
        """Start a stream for a rank that the checkpoint does not have, as RngItem does."""
        self.seed(_seeds(tree, rank))

    def problems(self, saved: Any) -> list[str]:
        kind = saved.get("kind") if isinstance(saved, dict) else None
        return [] if kind == self.kind else [f"is a {self.kind}, in the checkpoint it is {kind or 'none'}"]


def generator_item(obj: object) -> GeneratorItem | None:
    """Return the adapter for a generator; None for other objects and the stateless random.SystemRandom."""
    match obj:
        case random.SystemRandom():
            return None
        case random.Random():
            return GeneratorItem(
                "random.Random", obj.getstate, obj.setstate, lambda seeds: obj.seed(_number(seeds))
            )
        case np.random.Generator():
            return _numpy_generator(obj.bit_generator)
        case np.random.RandomState():
            return _numpy_random_state(obj)
        case torch.Generator():
            return GeneratorItem(
                f"torch.Generator on {obj.device.type}",
                obj.get_state,
                obj.set_state,
                lambda seeds: obj.manual_seed(_number(seeds) % 2**64),
            )
    return None


def _numpy_generator(bits: Any) -> GeneratorItem:
    """Return the adapter for any BitGenerator, without the number of its spawned children."""

    def set_state(state: Any) -> None:
        bits.state = state

    kind = f"numpy Generator over {type(bits).__name__}"
    return GeneratorItem(
        kind, lambda: bits.state, set_state, lambda seeds: set_state(type(bits)(seeds).state)
    )


def _numpy_random_state(generator: np.random.RandomState) -> GeneratorItem:
    get_state = partial(generator.get_state, legacy=False)
    name = get_state()["bit_generator"]

    def seed(seeds: np.random.SeedSequence) -> None:
        state = getattr(np.random, name)(seeds).state
        generator.set_state({**state, "has_gauss": 0, "gauss": 0.0})

    return GeneratorItem(f"numpy RandomState over {name}", get_state, generator.set_state, seed)


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
