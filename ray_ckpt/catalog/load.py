"""A run's checkpoints as tensors and values, on any machine that can read the storage path.

    run = ray_ckpt.open("s3://bucket/runs/gpt")  # a folder, or a URL of S3, GCS or a file system of fsspec
    state = run.load("model")  # its state_dict() at the newest durable checkpoint
    model.load_state_dict(state)
    norms = run.load("optimizer.*.exp_avg", step=3000)  # {name: tensor}
    run.load(into={"model": model, "optimizer": optimizer})  # in place, with their present sharding

Every tensor is whole, however many ranks saved it. Only the byte ranges of the requested tensors are read,
several at a time, and each range is compared with its digest from the manifest, which the root digest in the
log verifies. Nothing is written, no code from the checkpoint is executed, and no cluster is needed. torch is
imported when the first tensor is read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

from ray_ckpt.arguments import whole_number
from ray_ckpt.catalog.catalog import Catalog, CheckpointView
from ray_ckpt.catalog.lazy_tensor import matching_tensors
from ray_ckpt.errors import ConfigError, CorruptionError, FormatError, RestoreError
from ray_ckpt.format.names import state_file
from ray_ckpt.format.tree import TensorRef, decode_state
from ray_ckpt.location import StoragePath
from ray_ckpt.restore.manifest import ListedRows, RowColumns
from ray_ckpt.restore.reader import FileSource, ProgressLog, SourceReader
from ray_ckpt.types import AttemptId, CheckpointInfo, Fragment, Level

if TYPE_CHECKING:
    import torch

    from ray_ckpt.capture.items import NewItem
    from ray_ckpt.capture.load import RestoreInfo, SavedState

log = logging.getLogger("ray_ckpt")

MAX_NOTES = 3  # failures that one error lists


def open(path: StoragePath, storage_options: Mapping[str, str] | None = None) -> OpenedRun:
    """Open the run at `<storage_path>/<run name>` and read its log. Raise the errors of `Catalog`."""
    return OpenedRun(Catalog(path, storage_options))


class OpenedRun:
    """A run to load from. `catalog` lists its checkpoints; `catalog.refresh()` reads the log again."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._last: tuple[tuple[AttemptId, str], RowColumns] | None = None  # often needed again

    def __repr__(self) -> str:
        return f"OpenedRun({self.catalog!r})"

    @overload
    def load(
        self, what: str | Iterable[str] | None = None, *, step: int | None = None, rank: int = 0
    ) -> Any: ...

    @overload
    def load(self, *, into: Mapping[str, Any], step: int | None = None) -> RestoreInfo: ...

    def load(
        self,
        what: str | Iterable[str] | None = None,
        *,
        step: int | None = None,
        rank: int | None = None,
        into: Mapping[str, Any] | None = None,
    ) -> Any:
        """Read a durable checkpoint: the newest one on the lineage, or the one of `step`.

        Items that were uploaded alone (option `remote_items`) are read too: if the newest checkpoint with
        all wanted items is such a one, or if the step has only these on the storage path.

        what:
            None returns {item: state}. The name of an item returns its state: its `state_dict()` when it was
            saved (an optimizer's state is keyed by parameter names). A full name, a pattern of full names
            such as "model.layers.*.weight", or several of them return {name: tensor}. Tensors are newly
            allocated on the CPU.
        rank:
            The rank whose values are returned where ranks differ: data position, random state ("rng"),
            buffers, plain values.
        into:
            Objects by the names of their items, as for a Checkpointer. The objects are filled in place,
            whatever their layout is, and a RestoreInfo is returned. Where torch.distributed is initialized,
            each rank reads its part; without `step` all ranks must call `load`, and all load the checkpoint
            that is the newest for rank 0. Random state does not change.

        Raise ConfigError if there is no such step, item, name or rank, or the step is not durable;
        MismatchError, with each difference, if `into` does not fit (nothing is changed); RestoreError if
        something is damaged or cannot be read (`into` then holds parts of the checkpoint); CorruptionError if
        the manifest is damaged; NewerFormat if a newer ray_ckpt wrote the checkpoint.
        """
        if into is not None:
            _check_into(into, what, rank)
            return self._load_into(into, step)
        what = _checked(what)
        return self.choose(step, _items_in(what)).load(what, rank=0 if rank is None else rank)

    def at(self, attempt: AttemptId, items: Collection[str] = ()) -> OpenedCheckpoint:
        """Return a live durable checkpoint of the run. For any other, raise ConfigError with the nearest.

        If `items` are all that is wanted, a checkpoint with these on the storage path is returned too.
        """
        found = next((c for c in self.catalog.list(all=True) if c.id.attempt == attempt.attempt), None)
        if found is not None and found.state == "live" and found.level is Level.DURABLE:
            return OpenedCheckpoint(self, self.catalog.view(found))
        if found is not None and found.state in ("live", "lost") and found.exported and items:
            return OpenedCheckpoint(self, self.catalog.view(found))
        if found is None:
            what = "has no record of this checkpoint of"
        else:
            what = "has in the cluster only" if found.state == "live" else f"has {found.state}"
            if found.exported and found.state in ("live", "lost"):
                items = ", ".join(found.exported_items)
                what = f"has on the storage path only {items}, which training cannot resume from,"
        raise ConfigError(
            f"Run {self.catalog.run_name} {what} step {attempt.step}.",
            hint=self.catalog.nearest_durable(attempt.step),
            step=attempt.step,
        )

    def _load_into(self, objects: Mapping[str, Any], step: int | None) -> RestoreInfo:
        chosen = self.agreed(objects) if step is None else self.choose(step)
        return chosen.load(into=objects)

    def agreed(self, items: Collection[str] = ()) -> OpenedCheckpoint:
        """Return what `choose` returns; where torch.distributed is initialized, what it returns on rank 0.

        All ranks must call this. Raise ConfigError if there is none.
        """
        from torch import distributed as dist

        if _group()[1] > 1:
            newest = self._newest(items)
            chosen = [newest.info.id.attempt if newest is not None else ""]
            dist.broadcast_object_list(chosen, src=0)
            if chosen[0]:
                return OpenedCheckpoint(self, self._of_attempt(chosen[0]))
        return self.choose(None, items)

    def _newest(self, items: Collection[str]) -> CheckpointView | None:
        """Return the newest durable checkpoint or, if it is newer, the newest with these items."""
        return self.catalog.with_items(items) if items else self.catalog.newest(Level.DURABLE)

    def _rows_of(self, view: CheckpointView) -> RowColumns:
        """Return the manifest of a checkpoint, proven by the log."""
        if self._last is None or self._last[0] != (view.info.id, view.items):
            self._last = (view.info.id, view.items), view.columns()
        return self._last[1]

    def choose(self, step: int | None = None, items: Collection[str] = ()) -> OpenedCheckpoint:
        """Return the checkpoint of a step, or the newest durable one. Raise ConfigError if none exists.

        If `items` are all that is wanted, they may have been uploaded alone, from a newer checkpoint.
        """
        view = self._newest(items) if step is None else self.catalog[step]
        if view is not None and view.where is not None:
            return OpenedCheckpoint(self, view)
        what = "has no durable checkpoint" if step is None else f"has step {step} in the cluster only"
        where = " on its lineage" if step is None and self.catalog.durable_steps else ""
        raise ConfigError(
            f"Run {self.catalog.run_name} {what}{where}.",
            hint=self.catalog.nearest_durable(step or 0),
            step=step,
        )

    def _of_attempt(self, attempt: str) -> CheckpointView:
        """Return the checkpoint that rank 0 chose; read the log again if that has no files of it so far."""
        view = self._view_of(attempt)
        if view is None or view.where is None:
            self.catalog.refresh()
            view = self._view_of(attempt)
        if view is None:
            raise ConfigError(
                f"Rank 0 loads a checkpoint that run {self.catalog.run_name} does not have on this rank.",
                hint="Open the same run on all ranks.",
                attempt=attempt,
            )
        return view

    def _view_of(self, attempt: str) -> CheckpointView | None:
        known = self.catalog.list(all=True)
        return next((self.catalog.view(info) for info in known if info.id.attempt == attempt), None)


