"""Checkpoints and their holders as tests of single parts of the run machine need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray_ckpt.core.holders import Holders
from ray_ckpt.types import AttemptId, CheckpointInfo, Level


def checkpoint(
    step: int,
    *,
    level: Level = Level.REPLICATED,
    num_nodes: int = 1,
    size_bytes: int = 100,
    committed_at_s: float = 0.0,
    verified_at_s: float | None = None,
) -> CheckpointInfo:
    """Return the checkpoint of that step, which is its place in the log too."""
    return CheckpointInfo(
        id=AttemptId(run_uid="0" * 32, session=1, step=step, attempt=f"{step:016x}"),
        seq=step,
        level=level,
        world_size=num_nodes,
        num_nodes=num_nodes,
        size_bytes=size_bytes,
        root_digest="0" * 32,
        committed_at_s=committed_at_s,
        metrics={},
        verified_at_s=verified_at_s,
    )


def holders_of(live: str | set[str], held: Mapping[int, Sequence[Sequence[str]]]) -> Holders:
    """Per step the nodes of each fragment: `{7: ("ab", "b")}`."""
    holders = Holders()
    holders.live = frozenset(live)
    for step, fragments in held.items():
        for index, nodes in enumerate(fragments):
            for node in nodes:
                holders.add(f"{step:016x}", index, node)
    return holders
