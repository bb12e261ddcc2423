"""The Checkpointer: what a training loop holds.

It decides when to save from the step number alone, captures state into the arena of its node's agent and
goes on; everything after that happens in other processes. It restores before the first step. A save that
fails is counted and logged and never stops training; only misuse is raised.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Set
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.classes import check_settings, classes_of
from ray_ckpt.capture.gradients import GradientsItem, Window
from ray_ckpt.capture.hyperparameters import Changed, Hyperparameters
from ray_ckpt.capture.items import Item
from ray_ckpt.capture.load import Load, RestoreInfo
from ray_ckpt.capture.predict import with_predictions
from ray_ckpt.capture.rng import RngItem
from ray_ckpt.capture.unregistered import early_iterators, unregistered
from ray_ckpt.capture.walk import Walked, walk
from ray_ckpt.config import MAX_METRIC_NAME, is_uri
from ray_ckpt.core.awaited import ranks_text
from ray_ckpt.core.barriers import BARRIER_S
from ray_ckpt.core.messages import STILL_WRITING, RankProgress
from ray_ckpt.core.node_machine import SaveOutcome
from ray_ckpt.data import is_bound_to_world_size
from ray_ckpt.errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    NotConnected,
    RestoreError,
    RunConflict,
    ServiceError,
    Unavailable,
    named_text,
    text_of,
)
from ray_ckpt.format.names import make_attempt
from ray_ckpt.format.records import MAX_METRICS
from ray_ckpt.format.shard import ShardLayout, build_layout
from ray_ckpt.format.tree import encode_tree
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.texts import tiers_text
from ray_ckpt.trainer.connection import Connection, ProgressThread, get_connection
from ray_ckpt.trainer.item_reader import ItemReader
from ray_ckpt.trainer.link import Link
from ray_ckpt.trainer.save_signal import SaveSignals
from ray_ckpt.trainer.saver import SaveParts, Saver
from ray_ckpt.trainer.step_count import Call, StepCount, whole_number
from ray_ckpt.trainer.unprotected import UnprotectedGuard
from ray_ckpt.trainer.waiting import wait_for_restore
from ray_ckpt.types import (
    AttemptId,
    CheckpointInfo,
    Level,
    RankRestore,
)

log = logging.getLogger("ray_ckpt")

FLUSH_S = 120.0  # how long leaving the loop waits for the last capture to be safe on this node
RESERVED_ITEM = re.compile(r"rng|gradients|rank\d+")  # the Checkpointer's own, and prefixes of per-rank names
URGENT_BLOCK_S = 10.0  # that a save in an emergency may wait for the one before it
OUTCOME_SLACK_S = 5.0  # for the answer to travel, beyond what the coordinator waits for
FIRST_OUTCOME_S = 10.0  # the second save waits for the first, to find ranks that save alone
MAX_POSTPONED = 1_000  # steps of an accumulation window; longer ones are none, but gradients nobody uses
FIRST_REPORT_STEPS = 10  # after the restore, and two saves by number: a rank that saves alone is found before
MAX_DOUBLED = 10  # times that the steps to the next report are doubled while ranks do not come to one
BARRIER_SLACK_S = 40.0  # for the answer, also of a restarted coordinator: all ranks need the same answer
LOOK_S = 1.0  # between looks at the outcomes of saves while ranks are waited for
MAX_LOGGED = 500  # characters of a line about metrics
MAX_PENDING = 16  # outcomes watched at a time; older ones were answered or are lost

LevelName = Literal["local", "replicated", "durable"]
LEVELS: Mapping[str, Level] = {level.label: level for level in Level}


@dataclass(slots=True)
class _Pending:
    attempt: AttemptId
    metrics: Mapping[str, float]
    outcome: Future[SaveOutcome]
    seen: bool = False  # its end has been logged or raised


@dataclass(slots=True)
class SaveStats:
    """Counts and seconds of this rank's saves by this Checkpointer."""

    saved: int = 0
    skipped: int = 0
    dropped: int = 0
    blocked_s: deque[float] = field(default_factory=lambda: deque(maxlen=1000))  # per save, the newest
    waited_s: float = 0.0  # that optimizer steps waited for captures, in all


_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def close_all() -> None:
    """Flush and close every Checkpointer of this process; its worker is about to end."""
    for checkpointer in list(_open):
        try:
            checkpointer.close()
        except CheckpointError as error:
            log.warning("while closing: %s", error)


