"""One snapshot: live tensors copied into an arena or a ring, in the background where that is safe.

`start` returns as soon as everything that may change at any time has been copied. The rest is copied while
training goes on; `before_change`, called before parameters change, waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from ray_ckpt.capture.arena import Arena, Ring
from ray_ckpt.capture.overlap_guard import running
from ray_ckpt.capture.walk import LiveSlice
from ray_ckpt.errors import StateError, Unavailable

log = logging.getLogger("ray_ckpt")

COPY_WAIT_S = 300.0  # that training waits for a copy; one of a second that takes so long never ends
MAX_CLONED_BYTES = 1 << 30  # of a device's memory for copies of what may change at any time; buffers and such
OPERATION_S = 2.0  # that one operation on one tensor may still take when the copy has ended


@dataclass(slots=True)
class _Part:
    """A slice on its way. Sources that may change at any time are replaced by copies of them."""

    live: LiveSlice
    source: torch.Tensor
    is_late: bool  # copied in the background
    view: torch.Tensor | None = None  # where it goes in an arena; a ring has none
    reference: torch.Tensor | None = None  # what it must look like there, if captures are verified

    def differs(self) -> bool:
        """Whether a verified capture is not what it should be, bit for bit (NaN included)."""
        if self.view is None or self.reference is None:
            return False
        return not torch.equal(_raw(self.view), _raw(self.reference.cpu()))


@dataclass(slots=True)
class _Batch:
    """Slices in the host's memory that are copied at once, none of which needs a part of its own."""

    sources: list[torch.Tensor]
    views: list[torch.Tensor]
    is_late: bool = False


class Snapshot:
    """A copy that is running, or has ended. Made by `Snapshotter.start`."""

    def __init__(self, parts: Sequence[_Part], waited: Callable[[float], None]) -> None:
        self.parts = parts
        self.is_late = any(part.is_late for part in parts)
        self._waited = waited  # told the seconds for which `before_change` held training up
        self._versions = [(part.live, _version(part.live)) for part in parts if part.is_late]
        self._lock = threading.Lock()
        self._changed: list[LiveSlice] | None = None  # None: not judged yet
        self._judged = threading.Event()
        self._is_abandoned = False
        self.waits_since_s: float | None = None  # since when training has waited before a change (monotonic)
        self.host_copied = threading.Event()
        # (torch.cuda or the like, device, event) of each device's copies
        self.device_copied: list[tuple[Any, torch.device, Any]] = []

    def before_change(self) -> None:
        """Return when live state may be changed: the host waits for host copies, a device for its own.

        Called by the thread that trains. A copy that takes longer than COPY_WAIT_S is given up.
        """
        start_s = self.waits_since_s = time.monotonic()
        self._note_changes()
        for module, device, event in self.device_copied:
            module.current_stream(device).wait_event(event)
        if not self.host_copied.wait(COPY_WAIT_S):
            log.error("a capture has not ended after %.0f s; its save is given up", COPY_WAIT_S)
            self._is_abandoned = True
            running.end(self)
        self._waited(time.monotonic() - start_s)

    def judge(self) -> None:
        """Called by the thread that trains, which is in no operation then: if all is copied, look at it."""
        if self.host_copied.is_set() and not self.device_copied:
            self._note_changes()

    def finish(self) -> None:
        """When all is copied, by the thread that copied. StateError if a tensor changed before it was.

        torch counts a change when the operation ends, so one may still be running in the thread that trains.
        Waits for that thread to say that it is not, or for OPERATION_S.
        """
        if self._versions:
            self._judged.wait(OPERATION_S)
        self._note_changes()
        changed = [*(self._changed or ()), *(part.live for part in self.parts if part.differs())]
        if self._is_abandoned:
            raise StateError(f"The capture took longer than {COPY_WAIT_S:.0f} s.")
        if changed:
            keys = tuple(live.slice.key for live in changed)
            raise StateError(
                f"{keys[0]} was changed outside optimizer.step() while it was being captured"
                + (f", and {len(keys) - 1} others." if len(keys) > 1 else "."),
                hint="Put that change into `with ckpt.lock():`, or set overlap=False.",
                keys=keys,
            )

    def _note_changes(self) -> None:
        """Once: when all is copied, or before the first change that is allowed."""
        with self._lock:
            if self._changed is None:
                self._changed = [live for live, version in self._versions if _version(live) != version]
        self._judged.set()


