"""Pointers, which Ray Train keeps in place of our checkpoints, and a function to open a pointer.

A pointer is a small directory with `pointer.json` in Ray Train's folder of the run. Ray counts, scores and
deletes pointers; only our retention deletes checkpoints. So a pointer may exist longer than its checkpoint;
opening such a pointer raises an error that lists the steps of the remaining checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.train
from pyarrow.fs import FileType

from ray_ckpt.actors import names
from ray_ckpt.actors.client import CALL_S, get_result
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.catalog.load import OpenedCheckpoint, OpenedRun
from ray_ckpt.errors import CheckpointError, ConfigError, NewerFormat
from ray_ckpt.format import jsontext
from ray_ckpt.location import BUCKETS, Location
from ray_ckpt.types import AttemptId, Level

log = logging.getLogger("ray_ckpt")

POINTER_FILE = "pointer.json"
VERSION = 2  # version 1 has the run as a path without a scheme
MAX_POINTER_BYTES = 64 << 10  # a pointer has some hundred bytes
_WHAT = "The pointer"
_FIELDS = frozenset(("ray_ckpt", "run", "storage_options", "run_uid", "step", "session", "attempt"))
CHECK_S = 1.0  # between two readings of the log while waiting for a checkpoint
_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}  # for version 1, by the kind of the file system


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """A checkpoint and the location of its run."""

    attempt: AttemptId
    run: str
    """<storage_path>/<run name>, as `ray_ckpt.open` takes it."""
    storage_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        """The unique name of the pointer's directory."""
        return f"ray_ckpt_{self.attempt.directory}"

    def encode(self) -> bytes:
        """Return `pointer.json`. Storage options are included only for buckets, where they are not secret."""
        is_bucket = Location.parse(self.run).scheme in BUCKETS
        document = {
            "ray_ckpt": VERSION,
            "run": self.run,
            "storage_options": dict(self.storage_options) if is_bucket else {},
            "run_uid": self.attempt.run_uid,
            "step": self.attempt.step,
            "session": self.attempt.session,
            "attempt": self.attempt.attempt,
        }
        return jsontext.dumps_sealed(document, what=_WHAT, max_bytes=MAX_POINTER_BYTES, indent=1)

    @classmethod
    def decode(cls, data: bytes, file_system: str = "local") -> Pointer:
        """Read `pointer.json`. Raises ValueError, NewerFormat. `file_system` is the name of its kind."""
        document = jsontext.loads(data, what=_WHAT, max_bytes=MAX_POINTER_BYTES, final_newline=False)
        version = document.get("ray_ckpt") if isinstance(document, dict) else None
        if type(version) is not int or version < 1:
            raise ValueError("it has no version")
        if version > VERSION:
            found = f"it is of version {version}, and this one reads up to {VERSION}"
            raise jsontext.newer("A pointer", found)
        document = jsontext.loads_if_sealed(
            data, what=_WHAT, max_bytes=MAX_POINTER_BYTES, known=_FIELDS, indent=1, final_newline=False
        )
        run, options = _need(document, "run", str), document.get("storage_options", {})
        if document["ray_ckpt"] == 1:
            if file_system not in _SCHEMES:
                raise ValueError(f"it does not name the file system of {run}")
            run = _SCHEMES[file_system] + run
        if not isinstance(options, dict) or not all(isinstance(value, str) for value in options.values()):
            raise ValueError("its storage_options are not strings")
        attempt = AttemptId(
            run_uid=_need(document, "run_uid", str),
            session=_need(document, "session", int),
            step=_need(document, "step", int),
            attempt=_need(document, "attempt", str),
        )
        return cls(attempt=attempt, run=run, storage_options=options)


