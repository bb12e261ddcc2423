"""Checks of `ray-ckpt doctor`: this machine, its staging folders, and a storage path.

Each check is a function that measures one thing and gives advice. Checks run one after the other, so that no
check disturbs the measurement of another. Each check has a thread with a time limit, so that a store or a
disk that hangs results in a failed check. A check removes what it has written, even after its time limit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import psutil

from ray_ckpt.config import (
    ADDRESS_ENV,
    GIB,
    MIB,
    PORTS_ENV,
    STAGING_ENV,
    RunOptions,
    staging_roots,
    transport_ports,
)
from ray_ckpt.errors import CheckpointError, named_text
from ray_ckpt.format import names
from ray_ckpt.location import Location
from ray_ckpt.storage.local.direct import PAGE_BYTES, read_blocks_direct, write_direct
from ray_ckpt.storage.local.files import (
    DIR_MODE,
    FILE_MODE,
    IO_BLOCK_BYTES,
    free_bytes,
    total_bytes,
    write_file,
)
from ray_ckpt.storage.local.memory import available_memory_bytes
from ray_ckpt.storage.local.pages import HUGE_BYTES, make_huge
from ray_ckpt.storage.remote.file_store import read_whole
from ray_ckpt.storage.remote.tier import CLOCK_FILE, RemoteTier
from ray_ckpt.texts import size_text

State: TypeAlias = Literal["ok", "warn", "fail"]

CHECK_S = 10.0  # time limit of a check that only calls the kernel
DISK_S = 120.0  # time limit of the disk measurement: 256 MiB, written and read at 5 MB/s
STORE_S = 30.0  # time limit of each check of the store: longer than the log retries a request
GRACE_S = 5.0  # time in which a stopped check can finish its current block and delete its file
SMALL_BYTES = 4096  # size of the small files: about that of a log record or a `checkpoint.json`
SMALL_FILES = 5  # small files per check; the median counts, as the first file includes the time to connect
LEAST_SHM_BYTES = 64 * MIB  # Docker's default for /dev/shm, too small for any arena
LEAST_MEMORY_BYTES = GIB  # with less, hardly any state fits into memory a second time
LEAST_OPEN_FILES = 4096  # a node's agent has a few for each rank, peer and request; Ray itself needs more
LEAST_DISK_BYTES_S = 200 * MIB  # below it, a node's checkpoint of 10 GB takes most of a minute
SLOW_FSYNC_S = 0.05  # seconds per fsync; a save does several
SLOW_STORE_S = 1.0  # seconds per small file: a commit writes one, and a restore waits for a few
CLOCK_OFF_S = 5.0  # ages (retention, sweeps) are hours; tokens of clouds are refused at minutes
MAX_PORTS = 1000  # ports of a range that are tried
MEMORY_FILES = ("tmpfs", "ramfs")
NETWORK_FILES = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "9p", "fuse.sshfs", "fuse.gcsfuse")
PTRACE_RULE = Path("/proc/sys/kernel/yama/ptrace_scope")
_READ_BY_ANOTHER = "import sys; open(sys.argv[1], 'r+b').read(1)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of a check: its subject, its state, the measurement, and advice (empty if none is needed)."""

    name: str
    state: State
    found: str
    advice: str = ""


_OTHER_FOLDER = (
    f"Name a folder that this user may write, on a disk that works, with staging or {STAGING_ENV}."
)

Finding: TypeAlias = tuple[State, str, str]  # state, found, advice


def check_machine() -> Iterator[Check]:
    """Run the checks that need no folder: memory, limits, ports. Takes about a second."""
    checks: Mapping[str, Callable[[], Finding]] = {
        "shared memory": _shared_memory,
        "huge pages": _huge_pages,
        "memory of others": _memory_of_others,
        "memory": _memory,
        "open files": _open_files,
        "ports": _ports,
    }
    for name, look in checks.items():
        yield _run(name, look, limit_s=CHECK_S)


