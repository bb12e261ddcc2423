"""Recovery drills of a run that a service has open: what there is to read, and where the results go."""

from __future__ import annotations

from typing import Any

from ray_ckpt.actors.attach import find_service
from ray_ckpt.actors.service import CALL_S, ask
from ray_ckpt.actors.wire import DrillSources
from ray_ckpt.core.drill import LiveCheckpoint, Scenario
from ray_ckpt.drill import CheckpointDrill, DrillReport, Progress, Reach, choose, drill
from ray_ckpt.errors import CheckpointError, ConfigError, Unavailable

MAX_TEXT = 2000  # characters of a result in the log: some problems; the report has more


class RunDrills:
    """A run of the service of this process's cluster; `key` is `<storage_path>/<run>`.

    ConfigError if the cluster has no service, Unavailable if that has not opened the run.
    """

    def __init__(self, key: str) -> None:
        self._service: Any = find_service()
        if self._service is None:
            raise ConfigError(
                "This cluster has no checkpoint service.",
                hint="It starts with the training. Without one, only --remote-only has something to read.",
            )
        self._key = key
        self.sources = self._ask()
        self.unrecorded: list[str] = []  # results that did not come into the log, and why
        self._is_silent = False

    def drill(
        self, scenario: Scenario, *, step: int | None = None, progress: Progress | None = None
    ) -> DrillReport:
        """Rehearse a loss for all live checkpoints, or those of one step, and note the results in the log."""
        return drill(
            choose(self.sources.live, step),
            scenario,
            _reach(self.sources),
            last_step=self.sources.last_step,
            again=self._again,
            record=lambda result: self._record(scenario, result),
            progress=progress,
        )

    def _ask(self) -> DrillSources:
        sources: DrillSources = ask(self._service.drill_sources.remote(self._key), CALL_S)
        return sources

    def _again(self, known: LiveCheckpoint) -> tuple[LiveCheckpoint, Reach] | None:
        try:
            sources = self._ask()
        except CheckpointError:  # what was found stands, if nobody can say more
            return known, _reach(self.sources)
        found = (c for c in sources.live if c.checkpoint.id == known.checkpoint.id)
        return next(((c, _reach(sources)) for c in found), None)

    def _record(self, scenario: Scenario, result: CheckpointDrill) -> None:
        """Once the log does not answer, nothing more is told to it: each would wait as long."""
        if self._is_silent:
            return
        call = self._service.drilled.remote(
            self._key,
            result.checkpoint.id.attempt,
            scenario.name,
            result.verdict == "passed",
            result.seconds,
            result.read_bytes,
            "; ".join(result.problems or result.notes)[:MAX_TEXT],
        )
        try:
            ask(call, CALL_S)
        except CheckpointError as error:  # such as a log that does not answer: what was read counts
            self._is_silent = isinstance(error, Unavailable)
            self.unrecorded.append(f"step {result.checkpoint.step}: {error}")


def _reach(sources: DrillSources) -> Reach:
    return Reach(endpoints=sources.endpoints, credentials=sources.credentials, remote=sources.storage.open())
