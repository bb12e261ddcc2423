"""Parity groups on real files over the real transport, without Ray: coding, losses, repair, damage."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typing_extensions import Buffer

from ray_ckpt.actors.agent.coding import compute, damaged_parity
from ray_ckpt.actors.agent.files import scrub
from ray_ckpt.actors.agent.manifest_memory import ManifestMemory
from ray_ckpt.actors.agent.prefetch import Prefetch, PrefetchRoom
from ray_ckpt.actors.agent.priority import ActiveCopies
from ray_ckpt.actors.agent.restore_sources import SourceFinder
from ray_ckpt.actors.agent.run import NodeRun
from ray_ckpt.core import messages as m
from ray_ckpt.core.loss_scenarios import LiveCheckpoint, Scenario
from ray_ckpt.core.placement import place_groups
from ray_ckpt.core.values import GroupPlaces, ResumePoint, SessionPlan
from ray_ckpt.errors import CorruptionError, FormatError, Unavailable
from ray_ckpt.format.names import STILL, fragment_file, is_still_name, make_attempt, parity_file
from ray_ckpt.format.parity import DIGEST_BYTES, ParityHeader, decode_header, header_bytes
from ray_ckpt.restore import parity
from ray_ckpt.restore.parity import GroupReader, group_sources
from ray_ckpt.restore.reader import FileSource, FlatSink, RestoreTicket, SourceReader, parity_sources
from ray_ckpt.restore.sources import BUSY_TRIES, Peers
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.storage.local.staging import Staging
from ray_ckpt.storage.remote.tier import RemoteRef
from ray_ckpt.transport.sending import Limiter
from ray_ckpt.transport.server import PeerServer
from ray_ckpt.transport.wire import FileName
from ray_ckpt.types import CheckpointInfo, Level, ParityGroup
from ray_ckpt.verify.copies import verify_copies
from ray_ckpt.verify.drill import dry_run
from ray_ckpt.verify.live_manifest import ReadAccess
from tests.support.sample_run import SampleCheckpoint, make_checkpoint
from tests.transport.peers import KEYS, UID, CutWire, Folder

NUM_NODES = 8
ROWS = 160_000  # 10 MB of state
WINDOW_BYTES = 150_000  # so that a segment has several windows
MAX_BYTES = 1 << 30  # of a file
NODES = tuple(f"node-{at}" for at in range(NUM_NODES))
PAIRS = tuple(combinations(range(NUM_NODES), 2))


@dataclass(slots=True)
class Group:
    """Eight nodes with the fragments of a checkpoint, their servers, and the parity group of all."""

    root: Path
    saved: SampleCheckpoint
    group: ParityGroup
    endpoints: dict[str, str] = field(default_factory=dict)
    runs: dict[str, NodeRun] = field(default_factory=dict)

    def places(self, *lost: int, parities: Mapping[int, str] | None = None) -> GroupPlaces:
        there = [(name,) if at not in lost else () for at, name in enumerate(NODES)]
        return GroupPlaces(group=self.group, fragments=tuple(there), parities=tuple(there))

    def code(self, member: int, node: str, *lost: int, is_parity: bool = True, is_anew: bool = False) -> int:
        order = m.Code(
            attempt=self.saved.attempt,
            num_nodes=NUM_NODES,
            node_index=member,
            node_id=node,
            is_parity=is_parity,
            places=self.places(*lost),
            read_bytes=0,
            is_anew=is_anew,
        )
        credentials = KEYS.credentials(UID)
        return compute(self.runs[node], order, self.endpoints, credentials, ActiveCopies(), epoch=1)

    def saves(self, saved: SampleCheckpoint) -> None:
        """Store the next checkpoint, which shares still shards with the last one as agents do."""
        last, self.saved = self.saved, saved
        for member, node in enumerate(NODES):
            disks = self.runs[node].staging
            for name in self.files(member):
                is_same = is_still_name(name) and saved.files[name] == last.files.get(name)
                if not (is_same and disks.link(UID, [last.attempt.directory], saved.attempt.directory, name)):
                    disks.put(UID, saved.attempt.directory, name, [saved.files[name]])

    def folder(self, node: str) -> Path:
        return self.root / node / UID / self.saved.attempt.directory

    def files(self, member: int) -> list[str]:
        return [fragment_file(member, NUM_NODES), *(f.name for f in self.saved.fragments[member].files)]

    def used_bytes(self) -> int:
        return sum(p.stat().st_size for node in NODES for p in self.folder(node).iterdir())


def _is_deleted(attempt: str) -> bool:
    return False


@cache
def _saved() -> SampleCheckpoint:
    attempt = make_attempt(run_uid=UID, session=1, step=10, attempt=0)
    return make_checkpoint(attempt, world_size=2 * NUM_NODES, num_nodes=NUM_NODES, rows=ROWS)


@contextmanager
def _open_group(root: Path) -> Iterator[Group]:
    """Serve what the folders of the nodes have; create those that are not there."""
    (parity_group,) = place_groups(NODES, num_data=6, parity=2)
    found = Group(root, _saved(), parity_group)
    with ExitStack() as stack:
        for node in (*NODES, "spare"):
            (root / node).mkdir(mode=0o700, exist_ok=True)
            disks = stack.enter_context(closing(Disks([root / node])))
            server = PeerServer("127.0.0.1", keys=KEYS, files=Folder(root / node))
            stack.callback(server.shutdown)
            found.endpoints[node] = server.endpoint
            run = SimpleNamespace(
                run_uid=UID,
                staging=disks,
                limiter=Limiter(),
                unlinked={},
                machine=SimpleNamespace(is_deleted=_is_deleted, epoch=1),
                check_space=lambda needed_bytes, what: None,
            )
            found.runs[node] = cast(NodeRun, run)
        yield found


def _store(group: Group) -> None:
    directory = group.saved.attempt.directory
    for at, node in enumerate(NODES):
        for name in group.files(at):
            group.runs[node].staging.put(UID, directory, name, [group.saved.files[name]])


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with _open_group(tmp_path) as found:
        _store(found)
        yield found


@pytest.fixture(scope="module")
def folders_of_coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of nodes that have computed their parity, which each test copies."""
    root = tmp_path_factory.mktemp("coded")
    with _open_group(root) as found, pytest.MonkeyPatch.context() as patched:
        patched.setattr(parity, "WINDOW_BYTES", WINDOW_BYTES)
        _store(found)
        for member, node in enumerate(NODES):
            found.code(member, node)
    return root


