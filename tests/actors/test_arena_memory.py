"""Memory for captures on the agent's side: how much, of what kind, and what if there is too little."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch

from ray_ckpt.actors.agent import memory as memory_module
from ray_ckpt.actors.agent import shared_memory as shared_memory_module
from ray_ckpt.actors.agent.arena import ArenaMemory, RankArena, ShmRoom, SignalPage, choose_mode, make_arena
from ray_ckpt.actors.agent.memory import RankMemory
from ray_ckpt.actors.agent.shared_memory import SHM_FOLDER, named_file, sweep_named_files
from ray_ckpt.capture.arena import Ring
from ray_ckpt.errors import InsufficientSpace, Unavailable
from ray_ckpt.format.arena_page import RING_BLOCK_BYTES, RING_BLOCKS
from ray_ckpt.format.shard import RankLayout, ShardLayout
from ray_ckpt.storage.local.cores import available_cores
from ray_ckpt.storage.local.memory import available_memory_bytes

GIB = 1 << 30
ATTEMPT = "0123456789abcdef"


@pytest.mark.parametrize(
    ("all_bytes", "free_bytes", "expected"),
    [(1, 8, "double"), (1.01, 8, "single"), (5.5, 8, "single"), (5.7, 8, "stream"), (100, 8, "stream")],
)
def test_auto_takes_what_leaves_memory_to_the_training(
    all_bytes: float, free_bytes: float, expected: str
) -> None:
    assert choose_mode("auto", all_bytes=int(all_bytes * GIB), free_bytes=int(free_bytes * GIB)) == expected


def test_a_mode_that_is_set_by_name_is_checked() -> None:
    assert choose_mode("single", all_bytes=7 * GIB, free_bytes=8 * GIB) == "single"
    assert choose_mode("stream", all_bytes=700 * GIB, free_bytes=8 * GIB) == "stream"
    for mode, size in (("single", 8 * GIB), ("double", 4 * GIB)):
        with pytest.raises(InsufficientSpace, match=f"memory='{mode}' needs 8,589,934,592 bytes"):
            choose_mode(mode, all_bytes=size, free_bytes=8 * GIB)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("all_bytes", "room_bytes", "ranks", "expected"),
    [
        (20 * MIB, 64 * MIB, 1, "double"),
        (30 * MIB, 64 * MIB, 1, "single"),
        (60 * MIB, 64 * MIB, 1, "single"),  # a ring is larger
        (200 * MIB, 190 * MIB, 1, "stream"),
        (200 * MIB, 260 * MIB, 2, "single"),  # two rings are larger
        (2 * GIB, 64 * GIB, 1, "single"),  # by memory, of which there are 8 GiB
        (6 * GIB, 64 * GIB, 1, "stream"),
    ],
)
def test_auto_takes_what_fits_into_dev_shm_where_the_memory_has_to_be_there(
    all_bytes: int, room_bytes: int, ranks: int, expected: str
) -> None:
    room = ShmRoom(free_bytes=room_bytes, size_bytes=room_bytes)
    assert choose_mode("auto", all_bytes=all_bytes, free_bytes=8 * GIB, ranks=ranks, room=room) == expected


@pytest.mark.parametrize(
    ("mode", "all_bytes", "needed"),
    [
        ("auto", 100, 105_910_272),
        ("double", 40, 85_991_424),
        ("single", 64, 68_161_536),
        ("stream", 1, 134_221_824),
    ],
)
def test_what_does_not_fit_into_dev_shm_is_an_error_with_a_remedy(
    mode: str, all_bytes: int, needed: int
) -> None:
    room = ShmRoom(free_bytes=63 * MIB, size_bytes=64 * MIB)
    with pytest.raises(InsufficientSpace) as caught:
        choose_mode(mode, all_bytes=all_bytes * MIB, free_bytes=8 * GIB, room=room)
    message, hint = caught.value.message, caught.value.hint
    assert f"memory='{mode}' needs {needed:,} bytes" in message
    assert "/dev/shm, which has 66,060,288 of 67,108,864 bytes free" in message
    assert "--shm-size" in hint and "ptrace_scope" in hint and "CAP_SYS_PTRACE" in hint
    assert caught.value.fields["needed_bytes"] == needed


def test_a_cgroup_limits_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = available_memory_bytes()
    assert 0 < everything <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 200000\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "memory.max").write_text("max\n")
    monkeypatch.setattr(
        "ray_ckpt.storage.local.memory.cgroups",
        lambda controller: iter((folder, True) for folder in (inner, tmp_path)),
    )
    assert available_memory_bytes() == 500_000


def test_a_cgroup_limits_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod with a limit of CPU, which sees all cores of its node."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert 0 < available_cores() <= 64
    new, old = tmp_path / "new", tmp_path / "old"
    for folder in (new, old):
        folder.mkdir()
    found = [(tmp_path, True), (new, True), (old, False)]
    monkeypatch.setattr("ray_ckpt.storage.local.cores.cgroups", lambda controller: iter(found))
    assert available_cores() == 64, "no files"
    (new / "cpu.max").write_text("max 100000\n")
    (old / "cpu.cfs_quota_us").write_text("-1\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert available_cores() == 64
    (old / "cpu.cfs_quota_us").write_text("450000\n")
    assert available_cores() == 4.5
    (new / "cpu.max").write_text("150000 100000\n")
    assert available_cores() == 1.5


@pytest.mark.parametrize("named", [False, True])
def test_memory_is_put_behind_every_page(named: bool) -> None:
    arena = make_arena(0, 5 << 20, mode="double", all_bytes=1, free_bytes=GIB, named=named)
    assert arena.mode == "double" and len(arena.buffers) == 2
    for buffer in arena.buffers:
        buffer.populate()
        assert buffer.page.populated_bytes == len(buffer.memory)
        assert Path(buffer.path).stat().st_blocks * 512 >= len(buffer.memory)
    paths = [buffer.path for buffer in arena.buffers]
    arena.close()
    assert not any(Path(path).exists() for path in paths)


def test_another_agents_sweep_does_not_take_a_file_that_is_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sweep finds the file before it is locked."""
    lock, num_sweeps = fcntl.flock, 0

    def sweep_first(fd: int, operation: int) -> None:
        nonlocal num_sweeps
        if num_sweeps < 2:
            num_sweeps += 1
            sweep_named_files()
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    fd, path = named_file(0, 4096)
    assert num_sweeps == 2 and os.fstat(fd).st_nlink == 1
    sweep_named_files()
    assert Path(path).exists(), "it is locked"
    os.close(fd)
    sweep_named_files()
    assert not Path(path).exists()


