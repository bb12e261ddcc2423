"""The session of this rank, shared by all that save and load state dicts in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ray_ckpt.capture.items import Item
from ray_ckpt.capture.load import RestoreInfo, SavedState
from ray_ckpt.capture.unregistered import live_optimizers
from ray_ckpt.errors import ConfigError
from ray_ckpt.interop.dcp.state import items_of
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.trainer.connection import get_connection
from ray_ckpt.types import Level

_current: tuple[object, Session] | None = None  # with the link of its connection


class Session:
    """One restore, and the saves after it."""

    def __init__(self) -> None:
        self._checkpointer = Checkpointer()
        self._is_begun = False
        self._optimizers: list[torch.optim.Optimizer] | None = None  # those alive at the first save

    @property
    def step(self) -> int:
        """The step that a load restores, or has restored; 0 in a new run."""
        return self._checkpointer.resume_step()

    @property
    def where(self) -> str:
        """The URI of the run."""
        return self._checkpointer.where

    @property
    def is_begun(self) -> bool:
        """True after the load, or after the first save."""
        return self._is_begun

    def saved(self) -> SavedState | None:
        """Return the saved items that a load restores, without their tensors; None in a new run.

        Raises ConfigError after the session has begun.
        """
        self._refuse_second_load()
        return self._checkpointer.saved()

    def load(self, items: Mapping[str, Item]) -> RestoreInfo | None:
        """Fill the tensors of `items` with those of the checkpoint to resume from, and begin the session.

        Returns None in a new run. Raises the errors of `Checkpointer.restore`; then the call may be repeated.
        """
        self._refuse_second_load()
        self._checkpointer.hold(items, ())
        try:
            info = self._checkpointer.restore()
        except BaseException:
            self._checkpointer.close()
            self._checkpointer = Checkpointer()
            raise
        self._is_begun = True
        return info

    def _refuse_second_load(self) -> None:
        if self._is_begun:
            raise ConfigError(
                "This group has begun to save, or has loaded already.",
                hint="Load everything in one call before the first save; another checkpoint is read by its "
                'URI, as with ray_ckpt.dcp.Reader("<storage path>/<run>@<step>").',
            )

    def save(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any] | None, per_rank: Sequence[str]
    ) -> Callable[[Level, float], None]:
        """Capture a nested state dict, as `save_items`."""
        return self.save_items(step, items_of(state, per_rank=per_rank), metrics)

    def save_items(
        self, step: int, items: Mapping[str, Item], metrics: Mapping[str, Any] | None = None
    ) -> Callable[[Level, float], None]:
        """Capture ready items; return a function that waits for a level, as `Checkpointer.waiter`.

        Raises ConfigError if the run has a checkpoint that was not loaded.
        """
        if not self._is_begun:
            if step_to_load := self.step:
                raise ConfigError(
                    f"The run has a checkpoint of step {step_to_load}, which was not loaded.",
                    hint="Load it before the first save, as the guide of your framework shows, such as "
                    "dcp.load(state, storage_reader=ray_ckpt.dcp.Reader()); or start another run name; "
                    'or use resume="never", whose first saves delete that checkpoint unless it is pinned.',
                )
            self.load(items)
        if self._optimizers is None:
            self._optimizers = live_optimizers()
        self._checkpointer.hold(items, self._optimizers)
        self._checkpointer.save(step, metrics)
        return self._checkpointer.waiter()


def current() -> Session:
    """Return the session of this process's connection; NotConnected outside a run."""
    global _current
    link = get_connection().link
    if _current is None or _current[0] is not link or link is None:
        _current = (link, Session())
    return _current[1]
