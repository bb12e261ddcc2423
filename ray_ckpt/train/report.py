"""Report checkpoints to Ray Train, so that `Result.checkpoint` and its resume see them.

Ray Train gets a pointer (`pointers.py`); our catalog is authoritative, and Ray's list is a hint.
`ray.train.report` is a barrier that takes up to two seconds, so it is called about once a minute, at a step
on which all ranks agree: rank 0 sends this step in the barrier of the previous report. The step of a report
is not the step of a save, because a rank may miss an agreed save.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import pyarrow.fs
import ray.train
import ray.train.collective

from ray_ckpt.actors.messages import RunSpec
from ray_ckpt.errors import NewerFormat
from ray_ckpt.train.pointers import MAX_POINTER_BYTES, POINTER_FILE, Pointer
from ray_ckpt.types import AttemptId

log = logging.getLogger("ray_ckpt")

REPORT_EVERY_S = 60.0  # seconds between reports, because a report is a barrier of all ranks
FIRST_STEPS = 10  # from the first report to the second: the pace is unknown at the first
WRITE_TIMEOUT_S = 30.0  # if a store takes longer, this report is skipped


class PointerReporter:
    """Reports committed checkpoints to Ray Train from the training thread of every rank.

    With `validates`, Ray Train passes each checkpoint to the validation function of the trainer.
    """

    def __init__(self, spec: RunSpec, *, validates: bool = False) -> None:
        self._spec = spec
        self._validates = validates
        self._last: tuple[float, int] | None = None  # monotonic time and step of the last report
        self._reported: AttemptId | None = None

    def report(self, newest: tuple[AttemptId, Mapping[str, float]] | None, step: int) -> int:
        """Report as defined in `link.Reporter`. This call is a barrier of all ranks."""
        fresh = None
        if (
            ray.train.get_context().get_world_rank() == 0
            and newest is not None
            and newest[0] != self._reported
        ):
            fresh = newest if self._write_pointer(newest[0]) else None
        message = (fresh, step + self._steps_per_report(step))
        fresh, next_step = ray.train.collective.broadcast_from_rank_zero(message)
        if fresh is not None:
            self._report(*fresh)
            self._reported = fresh[0]
        return int(next_step)

    def _pointer(self, attempt: AttemptId) -> Pointer:
        return Pointer(
            attempt=attempt, run=self._spec.key, storage_options=self._spec.options.storage_options or {}
        )

    def _write_pointer(self, attempt: AttemptId) -> bool:
        """Write the pointer before the barrier, in bounded time: an error inside `report` would end the run.

        Return False if the pointer could not be written or exists already. A restored checkpoint that was
        reported before must not be reported again, because Ray deletes pointers by number, and a missing
        directory ends the run.
        """
        pointer, storage = self._pointer(attempt), ray.train.get_context().get_storage()
        future: Future[bool] = Future()

        def write() -> None:
            try:
                future.set_result(_write(storage, pointer))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=write, name="ray_ckpt-pointer", daemon=True).start()
        try:
            return future.result(WRITE_TIMEOUT_S)
        except Exception as error:
            reason = str(error) or "time is up"
            log.warning("step %d is not reported to Ray Train: %s", attempt.step, reason)
            return False

    def _steps_per_report(self, step: int) -> int:
        """Return the number of steps that take about REPORT_EVERY_S at the pace since the last report."""
        last, self._last = self._last, (time.monotonic(), step)
        if last is None:
            return FIRST_STEPS
        pace_s = (self._last[0] - last[0]) / max(step - last[1], 1)
        return max(1, round(REPORT_EVERY_S / max(pace_s, 1e-3)))

    def _report(self, attempt: AttemptId, metrics: Mapping[str, float]) -> None:
        context = ray.train.get_context()
        checkpoint = None
        if context.get_world_rank() == 0:  # the other ranks only join the barrier
            storage = context.get_storage()
            checkpoint = ray.train.Checkpoint(
                storage.experiment_fs_path, filesystem=storage.storage_filesystem
            )
        ray.train.report(
            {"step": attempt.step, **metrics},
            checkpoint=checkpoint,
            checkpoint_dir_name=self._pointer(attempt).directory,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.SYNC,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=_use_pointer,
            validation=self._validates and checkpoint is not None,
        )


def _write(storage: Any, pointer: Pointer) -> bool:
    """Write the pointer; return False if a complete pointer exists already."""
    files = storage.storage_filesystem
    folder = storage.build_checkpoint_path_from_name(pointer.directory)
    path = f"{folder}/{POINTER_FILE}"
    if _is_written(files, path):
        return False
    files.create_dir(folder, recursive=True)
    with files.open_output_stream(path) as stream:
        stream.write(pointer.encode())
    return True


def _is_written(files: pyarrow.fs.FileSystem, path: str) -> bool:
    """Return whether a complete pointer exists: a part of one, left by a crash, was never reported."""
    kind = files.get_file_info(path).type
    if kind != pyarrow.fs.FileType.File:
        return bool(kind != pyarrow.fs.FileType.NotFound)
    with files.open_input_stream(path) as stream:
        data = stream.read(MAX_POINTER_BYTES)
    try:
        Pointer.decode(data, files.type_name)
    except NewerFormat:
        return True
    except (ValueError, RecursionError):
        return False
    return True


def _use_pointer(checkpoint: Any, checkpoint_dir_name: str) -> Any:
    """Return the pointer that was written before, instead of an upload."""
    storage = ray.train.get_context().get_storage()
    path = storage.build_checkpoint_path_from_name(checkpoint_dir_name)
    return ray.train.Checkpoint(path, filesystem=storage.storage_filesystem)
