"""torch.distributed.checkpoint in four modes; one rank with a gloo group, which async_save requires.

`thread` is async_save with its defaults, `process` writes from another process, `shared` stages into shared
memory that is kept between saves, which the authors call the mode without overhead (pinned memory and the
copy thread are off, because they need CUDA). The number of writer threads is that of the cores.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
    save,
)

from jobs.bench.peers.child import RETURNED, STAGED, Live, Peer, main, parser

SHARED = StagingOptions(
    use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
)


class Dcp(Peer):
    def __init__(self, way: str) -> None:
        start_group()
        self.way = way
        self.stager = DefaultStager(SHARED) if way == "shared" else None

    def save(self, live: Live, folder: Path, step: int) -> Iterator[str]:
        state = dcp_state(live)
        writer = FileSystemWriter(folder, thread_count=os.cpu_count() or 1)
        if self.way == "sync":
            save(state, storage_writer=writer)
            return
        process = self.way in ("process", "shared")
        answer = async_save(
            state,
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS
            if process
            else AsyncCheckpointerType.THREAD,
            async_stager=self.stager,
        )
        yield RETURNED
        if isinstance(answer, AsyncSaveResponse):
            answer.staging_completion.result()
            answer = answer.upload_completion
        yield STAGED
        answer.result()

    def load(self, live: Live, folder: Path, step: int, *, cached: bool) -> None:
        load(dcp_state(live), checkpoint_id=folder)  # loads in place

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


def dcp_state(live: Live) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(live.model),
        "optimizer": get_optimizer_state_dict(live.model, live.optimizer),
    }


def start_group() -> None:
    """Open a process group of this process alone, which some libraries need."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
    )
    dist.init_process_group("gloo", rank=0, world_size=1)


if __name__ == "__main__":
    arguments = parser()
    arguments.add_argument("way", choices=("sync", "thread", "process", "shared"))
    chosen = arguments.parse_args()
    main(lambda live: Dcp(chosen.way), chosen)
