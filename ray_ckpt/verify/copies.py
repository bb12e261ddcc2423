"""Prove that a live checkpoint can be restored from its holders: nodes, and perhaps the storage path.

Every copy of each fragment and its files is checked, because a failure may leave any single copy. The check
reads the fragment, the sizes of the files and their headers, also of parity files. It reads no bytes of
tensors; a drill reads all of these bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ray_ckpt.core.loss_scenarios import LiveCheckpoint
from ray_ckpt.core.parity_files import lost_members, tolerance
from ray_ckpt.core.values import GroupPlaces
from ray_ckpt.errors import ConfigError, Unavailable
from ray_ckpt.format import names
from ray_ckpt.format.manifest import FragmentVersion, choose_fragments, version_files
from ray_ckpt.restore.parity import PARITY, GroupReader, GroupSources, further_ways, group_sources
from ray_ckpt.restore.sources import Peers
from ray_ckpt.storage.checkpoint_files import CheckpointFile, SavedFiles, files_on
from ray_ckpt.storage.parallel import map_in_order
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.transport.credentials import Credentials
from ray_ckpt.transport.wire import FileName
from ray_ckpt.types import AttemptId, CheckpointInfo, FileEntry, Fragment, Level, ProgressCallback
from ray_ckpt.verify.content import Damage, check_group, check_tensors
from ray_ckpt.verify.drill import Retry
from ray_ckpt.verify.live_manifest import SHORT_ID, ReadAccess
from ray_ckpt.verify.plan import (
    Holder,
    PlanReport,
    PlanVerification,
    check_listed,
    plan_report,
)

HOLDERS_AT_A_TIME = 8  # in parallel, because a frozen holder takes 30 s

R = TypeVar("R")


def verify_copies(
    live: LiveCheckpoint, access: ReadAccess, *, retry: Retry, progress: ProgressCallback | None = None
) -> PlanReport | None:
    """Prove that a live checkpoint can be restored, and that each holder has all files that it should have.

    A checkpoint can be restored if the fragments match the log and cover every element exactly once, and if
    some holder has each file with the right size and header. Other findings are reported even then: a holder
    without a file that it should have, or a fragment on fewer nodes than its level promises. If there are
    findings, the checkpoint is checked once more in the state that `retry` returns; if it could not be
    restored, also with the files that a parity group gives without one of its members. Returns None if the
    checkpoint has been retired in the meantime.

    Raises NewerFormat if no copy of a fragment can be read and one has a newer version, but no error for
    damage or for nodes that do not answer.
    """
    report = _check(live, access, progress or (lambda num_copies: None))
    if report.ok:
        return report
    found = retry(live)
    if found is None:
        return None
    return _check(*found, lambda num_copies: None, is_further=not report.is_restorable)


def num_copies(live: LiveCheckpoint) -> int:
    """Count the copies of fragments that `verify_copies` checks."""
    on_storage = live.checkpoint.num_nodes if live.checkpoint.level >= Level.DURABLE else 0
    return sum(map(len, live.holders)) + on_storage


def _check(
    live: LiveCheckpoint, access: ReadAccess, progress: ProgressCallback, *, is_further: bool = False
) -> PlanReport:
    info = live.checkpoint
    live, bad_parities = _without_bad_parities(live, access)
    wanted = tuple(names.fragment_file(index, info.num_nodes) for index in range(info.num_nodes))
    usual = tuple(_holders(live, wanted, access))
    further = tuple(_further_holders(live, wanted, access)) if is_further else ()
    holders = usual + further
    versions: dict[str, dict[str, FragmentVersion]] = {}  # versions of each fragment, by digest
    for read in _each(_HolderCheck.read_fragments, holders):
        for name, version in read.items():
            versions.setdefault(name, {}).setdefault(version[0].digest, version)
    for holder in holders:
        if not versions.keys() >= set(wanted):
            holder.check.refuse_newer()
    chosen = _choose(versions, info)
    for count in _each(lambda holder: holder.check_files(chosen), holders):
        progress(count)
    fragments = {name: fragment for name, (_, fragment) in chosen.items()}
    found = {name: entry for name, (entry, _) in chosen.items()}
    fatal = [
        *check_group(None, fragments),
        *check_tensors(fragments),
        *check_listed(None, fragments, found, info.root_digest),
        *(damage for name in wanted for damage in _lost(name, fragments.get(name), holders)),
    ]
    return plan_report(
        fragments,
        where=info.directory,
        is_restorable=not fatal,
        read_bytes=sum(holder.check.size_bytes for holder in holders),
        damages=[*fatal, *bad_parities, *_too_few(live, wanted)],
        holders=[holder.report(wanted) for holder in (*usual, *(one for one in further if one.is_whole))],
    )


def _holders(live: LiveCheckpoint, wanted: Sequence[str], access: ReadAccess) -> Iterator[_HolderCheck]:
    """Yield a check for each node that holds a `wanted` fragment, and for the storage path if `durable`."""
    info = live.checkpoint
    for node in sorted({node for nodes in live.holders for node in nodes}):
        held = [name for name, nodes in zip(wanted, live.holders, strict=True) if node in nodes]
        files: _FilesOfPeers = _HeldFiles(held, info.id, access.credentials, access.endpoints.get(node, ""))
        yield _HolderCheck(f"node {node[:SHORT_ID]}", held, files, node)
    for places in live.groups:
        if lost := _computed(live, places):
            computed = [wanted[at] for at in sorted(lost)]
            ways = group_sources(places, info.num_nodes, access.endpoints)
            for name, sources in zip("PQ", ways if len(lost) == 1 else ways[:1], strict=False):
                files = _ComputedFiles(computed, info.id, access.credentials, sources)
                yield _HolderCheck(f"{PARITY} ({name})" if len(lost) == 1 else PARITY, computed, files)
    if info.level >= Level.DURABLE and access.remote is not None:
        yield _StorageCheck(access.remote, info, wanted)


def _further_holders(
    live: LiveCheckpoint, wanted: Sequence[str], access: ReadAccess
) -> Iterator[_HolderCheck]:
    """Yield a check for each member of a group with a lost one, as if that member were damaged.

    It is of files that the others give, those of both members; see `further_ways`.
    """
    info = live.checkpoint
    for places in live.groups:
        lost = _computed(live, places)
        ways = group_sources(places, info.num_nodes, access.endpoints) if len(lost) == 1 else ()
        for sources in further_ways(ways[0]) if ways else ():
            assert sources.without is not None
            computed = [wanted[at] for at in sorted({*lost, places.group.members[sources.without]})]
            files = _ComputedFiles(computed, info.id, access.credentials, sources)
            left_out = ", ".join(node[:SHORT_ID] for node in sources.left_out)
            yield _HolderCheck(f"{PARITY} without {left_out}", computed, files)


def _computed(live: LiveCheckpoint, places: GroupPlaces) -> set[int]:
    """Return the members of a group without a holder whose files can be computed."""
    return {at for at in places.group.members if not live.holders[at]} - lost_members(places)


def _each(look: Callable[[_HolderCheck], R], holders: Sequence[_HolderCheck]) -> Iterator[R]:
    """Call `look` with each holder, a few at a time; results are in order. Holders then close connections."""

    def check_once(holder: _HolderCheck) -> R:
        try:
            return look(holder)
        finally:
            holder.close()

    return map_in_order(check_once, holders, threads=HOLDERS_AT_A_TIME, name="verify")


def _choose(
    versions: Mapping[str, Mapping[str, FragmentVersion]], info: CheckpointInfo
) -> dict[str, FragmentVersion]:
    """Choose the versions of fragments that together give the root digest, or else the first of each."""
    files = {
        name: {digest: version_files(version) for digest, version in found.items()}
        for name, found in versions.items()
    }
    chosen = choose_fragments(files, info.root_digest, info.root_of)
    chosen = chosen or {name: next(iter(found)) for name, found in files.items()}
    return {name: versions[name][digest] for name, digest in chosen.items()}


def _lost(name: str, fragment: Fragment | None, holders: Iterable[_HolderCheck]) -> Iterator[Damage]:
    """Report the fragment and the files in it of which no holder has an intact copy."""
    having = [holder for holder in holders if name in holder.fragments]
    if not having:
        yield Damage(file=name, where="copies", detail="No live node holds it and its files.")
        return
    files = {name} | {file.name for file in (fragment.files if fragment is not None else ())}
    for file in sorted(files.difference(*(holder.intact(files) for holder in having))):
        yield Damage(file=file, where="copies", detail="No holder has it intact.")


def _without_bad_parities(
    live: LiveCheckpoint, access: ReadAccess
) -> tuple[LiveCheckpoint, tuple[Damage, ...]]:
    """Return the checkpoint without parity files that cannot be read or have a wrong size, and these."""
    info, found, groups = live.checkpoint, list[Damage](), list[GroupPlaces]()

    def look(places: GroupPlaces) -> dict[int, str]:
        sources = group_sources(places, info.num_nodes, access.endpoints)[0]
        return dict(GroupReader(info.id, sources, peers).bad_parities())

    with closing(Peers(access.credentials)) as peers:
        looks = map_in_order(look, live.groups, threads=HOLDERS_AT_A_TIME, name="verify")
        for places, bad in zip(live.groups, looks, strict=True):
            for at, reason in bad.items():
                name = names.parity_file(places.group.members[at], info.num_nodes)
                nodes = ", ".join(node[:SHORT_ID] for node in places.parities[at])
                found.append(Damage(file=name, where="copies", detail=f"On {nodes}: {reason}"))
            left = tuple(() if at in bad else held for at, held in enumerate(places.parities))
            groups.append(replace(places, parities=left))
    return replace(live, groups=tuple(groups)), tuple(found)


def _too_few(live: LiveCheckpoint, wanted: Sequence[str]) -> Iterator[Damage]:
    """Report fragments on fewer nodes than the level promises, such as after the loss of a node."""
    info = live.checkpoint
    promised = {Level.LOCAL: 1, Level.REPLICATED: 1 + info.replicas, Level.DURABLE: 0}[info.level]
    coded: set[int] = set()
    for places in live.groups if info.level is Level.REPLICATED else ():
        coded |= set(places.group.members)
        if 0 <= (left := tolerance(places)) < info.replicas:
            name = wanted[places.group.members[0]]
            detail = f"Its parity group allows for {left} lost node(s) instead of {info.replicas}."
            yield Damage(file=name, where="copies", detail=detail)
    for index, (name, nodes) in enumerate(zip(wanted, live.holders, strict=True)):
        if (
            index not in coded and 0 < len(nodes) < promised
        ):  # a fragment without any holder is reported by `_lost`
            detail = f"{len(nodes)} of {promised} nodes that should hold it and its files are there."
            yield Damage(file=name, where="copies", detail=detail)


# Holders


class _HolderCheck:
    """The check of one holder that should have some fragments of a checkpoint."""

    def __init__(self, where: str, fragments: Sequence[str], files: SavedFiles, node: str = "") -> None:
        self.where = where
        self.fragments = tuple(fragments)
        self.check = PlanVerification(files, lambda nbytes: None)
        self._node = node
        self._files = files
        self._read: dict[str, FileEntry] = {}  # the readable fragments of this holder

    @property
    def is_silent(self) -> bool:
        """True if the holder does not answer, so that its files are unknown."""
        return isinstance(self._files, _FilesOfPeers) and self._files.is_silent

    @property
    def is_whole(self) -> bool:
        return not self.check.damages

    def read_fragments(self) -> dict[str, FragmentVersion]:
        """Read the readable fragments of this holder."""
        read = self._read_fragments()
        self._read = {name: self.check.found[name] for name in read}
        return {name: (self._read[name], fragment) for name, fragment in read.items()}

    def _read_fragments(self) -> dict[str, Fragment]:
        return self.check.read_named([(name, None) for name in self.fragments])

    def check_files(self, chosen: Mapping[str, FragmentVersion]) -> int:
        """Compare the files of this holder with the `chosen` fragments. Return the number of copies."""
        mine = {name: chosen[name] for name in self.fragments if name in chosen}
        for name, (entry, _) in mine.items():
            if self._read.get(name, entry) != entry:
                self.check.report(name, "digest", f"Its bytes differ from their digest {entry.digest}.")
        if not self.is_silent:
            self.check.check_sizes(None, {name: fragment for name, (_, fragment) in mine.items()})
        return len(self.fragments)

    def intact(self, files: Iterable[str]) -> set[str]:
        """Return the `files` without a finding at this holder; a fragment must have been read, too."""
        if self.is_silent:
            return set()
        unread = set(self.fragments).difference(self._read)
        return set(files) - unread - {damage.file for damage in self.check.damages}

    def close(self) -> None:
        """Close the connections; a later request opens new connections."""
        if isinstance(self._files, _FilesOfPeers):
            self._files.close()

    def report(self, wanted: Sequence[str]) -> Holder:
        found = tuple(index for index, name in enumerate(wanted) if name in self.fragments)
        return Holder(where=self.where, node=self._node, fragments=found, damages=tuple(self.check.damages))


class _StorageCheck(_HolderCheck):
    """The check of the storage path, which should have all fragments."""

    def __init__(self, tier: RemoteTier, info: CheckpointInfo, fragments: Sequence[str]) -> None:
        where = str(tier.root / names.CHECKPOINTS_DIR / info.directory)
        files: SavedFiles
        try:
            files = files_on(tier, info.directory)
            _ = files.names
        except (ConfigError, OSError) as error:  # such as no credentials; each file reports the reason
            files = _HeldFiles(fragments, info.id, None, "", folder=f"{where}/", reason=str(error))
        super().__init__(where, fragments, files)
        self._root_digest = info.root_digest

    def _read_fragments(self) -> dict[str, Fragment]:
        description = self.check.read_description()
        listed: dict[str, FileEntry] = {}
        if description is not None:
            self.check.check_root(description, self._root_digest, is_whole=False)
        if description is not None and description.root_digest == self._root_digest:
            listed = {entry.name: entry for entry in description.fragments}
        return self.check.read_named([(name, listed.get(name)) for name in self.fragments])

    def check_files(self, chosen: Mapping[str, FragmentVersion]) -> int:
        count = super().check_files(chosen)
        self.check.check_unlisted(is_whole=len(chosen) == len(self.fragments))
        return count


class _FilesOfPeers(SavedFiles):
    """Files of a checkpoint that are read from nodes."""

    is_silent = False  # an agent that did not answer gets no more requests

    def __init__(self, fragments: Iterable[str], attempt: AttemptId, credentials: Credentials | None) -> None:
        self._fragments = tuple(fragments)
        self._attempt = attempt
        self._peers = Peers(credentials)

    @property
    def folder_name(self) -> str:
        return self._attempt.directory

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fragments that should be there, because agents do not list files."""
        return self._fragments

    def close(self) -> None:
        self._peers.close()