@pytest.fixture
def coded(folders_of_coded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(parity, "WINDOW_BYTES", WINDOW_BYTES)
    shutil.copytree(folders_of_coded, tmp_path, dirs_exist_ok=True)
    with _open_group(tmp_path) as found:
        yield found


def _with_base(step: int, base: Any, session: int = 1) -> SampleCheckpoint:
    attempt = make_attempt(run_uid=UID, session=session, step=step, attempt=0)
    return make_checkpoint(attempt, world_size=2 * NUM_NODES, num_nodes=NUM_NODES, rows=2_000, base=base)


def _reader(stack: ExitStack, group: Group, *lost: int) -> GroupReader:
    peers = stack.enter_context(closing(Peers(KEYS.credentials(UID))))
    sources = group_sources(group.places(*lost), NUM_NODES, group.endpoints)
    return GroupReader(group.saved.attempt, sources[0], peers)


def test_the_disk_of_a_save_is_that_of_the_state_and_a_third(group: Group) -> None:
    before = group.used_bytes()
    stored = sum(group.code(member, node) for member, node in enumerate(NODES))
    assert group.used_bytes() == before + stored
    assert group.used_bytes() <= 1.35 * before
    for member, node in enumerate(NODES):
        (header,) = group.runs[node].staging.parities(UID)
        assert header.name == parity_file(member, NUM_NODES)
        assert damaged_parity(group.runs[node], group.saved.attempt, member, NUM_NODES) == ()


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(PAIRS[:2], id="two of them"),
        pytest.param(PAIRS[2:], id="all others", marks=pytest.mark.slow),
    ],
)
def test_every_pair_of_nodes_may_be_lost(coded: Group, pairs: Sequence[tuple[int, int]]) -> None:
    saved = coded.saved
    for lost in pairs:
        with ExitStack() as stack:
            reader = _reader(stack, coded, *lost)
            for member in lost:
                for name in coded.files(member):
                    assert reader.read_whole(name, max_bytes=MAX_BYTES) == saved.files[name], (lost, name)


def test_a_fragment_that_is_too_large_is_refused_before_it_is_computed(coded: Group) -> None:
    name = fragment_file(0, NUM_NODES)
    with ExitStack() as stack:
        reader = _reader(stack, coded, 0)
        header_bytes = reader.header() and reader.read_bytes
        with pytest.raises(FormatError, match=f"{name} has .* the format allows 100"):
            reader.read_whole(name, max_bytes=100)
        assert reader.read_bytes == header_bytes


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_parity_is_planned_from_any_holder_of_a_fragment(group: Group, harm: str) -> None:
    """The first holder does not answer, or has a damaged fragment; another one has it intact."""
    name = fragment_file(3, NUM_NODES)
    second = group.folder(NODES[4]) / name
    second.write_bytes((group.folder(NODES[3]) / name).read_bytes())
    with ExitStack() as stack:
        reader = _reader(stack, group)
        first = group.endpoints[NODES[3]]
        if harm == "gone":
            first = first.rsplit(":", 1)[0] + ":1"
        else:
            (group.folder(NODES[3]) / name).write_bytes(b"damaged")
        held = list(reader._sources.fragments)
        held[3] = (first, group.endpoints[NODES[4]])
        reader._sources = replace(reader._sources, fragments=tuple(held))
        header = reader.plan(0)
    assert header.files[3][0].size_bytes == second.stat().st_size


