"""The durable tier: a shard from staging to S3 and back, compared with programs that copy the same file.

ray_ckpt does the work of an agent in a drain (read around the page cache, hash, send in parts, compare sizes)
and of a rank in a restore (read ranges into memory, verify the digest of each row). The programs take turns
with ray_ckpt at the same server. Each client is measured with its default settings and with better ones, and
the faster setting counts. The programs read the file from the page cache and write to tmpfs. The time of a
program for an empty file, mostly its start, is subtracted, so that numbers below about 256 MiB are noise. All
clients share the cores with the server.
"""

from __future__ import annotations

import contextlib
import resource
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal, TypeAlias

from jobs.bench.context import Context
from jobs.bench.remote_clients import (
    ATTEMPT,
    CLIENTS,
    FILE,
    QUICK_CLIENTS,
    Cargo,
    Client,
    ClientSetting,
    Ours,
    Program,
    make_cargo,
)
from jobs.bench.remote_memory import agent_row, process_row
from jobs.bench.row import Reference, Row, first_line, gb_per_s, skipped, watched
from jobs.demo import s3_server
from ray_ckpt.format.digest import Digester
from ray_ckpt.format.names import CHECKPOINTS_DIR
from ray_ckpt.location import Location
from ray_ckpt.storage.local.files import read_blocks
from ray_ckpt.storage.remote.tier import RemoteRef, open_store

MAX_REPEAT = 3  # samples; seven clients move the shard in each round
START_SAMPLES = 3  # samples of a program's start, with an empty file; the median counts
CHECKSUMS = ("crc64nvme",)  # measured besides the default of ray_ckpt, which uses it on Amazon's S3 only
BUCKET = "bench"
TMPFS = "/dev/shm"

Direction: TypeAlias = Literal["upload", "download"]


def rows(context: Context) -> Iterator[Row]:
    peers = QUICK_CLIENTS if context.quick else CLIENTS
    repeat = min(context.repeat, MAX_REPEAT)
    with contextlib.ExitStack() as stack:
        storage_path = str(stack.enter_context(_place(context.server)))
        folder = stack.enter_context(context.temporary())
        tmpfs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray_ckpt-bench-", dir=TMPFS)))
        ref = RemoteRef(storage_path=storage_path, run_name="bench")
        cargo = make_cargo(folder / FILE, context.size_bytes)
        rig = Rig(ref, cargo, folder, tmpfs)
        yield from rig.upload_rows(peers, repeat, () if context.quick else CHECKSUMS)
        yield from rig.download_rows(peers, repeat)
        yield process_row(ref, cargo)
        yield agent_row(storage_path, folder, context.size_bytes)


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


@dataclass(frozen=True, slots=True)
class Usage:
    """Wall seconds of some work, with the CPU seconds of this process and of ended child processes."""

    wall_s: float
    cpu_s: float


def usage_of(work: Callable[[], None]) -> Usage:
    started_s, before_s = time.perf_counter(), _cpu_s()
    work()
    return Usage(time.perf_counter() - started_s, _cpu_s() - before_s)


def _cpu_s() -> float:
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in found)


@dataclass(slots=True, kw_only=True)
class Mover:
    """A client at its work, in one direction."""

    name: str
    setting: str
    prepare: Callable[[], None]  # its time is not measured
    move: Callable[[], None]
    start: Usage = Usage(0.0, 0.0)  # subtracted from each sample
    cpu_s: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.name}, {self.setting}"

    def sample(self) -> float:
        """Return the seconds of one move."""
        self.prepare()
        used = usage_of(self.move)
        self.cpu_s.append(used.cpu_s - self.start.cpu_s)
        return used.wall_s - self.start.wall_s


