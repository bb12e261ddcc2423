"""Every error that ray_ckpt raises on purpose.

    CheckpointError                      catch this to catch all of them
    |- ConfigError (ValueError)          an option, path or environment is wrong; fix it and start again
    |  |- StorageNotShared               the storage path is not the same place on every node
    |  |- StoragePathError               the storage path cannot be written, read or used for commits
    |  |- StagingError                   a node's staging folder cannot be used
    |  |- NotConnected (RuntimeError)    a Checkpointer without callback or connection
    |- StateError (TypeError)            the training state cannot be stored as asked
    |  |- UnsupportedItem                an object without a way to save it
    |  |- UnsupportedLeaf                a value that would need pickle; names its path
    |- MismatchError (ValueError)        the checkpoint does not fit the model; lists each difference
    |- CollectiveError (RuntimeError)    the ranks did not do the same thing
    |  |- SaveNotCollective              a save that only some ranks called
    |- InsufficientSpace (OSError)       too little disk or memory, named in bytes
    |- CorruptionError (ValueError)      stored bytes differ from their digest; names file and slice
    |  |- FormatError                    bytes that are not a valid file of this format
    |     |- NewerFormat                 a file or record that a newer ray_ckpt wrote; nothing is damaged
    |- RestoreError (RuntimeError)       nothing intact is left to restore from
    |- ResumeError (RuntimeError)        a resumed run is not the run that it resumes
    |- Unprotected (RuntimeError)        training has gone on for too long without a new checkpoint
    |- RunConflict (RuntimeError)        someone else owns this run, or its log is not the nodes' own
    |  |- RunInUse                       another launcher that is alive in this cluster has the run
    |  |- RunSuperseded                  a newer session owns the run; this one must stop
    |  |- Fenced                         a newer coordinator owns the log
    |- ServiceError (RuntimeError)       the service did not answer as it should
    |  |- Unavailable                    an agent, a peer or the store could not be reached in time

Each carries a `hint` (what to do now) and plain fields, and survives pickling, so that it crosses Ray
actors unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self


def _rebuild(cls: type[CheckpointError], message: str, hint: str, fields: dict[str, Any]) -> CheckpointError:
    return cls(message, hint=hint, **fields)


class CheckpointError(Exception):
    """Base of all errors of ray_ckpt: a message, a `hint`, and `fields` that a handler can read."""

    def __init__(self, message: str, *, hint: str = "", **fields: Any) -> None:
        super().__init__(f"{message} {hint}".strip())
        self.message = message
        self.hint = hint
        self.fields = fields

    def __reduce__(self) -> tuple[Callable[..., CheckpointError], tuple[Any, ...]]:
        return _rebuild, (type(self), self.message, self.hint, self.fields)


class ConfigError(CheckpointError, ValueError):
    """An option, a path or the environment is wrong."""


class StorageNotShared(ConfigError):
    """The storage path is not the same place on every node."""


class StoragePathError(ConfigError):
    """The storage path cannot be written, read or used for commits."""


class StagingError(ConfigError):
    """A node's staging folder cannot be used."""


class NotConnected(ConfigError, RuntimeError):
    """A Checkpointer was built with neither callback nor connection."""


class StateError(CheckpointError, TypeError):
    """The training state cannot be stored as asked."""


class UnsupportedItem(StateError):
    """An object that has no way to be saved."""


class UnsupportedLeaf(StateError):
    """A value that could only be stored with pickle; `fields["path"]` names it."""


class MismatchError(CheckpointError, ValueError):
    """The checkpoint does not fit the live state; every difference is listed."""


class CollectiveError(CheckpointError, RuntimeError):
    """The ranks did not do the same thing."""


class SaveNotCollective(CollectiveError):
    """Only some ranks called `save` for a step."""


class InsufficientSpace(CheckpointError, OSError):
    """Too little disk space or memory."""


class CorruptionError(CheckpointError, ValueError):
    """Stored bytes differ from their digest."""


class FormatError(CorruptionError):
    """Bytes that are not a valid file of this format."""

    def at(self, place: str, hint: str = "") -> Self:
        """Return the same error with the file's place before it; `hint` if it has none of its own."""
        return type(self)(f"{place}: {self.message}", hint=self.hint or hint, **self.fields)


class NewerFormat(FormatError):
    """Written by a newer ray_ckpt, whose version can read it."""


class RestoreError(CheckpointError, RuntimeError):
    """Nothing intact is left to restore from."""


class ResumeError(CheckpointError, RuntimeError):
    """A resumed run is not the run that it resumes; names the first difference and its likely cause."""


class Unprotected(CheckpointError, RuntimeError):
    """Training has gone on without a new checkpoint for as long as `unprotected_after` allows."""


class RunConflict(CheckpointError, RuntimeError):
    """Someone else owns this run, or its log is not the one that the nodes know."""


class RunInUse(RunConflict):
    """Another launcher that is alive in this cluster has the run; of `ray-ckpt`, somebody may have it."""


class RunSuperseded(RunConflict):
    """A newer session owns the run; this one must stop."""


class Fenced(RunConflict):
    """A newer coordinator owns the log of this run."""


class ServiceError(CheckpointError, RuntimeError):
    """The service did not answer as it should."""


class Unavailable(ServiceError):
    """An agent, a peer or the store could not be reached in time."""


def missing_package(package: str, extra: str, needed_for: str) -> ConfigError:
    """Return the error of a package that only an extra of ray_ckpt installs, and that is not installed."""
    return ConfigError(
        f"{needed_for} needs the package {package}, which is not installed here.",
        hint=f"Install it where this runs, on every node for a run: pip install 'ray_ckpt[{extra}]'.",
        package=package,
    )


def text_of(error: BaseException) -> str:
    """What an error says; those that say nothing are named, so that no message ends in a colon."""
    if text := str(error).strip():
        return text
    return "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__


def named_text(error: BaseException) -> str:
    """The class of an error, and what it says if it says something."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
