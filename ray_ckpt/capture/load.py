"""Restore of items: saved bytes into live state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch

from ray_ckpt.capture.classes import (
    Classes,
    class_problems,
    difference,
    rates_of,
    take_rates,
    taken,
)
from ray_ckpt.capture.dtensors import boxes_on, is_dtensor
from ray_ckpt.capture.hyperparameters import Changed
from ray_ckpt.capture.items import (
    OTHER_GROUPS,
    BaseOptimizerItem,
    Item,
    Leaf,
    ModuleItem,
    is_optimizer_state,
)
from ray_ckpt.capture.mismatch import IN_WINDOW, check_names, listed, misfit, problem_of
from ray_ckpt.capture.sinks import Target, sink_for
from ray_ckpt.capture.trees import TreeItem
from ray_ckpt.capture.walk import (
    DTYPES,
    HeldLeaf,
    LiveSlice,
    Walked,
    is_global,
    replace_refs,
    slices_of,
    walk,
)
from ray_ckpt.collector import collector_paused
from ray_ckpt.errors import CheckpointError, InsufficientSpace
from ray_ckpt.format.names import shard_files
from ray_ckpt.format.tree import IMPORTED_FROM, TensorRef
from ray_ckpt.plan.regions import Box
from ray_ckpt.plan.restore import Copy, Read, RestorePlan, RowKey, plan_restore, row_key
from ray_ckpt.restore.manifest import SavedRows
from ray_ckpt.restore.reader import Sink, SourceReader
from ray_ckpt.texts import count_text
from ray_ckpt.types import ManifestRow, RestoredPart, Slice

log = logging.getLogger("ray_ckpt")

Path: TypeAlias = tuple[str, ...]
"""Keys and indices of a leaf in the tree of an item."""
Load: TypeAlias = Callable[[], Set[str]]
"""Function that loads items after all ranks have read; returns the names of items that begin anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreInfo:
    """Result of a restore: the step, its metrics, and the source of each part."""

    step: int
    metrics: Mapping[str, float]
    """The metrics of the checkpoint; none if all items of `init_from` begin anew."""
    parts: tuple[RestoredPart, ...]
    seconds: float
    changed: tuple[Changed, ...] = ()
    """Hyperparameters whose values as built differ from the saved values."""

    def bytes_by_tier(self) -> Mapping[str, int]:
        totals: dict[str, int] = {}
        for part in self.parts:
            totals[part.tier] = totals.get(part.tier, 0) + part.size_bytes
        return totals

    @property
    def prefetched_bytes(self) -> int:
        """Bytes that were in memory, and verified, before this rank asked for them."""
        return sum(part.size_bytes for part in self.parts if part.is_prefetched)


@dataclass(frozen=True, slots=True)
class SavedState:
    """The saved items of a rank with TensorRef in place of tensors, and a slice of each tensor by key."""

    trees: Mapping[str, Any]
    slices: Mapping[str, Slice]

    @classmethod
    def of(cls, trees: Mapping[str, Any], rows: SavedRows) -> SavedState:
        """Return the saved `trees`; if a tensor is missing in `rows`, these are completed."""
        keys = {ref.key for tree in trees.values() for ref in tensor_refs(tree).values()}
        found = rows.first_of(keys)
        if len(found) < len(keys) and rows.complete():
            found = rows.first_of(keys)
        return cls(trees, {key: row.slice for key, row in found.items() if row.slice is not None})


