"""A rank that may outlive others of its group: what it keeps for a salvage, and its part in one.

After each step the rank sends what it alone holds (random state, data position, buffers, plain values) to its
agent. When collective operations fail, or the agent asks, it offers its live state of the last step. The
state is that of the step if no optimizer step has begun since, and if the version of every tensor that it
holds in common with other ranks is unchanged; otherwise it is not offered. When it is captured, the same is
checked again, since only optimizer steps wait for the capture. See PROTOCOL.md section 4.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ray_ckpt.capture.snapshot import OPERATION_S, versions
from ray_ckpt.capture.walk import LiveSlice, Walked
from ray_ckpt.core.values import Salvage, SessionKey
from ray_ckpt.errors import Unavailable, named_text, text_of
from ray_ckpt.format.digest import digest
from ray_ckpt.format.shard import build_layout
from ray_ckpt.trainer.handoff import SaveParts
from ray_ckpt.trainer.link import MAX_STEP_STATE_BYTES, Link, StepState
from ray_ckpt.trainer.rank_items import RankItems
from ray_ckpt.trainer.saver import Saver
from ray_ckpt.types import Level

log = logging.getLogger("ray_ckpt")

WHOLE_S = 1.0  # wait for an optimizer step that is running to come to the end of its step
DECIDED_S = 10.0  # wait for the decision: twice the time in which the survivors are gathered, and more
FREE_S = 10.0  # wait for the save before, whose memory the salvage needs
SAVED_S = 30.0  # wait for the commit; then the process ends, and nodes may still commit
LEAVE_S = DECIDED_S + FREE_S + SAVED_S  # longest time for which a failed training loop is held up


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """The last step whose state may be saved later."""

    step: int
    begun: int  # optimizer steps that had begun
    state: StepState
    count: str  # as in `SaveParts`
    own: tuple[LiveSlice, ...]  # copies
    common: tuple[LiveSlice, ...]  # live
    versions: tuple[tuple[int, int], ...]  # of `common`
    walked: Walked


class Survivor:
    """The salvages of one rank. `keep` runs in the training thread, all else in a thread of its own."""

    def __init__(self, link: Link, session_key: SessionKey, items: RankItems, saver: Saver) -> None:
        self._link, self._session_key = link, session_key
        self._items, self._saver = items, saver
        self._state = threading.Condition()  # guards the fields below
        self._kept: _Kept | None = None
        self._begun = 0  # optimizer steps that have begun in this process
        self._is_frozen = False  # no optimizer step may begin: the live state is offered or captured
        self._is_held = False  # the training thread waits, so it changes nothing
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._has_warned = False
        self._is_off = False  # an error has shown that states cannot be kept
        self._pid = os.getpid()
        hook = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
        self._hook = register_optimizer_step_pre_hook(hook)
        self._holds = ""
        self._await_question()

    def _await_question(self) -> None:
        """Make an offer when the agent asks: this rank may hang in a collective operation."""

        def asked(question: Future[bool]) -> None:
            if question.exception() is None and question.result():
                self._start()

        try:
            self._link.asked(self._session_key).add_done_callback(asked)
        except Unavailable as error:
            log.debug("this rank cannot be asked: %s", error)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._pid == os.getpid():
            with self._state:
                self.settle()
                self._begun += 1

    def settle(self) -> None:
        """Wait until training may change its state; called by the training thread."""
        if self._pid == os.getpid():
            with self._state:
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

        Within an accumulation window nothing is kept, as gradients are no part of a checkpoint. An error
        ends this for the process, and is logged: training goes on.
        """
        if self._is_off or self._items.is_accumulating():
            return
        try:
            self._keep(step, count)
        except Exception as error:
            self._is_off, self._kept = True, None
            log.warning("no step can be salvaged from now on: %s", named_text(error))

    def _keep(self, step: int, count: str) -> None:
        walked = self._items.walk()
        own = [live for live in walked.slices if live.ranks == (self._link.identity.rank,)]
        common = tuple(live for live in walked.slices if len(live.ranks) > 1)
        data = self._items.encode_state(step, walked)
        size = len(data) + sum(live.nbytes for live in own)
        if size > MAX_STEP_STATE_BYTES:
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
            return
        copies = tuple(_copy(live) for live in own)
        layout = build_layout(live.slice for live in copies)
        by_key = {live.slice_key: live for live in copies}
        placed = [by_key[each.slice.key, each.slice.offset].tensor for each in layout.slices]
        state = StepState(
            rank=self._link.identity.rank,
            step=step,
            holds=self._class_of(common),
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
            versions=versions(common),
            walked=walked,
        )
        with self._state:
            self._kept = kept
            self._state.notify_all()
        self._link.keep(self._session_key, state)

    def _class_of(self, common: tuple[LiveSlice, ...]) -> str:
        """Return the class of this rank: ranks of one class hold the same tensors in common with others."""
        before = self._kept.common if self._kept is not None else None
        if before is None or len(before) != len(common) or not all(map(is_, before, common)):
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
        self._is_closed, self._kept = True, None  # its tensors may occupy an accelerator's memory
        self._wait_for_salvage()
        self._hook.remove()

    def _wait_for_salvage(self) -> None:
        if self._thread is not None:
            with self._held():
                self._thread.join(LEAVE_S)

    def _start(self) -> None:
        with self._state:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ray_ckpt-salvage", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        try:
            self._salvage()
        except Exception as error:
            log.warning("this rank takes no part in a salvage: %s", text_of(error))
        finally:
            with self._state:
                self._is_frozen = False
                self._state.notify_all()

    def _salvage(self) -> None:
        kept = self._freeze()
        if kept is None:
            return
        salvage: Salvage = self._link.offer(self._session_key, kept.step).result(DECIDED_S)
        if salvage.attempt is None or self._link.identity.rank not in salvage.savers:
            return
        if salvage.attempt.step != kept.step:
            raise Unavailable(f"It holds step {kept.step}, not step {salvage.attempt.step}.")
        self._save(kept, salvage)
        outcome = self._link.outcome(salvage.attempt, Level.LOCAL).result(SAVED_S)
        if outcome.error is not None:
            raise outcome.error
        log.info("step %d is saved by survivors", kept.step)

    def _freeze(self) -> _Kept | None:
        """Hold off optimizer steps, and return the step that the live state is at; None before the first.

        Raises Unavailable if the live state is that of no finished step.
        """
        with self._state:
            self._state.wait_for(lambda: self._kept is not None and self._kept.begun == self._begun, WHOLE_S)
            kept = self._kept
            if kept is None or self._is_closed:
                return None
            if kept.begun != self._begun:
                raise Unavailable(f"An optimizer step has begun after step {kept.step}.")
            self._is_frozen = True
        _check_unchanged(kept)
        return kept

    def _check_captured(self, kept: _Kept) -> None:
        """Raise Unavailable if training has changed a tensor during the capture, which has ended.

        Called by the copying thread. The version of a tensor shows a change only when the operation has
        ended, so an operation that is running now gets OPERATION_S.
        """
        with self._state:
            self._state.wait_for(lambda: self._is_held, OPERATION_S)
        _check_unchanged(kept)

    def _save(self, kept: _Kept, salvage: Salvage) -> None:
        """Capture this rank's share of the step, as the savers divide it among themselves."""
        began_s = time.monotonic()
        assert salvage.attempt is not None
        savers = set(salvage.savers)
        common = (replace(s, ranks=tuple(k for k in s.ranks if k in savers)) for s in kept.common)
        walked = replace(kept.walked, slices=(*kept.own, *common), blocks={})
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


def make_survivor(link: Link, session_key: SessionKey, items: RankItems, saver: Saver) -> Survivor | None:
    """Return the Survivor of a rank; None without the option `salvage`, or if there are no other ranks."""
    if not link.options.salvage or link.identity.world_size == 1:
        return None
    return Survivor(link, session_key, items, saver)


def _check_unchanged(kept: _Kept) -> None:
    """Raise Unavailable if a tensor that the rank holds in common with others is not that of the step."""
    for live, before, now in zip(kept.common, kept.versions, versions(kept.common), strict=True):
        if before != now:
            raise Unavailable(
                f"{live.slice.key} was changed after step {kept.step}, outside of optimizer steps."
            )


def _copy(live: LiveSlice) -> LiveSlice:
    copy = live.tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return replace(live, tensor=copy, leaf=copy)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
