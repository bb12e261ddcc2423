"""Make parity files on this node, and the files of lost members of a parity group; check what is stored.

Functions block; call them from threads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TypeAlias

from ray_ckpt.actors.agent.priority import ActiveCopies
from ray_ckpt.actors.agent.run import NodeRun
from ray_ckpt.actors.agent.still_files import MAX_LIKE
from ray_ckpt.core import messages as m
from ray_ckpt.errors import CheckpointError, CorruptionError, Unavailable
from ray_ckpt.format.names import STILL, parity_file
from ray_ckpt.format.parity import DIGEST_BYTES, Layer, ParityHeader, blocks_at
from ray_ckpt.restore.parity import GroupReader, group_sources
from ray_ckpt.restore.sources import Peers
from ray_ckpt.storage.local.direct import read_written
from ray_ckpt.storage.local.files import checked
from ray_ckpt.transport.credentials import Credentials
from ray_ckpt.types import AttemptId, FileEntry

_Way: TypeAlias = Callable[[str, Sequence[tuple[int, int]]], Generator[memoryview, None, None]]


def compute(
    run: NodeRun,
    order: m.Code,
    endpoints: Mapping[str, str],
    credentials: Credentials,
    copies: ActiveCopies,
    epoch: int,
) -> int:
    """Carry out the order of an epoch to compute files of a parity group; return the bytes that were stored.

    Unavailable if a member cannot be read, CorruptionError if its fragment is damaged or if computed bytes
    do not match their digest.
    """
    ways = group_sources(order.places, order.num_nodes, endpoints)
    with closing(Peers(credentials, run.limiter.slowest_bytes_per_s)) as peers, copies.one():
        _check_wanted(run, order.attempt, epoch)
        first, *others = (GroupReader(order.attempt, way, peers, run.limiter) for way in ways)
        if order.is_parity:
            stored = _store_parity(run, order, first, epoch)
        else:
            stored = _store_member(run, order, [first, *others], epoch)
    _check_wanted(run, order.attempt, epoch)
    return stored


def _store_parity(run: NodeRun, order: m.Code, group: GroupReader, epoch: int) -> int:
    """Store the parity files of a member; that of the still shards first, by a link if it was made before."""
    position, directory = order.places.group.members.index(order.node_index), order.attempt.directory
    if order.is_anew:  # later orders and saves link none of them either
        run.unlinked[position] = set(run.staging.directories(run.run_uid))
    header, stored = group.plan(position), 0
    for layer in reversed(header.layers):
        _check_wanted(run, order.attempt, epoch)
        name, size_bytes = layer.parity_file(header.position), header.size_bytes(layer)
        if layer.number and run.staging.link(run.run_uid, _with_same(run, header), directory, name):
            continue
        run.check_space(size_bytes, what=f"The parity of step {order.attempt.step}")
        run.staging.put(run.run_uid, directory, name, group.encode(header, layer), size_bytes=size_bytes)
        stored += size_bytes
    run.unlinked.get(header.position, set()).discard(directory)
    if header not in run.staging.parities(run.run_uid, directory=directory):
        raise Unavailable("a scrub has taken away a file that this one shares with an earlier checkpoint")
    return stored


def _with_same(run: NodeRun, header: ParityHeader) -> Iterator[str]:
    """Yield the newest checkpoints of the session on this node with the same parity of still shards.

    Another session may have coded bytes that were damaged; this one has read the still shards of others, and
    an order that comes after it has found damage makes parity anew.
    """
    (_, still), directory = header.layers, header.attempt.directory
    session = header.attempt.epoch, header.attempt.session
    unlinked = run.unlinked.get(header.position, set()) | {directory}
    others = [name for name in run.staging.directories(run.run_uid) if name not in unlinked]
    for other in sorted(others, reverse=True)[:MAX_LIKE]:
        for found in run.staging.parities(run.run_uid, directory=other):
            is_of_session = (found.attempt.epoch, found.attempt.session) == session
            is_same = found.has_still and (found.layers[STILL], found.position) == (still, header.position)
            if is_of_session and is_same:
                yield other


def _store_member(run: NodeRun, order: m.Code, groups: Sequence[GroupReader], epoch: int) -> int:
    """Store the files of a member, its fragment last: copied from a node that has them, or else computed."""
    position = order.places.group.members.index(order.node_index)
    fragment, *files = groups[0].files_of(position)
    ways: list[_Way] = [group.read for group in groups]
    if order.places.fragments[position]:
        ways.insert(0, partial(groups[0].copy, position))
    for file in (*files, fragment):
        _check_wanted(run, order.attempt, epoch)
        _store_file(run, order.attempt, file, ways)
    return sum(file.size_bytes for file in (fragment, *files))


def _store_file(run: NodeRun, attempt: AttemptId, file: FileEntry, ways: Iterable[_Way]) -> None:
    """Store a file in the first way that gives its bytes; else raise the error of a way, damage first."""
    run.check_space(file.size_bytes, what=f"The copy of {file.name}")
    errors: list[CheckpointError] = []
    for way in ways:
        blocks = way(file.name, [(0, file.size_bytes)])
        try:
            run.staging.put(
                run.run_uid,
                attempt.directory,
                file.name,
                blocks,
                size_bytes=file.size_bytes,
                expect=file.digest,
            )
            return
        except (CorruptionError, Unavailable) as error:
            errors.append(error)
    raise min(errors, key=lambda error: not isinstance(error, CorruptionError))


def _check_wanted(run: NodeRun, attempt: AttemptId, epoch: int) -> None:
    """Raise Unavailable if the order is outdated, and leave no file if the attempt is being deleted here."""
    if run.machine.is_deleted(attempt.attempt):
        run.staging.delete(run.run_uid, attempt.directory)
        raise Unavailable(f"step {attempt.step} is being deleted here")
    if run.machine.epoch != epoch:
        raise Unavailable("a newer coordinator is at work")


def damaged_parity(run: NodeRun, attempt: AttemptId, node_index: int, num_nodes: int) -> tuple[str, ...]:
    """Return the names of a member's parity files whose blocks differ from their digest.

    If the header is damaged, or the second file is missing, that is the first one.
    """
    for header in run.staging.parities(run.run_uid, directory=attempt.directory):
        if header.group.members[header.position] == node_index:
            bad = (layer for layer in header.layers if not _is_intact(run, header, layer))
            return tuple(layer.parity_file(header.position) for layer in bad)
    first = parity_file(node_index, num_nodes)
    is_there = run.staging.path(run.run_uid, attempt.directory, first).exists()
    return (first,) if is_there else ()


def _is_intact(run: NodeRun, header: ParityHeader, layer: Layer) -> bool:
    name = layer.parity_file(header.position)
    path = run.staging.path(run.run_uid, header.attempt.directory, name)
    start, size_bytes = blocks_at(header, layer), layer.blocks_bytes
    try:
        end = read_written(path, start + size_bytes, DIGEST_BYTES)
        stored = b"".join(map(bytes, end)).decode(errors="replace")
        blocks = read_written(path, start, size_bytes)
        for _ in checked(blocks, size_bytes=size_bytes, digest=stored, what=name):
            pass
    except CorruptionError:
        return False
    return True
