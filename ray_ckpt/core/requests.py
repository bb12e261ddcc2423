"""Events of the run machine that people and launchers cause; most wait for an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray_ckpt.core.values import Token
from ray_ckpt.format.records import Drilled


@dataclass(frozen=True, slots=True, kw_only=True)
class SalvageRequested:
    """A launcher is about to end a group that has lost ranks; the reply comes when the salvage has ended."""

    token: Token


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRequested:
    """`owner` wants a checkpoint kept. The reply is sent when the pin is in the log."""

    token: Token
    attempt: str
    owner: str
    expires_at_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpinRequested:
    token: Token
    attempt: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """A user wants a checkpoint, due or not, on the storage path; replied to when its drain is queued.

    A caller that waits is replied to when the checkpoint is durable; Unavailable after `within_s`.
    """

    token: Token
    attempt: str
    within_s: float | None = None  # seconds for which the caller waits; None: it does not


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotateRequested:
    """A user adds metrics to the newest live checkpoint of a step on the lineage.

    The reply is sent when the metrics are in the log. If a save of that step is open, the metrics are added
    to that save once the save is committed.
    """

    token: Token
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillEnded:
    """A recovery drill has read a checkpoint. The reply is sent when the result is in the log."""

    token: Token
    result: Drilled


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequested:
    """A caller waits until the last checkpoint of the run is on the storage path."""

    token: Token
    owner: str = ""  # the launcher that waits; RunSuperseded if another one has the run; "": any may
    ends_group: bool = False  # the launcher also ends the run
    has_failed: bool = False  # the launcher has given up: the run has failed
