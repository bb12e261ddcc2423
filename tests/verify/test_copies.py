"""`verify --plan` of what nodes hold: every copy is looked at, on real peers and files; no tensor moves."""

from __future__ import annotations

import errno
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ray_ckpt.core.loss_scenarios import LiveCheckpoint
from ray_ckpt.format.digest import root_digest
from ray_ckpt.format.manifest import decode_checkpoint, encode_checkpoint, encode_fragment
from ray_ckpt.format.names import CHECKPOINT_JSON, fragment_file, make_attempt, shard_file, state_file
from ray_ckpt.location import Location
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.transport import client
from ray_ckpt.transport.wire import FileName
from ray_ckpt.types import Level
from ray_ckpt.verify.copies import num_copies, verify_copies
from ray_ckpt.verify.live_manifest import ReadAccess
from ray_ckpt.verify.plan import PlanReport
from tests.support.peer_nodes import A, B, C, Nodes, both, flip, live
from tests.support.roots import ROOTS
from tests.support.sample_run import SampleCheckpoint, make_checkpoint
from tests.transport.peers import UID, Folder

SHARD, OTHER_SHARD = shard_file(0, 2), shard_file(1, 2)
FRAGMENT = fragment_file(0, 2)
NODE_A, NODE_B = f"node {A[:12]}", f"node {B[:12]}"


@pytest.fixture(params=ROOTS)
def saved(request: pytest.FixtureRequest) -> SampleCheckpoint:
    attempt = make_attempt(run_uid=UID, session=1, step=10, attempt=0)
    return make_checkpoint(attempt, rows=4096, root_of=request.param)


def look(nodes: Nodes, known: LiveCheckpoint, reach: ReadAccess | None = None) -> PlanReport:
    reach = reach or nodes.reach
    report = verify_copies(known, reach, retry=lambda known: (known, reach))
    assert report is not None
    return report


def findings(report: PlanReport) -> list[tuple[str, str, str]]:
    """Holder, "" for the whole, file and what is wrong with it."""
    whole = [("", damage.file, damage.where) for damage in report.damages]
    return whole + [(h.where, d.file, d.where) for h in report.holders for d in h.damages]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def other_manifest(path: Path, saved: SampleCheckpoint) -> None:
    """Replace a fragment by one that can be read and was not committed."""
    fragment = saved.fragments[0]
    path.write_bytes(encode_fragment(replace(fragment, metrics={"loss": 7.0})))


def test_every_copy_is_looked_at_and_no_tensor_moves(nodes: Nodes, saved: SampleCheckpoint) -> None:
    there, counted = both(nodes, saved), list[int]()
    report = verify_copies(there, nodes.reach, retry=lambda known: None, progress=counted.append)
    assert report is not None and report.ok and report.is_restorable
    assert [(h.where, h.node, h.fragments) for h in report.holders] == [
        (NODE_A, A, (0, 1)),
        (NODE_B, B, (0, 1)),
    ]
    assert all(item.num_covered == item.num_elements for item in report.items) and report.world_size == 2
    assert report.read_bytes < 2 * report.size_bytes / 10, "of two copies"
    assert sum(counted) == num_copies(there) == 4
    flip(nodes.folder(B, saved) / SHARD)
    assert look(nodes, there).ok, "the last byte is a tensor's: a drill would see it"


@pytest.mark.parametrize(
    ("harm", "file", "where"),
    [
        (cut, SHARD, "size"),
        (lambda path: flip(path, 20), SHARD, "header"),
        (Path.unlink, SHARD, "missing"),
        (Path.unlink, state_file(0, 2), "missing"),
        (Path.unlink, FRAGMENT, "missing"),
        (lambda path: path.write_bytes(b"PAR1"), FRAGMENT, "content"),
    ],
    ids=["cut", "header", "shard", "state", "no manifest", "bad manifest"],
)
def test_a_bad_copy_is_reported_with_its_node_until_all_are_bad(
    nodes: Nodes, saved: SampleCheckpoint, harm: Callable[[Path], None], file: str, where: str
) -> None:
    there = both(nodes, saved)
    harm(nodes.folder(B, saved) / file)
    report = look(nodes, there)
    assert report.is_restorable and not report.ok
    assert findings(report) == [(NODE_B, file, where)]
    harm(nodes.folder(A, saved) / file)
    report = look(nodes, there)
    assert not report.is_restorable
    assert findings(report) == [("", file, "copies"), (NODE_A, file, where), (NODE_B, file, where)]


def test_what_one_holder_lacks_may_come_from_another(nodes: Nodes, saved: SampleCheckpoint) -> None:
    there = both(nodes, saved)
    cut(nodes.folder(A, saved) / SHARD)
    for file in (FRAGMENT, OTHER_SHARD):
        (nodes.folder(B, saved) / file).unlink()
    report = look(nodes, there)
    assert report.is_restorable, "as a restore goes on with the next source of each file"
    assert {place for place, *_ in findings(report)} == {NODE_A, NODE_B}