@collector_paused()  # not for what the user's objects do, which is in the returned function
def load_items(
    items: Mapping[str, Item],
    state: Mapping[str, Any],
    rows: SavedRows,
    reader: SourceReader,
    *,
    rank: int,
    world_size: int,
    node_ranks: Sequence[int] = (),
    ranks: Sequence[int] = (),
    anew: Collection[str] = (),
    before: Walked | None = None,
) -> Load:
    """Read the tensors of `items`; return the function that loads the rest, to call when all ranks are ready.

    Existing tensors are filled in place; missing ones (of an optimizer that has not stepped) are created on
    the device of the parameter. MismatchError lists all differences before any byte is read. Rows that
    `reader` could not read are listed in `reader.damage`; live tensors then hold parts of these rows. If
    several of `node_ranks` (the ranks of this node) hold a row, the node's agent reads the row if possible.
    `ranks` are the ranks that may hold the same tensors, if only a part of the group may (`walk`). A rank
    without state in the checkpoint starts per-rank items from the state of rank 0. An item in `anew` stays as
    it is if the checkpoint has no fitting state for it, or state of another class; saved state of an item in
    `anew` that is not in `items` is left. An imported checkpoint has
    no random state, and may have more items than `items`. `before` is an earlier walk of the items.
    If `rows` are a part of the manifest that lacks something, they are completed; see `SavedRows.complete`
    for the errors.
    """
    classes: Classes = state.get("classes", {})
    everyone = tuple(ranks) or tuple(range(world_size))
    if IMPORTED_FROM in state:
        state, anew = _of_import(items, state, is_first=rank == everyone[0]), {*anew, "rng"}
    state = _without_dropped(items, state, anew, is_first=rank == everyone[0])
    saved = {name: items[name].renamed(t) if name in items else t for name, t in state["items"].items()}
    state = {**state, "items": saved}
    walked = walk(items, rank=rank, world_size=len(everyone), first=everyone[0], before=before)
    near_files = {file: k for k in node_ranks for file in shard_files(k, world_size)}
    of_rank = partial(
        _Wanted,
        rows,
        walked,
        classes,
        rank=rank,
        everyone=everyone,
        own_files=shard_files(rank, world_size),
        near_files=frozenset(near_files),
    )
    all_items = items
    while True:
        begun: dict[str, str] = {}
        changed = set[int]()
        asked = [name for name in sorted(all_items) if name in anew]
        for name in sorted(asked, key=lambda name: isinstance(all_items[name], BaseOptimizerItem)):
            if reason := of_rank(changed=changed).reason_to_begin(name, all_items[name], state["items"]):
                begun[name] = reason
        trees = _trees(all_items, state, begun.keys())
        items = {name: item for name, item in all_items.items() if name in trees}
        wanted = of_rank(changed=changed)
        for name, item in items.items():
            wanted.add(name, item, trees[name], check=name not in begun)
        plan = wanted.plan()
        if not (plan.problems or begun) or not rows.complete():
            break
    if plan.problems:
        modules = [name for name, item in items.items() if isinstance(item, ModuleItem)]
        raise misfit(state["step"], plan.problems, modules=modules, begins=wanted.misfits)
    if rank == everyone[0]:
        _log_classes(items, begun, classes)
    for name, item in items.items():
        if isinstance(item, TreeItem) and name not in begun:
            item.fill(trees[name])
    here = [k for k in node_ranks if k in everyone]
    _read(plan.reads, wanted.targets, reader, here, everyone[0], near_files)
    is_new = rank >= state.get("world_size", world_size)

    def load_all() -> Set[str]:
        for name, item in items.items():
            tree = wanted.filled(name, trees[name])
            if name in begun:
                take_rates(item, tree)
            elif is_new and item.per_rank:
                item.load_for_new_rank(tree, rank)
            else:
                item.load(taken(name, item, tree, classes))
        return begun.keys()

    return load_all


def _of_import(items: Mapping[str, Item], state: Mapping[str, Any], *, is_first: bool) -> Mapping[str, Any]:
    """Return the state of an imported checkpoint without items that nobody has registered."""
    saved = state["items"]
    if (left := sorted(saved.keys() - items.keys())) and is_first:
        log.warning("the imported checkpoint also has %s, which is not registered and not loaded", left)
    return {**state, "items": {name: tree for name, tree in saved.items() if name in items}}


def _without_dropped(
    items: Mapping[str, Item], state: Mapping[str, Any], anew: Collection[str], *, is_first: bool
) -> Mapping[str, Any]:
    """Return the state without items in `anew` that nobody has registered."""
    saved = state["items"]
    dropped = sorted((saved.keys() & set(anew)) - items.keys() - {IN_WINDOW})
    for name in dropped * is_first:
        log.warning("%s is not restored: it is not registered, and the option anew has it", name)
    return {**state, "items": {name: tree for name, tree in saved.items() if name not in dropped}}


def _trees(items: Mapping[str, Item], state: Mapping[str, Any], begun: Set[str]) -> dict[str, Any]:
    """Return the tree to load of each item; for an optimizer that begins anew, only the learning rates."""
    saved = state["items"]
    check_names(state["step"], items.keys() - begun, saved.keys() - begun)
    rates = {name: rates_of(items[name], saved[name]) for name in begun & saved.keys()}
    trees = {name: saved[name] for name in items if name not in begun}
    return trees | {name: tree for name, tree in rates.items() if tree is not None}


