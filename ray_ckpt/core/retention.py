"""Retention: decide which checkpoints are kept, and on which tier.

Decisions follow from the records and from damage that was found on the storage path. A checkpoint is kept if
any policy keeps it. Policies select from the lineage only: a checkpoint off the lineage belongs to a session
that a later session superseded by resuming from an earlier checkpoint. Four rules precede the policies: busy
checkpoints stay, pinned checkpoints stay, for each level the newest checkpoint that has reached the level
stays, so that the protection of a level is lost only after a newer checkpoint offers it, and the newest items
on the storage path stay. A durable checkpoint that is damaged there, or may be, offers no protection: older
ones stay too, down to the newest intact one. Retirement gives up all copies of a checkpoint; eviction gives
up only the copies on the nodes. This module only decides: the run machine writes the records, then deletes
bytes.

All functions are linear in the number of records. Times are Unix seconds by the coordinators' clocks; a wrong
clock affects ages, periods and the expiry of pins, and no other decision.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from math import floor, inf, isfinite, isnan
from typing import Literal, TypeAlias
from urllib.parse import quote, unquote

from ray_ckpt.config import RunOptions
from ray_ckpt.errors import FormatError
from ray_ckpt.types import CheckpointInfo, Level

Mode: TypeAlias = Literal["min", "max"]

EPOCH_METRIC = "epoch"  # the metric with the training epoch's number; the fraction is ignored
NEWEST_ITEMS = "newest items on the storage path"  # reason to keep a checkpoint, but not to drain it
MAX_TEXT = 16 * 1024  # characters of the policies' text; the options cannot produce a longer text


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionView:
    """Input of all decisions. `live` and `lineage` are in log order; `busy` are attempts in use.

    `unsafe_remote` are attempts whose copy on the storage path is damaged or may be. `is_readable` returns
    False for a checkpoint with a part that can be read from no live node and not from the storage path.
    """

    live: tuple[CheckpointInfo, ...]
    lineage: tuple[CheckpointInfo, ...]
    now_s: float
    busy: Collection[str] = frozenset()
    unsafe_remote: Collection[str] = frozenset()
    is_readable: Callable[[CheckpointInfo], bool] = lambda checkpoint: True

    def offers(self, checkpoint: CheckpointInfo, level: Level) -> bool:
        """Return whether a checkpoint can serve its level, as far as damage and losses are known."""
        if level is Level.DURABLE:
            return checkpoint.level >= level and checkpoint.id.attempt not in self.unsafe_remote
        return checkpoint.level >= level and self.is_readable(checkpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision to keep or retire a live checkpoint; `reasons`, never empty, are shown to users."""

    checkpoint: CheckpointInfo
    kept: bool
    reasons: tuple[str, ...]


# Policies: `kept` maps the attempts of the view's lineage that the policy keeps to the reason; `text` is the
# policy in a session record.


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Policy that keeps the last `count` checkpoints."""

    count: int

    @property
    def text(self) -> str:
        return f"last={self.count}"

    def kept(self, view: RetentionView) -> Mapping[str, str]:
        return {c.id.attempt: f"last {self.count}" for c in view.lineage[-self.count :]}


@dataclass(frozen=True, slots=True)
class KeepEverySteps:
    """Policy that keeps the first checkpoint at or after each multiple of `steps`."""

    steps: int

    @property
    def text(self) -> str:
        return f"every_steps={self.steps}"

    def kept(self, view: RetentionView) -> Mapping[str, str]:
        firsts = _first_of_each((c.step // self.steps, c) for c in view.lineage if c.step >= self.steps)
        return {c.id.attempt: f"first from step {number * self.steps}" for number, c in firsts.items()}


@dataclass(frozen=True, slots=True)
class KeepEverySeconds:
    """Policy that keeps the first checkpoint committed in each period of `seconds`, counted from 1970."""

    seconds: float

    @property
    def text(self) -> str:
        return f"every_s={self.seconds!r}"

    def kept(self, view: RetentionView) -> Mapping[str, str]:
        firsts = _first_of_each((c.committed_at_s // self.seconds, c) for c in view.lineage)
        return {c.id.attempt: f"first of {self.seconds:g} s" for c in firsts.values()}


@dataclass(frozen=True, slots=True)
class KeepMilestones:
    """Policy that keeps the first checkpoint at or after each of these fractions of `total_steps`."""

    total_steps: int
    fractions: tuple[float, ...]

    @property
    def text(self) -> str:
        return f"milestones={self.total_steps}:{','.join(map(repr, self.fractions))}"

    def kept(self, view: RetentionView) -> Mapping[str, str]:
        ahead = sorted(self.fractions, reverse=True)
        kept = {}
        for c in view.lineage:
            while ahead and c.step / self.total_steps >= ahead[-1]:
                kept[c.id.attempt] = f"milestone {ahead.pop():g}"
        return kept


@dataclass(frozen=True, slots=True)
class KeepEpochs:
    """Policy that keeps the last checkpoint of each `EPOCH_METRIC` value, except the newest checkpoint."""

    @property
    def text(self) -> str:
        return "epochs"

    def kept(self, view: RetentionView) -> Mapping[str, str]:
        epochs = _measured(view.lineage, EPOCH_METRIC)
        lasts = {floor(value): c for value, c in epochs if isfinite(value)}
        return {
            c.id.attempt: f"end of epoch {epoch}" for epoch, c in lasts.items() if c is not view.lineage[-1]
        }


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Policy that keeps the `count` best checkpoints by a metric (not NaN); of equals, the older."""

    metric: str
    mode: Mode
    count: int

    @property
    def text(self) -> str:
        return f"best={quote(self.metric)}:{self.mode}:{self.count}"

    def kept(self, view: RetentionView) -> Mapping[str, str]:
        sign = 1 if self.mode == "min" else -1
        best = nsmallest(self.count, _measured(view.lineage, self.metric), key=lambda pair: sign * pair[0])
        return {
            c.id.attempt: f"{place} of {self.count} best by {self.metric} ({self.mode})"
            for place, (_, c) in enumerate(best, 1)
        }


