"""The durable tier: a shard from staging to S3 and back, compared with programs that copy the same file.

ray_ckpt does the work of an agent in a drain (read around the page cache, hash, send in parts, compare sizes)
and of a rank in a restore (read ranges into memory, verify the digest of each row). The programs take turns
with ray_ckpt at the same server, each with the fastest of the settings that were tried on two cores: parts of
8 to 64 MiB, 2 to 20 at a time, with and without signatures and checksums of the bytes beyond those that S3
requires. The programs read the file from the page cache and write to tmpfs. The time of a program for an
empty file, mostly its start, is subtracted, so that numbers below about 256 MiB are noise. All clients share
the cores with the server.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import psutil
import s3fs

from jobs.bench.context import Context
from jobs.bench.disk import ATTEMPT, FILE, NUM_SLICES
from jobs.bench.limits import Bytes, huge_buffer
from jobs.bench.row import Reference, Row, gb_per_s, interleaved, skipped
from jobs.demo import s3_server
from ray_ckpt.format.digest import Digester, digest
from ray_ckpt.format.names import CHECKPOINTS_DIR
from ray_ckpt.location import Location
from ray_ckpt.restore.reader import FileSource, FlatSink, SourceReader
from ray_ckpt.storage.local.direct import read_blocks_direct
from ray_ckpt.storage.remote.tier import RemoteRef, RemoteTier, open_store
from ray_ckpt.texts import size_text
from ray_ckpt.types import FileEntry, ManifestRow

MAX_REPEAT = 3  # samples; four clients move the shard in each round
START_SAMPLES = 3  # samples of a program's start, with an empty file; the median counts
PROGRAM_S = 300.0  # time limit of one copy; the slowest servers accept 10 MB/s
MAX_ERROR_CHARS = 200  # characters of a program's error in a row
LIMIT_MB = 600.0  # limit of an agent's memory, without its arenas
LOOK_S = 0.05  # interval between two samples of memory
BUCKET = "bench"
TMPFS = "/dev/shm"

Direction: TypeAlias = Literal["upload", "download"]
Move: TypeAlias = Callable[[], None]


def rows(context: Context) -> Iterator[Row]:
    peers = {"s3fs": CLIENTS["s3fs"]} if context.quick else CLIENTS
    repeat = min(context.repeat, MAX_REPEAT)
    with contextlib.ExitStack() as stack:
        storage_path = str(stack.enter_context(_place(context.server)))
        folder = stack.enter_context(context.temporary())
        tmpfs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray_ckpt-bench-", dir=TMPFS)))
        # The strict store supports it, and ray_ckpt uses it by default on Amazon's S3 only.
        options = (("checksum", "crc64nvme"),) if context.server == "strict" else ()
        ref = RemoteRef(storage_path=storage_path, run_name="bench", options=options)
        rig = Rig(ref.open(), make_cargo(folder / FILE, context.size_bytes), folder, tmpfs)
        yield from rig.rows("upload", peers, repeat)
        yield from rig.rows("download", peers, repeat)
        yield memory_row(storage_path, folder, context.size_bytes)


@contextlib.contextmanager
def _place(server: str) -> Iterator[Location]:
    """Open a new prefix in a server that is started here or under a storage path; empty it at the end."""
    with contextlib.ExitStack() as stack:
        if server in s3_server.KINDS:
            server = stack.enter_context(s3_server.running(server, BUCKET)).url("runs")
        place = Location.parse(server) / f"bench-{uuid.uuid4().hex}"
        try:
            yield place
        finally:
            files, _ = open_store(place, None)
            for upload in files.uploads():
                files.abort(upload)
            files.delete([stored.name for stored in files.list()])


# Transfers, and the programs that make them


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """A shard in staging, as described by agent and manifest."""

    path: Path
    entry: FileEntry
    rows: tuple[ManifestRow, ...]


def make_cargo(path: Path, size_bytes: int) -> Cargo:
    """Write a file of noise, which is then on the disk and in the page cache."""
    memory = huge_buffer(size_bytes)
    with path.open("wb") as file:
        file.write(memory)
        os.fsync(file.fileno())
    step = -(-size_bytes // NUM_SLICES)
    pieces = [(at, memory[at : at + step]) for at in range(0, size_bytes, step)]
    rows = tuple(
        ManifestRow(kind="state", file=FILE, byte_offset=at, nbytes=len(piece), digest=digest(piece))
        for at, piece in pieces
    )
    return Cargo(
        path=path, entry=FileEntry(name=FILE, size_bytes=size_bytes, digest=digest(memory)), rows=rows
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A client that moves one file. Its functions raise OSError with a message of one line."""

    upload: Callable[[Path, Location], None]
    download: Callable[[Location, Path], None]
    is_program: bool = False  # it needs time to start


Make: TypeAlias = Callable[[Location, Path], Client]
"""Arguments: a place in the store, which has the endpoint, and a folder for the client's own files.

FileNotFoundError if the client is not installed.
"""


