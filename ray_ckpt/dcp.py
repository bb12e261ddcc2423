"""torch.distributed.checkpoint (DCP) through ray_ckpt: `Writer` and `Reader`; see docs/guides/dcp.md."""

from __future__ import annotations

from ray_ckpt.interop.dcp.reader import Reader
from ray_ckpt.interop.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