class _ComputedFiles(_FilesOfPeers):
    """The files of lost members of a parity group, computed from the others."""

    def __init__(
        self,
        fragments: Iterable[str],
        attempt: AttemptId,
        credentials: Credentials | None,
        sources: GroupSources,
    ) -> None:
        super().__init__(fragments, attempt, credentials)
        self._group = GroupReader(attempt, sources, self._peers)

    def place(self, name: str) -> str:
        return name

    def open(self, name: str) -> CheckpointFile | None:
        with _as_os_error():
            found = (file for file in self._group.entries(name) if file.name == name)
            return CheckpointFile(size_bytes=next(found).size_bytes, read=partial(self._read, name))

    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> Generator[memoryview, None, None]:
        with _as_os_error():
            yield from self._group.read(name, ranges)


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise ConnectionError for Unavailable: readers of files expect an OSError."""
    try:
        yield
    except Unavailable as error:
        raise ConnectionError(error.message) from error


class _HeldFiles(_FilesOfPeers):
    """The files of a checkpoint on a node."""

    def __init__(
        self,
        fragments: Iterable[str],
        attempt: AttemptId,
        credentials: Credentials | None,
        endpoint: str,
        *,
        folder: str = "",
        reason: str = "its agent does not answer",
    ) -> None:
        """Take the endpoint of the node's agent; without one, opening a file raises `reason`."""
        super().__init__(fragments, attempt, credentials)
        self._endpoint = endpoint
        self._folder = folder
        self._reason = reason
        self.is_silent = not endpoint

    def place(self, name: str) -> str:
        return f"{self._folder}{name}"

    def open(self, name: str) -> CheckpointFile | None:
        if self.is_silent:
            raise ConnectionError(self._reason)
        file = FileName(run_uid=self._attempt.run_uid, directory=self._attempt.directory, file=name)
        try:
            with self._peers.acquire(self._endpoint) as peer:
                size = peer.size(file)
        except Unavailable as error:
            if not error.fields.get("answered"):
                self.is_silent = True
            raise ConnectionError(error.message) from error
        return None if size is None else CheckpointFile(size_bytes=size, read=partial(self._read, file))

    def _read(self, file: FileName, ranges: Sequence[tuple[int, int]]) -> Generator[memoryview, None, None]:
        with _as_os_error(), self._peers.acquire(self._endpoint) as peer:
            yield from peer.read(file, ranges)
