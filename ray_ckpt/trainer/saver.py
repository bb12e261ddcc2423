"""A rank's saves: the memory they go into, the copy, and the handing over to the node's agent."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from itertools import compress
from operator import is_not

import torch

from ray_ckpt.capture.arena import Arena, Ring
from ray_ckpt.capture.dtensors import mesh_text
from ray_ckpt.capture.overlap_guard import background_slices, guarded_storages, hooks_in_backward
from ray_ckpt.capture.snapshot import Snapshot, Snapshotter
from ray_ckpt.capture.walk import LiveSlice, SliceKey, Walked, bytes_digest
from ray_ckpt.errors import CheckpointError, ConfigError, InsufficientSpace, Unavailable, text_of
from ray_ckpt.format.shard import ShardLayout, build_layout
from ray_ckpt.trainer.link import ArenaGrant, Identity, Link, SealedShard
from ray_ckpt.types import AttemptId, Slice

log = logging.getLogger("ray_ckpt")

SETUP_WAIT_S = 10.0  # for the agent's memory at the first save; its answer takes milliseconds


@dataclass(slots=True)
class _Buffer:
    """Memory for one save at a time."""

    target: Arena | Ring
    index: int
    released: Future[None] | None = None  # done when the agent has done with what is in it
    layout: ShardLayout | None = None  # the one that the agent has been told


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveParts:
    """What a save is made of, apart from tensors. `metrics` is called beside the copy, off the training."""

    attempt: AttemptId
    state: bytes
    metrics: Callable[[], Mapping[str, float] | None]
    compare_content: bool  # whether the ranks compare the bytes of what they share
    count: str  # of steps, as `StepCount.mark`; the ranks of a part compare it
    began_s: float  # monotonic: when the training thread came to it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What a save copies, as long as the tensors of the rank stay where they are."""

    whole: tuple[LiveSlice, ...]  # all of the rank, for which this was made
    optimized: tuple[int, ...]  # identities of what optimizers change, behind the number of hooks in backward
    layout: ShardLayout
    slices: tuple[LiveSlice, ...]  # in the layout's order
    places: Mapping[SliceKey, int]  # of each among `slices`
    background: Set[str]
    guarded: Set[int]  # storages of what is in `background`
    mesh: str

    def followed(self, whole: tuple[LiveSlice, ...]) -> _Plan | None:
        """Return the plan for the same slices with other tensors behind some, as random state has each time.

        None if a slice differs otherwise, or an optimizer's step may change its memory.
        """
        if len(whole) != len(self.whole):
            return None
        slices = list(self.slices)
        for old, new in compress(zip(self.whole, whole, strict=True), map(is_not, self.whole, whole)):
            if not self._is_alike(old, new):
                return None
            if (place := self.places.get(new.place)) is not None:
                slices[place] = new
        return replace(self, whole=whole, slices=tuple(slices))

    def _is_alike(self, old: LiveSlice, new: LiveSlice) -> bool:
        in_step = old.changes_in_step or new.changes_in_step
        is_guarded = new.tensor.untyped_storage().data_ptr() in self.guarded
        return not in_step and not is_guarded and old.slice == new.slice and old.ranks == new.ranks