def check_staging(
    option: str | tuple[str, ...] | None = None, *, size_bytes: int = 256 * MIB, limit_s: float = DISK_S
) -> Iterator[Check]:
    """Run three checks of each staging folder of this machine, as `RunOptions.staging` names them.

    Writes a file of `size_bytes` (0: none) and small files into a new folder there, and removes the folder. A
    staging folder that does not exist is not created: its nearest existing parent is checked instead. Nothing
    is written where space is too low.
    """
    for root in staging_roots(option, "doctor"):
        place = _nearest_place(root)
        stop = threading.Event()
        checks: dict[str, tuple[Callable[[], Finding], float]] = {
            "staging": (partial(_space, root, place, size_bytes), CHECK_S),
            "fsync": (partial(_small_files, place), CHECK_S),
        }
        if size_bytes:
            checks["speed"] = (partial(_speed, place, size_bytes, stop), limit_s)
        for name, (look, allowed_s) in checks.items():
            check = _run(
                f"{name} {root}",
                look,
                limit_s=allowed_s,
                advice=_OTHER_FOLDER,
                stop=stop if name == "speed" else None,
            )
            yield check
            if check.state == "fail":
                break


def check_store(
    storage_path: Location, options: Mapping[str, str] | None = None, *, limit_s: float = STORE_S
) -> Iterator[Check]:
    """Check that the storage path can hold a log, the time that small files take, and the clock of the store.

    Writes into a new folder `ray_ckpt-doctor-...` there, and removes the folder. Ends after the first check
    that fails, as later checks would fail too; each check has `limit_s` seconds. A local folder must exist.
    """
    tier = RemoteTier(storage_path / f"ray_ckpt-doctor-{uuid.uuid4().hex}", options)
    steps: Mapping[str, Callable[[RemoteTier], Finding]] = {
        "store": _store_probe,
        "store latency": _store_latency,
        "store clock": _store_clock,
    }
    advice = f"Check path, network and credentials. {tier.root.name} may be left there."
    for name, look in steps.items():
        check = _run(name, partial(_cleaned, tier, look), limit_s=limit_s, advice=advice)
        yield check
        if check.state == "fail":
            return


# Running


def _run(
    name: str,
    look: Callable[[], Finding],
    *,
    limit_s: float,
    advice: str = "",
    stop: threading.Event | None = None,
) -> Check:
    """Run `look` in a daemon thread and return its result as a check.

    If `look` raises an error or exceeds `limit_s`, the check has failed, with the error's hint or `advice`.
    `stop` is set when the wait is over; `look` then has GRACE_S to remove what it has written.
    """
    found: list[Finding] = []

    def body() -> None:
        try:
            found.append(look())
        except CheckpointError as error:
            found.append(("fail", error.message, error.hint or advice))
        except Exception as error:  # any error: the other checks are still useful
            found.append(("fail", named_text(error), advice))

    thread = threading.Thread(target=body, name=f"ray_ckpt-doctor-{name}", daemon=True)
    thread.start()
    try:
        thread.join(limit_s)
        in_time = found[:1] or [("fail", f"no answer within {limit_s:g} s", advice)]
    finally:
        if stop is not None:
            stop.set()
            thread.join(GRACE_S)
    state, text, what_to_do = in_time[0]
    return Check(name=name, state=state, found=text, advice=what_to_do)


# This machine


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return "warn", "there is no /dev/shm", "Mount a tmpfs there; Ray's object store needs it."
    total, free = total_bytes(folder), free_bytes(folder)
    found = f"/dev/shm has {size_text(free)} free of {size_text(total)}"
    if total <= LEAST_SHM_BYTES:
        return "warn", found, "Give the container more (docker --shm-size); Ray's object store needs it."
    return "ok", found, ""


