"""Nodes of a run that save, copy, upload and scrub with the agents' own functions, without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ray_ckpt.actors.agent.arena import RankArena, make_arena
from ray_ckpt.actors.agent.captures import Captures
from ray_ckpt.actors.agent.files import StoredFiles, put_fragment, scrub, send_copy, store_shard, upload
from ray_ckpt.actors.agent.memory import RankMemory
from ray_ckpt.actors.agent.peer_files import PeerFiles
from ray_ckpt.actors.agent.priority import ActiveCopies
from ray_ckpt.actors.agent.run import require
from ray_ckpt.capture.arena import Arena
from ray_ckpt.capture.still import StillSlices
from ray_ckpt.capture.walk import walk
from ray_ckpt.config import RunOptions
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.values import ScrubResult
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import make_attempt, shard_file
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.storage.remote.tier import RemoteRef
from ray_ckpt.trainer.link import SealedShard
from ray_ckpt.transport.sending import Limiter
from ray_ckpt.transport.server import PeerServer
from ray_ckpt.types import AttemptId, FileEntry, Fragment
from tests.capture.ranks import items_of
from tests.transport.peers import KEYS, UID

STILL_FILE = shard_file(0, 1, 1)
RUN = "gpt"


def attempt(step: int) -> AttemptId:
    return make_attempt(run_uid=UID, session=1, step=step, attempt=0)


class StillNode:
    """An agent's end of a run on one node, with a rank whose tensors are `base` (static) and `head`."""

    def __init__(
        self,
        stack: ExitStack,
        root: Path,
        storage: Path,
        *,
        roots: Sequence[Path] = (),
        options: RunOptions | None = None,
    ) -> None:
        disks = Disks(roots or [root])
        stack.callback(disks.close)
        self.memory = RankMemory()
        stack.callback(self.memory.close)
        self.machine = NodeMachine(epoch=1)  # what this node knows of deletions
        plan = SimpleNamespace(world_size=1, session_key=(1, 1))
        self.run: Any = SimpleNamespace(
            run_uid=UID,
            staging=disks,
            memory=self.memory,
            machine=SimpleNamespace(
                plan=plan,
                is_deleted=self.machine.is_deleted,
                is_unwanted=self.machine.is_unwanted,
                reaches=lambda _: True,
            ),
            require_plan=lambda: require(self.run.machine.plan),
            check_space=lambda *_, **__: None,
            reach_epoch=lambda _: None,
            still={},
            read_still={},
            bad_still={},
            captures=Captures(),
            mended={},
            limiter=Limiter(),
            drain_limiter=Limiter(),
            uploads={},
            endpoints={},
            remote=RemoteRef(storage_path=str(storage), run_name=RUN).open(),
            spec=SimpleNamespace(options=options or RunOptions()),
        )
        runs: Any = {UID: self.run}
        server = PeerServer("127.0.0.1", keys=KEYS, files=PeerFiles(runs))
        stack.callback(server.shutdown)
        self.endpoint = server.endpoint
        self._copies = ActiveCopies()
        self._arena: RankArena | None = None

    def save(self, step: int, base: torch.Tensor, head: torch.Tensor) -> StoredFiles:
        """Capture all tensors, and store the node's fragment with its files."""
        stored = self.capture(step, base, head)
        self.complete(step, stored)
        return stored

    def complete(self, step: int, stored: StoredFiles) -> None:
        """Write the fragment, after the files that it lists."""
        fragment = Fragment(
            attempt=attempt(step),
            node_index=0,
            num_nodes=1,
            world_size=1,
            ranks=(0,),
            files=stored.files,
            rows=stored.rows,
            replicated=(),
            metrics=None,
        )
        put_fragment(self.run, fragment)

    def capture(self, step: int, base: torch.Tensor, head: torch.Tensor) -> StoredFiles:
        """Capture all tensors, and store the files without the fragment."""
        shard = self.seal(step, base, head)
        return store_shard(self.run, shard)

    def seal(
        self, step: int, base: torch.Tensor, head: torch.Tensor, *, still_from: int | None = None
    ) -> SealedShard:
        """Capture all tensors, or all but `base` if the capture of `still_from` has copied it."""
        items = items_of(base=nn.Parameter(base, requires_grad=False), head=head)
        owned = walk(items, rank=0, world_size=1).owned(0)
        layout = StillSlices((), (), 1).layout(owned)
        if self._arena is None:
            sizes = {"all_bytes": layout.size_bytes, "free_bytes": 1 << 34}
            self._arena = make_arena(0, layout.size_bytes, mode="single", named=False, **sizes)
            self.memory.arenas[0] = self._arena
        (buffer,) = self._arena.buffers
        arena = Arena(buffer.path)
        arena.lay_out(layout)
        buffer.layout = layout
        by_key = {live.slice_key: live for live in owned}
        copied = layout.slices if still_from is None else layout.slices[: layout.num_moving]
        for placed, view in zip(copied, arena.views, strict=False):
            view.copy_(by_key[placed.slice.key, placed.slice.offset].tensor)
        arena.seal(attempt(step).attempt)
        shard = SealedShard(
            attempt=attempt(step),
            rank=0,
            state=b"{}\n",
            replicated=(),
            metrics=None,
            buffer=0,
            layout=layout,
            layout_signature=layout.signature,
            mesh="",
            stall_s=0.0,
            capture_s=0.0,
            still_from=attempt(step if still_from is None else still_from),
        )
        self.run.captures.seal(shard)
        return shard

    def send(self, step: int, peer: StillNode, *, is_repair: bool = False) -> tuple[int, int]:
        """Copy a checkpoint to a peer; return the bytes sent, and those that the peer had."""
        self.run.endpoints["peer"] = peer.endpoint
        order = n.SendCopy(epoch=1, attempt=attempt(step), node_index=0, holder="peer", is_repair=is_repair)
        _, *sent = send_copy(self.run, order, KEYS.credentials(UID), self._copies)
        return sent[0], sent[1]

    def upload(self, step: int, like: int | None = None) -> tuple[int, int]:
        """Upload a checkpoint; return the bytes uploaded, and those that the store had."""
        source = "" if like is None else attempt(like).directory
        return upload(self.run, attempt(step), 0, source, self._copies)

    def scrub(self, step: int) -> ScrubResult:
        return scrub(self.run, attempt(step), 0)

    def delete(self, order: n.DeleteOrdered) -> None:
        """Obey a coordinator's order to delete folders."""
        for effect in self.machine.handle(order):
            assert isinstance(effect, n.DeleteFolder)
            self.run.staging.delete(UID, effect.directory)

    def path(self, step: int, file: str = STILL_FILE) -> Path:
        found: Path = self.run.staging.path(UID, attempt(step).directory, file)
        return found

    def inode(self, step: int) -> int:
        return self.path(step).stat().st_ino

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints here."""
        return [held.fragment.attempt.step for held in self.run.staging.holdings(UID)]

    def entry(self, step: int) -> FileEntry:
        data = self.path(step).read_bytes()
        return FileEntry(name=STILL_FILE, size_bytes=len(data), digest=digest(data))
