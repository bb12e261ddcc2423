"""The tensors of a checkpoint as a model directory of Hugging Face has them: hub names, tied ones once.

Transformers has other names in memory than in files for some models, and fuses tensors, such as the experts
of a mixture. What `save_pretrained` would write is found on an empty model of the saved configuration, on the
device "meta"; then the tensors are computed one after the other, and memory holds those of one layer at most.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import huggingface_hub
import torch
import transformers
from transformers import core_model_loading, modeling_utils

from ray_ckpt.capture.walk import DTYPE_NAMES, DTYPES
from ray_ckpt.catalog.lazy_tensor import Bytes
from ray_ckpt.catalog.load import OpenedCheckpoint
from ray_ckpt.catalog.uri import CheckpointUri
from ray_ckpt.errors import ConfigError
from ray_ckpt.format.shard import ITEMSIZE
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.interop.huggingface.files import DEFAULT_ADAPTER
from ray_ckpt.interop.packages import require
from ray_ckpt.location import StoragePath

FILES_ITEM = "files"
CONFIG, ADAPTER_CONFIG, GENERATION_CONFIG = "config.json", "adapter_config.json", "generation_config.json"
MAX_LISTED = 5  # names in one error
_LAYER = re.compile(r"(.*?\.\d+)\.")  # up to the first number in a name

State: TypeAlias = dict[str, torch.Tensor]
Convert: TypeAlias = Callable[[State], State]
"""Function that gives the tensors of a file for tensors in memory: all, or those of a layer."""


def tensors(
    checkpoint: OpenedCheckpoint | StoragePath,
    *,
    item: str = "model",
    dtype: torch.dtype | None = None,
    like: str | Path | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the whole tensor, on the CPU, of each tensor that `save_pretrained` would write.

    checkpoint:
        One checkpoint, such as `ray_ckpt.open_in_cluster(...)`, or the URI of a durable one:
        "s3://bucket/runs/gpt@3000"; without a step, the newest one.
    item:
        The item with the model.
    dtype:
        A dtype to which tensors of floating point are converted.
    like:
        A model directory with the configuration, if the checkpoint has no item `files`.

    The order is that of the layers. Memory holds the tensors of one layer at most. Raises ConfigError if the
    configuration is missing or is not that of the model, and the errors of `OpenedCheckpoint.load`.
    """
    opened = checkpoint
    if not isinstance(opened, OpenedCheckpoint):
        opened = CheckpointUri.parse(str(opened)).open(storage_options, items=(item, FILES_ITEM))
    model = HubModel(opened, item=item, dtype=dtype, like=Path(like) if like is not None else None)
    for name in model:
        yield name, model.load(name)


class HubModel(Mapping[str, "HubTensor"]):
    """Tensors to write, by hub name, in the order of `save_pretrained`; `files` are the small files."""

    def __init__(
        self,
        checkpoint: OpenedCheckpoint,
        *,
        item: str = "model",
        dtype: torch.dtype | None = None,
        like: Path | None = None,
    ) -> None:
        """Take the model of the item `item`; with `dtype`, its floating-point tensors are converted.

        The configuration is that of the checkpoint's item `files`, or of the model directory `like`. Reads no
        tensor. Raises ConfigError if there is none, if it is not that of the saved model, or if Transformers
        does not have the model's class.
        """
        _require()
        self._checkpoint = checkpoint
        self._cast = partial(_cast, dtype=dtype)
        self.files = _files_in(like) if like is not None else _files_of(checkpoint)
        self._keys = _keys(checkpoint, item)
        self._state: State = {
            name: self._cast(torch.empty(part.global_shape, dtype=DTYPES[part.dtype], device="meta"))
            for name, part in _slices(checkpoint, self._keys).items()
        }
        self.is_adapter = ADAPTER_CONFIG in self.files
        make = _adapter if self.is_adapter else _whole_model
        self._convert: Convert = make(self.files, self._state)
        self._whole: State = self._convert(self._state)
        self._renamed = _renamed(self._state, self._whole)
        self._parts = _divide(self._state, self._whole, self._renamed, self._convert)
        self._last: tuple[tuple[str, ...], State] = ((), {})
        self._settle_files()

    def __getitem__(self, name: str) -> HubTensor:
        tensor = self._whole[name]
        return HubTensor(self, name, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype])

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    @property
    def stem(self) -> str:
        """The name of the file of tensors, without its suffix."""
        return "adapter_model" if self.is_adapter else "model"

    def shards(self, max_file_bytes: int) -> list[dict[str, HubTensor]]:
        """Distribute the tensors over files as `save_pretrained` does: those of one storage stay together."""
        split = huggingface_hub.split_state_dict_into_shards_factory(
            self._whole,
            get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
            get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
            filename_pattern="{suffix}",
            max_shard_size=max_file_bytes,
        )
        return [{name: self[name] for name in names} for names in split.filename_to_tensors.values()]

    def load(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU; those that it is computed with stay until another needs others."""
        if (source := self._renamed.get(name)) is not None:
            self._last = (), {}
            return self._read((source,))[source]
        sources = self._parts[name]
        if self._last[0] != sources:
            self._last = (), {}  # frees them before others are read
            self._last = sources, self._convert(self._read(sources))
        return self._last[1][name]

    def _read(self, names: Sequence[str]) -> State:
        """Read tensors by their names in memory."""
        found = self._checkpoint.load([self._keys[name] for name in names])
        return {name: self._cast(found.pop(self._keys[name])) for name in names}

    def _settle_files(self) -> None:
        """Let the files be those that `save_pretrained` writes, with the dtype of these tensors."""
        if self.is_adapter:
            for name in (CONFIG, GENERATION_CONFIG):
                self.files.pop(name, None)
            return
        config = json.loads(self.files[CONFIG])
        dtypes = (tensor.dtype for tensor in self._whole.values() if tensor.dtype.is_floating_point)
        if (dtype := next(dtypes, None)) is not None:
            config["dtype"] = str(dtype).removeprefix("torch.")
        self.files[CONFIG] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


@dataclass(frozen=True, slots=True)
class HubTensor:
    """One tensor of a HubModel; `dtype_name` is safetensors' name."""

    model: HubModel
    name: str
    shape: tuple[int, ...]
    dtype_name: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype_name]

    def check(self) -> None:
        """Do nothing: every byte is compared with its digest when it is read."""

    def load(self) -> torch.Tensor:
        """Return the tensor on the CPU. Raises the errors of `OpenedCheckpoint.load`."""
        return self.model.load(self.name)

    def read_into(self, out: Bytes) -> None:
        """Write the tensor to `out`, bytes of shape (*shape, bytes of an element)."""
        data = self.load().contiguous().reshape(-1).view(torch.uint8).numpy()
        out[...] = data.reshape(out.shape)


