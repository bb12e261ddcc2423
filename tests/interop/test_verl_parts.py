"""Parts that a driver restores one after the other."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import pytest

from ray_ckpt.config import RunOptions
from ray_ckpt.core.values import SessionKey
from ray_ckpt.errors import AgentLost, RestoreError, Unavailable
from ray_ckpt.interop.verl.parts import PartLink
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.trainer import waiting
from ray_ckpt.trainer.link import ArenaGrant, Identity, Link
from ray_ckpt.types import GroupPart, RankRestore

REPORT = RankRestore(rank=0)
OLDER = RestoreTicket(session_key=(1, 2), checkpoint=None)
IDENTITY = Identity(
    run_uid="u",
    run_name="rl",
    rank=0,
    world_size=3,
    node_id="n",
    parts=(GroupPart(name="actor", world_size=2), GroupPart(name="critic", world_size=1)),
    part="actor",
)


class GroupAnswer:
    """The link to a group whose answer to a restore is still open."""

    def __init__(self, part: str) -> None:
        self.identity = replace(IDENTITY, part=part)
        self.answer: Future[RestoreTicket | None] = Future()
        self.reported: list[Any] = []
        self.recovered = 0

    options = RunOptions(restore_timeout_s=30)

    def recover(self) -> None:
        self.recovered += 1

    def open_arena(self, session_key: SessionKey, size_bytes: int, *, named: bool = False) -> ArenaGrant:
        assert self.answer.done(), "the agents would free it"
        return ArenaGrant(mode="double", paths=(), size_bytes=size_bytes)

    def restored(self, session_key: SessionKey, report: RankRestore) -> Future[RestoreTicket | None]:
        self.reported.append((session_key, report))
        return self.answer


def part_of(group: GroupAnswer) -> PartLink:
    return PartLink(cast(Link, group))


def test_the_first_part_goes_on_and_learns_the_outcome_later() -> None:
    group = GroupAnswer("actor")
    part = part_of(group)
    assert not part.is_last and part.identity.part == "actor"
    assert part.restored((1, 1), REPORT).result(0) is None and group.reported == [((1, 1), REPORT)]
    part.check()  # the critic has not been called yet
    group.answer.set_result(OLDER)
    with pytest.raises(RestoreError, match="step 0 is restored instead"):
        part.check()


def test_memory_for_saves_is_opened_when_the_group_has_restored() -> None:
    group = GroupAnswer("actor")
    part = part_of(group)
    part.restored((1, 1), REPORT)
    assert not part.is_answered
    threading.Timer(0.05, group.answer.set_result, (None,)).start()
    assert part.open_arena((1, 1), 64).size_bytes == 64
    assert part.is_answered


def test_the_last_part_waits_for_all() -> None:
    group = GroupAnswer("critic")
    part = part_of(group)
    found = part.restored((1, 1), REPORT)
    assert part.is_last and not found.done()
    group.answer.set_result(None)
    assert found.result(0) is None


def test_the_last_part_ends_the_driver_if_an_older_step_is_chosen() -> None:
    group = GroupAnswer("critic")
    found = part_of(group).restored((1, 1), REPORT)
    group.answer.set_result(OLDER)
    with pytest.raises(RestoreError, match="goes on from that step"):
        found.result(0)


def test_errors_of_the_service_reach_the_last_part() -> None:
    group = GroupAnswer("critic")
    found = part_of(group).restored((1, 1), REPORT)
    group.answer.set_exception(Unavailable("The agent does not answer."))
    with pytest.raises(Unavailable):
        found.result(0)


def test_a_part_that_goes_on_reports_to_the_next_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent would wait for it for ever, and with it the last part."""
    monkeypatch.setattr(waiting, "RECOVER_POLL_S", 0.0)
    group = GroupAnswer("actor")
    part = part_of(group)
    part.restored((1, 1), REPORT)
    died, group.answer = group.answer, Future()
    died.set_exception(AgentLost("The agent died."))
    end_s = time.monotonic() + 10
    while len(group.reported) < 2 and time.monotonic() < end_s:
        time.sleep(0.01)
    assert group.reported == 2 * [((1, 1), REPORT)] and group.recovered == 1 and not part.is_answered
    group.answer.set_result(OLDER)
    part.wait()
    with pytest.raises(RestoreError):
        part.check()
