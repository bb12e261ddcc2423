"""The schedule of drains: commits that are due, checkpoints that users request, and drains that failed."""

from __future__ import annotations

from collections.abc import Iterator

from ray_ckpt import telemetry
from ray_ckpt.core import messages as m
from ray_ckpt.core.context import Context
from ray_ckpt.core.drain import Drains
from ray_ckpt.core.drain_policy import DrainPolicy
from ray_ckpt.core.finishing import Finishing
from ray_ckpt.core.item_uploads import ItemUploads
from ray_ckpt.core.maintenance import Maintenance
from ray_ckpt.core.save_intervals import SaveIntervals
from ray_ckpt.core.values import Token
from ray_ckpt.errors import CheckpointError, ConfigError, RunSuperseded, Unavailable
from ray_ckpt.format import records as r
from ray_ckpt.types import AttemptId, CheckpointInfo, Level


class DrainSchedule:
    """The start and the end of drains; `Drains` assigns the uploads of each drain to nodes."""

    def __init__(
        self,
        context: Context,
        *,
        drains: Drains,
        item_uploads: Drains,
        intervals: SaveIntervals,
        maintenance: Maintenance,
        finishing: Finishing,
    ) -> None:
        self._context = context
        self._drains, self._intervals = drains, intervals
        self._maintenance, self._finishing = maintenance, finishing
        self._policy = DrainPolicy()
        self._items = ItemUploads(context, drains=drains, uploads=item_uploads)
        self._waits: dict[Token, tuple[str, float]] = {}  # by call: attempt, end (monotonic)
        self._refused: dict[
            str, CheckpointError
        ] = {}  # attempts that were given up since a finish was requested

    def recount(self, checkpoint: CheckpointInfo) -> None:
        """Count a commit of an earlier coordinator; call for all of these in log order."""
        self.is_due(checkpoint)
        self._items.is_due(checkpoint)

    def is_due(self, checkpoint: CheckpointInfo) -> bool:
        """Count a commit and return True if it must be drained; call for all commits in log order."""
        every, every_s = self._context.options.remote_every, self._intervals.remote_interval_s
        return self._policy.committed(checkpoint, every=every, every_s=every_s)

    def committed(self, checkpoint: CheckpointInfo) -> Iterator[m.Effect]:
        if self.is_due(checkpoint):
            self._drains.start(checkpoint)
            yield from self.assign()
        self._items.committed(checkpoint)
        yield from self._items.assign()

    def undrained(self) -> set[str]:
        """Return the attempts that are due, not durable, and held by live nodes or computable there."""
        due = self._policy.undrained(self._context.history.checkpoints)
        return {c.id.attempt for c in due if self._context.holders.has_all(c)}

    def assign(self) -> Iterator[m.Effect]:
        """Assign uploads to nodes; give up the drains for which no live node has an intact copy."""
        self._intervals.draining(self._drains.attempts)
        for checkpoint, reason in self._drains.give_up():
            yield from self._failed(checkpoint.id, reason)
        yield from self._drains.assign()

    def ticked(self) -> Iterator[m.Effect]:
        if not self._finishing:
            self._refused = {}
        yield from self._answer()
        yield from self.assign()
        yield from self._items.assign()

    def bring(self, checkpoint: CheckpointInfo) -> Iterator[m.Effect]:
        """Drain the checkpoint for which a caller waits, before all other checkpoints."""
        self._drains.start(checkpoint, is_urgent=True, is_requested=True)
        yield from self.assign()

    def finish(self) -> Iterator[m.Effect]:
        """Answer requests to finish once the newest checkpoint is durable; drain it if needed.

        If it cannot be drained, the newest one that can be read and drained is; requests after a run that did
        not fail then get an error.
        """
        last = next(reversed(self._context.history.lineage()), None)
        while (checkpoint := self._to_bring(last)) is not None:
            yield from self.bring(checkpoint)
            if checkpoint.id.attempt not in self._refused:
                return
        newest = self._context.newest_readable(without=self._refused)
        error = self._refused.get(last.id.attempt) if last is not None else None
        if error is None:
            yield from self._finishing.reply(last)
        elif self._finishing.has_failed and newest is not None:
            yield from self._finishing.reply(newest)
        else:
            yield from self._finishing.fail(error)
        if not self._finishing:  # else the end of the session is appended before the answer
            self._refused = {}

    def _to_bring(self, last: CheckpointInfo | None) -> CheckpointInfo | None:
        """Return the checkpoint for whose drain a finish waits: the last one, or the newest readable one."""
        found = (last, self._context.newest_readable(without=self._refused))
        wanted = (c for c in found if c is not None and c.id.attempt not in self._refused)
        return next(filter(self._context.holders.needs_upload, wanted), None)

    @property
    def is_rescue_due(self) -> bool:
        """True if nodes will leave soon, and copies with them, or if the launcher has died."""
        context = self._context
        is_leaving = context.is_leaving or (bool(context.draining) and self._maintenance.is_stranded)
        return is_leaving or self._finishing.end_cause == "launcher"

    def rescue(self) -> Iterator[m.Effect]:
        """Drain the newest checkpoint that can be read and drained; call if `is_rescue_due`."""
        context, newest = self._context, self._context.newest_readable(without=self._drains.put_off)
        if newest is None:
            return
        ends = [at_s for node, at_s in context.leaves_at_s.items() if node in context.holders.live]
        fits = not ends or context.now_s + self._intervals.drain_s <= max(ends)
        if fits and context.holders.needs_upload(newest):
            self._drains.start(newest, is_urgent=True)
            yield from self.assign()

    def start_again(self, *, is_end: bool = False) -> None:
        """Start drains that are due and not under way; items alone only before the end of the run.

        These are the drains of checkpoints that are damaged on the storage path, and drains that were
        displaced from the queue, had no source, or ended with an earlier coordinator.
        """
        holders, checkpoints = self._context.holders, self._context.history.checkpoints
        unread = self._maintenance.unread if is_end else set()  # not scrubbed then
        names = holders.bad_remote.keys() | unread
        bad = [checkpoints[name] for name in sorted(names & checkpoints.keys())]
        bad = [checkpoint for checkpoint in bad if checkpoint.state == "live"]
        for name in holders.bad_remote.keys() - {checkpoint.id.attempt for checkpoint in bad}:
            del holders.bad_remote[name]
        for checkpoint in (*bad, *self._policy.undrained(checkpoints)):
            is_new = checkpoint.id.attempt not in self._drains.attempts
            if is_new and self._drains.has_room and holders.can_upload(checkpoint):
                self._drains.start(checkpoint)
        if not is_end:
            self._items.start_again()

    def nodes_lost(self, lost: frozenset[str]) -> Iterator[m.Effect]:
        self._drains.lost(lost)
        yield from self.assign()
        yield from self._items.nodes_lost(lost)

    # -- events --------------------------------------------------------------------------------------

    def requested(self, event: m.DrainRequested) -> Iterator[m.Effect]:
        """Start the drain of a checkpoint that a user wants on the storage path."""
        checkpoint = self._context.history.checkpoints.get(event.attempt)
        if checkpoint is not None and event.within_s is not None:
            self._waits[event.token] = event.attempt, self._context.now_s + event.within_s
            yield from self._answer()
            return
        if checkpoint is None or checkpoint.state != "live":
            state = f"is {checkpoint.state}" if checkpoint else "does not exist"
            yield m.Fail(token=event.token, error=ConfigError(f"Checkpoint {event.attempt} {state}."))
            return
        if checkpoint.level < Level.DURABLE:
            self._drains.start(checkpoint)
            yield from self.assign()
        yield m.Reply(token=event.token, value=None)

    def _answer(self) -> Iterator[m.Effect]:
        """Answer the callers whose wait is over, and drain the checkpoint that is awaited longest.

        Each caller waits for its own checkpoint: newer ones may come faster than they can be uploaded.
        """
        checkpoints = self._context.history.checkpoints
        if self._waits and self._context.plan is None:
            yield from self.fail(RunSuperseded("The group that waited has ended."))
        for token, (attempt, until_s) in list(self._waits.items()):
            checkpoint = checkpoints[attempt]
            if not self._context.holders.needs_upload(checkpoint):
                yield m.Reply(token=token, value=checkpoint)
            elif checkpoint.state != "live" or self._context.now_s >= until_s:
                state = "not on the storage path yet" if checkpoint.state == "live" else checkpoint.state
                yield m.Fail(token=token, error=Unavailable(f"Step {checkpoint.step} is {state}."))
            else:
                continue
            del self._waits[token]
        awaited = [attempt for attempt, _ in self._waits.values()]
        self._drains.awaited = awaited[0] if awaited else ""
        for attempt in awaited:
            self._drains.start(checkpoints[attempt], is_requested=True)
        if awaited:
            yield from self.assign()

    def fail(self, error: CheckpointError, attempt: str = "") -> Iterator[m.Fail]:
        """Fail the callers that wait, or those that wait for one attempt."""
        for token, (awaited, _) in list(self._waits.items()):
            if attempt in ("", awaited):
                del self._waits[token]
                yield m.Fail(token=token, error=error)

    def ended(self, event: m.DrainEnded) -> Iterator[m.Effect]:
        """Note the end of one upload."""
        if event.is_damage:
            self._maintenance.suspect(event.attempt, {event.node_id})
        if event.items:
            yield from self._items.ended(event)
            return
        self._drains.ended(event)
        if event.error is not None:
            self._context.measure(telemetry.FAILURES, cause="drain")
            yield from self._context.warn_once(
                f"Step {event.attempt.step}: draining fragment {event.node_index}: {event.error}"
            )
        yield from self.assign()

    def described(self, event: m.DescriptionWritten) -> Iterator[m.Effect]:
        """Promote a checkpoint that is complete on the storage path; give up its drain if it is damaged.

        If the drain may have shared files there, it begins anew without them, and their origin is read while
        the run goes on.
        """
        context, attempt = self._context, event.attempt.attempt
        if event.exported is not None:
            yield from self._items.described(event, event.exported)
            return
        checkpoint = context.history.checkpoints[attempt]
        origin = self._drains.start_unshared(attempt) if event.is_damage else None
        if origin is not None:
            if not self._finishing:  # else no round reads it before the nodes are emptied
                self._maintenance.suspect_stored(context.history.checkpoints[origin.attempt])
            yield from context.warn_once(
                f"Step {event.attempt.step} is damaged on the storage path. It is uploaded again without "
                f"files of step {origin.step}: {event.error}"
            )
            yield from self.assign()
            return
        uploaded = self._drains.described(event)
        if event.is_damage:
            yield from self._failed(event.attempt, str(event.error))
        elif event.error is not None:
            yield from context.warn_once(f"Step {event.attempt.step}: describing it: {event.error}")
        else:
            self._maintenance.uploaded(checkpoint, uploaded)
            if checkpoint.state == "live" and checkpoint.level < Level.DURABLE:
                op = r.Promote(
                    attempt=attempt,
                    level=Level.DURABLE,
                    replicas=checkpoint.replicas,
                    parity=checkpoint.parity or None,
                )
                context.ledger.append(op)

    def _failed(self, attempt: AttemptId, reason: str) -> Iterator[m.Effect]:
        """Warn of a drain that was given up; fail the callers that wait for this drain."""
        error = Unavailable(f"Step {attempt.step} did not reach the storage path: {reason}")
        yield from self._context.warn_once(str(error))
        yield from self.fail(error, attempt.attempt)
        if self._finishing:
            self._refused[attempt.attempt] = error
