"""Nodes that hold parts of a checkpoint, as real peers with real files, for tests without Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ray_ckpt.core.loss_scenarios import LiveCheckpoint
from ray_ckpt.format.names import fragment_file, make_attempt
from ray_ckpt.location import Location
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.transport.server import PeerServer
from ray_ckpt.types import CheckpointInfo, Level, RootOf
from ray_ckpt.verify.live_manifest import ReadAccess
from tests.support.sample_run import SampleCheckpoint, make_checkpoint
from tests.transport.peers import KEYS, UID, Folder

A, B, C = (letter * 56 for letter in "abc")


@dataclass(slots=True)
class Nodes:
    """Agents' ends of the transport, each with a folder of its own, and a storage path."""

    root: Path
    endpoints: dict[str, str] = field(default_factory=dict)

    def put(self, place: str, saved: SampleCheckpoint, *indices: int) -> None:
        """Fragments with their files, at a node or on the storage path ("remote")."""
        folder = self.folder(place, saved)
        folder.mkdir(parents=True, exist_ok=True)
        for index in indices:
            fragment = saved.fragments[index]
            for name in (*(f.name for f in fragment.files), fragment_file(index, saved.num_nodes)):
                (folder / name).write_bytes(saved.files[name])

    def folder(self, place: str, saved: SampleCheckpoint) -> Path:
        base = self.root / place / ("checkpoints" if place == "remote" else UID)
        return base / saved.attempt.directory

    @property
    def reach(self) -> ReadAccess:
        remote = RemoteTier(Location.parse(self.root / "remote"))
        return ReadAccess(endpoints=self.endpoints, credentials=KEYS.credentials(UID), remote=remote)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """A, B and C, which hold nothing yet."""
    with ExitStack() as stack:
        nodes = Nodes(tmp_path)
        for node in (A, B, C):
            server = PeerServer("127.0.0.1", keys=KEYS, files=Folder(tmp_path / node))
            stack.callback(server.shutdown)
            nodes.endpoints[node] = server.endpoint
        yield nodes


def sample(step: int, root_of: RootOf = "fragments") -> SampleCheckpoint:
    attempt = make_attempt(run_uid=UID, session=1, step=step, attempt=0)
    return make_checkpoint(attempt, rows=64, root_of=root_of)


def live(
    saved: SampleCheckpoint,
    *holders: Sequence[str],
    level: Level = Level.REPLICATED,
    on_lineage: bool = True,
) -> LiveCheckpoint:
    info = CheckpointInfo(
        id=saved.attempt,
        seq=saved.attempt.step,
        level=level,
        world_size=saved.world_size,
        num_nodes=saved.num_nodes,
        size_bytes=saved.size_bytes,
        root_digest=saved.root_digest,
        root_of=saved.root_of,
        committed_at_s=0.0,
        metrics={},
        replicas=1,
    )
    found = tuple(map(tuple, holders)) or ((A, B), (B, A))
    homes = tuple(h[0] if h else "" for h in found)
    return LiveCheckpoint(checkpoint=info, holders=found, homes=homes, on_lineage=on_lineage)


def both(nodes: Nodes, saved: SampleCheckpoint) -> LiveCheckpoint:
    """Put on A and B their own part and each other's."""
    for node in (A, B):
        nodes.put(node, saved, 0, 1)
    return live(saved)


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
