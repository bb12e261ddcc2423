"""Write, copy, upload and check the files of a run.

Functions block; call them from threads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial

from ray_ckpt.actors.agent.coding import damaged_parity
from ray_ckpt.actors.agent.priority import ActiveCopies, DrainRateLimiter
from ray_ckpt.actors.agent.run import NodeRun, require
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import Inventory, StoredFragment, StoredParity
from ray_ckpt.errors import Unavailable
from ray_ckpt.format.names import shard_file, state_file
from ray_ckpt.storage.local.direct import read_blocks_direct
from ray_ckpt.storage.local.scrub import verify_fragment
from ray_ckpt.storage.local.staging import Holding
from ray_ckpt.trainer.link import SealedShard
from ray_ckpt.transport.client import PeerClient
from ray_ckpt.transport.credentials import Credentials
from ray_ckpt.transport.sending import Outgoing, send_files
from ray_ckpt.transport.wire import FileName, PutRequest
from ray_ckpt.types import AttemptId, FileEntry, ManifestRow

COPY_BLOCK_BYTES = 8 << 20  # bytes sent between two checks that the arena still holds the attempt
DRAIN_SPREAD_S = 0.5  # longest random wait before an upload, so that nodes do not all retry at once


def store_shard(run: NodeRun, shard: SealedShard) -> tuple[tuple[FileEntry, ...], tuple[ManifestRow, ...]]:
    """Hash and write the two files of a rank. The returned rows cover each byte of both files."""
    attempt, buffer = shard.attempt, run.memory.buffer_of(shard)
    if buffer is None or buffer.layout is None:
        raise Unavailable(f"the arena of rank {shard.rank} is gone")
    arena, layout = run.memory.arenas[shard.rank], buffer.layout
    if arena.mode != "stream":
        arena.check(buffer, attempt.attempt)
    world_size = run.require_plan().world_size
    run.check_space(layout.size_bytes + len(shard.state), what=f"The shard of rank {shard.rank}")
    file, state = shard_file(shard.rank, world_size), state_file(shard.rank, world_size)
    spans = [(0, len(layout.header)), *((p.byte_offset, p.nbytes) for p in layout.slices)]
    written = run.staging.put(
        run.run_uid,
        attempt.directory,
        file,
        arena.chunks(buffer, attempt.attempt),
        size_bytes=layout.size_bytes,
        spans=spans,
    )
    arena.check(buffer, attempt.attempt)  # fails if the rank captured into the arena during the write
    stored = run.staging.put(run.run_uid, attempt.directory, state, [shard.state])
    rows = [
        ManifestRow(
            kind="header",
            file=file,
            byte_offset=0,
            nbytes=len(layout.header),
            digest=written.spans[0],
        ),
        *(
            ManifestRow(
                kind="slice",
                file=file,
                byte_offset=p.byte_offset,
                nbytes=p.nbytes,
                digest=found,
                slice=p.slice,
            )
            for p, found in zip(layout.slices, written.spans[1:], strict=True)
        ),
        ManifestRow(kind="state", file=state, byte_offset=0, nbytes=len(shard.state), digest=stored.digest),
    ]
    entries = (
        FileEntry(name=file, size_bytes=written.size_bytes, digest=written.digest),
        FileEntry(name=state, size_bytes=stored.size_bytes, digest=stored.digest),
    )
    return entries, tuple(rows)


def send_copy(run: NodeRun, effect: n.SendCopy, credentials: Credentials, copies: ActiveCopies) -> int:
    """Copy a fragment and its files to a peer, and return the bytes sent."""
    if not run.machine.reaches(effect.holder):  # another copy may have failed while this copy was queued
        raise Unavailable("it has not answered since an earlier copy.", unreachable=True)
    held = holding(run, effect.attempt, effect.node_index)
    directory, endpoint = effect.attempt.directory, run.endpoints[effect.holder]

    def outgoing(file: FileEntry) -> Outgoing:
        name = FileName(run_uid=run.run_uid, directory=directory, file=file.name)
        request = PutRequest(name=name, size_bytes=file.size_bytes, digest=file.digest, epoch=effect.epoch)
        return Outgoing(request=request, chunks=partial(_wanted_bytes, run, effect.attempt, file.name))

    for batch in (
        held.fragment.files,
        (held.entry,),
    ):  # a stored fragment implies that its files are stored too
        files = [outgoing(file) for file in batch]
        with copies.one():
            try:
                send_files(endpoint, credentials, files, limiter=run.limiter)
            except _Recaptured:  # the second try reads the file from the disk
                send_files(endpoint, credentials, files, limiter=run.limiter)
    return sum(file.size_bytes for file in (*held.fragment.files, held.entry))


def peer_answers(run: NodeRun, peer: str, credentials: Credentials, within_s: float) -> bool:
    """Return whether a peer answers within `within_s`; True if the peer's address is not known."""
    endpoint = run.endpoints.get(peer)
    if endpoint is None:
        return True
    with PeerClient(endpoint, credentials=credentials) as client:
        return client.is_there(run.run_uid, within_s=within_s)


