"""Rules for what goes wrong: which requests, what happens to them, how often.

Deterministic: a rule counts the requests that match it, and fires on every `every`th of them, `times` times.
Requests of the admin interface never match.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_FAULTS = 100  # rules at one time: each request is held against all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A request matches if all that is given does.

    `operation`: a name such as PutObject, the same for all APIs. `key`: a regular expression that is found
    somewhere in the object's name. gcsfs sends the names of small objects in the body, where no rule looks.
    """

    method: str | None = None
    operation: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.key or "")
        except re.error as error:
            raise ValueError(f"{self.key!r} is no regular expression") from error

    def covers(self, method: str, operation: str, key: str) -> bool:
        return (
            self.method in (None, method)
            and self.operation in (None, operation)
            and (self.key is None or re.search(self.key, key) is not None)
        )


@dataclass(frozen=True, slots=True)
class Status:
    """Refuse with this status instead of applying. 200: an error in the body, as S3 may on completion."""

    status: int
    code: str = ""  # empty: what the status usually comes with


@dataclass(frozen=True, slots=True)
class DropBefore:
    """Close the connection once the head is read; nothing is applied."""


@dataclass(frozen=True, slots=True)
class DropAfter:
    """Apply, then close without an answer."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """Send so many bytes of the answer's body under its full Content-Length, then close."""

    keep_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Flip:
    """Turn one bit of the answer's body around. `byte`: its place, modulo the size of the body."""

    byte: int = 0
    bit: int = 0


@dataclass(frozen=True, slots=True)
class Slow:
    """Read and write bodies at no more than this."""

    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait between reading the request and applying it."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hang:
    """Never answer, and apply nothing."""


@dataclass(frozen=True, slots=True)
class Down:
    """Cut all connections, and close each new one at its first request, until the rule is removed."""


Action = Status | DropBefore | DropAfter | Truncate | Flip | Slow | Delay | Hang | Down
_ACTIONS: dict[str, type[Action]] = {
    "status": Status,
    "drop_before": DropBefore,
    "drop_after": DropAfter,
    "truncate": Truncate,
    "flip": Flip,
    "slow": Slow,
    "delay": Delay,
    "hang": Hang,
    "down": Down,
}
_NAMES = {action: name for name, action in _ACTIONS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`times`: how often at most; None: until it is removed. `every`: 3 spares two, then fires, and so on."""

    action: Action
    match: Match = field(default_factory=Match)
    times: int | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1 or (self.times is not None and self.times < 1):
            raise ValueError("every and times are 1 or more")

    def to_json(self) -> dict[str, Any]:
        action = {"kind": _NAMES[type(self.action)], **dataclasses.asdict(self.action)}
        return {
            "match": dataclasses.asdict(self.match),
            "action": action,
            "times": self.times,
            "every": self.every,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Fault:
        """ValueError, TypeError or KeyError: this is no fault."""
        action = dict(values["action"])
        return cls(
            action=_ACTIONS[action.pop("kind")](**action),
            match=Match(**values.get("match", {})),
            times=values.get("times"),
            every=values.get("every", 1),
        )


@dataclass(slots=True)
class _Rule:
    fault: Fault
    matched: int = 0
    fired: int = 0

    def fires(self) -> bool:
        """Count a request that has matched; return whether the fault happens to it."""
        self.matched += 1
        if self.fault.times is not None and self.fired >= self.fault.times:
            return False
        if self.matched % self.fault.every:
            return False
        self.fired += 1
        return True


class Faults:
    """The rules of a server, safe for its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: dict[int, _Rule] = {}
        self._last_id = 0

    def add(self, fault: Fault) -> int:
        """Add a fault, and return the number by which it is removed."""
        with self._lock:
            if len(self._rules) >= MAX_FAULTS:
                raise ValueError(f"there are {MAX_FAULTS} faults already")
            self._last_id += 1
            self._rules[self._last_id] = _Rule(fault)
            return self._last_id

    def remove(self, number: int) -> None:
        with self._lock:
            self._rules.pop(number, None)

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    def fired(self) -> dict[str, int]:
        """Return how often each rule has fired, by its number."""
        with self._lock:
            return {str(number): rule.fired for number, rule in self._rules.items()}

    def of(self, method: str, operation: str, key: str) -> Sequence[Action]:
        """Return the actions for this request, in the order in which the rules were added."""
        with self._lock:
            return tuple(
                rule.fault.action
                for rule in self._rules.values()
                if rule.fault.match.covers(method, operation, key) and rule.fires()
            )
