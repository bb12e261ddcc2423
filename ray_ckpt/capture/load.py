"""Bytes back into live state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ray_ckpt.capture.items import Item
from ray_ckpt.capture.sinks import Target, sink_for
from ray_ckpt.capture.walk import (
    DTYPES,
    Box,
    LiveSlice,
    boxes_on,
    map_leaves,
    resolve_leaves,
    slices_of,
    walk,
)
from ray_ckpt.errors import MismatchError
from ray_ckpt.format.names import shard_file
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.plan.restore import Copy, Read, plan_restore
from ray_ckpt.restore import Place, Sink, SourceReader, place_of
from ray_ckpt.types import ManifestRow

MAX_LISTED = 20  # differences named in one error


def load_items(
    items: Mapping[str, Item],
    state: Mapping[str, Any],
    rows: Iterable[ManifestRow],
    reader: SourceReader,
    *,
    rank: int,
    world_size: int,
    node_ranks: Sequence[int] = (),
) -> Callable[[], None]:
    """Read the tensors of `items` and return what puts the rest in place, to be called once all ranks can.

    Tensors that live already are filled in place; missing ones (an optimizer that has not stepped) are
    made with the placement of what they belong to. MismatchError lists what does not fit, before any
    byte is read; what `reader` could not get is in its `damage`, and then live tensors hold parts of it.
    What several of `node_ranks` (the ranks of this node) hold alike is read by their agent if it can.
    """
    saved_trees, rows = state["items"], list(rows)
    _check_names(items, saved_trees)
    saved_slices = {row.slice.key: row.slice for row in rows if row.slice is not None}
    walked = walk(items, rank=rank, world_size=world_size)
    live: dict[str, torch.Tensor] = {}
    targets: list[LiveSlice] = []
    problems: list[str] = []
    here = _tensors_by_ref(items, walked.trees)
    everyone = tuple(range(world_size))
    slices = {part.slice.key: part for part in walked.slices}
    for name, item in items.items():
        wanted = _refs(saved_trees[name])
        for key, path in wanted.items():
            tensor = None if item.per_rank else here.get(key)
            if tensor is not None:
                live[key] = tensor
                targets.extend([slices[key]] if key in slices else [])  # an empty local part is no slice
                continue
            saved = saved_slices.get(key)
            if saved is None:
                problems.append(f"{key}: not in the checkpoint's manifest")
                continue
            live[key] = item.allocate(path, saved.global_shape, DTYPES[saved.dtype])
            item_name, _, _ = key.partition(".")
            ranks = everyone if item.is_shared(path) else (rank,)
            targets.extend(slices_of(live[key], item=item_name, path=_path_in(key, item_name), ranks=ranks))
        problems += [f"{name}.{problem}" for problem in item.problems(saved_trees[name])]
    own_file = shard_file(rank, world_size)
    plan = plan_restore([target.slice for target in targets], rows, prefer_file=own_file)
    problems += plan.problems
    if problems:
        listed = "; ".join(problems[:MAX_LISTED]) + ("; ..." if len(problems) > MAX_LISTED else "")
        raise MismatchError(
            f"The checkpoint of step {state['step']} does not fit, {len(problems)} differences: {listed}.",
            hint="Build the same model as the run that saved it, or start another run name.",
            problems=tuple(problems),
        )
    _read(plan.reads, targets, reader, node_ranks)

    def load_all() -> None:
        for name, item in items.items():
            item.load(resolve_leaves(saved_trees[name], live))

    return load_all


def _check_names(items: Mapping[str, Item], saved: Mapping[str, Any]) -> None:
    missing, unexpected = sorted(set(items) - set(saved)), sorted(set(saved) - set(items) - {"rng"})
    if missing or unexpected:
        raise MismatchError(
            f"The checkpoint has other items: missing in it {missing}, unexpected {unexpected}.",
            hint="Register the same items as the run that saved it.",
            missing=tuple(missing),
            unexpected=tuple(unexpected),
        )


def _refs(tree: Any) -> dict[str, tuple[str, ...]]:
    """Every tensor key of a saved tree with its path in the item."""
    found: dict[str, tuple[str, ...]] = {}

    def visit(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, TensorRef):
            found[value.key] = path
            return value
        return map_leaves(value, visit, path)

    visit(tree, ())
    return found


def _tensors_by_ref(items: Mapping[str, Item], trees: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The live tensors of shared items by key. A DTensor with an empty local part is there too."""
    tensors: dict[str, torch.Tensor] = {}
    for name, item in items.items():
        if item.per_rank:
            continue

        def visit(value: Any, path: tuple[str, ...], name: str = name) -> Any:
            if isinstance(value, torch.Tensor):
                tensors[".".join((name, *path))] = value
                return value
            return map_leaves(value, lambda v, p: visit(v, p, name), path)

        visit(item.tree(), ())
    return tensors


def _path_in(key: str, item_name: str) -> tuple[str, ...]:
    rest = key[len(item_name) + 1 :]
    return (rest,) if rest else ()


def _read(
    reads: Iterable[Read], targets: list[LiveSlice], reader: SourceReader, node_ranks: Sequence[int]
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
    reader.read(rows, sink_of, _sharers(by_place, targets, node_ranks))
    for device in devices:
        torch.cuda.synchronize(device)


def _sharers(
    reads: Mapping[Place, Read], targets: list[LiveSlice], node_ranks: Sequence[int]
) -> dict[Place, tuple[int, ...]]:
    """The rows of which several ranks of this node want all or a part, with these ranks.

    Every rank finds the same ones, from where tensors lie on which rank. Of a row for several tensors the
    first counts.
    """
    if len(node_ranks) < 2:
        return {}
    found: dict[Place, tuple[int, ...]] = {}
    alike: dict[int, tuple[int, ...]] = {}  # by identity: most slices have one tuple of all ranks in common
    boxes: dict[Hashable, tuple[tuple[int, Box], ...]] = {}  # by layout: many tensors have the same one
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
                boxes[layout] = tuple(boxes_on(target.leaf, sorted(node_ranks)))
            ranks = tuple(rank for rank, box in boxes[layout] if _meet(box, (saved.offset, saved.shape)))
        if len(ranks) > 1:
            found[place] = ranks
    return found


def _layout(leaf: torch.Tensor) -> Hashable | None:
    """What decides where the parts of a DTensor lie; None for a plain tensor."""
    mesh = getattr(leaf, "device_mesh", None)
    return None if mesh is None else (id(mesh), tuple(leaf.placements), tuple(leaf.shape))  # type: ignore[attr-defined]


def _meet(one: Box, other: Box) -> bool:
    """Whether two boxes share an element."""
    return all(a < b + n and b < a + m for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True))


def _target(copy: Copy, targets: list[LiveSlice]) -> Target:
    tensor = targets[copy.target].tensor
    if tuple(tensor.shape) != copy.shape:
        ends = zip(copy.target_start, copy.shape, strict=True)
        tensor = tensor[tuple(slice(begin, begin + size) for begin, size in ends)]
    return Target(tensor=tensor, source_start=copy.source_start)
