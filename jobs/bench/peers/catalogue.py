"""The peers and the way to start the process of each. `child.py` defines the requests that peers serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """`jobs/bench/peers/<script>.py` with its arguments, in an environment of `environments.py`.

    `note` describes the peer's files for a reader of the results. If the peer does not fsync its files, the
    bench does, within the measured time of the save. `memory` is the source of a load from memory: for most
    peers the page cache, for some memory that the library keeps, which may be usable only `once`. `disk` is
    true if a load from files is possible while that memory exists.
    """

    what: str
    script: str
    arguments: tuple[str, ...] = ()
    environment: str = ""  # empty: the environment of the project
    note: str = "it does not fsync; done for it"
    memory: str = "files in the page cache"
    once: bool = False
    disk: bool = True


OURS = "ray_ckpt"
IN_MEMORY = "in memory, on no disk"
PEERS: Mapping[str, Peer] = {
    OURS: Peer(
        what="this project, one rank on a local Ray",
        script="ours",
        note="",
        memory="the node's arena",
        once=True,
    ),
    "torch.save": Peer(what="torch.save and torch.load(mmap=True)", script="plain", arguments=("torch",)),
    "safetensors": Peer(what="safetensors.torch", script="plain", arguments=("safetensors",)),
    "dcp": Peer(what="torch.distributed.checkpoint.save", script="dcp", arguments=("sync",), note=""),
    "dcp-thread": Peer(what="DCP async_save, thread", script="dcp", arguments=("thread",), note=""),
    "dcp-process": Peer(what="DCP async_save, process", script="dcp", arguments=("process",), note=""),
    "dcp-shared": Peer(
        what="DCP async_save, shared-memory stager", script="dcp", arguments=("shared",), note=""
    ),
    "torchsnapshot": Peer(
        what="torchsnapshot async_take", script="torchsnapshot_peer", environment="torchsnapshot"
    ),
    "orbax": Peer(what="orbax AsyncCheckpointer, jax arrays", script="orbax_peer", environment="orbax"),
    "torch_checkpointing": Peer(
        what="torch_checkpointing, asynchronous, prewarmed",
        script="torch_checkpointing_peer",
        environment="torch_checkpointing",
    ),
    "dlrover": Peer(
        what="DLRover Flash Checkpoint",
        script="dlrover_peer",
        environment="dlrover",
        memory="its shared memory",
        disk=False,
    ),
    "nvrx": Peer(what="NVRx local checkpoint", script="nvrx_peer", environment="nvrx"),
    "ml_flashpoint": Peer(
        what="ML Flashpoint on tmpfs",
        script="ml_flashpoint_peer",
        environment="ml_flashpoint",
        note=IN_MEMORY,
        memory="its files on tmpfs",
        disk=False,
    ),
    "lm_resiliency": Peer(
        what="lm-resiliency in-memory checkpoint, flushed to disk",
        script="lm_resiliency_peer",
        environment="lm_resiliency",
        note="",
    ),
    "ray.train": Peer(what="ray.train.report, SYNC upload", script="ray_train_peer", arguments=("SYNC",)),
    "ray.train-async": Peer(
        what="ray.train.report, ASYNC upload", script="ray_train_peer", arguments=("ASYNC",)
    ),
}
