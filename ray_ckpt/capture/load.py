"""Bytes back into live state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ray_ckpt.capture.items import Item
from ray_ckpt.capture.walk import DTYPES, LiveSlice, map_leaves, resolve_leaves, slices_of, walk
from ray_ckpt.errors import MismatchError
from ray_ckpt.format.names import shard_file
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.plan.restore import Read, plan_restore
from ray_ckpt.restore import SourceReader
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
) -> Callable[[], None]:
    """Read the tensors of `items` and return what puts the rest in place, to be called once all ranks can.

    Tensors that live already are filled in place; missing ones (an optimizer that has not stepped) are
    made with the placement of what they belong to. MismatchError lists what does not fit, before any
    byte is read; what `reader` could not get is in its `damage`.
    """
    saved_trees, rows = state["items"], list(rows)
    _check_names(items, saved_trees)
    saved_slices = {row.slice.key: row.slice for row in rows if row.slice is not None}
    walked = walk(items, rank=rank, world_size=world_size)
    live: dict[str, torch.Tensor] = {}
    targets: list[LiveSlice] = []
    problems: list[str] = []
    here = _tensors_by_ref(items, walked.trees)
    for name, item in items.items():
        wanted = _refs(saved_trees[name])
        for key, path in wanted.items():
            tensor = None if item.per_rank else here.get(key)
            if tensor is None:
                saved = saved_slices.get(key)
                if saved is None:
                    problems.append(f"{key}: not in the checkpoint's manifest")
                    continue
                tensor = item.allocate(path, saved.global_shape, DTYPES[saved.dtype])
            live[key] = tensor
            item_name, _, _ = key.partition(".")
            found = slices_of(tensor, item=item_name, path=_path_in(key, item_name), ranks=(rank,))
            targets.extend(found)
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
    _read(plan.reads, targets, reader)

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


def _read(reads: Iterable[Read], targets: list[LiveSlice], reader: SourceReader) -> None:
    by_place = {(read.row.file, read.row.byte_offset): read for read in reads}

    def take(row: ManifestRow, data: bytearray | bytes) -> None:
        assert row.slice is not None
        raw = torch.frombuffer(bytearray(data) if isinstance(data, bytes) else data, dtype=torch.uint8)
        source = raw.view(DTYPES[row.slice.dtype]).view(row.slice.shape)
        for copy in by_place[(row.file, row.byte_offset)].copies:
            part = source[_box(copy.source_start, copy.shape)]
            with torch.no_grad():
                targets[copy.target].tensor[_box(copy.target_start, copy.shape)].copy_(part)

    reader.read([read.row for read in reads], take)


def _box(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(start, shape, strict=True))
