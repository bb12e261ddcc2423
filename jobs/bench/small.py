"""Time of a save for each of many small tensors: 20,000 of 4 KiB, of which no optimizer knows.

The state is a dict of tensors, and then a module with as many parameters. Blocked time is what `save` takes,
through the whole service on a Ray of one node; beside it torch copies the same tensors in one call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jobs.bench.context import Context
from jobs.bench.row import Reference, Row, compared
from jobs.bench.training import Saves, local_ray

NUM_TENSORS = 20_000
QUICK_TENSORS = 500
NUM_ELEMENTS = 1024  # elements of each tensor
LIMIT_US = 5.0  # time per tensor in a warm save
NUM_FIRST = 3  # saves before the samples, after which every buffer has been used


def rows(context: Context) -> Iterator[Row]:
    num = QUICK_TENSORS if context.quick else NUM_TENSORS
    with context.temporary() as folder, local_ray(folder):
        tensors = [torch.randn(NUM_ELEMENTS) for _ in range(num)]
        named = {f"t{index}": tensor for index, tensor in enumerate(tensors)}
        yield from _saves("dict", "a dict", tensors, {"tensors": named}, context, folder)
        module = nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in named.items()})
        yield from _saves("module", "a module", list(module.values()), {"model": module}, context, folder)


def _saves(
    kind: str, of: str, tensors: list[torch.Tensor], items: dict[str, Any], context: Context, folder: Path
) -> Iterator[Row]:
    num, saves = len(tensors), Saves(items, folder, f"small-{kind}")
    saves.wait_ready()
    targets = [torch.zeros_like(tensor, requires_grad=False) for tensor in tensors]

    def save() -> float:
        blocked_s = saves.save()
        saves.settle()
        return blocked_s

    @torch.no_grad()
    def copy() -> float:
        start_s = time.perf_counter()
        torch._foreach_copy_(targets, tensors)
        return time.perf_counter() - start_s

    def per_tensor(seconds: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(each / num * 1e6 for each in seconds)

    first_s, *_ = [save() for _ in range(NUM_FIRST)]
    copy()
    what = f"warm save of {num:,} small tensors in {of}, each"
    beside = ("torch._foreach_copy_", copy)
    row = compared(f"small-{kind}", what, "us", save, beside, repeat=context.repeat, convert=per_tensor)
    yield row
    yield Row(
        name=f"small-{kind}-limit",
        what=what,
        unit="us",
        samples=row.samples,
        reference=Reference(name="limit", samples=(LIMIT_US,)),
        reach="<= 1",
        machine=row.machine,
    )
    yield Row(
        name=f"small-{kind}-first",
        what="the first save of them, each",
        unit="us",
        samples=per_tensor((first_s,)),
        reference=Reference(name="warm save", samples=row.samples),
        machine=row.machine,
    )
    saves.close()
