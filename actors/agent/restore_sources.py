"""Find the sources of a checkpoint, in this order: the node's arenas and disk, peers, the storage path."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from ray_ckpt.actors.agent.arena import RankArena
from ray_ckpt.actors.agent.manifest_memory import ManifestMemory
from ray_ckpt.core.values import ResumePoint, SessionNode, SessionPlan
from ray_ckpt.errors import CheckpointError, CorruptionError, NewerFormat, RestoreError, Unavailable, is_lost
from ray_ckpt.format.digest import digest, root_digest
from ray_ckpt.format.manifest import MAX_FRAGMENT_BYTES, choose_fragments, decode_places
from ray_ckpt.format.names import fragment_file, is_file_name, shard_files
from ray_ckpt.restore.parity import GroupReader
from ray_ckpt.restore.reader import FileSource, RestoreTicket, further_sources, parity_sources
from ray_ckpt.restore.sources import Peers
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.storage.local.files import read_small
from ray_ckpt.storage.parallel import map_in_order
from ray_ckpt.storage.remote.tier import RemoteRef
from ray_ckpt.transport.credentials import Credentials
from ray_ckpt.transport.wire import FileName
from ray_ckpt.types import (
    ARENA_PAGE_BYTES,
    AttemptId,
    CheckpointInfo,
    FileEntry,
    FragmentMetadata,
    Level,
)

FETCH_THREADS = 8  # fragments fetched at a time: a peer answers in some ms, a store in some tens of ms
DECODERS = 2  # fragments decoded at a time: more threads are no faster, and spend CPU on Python's lock
FETCHED = 16  # fragments in memory at a time, besides those in the manifest's memory; most have 2 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFragment:
    """A fragment of one source: its file, its metadata and the columns of its rows that a plan needs."""

    entry: FileEntry
    metadata: FragmentMetadata
    places: pa.Table
    data: bytes

    @property
    def files(self) -> tuple[FileEntry, ...]:
        return self.entry, *self.metadata.files


class SourceFinder:
    """Make the ticket of a restore for all ranks of a node.

    The manifest of a ticket is in memory that the caller closes.
    """

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
        named: bool = False,
    ) -> None:
        self._run_uid = run_uid
        self._node_id = node_id
        self._credentials = credentials
        self._arenas = arenas
        self._staging = staging
        self._storage = storage
        self._endpoints = endpoints
        self._named = named
        self._peers = Peers(credentials)
        self._decoders = threading.BoundedSemaphore(DECODERS)
        self._unreached: set[int] = set()  # fragments with a source that was not reached

    def ticket(self, plan: SessionPlan) -> tuple[RestoreTicket, ManifestMemory]:
        """Fetch all fragments, check them against the log's root digest, and list each file's sources."""
        resume = plan.resume
        assert resume is not None
        with closing(self._peers):
            memory, found = self._manifest(resume)
        with closing_on_error(memory):
            return self._ticket(plan, resume, memory, found, is_whole=True), memory

    def own_ticket(self, plan: SessionPlan) -> tuple[RestoreTicket, ManifestMemory] | None:
        """Return a ticket with the fragment that the ranks of this node saved, and no other.

        None if the group has another shape than the one that saved, if other ranks saved on this node, if the
        plan lacks the digest of the committed fragment, or if no source has the fragment with that digest.
        """
        resume, here = plan.resume, self._here(plan)
        assert resume is not None
        checkpoint = resume.checkpoint
        shape = (plan.world_size, len(plan.nodes))
        if here is None or not resume.fragments or shape != (checkpoint.world_size, checkpoint.num_nodes):
            return None
        with closing(self._peers):
            for version in self._versions(resume, here.node_index):
                if version.entry.digest == resume.fragments[here.node_index]:
                    break
            else:
                return None
        if version.metadata.ranks != here.ranks:
            return None
        memory = self._memory()
        with closing_on_error(memory):
            memory.add(version.places, version.data)
            found = {here.node_index: version.metadata}
            return self._ticket(plan, resume, memory, found, is_whole=False), memory

    def _ticket(
        self,
        plan: SessionPlan,
        resume: ResumePoint,
        memory: ManifestMemory,
        found: Mapping[int, FragmentMetadata],
        *,
        is_whole: bool,
    ) -> RestoreTicket:
        here = self._here(plan)
        return RestoreTicket(
            session_key=plan.session_key,
            checkpoint=resume.checkpoint,
            manifest=memory.seal(),
            sources=self._all_sources(resume, found),
            credentials=self._credentials,
            storage=self._storage,
            node_ranks=here.ranks if here is not None else (),
            is_whole=is_whole,
        )

    def _here(self, plan: SessionPlan) -> SessionNode | None:
        return next((node for node in plan.nodes if node.node_id == self._node_id), None)

    def _memory(self) -> ManifestMemory:
        return ManifestMemory(named=self._named)

    # -- sources ---------------------------------------------------------------------------------------

    def _all_sources(
        self, resume: ResumePoint, found: Mapping[int, FragmentMetadata]
    ) -> dict[str, tuple[FileSource, ...]]:
        """Return the sources of each file; files with equal sources share one tuple."""
        attempt = resume.checkpoint.id
        here = {name: self._here_sources(resume.checkpoint, name) for name in self._names_here(attempt)}
        here |= {name: self._here_sources(resume.checkpoint, name) for name in self._arena_files(resume)}
        sources: dict[str, tuple[FileSource, ...]] = {}
        for index, metadata in found.items():
            elsewhere = self._elsewhere(resume, index)
            for file in metadata.files:
                sources[file.name] = (*here[file.name], *elsewhere) if file.name in here else elsewhere
        return sources

    def _sources(self, resume: ResumePoint, index: int, file: str) -> tuple[FileSource, ...]:
        return (*self._here_sources(resume.checkpoint, file), *self._elsewhere(resume, index))

    def _here_sources(self, checkpoint: CheckpointInfo, file: str) -> tuple[FileSource, ...]:
        attempt = checkpoint.id
        found: list[FileSource] = []
        for rank, arena in self._arenas.items():
            buffer, files = arena.find(attempt.attempt), shard_files(rank, checkpoint.world_size)
            if buffer is None or file not in files or buffer.layout is None:
                continue
            if (number := files.index(file)) < len(starts := buffer.layout.starts):
                base = ARENA_PAGE_BYTES + starts[number]
                found.append(FileSource(tier="memory", where=self._node_id, path=buffer.path, base=base))
        with suppress(OSError):  # of a broken disk, to which peers and the storage path are an alternative
            local = self._staging.path(self._run_uid, attempt.directory, file)
            if local.exists():
                found.append(FileSource(tier="local", where=self._node_id, path=str(local)))
        return tuple(found)

    def _names_here(self, attempt: AttemptId) -> set[str]:
        """Return the names of the checkpoint's files on the disks of this node."""
        names: set[str] = set()
        for root in self._staging.roots:
            with suppress(OSError):
                names.update(path.name for path in (root / self._run_uid / attempt.directory).iterdir())
        return {name for name in names if is_file_name(name)}

    def _arena_files(self, resume: ResumePoint) -> set[str]:
        world_size = resume.checkpoint.world_size
        return {file for rank in self._arenas for file in shard_files(rank, world_size)}

    def _elsewhere(self, resume: ResumePoint, index: int) -> tuple[FileSource, ...]:
        peers = [node for node in resume.holders[index] if node != self._node_id]
        addresses = self._endpoints
        found = [FileSource(tier="peer", where=node, endpoint=addresses.get(node, "")) for node in peers]
        found += parity_sources(index, resume.groups, resume.checkpoint.num_nodes, self._endpoints)
        if resume.checkpoint.level >= Level.DURABLE:
            found.append(FileSource(tier="remote", where=self._storage.open().where))
        return tuple(found)

    # -- fragments -------------------------------------------------------------------------------------

    def _manifest(self, resume: ResumePoint) -> tuple[ManifestMemory, dict[int, FragmentMetadata]]:
        """Put the committed version of each fragment into memory, ordered by index.

        If the first readable versions do not match the log's root digest, read the versions of all sources.
        """
        memory, found = self._written(resume, None)
        with closing_on_error(memory):
            files = [file for version in found for file in version.files]
            if root_digest(files, resume.checkpoint.root_of) == resume.checkpoint.root_digest:
                return memory, {at: version.metadata for at, version in enumerate(found)}
        memory.close()
        memory, found = self._written(resume, self._chosen(resume))
        return memory, {at: version.metadata for at, version in enumerate(found)}

    def _written(
        self, resume: ResumePoint, chosen: Mapping[int, str] | None
    ) -> tuple[ManifestMemory, list[ReadFragment]]:
        """Write one version of each fragment into memory: by digest if `chosen` is given, else any.

        The returned fragments have no rows.
        """
        memory, found = self._memory(), list[ReadFragment]()
        fetched = map_in_order(
            partial(self._version, resume, chosen),
            range(len(resume.holders)),
            threads=FETCH_THREADS,
            name="manifest",
            max_results=FETCHED,
        )
        with closing_on_error(memory), closing(fetched):
            for version in fetched:
                memory.add(version.places, version.data)
                found.append(replace(version, places=None, data=b""))
        return memory, found

    def _version(self, resume: ResumePoint, chosen: Mapping[int, str] | None, index: int) -> ReadFragment:
        """Return a version of a fragment. RestoreError if no source has it, Unavailable if one may."""
        for version in self._versions(resume, index):
            if chosen is None or chosen[index] == version.entry.digest:
                return version
        checkpoint = resume.checkpoint
        name = fragment_file(index, checkpoint.num_nodes)
        if index in self._unreached:
            raise Unavailable(f"No source with {name} of step {checkpoint.step} was reached.")
        raise RestoreError(f"No source has {name} of step {checkpoint.step} intact.")

    def _chosen(self, resume: ResumePoint) -> dict[int, str]:
        """Return the digests of the committed fragments, from the versions of all sources.

        CorruptionError if no combination of versions has the root digest of the log, Unavailable if one may.
        """
        checkpoint = resume.checkpoint
        names = [fragment_file(index, checkpoint.num_nodes) for index in range(len(resume.holders))]
        files = {
            name: {version.entry.digest: version.files for version in self._versions(resume, index)}
            for index, name in enumerate(names)
        }
        chosen = choose_fragments(files, checkpoint.root_digest, checkpoint.root_of)
        if chosen is None and self._unreached:
            raise Unavailable(f"Not all sources of the manifest of step {checkpoint.step} were reached.")
        if chosen is None:
            raise CorruptionError(
                f"The manifest of step {checkpoint.step} is not the one that was committed."
            )
        return {index: chosen[name] for index, name in enumerate(names)}

    def _versions(self, resume: ResumePoint, index: int) -> Iterator[ReadFragment]:
        """Yield the version of a fragment at each source, without those that do not decode.

        NewerFormat if no version decodes and one has a newer format.
        """
        newer: NewerFormat | None = None
        is_there = False
        checkpoint = resume.checkpoint
        name = fragment_file(index, checkpoint.num_nodes)
        sources = self._sources(resume, index, name)
        for source in (*sources, *further_sources(sources)):
            try:
                data = self._read_whole(checkpoint.id, name, source)
                with self._decoders:
                    metadata, places = decode_places(data)
            except NewerFormat as error:
                newer = newer or error.at(name)
                continue
            except (OSError, EOFError, CheckpointError) as error:
                if not is_lost(error, is_remote=source.tier == "remote"):
                    self._unreached.add(index)
                continue
            is_there = True
            entry = FileEntry(name=name, size_bytes=len(data), digest=digest(data))
            yield ReadFragment(entry=entry, metadata=metadata, places=places, data=data)
        if newer is not None and not is_there:
            raise newer

    def _read_whole(self, attempt: AttemptId, name: str, source: FileSource) -> bytes:
        if source.tier == "remote":
            tier = self._storage.open()
            return tier.read_whole(attempt.directory, name, max_bytes=MAX_FRAGMENT_BYTES)
        if source.tier != "peer":
            return read_small(Path(source.path), MAX_FRAGMENT_BYTES)
        if source.group is not None:
            return GroupReader(attempt, source.group, self._peers).read_whole(
                name, max_bytes=MAX_FRAGMENT_BYTES
            )
        file = FileName(run_uid=self._run_uid, directory=attempt.directory, file=name)
        return self._peers.read_small(source.endpoint, file, max_bytes=MAX_FRAGMENT_BYTES)


@contextmanager
def closing_on_error(memory: ManifestMemory) -> Iterator[None]:
    """Close the memory if the block fails."""
    try:
        yield
    except BaseException:
        memory.close()
        raise