@pytest.mark.parametrize("holder", [A, B])
def test_of_manifests_that_differ_the_one_in_the_log_counts(
    nodes: Nodes, saved: SampleCheckpoint, holder: str
) -> None:
    there = both(nodes, saved)
    other_manifest(nodes.folder(holder, saved) / FRAGMENT, saved)
    report = look(nodes, there)
    assert report.is_restorable and findings(report) == [(f"node {holder[:12]}", FRAGMENT, "digest")]


def test_another_manifest_everywhere_is_no_proof(nodes: Nodes, saved: SampleCheckpoint) -> None:
    there = both(nodes, saved)
    for holder in (A, B):
        other_manifest(nodes.folder(holder, saved) / FRAGMENT, saved)
    report = look(nodes, there)
    assert not report.is_restorable and findings(report) == [("", CHECKPOINT_JSON, "root digest")]


def test_fewer_holders_than_promised_are_reported(nodes: Nodes, saved: SampleCheckpoint) -> None:
    both(nodes, saved)
    report = look(nodes, live(saved, (A, B), (B,)))
    assert report.is_restorable and findings(report) == [("", fragment_file(1, 2), "copies")]
    assert "1 of 2 nodes" in report.damages[0].detail
    report = look(nodes, live(saved, (A,), (B,), level=Level.LOCAL))
    assert report.ok, "one is what that level promises"
    report = look(nodes, live(saved, (A,), (), level=Level.LOCAL))
    assert not report.is_restorable and findings(report) == [("", fragment_file(1, 2), "copies")]
    assert "No live node holds" in report.damages[0].detail


def test_the_storage_path_is_one_more_holder(nodes: Nodes, saved: SampleCheckpoint) -> None:
    there = both(nodes, saved)
    durable = replace(there, checkpoint=replace(there.checkpoint, level=Level.DURABLE))
    stored = saved.write(nodes.folder("remote", saved))
    alone = replace(durable, holders=((), ()))
    assert look(nodes, durable).ok and look(nodes, alone).ok
    assert num_copies(alone) == 2
    for holder in (A, B):
        cut(nodes.folder(holder, saved) / SHARD)
    report = look(nodes, durable)
    assert report.is_restorable and findings(report) == [(NODE_A, SHARD, "size"), (NODE_B, SHARD, "size")]
    cut(stored / OTHER_SHARD)
    (stored / CHECKPOINT_JSON).unlink()
    report = look(nodes, durable)
    assert report.is_restorable
    assert findings(report)[2:] == [
        (str(stored), CHECKPOINT_JSON, "missing"),
        (str(stored), OTHER_SHARD, "size"),
    ]
    assert not look(nodes, alone).is_restorable


def test_a_folder_of_the_storage_path_that_lists_other_files_is_reported(
    nodes: Nodes, saved: SampleCheckpoint
) -> None:
    there = both(nodes, saved)
    durable = replace(there, checkpoint=replace(there.checkpoint, level=Level.DURABLE))
    stored = saved.write(nodes.folder("remote", saved))
    description = decode_checkpoint((stored / CHECKPOINT_JSON).read_bytes())
    *others, last = description.files
    files = (*others, replace(last, digest="0" * 32))
    other = replace(description, files=files, root_digest=root_digest(files, saved.root_of))
    (stored / CHECKPOINT_JSON).write_bytes(encode_checkpoint(other))
    (stored / shard_file(3, 4)).write_bytes(b"")
    report = look(nodes, durable)
    assert report.is_restorable and not report.damages
    assert findings(report) == [
        (str(stored), CHECKPOINT_JSON, "root digest"),
        (str(stored), shard_file(3, 4), "unlisted"),
    ]


def durable(saved: SampleCheckpoint, *holders: Sequence[str]) -> LiveCheckpoint:
    """Return a checkpoint on the storage path, and on the nodes of `holders`."""
    return live(saved, *(holders or ((), ())), level=Level.DURABLE)


def remove_folder(stored: Path) -> None:
    shutil.rmtree(stored)


def remove_manifest(stored: Path) -> None:
    for path in (*stored.glob("manifest-*"), stored / CHECKPOINT_JSON):
        path.unlink()


