"""Write descriptions, list files and delete files on a storage path.

Functions block; call them from threads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial

from ray_ckpt.core import messages as m
from ray_ckpt.core.values import UnfinishedUpload
from ray_ckpt.errors import CorruptionError
from ray_ckpt.format.digest import digest, root_digest, root_files
from ray_ckpt.format.manifest import (
    MAX_FRAGMENT_BYTES,
    CheckpointDescription,
    decode_columns,
    encode_checkpoint,
)
from ray_ckpt.format.names import CHECKPOINT_JSON, fragment_file
from ray_ckpt.format.records import Exported
from ray_ckpt.format.tree import MAX_TREE_BYTES, decode_state
from ray_ckpt.storage.parallel import map_in_order
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.types import CheckpointInfo, FileEntry

FRAGMENTS_AT_A_TIME = 16  # concurrent reads of files, since most of the time is round trips to the store

log = logging.getLogger("ray_ckpt.coordinator")


def write_description(
    remote: RemoteTier, checkpoint: CheckpointInfo, exported: Exported | None = None
) -> None:
    """Check the fragments on the storage path against their root digest, then write checkpoint.json.

    With `exported`, this is about the directory of these items, each of which a rank must have saved.
    """
    expected, root_of, items = checkpoint.root_digest, checkpoint.root_of, ""
    if exported is not None:
        expected, root_of, items = exported.root_digest, "fragments", exported.items
        remote = remote.of_items(items)
    read = map_in_order(
        lambda index: _read_files(remote, checkpoint, index),
        range(checkpoint.num_nodes),
        threads=min(FRAGMENTS_AT_A_TIME, checkpoint.num_nodes),
        name="describe",
    )
    files = [entry for entries in read for entry in entries]
    is_committed = root_digest(files, root_of) == expected
    if not is_committed or len({file.name for file in files}) != len(files):
        raise CorruptionError(f"{remote.folder_of(checkpoint.directory)} is not what was committed.")
    _check_sizes(remote, checkpoint.directory, files)
    if items:
        _check_items(remote, checkpoint.directory, files, items)
    description = CheckpointDescription(
        attempt=checkpoint.id,
        world_size=checkpoint.world_size,
        num_nodes=checkpoint.num_nodes,
        metrics=checkpoint.metrics,
        files=tuple(root_files(files, root_of)),
        root_digest=expected,
        root_of=root_of,
        items=items,
    )
    remote.put(checkpoint.directory, CHECKPOINT_JSON, encode_checkpoint(description))


def _read_files(remote: RemoteTier, checkpoint: CheckpointInfo, index: int) -> tuple[FileEntry, ...]:
    """Return the files that a node has stored: the fragment, and those that the fragment names.

    CorruptionError if the fragment is gone or damaged, OSError if the store fails.
    """
    name = fragment_file(index, checkpoint.num_nodes)
    try:
        data = remote.read_whole(checkpoint.directory, name, max_bytes=MAX_FRAGMENT_BYTES)
    except FileNotFoundError:
        if not remote.is_there():
            raise  # for example a missing mount; the checkpoint may be intact
        raise CorruptionError(f"{checkpoint.directory}/{name} is gone from the storage path.") from None
    entry = FileEntry(name=name, size_bytes=len(data), digest=digest(data))
    return *decode_columns(data)[0].files, entry


def _check_sizes(remote: RemoteTier, directory: str, files: Sequence[FileEntry]) -> None:
    """Raise CorruptionError unless every file exists with its size; OSError if the store fails."""
    stored = remote.settle(directory)

    def size_of(file: FileEntry) -> int | None:
        found = stored.get(file.name)
        return remote.size(directory, file.name) if found is None else remote.saved_size(found)

    with closing(map_in_order(size_of, files, threads=FRAGMENTS_AT_A_TIME, name="describe")) as sizes:
        for file, size in zip(files, sizes, strict=True):
            if size != file.size_bytes:
                raise CorruptionError(
                    f"{directory}/{file.name} on the storage path has {size} bytes, not {file.size_bytes}.",
                    file=file.name,
                )


def _check_items(remote: RemoteTier, directory: str, files: Iterable[FileEntry], items: str) -> None:
    """Raise CorruptionError if the state file of no rank has one of the items; OSError if the store fails."""
    missing = set(items.split(","))
    states = (file.name for file in files if file.name.startswith("state-"))
    count = FRAGMENTS_AT_A_TIME  # mostly the first file has all items
    read = partial(remote.read_whole, directory, max_bytes=MAX_TREE_BYTES)
    with closing(map_in_order(read, states, threads=count, name="describe", max_results=count)) as trees:
        for data in trees:
            missing -= {key.split(".")[0] for key in decode_state(data)["items"]}
            if not missing:
                return
    raise CorruptionError(
        f"No rank saves {', '.join(sorted(missing))}, so these items are not complete.",
        hint="Correct the names in remote_items.",
    )


def list_remote(remote: RemoteTier, order: m.SweepRemote) -> m.RemoteListed:
    """Return the checkpoint directories and unfinished uploads, with ages by the store's clock."""
    now_s = remote.now_s()
    uploads = []
    try:
        for upload in remote.uploads():
            _, directory, file = upload.name.split("/")
            age_s = now_s - upload.started_s
            uploads.append(UnfinishedUpload(directory=directory, file=file, upload_id=upload.id, age_s=age_s))
    except OSError as error:
        if order.uploads_only:
            raise
        log.info("the storage path is listed without unfinished uploads: %s", error)
    directories = {} if order.uploads_only else remote.directories()
    ages = {directory: now_s - newest_s for directory, newest_s in directories.items()}
    return m.RemoteListed(number=order.number, directories=ages, uploads=tuple(uploads))


def delete_all(remote: RemoteTier, effect: m.DeleteOrphans) -> None:
    """Delete orphans. OSError if the store fails; the next listing then finds the remaining orphans."""
    for upload in effect.uploads:
        remote.abort(upload.directory, upload.file, upload.upload_id)
    for directory in effect.directories:
        remote.delete(directory)
