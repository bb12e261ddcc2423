"""The manifest of a live checkpoint, read from the nodes that hold it and from the storage path."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from ray_ckpt.core.values import GroupPlaces
from ray_ckpt.errors import CheckpointError, ConfigError, NewerFormat
from ray_ckpt.format.digest import digest, root_digest
from ray_ckpt.format.manifest import (
    MAX_FRAGMENT_BYTES,
    FragmentVersion,
    choose_fragments,
    decode_fragment,
    version_files,
)
from ray_ckpt.format.names import fragment_file
from ray_ckpt.restore.parity import GroupReader
from ray_ckpt.restore.reader import FileSource, further_sources, parity_sources
from ray_ckpt.restore.sources import Peers
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.transport.client import PeerClient
from ray_ckpt.transport.credentials import Credentials
from ray_ckpt.transport.sending import Limiter
from ray_ckpt.transport.wire import FileName
from ray_ckpt.types import CheckpointInfo, FileEntry

SHORT_ID = 12  # characters of a node id; as in the logs


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAccess:
    """Access to the copies: on nodes, with the credentials of a peer, and on the storage path.

    `limiter` bounds the rate of all reads together.
    """

    endpoints: Mapping[str, str] = field(default_factory=dict)  # agents, by node
    credentials: Credentials | None = field(default=None, repr=False)
    remote: RemoteTier | None = None
    limiter: Limiter = field(default_factory=Limiter, compare=False)


class LiveManifest:
    """The fragments of a live checkpoint.

    `notes` are about bad copies of fragments, `lost` are fragments without an intact copy.
    """

    def __init__(
        self,
        checkpoint: CheckpointInfo,
        holders: Sequence[Sequence[str]],
        access: ReadAccess,
        *,
        is_remote: bool,
        groups: Sequence[GroupPlaces] = (),
        committed: Mapping[str, str] | None = None,
        on_read: Callable[[int, FileSource, int, float], None] = lambda index, source, nbytes, seconds: None,
    ) -> None:
        """Take the nodes that hold each fragment, whether the storage path has all, and the parity groups.

        `committed` are the digests of fragments by name, needed if holders have different versions. `on_read`
        is called with the index of a fragment, its source, its size in bytes and the seconds of the read.
        """
        self._checkpoint = checkpoint
        self._holders = holders
        self._access = access
        self._is_remote = is_remote
        self._groups = groups
        self._on_read = on_read
        self.committed = committed
        self.notes: list[str] = []
        self.lost: list[str] = []

    def whole(self) -> tuple[FragmentVersion, ...]:
        """Return all fragments, proven by the root digest in the log.

        Raises CheckpointError if a fragment has no intact copy.
        """
        found = tuple(v for index in range(len(self._holders)) if (v := self.version(index)) is not None)
        checkpoint = self._checkpoint
        files = [file for version in found for file in version_files(version)]
        if self.lost:
            raise CheckpointError(
                f"Step {checkpoint.step} has no intact copy of {self.lost[0]}.",
                hint="; ".join(self.notes) or "Bring back the nodes that hold it.",
            )
        if root_digest(files, checkpoint.root_of) == checkpoint.root_digest:
            return found
        self.committed = None if self.committed is not None else self.choose()
        if self.committed is None:
            raise CheckpointError(
                f"The manifest of step {checkpoint.step} is not the one that was committed.",
                hint="Use another step.",
            )
        return self.whole()

    def sources_of(self, index: int) -> tuple[FileSource, ...]:
        """Return the sources of a fragment and its files, in the order of a restore."""
        endpoints = self._access.endpoints
        found = [
            FileSource(tier="peer", where=node[:SHORT_ID], endpoint=endpoints[node])
            for node in self._holders[index]
            if node in endpoints
        ]
        found += parity_sources(index, self._groups, self._checkpoint.num_nodes, endpoints)
        if self._is_remote and self._access.remote is not None:
            found.append(FileSource(tier="remote", where=self._access.remote.where))
        return tuple(found)

    def version(self, index: int) -> FragmentVersion | None:
        """Read a fragment from the first source with an intact copy; without such a source note the loss."""
        found = next(self.versions(index), None)
        if found is None:
            name = self._name(index)
            self.lost.append(name if self.sources_of(index) else f"{name}: no holder has an agent")
        return found

    def versions(self, index: int) -> Iterator[FragmentVersion]:
        """Yield a fragment from each source with an intact copy, in the order of a restore.

        Raises NewerFormat if no copy is intact and one has a newer version, which cannot be checked.
        """
        newer: NewerFormat | None = None
        is_found, name = False, self._name(index)
        sources = self.sources_of(index)
        for source in (*sources, *further_sources(sources)):
            start_s = time.monotonic()
            try:
                data = self._read(name, source)
                fragment = decode_fragment(data)
            except NewerFormat as error:
                newer = newer or error.at(f"{name} on {source.tier} {source.where}")
                continue
            except (OSError, EOFError, CheckpointError) as error:
                self._note(f"{name} on {source.tier} {source.where}: {error}")
                continue
            self._on_read(index, source, len(data), time.monotonic() - start_s)
            self._access.limiter.wait(len(data))
            entry = FileEntry(name=name, size_bytes=len(data), digest=digest(data))
            if self.committed is not None and entry.digest != self.committed[name]:
                self._note(f"{name} on {source.tier} {source.where}: it is not the one that was committed")
                continue
            is_found = True
            yield entry, fragment
        if newer is not None and not is_found:
            raise newer

    def choose(self) -> dict[str, str] | None:
        """Choose the digests of fragments that give the root digest in the log, as a restore does."""
        versions = {
            self._name(index): {version[0].digest: version_files(version) for version in self.versions(index)}
            for index in range(len(self._holders))
        }
        return choose_fragments(versions, self._checkpoint.root_digest, self._checkpoint.root_of)

    def _name(self, index: int) -> str:
        return fragment_file(index, self._checkpoint.num_nodes)

    def _note(self, note: str) -> None:
        """Note a bad copy of a fragment, once."""
        if note not in self.notes:
            self.notes.append(note)

    def _read(self, name: str, source: FileSource) -> bytes:
        attempt, access = self._checkpoint.id, self._access
        if source.tier == "remote":
            assert access.remote is not None
            return access.remote.read_whole(attempt.directory, name, max_bytes=MAX_FRAGMENT_BYTES)
        if access.credentials is None:
            raise ConfigError("There are no credentials for peers.")
        if source.group is not None:
            with closing(Peers(access.credentials)) as peers:
                return GroupReader(attempt, source.group, peers).read_whole(
                    name, max_bytes=MAX_FRAGMENT_BYTES
                )
        file = FileName(run_uid=attempt.run_uid, directory=attempt.directory, file=name)
        with PeerClient(source.endpoint, credentials=access.credentials) as peer:
            return peer.read_file(file, max_bytes=MAX_FRAGMENT_BYTES)
