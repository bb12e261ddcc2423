"""What a user can choose for a run, checked when it is chosen."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ray_ckpt.errors import ConfigError

STAGING_ENV = "RAY_CKPT_STAGING"  # per node; wins over the option, since only the node knows its disks
GIB = 1 << 30

Resume: TypeAlias = Literal["auto", "never", "must"]


def default_staging() -> str:
    return f"/tmp/ray_ckpt-{os.getuid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How one run is protected. All times are seconds, all sizes bytes."""

    replicas: int = 1
    """Copies of each shard on other nodes; capped at what the live nodes can hold."""
    keep_last: int = 3
    """Checkpoints that retention keeps; the newest of each level is kept besides."""
    every_steps: int = 100
    """A save is due after each multiple of this many optimizer steps."""
    remote_every: int = 10
    """Every this many commits one is drained to the storage path; the last one of a run always is."""
    staging: str | None = None
    """Local folder on each node, best on NVMe. `{node_id}` in it is replaced; the environment variable
    RAY_CKPT_STAGING of a node wins. Default: /tmp/ray_ckpt-<uid>."""
    resume: Resume = "auto"
    """auto: restore if there is a checkpoint; never: start from scratch; must: an error if there is none."""
    max_block_s: float = 0.0
    """How long a save may wait for the one before it; then it is skipped and counted."""
    goal_timeout_s: float = 60.0
    """After this long a checkpoint that is local everywhere is committed without its missing replicas."""
    attempt_timeout_s: float = 60.0
    """After this long an attempt that lacks ranks is dropped."""
    inventory_wait_s: float = 10.0
    """How long a restore waits for nodes that may return with the newest checkpoint."""
    finish_timeout_s: float = 600.0
    """How long the end of a run waits for its last checkpoint to reach the storage path."""
    reserve_bytes: int = GIB
    """Free space on each staging disk that checkpoints never use."""
    ray_report: bool = True
    """Report pointers to Ray Train, so that `Result.checkpoint` shows the newest checkpoint."""

    def __post_init__(self) -> None:
        for name, least in (("replicas", 0), ("keep_last", 1), ("every_steps", 1), ("remote_every", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(
                    f"{name} is {value!r}.", hint=f"Set it to an integer of at least {least}.", option=name
                )
        for name in (
            "max_block_s",
            "goal_timeout_s",
            "attempt_timeout_s",
            "inventory_wait_s",
            "finish_timeout_s",
        ):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
                raise ConfigError(
                    f"{name} is {value!r}.", hint="Set it to a number of seconds, 0 or more.", option=name
                )
        if not isinstance(self.reserve_bytes, int) or self.reserve_bytes < 0:
            raise ConfigError(
                f"reserve_bytes is {self.reserve_bytes!r}.",
                hint="Set it to 0 or more bytes.",
                option="reserve_bytes",
            )
        if self.resume not in ("auto", "never", "must"):
            raise ConfigError(
                f"resume is {self.resume!r}.", hint="Use 'auto', 'never' or 'must'.", option="resume"
            )

    @classmethod
    def parse(cls, **options: Any) -> RunOptions:
        """RunOptions from keywords; an unknown one is a ConfigError that names the closest known one."""
        unknown = sorted(set(options) - set(cls.__dataclass_fields__))
        if unknown:
            from difflib import get_close_matches

            near = get_close_matches(unknown[0], list(cls.__dataclass_fields__), n=1)
            known = ", ".join(sorted(cls.__dataclass_fields__))
            hint = f"Did you mean {near[0]}? Known: {known}." if near else f"Known: {known}."
            raise ConfigError(f"Unknown option {unknown[0]!r}.", hint=hint, option=unknown[0])
        return cls(**options)


def local_path(storage_path: str) -> Path:
    """The folder behind a storage path: absolute, POSIX. ConfigError for anything else.

    Object stores are not supported yet; a URL that names one is refused here, before a run starts.
    """
    text = storage_path.removeprefix("file://")
    if "://" in text:
        raise ConfigError(
            f"The storage path {storage_path!r} is not a file system path.",
            hint="Use an absolute path that all nodes share (NFS, Lustre; a local disk for one node).",
            storage_path=storage_path,
        )
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ConfigError(
            f"The storage path {storage_path!r} is relative.",
            hint="Make it absolute; each node would read a relative path from another folder.",
            storage_path=storage_path,
        )
    return path