@pytest.mark.parametrize("harm", [remove_folder, remove_manifest])
def test_a_storage_path_without_a_manifest_proves_nothing(
    nodes: Nodes, saved: SampleCheckpoint, harm: Callable[[Path], None]
) -> None:
    stored = saved.write(nodes.folder("remote", saved))
    assert look(nodes, durable(saved)).ok
    harm(stored)
    lost = {("", fragment_file(index, 2), "copies") for index in (0, 1)}
    report = look(nodes, durable(saved))
    assert not report.is_restorable and lost <= set(findings(report))
    nodes.put(A, saved, 0)
    report = look(nodes, durable(saved, (A,), ()))
    assert not report.is_restorable, "of the other half there is nothing"
    assert findings(report)[0] == ("", fragment_file(1, 2), "copies")
    assert (str(stored), FRAGMENT, "missing") in findings(report)
    nodes.put(B, saved, 1)
    assert look(nodes, durable(saved, (A,), (B,))).is_restorable


def test_a_manifest_of_another_checkpoint_beside_intact_copies_is_reported_only(
    nodes: Nodes, saved: SampleCheckpoint
) -> None:
    stored = saved.write(nodes.folder("remote", saved))
    both(nodes, saved)
    remove_manifest(stored)
    foreign = fragment_file(0, 4)
    (stored / foreign).write_bytes(encode_fragment(replace(saved.fragments[0], num_nodes=4)))
    report = look(nodes, durable(saved, (A, B), (B, A)))
    assert report.is_restorable and not report.damages
    assert (str(stored), foreign, "unlisted") in findings(report)


def test_a_storage_path_that_cannot_be_opened_is_reported_and_the_nodes_are_enough(
    nodes: Nodes, saved: SampleCheckpoint
) -> None:
    both(nodes, saved)
    remote = RemoteTier(Location.parse("s3://bucket/gpt"), {"profile": "nowhere"})
    reach = replace(nodes.reach, remote=remote)
    report = look(nodes, durable(saved, (A, B), (B, A)), reach)
    assert report.is_restorable and not report.ok
    assert {(where.partition(":")[0], what) for where, _, what in findings(report)} == {("s3", "unreadable")}
    assert "no AWS profile" in report.holders[-1].damages[0].detail
    assert not look(nodes, durable(saved), reach).is_restorable


def test_a_file_that_a_node_cannot_read_is_damage_of_that_file_alone(
    nodes: Nodes, saved: SampleCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, size = both(nodes, saved), Folder.size

    def failing(folder: Folder, name: FileName) -> int | None:
        if name.file == SHARD and folder.root.name == A:
            raise OSError(errno.EIO, "Input/output error")
        return size(folder, name)

    monkeypatch.setattr(Folder, "size", failing)
    (nodes.folder(B, saved) / OTHER_SHARD).unlink()
    report = look(nodes, there)
    assert report.is_restorable, "A has the other file, by its own list"
    assert findings(report) == [(NODE_A, SHARD, "unreadable"), (NODE_B, OTHER_SHARD, "missing")]


def test_a_node_without_an_agent_is_reported_and_the_others_are_enough(
    nodes: Nodes, saved: SampleCheckpoint
) -> None:
    there = both(nodes, saved)
    del nodes.endpoints[B]
    report = look(nodes, there)
    assert report.is_restorable
    assert findings(report) == [(NODE_B, fragment_file(index, 2), "unreadable") for index in (0, 1)]
    cut(nodes.folder(A, saved) / SHARD)
    report = look(nodes, there)
    assert not report.is_restorable and findings(report)[0] == ("", SHARD, "copies"), "B proves nothing"


def test_a_frozen_node_is_waited_for_once(
    nodes: Nodes, saved: SampleCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = both(nodes, saved)
    monkeypatch.setattr(client, "CALL_BASE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        nodes.endpoints[B] = f"grpc+tls://127.0.0.1:{frozen.getsockname()[1]}"
        start_s = time.monotonic()
        report = look(nodes, there)
    assert time.monotonic() - start_s < 4, "twice: it is looked at again"
    assert report.is_restorable
    assert {place for place, *_ in findings(report)} == {NODE_B}


def test_what_moves_is_looked_at_where_it_is_and_what_is_retired_not(
    nodes: Nodes, saved: SampleCheckpoint
) -> None:
    nodes.put(C, saved, 0, 1)
    moved = live(saved, (C, A), (C, A))
    nodes.put(A, saved, 0, 1)
    requested: list[LiveCheckpoint] = []

    def again(known: LiveCheckpoint) -> tuple[LiveCheckpoint, ReadAccess]:
        requested.append(known)
        return moved, nodes.reach

    before = live(saved, (B, C), (B, C))
    report = verify_copies(before, nodes.reach, retry=again)
    assert report is not None and report.ok and requested == [before]
    assert verify_copies(before, nodes.reach, retry=lambda known: None) is None


def test_a_copy_is_looked_at_and_left_as_it_is(nodes: Nodes, saved: SampleCheckpoint) -> None:
    there = both(nodes, saved)
    before = {path: path.stat().st_mtime_ns for path in nodes.root.rglob("*")}
    look(nodes, there)
    assert before == {path: path.stat().st_mtime_ns for path in nodes.root.rglob("*")}
