"""A part of a group whose parts are restored one after the other, by a driver that waits for each.

The ranks of a group restore together: none goes on before all have verified their state. verl's driver calls
the critic when the actor has returned. So the actor goes on when its own state is verified, and the critic,
which is called last, waits for all. If the service then chooses an older step, the critic raises: the driver
has chosen its step already, and ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias

from ray_ckpt.core.values import SessionKey
from ray_ckpt.errors import AgentLost, RestoreError
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.trainer.link import ArenaGrant, Link
from ray_ckpt.trainer.waiting import Recovering
from ray_ckpt.types import RankRestore

Answer: TypeAlias = Future[RestoreTicket | None]


class PartLink:
    """The link of a part; it differs from `link` in the wait for the other parts."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._answer: Answer | None = None
        self.is_last = link.identity.part == link.identity.parts[-1].name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def restored(self, session_key: SessionKey, report: RankRestore) -> Answer:
        """Report the restore; only the last part waits for the answer of the group."""
        send = partial(self._link.restored, session_key, report)
        sent, found = send(), Answer()
        if self.is_last:
            self._answer = sent
            sent.add_done_callback(lambda _: _settle(found, self.check))
        else:
            self._answer = Answer()
            sent.add_done_callback(partial(_pass_on, self._link, send, self._answer))
            found.set_result(None)
        return found

    def open_arena(self, session_key: SessionKey, size_bytes: int, *, named: bool = False) -> ArenaGrant:
        """Open an arena once the group has restored, when agents free the arenas of the group before.

        A Checkpointer calls this in a thread of its own.
        """
        self.wait()
        return self._link.open_arena(session_key, size_bytes, named=named)

    @property
    def is_answered(self) -> bool:
        """True once all parts have restored."""
        return self._answer is not None and self._answer.done()

    def wait(self) -> None:
        """Wait, up to the option `restore_timeout_s`, until all parts have restored. Raises TimeoutError."""
        if self._answer is not None:
            self._answer.exception(self._link.options.restore_timeout_s)

    def check(self) -> None:
        """Raise RestoreError if the group could not restore the step; wait for no other part."""
        if self._answer is None or not self._answer.done():
            return
        older = self._answer.result()
        if older is not None:
            step = older.checkpoint.step if older.checkpoint is not None else 0
            raise RestoreError(
                f"No intact copy of a part is left, and step {step} is restored instead.",
                hint="Start again: the driver then goes on from that step.",
                step=step,
            )


def _pass_on(link: Link, send: Callable[[], Answer], answer: Answer, sent: Answer) -> None:
    """Pass the answer of the group on; if the agent has died, report to the next one, in a thread."""
    error = sent.exception()
    if isinstance(error, AgentLost):
        again = partial(_report_again, Recovering(link), send, answer, error)
        threading.Thread(target=again, name="ray_ckpt-restored", daemon=True).start()
    elif error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(sent.result())


def _report_again(
    recovering: Recovering, send: Callable[[], Answer], answer: Answer, error: AgentLost
) -> None:
    """Report to each next agent, and pass the answer of the group on."""
    try:
        while True:
            recovering.wait(error)
            try:
                answer.set_result(send().result())
                return
            except AgentLost as lost:
                error = lost
    except Exception as failure:
        answer.set_exception(failure)


def _settle(found: Answer, check: Any) -> None:
    try:
        check()
        found.set_result(None)
    except Exception as error:
        found.set_exception(error)
