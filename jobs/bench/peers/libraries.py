"""The calls of each library. Each function imports its library, which is in an environment of its own.

The docstring of a function describes the peer's configuration, and the features that were left out because
they require CUDA.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jobs.bench.peers.child import RETURNED, STAGED, Library, Live, forget_cached, serve
from jobs.bench.state import MOMENTS, tensors, wipe

POLL_S = 0.005
START_S = 3.0  # from the opening of a group to its restore, at the least: processes start and import torch
WAIT_S = 240.0  # time limit until a library has written a save, or is ready for one
CORES = os.cpu_count() or 1


def ray_ckpt_itself(live: Live) -> Library:
    """Connect ray_ckpt as users do: one rank on a local Ray, with the service's actors.

    A save is complete with the commit at level local: files fsynced on the node, the record in the log. A
    load is a restore by a new group, without the time to connect: first from the node's arena, which is then
    released, later from the node's disk. A new process takes longer than START_S until it restores, and in
    that time its node's agent reads ahead.
    """
    import ray

    import ray_ckpt

    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray.init(address="local", num_cpus=1, **quiet)

    def connected() -> ray_ckpt.Checkpointer:
        paths = {name: str(live.root / name) for name in ("storage", "staging")}
        storage_path, staging = paths.values()
        ray_ckpt.connect(run="bench", storage_path=storage_path, staging=staging, replicas=0, keep_last=1)
        return ray_ckpt.Checkpointer(model=live.model, optimizer=live.optimizer)

    ckpt = connected()
    assert ckpt.restore() is None

    def save(folder: Path, step: int) -> Iterator[str]:
        if not ckpt.save(step):
            raise RuntimeError("the save was skipped")
        yield RETURNED
        with ckpt.lock():  # the optimizer's next step waits for this lock
            pass
        yield STAGED
        ckpt.wait("local")

    def restore(step: int) -> tuple[float, set[str]]:
        """Return the seconds of a restore by a new group, and the tiers that it read."""
        nonlocal ckpt
        ckpt.close()
        ckpt = connected()
        time.sleep(START_S)
        started_s = time.perf_counter()
        info = ckpt.restore()
        used_s = time.perf_counter() - started_s
        assert info is not None and info.step == step, info
        return used_s, set(info.bytes_by_tier())

    def load(folder: Path, step: int, cached: bool) -> float:
        used_s, tiers = restore(step)
        if not cached and "memory" in tiers:  # by now the agent has released the arena
            wipe(live.model, live.optimizer)
            forget_cached(live.root)
            used_s, tiers = restore(step)
        assert ("memory" in tiers) == cached, tiers
        return used_s

    prepare = partial(_wait_for, lambda: ckpt.setup_s is not None)  # the arena, as before training
    return Library(save=save, load=load, prepare=prepare, close=lambda: ckpt.close())


def torch_save(live: Live) -> Library:
    """Write one file while training waits; load it mapped into the live tensors, which is fastest."""

    def save(folder: Path, step: int) -> None:
        folder.mkdir()
        torch.save(live.state_dict(), folder / "state.pt")

    def load(folder: Path, step: int, cached: bool) -> None:
        live.load_state_dict(torch.load(folder / "state.pt", mmap=True, weights_only=True))

    return Library(save=save, load=load)


def safetensors(live: Live) -> Library:
    """Write tensors by flat names, as programs do that save their optimizer in this format."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    flat = {name: parameter.data for name, parameter in live.model.named_parameters()}
    for name, parameter in live.model.named_parameters():
        state = live.optimizer.state[parameter]
        flat |= {f"optimizer.{name}.{key}": state[key] for key in (*MOMENTS, "step")}

    def save(folder: Path, step: int) -> None:
        folder.mkdir()
        save_file(flat, folder / "state.safetensors")

    def load(folder: Path, step: int, cached: bool) -> None:
        with safe_open(folder / "state.safetensors", framework="pt") as file:
            for name, tensor in flat.items():
                tensor.copy_(file.get_tensor(name))

    return Library(save=save, load=load)