def parse_dtype(name: str) -> torch.dtype:
    """Return a floating-point dtype by its name in torch. Raises ConfigError."""
    found = getattr(torch, name, None)
    if not (isinstance(found, torch.dtype) and found.is_floating_point and found in DTYPE_NAMES):
        raise ConfigError(
            f"The dtype is {name!r}.", hint="Give one of torch's for floating point, such as bfloat16."
        )
    return found


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.dtype.is_floating_point else tensor


def _require() -> None:
    names = ("remove_tied_weights_from_state_dict",)
    require("transformers", extra="huggingface", owner=modeling_utils, names=names)
    require(
        "transformers", extra="huggingface", owner=core_model_loading, names=("revert_weight_conversion",)
    )


# -- the checkpoint ----------------------------------------------------------------------------------------


def _keys(checkpoint: OpenedCheckpoint, item: str) -> dict[str, str]:
    """Return the full names of an item's tensors by their names in the item."""
    trees = checkpoint.saved().trees
    if item not in trees:
        raise ConfigError(f"There is no item {item!r}.", hint=f"There are {', '.join(sorted(trees))}.")
    found: dict[str, str] = {}
    for fragment in checkpoint.fragments():
        for row in fragment.rows:
            if row.slice is not None and row.slice.item == item:
                found[row.slice.name] = row.slice.key
    tree = trees[item] if isinstance(trees[item], dict) else {}
    return found | {name: ref.key for name, ref in tree.items() if isinstance(ref, TensorRef)}


def _slices(checkpoint: OpenedCheckpoint, keys: Mapping[str, str]) -> dict[str, Any]:
    rows = (row for fragment in checkpoint.fragments() for row in fragment.rows)
    found = {row.slice.key: row.slice for row in rows if row.slice is not None}
    return {name: found[key] for name, key in keys.items()}


def _files_of(checkpoint: OpenedCheckpoint) -> dict[str, bytes]:
    found = checkpoint.saved().trees.get(FILES_ITEM)
    tree = found if isinstance(found, dict) else {}
    if CONFIG not in tree or not all(isinstance(ref, TensorRef) for ref in tree.values()):
        raise ConfigError(
            f"Step {checkpoint.step} has no item {FILES_ITEM!r} with a configuration.",
            hint="Give a directory with the model's config.json: --like DIR.",
        )
    for name in tree:  # they become files of a folder
        if Path(str(name)).name != name or name == ".." or "\0" in name:
            raise ConfigError(f"{name!r} in the item {FILES_ITEM!r} is not the name of a file.")
    files: dict[str, torch.Tensor] = checkpoint.load(FILES_ITEM)
    return {name: tensor.numpy().tobytes() for name, tensor in files.items()}


def _files_in(folder: Path) -> dict[str, bytes]:
    """Return the small files of a model directory."""
    found = {path.name: path.read_bytes() for path in sorted(folder.glob("*")) if is_small(path)}
    if CONFIG not in found:
        raise ConfigError(f"{folder} has no config.json.", hint="Give a model directory.")
    return found


def is_small(path: Path) -> bool:
    """Return whether a file of a model directory is one of those beside the weights."""
    return (
        path.is_file() and path.suffix in (".json", ".txt", ".jinja", ".model") and "index" not in path.name
    )


# -- what save_pretrained writes ---------------------------------------------------------------------------


