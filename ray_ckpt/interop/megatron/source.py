"""Sources of a load: the checkpoint with which the run continues, or a durable one that a folder names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

from ray_ckpt.capture.items import Item
from ray_ckpt.capture.load import SavedState
from ray_ckpt.catalog.load import OpenedCheckpoint
from ray_ckpt.catalog.uri import CheckpointUri, uri_of
from ray_ckpt.errors import ConfigError, RestoreError
from ray_ckpt.interop.dcp.session import Session, current
from ray_ckpt.interop.megatron.folder import read_reference
from ray_ckpt.trainer.connection import get_connection


class Source(Protocol):
    """A checkpoint to load from."""

    def saved(self) -> SavedState:
        """Return the saved items, without their tensors."""
        ...

    def load(self, items: Mapping[str, Item]) -> None:
        """Fill the tensors of `items`."""
        ...


class _OfSession:
    """The checkpoint with which the run continues, from memory, local disk, peers or the storage path."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.step = session.step
        self.uri = uri_of(session.where, self.step)
        self._saved: SavedState | None = None

    def saved(self) -> SavedState:
        if self._saved is None:
            self._saved = self.session.saved()
        assert self._saved is not None, "the run has a checkpoint"
        return self._saved

    def load(self, items: Mapping[str, Item]) -> None:
        """Fill the tensors of `items`. RestoreError if only an older checkpoint is intact.

        A second load reads the checkpoint as that of any other run.
        """
        if self.session.is_begun:
            _OfUri(self.uri).load(items)
            return
        info = self.session.load(items)
        if info is not None and info.step != self.step:
            raise RestoreError(
                f"Step {self.step} has no intact copy; the run continues from step {info.step}, to which the "
                "common state does not belong.",
                hint="Start the training again: it then begins with that step.",
            )


class _OfUri:
    """A durable checkpoint of any run."""

    def __init__(self, uri: str) -> None:
        self._opened: OpenedCheckpoint = CheckpointUri.parse(uri).open(None)

    def saved(self) -> SavedState:
        return self._opened.saved()

    def load(self, items: Mapping[str, Item]) -> None:
        self._opened.load(into=items)


_of_session: _OfSession | None = None


def source_of(folder: str | os.PathLike[str]) -> Source:
    """Return the checkpoint to which a folder refers.

    In a run, before its first save, only the checkpoint with which the run continues is read of that run:
    ConfigError for another step.
    """
    global _of_session
    run, step = read_reference(folder)
    uri = uri_of(run, step)
    if get_connection().link is None:
        return _OfUri(uri)
    session = current()
    if run != session.where:
        return _OfUri(uri)
    if _of_session is None or _of_session.session is not session:
        _of_session = _OfSession(session)
    if step == _of_session.step:
        return _of_session
    if session.is_begun:
        return _OfUri(uri)
    raise ConfigError(
        f"The folder {os.fspath(folder)} is of step {step}, and the run continues from step "
        f"{_of_session.step}.",
        hint="Load from the folder that ray_ckpt.megatron.resume_folder(save_dir) returns, or go back with "
        f"the option resume='step:{step}'.",
    )