class Saver:
    """Owns the rank's end of the arena. Copies run one at a time; a buffer is used again once released."""

    def __init__(
        self,
        link: Link,
        session: int,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        waited: Callable[[float], None],
    ) -> None:
        """`waited` is told the seconds of each wait before an optimizer's step."""
        self._link = link
        self._session = session
        self._optimizers = tuple(optimizers)
        options = link.options
        self._held_s: float | None = None  # for which the last save held training up; None: it still does
        self._snapshotter = Snapshotter(
            overlap=options.overlap, verify=options.verify_captures, waited=waited
        )
        self._buffers: deque[_Buffer] = deque()  # the one that was used longest ago first
        self._grant: ArenaGrant | None = None
        self._setup: Future[tuple[ArenaGrant, deque[_Buffer]]] | None = None  # not taken over yet
        self._layout: ShardLayout | None = None
        self._layout_key: frozenset[Slice] = frozenset()
        self._plan: _Plan | None = None
        self._pid = os.getpid()
        self._snapshot: Snapshot | None = None
        self._setup_wait_s = 0.0  # what is left to wait for it
        self.setup_s: float | None = None  # that memory took to be in place, in the background

    # -- memory ----------------------------------------------------------------------------------------

    def prepare(self, layout: ShardLayout) -> None:
        """Have memory for a shard of that layout made ready while training goes on. Does not wait."""
        self._layout = layout
        self._layout_key = frozenset(placed.slice for placed in layout.slices)
        self._start_setup(layout)

    def _start_setup(self, layout: ShardLayout) -> None:
        setup: Future[tuple[ArenaGrant, deque[_Buffer]]] = Future()
        self._setup, self._setup_wait_s = setup, SETUP_WAIT_S
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

        def work() -> None:  # in a thread of its own: the agent may be slow, or frozen
            start_s = time.monotonic()
            try:
                grant, buffers = self._open(layout)
            except Exception as error:
                setup.set_exception(error)
                return
            all_buffers = tuple(buffers)  # saves turn the deque around meanwhile
            setup.set_result((grant, buffers))
            _make_ready(all_buffers, device)
            self.setup_s = time.monotonic() - start_s

        threading.Thread(target=work, name="ray_ckpt-setup", daemon=True).start()

    def _open(self, layout: ShardLayout) -> tuple[ArenaGrant, deque[_Buffer]]:
        grant = self._link.open_arena(self._session, layout.size_bytes)
        try:
            targets = [_map(grant, path) for path in grant.paths]
        except OSError as error:  # /proc does not lead there: ptrace rules, or another PID namespace
            log.info("the agent's memory is reached by a file in /dev/shm: %s", error)
            grant = self._link.open_arena(self._session, layout.size_bytes, named=True)
            targets = [_map(grant, path) for path in grant.paths]
        for target in targets:
            if isinstance(target, Arena):
                target.lay_out(layout)
        return grant, deque(_Buffer(target, index) for index, target in enumerate(targets))

    def _fit(self, layout: ShardLayout) -> None:
        """Have an arena that the shard fits into.

        InsufficientSpace if there cannot be one, Unavailable if it is not there after SETUP_WAIT_S.
        """
        if self._is_large_enough(layout):
            return
        for _ in range(2):  # what was prepared may be too small by now
            if self._setup is None:
                self._forget_buffers()
                self._start_setup(layout)
            setup = self._setup
            assert setup is not None
            try:
                grant, buffers = setup.result(self._setup_wait_s)
            except FutureTimeout:  # the next saves look at it without waiting
                self._setup_wait_s = 0.0
                raise Unavailable("The agent has no memory for this rank's captures yet.") from None
            except BaseException:
                self._setup = None
                raise
            self._setup = None
            self._grant, self._buffers = grant, buffers
            if self._is_large_enough(layout):
                return
        raise InsufficientSpace(f"The agent gave less than the {layout.size_bytes:,} bytes asked for.")

    def _is_large_enough(self, layout: ShardLayout) -> bool:
        grant = self._grant
        return grant is not None and (grant.mode == "stream" or layout.size_bytes <= grant.size_bytes)

    def _forget_buffers(self) -> None:
        self._grant = self._snapshot = None
        for buffer in self._buffers:
            buffer.target.mapping.give_up()
        self._buffers.clear()

    def wait_free(self, timeout_s: float) -> bool:
        """Whether a buffer may be captured into, after at most `timeout_s`."""
        if not self._buffers or self._buffers[0].released is None:
            return True
        if timeout_s > 0:  # it is not handed over before this thread has been seen between two operations
            self.settle()
        try:
            self._buffers[0].released.result(timeout_s)
        except FutureTimeout:
            return False
        except Exception as error:  # the agent died, and the save with it
            log.warning("the last save was lost: %s", text_of(error))
            self.lose_agent()
            return True
        self._buffers[0].released = None
        return True

    def wait_released(self, timeout_s: float) -> bool:
        """Whether everything captured is out of this process's hands, after at most `timeout_s`."""
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
        """The agent does not answer: its memory is gone; ask for a new one, and save again next time."""
        self._forget_buffers()
        self._link.recover()

    # -- a save ----------------------------------------------------------------------------------------

    def save(self, walked: Walked, parts: SaveParts) -> None:
        """Start the capture of this rank's slices; a buffer must be free.

        Returns when everything that may change before the next optimizer step has been copied. What fails
        later costs this attempt, and the agent is told. Raises CheckpointError or OSError before that.
        """
        if not self._is_ours():
            raise ConfigError(
                "This Checkpointer belongs to the process that this one was forked from.",
                hint="Save from the process that restored.",
            )
        self.settle()
        self._held_s = None
        rank = self._link.identity.rank
        plan = self._plan_of(walked)
        layout, attempt = plan.layout, parts.attempt.attempt
        self._fit(layout)
        buffer = self._buffers[0]
        is_new, buffer.layout = buffer.layout is not layout, None  # until the agent has been told
        agreed = _Agreed(walked, self._link.identity, content=parts.compare_content)
        agreed.add_now(plan.background)
        if isinstance(buffer.target, Arena) and buffer.target.layout is not layout:
            buffer.target.lay_out(layout)
        released: Future[None] = Future()
        is_reported = False  # the agent reads, and gives the buffer back itself

        def hand_over() -> None:
            nonlocal is_reported
            shard = SealedShard(
                attempt=parts.attempt,
                rank=rank,
                state=parts.state,
                replicated=(agreed.digest(), f"{self._link.identity.part}/{parts.count}"),
                metrics=parts.metrics(),
                buffer=buffer.index,
                layout=layout if is_new else None,
                layout_signature=layout.signature,
                mesh=plan.mesh,
                stall_s=self._stalled_s(parts.began_s),
                capture_s=time.monotonic() - parts.began_s,
            )
            try:
                sealed = self._link.seal(shard)
            except Exception as error:  # there is no agent any more
                released.set_exception(error)
                return
            is_reported, buffer.layout = True, layout
            sealed.add_done_callback(lambda done: _pass_on(done, released))

        def fail(error: Exception) -> None:
            log.warning("step %d is not saved: %s", parts.attempt.step, text_of(error))
            if is_reported:  # a stream was given up: its reader finds out, and says so itself
                return
            with contextlib.suppress(Exception):
                self._link.skip(parts.attempt, text_of(error))
            if not released.done():
                released.set_result(None)

        buffer.released = released
        self._buffers.rotate(-1)
        try:
            if isinstance(buffer.target, Ring):
                agreed.complete()
                buffer.target.begin(attempt, released.done)
                hand_over()
                self._start_stream(buffer.target, plan, attempt, fail)
            else:
                self._start_copy(buffer.target, plan, attempt, agreed.complete, hand_over, fail)
        except BaseException:
            if isinstance(buffer.target, Ring):
                buffer.target.give_up()
            if not is_reported and not released.done():  # nothing runs that would ever give the buffer back
                released.set_result(None)
            raise
        self._held_s = time.monotonic() - parts.began_s

    def _stalled_s(self, began_s: float) -> float:
        """Of the last save, by now; by the thread that copies."""
        if self._held_s is None:
            return time.monotonic() - began_s
        waits_since_s = self._snapshot.waits_since_s if self._snapshot is not None else None
        return self._held_s + (time.monotonic() - waits_since_s if waits_since_s is not None else 0.0)

    def _start_copy(
        self,
        arena: Arena,
        plan: _Plan,
        attempt: str,
        during: Callable[[], None],
        hand_over: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """The agent is told when everything is there."""

        def finish() -> None:
            arena.seal(attempt)
            hand_over()

        arena.begin()
        self._snapshot = self._snapshotter.start(
            arena, plan.slices, background=plan.background, during=during, finish=finish, fail=fail
        )

    def _start_stream(self, ring: Ring, plan: _Plan, attempt: str, fail: Callable[[Exception], None]) -> None:
        """The agent reads while this rank writes, so it has been told before anything is there."""

        def give_up(error: Exception) -> None:
            ring.give_up()
            fail(error)

        try:
            ring.write(torch.frombuffer(bytearray(plan.layout.header), dtype=torch.uint8))
        except CheckpointError as error:
            give_up(error)
            return
        self._snapshot = self._snapshotter.start(
            ring,
            plan.slices,
            background=plan.background,
            during=_nothing,
            finish=lambda: ring.end(attempt),
            fail=give_up,
        )

    def settle(self) -> None:
        """Return when live state may be changed."""
        if self._snapshot is not None and self._is_ours():
            self._snapshot.before_change()

    def look(self) -> None:
        """The training thread is between two operations: a copy that has ended can be judged now."""
        if self._snapshot is not None and self._is_ours():
            self._snapshot.judge()

    def _is_ours(self) -> bool:
        """A forked child has neither the thread nor the memory of its parent's captures."""
        return self._pid == os.getpid()

    def close(self) -> None:
        """Wait for a copy that runs, and give the memory back; the agent keeps what is in it."""
        if self._is_ours():
            self.settle()
            self._snapshotter.close()
            self._forget_buffers()

    def _plan_of(self, walked: Walked) -> _Plan:
        """What to copy where; that of the save before unless a tensor has moved, or a hook was added."""
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        params = (id(param) for group in groups for param in group["params"])
        optimized = (hooks_in_backward(self._optimizers), *params)
        plan = self._plan
        if plan is not None and plan.whole is not walked.slices:
            plan = self._plan = plan.followed(walked.slices)
        if plan is None or plan.optimized != optimized:
            owned = walked.owned(self._link.identity.rank)
            layout = self._layout_of(frozenset(live.slice for live in owned))
            by_place = walked.by_place
            order = [(placed.slice.key, placed.slice.offset) for placed in layout.slices]
            background = background_slices(walked.slices, guarded_storages(self._optimizers))
            plan = self._plan = _Plan(
                whole=walked.slices,
                optimized=optimized,
                layout=layout,
                slices=tuple(map(by_place.__getitem__, order)),
                places={place: index for index, place in enumerate(order)},
                background=background,
                guarded={
                    live.tensor.untyped_storage().data_ptr()
                    for live in walked.slices
                    if live.changes_in_step and live.slice.key in background
                },
                mesh=mesh_text(held.leaf for held in walked.held.values()),
            )
        return plan

    def _layout_of(self, slices: frozenset[Slice]) -> ShardLayout:
        """The layout of these slices; the one before, unless shapes or placements have changed."""
        if self._layout is None or slices != self._layout_key:
            self._layout, self._layout_key = build_layout(slices), slices
        return self._layout


class _Agreed:
    """The digest that all ranks must agree on, with the bytes of what they share if `content`.

    Bytes that change in optimizer steps only are read beside the copy, the others at once.
    """

    def __init__(self, walked: Walked, identity: Identity, *, content: bool) -> None:
        self._walked = walked
        self._identity = identity
        self._left = {live.slice.key: live for live in walked.shared(identity.ranks)} if content else {}
        self._contents: dict[str, str] = {}
        self._content = content

    def add_now(self, background: Set[str]) -> None:
        """Read what may change at any time, and what other devices hold: this thread knows their streams."""
        for key, live in list(self._left.items()):
            if key not in background or live.tensor.device.type != "cpu":
                self._contents[key] = bytes_digest(self._left.pop(key).tensor)

    def complete(self) -> None:
        while self._left:
            key, live = self._left.popitem()
            self._contents[key] = bytes_digest(live.tensor)

    def digest(self) -> str:
        """`<part>:<digest>`, and of a part with its bytes `<part>/content:<digest>`: only like is compared.

        Ranks may be at different saves of theirs, as one that has missed an agreed step is.
        """
        found = self._walked.shared_digest(self._identity.ranks, self._contents)
        kind = f"{self._identity.part}/content" if self._content else self._identity.part
        return f"{kind}:{found}" if kind else found


def _make_ready(buffers: Iterable[_Buffer], device: int | None) -> None:
    """Have the pages in place, and pinned for copies from `device`. Without it the first save is slower."""
    try:
        for buffer in buffers:
            buffer.target.mapping.populate()
            if device is not None and isinstance(buffer.target, Arena):
                buffer.target.mapping.pin(torch.device("cuda", device))
    except (OSError, RuntimeError) as error:
        log.warning("the arena could not be made ready: %s", error)


def _map(grant: ArenaGrant, path: str) -> Arena | Ring:
    return Ring(path) if grant.mode == "stream" else Arena(path)


def _pass_on(done: Future[None], released: Future[None]) -> None:
    error = done.exception()
    if released.done():
        return
    if error is None:
        released.set_result(None)
    else:
        released.set_exception(error)


def _nothing() -> None:
    pass