def upload(run: NodeRun, attempt: AttemptId, node_index: int, copies: ActiveCopies) -> int:
    """Upload a fragment and its files to the storage path, at a lower priority than copies to peers.

    Returns the bytes of the files that were uploaded.
    """
    time.sleep(random.uniform(0.0, DRAIN_SPREAD_S))
    held = holding(run, attempt, node_index)
    key = (attempt.attempt, node_index)
    pace = run.uploads[key] = DrainRateLimiter(run.drain_limiter, copies)
    try:
        for file in (*held.fragment.files, held.entry):
            if run.machine.is_deleted(attempt.attempt):  # a late upload would bring the step back
                raise Unavailable(f"step {attempt.step} is being deleted here")
            path = run.staging.path(run.run_uid, attempt.directory, file.name)
            run.remote.put_file(attempt.directory, file, path, pace=pace, level=run.spec.options.compress)
    finally:
        run.uploads.pop(key, None)
    return sum(file.size_bytes for file in (*held.fragment.files, held.entry))


def scrub(run: NodeRun, attempt: AttemptId, node_index: int) -> tuple[str, ...]:
    """Compare a fragment's files with their digests, quarantine bad files, and return the problems found."""
    try:
        num_nodes = holding(run, attempt, node_index).fragment.num_nodes
    except Unavailable:
        return (f"fragment {node_index} is not complete here",)
    path = partial(run.staging.path, run.run_uid, attempt.directory)
    damaged = verify_fragment(path, node_index, num_nodes) + damaged_parity(run, attempt, node_index)
    for file in damaged:
        run.staging.quarantine(run.run_uid, attempt.directory, file)
    return damaged


def holding(run: NodeRun, attempt: AttemptId, node_index: int) -> Holding:
    """Return a complete fragment on this node, else raise Unavailable."""
    for held in run.staging.holdings(run.run_uid, directory=attempt.directory):
        if held.fragment.attempt == attempt and held.fragment.node_index == node_index:
            return held
    raise Unavailable(f"fragment {node_index} of step {attempt.step} is not on its node any more")


def inventory(run: NodeRun) -> Inventory:
    """Return the files of a run on this node, except those that are being deleted."""
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
    return Inventory(
        parities=parities,
        fragments=tuple(map(held_fragment, kept)),
        directories=directories,
        plan=run.host.plan,
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


def _wanted_bytes(run: NodeRun, attempt: AttemptId, file: str) -> Iterator[memoryview]:
    """Yield a file's bytes. Unavailable once its checkpoint is being deleted, to free the link."""
    for block in _stored_bytes(run, attempt, file):
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
        buffer = arena.find(attempt.attempt)
        if buffer is None or file != shard_file(rank, run.require_plan().world_size):
            continue
        data = buffer.data(require(buffer.layout))
        while offset < len(data) and buffer.page.sealed == attempt.attempt:
            yield data[offset : offset + COPY_BLOCK_BYTES]
            if buffer.page.sealed != attempt.attempt:
                raise _Recaptured
            offset += COPY_BLOCK_BYTES
        if offset >= len(data):
            return
    yield from read_blocks_direct(run.staging.path(run.run_uid, attempt.directory, file), offset)