def open_memory() -> int:
    """Return the number of files in memory that this process has open; other tests' threads open sockets."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(fd.readlink()).startswith(("/memfd:", f"{SHM_FOLDER}/ray_ckpt-"))
    return found


def test_memory_that_is_given_up_while_it_is_populated_is_released_by_then() -> None:
    before = open_memory()
    for _ in range(20):
        arena = make_arena(0, 200 << 20, mode="single", all_bytes=1, free_bytes=GIB, named=False)
        arena.start_populating()
        arena.close()
        arena.close()
    deadline_s = time.monotonic() + 30
    while any(t.name == "ray_ckpt-populate" for t in threading.enumerate()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert open_memory() == before


def test_memory_that_was_sealed_before_its_turn_is_not_populated() -> None:
    """A group may die while the agent still populates the first of two buffers."""
    arena = make_arena(0, 1 << 20, mode="double", all_bytes=1, free_bytes=GIB, named=False)
    assert arena.buffers[1].seal_writes()
    arena.buffers[1].populate()
    arena.close()


@pytest.mark.parametrize("named", [False, True])
def test_memory_that_cannot_be_mapped_is_given_back(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the address space, or of the number of mappings, refuses it; `auto` tries a smaller mode."""

    def refuse(*_: object, **__: object) -> memoryview:
        raise OSError(errno.ENOMEM, "no address space")

    def files() -> tuple[int, int]:
        return open_memory(), len(list(SHM_FOLDER.glob(f"ray_ckpt-{os.getuid()}-rank777-*")))

    before = files()
    monkeypatch.setattr(shared_memory_module, "map_shared", refuse)
    with pytest.raises(InsufficientSpace, match="no address space"):
        make_arena(777, 1 << 20, mode="auto", all_bytes=1, free_bytes=GIB, named=named)
    with pytest.raises(OSError, match="no address space"):
        SignalPage(named=named)
    assert files() == before


