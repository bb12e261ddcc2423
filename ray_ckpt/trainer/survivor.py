"""A rank that may outlive others of its group: what it keeps for a salvage, and its part in one.

After each step the rank sends what it alone holds (random state, data position, buffers, plain values) to its
agent. When collective operations fail, or the agent asks, it offers its live state of the last step. The
state is that of the step if no optimizer step has begun since, and if the version of every tensor that it
holds in common with other ranks is unchanged; otherwise it is not offered. When it is captured, the same is
checked again, since only optimizer steps wait for the capture. See PROTOCOL.md section 4.

With the option `salvage_copy` it also has a copy of the tensors of the step before the last optimizer step,
and offers that step too.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ray_ckpt.capture.overlap_guard import runs_hooks
from ray_ckpt.capture.snapshot import OPERATION_S, versions
from ray_ckpt.capture.still import StillSlices, look, new_draws
from ray_ckpt.capture.torch_private import copy_all
from ray_ckpt.capture.walk import LiveSlice, SliceKey, Walked
from ray_ckpt.core.values import Salvage, SessionKey
from ray_ckpt.errors import Unavailable, UnsupportedItem, named_text, text_of
from ray_ckpt.format.digest import digest
from ray_ckpt.format.shard import build_layout
from ray_ckpt.trainer.handoff import SaveParts
from ray_ckpt.trainer.link import MAX_STEP_STATE_BYTES, Link, StepState
from ray_ckpt.trainer.rank_items import RankItems
from ray_ckpt.trainer.saver import Saver
from ray_ckpt.types import Level

log = logging.getLogger("ray_ckpt")

WHOLE_S = 1.0  # wait for an optimizer step that is running to come to the end of its step
UNSAVED_S = 10.0  # wait for a save that training is making, which uses the same memory
DECIDED_S = 10.0  # wait for the decision, which is made GATHER_S = 2 s after the first report
FREE_S = 10.0  # wait for the save before, whose memory the salvage needs
MAX_PAUSE_STEPS = 1024  # from one attempt to the next to keep a state that is too large: each encodes it
SAVED_S = 30.0  # wait for the commit; then the process ends, and nodes may still commit
LEAVE_S = WHOLE_S + UNSAVED_S + DECIDED_S + FREE_S + SAVED_S  # for which training is held up, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A finished step whose state may be saved later."""

    step: int
    begun: int  # optimizer steps that had begun
    state: StepState
    count: str  # as in `SaveParts`
    own: tuple[LiveSlice, ...]  # copies
    common: tuple[LiveSlice, ...]  # live, or copies
    live: tuple[LiveSlice, ...]  # those of `common` that are live, and not copies
    versions: tuple[tuple[int, int], ...]  # of `live`
    walked: Walked
    draws: torch.Tensor | None = None  # chooses the elements in `looks`; None: there are no looks
    looks: tuple[torch.Tensor, ...] = ()  # at the tensors in `live`, whose versions miss `.data`


