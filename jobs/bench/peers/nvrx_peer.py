"""NVRx's LocalCheckpointManager, synchronous: its asynchronous path calls torch.cuda.synchronize().

NVRx's wrapper of state dicts requires tensors on CUDA; the wrapper here differs only in that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nvidia_resiliency_ext.checkpointing.local.basic_state_dict as states  # type: ignore[import-not-found]
import nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager as managers  # type: ignore[import-not-found]

from jobs.bench.peers.child import Live, Peer, main, parser
from jobs.bench.peers.dcp import start_group


class CpuStateDict(states.BasicTensorAwareStateDict):  # type: ignore[misc]
    def __init__(self, state: dict[str, Any]) -> None:
        self.state_dict = state
        self._is_hollow = False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Do nothing: the tensors are on the CPU already."""


class Nvrx(Peer):
    """NVRx, with one manager and folder per save, because a manager names files and deletes older ones."""

    def __init__(self) -> None:
        start_group()
        self.manager: Any = None

    def save(self, live: Live, folder: Path, step: int) -> Iterator[str]:
        self.manager = managers.LocalCheckpointManager(folder)
        self.manager.save(CpuStateDict(live.state_dict()), step, is_async=False)
        return iter(())

    def load(self, live: Live, folder: Path, step: int, *, cached: bool) -> None:
        assert self.manager.find_latest() == step
        found, _ = self.manager.load()
        live.load_state_dict(found.state_dict)


if __name__ == "__main__":
    main(lambda live: Nvrx(), parser().parse_args())