def test_a_rank_cannot_be_cut_off_from_its_memory() -> None:
    buffer = ArenaMemory(0, 1 << 20)
    with pytest.raises(PermissionError):
        os.truncate(buffer.path, 0)
    buffer.close()


def in_small_dev_shm(script: str) -> str:
    """Return the output of a program in a new mount namespace, with a /dev/shm of 64 MB as in containers."""
    preface = f"""
import sys
sys.path.insert(0, {str(Path.cwd())!r})
from ray_ckpt.actors.agent.arena import make_arena
from ray_ckpt.actors.agent.shared_memory import SHM_FOLDER
from ray_ckpt.errors import InsufficientSpace
"""
    command = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {sys.executable} -"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        input=preface + script,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unshare" in done.stderr and done.returncode != 0:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_too_little_room_in_dev_shm_is_an_error_at_once_and_leaves_nothing() -> None:
    lines = in_small_dev_shm("""
arena = make_arena(0, 256 << 20, mode="single", all_bytes=1, free_bytes=1 << 40, named=False)
arena.buffers[0].populate()
assert arena.buffers[0].page.populated_bytes == len(arena.buffers[0].memory)
for mode, all_bytes in ("single", 1), ("single", 256 << 20), ("auto", 256 << 20):
    try:
        make_arena(0, 256 << 20, mode=mode, all_bytes=all_bytes, free_bytes=1 << 40, named=True)
    except InsufficientSpace as error:
        print("refused:", error)
assert not list(SHM_FOLDER.glob("ray_ckpt-*"))
""").splitlines()
    assert lines[0].startswith(
        "refused: There is no shared memory of 269,484,032 bytes for rank 0 in /dev/shm"
    )
    assert lines[1].startswith("refused: memory='single' needs 269,488,128 bytes")
    assert lines[2].startswith("refused: memory='auto' needs 134,221,824 bytes")
    assert len(lines) == 3 and all("--shm-size" in line and "ptrace_scope" in line for line in lines)


def test_auto_uses_dev_shm_as_far_as_it_goes() -> None:
    """Two ranks share it; memory that other processes have taken meanwhile leaves a smaller mode."""
    lines = in_small_dev_shm("""
size = 14 << 20
both = {"mode": "auto", "all_bytes": 2 * size, "free_bytes": 1 << 40, "named": True, "ranks": 2}
first = make_arena(0, size, **both)
second = make_arena(1, size, **both, taken_bytes=first.named_bytes)
print(first.mode, second.mode, first.named_bytes)
first.close(), second.close()
del first, second  # the last references to the mappings
alone = make_arena(0, size, mode="auto", all_bytes=size, free_bytes=1 << 40, named=True)
print(alone.mode)
alone.close()
del alone
(SHM_FOLDER / "ballast").write_bytes(bytes(36 << 20))
print(make_arena(0, size, mode="auto", all_bytes=1, free_bytes=1 << 40, named=True).mode)
""").splitlines()
    assert lines == ["single single 15732736", "double", "single"]


def test_files_of_dead_agents_are_swept_and_those_of_live_ones_are_not() -> None:
    alive = ArenaMemory(0, 1 << 16, named=True)
    code = "import os; from ray_ckpt.actors.agent.arena import ArenaMemory as A; "
    code += "a = A(1, 1 << 16, named=True); print(a.path, flush=True); os._exit(9)"
    left = Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
    assert left.exists()
    sweep_named_files()
    assert not left.exists() and Path(alive.path).exists()
    alive.close()


