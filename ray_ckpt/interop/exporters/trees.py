"""The trees of saved items on their way into an export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_ckpt.capture.walk import replace_refs
from ray_ckpt.catalog.lazy_tensor import LazyTensor


def with_tensors(tree: Any, tensors: Mapping[str, LazyTensor]) -> Any:
    """Return a value to pickle: the tree with loaded tensors in place of TensorRefs, and torch's dtypes."""
    return replace_refs(tree, lambda ref, path: tensors[ref.key].load())