@dataclass(frozen=True, slots=True)
class TimeToLive:
    """Policy that excludes checkpoints older than `seconds` from all other policies."""

    seconds: float

    @property
    def text(self) -> str:
        return f"ttl_s={self.seconds!r}"


Keeper: TypeAlias = KeepLast | KeepEverySteps | KeepEverySeconds | KeepMilestones | KeepEpochs | KeepBest
Policy: TypeAlias = Keeper | TimeToLive


def policies_of(options: RunOptions) -> tuple[Policy, ...]:
    """Return the policies that a run's options choose."""
    policies: list[Policy] = [KeepLast(options.keep_last)]
    if options.keep_every is not None:
        policies.append(KeepEverySteps(options.keep_every))
    if options.keep_every_s is not None:
        policies.append(KeepEverySeconds(float(options.keep_every_s)))
    if options.keep_milestones and options.total_steps is not None:
        fractions = tuple(float(fraction) for fraction in options.keep_milestones)
        policies.append(KeepMilestones(options.total_steps, fractions))
    if options.keep_epochs:
        policies.append(KeepEpochs())
    if options.keep_best is not None:
        metric, mode, count = options.keep_best
        policies.append(KeepBest(metric, "min" if mode == "min" else "max", count))
    if options.ttl_s is not None:
        policies.append(TimeToLive(float(options.ttl_s)))
    return tuple(policies)


# Retirement


def decide(
    view: RetentionView, policies: Sequence[Policy], *, pressure: bool = False
) -> tuple[Decision, ...]:
    """Return a decision for each live checkpoint, in log order.

    `pressure`: a staging disk is above its high watermark. Then policies keep only durable checkpoints,
    because their copies on nodes can be evicted; other checkpoints take space until they are retired.
    """
    on_lineage = {c.id.attempt for c in view.lineage}
    ttl_s = _ttl_s(policies)
    kept = _kept(view, policies, ttl_s, pressure)

    def why_not(c: CheckpointInfo) -> str:
        if c.id.attempt not in on_lineage:
            return "off the lineage"
        if _age_s(c, view) > ttl_s:
            return f"older than {ttl_s:g} s"
        return "makes room on the nodes" if pressure else "no policy keeps it"

    return tuple(
        Decision(checkpoint=c, kept=True, reasons=tuple(reasons))
        if (reasons := kept.get(c.id.attempt))
        else Decision(checkpoint=c, kept=False, reasons=(why_not(c),))
        for c in view.live
    )


def decide_at_end(view: RetentionView, policies: Sequence[Policy]) -> tuple[Decision, ...]:
    """Return a decision for each checkpoint that a finished run has only on its nodes.

    `KeepLast` does not apply here: a run that has ended need not resume from its last checkpoints.
    """
    lasting = [policy for policy in policies if not isinstance(policy, KeepLast)]
    return tuple(d for d in decide(view, lasting) if d.checkpoint.level < Level.DURABLE)


