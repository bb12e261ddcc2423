"""Open runs: read a run's log, claim it with the epoch of this coordinator, and open the run on all nodes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from ray_ckpt.actors.coordinator.agents import first_answers
from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.ports import STORE_TIMEOUT_S
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.messages import RunSpec
from ray_ckpt.actors.threads import BriefThreads
from ray_ckpt.core import messages as m
from ray_ckpt.core.ownership import RunMark, check_log
from ray_ckpt.core.values import SessionPlan
from ray_ckpt.engine.ports import GroupFound, LogAwaited, OwnerChecked, RunOpened
from ray_ckpt.errors import Fenced, RunConflict, StoragePathError, Unavailable
from ray_ckpt.format.names import LOG_DIR, record_file
from ray_ckpt.format.records import Session
from ray_ckpt.storage.log_store import read_run
from ray_ckpt.storage.remote.tier import RemoteTier

OPEN_LOG_TRIES = 3  # a late record of a dead coordinator may take the place of the claim


class RunOpener:
    """Opener of runs; `on_open()` is called each time that a run is opened."""

    def __init__(self, engine: Engine, on_open: Callable[[], None]) -> None:
        self._engine = engine
        self._on_open = on_open

    async def reach(self, key: str) -> Run:
        """Return the run; if it was put away, or is about to be, open it again for a while."""
        runs = self._engine.runs
        run, past = runs.open.get(key), runs.past.get(key)
        closing = run if run is not None and run.machine.is_closing else None
        if closing is not None or (run is None and past is not None):
            spec = (closing or past).spec  # type: ignore[union-attr]
            runs.check_not_ending()
            with runs.in_use(spec.name):
                await self.open(spec, owner=None)
        return runs.get(key)

    async def open(
        self, spec: RunSpec, *, owner: str | None, is_wanted: bool = True, found: SessionPlan | None = None
    ) -> str:
        """Open a run on all live nodes, and return its uid; `found` is the plan of a group at work.

        `is_wanted` means that a caller waits for the run, so a finished run is not put away at once. The
        options of `spec` apply if the run was not open, or if the launcher `owner` may own it. Then this
        waits for all nodes, unless the group is at work, or goes on when they have answered.
        """
        engine = self._engine
        async with engine.runs.turn(spec.key):
            run = engine.runs.open.get(spec.key)
            self._on_open()
            if run is not None and is_wanted:
                run.host.handle(m.RunWanted())
            is_new = run is None or not run.machine.is_open or run.machine.is_closing
            is_new = is_new or (run is not None and await self._is_overtaken(run))
            if run is None or is_new:
                run = await self._open_log(spec, owner, is_wanted, found)
            elif owner is not None:
                await self._use(run, spec, owner)
            elif found is not None:
                run.host.handle(GroupFound(plan=found))
            if found is None or not (run.host.is_recovering or run.machine.view.has_group):
                await engine.request(run, lambda token: RunOpened(token=token, checks_storage=is_new))
            return run.run_uid

    async def _use(self, run: Run, spec: RunSpec, owner: str) -> None:
        """Use the options with which a launcher opens an open run, unless another one that lives has it."""
        engine = self._engine
        await engine.request(run, lambda token: OwnerChecked(token=token, owner=owner))
        if run.spec.storage != spec.storage:
            await BriefThreads(1, "ray_ckpt-check").run(_check_same_log, run, spec)  # the run's may hang
            run.remote = spec.storage.open()
        run.spec, run.machine.options = spec, spec.options

    async def _is_overtaken(self, run: Run) -> bool:
        """Return whether a rollback, or another cluster, has written to the log of an idle run."""
        if not run.machine.view.is_idle:
            return False
        name = record_file(run.machine.history.next_seq)
        try:
            found = await asyncio.wait_for(run.log_threads.run(run.store.read, name), STORE_TIMEOUT_S)
        except (OSError, TimeoutError):
            return False
        return found is not None and run.machine.view.is_idle

    async def _open_log(
        self, spec: RunSpec, owner: str | None, is_wanted: bool, found: SessionPlan | None
    ) -> Run:
        """Read the run's log to its end; append this coordinator's epoch if it may own the run."""
        engine = self._engine
        marks, error = await self._read_marks(spec, is_at_work=found is not None)
        for _ in range(OPEN_LOG_TRIES):
            run = engine.new_run(spec)
            if owner is None:  # it was open before, so it has a log
                await run.log_threads.run(_check_mounted, run.remote)
            await run.log_threads.run(run.remote.probe_log)
            history, records = await run.log_threads.run(read_run, run.store)
            event = m.LogOpened(
                records=records, history=history, run_name=spec.name, fresh_uid=uuid.uuid4().hex
            )
            if error is not None and not _has_begun(event):
                raise error
            service, resume = engine.agents.service, spec.options.resume
            check_log(event, service=service, owner=owner, marks=marks, resume=resume)
            # Only after these checks, since the new nonce replaces that of an earlier coordinator.
            await run.log_threads.run(run.remote.leave_nonce, run.nonce)
            engine.runs.open[spec.key] = run
            run.host.handle(event)
            if found is not None:  # at once, so that no call of the group finds a run without a group
                run.host.handle(GroupFound(plan=found))
            if is_wanted:
                run.host.handle(m.RunWanted())
            try:
                opened = engine.request(run, lambda token: LogAwaited(token=token))
                await asyncio.wait_for(opened, 2 * STORE_TIMEOUT_S)
            except Fenced:
                continue
            except TimeoutError:
                del engine.runs.open[spec.key]
                break
            engine.runs.past.pop(spec.key, None)
            return run
        raise Unavailable(
            f"The log of run {spec.name} at {run.remote.where} does not take records.",
            hint="Check that the storage path is healthy and that no other cluster runs it, then try again.",
        )

    async def _read_marks(
        self, spec: RunSpec, *, is_at_work: bool
    ) -> tuple[tuple[RunMark, ...], Exception | None]:
        """Return the marks of runs of this name on the nodes' disks, and the error of a node, if any had one.

        While a group is at work, nodes that do not answer soon are left out.
        """
        agents = self._engine.agents
        calls = [
            asyncio.ensure_future(agents.request(node, "read_marks", spec))
            for node in await agents.live_nodes()
        ]
        done = await first_answers(calls, lambda answers: is_at_work and any(answers))
        for late in set(calls) - done:
            late.cancel()
        errors = [error for call in done if isinstance(error := call.exception(), Exception)]
        marks = tuple(mark for call in done if call.exception() is None for mark in call.result() or ())
        return marks, errors[0] if errors else None


def _has_begun(event: m.LogOpened) -> bool:
    """Return whether the run has had a group. Later groups do without a node that has an error."""
    in_snapshot = event.history is not None and event.history.session is not None
    return in_snapshot or any(isinstance(record.op, Session) for record, _ in event.records)


def _check_mounted(tier: RemoteTier) -> None:
    """Raise StoragePathError if the folder of a log that was there is not: `probe_log` would make a new one.

    That would be below the mount point of a storage path that is not mounted, and hidden by it later.
    """
    if tier.root.is_posix and not (tier.root.folder / LOG_DIR).is_dir():
        raise StoragePathError(tier.missing(), path=tier.where)


def _check_same_log(run: Run, spec: RunSpec) -> None:
    """Raise RunConflict unless the log of this run is where the new storage options lead."""
    tier = spec.storage.open()
    tier.probe_log()
    history, records = read_run(tier.log)
    for record, record_digest in records:
        history.apply(record, record_digest)
    known = run.machine.history
    if (history.run_uid, history.next_seq >= known.next_seq) != (known.run_uid, True):
        raise RunConflict(
            f"With its new storage_options run {spec.name} is not at {tier.where}, where its log has been.",
            hint="Give the options with which the run was begun, or another run name.",
        )
    tier.leave_nonce(run.nonce)