class Checkpointer:
    """Saves and restores the training state of this rank, together with all other ranks.

    Every keyword is an item: modules, optimizers, tensors, anything with `state_dict` and
    `load_state_dict`, dicts and lists of plain values. RNG state is added by itself.

    Raises NotConnected outside a run, UnsupportedItem for an object that cannot be saved.
    """

    def __init__(self, *, link: Link | None = None, **items: Any) -> None:
        connection = get_connection() if link is None else Connection(link=link)
        if connection.problem is not None:
            raise connection.problem
        link, reporter = connection.link, connection.reporter
        if link is None:
            raise NotConnected(
                "This process belongs to no run.",
                hint="Pass CheckpointCallback(...) in ray.train.RunConfig(callbacks=[...]), "
                "or use ray_ckpt.connect(run=..., storage_path=..., rank=..., world_size=...). "
                "Ray Train with num_workers=0 runs no callbacks: use num_workers=1.",
            )
        self._link, self._reporter = link, reporter if link.options.ray_report else None
        self._probe = connection.probe
        self._objects: dict[str, Any] = {}
        self._items: dict[str, Item] = {}
        self._warnings: tuple[str, ...] = ()  # of the start, about what resuming lacks
        self._session: int | None = None
        self._epoch = 0
        self._ended: Future[CheckpointError] | None = None
        self._saver: Saver | None = None
        self._is_closed = False
        self._walked: Walked | None = None  # what the walk before has found
        self._pending: deque[_Pending] = deque(maxlen=MAX_PENDING)
        self._newest: tuple[AttemptId, Mapping[str, float]] | None = None
        self._tries: dict[int, int] = {}
        self._save_calls = 0
        self._own_saves = 0  # those that the training loop has asked for by itself
        self._next_report = 0  # the step at which all ranks report next
        self._count = StepCount()
        self._whole_step = -1  # the last step whose `step` has returned
        self._saved_step = 0  # the last step that a save was begun for
        self._saved_before: int | None = None  # and the one before; None: this is the first
        self._saved_updates = 0  # optimizer steps that were made when `save` was called last
        self._asked: _Pending | str | None = None  # the last save asked for, or why it came to nothing
        self._restored: CheckpointInfo | None = None  # of this run
        self._missed_reports = 0  # since the last one that all ranks came to
        self._is_over = False  # the loop has ended: nothing more is saved
        self._rng: Any = None  # random state as restored, until the first step
        self._last_metrics: Mapping[str, Any] | None = None
        self._no_numbers: set[str] = set()  # names of metrics that a warning has named
        self._signals = SaveSignals(link)
        self._protection = UnprotectedGuard(link.options.unprotected_after)
        self._watch: ProgressThread | None = None
        self._window: Window | None = None  # in which gradients wait for an optimizer's step
        self._num_postponed = 0  # steps for which a save has waited for its end
        self.stats = SaveStats()
        for name, obj in items.items():
            self.add(name, obj)
        _open.add(self)

    def add(self, name: str, obj: Any) -> None:
        """Register one more item. Only before the restore, which is when the set of items is fixed."""
        if self._session is not None:
            raise ConfigError(f"The item {name!r} comes too late.", hint="Add all items before the restore.")
        if RESERVED_ITEM.fullmatch(name) or name in self._objects or not name.isidentifier():
            raise ConfigError(f"{name!r} cannot be the name of an item.", hint="Use another identifier.")
        self._objects[name] = obj
        if not isinstance(obj, torch.optim.Optimizer):  # its parameters may belong to a later item
            adapt(name, obj, {})

    # -- restore -------------------------------------------------------------------------------------

    def restore(self) -> RestoreInfo | None:
        """Bring every item to the newest intact checkpoint of the run, on all ranks alike; None without one.

        A run without one begins with what `resume=URI` or `init_from` name; then the step is that of the
        other run's checkpoint, or 0. Hyperparameters that differ from those that the objects were built with
        are logged and in the answer; those in the option `keep` stay as built.

        Raises MismatchError (each difference listed) if the checkpoint does not fit, RestoreError if
        there are checkpoints but none intact, InsufficientSpace if saves could not fit this node.
        """
        self._build_items()
        self._preflight()
        built = Hyperparameters(self._objects)
        built.check(self._link.options.keep)
        ticket = self._link.ticket()
        while True:
            self._session, self._epoch = ticket.session, ticket.epoch
            origin = None
            if ticket.checkpoint is None:
                origin = self._link.origin(ticket.session, ticket.epoch)
            report, load = self._resumer.all_of(ticket) if origin is None else self._begin_from(origin)
            answer = self._link.restored(ticket.session, report)
            again = wait_for_restore(answer, self._link, self._link.options.restore_timeout_s)
            if again is None:
                break
            log.warning("step %s has no intact copy of a part; falling back", _step_of(ticket))
            ticket = again
        info = None
        if ticket.checkpoint is not None:
            info = _restore_info(ticket.checkpoint, report)
            if is_uri(self._link.options.resume) and self._link.identity.rank == 0:
                log.warning("the run goes on from its own newest checkpoint, not from what `resume` names")
            self._warn_of_other_world(ticket.checkpoint)
        elif origin is not None and origin.checkpoint is not None:
            info = replace(_restore_info(origin.checkpoint, report), step=report.origin_step or 0)
            if report.origin_step is not None:
                self._warn_of_other_world(origin.checkpoint)
        begun = load()
        if info is not None:
            info = replace(info, changed=self._changed(built, begun))
            if self._link.options.keep:
                check_settings(self._items)
            self._log_restored(info)
        if self._probe is not None:
            self._probe.restored(self._items, ticket.checkpoint, self._warnings)
        self._saver = Saver(self._link, ticket.session, self._optimizers(), waited=self._count_wait)
        self._saver.prepare(self._predicted_layout(self._walk()))
        self._ended = self._link.ended(ticket.session)
        self._rng = self._items["rng"].tree() if info else None
        self._restored = ticket.checkpoint
        self._saved_step = info.step if info else 0
        self._count.restore(self._saved_step)
        self._next_report = self._saved_step + max(
            FIRST_REPORT_STEPS, 2 * (self._link.options.steps_between_saves or 0)
        )
        self._protection.renew()
        self._watch = ProgressThread(self._link, self._session, self._progress, self._signals)
        return info

    def _changed(self, built: Hyperparameters, begun: Set[str]) -> tuple[Changed, ...]:
        keep = (*self._link.options.keep, *(f"{name}.*" for name in begun))
        try:
            return built.loaded(keep)
        except Exception:  # of an optimizer or schedule written elsewhere
            if keep:
                raise
            log.warning("hyperparameters could not be compared", exc_info=True)
            return ()

    def _log_restored(self, info: RestoreInfo) -> None:
        log.info("restored step %d in %.2f s: %s", info.step, info.seconds, tiers_text(info.bytes_by_tier()))
        if self._link.identity.rank == 0:
            for changed in info.changed:
                log.warning("hyperparameter %s", changed)

    def _count_wait(self, seconds: float) -> None:
        self.stats.waited_s += seconds

    def _progress(self) -> RankProgress:
        stall_s = self.stats.blocked_s[-1] if self.stats.blocked_s else 0.0
        reported = self._signals.progress(step=self._count.last, saved_step=self._saved_step, stall_s=stall_s)
        return replace(
            reported,
            saved_before=self._saved_before,
            updates=self._num_updates(),
            saved_updates=self._saved_updates,
            is_over=self._is_over,
        )

    def _num_updates(self) -> int:
        """Optimizer steps by now, for comparison with other ranks; parts of a group make different ones."""
        return self._window.num_steps if self._window is not None and not self._link.identity.parts else 0

    def _build_items(self) -> None:
        if self._session is not None:
            raise ConfigError("restore() was called twice.", hint="Call it once, before the first step.")
        owners = {n: o for n, o in self._objects.items() if isinstance(o, nn.Module | nn.Parameter)}
        self._items = {name: adapt(name, obj, owners) for name, obj in self._objects.items()}
        self._items["rng"] = RngItem()
        modules = [obj for obj in owners.values() if isinstance(obj, nn.Module)]
        self._window = Window(self._optimizers(), modules)
        if self._link.options.partial_grads:
            world_size = self._link.identity.world_size
            self._items["gradients"] = GradientsItem(owners, window=self._window, world_size=world_size)
        self._resumer = ItemReader(self._link, self._items)
        if self._link.identity.rank == 0:
            self._warnings = (
                *(
                    f"{phrase} is not registered: pass it to the Checkpointer, or resuming lacks it"
                    for phrase in unregistered(self._objects)
                ),
                *(
                    f"{phrase}: make its iterator after ckpt.steps, and register its position"
                    for phrase in early_iterators()
                ),
            )
            for warning in self._warnings:
                log.warning("%s", warning)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [obj for obj in self._objects.values() if isinstance(obj, torch.optim.Optimizer)]

    def _preflight(self) -> None:
        """Find what would make a save fail before training time is lost."""
        walked = self._walk()
        encode_tree(dict(walked.trees), kept=walked.kept)
        self._link.reserve(self._predicted_layout(walked).size_bytes)

    def _predicted_layout(self, walked: Walked) -> ShardLayout:
        """Of this rank's shard once every optimizer has its state."""
        identity = self._link.identity
        whole = with_predictions(walked, self._items, ranks=identity.ranks)
        return build_layout(live.slice for live in whole.owned(identity.rank))

    def _begin_from(self, ticket: RestoreTicket) -> tuple[RankRestore, Load]:
        """Read what a run without a checkpoint begins with; see `origin`."""
        options, checkpoint = self._link.options, ticket.checkpoint
        assert checkpoint is not None
        is_resumed = is_uri(options.resume)
        if is_resumed:
            report, load = self._resumer.all_of(ticket)
        else:
            report, load = self._resumer.some_of(ticket, options.init_items)
        if report.damage:
            raise RestoreError(
                f"The run cannot begin with step {checkpoint.step} of {checkpoint.id.run_uid}: "
                f"{len(report.damage)} parts cannot be read, the first is {report.damage[0]}.",
                hint="`ray-ckpt verify` shows the damage; name another checkpoint.",
                damage=report.damage,
            )
        return replace(report, origin_step=checkpoint.step if is_resumed else None), load

    def _warn_of_other_world(self, checkpoint: CheckpointInfo) -> None:
        identity = self._link.identity
        if checkpoint.world_size == identity.world_size or identity.rank != 0:
            return
        log.warning(
            "step %d was saved by %d ranks and is restored by %d: it goes on as another run would, "
            "and ranks that are new draw random numbers of their own",
            checkpoint.step,
            checkpoint.world_size,
            identity.world_size,
        )
        for name, obj in self._objects.items():
            if is_bound_to_world_size(obj):
                log.warning(
                    "the position of %r is that of a rank among %d: samples are lost and doubled now; "
                    "use ray_ckpt.data.GlobalBatchSampler",
                    name,
                    checkpoint.world_size,
                )

    # -- the loop ------------------------------------------------------------------------------------

    def steps(self, *, total: int) -> Iterator[int]:
        """Restore now, then yield the steps that are left: the last saved step + 1 up to `total`.

        The state after the body is that of the yielded step; `ckpt.step(step)` must be its last statement.
        At the end the last step is saved, and all ranks wait until it is committed.
        """
        total = whole_number(total, "total")
        self.restore()
        if self._probe is not None:
            total = self._probe.total(total)
        if 0 < total <= self._count.last and self._link.identity.rank == 0:
            log.warning(
                "step %d was restored and total=%d: no step is left; a larger total trains on",
                self._count.last,
                total,
            )
        return self._steps(self._count.last + 1, total)

    def _steps(self, first: int, total: int) -> Iterator[int]:
        step = first - 1
        self.restore_random_state()
        try:
            for step in range(first, total + 1):
                if self._probe is not None:
                    self._probe.begun(step, self._items)
                yield step
        except GeneratorExit:  # break, or an exception in the body: other ranks may not be with us
            is_whole = self._whole_step == step  # else the body is half done: its state belongs to no step
            if is_whole:
                self._save_last()
                self._is_over = True
            self.flush(commit=is_whole)
            self._end_progress()
            raise
        self.finish()

    # -- for a loop that calls back ------------------------------------------------------------------

    def resume_step(self) -> int:
        """The step that `restore` is going to bring back; 0 in a new run. Every rank gets the same.

        For what has to know it while the objects are built: the counters of a framework, say. Items may be
        added after it. If the checkpoint turns out to have no intact copy, `restore` falls back to an older
        one, and says so: its `info.step` is what counts.
        """
        if self._saver is not None:
            return self._count.restored
        ticket = self._link.ticket()
        if ticket.checkpoint is not None:
            return ticket.checkpoint.step
        if not is_uri(self._link.options.resume):
            return 0
        origin = self._link.origin(ticket.session, ticket.epoch)
        return _step_of(origin) if origin is not None else 0

    def restore_random_state(self) -> None:
        """Put random state back as it was restored, once, before the first step; `steps` does so by itself.

        In between, what makes iterators, validates or builds more objects draws random numbers, which the
        saved state has drawn already. Call it in the hook that comes before each step, and last there: it
        does nothing in a new run, the second time, or after a step.
        """
        rng, self._rng = self._rng, None
        if rng is not None:
            self._items["rng"].load(rng)

    def finish(self) -> bool:
        """Save the last step unless that has been done, and wait until it is committed: training is over.

        On every rank, after the last step; `steps` does so by itself. False if there is no checkpoint of that
        step: the log says why, and `wait` raises with the reason.
        """
        if self._saver is None:
            raise ConfigError("finish was called before restore.", hint="Restore first, also in a new run.")
        self._save_last()
        self._is_over = True
        self.flush(commit=True)
        if problem := self._problem():
            newest = self._newest[0] if self._newest else self._restored.id if self._restored else None
            log.error(
                "training ends with step %d, which has no checkpoint: %s; the newest of the run is %s",
                self._count.last,
                problem,
                "none" if newest is None else f"that of step {newest.step}",
            )
        self._report()
        self._end_progress()
        return not problem

    def _problem(self) -> str:
        """Why the last save that was asked for, if any, has not become a checkpoint; "" if it has."""
        asked = self._asked
        if asked is None or isinstance(asked, str):
            return asked or ""
        if not asked.outcome.done() or asked.outcome.exception() is not None:
            return "nothing was heard of how its save ended"
        return str(asked.outcome.result().error or "")

    # -- saving --------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether the cadence asks for a save after `step`, which is the one just completed.

        The same on all ranks: a multiple of `every_steps`, or a step that the coordinator has named to all.
        In a loop without `step`, ask after each step, on every rank: saves by time and before a node leaves
        come at a step that lies ahead of all ranks, by the pace that they show here. Raises as `step` does.
        """
        step = self._complete(step, "due")
        if not (is_due := self._is_due(step)):
            self._check_surroundings(step)
        return is_due

    def _is_due(self, step: int) -> bool:
        every = self._link.options.steps_between_saves
        is_agreed = self._signals.look(step)
        return is_agreed or (every is not None and step % every == 0)

    def _complete(self, step: int, call: Call) -> int:
        """Note that `step` is complete, once, by whichever call says so first. Raises as `step` does."""
        if self._saver is None:
            raise ConfigError(
                f"{call} was called before restore.",
                hint="Call ckpt.restore() or ckpt.steps() first, also in a new run.",
            )
        if self._is_closed:
            raise ConfigError(f"{call} was called after close.", hint="Close the Checkpointer last.")
        step, is_new = self._count.complete(step, call)
        if is_new:
            self._signals.completed()
            self._rng = None
        self._saver.look()
        return step

    def _check_surroundings(self, step: int) -> None:
        """What there is to see at a step that is not saved."""
        self._check_outcomes()
        self._protection.check(step)

    def step(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Say that optimizer step number `step` is complete; saves if that is due.

        `step` counts optimizer steps over the whole run: an integer (also NumPy's, or a tensor of one) above
        the step before, from 1 or the restored step + 1 on. ConfigError for another, before anything is done.
        """
        step = self._complete(step, "step")
        self._last_metrics = _detached(metrics)
        if self._is_due(step) or self._num_postponed or (self._probe is not None and self._probe.due(step)):
            self._save_now(step, metrics)
        else:
            self._check_surroundings(step)
        self._report_if_due(step)
        self._whole_step = step
        if self._probe is not None:
            self._probe.ended(step, self._items)

    def save(self, step: int, metrics: Mapping[str, Any] | None = None) -> bool:
        """Save the state after `step`, on every rank. False if it was skipped or could not be captured.

        Returns when the state has been copied; use `wait` to know that it is safe. Metrics are numbers or
        one-element tensors; rank 0's count. In the middle of an accumulation window, when gradients wait for
        an optimizer's step, it returns False, and the next `step` after the window saves, unless
        `partial_grads` is set: then the gradients are saved too. `step` is as in `step`, or the step that
        `step` or `due` was called for last. A save that returned False may be tried again.
        """
        step = self._complete(step, "save")
        saved = self._save_now(step, metrics)
        if saved:
            self._count.captured()
        if not self._signals.is_at(step):  # a rank that has missed that word is not here
            self._own_saves += 1
            if self._own_saves >= 2:  # a rank that saves alone has been told so
                self._report_if_due(step)
        return saved

    def _save_now(self, step: int, metrics: Mapping[str, Any] | None) -> bool:
        if self._is_in_window():
            self._asked = f"step {step}: its save waits for the end of the accumulation window"
            return False
        max_block_s = self._link.options.max_block_s
        if self._signals.is_urgent:
            max_block_s = max(max_block_s, URGENT_BLOCK_S)
        saved = self._save(step, metrics, max_block_s=max_block_s)
        self._protection.check(step)
        return saved

    def _report_if_due(self, step: int) -> None:
        """By the step alone: ranks that miss an agreed step have saved less often than others."""
        if self._reporter is not None and step >= self._next_report:
            self._report()

    def annotate(self, step: int, *, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the checkpoint of `step`, such as a validation's; of one name the later counts.

        Metrics are as in `save`; rank 0's count, other ranks return at once. It does not wait for the service
        and never stops training: if the step has no live checkpoint or its save fails, a warning says so.
        """
        if self._link.identity.rank != 0:
            return
        try:
            if (step := whole_number(step, "The step")) < 1:
                raise ConfigError("There is no checkpoint of a step below 1.")
            if values := self._read_numbers(_detached(metrics)):
                on_its_way = (p.attempt for p in reversed(self._pending) if not p.outcome.done())
                attempt = next((a for a in on_its_way if a.step == step), None)
                done = self._link.annotate(step, values, attempt)
                done.add_done_callback(lambda done: _warn_of_annotation(step, done))
        except Exception as error:  # there is no agent, or a value of a strange kind: training goes on
            log.warning("step %s was not annotated: %s", step, text_of(error))

    def _is_in_window(self) -> bool:
        """Whether a save is put off to the end of the accumulation window."""
        if self._window is None or self._link.options.partial_grads or not self._window.is_open():
            self._num_postponed = 0
        else:
            self._num_postponed += 1
            if self._num_postponed > MAX_POSTPONED:
                log.warning("gradients have waited for %d steps; the save does so no longer", MAX_POSTPONED)
                self._num_postponed = 0
        return self._num_postponed > 0

    def wait(self, level: LevelName = "local", *, timeout_s: float = 600.0) -> None:
        """Return when the last save that was asked for is at `level`.

        Unavailable with the reason if that save was skipped, could not be captured, was dropped, waits for
        the end of an accumulation window, or if time is up. Before the first save it is about the checkpoint
        that was restored; Unavailable if this run has none.
        """
        if level not in LEVELS:
            raise ConfigError(f"{level!r} is not a level.", hint=f"Use one of {', '.join(LEVELS)}.")
        if self._saver is None:
            raise ConfigError("wait was called before restore.", hint="Restore, train, save, then wait.")
        self._saver.settle()
        asked, deadline_s = self._asked, time.monotonic() + timeout_s
        if isinstance(asked, str):
            raise Unavailable(f"There is no checkpoint to wait for: {asked}.")
        if asked is not None:
            attempt = asked.attempt
        elif self._restored is not None:
            if self._restored.level >= LEVELS[level]:
                return
            attempt = self._restored.id
        else:
            raise Unavailable("There is no checkpoint to wait for: no save has been asked for yet.")
        try:
            if asked is not None:
                _raise_outcome(self._link.outcome(attempt, Level.LOCAL).result(timeout_s), attempt)
            if level == "durable":
                self._link.make_durable().result(deadline_s - time.monotonic())
            elif LEVELS[level] > Level.LOCAL:
                left_s = deadline_s - time.monotonic()
                _raise_outcome(self._link.outcome(attempt, LEVELS[level]).result(left_s), attempt)
        except CheckpointError:
            raise
        except Exception as error:  # time is up, or the agent died
            raise Unavailable(
                f"Step {attempt.step} did not become {level} within {timeout_s:.0f} s.",
                hint="See the log of the coordinator for the reason; raise timeout_s if it is just slow.",
            ) from error

    @property
    def setup_s(self) -> float | None:
        """Seconds that it took to have memory for captures in place, in the background; None until it is."""
        return self._saver.setup_s if self._saver is not None else None

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Change parameters or optimizer state other than by `optimizer.step()` in here.

        Waits for a capture that is still reading them. For weights that are clamped, copied or loaded in
        place, and for a step that is replayed from a CUDA graph, which runs no hooks.
        """
        if self._saver is not None:
            self._saver.settle()
        yield

    def flush(self, *, commit: bool = False) -> None:
        """Wait, bounded, until the last capture is out of this process's hands, or (`commit`) committed."""
        if self._watch is not None:
            self._watch.send()
        if self._saver is not None:
            self._saver.settle()
        if self._saver is not None and not self._saver.wait_released(FLUSH_S):
            log.warning("the last capture was not written within %.0f s", FLUSH_S)
        if commit and self._pending:
            self._await_outcome(self._pending[-1])
        self._check_outcomes()

    def close(self) -> None:
        """Flush and end the progress thread."""
        self._is_over = True
        self.flush()
        self._is_closed = True
        self._end_progress()
        if self._window is not None:
            self._window.close()
        if self._saver is not None:
            self._saver.close()
        self._signals.close()
        self._walked = None  # its tensors may be an accelerator's memory
        _open.discard(self)

    def _end_progress(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    # -- saving, inside ------------------------------------------------------------------------------

    def _save(self, step: int, metrics: Mapping[str, Any] | None, *, max_block_s: float) -> bool:
        start_s = time.monotonic()
        saver = _require(self._saver)
        self._asked = f"step {step} was not saved: an error ended its save"
        self._save_calls += 1
        if self._save_calls == 2 and self._pending:  # a rank that saves alone is told at its second save
            self._await_outcome(self._pending[0], FIRST_OUTCOME_S)
        self._check_outcomes()
        saver.look()
        attempt = self._attempt(step)
        saved = False
        if not saver.wait_free(max_block_s):
            self.stats.skipped += 1
            self._skip(attempt, STILL_WRITING)
        else:
            try:
                self._capture(attempt, metrics, start_s)
                saved = True
            except (ConfigError, CollectiveError, RunConflict):
                raise
            except (CheckpointError, OSError) as error:
                self.stats.dropped += 1
                if isinstance(error, ServiceError | OSError):
                    saver.lose_agent()
                self._skip(attempt, text_of(error))
            except Exception as error:  # no memory for a copy, a state_dict that raises: training goes on
                self.stats.dropped += 1
                log.exception("step %d could not be captured", step)
                self._skip(attempt, named_text(error))
        if step != self._saved_step or self._saved_before is None:
            self._saved_before = self._saved_step
        self._saved_updates, self._saved_step = self._num_updates(), step
        self.stats.blocked_s.append(time.monotonic() - start_s)
        return saved

    def _skip(self, attempt: AttemptId, reason: str) -> None:
        self._asked = f"step {attempt.step} was not saved: {reason}"
        self._protection.failed(attempt.step, reason)
        log.warning("step %d is not saved: %s", attempt.step, reason)
        self._link.skip(attempt, reason)

    def _save_last(self) -> None:
        """Save the last step unless that has been done; once more if its save was skipped or dropped."""
        step = self._count.last
        if step == self._count.restored:
            return
        if self._saved_step == step:
            last = self._pending[-1] if self._pending else None
            if last is not None and last.attempt.step == step and self._await_outcome(last):
                return
        if self._is_in_window():
            log.warning("the loop ends in an accumulation window; its gradients are not in the checkpoint")
        self._save(step, self._last_metrics, max_block_s=FLUSH_S)

    def _await_outcome(self, pending: _Pending, limit_s: float | None = None) -> bool:
        """Whether that attempt was committed; waits as long as the coordinator does for missing ranks."""
        if self._saver is not None:
            self._saver.settle()  # it is not written before this thread has been seen between two operations
        if limit_s is None:
            limit_s = self._link.options.attempt_timeout_s + OUTCOME_SLACK_S
        try:
            return pending.outcome.result(limit_s).error is None
        except TimeoutError:
            text = f"nothing was heard of it for {limit_s:.0f} s"
        except Exception as error:  # the agent died
            text = text_of(error)
        log.warning("step %d: cannot tell how its save ended: %s", pending.attempt.step, text)
        return False

    def _walk(self) -> Walked:
        identity = self._link.identity
        ranks = identity.ranks
        self._walked = walk(
            self._items, rank=identity.rank, world_size=len(ranks), first=ranks[0], before=self._walked
        )
        return self._walked

    def _attempt(self, step: int) -> AttemptId:
        assert self._session is not None
        count = self._tries.get(step, 0)
        self._tries = {step: count + 1}
        return make_attempt(
            run_uid=self._link.identity.run_uid,
            epoch=self._epoch,
            session=self._session,
            step=step,
            attempt=count,
        )

    def _capture(self, attempt: AttemptId, metrics: Mapping[str, Any] | None, began_s: float) -> None:
        identity, saver = self._link.identity, _require(self._saver)
        walked = self._walk()
        state = encode_tree(
            {
                "step": attempt.step,
                "world_size": identity.world_size,
                **({"parts": [asdict(part) for part in identity.parts]} if identity.parts else {}),
                "classes": classes_of(self._items),
                "items": dict(walked.trees),
            },
            kept=walked.kept,
        )
        values, late = self._numbers(metrics)

        def all_values() -> Mapping[str, float] | None:
            for name, value in self._read_numbers(late).items():
                if len(values) < MAX_METRICS:
                    values[name] = value
            return values if identity.rank == 0 else None

        saver.save(
            walked,
            SaveParts(
                attempt=attempt,
                state=state,
                metrics=all_values,
                compare_content=self._save_calls == 1,  # of a session: ranks that differ are found early
                count=self._count.mark(),
                began_s=began_s,
            ),
        )
        outcome = self._link.outcome(attempt, Level.LOCAL)
        if len(self._pending) == MAX_PENDING and not self._pending[0].outcome.done():
            self._protection.failed(self._pending[0].attempt.step, "nothing was heard of it")
        self._asked = _Pending(attempt=attempt, metrics=values, outcome=outcome)
        self._pending.append(self._asked)
        self.stats.saved += 1

    def _numbers(self, metrics: Mapping[str, Any] | None) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Metrics as numbers, and copies of those that an accelerator still computes, to be read later."""
        now, late = _detached(metrics), {}
        for name, value in list(now.items()):
            if isinstance(value, torch.Tensor) and value.device.type != "cpu" and value.numel() == 1:
                late[name] = now.pop(name).clone()
        return self._read_numbers(now), late

    def _read_numbers(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """What is no number is left out with a warning, once for a name: a save must not fail over it."""
        values: dict[str, float] = {}
        bad: dict[str, str] = {}
        for name, value in itertools.islice(metrics.items(), MAX_METRICS):
            short = str(name)[:MAX_METRIC_NAME]
            try:
                values[short] = float(value)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                bad[short] = f"{short!r} ({error})"
        if len(metrics) > MAX_METRICS and "" not in self._no_numbers:
            self._no_numbers.add("")
            log.warning("of %d metrics the first %d are kept", len(metrics), MAX_METRICS)
        new = [text for name, text in bad.items() if name not in self._no_numbers]
        if new and len(self._no_numbers) < MAX_METRICS and self._link.identity.rank == 0:
            self._no_numbers.update(bad)
            log.warning("metrics are left out, as they are no numbers: %s", ", ".join(new)[:MAX_LOGGED])
        return values

    def _check_outcomes(self) -> None:
        """Look at ended saves without waiting. Misuse and lost tenure are raised, other failures counted."""
        self._check_tenure()
        ended = [pending for pending in self._pending if not pending.seen and pending.outcome.done()]
        for pending in ended:
            pending.seen = True
            self._settle(pending)

    def _check_tenure(self) -> None:
        """Raise if the agent has heard that the run is somebody else's; look only, do not wait."""
        if self._ended is None or not self._ended.done():
            return
        ended, self._ended = self._ended, None
        try:
            error = ended.result(0)
        except Exception:  # the agent died: its successor hears of it, and the next save does
            return
        raise error

    def _settle(self, pending: _Pending) -> None:
        try:
            outcome = pending.outcome.result(0)
        except Exception as error:
            text = text_of(error)
            self._protection.failed(pending.attempt.step, text)
            log.warning("step %d: the agent did not tell how its save ended: %s", pending.attempt.step, text)
            return
        if isinstance(outcome.error, CollectiveError | RunConflict):
            raise outcome.error
        if outcome.error is not None:
            self.stats.dropped += 1
            self._protection.failed(pending.attempt.step, str(outcome.error))
            log.warning("step %d was not saved: %s", pending.attempt.step, outcome.error)
        else:
            self._protection.renew(pending.attempt.step)
            self._newest = (pending.attempt, pending.metrics)

    def _report(self) -> None:
        """Report with all ranks, or not at all: nobody leaves the barrier of a report alone."""
        if self._reporter is None:
            return
        if self._all_have_come(self._next_report):
            self._next_report = self._reporter.report(self._newest, self._count.last)
            self._missed_reports = 0
        else:  # the same step on all ranks, also on those that come later
            self._next_report += FIRST_REPORT_STEPS << min(self._missed_reports, MAX_DOUBLED)
            self._missed_reports += 1

    def _all_have_come(self, number: int) -> bool:
        """Whether all ranks are at the report of that number. Raises misuse that is found meanwhile."""
        if self._link.identity.world_size == 1:
            return True
        assert self._session is not None
        end_s = time.monotonic() + BARRIER_S + BARRIER_SLACK_S
        try:
            answer = self._link.reach_barrier(self._session, number)
            while not answer.done() and time.monotonic() < end_s:
                wait((answer,), LOOK_S)
                self._check_outcomes()
            missing = answer.result(0)
        except (CollectiveError, RunConflict):
            raise
        except Exception as error:  # the service is away: other ranks are not told to go either
            reason = str(error) or "the coordinator does not answer"
            log.warning("step %d is not reported to Ray Train: %s", self._count.last, reason)
            return False
        if missing:
            log.warning(
                "step %d is not reported to Ray Train: rank(s) %s did not come to it within %.0f s; "
                "call step on every rank, after every step",
                self._count.last,
                ranks_text(missing),
                BARRIER_S,
            )
        return not missing


def _raise_outcome(outcome: SaveOutcome, attempt: AttemptId) -> None:
    if isinstance(outcome.error, CollectiveError | RunConflict):
        raise outcome.error
    if outcome.error is not None:
        raise Unavailable(f"Step {attempt.step} was not saved: {outcome.error}")


def _restore_info(checkpoint: CheckpointInfo, report: RankRestore) -> RestoreInfo:
    return RestoreInfo(
        step=checkpoint.step, metrics=checkpoint.metrics, parts=report.parts, seconds=report.seconds
    )


def _step_of(ticket: RestoreTicket) -> int:
    return ticket.checkpoint.step if ticket.checkpoint else 0


def _detached(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metrics without the graphs that they hang on, which must not live until the next step."""
    items = (metrics or {}).items()
    return {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in items}


def _warn_of_annotation(step: int, done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        log.warning("step %d was not annotated: %s", step, text_of(getattr(error, "cause", None) or error))


def _require(saver: Saver | None) -> Saver:
    assert saver is not None, "saves are refused before the restore"
    return saver