def test_three_lost_nodes_are_too_many(coded: Group) -> None:
    with ExitStack() as stack, pytest.raises(Unavailable, match="Too many members"):
        _reader(stack, coded, 0, 1, 2).read_whole(fragment_file(0, NUM_NODES), max_bytes=MAX_BYTES)


def test_a_restore_of_one_lost_node_reads_six_times_its_bytes(coded: Group) -> None:
    saved, lost = coded.saved, 3
    fragment = saved.fragments[lost]
    group = group_sources(coded.places(lost), NUM_NODES, coded.endpoints)[0]
    source = FileSource(tier="peer", where="parity", group=group)
    reader = SourceReader(
        saved.attempt,
        {file.name: (source,) for file in fragment.files},
        credentials=KEYS.credentials(UID),
    )
    found: dict[tuple[str, int], Any] = {}

    def sink(row: Any) -> FlatSink:
        data = found[row.file, row.byte_offset] = np.empty(row.nbytes, np.uint8)
        return FlatSink(data)

    reader.read(fragment.rows, sink)
    assert reader.damage == [] and reader.rejected == []
    for row in fragment.rows:
        wanted = saved.files[row.file][row.byte_offset : row.byte_offset + row.nbytes]
        assert found[row.file, row.byte_offset].tobytes() == wanted
    size = sum(file.size_bytes for file in fragment.files)
    (pulled,) = reader._groups.values()
    assert 5 * size < pulled.read_bytes <= 1.2 * 6 * size


def _checkpoint(group: Group) -> CheckpointInfo:
    saved = group.saved
    return CheckpointInfo(
        id=saved.attempt,
        seq=9,
        level=Level.REPLICATED,
        world_size=saved.world_size,
        num_nodes=saved.num_nodes,
        size_bytes=saved.size_bytes,
        root_digest=saved.root_digest,
        root_of=saved.root_of,
        committed_at_s=0.0,
        metrics={},
        replicas=2,
    )


def _ticket(group: Group, *lost: int) -> tuple[RestoreTicket, ManifestMemory]:
    """Return the ticket of a new node, with the memory of its manifest."""
    places = group.places(*lost)
    resume = ResumePoint(checkpoint=_checkpoint(group), holders=places.fragments, groups=(places,))
    finder = SourceFinder(
        run_uid=UID,
        node_id="spare",
        credentials=KEYS.credentials(UID),
        arenas={},
        staging=group.runs["spare"].staging,
        storage=RemoteRef(storage_path=str(group.root), run_name="gpt"),
        endpoints=group.endpoints,
    )
    return finder.ticket(SessionPlan(run_uid=UID, session=2, world_size=1, nodes=(), resume=resume))


def test_a_ticket_has_the_manifest_and_the_files_of_lost_nodes(coded: Group) -> None:
    lost, saved = (1, 4), coded.saved
    ticket, memory = _ticket(coded, *lost)
    try:
        assert ticket.manifest is not None
        manifest = ticket.manifest.open()
        rows = [row for fragment in saved.fragments for row in fragment.rows[::3]]
        reader = SourceReader(saved.attempt, ticket.sources, credentials=ticket.credentials)
        for row in rows:
            assert row in list(manifest.of_file(row.file))
            if row.nbytes:
                wanted = saved.files[row.file][row.byte_offset : row.byte_offset + row.nbytes]
                assert reader.read_bytes(row) == wanted
        assert {part.where for part in reader.parts} == {*NODES, "parity"} - {NODES[at] for at in lost}
    finally:
        memory.close()