def our_client(tier: RemoteTier, cargo: Cargo) -> Client:
    """Upload the cargo as an agent does, and read it into existing memory as a rank does."""
    target: Bytes = np.ones(cargo.entry.size_bytes, np.uint8)

    def upload(path: Path, to: Location) -> None:
        tier.put_file(ATTEMPT.directory, cargo.entry, cargo.path)

    def download(source: Location, path: Path) -> None:
        """Read the cargo. Raise OSError if a digest is wrong."""
        sources = {FILE: (FileSource(tier="remote", where=tier.where),)}
        reader = SourceReader(ATTEMPT, sources, credentials=None, remote=tier)
        reader.read(cargo.rows, lambda row: FlatSink(target[row.byte_offset : row.byte_offset + row.nbytes]))
        if reader.damage:
            raise OSError(f"wrong bytes: {reader.rejected[0]}")

    return Client(upload=upload, download=download)


def s3fs_client(place: Location, folder: Path) -> Client:
    """Move files with s3fs in this process."""
    files = s3fs.S3FileSystem(endpoint_url=place.endpoint)
    options = {"chunksize": 8 << 20, "max_concurrency": 8}
    return Client(
        upload=lambda path, to: files.put_file(str(path), to.path, **options),
        download=lambda source, path: files.get_file(source.path, str(path), **options),
    )


def aws_client(place: Location, folder: Path) -> Client:
    endpoint = ("--endpoint-url", place.endpoint) if place.endpoint else ()
    file = folder / "aws.ini"
    file.write_text("[default]\ns3 =\n  multipart_chunksize = 16MB\n  payload_signing_enabled = false\n")
    command = (_installed("aws"), *endpoint, "s3", "cp", "--quiet")
    return program(command, "s3://", {"AWS_CONFIG_FILE": str(file)})


def rclone_client(place: Location, folder: Path) -> Client:
    remote = {"TYPE": "s3", "ENV_AUTH": "true", "PROVIDER": "Other" if place.endpoint else "AWS"}
    remote |= {"ENDPOINT": place.endpoint} if place.endpoint else {}
    remote |= {"REGION": place.region} if place.region else {}
    flags = "--config= --retries=1 --ignore-times --s3-no-check-bucket --s3-chunk-size=16M"
    flags += " --multi-thread-streams=2 --s3-disable-checksum --s3-use-unsigned-payload=true"
    environment = {f"RCLONE_CONFIG_BENCH_{name}": value for name, value in remote.items()}
    return program((_installed("rclone"), "copyto", *flags.split()), "bench:", environment)


