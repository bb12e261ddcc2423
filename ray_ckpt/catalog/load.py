"""A run's checkpoints as tensors and values, anywhere that reaches the storage path. Needs no cluster.

    run = ray_ckpt.open("s3://bucket/runs/gpt")  # a folder, a URL of S3 or GCS, or of what fsspec knows
    state = run.load("model")  # what its state_dict() was at the newest durable checkpoint
    model.load_state_dict(state)
    norms = run.load("optimizer.*.exp_avg", step=3000)  # {name: tensor}
    run.load(into={"model": model, "optimizer": optimizer})  # in place, sharded as they are

Every tensor is whole, however many ranks have saved it. Of the files only the ranges are read that hold what
was asked for, several at a time, and each is compared with its digest; the manifest that says where they are
is proven by the log. Nothing is written, and no code of the checkpoint's runs. torch is loaded with the first
tensor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

from ray_ckpt.catalog.catalog import Catalog, CheckpointView
from ray_ckpt.catalog.lazy_tensor import matching_tensors
from ray_ckpt.errors import ConfigError, CorruptionError, FormatError, RestoreError
from ray_ckpt.format.names import state_file
from ray_ckpt.format.tree import TensorRef, decode_state
from ray_ckpt.location import StoragePath
from ray_ckpt.restore.reader import FileSource, ProgressLog, SourceReader
from ray_ckpt.texts import nearest_steps
from ray_ckpt.types import AttemptId, CheckpointInfo, Fragment, Level

if TYPE_CHECKING:
    import torch

    from ray_ckpt.capture.load import RestoreInfo

log = logging.getLogger("ray_ckpt")

MAX_NOTES = 3  # of what has failed, in one error


def open(path: StoragePath, storage_options: Mapping[str, str] | None = None) -> OpenedRun:
    """The run at `<storage_path>/<run name>`, as its log is now. Raises as `Catalog`."""
    return OpenedRun(Catalog(path, storage_options))


class OpenedRun:
    """A run to load from. `catalog` says what there is; `catalog.refresh()` reads the log again."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._last: _Saved | None = None  # the manifest that was read last: often the next one too

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
        """Read a durable checkpoint: the newest of the lineage, or that of `step`.

        what:
            None gives {item: state}; the name of an item its state, which is what its `state_dict()` was when
            it was saved (an optimizer's by names of parameters); a full name, or a pattern of them such as
            "model.layers.*.weight", or several, {name: tensor}. Tensors are new ones on the CPU.
        rank:
            Whose state, where ranks differ: data position, random state ("rng"), buffers, plain values.
        into:
            Objects by the names of their items, as for a Checkpointer: filled in place, whatever their layout
            is. Where torch.distributed is initialized each rank reads its part; without `step` all must call,
            and take what rank 0 finds newest. Random state stays as it is. Returns a RestoreInfo.

        ConfigError: there is no such step, item, name or rank, or the step is not durable. MismatchError:
        `into` does not fit, with each difference; nothing has been changed. RestoreError: something is
        damaged or cannot be read; then `into` holds parts of it. CorruptionError: the manifest is damaged.
        NewerFormat: a newer ray_ckpt wrote it.
        """
        if into is not None:
            _check_into(what, rank)
            return self._load_into(into, step)
        return self._load(self.choose(step)._view, what, rank)

    def at(self, attempt: AttemptId) -> OpenedCheckpoint:
        """One checkpoint of the run. ConfigError, with the nearest ones, unless it is live and durable."""
        found = next((c for c in self.catalog.list(all=True) if c.id.attempt == attempt.attempt), None)
        if found is not None and found.state == "live" and found.level is Level.DURABLE:
            return OpenedCheckpoint(self, self.catalog.view(found))
        if found is None:
            what = "does not know the checkpoint of"
        else:
            what = "has in the cluster only" if found.state == "live" else f"has {found.state}"
        raise ConfigError(
            f"Run {self.catalog.run_name} {what} step {attempt.step}.",
            hint=self._nearest(attempt.step),
            step=attempt.step,
        )

    def _load(self, view: CheckpointView, what: str | Iterable[str] | None, rank: int | None) -> Any:
        saved = self._saved(view)
        seen_by = saved.check_rank(rank or 0)
        if what is None:
            return saved.states(None, seen_by)
        if isinstance(what, str) and what.isidentifier():  # as the names of items are
            return saved.states(what, seen_by)[what]
        return saved.tensors((what,) if isinstance(what, str) else tuple(what), seen_by)

    def _load_into(self, objects: Mapping[str, Any], step: int | None) -> RestoreInfo:
        from torch import distributed as dist

        if step is None and _group()[1] > 1:
            newest = self.catalog.newest(Level.DURABLE)
            told = [newest.info.id.attempt if newest is not None else ""]
            dist.broadcast_object_list(told, src=0)
            view = self._of_attempt(told[0]) if told[0] else self.choose(None)._view
        else:
            view = self.choose(step)._view
        return self._fill(view, objects)

    def _fill(self, view: CheckpointView, objects: Mapping[str, Any]) -> RestoreInfo:
        rank, world_size = _group()
        return self._saved(view).load_into(objects, rank=rank, world_size=world_size)

    def _saved(self, view: CheckpointView) -> _Saved:
        if self._last is None or self._last.info.id != view.info.id:
            self._last = _Saved(view)
        return self._last

    def choose(self, step: int | None = None) -> OpenedCheckpoint:
        """The checkpoint of a step, or the newest durable one. ConfigError if it cannot be read from here."""
        view = self.catalog.newest(Level.DURABLE) if step is None else self.catalog[step]
        if view is not None and view.where is not None:
            return OpenedCheckpoint(self, view)
        what = "has no durable checkpoint" if step is None else f"has step {step} in the cluster only"
        where = " on its lineage" if step is None and self._durable_steps() else ""
        raise ConfigError(
            f"Run {self.catalog.run_name} {what}{where}.", hint=self._nearest(step or 0), step=step
        )

    def _durable_steps(self) -> set[int]:
        return {c.step for c in self.catalog.checkpoints if c.level is Level.DURABLE}

    def _nearest(self, step: int) -> str:
        return nearest_steps(self._durable_steps(), step, kind="durable")

    def _of_attempt(self, attempt: str) -> CheckpointView:
        """Return the checkpoint that another rank chose, from a log that may be newer than ours."""
        if attempt not in {info.id.attempt for info in self.catalog.checkpoints}:
            self.catalog.refresh()
        for info in self.catalog.checkpoints:
            if info.id.attempt == attempt:
                return self.catalog.view(info)
        raise ConfigError(
            f"Rank 0 loads a checkpoint that run {self.catalog.run_name} has not here.",
            hint="Open the same run on all ranks.",
            attempt=attempt,
        )


