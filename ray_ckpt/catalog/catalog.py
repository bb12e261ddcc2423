"""The checkpoints of a run according to its log and its storage path: read-only, without a cluster.

No data is trusted: the log is replayed with every check of a coordinator, and `verify` compares each file of
a checkpoint with its digest. A log with a gap or a damaged record is an error, never a shorter history.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, SupportsIndex

import pyarrow as pa

from ray_ckpt.arguments import whole_number, whole_numbers
from ray_ckpt.catalog.checkpoint import REQUESTS_AT_A_TIME, CheckpointView
from ray_ckpt.catalog.runs import find_runs, run_at
from ray_ckpt.catalog.tables import (
    MAX_HTML_METRICS,
    MAX_HTML_ROWS,
    SHARDS,
    SLICES,
    TABLES,
    Cuts,
    TableName,
    checkpoints_table,
    events_table,
    parquet_file,
    sessions_table,
    shards_table,
    slices_table,
)
from ray_ckpt.core.history import SessionInfo
from ray_ckpt.errors import CheckpointError, ConfigError, FormatError, NoRun, missing_package
from ray_ckpt.format import names
from ray_ckpt.location import StoragePath, locate, without_tilde
from ray_ckpt.storage.checkpoint_files import readable
from ray_ckpt.storage.log_store import LogStore, MemoryLogStore, read_covered, read_run
from ray_ckpt.storage.parallel import map_in_order
from ray_ckpt.storage.remote.file_store import children_of
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.texts import html_table, metrics_text, nearest_steps, steps_text, to_datetime
from ray_ckpt.types import CheckpointInfo, FileEntry, Fragment, Level, ProgressCallback
from ray_ckpt.verify.content import Damage, VerifyReport, verify_directory

__all__ = [
    "Catalog",
    "CheckpointView",
    "Damage",
    "SessionInfo",
    "VerifyReport",
    "find_runs",
    "to_datetime",
    "verify_directory",
]

log = logging.getLogger("ray_ckpt")


class Catalog:
    """A run's log, read once from the newest snapshot on. `path` is `<storage_path>/<run>` or its `ray_ckpt`.

    `path` may be a folder or a URL, like the training's storage path; `storage_options` are those of
    RunOptions. `catalog[30]` is the newest live checkpoint of step 30; checkpoints on the current lineage are
    preferred. If this checkpoint is in the cluster only and another checkpoint of step 30 is durable,
    `catalog[30]` is the durable checkpoint, and a warning is logged. Iteration yields the live checkpoints in
    log order.

    Raise NoRun if there is no run at `path`, ConfigError if `path` cannot be opened, StoragePathError if the
    log cannot be read, FormatError if the log is damaged.
    """

    def __init__(self, path: StoragePath, storage_options: Mapping[str, str] | None = None) -> None:
        run = run_at(locate(path), storage_options)
        self._tier = RemoteTier(run / names.SERVICE_DIR, storage_options)
        self._warned: set[str] = set()  # attempts in whose place a durable checkpoint was returned
        self.refresh()

    @property
    def where(self) -> str:
        """The folder that holds the log and the checkpoints: a path or a URL."""
        return self._tier.where

    @property
    def path(self) -> Path | None:
        """`where` as a Path, if the run is in a folder of this machine."""
        root = self._tier.root
        return root.folder if root.is_posix else None

    def refresh(self) -> None:
        """Read the log again. If reading fails, the catalog is unchanged."""
        with readable(self._tier.root):
            listed = self._tier.log.list()
            # read after the listing, so every listed record must be found
            history, found = read_run(self._ahead(_read_first(listed)))
        base = history.copy()
        for record, record_digest in found:
            history.apply(record, record_digest)
        last = max(_seqs(listed), default=-1)
        if last >= history.next_seq:
            raise FormatError(
                f"The log in {self.where} has no record {history.next_seq}, but record {last}.",
                hint="Restore the missing file from a backup; no record after it can be trusted.",
                path=self.where,
            )
        if history.next_seq == 0:
            raise NoRun(
                f"The log in {self.where} has no records.", hint="The run has not started.", path=self.where
            )
        self._base, self._history, self._newest = base, history, tuple(record for record, _ in found)

    def _ahead(self, wanted: Iterable[str]) -> LogStore:
        """Return the log; if it is in a bucket, fetch the files `wanted` in parallel. Raise OSError."""
        log = self._tier.log
        return log if self._tier.root.is_posix else _Fetched(log, wanted)

    @property
    def run_name(self) -> str:
        return self._history.run_name

    @property
    def run_uid(self) -> str:
        return self._history.run_uid

    @property
    def sessions(self) -> tuple[SessionInfo, ...]:
        """The training groups of this run, in the order in which they started."""
        return tuple(self._history.sessions.values())

    @property
    def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """The live checkpoints, in log order."""
        return self._history.live()

    @property
    def lineage(self) -> tuple[CheckpointInfo, ...]:
        """The live checkpoints of the current session and of its ancestors, in log order."""
        return self._history.lineage()

    @property
    def exported(self) -> CheckpointInfo | None:
        """The newest checkpoint, live or lost, on any branch, with items alone on the storage path."""
        return self._history.exported

    @property
    def lost_exported(self) -> tuple[CheckpointInfo, ...]:
        """The lost checkpoints of which the storage path still has some items, in log order."""
        return self._history.lost_exported()

    @property
    def suspect(self) -> CheckpointInfo | None:
        """The newest checkpoint on the lineage with replicas that differed, also if it is lost or retired."""
        return self._history.suspect

    @property
    def suspect_text(self) -> str:
        """The step and the finding of `suspect`, with the first such step of its lineage; "" without one."""
        return self._history.suspect_text

    def list(self, *, all: bool = False) -> tuple[CheckpointInfo, ...]:
        """Return the live checkpoints in log order; with `all` also lost, retired and collected ones."""
        return tuple(self._history.checkpoints.values()) if all else self.checkpoints

    def find(self, step: int, *, all: bool = False) -> CheckpointView | None:
        """Return the newest checkpoint of `step`; prefer live checkpoints, then the current lineage."""
        found = self._newest_last(c for c in self.list(all=all) if c.step == step)
        return self.view(found[-1]) if found else None

    def _newest_last(self, found: Iterable[CheckpointInfo]) -> Sequence[CheckpointInfo]:
        """Sort checkpoints of one step so that the preferred checkpoint is the last."""
        ends = self._history.branch_points()
        return sorted(found, key=lambda c: (c.state == "live", c.seq <= ends.get(c.id.session, -1), c.seq))

    def newest(self, level: Level = Level.LOCAL) -> CheckpointView | None:
        """Return the newest checkpoint of the lineage that has reached `level`, or None."""
        found = [c for c in self.lineage if c.level >= level]
        return self.view(found[-1]) if found else None

    @property
    def durable_steps(self) -> frozenset[int]:
        """The steps of the live durable checkpoints."""
        return frozenset(c.step for c in self.checkpoints if c.level is Level.DURABLE)

    def nearest_durable(self, step: int) -> str:
        """Return a hint: the durable steps closest to `step`, or how to reach steps that only nodes have."""
        if (durable := self.durable_steps) or not self.checkpoints:
            return nearest_steps(durable, step, kind="durable")
        steps = steps_text(c.step for c in self.checkpoints)
        return (
            f"Only the nodes have steps {steps}. Read one in the cluster by ray_ckpt.open_in_cluster(RUN); "
            'or let the training call ckpt.wait("durable"), or set a smaller remote_every.'
        )

    def view(self, info: CheckpointInfo) -> CheckpointView:
        """Return a view of a checkpoint; the store is read only if the checkpoint was retired or lost."""
        there = _may_have_files(info)
        if there and not _surely_has_files(info):
            with readable(self._tier.root):
                folder = self._tier.of_items(_items_of(info)).folder_of(info.directory)
                there = bool(children_of(self._tier.files, folder).files)
        return self._view(info, there)

    def with_items(self, items: Collection[str]) -> CheckpointView | None:
        """Return the newest checkpoint of the lineage with these items on the storage path, or None.

        It may be durable, or have these items alone there; the nodes may have lost the rest of it. A warning
        names a newer one with these items that is not of the lineage.
        """
        ends = self._history.branch_points()
        known = (c for c in (*self.checkpoints, *self.lost_exported) if c.exported)
        exported = [c for c in known if set(items) <= set(c.exported_items)]
        found = [*exported, *(c for c in self.checkpoints if c.level is Level.DURABLE)]
        found = [c for c in found if c.seq <= ends.get(c.id.session, -1)]
        best = max(found, key=lambda c: c.seq, default=None)
        newest = max(exported, key=lambda c: c.seq, default=None)
        if newest is not None and (best is None or newest.seq > best.seq):
            self._warn_of_newer(newest)
        return self.view(best) if best is not None else None

    def _warn_of_newer(self, info: CheckpointInfo) -> None:
        if info.id.attempt not in self._warned:
            self._warned.add(info.id.attempt)
            log.warning(
                "step %d of session %d has newer items, but training has resumed from an older checkpoint; "
                "name the step to read them",
                info.step,
                info.id.session,
            )

    def views(self, *, all: bool = False) -> tuple[CheckpointView, ...]:
        """Return views of the checkpoints of `list`; list folders of retired or lost ones in one request."""
        known = self.list(all=all)
        return tuple(map(self._view, known, self._on_storage(known)))

    def _on_storage(self, known: Sequence[CheckpointInfo]) -> tuple[bool, ...]:
        """Return whether the storage path has files of each checkpoint; list only retired or lost ones."""
        folders: tuple[str, ...] = ()
        if any(_may_have_files(info) and not _surely_has_files(info) for info in known):
            with readable(self._tier.root):
                folders = children_of(self._tier.files, names.CHECKPOINTS_DIR).folders
        there = {folder.rpartition("/")[2] for folder in folders}

        def is_there(info: CheckpointInfo) -> bool:
            return info.directory + names.items_suffix(_items_of(info)) in there

        return tuple(_may_have_files(info) and (_surely_has_files(info) or is_there(info)) for info in known)

    def _view(self, info: CheckpointInfo, there: bool) -> CheckpointView:
        items = _items_of(info) if there else ""
        return CheckpointView(info=info, tier=self._tier.of_items(items) if there else None, items=items)

    def __getitem__(self, step: int) -> CheckpointView:
        step = whole_number(step, "step")
        if (view := self.find(step)) is not None:
            return self._durable_instead(view)
        if lost := [c for c in self.lost_exported if c.step == step]:
            return self.view(lost[-1])
        raise ConfigError(
            f"Run {self.run_name} has no live checkpoint of step {step}.",
            hint=nearest_steps((c.step for c in self.checkpoints), step),
            step=step,
        )

    def _durable_instead(self, view: CheckpointView) -> CheckpointView:
        """Return `view` if it has all files; otherwise a live durable checkpoint of the same step, if any."""
        same = (c for c in self.checkpoints if c.step == view.info.step and c.level is Level.DURABLE)
        durable = self._newest_last(same)
        if (view.tier is not None and not view.items) or not durable:
            return view
        found, attempt = self._view(durable[-1], True), view.info.id
        if attempt.attempt not in self._warned:
            self._warned.add(attempt.attempt)
            log.warning(
                "step %d: the newest checkpoint, of session %d, is in the cluster only; the durable one of "
                "session %d is read (%s)",
                attempt.step,
                attempt.session,
                found.info.id.session,
                found.info.directory,
            )
        return found

    def __contains__(self, step: object) -> bool:
        return any(c.step == step for c in self.checkpoints)

    def __iter__(self) -> Iterator[CheckpointView]:
        return iter(self.views())

    def __len__(self) -> int:
        return len(self.checkpoints)

    def __repr__(self) -> str:
        return f"Catalog({self.where!r}, run_name={self.run_name!r}, {len(self)} live checkpoints)"

    def _repr_html_(self) -> str:
        """Return the newest live checkpoints for a notebook. Texts from the log are escaped."""
        shown = self.checkpoints[-MAX_HTML_ROWS:]
        newest = self.lineage[-1:]
        rows = [
            (
                f"{info.step} (newest)" if info in newest else info.step,
                info.level.label,
                info.id.session,
                info.world_size,
                info.size_bytes,
                to_datetime(info.committed_at_s) or "",
                metrics_text(info.metrics, most=MAX_HTML_METRICS),
            )
            for info in reversed(shown)
        ]
        title = f"run {self.run_name}: {len(self)} live checkpoints in {self.where}"
        headers = ("step", "level", "session", "ranks", "bytes", "saved at", "metrics")
        hidden = len(self) - len(shown)
        left_out = f"and {hidden} older ones" if hidden else ""
        return html_table(title, headers, rows, left_out)

    # -- tables ------------------------------------------------------------------------------------------

    def to_arrow(
        self, table: TableName = "checkpoints", *, steps: Iterable[SupportsIndex] | None = None
    ) -> pa.Table:
        """Return one of the tables of the run, in log order; `write_parquet` writes all of them.

        checkpoints:
            One row per checkpoint in the log, whatever its `state`. `on_lineage` is true if the newest state
            descends from the checkpoint, `on_storage` if the storage path has the checkpoint's files, and
            `exported` has the items that were uploaded apart from them (option `remote_items`). `tiers` lists
            the tiers that hold the checkpoint according to the log. Durations that were not reported are
            null; `drain_s` lasts from the commit until the whole checkpoint is on the storage path. `cuts`
            describes how the tensors are cut (`tables.Cuts`) and is null if `steps` is not given.
        sessions:
            One row per training group, with the group's origin, branch, restore and end.
        events:
            One row per record that is still in the log. A long log keeps the first record and those of the
            last day or two; the others exist only in snapshots.
        shards, slices:
            One row per file, or per saved slice, of the live durable checkpoints, from their manifests.
            The slices of many checkpoints take much memory here; `write_parquet` needs little memory.

        `steps` selects live durable checkpoints; it does not apply to sessions and events. Without `steps`, a
        checkpoint that the run deletes in the meantime is left out, and the log is read again. Raise
        ConfigError for an unknown table or step, and the errors of `CheckpointView.fragments`.
        """
        match table:
            case "checkpoints" if steps is None:
                return self._checkpoints(self.list(all=True), {})
            case "checkpoints":
                chosen = self.durable(steps)
                return self._checkpoints([view.info for view in chosen], _cuts_of(chosen))
            case "shards" | "slices":
                schema, make = _MANIFEST_TABLES[table]
                found = [schema.empty_table()]
                for view in self.durable(steps):
                    with self._unless_deleted(view, is_chosen=steps is not None):
                        found += [make(*part) for part in view.each_fragment()]
                return pa.concat_tables(found)
            case "sessions" if steps is None:
                return sessions_table(self._history)
            case "events" if steps is None:
                return self.events()
        raise ConfigError(
            f"There is no table {table!r}{' of single steps' if table in TABLES else ''}.",
            hint=f"The tables are {', '.join(TABLES)}; `steps` works with the first three.",
        )

    def to_pandas(
        self, table: TableName = "checkpoints", *, steps: Iterable[SupportsIndex] | None = None
    ) -> Any:
        """Return `to_arrow` as a pandas DataFrame. Raise ConfigError if pandas is not installed."""
        try:
            import pandas  # noqa: F401
        except ImportError:
            raise missing_package("pandas", "pandas", "A DataFrame") from None
        return self.to_arrow(table, steps=steps).to_pandas()

    def events(self) -> pa.Table:
        """Return the log, one row per record; fields that a record lacks are null. See `to_arrow`."""
        with readable(self._tier.root):
            seqs = (seq for seq in _seqs(self._tier.log.list()) if seq < self._base.next_seq)
            covered = read_covered(self._ahead(map(names.record_file, seqs)), self._base)
        return events_table([*(record for record, _ in covered), *self._newest], self._history)

    def write_parquet(
        self,
        folder: str | os.PathLike[str],
        *,
        steps: Iterable[SupportsIndex] | None = None,
        progress: ProgressCallback | None = None,
    ) -> dict[str, int]:
        """Write each table to `folder` as `<table>.parquet`; return the number of rows of each.

        The folder is created, and existing files of these names are replaced when the new ones are complete.
        `shards` and `slices` cover the live durable checkpoints, or those of `steps`; `checkpoints` has
        `cuts` for the same checkpoints. Each manifest is read once, and memory does not grow with the number
        of manifests. Without `steps`, a checkpoint that the run deletes in the meantime is left out, and the
        log is read again. `progress(1)` is called after each checkpoint. Raise ConfigError if a step is not
        durable, OSError, and the errors of `CheckpointView.fragments`.
        """
        chosen, cuts, out = self.durable(steps), {}, without_tilde(folder)
        out.mkdir(parents=True, exist_ok=True)
        with (
            parquet_file(out / "shards.parquet", SHARDS) as shards,
            parquet_file(out / "slices.parquet", SLICES) as slices,
        ):
            for view in chosen:
                with self._unless_deleted(view, is_chosen=steps is not None):
                    cut, parts = Cuts(), []
                    for fragment, entry in view.each_fragment():
                        parts.append((shards_table(fragment, entry), slices_table(fragment)))
                        cut.add(fragment.rows)
                    for files, parts_of_tensors in parts:  # the manifest is complete
                        shards.add(files)
                        slices.add(parts_of_tensors)
                    cuts[view.info.id.attempt] = cut.texts()
                if progress is not None:
                    progress(1)
        rows = {"shards": shards.num_rows, "slices": slices.num_rows}
        whole = {
            "checkpoints": self._checkpoints(self.list(all=True), cuts),
            "sessions": sessions_table(self._history),
            "events": self.events(),
        }
        for name, table in whole.items():
            with parquet_file(out / f"{name}.parquet", table.schema) as file:
                file.add(table)
            rows[name] = table.num_rows
        return {name: rows[name] for name in TABLES}

    @contextmanager
    def _unless_deleted(self, view: CheckpointView, *, is_chosen: bool) -> Iterator[None]:
        """Ignore an unreadable manifest if its checkpoint was not selected and is no longer live."""
        try:
            yield
        except CheckpointError:
            if is_chosen:
                raise
            self.refresh()
            if view.info.id in {info.id for info in self.checkpoints}:
                raise

    def _checkpoints(self, known: Sequence[CheckpointInfo], cuts: Mapping[str, Sequence[str]]) -> pa.Table:
        there = zip(known, self._on_storage(known), strict=True)
        whole = tuple(is_there and not _items_of(info) for info, is_there in there)
        return checkpoints_table(known, self._history, on_storage=whole, cuts=cuts)

    def durable(self, steps: Iterable[SupportsIndex] | None = None) -> tuple[CheckpointView, ...]:
        """Return the live durable checkpoints, or those of `steps`, in log order.

        Raise ConfigError if a step has no durable checkpoint.
        """
        wanted = None if steps is None else whole_numbers(steps, "steps")
        found = [c for c in self.checkpoints if c.level is Level.DURABLE]
        if missing := sorted((wanted or set()) - self.durable_steps):
            raise ConfigError(
                f"Run {self.run_name} has no live durable checkpoint of step {missing[0]}.",
                hint=self.nearest_durable(missing[0]),
                step=missing[0],
            )
        return tuple(self._view(c, True) for c in found if wanted is None or c.step in wanted)


_MANIFEST_TABLES: Mapping[str, tuple[pa.Schema, Callable[[Fragment, FileEntry], pa.Table]]] = {
    "shards": (SHARDS, shards_table),
    "slices": (SLICES, lambda fragment, entry: slices_table(fragment)),
}


def _cuts_of(views: Iterable[CheckpointView]) -> dict[str, tuple[str, ...]]:
    """Read the manifests and return how tensors are cut, by attempt."""
    found = {}
    for view in views:
        cuts = Cuts()
        for fragment, _ in view.each_fragment():
            cuts.add(fragment.rows)
        found[view.info.id.attempt] = cuts.texts()
    return found


def _may_have_files(info: CheckpointInfo) -> bool:
    """Return whether the storage path may have files of a checkpoint; a retired one may lack them."""
    return (info.level is Level.DURABLE or info.exported != "") and info.state != "collected"


def _surely_has_files(info: CheckpointInfo) -> bool:
    """Return whether files that the storage path may have are there: they have not been deleted."""
    return info.state == "live" or (info.state == "lost" and _items_of(info) != "")


def _items_of(info: CheckpointInfo) -> str:
    """Return the only items that the storage path has of a checkpoint; "" if it has all or none."""
    return "" if info.level is Level.DURABLE else info.exported


# The log


class _Fetched(MemoryLogStore):
    """A log store to read from: `wanted` was fetched in parallel, other files come from `store`."""

    def __init__(self, store: LogStore, wanted: Iterable[str]) -> None:
        super().__init__()
        self._store = store
        wanted = tuple(wanted)
        read = map_in_order(store.read, wanted, threads=REQUESTS_AT_A_TIME, name="log")
        for name, data in zip(wanted, read, strict=True):
            if data is not None:
                self.objects[name] = data

    def read(self, name: str) -> bytes | None:
        return self.objects[name] if name in self.objects else self._store.read(name)

    def list(self, prefix: str = "") -> tuple[str, ...]:
        return self._store.list(prefix)


def _seqs(listed: Iterable[str]) -> Iterator[int]:
    """Yield the numbers of the records among the names in a log."""
    return (seq for name in listed if (seq := names.record_seq(name)) is not None)


def _read_first(listed: Iterable[str]) -> Iterator[str]:
    """Yield the files that a reader of an intact log needs: the newest snapshot, record 0, later records."""
    listed = tuple(listed)
    newest = max((seq for name in listed if (seq := names.snapshot_seq(name)) is not None), default=-1)
    if newest >= 0:
        yield names.snapshot_file(newest)
    yield from (names.record_file(seq) for seq in _seqs(listed) if seq == 0 or seq > newest)
