"""The model of a sample run, in a module that imports little: processes of a test start sooner with it."""

from __future__ import annotations

import torch
from torch import nn


class Sample(nn.Module):
    """The model of a sample run; `sharded`: its weight is a DTensor over the four ranks of the group."""

    def __init__(self, rows: int, *, sharded: bool) -> None:
        super().__init__()
        block = nn.Module()
        block.register_parameter("weight", nn.Parameter(_weight(rows, sharded)))
        block.register_parameter("bias", nn.Parameter(torch.zeros(6)))
        self.blocks = nn.ModuleList([block])
        self.head = nn.Parameter(torch.zeros(4, 2 * rows, dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.zeros(0, 3))


def _weight(rows: int, sharded: bool) -> torch.Tensor:
    if not sharded:
        return torch.zeros(rows, 6)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (4,))
    return DTensor.from_local(torch.zeros(rows // 4, 6), mesh, [Shard(0)])
