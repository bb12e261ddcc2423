"""Bytes back into live state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from ray_ckpt.capture.dtensors import boxes_on, is_dtensor
from ray_ckpt.capture.items import Item
from ray_ckpt.capture.per_rank import PerRankItem
from ray_ckpt.capture.sinks import Target, sink_for
from ray_ckpt.capture.walk import (
    DTYPES,
    Held,
    Leaf,
    LiveSlice,
    is_global,
    replace_refs,
    slices_of,
    walk,
)
from ray_ckpt.errors import MismatchError
from ray_ckpt.format.names import shard_file
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.plan.regions import Box
from ray_ckpt.plan.restore import Copy, Read, plan_restore
from ray_ckpt.restore import Place, Sink, SourceReader, place_of
from ray_ckpt.types import ManifestRow, Slice

MAX_LISTED = 20  # differences named in one error

Path: TypeAlias = tuple[str, ...]
"""Of a leaf in the tree of an item: keys and indices."""


def load_items(
    items: Mapping[str, Item],
    state: Mapping[str, Any],
    rows: Iterable[ManifestRow],
    reader: SourceReader,
    *,
    rank: int,
    world_size: int,
    node_ranks: Sequence[int] = (),
    ranks: Sequence[int] = (),
) -> Callable[[], None]:
    """Read the tensors of `items` and return what puts the rest in place, to be called once all ranks can.

    Tensors that live already are filled in place; missing ones (an optimizer that has not stepped) are
    made with the placement of what they belong to. MismatchError lists what does not fit, before any
    byte is read; what `reader` could not get is in its `damage`, and then live tensors hold parts of it.
    What several of `node_ranks` (the ranks of this node) hold alike is read by their agent if it can.
    `ranks` are those that may hold the same tensors, if not all: a part of the group (`walk`).
    A rank beyond those that saved, as `state` has it, starts per-rank items from the state of rank 0.
    """
    saved_trees, rows = state["items"], list(rows)
    _check_names(items, saved_trees)
    everyone = tuple(ranks) or tuple(range(world_size))
    wanted = _Wanted(rows, rank=rank, everyone=everyone)
    walked = walk(items, rank=rank, world_size=len(everyone), first=everyone[0])
    for name, item in items.items():
        here = {path: walked.held[ref.key] for path, ref in _refs(walked.trees[name]).items()}
        for path, ref in _refs(saved_trees[name]).items():
            wanted.add(name, item, path, ref.key, here.get(path))
        wanted.problems += [f"{name}.{problem}" for problem in item.problems(saved_trees[name])]
    own_file = shard_file(rank, world_size)
    plan = plan_restore([target.slice for target in wanted.targets], rows, prefer_file=own_file)
    problems = (*wanted.problems, *plan.problems)
    if problems:
        listed = "; ".join(problems[:MAX_LISTED]) + ("; ..." if len(problems) > MAX_LISTED else "")
        raise MismatchError(
            f"The checkpoint of step {state['step']} does not fit, {len(problems)} differences: {listed}.",
            hint="Build the same model as the run that saved it, or start another run name.",
            problems=problems,
        )
    _read(plan.reads, wanted.targets, reader, [k for k in node_ranks if k in everyone], everyone[0])
    is_new = rank >= state.get("world_size", world_size)

    def load_all() -> None:
        for name, item in items.items():
            tree = wanted.filled(name, saved_trees[name])
            if is_new and isinstance(item, PerRankItem):
                item.load_for_new_rank(tree, rank)
            else:
                item.load(tree)

    return load_all


@dataclass(slots=True)
class _Wanted:
    """Where each saved tensor of the items goes on this rank, and what speaks against it."""

    rows: Sequence[ManifestRow]
    rank: int = field(kw_only=True)
    everyone: tuple[int, ...] = field(kw_only=True)
    targets: list[LiveSlice] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    leaves: dict[str, dict[Path, Leaf]] = field(default_factory=dict)  # of each item, as it is to be
    _saved: dict[str, Slice] = field(init=False)  # one of the slices of each key
    _filled: dict[int, str] = field(default_factory=dict)  # live leaves by identity, with what fills them

    def __post_init__(self) -> None:
        self._saved = {row.slice.key: row.slice for row in self.rows if row.slice is not None}

    def add(self, name: str, item: Item, path: Path, key: str, held: Held | None) -> None:
        """The saved tensor `key` belongs at `path` of an item, where `held` lives now."""
        saved, leaves = self._saved.get(key), self.leaves.setdefault(name, {})
        if held is not None and _is_filled(item, path, held.leaf):
            leaves[path] = held.leaf
            if self._is_first(held, key):
                self.targets += [_under(live, key) for live in held.slices]
        elif saved is None:
            self.problems.append(f"{key}: not in the checkpoint's manifest")
        else:
            leaf = leaves[path] = item.allocate(path, saved.global_shape, DTYPES[saved.dtype])
            ranks = self.everyone if item.is_shared(path) else (self.rank,)
            slices = slices_of(leaf, item=name, path=path, ranks=ranks, first=self.everyone[0])
            self.targets += [_under(live, key) for live in slices]

    def filled(self, name: str, tree: Any) -> Any:
        """The saved tree of an item with its leaves in place."""
        leaves = self.leaves.get(name, {})
        return replace_refs(tree, lambda _, path: leaves[path])

    def _is_first(self, held: Held, key: str) -> bool:
        """Whether nothing fills this leaf yet: one under several names is filled once.

        A problem if it is filled from another tensor already, which holds something else.
        """
        first = self._filled.get(id(held.leaf))
        if first is None:
            self._filled[id(held.leaf)] = key
        elif first != key and self._bytes_of(first) != self._bytes_of(key):
            self.problems.append(f"{key}: is one tensor with {first} here, and another one in the checkpoint")
        return first is None

    def _bytes_of(self, key: str) -> set[tuple[object, ...]]:
        found = (row for row in self.rows if row.slice is not None and row.slice.key == key)
        return {(row.slice.offset, row.slice.shape, row.digest) for row in found if row.slice is not None}


def _is_filled(item: Item, path: Path, leaf: Leaf) -> bool:
    """Whether the saved bytes go into the leaf that lives, rather than into a new one."""
    return is_global(leaf) or not item.is_replaced(path)


def _under(live: LiveSlice, key: str) -> LiveSlice:
    """The slice as one of the saved tensor `key`: the names of a rank, or of tied weights, may be others."""
    return live if live.slice.key == key else replace(live, slice=replace(live.slice, item=key, name=""))


def _check_names(items: Mapping[str, Item], saved: Mapping[str, Any]) -> None:
    missing, unexpected = sorted(set(items) - set(saved)), sorted(set(saved) - set(items) - {"rng"})
    if missing or unexpected:
        raise MismatchError(
            f"The checkpoint has other items: missing in it {missing}, unexpected {unexpected}.",
            hint="Register the same items as the run that saved it.",
            missing=tuple(missing),
            unexpected=tuple(unexpected),
        )


def _refs(tree: Any) -> dict[Path, TensorRef]:
    """The tensors of a tree by their paths."""
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
) -> None:
    """Fill the targets. Returns when devices have everything too."""
    by_place = {place_of(read.row): read for read in reads}
    devices = {target.tensor.device for target in targets if target.tensor.device.type == "cuda"}

    def sink_of(row: ManifestRow) -> Sink:
        part = row.slice
        assert part is not None
        copies = by_place[place_of(row)].copies
        return sink_for(part.shape, DTYPES[part.dtype], [_target(copy, targets) for copy in copies])

    for device in devices:  # what may still be writing to the tensors, on whichever stream
        torch.cuda.synchronize(device)
    rows = [read.row for read in by_place.values()]
    reader.read(rows, sink_of, _sharers(by_place, targets, node_ranks, first))
    for device in devices:
        torch.cuda.synchronize(device)


def _sharers(
    reads: Mapping[Place, Read], targets: list[LiveSlice], node_ranks: Sequence[int], first: int = 0
) -> dict[Place, tuple[int, ...]]:
    """The rows of which several ranks of this node want all or a part, with these ranks.

    Every rank finds the same ones, from where tensors lie on which rank. Of a row for several tensors the
    first counts.
    """
    if len(node_ranks) < 2:
        return {}
    found: dict[Place, tuple[int, ...]] = {}
    alike: dict[int, tuple[int, ...]] = {}  # by identity: most slices have one tuple of all ranks in common
    boxes: dict[
        Hashable, tuple[tuple[int, tuple[Box, ...]], ...]
    ] = {}  # by layout: many tensors have the same one
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
        if len(ranks) > 1:
            found[place] = ranks
    return found


def _layout(leaf: torch.Tensor) -> Hashable | None:
    """What decides where the parts of a DTensor lie; None for a plain tensor."""
    if not is_dtensor(leaf):
        return None
    return id(leaf.device_mesh), tuple(leaf.placements), tuple(leaf.shape)  # type: ignore[attr-defined]


def _meet(one: Box, other: Box) -> bool:
    """Whether two boxes share an element."""
    return all(a < b + n and b < a + m for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True))


def _target(copy: Copy, targets: list[LiveSlice]) -> Target:
    tensor = targets[copy.target].tensor
    if tuple(tensor.shape) != copy.shape:
        ends = zip(copy.target_start, copy.shape, strict=True)
        tensor = tensor[tuple(slice(begin, begin + size) for begin, size in ends)]
    return Target(tensor=tensor, source_start=copy.source_start)
