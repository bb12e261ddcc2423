"""Write, copy, upload and check the files of a run.

Functions block; call them from threads.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from ray_ckpt.actors.agent.arena import ArenaMemory, RankArena
from ray_ckpt.actors.agent.coding import damaged_parity
from ray_ckpt.actors.agent.priority import ActiveCopies, DrainRateLimiter
from ray_ckpt.actors.agent.run import NodeRun, require
from ray_ckpt.actors.agent.still_files import has_remotely, same_here, store_still
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import Inventory, ScrubResult, SessionKey, StoredFragment, StoredParity
from ray_ckpt.errors import LOST_BYTES, CorruptionError, Unavailable
from ray_ckpt.format.digest import digest
from ray_ckpt.format.manifest import encode_fragment
from ray_ckpt.format.names import STILL, fragment_file, is_still_name, shard_file, shard_files, state_file
from ray_ckpt.format.shard import ShardLayout, build_layout
from ray_ckpt.storage.local.direct import Written, read_blocks_direct
from ray_ckpt.storage.local.scrub import verify_fragment
from ray_ckpt.storage.local.staging import Holding
from ray_ckpt.storage.parallel import map_in_order
from ray_ckpt.trainer.link import SealedShard, StepState
from ray_ckpt.transport.client import PeerClient
from ray_ckpt.transport.credentials import Credentials
from ray_ckpt.transport.sending import Outgoing, send_files
from ray_ckpt.transport.wire import FileName, PutRequest
from ray_ckpt.types import AttemptId, FileEntry, Fragment, ManifestRow

log = logging.getLogger("ray_ckpt.agent")

COPY_BLOCK_BYTES = 8 << 20  # bytes sent between two checks that the arena still holds the attempt
_Reader: TypeAlias = Callable[[NodeRun, AttemptId, str], Iterator[memoryview]]  # of a file's bytes
DRAIN_SPREAD_S = 0.5  # longest random wait before an upload, so that nodes do not all retry at once


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFiles:
    """The files of a rank on this node's disk; `rows` cover each byte of all of them."""

    files: tuple[FileEntry, ...]
    rows: tuple[ManifestRow, ...]
    shared_bytes: int  # bytes that were there already, in an earlier checkpoint

    @property
    def written_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files) - self.shared_bytes


def store_shard(run: NodeRun, shard: SealedShard) -> StoredFiles:
    """Hash and write the files of a rank; a still shard that is there already is linked."""
    attempt, buffer = shard.attempt, run.memory.buffer_of(shard)
    if buffer is None or buffer.layout is None:
        raise Unavailable(f"the arena of rank {shard.rank} is gone")
    arena, layout = run.memory.arenas[shard.rank], buffer.layout
    if arena.mode != "stream":
        arena.check(buffer, attempt.attempt)
    world_size = run.require_plan().world_size
    run.check_space(layout.shards[0].size_bytes + len(shard.state), what=f"The shard of rank {shard.rank}")
    store = partial(_store, run, arena, buffer, shard)
    numbers = range(len(layout.shards))
    parts = (
        map_in_order(store, numbers, threads=len(numbers), name="shard") if len(numbers) > 1 else [store(0)]
    )
    entries: list[FileEntry] = []
    rows: list[ManifestRow] = []
    shared_bytes = 0
    for number, (written, is_shared) in zip(numbers, parts, strict=True):
        file = shard_file(shard.rank, world_size, number)
        shared_bytes += written.size_bytes if is_shared else 0
        entries.append(FileEntry(name=file, size_bytes=written.size_bytes, digest=written.digest))
        rows += _shard_rows(file, layout.shards[number], written)
    arena.check(buffer, attempt.attempt)  # fails if the rank captured into the arena during the write
    stored = run.staging.put(
        run.run_uid, attempt.directory, state_file(shard.rank, world_size), [shard.state]
    )
    return _with_state(shard.rank, world_size, entries, rows, stored, shared_bytes)


def store_step_state(run: NodeRun, attempt: AttemptId, state: StepState) -> StoredFiles:
    """Hash and write the two files of a rank from its own state after a step, as `store_shard` does."""
    layout, world_size = build_layout(state.slices), run.require_plan().world_size
    run.check_space(len(state.shard) + len(state.state), what=f"The own state of rank {state.rank}")
    put = partial(run.staging.put, run.run_uid, attempt.directory)
    file = shard_file(state.rank, world_size)
    spans = [(0, len(layout.header)), *((p.byte_offset, p.nbytes) for p in layout.slices)]
    written = put(file, [memoryview(state.shard)], size_bytes=layout.size_bytes, spans=spans)
    stored = put(state_file(state.rank, world_size), [state.state])
    entries = [FileEntry(name=file, size_bytes=written.size_bytes, digest=written.digest)]
    return _with_state(state.rank, world_size, entries, [*_shard_rows(file, layout, written)], stored)