class OpenedCheckpoint:
    """One checkpoint to load from. `run` is the checkpoint's run, with all other checkpoints."""

    def __init__(self, run: OpenedRun, view: CheckpointView) -> None:
        self.run = run
        self._view = view

    def __repr__(self) -> str:
        return f"OpenedCheckpoint(step {self.step} of {self.run.catalog.run_name!r})"

    @property
    def info(self) -> CheckpointInfo:
        return self._view.info

    def fragments(self) -> tuple[Fragment, ...]:
        """Return the manifest by node, proven by the log. Raise CorruptionError if it is damaged."""
        return self._view.fragments()

    @property
    def step(self) -> int:
        return self._view.info.step

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._view.info.metrics

    @overload
    def load(self, what: str | Iterable[str] | None = None, *, rank: int = 0) -> Any: ...

    @overload
    def load(self, *, into: Mapping[str, Any]) -> RestoreInfo: ...

    def load(
        self,
        what: str | Iterable[str] | None = None,
        *,
        rank: int | None = None,
        into: Mapping[str, Any] | None = None,
    ) -> Any:
        """Load this step; see `OpenedRun.load`."""
        if into is not None:
            _check_into(into, what, rank)
            return self._load_into(into)
        if not 0 <= (seen_by := whole_number(0 if rank is None else rank, "rank")) < self.info.world_size:
            raise ConfigError(
                f"Step {self.step} has no rank {seen_by}.", hint=f"Give 0 to {self.info.world_size - 1}."
            )
        what = _checked(what)
        if what is None:
            return self._states(None, seen_by)
        if isinstance(what, str) and what.isidentifier():  # only the names of items are identifiers
            return self._states(what, seen_by)[what]
        return self._tensors((what,) if isinstance(what, str) else what, seen_by)

    @property
    def _rows(self) -> RowColumns | ListedRows:
        return self.run._rows_of(self._view)

    def _states(self, item: str | None, rank: int) -> dict[str, Any]:
        """Return the states of one item or of all items on `rank`."""
        trees = self._merged(rank)["items"]
        if item is not None and item not in trees:
            raise ConfigError(
                f"Step {self.step} has no item {item!r}{' on the storage path' if self._view.items else ''}.",
                hint=f"It has {', '.join(sorted(trees))}.",
                item=item,
            )
        wanted = trees if item is None else {item: trees[item]}
        loaded = self._load_trees(wanted, rank)
        for name, found in loaded.items():
            self._warn_partial(name, found.num_tensors, rank)
        return {name: found.state for name, found in loaded.items()}

    def _tensors(self, patterns: Collection[str], rank: int) -> dict[str, torch.Tensor]:
        """Return whole tensors by their full names, sorted by name; where ranks differ, those of `rank`."""
        names = sorted(self._rows.keys())
        for item in patterns:
            if item.isidentifier() and item not in names:  # only the names of items are identifiers
                raise ConfigError(
                    f"{item!r} is no tensor of step {self.step}, and several names are those of tensors.",
                    hint=f"load({item!r}) returns the state of an item; {item + '.*'!r} means its tensors.",
                    pattern=item,
                )
        chosen = matching_tensors(patterns, names, f" of step {self.step}")
        tree = {name: TensorRef(name) for name in names if name in chosen}
        state: dict[str, torch.Tensor] = self._load_trees({"tensors": tree}, rank)["tensors"].state
        return state

    def _load_into(self, objects: Mapping[str, Any]) -> RestoreInfo:
        """Fill the live objects of this process."""
        from torch import nn

        from ray_ckpt.capture.adapt import adapt
        from ray_ckpt.capture.load import RestoreInfo, load_items, wanted_trees

        start_s, (rank, world_size) = time.monotonic(), _group()
        owners = {n: o for n, o in objects.items() if isinstance(o, nn.Module | nn.Parameter)}
        items = {name: adapt(name, obj, owners) for name, obj in objects.items()}
        saved = self._merged(rank if rank < self.info.world_size else 0)
        state = {**saved, "items": wanted_trees(items, saved["items"])}
        reader = self._reader()
        put_rest = load_items(items, state, self._rows, reader, rank=rank, world_size=world_size)
        self._check(reader)
        put_rest()
        return RestoreInfo(
            step=self.step,
            metrics=self.info.metrics,
            parts=tuple(reader.parts),
            seconds=time.monotonic() - start_s,
        )

    def saved(self) -> SavedState:
        """Return the saved items of this rank without a byte of their tensors."""
        from ray_ckpt.capture.load import SavedState

        rank = _group()[0]
        state = self._merged(rank if rank < self.info.world_size else 0)
        return SavedState.of(state["items"], self._rows)

    def _load_trees(self, trees: Mapping[str, Any], rank: int) -> dict[str, NewItem]:
        """Load the tensors of the trees; where ranks differ in a tensor of one name, that of `rank`."""
        from ray_ckpt.capture.items import NewItem
        from ray_ckpt.capture.load import load_items

        items = {name: NewItem() for name in trees}
        reader, state = self._reader(), {"step": self.step, "items": trees}
        put_rest = load_items(items, state, self._rows, reader, rank=rank, world_size=self.info.world_size)
        self._check(reader)
        put_rest()
        return items

    def _merged(self, rank: int) -> dict[str, Any]:
        """Return the state of `rank` for `load_items`, with TensorRef in place of tensors.

        If the group has several parts, the items of the other parts are added as the first rank of each part
        saved them.
        """
        state = self._state(rank)
        trees, classes = state["items"], state.get("classes", {})
        first = 0
        for part in state.get("parts", ()):
            if not first <= rank < first + part["world_size"]:
                other = self._state(first)
                trees, classes = {**other["items"], **trees}, {**other.get("classes", {}), **classes}
            first += part["world_size"]
        world_size = self.info.world_size
        return {"step": self.step, "world_size": world_size, "items": trees, "classes": classes}

    def _state(self, rank: int) -> dict[str, Any]:
        file = state_file(rank, self.info.world_size)
        rows = self._rows.of_file(file)
        if not rows:
            raise CorruptionError(f"The manifest of step {self.step} has no {file}.", file=file)
        reader = self._reader()
        data = reader.read_bytes(rows[0])
        self._check(reader)
        assert data is not None, "the reader found no damage"
        try:
            return decode_state(data)
        except FormatError as error:
            raise error.at(file) from error

    def _reader(self) -> SourceReader:
        source = (FileSource(tier="remote", where=self._view.where or ""),)
        return SourceReader(
            self.info.id,
            dict.fromkeys(self._rows.files(), source),
            credentials=None,
            remote=self._view.tier,
            progress=ProgressLog(self.step, log=log.info),
        )

    def _check(self, reader: SourceReader) -> None:
        """Raise RestoreError if a range could not be read; log the failures that a retry repaired."""
        if not reader.damage:
            for note in reader.rejected:
                log.warning("load: %s", note)
        else:
            notes = "; ".join(reader.rejected[:MAX_NOTES])
            raise RestoreError(
                f"{len(reader.damage)} parts of step {self.step} cannot be read, the first is "
                f"{reader.damage[0]}: {notes}.",
                hint="If the store works, run `ray-ckpt verify` to find damage, and load another step.",
                damage=tuple(reader.damage),
            )

    def _warn_partial(self, item: str, num_tensors: int, rank: int) -> None:
        """Log a warning if other ranks have tensors of an item that `rank` lacks, as in a pipeline."""
        known = self._rows.keys(item)
        if len(known) > num_tensors:
            log.warning(
                "rank %d has %d of the %d tensors of %s; load(%r) gives them all",
                rank,
                num_tensors,
                len(known),
                item,
                f"{item}.*",
            )


