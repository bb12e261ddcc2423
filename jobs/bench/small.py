"""Time of a save and a restore for each of many small tensors: 20,000 of 4 KiB.

The state is a dict of tensors, then a module with as many parameters, and then a module with a fourth of them
and AdamW, whose state has three tensors for each parameter, one of them a number. Blocked time is what `save`
takes, through the whole service on a Ray of one node; torch copies the same tensors in one call in turn with
it. A restore is one by a new group, from its call to its return.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from jobs.bench.context import Context
from jobs.bench.row import Reference, Row, measure
from jobs.bench.training import Saves, local_ray

NUM_TENSORS = 20_000
QUICK_TENSORS = 500
NUM_ELEMENTS = 1024  # elements of each tensor
LIMIT_US = 5.0  # time per tensor in a warm save
NUM_FIRST = 3  # saves before the samples, after which every buffer has been used


def rows(context: Context) -> Iterator[Row]:
    num = QUICK_TENSORS if context.quick else NUM_TENSORS
    tensors = [torch.randn(NUM_ELEMENTS) for _ in range(num)]
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    named = {f"t{index}": tensor for index, tensor in enumerate(tensors)}
    module = nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in named.items()})

    def copy() -> float:
        start_s = time.perf_counter()
        torch._foreach_copy_(targets, tensors)
        return (time.perf_counter() - start_s) / num * 1e6

    num_params = num // 4  # each with three tensors of state
    trained = nn.ParameterDict({name: named[name].clone() for name in list(named)[:num_params]})
    optimizer = torch.optim.AdamW(trained.parameters())
    for param in trained.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()

    kinds: dict[str, tuple[str, Mapping[str, Any]]] = {
        "dict": ("a dict", {"tensors": named}),
        "module": ("a module", {"model": module}),
        "optimizer": ("a module and AdamW", {"model": trained, "optimizer": optimizer}),
    }
    with context.temporary() as folder, local_ray(folder):
        for kind, (label, items) in kinds.items():
            saves = Saves(items, folder, f"small-{kind}")
            saves.wait_ready()
            for _ in range(NUM_FIRST):
                saves.save_and_settle()
                copy()
            name, what = f"small-{kind}", f"warm save of {num:,} small tensors in {label}, each"
            sample = lambda: saves.save_and_settle() / num * 1e6  # noqa: B023, E731  # used before the next
            beside = ("torch._foreach_copy_", copy)
            yield (row := measure(name, what, "us", sample, beside=beside, repeat=context.repeat))
            limit = Reference(name="limit", samples=(LIMIT_US,))
            yield Row(
                name=f"{name}-limit", what=what, unit="us", samples=row.samples, reference=limit, reach="<= 1"
            )
            saves.close()

            def restore(name: str = name, items: Mapping[str, Any] = items) -> float:
                again = Saves(items, folder, name)
                assert again.step, "nothing was restored"
                again.close()
                return again.restored_s / num * 1e6

            what = f"restore of {num:,} small tensors in {label}, each"
            yield measure(f"{name}-restore", what, "us", restore, beside=beside, repeat=context.repeat)
