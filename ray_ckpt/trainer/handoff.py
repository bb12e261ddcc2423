"""One save of a rank: the bytes of the save, and the handover to the agent of the node."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from operator import is_not

import torch

from ray_ckpt.capture.arena import Arena, Ring
from ray_ckpt.capture.replica_watch import ReplicaWatch, WindowDigests
from ray_ckpt.capture.still import Taken
from ray_ckpt.capture.walk import LiveSlice, SliceKey, Walked, bytes_digest
from ray_ckpt.errors import CheckpointError, text_of
from ray_ckpt.format.shard import RankLayout
from ray_ckpt.trainer.link import Identity, SaveLink, SealedShard
from ray_ckpt.types import AttemptId, Watched

NUMBER_BYTES = 16  # of the largest dtype: a tensor of one element, such as a step count

log = logging.getLogger("ray_ckpt")


@dataclass(slots=True)
class SaveBuffer:
    """Memory for one save at a time."""

    target: Arena | Ring
    index: int
    released: Future[bool] | None = None  # done when the agent no longer needs the bytes; see `SaveLink.seal`
    layout: RankLayout | None = None  # the layout of this buffer that was sent to the agent
    taken: Taken | None = None  # the still slices of the last capture, if that was complete and has some
    still_from: AttemptId | None = None  # the last capture that copied still slices


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveParts:
    """The parts of a save other than tensors. The copying thread calls `metrics` and `check`."""

    attempt: AttemptId
    state: bytes
    metrics: Callable[[], Mapping[str, float] | None]
    compare_content: bool  # the ranks compare the bytes of their shared tensors
    count: str  # step count from `StepCount.mark`; compared by the ranks of a part
    began_s: float  # monotonic: when the training thread began the save
    check: Callable[[], None] = lambda: None  # called when all is copied; an exception gives the save up


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """The slices that a save copies, as long as the tensors of the rank stay where they are."""

    whole: tuple[LiveSlice, ...]  # all slices of the rank when this plan was made
    optimized: tuple[int, ...]  # number of backward hooks, then ids of what optimizers change
    layout: RankLayout
    slices: tuple[LiveSlice, ...]  # in the layout's order
    has_stepped: bool  # an optimizer has some of the still slices, so each save copies them
    places: Mapping[SliceKey, int]  # index of each slice in `slices`
    background: Set[str]
    guarded: Set[int]  # storages of the tensors in `background`
    mesh: str
    watch: ReplicaWatch | None  # None: the option is off

    @property
    def moving(self) -> tuple[LiveSlice, ...]:
        return self.slices[: self.layout.num_moving]

    @property
    def still(self) -> tuple[LiveSlice, ...]:
        return self.slices[self.layout.num_moving :]

    def followed(self, whole: tuple[LiveSlice, ...]) -> CopyPlan | None:
        """Return the plan for the same slices if the tensors of some slices were replaced.

        Random state has new tensors at each save, and so have step counts that an optimizer keeps as numbers.
        Returns None if a slice differs in any other way, or if an optimizer step may change the memory of a
        new tensor of more than a few bytes: a new plan may then copy it in the background.
        """
        if len(whole) != len(self.whole):
            return None
        slices = list(self.slices)
        for old, new in compress(zip(self.whole, whole, strict=True), map(is_not, self.whole, whole)):
            if not self._is_alike(old, new):
                return None
            if (index := self.places.get(new.slice_key)) is not None:
                slices[index] = new
        return replace(self, whole=whole, slices=tuple(slices))

    def _is_alike(self, old: LiveSlice, new: LiveSlice) -> bool:
        if (old.slice, old.ranks, old.is_inference) != (new.slice, new.ranks, new.is_inference):
            return False
        if new.tensor.untyped_storage().data_ptr() in self.guarded or new.slice.key in self.background:
            return False
        is_number = new.nbytes <= NUMBER_BYTES
        return is_number or not (old.changes_in_step or new.changes_in_step)


class SharedDigest:
    """The digest that all ranks must agree on; with `content` it includes the bytes of shared tensors.

    Bytes that change only in optimizer steps are read during the copy; all other bytes are read at once. So
    are those of `window`, the digests that a difference of makes a finding only: after an exception there,
    which `on_unwatched` gets, the save has none of them.
    """

    def __init__(
        self,
        walked: Walked,
        identity: Identity,
        *,
        content: bool,
        window: WindowDigests | None,
        on_unwatched: Callable[[Exception], None],
    ) -> None:
        self._walked = walked
        self._identity = identity
        self._left = {live.slice_key: live for live in walked.shared(identity.ranks)} if content else {}
        self._contents: dict[SliceKey, str] = {}
        self._content = content
        self._window = window
        self._on_unwatched = on_unwatched

    def add_now(self, background: Set[str]) -> None:
        """Read bytes that may change at any time, and bytes on a device; this thread has its stream."""
        for key, live in list(self._left.items()):
            if live.slice.key not in background or live.tensor.device.type != "cpu":
                self._contents[key] = bytes_digest(self._left.pop(key).tensor)
        with self._watching():
            if self._window is not None:
                self._window.add_now(background)

    def complete(self) -> None:
        while self._left:
            key, live = self._left.popitem()
            self._contents[key] = bytes_digest(live.tensor)
        with self._watching():
            if self._window is not None:
                self._window.complete()

    def watched(self) -> tuple[Watched, ...]:
        """Return the digests that are compared between replicas; () without any."""
        with self._watching():
            if self._window is not None:
                return self._window.reports()
        return ()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Catch an exception of the window, such as that of a device without memory."""
        try:
            yield
        except Exception as error:
            self._window = None
            self._on_unwatched(error)

    def text(self) -> str:
        """Return `<part>:<digest>`, or with bytes `<part>/content:<digest>`.

        Only texts of the same kind are compared. All ranks compare bytes until a save is committed; then one
        of them may learn of that commit later than others.
        """
        found = self._walked.shared_digest(self._identity.ranks, self._contents)
        kind = f"{self._identity.part}/content" if self._content else self._identity.part
        return f"{kind}:{found}" if kind else found


