"""The trees of saved items on their way into an export."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ray_ckpt.capture.load import tensor_refs
from ray_ckpt.capture.walk import replace_refs
from ray_ckpt.catalog.lazy_tensor import LazyTensor
from ray_ckpt.errors import ConfigError
from ray_ckpt.texts import count_text
from ray_ckpt.trainer.rank_items import RESERVED_ITEM


def with_tensors(tree: Any, tensors: Mapping[str, LazyTensor]) -> Any:
    """Return a value to pickle: the tree with loaded tensors in place of TensorRefs, and torch's dtypes."""
    return replace_refs(tree, lambda ref, path: tensors[ref.key].load())


def check_whole(
    trees: Mapping[str, Any], tensors: Mapping[str, LazyTensor], items: Collection[str] | None = None
) -> None:
    """Raise ConfigError unless the trees, those of one rank, have all tensors of `items`; None means all.

    Ranks of a pipeline have other tensors each. Random state, and all that each rank has for itself, may
    be missing.
    """
    held = {ref.key for tree in trees.values() for ref in tensor_refs(tree).values()}
    missing = [
        name
        for name, lazy in tensors.items()
        if name not in held
        and (lazy.item in items if items is not None else not RESERVED_ITEM.fullmatch(lazy.item))
    ]
    if missing:
        first = f"{', such as' if len(missing) > 1 else ':'} {min(missing)}"
        raise ConfigError(
            f"Rank 0 lacks {count_text(len(missing), 'tensor')}{first}, which other ranks have saved; this "
            "format has one state for all ranks.",
            hint="Give --to safetensors, which has the tensors of all ranks.",
        )
