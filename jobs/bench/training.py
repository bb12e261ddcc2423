"""One rank on a local Ray with the whole service, for rows about costs that the training pays."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import nn

import ray_ckpt
from jobs.bench.limits import Bytes
from jobs.bench.state import make_state, tensors

READY_S = 300.0  # time limit for the arena's memory; touching 2 GiB for the first time takes seconds
PIECE_BYTES = 16 << 20  # bytes of a large tensor for one thread at a time
FAR_FUTURE_STEPS = 10**9  # an interval that is never reached: the rows call `save` themselves


@contextmanager
def local_ray(folder: Path) -> Iterator[None]:
    """Start a Ray cluster of one node in `folder`."""
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(folder / "ray") if len(str(folder)) < 40 else None,  # sockets have short names
    )
    try:
        yield
    finally:
        ray.shutdown()


class Saves:
    """Items that are saved into a run of their own, and have been restored."""

    def __init__(self, items: Mapping[str, Any], folder: Path, name: str, **options: Any) -> None:
        defaults = {
            "storage_path": str(folder / "storage"),
            "staging": str(folder / "staging"),
            "memory": "single",
            "replicas": 0,
            "keep_last": 1,
            "every_steps": FAR_FUTURE_STEPS,
        }
        ray_ckpt.connect(run=name, **{**defaults, **options})
        self.ckpt = ray_ckpt.Checkpointer(**items)
        start_s = time.perf_counter()
        info = self.ckpt.restore()
        self.restored_s = time.perf_counter() - start_s
        self.step = info.step if info is not None else 0

    def wait_ready(self) -> float:
        """Wait until the arena's memory is ready; return the seconds that this took in the background."""
        deadline_s = time.monotonic() + READY_S
        while (taken_s := self.ckpt.setup_s) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError("the arena did not become ready")
            time.sleep(0.02)
        return taken_s

    def save(self) -> float:
        """Save the next step; return the seconds that `save` took."""
        self.step += 1
        if not self.ckpt.save(self.step):
            raise RuntimeError("the save was skipped")
        return self.ckpt.stats.blocked_s[-1]

    def settle(self) -> None:
        """Wait until the last save is on the disk and in the log."""
        self.ckpt.wait("local")

    def save_and_settle(self) -> float:
        """Save the next step and wait for it; return the seconds that `save` took."""
        blocked_s = self.save()
        self.settle()
        return blocked_s

    def close(self) -> None:
        self.ckpt.close()


class Training(Saves):
    """A model with an AdamW optimizer."""

    def __init__(self, size_bytes: int, folder: Path, name: str, **options: Any) -> None:
        self.model, self.optimizer = make_state(size_bytes)
        super().__init__({"model": self.model, "optimizer": self.optimizer}, folder, name, **options)


class Compute:
    """Work as a forward and backward pass do it: matrix products of about `seconds`."""

    def __init__(self, seconds: float, *, side: int = 512) -> None:
        self._one, self._two, self._out = (torch.randn(side, side) for _ in range(3))
        self._count = 1
        while self() < seconds / 4:
            self._count *= 2
        self._count = max(1, round(self._count * seconds / self()))

    def __call__(self) -> float:
        start_s = time.perf_counter()
        for _ in range(self._count):
            torch.mm(self._one, self._two, out=self._out)
        return time.perf_counter() - start_s


class SameBytes:
    """A memcpy of the state from where it is, in ordinary memory, to warm memory."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, threads: int) -> None:
        flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors(model, optimizer)]
        sources = sorted((piece.numpy() for one in flat for piece in torch.split(one, PIECE_BYTES)), key=len)
        pairs = [(np.ones_like(source), source) for source in sources]
        self._shares = [pairs[first::threads] for first in range(threads)]
        self._pool = ThreadPoolExecutor(threads)
        self()  # starts the threads

    def __call__(self) -> float:
        start_s = time.perf_counter()
        list(self._pool.map(_copy_all, self._shares))
        return time.perf_counter() - start_s

    def close(self) -> None:
        self._pool.shutdown()
        del self._shares


def _copy_all(pairs: Iterable[tuple[Bytes, Bytes]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)
