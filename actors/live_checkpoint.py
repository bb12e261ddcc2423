"""Opens a checkpoint from the nodes that hold it, before it is on the storage path."""

from __future__ import annotations

from collections.abc import Mapping

from ray_ckpt.actors.live_run import LiveRun
from ray_ckpt.arguments import whole_number
from ray_ckpt.catalog.catalog import Catalog, CheckpointView
from ray_ckpt.catalog.load import OpenedCheckpoint, OpenedRun
from ray_ckpt.core.loss_scenarios import LiveCheckpoint
from ray_ckpt.errors import ConfigError
from ray_ckpt.location import StoragePath, locate
from ray_ckpt.restore.manifest import ListedRows
from ray_ckpt.restore.reader import SourceReader
from ray_ckpt.texts import nearest_steps
from ray_ckpt.types import Fragment, Level
from ray_ckpt.verify.live_manifest import LiveManifest, ReadAccess


def open_in_cluster(
    path: StoragePath, *, step: int | None = None, storage_options: Mapping[str, str] | None = None
) -> OpenedCheckpoint:
    """Open a checkpoint of the run at `<storage_path>/<run name>` from the copies in this Ray cluster.

    Without `step`, the newest committed checkpoint of the lineage. Each byte is read from the memory or disk
    of a node, else from the storage path, and compared with its digest. The checkpoint may be retired while
    it is read; `ray_ckpt.pin` prevents that.

    Raises ConfigError if the cluster has no checkpoint service or the run has no such checkpoint,
    Unavailable if the service has not opened the run, CheckpointError if no intact manifest is left.
    """
    step = None if step is None else whole_number(step, "step")
    catalog = Catalog(path, storage_options)
    run = LiveRun(str(locate(catalog.where).parent))
    live = [c for c in run.sources.live if c.on_lineage]
    found = live if step is None else [c for c in run.sources.live if c.checkpoint.step == step]
    if not found:
        what = "no checkpoint" if step is None else f"no live checkpoint of step {step}"
        raise ConfigError(
            f"Run {catalog.run_name} has {what}.",
            hint=nearest_steps({c.checkpoint.step for c in live}, step or 0),
        )
    chosen = max(found, key=lambda c: (c.on_lineage, c.checkpoint.seq))
    return InClusterCheckpoint(OpenedRun(catalog), chosen, run.reach)


class InClusterCheckpoint(OpenedCheckpoint):
    """A live checkpoint, read from the nodes that hold it and from the storage path."""

    def __init__(self, run: OpenedRun, live: LiveCheckpoint, access: ReadAccess) -> None:
        info, is_remote = live.checkpoint, live.checkpoint.level is Level.DURABLE
        super().__init__(run, CheckpointView(info=info, tier=access.remote if is_remote else None))
        self._access = access
        manifest = LiveManifest(info, live.holders, access, is_remote=is_remote, groups=live.groups)
        self._fragments = tuple(fragment for _, fragment in manifest.whole())
        self._sources = {
            file.name: manifest.sources_of(index)
            for index, fragment in enumerate(self._fragments)
            for file in fragment.files
        }

    def fragments(self) -> tuple[Fragment, ...]:
        return self._fragments

    @property
    def _rows(self) -> ListedRows:
        return ListedRows(row for fragment in self._fragments for row in fragment.rows)

    def _reader(self) -> SourceReader:
        return SourceReader(
            self.info.id,
            self._sources,
            credentials=self._access.credentials,
            remote=self._access.remote,
            limiter=self._access.limiter,
        )
