"""A folder of torch.distributed.checkpoint: its chunks as slices, its state dict as items.

`.metadata` is a pickle of the chunks of each tensor and of their places in the `.distcp` files; each chunk
and each object there is an archive of torch.save. Checkpoints that were saved without collectives have one
`__<rank>.metadata` for each rank. All files are checked before a byte is imported: sizes, places, and that
the chunks cover their tensors, which the writer does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ray_ckpt.errors import ConfigError, CorruptionError
from ray_ckpt.format import jsontext
from ray_ckpt.format.manifest import MAX_ROWS
from ray_ckpt.format.short import key_text
from ray_ckpt.format.tree import MAX_DEPTH, TensorRef
from ray_ckpt.interop.dcp.state import WHOLE, divides
from ray_ckpt.interop.importers.archive import TorchArchive
from ray_ckpt.interop.importers.source import Imported, cut_short, file_size, read_bytes
from ray_ckpt.interop.importers.tensors import DTYPES, refused, sizes, tensor_of
from ray_ckpt.interop.importers.unpickler import MAX_PICKLE_BYTES, Foreign, interpreting, kind_of, unpickle
from ray_ckpt.interop.importers.values import Values
from ray_ckpt.types import Slice

METADATA_FILE = ".metadata"
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_CLASSES = "torch.distributed.checkpoint.metadata"
_METADATA = (
    f"{_CLASSES}.Metadata",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
)
KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys of dicts and indices of lists of an entry of a state dict."""
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a chunk in its tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The archive of a chunk or of an object."""

    path: Path
    offset: int
    length: int

    def archive(self, form: str = "pt") -> TorchArchive:
        return TorchArchive(self.path, form=form, offset=self.offset, length=self.length)


@dataclass(slots=True, kw_only=True)
class Chunks:
    """A tensor: its dtype, as in a shard, and the places of its boxes."""

    dtype: str
    shape: tuple[int, ...]
    places: dict[Box, Place] = field(default_factory=dict)


@dataclass(slots=True)
class Content:
    """The entries of a checkpoint by their flat names, from its metadata files; the first one counts."""

    source: Path
    version: str = ""
    tensors: dict[str, Chunks] = field(default_factory=dict)
    objects: dict[str, Place] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)
    num_chunks: int = 0
    _sizes: dict[str, int] = field(default_factory=dict)  # of the files

    def add(self, metadata: Any, where: str) -> None:
        """Add the content of a metadata file. Raise the errors of `read_directory`."""
        with interpreting(where):
            fields = _fields(metadata, *_METADATA)
            self.version = self.version or str(fields.get("version") or "")
            self.paths |= {name: _path(path) for name, path in (fields.get("planner_data") or {}).items()}
            places = dict(self._places(fields["storage_data"]))
            for name, entry in fields["state_dict_metadata"].items():
                self._add_entry(jsontext.text(name, "a name"), entry, places)

    def _add_entry(self, name: str, entry: Any, places: Mapping[Any, Place]) -> None:
        if kind_of(entry) == f"{_CLASSES}.BytesStorageMetadata":
            self.objects.setdefault(name, _found(places, name, None))
            return
        fields = _fields(entry, f"{_CLASSES}.TensorStorageMetadata")
        found = Chunks(dtype=_dtype(name, fields["properties"]), shape=sizes(fields["size"]))
        chunks = self.tensors.setdefault(name, found)
        if (chunks.dtype, chunks.shape) != (found.dtype, found.shape):
            raise ValueError(f"{name} has another dtype or shape in another metadata file")
        self.num_chunks += len(fields["chunks"])
        if self.num_chunks > MAX_ROWS:
            raise ConfigError(f"{self.source} has more than {MAX_ROWS} chunks, the most of one manifest.")
        for chunk in fields["chunks"]:
            box = _fields(chunk, f"{_CLASSES}.ChunkStorageMetadata")
            offset, shape = sizes(box["offsets"]), sizes(box["sizes"])
            chunks.places.setdefault((offset, shape), _found(places, name, offset))

    def _places(self, storage: Mapping[Any, Any]) -> Iterator[tuple[Any, Place]]:
        for index, info in storage.items():
            key = _fields(index, f"{_CLASSES}.MetadataIndex")
            offset = key.get("offset")
            yield (key["fqn"], None if offset is None else sizes(offset)), self._place(info)

    def _place(self, info: Any) -> Place:
        """Return the place of an archive. Raise CorruptionError unless it is inside its file."""
        fields = _fields(info, "torch.distributed.checkpoint.filesystem._StorageInfo")
        if transforms := fields.get("transform_descriptors"):
            raise ConfigError(
                f"{self.source} is stored with {', '.join(map(str, transforms))}, which is not supported.",
                hint="Save it again without extensions.",
            )
        name = jsontext.text(fields["relative_path"], "relative_path")
        offset, length = (jsontext.integer(fields[key], key) for key in ("offset", "length"))
        if Path(name).name != name:
            raise ValueError(f"the file name {name!r} leads out of the folder")
        path = self.source / name
        if name not in self._sizes:
            self._sizes[name] = file_size(path)
        if offset + length > self._sizes[name]:
            raise cut_short(path)
        return Place(path=path, offset=offset, length=length)


def read_directory(source: Path) -> Imported:
    """Return the checkpoint in a folder.

    Raise ConfigError for a folder without metadata, with names that are not on the list, or with transforms;
    UnsupportedLeaf for a value that a checkpoint cannot hold; CorruptionError if a file is missing, damaged
    or too short.
    """
    content = read_content(source)
    imported = Imported(format="dcp", source=source, version=content.version)
    imported.items.update(_trees(content, imported))
    return imported


def read_content(source: Path) -> Content:
    """Return the entries in the metadata files of a folder. Raise the errors of `read_directory`."""
    content = Content(source)
    for path in _metadata_files(source):
        size = file_size(path)
        if size > MAX_PICKLE_BYTES:
            raise ConfigError(f"{path} has {size} bytes; at most {MAX_PICKLE_BYTES} are read.")
        content.add(unpickle(read_bytes(path, 0, size), form="dcp", where=str(path)), str(path))
    return content


def _metadata_files(source: Path) -> list[Path]:
    if (source / METADATA_FILE).exists():
        return [source / METADATA_FILE]
    found = [path for path in source.glob("__*.metadata") if _RANK_METADATA.fullmatch(path.name)]
    if not found:
        raise ConfigError(
            f"{source} is no checkpoint of torch.distributed.checkpoint: it has no {METADATA_FILE}.",
            hint="Its save may not have ended; give the folder of another step.",
        )
    return sorted(found, key=lambda path: int(path.name[2:].partition(".")[0]))


def _trees(content: Content, imported: Imported) -> dict[str, Any]:
    """Return the items' trees, and add all tensors to `imported`."""
    values = Values(imported)
    paths = {name: content.paths.get(name, (name,)) for name in (*content.tensors, *content.objects)}
    if not divides(str(path[0]) for path in paths.values()):
        paths = {name: (WHOLE, *path) for name, path in paths.items()}
    trees = _Node()
    for name, chunks in content.tensors.items():
        _put(trees, paths[name], add_tensor(values, _names(paths[name]), chunks))
    for name, place in content.objects.items():
        archive = place.archive()
        _put(trees, paths[name], values.take(archive.value(), archive, _names(paths[name])))
    return {str(item): _tree(node) for item, node in trees.items()}


