"""Make parity files on this node, and the files of lost members of a parity group; check what is stored.

Functions block; call them from threads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TypeAlias

from ray_ckpt.actors.agent.priority import ActiveCopies
from ray_ckpt.actors.agent.run import NodeRun
from ray_ckpt.core import messages as m
from ray_ckpt.errors import CheckpointError, CorruptionError, Unavailable
from ray_ckpt.format.parity import DIGEST_BYTES, ParityHeader, encode_header
from ray_ckpt.restore.parity import GroupReader, group_sources
from ray_ckpt.restore.sources import Peers
from ray_ckpt.storage.local.direct import read_written
from ray_ckpt.storage.local.files import checked
from ray_ckpt.transport.credentials import Credentials
from ray_ckpt.types import AttemptId, FileEntry

_Way: TypeAlias = Callable[[str, Sequence[tuple[int, int]]], Generator[memoryview, None, None]]


def compute(
    run: NodeRun, order: m.Code, endpoints: Mapping[str, str], credentials: Credentials, copies: ActiveCopies
) -> int:
    """Carry out an order to compute files of a parity group, and return the bytes that were stored.

    Unavailable if a member cannot be read, CorruptionError if its fragment is damaged or if computed bytes
    do not match their digest.
    """
    ways = group_sources(order.places, order.num_nodes, endpoints)
    with closing(Peers(credentials, run.limiter.slowest_bytes_per_s)) as peers, copies.one():
        _check_wanted(run, order.attempt)
        first, *others = (GroupReader(order.attempt, way, peers, run.limiter) for way in ways)
        if order.is_parity:
            stored = _store_parity(run, order, first)
        else:
            stored = _store_member(run, order, [first, *others])
    _check_wanted(run, order.attempt)
    return stored


def _store_parity(run: NodeRun, order: m.Code, group: GroupReader) -> int:
    header = group.plan(order.places.group.members.index(order.node_index))
    run.check_space(header.size_bytes, what=f"The parity of step {order.attempt.step}")
    written = run.staging.put(
        run.run_uid,
        order.attempt.directory,
        header.name,
        group.encode(header),
        size_bytes=header.size_bytes,
    )
    return written.size_bytes


def _store_member(run: NodeRun, order: m.Code, groups: Sequence[GroupReader]) -> int:
    """Store the files of a member, its fragment last: copied from a node that has them, or else computed."""
    position = order.places.group.members.index(order.node_index)
    fragment, *files = groups[0].files_of(position)
    ways: list[_Way] = [group.read for group in groups]
    if order.places.fragments[position]:
        ways.insert(0, partial(groups[0].copy, position))
    for file in (*files, fragment):
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


def _check_wanted(run: NodeRun, attempt: AttemptId) -> None:
    """Raise Unavailable, and leave no file, if the attempt is being deleted on this node."""
    if run.machine.is_deleted(attempt.attempt):
        run.staging.delete(run.run_uid, attempt.directory)
        raise Unavailable(f"step {attempt.step} is being deleted here")


def damaged_parity(run: NodeRun, attempt: AttemptId, node_index: int) -> tuple[str, ...]:
    """Return the name of the parity file of a member if its blocks differ from their digest, else ()."""
    for header in run.staging.parities(run.run_uid, directory=attempt.directory):
        if header.group.members[header.position] == node_index and not _is_intact(run, header):
            return (header.name,)
    return ()


def _is_intact(run: NodeRun, header: ParityHeader) -> bool:
    path = run.staging.path(run.run_uid, header.attempt.directory, header.name)
    start, end = len(encode_header(header)), header.size_bytes - DIGEST_BYTES
    try:
        stored = b"".join(map(bytes, read_written(path, end, DIGEST_BYTES))).decode(errors="replace")
        blocks = read_written(path, start, end - start)
        for _ in checked(blocks, size_bytes=end - start, digest=stored, what=header.name):
            pass
    except CorruptionError:
        return False
    return True
