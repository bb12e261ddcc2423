"""The Checkpointer: the object of a training loop that saves and restores.

It decides when to save from the step number alone, captures state into the arena of its node's agent and
returns; everything after that happens in other processes. It restores before the first step. A failed save is
counted and logged and never stops training; only misuse is raised.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal

import torch

from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.load import RestoreInfo
from ray_ckpt.config import is_uri
from ray_ckpt.core.values import STILL_WRITING, RankProgress
from ray_ckpt.errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    NotConnected,
    RunConflict,
    ServiceError,
    named_text,
    text_of,
)
from ray_ckpt.format.names import make_attempt
from ray_ckpt.trainer.connection import Connection, ProgressThread, get_connection
from ray_ckpt.trainer.handoff import SaveParts
from ray_ckpt.trainer.link import Link
from ray_ckpt.trainer.metrics import MetricReader, detached
from ray_ckpt.trainer.outcomes import Outcomes, SaveStats
from ray_ckpt.trainer.postponing import Postponing
from ray_ckpt.trainer.rank_items import RankItems, gap_warnings
from ray_ckpt.trainer.reports import Reports
from ray_ckpt.trainer.restoring import Restoring, step_of
from ray_ckpt.trainer.save_signal import SaveSignals
from ray_ckpt.trainer.saver import Saver
from ray_ckpt.trainer.step_count import Call, StepCount, whole_number
from ray_ckpt.trainer.unprotected import UnprotectedGuard
from ray_ckpt.types import AttemptId, Level

log = logging.getLogger("ray_ckpt")

FLUSH_S = 120.0  # how long leaving the loop waits for the last capture to be safe on this node
RESERVED_ITEM = re.compile(r"rng|gradients|rank\d+")  # the Checkpointer's own, and prefixes of per-rank names
URGENT_BLOCK_S = 10.0  # that a save in an emergency may wait for the one before it
FIRST_OUTCOME_S = 10.0  # that the second save waits for the first, to find ranks that save alone

LevelName = Literal["local", "replicated", "durable"]
LEVELS: Mapping[str, Level] = {level.label: level for level in Level}

_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def close_all() -> None:
    """Flush and close every Checkpointer of this process, whose worker is about to end."""
    for checkpointer in list(_open):
        try:
            checkpointer.close()
        except CheckpointError as error:
            log.warning("while closing: %s", error)


class Checkpointer:
    """Saves and restores the training state of this rank, together with all other ranks.

    Every keyword is an item: modules, optimizers, tensors, anything with `state_dict` and
    `load_state_dict`, dicts and lists of plain values. RNG state is added automatically.

    Raises NotConnected outside a run, UnsupportedItem for an object that cannot be saved.
    """

    def __init__(self, *, link: Link | None = None, **items: Any) -> None:
        connection = get_connection() if link is None else Connection(link=link)
        if connection.problem is not None:
            raise connection.problem
        if connection.link is None:
            raise NotConnected(
                "This process belongs to no run.",
                hint="Pass CheckpointCallback(...) in ray.train.RunConfig(callbacks=[...]), "
                "or use ray_ckpt.connect(run=..., storage_path=..., rank=..., world_size=...). "
                "Ray Train with num_workers=0 runs no callbacks: use num_workers=1.",
            )
        self._link = link = connection.link
        self._observer = connection.observer
        self._objects: dict[str, Any] = {}
        # From the restore on:
        self._session: int | None = None
        self._epoch = 0
        self._items: RankItems | None = None
        self._saver: Saver | None = None
        self._postponing: Postponing | None = None
        self._watch: ProgressThread | None = None
        self._rng: Any = None  # random state as restored, until the first step
        # Steps and saves:
        self._count = StepCount()
        self._signals = SaveSignals(link)
        self._metrics = MetricReader(is_first=link.identity.rank == 0)
        self._last_metrics: Mapping[str, Any] | None = None
        self._whole_step = -1  # the last step whose `step` has returned
        self._saved_step = 0  # the last step that a save was begun for
        self._saved_before: int | None = None  # the one before it; None: there is none
        self._saved_updates = 0  # optimizer steps that were made when `save` was called last
        self._tries: dict[int, int] = {}
        self._save_calls = 0
        self._own_saves = 0  # requested by the training loop itself
        self._is_over = False  # the loop has ended: nothing more is saved
        self._is_closed = False
        self.stats = SaveStats()
        self._guard = UnprotectedGuard(link.options.unprotected_after)
        self._outcomes = Outcomes(link, self._guard, self.stats)
        self._reports = Reports(link, connection.reporter, self._outcomes)
        for name, obj in items.items():
            self.add(name, obj)
        _open.add(self)

    def add(self, name: str, obj: Any) -> None:
        """Register one more item. Only before the restore, which fixes the set of items."""
        if self._session is not None:
            raise ConfigError(f"The item {name!r} comes too late.", hint="Add all items before the restore.")
        if RESERVED_ITEM.fullmatch(name) or name in self._objects or not name.isidentifier():
            raise ConfigError(f"{name!r} cannot be the name of an item.", hint="Use another identifier.")
        self._objects[name] = obj
        if not isinstance(obj, torch.optim.Optimizer):  # its parameters may belong to a later item
            adapt(name, obj, {})

    # -- restore -------------------------------------------------------------------------------------

    def restore(self) -> RestoreInfo | None:
        """Restore every item from the newest intact checkpoint of the run, the same on all ranks.

        Returns None without one. A run without a checkpoint begins with the one that `resume=URI` or
        `init_from` names; then the step is that of the other run's checkpoint, or 0. Hyperparameters that
        differ from those that the objects were built with are logged and listed in the answer; those in the
        option `keep` stay as built.

        Raises MismatchError (each difference listed) if the checkpoint does not fit, RestoreError if
        there are checkpoints but none intact, InsufficientSpace if saves could not fit this node.
        """
        if self._session is not None:
            raise ConfigError("restore() was called twice.", hint="Call it once, before the first step.")
        link, options = self._link, self._link.options
        items = self._items = RankItems(self._objects, link.identity, partial_grads=options.partial_grads)
        warnings = gap_warnings(self._objects) if link.identity.rank == 0 else ()
        for warning in warnings:
            log.warning("%s", warning)
        link.reserve(items.preflight().size_bytes)
        restoring = Restoring(link, items)
        ticket = link.ticket()
        self._session = ticket.session
        restored = restoring.run(ticket)
        self._session, self._epoch = restored.session, restored.epoch
        info = restored.info
        checkpoint = restored.checkpoint
        self._observer.restored(items.items, checkpoint.step if checkpoint else None, warnings)
        self._postponing = Postponing(items.window, partial_grads=options.partial_grads)
        self._saver = Saver(link, restored.session, items.optimizers, on_wait=self._outcomes.count_wait)
        self._saver.prepare(items.predicted_layout(items.walk()))
        self._rng = items.items["rng"].tree() if info else None
        self._saved_step = info.step if info else 0
        self._count.restore(self._saved_step)
        self._outcomes.begin(restored.session, checkpoint)
        self._reports.begin(restored.session, self._saved_step)
        self._watch = ProgressThread(link, restored.session, self._progress, self._signals)
        return info

    def _progress(self) -> RankProgress:
        stall_s = self.stats.blocked_s[-1] if self.stats.blocked_s else 0.0
        measured = self._signals.progress(step=self._count.last, saved_step=self._saved_step, stall_s=stall_s)
        return replace(
            measured,
            saved_before=self._saved_before,
            updates=self._num_updates(),
            saved_updates=self._saved_updates,
            is_over=self._is_over,
        )

    def _num_updates(self) -> int:
        """Count the optimizer steps so far, for comparison of ranks; 0 in parts of a group, which differ."""
        return self._items.window.num_steps if self._items and not self._link.identity.parts else 0

    # -- the loop ------------------------------------------------------------------------------------

    def steps(self, *, total: int) -> Iterator[int]:
        """Restore now, then yield the steps that are left: the last saved step + 1 up to `total`.

        The state after the body is that of the yielded step; `ckpt.step(step)` must be its last statement.
        At the end the last step is saved, and all ranks wait until it is committed.
        """
        total = whole_number(total, "total")
        self.restore()
        total = self._observer.total(total)
        if 0 < total <= self._count.last and self._link.identity.rank == 0:
            log.warning(
                "step %d was restored and total=%d: no step is left; a larger total trains on",
                self._count.last,
                total,
            )
        return self._steps(self._count.last + 1, total)

    def _steps(self, first: int, total: int) -> Iterator[int]:
        items = self._require_items()
        step = first - 1
        self.restore_random_state()
        try:
            for step in range(first, total + 1):
                self._observer.begun(step, items.items)
                yield step
        except GeneratorExit:  # break, or an exception in the body: other ranks may still be in the loop
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
        """Return the step that `restore` is going to bring back; 0 in a new run. All ranks get the same.

        It serves code that needs the step while objects are built, such as the counters of a framework. Items
        may be added after it. If the checkpoint turns out to have no intact copy, `restore` falls back to an
        older one and logs that: its `info.step` is what counts.
        """
        if self._saver is not None:
            return self._count.restored
        ticket = self._link.ticket()
        if ticket.checkpoint is not None:
            return ticket.checkpoint.step
        if not is_uri(self._link.options.resume):
            return 0
        origin = self._link.origin(ticket.session, ticket.epoch)
        return step_of(origin) if origin is not None else 0

    def restore_random_state(self) -> None:
        """Put random state back as it was restored, once, before the first step; `steps` calls it.

        After the restore, code that makes iterators, validates or builds more objects draws random numbers,
        which the saved state has drawn already. Call this in the hook before each step, and last there: it
        does nothing in a new run, the second time, or after a step.
        """
        rng, self._rng = self._rng, None
        if rng is not None:
            self._require_items().items["rng"].load(rng)

    def finish(self) -> bool:
        """Save the last step unless that has been done, and wait until it is committed: training is over.

        Call it on every rank, after the last step; `steps` calls it. Returns False if there is no checkpoint
        of that step: the log has the reason, and `wait` raises with it.
        """
        if self._saver is None:
            raise ConfigError("finish was called before restore.", hint="Restore first, also in a new run.")
        self._save_last()
        self._is_over = True
        self.flush(commit=True)
        if problem := self._outcomes.problem():
            newest = self._outcomes.newest_step
            log.error(
                "training ends with step %d, which has no checkpoint: %s; the newest of the run is %s",
                self._count.last,
                problem,
                "none" if newest is None else f"that of step {newest}",
            )
        self._reports.report(self._count.last)
        self._end_progress()
        return not problem

    # -- saving --------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Return True if the cadence requires a save after `step`, which is the one just completed.

        All ranks get the same answer: the step is a multiple of `every_steps`, or the coordinator has
        announced it to all. In a loop without `step`, call it after each step, on every rank: a save by time
        or before a node leaves is announced for a step ahead of all ranks, by the pace that is measured here.
        Raises as `step` does.
        """
        step = self._complete(step, "due")
        if not (is_due := self._is_due(step)):
            self._check_outcomes(step)
        return is_due

    def _is_due(self, step: int) -> bool:
        every = self._link.options.steps_between_saves
        is_agreed = self._signals.look(step)
        return is_agreed or (every is not None and step % every == 0)

    def _complete(self, step: int, call: Call) -> int:
        """Note once that `step` is complete, whichever call comes first. Raises as `step` does."""
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
        self._saver.check()
        return step

    def _check_outcomes(self, step: int) -> None:
        self._outcomes.check()
        self._guard.check(step)

    def step(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Note that optimizer step number `step` is complete; save if that is due.

        `step` counts optimizer steps over the whole run: an integer (also NumPy's, or a tensor of one) above
        the step before, from 1 or the restored step + 1 on. Raises ConfigError for any other, before anything
        is done.
        """
        step = self._complete(step, "step")
        self._last_metrics = detached(metrics)
        is_due = self._is_due(step) or self._observer.due(step)
        if is_due or (self._postponing is not None and self._postponing.is_active):
            self._save_now(step, metrics)
        else:
            self._check_outcomes(step)
        self._reports.report_if_due(step)
        self._whole_step = step
        self._observer.ended(step, self._require_items().items)

    def save(self, step: int, metrics: Mapping[str, Any] | None = None) -> bool:
        """Save the state after `step`, on every rank. Return False if it was skipped or not captured.

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
        if not self._signals.is_at(step):  # a rank that has missed the save signal does not come here
            self._own_saves += 1
            if self._own_saves >= 2:  # by then a rank that saves alone has had its error
                self._reports.report_if_due(step)
        return saved

    def _save_now(self, step: int, metrics: Mapping[str, Any] | None) -> bool:
        assert self._postponing is not None
        if self._postponing.postpone():
            self._outcomes.refuse(f"step {step}: its save waits for the end of the accumulation window")
            return False
        max_block_s = self._link.options.max_block_s
        if self._signals.is_urgent:
            max_block_s = max(max_block_s, URGENT_BLOCK_S)
        saved = self._save(step, metrics, max_block_s=max_block_s)
        self._guard.check(step)
        return saved

    def annotate(self, step: int, *, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the checkpoint of `step`, such as a validation's; of one name the later counts.

        Metrics are as in `save`; rank 0's count, other ranks return at once. It does not wait for the service
        and never stops training: if the step has no live checkpoint or its save fails, a warning is logged.
        """
        if self._link.identity.rank != 0:
            return
        try:
            if (step := whole_number(step, "The step")) < 1:
                raise ConfigError("There is no checkpoint of a step below 1.")
            if values := self._metrics.read(detached(metrics)):
                done = self._link.annotate(step, values, self._outcomes.in_flight(step))
                done.add_done_callback(lambda done: _warn_of_annotation(step, done))
        except Exception as error:  # there is no agent, or a value of a strange kind: training goes on
            log.warning("step %s was not annotated: %s", step, text_of(error))

    def wait(self, level: LevelName = "local", *, timeout_s: float = 600.0) -> None:
        """Return when the last requested save is at `level`.

        Raises Unavailable with the reason if that save was skipped, could not be captured, was dropped, waits
        for the end of an accumulation window, or if time is up. Before the first save, waits for the
        checkpoint that was restored; raises Unavailable if this run has none.
        """
        if level not in LEVELS:
            raise ConfigError(f"{level!r} is not a level.", hint=f"Use one of {', '.join(LEVELS)}.")
        if self._saver is None:
            raise ConfigError("wait was called before restore.", hint="Restore, train, save, then wait.")
        self._saver.settle()
        self._outcomes.wait(LEVELS[level], timeout_s)

    @property
    def setup_s(self) -> float | None:
        """Seconds until memory for captures was in place, in the background; None until it is."""
        return self._saver.setup_s if self._saver is not None else None

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Change parameters or optimizer state other than by `optimizer.step()` inside this context.

        Waits for a capture that is still reading them. For weights that are clamped, copied or loaded in
        place, and for a step that is replayed from a CUDA graph, which runs no hooks.
        """
        if self._saver is not None:
            self._saver.settle()
        yield

    def flush(self, *, commit: bool = False) -> None:
        """Wait, bounded, until the last capture has left this process or, with `commit`, is committed."""
        if self._watch is not None:
            self._watch.send()
        if self._saver is not None:
            self._saver.settle()
            if not self._saver.wait_released(FLUSH_S):
                log.warning("the last capture was not written within %.0f s", FLUSH_S)
        if commit and self._outcomes.pending:
            self._outcomes.is_committed(self._outcomes.pending[-1])
        self._outcomes.check()

    def close(self) -> None:
        """Flush and end the progress thread."""
        self._is_over = True
        self.flush()
        self._is_closed = True
        self._end_progress()
        if self._items is not None:
            self._items.close()
        if self._saver is not None:
            self._saver.close()
        self._signals.close()
        _open.discard(self)

    def _end_progress(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    # -- one save ------------------------------------------------------------------------------------

    def _save(self, step: int, metrics: Mapping[str, Any] | None, *, max_block_s: float) -> bool:
        start_s = time.monotonic()
        saver, outcomes = self._require_saver(), self._outcomes
        outcomes.refuse(f"step {step} was not saved: an error ended its save")
        self._save_calls += 1
        if self._save_calls == 2 and outcomes.pending:  # a rank that saves alone gets its error here
            saver.settle()
            outcomes.is_committed(outcomes.pending[0], FIRST_OUTCOME_S)
        outcomes.check()
        saver.check()
        attempt = self._attempt(step)
        saved = False
        if not saver.wait_free(max_block_s):
            self.stats.skipped += 1
            outcomes.skip(attempt, STILL_WRITING)
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
                outcomes.skip(attempt, text_of(error))
            except Exception as error:  # no memory for a copy, a state_dict that raises: training goes on
                self.stats.dropped += 1
                log.exception("step %d could not be captured", step)
                outcomes.skip(attempt, named_text(error))
        if step != self._saved_step or self._saved_before is None:
            self._saved_before = self._saved_step
        self._saved_updates, self._saved_step = self._num_updates(), step
        self.stats.blocked_s.append(time.monotonic() - start_s)
        return saved

    def _save_last(self) -> None:
        """Save the last step unless that has been done; once more if its save was skipped or dropped."""
        step, pending = self._count.last, self._outcomes.pending
        if step == self._count.restored:
            return
        if self._saved_step == step and pending and pending[-1].attempt.step == step:
            self._require_saver().settle()
            if self._outcomes.is_committed(pending[-1]):
                return
        if self._postponing is not None and self._postponing.postpone():
            log.warning("the loop ends in an accumulation window; its gradients are not in the checkpoint")
        self._save(step, self._last_metrics, max_block_s=FLUSH_S)

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
        items = self._require_items()
        walked = items.walk()
        state = items.encode_state(attempt.step, walked)
        captured = self._metrics.capture(metrics)
        self._require_saver().save(
            walked,
            SaveParts(
                attempt=attempt,
                state=state,
                metrics=captured.complete,
                compare_content=self._save_calls == 1,  # of a session: ranks that differ are found early
                count=self._count.mark(),
                began_s=began_s,
            ),
        )
        self._outcomes.add(attempt, captured.values)

    def _require_saver(self) -> Saver:
        assert self._saver is not None, "saves are refused before the restore"
        return self._saver

    def _require_items(self) -> RankItems:
        assert self._items is not None, "steps are refused before the restore"
        return self._items


def _warn_of_annotation(step: int, done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        log.warning("step %d was not annotated: %s", step, text_of(getattr(error, "cause", None) or error))