# -- streams -----------------------------------------------------------------------------------------


def layout_of(size_bytes: int) -> RankLayout:
    return RankLayout(shards=(ShardLayout(header=b"", slices=(), size_bytes=size_bytes),))


def stream_through(size_bytes: int) -> tuple[bytes, bytes]:
    arena = make_arena(0, 1, mode="stream", all_bytes=1, free_bytes=GIB, named=False)
    (buffer,) = arena.buffers
    data = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)
    ring = Ring(buffer.path)
    ring.begin(ATTEMPT, lambda: False)

    def write() -> None:
        for piece in torch.split(data, 3_000_001):
            ring.write(piece)
        ring.end(ATTEMPT)

    writer = threading.Thread(target=write)
    writer.start()
    buffer.layout = layout_of(size_bytes)
    found = b"".join(bytes(block) for block in arena.chunks(buffer, ATTEMPT))
    writer.join()
    assert arena.find(ATTEMPT) is None, "a ring holds no whole shard to restore from"
    arena.close()
    return found, data.numpy().tobytes()


@pytest.mark.parametrize(
    "size_bytes",
    [1, RING_BLOCK_BYTES, RING_BLOCK_BYTES * (RING_BLOCKS + 3) + 17],
    ids=["1", "block", "wraps"],
)
def test_a_stream_brings_every_byte_in_order(size_bytes: int) -> None:
    found, expected = stream_through(size_bytes)
    assert found == expected


def test_a_stream_that_the_rank_gives_up_is_no_file() -> None:
    arena = make_arena(0, 1, mode="stream", all_bytes=1, free_bytes=GIB, named=False)
    (buffer,) = arena.buffers
    ring = Ring(buffer.path)
    ring.begin(ATTEMPT, lambda: False)
    ring.write(torch.ones(10, dtype=torch.uint8))
    ring.give_up()
    buffer.layout = layout_of(10)
    with pytest.raises(Unavailable, match="gave up"):
        list(arena.chunks(buffer, ATTEMPT))
    arena.close()


def test_a_rank_does_not_wait_for_an_agent_that_stopped_reading() -> None:
    arena = make_arena(0, 1, mode="stream", all_bytes=1, free_bytes=GIB, named=False)
    ring = Ring(arena.buffers[0].path)
    ring.begin(ATTEMPT, lambda: True)
    with pytest.raises(Unavailable, match="stopped reading"):
        ring.write(torch.empty(RING_BLOCK_BYTES * RING_BLOCKS + 1, dtype=torch.uint8))
    arena.close()


def test_a_capture_that_comes_too_early_is_found_by_the_writer() -> None:
    arena = make_arena(0, 1 << 16, mode="single", all_bytes=1, free_bytes=GIB, named=False)
    (buffer,) = arena.buffers
    buffer.layout = layout_of(1 << 16)
    buffer.page.seal(ATTEMPT)
    arena.check(buffer, ATTEMPT)
    (data,) = arena.chunks(buffer, ATTEMPT)
    assert len(data) == 1 << 16
    buffer.page.unseal()
    with pytest.raises(Unavailable, match="captured into its arena again"):
        arena.check(buffer, ATTEMPT)
    arena.close()


def test_memory_of_a_call_that_is_cancelled_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go = threading.Event(), threading.Event()
    made: list[RankArena] = []

    def slowly(*args: Any, **options: Any) -> RankArena:
        begun.set()
        assert may_go.wait(10)
        made.append(make_arena(*args, **options))
        return made[0]

    monkeypatch.setattr(memory_module, "make_arena", slowly)

    async def story() -> None:
        memory = RankMemory()
        with ThreadPoolExecutor(1) as pool:
            opening = asyncio.ensure_future(
                memory.open(0, MIB, mode="single", named=True, is_current=lambda: True, pool=pool)
            )
            assert await asyncio.to_thread(begun.wait, 10)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            may_go.set()
        async with asyncio.timeout(10):  # until the loop has the result
            while Path(made[0].buffers[0].path).exists():
                await asyncio.sleep(0)
        assert not memory.arenas

    asyncio.run(story())