def _sources_of(coded: Group, lost: Collection[int]) -> dict[str, list[FileSource]]:
    """Return the sources of all files when the nodes `lost` are gone."""
    places, sources = coded.places(*lost), dict[str, list[FileSource]]()
    for member, node in enumerate(NODES):
        computed = parity_sources(member, [places], NUM_NODES, coded.endpoints)
        here = FileSource(tier="peer", where=node, endpoint=coded.endpoints[node])
        for file in coded.files(member)[1:]:
            sources[file] = [*([] if member in lost else [here]), *computed]
    return sources


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("flipped", "lost", "num_wrong"),
    [
        ((2,), (5,), 0),
        pytest.param((2, 6), (), 0, marks=pytest.mark.slow),  # 3 to 5 s each
        ((2,), (5, 6), 1),
        pytest.param((1, 2), (5,), 1, marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_counts_as_one_loss(
    coded: Group, flipped: Sequence[int], lost: Sequence[int], num_wrong: int
) -> None:
    """Two sums allow for a lost node and a bit that nobody knows of, or for two such bits in one stripe."""
    saved = coded.saved
    for member in flipped:
        rows = [row for row in saved.fragments[member].rows if row.nbytes]
        for row in rows if num_wrong else rows[:1]:
            _flip(coded.folder(NODES[member]) / row.file, row.byte_offset)
    sources = _sources_of(coded, lost)
    reader = SourceReader(saved.attempt, sources, credentials=KEYS.credentials(UID))
    for member in {*flipped, *lost}:
        for row in saved.fragments[member].rows[:3]:
            found = reader.read_bytes(row) if row.nbytes else b""
            if num_wrong:
                assert found in (None, saved.files[row.file][row.byte_offset : row.byte_offset + row.nbytes])
            else:
                assert found == saved.files[row.file][row.byte_offset : row.byte_offset + row.nbytes]
    assert bool(reader.damage) == bool(num_wrong) and not reader.is_unreachable


def _harm(coded: Group, harm: str, member: int, lost: int) -> None:
    """Damage files of a member on its node, so that P and Q compute a wrong fragment of `lost`."""
    if harm == "zeroed":
        for name in coded.files(member)[1:]:
            path = coded.folder(NODES[member]) / name
            path.write_bytes(bytes(path.stat().st_size))
        return
    name = coded.files(lost)[0]
    columns = pq.ParquetFile(pa.BufferReader(coded.saved.files[name])).metadata.row_group(0)
    found = {columns.column(at).path_in_schema: columns.column(at) for at in range(columns.num_columns)}
    (header,) = coded.runs[NODES[0]].staging.parities(UID)
    (span,) = header.layers[0].spans(name, [(found["digest"].data_page_offset + 50, 1)], WINDOW_BYTES)
    ((file, offset, _, _),) = header.layers[0].pieces(member, span)
    _flip(coded.folder(NODES[member]) / file, offset)


@pytest.mark.parametrize("harm", ["zeroed", pytest.param("digests", id="in a column that is read later")])
def test_a_lost_fragment_is_computed_without_a_member_that_is_damaged(coded: Group, harm: str) -> None:
    """Damaged bytes that nobody knows of count as one loss for the manifest too."""
    lost, damaged, saved = 5, 2, coded.saved
    _harm(coded, harm, damaged, lost)
    ticket, memory = _ticket(coded, lost)
    try:
        reader = SourceReader(saved.attempt, ticket.sources, credentials=ticket.credentials)
        for row in saved.fragments[lost].rows[::3]:
            wanted = saved.files[row.file][row.byte_offset : row.byte_offset + row.nbytes]
            assert reader.read_bytes(row) == wanted
        assert reader.bad_nodes == ({NODES[damaged]} if harm == "zeroed" else set()), "to be scrubbed"
    finally:
        memory.close()

    whole = coded.places()
    live = LiveCheckpoint(checkpoint=_checkpoint(coded), holders=whole.fragments, groups=(whole,))
    access = ReadAccess(endpoints=coded.endpoints, credentials=KEYS.credentials(UID))
    found = dry_run(live, Scenario(name="one node", lost=frozenset({NODES[lost]})), access)
    assert found.verdict == "passed", found.problems

    left = coded.places(lost)
    after = replace(live, holders=left.fragments, groups=(left,))
    report = verify_copies(after, access, retry=lambda known: (known, access))
    assert report is not None and report.is_restorable
    wheres = [holder.where for holder in report.holders if not holder.node]
    assert wheres == ["parity (P)", "parity (Q)", "parity without node-2"]


def test_a_file_read_ahead_that_cannot_be_mapped_is_computed_without_the_damaged_member(coded: Group) -> None:
    lost, saved = 5, coded.saved
    _harm(coded, "zeroed", 2, lost)
    ticket, memory = _ticket(coded, lost)
    with closing(memory), closing(Prefetch({}, PrefetchRoom())) as prefetch:
        file = coded.files(lost)[1]
        prefetch.run(replace(ticket, sources={file: ticket.sources[file]}, is_whole=False))
        merged = prefetch.merged(ticket)
        assert merged.sources[file][0].is_verified
        prefetch.close()  # as if the agent had ended
        reader = SourceReader(saved.attempt, merged.sources, credentials=ticket.credentials)
        for row in (row for row in saved.fragments[lost].rows if row.file == file and row.nbytes):
            wanted = saved.files[file][row.byte_offset : row.byte_offset + row.nbytes]
            assert reader.read_bytes(row) == wanted


@pytest.mark.slow  # 3 s
def test_drills_and_checks_of_copies_compute_what_a_loss_takes(coded: Group) -> None:
    whole = coded.places()
    live = LiveCheckpoint(checkpoint=_checkpoint(coded), holders=whole.fragments, groups=(whole,))
    access = ReadAccess(endpoints=coded.endpoints, credentials=KEYS.credentials(UID))
    for lost, verdict in ((("node-0", "node-7"), "passed"), (("node-0", "node-1", "node-7"), "not covered")):
        scenario = Scenario(name="some nodes", lost=frozenset(lost))
        found = dry_run(live, scenario, access)
        assert found.verdict == verdict, found.problems
        assert found.is_covered == (len(lost) == 2)
    left = coded.places(0, 7)
    after = replace(live, holders=left.fragments, groups=(left,))
    report = verify_copies(after, access, retry=lambda known: (known, access))
    assert report is not None and report.is_restorable
    assert [damage.detail for damage in report.damages] == [
        "Its parity group allows for 0 lost node(s) instead of 2."
    ]


def test_a_check_of_copies_looks_at_parity_files(coded: Group) -> None:
    whole = coded.places()
    live = LiveCheckpoint(checkpoint=_checkpoint(coded), holders=whole.fragments, groups=(whole,))
    access = ReadAccess(endpoints=coded.endpoints, credentials=KEYS.credentials(UID))

    def details() -> list[str]:
        report = verify_copies(live, access, retry=lambda known: (known, access))
        assert report is not None and report.is_restorable
        return [damage.detail for damage in report.damages]

    assert details() == []
    paths = [coded.folder(NODES[at]) / parity_file(at, NUM_NODES) for at in (1, 4)]
    paths[0].unlink()
    os.truncate(paths[1], paths[1].stat().st_size - 1)
    first, second, third = details()
    assert first.startswith("On node-1: ") and second.startswith("On node-4: parity-00004-of-00008.bin has ")
    assert third == "Its parity group allows for 1 lost node(s) instead of 2."


def test_a_check_of_copies_computes_with_q_if_p_is_damaged(coded: Group) -> None:
    left = coded.places(3)
    live = LiveCheckpoint(checkpoint=_checkpoint(coded), holders=left.fragments, groups=(left,))
    access = ReadAccess(endpoints=coded.endpoints, credentials=KEYS.credentials(UID))
    stripe = coded.group.stripe_of(3, 0)  # with the fragment
    path = coded.folder(NODES[stripe]) / parity_file(stripe, NUM_NODES)
    _flip(path, header_bytes(path.read_bytes()))
    report = verify_copies(live, access, retry=lambda known: (known, access))
    assert report is not None and report.is_restorable


def test_a_node_that_does_not_answer_is_left_out(coded: Group) -> None:
    for name in coded.files(5):  # node 5 lacks its files, which nobody knows yet
        (coded.folder(NODES[5]) / name).unlink()
    with ExitStack() as stack:
        reader = _reader(stack, coded, 2)
        for name in coded.files(2):
            assert reader.read_whole(name, max_bytes=MAX_BYTES) == coded.saved.files[name]
    (coded.folder(NODES[2]) / parity_file(2, NUM_NODES)).unlink()
    with ExitStack() as stack, pytest.raises(Unavailable, match="Too many members"):
        reader = _reader(stack, coded)
        for name in coded.files(5):
            (coded.folder(NODES[4]) / parity_file(4, NUM_NODES)).unlink(missing_ok=True)
            (coded.folder(NODES[3]) / parity_file(3, NUM_NODES)).unlink(missing_ok=True)
            (coded.folder(NODES[1]) / coded.files(1)[1]).unlink(missing_ok=True)
            reader.read_whole(name, max_bytes=MAX_BYTES)


def test_a_busy_peer_is_asked_again(coded: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members are lost, so each source that is left is needed; so is each member for a parity file."""
    seen, read_file = set[tuple[Path, str]](), Folder.read

    def busy_at_first(folder: Folder, name: FileName, offset: int, nbytes: int | None) -> Iterator[Buffer]:
        if (folder.root, name.file) not in seen:
            seen.add((folder.root, name.file))
            raise Unavailable("others read here", refused=False)
        return read_file(folder, name, offset, nbytes)

    monkeypatch.setattr(Folder, "read", busy_at_first)
    coded.code(0, "spare")
    assert {root.name for root, _ in seen} == {*NODES}
    seen.clear()
    with ExitStack() as stack:
        reader = _reader(stack, coded, 2, 6)
        for member in (2, 6):
            for name in coded.files(member):
                assert reader.read_whole(name, max_bytes=MAX_BYTES) == coded.saved.files[name]
    assert len(seen) > NUM_NODES


def test_a_peer_that_is_busy_for_long_is_asked_again_later(
    coded: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs this try of the restore, and no source."""
    busy, read_file, calls = coded.root / NODES[3], Folder.read, list[str]()

    def busy_for_long(folder: Folder, name: FileName, offset: int, nbytes: int | None) -> Iterator[Buffer]:
        if folder.root == busy and len(calls) < 2 * BUSY_TRIES:
            calls.append(name.file)
            raise Unavailable("others read here", refused=False)
        return read_file(folder, name, offset, nbytes)

    monkeypatch.setattr(Folder, "read", busy_for_long)
    with ExitStack() as stack:
        reader = _reader(stack, coded, 2, 6)
        for name in coded.files(2):
            with pytest.raises(Unavailable, match="others read here") as caught:
                reader.read_whole(name, max_bytes=MAX_BYTES)
            if len(calls) == 2 * BUSY_TRIES:
                break
        assert caught.value.fields["refused"] is False
        for name in coded.files(2):
            assert reader.read_whole(name, max_bytes=MAX_BYTES) == coded.saved.files[name]


def test_a_connection_that_breaks_once_costs_no_source(coded: Group) -> None:
    """The rest of the bytes is pulled, and none twice."""
    whole = read_bytes = 0
    for cut in (False, True):
        with ExitStack() as stack:
            if cut:
                port = int(coded.endpoints[NODES[3]].rsplit(":", 1)[1])
                wire = stack.enter_context(CutWire(port, cuts=[3_000]))
                coded.endpoints[NODES[3]] = coded.endpoints[NODES[3]].replace(str(port), str(wire.port))
            reader = _reader(stack, coded, 2, 6)
            for name in coded.files(2):
                assert reader.read_whole(name, max_bytes=MAX_BYTES) == coded.saved.files[name]
            whole, read_bytes = read_bytes, reader.read_bytes
            if cut:
                assert wire.num_connections == 2
    assert read_bytes == whole


def test_lost_members_and_then_their_parity_are_made_again(coded: Group) -> None:
    saved = coded.saved
    coded.code(2, "spare", 2, 6, is_parity=False)
    for name in coded.files(2):
        assert (coded.folder("spare") / name).read_bytes() == saved.files[name]
    coded.code(6, NODES[0], 2, 6, is_parity=False)
    for name in coded.files(6):
        assert (coded.folder(NODES[0]) / name).read_bytes() == saved.files[name]
    old = (coded.folder(NODES[2]) / parity_file(2, NUM_NODES)).read_bytes()
    coded.code(2, "spare")
    assert (coded.folder("spare") / parity_file(2, NUM_NODES)).read_bytes() == old


@pytest.mark.slow  # 8 s; the next one is quick
def test_parity_of_still_shards_is_made_once_and_linked(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like the shards themselves. Any two nodes of each checkpoint may be lost."""
    monkeypatch.setattr(parity, "WINDOW_BYTES", WINDOW_BYTES)
    base = np.arange(1 << 20, dtype=np.float32).reshape(1 << 10, 1 << 10)  # 4 MiB
    group.saves(_with_base(20, base))
    before = group.used_bytes()
    first = sum(group.code(member, node) for member, node in enumerate(NODES))
    assert group.used_bytes() == before + first and first > base.nbytes / 3
    group.saves(_with_base(30, base))
    second = sum(group.code(member, node) for member, node in enumerate(NODES))
    assert second < first - base.nbytes / 3
    for member, node in enumerate(NODES):
        name = parity_file(member, NUM_NODES, STILL)
        assert (group.folder(node) / name).stat().st_nlink == 2
        assert damaged_parity(group.runs[node], group.saved.attempt, member, NUM_NODES) == ()
    group.code(2, "spare", 2, 6, is_parity=False)
    for lost in ((2, 6), (0, 1), (7, 0)):
        with ExitStack() as stack:
            reader = _reader(stack, group, *lost)
            for member in lost:
                for name in group.files(member):
                    assert reader.read_whole(name, max_bytes=MAX_BYTES) == group.saved.files[name], (
                        lost,
                        name,
                    )

    other = base.copy()
    other[-1, -1] = 7
    group.saves(_with_base(40, other))
    third = sum(group.code(member, node) for member, node in enumerate(NODES))
    assert third == first, "one still shard has changed, so the parity of all is made again"
    with ExitStack() as stack:
        reader = _reader(stack, group, 6, 7)
        for name in (*group.files(6), *group.files(7)):
            assert reader.read_whole(name, max_bytes=MAX_BYTES) == group.saved.files[name]


def test_parity_of_still_shards_is_made_in_each_session(group: Group) -> None:
    """Else bytes that were damaged when they were coded would be in all parity to come."""
    base = np.ones((1 << 8, 1 << 8), np.float32)
    group.saves(_with_base(20, base))
    group.code(3, NODES[3])
    group.saves(_with_base(30, base, session=2))
    group.code(3, NODES[3])
    assert (group.folder(NODES[3]) / parity_file(3, NUM_NODES, STILL)).stat().st_nlink == 1


def test_wrong_parity_of_still_shards_is_linked_no_more_once_it_is_made_anew(group: Group) -> None:
    base = _saved_with_wrong_parity(group)
    _code_all(group)
    assert _computed_wrong(group, 2)
    _code_all(group, is_anew=True)
    assert not _computed_wrong(group, 2) and not _computed_wrong(group, 6)
    group.saves(_with_base(40, base))
    _code_all(group)
    assert not _computed_wrong(group, 2)
    assert (group.folder(NODES[0]) / parity_file(0, NUM_NODES, STILL)).stat().st_nlink == 2
    _code_all(group, is_anew=True)
    for node, member in ((NODES[0], 0), (NODES[1], 1)):
        (group.folder(node) / parity_file(member, NUM_NODES, STILL)).unlink()
        group.code(member, node)  # as repair does if an order failed
    assert not _computed_wrong(group, 2)


def test_no_wrong_parity_is_linked_after_an_order_to_make_it_anew_that_has_failed(group: Group) -> None:
    _saved_with_wrong_parity(group)
    for member, node in enumerate(NODES):
        with pytest.raises(Unavailable):  # another member cannot be read
            group.code(member, node, (member + 1) % len(NODES), is_anew=True)
    _code_all(group)
    assert not _computed_wrong(group, 2)


def _saved_with_wrong_parity(group: Group) -> np.ndarray[Any, Any]:
    """Save two steps; node 6 had a wrong still shard when the first was coded, and has written it anew."""
    base = np.arange(1 << 16, dtype=np.float32).reshape(1 << 8, 1 << 8)
    group.saves(_with_base(20, base))
    still = [name for name in group.files(6) if is_still_name(name)]
    for name in still:
        _flip(group.folder(NODES[6]) / name, -1)
    _code_all(group)
    for name in still:
        (group.folder(NODES[6]) / name).unlink()
    group.saves(_with_base(30, base))
    return base


def _code_all(group: Group, *, is_anew: bool = False) -> None:
    for member, node in enumerate(NODES):
        group.code(member, node, is_anew=is_anew)


def _computed_wrong(group: Group, lost: int) -> list[str]:
    """Return the files of a lost member that are computed with other bytes."""
    with ExitStack() as stack:
        reader, files = _reader(stack, group, lost), group.saved.files
        return [n for n in group.files(lost) if reader.read_whole(n, max_bytes=MAX_BYTES) != files[n]]


def test_a_shared_file_that_is_taken_away_meanwhile_fails_the_coding(group: Group) -> None:
    base = np.ones((1 << 8, 1 << 8), np.float32)
    for step in (20, 30):
        group.saves(_with_base(step, base))
        if step == 20:
            group.code(3, NODES[3])
    run = cast(Any, group.runs[NODES[3]])
    put, name = run.staging.put, parity_file(3, NUM_NODES, STILL)

    def put_while_a_scrub_runs(uid: str, directory: str, file: str, *args: Any, **more: Any) -> Any:
        (run.staging.path(uid, directory, name)).unlink()
        return put(uid, directory, file, *args, **more)

    run.staging.put = put_while_a_scrub_runs
    with pytest.raises(Unavailable, match="a scrub has taken away"):
        group.code(3, NODES[3])


def test_a_scrub_finds_a_parity_file_that_cannot_be_used(group: Group) -> None:
    """Its header is damaged, or the file with the parity of the still shards is gone."""
    group.saves(_with_base(20, np.ones((1 << 8, 1 << 8), np.float32)))
    for member in (3, 4):
        group.code(member, NODES[member])
    (group.folder(NODES[3]) / parity_file(3, NUM_NODES, STILL)).unlink()
    path = group.folder(NODES[4]) / parity_file(4, NUM_NODES)
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    for member in (3, 4):
        found = scrub(group.runs[NODES[member]], group.saved.attempt, member)
        assert found.damage == (parity_file(member, NUM_NODES),)
    assert scrub(group.runs[NODES[5]], group.saved.attempt, 5).damage == (), "it has made none yet"


@pytest.mark.slow  # 2 s
def test_a_group_of_an_earlier_version_keeps_it(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of two versions do not fit each other."""
    group.saves(_with_base(20, np.ones((1 << 8, 1 << 8), np.float32)))
    with monkeypatch.context() as patched:
        patched.setattr(parity, "is_still_name", lambda name: False)
        for member, node in enumerate(NODES):
            group.code(member, node)
    (group.folder(NODES[0]) / parity_file(0, NUM_NODES)).unlink()
    group.code(0, NODES[0])
    (header,) = group.runs[NODES[0]].staging.parities(UID)
    assert not header.has_still
    with ExitStack() as stack:
        reader = _reader(stack, group, 3, 4)
        for name in (*group.files(3), *group.files(4)):
            assert reader.read_whole(name, max_bytes=MAX_BYTES) == group.saved.files[name]


def test_damage_to_shared_parity_is_found_in_each_checkpoint_that_has_it(group: Group) -> None:
    base = np.ones((1 << 8, 1 << 8), np.float32)
    node, name = NODES[3], parity_file(3, NUM_NODES, STILL)
    for step in (20, 30):
        group.saves(_with_base(step, base))
        group.code(3, node)
    data = bytearray((group.folder(node) / name).read_bytes())
    data[100] ^= 1
    (group.folder(node) / name).write_bytes(data)
    found = scrub(group.runs[node], group.saved.attempt, 3)
    assert found.damage == (name,)
    assert [(attempt.step, member) for attempt, member in found.shared] == [(20, 3)]
    assert [header.attempt.step for header in group.runs[node].staging.parities(UID)] == []
    group.code(3, node)
    assert [header.attempt.step for header in group.runs[node].staging.parities(UID)] == [30]
    assert damaged_parity(group.runs[node], group.saved.attempt, 3, NUM_NODES) == ()


def test_damaged_parity_that_cannot_be_moved_counts_when_it_is_made_anew(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, name = NODES[3], parity_file(3, NUM_NODES)
    group.code(3, node)
    _flip(group.folder(node) / name, (group.folder(node) / name).stat().st_size - DIGEST_BYTES - 1)

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(Staging, "quarantine", fail)
        assert scrub(group.runs[node], group.saved.attempt, 3).damage == (name,)
    assert group.runs[node].staging.parities(UID) == ()
    group.code(3, node)
    assert len(group.runs[node].staging.parities(UID)) == 1


def test_a_member_that_a_node_has_is_copied(group: Group) -> None:
    """No node has a parity file, from which it could be computed."""
    group.code(2, "spare", is_parity=False)
    for name in group.files(2):
        assert (group.folder("spare") / name).read_bytes() == group.saved.files[name]


def test_a_member_that_is_damaged_on_its_node_is_computed(coded: Group) -> None:
    path = coded.folder(NODES[2]) / coded.files(2)[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    coded.code(2, "spare", is_parity=False)
    for name in coded.files(2):
        assert (coded.folder("spare") / name).read_bytes() == coded.saved.files[name]


def test_wrong_parity_gives_no_wrong_byte_and_is_found_by_a_scrub(coded: Group) -> None:
    lost = 4
    for at, index in ((0, 0), (1, 1)):  # P, then also the Q of the same stripe
        node = NODES[at]
        path = coded.folder(node) / parity_file(at, NUM_NODES)
        data = bytearray(path.read_bytes())
        (header,) = coded.runs[node].staging.parities(UID)
        data[header_bytes(bytes(data)) + index * header.layers[0].segment_bytes + 100] ^= 1
        path.write_bytes(data)
        assert damaged_parity(coded.runs[node], coded.saved.attempt, at, NUM_NODES) == (path.name,)
        with ExitStack() as stack:
            reader = _reader(stack, coded, lost)
            wrong = [
                n
                for n in coded.files(lost)
                if reader.read_whole(n, max_bytes=MAX_BYTES) != coded.saved.files[n]
            ]
        assert len(wrong) == 1
        if index == 0:
            coded.code(lost, "spare", lost, is_parity=False)
            for name in coded.files(lost):
                assert (coded.folder("spare") / name).read_bytes() == coded.saved.files[name]
        else:
            (coded.folder("spare") / wrong[0]).unlink()
            with pytest.raises(CorruptionError, match="other bytes than announced"):
                coded.code(lost, "spare", lost, is_parity=False)
            assert not (coded.folder("spare") / wrong[0]).exists()


def test_a_damaged_header_costs_one_parity_file(coded: Group) -> None:
    for at in (0, 3):
        path = coded.folder(NODES[at]) / parity_file(at, NUM_NODES)
        data = bytearray(path.read_bytes())
        data[40] ^= 1
        path.write_bytes(data)
    with ExitStack() as stack:
        reader = _reader(stack, coded, 5)
        for name in coded.files(5):
            assert reader.read_whole(name, max_bytes=MAX_BYTES) == coded.saved.files[name]


def test_threads_that_find_a_damaged_header_at_once_go_on(
    coded: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread of a restore opens the group."""
    path = coded.folder(NODES[0]) / parity_file(0, NUM_NODES)
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    together = Barrier(4)

    def decode_together(header: bytes) -> ParityHeader:
        together.wait(10)
        return decode_header(header)

    monkeypatch.setattr(parity, "decode_header", decode_together)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(4))
        reader = _reader(stack, coded, 5)
        for found in [pool.submit(reader.header) for _ in range(4)]:
            assert found.result().files
        assert [place for place in reader._failed if place[1]] == []  # the next one is read once by each


def test_what_is_deleted_during_the_work_stays_deleted(coded: Group) -> None:
    run = cast(Any, coded.runs["spare"])
    run.machine.is_deleted = lambda attempt: True
    with pytest.raises(Unavailable, match="being deleted"):
        coded.code(2, "spare", 2, is_parity=False)
    assert not coded.folder("spare").exists()


@pytest.mark.parametrize("is_parity", [True, False])
def test_an_order_of_an_earlier_coordinator_begins_no_further_file(coded: Group, is_parity: bool) -> None:
    """The next one may have retired the checkpoint, or have dealt other groups."""
    run = cast(Any, coded.runs["spare"])
    put, stored = run.staging.put, list[str]()

    def put_and_obey(uid: str, directory: str, file: str, *args: Any, **more: Any) -> Any:
        run.machine.epoch = 2
        stored.append(file)
        return put(uid, directory, file, *args, **more)

    run.staging.put = put_and_obey
    with pytest.raises(Unavailable, match="a newer coordinator"):
        coded.code(2, "spare", 2, is_parity=False) if not is_parity else coded.code(2, "spare")
    assert len(stored) == 1 and not stored[0].startswith("manifest-")
