"""Restarts with prefetching, by seeds: no wrong byte, no memory left (P4, P8); planted bugs are found.

`python -m tests.actors.prefetch_restarts --seeds 0:125` plays 1,000 and more.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import pytest

from ray_ckpt.actors.agent import prefetch
from ray_ckpt.actors.agent.arena import ArenaMemory, RankArena
from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.prefetch import Prefetch
from ray_ckpt.actors.agent.restoring import NodeRestore
from ray_ckpt.actors.agent.run import NodeRun
from ray_ckpt.core.values import SessionPlan
from ray_ckpt.restore import reader, sources
from ray_ckpt.testing.oracle import Violation
from tests.actors.prefetch_restarts import memory
from tests.actors.prefetch_restarts.schedule import play

NUM_SEEDS = 4  # in the quick test
MOST_SEEDS = 40  # by which a planted bug has to be found
SHORT_S = 0.3  # until memory counts as left, where some is


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence the log: the nodes of a schedule die all the time."""
    logger = logging.getLogger("ray_ckpt")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Plant a bug; close the memory that it has left, which other tests of this process look for."""
    before = memory.open_numbers()
    yield monkeypatch
    gc.collect()
    for number in memory.open_numbers() - before:
        os.close(number)


def test_no_byte_is_wrong_and_no_memory_stays() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        counts += play(seed, 1)
    assert counts["restarts"] >= NUM_SEEDS and counts["ranks compared"] > NUM_SEEDS
    assert counts["bytes read ahead"] and counts["prefetches held up"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, 120, 24))
def test_many_restarts(first: int) -> None:
    for seed in range(first, first + 24):
        play(seed)


# -- planted bugs --------------------------------------------------------------------------------------


def found(promise: str, seeds: Sequence[int] = range(MOST_SEEDS)) -> None:
    """Check that a schedule finds the planted bug as a broken `promise`."""
    patience_s = SHORT_S if promise == "P8" else memory.GONE_S
    for seed in seeds:
        try:
            with patch.object(memory, "GONE_S", patience_s):
                play(seed)
        except Violation as violation:
            assert str(violation).startswith(promise), violation
            return
    pytest.fail("the planted bug was not found")


@pytest.mark.slow  # one planted bug, of files that are not verified, is quick
def test_bytes_of_another_checkpoint_are_found(planted: pytest.MonkeyPatch) -> None:
    """The files that a superseded session has read ahead are served under their names in the next one."""
    handed: WeakKeyDictionary[NodeRun, tuple[Any, Any]] = WeakKeyDictionary()
    supersede, begin = NodeRestore.supersede, NodeRestore.__init__

    def hand_over(self: NodeRestore) -> None:
        old = self._prefetch
        memories = {file: old._memories.pop(file) for file in old._sources if file in old._memories}
        handed[self._run] = dict(old._sources), memories
        old._sources.clear()
        supersede(self)

    def take_over(self: NodeRestore, node: Node, run: NodeRun, plan: SessionPlan, **more: Any) -> None:
        begin(self, node, run, plan, **more)
        files, memories = handed.pop(run, ({}, {}))
        self._prefetch._sources.update(files)
        self._prefetch._memories.update(memories)

    planted.setattr(NodeRestore, "supersede", hand_over)
    planted.setattr(NodeRestore, "__init__", take_over)
    for module in (prefetch, reader):
        planted.setattr(module, "prefetch_seal", lambda attempt, file: file.encode())
    found("P4", range(1, 1 + MOST_SEEDS))


@pytest.mark.slow
def test_memory_that_a_changed_plan_leaves_is_found(planted: pytest.MonkeyPatch) -> None:
    """A session that is superseded does not free what it has read ahead."""

    def supersede(self: NodeRestore) -> None:
        self._is_superseded = True

    planted.setattr(NodeRestore, "supersede", supersede)
    found("P8")


@pytest.mark.slow
def test_memory_of_a_file_that_was_at_work_at_the_end_is_found(planted: pytest.MonkeyPatch) -> None:
    """A file that is completed after the end of its session is kept."""
    close = Prefetch.close

    def forget(self: Prefetch) -> None:
        close(self)
        self._is_closed = False
        for progress in self._at_work.values():
            progress.is_given_up = False

    planted.setattr(Prefetch, "close", forget)
    found("P8")


@pytest.mark.slow
def test_arenas_that_a_prefetch_keeps_mapped_are_found(planted: pytest.MonkeyPatch) -> None:
    close = Prefetch.close

    def keep(self: Prefetch) -> None:
        arenas = self._arenas
        close(self)
        self._arenas = arenas

    planted.setattr(Prefetch, "close", keep)
    found("P8")


@pytest.mark.slow
def test_old_memory_of_a_node_that_is_trusted_is_found(planted: pytest.MonkeyPatch) -> None:
    """An arena counts as a capture of any checkpoint, and is not compared with its digests."""

    def find(self: RankArena, attempt: str) -> ArenaMemory | None:
        return next((buffer for buffer in self.buffers if buffer.layout is not None), None)

    planted.setattr(RankArena, "find", find)
    planted.setattr(sources.Mapped, "check", lambda self: self._file())
    planted.setattr(prefetch, "SourceReader", Trusting)
    found("P4")


def test_files_that_are_not_verified_are_found(planted: pytest.MonkeyPatch) -> None:
    """A prefetch takes the bytes of a damaged file."""
    planted.setattr(prefetch, "SourceReader", Trusting)
    found("P4", range(25, 25 + MOST_SEEDS))


class Trusting(reader.SourceReader):
    """A reader that compares nothing."""

    def _read_intact(self, *arguments: Any, is_verified: bool) -> reader.Sink | None:
        return super()._read_intact(*arguments, is_verified=True)