def _kept(
    view: RetentionView, policies: Sequence[Policy], ttl_s: float, pressure: bool
) -> Mapping[str, Sequence[str]]:
    """Map each attempt to keep to the reasons for keeping it."""
    young = replace(view, lineage=tuple(c for c in view.lineage if _age_s(c, view) <= ttl_s))
    durable = {c.id.attempt for c in young.lineage if c.level is Level.DURABLE}
    kept: dict[str, list[str]] = {}
    for attempt, reason in _always(view):
        kept.setdefault(attempt, []).append(reason)
    for policy in policies:
        if not isinstance(policy, TimeToLive):
            for attempt, reason in policy.kept(young).items():
                if attempt in durable or not pressure:
                    kept.setdefault(attempt, []).append(reason)
    return kept


def _always(view: RetentionView) -> Iterator[tuple[str, str]]:
    """Yield the attempts that are kept by a rule, not by a policy, each with the reason."""
    for attempt in view.busy:
        yield attempt, "in use"
    for level in Level:
        for c in _newest(view, level):
            yield c.id.attempt, f"newest {level.label}"
    for c in _with_newest_items(view):
        yield c.id.attempt, NEWEST_ITEMS
    for c in view.live:
        for owner in pinned_by(c, view.now_s):
            yield c.id.attempt, f"pinned by {owner}"


def pinned_by(checkpoint: CheckpointInfo, now_s: float) -> tuple[str, ...]:
    """Return the owners of pins that have not expired."""
    return tuple(owner for owner, end_s in checkpoint.pins.items() if end_s is None or end_s > now_s)


def pinned_aside(view: RetentionView) -> tuple[CheckpointInfo, ...]:
    """Return the pinned checkpoints off the lineage that are not on the storage path."""
    on_lineage = {c.id.attempt for c in view.lineage}
    aside = (c for c in view.live if c.level < Level.DURABLE and c.id.attempt not in on_lineage)
    return tuple(c for c in aside if pinned_by(c, view.now_s))


def _ttl_s(policies: Iterable[Policy]) -> float:
    return min((policy.seconds for policy in policies if isinstance(policy, TimeToLive)), default=inf)


def _age_s(checkpoint: CheckpointInfo, view: RetentionView) -> float:
    return view.now_s - checkpoint.committed_at_s


def _newest(view: RetentionView, level: Level) -> Iterator[CheckpointInfo]:
    """Yield checkpoints of the lineage that have reached `level`, newest first, down to one that offers it.

    If none of the lineage offers it, the same of all live ones follow: a group may have gone back from them.
    """
    yielded: set[str] = set()
    for checkpoints in (view.lineage, view.live):
        for c in (c for c in reversed(checkpoints) if c.level >= level and c.id.attempt not in yielded):
            yielded.add(c.id.attempt)
            yield c
            if view.offers(c, level):
                return


def _newest_exported(checkpoints: Sequence[CheckpointInfo], view: RetentionView) -> CheckpointInfo | None:
    """Return the last checkpoint of which the storage path has some items, or all without known damage."""
    return next((c for c in reversed(checkpoints) if c.exported or view.offers(c, Level.DURABLE)), None)


def _with_newest_items(view: RetentionView) -> Iterator[CheckpointInfo]:
    """Yield the checkpoints that are kept for their items: the newest of the lineage, and the newest of all.

    A group that resumes from an older durable checkpoint, after the loss of all nodes, leaves newer items off
    the lineage. These stay until the storage path has something newer of the lineage.
    """
    stored = _newest_exported(view.lineage, view)
    exported = [c for c in view.live if c.exported and (stored is None or c.seq >= stored.seq)]
    return (c for c in exported if c is exported[-1] or c is stored)


def outlived(lost: Iterable[CheckpointInfo], view: RetentionView) -> tuple[CheckpointInfo, ...]:
    """Return the unpinned lost checkpoints that are older than the newest intact one on the storage path."""
    newest = _newest_exported([c for c in view.live if c.id.attempt not in view.unsafe_remote], view)
    older = [c for c in lost if newest is not None and c.seq < newest.seq]
    return tuple(c for c in older if not pinned_by(c, view.now_s))


def _first_of_each(pairs: Iterable[tuple[float, CheckpointInfo]]) -> Mapping[float, CheckpointInfo]:
    """Map each group to its first checkpoint."""
    firsts: dict[float, CheckpointInfo] = {}
    for group, c in pairs:
        firsts.setdefault(group, c)
    return firsts