def _huge_pages() -> Finding:
    """Check that a memfd can be created, and that the kernel gives it huge pages on request."""
    fd = os.memfd_create("ray_ckpt-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, HUGE_BYTES)
        os.pwrite(fd, b"1", 0)
        is_huge = make_huge(fd, 0, HUGE_BYTES) == HUGE_BYTES
    finally:
        os.close(fd)
    if is_huge:
        return "ok", "memory of captures gets huge pages", ""
    return "warn", "no huge pages for shared memory", "Captures are slower. Linux 6.1 and later give them."


def _memory_of_others() -> Finding:
    """Check that another process of this user may map a memfd of this one, as ranks map the agent's."""
    rule_text = ""
    with contextlib.suppress(OSError):
        rule_text = f" (kernel.yama.ptrace_scope is {PTRACE_RULE.read_text().strip()})"
    fd = os.memfd_create("ray_ckpt-doctor", os.MFD_CLOEXEC)
    try:
        command = [sys.executable, "-I", "-S", "-c", _READ_BY_ANOTHER, f"/proc/{os.getpid()}/fd/{fd}"]
        ended = subprocess.run(command, capture_output=True, timeout=CHECK_S / 2)
    except subprocess.TimeoutExpired:
        busy = "Try again on a machine that is less busy."
        return "warn", f"another process did not answer{rule_text}", busy
    finally:
        os.close(fd)
    if ended.returncode == 0:
        return "ok", f"another process opens this one's shared memory{rule_text}", ""
    advice = "Captures lie in /dev/shm instead: give it room for them, or allow ptrace between own processes."
    return "warn", f"another process may not open this one's shared memory{rule_text}", advice


def _memory() -> Finding:
    free = available_memory_bytes()
    found = f"{size_text(free)} available, by the machine and its cgroup limits"
    if free < LEAST_MEMORY_BYTES:
        advice = "Free memory, raise the limit, or use memory='stream': captures need room for the state."
        return "warn", found, advice
    return "ok", found, ""


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = ["no limit" if n == resource.RLIM_INFINITY else str(n) for n in (soft, hard)]
    found = f"{limits[0]} (at most {limits[1]})"
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        return "warn", found, "Raise it with `ulimit -n 65536` where Ray is started."
    return "ok", found, ""


def _ports() -> Finding:
    """Check that an agent finds a port in RAY_CKPT_PORTS. Raise ConfigError for an invalid value."""
    ports = transport_ports()
    if ports is None:
        return "ok", f"any, as {PORTS_ENV} is not set", ""
    host = os.environ.get(ADDRESS_ENV, "")
    tried = ports[:MAX_PORTS]
    free = sum(_is_free(host, port) for port in tried)
    found = f"{free} of {len(tried)} are free, {ports.start}-{ports.stop - 1} on {host or 'all addresses'}"
    if not free:
        advice = f"Give {PORTS_ENV} a wider range, and {ADDRESS_ENV} an address of this machine."
        return "fail", found, advice
    return "ok", found, ""


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind((host, port))
            return True
    return False


# Staging folders


def _nearest_place(root: Path) -> Path:
    """Return `root`, or its nearest parent that exists, which may be a file or a broken link."""
    place = root
    while not os.path.lexists(place) and place != place.parent:  # raises no PermissionError
        place = place.parent
    return place


def _space(root: Path, place: Path, size_bytes: int) -> Finding:
    """Check free space and file system of `place`: `root`, or its nearest parent that exists."""
    if not place.is_dir():
        return "fail", f"{place} is not a folder", _OTHER_FOLDER
    reserve, free = RunOptions().reserve_bytes, free_bytes(place)
    kind = _file_system(place)
    found = f"{size_text(free)} free of {size_text(total_bytes(place))}, {kind or 'unknown file system'}"
    if place != root:
        found += "; the folder is created when it is needed"
    if free < reserve + size_bytes:
        advice = (
            f"{size_text(reserve)} stay free by default (reserve_bytes). Make room, or name another folder"
        )
        return "fail", found, f"{advice} with staging or {STAGING_ENV}."
    if kind in MEMORY_FILES:
        return "warn", found, "This is memory, lost with the machine. Name a folder on a disk."
    if kind in NETWORK_FILES:
        return "warn", found, "This is a network file system. Name a folder on a local disk, best NVMe."
    return "ok", found, ""


def _file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`; empty if it is unknown."""
    mounts = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    whole = path.resolve()
    return next((mounts[str(place)] for place in (whole, *whole.parents) if str(place) in mounts), "")


def _small_files(place: Path) -> Finding:
    """Check that the folder can be written, the time of a small durable file, and O_DIRECT."""
    with tempfile.TemporaryDirectory(prefix="ray_ckpt-doctor-", dir=place) as folder:
        times_s = []
        for number in range(SMALL_FILES):
            began_s = time.monotonic()
            write_file(Path(folder, str(number)), [bytes(SMALL_BYTES)])
            times_s.append(time.monotonic() - began_s)
        is_direct = _takes_direct(Path(folder, "direct"))
    median_s = statistics.median(times_s)
    found = f"a small file takes {1000 * median_s:.1f} ms; {'with' if is_direct else 'no'} O_DIRECT"
    if not is_direct:
        return "warn", found, "Files go through the page cache. ext4 and xfs on a disk take O_DIRECT."
    if median_s > SLOW_FSYNC_S:
        return "warn", found, "Each save waits for several. Use a faster disk, or one that is less busy."
    return "ok", found, ""


def _takes_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, FILE_MODE))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _speed(place: Path, size_bytes: int, stop: threading.Event) -> Finding:
    """Measure writing a file like a shard, fsync included, and reading the file past the page cache."""
    block = memoryview(os.urandom(min(size_bytes, IO_BLOCK_BYTES)))  # random, as some disks compress

    def blocks() -> Iterator[memoryview]:
        for start in range(0, size_bytes, len(block)):
            _go_on(stop)
            yield block[: min(len(block), size_bytes - start)]

    with tempfile.TemporaryDirectory(prefix="ray_ckpt-doctor-", dir=place) as folder:
        began_s = time.monotonic()
        path, _ = write_direct(Path(folder), blocks(), size_bytes=size_bytes)
        written_s = time.monotonic()
        for _ in read_blocks_direct(path):
            _go_on(stop)
        read_s = time.monotonic()
    rates = [size_bytes / max(t, 1e-6) for t in (written_s - began_s, read_s - written_s)]
    found = f"{size_text(size_bytes)} written at {size_text(rates[0])}/s, read at {size_text(rates[1])}/s"
    if min(rates) < LEAST_DISK_BYTES_S and size_bytes >= PAGE_BYTES:
        return "warn", found, "Saves take long to be local, restores are slow. Use NVMe or several disks."
    return "ok", found, ""


def _go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise OSError(errno.ETIMEDOUT, "the check was stopped")


# The storage path


def _store_probe(tier: RemoteTier) -> Finding:
    tier.probe_log()
    return "ok", "creates a name once, reads, lists and deletes it at once", ""


def _store_latency(tier: RemoteTier) -> Finding:
    puts_s, gets_s = [], []
    data = os.urandom(SMALL_BYTES)
    for number in range(SMALL_FILES):
        name = f"file-{number}"
        began_s = time.monotonic()
        tier.files.put(name, [data], max_bytes=SMALL_BYTES)
        put_s = time.monotonic()
        seen = read_whole(tier.files, name, max_bytes=SMALL_BYTES)
        puts_s.append(put_s - began_s)
        gets_s.append(time.monotonic() - put_s)
        if seen != data:
            return "fail", "a small file came back with other bytes", "Do not store checkpoints there."
    put_s, get_s = statistics.median(puts_s), statistics.median(gets_s)
    found = f"a small file takes {1000 * put_s:.1f} ms to write, {1000 * get_s:.1f} ms to read"
    if max(put_s, get_s) > SLOW_STORE_S:
        return "warn", found, "Each commit takes that long. Use a store that is nearer, or less busy."
    return "ok", found, ""


def _store_clock(tier: RemoteTier) -> Finding:
    """Compare the store's time of storing a file with this machine's clock before and after."""
    before_s = time.time()
    store_s = tier.now_s()
    after_s = time.time()
    off_s = max(before_s - store_s, store_s - after_s, 0.0)  # some stores date files by the second
    found = f"{off_s:.1f} s off this machine's"
    if off_s > CLOCK_OFF_S:
        return "warn", found, "Set this machine's clock by NTP: requests may be refused, and ages are wrong."
    return "ok", found, ""


def _cleaned(tier: RemoteTier, look: Callable[[RemoteTier], Finding]) -> Finding:
    """Run `look`, then remove the files that it has written."""
    if tier.root.is_posix and not tier.root.folder.parent.is_dir():
        advice = "Mount it, or create it: a folder made here may be on a disk that other nodes do not see."
        return "fail", f"{tier.root.parent} does not exist", advice
    try:
        if tier.root.is_posix:
            tier.root.folder.mkdir(mode=DIR_MODE, exist_ok=True)
        return look(tier)
    finally:
        _remove(tier)


def _remove(tier: RemoteTier) -> None:
    """Remove files as far as possible; ignore errors, as the check itself reports a failing store."""
    with contextlib.suppress(OSError, CheckpointError):
        tier.files.delete([CLOCK_FILE, *(f"file-{number}" for number in range(SMALL_FILES))])
        if tier.root.is_posix:
            with contextlib.suppress(FileNotFoundError):
                (tier.root.folder / names.LOG_DIR).rmdir()
            tier.root.folder.rmdir()
