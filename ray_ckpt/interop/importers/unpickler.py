"""Pickles as data: builtin values, and `Foreign` objects where a pickle names a class or a function.

A pickle is a program that may call whatever it names. Here a name gives a class of no behaviour, which keeps
what the pickle passes to it, and only names in ALLOWED are taken at all: anything else is an error with the
name, and nothing of it is imported. `values.py` interprets the few kinds that have a meaning.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ray_ckpt.errors import CheckpointError, ConfigError, CorruptionError, FormatError

MAX_PICKLE_BYTES = 256 << 20  # of one pickle: metadata of some 100,000 slices; others are far smaller


def _named(form: str, words: str) -> set[str]:
    """Return `form` with each of the words in place of its star."""
    return {form.replace("*", word) for word in words.split()}


_VALUES = {
    *_named("builtins.*", "bool bytearray bytes complex dict float frozenset int list set str tuple"),
    *_named("collections.*", "OrderedDict Counter defaultdict"),
    *_named("pathlib.*", "PosixPath _local.PosixPath"),
    "_codecs.encode",  # bytes, in old protocols
    *_named("numpy.*", "dtype ndarray"),
    *_named("numpy._core.multiarray.*", "scalar _reconstruct"),
    *_named("numpy.core.multiarray.*", "scalar _reconstruct"),  # before numpy 2
    *_named("torch.*", "Size device Tensor nn.parameter.Parameter serialization._get_layout"),
    *_named(
        "torch.*", "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64"
    ),
    *_named("torch.float8_*", "e4m3fn e5m2 e4m3fnuz e5m2fnuz e8m0fnu"),
    *_named(
        "torch.*", "complex32 complex64 complex128 quint8 qint8 qint32 per_tensor_affine per_channel_affine"
    ),
    *_named("torch.*Storage", "Bool Byte Char Short Int Long Half BFloat16 Float Double ComplexFloat"),
    *_named("torch.*Storage", "ComplexDouble QInt8 QUInt8 QInt32 Untyped storage.Untyped"),
    "torch._tensor._rebuild_from_type_v2",
    *_named("torch._utils._rebuild_*", "tensor_v2 tensor_v3 parameter parameter_with_state sparse_tensor"),
    *_named("torch._utils._rebuild_*", "sparse_csr_tensor nested_tensor qtensor meta_tensor_no_storage"),
    *_named(
        "torch._utils._rebuild_*", "wrapper_subclass device_tensor_from_numpy device_tensor_from_cpu_tensor"
    ),
}
_METADATA = {
    *_named(
        "torch.distributed.checkpoint.metadata.*",
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
        "_MEM_FORMAT_ENCODING MetadataIndex StorageMeta",
    ),
    *_named("torch.distributed.checkpoint.filesystem.*", "_StorageInfo _StoragePrefix"),
    *_named(
        "torch.distributed.checkpoint.planner.*",
        "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    ),
    *_named("megatron.core.dist_checkpointing.strategies.torch.*", "MCoreMetadata MCoreSavePlan"),
}
_DEEPSPEED = {
    *_named("deepspeed.runtime.fp16.loss_scaler.*", "LossScaler DynamicLossScaler"),
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
_SHARDED = {
    "torch.distributed.tensor.DTensor",
    *_named("torch.distributed.tensor._dtensor_spec.*", "DTensorSpec TensorMeta ShardOrderEntry"),
    *_named("torch.distributed.tensor.placement_types.*", "Shard Replicate _StridedShard"),
    "torch.distributed.device_mesh.DeviceMesh",
    *_named("torch.distributed._mesh_layout.*", "_MeshLayout _FlatLayout"),
    "torch.distributed._tensor.api.DTensor",  # before torch 2.5
    *_named("torch.distributed._tensor.placement_types.*", "DTensorSpec TensorMeta Shard Replicate"),
}
_MEGATRON = {
    "argparse.Namespace",
    "_io.BytesIO",
    *_named("megatron.core.enums.*", "ModelType Fp8Recipe Fp4Recipe"),
    *_named(
        "megatron.core.transformer.enums.*", "AttnBackend AttnMaskType AttnType LayerType CudaGraphScope"
    ),
}
ALLOWED = {
    "pt": frozenset(_VALUES),
    "dcp": frozenset(_VALUES | _METADATA),
    "deepspeed": frozenset(_VALUES | _DEEPSPEED),
    "torch_dist": frozenset(_VALUES | _MEGATRON),
    "verl": frozenset(_VALUES | _SHARDED),
}
"""The names that a pickle may have, by the format of the import."""


class _Sealed(type):
    """A class that a pickle cannot change."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise pickle.UnpicklingError("it sets an attribute of a class")


class Foreign(metaclass=_Sealed):
    """An instance, or the result of a call, of the name `kind`: what the pickle passes to it, and no more.

    `entries` are the key-value pairs that it puts into it, as into a dict.
    """

    __slots__ = ("args", "entries", "state")
    kind = ""

    def __new__(cls, *args: Any) -> Foreign:
        made = super().__new__(cls)
        made.args, made.state, made.entries = args, None, []
        return made

    args: tuple[Any, ...]
    state: Any
    entries: list[tuple[Any, Any]]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries.append((key, value))


STORAGE = "a storage"  # kind of the result of a persistent id, whose args are that id


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: frozenset[str], where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed
        self._where = where
        self._classes: dict[str, type[Foreign]] = {}

    def find_class(self, module: str, name: str) -> Any:
        kind = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if kind not in self._allowed:
            raise ConfigError(
                f"{self._where} has {kind}, which is not on the list of names that an import takes.",
                hint="Nothing of it was run. Save the checkpoint again without that object.",
                name=kind,
            )
        return self._class(kind)

    def persistent_load(self, pid: Any) -> Foreign:
        return self._class(STORAGE)(*(pid if type(pid) is tuple else (pid,)))

    def _class(self, kind: str) -> type[Foreign]:
        if kind not in self._classes:
            made: Any = _Sealed(kind, (Foreign,), {"__slots__": (), "kind": kind})
            self._classes[kind] = made
        return self._classes[kind]


def unpickle(data: bytes, *, form: str, where: str) -> Any:
    """Return the value of a pickle, with Foreign objects and, for bare names, subclasses of Foreign.

    `where` names the file in errors. Raise ConfigError for a name that is not in `ALLOWED[form]`,
    CorruptionError for a damaged pickle.
    """
    try:
        return _Unpickler(data, ALLOWED[form], where).load()
    except ConfigError:
        raise
    except Exception as error:  # on damaged bytes the unpickler raises anything
        raise damaged(where, error) from error


def kind_of(value: Any) -> str:
    """Return the name for which a value stands, or of which it is the result; "" for builtin values."""
    if isinstance(value, Foreign) or (isinstance(value, type) and issubclass(value, Foreign)):
        return value.kind
    return ""


@contextmanager
def interpreting(where: str) -> Iterator[None]:
    """Convert errors of values of another type than expected, in the block, to a CorruptionError."""
    try:
        yield
    except FormatError as error:
        raise damaged(where, error.message.removesuffix(".")) from error
    except CheckpointError:
        raise
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise damaged(where, error) from error


def damaged(where: str, error: object) -> CorruptionError:
    """Return the error for a file whose content does not fit together."""
    text = str(error) or type(error).__name__
    return CorruptionError(f"{where} is damaged: {text[:200]}.", hint="Copy the file again.", file=where)