class Snapshotter:
    """Copies of one rank, one at a time, on a thread and, for an accelerator, a stream of its own.

    `verify` takes a second copy at once and compares: for finding code that changes parameters behind the
    optimizer's back, at the price of a blocking copy and its memory.
    """

    def __init__(self, *, overlap: bool, verify: bool, waited: Callable[[float], None]) -> None:
        self._overlap = overlap
        self._waited = waited
        self._verify = verify
        self._thread = ThreadPoolExecutor(1, "ray_ckpt-capture", initializer=_use_one_core)
        self._streams: dict[torch.device, Any] = {}
        self._unsafe: set[str] = set()  # slices found changed during a copy are copied at once from then on

    def start(
        self,
        target: Arena | Ring,
        slices: Sequence[LiveSlice],
        *,
        background: Set[str],
        during: Callable[[], None],
        finish: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> Snapshot:
        """Copy `slices`, in the layout's order, into `target`; then call `finish`, or `fail` with the reason.

        Those whose keys are in `background` may be copied while training goes on; `during` is called then,
        before live state may change. Either `finish` or `fail` is called once, by the thread of the copy, or
        before returning if nothing is overlapped. The target has begun; `finish` seals it.
        """
        safe = background - self._unsafe if self._overlap else frozenset()
        batch, parts = self._split(target, slices, safe)
        snapshot = Snapshot(parts, self._waited)
        with torch.no_grad():
            rest = self._copy_now(target, batch, snapshot)
        if snapshot.is_late:
            running.add(snapshot)
        run = partial(self._run, snapshot, rest, during, finish, fail)
        if not self._overlap:
            run()
            return snapshot
        try:
            self._thread.submit(run).add_done_callback(partial(_ended, snapshot, fail))
        except RuntimeError as error:  # closed, or there can be no more threads
            running.end(snapshot)
            raise Unavailable(f"There is no thread to copy in: {error}.") from error
        return snapshot

    def _run(
        self,
        snapshot: Snapshot,
        rest: Callable[[], None],
        during: Callable[[], None],
        finish: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        try:
            try:
                with torch.no_grad():
                    rest()
                    during()
            finally:
                snapshot.host_copied.set()
            for _, _, event in snapshot.device_copied:
                event.synchronize()
            snapshot.finish()
            finish()
        except Exception as error:
            if isinstance(error, StateError):
                self._unsafe.update(error.fields.get("keys", ()))
            fail(error)
        finally:
            running.end(snapshot)
            snapshot.parts = ()  # copies on devices, references, and views of an arena that may be given up

    def close(self) -> None:
        """End the thread once the copy that it is at has ended."""
        self._thread.shutdown(wait=False)

    def _split(
        self, target: Arena | Ring, slices: Sequence[LiveSlice], safe: Set[str]
    ) -> tuple[_Batch, list[_Part]]:
        """What one call copies at once, and a part for each other slice: a part alone takes a microsecond."""
        batch, parts = _Batch([], []), []
        if not isinstance(target, Arena):
            return batch, [_Part(live, live.tensor, is_late=live.slice.key in safe) for live in slices]
        for live, view in zip(slices, target.views, strict=True):
            source = live.tensor
            is_late = bool(safe) and live.changes_in_step and live.slice.key in safe  # the key costs most
            if is_late or self._verify or not _is_on_host(source):
                reference = source.detach().clone() if self._verify else None
                parts.append(_Part(live, source, is_late=is_late, view=view, reference=reference))
            else:
                batch.sources.append(source)
                batch.views.append(view)
        return batch, parts

    def _copy_now(self, target: Arena | Ring, batch: _Batch, snapshot: Snapshot) -> Callable[[], None]:
        """Copy what may change at any time; returns what copies the rest."""
        parts = snapshot.parts
        if isinstance(target, Arena):
            on_host = [part for part in parts if _is_on_host(part.source)]
            _copy([batch, *(part for part in on_host if not part.is_late)])
            snapshot.device_copied = self._start_devices([p for p in parts if not _is_on_host(p.source)])
            return partial(_copy, [part for part in on_host if part.is_late])
        for part in parts:
            if not part.is_late and self._overlap:
                part.source = _clone(part.source)
        return partial(self._stream_out, target, parts, self._ready_events(parts))

    # -- accelerators ----------------------------------------------------------------------------------

    def _start_devices(self, parts: Sequence[_Part]) -> list[tuple[Any, torch.device, Any]]:
        """Enqueue the copies from each device on its own stream, after what its current stream has to do.

        What may change at any time is copied on the device first, in the order of the training's stream; if
        that is more than MAX_CLONED_BYTES, this waits until all of the device has been copied instead.
        """
        copied = []
        for device in dict.fromkeys(part.source.device for part in parts):
            mine = [part for part in parts if part.source.device == device]
            at_once = [part for part in mine if not part.is_late]
            waits = not self._overlap or sum(part.live.nbytes for part in at_once) > MAX_CLONED_BYTES
            for part in () if waits else at_once:
                part.source = _clone(part.source)
            module, stream = self._stream_of(device)
            with _on_device(module, device):
                ready, done = module.Event(), module.Event()
                ready.record(module.current_stream(device))
                with module.stream(stream):
                    stream.wait_event(ready)
                    for part in mine:
                        _copy_from_device(part)
                    done.record(stream)
            if waits and at_once:
                done.synchronize()
            copied.append((module, device, done))
        return copied

    def _stream_of(self, device: torch.device) -> tuple[Any, Any]:
        module = torch.get_device_module(device)
        if device not in self._streams:
            with _on_device(module, device):
                self._streams[device] = module.Stream()
        return module, self._streams[device]

    def _ready_events(self, parts: Sequence[_Part]) -> dict[torch.device, Any]:
        """An event for each device, behind everything that training has asked of it so far."""
        events = {}
        for device in {part.source.device for part in parts if not _is_on_host(part.source)}:
            module, _ = self._stream_of(device)
            with _on_device(module, device):
                events[device] = module.Event()
                events[device].record(module.current_stream(device))
        return events

    def _stream_out(self, ring: Ring, parts: Sequence[_Part], ready: dict[torch.device, Any]) -> None:
        """Put every part through the ring, in file order."""
        for part in parts:
            device = part.source.device
            if _is_on_host(part.source):
                ring.write(part.source)
                continue
            module, stream = self._stream_of(device)
            with _on_device(module, device), module.stream(stream):
                stream.wait_event(ready[device])
                ring.write(part.source.cpu())


def _ended(snapshot: Snapshot, fail: Callable[[Exception], None], done: Future[None]) -> None:
    """The thread itself may have failed, so that nothing was run."""
    running.end(snapshot)
    error = done.exception() if not done.cancelled() else CancelledError()
    if isinstance(error, Exception):
        fail(error)


def _version(live: LiveSlice) -> tuple[int, int]:
    """Counts the changes of a tensor; a DTensor and its local part count their own."""
    return live.leaf._version, live.tensor._version


def _is_on_host(source: torch.Tensor) -> bool:
    return bool(source.is_cpu)


def _on_device(module: Any, device: torch.device) -> AbstractContextManager[Any]:
    """`device` as the current one of this thread, if the module has several."""
    current = getattr(module, "device", None)
    return current(device) if current is not None else nullcontext()


def _clone(source: torch.Tensor) -> torch.Tensor:
    """A copy on the same device, in the order of this thread's stream."""
    return source.detach().clone()


def _copy_from_device(part: _Part) -> None:
    """Enqueue the copy on the current stream."""
    assert part.view is not None
    part.view.copy_(part.source, non_blocking=True)


def _copy(parts: Sequence[_Part | _Batch]) -> None:
    """In one call, which holds the interpreter's lock at its beginning and its end only."""
    views: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for part in parts:
        if isinstance(part, _Batch):
            views += part.views
            sources += part.sources
        elif part.view is not None:
            views.append(part.view)
            sources.append(part.source)
    if views:
        torch._foreach_copy_(views, sources)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _use_one_core() -> None:
    """This thread's copies run on one core, so that they do not push training off the others."""
    try:
        torch.get_num_threads()  # sets this thread up; it would undo the limit later
        threadpool_limits(limits=1, user_api="openmp")  # of the calling thread only
    except Exception as error:  # a thread that cannot start would hold training up
        log.debug("captures run on several cores: %s", error)
