"""Requests to finish a run, and the end of the run as the launcher reports it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ray_ckpt.core import messages as m
from ray_ckpt.core.closing import Closing
from ray_ckpt.core.context import Context
from ray_ckpt.core.session_end import SessionEnd
from ray_ckpt.core.sessions import Sessions
from ray_ckpt.core.sweep import Sweeps
from ray_ckpt.errors import CheckpointError, RunSuperseded
from ray_ckpt.types import CheckpointInfo, EndCause


class Finishing:
    """The open requests to finish a run, their answers, and the end of the group if a request includes it."""

    def __init__(
        self,
        context: Context,
        *,
        sessions: Sessions,
        session_end: SessionEnd,
        sweeps: Sweeps,
        closing: Closing,
    ) -> None:
        self._context = context
        self._sessions, self._session_end = sessions, session_end
        self._sweeps, self._closing = sweeps, closing
        self._requests: list[m.FinishRequested] = []
        self.end_cause: EndCause | None = None  # as the launcher reported; None after the next group opens

    def __bool__(self) -> bool:
        """Return True while a request has no answer."""
        return bool(self._requests)

    @property
    def ends_group(self) -> bool:
        """True if an open request also ends the group."""
        return any(event.ends_group for event in self._requests)

    @property
    def has_failed(self) -> bool:
        """True if an open request comes after a run that has failed."""
        return any(event.has_failed for event in self._requests)

    def add(self, event: m.FinishRequested) -> Iterator[m.Effect]:
        """Let a request wait for its answer, unless another launcher than that of the request has the run."""
        if event.owner and self._sessions.objection(event.owner, "") is not None:
            name = self._context.history.run_name
            error = RunSuperseded(f"Run {name} is not finished: another launcher has taken it over.")
            yield m.Fail(token=event.token, error=error)
        else:
            self._requests.append(event)

    def group_came(self) -> None:
        """Cancel the end of the run, because a new group has opened the run."""
        self.end_cause = None
        self._closing.stop()

    def ended(self, cause: EndCause) -> None:
        """Note how the run has ended; a finished run is put away after the grace period."""
        self.end_cause = cause
        if cause == "finished":
            self._closing.finished()

    def reply(self, newest: CheckpointInfo | None) -> Iterator[m.Effect]:
        """Answer all requests; call when the newest checkpoint is durable or the run has no checkpoint."""
        ends_group = self.ends_group
        if ends_group and self._end_session():
            return  # called again when the end is in the log: after the reply, the cluster may be shut down
        yield from self._sweeps.order_listing(self._context.wall_s, is_end=True)
        if ends_group:
            self.ended(_request_end(self._requests))
        requests, self._requests = self._requests, []
        for event in requests:
            yield m.Reply(token=event.token, value=newest)
        if ends_group:
            yield from self._end_group()

    def fail(self, error: CheckpointError) -> Iterator[m.Effect]:
        """Fail all requests; end the group nevertheless if a request ends it, as that of a failed run."""
        ends_group = self.ends_group
        if ends_group:
            self._session_end.end("process", live=self._context.holders.live)
            self.ended("process")
        requests, self._requests = self._requests, []
        for event in requests:
            yield m.Fail(token=event.token, error=error)
        if ends_group:
            yield from self._end_group()

    def _end_session(self) -> bool:
        """Append the end of the session at work; return False if there is no record to append."""
        cause, live = _request_end(self._requests), self._context.holders.live
        return self._session_end.end(cause, live=None if cause == "finished" else live)

    def _end_group(self) -> Iterator[m.Effect]:
        yield from self._sessions.end(RunSuperseded("The launcher has ended the run."))


def _request_end(requests: Iterable[m.FinishRequested]) -> EndCause:
    return "process" if any(event.has_failed for event in requests) else "finished"
