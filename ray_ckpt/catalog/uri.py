"""URIs of checkpoints of other runs, from which a run without checkpoints may start.

    s3://bucket/runs/gpt                                   the newest durable checkpoint of a run
    s3://bucket/runs/gpt@3000                              the checkpoint of step 3000
    <run>/ray_ckpt/checkpoints/000000003000-<attempt>      a checkpoint by its folder
    <run>/ray_ckpt_000000003000-<attempt>                  a checkpoint by Ray Train's pointer to it

When a group starts, the coordinator chooses the checkpoint once for all ranks. Each rank then reads its part
from the storage path of the other run.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ray_ckpt.catalog.load import OpenedCheckpoint, OpenedRun
from ray_ckpt.catalog.load import open as open_run
from ray_ckpt.catalog.runs import AT_STEP
from ray_ckpt.config import RunOptions, is_uri
from ray_ckpt.core.values import SessionKey
from ray_ckpt.errors import ConfigError
from ray_ckpt.format import names
from ray_ckpt.location import Location
from ray_ckpt.restore.reader import FileSource, RestoreTicket
from ray_ckpt.storage.remote.tier import RemoteRef
from ray_ckpt.types import AttemptId

POINTER_PREFIX = "ray_ckpt_"  # of the folders that Ray Train keeps for a run's checkpoints


def uri_of(run: str, step: int) -> str:
    """Return the URI of a step of the run with a URI: the step is behind the name, before URL parameters."""
    where = Location.parse(run)
    return str(where.parent / f"{where.name}@{step}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUri:
    """A parsed URI of a checkpoint. Without step and folder the URI means the run's newest durable one."""

    run: Location
    """<storage_path>/<run name>"""
    step: int | None = None
    directory: str | None = None

    @classmethod
    def parse(cls, text: str) -> CheckpointUri:
        """Parse a URI. Raise ConfigError if it is not the storage path of a run or contains a secret."""
        where = Location.parse(text)
        directory = where.name.removeprefix(POINTER_PREFIX)
        if names.is_directory_name(directory):
            run = where.parent
            if (run.name, run.parent.name) == (names.CHECKPOINTS_DIR, names.SERVICE_DIR):
                run = run.parent.parent
            return cls(run=run, step=int(directory.partition("-")[0]), directory=directory)
        if (found := AT_STEP.match(where.name)) is not None:
            return cls(run=where.parent / found[1], step=int(found[2]))
        return cls(run=where.parent if where.name == names.SERVICE_DIR else where)

    def open(
        self, storage_options: Mapping[str, str] | None, *, items: Collection[str] = ()
    ) -> OpenedCheckpoint:
        """Open the checkpoint. Raise ConfigError if it is not durable, StoragePathError or FormatError.

        If `items` are all that is wanted, it need not be durable: they may have been uploaded alone.
        """
        run = open_run(self.run, storage_options)
        if self.directory is not None:
            return run.at(_attempt_of(run, self), items)
        opened = run.choose(self.step, items)
        return opened if items else run.at(opened.info.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The checkpoint of another run that was chosen for all ranks of a group to start from."""

    uri: str
    storage: RemoteRef
    attempt: AttemptId

    def ticket(self, session_key: SessionKey) -> RestoreTicket:
        """Return a ticket for a rank to read the checkpoint. Raise the errors of `CheckpointUri.open`."""
        run = open_run(
            Location.parse(self.storage.storage_path) / self.storage.run_name, dict(self.storage.options)
        )
        opened = run.at(self.attempt)
        rows = run.catalog.view(opened.info).columns()
        source = (FileSource(tier="remote", where=self.uri),)
        return RestoreTicket(
            session_key=session_key,
            checkpoint=opened.info,
            manifest=rows,
            sources=dict.fromkeys(rows.files(), source),
            storage=self.storage,
        )


def find_origin(options: RunOptions, storage: RemoteRef) -> Origin | None:
    """Return the checkpoint of another run from which a run without checkpoints starts, or None.

    The options of the storage path apply if both runs are in the same kind of store. Raise the errors of
    `CheckpointUri.open`.
    """
    text = options.resume if is_uri(options.resume) else options.init_from
    if text is None:
        return None
    uri = CheckpointUri.parse(text)
    is_same_kind = Location.parse(storage.storage_path).scheme == uri.run.scheme
    storage_options = storage.options if is_same_kind else ()
    opened = uri.open(dict(storage_options))
    return Origin(
        uri=text,
        storage=RemoteRef(storage_path=str(uri.run.parent), run_name=uri.run.name, options=storage_options),
        attempt=opened.info.id,
    )


def own_resume(resume: str, run: Location, storage_options: Mapping[str, str] | None = None) -> str:
    """Return `resume`; replace a URI of the same run by "must" or "step:<n>".

    A step means the checkpoint on the lineage. Therefore, if the URI is the folder of a checkpoint, raise
    ConfigError if that one is not on the lineage, and the errors of `Catalog`.
    """
    if not is_uri(resume):
        return resume
    uri = CheckpointUri.parse(resume)
    if not _is_same(uri.run, run, (storage_options or {}).get("endpoint_url")):
        return resume
    if uri.directory is not None:
        _check_lineage(open_run(run, storage_options), uri)
    return "must" if uri.step is None else f"step:{uri.step}"


def _is_same(named: Location, run: Location, endpoint: str | None) -> bool:
    """Return whether two locations are one.

    `endpoint` is the run's if its path names none, and that of a `named` location without one. A region that
    only one of them names is ignored.
    """
    if named.scheme != run.scheme or named.name != run.name:  # a path of a file system that hangs waits
        return False
    is_path = named.path == run.path
    if named.is_posix:
        return is_path or os.path.realpath(named.path) == os.path.realpath(run.path)
    return is_path and named.endpoint in (None, run.endpoint or endpoint)


def _check_lineage(run: OpenedRun, uri: CheckpointUri) -> None:
    """Raise ConfigError unless the folder `uri.directory` has the lineage's checkpoint of its step."""
    on_lineage = [info for info in run.catalog.lineage if info.step == uri.step]
    if any(info.directory == uri.directory for info in on_lineage):
        return
    _attempt_of(run, uri)
    hint = f"`ray-ckpt rollback {uri.run} --to {uri.step}` goes back to it."
    if on_lineage:
        hint = f"resume='step:{uri.step}' goes back to {on_lineage[-1].directory}, which is on the lineage; "
        hint += "a run with another name can start from the other one."
    raise ConfigError(f"{uri.directory} is not on the lineage of its run.", hint=hint, step=uri.step)


def _attempt_of(run: OpenedRun, uri: CheckpointUri) -> AttemptId:
    for info in run.catalog.list(all=True):
        if info.directory == uri.directory:
            return info.id
    raise ConfigError(
        f"Run {run.catalog.run_name} has no checkpoint {uri.directory}.",
        hint=f"`ray-ckpt ls {uri.run}` lists its checkpoints.",
        step=uri.step,
    )