class _StepCopy:
    """Memory on each device for a copy of the tensors of one step."""

    def __init__(self, still: StillSlices) -> None:
        self._still = still
        self._common: tuple[LiveSlice, ...] = ()  # of the last copy
        self._uncopied: tuple[LiveSlice, ...] = ()  # those that training leaves as they are
        self._versions: tuple[tuple[int, int], ...] = ()  # of `_uncopied`, like `_looks` since the first copy
        self._draws = new_draws()
        self._looks: tuple[torch.Tensor, ...] = ()
        self._changed: set[SliceKey] = set()  # taken for unchanged before, such as an average of weights
        self._num_moved = 0
        self._moving: list[LiveSlice] = []
        self._copies: list[LiveSlice] = []  # of `_moving`

    def take(self, kept: _Kept) -> _Kept:
        """Return `kept` with copies in place of its live tensors."""
        seen = zip(self._uncopied, self._versions, strict=True)
        changed = {live.slice_key for live, version in seen if live.versions != version}
        is_as_before = not changed and self._num_moved == self._still.num_moved
        if not is_as_before or not _are_same(self._common, kept.common):
            self._changed |= changed
            self._choose(kept.common)
        with torch.no_grad():
            copy_all([copy.tensor for copy in self._copies], [live.tensor for live in self._moving])
        return replace(
            kept,
            common=(*self._uncopied, *self._copies),
            live=self._uncopied,
            versions=self._versions,
            draws=self._draws,
            looks=self._looks,
        )

    def forget(self) -> None:
        """Free the memory of the copy, and keep no live tensor. The next step is copied into new memory."""
        self._common = self._uncopied = self._versions = self._looks = ()
        self._moving, self._copies = [], []

    def _choose(self, common: tuple[LiveSlice, ...]) -> None:
        """Choose the tensors to copy, and allocate memory for them."""
        self._copies = []  # frees the memory
        chosen = self._still.unstepped(self._still.choose(common), self._still.optimizers)
        still = [live for live in chosen if live.slice_key not in self._changed]
        self._uncopied, self._versions = tuple(still), versions(still)
        self._looks = tuple(look(live.tensor, self._draws) for live in still)
        left_out = {live.slice_key for live in still}
        self._moving = [live for live in common if live.slice_key not in left_out]
        self._copies = [_room_for(live) for live in self._moving]
        self._common, self._num_moved = common, self._still.num_moved