def _with_state(
    rank: int,
    world_size: int,
    entries: Sequence[FileEntry],
    rows: Sequence[ManifestRow],
    stored: Written,
    shared_bytes: int = 0,
) -> StoredFiles:
    """Add the state file of a rank to its shards."""
    name = state_file(rank, world_size)
    entry = FileEntry(name=name, size_bytes=stored.size_bytes, digest=stored.digest)
    row = ManifestRow(kind="state", file=name, byte_offset=0, nbytes=stored.size_bytes, digest=stored.digest)
    return StoredFiles(files=(*entries, entry), rows=(*rows, row), shared_bytes=shared_bytes)


def _store(
    run: NodeRun, arena: RankArena, buffer: ArenaMemory, shard: SealedShard, number: int
) -> tuple[Written, bool]:
    """Store a shard of a capture; return its digests, and whether it shares the bytes of an earlier one."""
    layout = require(buffer.layout)
    part, directory = layout.shards[number], shard.attempt.directory
    file = shard_file(shard.rank, run.require_plan().world_size, number)
    spans = [(0, len(part.header)), *((p.byte_offset, p.nbytes) for p in part.slices)]
    if number == STILL:
        return store_still(run, directory, file, buffer.data(layout, number), spans)
    chunks = arena.chunks(buffer, shard.attempt.attempt)
    written = run.staging.put(run.run_uid, directory, file, chunks, size_bytes=part.size_bytes, spans=spans)
    return written, False


def _shard_rows(file: str, part: ShardLayout, written: Written) -> Iterator[ManifestRow]:
    """Yield the rows of a shard: its header, then its slices."""
    yield ManifestRow(
        kind="header", file=file, byte_offset=0, nbytes=len(part.header), digest=written.spans[0]
    )
    for p, found in zip(part.slices, written.spans[1:], strict=True):
        yield ManifestRow(
            kind="slice", file=file, byte_offset=p.byte_offset, nbytes=p.nbytes, digest=found, slice=p.slice
        )


def send_copy(
    run: NodeRun, effect: n.SendCopy, credentials: Credentials, copies: ActiveCopies
) -> tuple[FileEntry, int, int]:
    """Copy a fragment and its files to a peer.

    Return the fragment's entry as it was sent, the bytes sent, and the bytes that the peer had.
    """
    if not run.machine.reaches(effect.holder):  # another copy may have failed while this copy was queued
        raise Unavailable("it has not answered since an earlier copy.", unreachable=True)
    held = holding(run, effect.attempt, effect.node_index)
    directory, endpoint = effect.attempt.directory, run.endpoints[effect.holder]

    def outgoing(file: FileEntry, read: _Reader) -> Outgoing:
        name = FileName(run_uid=run.run_uid, directory=directory, file=file.name)
        request = PutRequest(
            name=name,
            size_bytes=file.size_bytes,
            digest=file.digest,
            epoch=effect.epoch,
            is_link=next(same_here(run, directory, file), None) is not None,
            is_repair=effect.is_repair,
        )
        return Outgoing(request=request, chunks=partial(_wanted_bytes, run, effect.attempt, file.name, read))

    shared_bytes = 0
    for batch in (
        held.fragment.files,
        (held.entry,),
    ):  # a stored fragment implies that its files are stored too
        with copies.one():
            try:
                files = [outgoing(file, _stored_bytes) for file in batch]
                shared_bytes += send_files(endpoint, credentials, files, limiter=run.limiter)
            except _Recaptured:  # other ranks may capture next, so the second try reads no arena
                files = [outgoing(file, _bytes_on_disk) for file in batch]
                shared_bytes += send_files(endpoint, credentials, files, limiter=run.limiter)
    num_bytes = sum(file.size_bytes for file in (*held.fragment.files, held.entry))
    return held.entry, num_bytes - shared_bytes, shared_bytes


def may_be_damage(failure: Exception) -> bool:
    """Return whether a copy failed because of its source: a file is gone, unreadable or never came intact."""
    if isinstance(failure, OSError):
        return failure.errno in LOST_BYTES
    return isinstance(failure, CorruptionError | EOFError) or (
        isinstance(failure, Unavailable) and bool(failure.fields.get("altered"))
    )


