"""Faults on real Ray: each a few lines, for single tests and for the soak alike."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.actors.client import coordinator, get_result
from ray_ckpt.actors.messages import RunStatus
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.errors import CheckpointError, ConfigError, Unavailable
from ray_ckpt.location import Location
from ray_ckpt.types import CheckpointInfo
from tests.fault import journal, oracle
from tests.fault.ranks import Group, Job

os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # of ranks that die as they should
WAIT_S = 60.0  # for whatever a test waits for; each promise has its own, shorter bound
STATUS_S = 10.0
SLICE_AT = 4096 + 40  # a byte of a slice, beyond the header of a shard file


def wait_for(
    condition: Callable[[], Any], *, within_s: float = WAIT_S, what: str = "", every_s: float = 0.05
) -> float:
    """Poll until true; the seconds that it took."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < within_s, f"not within {within_s:.0f} s: {what or condition}"
        time.sleep(every_s)
    return time.monotonic() - start_s


class Rig:
    """A run that is trained under faults in a cluster, and its journal."""

    def __init__(
        self, cluster: LocalCluster, root: Path, run: str, *, storage: str | None = None, **options: Any
    ) -> None:
        """Make a rig whose storage path is a folder below `root`, or the URL `storage`."""
        self.cluster, self.root = cluster, root
        self.folder = root / "storage" / run
        self.journal = root / f"journal-{run}"
        where = Location.parse(storage or root / "storage")
        self.job = Job(run=run, storage=str(where), journal=str(self.journal), options=options)
        self.key = str(where / run)
        self.poll_s = 0.05 if where.is_posix else 0.5  # each look at a bucket is some requests
        self.group: Group | None = None

    def job_to(self, total: int) -> Job:
        """Return the training job with a last step."""
        return replace(self.job, total=total)

    # -- the training ----------------------------------------------------------------------------------

    def train(self, nodes: Sequence[str], job: Job | None = None) -> Group:
        """Start a new group on the named nodes, which begins to train."""
        self.stop()
        self.group = Group([self.cluster.nodes[name].node_id for name in nodes])
        self.group.start(job or self.job)
        return self.group

    def restore(self, nodes: Sequence[str], *, until: Path | None = None) -> int:
        """Restore in a new group; return the step. Every rank must have the journal's state.

        Rank 1 begins only when `until` exists.
        """
        self.stop()
        self.group = Group([self.cluster.nodes[name].node_id for name in nodes])
        steps = {step for step, _ in self.group.restore(self.job, until=until)}
        assert len(steps) == 1
        self.check()
        return steps.pop()

    def stop(self) -> None:
        if self.group is not None:
            self.group.stop()
            self.group = None

    def check(self) -> oracle.Verdict:
        """Assert that the oracle finds no fault, and return its verdict."""
        verdict = oracle.judge_afresh(self.key, self.journal)
        assert not verdict.problems, "\n".join(verdict.problems)
        return verdict

    # -- what is seen ----------------------------------------------------------------------------------

    @property
    def catalog(self) -> Catalog:
        return Catalog(self.key)

    def commits(self) -> tuple[CheckpointInfo, ...]:
        """Return all commits in log order; none before the run has begun."""
        with contextlib.suppress(ConfigError):
            return self.catalog.list(all=True)
        return ()

    def wait_commits(self, more: int = 1, *, within_s: float = WAIT_S) -> float:
        """Wait for this number of new commits in the log; return the seconds that it took."""
        before = len(self.commits())
        return wait_for(
            lambda: len(self.commits()) >= before + more,
            within_s=within_s,
            what=f"{more} more commit(s)",
            every_s=self.poll_s,
        )

    def epoch(self) -> int:
        """Return the epoch of the coordinator that wrote last."""
        return int(self.catalog.events()["epoch"][-1].as_py())

    def last_step(self) -> int:
        return journal.last_step(self.journal)

    def restored(self) -> int:
        """Return the last step that any group has restored; 0 if none."""
        return max((e.step for e in journal.read(self.journal) if e.kind == "restored"), default=0)

    def num_sessions(self) -> int:
        """Return the number of sessions in the log."""
        return int(self.catalog.events()["op"].to_pylist().count("session"))

    def status(self) -> RunStatus:
        """Return the status of the coordinator, which may be starting at the moment."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            try:
                status: RunStatus = get_result(coordinator().status.remote(self.key), STATUS_S)
                return status
            except Unavailable:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.2)

    def holders(self, checkpoint: CheckpointInfo) -> dict[int, set[str]]:
        """Live nodes, by name, that hold each fragment."""
        live = {node.node_id: name for name, node in self.cluster.nodes.items()}
        found = self.status().holders[checkpoint.id.attempt]
        return {index: {live[n] for n in nodes if n in live} for index, nodes in found.items()}

    def is_protected(self) -> bool:
        """Return whether no copy is missing anywhere."""
        with contextlib.suppress(CheckpointError):
            return self.status().copies_missing == 0
        return False

    # -- processes -------------------------------------------------------------------------------------

    def raylet(self, node: str) -> psutil.Process:
        return psutil.Process(self.cluster.nodes[node].handle.all_processes["raylet"][0].process.pid)

    def actors(self, kind: str, nodes: Sequence[str] | None = None) -> list[psutil.Process]:
        """Return the processes of actors of a class on these nodes."""
        children = [p for name in nodes or self.cluster.nodes for p in self.raylet(name).children()]
        return [p for p in children if _title(p).startswith(f"ray::{kind}")]

    def kill_coordinator(self) -> None:
        for process in self.actors("Coordinator"):
            process.kill()

    def kill_agent(self, node: str) -> None:
        for process in self.actors("NodeAgent", [node]):
            process.kill()

    def kill_rank(self, rank: int) -> None:
        assert self.group is not None
        os.kill(self.group.pids[rank], signal.SIGKILL)

    @property
    def staging_root(self) -> Path:
        """Where the staging folders of all nodes are, by name."""
        return self.cluster.nodes["head"].staging.parent

    # -- bytes -----------------------------------------------------------------------------------------

    def staged(self, node: str, checkpoint: CheckpointInfo) -> Path:
        return self.cluster.nodes[node].staging / checkpoint.id.run_uid / checkpoint.directory

    def stored(self, checkpoint: CheckpointInfo) -> Path:
        return self.folder / "ray_ckpt" / "checkpoints" / checkpoint.directory


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def flip(path: Path, at: int = SLICE_AT) -> None:
    """Flip one bit in place, as a disk would."""
    with path.open("r+b") as file:
        file.seek(at % path.stat().st_size)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


def shards(folder: Path, rank: int | None = None) -> list[Path]:
    return sorted(folder.glob("shard-*" if rank is None else f"shard-{rank:05d}*"))


@contextmanager
def away(folder: Path) -> Iterator[None]:
    """Take the storage path away: a plain file stands in its place."""
    parked = folder.with_name(f"{folder.name}.away")
    folder.rename(parked)
    folder.write_bytes(b"")
    try:
        yield
    finally:
        folder.unlink()
        parked.rename(folder)


@contextmanager
def frozen(*processes: psutil.Process) -> Iterator[None]:
    """SIGSTOP, and SIGCONT in the end to those that still exist, in this order."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """Mount a file system of that size at `folder`. Root only."""
    folder.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "tmpfs", str(folder))
    try:
        yield
    finally:
        _run("umount", "-l", str(folder))


@contextmanager
def lying_disk(folder: Path, root: Path, *, size_bytes: int, real_bytes: int) -> Iterator[Path]:
    """A disk that takes `size_bytes` and has room for `real_bytes`: writes succeed, fsync fails, and the
    next fsync succeeds (the kernel forgets). Root only. Yields the folder whose space is the real one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    backing = root / "backing"
    with small_disk(backing, real_bytes):
        image = backing / "image"
        with image.open("wb") as file:
            file.truncate(size_bytes)
        _run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=1", str(image))
        _run("mount", "-o", "loop", str(image), str(folder))
        try:
            yield backing
        finally:
            _run("umount", "-l", str(folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def can_mount() -> bool:
    return os.geteuid() == 0
