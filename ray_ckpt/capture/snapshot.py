"""Copies of live tensors into an arena or a ring, in the background where that is safe.

`start` returns as soon as the tensors that may change at any time are copied. The other tensors are copied
during training, on one core; `before_change`, called before parameters change, waits for the copies, which
then use the cores of training too.
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
from itertools import compress
from operator import ne, not_
from typing import Any

import torch

from ray_ckpt.capture.arena import Arena, Ring
from ray_ckpt.capture.items import elements
from ray_ckpt.capture.overlap_guard import running
from ray_ckpt.capture.shared_copy import Helpers, SharedCopy, use_one_core
from ray_ckpt.capture.torch_private import all_versions, copy_all
from ray_ckpt.capture.walk import LiveSlice
from ray_ckpt.errors import StateError, Unavailable

log = logging.getLogger("ray_ckpt")

COPY_WAIT_S = 300.0  # longest wait of training for a copy: a copy takes about a second, so a longer one hangs
MAX_CLONED_BYTES = 1 << 30  # device memory for copies of tensors that may change at any time
MAX_COPIES = 4  # of a tensor that another thread changes at the same time; a small one is still by then
OPERATION_S = 2.0  # longest time that an operation on a tensor may still run after the copy has ended


@dataclass(slots=True)
class _Piece:
    """A slice to copy. A source that may change at any time is replaced by a clone."""

    live: LiveSlice
    source: torch.Tensor
    is_late: bool  # copied in the background
    view: torch.Tensor | None = None  # the target in an arena; None for a ring
    reference: torch.Tensor | None = None  # the expected content, if captures are verified

    def differs(self) -> bool:
        """Return whether a verified capture differs from its reference in any bit (NaN included)."""
        if self.view is None or self.reference is None:
            return False
        return not torch.equal(_raw(self.view), _raw(self.reference.cpu()))


@dataclass(slots=True)
class _Batch:
    """Slices in host memory that are copied in one call."""

    sources: list[torch.Tensor]
    views: list[torch.Tensor]


class Snapshot:
    """A copy that is running or has ended; made by `Snapshotter.start`."""

    def __init__(self, parts: Sequence[_Piece], *, waited: Callable[[float], None], helpers: Helpers) -> None:
        self.parts = parts
        self.shared: SharedCopy | None = None  # the copy beside training, from host memory
        self.restless: list[torch.Tensor] = []  # changed by another thread in each of MAX_COPIES copies
        self._helpers = helpers
        self.is_late = any(part.is_late for part in parts)
        self._waited = waited  # gets the seconds for which `before_change` stalled training
        self.late: Sequence[LiveSlice] = [part.live for part in parts if part.is_late]
        self._versions = versions(self.late)
        self._lock = threading.Lock()
        self._changed: list[LiveSlice] | None = None  # None: not checked yet
        self._judged = threading.Event()
        self._is_abandoned = False
        self.waits_since_s: float | None = None  # monotonic time at which training began to wait
        self.host_copied = threading.Event()
        # (torch.cuda or the like, device, event) of each device's copies
        self.device_copied: list[tuple[Any, torch.device, Any]] = []

    def before_change(self) -> None:
        """Wait until live state may change: the host waits for host copies, a device for its device copies.

        Called by the training thread. A copy that takes longer than COPY_WAIT_S is abandoned.
        """
        start_s = self.waits_since_s = time.monotonic()
        self._note_changes()
        for module, device, event in self.device_copied:
            module.current_stream(device).wait_event(event)
        if (shared := self.shared) is not None:
            self._helpers.join(shared)
        if not self.host_copied.wait(COPY_WAIT_S):
            log.error("a capture has not ended after %.0f s; its save is given up", COPY_WAIT_S)
            self._is_abandoned = True
            running.end(self)
        self._waited(time.monotonic() - start_s)

    def wait(self) -> None:
        """Wait until nothing is copied any more, as before the target's memory is given up.

        A copy that training has given up is not waited for again.
        """
        if self._is_abandoned:
            return
        self.before_change()
        for _, _, event in self.device_copied:
            event.synchronize()

    def judge(self) -> None:
        """Check for changes if all slices are copied; called by the training thread between operations."""
        if self.host_copied.is_set() and not self.device_copied:
            self._note_changes()

    def finish(self) -> None:
        """Check for changes when every slice is copied; StateError if a tensor changed during the copy.

        Called by the copying thread. torch increments a tensor's version only when an operation finishes, so
        an operation may still be running on the training thread. Therefore wait until that thread calls
        `judge`, for OPERATION_S at most.
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
                hint="Make the change within `with ckpt.lock():`, or set overlap=False.",
                keys=keys,
            )

    def _note_changes(self) -> None:
        """Note changed slices, once: when every slice is copied, or before the first allowed change."""
        with self._lock:
            if self._changed is None:
                now = versions(self.late)
                self._changed = list(compress(self.late, map(ne, now, self._versions)))
        self._judged.set()