def peer_answers(run: NodeRun, peer: str, credentials: Credentials, within_s: float) -> bool:
    """Return whether a peer answers within `within_s`; True if the peer's address is not known."""
    endpoint = run.endpoints.get(peer)
    if endpoint is None:
        return True
    with PeerClient(endpoint, credentials=credentials) as client:
        return client.is_there(run.run_uid, within_s=within_s)


def upload(
    run: NodeRun, attempt: AttemptId, node_index: int, like: str, copies: ActiveCopies
) -> tuple[int, int]:
    """Upload a fragment and its files to the storage path, at a lower priority than copies to peers.

    Still shards that the durable checkpoint `like` has are copied within the store, if `compress` would store
    them in the form that they have there. Returns the bytes, as stored, of the files that were uploaded, and
    of those that were copied.
    """
    time.sleep(random.uniform(0.0, DRAIN_SPREAD_S))
    held = holding(run, attempt, node_index)
    key, level = (attempt.attempt, node_index), run.spec.options.compress
    stored_bytes = shared_bytes = 0
    pace = run.uploads[key] = DrainRateLimiter(run.drain_limiter, copies)
    try:
        for file in (*held.fragment.files, held.entry):
            if run.machine.is_deleted(attempt.attempt):  # a late upload would bring the step back
                raise Unavailable(f"step {attempt.step} is being deleted here")
            is_there = like and has_remotely(run, like, node_index, held.fragment.num_nodes, file)
            path = run.staging.path(run.run_uid, attempt.directory, file.name)
            if is_there:
                shared = run.remote.share(like, attempt.directory, file, path=path, level=level)
                if shared is not None:
                    shared_bytes += shared
                    continue
            stored_bytes += run.remote.put_file(attempt.directory, file, path, pace=pace, level=level)
    finally:
        run.uploads.pop(key, None)
    return stored_bytes, shared_bytes


def scrub(run: NodeRun, attempt: AttemptId, node_index: int) -> ScrubResult:
    """Compare a fragment's files with their digests, quarantine bad files, and return the problems found.

    A bad file is bad in each checkpoint that shares it, and goes to quarantine from all of them. Unavailable
    if the copy is being deleted: its files vanish one by one.
    """
    try:
        num_nodes = holding(run, attempt, node_index).fragment.num_nodes
    except CorruptionError:
        return ScrubResult(damage=(f"fragment {node_index} is not complete here",))
    path = partial(run.staging.path, run.run_uid, attempt.directory)
    damaged = verify_fragment(path, node_index, num_nodes) + damaged_parity(
        run, attempt, node_index, num_nodes
    )
    if damaged and run.machine.is_deleted(attempt.attempt):
        raise Unavailable(f"step {attempt.step} is being deleted here")
    with run.staging.no_links:  # otherwise a save may share a bad file that is listed already
        shared = _take_away(run, attempt.directory, damaged)
    shared = {pair for pair in shared if not run.machine.is_deleted(pair[0].attempt)}
    return ScrubResult(damage=damaged, shared=tuple(sorted(shared, key=lambda pair: (pair[0].step, pair[1]))))


def _take_away(run: NodeRun, directory: str, damaged: Sequence[str]) -> set[tuple[AttemptId, int]]:
    """Move bad files to quarantine from all checkpoints; return the other fragments that had them."""
    shared: set[tuple[AttemptId, int]] = set()
    bad: list[tuple[str, str]] = []  # folders and files; the own folder last, by which others are found
    for file in damaged:
        for other in run.staging.sharers(run.run_uid, directory, file):
            for held in run.staging.holdings(run.run_uid, directory=other):
                if file in {entry.name for entry in held.fragment.files}:
                    shared.add((held.fragment.attempt, held.fragment.node_index))
            for header in run.staging.parities(run.run_uid, directory=other):
                if file in {layer.parity_file(header.position) for layer in header.layers}:
                    shared.add((header.attempt, header.group.members[header.position]))
            bad.append((other, file))
        bad.append((directory, file))
    _quarantine(run, bad)
    return shared


def _quarantine(run: NodeRun, bad: Sequence[tuple[str, str]]) -> None:
    """Move bad files to quarantine; those that cannot be moved stay, and are in no holding.

    Raise the last OSError if the disk fails altogether, so that no file could be moved: the files may be
    intact.
    """
    failures: list[OSError] = []
    for directory, file in bad:
        try:
            run.staging.quarantine(run.run_uid, directory, file)
        except OSError as error:
            log.warning("the damaged %s stays in %s: %s", file, directory, error)
            failures.append(error)
    if failures and len(failures) == len(bad) and failures[-1].errno in LOST_BYTES:
        raise failures[-1]