class Survivor:
    """The salvages of one rank. `keep` runs in the training thread, all else in a thread of its own."""

    def __init__(self, link: Link, session_key: SessionKey, items: RankItems, saver: Saver) -> None:
        self._link, self._session_key = link, session_key
        self._items, self._saver = items, saver
        self._state = threading.Condition()  # guards the fields below
        self._kept: _Kept | None = None
        self._copy = _StepCopy(items.still) if link.options.salvage_copy else None
        self._copied: _Kept | None = None  # the step before the last optimizer step
        self._begun = 0  # optimizer steps and other changes that have begun in this process
        self._begun_before = 0  # at the end of the step before
        self._is_frozen = False  # no change and no save may begin: the live state is offered or captured
        self._is_held = False  # the training thread waits, so it changes nothing
        self._is_saving = False  # the training thread saves
        self._stream = _stream()  # of training
        self._thread: threading.Thread | None = None
        self._ends_s = 0.0  # when training waits no longer for the thread (monotonic)
        self._is_closed = False
        self._has_warned = False
        self._pause_steps = 1  # after the last state that was too large; 1 if the last one was not
        self._skips = 0  # steps that are left of the pause
        self._is_off = False  # an error has shown that states cannot be kept
        self._pid = os.getpid()
        _watch_steps(self)
        self._holds = ""
        self._question: Future[bool] | None = None  # of the agent; None: it could not be requested
        self._await_question()

    def _await_question(self) -> None:
        """Make an offer when the agent asks: this rank may hang in a collective operation."""
        start = weakref.WeakMethod(self._start)  # the question may stay open for the life of the process

        def asked(question: Future[bool]) -> None:
            if question.exception() is None and question.result() and (starts := start()) is not None:
                starts()

        try:
            self._question = self._link.asked(self._session_key)
            self._question.add_done_callback(asked)
        except Unavailable as error:
            self._question = None
            log.debug("this rank cannot be asked: %s", error)

    def before_change(self, *, forgets: bool = False) -> None:
        """Wait until training may change its state, and note that it does; called by the training thread.

        The live state is that of no finished step from now on, until the end of the next step. With `forgets`
        no tensor and no copy is kept, so that their memory is free when tensors are moved.
        """
        if self._pid == os.getpid():
            with self._state:
                self._settle()
                if forgets:
                    self._forget()
                else:
                    self._copy_step()
                self._begun += 1

    def _forget(self) -> None:
        self._kept = self._copied = None
        if self._copy is not None:
            self._copy.forget()

    def _copy_step(self) -> None:
        """Copy the last step before the first optimizer step after it. An error ends this for the process."""
        kept = self._kept
        if self._copy is None or kept is None or kept.begun != self._begun:
            return
        self._copied = None
        if self._is_frozen or versions(kept.live) != kept.versions:  # an overdue salvage may read the copy
            return
        try:
            self._copied = self._copy.take(kept)
        except Exception as error:
            self._copy = None
            log.warning("the tensors of steps are not copied from now on: %s", named_text(error))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Let the training thread use the memory for captures; a salvage does not, inside this context.

        Raises Unavailable if a salvage uses it, and does not end.
        """
        if self._pid != os.getpid():  # a forked child, whose saves are refused; the lock may be taken there
            yield
            return
        with self._state:
            self._settle()
            if self._is_frozen:
                raise Unavailable("The save from survivors has not ended.")
            self._is_saving = True
        try:
            yield
        finally:
            with self._state:
                self._is_saving = False
                self._state.notify_all()

    def _settle(self) -> None:
        """Wait until the thread of the salvage allows changes and saves, or for LEAVE_S."""
        if self._is_frozen:
            with self._held():
                self._state.wait_for(lambda: not self._is_frozen, LEAVE_S)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Note that the training thread waits inside this context."""
        with self._state:
            self._is_held = True
            self._state.notify_all()
        try:
            yield
        finally:
            self._is_held = False

    # -- after each step -----------------------------------------------------------------------------

    def keep(self, step: int, count: str) -> None:
        """Keep what a salvage of `step` needs, and send this rank's own part of it to the agent.

        Within an accumulation window nothing is kept, as gradients are no part of a checkpoint; nor is a step
        that nobody has seen. An error ends this for the process, and is logged: training goes on.
        """
        if self._is_off or self._items.is_accumulating() or self._is_unseen():
            return
        try:
            self._check_hooks()
            self._keep(step, count)
            question = self._question
            if question is None or (question.done() and question.exception() is not None):
                self._await_question()  # of a new agent
        except Exception as error:
            self._is_off, self._kept = True, None
            log.warning("no step can be salvaged from now on: %s", named_text(error))

    def _is_unseen(self) -> bool:
        """Return whether no change was seen since the last call: the live state may be that of another step.

        So it is after an optimizer step that a CUDA graph has replayed outside of the lock.
        """
        is_unseen = self._begun == self._begun_before and bool(self._items.still.optimizers)
        with self._state:
            self._begun += is_unseen  # the state of the step before is not offered either
        self._begun_before = self._begun
        return is_unseen

    def _check_hooks(self) -> None:
        """Raise UnsupportedItem if an optimizer runs no hooks: nobody would see that its next step begins."""
        for optimizer in self._items.still.optimizers:
            inner: Any = optimizer
            while inner is not None and not runs_hooks(inner):
                inner = getattr(inner, "optimizer", None)  # what it wraps
            if inner is None:
                raise UnsupportedItem(f"The steps of {type(optimizer).__name__} run no hooks.")

    def _keep(self, step: int, count: str) -> None:
        if self._skips:
            self._skips -= 1
            return
        walked = self._items.walk()
        own = [live for live in walked.slices if live.ranks == (self._link.identity.rank,)]
        common = tuple(live for live in walked.slices if len(live.ranks) > 1)
        size = sum(live.nbytes for live in own)
        data = self._items.encode_state(step, walked) if size <= MAX_STEP_STATE_BYTES else b""
        if (size := size + len(data)) > MAX_STEP_STATE_BYTES:
            self._pause(step, size)
            return
        self._pause_steps = 1
        copies = tuple(_copy(live) for live in own)
        layout = build_layout(live.slice for live in copies)
        by_key = {live.slice_key: live for live in copies}
        placed = [by_key[each.slice.key, each.slice.offset].tensor for each in layout.slices]
        state = StepState(
            rank=self._link.identity.rank,
            step=step,
            holds=f"{self._class_of(common)} {count.partition(':')[2]}",
            state=data,
            slices=tuple(live.slice for live in copies),
            shard=b"".join((layout.header, *map(_bytes, placed))),
        )
        kept = _Kept(
            step=step,
            begun=self._begun,
            state=state,
            count=count,
            own=copies,
            common=common,
            live=common,
            versions=versions(common),
            walked=walked,
        )
        with self._state:
            self._kept, self._stream = kept, _stream()
            self._state.notify_all()
        self._link.keep(self._session_key, state)

    def _pause(self, step: int, size: int) -> None:
        """Keep no state of the next steps, as the state of this one is too large."""
        self._pause_steps = min(2 * self._pause_steps, MAX_PAUSE_STEPS)
        self._skips = self._pause_steps - 1
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "step %d cannot be salvaged: rank %d alone holds %s bytes of it, more than %s; "
                "a restart continues from the last save",
                step,
                self._link.identity.rank,
                f"{size:,}",
                f"{MAX_STEP_STATE_BYTES:,}",
            )

    def _class_of(self, common: tuple[LiveSlice, ...]) -> str:
        """Return a digest of names, boxes and holders of the tensors held in common with others."""
        if self._kept is None or not _are_same(self._kept.common, common):
            boxes = ((s.slice.key, s.slice.offset, s.slice.shape, s.ranks) for s in common)
            lines = sorted([key, *map(list, box)] for key, *box in boxes)
            self._holds = digest(json.dumps(lines).encode())
        return self._holds

    # -- a salvage -----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Make an offer at the failure of the training loop, and wait until it has been taken up."""
        self._start()
        self._wait_for_salvage()

    def close(self) -> None:
        """Make no offer from now on; a salvage that has begun comes to its end first."""
        self._is_closed = True
        self._kept = self._copied = self._copy = None  # the tensors may occupy an accelerator's memory
        self._wait_for_salvage()
        _watching.discard(self)

    def _wait_for_salvage(self) -> None:
        if self._thread is not None:
            with self._held():
                self._thread.join(max(0.0, self._ends_s - time.monotonic()))

    def _start(self) -> None:
        with self._state:
            if self._thread is None:
                self._ends_s = time.monotonic() + LEAVE_S
                self._thread = threading.Thread(target=self._run, name="ray_ckpt-salvage", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                self._salvage()  # its copies from a device follow the work of training
        except Exception as error:
            log.warning("this rank takes no part in a salvage: %s", text_of(error))
        finally:
            with self._state:
                self._is_frozen = False
                self._state.notify_all()

    def _salvage(self) -> None:
        steps = {kept.step: kept for kept in self._freeze()}
        if not steps:
            return
        salvage: Salvage = self._link.offer(self._session_key, tuple(steps)).result(DECIDED_S)
        if salvage.attempt is None or self._link.identity.rank not in salvage.savers:
            return
        step = salvage.attempt.step
        try:
            if step not in steps:
                raise Unavailable(f"It holds step {', '.join(map(str, steps))}, not step {step}.")
            self._save(steps[step], salvage)
        except Exception as error:  # or launcher and ranks wait until their time is up
            self._link.skip(salvage.attempt, text_of(error))
            raise
        outcome = self._link.outcome(salvage.attempt, Level.LOCAL).result(SAVED_S)
        if outcome.error is not None:
            raise outcome.error
        log.info("step %d is saved by survivors", step)

    def _freeze(self) -> list[_Kept]:
        """Hold off optimizer steps, and return the finished steps whose tensors are here, the newest first.

        There are none before the first step, nor after `before_change` with `forgets`. Raises Unavailable if
        there is no copy, and the live state is that of no finished step.
        """
        with self._state:
            if not self._state.wait_for(lambda: not self._is_saving, UNSAVED_S):
                raise Unavailable("Training is making a save, which does not end.")
            self._state.wait_for(lambda: self._kept is not None and self._kept.begun == self._begun, WHOLE_S)
            if self._is_saving:  # another save has begun in the meantime
                raise Unavailable("Training is making a save.")
            kept, copied = self._kept, self._copied
            if kept is None or self._is_closed:
                return []
            self._is_frozen = True
            reason = "an optimizer step has begun" if kept.begun != self._begun else _change_of(kept)
        found = [] if reason else [kept]
        if copied is not None and not _change_of(copied):
            found.append(copied)
        if not found:
            raise Unavailable(f"After step {kept.step} {reason}.")
        return found

    def _check_captured(self, kept: _Kept) -> None:
        """Raise Unavailable if training has changed a tensor during the capture, which has ended.

        Called by the copying thread. The version of a tensor shows a change only when the operation has
        ended, so an operation that is running now gets OPERATION_S.
        """
        with self._state:
            self._state.wait_for(lambda: self._is_held, OPERATION_S)
        if reason := _change_of(kept) or _look_of(kept):
            raise Unavailable(f"After step {kept.step} {reason}.")

    def _save(self, kept: _Kept, salvage: Salvage) -> None:
        """Capture this rank's share of the step, as the savers divide it among themselves."""
        began_s = time.monotonic()
        assert salvage.attempt is not None
        savers = set(salvage.savers)
        common = (replace(s, ranks=tuple(k for k in s.ranks if k in savers)) for s in kept.common)
        walked = replace(kept.walked, slices=(*kept.own, *common), blocks={})
        with self._saver.lent():
            if not self._saver.wait_free(FREE_S):
                raise Unavailable("The save before is still being written.")
            self._saver.save(
                walked,
                SaveParts(
                    attempt=salvage.attempt,
                    state=kept.state.state,
                    metrics=lambda: None,
                    compare_content=False,
                    count=kept.count,
                    began_s=began_s,
                    check=partial(self._check_captured, kept),
                ),
            )
            self._saver.settle()


_watching: weakref.WeakSet[Survivor] = weakref.WeakSet()
_is_hooked = False


def _watch_steps(survivor: Survivor) -> None:
    """Call `before_change` before the step of any optimizer of this process, as long as `survivor` lives.

    There is one hook for all, and it stays: a hook of its own would have to be removed when the garbage
    collector finds the survivor, maybe while torch iterates over the hooks.
    """
    global _is_hooked
    _watching.add(survivor)
    if not _is_hooked:
        register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))  # type: ignore[no-untyped-call]
        _is_hooked = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for survivor in list(_watching):
        survivor.before_change()