class OpenedCheckpoint:
    """One checkpoint to load from. `run` is what it belongs to, with all others."""

    def __init__(self, run: OpenedRun, view: CheckpointView) -> None:
        self.run = run
        self._view = view

    def __repr__(self) -> str:
        return f"OpenedCheckpoint(step {self.step} of {self.run.catalog.run_name!r})"

    @property
    def info(self) -> CheckpointInfo:
        return self._view.info

    def fragments(self) -> tuple[Fragment, ...]:
        """Its manifest, by node, proven by the log. CorruptionError if it is damaged."""
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
        if into is None:
            return self.run._load(self._view, what, rank)
        _check_into(what, rank)
        return self.run._fill(self._view, into)


class _Saved:
    """One checkpoint's manifest, proven by the log, and what is read by it."""

    def __init__(self, view: CheckpointView) -> None:
        self.info = view.info
        self._tier = view.tier
        self._rows = tuple(row for fragment in view.fragments() for row in fragment.rows)
        source = (FileSource(tier="remote", where=view.where or ""),)
        self._sources = dict.fromkeys((row.file for row in self._rows), source)

    def check_rank(self, rank: int) -> int:
        """`rank` if it has saved something; ConfigError otherwise."""
        if not 0 <= rank < self.info.world_size:
            raise ConfigError(
                f"Step {self.info.step} has no rank {rank}.", hint=f"Give 0 to {self.info.world_size - 1}."
            )
        return rank

    def states(self, item: str | None, rank: int) -> dict[str, Any]:
        """The states of one item or of all, as `rank` had them."""
        trees = self._merged(rank)["items"]
        if item is not None and item not in trees:
            raise ConfigError(
                f"Step {self.info.step} has no item {item!r}.",
                hint=f"It has {', '.join(sorted(trees))}.",
                item=item,
            )
        wanted = trees if item is None else {item: trees[item]}
        loaded = self._load(wanted, rank)
        for name, found in loaded.items():
            self._warn_partial(name, found.num_tensors, rank)
        return {name: found.state for name, found in loaded.items()}

    def tensors(self, patterns: Collection[str], rank: int) -> dict[str, torch.Tensor]:
        """Whole tensors by their full names, in the order of these; `rank`'s own where ranks differ."""
        names = sorted({row.slice.key for row in self._rows if row.slice is not None})
        chosen = matching_tensors(patterns, names, f" of step {self.info.step}")
        tree = {name: TensorRef(name) for name in names if name in chosen}
        state: dict[str, torch.Tensor] = self._load({"tensors": tree}, rank)["tensors"].state
        return state

    def load_into(self, objects: Mapping[str, Any], *, rank: int, world_size: int) -> RestoreInfo:
        """Fill live objects, as rank `rank` of `world_size` that have them."""
        from torch import nn

        from ray_ckpt.capture.adapt import adapt
        from ray_ckpt.capture.load import RestoreInfo, load_items

        start_s = time.monotonic()
        owners = {n: o for n, o in objects.items() if isinstance(o, nn.Module | nn.Parameter)}
        items = {name: adapt(name, obj, owners) for name, obj in objects.items()}
        saved = self._merged(rank if rank < self.info.world_size else 0)
        state = {**saved, "items": {n: tree for n, tree in saved["items"].items() if n in items}}
        reader = self._reader()
        put_rest = load_items(items, state, self._rows, reader, rank=rank, world_size=world_size)
        self._check(reader)
        put_rest()
        return RestoreInfo(
            step=self.info.step,
            metrics=self.info.metrics,
            parts=tuple(reader.parts),
            seconds=time.monotonic() - start_s,
        )

    def _load(self, trees: Mapping[str, Any], rank: int) -> dict[str, _NewItem]:
        """The trees with their tensors; where ranks have different ones under a name, those of `rank`."""
        from ray_ckpt.capture.load import load_items

        items = {name: _NewItem() for name in trees}
        reader, state = self._reader(), {"step": self.info.step, "items": trees}
        put_rest = load_items(items, state, self._rows, reader, rank=rank, world_size=self.info.world_size)
        self._check(reader)
        put_rest()
        return items

    def _merged(self, rank: int) -> dict[str, Any]:
        """Return what `load_items` takes, as `rank` has saved it, with TensorRef in place of tensors.

        Of a group of several parts also the items of the others, as their first ranks have saved them.
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
        return {"step": self.info.step, "world_size": world_size, "items": trees, "classes": classes}

    def _state(self, rank: int) -> dict[str, Any]:
        file = state_file(rank, self.info.world_size)
        row = next((row for row in self._rows if row.file == file), None)
        if row is None:
            raise CorruptionError(f"The manifest of step {self.info.step} has no {file}.", file=file)
        reader = self._reader()
        data = reader.read_bytes(row)
        self._check(reader)
        assert data is not None, "nothing is damaged"
        try:
            return decode_state(data)
        except FormatError as error:
            raise error.at(file) from error

    def _reader(self) -> SourceReader:
        progress = ProgressLog(self.info.step, log=log.info)
        return SourceReader(
            self.info.id, self._sources, credentials=None, remote=self._tier, progress=progress
        )

    def _check(self, reader: SourceReader) -> None:
        """RestoreError if something could not be read; what was read at the second try is said."""
        if not reader.damage:
            for note in reader.rejected:
                log.warning("load: %s", note)
        else:
            notes = "; ".join(reader.rejected[:MAX_NOTES])
            raise RestoreError(
                f"{len(reader.damage)} parts of step {self.info.step} cannot be read, the first is "
                f"{reader.damage[0]}: {notes}.",
                hint="If the store is well and has it, `ray-ckpt verify` shows damage; load another step.",
                damage=tuple(reader.damage),
            )

    def _warn_partial(self, item: str, num_tensors: int, rank: int) -> None:
        """Say so if other ranks have tensors of an item that this one has not, as in a pipeline."""
        known = {row.slice.key for row in self._rows if row.slice is not None and row.slice.item == item}
        if len(known) > num_tensors:
            log.warning(
                "rank %d has %d of the %d tensors of %s; load(%r) gives them all",
                rank,
                num_tensors,
                len(known),
                item,
                f"{item}.*",
            )


class _NewItem:
    """An item that does not live yet: takes whatever was saved, each tensor whole and on the CPU."""

    per_rank = False

    def __init__(self) -> None:
        self.state: Any = None
        self.num_tensors = 0

    def tree(self) -> Any:
        return None

    def load(self, tree: Any) -> None:
        self.state = tree

    def problems(self, saved: Any) -> list[str]:
        return []

    def is_shared(self, path: tuple[str, ...]) -> bool:
        return True

    def is_replaced(self, path: tuple[str, ...]) -> bool:
        return True

    def changes_in_step(self, path: tuple[str, ...]) -> bool:
        return False

    def allocate(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        self.num_tensors += 1
        return torch.empty(shape, dtype=dtype, device="cpu")


def _group() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    from torch import distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _check_into(what: object, rank: object) -> None:
    if what is not None or rank is not None:
        raise ConfigError("`into` names the items itself.", hint="Leave out `what` and `rank`.")