def _measured(checkpoints: Iterable[CheckpointInfo], metric: str) -> Iterator[tuple[float, CheckpointInfo]]:
    """Yield the value of `metric` and the checkpoint, for each checkpoint with a value that is not NaN."""
    for c in checkpoints:
        value = c.metrics.get(metric)
        if value is not None and not isnan(value):
            yield value, c


# Eviction


def choose_evictions(view: RetentionView, *, keep_local: int) -> tuple[str, ...]:
    """Return the attempts to delete only from the nodes, not from the storage path; oldest first.

    These attempts are durable and not among the last `keep_local` (at least 1) of the lineage. A checkpoint
    is never evicted while it is busy, not durable, the newest, or unsafe on the storage path.
    """
    current = view.lineage or view.live  # the lineage is empty until a session from scratch commits
    stay = {c.id.attempt for c in current[-keep_local:]}.union(view.busy, view.unsafe_remote)
    return tuple(c.id.attempt for c in view.live if c.level is Level.DURABLE and c.id.attempt not in stay)


def choose_evictions_for_space(
    view: RetentionView,
    *,
    held_bytes: Mapping[str, int],
    free_bytes: int,
    total_bytes: int,
    high_watermark: float,
    low_watermark: float,
) -> tuple[str, ...]:
    """Return the attempts to delete from one node because its disk is full, oldest first.

    `held_bytes` maps attempts to their bytes on the node. Nothing is evicted while at most `high_watermark`
    of the disk is in use. Otherwise attempts are evicted until the use is down to `low_watermark`, but only
    attempts that `choose_evictions` returns with `keep_local` 1.
    """
    used_bytes = total_bytes - free_bytes
    if used_bytes <= high_watermark * total_bytes:
        return ()
    chosen: list[str] = []
    for attempt in choose_evictions(view, keep_local=1):
        if used_bytes <= low_watermark * total_bytes:
            break
        if attempt in held_bytes:
            chosen.append(attempt)
            used_bytes -= held_bytes[attempt]
    return tuple(chosen)


# Text


def to_text(policies: Iterable[Policy]) -> str:
    """Return the policies as the text in a session record: `last=3 every_steps=1000 best=loss:min:2`."""
    return " ".join(policy.text for policy in policies)


def from_text(text: str) -> tuple[Policy, ...]:
    """Return the policies in `text`, none if `text` is empty. Raise FormatError if `text` is not valid."""
    if len(text) > MAX_TEXT:
        raise FormatError(f"A retention policy has {len(text)} characters; at most {MAX_TEXT} are allowed.")
    return tuple(map(_policy, text.split()))


def _policy(word: str) -> Policy:
    key, _, value = word.partition("=")
    read = _READERS.get(key)
    if read is None:
        raise FormatError(
            f"There is no retention policy {key[:80]!r}.",
            hint=f"This ray_ckpt knows {', '.join(_READERS)}.",
        )
    try:
        return read(value)
    except ValueError as error:
        raise FormatError(f"The retention policy {word[:80]!r} is not valid: {error}.") from error


def _read_milestones(value: str) -> KeepMilestones:
    total_steps, _, fractions = value.partition(":")
    return KeepMilestones(_count(total_steps), tuple(map(_fraction, fractions.split(","))))


def _read_best(value: str) -> KeepBest:
    metric, _, rest = value.partition(":")
    mode, _, count = rest.partition(":")
    if not metric or mode not in ("min", "max"):
        raise ValueError("it needs a metric, and min or max")
    return KeepBest(unquote(metric, errors="strict"), "min" if mode == "min" else "max", _count(count))


def _read_epochs(value: str) -> KeepEpochs:
    if value:
        raise ValueError("it takes no value")
    return KeepEpochs()


def _count(value: str) -> int:
    if not _COUNT.fullmatch(value):
        raise ValueError(f"{value[:80]!r} is not a whole number of at least 1")
    return int(value)


def _positive(value: str) -> float:
    number = float(value)
    if not 0 < number < inf:
        raise ValueError(f"{value[:80]!r} is not a number above 0")
    return number


def _fraction(value: str) -> float:
    if (number := _positive(value)) > 1:
        raise ValueError(f"{value[:80]!r} is above 1")
    return number


_COUNT = re.compile(r"[1-9][0-9]{0,17}")
_READERS: Mapping[str, Callable[[str], Policy]] = {
    "last": lambda value: KeepLast(_count(value)),
    "every_steps": lambda value: KeepEverySteps(_count(value)),
    "every_s": lambda value: KeepEverySeconds(_positive(value)),
    "milestones": _read_milestones,
    "epochs": _read_epochs,
    "best": _read_best,
    "ttl_s": lambda value: TimeToLive(_positive(value)),
}
