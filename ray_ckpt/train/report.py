"""Pointers: what Ray Train is told of our checkpoints, so that `Result.checkpoint` and its resume see them.

A pointer is a small directory in the run's folder with `pointer.json`; our catalog leads, Ray's is a hint.
`ray.train.report` is a barrier that takes up to two seconds, so it is called about once a minute. All
ranks must agree on when: at a save that rank 0 named at the last report, in that same barrier.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import ray.train
import ray.train.collective

from ray_ckpt.types import AttemptId

log = logging.getLogger("ray_ckpt")

REPORT_EVERY_S = 60.0
WRITE_TIMEOUT_S = 30.0  # a store that takes longer gets no pointer this time
POINTER_FILE = "pointer.json"


class PointerReporter:
    """Reports committed checkpoints to Ray Train from the training thread of every rank."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self._last_calls = 0
        self._reported: AttemptId | None = None

    def report(self, newest: tuple[AttemptId, Mapping[str, float]] | None, save_calls: int) -> int:
        """See `link.Reporter`. A barrier of all ranks."""
        fresh = None
        if (
            ray.train.get_context().get_world_rank() == 0
            and newest is not None
            and newest[0] != self._reported
        ):
            fresh = newest if self._write_pointer(newest[0]) else None
        message = (fresh, save_calls + self._saves_per_report(save_calls))
        fresh, next_calls = ray.train.collective.broadcast_from_rank_zero(message)
        if fresh is not None:
            self._report(*fresh)
            self._reported = fresh[0]
        return int(next_calls)

    def _write_pointer(self, attempt: AttemptId) -> bool:
        """Written before the barrier and within a bound: an error inside `report` would end the run."""
        storage = ray.train.get_context().get_storage()
        future: Future[None] = Future()

        def write() -> None:
            try:
                _write_pointer(storage, attempt)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=write, name="ray_ckpt-pointer", daemon=True).start()
        try:
            future.result(WRITE_TIMEOUT_S)
        except Exception as error:
            log.warning("step %d is not reported to Ray Train: %s", attempt.step, error or "time is up")
            return False
        return True

    def _saves_per_report(self, save_calls: int) -> int:
        """How many saves take about REPORT_EVERY_S at the pace since the last report."""
        now_s = time.monotonic()
        pace_s = (now_s - self._last_s) / max(save_calls - self._last_calls, 1)
        self._last_s, self._last_calls = now_s, save_calls
        return max(1, round(REPORT_EVERY_S / max(pace_s, 1e-3)))

    def _report(self, attempt: AttemptId, metrics: Mapping[str, float]) -> None:
        context = ray.train.get_context()
        checkpoint = None
        if context.get_world_rank() == 0:  # ranks without a checkpoint just join the barrier
            storage = context.get_storage()
            checkpoint = ray.train.Checkpoint(
                storage.experiment_fs_path, filesystem=storage.storage_filesystem
            )
        ray.train.report(
            {"step": attempt.step, **metrics},
            checkpoint=checkpoint,
            checkpoint_dir_name=_pointer_name(attempt),
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.SYNC,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=_use_pointer,
        )


def _pointer_name(attempt: AttemptId) -> str:
    return f"ray_ckpt_{attempt.directory}"


def _write_pointer(storage: Any, attempt: AttemptId) -> None:
    path = storage.build_checkpoint_path_from_name(_pointer_name(attempt))
    pointer = {
        "ray_ckpt": 1,
        "run": storage.experiment_fs_path,
        "run_uid": attempt.run_uid,
        "step": attempt.step,
        "session": attempt.session,
        "attempt": attempt.attempt,
    }
    storage.storage_filesystem.create_dir(path, recursive=True)
    with storage.storage_filesystem.open_output_stream(f"{path}/{POINTER_FILE}") as stream:
        stream.write(json.dumps(pointer, indent=1).encode())


def _use_pointer(checkpoint: Any, checkpoint_dir_name: str) -> Any:
    """Instead of an upload: the pointer is there already."""
    storage = ray.train.get_context().get_storage()
    path = storage.build_checkpoint_path_from_name(checkpoint_dir_name)
    return ray.train.Checkpoint(path, filesystem=storage.storage_filesystem)