def _whole_model(files: Mapping[str, bytes], state: State) -> Convert:
    """Return the function that gives the state of a file for a part of the state in memory.

    Sorts `state` as the model has it.
    """
    with _folder(files) as folder:
        model = _empty_model(folder)
    order = list(model.state_dict())
    _check_names(type(model).__name__, state, order, tied=_tied(model))
    given = {name: state[name] for name in order if name in state}
    state.clear()
    state.update(modeling_utils.remove_tied_weights_from_state_dict(given, model))
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    return lambda part: core_model_loading.revert_weight_conversion(model, dict(part))


def _empty_model(folder: str) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, AttributeError, TypeError) as error:  # depends on the file's content
        raise ConfigError(
            f"{CONFIG} is not that of a model of Transformers {transformers.__version__}: "
            f"{str(error).partition('. ')[0].removesuffix('.')}.".replace(f"{folder}/", ""),
            hint="Give the model's own configuration: --like DIR.",
        ) from error
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        raise ConfigError(
            f"Transformers has no model {config.architectures}.",
            hint="Export the names in memory: --to safetensors --item model.",
        )
    with torch.device("meta"):
        return kind(config)


def _adapter(files: Mapping[str, bytes], state: State) -> Convert:
    """Return the function that gives the state of a PEFT adapter's file: of "default", or of the only one."""
    import peft
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    require("peft", extra="huggingface")
    with _folder(files) as folder:
        config = peft.PeftConfig.from_pretrained(folder)
        if config.is_prompt_learning:
            raise ConfigError(
                f"The adapter is a {config.peft_type.value}, whose file PEFT computes from a live model.",
                hint="Load the checkpoint into the model and call save_pretrained.",
            )
        base = _empty_model(folder)
        base.name_or_path = config.base_model_name_or_path  # else PEFT warns that it has changed
    name = _adapter_name(state, PEFT_TYPE_TO_PREFIX_MAPPING.get(config.peft_type, ""))
    with torch.device("meta"):
        model = peft.get_peft_model(base, config, adapter_name=name)
    return lambda part: peft.get_peft_model_state_dict(model, state_dict=dict(part), adapter_name=name)


def _adapter_name(state: State, prefix: str) -> str:
    """Return the name of the adapter to export: names follow the part with `prefix`, as in lora_A.NAME."""
    found = {
        after
        for key in state
        for part, after in pairwise(key.split("."))
        if prefix and part.startswith(prefix)
    }
    if not found or DEFAULT_ADAPTER in found:
        return DEFAULT_ADAPTER
    if len(found) > 1:
        raise ConfigError(
            f"The model has the adapters {_listed(sorted(found))}, and none is called {DEFAULT_ADAPTER}.",
            hint="Export all tensors with their names in memory: --to safetensors --item model.",
        )
    return found.pop()


def _tied(model: Any) -> set[str]:
    """Return the names of parameters that are another one too."""
    names: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    return {name for name, each in parameters if names.setdefault(id(each), name) != name}


def _check_names(kind: str, state: State, expected: Sequence[str], *, tied: set[str]) -> None:
    if unknown := sorted(set(state) - set(expected)):
        raise ConfigError(
            f"The configuration is that of {kind}, which has no {_listed(unknown)}.",
            hint="Give the model's own configuration: --like DIR.",
        )
    if missing := sorted(set(expected) - set(state) - tied):
        raise ConfigError(
            f"The configuration is that of {kind}, and the checkpoint has no {_listed(missing)}.",
            hint="Give the model's own configuration: --like DIR.",
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _renamed(state: State, whole: State) -> dict[str, str]:
    """Return the names in memory of those tensors of the file that are only renamed."""
    names = {id(tensor): name for name, tensor in state.items()}
    return {name: names[id(tensor)] for name, tensor in whole.items() if id(tensor) in names}


def _divide(
    state: State, whole: State, renamed: Mapping[str, str], convert: Convert
) -> dict[str, tuple[str, ...]]:
    """Return the tensors in memory from which each computed tensor of the file is computed.

    They are computed with those of their layer; if that gives other tensors than all together, with all.
    """
    computed = {name: tensor for name, tensor in whole.items() if name not in renamed}
    if not computed:  # as in an adapter: for some kinds, PEFT cannot convert a part of the state
        return {}
    taken = set(renamed.values())
    layers = defaultdict[str, list[str]](list)
    for name in state:
        if name not in taken:
            found = _LAYER.match(name)
            layers[found[1] if found else ""].append(name)
    parts: dict[str, tuple[str, ...]] = {}
    shapes: dict[str, torch.Size] = {}
    for together in layers.values():
        sources = tuple(together)
        for name, tensor in convert({name: state[name] for name in sources}).items():
            if name in computed:
                parts[name], shapes[name] = sources, tensor.shape
    if shapes != {name: tensor.shape for name, tensor in computed.items()}:
        return dict.fromkeys(computed, tuple(state))
    return parts


@contextmanager
def _folder(files: Mapping[str, bytes]) -> Iterator[str]:
    """Write small files to a temporary folder, for what reads them there only."""
    with TemporaryDirectory(prefix="ray_ckpt-") as folder:
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        yield folder
