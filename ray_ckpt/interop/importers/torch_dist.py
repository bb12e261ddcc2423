"""A folder of Megatron-core in the format torch_dist: a directory of DCP with two more files.

`metadata.json` names the format, and `common.pt` has the values that are no shards. Keys of tensors are kept
as they are, so layers of equal shape are one tensor with an axis for the layer. Keys
`optimizer.state.<entry>.<key of a weight>` become the state of that weight, as of an optimizer of torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_ckpt.errors import ConfigError
from ray_ckpt.format import jsontext
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.interop.importers.archive import TorchArchive
from ray_ckpt.interop.importers.dcp import METADATA_FILE, Content, add_tensor, read_content
from ray_ckpt.interop.importers.flat import float32
from ray_ckpt.interop.importers.huggingface import MODEL
from ray_ckpt.interop.importers.source import MAX_CONFIG_BYTES, Imported, file_size, read_bytes
from ray_ckpt.interop.importers.unpickler import interpreting
from ray_ckpt.interop.importers.values import Values
from ray_ckpt.types import Slice

OPTIMIZER, OBJECTS, COMMON = "optimizer", "objects", "common"
CONFIG_FILE, COMMON_FILE = "metadata.json", "common.pt"
STATE = re.compile(r"optimizer\.state\.([^.]+)\.(.+)")
STEP = "step"
_OPTIMIZERS = ("optimizer.", "chained_")  # beginnings of keys


class MegatronValues(Values):
    """Reader of values with the classes of Megatron, which become plain ones."""

    def _foreign(self, kind: str, value: Any, path: tuple[str, ...], archive: TorchArchive) -> Any:
        if not isinstance(value, type):
            if kind == "_io.BytesIO":
                return bytes(value.state[0])
            if kind == "argparse.Namespace":
                return self._visit(dict(value.state), path, archive)
            if kind.startswith("megatron."):  # an enum
                (number,) = value.args
                return self._visit(number, path, archive)
        return super()._foreign(kind, value, path, archive)


def read_torch_dist(source: Path) -> Imported:
    """Return the checkpoint in a folder.

    The items are `model` and `optimizer` with the tensors by their keys, `objects` with the sharded objects,
    and `common`. Raise ConfigError for a folder of another kind, UnsupportedLeaf for a value that a
    checkpoint cannot hold, CorruptionError if a file is missing or damaged.
    """
    _check_config(source)
    common_file = TorchArchive(source / COMMON_FILE, form="torch_dist")
    content = read_content(source)
    imported = Imported(format="torch_dist", source=source, version=content.version)
    values = MegatronValues(imported)
    common: dict[str, Any] = values.take(common_file.value(), common_file, (COMMON,))
    with interpreting(str(source / COMMON_FILE)):
        optimizer = _Optimizer(common, values)
    with interpreting(str(source / METADATA_FILE)):
        model = {
            name: add_tensor(values, (MODEL, name), chunks)
            for name, chunks in content.tensors.items()
            if not name.startswith(_OPTIMIZERS)
        }
        tree = optimizer.tree(content, model)
    imported.items.update({MODEL: model, OPTIMIZER: tree, OBJECTS: _objects(content, values), COMMON: common})
    for name in [name for name, tree in imported.items.items() if not tree]:
        del imported.items[name]
    return imported


def _check_config(source: Path) -> None:
    path = source / CONFIG_FILE
    if not path.exists():
        raise ConfigError(f"{source} is no checkpoint of Megatron-core: it has no {CONFIG_FILE}.")
    data = read_bytes(path, 0, min(file_size(path), MAX_CONFIG_BYTES))
    document = jsontext.loads(data, what=str(path), max_bytes=MAX_CONFIG_BYTES, final_newline=False)
    backend = jsontext.mapping(document, str(path)).get("sharded_backend")
    if backend != "torch_dist":
        raise ConfigError(f"{path} names the format {str(backend)[:40]!r}.", hint="torch_dist is imported.")


class _Optimizer:
    """The item of the optimizer: state by weights if Megatron's keys show them, else by its own keys."""

    def __init__(self, common: Mapping[str, Any], values: Values) -> None:
        self._values = values
        found = _inner(common)
        self._groups = found.get("param_groups")
        self._steps = found["state"].get("common_step") if isinstance(found.get("state"), dict) else None

    def tree(self, content: Content, model: Mapping[str, Any]) -> dict[str, Any]:
        """Add the tensors and return the tree."""
        states: dict[str, dict[str, Any]] = {}
        others: dict[str, Any] = {}
        for name, chunks in content.tensors.items():
            if not name.startswith(_OPTIMIZERS):
                continue
            match = STATE.fullmatch(name)
            if match is None or match[2] not in model:
                others[name] = add_tensor(self._values, (OPTIMIZER, name), chunks)
                continue
            path = (OPTIMIZER, "state", match[2], match[1])
            states.setdefault(match[2], {})[match[1]] = add_tensor(self._values, path, chunks)
        if states and isinstance(self._steps, int):
            for name, state in states.items():
                state.setdefault(STEP, self._step(name, self._steps))
        groups = {"param_groups": self._groups} if self._groups else {}
        return {**others, **({"state": states, **groups} if states else {})}

    def _step(self, name: str, steps: int) -> TensorRef:
        key = f"state.{name}.{STEP}"
        part = Slice(item=OPTIMIZER, name=key, dtype="F32", global_shape=(), offset=(), shape=())
        return self._values.add([(part, float32(steps))])


def _inner(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state dict of torch's optimizer in `common.pt`, empty if there is none."""
    found: Any = common.get(OPTIMIZER) or {}
    while isinstance(found, dict) and isinstance(found.get(OPTIMIZER), dict):
        found = found[OPTIMIZER]
    return found if isinstance(found, dict) else {}


def _objects(content: Content, values: Values) -> dict[str, Any]:
    """Return the sharded objects by key and number of the shard, each as Megatron's list of one object."""
    found = {}
    for name, place in content.objects.items():
        archive = place.archive("torch_dist")
        found[name] = values.take(archive.value(), archive, (OBJECTS, name))
    return found