def make_survivor(link: Link, session_key: SessionKey, items: RankItems, saver: Saver) -> Survivor | None:
    """Return the Survivor of a rank; None without the option `salvage`, or if there are no other ranks."""
    if not link.options.salvage or link.identity.world_size == 1:
        return None
    return Survivor(link, session_key, items, saver)


def _stream() -> torch.cuda.Stream | None:
    """Return the stream of this thread on its device, if CUDA is used."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def _change_of(kept: _Kept) -> str:
    """Return why a tensor that the rank holds in common with others is not that of the step, or ""."""
    for live, before, now in zip(kept.live, kept.versions, versions(kept.live), strict=True):
        if before != now:
            return f"{live.slice.key} was changed outside of optimizer steps"
    return ""


def _look_of(kept: _Kept) -> str:
    """Return which uncopied tensor of a copied step has changed without a new version, or "".

    It reads a device, whose work may hang until the capture has come to its end; so no offer waits for it.
    """
    if kept.draws is not None:
        for live, before in zip(kept.live, kept.looks, strict=True):
            if not torch.equal(look(live.tensor, kept.draws), before):
                return f"{live.slice.key} was changed through `.data`"
    return ""


def _are_same(slices: Sequence[LiveSlice], others: Sequence[LiveSlice]) -> bool:
    return len(slices) == len(others) and all(map(is_, slices, others))


def _room_for(live: LiveSlice) -> LiveSlice:
    """Return a slice with new memory on the same device; the leaf remains, for the division among savers."""
    return replace(live, tensor=torch.empty_like(live.tensor, memory_format=torch.contiguous_format))


def _copy(live: LiveSlice) -> LiveSlice:
    copy = live.tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return replace(live, tensor=copy, leaf=copy)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
