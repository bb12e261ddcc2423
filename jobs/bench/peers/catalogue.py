"""The peers and the rows of each. `libraries.py` has the calls of each peer's library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KINDS: Mapping[str, str] = {  # kind of a peer's row -> colour in the picture
    "blocked-first": "#c9a227",
    "blocked": "#e07a1f",
    "complete": "#33658a",
    "load-memory": "#8fb8de",
    "load": "#6a4c93",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library as a reader of the results sees it; `environment` is one of `environments.py`.

    `note` describes the peer's files. If the peer does not fsync its files, the bench does, within the
    measured time of the save. `memory` is the source of a load from memory: for most peers the page cache,
    for some memory that the library keeps, which may be usable only `once`. `disk` is true if a load from
    files is possible while that memory exists.
    """

    what: str
    environment: str = ""  # empty: the environment of the project
    note: str = "it does not fsync; done for it"
    memory: str = "files in the page cache"
    once: bool = False
    disk: bool = True


OURS = "ray_ckpt"
IN_MEMORY = "in memory, on no disk"
PEERS: Mapping[str, Peer] = {
    OURS: Peer(what="this project, one rank on a local Ray", note="", memory="the node's arena", once=True),
    "torch.save": Peer(what="torch.save and torch.load(mmap=True)"),
    "safetensors": Peer(what="safetensors.torch"),
    "dcp": Peer(what="torch.distributed.checkpoint.save", note=""),
    "dcp-thread": Peer(what="DCP async_save, thread", note=""),
    "dcp-process": Peer(what="DCP async_save, process", note=""),
    "dcp-shared": Peer(what="DCP async_save, shared-memory stager", note=""),
    "torchsnapshot": Peer(what="torchsnapshot async_take", environment="torchsnapshot"),
    "orbax": Peer(what="orbax AsyncCheckpointer, jax arrays", environment="orbax"),
    "torch_checkpointing": Peer(
        what="torch_checkpointing, asynchronous, prewarmed", environment="torch_checkpointing"
    ),
    "dlrover": Peer(
        what="DLRover Flash Checkpoint", environment="dlrover", memory="its shared memory", disk=False
    ),
    "nvrx": Peer(what="NVRx local checkpoint", environment="nvrx"),
    "ml_flashpoint": Peer(
        what="ML Flashpoint on tmpfs",
        environment="ml_flashpoint",
        note=IN_MEMORY,
        memory="its files on tmpfs",
        disk=False,
    ),
    "lm_resiliency": Peer(
        what="lm-resiliency in-memory checkpoint, flushed to disk", environment="lm_resiliency", note=""
    ),
    "ray.train": Peer(what="ray.train.report, SYNC upload"),
    "ray.train-async": Peer(what="ray.train.report, ASYNC upload"),
}
