"""Share a rank's still shard with an earlier checkpoint instead of writing, sending or uploading it.

The digest decides. A shard is hashed in memory; if an earlier checkpoint on the same disk lists a shard of
the same name, size and digest, a hard link takes the place of the bytes. Whatever fails on this way, such as
a file system without links or a checkpoint that is deleted meanwhile, the shard is written as any other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from operator import eq
from typing import TYPE_CHECKING

from ray_ckpt.core.values import ScrubResult
from ray_ckpt.errors import CheckpointError, CorruptionError
from ray_ckpt.format.digest import digest
from ray_ckpt.format.manifest import MAX_FRAGMENT_BYTES, decode_columns
from ray_ckpt.format.names import attempt_of, fragment_file, is_still_name
from ray_ckpt.storage.local.direct import Written, hashed, read_written
from ray_ckpt.storage.local.files import checked
from ray_ckpt.storage.local.scrub import verify_stored
from ray_ckpt.storage.parallel import map_in_order
from ray_ckpt.types import AttemptId, FileEntry

if TYPE_CHECKING:
    from ray_ckpt.actors.agent.arena import ArenaMemory
    from ray_ckpt.actors.agent.run import NodeRun
    from ray_ckpt.trainer.link import SealedShard

log = logging.getLogger("ray_ckpt.agent")

HASH_THREADS = 2  # of a still shard: memory is read at full speed, and training keeps its cores
MAX_LIKE = 4  # earlier checkpoints that are examined, newest first: those of two buffers and two more


def likes(run: NodeRun, directory: str, file: str) -> Iterator[tuple[str, FileEntry]]:
    """Yield the newest complete checkpoints on this node that have a file of this name, and its entry."""
    others = [name for name in run.staging.directories(run.run_uid) if name != directory]
    for other in sorted(others, reverse=True)[:MAX_LIKE]:
        for held in run.staging.holdings(run.run_uid, directory=other):
            for entry in held.fragment.files:
                if entry.name == file:
                    yield other, entry


def store_still(
    run: NodeRun, directory: str, file: str, data: memoryview, spans: Sequence[tuple[int, int]]
) -> tuple[Written, bool]:
    """Store a still shard durably. Return its digests, and whether it shares the bytes of an earlier one."""
    sized = (like for like in likes(run, directory, file) if like[1].size_bytes == data.nbytes)
    if (newest := next(sized, None)) is not None:
        found = _hashed(run, file, data, spans)
        same = (
            other
            for other, entry in chain([newest], sized)
            if entry.digest == found.digest and _may_link(run, directory, other, entry)
        )
        if run.staging.link(run.run_uid, same, directory, file):
            return found, True
    run.check_space(data.nbytes, what=file)
    written = run.staging.put(run.run_uid, directory, file, [data], size_bytes=data.nbytes, spans=spans)
    _, last = run.still.get(file, ((), None))
    if last is not None and last.digest == written.digest and run.spec.options.parity is not None:
        run.captures.note_rewritten(attempt_of(directory))
    run.still[file] = tuple(spans), written
    return written, False


def check_copied(
    run: NodeRun, buffer: ArenaMemory | None, shard: SealedShard, files: Sequence[FileEntry]
) -> None:
    """Raise CorruptionError if still slices have changed in the arena since the rank copied them.

    A capture leaves them out if the rank finds its tensors as they were. So the memory has changed, by a
    flipped bit or by a write to a wrong address. `files` are stored, and were in `buffer` all that time.
    """
    still = next((file.digest for file in files if is_still_name(file.name)), None)
    if buffer is None or shard.still_from is None or still is None:
        return
    if not buffer.keeps_still(shard.still_from, still):
        run.captures.note_changed(shard)
        raise CorruptionError(
            f"Tensors that stay the same, which rank {shard.rank} copied into its arena at step "
            f"{shard.still_from.step}, have changed there. A later save copies them again."
        )


def _may_link(run: NodeRun, directory: str, other: str, entry: FileEntry) -> bool:
    """Return whether a save is to share a shard of an earlier checkpoint; report a damaged one with the save.

    With parity it is read first: the nodes of the session's groups code its bytes as they are, so that bytes
    which have changed on the disk could not be computed. A copy on another node has bytes of its own.
    """
    if run.spec.options.parity is None or is_intact(run, other, entry):
        return True
    _, bad, _ = run.bad_still.get(entry.name, (None, None, None))
    if bad == entry:  # else the copy is away or cannot be read, which is no damage
        run.captures.note_bad(attempt_of(directory), attempt_of(other))
    return False


def is_intact(run: NodeRun, directory: str, entry: FileEntry) -> bool:
    """Return whether a still shard on this node has its digest; it is read once in a session."""
    path = run.staging.path(run.run_uid, directory, entry.name)
    try:
        found, plan = path.stat(), run.machine.plan
        known = plan.session_key if plan else None, entry, (found.st_dev, found.st_ino)
        if run.read_still.get(entry.name) == known:
            return True
        if run.bad_still.get(entry.name) == known:
            return False
        blocks = read_written(path)
        for _ in checked(blocks, size_bytes=entry.size_bytes, digest=entry.digest, what=entry.name):
            pass
    except OSError:
        return False
    except CorruptionError:
        run.bad_still[entry.name] = known
        return False
    run.read_still[entry.name] = known
    return True


def _hashed(run: NodeRun, file: str, data: memoryview, spans: Sequence[tuple[int, int]]) -> Written:
    """Return the digests of a shard.

    The spans cover all of it, so a shard with the spans' digests of the last time has its digest too. Spans
    are hashed in several threads, and a whole file is not.
    """
    known_spans, known = run.still.get(file, ((), None))
    if known is not None and known_spans == tuple(spans):
        digests = map_in_order(partial(_digest_of, data), spans, threads=HASH_THREADS, name="still")
        with closing(digests):
            if all(map(eq, digests, known.spans)):
                return known
    found = hashed(data, spans)
    run.still[file] = tuple(spans), found
    return found


def _digest_of(data: memoryview, span: tuple[int, int]) -> str:
    offset, nbytes = span
    return digest(data[offset : offset + nbytes])


def same_here(run: NodeRun, directory: str, file: FileEntry) -> Iterator[str]:
    """Yield the newest checkpoints on this node whose complete fragments list the same still shard."""
    if is_still_name(file.name):
        yield from (other for other, entry in likes(run, directory, file.name) if entry == file)


def has_remotely(run: NodeRun, directory: str, node_index: int, num_nodes: int, file: FileEntry) -> bool:
    """Return whether a checkpoint on the storage path lists the same still shard in this fragment."""
    if not is_still_name(file.name):
        return False
    here = (h.fragment for h in run.staging.holdings(run.run_uid, directory=directory))
    if any(f.node_index == node_index and f.num_nodes == num_nodes and file in f.files for f in here):
        return True
    try:
        name = fragment_file(node_index, num_nodes)
        data = run.remote.read_whole(directory, name, max_bytes=MAX_FRAGMENT_BYTES)
        metadata, _ = decode_columns(data)
    except (OSError, EOFError, CheckpointError):
        return False
    return file in metadata.files


def scrub_stored(run: NodeRun, attempt: AttemptId, node_index: int, num_nodes: int) -> ScrubResult:
    """Compare a fragment's files on the storage path with their digests, and mend still shards.

    Checkpoints there may share one damaged file, most of which no node has any more. A later checkpoint on
    this node may have the same shard.
    """
    blocks = partial(run.remote.blocks, attempt.directory)
    damage = verify_stored(blocks, node_index, num_nodes)
    still = [file for file in damage if is_still_name(file)]
    left, tries = damage, 2  # the second without files that were mended before, and are damaged again
    while still and tries and _mend(run, attempt, fragment_file(node_index, num_nodes), still):
        left, tries = verify_stored(blocks, node_index, num_nodes), tries - 1
        still = [file for file in left if is_still_name(file)]
        run.mended = {file: where for file, where in run.mended.items() if file.name not in still}
    return ScrubResult(damage=left, mended=tuple(file for file in damage if file not in left))


def _mend(run: NodeRun, attempt: AttemptId, fragment: str, still: Sequence[str]) -> bool:
    """Write damaged still shards of a fragment anew as far as possible; return whether any was."""
    directory, is_any = attempt.directory, False
    data = run.remote.read_whole(directory, fragment, max_bytes=MAX_FRAGMENT_BYTES)
    for file in (file for file in decode_columns(data)[0].files if file.name in still):
        if run.machine.is_unwanted(attempt.attempt):  # a late write would bring the step back
            return False
        known = run.mended.get(file)
        if known not in (None, directory) and run.remote.share(known, directory, file) is not None:
            is_any = True
            continue
        for other in same_here(run, directory, file):
            path = run.staging.path(run.run_uid, other, file.name)
            try:
                run.remote.put_file(
                    directory, file, path, pace=run.drain_limiter, level=run.spec.options.compress
                )
            except (OSError, CorruptionError) as error:
                log.info("%s of %s is not mended from %s: %s", file.name, directory, other, error)
                continue
            run.mended[file] = directory
            is_any = True
            break
    if is_any:
        run.remote.settle(directory)
    return is_any
