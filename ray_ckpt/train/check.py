"""Run a training loop, resume it, and compare the two runs bit for bit.

Only registered items are compared. A difference in other state, such as an EMA that was not registered, is
not found unless a registered item depends on it; so the result includes the warnings of `ckpt.steps`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

from ray_ckpt.errors import ConfigError, ResumeError
from ray_ckpt.location import Location
from ray_ckpt.train.callback import CheckpointCallback
from ray_ckpt.trainer.probe import (
    Difference,
    ProbePart,
    ProbeSpec,
    compare,
    read_traces,
    resolve_chance,
)

MAX_BLOCK_S = 60.0  # wait of a save of the first run for the previous save, as no save may be skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeCheck:
    """The comparison of a resumed run with the original run; the truth value is False if they differ."""

    name: str
    """The run, below the storage path. Its checkpoints stay there, and the digests, in `folder`."""
    folder: Path
    at: int
    steps: int
    num_ranks: int
    num_states: int
    """Compared on each rank: at the checkpoint, before the next step, and after each step."""
    num_values: int
    """Tensors and other values in the last state of rank 0."""
    seconds: Mapping[ProbePart, float]
    """Duration of each run; there is a third one if chance or a missing item could be the cause."""
    difference: Difference | None
    warnings: tuple[str, ...] = ()
    """Logged at the start: objects that are not registered, so not compared; loaders iterated too early."""

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        warnings = "; ".join(self.warnings)
        if self.difference is not None:
            causes = f" Warnings of its start, which may be the cause: {warnings}." if warnings else ""
            return f"The resumed run is not the run that it resumes. {self.difference}{causes}"
        what = f"{self.num_values:,} tensors and values in {self.num_states} states of {self.num_ranks} ranks"
        text = f"The resumed run is the same bit for bit: {what}, steps {self.at} to {self.at + self.steps}."
        return f"{text} Not compared, for it is not registered: {warnings}." if warnings else text

    def raise_for_difference(self) -> None:
        """Raise ResumeError with the first difference and the likely cause if the runs differ."""
        if self.difference is not None:
            raise ResumeError(
                str(self),
                name=self.name,
                rank=self.difference.rank,
                step=self.difference.step,
                names=self.difference.names,
                cause=self.difference.cause,
            )


def check_resume(
    train_loop: Callable[[], Any] | Callable[[dict[str, Any]], Any],
    *,
    config: Mapping[str, Any] | None = None,
    scaling_config: ray.train.ScalingConfig,
    at: int,
    steps: int,
    storage_path: str | None = None,
    torch_config: TorchConfig | None = None,
    **options: Any,
) -> ResumeCheck:
    """Train `at` + `steps` steps with a save after step `at`, restore the save, train `steps` steps, compare.

    `train_loop` is a loop for TorchTrainer that uses a Checkpointer and runs at least `at` + `steps` steps
    (`ckpt.steps` ends after these steps). Each run has a new group of workers, so the check needs the time to
    start a trainer two or three times and to hash all state after each step, and disk space for the
    checkpoints. `storage_path` is a folder that all nodes share; the default is Ray Train's default.
    `options` are the options of CheckpointCallback except `resume` and `keep_last`; by default only step `at`
    and the last step are saved.

    Raises ConfigError for runs that cannot be compared, and the errors of TorchTrainer.fit, which wrap a
    ConfigError of a rank. A difference raises nothing: see `raise_for_difference`.
    """
    path = Location.parse(storage_path or ray.train.RunConfig().storage_path)
    _check(path, scaling_config, options)
    name = f"check-resume-{uuid.uuid4().hex[:12]}"
    folder = path.folder / name / "states"
    spec = ProbeSpec(folder=str(folder), at=at, last=at + steps, part="first")
    folder.mkdir(parents=True)
    options = {
        "every_steps": at + steps,
        "max_block_s": MAX_BLOCK_S,
        "ray_report": False,
        **options,
        "keep_last": steps + 2,  # so that step `at` is kept, whichever other steps are saved
    }
    seconds: dict[ProbePart, float] = {}

    def run(part: ProbePart) -> None:
        started_s = time.monotonic()
        callback = CheckpointCallback(
            probe=replace(spec, part=part), resume="never" if part == "first" else f"step:{at}", **options
        )
        TorchTrainer(
            train_loop,
            train_loop_config=None if config is None else dict(config),
            torch_config=torch_config,
            scaling_config=scaling_config,
            run_config=ray.train.RunConfig(name=name, storage_path=str(path), callbacks=[callback]),
        ).fit()
        seconds[part] = time.monotonic() - started_s

    difference = _compare_runs(folder, run)
    traces = read_traces(folder, "first")
    sizes = [len(noted.state) for noted in traces[0].states]
    return ResumeCheck(
        name=name,
        folder=folder,
        at=at,
        steps=steps,
        num_ranks=len(traces),
        num_states=len(sizes),
        num_values=sizes[-1],
        seconds=seconds,
        difference=difference,
        warnings=traces[0].warnings,
    )


def _compare_runs(folder: Path, run: Callable[[ProbePart], None]) -> Difference | None:
    """Run twice and compare; run a third time if the cause may be chance or a missing item."""
    run("first")
    run("second")
    difference = compare(read_traces(folder, "first"), read_traces(folder, "second"))
    if difference is not None and difference.may_be_chance:
        run("third")
        again = compare(read_traces(folder, "second"), read_traces(folder, "third"))
        difference = resolve_chance(difference, again)
    return difference


def _check(path: Location, scaling_config: ray.train.ScalingConfig, options: Mapping[str, Any]) -> None:
    if not path.is_posix:
        raise ConfigError(
            f"{path} is not a folder.",
            hint="Compare on a folder that all nodes share; the result does not depend on where "
            "checkpoints are stored.",
        )
    if not isinstance(scaling_config.num_workers, int):
        raise ConfigError(
            f"num_workers is {scaling_config.num_workers}.",
            hint="Choose one number of workers: runs of different sizes do not agree bit for bit.",
        )
    if "resume" in options or "probe" in options:
        raise ConfigError("check_resume chooses what is resumed.", hint="Leave out `resume`.")
