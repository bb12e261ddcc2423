"""Shard and clients of the rows `remote`: ray_ckpt, rclone, aws and s3fs, each with two settings.

`default` is the client's default setting, `tuned` the fastest of the settings that were tried on two cores:
parts of 8 to 64 MiB, 2 to 20 at a time, with and without signatures and checksums of the bytes beyond those
that S3 requires.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import s3fs

from jobs.bench.disk import NUM_SLICES, huge_buffer
from jobs.demo import s3_server
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import make_attempt, shard_file
from ray_ckpt.location import Location
from ray_ckpt.restore.reader import FileSource, FlatSink, SourceReader
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.types import FileEntry, ManifestRow

PROGRAM_S = 300.0  # time limit of one copy; the slowest servers accept 10 MB/s
MAX_ERROR_CHARS = 200  # characters of a program's error in a row
MIB = 1 << 20
ATTEMPT = make_attempt(run_uid="0" * 32, session=1, step=1, attempt=0)
FILE = shard_file(0, 1)

ByteArray: TypeAlias = npt.NDArray[np.uint8]


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
    return Cargo(
        path=path,
        entry=FileEntry(name=FILE, size_bytes=size_bytes, digest=digest(memory)),
        rows=tuple(
            ManifestRow(kind="state", file=FILE, byte_offset=at, nbytes=len(piece), digest=digest(piece))
            for at, piece in pieces
        ),
    )


class Client(Protocol):
    """A client that moves one file. Methods raise OSError with a message of one line."""

    def upload(self, path: Path, to: Location) -> None: ...

    def download(self, source: Location, path: Path) -> None: ...


Make: TypeAlias = Callable[[Location, Path], Client]
"""Arguments: a place in the store, which has the endpoint, and a folder for the client's own files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSetting:
    """A client with one of its settings. FileNotFoundError from `make` if it is not installed."""

    name: str
    setting: str
    make: Make


class Ours:
    """Upload the cargo as an agent does, and read it into existing memory as a rank does."""

    def __init__(self, tier: RemoteTier, cargo: Cargo) -> None:
        self._tier, self._cargo = tier, cargo
        self._target: ByteArray = np.ones(cargo.entry.size_bytes, np.uint8)

    def upload(self, path: Path, to: Location) -> None:
        self._tier.put_file(ATTEMPT.directory, self._cargo.entry, path)

    def download(self, source: Location, path: Path) -> None:
        """Read the cargo. Raise OSError if a digest is wrong."""
        sources = {FILE: (FileSource(tier="remote", where=self._tier.where),)}
        reader = SourceReader(ATTEMPT, sources, credentials=None, remote=self._tier)
        reader.read(self._cargo.rows, self._sink)
        if reader.damage:
            raise OSError(f"wrong bytes: {reader.rejected[0]}")

    def _sink(self, row: ManifestRow) -> FlatSink:
        return FlatSink(self._target[row.byte_offset : row.byte_offset + row.nbytes])


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A command that copies from one place to another, with `remote` before bucket/key."""

    command: tuple[str, ...]
    remote: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def upload(self, path: Path, to: Location) -> None:
        self._run(str(path), self.remote + to.path)

    def download(self, source: Location, path: Path) -> None:
        self._run(self.remote + source.path, str(path))

    def _run(self, source: str, target: str) -> None:
        try:
            done = subprocess.run(
                [*self.command, source, target],
                env={**os.environ, **self.environment},
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


class S3fs:
    """s3fs in this process."""

    def __init__(self, endpoint: str | None, options: Mapping[str, int]) -> None:
        self._files = s3fs.S3FileSystem(endpoint_url=endpoint)
        self._options = options

    def upload(self, path: Path, to: Location) -> None:
        self._files.put_file(str(path), to.path, **self._options)

    def download(self, source: Location, path: Path) -> None:
        self._files.get_file(source.path, str(path), **self._options)


def _s3fs(**options: int) -> Make:
    return lambda place, folder: S3fs(place.endpoint, options)


def _aws(**settings: str) -> Make:
    def make(place: Location, folder: Path) -> Program:
        endpoint = ("--endpoint-url", place.endpoint) if place.endpoint else ()
        command = (_installed("aws"), *endpoint, "s3", "cp", "--quiet")
        if not settings:
            return Program(command=command, remote="s3://")
        file = folder / "aws.ini"
        file.write_text("[default]\ns3 =\n" + "".join(f"  {name} = {settings[name]}\n" for name in settings))
        return Program(command=command, remote="s3://", environment={"AWS_CONFIG_FILE": str(file)})

    return make


def _rclone(*flags: str) -> Make:
    common = ("--config", "", "--retries", "1", "--ignore-times", "--s3-no-check-bucket")

    def make(place: Location, folder: Path) -> Program:
        remote = {"TYPE": "s3", "ENV_AUTH": "true", "PROVIDER": "Other" if place.endpoint else "AWS"}
        remote |= {"ENDPOINT": place.endpoint} if place.endpoint else {}
        remote |= {"REGION": place.region} if place.region else {}
        return Program(
            command=(_installed("rclone"), "copyto", *common, *flags),
            remote="bench:",
            environment={f"RCLONE_CONFIG_BENCH_{name}": value for name, value in remote.items()},
        )

    return make


def _installed(name: str) -> str:
    if (path := s3_server.tool(name)) is None:
        raise FileNotFoundError("it is not installed; `make .venv-servers/.ready` does it")
    return path


CLIENTS = (
    ClientSetting(name="s3fs", setting="default", make=_s3fs()),
    ClientSetting(name="s3fs", setting="tuned", make=_s3fs(chunksize=8 * MIB, max_concurrency=8)),
    ClientSetting(name="aws", setting="default", make=_aws()),
    ClientSetting(
        name="aws",
        setting="tuned",
        make=_aws(multipart_chunksize="16MB", payload_signing_enabled="false"),
    ),
    ClientSetting(name="rclone", setting="default", make=_rclone()),
    ClientSetting(
        name="rclone",
        setting="tuned",
        make=_rclone(
            "--s3-chunk-size=16M",
            "--s3-disable-checksum",
            "--s3-use-unsigned-payload=true",
            "--multi-thread-streams=2",
        ),
    ),
)
QUICK_CLIENTS = CLIENTS[:1]
