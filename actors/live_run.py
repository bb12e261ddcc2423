"""Read the copies that the nodes of a live run hold, and run recovery drills on these copies."""

from __future__ import annotations

from typing import Any

import ray

from ray_ckpt.actors import ray_cluster
from ray_ckpt.actors.attach import find_service
from ray_ckpt.actors.client import CALL_S, get_result
from ray_ckpt.actors.messages import DrillSources
from ray_ckpt.core.loss_scenarios import LiveCheckpoint, Scenario
from ray_ckpt.errors import CheckpointError, ConfigError, Unavailable
from ray_ckpt.format.records import Drilled
from ray_ckpt.transport.sending import Limiter
from ray_ckpt.types import ProgressCallback
from ray_ckpt.verify.drill import CheckpointDrill, DrillReport, drill
from ray_ckpt.verify.live_manifest import ReadAccess

MAX_TEXT = 2000  # characters of a result in the log, for the first problems; the report lists more


class LiveRun:
    """A run that is open in the service of this process's cluster; `key` is `<storage_path>/<run>`.

    All streams together read files at no more than `max_bytes_per_s`; None means no limit.
    ConfigError if there is no cluster or no service in it, Unavailable if the service has not opened the run.
    """

    def __init__(self, key: str, *, max_bytes_per_s: float | None = None) -> None:
        if not ray.is_initialized() and ray_cluster.find_cluster() is None:  # Ray would start one
            raise ConfigError(
                "There is no Ray cluster on this machine.",
                hint="Call ray.init(address=...) with the address of the run's cluster.",
            )
        self._service: Any = find_service()
        if self._service is None:
            raise ConfigError(
                "This cluster has no checkpoint service.",
                hint="It starts with the training. Without one, only the storage path can be read.",
            )
        self._key = key
        self._limiter = Limiter(max_bytes_per_s)
        self.sources = self._read_sources()

    @property
    def reach(self) -> ReadAccess:
        return self._reach_of(self.sources)

    def again(self, known: LiveCheckpoint) -> tuple[LiveCheckpoint, ReadAccess] | None:
        """Return the current state of a live checkpoint and access to its files; None once retired."""
        try:
            sources = self._read_sources()
        except CheckpointError:  # the last known state is still used
            return known, self.reach
        found = (c for c in sources.live if c.checkpoint.id == known.checkpoint.id)
        return next(((c, self._reach_of(sources)) for c in found), None)

    def _read_sources(self) -> DrillSources:
        sources: DrillSources = get_result(self._service.drill_sources.remote(self._key), CALL_S)
        return sources

    def _reach_of(self, sources: DrillSources) -> ReadAccess:
        return ReadAccess(
            endpoints=sources.endpoints,
            credentials=sources.credentials,
            remote=sources.storage.open(),
            limiter=self._limiter,
        )


class RunDrills(LiveRun):
    """A live run, with recovery drills."""

    def __init__(self, key: str, *, max_bytes_per_s: float | None = None) -> None:
        super().__init__(key, max_bytes_per_s=max_bytes_per_s)
        self.unrecorded: list[str] = []  # results that are not in the log, with the reasons
        self._is_silent = False

    def drill(
        self, scenario: Scenario, *, step: int | None = None, progress: ProgressCallback | None = None
    ) -> DrillReport:
        """Drill a loss for all live checkpoints, or for those of one step, and log the results."""
        return drill(
            self.sources.live,
            scenario,
            self.reach,
            step=step,
            last_step=self.sources.last_step or None,  # 0: no rank has reported a step
            retry=self.again,
            record=lambda result: self._record(scenario, result),
            progress=progress,
        )

    def _record(self, scenario: Scenario, result: CheckpointDrill) -> None:
        """Record a result, unless an earlier record got no answer: each further record would wait as long."""
        if self._is_silent:
            return
        drilled = Drilled(
            attempt=result.checkpoint.id.attempt,
            scenario=scenario.name,
            passed=result.verdict == "passed",
            seconds=result.seconds,
            read_bytes=result.read_bytes,
            text="; ".join(result.problems or result.notes)[:MAX_TEXT],
        )
        try:
            get_result(self._service.record_drill.remote(self._key, drilled), CALL_S)
        except CheckpointError as error:  # only the record fails; the drill has been done
            self._is_silent = isinstance(error, Unavailable)
            self.unrecorded.append(f"step {result.checkpoint.step}: {error}")