class Rig:
    """A place in a store, a cargo, and the clients that can move the cargo."""

    def __init__(self, ref: RemoteRef, cargo: Cargo, folder: Path, tmpfs: Path) -> None:
        self._ref, self._tier, self._cargo, self._folder = ref, ref.open(), cargo, folder
        self._ours = Ours(self._tier, cargo)
        self._object = self._tier.root / CHECKPOINTS_DIR / ATTEMPT.directory / FILE
        self._copy = tmpfs / FILE
        self._empty = self._tier.root / "empty"
        self._empty_path = tmpfs / "empty"
        self._empty_path.touch()

    def upload_rows(
        self, peers: Sequence[ClientSetting], repeat: int, checksums: Sequence[str] = ()
    ) -> Iterator[Row]:
        """Measure uploads of ray_ckpt with the default and with `checksums`, and uploads of the peers."""
        refs = {name: replace(self._ref, options=(("checksum", name),)) for name in checksums}
        own = {"default": self._ours, **{name: Ours(ref.open(), self._cargo) for name, ref in refs.items()}}
        yield from self._rows(
            "upload", "a shard from staging to S3, hashed, sizes compared", own, peers, repeat
        )

    def download_rows(self, peers: Sequence[ClientSetting], repeat: int) -> Iterator[Row]:
        self._ours.upload(self._cargo.path, self._object)
        what, own = "a shard from S3 into memory, every digest checked", {"default": self._ours}
        yield from self._rows("download", what, own, peers, repeat)

    def _rows(
        self,
        direction: Direction,
        what: str,
        own: Mapping[str, Client],
        peers: Sequence[ClientSetting],
        repeat: int,
    ) -> Iterator[Row]:
        """Yield the row of ray_ckpt compared with the best peer, then each peer in its fastest setting."""
        ours = [self._mover(direction, "ray_ckpt", setting, client) for setting, client in own.items()]
        movers, missing = self._movers(direction, peers)
        samples, machine = watched({mover.label: mover.sample for mover in (*ours, *movers)}, repeat)
        speeds = {label: gb_per_s(found, self._cargo.entry.size_bytes) for label, found in samples.items()}
        fastest = partial(_fastest_first, speeds)

        def row(name: str, what: str, found: Sequence[Mover], best: Mover | None = None) -> Row:
            first, *slower = fastest(found)
            others = [f"{mover.setting} {median(speeds[mover.label]):.3g} GB/s" for mover in slower]
            return Row(
                name=name,
                what=what,
                unit="GB/s",
                samples=speeds[first.label],
                reference=Reference(name=best.label, samples=speeds[best.label]) if best else None,
                reach=">= 0.9" if best else "",
                machine=machine,
                note="; ".join((first.setting, *self._costs(first), *others)),
            )

        yield row(f"remote-{direction}", what, ours, fastest(movers)[0] if movers else None)
        for name in dict.fromkeys(peer.name for peer in peers):
            if found := [mover for mover in movers if mover.name == name]:
                yield row(f"remote-{direction}/{name}", name, found)
            else:
                yield skipped(f"remote-{direction}/{name}", name, missing[name])

    def _movers(
        self, direction: Direction, peers: Iterable[ClientSetting]
    ) -> tuple[list[Mover], dict[str, str]]:
        """Return the movers that work, and the reasons why other clients do not."""
        movers, missing = [], {}
        for peer in peers:
            try:
                client = peer.make(self._object, self._folder)
                movers.append(self._mover(direction, peer.name, peer.setting, client))
            except OSError as error:
                missing[peer.name] = first_line(error)
        return movers, missing

    def _mover(self, direction: Direction, name: str, setting: str, client: Client) -> Mover:
        """Return a mover that is ready to be measured: it has moved every byte once. Raise OSError."""
        if direction == "upload":
            prepare = self._forget_object
            move = partial(client.upload, self._cargo.path, self._object)
            idle = partial(client.upload, self._empty_path, self._empty)
        else:
            prepare = self._forget_copy
            move = partial(client.download, self._object, self._copy)
            idle = partial(client.download, self._empty, self._copy)
        mover = Mover(name=name, setting=setting, prepare=prepare, move=move)
        prepare()
        move()
        self._check(direction)
        if isinstance(client, Program):
            self._tier.files.put(self._empty.name, [], max_bytes=0)
            starts = [usage_of(idle) for _ in range(START_SAMPLES)]
            mover.start = Usage(median(one.wall_s for one in starts), median(one.cpu_s for one in starts))
        return mover

    def _forget_object(self) -> None:
        self._tier.delete(ATTEMPT.directory)

    def _forget_copy(self) -> None:
        self._copy.unlink(missing_ok=True)

    def _check(self, direction: Direction) -> None:
        """Raise OSError unless the moved bytes are right. Our own reads are checked as they arrive."""
        if direction == "upload":
            self._ours.download(self._object, self._copy)
        elif self._copy.exists():
            found = Digester()
            for block in read_blocks(self._copy):
                found.update(block)
            if found.hexdigest() != self._cargo.entry.digest:
                raise OSError("it wrote other bytes")

    def _costs(self, mover: Mover) -> Iterator[str]:
        yield f"{median(mover.cpu_s) / self._cargo.entry.size_bytes * 1e9:.2g} CPU s/GB"
        if mover.start.wall_s:
            yield f"{mover.start.wall_s:.2g} s of start left out"


def _fastest_first(speeds: Mapping[str, Sequence[float]], movers: Iterable[Mover]) -> list[Mover]:
    return sorted(movers, key=lambda mover: median(speeds[mover.label]), reverse=True)
