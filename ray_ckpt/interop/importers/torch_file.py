"""A file of torch.save: its state dicts as items."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_ckpt.errors import ConfigError
from ray_ckpt.interop.dcp.state import WHOLE, divides
from ray_ckpt.interop.importers.archive import TorchArchive
from ray_ckpt.interop.importers.huggingface import MODEL
from ray_ckpt.interop.importers.source import Imported
from ray_ckpt.interop.importers.unpickler import kind_of
from ray_ckpt.interop.importers.values import Values, entries_of


def read_file(source: Path) -> Imported:
    """Return the checkpoint in a file.

    A dict of state dicts becomes an item for each key, if all keys can be names of items. A dict of tensors
    is the item `model`, anything else the item `state`. Raise ConfigError for a file of another kind,
    UnsupportedLeaf for a value that a checkpoint cannot hold, CorruptionError if the file is damaged.
    """
    if source.is_dir():
        raise ConfigError(f"{source} is a folder.", hint="Give a file of torch.save.")
    if not source.exists():
        raise ConfigError(f"{source} does not exist.", hint="Give a file of torch.save.")
    archive = TorchArchive(source, form="pt")
    imported = Imported(format="pt", source=source)
    values = Values(imported)
    for name, value in _items(archive.value()).items():
        imported.items[name] = values.take(value, archive, (name,))
    return imported


def _items(value: Any) -> Mapping[str, Any]:
    entries = entries_of(value)
    if entries is None:
        return {WHOLE: value}
    has_states = any(entries_of(each) is not None for each in entries.values())
    if has_states and all(type(key) is str for key in entries) and divides(entries):
        return entries
    is_model = bool(entries) and all("_rebuild_" in kind_of(each) for each in entries.values())
    return {MODEL if is_model else WHOLE: value}