def _log_classes(items: Mapping[str, Item], begun: Mapping[str, str], classes: Classes) -> None:
    for name, reason in begun.items():
        log.warning("%s begins anew: %s", name, reason)
    for name, item in items.items():
        if name not in begun and (text := difference(name, item, classes)) is not None:
            log.warning("%s; the form of their state is the same", text)


@dataclass(slots=True)
class _Wanted:
    """Targets on this rank of all saved tensors of the items, and problems."""

    rows: SavedRows
    walked: Walked
    classes: Classes
    rank: int = field(kw_only=True)
    everyone: tuple[int, ...] = field(kw_only=True)
    own_files: tuple[str, ...] = field(kw_only=True)  # shards of this rank
    near_files: frozenset[str] = field(kw_only=True)  # shards of the ranks on this node
    changed: set[int] = field(kw_only=True)  # live tensors by id that begin anew, of another shape or dtype
    targets: list[LiveSlice] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)  # names of items that do not fit the saved class
    renamed: set[str] = field(default_factory=set)  # parameters of a module only, or of the checkpoint only
    groups: dict[str, Callable[[Set[str]], bool]] = field(default_factory=dict)  # by problem; see `plan`
    leaves: dict[str, dict[Path, Leaf]] = field(default_factory=dict)  # new leaves of each item
    _saved: dict[str, ManifestRow] = field(default_factory=dict)  # the first row of each saved tensor
    _own: dict[str, ManifestRow] = field(default_factory=dict)  # rows that may differ between ranks
    _made: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)  # by item and key, new leaves
    _filled: dict[int, str] = field(default_factory=dict)  # live leaves by id, with the key that fills them

    def add(self, name: str, item: Item, tree: Any, *, check: bool = True) -> _Wanted:
        """Add all tensors of the saved `tree` of an item; with `check`, also check that it fits the item."""
        here, refs = self._held(name), tensor_refs(tree)
        self._saved |= self.rows.first_of(ref.key for ref in refs.values())
        is_lacking = any(
            ref.key not in self._saved and (path not in here or here[path].slices)
            for path, ref in refs.items()
        )
        if is_lacking and self.rows.complete():  # as for data-parallel ranks, which save a part each
            self._saved |= self.rows.first_of(ref.key for ref in refs.values())
        if own := {r.key for path, r in refs.items() if not (item.per_rank or item.is_shared(path))}:
            here_too = chain.from_iterable(map(self.rows.of_file, self.own_files))
            self._own |= {row.slice.key: row for row in here_too if row.slice and row.slice.key in own}
        for path, ref in refs.items():
            self._add(name, item, path, ref.key, here.get(path))
        if check:
            problems = [*item.problems(tree), *self._state_problems(item, tree)]
            found = [problem_of(name, problem) for problem in problems]
            misfits = list(class_problems(name, item, tree, self.classes))
            self.problems += found + misfits
            if misfits or (found and isinstance(item, TreeItem | BaseOptimizerItem)):
                self.misfits.append(name)
            if isinstance(item, ModuleItem) and isinstance(tree, Mapping):
                names = self.walked.trees[name].keys() ^ tree.keys()
                self.renamed |= {*names, *(f"{name}.{n}" for n in names)}
            if isinstance(item, BaseOptimizerItem) and is_optimizer_state(tree):
                self.groups[problem_of(name, OTHER_GROUPS)] = partial(item.has_other_groups, tree)
        return self

    def _state_problems(self, item: Item, tree: Any) -> Iterator[str]:
        """Yield a problem if an optimizer's saved state is of parameters that have another shape now."""
        if not (self.changed and isinstance(item, BaseOptimizerItem) and is_optimizer_state(tree)):
            return
        others = [n for n, p in item.parameters.items() if id(p) in self.changed and n in tree["state"]]
        if others:
            more = f" and {len(others) - 1} more" * bool(others[1:])
            yield f"it has state of {others[0]}{more} with another shape or dtype, which begin anew here"

    def reason_to_begin(self, name: str, item: Item, trees: Mapping[str, Any]) -> str | None:
        """Return why an item of the option `anew` begins anew; None if its saved state fits.

        If it begins anew, add its live tensors that do not fit to `changed`.
        """
        if name not in trees:
            return "it is not in the checkpoint"
        refs, here, num_fitting = tensor_refs(trees[name]), self._held(name), 0
        if (text := difference(name, item, self.classes)) is not None:
            problems: Sequence[str] = [text]
        elif problems := self.add(name, item, trees[name]).plan().problems:
            fits = {path: self._fits(ref.key, here[path]) for path, ref in refs.items() if path in here}
            num_fitting = sum(fits.values())
            self.changed |= {id(here[path].leaf) for path, is_fit in fits.items() if not is_fit}
        if not problems:
            return None
        fitting = f", {num_fitting:,} of them would fit" if num_fitting else ""
        sizes = f" ({count_text(len(refs), 'tensor')}{fitting})" if refs else ""
        return f"its state in the checkpoint is not used{sizes}; {listed(problems, 1)}"

    def _held(self, name: str) -> dict[Path, HeldLeaf]:
        """Return the live tensors of an item by their paths."""
        return {p: self.walked.held[ref.key] for p, ref in tensor_refs(self.walked.trees[name]).items()}

    def _fits(self, key: str, held: HeldLeaf) -> bool:
        """Return whether a saved tensor has the shape and dtype of a live one."""
        row = self._own.get(key, self._saved.get(key))
        if row is None or row.slice is None:
            return False
        return (row.slice.global_shape, DTYPES[row.slice.dtype]) == (tuple(held.leaf.shape), held.leaf.dtype)

    def plan(self) -> RestorePlan:
        """Return the plan of all reads, with all problems.

        Other parameters in the groups of an optimizer are none if a module lists them already.
        """
        targets = [target.slice for target in self.targets]
        met = self.rows.meeting(targets, (*self.own_files, *self.near_files))
        rows = (*self._own.values(), *met)  # also if one of them has another form, and meets no target
        plan = plan_restore(targets, rows, own_files=self.own_files, near_files=self.near_files)
        own = [text for text in self.problems if text not in self.groups or self.groups[text](self.renamed)]
        return replace(plan, problems=(*own, *plan.problems, *self._clashes(plan)))

    def _clashes(self, plan: RestorePlan) -> Iterator[str]:
        """Yield a problem for each target in the memory of an earlier one that would get other bytes."""
        places: dict[Hashable, list[int]] = {}
        for index, target in enumerate(self.targets):
            if target.tensor.data_ptr():  # else it is empty, or a wrapper around another tensor
                places.setdefault(_place(target.tensor), []).append(index)
        several = [indexes for indexes in places.values() if len(indexes) > 1]
        if not several:
            return
        copies: dict[int, dict[Hashable, str]] = {}  # by target: digests by the places of their bytes
        for read in plan.reads:
            assert read.row.slice is not None
            for copy in read.copies:
                at = (copy.target_start, copy.shape, copy.source_start, read.row.slice.shape)
                copies.setdefault(copy.target, {})[at] = read.row.digest
        for first, *others in several:
            for other in others:
                one, two = copies.get(first, {}), copies.get(other, {})
                if one.keys() == two.keys() and one != two:
                    keys = (self.targets[other].slice.key, self.targets[first].slice.key)
                    yield f"{keys[0]}: has the memory of {keys[1]} here, and other bytes in the checkpoint"

    def _add(self, name: str, item: Item, path: Path, key: str, held: HeldLeaf | None) -> None:
        """Add the saved tensor `key` at `path` of an item, where `held` is the live leaf."""
        saved, leaves = self._own.get(key, self._saved.get(key)), self.leaves.setdefault(name, {})
        has_grown = held is not None and saved is not None and _has_grown(item, held.leaf, saved)
        if held is not None and not has_grown and _is_filled(item, path, held.leaf):
            leaves[path] = held.leaf
            if any(map(_shares_memory, held.slices)):
                self.problems.append(f"{key}: its elements share memory here; give it clone() of the tensor")
            elif self._is_first(held, key):
                self.targets += [_under(live, key) for live in held.slices]
        elif saved is None:
            self.problems.append(f"{key}: not in the checkpoint's manifest")
        else:
            leaf = leaves[path] = self._allocated(item, path, saved, _device_of(held))
            first = self._made.setdefault((name, key), leaf)
            if first is not leaf and _is_alike(first, leaf):
                leaves[path] = first  # one tensor at several places is one again
                return
            ranks = self.everyone if item.is_shared(path) else (self.rank,)
            slices = slices_of(leaf, item=name, path=path, ranks=ranks, first=self.everyone[0])
            self.targets += [_under(live, key) for live in slices]

    def _allocated(
        self, item: Item, path: Path, row: ManifestRow, device: torch.device | None
    ) -> torch.Tensor:
        """Return a new tensor for a saved slice, on `device` or that of the item.

        Raises InsufficientSpace if memory is lacking.
        """
        saved = row.slice
        assert saved is not None
        try:
            with torch.inference_mode(False):  # an optimizer cannot change an inference tensor later
                leaf = item.allocate(path, saved.global_shape, DTYPES[saved.dtype])
            if device is not None:
                with suppress(torch.OutOfMemoryError):  # the object may copy it: the host does as well
                    leaf = leaf.to(device)
            return leaf
        except RuntimeError as error:  # torch has no class for lack of memory on the CPU
            if isinstance(error, CheckpointError):
                raise
            raise InsufficientSpace(
                f"{saved.key} of {row.file} cannot be held in memory, with shape {list(saved.global_shape)}: "
                f"{str(error)[:200]}",
                hint="If this is not its real size, the file is damaged: see `ray-ckpt verify`.",
                file=row.file,
            ) from error

    def filled(self, name: str, tree: Any) -> Any:
        """Return the saved tree of an item, with the new leaves in place of references."""
        leaves = self.leaves.get(name, {})
        return replace_refs(tree, lambda _, path: leaves[path])

    def _is_first(self, held: HeldLeaf, key: str) -> bool:
        """Return whether no saved tensor fills this leaf yet: a leaf with several names is filled once.

        Note a problem if a saved tensor with other content already fills the leaf.
        """
        first = self._filled.get(id(held.leaf))
        if first is None:
            self._filled[id(held.leaf)] = key
        elif first != key and self._bytes_of(first) != self._bytes_of(key):
            self.problems.append(f"{key}: is one tensor with {first} here, and another one in the checkpoint")
        return first is None

    def _bytes_of(self, key: str) -> set[tuple[object, ...]]:
        slices = ((row.slice, row.digest) for row in self.rows.of_key(key))
        return {(part.offset, part.shape, found) for part, found in slices if part is not None}


