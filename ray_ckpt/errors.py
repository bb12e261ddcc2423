"""Errors that ray_ckpt raises, as a tree.

    CheckpointError                      base class of all
    |- ConfigError (ValueError)          an option, a path or the environment is wrong
    |  |- StorageNotShared               the storage path is not the same place on every node
    |  |- StoragePathError               the storage path cannot be written, read or used for commits
    |  |- NoRun                          there is no run at a path, or it has not started
    |  |- StagingError                   a node's staging folder cannot be used
    |  |- NotConnected (RuntimeError)    a Checkpointer has neither callback nor connection
    |- StateError (TypeError)            the training state cannot be stored
    |  |- UnsupportedItem                no way is known to save an object
    |  |- UnsupportedLeaf                a value would need pickle; names its path
    |- MismatchError (ValueError)        the checkpoint does not fit the model; lists each difference
    |- CollectiveError (RuntimeError)    the ranks called different things
    |  |- SaveNotCollective              only some ranks called `save`
    |- InsufficientSpace (OSError)       too little disk space or memory, in bytes
    |- CorruptionError (ValueError)      stored bytes differ from their digest; names file and slice
    |  |- FormatError                    bytes are no valid file of the format
    |     |- NewerFormat                 a newer ray_ckpt wrote it; nothing is damaged
    |- RestoreError (RuntimeError)       no intact copy is left to restore from
    |- ResumeError (RuntimeError)        a resumed run differs from the original
    |- Unprotected (RuntimeError)        training went on too long without a checkpoint
    |- RunConflict (RuntimeError)        another owner has the run, or the log changed
    |  |- RunInUse                       a live launcher in this cluster has the run
    |  |- RunSuperseded                  a newer session has the run; this one must stop
    |  |- Fenced                         a newer coordinator owns the log
    |- ServiceError (RuntimeError)       the service failed
    |  |- Unavailable                    an agent, a peer or the store did not answer
    |     |- AgentLost                   the agent of a rank's node died

Each has a `hint` with the next action, and plain `fields`. Pickling keeps both, so errors cross Ray actors
unchanged.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Any, Self

LOST_BYTES = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)  # a bad sector; a checksum of the file system differs


class CheckpointError(Exception):
    """Base class of all errors: a message, a `hint`, and `fields` that a handler can read."""

    def __init__(self, message: str, *, hint: str = "", **fields: Any) -> None:
        super().__init__(f"{message} {hint}".strip())
        self.message = message
        self.hint = hint
        self.fields = fields

    def __reduce__(self) -> tuple[Callable[..., CheckpointError], tuple[Any, ...]]:
        return partial(type(self), hint=self.hint, **self.fields), (self.message,)

    def at(self, place: str, hint: str = "") -> Self:
        """Return the same error with `place` before the message, and with `hint` if the error has no hint."""
        return type(self)(f"{place}: {self.message}", hint=self.hint or hint, **self.fields)


class ConfigError(CheckpointError, ValueError):
    """An option, a path or the environment is wrong."""


class StorageNotShared(ConfigError):
    """The storage path is not the same place on every node."""


class StoragePathError(ConfigError):
    """The storage path cannot be written, read or used for commits."""


class NoRun(ConfigError):
    """There is no run at a path, or it has not started."""


class StagingError(ConfigError):
    """A node's staging folder cannot be used."""


class NotConnected(ConfigError, RuntimeError):
    """A Checkpointer was built with neither callback nor connection."""


class StateError(CheckpointError, TypeError):
    """The training state cannot be stored."""


class UnsupportedItem(StateError):
    """No way is known to save an object."""


class UnsupportedLeaf(StateError):
    """A value could only be stored with pickle; `fields["path"]` names it."""


class MismatchError(CheckpointError, ValueError):
    """The checkpoint does not fit the live state; every difference is listed."""


class CollectiveError(CheckpointError, RuntimeError):
    """The ranks did not call the same method, or called it with different arguments."""


class SaveNotCollective(CollectiveError):
    """Only some ranks called `save` for a step."""


class InsufficientSpace(CheckpointError, OSError):
    """Too little disk space or memory."""


class CorruptionError(CheckpointError, ValueError):
    """Stored bytes differ from their digest."""


class FormatError(CorruptionError):
    """Bytes are not a valid file of the format."""


class NewerFormat(FormatError):
    """A newer ray_ckpt wrote the file; that version can read it."""


class RestoreError(CheckpointError, RuntimeError):
    """No intact copy is left to restore from."""


class ResumeError(CheckpointError, RuntimeError):
    """A resumed run differs from the original; the error names the first difference and the likely cause."""


class Unprotected(CheckpointError, RuntimeError):
    """Training went on without a new checkpoint for longer than `unprotected_after` allows."""


class RunConflict(CheckpointError, RuntimeError):
    """Another owner has the run, or the log is not the one that the nodes used before."""


class RunInUse(RunConflict):
    """A live launcher in this cluster has the run, or, for commands, may have the run."""


class RunSuperseded(RunConflict):
    """A newer session has the run; this one must stop."""


class Fenced(RunConflict):
    """A newer coordinator owns the log of this run."""


class ServiceError(CheckpointError, RuntimeError):
    """The service failed to complete a call."""


class Unavailable(ServiceError):
    """An agent, a peer or the store did not answer in time."""


class AgentLost(Unavailable):
    """The agent of a rank's node has died, or the next one does not know the rank's run yet."""


def is_lost(error: Exception, *, is_remote: bool = False) -> bool:
    """Return True if a source does not have the bytes that were read, or no intact ones.

    False if they may be intact there: a peer or a store did not answer, or too many files are open. On the
    storage path (`is_remote`) an EIO, or an end that comes too early, is mostly that of a connection.
    """
    if is_remote:
        return isinstance(error, FileNotFoundError | CorruptionError)
    if isinstance(error, Unavailable):
        return bool(error.fields.get("lost"))
    if isinstance(error, OSError) and error.errno in LOST_BYTES:
        return True
    return isinstance(error, FileNotFoundError | EOFError | CorruptionError)


def missing_package(package: str, extra: str, needed_for: str) -> ConfigError:
    """Return the error for a missing package that an extra of ray_ckpt installs."""
    return ConfigError(
        f"{needed_for} needs the package {package}, which is not installed here.",
        hint=f"Install it where this runs, on every node for a run: pip install 'ray_ckpt[{extra}]'.",
        package=package,
    )


def text_of(error: BaseException) -> str:
    """Return the text of an error, or its class if the text is empty, so that no message ends in a colon."""
    if text := str(error).strip():
        return text
    return "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__


def named_text(error: BaseException) -> str:
    """Return the class of an error and its text, if it has one."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
