"""The Checkpointer: the object of a training loop that saves and restores.

A Checkpointer decides from the step number alone when to save. A save copies the state into the arena of the
node's agent and returns; other processes do the rest. A Checkpointer restores before the first step. A failed
save is counted and logged and never stops training; only misuse is raised.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch

from ray_ckpt.arguments import whole_number
from ray_ckpt.capture.engines import parts_of
from ray_ckpt.capture.items import Item
from ray_ckpt.capture.load import RestoreInfo, SavedState
from ray_ckpt.collector import collector_paused
from ray_ckpt.config import RunOptions, is_uri
from ray_ckpt.core.values import GOES_ON, STILL_WRITING, RankProgress, SessionKey
from ray_ckpt.errors import CheckpointError, CollectiveError, ConfigError, RunConflict, named_text, text_of
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.trainer.connection import Connection, ProgressThread, get_connection, open_checkpointers
from ray_ckpt.trainer.handoff import SaveParts
from ray_ckpt.trainer.item_reader import ItemReader
from ray_ckpt.trainer.link import Link
from ray_ckpt.trainer.metrics import MetricReader, detached
from ray_ckpt.trainer.outcomes import Outcomes, SaveStats, UnprotectedGuard, warn_of_annotation
from ray_ckpt.trainer.rank_items import RankItems, start_gap_search, with_item
from ray_ckpt.trainer.reports import Reports
from ray_ckpt.trainer.restoring import Restoring, called_again, step_of
from ray_ckpt.trainer.save_count import SaveCount
from ray_ckpt.trainer.save_signal import SaveSignals
from ray_ckpt.trainer.saver import Saver
from ray_ckpt.trainer.step_count import HINT, Call, StepCount
from ray_ckpt.trainer.survivor import Survivor, make_survivor
from ray_ckpt.types import AttemptId, Level

log = logging.getLogger("ray_ckpt")

FLUSH_S = 120.0  # at the end of the loop, the wait until the last capture is safe on this node
MAX_COMPARED = 16  # first saves without a commit that compare all bytes, which costs each a digest of them
FIRST_OUTCOME_S = 10.0  # wait of the second save for the first, to find ranks that save alone

LevelName = Literal["local", "replicated", "durable"]
LEVELS: Mapping[str, Level] = {level.label: level for level in Level}


class Checkpointer:
    """Saves and restores the training state of this rank, together with all other ranks.

    Every keyword is an item: a module, an optimizer, a tensor, an object with `state_dict` and
    `load_state_dict`, or a dict or list of plain values. RNG state is added automatically.

    Raises NotConnected outside a run, UnsupportedItem for an object that cannot be saved.
    """

    def __init__(self, *, link: Link | None = None, **items: Any) -> None:
        connection = self._connection = get_connection() if link is None else Connection(link=link)
        self._link = link = connection.need_link()
        self._probe = connection.probe
        self._objects: Mapping[str, Any] = {}
        # Set by the restore:
        self._session_key: SessionKey | None = None
        self._items: RankItems | None = None
        self._saver: Saver | None = None
        self._watch: ProgressThread | None = None
        self._survivor: Survivor | None = None
        self._rng: Any = None  # the restored random state, kept until the first step
        self._count = StepCount(salvages=link.options.salvage and link.identity.rank == 0)
        self._saves = SaveCount(link.identity)
        self._signals = SaveSignals(link)
        self._metrics = MetricReader(is_first=link.identity.rank == 0)
        self._last_metrics: dict[str, Any] = {}  # of the calls for the last step
        self._whole_step = -1  # the last step, if its calls have returned and none has to follow
        self._loop: Callable[[], Generator[int] | None] = lambda: None  # the iterator of `steps`, if it lives
        self._save_calls = self._own_saves = 0  # in all, and those that the training loop itself requested
        self._is_over = False  # the loop has ended: nothing more is saved
        self._is_closed = False
        self.stats = SaveStats()
        self._guard = UnprotectedGuard(link.options.unprotected_after)
        self._outcomes = Outcomes(link, self._guard, self.stats)
        self._reports = Reports(link, connection.reporter, self._outcomes)
        for name, obj in items.items():
            self.add(name, obj)
        open_checkpointers.add(self)

    def add(self, name: str, obj: Any) -> None:
        """Register one more item. Call this before the restore, which fixes the set of items.

        An engine of DeepSpeed is several items: `engine=engine` registers `model`, `optimizer` and, if it has
        one, `scheduler`; `actor=engine` registers `actor`, `actor_optimizer` and `actor_scheduler`.
        """
        for part, found in parts_of(name, obj).items():
            if self._objects.get(part, self) is found:  # the optimizer of an engine that is registered too
                continue
            if self._session_key is not None:
                hint = "Add all items before the restore."
                raise ConfigError(f"The item {part!r} comes too late.", hint=hint)
            self._objects = with_item(self._objects, part, found)

    def hold(self, items: Mapping[str, Item], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Replace all items, also after the restore, by these ready items.

        For trainers that hand over a new state dict with each save or load. Only the steps of `optimizers`
        change tensors that are copied in the background.
        """
        self._objects = dict(items)
        if self._items is not None and self._saver is not None:
            self._items.hold(items)
            self._saver.optimizers = tuple(optimizers)

    @property
    def options(self) -> RunOptions:
        """The options of the run."""
        return self._link.options

    @property
    def where(self) -> str:
        """The URI of the run, `<storage path>/<run name>`, as for `ray_ckpt.open`."""
        return self._link.identity.where

    # -- restore -------------------------------------------------------------------------------------

    def restore(self, *, live_step: int | None = None) -> RestoreInfo | None:
        """Restore every item from the newest intact checkpoint of the run, the same on all ranks.

        Returns None if there is none. A run without a checkpoint begins with the checkpoint that `resume=URI`
        or `init_from` names; then the step is the step of that other checkpoint, or 0. Hyperparameters that
        differ from the values that the objects were built with are logged and listed in the result; those
        named in the option `keep` stay as built.

        With `live_step` nothing is loaded: saves go on from the live state, which is that after this step, as
        in a replica after the loss of the one that saved. ConfigError if the newest checkpoint is later.

        Raises MismatchError (each difference listed) if the checkpoint does not fit, RestoreError if
        there are checkpoints but none intact, InsufficientSpace if saves of a new run would not fit here,
        ConfigError if another Checkpointer of this process has restored since it was connected.
        """
        if self._session_key is not None or self._is_closed:
            raise called_again(is_closed=self._is_closed, has_failed=self._saver is None)
        self._connection.check_unused()
        link, options = self._link, self._link.options
        items = self._items = RankItems(self._objects, link.identity, options)
        size_bytes = items.preflight().size_bytes
        gaps = start_gap_search(self._objects) if link.identity.rank == 0 else None
        link.reserve(size_bytes)
        restoring, ticket = Restoring(link, items), link.ticket()
        self._session_key = ticket.session_key
        restored = restoring.run(ticket) if live_step is None else restoring.keep(ticket, live_step)
        key = self._session_key = restored.session_key
        info = restored.info
        if restored.has_random_state:  # a walk may draw, as for a loader's state
            self._rng = items.items["rng"].tree()
        checkpoint = restored.checkpoint
        if self._probe is not None:
            warnings = gaps.result() if gaps is not None else ()
            self._probe.restored(items.items, checkpoint.step if checkpoint else None, warnings)
        self._saver = Saver(link, key, items.still, on_wait=self._outcomes.count_wait)
        self._survivor = make_survivor(link, key, items, self._saver)
        self._saver.prepare(items.predicted_layout(items.walk()))
        step = info.step if info else live_step or 0
        self._count.restore(step)
        self._saves.restore(step, key, items.window)
        self._outcomes.begin(key, checkpoint)
        self._reports.begin(key, step)
        self._watch = ProgressThread(link, key, self._progress, self._signals)
        self._connection.used.set()
        return info

    def _progress(self) -> RankProgress:
        stall_s = self.stats.blocked_s[-1] if self.stats.blocked_s else 0.0
        saved_step = self._saves.last_step
        measured = self._signals.progress(step=self._count.last, saved_step=saved_step, stall_s=stall_s)
        return self._saves.progress(measured, is_over=self._is_over)

    # -- the loop ------------------------------------------------------------------------------------

    def steps(self, *, total: int) -> Iterator[int]:
        """Restore now, then yield the remaining steps: from the last saved step + 1 up to `total`.

        The state after the loop body belongs to the yielded step; `ckpt.step(step)` must be the last
        statement of the body. At the end the last step is saved, and all ranks wait until this save is
        committed.
        """
        total = whole_number(total, "total", hint=HINT)
        self.restore()
        if self._probe is not None:
            total = self._probe.total(total)
        if self._link.identity.rank == 0:
            self._count.warn_if_none_left(total)
        loop = self._steps(self._count.last + 1, total)
        self._loop = weakref.ref(loop)
        return loop

    def _steps(self, first: int, total: int) -> Generator[int]:
        items = self._require_items()
        self.restore_random_state()
        try:
            for step in range(first, total + 1):
                if self._probe is not None:
                    self._probe.begun(step, items.items)
                self._count.begun = step
                yield step
                if self._count.is_passed_over(step):
                    self._guard.check(step)
        except (GeneratorExit, CheckpointError):  # break, an exception in the body, or Unprotected
            if self in open_checkpointers and not sys.is_finalizing():
                self._leave(step)
            elif not self._is_closed:  # its memory is collected
                log.warning("step %d may not be saved: its loop was left, and close was not called", step)
            raise
        try:
            self._count.end(total)
            self.finish()
        finally:
            self._end_progress()

    def _leave(self, begun: int) -> None:
        """End a loop that was left in step `begun`: other ranks may still be in it."""
        is_whole = self._whole_step == begun  # otherwise the state is between two steps
        try:
            if is_whole:
                self._save_last()
            else:
                self._outcomes.warn_if_unsaved(self._count.last, since=self._count.restored, begun=begun)
            if self._survivor is not None and (not is_whole or self._outcomes.has_failed):
                self._survivor.leave()
            self.flush()
        finally:
            self._end_progress()

    # -- for a loop that calls back ------------------------------------------------------------------

    def resume_step(self) -> int:
        """Return the step that `restore` will restore; 0 in a new run. All ranks get the same step.

        Use this method in code that needs the step while objects are built, such as the counters of a
        framework. Items may still be added after the call. If the checkpoint has no intact copy, `restore`
        falls back to an older checkpoint and logs that: the step of its result is the valid one.
        """
        if self._saver is not None:
            return self._count.restored
        ticket = self._resume_ticket()
        return step_of(ticket) if ticket is not None else 0

    def saved(self) -> SavedState | None:
        """Return the saved state of this rank that `restore` will restore, without a byte of its tensors.

        None in a new run. Raises RestoreError if the state cannot be read from any source.
        """
        return ItemReader(self._link, {}).saved(self._resume_ticket)

    def _resume_ticket(self) -> RestoreTicket | None:
        """Return the ticket of the checkpoint that `restore` will restore with its step."""
        ticket = self._link.ticket(early=True)
        if ticket.checkpoint is not None:
            return ticket
        return self._link.origin(ticket.session_key) if is_uri(self.options.resume) else None

    def restore_random_state(self) -> None:
        """Set random state to the restored state again, once, before the first step; `steps` calls it.

        After the restore, code that makes iterators, validates or builds more objects draws random numbers
        that the saved run had drawn already. Call this method last in the hook before each step: it does
        nothing if no random state was restored, at a second call, or after a step.
        """
        rng, self._rng = self._rng, None
        if rng is not None:
            self._require_items().items["rng"].load(rng)

    def finish(self, metrics: Mapping[str, Any] | None = None) -> bool:
        """Save the last step unless it is saved, and wait until the save is committed: training is over.

        Call this on every rank, after the last step; `steps` does. Metrics are as in `save`. Returns False if
        there is no checkpoint of the last step: see the log, or `wait`. The last step is the last one that a
        call has named: if a registered optimizer has stepped since, the state is of no step, and not saved.
        """
        self._check_open("finish")
        self._save_last(metrics)
        if problem := self._outcomes.problem():
            text = "training ends with step %d, which has no checkpoint: %s; the newest of the run is %s"
            log.error(text, self._count.last, problem, self._outcomes.newest_text)
        self._reports.report(self._count.last)
        self._end_progress()
        return not problem

    # -- saving --------------------------------------------------------------------------------------

    def due(self, step: int, *, by_default: bool = True) -> bool:
        """Return True if the cadence requires a save after `step`, the step just completed.

        All ranks get the same answer: the step is a multiple of `every_steps`, or the coordinator has
        announced it to all. In a loop without `step`, call this method after each step, on every rank: from
        the measured pace, the coordinator chooses a step that no rank has reached, to save by time or before
        a node leaves. With `by_default=False`, a loop with a cadence of its own is spared the one
        that a run has without `every_steps` and `every_s`. Raises as `step` does.
        """
        step, items = self._complete(step, "due"), self._require_items()
        is_over = items.is_postponing and not items.is_accumulating()  # the window that a save waits for
        if not (is_due := self._is_due(step, by_default=by_default) or is_over):
            self._check_outcomes(step)
            self._whole_step = step
        return is_due

    def _is_due(self, step: int, *, by_default: bool = True) -> bool:
        options = self._link.options
        every = options.steps_between_saves if by_default else options.every_steps
        is_agreed = self._signals.look(step)
        return is_agreed or (every is not None and step % every == 0)

    def _complete(self, step: int, call: Call) -> int:
        """Note that `step` is complete, at the first call for this step. Raises as `step` does."""
        self._check_open(call)
        is_same = self._saves.has_updates and self._saves.is_same_state()
        step, is_new = self._count.complete(step, call, is_same)
        self._saves.completed(is_new=is_new)
        self._whole_step = -1
        if is_new:
            self._signals.completed()
            self._rng, self._last_metrics = None, {}
        self._require_saver().check()
        return step

    def _check_open(self, call: str) -> None:
        if self._saver is None:
            hint = "Call ckpt.restore() or ckpt.steps() first, also in a new run."
            raise ConfigError(f"{call} was called before restore.", hint=hint)
        if self._is_closed:
            raise ConfigError(f"{call} was called after close.", hint="Close the Checkpointer last.")

    def _check_outcomes(self, step: int) -> None:
        self._outcomes.check()
        self._guard.check(step)

    def step(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Note that optimizer step number `step` is complete; save if a save is due.

        `step` counts optimizer steps over the whole run: an integer (also a NumPy integer, or a tensor of
        one) above the previous step, and at least 1 or the restored step + 1. Raises ConfigError for any
        other value, before anything is done.
        """
        step = self._complete(step, "step")
        if self._survivor is not None:  # before a save and a report, in which ranks wait for each other
            self._survivor.keep(step, self._count.mark())
        self._last_metrics |= detached(metrics)
        items = self._require_items()
        is_due = self._is_due(step) or (self._probe is not None and self._probe.due(step))
        if (is_due or items.is_postponing) and not self._joins_save(step, metrics):
            self._save_now(step)
        else:
            self._check_outcomes(step)
        self._reports.report_if_due(step)
        self._whole_step = step
        if self._probe is not None:
            self._probe.ended(step, items.items)

    def save(self, step: int, metrics: Mapping[str, Any] | None = None) -> bool:
        """Save the state after `step`, on every rank. Return False if it was skipped or not captured.

        Returns when the state has been copied; use `wait` to wait until the copy is safe. Metrics are numbers
        or one-element tensors, of rank 0 only; a checkpoint has those of all calls for its step. In the
        middle of an accumulation window, when gradients wait for an optimizer step, `save` returns False, and
        after the window the next `step` saves, or `due` is True, unless `partial_grads` is set: then the
        gradients are saved too. The argument `step` follows the rules of the method `step`, or is that of the
        last `step` or `due`. If `step` has captured this step, that save is this one too, without changes in
        `lock` since then; so it is with `step` after `save`. A save that returned False may be tried again.
        """
        step = self._complete(step, "save")
        self._last_metrics |= detached(metrics)
        saved = self._joins_save(step, metrics) or self._save_now(step)
        if saved:
            self._count.captured()
        if not self._signals.is_at(step):  # a rank that missed the save signal does not make this call
            self._own_saves += 1
            if self._own_saves >= 2:  # by then a rank that saves alone has had its error
                self._reports.report_if_due(step)
        self._whole_step = step
        return saved

    def _joins_save(self, step: int, metrics: Mapping[str, Any] | None) -> bool:
        """Return True if the state of `step` is captured already, and its save goes on or is committed."""
        captured = self._outcomes.captured(step)
        if captured is None or not self._saves.is_same_state():
            return False
        self._require_saver().settle()
        if not self._outcomes.has_ended(captured, self._signals.block_s(self.options.max_block_s)):
            if self._link.identity.world_size > 1:  # another rank may not have captured it
                self._link.skip(self._saves.attempt(step), GOES_ON)
        elif not self._outcomes.is_committed(captured):
            return False
        self._outcomes.request(captured)
        if metrics is not None:
            self.annotate(step, metrics=metrics)
        return True

    def _save_now(self, step: int) -> bool:
        if self._require_items().postpone():
            self._outcomes.refuse(f"step {step}: its save waits for the end of the accumulation window")
            return False
        saved = self._save(step, max_block_s=self._signals.block_s(self.options.max_block_s))
        self._guard.check(step)
        return saved

    def annotate(self, step: int, *, metrics: Mapping[str, Any]) -> None:
        """Add metrics, such as a validation loss, to the checkpoint of `step`; new values replace old ones.

        Metrics are as in `save`; only those of rank 0 are used, and other ranks return at once. The call does
        not wait for the service and never stops training: if the step has no live checkpoint or its save
        fails, a warning is logged.
        """
        if self._link.identity.rank != 0:
            return
        try:
            if (step := whole_number(step, "The step", hint=HINT)) < 1:
                raise ConfigError("There is no checkpoint of a step below 1.")
            if values := self._metrics.read(detached(metrics)):
                if step == self._count.last:
                    self._last_metrics |= values
                done = self._link.annotate(step, values, self._outcomes.in_flight(step))
                done.add_done_callback(lambda done: warn_of_annotation(step, done))
        except Exception as error:  # there is no agent, or a value has an unexpected type: training goes on
            log.warning("step %s was not annotated: %s", step, text_of(error))

    def wait(self, level: LevelName = "local", *, timeout_s: float = 600.0) -> None:
        """Wait until the last requested save has reached `level`.

        Raises Unavailable with the reason if that save was skipped, could not be captured, was dropped, waits
        for the end of an accumulation window, or if the time is up. Before the first save, the call waits for
        the restored checkpoint, and raises Unavailable if this run has none.
        """
        if level not in LEVELS:
            raise ConfigError(f"{level!r} is not a level.", hint=f"Use one of {', '.join(LEVELS)}.")
        if self._saver is None:
            raise ConfigError("wait was called before restore.", hint="Restore, train, save, then wait.")
        self._saver.settle()
        self.waiter()(LEVELS[level], timeout_s)

    def waiter(self) -> Callable[[Level, float], None]:
        """Return a function that waits, in any thread, until the save requested last is at a level.

        The function takes the level and a limit in seconds; its errors are those of `wait`.
        """
        return self._outcomes.waiter()

    @property
    def setup_s(self) -> float | None:
        """Seconds until memory for captures was prepared, in the background; None until then."""
        return self._saver.setup_s if self._saver is not None else None

    @contextlib.contextmanager
    def lock(self, *, moves: bool = False) -> Iterator[None]:
        """Change parameters or optimizer state other than by `optimizer.step()` inside this context.

        Waits for a capture that reads them. It is for weights that are clamped or loaded in place, and steps
        replayed from a CUDA graph, which run no hooks. With `moves=True`, memory that state leaves is free.
        """
        if self._survivor is not None:
            self._survivor.before_change(forgets=moves)
        if self._saver is not None:
            self._saver.settle(forgets=moves)
        with self._items.moved() if moves and self._items is not None else contextlib.nullcontext():
            yield

    def flush(self, *, commit: bool = False) -> None:
        """Wait, up to a limit, until the last capture has left this process, or is committed if `commit`."""
        if self._watch is not None:
            self._watch.send()
        if self._saver is not None:
            self._saver.settle()
            if not self._saver.wait_released(FLUSH_S):
                log.warning("the last capture was not written within %.0f s", FLUSH_S)
        if commit and self._outcomes.pending:
            self._outcomes.is_committed(self._outcomes.pending[-1])
        self._outcomes.check()

    def close(self, *, leaves_loop: bool = True) -> None:
        """Flush and end the progress thread. Raises as `step` does, when all has ended.

        A loop over `steps` that has been left by `break` ends before, unless another thread may be in it.
        """
        loop = self._loop() if leaves_loop else None
        try:
            if loop is not None and inspect.getgeneratorstate(loop) == inspect.GEN_SUSPENDED:
                loop.close()
            self._is_over = True
            self.flush()
        finally:
            self._is_closed = True
            self._end_progress()
            for part in (self._survivor, self._items, self._saver, self._signals):
                if part is not None:
                    part.close()
            open_checkpointers.discard(self)

    def _end_progress(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    # -- one save ------------------------------------------------------------------------------------

    def _save(self, step: int, *, max_block_s: float) -> bool:
        start_s = time.monotonic()
        saver, outcomes = self._require_saver(), self._outcomes
        outcomes.refuse(f"step {step} was not saved: an error ended its save")
        self._save_calls += 1
        if self._save_calls == 2 and outcomes.pending:  # a rank that saves alone gets its error here
            saver.settle()
            outcomes.is_committed(outcomes.pending[0], FIRST_OUTCOME_S)
        outcomes.check()
        saver.check()
        attempt = self._saves.attempt(step)
        saved = False
        try:
            with self._survivor.saving() if self._survivor is not None else contextlib.nullcontext():
                if saver.wait_free(max_block_s):
                    self._capture(attempt, start_s)
                    saved = True
                else:
                    self.stats.skipped += 1
                    outcomes.skip(attempt, STILL_WRITING)
        except (ConfigError, CollectiveError, RunConflict):
            raise
        except (CheckpointError, OSError) as error:
            self.stats.dropped += 1
            outcomes.skip(attempt, text_of(error))
        except Exception as error:  # no memory for a copy, or a state_dict that raises: training goes on
            self.stats.dropped += 1
            log.exception("step %d could not be captured", step)
            outcomes.skip(attempt, named_text(error))
        self._saves.begun(step)
        self.stats.blocked_s.append(time.monotonic() - start_s)
        return saved

    def _save_last(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Save the last step unless it is saved, once more if its save failed, and wait for the commit.

        A later state is not saved: see `SaveCount.why_later`.
        """
        step, known, new = self._count.last, self._last_metrics, detached(metrics)
        self._last_metrics = known | new
        is_saved = step == self._outcomes.restored_step
        captured = self._outcomes.captured(step) if self._saves.last_step == step else None
        if captured is not None:
            self._require_saver().settle()
            self._outcomes.request(captured)
            # Another save while the outcome is unknown would be dropped if this one is committed.
            is_saved = self._outcomes.is_committed(captured) is not False
            if is_saved and self._last_metrics != known:
                self.annotate(step, metrics=new)
        if why := self._saves.why_later(has_gone_on=self._count.has_gone_on):
            if is_saved and not self._count.has_gone_on:  # else the end of the loop has said so
                log.warning("the state at the end is not saved: %s since step %d", why, step)
            elif not is_saved:
                self._outcomes.skip(self._saves.attempt(step), f"{why} since then")
        elif not is_saved:
            if self._require_items().postpone():
                text = "the loop ends in an accumulation window; its gradients are not in the checkpoint"
                log.warning(text)
            self._save(step, max_block_s=FLUSH_S)
        self._is_over = True
        self.flush(commit=not is_saved)

    @collector_paused()
    def _capture(self, attempt: AttemptId, began_s: float) -> None:
        items = self._require_items()
        walked = items.walk()
        captured = self._metrics.capture(self._last_metrics)
        self._require_saver().save(
            walked,
            SaveParts(
                attempt=attempt,
                state=items.encode_state(attempt.step, walked),
                metrics=captured.complete,
                compare_content=self._outcomes.newest is None and self._save_calls <= MAX_COMPARED,
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
