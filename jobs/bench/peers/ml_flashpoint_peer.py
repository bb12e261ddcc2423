"""ML Flashpoint's memory storage under DCP's async_save, in tmpfs, as its guide has it for plain DCP.

Unlike in the guide, saves run in a thread: in another process, the writer of 0.0.10 lacks objects that exist
only in the trainer's process. With one node there is no copy on a paired node. The files are in memory:
`complete` means that they are complete in memory; nothing is on a disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from ml_flashpoint.adapter.pytorch.memory_storage_reader import (  # type: ignore[import-not-found]
    MemoryStorageReader,
)
from ml_flashpoint.adapter.pytorch.memory_storage_writer import (  # type: ignore[import-not-found]
    MemoryStorageWriter,
)
from ml_flashpoint.checkpoint_object_manager import (  # type: ignore[import-not-found]
    checkpoint_object_manager as objects,
)
from ml_flashpoint.core import checkpoint_loader, checkpoint_saver  # type: ignore[import-not-found]
from ml_flashpoint.core.checkpoint_id_types import (  # type: ignore[import-not-found]
    CheckpointContainerId,
)
from ml_flashpoint.replication.replication_manager import (  # type: ignore[import-not-found]
    PairwiseReplicationStrategy,
    ReplicationManager,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from jobs.bench.peers.child import RETURNED, STAGED, Live, Peer, main, parser
from jobs.bench.peers.dcp import dcp_state, start_group

BASE = Path("/dev/shm/ray_ckpt-bench")
ADDRESS = "127.0.0.1:0"  # no other node copies to this address
SPARE = 1.3  # buffer for one save with headers, as a multiple of the state's size


class MlFlashpoint(Peer):
    def __init__(self, size_bytes: int) -> None:
        start_group()
        os.environ["NNODES"] = "1"
        shutil.rmtree(BASE, ignore_errors=True)  # files of a killed run
        self.container = CheckpointContainerId(str(BASE))
        manager = objects.CheckpointObjectManager()
        replicas = ReplicationManager()
        # By default, ML Flashpoint counts GPUs to find the number of ranks per node.
        replicas.initialize(manager, repl_strategy=PairwiseReplicationStrategy([ADDRESS], 1))
        started: Future[Any] = Future()
        started.set_result(mp.get_context("spawn").Manager())
        self.writer = MemoryStorageWriter(
            checkpoint_saver=checkpoint_saver.DefaultMLFlashpointCheckpointSaver(
                global_rank_getter=dist.get_rank,
                local_rank_getter=dist.get_node_local_rank,
                global_barrier_func=dist.barrier,
                ckpt_obj_manager=manager,
                replication_manager=replicas,
                initial_buffer_size_bytes=int(size_bytes * SPARE),
            ),
            mp_manager_future=started,
            thread_count=os.cpu_count() or 1,
        )
        self.loader = checkpoint_loader.DefaultMLFlashpointCheckpointLoader(
            checkpoint_object_manager=manager,
            replication_manager=replicas,
            global_rank_getter=dist.get_rank,
            local_rank_getter=dist.get_node_local_rank,
            broadcast_object_list_func=dist.broadcast_object_list,
            all_gather_object_func=dist.all_gather_object,
            world_size_getter=dist.get_world_size,
        )

    def save(self, live: Live, folder: Path, step: int) -> Iterator[str]:
        future: Any = async_save(
            dcp_state(live),
            checkpoint_id=self._name(step),
            storage_writer=self.writer,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
        )
        yield RETURNED
        yield STAGED
        future.result()

    def load(self, live: Live, folder: Path, step: int, *, cached: bool) -> None:
        reader = MemoryStorageReader(path=self._name(step), checkpoint_loader=self.loader)
        load(dcp_state(live), checkpoint_id=self._name(step), storage_reader=reader)

    def close(self) -> None:
        shutil.rmtree(BASE, ignore_errors=True)

    def _name(self, step: int) -> str:
        version = CheckpointContainerId.format_version_container(step)
        return str(CheckpointContainerId.create_child(self.container, version))


if __name__ == "__main__":
    chosen = parser().parse_args()
    main(lambda live: MlFlashpoint(chosen.size), chosen)
