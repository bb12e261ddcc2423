"""Checkpoints of other formats, read as the items and tensors of one checkpoint of ray_ckpt.

Nothing that a file names is imported or called, and memory does not grow with the tensors. `open_source`
reads and checks all that is small; the bytes of tensors are read when the checkpoint is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from ray_ckpt.interop.importers.dcp import read_directory
from ray_ckpt.interop.importers.deepspeed import read_tag
from ray_ckpt.interop.importers.huggingface import read_folder
from ray_ckpt.interop.importers.source import Imported
from ray_ckpt.interop.importers.torch_dist import read_torch_dist
from ray_ckpt.interop.importers.torch_file import read_file
from ray_ckpt.interop.importers.universal import read_universal
from ray_ckpt.interop.importers.verl import read_ranks

Form: TypeAlias = Literal["dcp", "hf", "pt", "deepspeed", "universal", "verl", "torch_dist"]

_READERS = {
    "dcp": read_directory,
    "hf": read_folder,
    "pt": read_file,
    "deepspeed": read_tag,
    "universal": read_universal,
    "verl": read_ranks,
    "torch_dist": read_torch_dist,
}


def open_source(form: Form, source: Path) -> Imported:
    """Return the checkpoint at `source`.

    Raise ConfigError for a source of another kind, or with names that are not on the list; UnsupportedLeaf
    for a value that a checkpoint cannot hold; CorruptionError if a file is missing or damaged.
    """
    return _READERS[form](source)