def dcp(live: Live, way: str) -> Library:
    """Save with torch.distributed.checkpoint; one rank with a gloo group, which async_save requires.

    `thread` is async_save with its defaults, `process` writes from another process, `shared` stages into
    shared memory that is kept between saves, which the authors call the mode without overhead (pinned memory
    and the copy thread are off, because they need CUDA). The number of writer threads is that of the cores.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import (
        AsyncCheckpointerType,
        AsyncSaveResponse,
        async_save,
    )
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    _start_group()
    options = {"use_pinned_memory": False, "use_async_staging": False, "use_non_blocking_copy": False}
    stager = DefaultStager(StagingOptions(use_shared_memory=True, **options)) if way == "shared" else None
    kind = AsyncCheckpointerType.THREAD if way == "thread" else AsyncCheckpointerType.PROCESS

    def save(folder: Path, step: int) -> Iterator[str]:
        writer = FileSystemWriter(folder, thread_count=CORES)
        if way == "sync":
            dcp_save(_dcp_state(live), storage_writer=writer)
            return
        answer = async_save(
            _dcp_state(live), storage_writer=writer, async_checkpointer_type=kind, async_stager=stager
        )
        yield RETURNED
        if isinstance(answer, AsyncSaveResponse):
            answer.staging_completion.result()
            answer = answer.upload_completion
        yield STAGED
        answer.result()

    def load(folder: Path, step: int, cached: bool) -> None:
        dcp_load(_dcp_state(live), checkpoint_id=folder)  # loads in place

    return Library(save=save, load=load, close=stager.close if stager else lambda: None)


def torchsnapshot(live: Live) -> Library:
    """Save with async_take; restore reads into the live tensors."""
    from torchsnapshot import Snapshot  # type: ignore[import-not-found]

    _start_group()
    state = {"model": live.model, "optimizer": live.optimizer}

    def save(folder: Path, step: int) -> Iterator[str]:
        pending = Snapshot.async_take(str(folder), state)
        yield RETURNED
        pending.wait()

    def load(folder: Path, step: int, cached: bool) -> None:
        Snapshot(str(folder)).restore(state)

    return Library(save=save, load=load)


def orbax(live: Live) -> Library:
    """Save with AsyncCheckpointer and its defaults (OCDBT, zarr3), jax arrays that hold the same bytes.

    jax arrays are immutable, so training waits only for the copies that orbax itself makes. The arrays are
    made from the state before a save, and copied back into the state after a load; neither is measured.
    """
    import jax  # type: ignore[import-not-found]
    import orbax.checkpoint as ocp  # type: ignore[import-not-found]

    checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    named = {f"{i:04d}": tensor.numpy() for i, tensor in enumerate(tensors(live.model, live.optimizer))}
    arrays: dict[str, Any] = {}

    def prepare() -> None:
        arrays.update({name: jax.numpy.array(value) for name, value in named.items()})
        jax.block_until_ready(arrays)

    def save(folder: Path, step: int) -> Iterator[str]:
        checkpointer.save(folder, args=ocp.args.StandardSave(dict(arrays)))
        yield RETURNED
        checkpointer.wait_until_finished()

    def load(folder: Path, step: int, cached: bool) -> float:
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, dict(arrays))
        arrays.clear()
        started_s = time.perf_counter()
        arrays.update(checkpointer.restore(folder, args=ocp.args.StandardRestore(target)))
        jax.block_until_ready(arrays)
        used_s = time.perf_counter() - started_s
        for name, value in named.items():
            value[...] = arrays[name]
        return used_s

    return Library(save=save, load=load, prepare=prepare, close=checkpointer.close)


def torch_checkpointing(live: Live) -> Library:
    """Save with shared staging buffers that are made beforehand, a copy thread, a writer process.

    The staging thread needs no CUDA; pinned memory needs CUDA and is off. O_DIRECT is off too, because the
    library's writes are not aligned and ext4 refuses them (EINVAL). One writer thread for each core.
    """
    import torch_checkpointing as tc  # type: ignore[import-not-found]
    from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig  # type: ignore[import-not-found]
    from torch_checkpointing.config import AsyncCheckpointSaverConfig  # type: ignore[import-not-found]
    from torch_checkpointing.staging import CheckpointStagerConfig  # type: ignore[import-not-found]
    from torch_checkpointing.storage.filesystem import (  # type: ignore[import-not-found]
        LocalFileSystemStorageConfig,
    )

    saver = AsyncCheckpointSaverConfig(
        writer_config=CheckpointWriterConfig(file_write_max_threads=CORES),
        staging_config=CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False),
    )
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = tc.CheckpointManager(tc.CheckpointManager.Config(save=saver, storage_config=storage))
    manager.prewarm_staging(live.state_dict())
    # Ready before training begins, like the arena of ray_ckpt; the library has no call that waits for it.
    manager._prewarm_staging_future.result()
    manager._saver._checkpoint_process._creation_future.result()

    def save(folder: Path, step: int) -> Iterator[str]:
        written = manager.save(str(folder), live.state_dict())
        yield RETURNED
        with manager.lock():  # as it is held around optimizer.step()
            pass
        yield STAGED
        written.result()

    def load(folder: Path, step: int, cached: bool) -> None:
        live.load_state_dict(manager.load(str(folder), into=live.state_dict()))

    return Library(save=save, load=load, close=manager.close)


def dlrover(live: Live) -> Library:
    """Copy into shared memory with DLRover's Flash Checkpoint; an agent's process writes the file.

    Under DLRover's launcher the agent outlives the trainer; here the trainer starts the agent's process. A
    load reads the shared memory. Without a launcher, the rank is taken from the environment.
    """
    from dlrover.trainer.torch.flash_checkpoint.checkpointer import (  # type: ignore[import-not-found]
        StorageType,
    )
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer  # type: ignore[import-not-found]

    run = "ray_ckpt-bench"  # part of the names of the shared memory, which outlives all processes
    _start_group()
    os.environ["TORCHELASTIC_RUN_ID"] = run

    def close() -> None:
        for path in Path("/dev/shm").glob(f"{run}_*"):
            path.unlink()

    close()  # removes the shared memory of a killed run
    tracker = live.root / "dlrover_latest.txt"
    checkpointer = DdpCheckpointer(str(live.root))

    def save(folder: Path, step: int) -> Iterator[str]:
        folder.mkdir()
        path = str(folder / "rank_0.pt")
        checkpointer.save_checkpoint(step, live.state_dict(), path, StorageType.DISK)
        yield RETURNED
        _wait_for(lambda: tracker.exists() and tracker.read_text() == str(step))

    def load(folder: Path, step: int, cached: bool) -> None:
        live.load_state_dict(checkpointer.load_checkpoint())

    return Library(save=save, load=load, close=close)


def nvrx(live: Live) -> Library:
    """Save with NVRx's LocalCheckpointManager, synchronous: its other path calls torch.cuda.synchronize().

    NVRx's wrapper of state dicts requires tensors on CUDA; the wrapper here differs only in that. There is
    one manager and folder per save, because a manager names files and deletes older ones.
    """
    from nvidia_resiliency_ext.checkpointing.local import (  # type: ignore[import-not-found]
        basic_state_dict,
    )
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import (  # type: ignore[import-not-found]
        local_manager,
    )

    class CpuStateDict(basic_state_dict.BasicTensorAwareStateDict):  # type: ignore[misc]
        def __init__(self, state: dict[str, Any]) -> None:
            self.state_dict = state
            self._is_hollow = False

        def restore_tensor_device(self, non_blocking: bool = True) -> None:
            """Do nothing: the tensors are on the CPU already."""

    _start_group()
    managers: list[Any] = []

    def save(folder: Path, step: int) -> None:
        managers[:] = [local_manager.LocalCheckpointManager(folder)]
        managers[0].save(CpuStateDict(live.state_dict()), step, is_async=False)

    def load(folder: Path, step: int, cached: bool) -> None:
        assert managers[0].find_latest() == step
        found, _ = managers[0].load()
        live.load_state_dict(found.state_dict)

    return Library(save=save, load=load)


def ml_flashpoint(live: Live) -> Library:
    """Save with ML Flashpoint's memory storage under DCP's async_save, in tmpfs, as its guide does.

    Unlike in the guide, saves run in a thread: in another process, the writer of 0.0.10 lacks objects that
    exist only in the trainer's process. With one node there is no copy on a paired node. The files are in
    memory: `complete` means that they are complete in memory; nothing is on a disk.
    """
    import ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager as objects  # type: ignore[import-not-found]
    import torch.multiprocessing as mp
    from ml_flashpoint.adapter.pytorch import (  # type: ignore[import-not-found]
        memory_storage_reader,
        memory_storage_writer,
    )
    from ml_flashpoint.core import checkpoint_id_types as ids  # type: ignore[import-not-found]
    from ml_flashpoint.core import checkpoint_loader, checkpoint_saver
    from ml_flashpoint.replication import replication_manager  # type: ignore[import-not-found]
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

    base = Path("/dev/shm/ray_ckpt-bench")
    _start_group()
    os.environ["NNODES"] = "1"
    shutil.rmtree(base, ignore_errors=True)  # files of a killed run
    container = ids.CheckpointContainerId
    manager, replicas = objects.CheckpointObjectManager(), replication_manager.ReplicationManager()
    # By default, ML Flashpoint counts GPUs to find the number of ranks per node; no other node copies here.
    alone = replication_manager.PairwiseReplicationStrategy(["127.0.0.1:0"], 1)
    replicas.initialize(manager, repl_strategy=alone)
    started: Future[Any] = Future()
    started.set_result(mp.get_context("spawn").Manager())
    ranks = {"global_rank_getter": dist.get_rank, "local_rank_getter": dist.get_node_local_rank}
    size_bytes = sum(tensor.nbytes for tensor in tensors(live.model, live.optimizer))
    saver = checkpoint_saver.DefaultMLFlashpointCheckpointSaver(
        **ranks,
        global_barrier_func=dist.barrier,
        ckpt_obj_manager=manager,
        replication_manager=replicas,
        initial_buffer_size_bytes=int(size_bytes * 1.3),  # one save with headers
    )
    writer = memory_storage_writer.MemoryStorageWriter(
        checkpoint_saver=saver, mp_manager_future=started, thread_count=CORES
    )
    loader = checkpoint_loader.DefaultMLFlashpointCheckpointLoader(
        **ranks,
        checkpoint_object_manager=manager,
        replication_manager=replicas,
        broadcast_object_list_func=dist.broadcast_object_list,
        all_gather_object_func=dist.all_gather_object,
        world_size_getter=dist.get_world_size,
    )

    def name_of(step: int) -> str:
        return str(container.create_child(container(str(base)), container.format_version_container(step)))

    def save(folder: Path, step: int) -> Iterator[str]:
        future: Any = async_save(
            _dcp_state(live),
            checkpoint_id=name_of(step),
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
        )
        yield RETURNED
        future.result()

    def load(folder: Path, step: int, cached: bool) -> None:
        reader = memory_storage_reader.MemoryStorageReader(path=name_of(step), checkpoint_loader=loader)
        dcp_load(_dcp_state(live), checkpoint_id=name_of(step), storage_reader=reader)

    return Library(save=save, load=load, close=lambda: shutil.rmtree(base, ignore_errors=True))


def lm_resiliency(live: Live) -> Library:
    """Save tensors in lm-resiliency's host slots, then flush them to its node-local disk tier.

    With one rank there is no replica on a peer; pinned memory needs CUDA and is off; the digests of the disk
    tier are on, because this project verifies digests too. A load reads the disk, as after the death of the
    process, because the slots are memory of this process.
    """
    import lm_resiliency.checkpointing as lm  # type: ignore[import-not-found]

    _start_group()
    options = {"run_id": "bench", "pin_memory": False, "verify_integrity": True}
    config = lm.InMemoryCkptConfig(disk_folder=str(live.root / "tier"), **options)
    manager, state = lm.InMemoryCheckpointManager(config), list(tensors(live.model, live.optimizer))

    def save(folder: Path, step: int) -> Iterator[str]:
        folder.mkdir()
        manager.save_tensors(state, step)
        yield RETURNED
        manager.maybe_wait()
        yield STAGED
        manager.flush_to_disk(step)
        manager._disk.wait()

    def load(folder: Path, step: int, cached: bool) -> None:
        found = lm.InMemoryCheckpointManager(config).load_tensors()
        assert found is not None and found[1] == step
        for tensor, loaded in zip(state, found[0], strict=True):
            tensor.copy_(loaded)

    return Library(save=save, load=load, close=manager.close)


def ray_train(live: Live, mode: str) -> Library:
    """Write the state with torch.save, as Ray's guides do, and report the folder; storage on the same disk.

    SYNC uploads it before report() returns, ASYNC in a thread. Runs in the worker (`in_ray_train`).
    """
    import ray.train
    from ray.train.v2.api.report_config import CheckpointUploadMode

    def save(folder: Path, step: int) -> Iterator[str]:
        local = live.root / f"local-{step}"
        local.mkdir()
        torch.save(live.state_dict(), local / "state.pt")
        ray.train.report(
            {"step": step},
            checkpoint=ray.train.Checkpoint(str(local)),
            checkpoint_dir_name=f"step-{step}",
            checkpoint_upload_mode=CheckpointUploadMode[mode],
            delete_local_checkpoint_after_upload=True,
        )
        yield RETURNED
        _wait_for(lambda: not local.exists())  # Ray deletes the folder when the upload is complete

    def load(folder: Path, step: int, cached: bool) -> None:
        (path,) = live.root.glob(f"run/**/step-{step}/state.pt")
        live.load_state_dict(torch.load(path, mmap=True, weights_only=True))
        for old in live.root.glob("run/**/step-*"):
            if old != path.parent:
                shutil.rmtree(old)

    return Library(save=save, load=load)


def in_ray_train(chosen: argparse.Namespace) -> None:
    """Serve requests in the one worker process of a training of Ray Train."""
    import ray
    import ray.train
    from ray.train.torch import TorchTrainer

    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    TorchTrainer(
        lambda config: serve(argparse.Namespace(**config)),
        train_loop_config=vars(chosen),
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(name="run", storage_path=str(chosen.folder)),
    ).fit()


LIBRARIES: Mapping[str, Callable[[Live], Library]] = {
    "ray_ckpt": ray_ckpt_itself,
    "torch.save": torch_save,
    "safetensors": safetensors,
    "dcp": partial(dcp, way="sync"),
    "dcp-thread": partial(dcp, way="thread"),
    "dcp-process": partial(dcp, way="process"),
    "dcp-shared": partial(dcp, way="shared"),
    "torchsnapshot": torchsnapshot,
    "orbax": orbax,
    "torch_checkpointing": torch_checkpointing,
    "dlrover": dlrover,
    "nvrx": nvrx,
    "ml_flashpoint": ml_flashpoint,
    "lm_resiliency": lm_resiliency,
    "ray.train": partial(ray_train, mode="SYNC"),
    "ray.train-async": partial(ray_train, mode="ASYNC"),
}


def _dcp_state(live: Live) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    optimizer = get_optimizer_state_dict(live.model, live.optimizer)
    return {"model": get_model_state_dict(live.model), "optimizer": optimizer}


def _start_group() -> None:
    """Open a process group of this process alone, which some libraries need."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **address})
    dist.init_process_group("gloo", rank=0, world_size=1)


def _wait_for(is_done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the library was not ready within {WAIT_S:.0f} s")
        time.sleep(POLL_S)
