"""Which peers there are, and how each one's process is started. See `child.py` for what they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A script `jobs/bench/peers/<script>.py` with its arguments, in an environment of `environments.py`.

    `fsyncs` says whether it puts its files on stable storage itself; if not, the bench does it afterwards, in
    the time that the save takes. `memory` is where a load from memory reads: for most it is what the system
    happens to hold of the files, for some memory that the library keeps, which may be there `once` only.
    `disk` says whether a load from files can be had while that is there.
    """

    what: str
    script: str
    arguments: tuple[str, ...] = ()
    environment: str = ""  # none: that of the project
    fsyncs: bool = False
    memory: str = "files in the page cache"
    once: bool = False
    disk: bool = True


PEERS: Mapping[str, Peer] = {
    "ray_ckpt": Peer(
        what="this project, one rank on a local Ray",
        script="ours",
        fsyncs=True,
        memory="the node's arena",
        once=True,
    ),
    "torch.save": Peer(what="torch.save and torch.load(mmap=True)", script="plain", arguments=("torch",)),
    "safetensors": Peer(what="safetensors.torch", script="plain", arguments=("safetensors",)),
    "dcp": Peer(what="torch.distributed.checkpoint.save", script="dcp", arguments=("sync",), fsyncs=True),
    "dcp-thread": Peer(what="DCP async_save, thread", script="dcp", arguments=("thread",), fsyncs=True),
    "dcp-process": Peer(what="DCP async_save, process", script="dcp", arguments=("process",), fsyncs=True),
    "dcp-shared": Peer(
        what="DCP async_save, shared-memory stager", script="dcp", arguments=("shared",), fsyncs=True
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
        memory="its files on tmpfs",
        disk=False,
    ),
    "lm_resiliency": Peer(
        what="lm-resiliency in-memory checkpoint, flushed to disk",
        script="lm_resiliency_peer",
        environment="lm_resiliency",
        fsyncs=True,
    ),
    "ray.train": Peer(what="ray.train.report, SYNC upload", script="ray_train_peer", arguments=("SYNC",)),
    "ray.train-async": Peer(
        what="ray.train.report, ASYNC upload", script="ray_train_peer", arguments=("ASYNC",)
    ),
}