def open_checkpoint(
    checkpoint: ray.train.Checkpoint,
    storage_options: Mapping[str, str] | None = None,
    *,
    wait_s: float = 0.0,
) -> OpenedCheckpoint:
    """Open the checkpoint of a pointer from Ray Train, to load from it; needs no cluster.

    `checkpoint` is `Result.checkpoint`, one of `Result.best_checkpoints`, the result of
    `ray.train.get_checkpoint()`, or the argument of a validation function. `storage_options` replaces the
    storage options of the run. The checkpoint must be durable; this function waits for that up to `wait_s`
    seconds. In the cluster that holds the checkpoint, it requests that the service copies the checkpoint to
    the storage path.

    Ray's `num_to_keep` keeps pointers, and our retention keeps checkpoints. To be able to open every pointer
    that Ray keeps after the cluster is gone, set `remote_every=1`, and set `keep_last` or `keep_best` to at
    least `num_to_keep`.

        def validate(checkpoint):  # a separate task, parallel to the training
            model = GPT()
            open_checkpoint(checkpoint, wait_s=600).load(into={"model": model})
            return {"validation_loss": evaluate(model)}

        TorchTrainer(
            train_loop,
            validation_config=ray.train.ValidationConfig(fn=validate),
            run_config=ray.train.RunConfig(callbacks=[CheckpointCallback()], ...),
            ...
        )

    Raises ConfigError if `checkpoint` is not a pointer of ray_ckpt, or if its checkpoint is retired, lost, or
    not durable (the message lists durable steps); NewerFormat if a newer ray_ckpt wrote the pointer; and the
    errors of `Catalog`.
    """
    pointer = _read_pointer(checkpoint)
    catalog = Catalog(pointer.run, pointer.storage_options if storage_options is None else storage_options)
    if catalog.run_uid != pointer.attempt.run_uid:
        raise ConfigError(
            f"{checkpoint.path} points to an earlier run than the one that is at {pointer.run} now.",
            hint="Its checkpoints went with that run's folder.",
            path=checkpoint.path,
        )
    if wait_s > 0 and _is_to_come(catalog, pointer.attempt):
        _request_drain(pointer)
    deadline_s = time.monotonic() + wait_s
    while _is_to_come(catalog, pointer.attempt) and (left_s := deadline_s - time.monotonic()) > 0:
        time.sleep(min(CHECK_S, left_s))
        catalog.refresh()
    return OpenedRun(catalog).at(pointer.attempt)


def _request_drain(pointer: Pointer) -> None:
    """Request the drain from the service of this cluster, if any; without a request it may never be due."""
    if not ray.is_initialized():
        return
    try:
        service = ray.get_actor(names.COORDINATOR, namespace=names.NAMESPACE)
        get_result(service.drain.remote(pointer.run, pointer.attempt.attempt), CALL_S)
    except (
        ValueError,
        CheckpointError,
    ) as error:  # no service, another run, or a retired checkpoint
        log.info("step %d is not brought to the storage path for this: %s", pointer.attempt.step, error)


def _is_to_come(catalog: Catalog, attempt: AttemptId) -> bool:
    """Return True if the attempt is live and not on the storage path yet."""
    return any(c.id.attempt == attempt.attempt and c.level < Level.DURABLE for c in catalog.checkpoints)


def _read_pointer(checkpoint: ray.train.Checkpoint) -> Pointer:
    path = f"{checkpoint.path}/{POINTER_FILE}"
    try:
        if checkpoint.filesystem.get_file_info(path).type not in (FileType.File, FileType.NotFound):
            raise ValueError(f"{POINTER_FILE} is not a file")  # reading a named pipe would block
        with checkpoint.filesystem.open_input_stream(path) as stream:
            data = stream.read(MAX_POINTER_BYTES)
        return Pointer.decode(data, checkpoint.filesystem.type_name)
    except NewerFormat as error:
        raise error.at(path) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{checkpoint.path} is not a pointer of ray_ckpt: {error}",
            hint="Give a checkpoint that Ray Train has from a run with CheckpointCallback; open others "
            "with the library that wrote them, and a run of ray_ckpt by its path with ray_ckpt.open.",
            path=checkpoint.path,
        ) from None


def _need(document: Mapping[str, Any], name: str, kind: type) -> Any:
    value = document.get(name)
    if type(value) is not kind:
        raise ValueError(f"its {name} is not of type {kind.__name__}")
    return value