def program(command: Sequence[str], remote: str, environment: Mapping[str, str]) -> Client:
    """Return a client that runs a command from one place to another, with `remote` before bucket/key."""

    def run(source: str, target: str) -> None:
        try:
            done = subprocess.run(
                [*command, source, target],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PROGRAM_S,
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it took more than {PROGRAM_S:.0f} s") from None
        if done.returncode:
            output = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
            raise OSError(output[-1][:MAX_ERROR_CHARS])

    return Client(
        upload=lambda path, to: run(str(path), remote + to.path),
        download=lambda source, path: run(remote + source.path, str(path)),
        is_program=True,
    )


def _installed(name: str) -> str:
    if (path := s3_server.tool(name)) is None:
        raise FileNotFoundError("it is not installed; `make .venv-servers/.ready` does it")
    return path


CLIENTS: Mapping[str, Make] = {"s3fs": s3fs_client, "aws": aws_client, "rclone": rclone_client}


# Rows of both directions


class Usage(NamedTuple):
    """Wall seconds of some work, with the CPU seconds of this process and of ended child processes."""

    wall_s: float
    cpu_s: float


NO_START = Usage(0.0, 0.0)


def usage_of(work: Move) -> Usage:
    started_s, before_s = time.perf_counter(), sum(os.times()[:4])
    work()
    return Usage(time.perf_counter() - started_s, sum(os.times()[:4]) - before_s)


@dataclass(slots=True, kw_only=True)
class Mover:
    """A client at its work, in one direction."""

    prepare: Move  # its time is not measured
    move: Move
    start: Usage = NO_START  # subtracted from each sample
    cpu_s: list[float] = field(default_factory=list)

    def sample(self) -> float:
        """Return the seconds of one move."""
        self.prepare()
        used = usage_of(self.move)
        self.cpu_s.append(used.cpu_s - self.start.cpu_s)
        return used.wall_s - self.start.wall_s


class Rig:
    """A place in a store, a cargo, and the clients that can move the cargo."""

    def __init__(self, tier: RemoteTier, cargo: Cargo, folder: Path, tmpfs: Path) -> None:
        self._tier, self._cargo, self._folder = tier, cargo, folder
        self._ours = our_client(tier, cargo)
        self._object = tier.root / CHECKPOINTS_DIR / ATTEMPT.directory / FILE
        self._copy = tmpfs / FILE
        self._empty = tier.root / "empty"
        self._empty_path = tmpfs / "empty"
        self._empty_path.touch()

    def rows(self, direction: Direction, peers: Mapping[str, Make], repeat: int) -> Iterator[Row]:
        """Yield the row of ray_ckpt compared with the best peer, then the row of each peer."""
        self._ours.upload(self._cargo.path, self._object)
        movers, missing = {"ray_ckpt": self._mover(direction, self._ours)}, {}
        for name, make in peers.items():
            try:
                movers[name] = self._mover(direction, make(self._object, self._folder))
            except OSError as error:
                missing[name] = error
        samples = interleaved({name: mover.sample for name, mover in movers.items()}, repeat)
        speeds = {name: gb_per_s(found, self._cargo.entry.size_bytes) for name, found in samples.items()}
        best = max(
            (name for name in movers if name in peers), key=lambda name: median(speeds[name]), default=""
        )
        what = {
            "upload": "a shard from staging to S3, hashed, sizes compared",
            "download": "a shard from S3 into memory, every digest checked",
        }
        yield Row(
            name=f"remote-{direction}",
            what=what[direction],
            unit="GB/s",
            samples=speeds["ray_ckpt"],
            reference=Reference(name=best, samples=speeds[best]) if best else None,
            reach=">= 0.9" if best else "",
            note=self._costs(movers["ray_ckpt"]),
        )
        for name in peers:
            row = f"remote-{direction}/{name}"
            if name in missing:
                yield skipped(row, name, missing[name])
            else:
                note = self._costs(movers[name])
                yield Row(name=row, what=name, unit="GB/s", samples=speeds[name], note=note)

    def _mover(self, direction: Direction, client: Client) -> Mover:
        """Return a mover that is ready to be measured: it has moved every byte once. Raise OSError."""
        if direction == "upload":
            prepare = partial(self._tier.delete, ATTEMPT.directory)
            move = partial(client.upload, self._cargo.path, self._object)
            idle = partial(client.upload, self._empty_path, self._empty)
        else:
            prepare = partial(self._copy.unlink, missing_ok=True)
            move = partial(client.download, self._object, self._copy)
            idle = partial(client.download, self._empty, self._copy)
        mover = Mover(prepare=prepare, move=move)
        prepare()
        move()
        self._check(direction)
        if client.is_program:
            self._tier.files.put(self._empty.name, [], max_bytes=0)
            starts = [usage_of(idle) for _ in range(START_SAMPLES)]
            mover.start = Usage(median(one.wall_s for one in starts), median(one.cpu_s for one in starts))
        return mover

    def _check(self, direction: Direction) -> None:
        """Raise OSError unless the moved bytes are right. Our own reads are checked as they arrive."""
        if direction == "upload":
            self._ours.download(self._object, self._copy)
        elif self._copy.exists():
            found = Digester()
            for block in read_blocks_direct(self._copy):
                found.update(block)
            if found.hexdigest() != self._cargo.entry.digest:
                raise OSError("it wrote other bytes")

    def _costs(self, mover: Mover) -> str:
        cpu_s, start_s = median(mover.cpu_s) / self._cargo.entry.size_bytes * 1e9, mover.start.wall_s
        return f"{cpu_s:.2g} CPU s/GB" + (f"; {start_s:.2g} s of start left out" if start_s else "")


# Memory


def memory_row(storage_path: str, folder: Path, size_bytes: int) -> Row:
    """Measure the memory of an agent on a local Ray that writes a checkpoint to staging and drains it."""
    from jobs.bench.agent import process  # these import Ray and torch
    from jobs.bench.training import Training, local_ray

    with local_ray(folder):
        training = Training(size_bytes, folder, "agent", storage_path=storage_path)
        training.wait_ready()
        with watched_memory(process("ray::NodeAgent")) as grown:
            training.save_and_settle()
            training.ckpt.wait("durable")
        training.close()
    return Row(
        name="remote-memory",
        what=f"memory that an agent needs to write and drain {size_text(size_bytes)}, without its arena",
        unit="MB",
        samples=(max(grown) / 1e6,),
        reference=Reference(name="limit", samples=(LIMIT_MB,)),
        reach="<= 1",
    )


@contextlib.contextmanager
def watched_memory(process: psutil.Process) -> Iterator[list[int]]:
    """Collect the growth of the process's own memory in bytes, per sample; complete at the end."""
    before, grown, over = own_bytes(process), [0], threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            grown.append(own_bytes(process) - before)

    watcher = threading.Thread(target=look, name="memory", daemon=True)
    watcher.start()
    try:
        yield grown
        grown.append(own_bytes(process) - before)
    finally:
        over.set()
        watcher.join()


def own_bytes(process: psutil.Process) -> int:
    """Return the bytes of a process's memory that are neither shared memory nor mapped files."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)
