"""Find the sources of a checkpoint, in this order: the node's arenas and disk, peers, the storage path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ray_ckpt.actors.agent.arena import RankArena
from ray_ckpt.core.values import ResumePoint, SessionPlan
from ray_ckpt.errors import CheckpointError, CorruptionError, NewerFormat, RestoreError
from ray_ckpt.format.digest import digest, root_digest
from ray_ckpt.format.manifest import (
    MAX_FRAGMENT_BYTES,
    FragmentVersion,
    choose_fragments,
    decode_fragment,
    version_files,
)
from ray_ckpt.format.names import fragment_file, shard_file
from ray_ckpt.restore.reader import FileSource, RestoreTicket
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.storage.remote.tier import RemoteRef
from ray_ckpt.transport.client import PeerClient
from ray_ckpt.transport.credentials import Credentials
from ray_ckpt.transport.wire import FileName
from ray_ckpt.types import AttemptId, CheckpointInfo, FileEntry, Level


class SourceFinder:
    """Make the ticket of a restore for all ranks of a node."""

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
        """Fetch all fragments, check them against the log's root digest, and list each file's sources."""
        resume = plan.resume
        assert resume is not None
        checkpoint = resume.checkpoint
        manifest = self._manifest(resume)
        sources = {
            file.name: self._sources(checkpoint, file.name, holders)
            for (_, fragment), holders in zip(manifest, resume.holders, strict=True)
            for file in fragment.files
        }
        return RestoreTicket(
            session=plan.session,
            epoch=plan.epoch,
            checkpoint=checkpoint,
            fragments=tuple(fragment for _, fragment in manifest),
            sources=sources,
            credentials=self._credentials,
            storage=self._storage,
            node_ranks=self._node_ranks(plan),
        )

    def _node_ranks(self, plan: SessionPlan) -> tuple[int, ...]:
        here = next((node for node in plan.nodes if node.node_id == self._node_id), None)
        return here.ranks if here is not None else ()

    def _sources(
        self, checkpoint: CheckpointInfo, file: str, holders: tuple[str, ...]
    ) -> tuple[FileSource, ...]:
        attempt: AttemptId = checkpoint.id
        found: list[FileSource] = []
        for rank, arena in self._arenas.items():
            buffer = arena.find(attempt.attempt)
            if buffer is not None and file == shard_file(rank, checkpoint.world_size):
                found.append(FileSource(tier="memory", where=self._node_id, path=buffer.path))
        local = self._staging.path(self._run_uid, attempt.directory, file)
        if local.exists():
            found.append(FileSource(tier="local", where=self._node_id, path=str(local)))
        peers = [node for node in holders if node != self._node_id and node in self._endpoints]
        found += [FileSource(tier="peer", where=node, endpoint=self._endpoints[node]) for node in peers]
        if checkpoint.level >= Level.DURABLE:
            found.append(FileSource(tier="remote", where=self._storage.open().where))
        return tuple(found)

    def _manifest(self, resume: ResumePoint) -> list[FragmentVersion]:
        """Return the committed version of each fragment, in the order of the fragments' indexes.

        If the first readable versions do not match the log's root digest, read the versions of all sources.
        """
        checkpoint = resume.checkpoint
        first: list[FragmentVersion] = []
        for index in range(len(resume.holders)):
            if (version := next(self._versions(resume, index), None)) is None:
                name = fragment_file(index, checkpoint.num_nodes)
                raise RestoreError(f"No source has {name} of step {checkpoint.step} intact.")
            first.append(version)
        if (
            root_digest([file for version in first for file in version_files(version)])
            == checkpoint.root_digest
        ):
            return first
        versions = {
            fragment_file(index, checkpoint.num_nodes): {
                v[0].digest: v for v in self._versions(resume, index)
            }
            for index in range(len(resume.holders))
        }
        files = {name: {d: version_files(v) for d, v in found.items()} for name, found in versions.items()}
        chosen = choose_fragments(files, checkpoint.root_digest)
        if chosen is None:
            raise CorruptionError(
                f"The manifest of step {checkpoint.step} is not the one that was committed."
            )
        return [found[chosen[name]] for name, found in versions.items()]

    def _versions(self, resume: ResumePoint, index: int) -> Iterator[FragmentVersion]:
        """Yield a fragment from each source where it decodes.

        NewerFormat if none decodes and one has a newer format.
        """
        newer: NewerFormat | None = None
        is_there = False
        checkpoint = resume.checkpoint
        name = fragment_file(index, checkpoint.num_nodes)
        for source in self._sources(checkpoint, name, resume.holders[index]):
            try:
                data = self._read_whole(checkpoint.id, name, source)
                fragment = decode_fragment(data)
            except NewerFormat as error:
                newer = newer or error.at(name)
                continue
            except (OSError, EOFError, CheckpointError):
                continue
            is_there = True
            yield FileEntry(name=name, size_bytes=len(data), digest=digest(data)), fragment
        if newer is not None and not is_there:
            raise newer

    def _read_whole(self, attempt: AttemptId, name: str, source: FileSource) -> bytes:
        if source.tier == "remote":
            tier = self._storage.open()
            return tier.read_whole(attempt.directory, name, max_bytes=MAX_FRAGMENT_BYTES)
        if source.tier != "peer":
            return Path(source.path).read_bytes()
        file = FileName(run_uid=self._run_uid, directory=attempt.directory, file=name)
        with PeerClient(source.endpoint, credentials=self._credentials) as peer:
            return peer.read_file(file, max_bytes=MAX_FRAGMENT_BYTES)
