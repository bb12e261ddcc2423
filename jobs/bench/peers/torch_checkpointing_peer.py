"""torch_checkpointing: shared staging buffers that are made beforehand, a copy thread, a writer process.

The staging thread needs no CUDA; pinned memory needs CUDA and is off. O_DIRECT is off too, because the
library's writes are not aligned and ext4 refuses them (EINVAL). The number of writer threads is that of the
cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch_checkpointing as tc  # type: ignore[import-not-found]
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig  # type: ignore[import-not-found]
from torch_checkpointing.config import AsyncCheckpointSaverConfig  # type: ignore[import-not-found]
from torch_checkpointing.staging import CheckpointStagerConfig  # type: ignore[import-not-found]
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig  # type: ignore[import-not-found]

from jobs.bench.peers.child import RETURNED, STAGED, Live, Peer, main, parser


class TorchCheckpointing(Peer):
    def __init__(self, live: Live) -> None:
        config = tc.CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(
                writer_config=CheckpointWriterConfig(file_write_max_threads=os.cpu_count() or 1),
                staging_config=CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False),
            ),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        self.manager = tc.CheckpointManager(config)
        self.manager.prewarm_staging(live.state_dict())
        # Ready before training begins, like the arena of ray_ckpt; the library has no call that waits for it.
        self.manager._prewarm_staging_future.result()
        self.manager._saver._checkpoint_process._creation_future.result()

    def save(self, live: Live, folder: Path, step: int) -> Iterator[str]:
        written = self.manager.save(str(folder), live.state_dict())
        yield RETURNED
        with self.manager.lock():  # as it is held around optimizer.step()
            pass
        yield STAGED
        written.result()

    def load(self, live: Live, folder: Path, step: int, *, cached: bool) -> None:
        live.load_state_dict(self.manager.load(str(folder), into=live.state_dict()))

    def close(self) -> None:
        self.manager.close()


if __name__ == "__main__":
    main(TorchCheckpointing, parser().parse_args())
