"""Copies from host memory that several threads share.

One thread copies beside training, on one core. Once training waits for the copy, helpers use its cores too.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeAlias

import torch
from threadpoolctl import threadpool_limits

from ray_ckpt.capture.torch_private import copy_all

log = logging.getLogger("ray_ckpt")

MAX_HELPERS = 3  # a bound for hosts with many cores, on which more were not measured
MAX_SHARES = 32  # of a copy; after each, its thread may have to wait 5 ms for the GIL
MIN_SHARE_BYTES = 4 << 20  # about a millisecond

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Target and source of a copy, of the same dtype and shape."""


class SharedCopy:
    """A copy that `run` makes, and any number of threads in `help`."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._shares = deque(_shares(pairs))
        self._changed = threading.Condition()
        self._num_helping = 0
        self._failed: Exception | None = None  # the error of a helper

    @property
    def num_left(self) -> int:
        """Shares that no thread has begun."""
        return len(self._shares)

    def run(self) -> None:
        """Copy until nothing is left, and wait for the helpers; raises their errors too.

        There is no limit here: training gives up a copy that takes too long (`Snapshot.before_change`).
        """
        try:
            self._work()
        finally:
            self._shares.clear()  # after an error no helper begins another one
            with self._changed:
                self._changed.wait_for(lambda: not self._num_helping)
        if self._failed is not None:
            raise self._failed

    def help(self) -> None:
        """Copy until nothing is left."""
        with self._changed:
            self._num_helping += 1
        try:
            self._work()
        except Exception as error:
            self._failed = error
        finally:
            with self._changed:
                self._num_helping -= 1
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            try:
                targets, sources = self._shares.popleft()
            except IndexError:  # another thread took the last share
                return
            with torch.no_grad():
                copy_all(targets, sources)


class Helpers:
    """Threads that help with the copies of a rank; they start when they are needed."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_HELPERS, "ray_ckpt-help", initializer=use_one_core)

    def join(self, copy: SharedCopy) -> None:
        """Help with `copy`, so that it uses as many cores as the calling thread may use, or two."""
        wanted = max(1, torch.get_num_threads() - 1)
        with suppress(RuntimeError):  # the executor is closed, or no thread can be started
            for _ in range(min(MAX_HELPERS, wanted, copy.num_left)):
                self._threads.submit(copy.help)

    def close(self) -> None:
        self._threads.shutdown(wait=False)


def use_one_core() -> None:
    """Run this thread's copies on one core, so that training keeps the others."""
    try:
        torch.get_num_threads()  # initializes this thread now: doing so later would undo the limit
        threadpool_limits(limits=1, user_api="openmp")  # limits the calling thread only
    except Exception as error:  # without the limit copies still work
        log.debug("captures run on several cores: %s", error)


def _shares(pairs: Sequence[Pair]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Yield the targets and sources of each share; shares have about the same size."""
    sizes = [source.nbytes for _, source in pairs]
    limit = max(MIN_SHARE_BYTES, sum(sizes) // MAX_SHARES)
    targets, sources = list[torch.Tensor](), list[torch.Tensor]()
    share_bytes = 0
    for pair, size in zip(pairs, sizes, strict=True):
        for target, source in (pair,) if size <= limit else _cut(pair, limit):
            targets.append(target)
            sources.append(source)
            share_bytes += source.nbytes
            if share_bytes >= limit:
                yield targets, sources
                targets, sources, share_bytes = [], [], 0
    if targets:
        yield targets, sources


def _cut(pair: Pair, limit: int) -> Iterable[Pair]:
    """Return a copy in parts of at most `limit` bytes; a strided source stays whole."""
    source = pair[1]
    if not source.is_contiguous():
        return [pair]
    length = limit // source.element_size()
    flat = (tensor.detach().view(-1) for tensor in pair)
    return zip(*(torch.split(tensor, length) for tensor in flat), strict=True)