def _has_grown(item: Item, leaf: Leaf, row: ManifestRow) -> bool:
    part = row.slice
    return part is not None and item.has_grown(leaf, part.global_shape, DTYPES[part.dtype])


def _device_of(held: HeldLeaf | None) -> torch.device | None:
    """Return the device of a live tensor, where the new one in its place belongs; None: the item decides."""
    if held is None or not isinstance(held.leaf, torch.Tensor) or held.leaf.is_meta:
        return None
    return held.leaf.device


def _is_filled(item: Item, path: Path, leaf: Leaf) -> bool:
    """Return whether the live leaf is filled, rather than a new tensor."""
    return is_global(leaf) or not item.is_replaced(path)


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors, none of them cut over ranks, can stand for each other."""
    if is_global(one) or is_global(other):
        return False
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _place(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for two tensors with the same elements in the same memory."""
    views = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, views


def _shares_memory(live: LiveSlice) -> bool:
    """Return whether a tensor is expanded, so that torch refuses to write to it."""
    sizes = zip(live.tensor.shape, live.tensor.stride(), strict=True)
    return live.nbytes > 0 and any(size > 1 and stride == 0 for size, stride in sizes)


def _under(live: LiveSlice, key: str) -> LiveSlice:
    """Return the slice under the saved `key`; names of ranks and of tied weights may differ."""
    return live if live.slice.key == key else replace(live, slice=replace(live.slice, item=key, name=""))