def put_fragment(run: NodeRun, fragment: Fragment) -> FileEntry:
    """Write the last file of a node's part of a save, and return its entry.

    CorruptionError if a scrub has meanwhile taken away a file that the save shares with an earlier one.
    """
    name, data = fragment_file(fragment.node_index, fragment.num_nodes), encode_fragment(fragment)
    run.staging.put(run.run_uid, fragment.attempt.directory, name, [data])
    entry = FileEntry(name=name, size_bytes=len(data), digest=digest(data))
    run.staging.known.add(entry.digest, fragment.metadata)  # correct, since this agent has encoded it
    if any(is_still_name(file.name) for file in fragment.files):
        holding(run, fragment.attempt, fragment.node_index)
    return entry


def holding(run: NodeRun, attempt: AttemptId, node_index: int) -> Holding:
    """Return a complete fragment on this node.

    CorruptionError if the fragment or a file that it lists is missing, Unavailable if it is being deleted.
    """
    for held in run.staging.holdings(run.run_uid, directory=attempt.directory):
        if held.fragment.attempt == attempt and held.fragment.node_index == node_index:
            return held
    text = f"fragment {node_index} of step {attempt.step} is not on its node any more"
    # A deletion is noted before it removes the first file.
    raise Unavailable(text) if run.machine.is_deleted(attempt.attempt) else CorruptionError(text)


def inventory(run: NodeRun, known: SessionKey) -> Inventory:
    """Return the files of a run on this node, except those that are being deleted.

    It has the plan of the group at work only if its session is newer than the one that is known.
    """
    held = tuple(run.staging.holdings(run.run_uid))
    directories = run.staging.directories(run.run_uid)
    kept = [each for each in held if not run.machine.is_deleted(each.fragment.attempt.attempt)]
    parities = tuple(
        StoredParity(
            attempt=header.attempt, node_index=header.group.members[header.position], group=header.group
        )
        for header in run.staging.parities(run.run_uid)
        if not run.machine.is_deleted(header.attempt.attempt)
    )
    plan = run.host.plan
    return Inventory(
        parities=parities,
        fragments=tuple(map(held_fragment, kept)),
        directories=directories,
        session_key=plan.session_key if plan is not None else None,
        plan=plan if plan is not None and plan.session_key > known else None,
        disk=run.staging.disk,
    )


def held_fragment(held: Holding) -> StoredFragment:
    """Return the inventory's entry for a fragment."""
    fragment = held.fragment
    return StoredFragment(
        attempt=fragment.attempt,
        node_index=fragment.node_index,
        num_nodes=fragment.num_nodes,
        fragment=held.entry,
        size_bytes=held.entry.size_bytes + sum(file.size_bytes for file in fragment.files),
        ranks=fragment.ranks,
        replicated=fragment.replicated,
        metrics=fragment.metrics,
    )


class _Recaptured(Exception):
    """Raised if a rank captured into an arena while the arena was being sent."""


def _wanted_bytes(run: NodeRun, attempt: AttemptId, file: str, read: _Reader) -> Iterator[memoryview]:
    """Yield a file's bytes. Unavailable once its checkpoint is being deleted, to free the link."""
    for block in read(run, attempt, file):
        if run.machine.is_deleted(attempt.attempt):
            raise Unavailable(f"step {attempt.step} is being deleted here")
        yield block


def _stored_bytes(run: NodeRun, attempt: AttemptId, file: str) -> Iterator[memoryview]:
    """Yield a file's bytes from its arena, which spares the disk, or from the disk if the arena lacks them.

    If the rank captures again in the meantime, the rest comes from the disk. _Recaptured if a block may have
    changed while it was sent.
    """
    offset = 0
    for rank, arena in list(run.memory.arenas.items()):
        buffer, plan = arena.find(attempt.attempt), run.machine.plan
        files = () if plan is None else shard_files(rank, plan.world_size)  # None: the session has ended
        if buffer is None or file not in files:
            continue
        data = buffer.data(require(buffer.layout), files.index(file))
        while offset < len(data) and buffer.page.sealed == attempt.attempt:
            yield data[offset : offset + COPY_BLOCK_BYTES]
            if buffer.page.sealed != attempt.attempt:
                raise _Recaptured
            offset += COPY_BLOCK_BYTES
        if offset >= len(data):
            return
    yield from _bytes_on_disk(run, attempt, file, offset)


def _bytes_on_disk(run: NodeRun, attempt: AttemptId, file: str, offset: int = 0) -> Iterator[memoryview]:
    yield from read_blocks_direct(run.staging.path(run.run_uid, attempt.directory, file), offset)