def _names(path: KeyPath) -> tuple[str, ...]:
    return tuple(map(key_text, path))


def add_tensor(values: Values, path: tuple[str, ...], chunks: Chunks) -> TensorRef:
    """Add the chunks of a tensor as slices under the name of `path`. Raise UnsupportedLeaf without chunks."""
    made = [
        (
            Slice(
                item=path[0],
                name=".".join(path[1:]),
                dtype=chunks.dtype,
                global_shape=chunks.shape,
                offset=offset,
                shape=shape,
            ),
            place,
        )
        for (offset, shape), place in chunks.places.items()
    ]
    if not made:
        raise refused(path, "is a tensor without chunks")
    return values.add((part, partial(_read_chunk, place, part)) for part, place in made)


def _read_chunk(place: Place, part: Slice) -> Iterator[memoryview]:
    """Yield the bytes of a chunk. Raise CorruptionError if its archive has another tensor."""
    archive = place.archive()
    with interpreting(f"{place.path} at byte {place.offset}"):
        tensor = tensor_of(archive.value(), (part.key,))
        if (tensor.dtype, tensor.shape) != (part.dtype, part.shape):
            raise ValueError(f"{part.key} is {tensor.dtype} {list(tensor.shape)} there")
        read = tensor.reader(archive)
    yield from read()


# The metadata


def _fields(value: Any, *kinds: str) -> dict[str, Any]:
    """Return the attributes of an instance of one of these classes."""
    if not isinstance(value, Foreign) or value.kind not in kinds or type(value.state) is not dict:
        raise ValueError(f"it has {kind_of(value) or type(value).__name__} in place of {kinds[0]}")
    return value.state


def _found(places: Mapping[Any, Place], name: str, offset: tuple[int, ...] | None) -> Place:
    if (name, offset) not in places:
        raise ValueError(f"{name}{'' if offset is None else f' at {list(offset)}'} is in no file")
    return places[name, offset]


def _dtype(name: str, properties: Any) -> str:
    """Return the dtype of a tensor as in a shard. Raise UnsupportedLeaf if it cannot be stored."""
    dtype, layout, *_ = properties.state
    if kind_of(dtype) not in DTYPES or layout.args != ("torch.strided",):
        raise refused((name,), f"is a tensor of {kind_of(dtype)} and {''.join(map(str, layout.args))}")
    return DTYPES[kind_of(dtype)]


def _path(path: Any) -> KeyPath:
    if type(path) is not tuple or not 0 < len(path) <= MAX_DEPTH or {*map(type, path)} - {str, int}:
        raise ValueError("a key of the state dict is no path")
    return path


# Nested state dicts


class _Node(dict[str | int, Any]):
    """A dict or a list of a state dict; its values are nodes or leaves."""


def _put(root: _Node, path: Iterable[str | int], value: Any) -> None:
    *above, last = path
    node = root
    for key in above:
        node = node.setdefault(key, _Node())
        if not isinstance(node, _Node):
            raise CorruptionError(f"The entry {'.'.join(map(str, path))} lies inside of another one.")
    if node.setdefault(last, value) is not value:
        raise CorruptionError(f"There are two entries {'.'.join(map(str, path))}.")


def _tree(value: Any) -> Any:
    """Return nodes with indices as lists, without the places of empty containers, which DCP leaves out."""
    if not isinstance(value, _Node):
        return value
    if {*map(type, value)} == {int}:
        return [_tree(value[index]) for index in sorted(value)]
    return {str(key): _tree(each) for key, each in value.items()}