def wanted_trees(items: Mapping[str, Item], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of saved trees that partial items want; items that are not among `items` are left."""
    return {name: items[name].wanted(tree) for name, tree in saved.items() if name in items}


def tensor_refs(tree: Any) -> dict[Path, TensorRef]:
    """Return the tensors of a tree by their paths."""
    found: dict[Path, TensorRef] = {}

    def note(ref: TensorRef, path: Path) -> TensorRef:
        found[path] = ref
        return ref

    replace_refs(tree, note)
    return found


def _read(
    reads: Iterable[Read],
    targets: list[LiveSlice],
    reader: SourceReader,
    node_ranks: Sequence[int],
    first: int,
    near_files: Mapping[str, int],
) -> None:
    """Fill the targets; return when all bytes are on their devices."""
    by_row = {row_key(read.row): read for read in reads}
    devices = {target.tensor.device for target in targets if target.tensor.device.type == "cuda"}

    def sink_of(row: ManifestRow) -> Sink:
        part = row.slice
        assert part is not None
        copies = by_row[row_key(row)].copies
        return sink_for(part.shape, DTYPES[part.dtype], [_target(copy, targets) for copy in copies])

    for device in devices:  # wait for pending writes to the tensors, on any stream
        torch.cuda.synchronize(device)
    rows = [read.row for read in by_row.values()]
    reader.read(rows, sink_of, _sharers(by_row, targets, node_ranks, first, near_files))
    for device in devices:
        torch.cuda.synchronize(device)


def _sharers(
    reads: Mapping[RowKey, Read],
    targets: list[LiveSlice],
    node_ranks: Sequence[int],
    first: int,
    near_files: Mapping[str, int],
) -> dict[RowKey, tuple[int, ...]]:
    """Return the rows that several ranks of this node want, wholly or in part, with these ranks.

    Each rank computes the same result, from the layout of tensors on all ranks. If a row fills several
    tensors, the layout of the first tensor counts. `near_files` are the files of the ranks of this node, with
    their ranks: a rank that has saved the region of a row reads its own copy.
    """
    if len(node_ranks) < 2:
        return {}
    found: dict[RowKey, tuple[int, ...]] = {}
    alike: dict[int, tuple[int, ...]] = {}  # by id: most slices share one tuple of all ranks
    boxes: dict[Hashable, tuple[tuple[int, tuple[Box, ...]], ...]] = {}  # by layout, which many share
    for place, read in reads.items():
        target, saved = targets[read.copies[0].target], read.row.slice
        assert saved is not None
        layout = _layout(target.leaf)
        if layout is None or (saved.offset, saved.shape) == (target.slice.offset, target.slice.shape):
            if id(target.ranks) not in alike:
                held = frozenset(target.ranks)
                alike[id(target.ranks)] = tuple(rank for rank in sorted(node_ranks) if rank in held)
            ranks = alike[id(target.ranks)]
        else:
            if layout not in boxes:
                here = sorted(rank - first for rank in node_ranks)
                boxes[layout] = tuple((first + rank, held) for rank, held in boxes_on(target.leaf, here))
            region = (saved.offset, saved.shape)
            ranks = tuple(rank for rank, held in boxes[layout] if any(_meet(box, region) for box in held))
        if len(read.near_files) > 1:
            owner = near_files.get(place[0])  # None: this rank wants another dtype than those near it
            ranks = _without_copy(ranks, owner, {near_files[file] for file in read.near_files})
        if len(ranks) > 1:
            found[place] = ranks
    return found


def _without_copy(ranks: tuple[int, ...], owner: int | None, holders: Set[int]) -> tuple[int, ...]:
    """Return the ranks that read the owner's copy; ranks that hold none read that of the first holder."""
    return tuple(rank for rank in ranks if rank == owner or (rank not in holders and owner == min(holders)))


def _layout(leaf: torch.Tensor) -> Hashable | None:
    """Return a key for the layout of a DTensor; None for a plain tensor."""
    if not is_dtensor(leaf):
        return None
    return id(leaf.device_mesh), tuple(leaf.placements), tuple(leaf.shape)  # type: ignore[attr-defined]


def _meet(one: Box, other: Box) -> bool:
    """Return whether two boxes share an element."""
    return all(a < b + n and b < a + m for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True))


def _target(copy: Copy, targets: list[LiveSlice]) -> Target:
    tensor = targets[copy.target].tensor
    if tuple(tensor.shape) != copy.shape:
        ends = zip(copy.target_start, copy.shape, strict=True)
        tensor = tensor[tuple(slice(begin, begin + size) for begin, size in ends)]
    return Target(tensor=tensor, source_start=copy.source_start)
