"""A model folder of Hugging Face: safetensors files as the item `model`, the small files as `files`.

The names of the tensors are those of the files. Files of pickles are not read and not taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from ray_ckpt.errors import ConfigError, CorruptionError
from ray_ckpt.format import jsontext
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.interop.importers.safetensors_file import StoredTensor, read_header
from ray_ckpt.interop.importers.source import Imported, file_size, read_bytes, read_range
from ray_ckpt.types import Slice

MODEL, FILES = "model", "files"  # the items
INDEX_FILE = "model.safetensors.index.json"
WHOLE_FILES = ("model.safetensors", "adapter_model.safetensors")
SHARDS = "shard-*-model-*.safetensors"  # of distributed saves, with slices
MAX_INDEX_BYTES = 64 << 20  # of the index; one of 100,000 tensors has 10 MB
MAX_FILES_BYTES = 64 << 20  # of the small files together; tokenizers have some 20 MB
SMALL_FILES = (
    "config.json",
    "*_config.json",
    "tokenizer*",
    "special_tokens*",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
)
_NEVER = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.safetensors", "*.py", "*.index.json")


def read_folder(source: Path) -> Imported:
    """Return the model in a folder.

    Raise ConfigError if the folder has no safetensors of a model, CorruptionError if a file is missing or
    damaged.
    """
    if not source.is_dir():
        raise ConfigError(f"{source} is no folder.", hint="Give the folder of a model.")
    imported = Imported(format="hf", source=source)
    imported.items[MODEL] = _add_model(imported, _model_tensors(source))
    if files := add_small_files(imported, source):
        imported.items[FILES] = files
    return imported


# The model


def _model_tensors(source: Path) -> Iterator[StoredTensor]:
    """Yield the tensors. As in Transformers, a whole file counts before an index that does not name it."""
    wanted = _index(source / INDEX_FILE) if (source / INDEX_FILE).exists() else {}
    if wanted and (WHOLE_FILES[0] in wanted.values() or not (source / WHOLE_FILES[0]).exists()):
        yield from _indexed(source, wanted)
        return
    whole = [source / name for name in WHOLE_FILES if (source / name).exists()][:1]
    paths = whole or sorted(source.glob(SHARDS))
    if not paths:
        raise _without_model(source)
    for path in paths:
        yield from read_header(path)


def _without_model(source: Path) -> ConfigError:
    pickles = sorted(path.name for path in source.glob("*.bin"))
    if pickles:
        hint = "Save the model again with save_pretrained, or give that file to `ray-ckpt import pt`."
        return ConfigError(f"{source} has its weights in {pickles[0]} only, a pickle.", hint=hint)
    return ConfigError(
        f"{source} has no safetensors of a model.", hint=f"There must be {WHOLE_FILES[0]} or {INDEX_FILE}."
    )


def _indexed(source: Path, wanted: Mapping[str, str]) -> Iterator[StoredTensor]:
    """Yield the tensors that the index names, each from its file."""
    for name in sorted({*wanted.values()}):
        if Path(name).name != name:
            raise CorruptionError(f"{source / INDEX_FILE} names the file {name!r}, outside of the folder.")
        found = {tensor.name: tensor for tensor in read_header(source / name)}
        for key in (key for key, file in wanted.items() if file == name):
            if key not in found:
                raise CorruptionError(
                    f"{source / name} does not have {key}, which the index names.",
                    hint="Copy the whole checkpoint.",
                    file=str(source / name),
                )
            yield found[key]


def _index(path: Path) -> dict[str, str]:
    size = file_size(path)
    if size > MAX_INDEX_BYTES:
        raise ConfigError(f"{path} has {size} bytes; at most {MAX_INDEX_BYTES} are read.")
    document = jsontext.mapping(
        jsontext.loads(
            read_bytes(path, 0, size), what=str(path), max_bytes=MAX_INDEX_BYTES, final_newline=False
        ),
        str(path),
    )
    weights = jsontext.mapping(document.get("weight_map"), f"weight_map of {path}")
    return {name: jsontext.text(file, name) for name, file in weights.items()}


def _add_model(imported: Imported, tensors: Iterable[StoredTensor]) -> dict[str, TensorRef]:
    """Add the slices to `imported`; return the tree."""
    by_name: defaultdict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in tensors:
        by_name[tensor.name].append(tensor)
    for name, parts in by_name.items():
        _check_parts(name, parts)
        global_shape = _global_shape(parts)
        for part in parts:
            imported.tensors.setdefault(_slice(part, global_shape), part.read)
    return {name: TensorRef(f"{MODEL}.{name}") for name in by_name}


def _check_parts(name: str, parts: Sequence[StoredTensor]) -> None:
    """Raise CorruptionError unless the parts can be slices of one tensor; the writer checks the coverage."""
    for part in parts:
        dims = {len(parts[0].shape), len(part.shape), len(_offset(part))}
        if len(dims) > 1 or (len(parts) > 1 and part.saved_offsets is None):
            raise CorruptionError(
                f"{part.path}: {name} does not fit the slices of it elsewhere.", file=str(part.path)
            )


def _global_shape(parts: Sequence[StoredTensor]) -> tuple[int, ...]:
    ends = (map(sum, zip(_offset(part), part.shape, strict=True)) for part in parts)
    return tuple(map(max, zip(*ends, strict=True)))


def _offset(part: StoredTensor) -> tuple[int, ...]:
    return (0,) * len(part.shape) if part.saved_offsets is None else part.saved_offsets


def _slice(part: StoredTensor, global_shape: tuple[int, ...]) -> Slice:
    return Slice(
        item=MODEL,
        name=part.name,
        dtype=part.dtype,
        global_shape=global_shape,
        offset=_offset(part),
        shape=part.shape,
    )


# The small files


def add_small_files(imported: Imported, source: Path) -> dict[str, TensorRef]:
    """Add the configuration and the tokenizer in a folder to `imported`; return the tree."""
    return _add_files(imported, _small_files(source))


def _small_files(source: Path) -> Iterator[tuple[Path, int]]:
    """Yield the configuration and the files of the tokenizer, with their sizes; empty files are left."""
    room = MAX_FILES_BYTES
    for path in sorted(source.iterdir()):
        if not _is_small_file(path.name) or not path.is_file() or not (size := path.stat().st_size):
            continue
        room -= size
        if room < 0:
            raise ConfigError(
                f"The configuration and the tokenizer in {source} have more than {MAX_FILES_BYTES} bytes.",
                hint=f"Move {path.name} elsewhere, if the model does not need it.",
            )
        yield path, size


def _is_small_file(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in SMALL_FILES) and not any(
        fnmatchcase(name, pattern) for pattern in _NEVER
    )


def _add_files(imported: Imported, files: Iterable[tuple[Path, int]]) -> dict[str, TensorRef]:
    tree = {}
    for path, size in files:
        part = Slice(item=FILES, name=path.name, dtype="U8", global_shape=(size,), offset=(0,), shape=(size,))
        imported.tensors[part] = partial(read_range, path, 0, size)
        tree[path.name] = TensorRef(part.key)
    return tree