@dataclass(slots=True)
class Handoff:
    """The transfer of one save to the agent: the buffer, and whether the agent was notified.

    The agent is notified of a copy when all bytes are in the buffer. It is notified of a stream before the
    first byte, because the agent reads while the rank writes.
    """

    _link: SaveLink
    _buffer: SaveBuffer
    _plan: CopyPlan
    _parts: SaveParts
    _digest: SharedDigest
    _stall_s: Callable[[float], float]  # maps a save's begin time to the time for which it blocked training
    _taken: Taken | None  # the still slices that the buffer has and that are not copied again
    released: Future[bool] = field(default_factory=Future)
    _is_known: bool = False  # the agent was notified, reads the buffer, and releases it
    _is_new_layout: bool = field(init=False)

    def __post_init__(self) -> None:
        if self._taken is None and self._plan.still:
            self._taken = Taken.of(self._plan.still)
            self._buffer.still_from = self._parts.attempt
        self._is_new_layout = self._buffer.layout is not self._plan.layout
        self._buffer.released, self._buffer.layout = self.released, None  # set again once it has the layout
        self._buffer.taken = None  # set again once it has the slices

    def begin(self) -> bool:
        """Prepare the buffer, and a stream up to its header; return False if the save has failed already."""
        target, layout = self._buffer.target, self._plan.layout
        if isinstance(target, Arena):
            target.begin()
            if target.layout is not layout:
                target.lay_out(layout)
            return True
        self._digest.complete()
        target.begin(self._parts.attempt.attempt, self.released.done)
        self._hand_over()
        try:
            target.write(torch.frombuffer(bytearray(layout.shards[0].header), dtype=torch.uint8))
        except CheckpointError as error:
            self.fail(error)
            return False
        return True

    def finish(self) -> None:
        """Seal the buffer when every slice is copied. Raises the exception of the save's `check`."""
        target, attempt = self._buffer.target, self._parts.attempt.attempt
        self._parts.check()
        if isinstance(target, Arena):
            target.seal(attempt)
            self._buffer.taken = self._taken
            self._hand_over()
        else:
            target.end(attempt)

    def _hand_over(self) -> None:
        parts, layout = self._parts, self._plan.layout
        shard = SealedShard(
            attempt=parts.attempt,
            rank=self._link.identity.rank,
            state=parts.state,
            replicated=(self._digest.text(), f"{self._link.identity.part}/{parts.count}"),
            metrics=parts.metrics(),
            buffer=self._buffer.index,
            layout=layout if self._is_new_layout else None,
            layout_signature=layout.signature,
            mesh=self._plan.mesh,
            stall_s=self._stall_s(parts.began_s),
            capture_s=time.monotonic() - parts.began_s,
            watched=self._digest.watched(),
            still_from=self._buffer.still_from if self._plan.still else None,
        )
        try:
            sealed = self._link.seal(shard)
        except Exception as error:  # the agent is gone
            self.released.set_exception(error)
            return
        self._is_known, self._buffer.layout = True, layout
        # The callback waits for the agent, so it keeps no tensor of this save.
        sealed.add_done_callback(partial(_release, self.released))

    def fail(self, error: Exception) -> None:
        """Cancel the save after `error`."""
        if isinstance(self._buffer.target, Ring):
            self._buffer.target.give_up()
        log.warning("step %d is not saved: %s", self._parts.attempt.step, text_of(error))
        if self._is_known:  # the agent detects the cancelled stream and reports it
            return
        with contextlib.suppress(Exception):
            self._link.skip(self._parts.attempt, text_of(error))
        if not self.released.done():
            self.released.set_result(False)

    def abandon(self) -> None:
        """Release the buffer after a failed start, because no thread runs that would release it."""
        if isinstance(self._buffer.target, Ring):
            self._buffer.target.give_up()
        if not self._is_known and not self.released.done():
            self.released.set_result(False)


def _release(released: Future[bool], sealed: Future[bool]) -> None:
    error = sealed.exception()
    if released.done():
        return
    if error is None:
        released.set_result(sealed.result())
    else:
        released.set_exception(error)