class Snapshotter:
    """Copies of one rank, made one at a time on a thread and, with an accelerator, a stream of their own.

    `verify` compares each copy with a second, blocking copy, to find code that changes parameters outside of
    an optimizer step; copies into a ring are not compared.
    """

    def __init__(self, *, overlap: bool, verify: bool, waited: Callable[[float], None]) -> None:
        self._overlap = overlap
        self._waited = waited
        self._verify = verify
        self._has_warned = False
        self._thread = ThreadPoolExecutor(1, "ray_ckpt-capture", initializer=use_one_core)
        self._helpers = Helpers()
        self._streams: dict[torch.device, Any] = {}
        # Slices that changed during a copy; later copies of them are made before `start` returns.
        self._unsafe: set[str] = set()
        self._restless: set[str] = set()  # slices that another thread changes; a warning named them

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

        Slices at the end of the layout may be left out; their bytes in an arena then stay as they are.

        Slices with keys in `background` may be copied during training; `during` is called after these copies
        and before live state may change: before `start` returns if no slice is copied during training.
        Either `finish` or `fail` is called once, by the copying thread, or before `start` returns if nothing
        is overlapped. The caller has called `begin` of the target; `finish` seals the target.
        """
        safe = background - self._unsafe if self._overlap else frozenset()
        batch, parts = self._split(target, slices, safe)
        snapshot = Snapshot(parts, waited=self._waited, helpers=self._helpers)
        with torch.no_grad():
            rest = self._copy_now(target, batch, snapshot)
        if snapshot.restless:
            self._warn_of_restless(slices, set(map(id, snapshot.restless)))
        if snapshot.is_late:
            running.add(snapshot)
        else:  # no step waits for this copy
            during()
        run = partial(self._run, snapshot, rest, during, finish, fail)
        if not self._overlap:
            run()
            return snapshot
        try:
            self._thread.submit(run).add_done_callback(partial(_ended, snapshot, fail))
        except RuntimeError as error:  # the executor is closed, or no thread can be started
            running.end(snapshot)
            raise Unavailable(f"There is no thread to copy in: {error}.") from error
        return snapshot

    def _warn_of_restless(self, slices: Sequence[LiveSlice], ids: Set[int]) -> None:
        """Warn, once for each tensor: without these saves the run would have none."""
        keys = {live.slice.key for live in slices if id(live.tensor) in ids} - self._restless
        self._restless |= keys
        if keys:
            log.warning(
                "%s: another thread changes it while saves copy it, so that a checkpoint may have two of its "
                "states; let that thread wait while step or save runs",
                ", ".join(sorted(keys)),
            )

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
                    if snapshot.is_late:
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
            # Frees device copies, references, and views of an arena that may be unmapped.
            snapshot.parts, snapshot.shared, snapshot.late = (), None, ()

    def close(self) -> None:
        """End the threads after their current copies."""
        self._thread.shutdown(wait=False)
        self._helpers.close()

    def _split(
        self, target: Arena | Ring, slices: Sequence[LiveSlice], safe: Set[str]
    ) -> tuple[_Batch, list[_Piece]]:
        """Return a batch of slices for one call, and a piece, which costs 1 us, for each other slice."""
        batch, parts = _Batch([], []), []
        if not isinstance(target, Arena):
            self._warn_unverified()
            return batch, [_Piece(live, live.tensor, is_late=live.slice.key in safe) for live in slices]
        for live, view in zip(slices, target.views, strict=False):  # still slices may be left out
            source = live.tensor
            # The key costs most, so the key is checked last.
            is_late = bool(safe) and live.changes_in_step and live.slice.key in safe
            if is_late or self._verify or not _is_on_host(source):
                reference = source.detach().clone() if self._verify else None
                parts.append(_Piece(live, source, is_late=is_late, view=view, reference=reference))
            else:
                batch.sources.append(source)
                batch.views.append(view)
        return batch, parts

    def _warn_unverified(self) -> None:
        """Warn once if copies into a ring, which cannot be read again, should be compared."""
        if self._verify and not self._has_warned:
            self._has_warned = True
            log.warning('verify_captures does nothing with memory="stream": a ring cannot be read again')

    def _copy_now(self, target: Arena | Ring, batch: _Batch, snapshot: Snapshot) -> Callable[[], None]:
        """Copy the slices that may change at any time; return a function that copies the rest."""
        parts = snapshot.parts
        if isinstance(target, Arena):
            on_host = [part for part in parts if _is_on_host(part.source)]
            snapshot.restless = _copy([batch, *(part for part in on_host if not part.is_late)])
            snapshot.device_copied = self._start_devices([p for p in parts if not _is_on_host(p.source)])
            late = [part for part in on_host if part.is_late]
            snapshot.shared = SharedCopy([(p.view, p.source) for p in late if p.view is not None])
            return snapshot.shared.run
        for part in parts:
            if not part.is_late and self._overlap:
                part.source = _clone(part.source)
        return partial(self._stream_out, target, parts, self._ready_events(parts))

    # -- accelerators ----------------------------------------------------------------------------------

    def _start_devices(self, parts: Sequence[_Piece]) -> list[tuple[Any, torch.device, Any]]:
        """Enqueue each device's copies on a separate stream, after the work of the device's current stream.

        Tensors that may change at any time are first cloned on the device, in the training stream; if these
        tensors have more than MAX_CLONED_BYTES, wait until the whole device has been copied instead.
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

    def _ready_events(self, parts: Sequence[_Piece]) -> dict[torch.device, Any]:
        """Return an event for each device, after the work that training has enqueued so far."""
        events = {}
        for device in {part.source.device for part in parts if not _is_on_host(part.source)}:
            module, _ = self._stream_of(device)
            with _on_device(module, device):
                events[device] = module.Event()
                events[device].record(module.current_stream(device))
        return events

    def _stream_out(self, ring: Ring, parts: Sequence[_Piece], ready: dict[torch.device, Any]) -> None:
        """Write every piece through the ring, in file order."""
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
    """Report the failure of a thread that failed before it ran anything."""
    running.end(snapshot)
    error = done.exception() if not done.cancelled() else CancelledError()
    if isinstance(error, Exception):
        fail(error)


