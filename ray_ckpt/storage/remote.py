"""The remote tier on a POSIX path that all nodes share: where checkpoints become durable.

<storage_path>/<run>/ray_ckpt/log/...            the commit log
<storage_path>/<run>/ray_ckpt/checkpoints/...    drained checkpoints, one directory each
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from typing_extensions import Buffer

from ray_ckpt.config import local_path
from ray_ckpt.errors import StorageNotShared, StoragePathError
from ray_ckpt.format import names
from ray_ckpt.storage import files
from ray_ckpt.storage.log_store import PosixLogStore, probe


class RemoteTier:
    """Files of checkpoints under one run's folder. Every call may be repeated; names are checked (P9)."""

    def __init__(self, storage_path: str, run_name: str) -> None:
        self.root = local_path(storage_path) / names.check_run_name(run_name) / names.SERVICE_DIR

    @property
    def log(self) -> PosixLogStore:
        return PosixLogStore(self.root / names.LOG_DIR)

    def probe(self, nonce: str) -> None:
        """Prove that commits work here and leave `nonce` for the nodes to find."""
        probe(self.root / names.LOG_DIR)
        try:
            files.make_dirs(self.root / names.CHECKPOINTS_DIR)
            files.write_file(self.root / "shared.probe", [nonce.encode()])
        except OSError as error:
            raise StoragePathError(
                f"The storage path {self.root} cannot be written: {error}.",
                hint="Give the user that runs Ray write access to it, or choose another storage_path.",
                path=str(self.root),
            ) from error

    def check_shared(self, nonce: str, *, node: str) -> None:
        """On a node: the nonce that the coordinator left must be readable and the folder writable here."""
        try:
            seen = (self.root / "shared.probe").read_bytes().decode()
        except OSError as error:
            seen = str(error)
        if seen != nonce:
            raise StorageNotShared(
                f"Node {node[:12]} does not see the storage path {self.root} as the coordinator does.",
                hint="Use a storage_path that every node mounts (NFS, Lustre, ...); "
                "a local disk works for one node only.",
                node=node,
                path=str(self.root),
            )
        try:
            files.write_temporary(self.root / names.CHECKPOINTS_DIR, []).unlink()
        except OSError as error:
            raise StoragePathError(
                f"Node {node[:12]} cannot write to the storage path {self.root}: {error}.",
                hint="Give the user that runs Ray write access to it on every node.",
                node=node,
                path=str(self.root),
            ) from error

    def path(self, directory: str, file: str) -> Path:
        return self.root / names.CHECKPOINTS_DIR / names.check_directory(directory) / names.check_file(file)

    def put(self, directory: str, file: str, chunks: Iterable[Buffer]) -> None:
        """Write one file durably; `chunks` may raise to abandon it, then nothing is left."""
        target = self.path(directory, file)
        files.make_dirs(target.parent)
        files.write_file(target, chunks)

    def delete(self, directory: str) -> None:
        """Delete one checkpoint: data first, then manifests, then the folder. Absent is fine."""
        folder = self.root / names.CHECKPOINTS_DIR / names.check_directory(directory)
        delete_checkpoint_dir(folder)
        with contextlib.suppress(FileNotFoundError):
            files.fsync_dir(folder.parent)  # what is recorded as gone must not come back


def delete_checkpoint_dir(folder: Path) -> None:
    """Remove a checkpoint's folder, its data before its manifests; what is not ours in it stays."""
    if not folder.is_dir():
        return
    entries = [p for p in folder.iterdir() if names.is_file_name(p.name) or files.is_temporary(p.name)]
    for path in sorted(
        entries, key=lambda p: (p.name.startswith("manifest"), p.name == names.CHECKPOINT_JSON)
    ):
        path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