def test_nobody_waits_for_memory_that_is_being_freed_but_a_new_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing the memory of a large group takes seconds, in which the next group is told to train."""
    may_go, close = threading.Event(), ArenaMemory.close

    def slowly(self: ArenaMemory) -> None:
        assert may_go.wait(10)
        close(self)

    async def story() -> None:
        memory = RankMemory()
        with ThreadPoolExecutor(1) as pool:

            async def opened(rank: int) -> RankArena:
                mode = {"mode": "single", "named": True}
                return await memory.open(rank, MIB, **mode, is_current=lambda: True, pool=pool)  # type: ignore[arg-type]

            old = await opened(0)
            monkeypatch.setattr(ArenaMemory, "close", slowly)
            memory.free_arenas()
            assert not memory.arenas and Path(old.buffers[0].path).exists()
            opening = asyncio.ensure_future(opened(1))
            assert not (await asyncio.wait({opening}, timeout=0.1))[0], "it would measure too little memory"
            may_go.set()
            await opening
            assert not Path(old.buffers[0].path).exists() and list(memory.arenas) == [1]
            may_go.clear()
            opening = asyncio.ensure_future(opened(1))  # in place of the one that it has
            assert not (await asyncio.wait({opening}, timeout=0.1))[0]
            may_go.set()
            await opening
        memory.close()
        assert not memory.arenas

    asyncio.run(story())


@pytest.mark.parametrize("reserve_first", [True, False])
def test_runs_that_begin_together_share_the_memory_of_their_node(
    reserve_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trials of Ray Tune; no page of their arenas is allocated while the others measure."""
    free_bytes, size_bytes = 256 * MIB, 30 * MIB
    monkeypatch.setattr(memory_module, "available_memory_bytes", lambda: free_bytes)
    monkeypatch.setattr(RankArena, "start_populating", lambda self: None)
    node: WeakSet[RankMemory] = WeakSet()
    memories = [RankMemory(node) for _ in range(8)]

    def reserve(memory: RankMemory) -> None:
        memory.reserve(0, size_bytes, ranks=(0,), mode="auto", named=False)

    async def story() -> None:
        with ThreadPoolExecutor(1) as pool:

            async def opened(memory: RankMemory) -> RankArena:
                if not reserve_first:
                    reserve(memory)
                return await memory.open(
                    0, size_bytes, mode="auto", named=False, is_current=lambda: True, pool=pool
                )

            for memory in memories if reserve_first else ():
                reserve(memory)
            arenas = [await opened(memory) for memory in memories]
            states = [arena for arena in arenas if arena.mode != "stream"]
            assert 4 <= len(states) < 8
            assert sum(arena.unfilled_bytes for arena in states) <= free_bytes
            for arena in arenas:
                for buffer in arena.buffers:
                    buffer.populate()
            assert not any(arena.unfilled_bytes for arena in arenas), (
                "their pages are not free memory any more"
            )
            reserve(RankMemory(node))

    asyncio.run(story())
    for memory in memories:
        memory.close()


def test_memory_that_a_run_has_reserved_is_free_again_when_its_ranks_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_module, "available_memory_bytes", lambda: 100 * MIB)
    node: WeakSet[RankMemory] = WeakSet()
    first, second = RankMemory(node), RankMemory(node)

    def reserve(memory: RankMemory) -> None:
        memory.reserve(0, 60 * MIB, ranks=(0,), mode="single", named=False)

    async def story() -> None:
        reserve(first)
        with pytest.raises(InsufficientSpace):
            reserve(second)
        reserve(first)
        first.free_arenas()  # those of the last group
        with pytest.raises(InsufficientSpace):
            reserve(second)
        first.free_arenas(is_left=True)
        reserve(second)
        second.close()
        reserve(first)

    asyncio.run(story())
