"""The ticket of a restore, without Ray: of manifests that differ, the one in the log counts."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from ray_ckpt.actors.agent.restore_sources import SourceFinder
from ray_ckpt.core.values import ResumePoint, SessionPlan
from ray_ckpt.errors import CorruptionError, RestoreError
from ray_ckpt.format.manifest import encode_fragment
from ray_ckpt.format.names import fragment_file
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.storage.remote.tier import RemoteRef
from tests.support.peer_nodes import A, B, C, Nodes, both, live, sample
from tests.support.sample_run import SampleCheckpoint
from tests.transport.peers import KEYS, UID


@pytest.fixture
def saved() -> SampleCheckpoint:
    return sample(10)


def ticket(nodes: Nodes, saved: SampleCheckpoint) -> RestoreTicket:
    """Return the ticket of a restore on C, which has no file of the checkpoint."""
    there = live(saved)
    resume = ResumePoint(checkpoint=there.checkpoint, holders=there.holders)
    plan = SessionPlan(run_uid=UID, session=2, world_size=2, nodes=(), resume=resume)
    with closing(Disks([nodes.root / "staging"])) as disks:
        finder = SourceFinder(
            run_uid=UID,
            node_id=C,
            credentials=KEYS.credentials(UID),
            arenas={},
            staging=disks,
            storage=RemoteRef(storage_path=str(nodes.root), run_name="gpt"),
            endpoints=nodes.endpoints,
        )
        return finder.ticket(plan)


def other_manifest(nodes: Nodes, saved: SampleCheckpoint, holder: str, index: int) -> None:
    """Replace a manifest by a readable one that was not committed."""
    data = encode_fragment(replace(saved.fragments[index], metrics={"loss": 7.0}))
    (nodes.folder(holder, saved) / fragment_file(index, 2)).write_bytes(data)


def test_each_file_has_the_holders_of_its_fragment(nodes: Nodes, saved: SampleCheckpoint) -> None:
    both(nodes, saved)
    found = ticket(nodes, saved)
    assert found.fragments == saved.fragments
    for fragment, holders in zip(saved.fragments, ((A, B), (B, A)), strict=True):
        for file in fragment.files:
            assert tuple(source.where for source in found.sources[file.name]) == holders


def test_an_intact_copy_of_a_manifest_is_taken_wherever_it_is(nodes: Nodes, saved: SampleCheckpoint) -> None:
    both(nodes, saved)
    other_manifest(nodes, saved, A, 0)  # the first source
    assert ticket(nodes, saved).fragments == saved.fragments
    other_manifest(nodes, saved, B, 1)
    assert ticket(nodes, saved).fragments == saved.fragments
    other_manifest(nodes, saved, B, 0)
    with pytest.raises(CorruptionError, match="not the one that was committed"):
        ticket(nodes, saved)


def test_a_manifest_that_nobody_has_is_named(nodes: Nodes, saved: SampleCheckpoint) -> None:
    both(nodes, saved)
    for holder in (A, B):
        (nodes.folder(holder, saved) / fragment_file(1, 2)).write_bytes(b"PAR1")
    with pytest.raises(RestoreError, match=f"No source has {fragment_file(1, 2)} of step 10 intact"):
        ticket(nodes, saved)