def _group() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks."""
    from torch import distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _checked(what: str | Iterable[str] | None) -> str | tuple[str, ...] | None:
    """Return `what`, several names as a tuple. Raise ConfigError if a name is no string."""
    if what is None or isinstance(what, str):
        return what
    is_one = not isinstance(what, Iterable) or isinstance(what, bytes)
    found: tuple[Any, ...] = (what,) if is_one else tuple(what)
    for name in found:
        if not isinstance(name, str):
            hint = "Give the name of an item, or full names or patterns of tensors, as strings."
            raise ConfigError(f"{name!r} is no name.", hint=hint)
    return found


def _items_in(what: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the items that names or patterns of tensors are about; () for all, or if that is not known."""
    if what is None:
        return ()
    items = {name.partition(".")[0] for name in ((what,) if isinstance(what, str) else what)}
    return tuple(sorted(items)) if all(item.isidentifier() for item in items) else ()


def _check_into(into: object, what: object, rank: object) -> None:
    if not isinstance(into, Mapping):
        raise ConfigError(
            f"`into` is {type(into).__name__}, and not the objects by the names of their items.",
            hint='Give a dict, such as into={"model": model}.',
        )
    if what is not None or rank is not None:
        raise ConfigError("`into` itself names the items.", hint="Omit `what` and `rank`.")
