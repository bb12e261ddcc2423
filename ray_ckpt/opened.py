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

import difflib
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, overload

from ray_ckpt.catalog import Catalog, CheckpointView
from ray_ckpt.errors import ConfigError, CorruptionError, RestoreError
from ray_ckpt.format.names import state_file
from ray_ckpt.format.tree import TensorRef, decode_tree
from ray_ckpt.restore import ProgressLog, Source, SourceReader
from ray_ckpt.types import Level
from ray_ckpt.verify import StoragePath

if TYPE_CHECKING:
    import torch

    from ray_ckpt.client import RestoreInfo

log = logging.getLogger("ray_ckpt")

MAX_NEAREST = 5  # names and steps in a hint
MAX_COMPARED = 10_000  # names among which the nearest are looked for, which takes a tenth of a second
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
            it was saved (an optimizer's by names of parameters); a pattern of full names such as
            "model.layers.*.weight", or several of them, {name: tensor}. Tensors are new ones on the CPU.
        rank:
            Whose state, where ranks differ: data position, random state ("rng"), buffers, plain values.
        into:
            Objects by the names of their items, as for a Checkpointer: filled in place, whatever their layout
            is. Where torch.distributed is initialized each rank reads its part; without `step` all must call,
            and take what rank 0 finds newest. Random state stays as it is. Returns a RestoreInfo.

        ConfigError: there is no such step, item, name or rank, or the step is not durable. MismatchError:
        `into` does not fit, with each difference; nothing has been changed. RestoreError: something is
        damaged or cannot be read; then `into` holds parts of it. CorruptionError: the manifest is damaged.
        """
        if into is not None:
            if what is not None or rank is not None:
                raise ConfigError("`into` names the items itself.", hint="Leave out `what` and `rank`.")
            return self._load_into(into, step)
        saved = self._saved(self._choose(step))
        seen_by = saved.check_rank(rank or 0)
        if what is None:
            return saved.states(None, seen_by)
        if isinstance(what, str) and what.isidentifier():  # as the names of items are
            return saved.states(what, seen_by)[what]
        return saved.tensors((what,) if isinstance(what, str) else tuple(what), seen_by)

    def _load_into(self, objects: Mapping[str, Any], step: int | None) -> RestoreInfo:
        from torch import distributed as dist

        is_group = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_group else (0, 1)
        if step is None and world_size > 1:
            newest = self.catalog.newest(Level.DURABLE)
            told = [newest.info.id.attempt if newest is not None else ""]
            dist.broadcast_object_list(told, src=0)
            view = self._of_attempt(told[0]) if told[0] else self._choose(None)
        else:
            view = self._choose(step)
        return self._saved(view).load_into(objects, rank=rank, world_size=world_size)

    def _saved(self, view: CheckpointView) -> _Saved:
        if self._last is None or self._last.info.id != view.info.id:
            self._last = _Saved(view)
        return self._last

    def _choose(self, step: int | None) -> CheckpointView:
        """The checkpoint of a step, or the newest durable one. ConfigError if it cannot be read from here."""
        view = self.catalog.newest(Level.DURABLE) if step is None else self.catalog[step]
        if view is not None and view.where is not None:
            return view
        what = "has no durable checkpoint" if step is None else f"has step {step} in the cluster only"
        durable = {c.step for c in self.catalog.checkpoints if c.level is Level.DURABLE}
        nearest = sorted(sorted(durable, key=lambda s: abs(s - (step or 0)))[:MAX_NEAREST])
        raise ConfigError(
            f"Run {self.catalog.run_name} {what}{' on its lineage' if step is None and durable else ''}.",
            hint=f"Durable are the steps {', '.join(map(str, nearest))}." if durable else "None is durable.",
            step=step,
        )

    def _of_attempt(self, attempt: str) -> CheckpointView:
        """What another rank has chosen, whose log may be newer than ours."""
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


class _Saved:
    """One checkpoint's manifest, proven by the log, and what is read by it."""

    def __init__(self, view: CheckpointView) -> None:
        self.info = view.info
        self._tier = view.tier
        self._rows = tuple(row for fragment in view.fragments() for row in fragment.rows)
        source = (Source(tier="remote", where=view.where or ""),)
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
        trees = self._trees(rank)
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
        chosen: set[str] = set()
        for pattern in patterns:
            found = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
            if not found:
                raise ConfigError(
                    f"No tensor of step {self.info.step} is called {pattern!r}.",
                    hint=_nearest(pattern, names),
                    pattern=pattern,
                )
            chosen.update(found)
        tree = {name: TensorRef(name) for name in names if name in chosen}
        state: dict[str, torch.Tensor] = self._load({"tensors": tree}, rank)["tensors"].state
        return state

    def load_into(self, objects: Mapping[str, Any], *, rank: int, world_size: int) -> RestoreInfo:
        """Fill live objects, as rank `rank` of `world_size` that have them."""
        from torch import nn

        from ray_ckpt.capture.items import adapt
        from ray_ckpt.capture.load import load_items
        from ray_ckpt.client import RestoreInfo

        start_s = time.monotonic()
        owners = {n: o for n, o in objects.items() if isinstance(o, nn.Module | nn.Parameter)}
        items = {name: adapt(name, obj, owners) for name, obj in objects.items()}
        trees = self._trees(rank if rank < self.info.world_size else 0)
        state = {"step": self.info.step, "items": {n: tree for n, tree in trees.items() if n in items}}
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

    def _trees(self, rank: int) -> dict[str, Any]:
        """The items as `rank` has saved them, with TensorRef in place of tensors."""
        file = state_file(rank, self.info.world_size)
        row = next((row for row in self._rows if row.file == file), None)
        if row is None:
            raise CorruptionError(f"The manifest of step {self.info.step} has no {file}.", file=file)
        reader = self._reader()
        data = reader.read_bytes(row)
        self._check(reader)
        assert data is not None, "nothing is damaged"
        trees: dict[str, Any] = decode_tree(data)["items"]
        return trees

    def _reader(self) -> SourceReader:
        progress = ProgressLog(self.info.step, say=log.info)
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
                hint="If the store is well, `ray-ckpt verify` shows the damage; load another step.",
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

    def changes_in_step(self, path: tuple[str, ...]) -> bool:
        return False

    def allocate(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        self.num_tensors += 1
        return torch.empty(shape, dtype=dtype, device="cpu")


def _nearest(wanted: str, names: Collection[str]) -> str:
    """A hint."""
    item = wanted.partition(".")[0]
    same = [name for name in names if name.partition(".")[0] == item] or list(names)
    nearest = difflib.get_close_matches(wanted, same[:MAX_COMPARED], n=MAX_NEAREST, cutoff=0.5)
    if nearest:
        return f"The nearest are {', '.join(nearest)}."
    return f"Its items with tensors are {', '.join(sorted({name.partition('.')[0] for name in names}))}."
