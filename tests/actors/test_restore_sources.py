"""The ticket of a restore, without Ray: of manifests that differ, the one in the log counts."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from ray_ckpt.actors.agent import manifest_memory
from ray_ckpt.actors.agent.manifest_memory import ManifestMemory
from ray_ckpt.actors.agent.restore_sources import SourceFinder
from ray_ckpt.core.values import ResumePoint, SessionNode, SessionPlan
from ray_ckpt.errors import CorruptionError, InsufficientSpace, RestoreError, Unavailable
from ray_ckpt.format.manifest import encode_fragment
from ray_ckpt.format.names import fragment_file
from ray_ckpt.restore.manifest import MappedManifest
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.storage.remote.tier import RemoteRef
from ray_ckpt.types import FileEntry, Fragment, Level, ManifestRow
from tests.support.peer_nodes import A, B, C, Nodes, both, live, sample
from tests.support.sample_run import SampleCheckpoint
from tests.transport.peers import KEYS, UID


@pytest.fixture
def saved() -> SampleCheckpoint:
    return sample(10)


@contextmanager
def finder(nodes: Nodes, node: str = C, *, named: bool = False) -> Iterator[SourceFinder]:
    """Open the finder of a node whose staging folder is that of its peer server."""
    (nodes.root / node).mkdir(exist_ok=True, mode=0o700)
    with closing(Disks([nodes.root / node])) as disks:
        yield SourceFinder(
            run_uid=UID,
            node_id=node,
            credentials=KEYS.credentials(UID),
            arenas={},
            staging=disks,
            storage=RemoteRef(storage_path=str(nodes.root), run_name="gpt"),
            endpoints=nodes.endpoints,
            named=named,
        )


def plan_of(saved: SampleCheckpoint, *, fragments: tuple[str, ...] = ()) -> SessionPlan:
    """Return a group of the same shape: rank 0 on A, rank 1 on B."""
    there = live(saved)
    resume = ResumePoint(checkpoint=there.checkpoint, holders=there.holders, fragments=fragments)
    return SessionPlan(
        run_uid=UID,
        session=2,
        world_size=2,
        nodes=tuple(
            SessionNode(node_id=node, node_index=at, ranks=(at,), holders=())
            for at, node in enumerate((A, B))
        ),
        resume=resume,
    )


def rows_in(found: RestoreTicket, files: Sequence[FileEntry]) -> list[ManifestRow]:
    assert found.manifest is not None
    rows = found.manifest.open()
    return [row for file in files for row in rows.of_file(file.name)]


def ticket(nodes: Nodes, saved: SampleCheckpoint) -> RestoreTicket:
    """Check that the ticket of a restore on C, which has no file, has all rows; return the ticket."""
    with finder(nodes) as found:
        made, memory = found.ticket(plan_of(saved))
    try:
        assert made.is_whole
        for fragment in saved.fragments:
            assert rows_in(made, fragment.files) == sorted(fragment.rows, key=partial(_place, fragment))
    finally:
        memory.close()
    return made


def _place(fragment: Fragment, row: ManifestRow) -> tuple[int, int]:
    return [file.name for file in fragment.files].index(row.file), fragment.rows.index(row)


def other_manifest(nodes: Nodes, saved: SampleCheckpoint, holder: str, index: int) -> None:
    """Replace a manifest by a readable one that was not committed."""
    data = encode_fragment(replace(saved.fragments[index], metrics={"loss": 7.0}))
    (nodes.folder(holder, saved) / fragment_file(index, 2)).write_bytes(data)


def test_each_file_has_the_holders_of_its_fragment(nodes: Nodes, saved: SampleCheckpoint) -> None:
    both(nodes, saved)
    found = ticket(nodes, saved)
    for fragment, holders in zip(saved.fragments, ((A, B), (B, A)), strict=True):
        for file in fragment.files:
            assert tuple(source.where for source in found.sources[file.name]) == holders


def test_an_intact_copy_of_a_manifest_is_taken_wherever_it_is(nodes: Nodes, saved: SampleCheckpoint) -> None:
    both(nodes, saved)
    other_manifest(nodes, saved, A, 0)  # the first source
    ticket(nodes, saved)
    other_manifest(nodes, saved, B, 1)
    ticket(nodes, saved)
    other_manifest(nodes, saved, B, 0)
    with pytest.raises(CorruptionError, match="not the one that was committed"):
        ticket(nodes, saved)


def test_parts_on_a_node_and_on_the_storage_path_are_read_where_they_are_intact(
    nodes: Nodes, saved: SampleCheckpoint
) -> None:
    nodes.put(A, saved, 0)
    (nodes.root / "gpt" / "ray_ckpt").mkdir(parents=True)
    remote = RemoteRef(storage_path=str(nodes.root), run_name="gpt").open()
    directory = saved.attempt.directory
    remote.put(directory, fragment_file(0, 2), b"damaged")
    remote.put(directory, fragment_file(1, 2), saved.files[fragment_file(1, 2)])
    plan = plan_of(saved)
    assert plan.resume is not None
    durable = replace(plan.resume.checkpoint, level=Level.DURABLE)
    resume = replace(plan.resume, checkpoint=durable, holders=((A,), ()))
    with finder(nodes) as found:
        made, memory = found.ticket(replace(plan, resume=resume))
    memory.close()
    tiers = (("peer", "remote"), ("remote",))
    for fragment, expected in zip(saved.fragments, tiers, strict=True):
        for file in fragment.files:
            assert tuple(source.tier for source in made.sources[file.name]) == expected


def test_a_pipe_in_place_of_a_manifest_is_passed_over(nodes: Nodes, saved: SampleCheckpoint) -> None:
    """A read of it waits for ever, and the restore with it."""
    both(nodes, saved)
    path = nodes.folder(A, saved) / fragment_file(0, 2)
    path.unlink()
    os.mkfifo(path)
    with finder(nodes, A) as found, ThreadPoolExecutor(1) as pool:
        making = pool.submit(found.own_ticket, plan_of(saved, fragments=digests(saved)))
        try:
            made = making.result(5)
        finally:
            os.close(os.open(path, os.O_RDWR))  # ends such a wait
    assert made is not None, "B has it intact"
    made[1].close()


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_disk_that_refuses_every_look_up_leaves_the_restore_to_the_peers(
    nodes: Nodes, saved: SampleCheckpoint, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    both(nodes, saved)
    own, stat = nodes.root / C, Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        if path.is_relative_to(own):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, **options)

    plan = plan_of(saved, fragments=digests(saved))
    here, *others = plan.nodes
    plan = replace(plan, nodes=(replace(here, node_id=C), *others))
    with finder(nodes) as found:
        monkeypatch.setattr(Path, "stat", refuse)
        made = found.ticket(plan) if is_whole else found.own_ticket(plan)
        monkeypatch.undo()
    assert made is not None
    with closing(made[1]):
        assert {source.tier for sources in made[0].sources.values() for source in sources} == {"peer"}


def test_a_manifest_that_nobody_has_is_named(nodes: Nodes, saved: SampleCheckpoint) -> None:
    both(nodes, saved)
    for holder in (A, B):
        (nodes.folder(holder, saved) / fragment_file(1, 2)).write_bytes(b"PAR1")
    with pytest.raises(RestoreError, match=f"No source has {fragment_file(1, 2)} of step 10 intact"):
        ticket(nodes, saved)


def test_a_manifest_whose_holders_do_not_answer_is_not_lost(nodes: Nodes, saved: SampleCheckpoint) -> None:
    both(nodes, saved)
    del nodes.endpoints[B]
    (nodes.folder(A, saved) / fragment_file(1, 2)).unlink()
    with pytest.raises(Unavailable, match=f"No source with {fragment_file(1, 2)} of step 10 was reached"):
        ticket(nodes, saved)
    nodes.put(A, saved, 1)
    other_manifest(nodes, saved, A, 1)
    with pytest.raises(Unavailable, match="Not all sources of the manifest of step 10 were reached"):
        ticket(nodes, saved)


def digests(saved: SampleCheckpoint) -> tuple[str, ...]:
    names = [fragment_file(index, saved.num_nodes) for index in range(saved.num_nodes)]
    return tuple(entry.digest for name in names for entry in saved.entries if entry.name == name)


def test_the_same_shape_reads_its_own_fragment_only(nodes: Nodes, saved: SampleCheckpoint) -> None:
    both(nodes, saved)
    (nodes.folder(A, saved) / fragment_file(1, 2)).write_bytes(b"PAR1")  # another node's is not read
    with finder(nodes, A) as found:
        made = found.own_ticket(plan_of(saved, fragments=digests(saved)))
    assert made is not None
    own, memory = made
    assert not own.is_whole and own.node_ranks == (0,)
    assert sorted(own.sources) == sorted(file.name for file in saved.fragments[0].files)
    assert len(rows_in(own, saved.fragments[0].files)) == len(saved.fragments[0].rows)
    assert rows_in(own, saved.fragments[1].files) == []
    memory.close()


@pytest.mark.parametrize("harm", ["damaged", "other content", "another attempt"])
def test_an_own_fragment_that_was_not_committed_is_not_used(
    nodes: Nodes, saved: SampleCheckpoint, harm: str
) -> None:
    """Its digest is not the committed one; then another source, or else the whole manifest, decides."""
    both(nodes, saved)
    for holder in (A, B):
        path = nodes.folder(holder, saved) / fragment_file(0, 2)
        if harm == "damaged":
            data = bytearray(path.read_bytes())
            data[60] ^= 1
            path.write_bytes(data)
        elif harm == "other content":
            other_manifest(nodes, saved, holder, 0)
        else:
            path.write_bytes(sample(11).files[fragment_file(0, 2)])
        with finder(nodes, A) as found:
            made = found.own_ticket(plan_of(saved, fragments=digests(saved)))
        if holder == A:
            assert made is not None, "B has it intact"
            made[1].close()
    assert made is None
    with pytest.raises((CorruptionError, RestoreError)):
        ticket(nodes, saved)


def test_without_a_proven_digest_or_in_another_shape_all_fragments_are_read(
    nodes: Nodes, saved: SampleCheckpoint
) -> None:
    both(nodes, saved)
    plan = plan_of(saved, fragments=digests(saved))
    with finder(nodes, A) as found:
        assert found.own_ticket(plan_of(saved)) is None
        assert found.own_ticket(replace(plan, world_size=3)) is None
        assert found.own_ticket(replace(plan, nodes=plan.nodes[:1])) is None
        swapped = tuple(replace(n, ranks=(1 - n.node_index,)) for n in plan.nodes)
        assert found.own_ticket(replace(plan, nodes=swapped)) is None
    with finder(nodes, C) as found:
        assert found.own_ticket(plan) is None


@pytest.mark.parametrize("named", [False, True])
def test_the_memory_of_a_manifest_cannot_change_and_is_freed(
    nodes: Nodes, saved: SampleCheckpoint, named: bool
) -> None:
    both(nodes, saved)
    before = manifest_files()
    with finder(nodes, named=named) as found:
        made, memory = found.ticket(plan_of(saved))
    manifest = made.manifest
    assert isinstance(manifest, MappedManifest) and Path(manifest.path).exists()
    assert manifest.path.startswith("/dev/shm/" if named else "/proc/")
    rows = manifest.open()
    if not named:
        fd = os.open(manifest.path, os.O_RDWR)
        for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 0)):
            with pytest.raises(PermissionError):
                change()
        os.close(fd)
    memory.close()
    memory.close()
    assert not Path(manifest.path).exists() and manifest_files() == before
    assert rows.of_file(saved.fragments[0].files[0].name), "what is mapped stays readable"
    with pytest.raises(OSError):
        manifest.open()
    del rows
    gc.collect()
    assert "ray_ckpt-manifest" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
def test_the_memory_of_a_ticket_that_fails_is_freed(
    nodes: Nodes, saved: SampleCheckpoint, monkeypatch: pytest.MonkeyPatch, named: bool, is_whole: bool
) -> None:
    both(nodes, saved)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(SourceFinder, "_all_sources", fail)
    plan, before = plan_of(saved, fragments=digests(saved)), manifest_files()
    with finder(nodes, A, named=named) as found, pytest.raises(OSError, match="injected"):
        found.ticket(plan) if is_whole else found.own_ticket(plan)
    assert manifest_files() == before


@pytest.mark.parametrize("named", [False, True])
def test_the_memory_of_a_manifest_that_cannot_be_opened_is_freed(
    named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "injected")

    before = manifest_files()
    monkeypatch.setattr(pa, "OSFile", fail)
    with pytest.raises(OSError, match="injected"):
        ManifestMemory(named=named)
    assert manifest_files() == before


def manifest_files() -> list[str]:
    """Return the open files of manifests. (pytest keeps shared rows open with the errors it has caught.)"""
    mine = (file for file in open_files() if "ray_ckpt-" in file and "ray_ckpt-shared" not in file)
    return sorted(mine)


def open_files() -> list[str]:
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # servers of other tests may close theirs now
            found.append(str(path.readlink()))
    return found


def test_a_manifest_that_is_too_large_for_the_node_is_refused(
    nodes: Nodes, saved: SampleCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    both(nodes, saved)
    before = manifest_files()
    monkeypatch.setattr(manifest_memory, "available_memory_bytes", lambda: 4096)
    with finder(nodes) as found, pytest.raises(InsufficientSpace, match="half of the free memory"):
        found.ticket(plan_of(saved))
    assert manifest_files() == before
