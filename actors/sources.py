"""Where a node can read a checkpoint from: its arenas, its disk, peers, the storage path, in that order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from ray_ckpt.actors.arena_memory import RankArena
from ray_ckpt.core.messages import SessionPlan
from ray_ckpt.errors import CheckpointError, CorruptionError, RestoreError
from ray_ckpt.format.digest import digest, root_digest
from ray_ckpt.format.manifest import MAX_FRAGMENT_BYTES, decode_fragment
from ray_ckpt.format.names import fragment_file, shard_file
from ray_ckpt.restore import RestoreTicket, Source
from ray_ckpt.storage.disks import Disks
from ray_ckpt.storage.remote import RemoteRef
from ray_ckpt.transport.client import PeerClient
from ray_ckpt.transport.credentials import Credentials
from ray_ckpt.transport.wire import FileName
from ray_ckpt.types import AttemptId, CheckpointInfo, FileEntry, Fragment, Level


class SourceFinder:
    """Makes the ticket of a restore, once for all ranks of a node."""

    def __init__(
        self,
        *,
        run_uid: str,
        node_id: str,
        credentials: Credentials,
        arenas: Mapping[int, RankArena],
        staging: Disks,
        storage: RemoteRef,
        endpoints: Mapping[str, str],
    ) -> None:
        self._run_uid = run_uid
        self._node_id = node_id
        self._credentials = credentials
        self._arenas = arenas
        self._staging = staging
        self._storage = storage
        self._endpoints = endpoints

    def ticket(self, plan: SessionPlan) -> RestoreTicket:
        """Fetch every fragment, check them against the log's root digest, and list each file's sources."""
        resume = plan.resume
        assert resume is not None
        checkpoint = resume.checkpoint
        fragments: list[Fragment] = []
        entries: list[FileEntry] = []
        sources: dict[str, tuple[Source, ...]] = {}
        for index, holders in enumerate(resume.holders):
            name = fragment_file(index, checkpoint.num_nodes)
            data = self._first_fragment(checkpoint.id, name, self._sources(checkpoint, name, holders))
            fragment = decode_fragment(data)
            fragments.append(fragment)
            entries += [*fragment.files, FileEntry(name=name, size_bytes=len(data), digest=digest(data))]
            for file in fragment.files:
                sources[file.name] = self._sources(checkpoint, file.name, holders)
        if root_digest(entries) != checkpoint.root_digest:
            raise CorruptionError(
                f"The manifest of step {checkpoint.step} is not the one that was committed."
            )
        return RestoreTicket(
            session=plan.session,
            epoch=plan.epoch,
            checkpoint=checkpoint,
            fragments=tuple(fragments),
            sources=sources,
            credentials=self._credentials,
            storage=self._storage,
            node_ranks=self._node_ranks(plan),
        )

    def _node_ranks(self, plan: SessionPlan) -> tuple[int, ...]:
        here = next((node for node in plan.nodes if node.node_id == self._node_id), None)
        return here.ranks if here is not None else ()

    def _sources(self, checkpoint: CheckpointInfo, file: str, holders: tuple[str, ...]) -> tuple[Source, ...]:
        attempt: AttemptId = checkpoint.id
        found: list[Source] = []
        for rank, arena in self._arenas.items():
            buffer = arena.find(attempt.attempt)
            if buffer is not None and file == shard_file(rank, checkpoint.world_size):
                found.append(Source(tier="memory", where=self._node_id, path=buffer.path))
        local = self._staging.path(self._run_uid, attempt.directory, file)
        if local.exists():
            found.append(Source(tier="local", where=self._node_id, path=str(local)))
        peers = [node for node in holders if node != self._node_id and node in self._endpoints]
        found += [Source(tier="peer", where=node, endpoint=self._endpoints[node]) for node in peers]
        if checkpoint.level >= Level.DURABLE:
            found.append(Source(tier="remote", where=self._storage.open().where))
        return tuple(found)

    def _first_fragment(self, attempt: AttemptId, name: str, sources: Iterable[Source]) -> bytes:
        """The fragment's bytes from the first source whose bytes decode."""
        for source in sources:
            with contextlib.suppress(OSError, EOFError, CheckpointError):
                data = self._read_whole(attempt, name, source)
                decode_fragment(data)
                return data
        raise RestoreError(f"No source has {name} of step {attempt.step} intact.")

    def _read_whole(self, attempt: AttemptId, name: str, source: Source) -> bytes:
        if source.tier == "remote":
            tier = self._storage.open()
            return tier.read_whole(attempt.directory, name, max_bytes=MAX_FRAGMENT_BYTES)
        if source.tier != "peer":
            return Path(source.path).read_bytes()
        file = FileName(run_uid=self._run_uid, directory=attempt.directory, file=name)
        with PeerClient(source.endpoint, credentials=self._credentials) as peer:
            return peer.read_file(file, max_bytes=MAX_FRAGMENT_BYTES)
