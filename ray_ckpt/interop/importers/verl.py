"""A folder of one model that verl or SkyRL saved from FSDP: files of each rank with its DTensors.

`model_world_size_<W>_rank_<r>.pt` has the state dict of the model, `optim_...` that of the optimizer, by
number as torch does, and `extra_state_...` the scheduler and random state, which is left, beside fields of
SkyRL. `huggingface/` has the configuration and the tokenizer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from ray_ckpt.capture.wrappers import clean_name
from ray_ckpt.errors import ConfigError, CorruptionError, UnsupportedLeaf
from ray_ckpt.format import jsontext
from ray_ckpt.format.manifest import MAX_ROWS
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.interop.importers.archive import TorchArchive
from ray_ckpt.interop.importers.huggingface import FILES, MODEL, add_small_files
from ray_ckpt.interop.importers.sharded import Held, held_by, is_dtensor
from ray_ckpt.interop.importers.source import MAX_CONFIG_BYTES, Imported, ReadSlice, file_size, read_bytes
from ray_ckpt.interop.importers.tensors import tensor_of
from ray_ckpt.interop.importers.unpickler import Foreign, interpreting
from ray_ckpt.interop.importers.values import Values, entries_of
from ray_ckpt.types import Slice

OPTIMIZER, SCHEDULER, EXTRA = "optimizer", "scheduler", "extra"
CONFIG_FILE = "fsdp_config.json"
_FILE = re.compile(r"(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt")
_RANDOM = "rng"


class RankValues(Values):
    """Reader of the values of one rank; all ranks put their boxes into the same `found`."""

    def __init__(self, imported: Imported, found: defaultdict[str, dict[Slice, ReadSlice]]) -> None:
        super().__init__(imported)
        self._found = found

    def _tensor(self, value: Foreign, path: tuple[str, ...], archive: TorchArchive) -> TensorRef:
        if is_dtensor(value):
            shape, boxes = held_by(value, path)
        else:
            whole = tensor_of(value, path)
            shape, boxes = whole.shape, [Held((0,) * len(whole.shape), whole)]
            if path[0] == OPTIMIZER and shape and prod(shape) > 1:
                raise _flat(path)
        key = ".".join(path)
        for offset, tensor in boxes:
            part = Slice(
                item=path[0],
                name=".".join(path[1:]),
                dtype=tensor.dtype,
                global_shape=shape,
                offset=offset,
                shape=tensor.shape,
            )
            self._found[key].setdefault(part, tensor.reader(archive))
        return TensorRef(key)


def read_ranks(source: Path) -> Imported:
    """Return the checkpoint of one model.

    The items are `model`, `optimizer`, `scheduler` and `files`, of those that there are. Raise ConfigError
    for a folder of another kind, or if the optimizer is one of FSDP1; UnsupportedLeaf for a value that a
    checkpoint cannot hold; CorruptionError if a file is missing or damaged.
    """
    imported = Imported(format="verl", source=source)
    world_size, files = _rank_files(source)
    if "optim" in files and _fsdp_version(source) == 1:
        raise _flat((OPTIMIZER,))
    found: defaultdict[str, dict[Slice, ReadSlice]] = defaultdict(dict)
    values = RankValues(imported, found)
    for rank in range(world_size):
        trees = dict(_trees(values, {kind: paths[rank] for kind, paths in files.items()}))
        if not rank:
            imported.items.update(trees)
        elif _keys(trees) != _keys(imported.items):
            raise CorruptionError(f"{source} has other entries on rank {rank} than on rank 0.")
        if sum(map(len, found.values())) > MAX_ROWS:
            raise ConfigError(f"{source} has more than {MAX_ROWS} parts of tensors.")
    for parts in found.values():
        values.add(parts.items())
    if "extra_state" in files:
        imported.items.update(_extra(Values(imported), files["extra_state"][0]))
    if (source / "huggingface").is_dir() and (small := add_small_files(imported, source / "huggingface")):
        imported.items[FILES] = small
    return imported


def _rank_files(source: Path) -> tuple[int, dict[str, list[Path]]]:
    """Return the world size, and the files of each kind by rank."""
    found = [m for path in (source.iterdir() if source.is_dir() else ()) if (m := _FILE.fullmatch(path.name))]
    worlds = sorted({int(match[2]) for match in found})
    if len(worlds) != 1:
        what = f"files of {worlds} ranks" if worlds else "no files model_world_size_*_rank_*.pt"
        hint = "Give the folder of one model, such as global_step_3000/actor."
        raise ConfigError(f"{source} has {what}.", hint=hint)
    (world_size,) = worlds
    kinds = sorted({match[1] for match in found} | {"model"})
    files = {
        kind: [source / f"{kind}_world_size_{world_size}_rank_{rank}.pt" for rank in range(world_size)]
        for kind in kinds
    }
    for path in (path for paths in files.values() for path in paths):
        file_size(path)  # raises if it is missing
    return world_size, files


def _trees(values: RankValues, paths: Mapping[str, Path]) -> Iterator[tuple[str, Any]]:
    """Yield the items of a rank."""
    model = TorchArchive(paths["model"], form="verl")
    with interpreting(str(paths["model"])):
        named: dict[str, Any] = {}
        for full, value in _dict(model.value()).items():
            if (name := clean_name(str(full))) in named:
                raise ConfigError(f"{paths['model']} has several tensors with the name {name}.", name=name)
            named[name] = value
        yield MODEL, values.take(named, model, (MODEL,))
    if "optim" in paths:
        optimizer = TorchArchive(paths["optim"], form="verl")
        with interpreting(str(paths["optim"])):
            state = _dict(optimizer.value())
            if not state:  # SkyRL without an optimizer
                return
            if not {"state", "param_groups"} <= state.keys():
                raise ValueError("it is no state dict of one optimizer of torch")
            yield OPTIMIZER, values.take(state, optimizer, (OPTIMIZER,))


def _extra(values: Values, path: Path) -> Iterator[tuple[str, Any]]:
    archive = TorchArchive(path, form="verl")
    with interpreting(str(path)):
        state = _dict(archive.value())
        if state.get("lr_scheduler"):
            yield SCHEDULER, values.take(state["lr_scheduler"], archive, (SCHEDULER,))
        others = {key: value for key, value in state.items() if key not in ("lr_scheduler", _RANDOM)}
        if any(value is not None for value in others.values()):
            yield EXTRA, values.take(others, archive, (EXTRA,))


def _dict(value: Any) -> dict[Any, Any]:
    found = entries_of(value)
    if found is None:
        raise ValueError("it has no dict")
    return found


def _keys(tree: Any) -> Any:
    """Return the names of the tensors of a tree."""
    if isinstance(tree, TensorRef):
        return {tree.key}
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return {key for each in inner for key in _keys(each)}


def _fsdp_version(source: Path) -> int:
    path = source / CONFIG_FILE
    if not path.is_file():
        return 2
    data = read_bytes(path, 0, min(file_size(path), MAX_CONFIG_BYTES))
    document = jsontext.loads(data, what=str(path), max_bytes=MAX_CONFIG_BYTES, final_newline=False)
    return jsontext.integer(jsontext.mapping(document, str(path)).get("FSDP_version", 2), "FSDP_version")


def _flat(path: tuple[str, ...]) -> UnsupportedLeaf:
    return UnsupportedLeaf(
        f"{'.'.join(path)} is of FSDP1: it has flat tensors, without the shapes of the parameters.",
        hint="Save with strategy fsdp2, or move the files optim_* away to import the rest.",
        path=".".join(path),
    )
