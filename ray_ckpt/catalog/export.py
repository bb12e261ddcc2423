"""Export of a checkpoint for other tools: safetensors in Hugging Face's layout, or one `.pt` file.

Files are written under temporary names and renamed when all of them are complete and every byte has been
compared with its digest; after an error no file is left. An existing folder is not replaced, only the files
in it: the folder may be a mount, a link or a working directory. In Hugging Face's layout, the files are
`model.safetensors`, or `model-00001-of-00002.safetensors` ... with `model.safetensors.index.json`, which
names the file of each tensor; see https://huggingface.co/docs/safetensors and
huggingface_hub.split_torch_state_dict_into_shards.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np

from ray_ckpt.catalog.catalog import Catalog, CheckpointView
from ray_ckpt.catalog.lazy_tensor import Bytes, LazyTensor, matching_tensors
from ray_ckpt.catalog.load import OpenedCheckpoint, OpenedRun
from ray_ckpt.errors import ConfigError
from ray_ckpt.format.shard import ITEMSIZE, MAX_HEADER_BYTES
from ray_ckpt.location import without_tilde
from ray_ckpt.storage.output_file import output_file, whole_file
from ray_ckpt.types import ProgressCallback

MAX_FILE_BYTES = 5 * 10**9  # bytes of tensors per file, unless one tensor is larger; as Hugging Face does
WINDOW_BYTES = 64 << 20  # of a file that are mapped at a time, or one larger tensor
INDEX_FILE = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"(adapter_)?model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")
MAX_NAMED = 5  # files in one error
METADATA = "__metadata__"  # the only key of a header that is not a tensor


class SavedTensor(Protocol):
    """A tensor to write: a LazyTensor, or one computed from several."""

    @property
    def dtype_name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def check(self) -> None:
        """Raise CorruptionError if it is known already that the tensor cannot be read."""

    def read_into(self, out: Bytes) -> None:
        """Write the bytes of the tensor to `out`, an array of bytes with its shape and an inner dimension."""


Saved = TypeVar("Saved", bound=SavedTensor)


def export_safetensors(
    view: CheckpointView,
    out: Path,
    *,
    item: str | None = None,
    only: Sequence[str] = (),
    max_file_bytes: int = MAX_FILE_BYTES,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> tuple[Path, ...]:
    """Write whole tensors to the folder `out` and return the files. Memory does not grow with the tensors.

    With `item` the tensors of one item are exported under their names in it, otherwise all tensors under
    their full names. `only` has full names or patterns of them. `progress` is called with the bytes of each
    tensor. `force` permits a folder that is not empty; only `model.safetensors`, the shards that its index
    lists, and files with the names of new ones are replaced.

    Raise ConfigError if no tensor is selected, or if `out` cannot be used or has other weights,
    CorruptionError for damage, OSError if `out` cannot be written.
    """
    tensors = _chosen(view, item, only)
    return write_safetensors(_parts(tensors, max_file_bytes), out, force=force, progress=progress)


def write_safetensors(
    shards: Sequence[Mapping[str, SavedTensor]],
    out: Path,
    *,
    stem: str = "model",
    files: Mapping[str, bytes] = MappingProxyType({}),
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> tuple[Path, ...]:
    """Write each shard, tensors by name, to a file in the folder `out`; one shard is `<stem>.safetensors`.

    `files` are small ones beside them. Returns all files, the small ones last. Options and errors are those
    of `export_safetensors`.
    """
    shards = [_sorted(shard) for shard in shards]
    headers = [_header(shard) for shard in shards]
    names = [_file_name(stem, k, len(shards)) for k in range(len(shards))]
    replaced = {*names, *_earlier(out, stem)}
    with export_folder(out, force=force, weights=_WEIGHTS, replaced=replaced) as folder:
        for name, header, shard in zip(names, headers, shards, strict=True):
            _write(folder / name, header, shard, progress or (lambda nbytes: None))
        if len(shards) > 1:
            names.append(INDEX_FILE)
            (folder / INDEX_FILE).write_text(_index(names, shards))
        for name, data in files.items():
            (folder / name).write_bytes(data)
        names += files
    return tuple(out / name for name in names)


def export_torch(
    catalog: Catalog,
    view: CheckpointView,
    out: Path,
    *,
    item: str | None = None,
    only: Sequence[str] = (),
    force: bool = False,
) -> tuple[Path, ...]:
    """Write one `.pt` file: {item: state}, the state of `item`, or {full name: tensor} for `only`.

    `view` is a live durable checkpoint of `catalog`. `torch.load(weights_only=True)` can load the file,
    because numpy arrays, such as numpy's random state, are converted to tensors. Where ranks have different
    values, those of rank 0 are written. The function needs as much memory as the state.

    Raise ConfigError if there is no such item or name, if `out` exists and `force` is false, or if only
    pickle could load a value; RestoreError or CorruptionError for damage; OSError if `out` cannot be written.
    """
    import torch

    target = output_file(out, force=force)
    if item is not None and only:
        raise ConfigError("A .pt file takes either an item or patterns.", hint="Give one of them.")
    view.files()  # ConfigError if there are none
    state = OpenedCheckpoint(OpenedRun(catalog), view).load(list(only) or item)
    with whole_file(target) as file:
        with file.open("wb") as opened:  # torch raises no OSError if it opens the file itself
            torch.save(_without_numpy(state), opened)
            os.fsync(opened.fileno())
        try:
            torch.load(file, weights_only=True, mmap=True)
        except Exception as error:  # the unpickler may raise anything
            raise ConfigError(
                "The state has values that torch.load(weights_only=True) refuses.",
                hint="Export one item, such as the model.",
            ) from error
    return (without_tilde(out),)


def _without_numpy(value: Any) -> Any:
    """Replace numpy arrays by tensors, if torch has their dtype, and numpy scalars by Python numbers."""
    import torch

    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value.copy())
        except TypeError:
            return value
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _without_numpy(each)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value)(_without_numpy(each) for each in value)
    return value


def _chosen(view: CheckpointView, item: str | None, only: Sequence[str]) -> dict[str, LazyTensor]:
    """Return the tensors to export, by their names in the export."""
    tensors = view.tensors()
    items = sorted({lazy.item for lazy in tensors.values()})
    if item is not None and item not in items:
        raise ConfigError(f"There is no item {item!r} with tensors.", hint=f"There are {', '.join(items)}.")
    found = {name: lazy for name, lazy in tensors.items() if item is None or lazy.item == item}
    wanted = matching_tensors(only, sorted(found))
    chosen = {name: lazy for name, lazy in found.items() if not only or name in wanted}
    if not chosen:
        raise ConfigError("The checkpoint has no tensors.")
    return chosen if item is None else {lazy.short_name or item: lazy for lazy in chosen.values()}


def _parts(tensors: Mapping[str, Saved], max_bytes: int) -> list[dict[str, Saved]]:
    """Distribute tensors, in their order, over parts of at most `max_bytes`, or of one larger tensor."""
    parts: list[dict[str, Saved]] = [{}]
    size_bytes = 0
    for name, lazy in tensors.items():
        if parts[-1] and size_bytes + lazy.nbytes > max_bytes:
            parts.append({})
            size_bytes = 0
        parts[-1][name] = lazy
        size_bytes += lazy.nbytes
    return parts


def _sorted(shard: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
    """Sort the tensors of a file from wide to narrow dtypes."""
    return dict(sorted(shard.items(), key=lambda pair: -ITEMSIZE[pair[1].dtype_name]))


def _header(shard: Mapping[str, SavedTensor]) -> bytes:
    """Return the header of a safetensors file. Each tensor is aligned, because wide dtypes come first."""
    entries: dict[str, object] = {METADATA: {"format": "pt"}}
    at = 0
    for name, lazy in shard.items():
        if name == METADATA:
            raise ConfigError(
                f"A safetensors file cannot have a tensor named {name}.",
                hint="Export it by its full name, without --item, or with --to torch.",
            )
        span = [at, at := at + lazy.nbytes]
        entries[name] = {"dtype": lazy.dtype_name, "shape": list(lazy.shape), "data_offsets": span}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ConfigError("There are too many tensors for one file.", hint="Give a smaller --max-file.")
    return len(text).to_bytes(8, "little") + text


def _write(path: Path, header: bytes, shard: Mapping[str, SavedTensor], progress: ProgressCallback) -> None:
    """Write one file. Tensors are read into a memory map of the file, which the kernel writes back."""
    size_bytes = len(header) + sum(lazy.nbytes for lazy in shard.values())
    for lazy in shard.values():
        lazy.check()  # before space is allocated
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)  # else a full disk raises SIGBUS in mapped memory
        file.write(header)
    at = len(header)
    for window in _parts(shard, WINDOW_BYTES):
        _write_window(path, at, list(window.values()), progress)
        at += sum(lazy.nbytes for lazy in window.values())
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_window(path: Path, at: int, window: Sequence[SavedTensor], progress: ProgressCallback) -> None:
    """Read consecutive tensors into the bytes of a file from `at` on."""
    left = np.empty(0, np.uint8)
    if size_bytes := sum(lazy.nbytes for lazy in window):
        mapped = np.memmap(path, np.uint8, "r+", offset=at, shape=(size_bytes,))
        left = mapped.view(np.ndarray)
    for lazy in window:
        place, left = left[: lazy.nbytes], left[lazy.nbytes :]
        if lazy.nbytes:
            lazy.read_into(place.reshape(*lazy.shape, ITEMSIZE[lazy.dtype_name]))
        progress(lazy.nbytes)
    if size_bytes:
        mapped.flush()


def _index(names: Sequence[str], shards: Sequence[Mapping[str, SavedTensor]]) -> str:
    weights = {key: name for name, shard in zip(names, shards, strict=False) for key in shard}
    size_bytes = sum(lazy.nbytes for shard in shards for lazy in shard.values())
    document = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(weights.items()))}
    return json.dumps(document, indent=2) + "\n"


def _earlier(out: Path, stem: str) -> set[str]:
    """Return the names of the weights of an earlier export in `out`: one file, or the files of its index."""
    names = {f"{stem}.safetensors"}
    try:
        listed = json.loads((out / INDEX_FILE).read_text())["weight_map"].values()
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, or not in this form
        return names
    return {*names, INDEX_FILE, *map(str, listed)}


def _file_name(stem: str, index: int, count: int) -> str:
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{index + 1:05}-of-{count:05}.safetensors"


@contextmanager
def export_folder(
    out: Path, *, force: bool, weights: re.Pattern[str] | None = None, replaced: Collection[str] = ()
) -> Iterator[Path]:
    """Give a temporary folder, whose files are moved to the folder `out` if no error occurs.

    It is made in `out`, or beside a missing `out`. `force` permits an `out` that is not empty. `weights` are
    the names of all files there that a reader would take for the export: those in `replaced` are deleted
    when the new files are complete, and others are refused. A file with the name of a new one is replaced.
    Raise ConfigError if `out` cannot be used.
    """
    if os.path.lexists(out) and not out.is_dir():
        raise ConfigError(f"{out} is not a folder.", hint="Give a folder for the files.")
    there = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if there and not force:
        raise ConfigError(f"{out} is not empty.", hint="Give another folder, or --force.")
    old = [name for name in there if weights is not None and weights.fullmatch(name)]
    if others := [name for name in old if name not in replaced]:
        more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        raise ConfigError(
            f"{out} has other weights: {', '.join(others[:MAX_NAMED])}{more}.",
            hint="Give another folder. If an interrupted or another export left them, delete them.",
        )
    whole = out.absolute()
    place = whole if whole.is_dir() else whole.parent
    if not place.is_dir():
        raise ConfigError(f"There is no folder {place}.", hint="Create it first.")
    path = place / f".{whole.name}.{token_hex(4)}.tmp"
    try:
        path.mkdir()
        yield path
        _publish(path, out, old)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _publish(folder: Path, out: Path, old: Sequence[str]) -> None:
    """Rename `folder` to `out`; if `out` exists, delete the `old` files and move the new, the index last."""
    if not out.is_dir():
        folder.rename(out.absolute())
        return
    for name in old:
        (out / name).unlink(missing_ok=True)
    for file in sorted(folder.iterdir()):
        file.replace(out / file.name)
