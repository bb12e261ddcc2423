"""Descriptions on the storage path: fragments are read at the same time, and damage is found."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.actors.coordinator import storage_work
from ray_ckpt.actors.coordinator.storage_work import write_description
from ray_ckpt.errors import CorruptionError, FormatError
from ray_ckpt.format import names, zstd
from ray_ckpt.format.manifest import decode_checkpoint
from ray_ckpt.location import Location
from ray_ckpt.storage.remote.tier import PROBE_FILE, RemoteTier
from ray_ckpt.types import AttemptId, CheckpointInfo, Level
from tests.support.sample_run import SampleCheckpoint, make_checkpoint

NUM_NODES = 40
ATTEMPT = AttemptId(run_uid="c" * 32, session=1, step=10, attempt="0123456789abcdef")


class CountingTier(RemoteTier):
    """Counts reads at a time; each read waits until `together` reads have begun, or for a moment."""

    together = 1

    def __init__(self, root: Path) -> None:
        super().__init__(Location.parse(root))
        self.place = root
        self.begun, self.now, self.most = 0, 0, 0
        self._changed = threading.Condition()

    def read_whole(self, directory: str, file: str, *, max_bytes: int) -> bytes:
        with self._changed:
            self.begun, self.now = self.begun + 1, self.now + 1
            self.most = max(self.most, self.now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.begun >= self.together, timeout=5.0)
        try:
            return super().read_whole(directory, file, max_bytes=max_bytes)
        finally:
            with self._changed:
                self.now -= 1

    @property
    def folder(self) -> Path:
        return self.place / names.CHECKPOINTS_DIR / ATTEMPT.directory


@pytest.fixture(scope="module")
def saved() -> SampleCheckpoint:
    return make_checkpoint(ATTEMPT, world_size=NUM_NODES, num_nodes=NUM_NODES)


@pytest.fixture
def tier(saved: SampleCheckpoint, tmp_path: Path) -> CountingTier:
    """The checkpoint as uploads leave it, without its description."""
    root = tmp_path / "gpt" / names.SERVICE_DIR
    root.mkdir(parents=True)
    (root / PROBE_FILE).touch()
    tier = CountingTier(root)
    saved.write(tier.folder)
    (tier.folder / names.CHECKPOINT_JSON).unlink()
    return tier


def committed(saved: SampleCheckpoint, **changes: Any) -> CheckpointInfo:
    info = CheckpointInfo(
        id=ATTEMPT,
        seq=1,
        level=Level.LOCAL,
        world_size=saved.world_size,
        num_nodes=saved.num_nodes,
        size_bytes=saved.size_bytes,
        root_digest=saved.root_digest,
        committed_at_s=0.0,
        metrics={},
    )
    return replace(info, **changes)


def described(tier: CountingTier) -> bool:
    return (tier.folder / names.CHECKPOINT_JSON).exists()


def test_the_fragments_of_a_description_are_read_at_the_same_time_but_not_all(
    saved: SampleCheckpoint, tier: CountingTier
) -> None:
    tier.together = storage_work.FRAGMENTS_AT_A_TIME
    write_description(tier, committed(saved))
    assert (tier.begun, tier.most) == (NUM_NODES, storage_work.FRAGMENTS_AT_A_TIME)
    written = (tier.folder / names.CHECKPOINT_JSON).read_bytes()
    assert written == saved.files[names.CHECKPOINT_JSON]
    assert decode_checkpoint(written).root_digest == saved.root_digest


def test_a_fragment_that_is_gone_or_damaged_leaves_no_description(
    saved: SampleCheckpoint, tier: CountingTier
) -> None:
    path = tier.folder / names.fragment_file(7, NUM_NODES)
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(CorruptionError, match=f"{path.name} is gone"):
        write_description(tier, committed(saved))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FormatError):
        write_description(tier, committed(saved))
    path.write_bytes(saved.files[names.fragment_file(8, NUM_NODES)])
    with pytest.raises(CorruptionError, match="not what was committed"):
        write_description(tier, committed(saved))
    assert not described(tier)


def test_the_sizes_of_compressed_shards_cost_one_request_each_and_not_one_after_the_other(
    saved: SampleCheckpoint, tier: CountingTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = sorted(name for name in saved.files if names.is_shard_name(name))
    for name in shards:
        path = tier.folder / name
        path.with_name(name + zstd.SUFFIX).write_bytes(b"".join(zstd.encode([path.read_bytes()], 1)))
        path.unlink()
    requests: list[str] = []
    together = threading.Barrier(storage_work.FRAGMENTS_AT_A_TIME, timeout=5.0)

    def counted(name: str) -> Any:
        real = getattr(tier.files, name)

        def call(file: str, *rest: Any, **more: Any) -> Any:
            if file.endswith(zstd.SUFFIX) or file.rpartition("/")[2] in shards:
                requests.append(file.rpartition("/")[2])
                if len(requests) <= storage_work.FRAGMENTS_AT_A_TIME:
                    together.wait()
            return real(file, *rest, **more)

        return call

    for name in ("size", "modified_s", "read"):
        monkeypatch.setattr(tier.files, name, counted(name))
    write_description(tier, committed(saved))
    assert described(tier) and sorted(requests) == [name + zstd.SUFFIX for name in shards]
    (tier.folder / requests[0]).write_bytes(b"".join(zstd.encode([b"short"], 1)))
    with pytest.raises(CorruptionError, match="has 5 bytes"):
        write_description(tier, committed(saved))
    (tier.folder / requests[0]).write_bytes(b"no table")
    with pytest.raises(FormatError, match=requests[0]):
        write_description(tier, committed(saved))


def test_a_storage_path_that_is_away_is_no_damage(saved: SampleCheckpoint, tier: CountingTier) -> None:
    """Such as a folder in place of a mount: then the checkpoint stays as it is, and is described later."""
    (tier.place / PROBE_FILE).unlink()
    (tier.folder / names.fragment_file(0, NUM_NODES)).unlink()
    with pytest.raises(FileNotFoundError):
        write_description(tier, committed(saved))
    tier.place.rename(tier.place.with_name("unmounted"))
    with pytest.raises(OSError, match="is it mounted"):
        write_description(tier, committed(saved))
