"""Checkpoints of other formats, read as the items and tensors of one checkpoint of ray_ckpt.

Nothing that a file names is imported or called, and memory does not grow with the tensors. `open_source`
reads and checks all that is small; the bytes of tensors are read when the checkpoint is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from ray_ckpt.errors import FormatError, UnsupportedLeaf
from ray_ckpt.format.manifest import check_coverage
from ray_ckpt.interop.importers.dcp import read_directory
from ray_ckpt.interop.importers.deepspeed import read_tag
from ray_ckpt.interop.importers.huggingface import read_folder
from ray_ckpt.interop.importers.source import Imported
from ray_ckpt.interop.importers.torch_dist import read_torch_dist
from ray_ckpt.interop.importers.torch_file import read_file
from ray_ckpt.interop.importers.universal import read_universal
from ray_ckpt.interop.importers.verl import read_ranks
from ray_ckpt.types import ManifestRow

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
    for a value that a checkpoint cannot hold; CorruptionError if a file is missing or damaged, or if tensors
    have elements that are in no file.
    """
    try:
        imported = _READERS[form](source)
        check_coverage(
            ManifestRow(kind="slice", file="", byte_offset=0, nbytes=0, digest="", slice=part)
            for part in imported.tensors
        )
    except (FormatError, UnsupportedLeaf) as error:
        raise (error if str(source) in error.message else error.at(str(source))) from error
    return imported
