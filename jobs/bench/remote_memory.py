"""Memory use of the durable tier: of a process that uploads and reads, and of a real agent.

The measured value is the growth of the process's private memory; arenas are shared memory.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from jobs.bench.context import format_size
from jobs.bench.remote_clients import ATTEMPT, Cargo, Ours
from jobs.bench.row import Reference, Row
from ray_ckpt.storage.remote.tier import RemoteRef

LIMIT_MB = 600.0  # DESIGN section 7: memory of an agent in addition to its arenas
LOOK_S = 0.05  # interval between two samples of memory


def process_row(ref: RemoteRef, cargo: Cargo) -> Row:
    """Measure a new process that uploads and then reads the cargo."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_carry, args=(there, ref, cargo), daemon=True)
    process.start()
    there.close()
    try:
        here.recv()
        assert process.pid is not None
        with watched_memory(process.pid) as grown:
            here.send("go")
            here.recv()  # raises EOFError if the process has died
    finally:
        process.kill()
        process.join()
    size = format_size(cargo.entry.size_bytes)
    return _within("remote-memory", f"memory of a process that uploads and then reads {size}", grown)


def _carry(connection: Connection, ref: RemoteRef, cargo: Cargo) -> None:
    """Upload and read the cargo once, on a message of the parent process."""
    tier = ref.open()
    ours = Ours(tier, cargo)
    tier.delete(ATTEMPT.directory)  # this call also imports modules and opens connections
    connection.send("ready")
    connection.recv()
    ours.upload(cargo.path, tier.root)
    ours.download(tier.root, cargo.path)
    connection.send("done")


def agent_row(storage_path: str, folder: Path, size_bytes: int) -> Row:
    """Measure an agent on a local Ray that writes a checkpoint to staging and drains it."""
    from jobs.bench.agent import process  # imports Ray and torch, which the process above must not load
    from jobs.bench.training import Training, local_ray

    with local_ray(folder):
        training = Training(size_bytes, folder, "agent", storage_path=storage_path)
        training.wait_ready()
        with watched_memory(process("ray::NodeAgent").pid) as grown:
            training.save()
            training.settle()
            training.ckpt.wait("durable")
        training.close()
    what = f"memory of an agent that writes and drains {format_size(size_bytes)}, without its arena"
    return _within("remote-memory-agent", what, grown)


def _within(name: str, what: str, grown: Sequence[int]) -> Row:
    return Row(
        name=name,
        what=f"{what}, above that before",
        unit="MB",
        samples=(max(grown) / 1e6,),
        reference=Reference(name="limit", samples=(LIMIT_MB,)),
        reach="<= 1",
    )


@contextlib.contextmanager
def watched_memory(pid: int) -> Iterator[list[int]]:
    """Collect the growth of the process's own memory in bytes, per sample; complete at the end."""
    before, grown, over = own_bytes(pid), [0], threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            grown.append(own_bytes(pid) - before)

    watcher = threading.Thread(target=look, name="memory", daemon=True)
    watcher.start()
    try:
        yield grown
        grown.append(own_bytes(pid) - before)
    finally:
        over.set()
        watcher.join()


def own_bytes(pid: int) -> int:
    """Return the bytes of a process's memory that are not shared memory."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * sum(map(int, re.findall(r"^Rss(?:Anon|File):\s+(\d+) kB$", text, re.MULTILINE)))