def versions(slices: Sequence[LiveSlice]) -> tuple[tuple[int, int], ...]:
    """Return the change counters of tensors, in order. Raises RuntimeError for inference tensors."""
    leaves, tensors = [live.leaf for live in slices], [live.tensor for live in slices]
    return tuple(zip(all_versions(leaves), all_versions(tensors), strict=True))


def _is_on_host(source: torch.Tensor) -> bool:
    return bool(source.is_cpu)


def _on_device(module: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one of this thread, if the module has several."""
    current = getattr(module, "device", None)
    return current(device) if current is not None else nullcontext()


def _clone(source: torch.Tensor) -> torch.Tensor:
    """Return a copy on the same device, in the order of this thread's stream."""
    return source.detach().clone()


def _copy_from_device(part: _Piece) -> None:
    """Enqueue the copy on the current stream."""
    assert part.view is not None
    part.view.copy_(part.source, non_blocking=True)


def _copy(parts: Sequence[_Piece | _Batch]) -> list[torch.Tensor]:
    """Copy all parts in one call, and those that another thread changes meanwhile again; return the last."""
    views: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for part in parts:
        if isinstance(part, _Batch):
            views += part.views
            sources += part.sources
        elif part.view is not None:
            views.append(part.view)
            sources.append(part.source)
    for _ in range(MAX_COPIES if views else 0):
        counted = list(
            map(not_, map(torch.Tensor.is_inference, sources))
        )  # torch counts no changes of others
        watched = list(compress(sources, counted))
        seen = all_versions(watched)
        copy_all(views, sources)
        if (now := all_versions(watched)) == seen:
            return []
        pairs = zip(compress(views, counted), watched, map(ne, now, seen), strict=True)
        again = [(view, source) for view, source, is_new in pairs if is_new and source.numel() > 1]
        views, sources = [view for view, _ in again], [source for _, source in again]
        if not again:  # a single element has one state
            return []
    return sources


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return elements(tensor).view(torch.uint8)
