"""The saves of a rank: memory for captures, the copying, and the handover to the agent."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from functools import partial

import torch

from ray_ckpt.capture.arena import Arena, Ring
from ray_ckpt.capture.dtensors import mesh_text
from ray_ckpt.capture.overlap_guard import (
    background_slices,
    guarded_storages,
    hooks_in_backward,
    optimized,
)
from ray_ckpt.capture.replica_watch import ReplicaWatch
from ray_ckpt.capture.snapshot import Snapshot, Snapshotter
from ray_ckpt.capture.still import StillSlices
from ray_ckpt.capture.walk import LiveSlice, Walked
from ray_ckpt.core.values import SessionKey
from ray_ckpt.errors import ConfigError, InsufficientSpace, ServiceError, Unavailable, text_of
from ray_ckpt.format.shard import RankLayout
from ray_ckpt.trainer.handoff import CopyPlan, Handoff, SaveBuffer, SaveParts, SharedDigest
from ray_ckpt.trainer.link import ArenaGrant, SaveLink

log = logging.getLogger("ray_ckpt")

SETUP_WAIT_S = 10.0  # wait for the agent's memory at the first save; usually milliseconds


class Saver:
    """Manages the arena on the rank's side. Copies run one at a time; a released buffer is used again."""

    def __init__(
        self,
        link: SaveLink,
        session_key: SessionKey,
        still: StillSlices,
        *,
        on_wait: Callable[[float], None],
    ) -> None:
        """Call `on_wait` with the seconds of each wait before an optimizer step."""
        self._link = link
        self._session_key = session_key
        self._still = still
        self.optimizers = still.optimizers
        options = link.options
        self._is_full = options.replicate == "full"
        self._verify = options.verify_captures
        self._stall_s: float | None = None  # blocked time of the last save; None: the save still blocks
        self._snapshotter = Snapshotter(overlap=options.overlap, verify=self._verify, waited=on_wait)
        self._buffers: deque[SaveBuffer] = deque()  # in order of use: the least recently used buffer first
        self._grant: ArenaGrant | None = None
        self._setup: Future[tuple[ArenaGrant, deque[SaveBuffer]]] | None = None  # its memory is not used yet
        self._layout: RankLayout | None = None
        self._plan: CopyPlan | None = None
        self._pid = os.getpid()
        self._snapshot: Snapshot | None = None
        self._setup_wait_s = 0.0  # time for which a save may still wait for the setup
        self._was_unwatched = False  # a save whose replicas could not be compared was logged
        self._is_lent = False  # a salvage uses the memory, in a thread of its own
        self.setup_s: float | None = None  # time until memory was prepared in the background

    # -- memory ----------------------------------------------------------------------------------------

    def prepare(self, layout: RankLayout) -> None:
        """Start preparing memory for shards of that layout, in the background."""
        self._layout = layout
        self._start_setup(layout)

    def _start_setup(self, layout: RankLayout) -> None:
        setup: Future[tuple[ArenaGrant, deque[SaveBuffer]]] = Future()
        self._setup, self._setup_wait_s = setup, SETUP_WAIT_S
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

        def work() -> None:  # in its own thread: the agent may be slow, or frozen
            start_s = time.monotonic()
            try:
                grant, buffers = self._open(layout)
            except Exception as error:
                setup.set_exception(error)
                return
            all_buffers = tuple(buffers)  # saves rotate the deque in the meantime
            setup.set_result((grant, buffers))
            _make_ready(all_buffers, device)
            self.setup_s = time.monotonic() - start_s

        threading.Thread(target=work, name="ray_ckpt-setup", daemon=True).start()

    def _open(self, layout: RankLayout) -> tuple[ArenaGrant, deque[SaveBuffer]]:
        grant = self._link.open_arena(self._session_key, layout.size_bytes)
        try:
            targets = [_map(grant, path) for path in grant.paths]
        except OSError as error:  # no access through /proc: ptrace rules, or another PID namespace
            log.info("the agent's memory is opened as a file in /dev/shm: %s", error)
            grant = self._link.open_arena(self._session_key, layout.size_bytes, named=True)
            targets = [_map(grant, path) for path in grant.paths]
        for target in targets:
            if isinstance(target, Arena):
                target.lay_out(layout)
        return grant, deque(SaveBuffer(target, index) for index, target in enumerate(targets))

    def _fit(self, layout: RankLayout) -> None:
        """Make sure that the arena fits shards of that layout.

        Raises InsufficientSpace if no arena can fit the shards, Unavailable if no arena exists after
        SETUP_WAIT_S.
        """
        if self._is_large_enough(layout):
            return
        for _ in range(2):  # the prepared memory may be too small by now
            if self._setup is None:
                self._forget_buffers()
                self._start_setup(layout)
            setup = self._setup
            assert setup is not None
            try:
                grant, buffers = setup.result(self._setup_wait_s)
            except FutureTimeout:  # the next saves check the setup without waiting
                self._setup_wait_s = 0.0
                raise Unavailable("The agent has no memory for this rank's captures yet.") from None
            except BaseException:
                self._setup = None
                raise
            self._setup = None
            self._grant, self._buffers = grant, buffers
            if self._is_large_enough(layout):
                return
        raise InsufficientSpace(f"The agent gave less than the {layout.size_bytes:,} bytes requested.")

    def _is_large_enough(self, layout: RankLayout) -> bool:
        grant = self._grant
        return grant is not None and (self._is_stream or layout.size_bytes <= grant.size_bytes)

    def _forget_buffers(self) -> None:
        if self._snapshot is not None and self._is_ours():
            self._snapshot.wait()
        self._grant = self._snapshot = None
        for buffer in self._buffers:
            buffer.target.mapping.give_up()
        self._buffers.clear()

    def wait_free(self, timeout_s: float) -> bool:
        """Return True once a buffer is free for a capture, False after `timeout_s`."""
        if not self._buffers:
            return True
        if self._buffers[0].released is not None:
            if timeout_s > 0:  # a capture is handed over only when this thread is at a safe point
                self.settle()
            try:
                if self._buffers[0].released.result(timeout_s):
                    self._buffers[0].taken = None  # the next capture copies the still slices again
            except FutureTimeout:
                return False
            except Exception as error:  # the agent died, and the save with it
                log.warning("the last save was lost: %s", text_of(error))
                self.lose_agent()
                return True
            self._buffers[0].released = None
        if self._grant is not None and not all(map(os.path.lexists, self._grant.paths)):
            self.lose_agent()  # it has died since, and its memory with it
        return True

    def wait_released(self, timeout_s: float) -> bool:
        """Return True once all captures have left this process, False after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for buffer in list(self._buffers) if self._is_ours() else ():
            if buffer.released is not None:
                try:
                    buffer.released.result(max(0.0, deadline_s - time.monotonic()))
                except FutureTimeout:
                    return False
                except Exception as error:
                    log.debug("the last save was lost: %s", error)
        return True

    def lose_agent(self) -> None:
        """Give up the memory of an agent that does not answer; request a new agent if that agent is dead."""
        self._forget_buffers()
        self._link.recover()

    # -- a save ----------------------------------------------------------------------------------------

    def save(self, walked: Walked, parts: SaveParts) -> None:
        """Start the capture of this rank's slices; a buffer must be free.

        Returns when everything that may change before the next optimizer step has been copied. Raises
        CheckpointError or OSError for a failure before the return, and gives up the memory if the agent may
        be the cause. A later failure drops only this attempt and is reported to the agent.
        """
        if not self._is_ours():
            raise ConfigError(
                "This Checkpointer belongs to the process that this one was forked from.",
                hint="Save from the process that restored.",
            )
        try:
            self._start(walked, parts)
        except (ServiceError, OSError):
            self.lose_agent()
            raise

    def _start(self, walked: Walked, parts: SaveParts) -> None:
        self.settle()
        self._stall_s = None
        plan, has_still = self._prepared(walked)
        buffer = self._buffers[0]
        identity = self._link.identity
        window = plan.watch.digests(walked.slices, parts.attempt.step, identity.rank) if plan.watch else None
        content = parts.compare_content and not self._is_full
        unwatched = partial(self._warn_unwatched, parts.attempt.step)
        digest = SharedDigest(walked, identity, content=content, window=window, on_unwatched=unwatched)
        digest.add_now(plan.background)
        handoff = Handoff(
            self._link, buffer, plan, parts, digest, self._stalled_s, buffer.taken if has_still else None
        )
        self._buffers.rotate(-1)
        try:
            if handoff.begin():
                self._snapshot = self._snapshotter.start(
                    buffer.target,
                    plan.moving if has_still else plan.slices,
                    background=plan.background,
                    during=digest.complete,
                    finish=handoff.finish,
                    fail=handoff.fail,
                )
        except BaseException:
            handoff.abandon()
            raise
        self._stall_s = time.monotonic() - parts.began_s

    def _prepared(self, walked: Walked) -> tuple[CopyPlan, bool]:
        """Return the plan of a save, and whether its buffer has the bytes of the still slices already."""
        plan = self._fitted(walked)
        taken, target = self._buffers[0].taken, self._buffers[0].target
        if taken is None or self._verify or not isinstance(target, Arena) or target.layout is not plan.layout:
            return plan, False
        changed = taken.changed(plan.still, target.views[len(plan.moving) :])
        if not changed:
            return plan, not plan.has_stepped and taken.is_here(plan.still)
        self._still.note_changed(changed)
        self._plan = None
        return self._fitted(walked), False

    def _fitted(self, walked: Walked) -> CopyPlan:
        """Return the plan of a save, whose layout fits the arena."""
        plan = self._plan_of(walked)
        self._fit(plan.layout)
        if self._is_stream and plan.still:
            self._plan = None
            plan = self._plan_of(walked)
        return plan

    @property
    def _is_stream(self) -> bool:
        return self._grant is not None and self._grant.mode == "stream"

    def _stalled_s(self, began_s: float) -> float:
        """Return for how long the last save has blocked training. Runs in the thread that copies."""
        if self._stall_s is None:
            return time.monotonic() - began_s
        waits_since_s = self._snapshot.waits_since_s if self._snapshot is not None else None
        return self._stall_s + (time.monotonic() - waits_since_s if waits_since_s is not None else 0.0)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Keep the memory through `close` inside this context, which another thread is in."""
        self._is_lent = True
        try:
            yield
        finally:
            self._is_lent = False

    def settle(self, *, forgets: bool = False) -> None:
        """Wait until training may change its state.

        With `forgets`, no tensor of the last save is kept, so that its memory is free when it is moved. The
        next save makes a new plan, and copies all slices.
        """
        if self._snapshot is not None and self._is_ours():
            self._snapshot.before_change()
        if forgets:
            self._plan = None

    def check(self) -> None:
        """Handle a copy that has ended. Called in the training thread at a safe point between operations."""
        if self._snapshot is not None and self._is_ours():
            self._snapshot.judge()

    def _is_ours(self) -> bool:
        """Return False in a forked child process, which has neither the copying thread nor its memory."""
        return self._pid == os.getpid()

    def close(self) -> None:
        """Wait for a running copy and release the memory; the agent keeps the content of the memory.

        While the memory is lent it stays, until the process ends.
        """
        if self._is_ours() and not self._is_lent:
            self.settle(forgets=True)
            self._snapshotter.close()
            self._forget_buffers()
            setup, self._setup = self._setup, None
            if setup is not None:
                setup.add_done_callback(_give_up)

    def _plan_of(self, walked: Walked) -> CopyPlan:
        """Return the plan of the previous save, or a new plan if a tensor has moved or a hook was added."""
        params = (id(param) for stepped in self.optimizers for param in optimized(stepped))
        found = (hooks_in_backward(self.optimizers), *params)
        plan = self._plan
        if plan is not None and plan.whole is not walked.slices:
            plan = self._plan = plan.followed(walked.slices)
        if plan is None or plan.optimized != found:
            identity = self._link.identity
            owned = walked.owned(identity.rank, identity.node_ranks, full=self._is_full)
            layout = self._still.layout(owned, is_stream=self._is_stream)
            layout = self._layout = self._layout if layout == self._layout else layout
            by_key = walked.by_slice_key
            order = [(placed.slice.key, placed.slice.offset) for placed in layout.slices]
            slices = tuple(map(by_key.__getitem__, order))
            still = slices[layout.num_moving :]
            background = background_slices(walked.slices, guarded_storages(self.optimizers))
            plan = self._plan = CopyPlan(
                whole=walked.slices,
                optimized=found,
                layout=layout,
                slices=slices,
                has_stepped=len(self._still.unstepped(still, self.optimizers)) < len(still),
                places={place: index for index, place in enumerate(order)},
                background=background,
                guarded={
                    live.tensor.untyped_storage().data_ptr()
                    for live in walked.slices
                    if live.changes_in_step and live.slice.key in background
                },
                mesh=mesh_text(held.leaf for held in walked.held.values()),
                watch=self._watch_of(walked.slices),
            )
        return plan

    def _watch_of(self, slices: Sequence[LiveSlice]) -> ReplicaWatch | None:
        options = self._link.options
        return ReplicaWatch(slices, every_steps=options.every_steps) if options.replica_watch else None

    def _warn_unwatched(self, step: int, error: Exception) -> None:
        """Log the first save whose replicas could not be compared. Runs also in the thread that copies."""
        if not self._was_unwatched:
            self._was_unwatched = True
            log.warning("replicas are not compared at step %d: %s", step, text_of(error))


def _make_ready(buffers: Iterable[SaveBuffer], device: int | None) -> None:
    """Populate the pages of the buffers and pin them for copies from `device`, for a fast first save."""
    try:
        for buffer in buffers:
            buffer.target.mapping.populate()
            if device is not None and isinstance(buffer.target, Arena):
                buffer.target.mapping.pin(torch.device("cuda", device))
    except (OSError, RuntimeError) as error:
        log.warning("the arena could not be populated in advance: %s", error)


def _give_up(setup: Future[tuple[ArenaGrant, deque[SaveBuffer]]]) -> None:
    """Give up memory that was prepared and that no save has used."""
    if setup.exception() is None:
        for buffer in setup.result()[1]:
            buffer.target.mapping.give_up()


def _map(grant: ArenaGrant, path: str) -> Arena | Ring:
    return Ring(path) if grant.mode == "stream" else Arena(path)
